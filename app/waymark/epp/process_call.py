"""One HTTP request as Envoy's external processing filter shows it: a stream of messages, from its headers to its end.

The answer to the headers waits until the body is whole, because the prompt decides. Then the body goes back as it came.
The body of the answer does not have to come here: the stream of messages lasts as long as the answer, so its end says
that the request is over. If bodies come, they pass unchanged: a streamed body at once, any other when it is complete.
The first byte says that the prompt is computed, and the last one waits until the load is released.

Envoy sends the request at once, so no honest stream waits for long. A peer that opens streams and sends nothing
would take all places. At the bound a new stream takes the place of the oldest waiting one of the connection with the
most such streams, as long as that connection has more of them than the connection of the new stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Literal

import orjson

from waymark.base.bounded_json import TooMuchJson
from waymark.base.errors import InvalidValue, WaymarkError
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.chat.multipart import fields_of_form
from waymark.chat.requests import SESSION, Form, InferenceRequest, check_places, form_of, read_request, session_of
from waymark.decide.question import SelectParameters
from waymark.decide.request_prompts import read_fields
from waymark.decide.requests import RequestSelector, RoutedRequest
from waymark.decide.under_way import RequestsUnderWay, RequestUnderWay, is_own_header
from waymark.domain.answer_times import asked_times_of
from waymark.domain.books import UsageReader
from waymark.domain.targets import host_and_port, names_engines
from waymark.epp import messages
from waymark.epp.answers import (
    BodyBytes,
    HeldAnswer,
    ImmediateAnswer,
    is_whole,
    misconfigured,
    overloaded,
    rejection_of,
    too_large,
)

#: Targets that the answer names to the proxy: the best, and those to try if it does not answer.
_TARGETS_MAX = 3

ReadMessage = Callable[[], Awaitable[Any]]
"""The next message of the proxy; None at the end of the stream."""
WriteMessage = Callable[[Any], Awaitable[None]]

_MODES = (
    "the endpoint picker reads bodies in the modes FULL_DUPLEX_STREAMED and BUFFERED; set processing_mode of the "
    "ext_proc filter"
)


#: The last event of a stream; a client may go on with its next turn before the stream has ended.
_LAST_EVENT = b"data: [DONE]\n\n"
_CROWDED = "too many requests arrive at once; try again in a moment"


class StreamCut(Exception):
    """The stream ends because of its peer. ``reason`` is a word for the counter."""

    def __init__(self, reason: Literal["late", "idle", "unexpected", "crowded"], sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


@record(frozen=True, slots=True)
class CallContext:
    """The objects and bounds that all calls of a process share."""

    selector: RequestSelector
    under_way: RequestsUnderWay
    metrics: Metrics
    bodies: BodyBytes
    tenant_id: str
    request_seconds: float
    """The time that the proxy may take to send a request."""
    idle_seconds: float
    """The time that an answer may take until its next message."""


class ProcessCall:
    """The messages of one stream, answered in order."""

    def __init__(self, picker: CallContext, place: StreamPlace, read_message: ReadMessage, write: WriteMessage) -> None:
        self._picker = picker
        self._place = place
        self._read = read_message
        self._write_message = write
        self._is_writing = False
        self._began = monotonic()
        self._headers: dict[str, str] = {}
        self._form: Form | None = None
        self._subset: frozenset[str] | None = None
        self._held = picker.bodies.arriving(place.interrupt)
        self._request_mode = messages.DUPLEX
        self._response_mode = messages.DUPLEX
        self._under_way: RequestUnderWay | None = None
        self._is_ok: bool | None = None
        """Whether the engine has answered without a fault of its own; None before its answer."""
        self._has_content = False
        self._usage = UsageReader()

    async def run(self) -> None:
        """Handle the request until it is over. Raise StreamCut if the peer does not behave like a proxy."""
        try:
            try:
                async with asyncio.timeout(self._picker.request_seconds) as self._place.waiting:
                    goes_on = await self._request()
            except TimeoutError:
                if self._place.is_given_up:
                    raise StreamCut("crowded", "too many streams of this connection wait for a request") from None
                if self._held.is_given_up:
                    # A message that the peer does not read is still on its way, and gRPC sends no other beside it.
                    if self._is_writing:
                        raise StreamCut("crowded", _CROWDED) from None
                    goes_on = await self._refuse(overloaded(_CROWDED, self._form))
                else:
                    raise StreamCut("late", f"no whole request within {self._picker.request_seconds:g} s") from None
            if goes_on:
                await self._response()
        finally:
            self._held.drop()
            if self._under_way is not None:
                self._under_way.end(is_ok=self._is_ok)

    # ---- the request -------------------------------------------------------------------------------

    async def _request(self) -> bool:
        """Read the request, and answer it. Return False if it is complete."""
        first = await self._read()
        if first is None:
            return False
        self._take_head(first)
        if self._request_mode not in (messages.DUPLEX, messages.BUFFERED, messages.NONE):
            return await self._refuse(misconfigured(_MODES, self._form))
        is_whole = first.request_headers.end_of_stream or self._request_mode == messages.NONE
        has_trailers = False
        if not is_whole:
            if self._request_mode == messages.BUFFERED:
                await self._write(messages.GO_ON["request_headers"])
            ended = await self._body()
            if isinstance(ended, ImmediateAnswer):
                return await self._refuse(ended)
            if ended is None:
                return False
            has_trailers = ended == "trailers"
        self._held.settle()
        self._place.settle()
        picked = await self._pick()
        if isinstance(picked, ImmediateAnswer):
            return await self._refuse(picked)
        # The client's headers about engines, except those that the decision sets.
        remove = [name for name in self._headers if names_engines(name) and name not in picked]
        by_body = self._request_mode == messages.BUFFERED and not is_whole
        await self._write(messages.picked(picked, remove, by_body=by_body))
        if not (by_body or is_whole):
            for piece in messages.pieces(self._held.whole(), is_request=True, is_end=not has_trailers):
                await self._write(piece)
        if has_trailers:
            await self._write(messages.GO_ON["request_trailers"])
        self._held.drop()
        return True

    def _take_head(self, first: Any) -> None:
        """Take the first message of the stream."""
        if first.WhichOneof("request") != "request_headers":
            raise StreamCut("unexpected", "a stream begins with the headers of a request")
        self._headers = messages.headers_of(first.request_headers)
        self._form = form_of(self._headers.get(":path", ""))
        self._subset = messages.subset_of(first)
        if first.HasField("protocol_config"):
            self._request_mode = first.protocol_config.request_body_mode
            self._response_mode = first.protocol_config.response_body_mode

    async def _body(self) -> Literal["body", "trailers"] | ImmediateAnswer | None:
        """Read the body to its end. Return how it ended, or None if the client went away."""
        while (message := await self._read()) is not None:
            if self._held.is_given_up:
                raise TimeoutError  # the interruption is on its way
            kind = message.WhichOneof("request")
            if kind == "request_trailers":
                return "trailers"
            if kind != "request_body":
                raise StreamCut("unexpected", f"{kind} is no part of a request's body")
            bound = self._held.add(message.request_body.body)
            if bound == "one":
                most = self._picker.bodies.one_max
                return too_large(f"the body has more than {most} bytes; send less", self._form)
            if bound == "all":
                return overloaded(_CROWDED, self._form)
            if message.request_body.end_of_stream or self._request_mode == messages.BUFFERED:
                return "body"
        return None

    async def _write(self, message: Any) -> None:
        self._is_writing = True
        await self._write_message(message)
        self._is_writing = False

    async def _refuse(self, rejection: ImmediateAnswer) -> bool:
        self._picker.metrics.epp_requests.labels(outcome=rejection.slug).inc()
        await self._write(messages.immediate(rejection.status, rejection.body, rejection.slug, rejection.headers))
        return False

    # ---- the decision ------------------------------------------------------------------------------

    async def _pick(self) -> dict[str, str] | ImmediateAnswer:
        """Return the headers that name the targets."""
        parameters = SelectParameters(
            only=self._subset, count=_TARGETS_MAX, milliseconds=self._picker.under_way.reserved_ms, needs_address=True
        )
        try:
            routed = await self._routed(self._said(), parameters)
        except WaymarkError as error:
            return rejection_of(error, self._form)
        self._under_way = self._picker.under_way.add(routed)
        self._picker.metrics.epp_requests.labels(outcome="picked").inc()
        selected = routed.selected
        addresses = [selected.target.candidate.address, *(candidate.address for candidate in selected.others)]
        # Ranks of one engine share its address.
        places = dict.fromkeys(host_and_port(address) for address in addresses if address is not None)
        return {**selected.headers, messages.DESTINATION: ",".join(places)}

    async def _routed(self, request: InferenceRequest | None, parameters: SelectParameters) -> RoutedRequest:
        selector, tenant_id = self._picker.selector, self._picker.tenant_id
        if request is None:
            return await selector.select_any(parameters, tenant_id=tenant_id)
        session = session_of(self._headers.get(SESSION))
        asked = asked_times_of(self._headers.get)
        return await selector.select(request, parameters, tenant_id=tenant_id, session=session, asked=asked)

    def _said(self) -> InferenceRequest | None:
        """Return the parsed body, or None if the path does not need one, like ``GET /v1/models``.

        Raise InvalidValue for a mistake.
        """
        body = self._held.whole()
        try:
            fields: Any = fields_of_form(body, self._headers.get("content-type", "").encode("latin-1", "replace"))
            if fields is None:
                fields = read_fields(body, self._form)
        except TooMuchJson as exc:
            raise InvalidValue(f"the body cannot be read: {exc}; send less") from None
        except orjson.JSONDecodeError as exc:
            if self._form is None or self._request_mode == messages.NONE:
                return None
            raise InvalidValue(f"the body is no JSON: {exc}; send an object with the field model") from None
        check_places(fields)
        if self._form is None and not (isinstance(fields, dict) and isinstance(fields.get("model"), str)):
            return None
        return read_request(self._headers.get(":path", ""), fields)

    # ---- the answer --------------------------------------------------------------------------------

    async def _response(self) -> None:
        held_answer, idle_seconds = HeldAnswer(self._picker.bodies, self._write), self._picker.idle_seconds
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(idle_seconds) as timeout:
                while (message := await self._read()) is not None:
                    await self._answer(message, held_answer)
                    # Without bodies, no message comes between the headers of an answer and its end. The connection
                    # notices a proxy that disappears silently.
                    is_silent = self._is_ok is not None and self._response_mode == messages.NONE
                    timeout.reschedule(None if is_silent else loop.time() + idle_seconds)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise StreamCut("idle", f"no message within {idle_seconds:g} s") from None
        finally:
            held_answer.drop()

    async def _answer(self, message: Any, held_answer: HeldAnswer) -> None:
        """Forward one message. The load of the request is released before the last message of an answer."""
        kind = message.WhichOneof("request")
        if kind == "response_body":
            body = message.response_body
            if body.body and not self._has_content:
                self._saw_content()
            self._usage.take(body.body)
            if self._response_mode == messages.DUPLEX:
                replies = list(messages.pieces(body.body, is_request=False, is_end=body.end_of_stream))
            else:
                replies = [messages.GO_ON[kind]]
            if body.end_of_stream or body.body.endswith(_LAST_EVENT):
                await self._give_back()
            await held_answer.send(replies, size=len(body.body), is_end=body.end_of_stream)
            return
        if kind not in messages.GO_ON:
            raise StreamCut("unexpected", f"{kind} is no part of an answer")
        is_end: bool = kind == "response_trailers"
        reply = messages.GO_ON[kind]
        if kind == "response_headers":
            headers = messages.headers_of(message.response_headers)
            await self._answered(message, headers)
            is_end = bool(message.response_headers.end_of_stream)
            if self._response_mode == messages.DUPLEX and is_whole(headers):
                held_answer.begin()
            if self._under_way is not None:
                ours = self._under_way.answer_headers
                forged = [name for name in headers if is_own_header(name) and name not in ours]
                reply = messages.answered(ours, forged)
        if is_end:
            await self._give_back()
        await held_answer.send([reply], size=0, is_end=is_end)

    async def _give_back(self) -> None:
        if self._under_way is not None:
            await self._under_way.give_back(is_ok=self._is_ok, usage=self._usage.usage)

    async def _answered(self, message: Any, headers: dict[str, str]) -> None:
        # A status without fault of the engine, such as 429 or 404, is an answer.
        self._is_ok = not headers.get(":status", "").startswith("5")
        place = messages.served_of(message)
        if place is not None and self._under_way is not None:
            await self._under_way.move(place)

    def _saw_content(self) -> None:
        self._has_content = True
        self._is_ok = self._is_ok is not False  # a proxy may leave out the headers
        if self._under_way is not None and self._is_ok:
            self._under_way.prefilled()
            self._picker.metrics.ttft_seconds.observe(monotonic() - self._began)


class StreamPlace:
    """The place of one stream, until ``leave``. It waits for a request until ``settle``."""

    def __init__(self, streams: Streams, peer: str) -> None:
        self._streams = streams
        self.peer = peer
        self.waiting: asyncio.Timeout | None = None
        """The deadline while the request arrives."""
        self.is_given_up = False
        """Whether another stream has the place now."""

    def give_up(self) -> None:
        self.is_given_up = True
        self.interrupt()

    def interrupt(self) -> None:
        """End the wait for a request."""
        if self.waiting is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self.waiting.reschedule(0.0)

    def settle(self) -> None:
        """Note that the request has arrived."""
        self._streams.settle(self)

    def leave(self) -> None:
        self._streams.leave(self)


class Streams:
    """The streams of a process."""

    def __init__(self, streams_max: int, metrics: Metrics) -> None:
        self._max = streams_max
        self._gauge = metrics.epp_streams
        self._count = 0
        self._waiting: dict[str, dict[StreamPlace, None]] = {}
        """The places that wait for a request, by connection, oldest first."""

    def enter(self, peer: str) -> StreamPlace | None:
        """Return a place for a stream of a connection, or None if there is no place."""
        if self._count >= self._max and not self._make_room(peer):
            return None
        place = StreamPlace(self, peer)
        self._waiting.setdefault(peer, {})[place] = None
        self._count += 1
        self._gauge.set(self._count)
        return place

    def _make_room(self, peer: str) -> bool:
        most = max(self._waiting.values(), key=len, default={})
        if len(most) <= len(self._waiting.get(peer, ())) + 1:
            return False
        oldest = next(iter(most))
        self.leave(oldest)
        oldest.give_up()
        return True

    def settle(self, place: StreamPlace) -> None:
        waiting = self._waiting.get(place.peer, {})
        waiting.pop(place, None)
        if not waiting:
            self._waiting.pop(place.peer, None)

    def leave(self, place: StreamPlace) -> None:
        """Free the place of an ended stream. A place that was given up does not count any more."""
        self.settle(place)
        if not place.is_given_up:
            self._count -= 1
            self._gauge.set(self._count)
