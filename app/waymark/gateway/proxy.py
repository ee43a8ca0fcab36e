"""One request through the gateway: to an engine, to another one if no answer has begun, and its answer back.

Bytes go on as they arrive, and an answer is never begun twice: an engine is replaced only until the first byte of its
answer has gone to the client.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from time import perf_counter
from typing import NamedTuple
from urllib.parse import quote

import aiohttp
import orjson

from waymark.base.asgi import AsgiSend, BrokenAnswer, RawHeaders
from waymark.base.asker import is_framed
from waymark.base.errors import NoTarget, Saturated
from waymark.base.event_streams import ends_event
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.chat.requests import Form
from waymark.decide.question import SelectParameters
from waymark.decide.requests import PreparedRequest, RequestSelector, RoutedRequest
from waymark.decide.under_way import RequestsUnderWay, RequestUnderWay
from waymark.domain.books import NO_USAGE, Usage, UsageReader
from waymark.gateway.security import to_client, to_engine
from waymark.gateway.shapes import WITHOUT_PATH, RequestRejected, engine_error, event_of
from waymark.gateway.upstream import CONNECT, Interrupted, Unreachable, Upstream, is_events

log = logging.getLogger(__name__)


AVOID_SECONDS = 5
"""For how long an engine that refused a connection gets no request. Each try costs a request time, and an engine
takes longer to start again."""

#: The most engines that one request is sent to.
ATTEMPTS = 3
#: The most bytes of an engine's error to be put into another shape.
_ERROR_BYTES_MAX = 2**20
#: Statuses by which an engine says that it cannot take the request now.
_PASSED_ON = frozenset({502, 503})
#: Bytes in the first event with content, for paths whose earlier events come before the prompt is computed.
_CONTENT: Mapping[Form, bytes] = {Form.MESSAGES: b"content_block_delta", Form.RESPONSES: b"response.output_"}
#: An event that ends the stream, or reports that the engine has failed. An engine may send the event of another path.
_LAST_EVENT = re.compile(
    rb"""(?x) [\r\n] (?: data: [ ]? (?: \[DONE\] | \{ \s* "error" | \{ \s* "type": \s* "error" )
                         | event: [ ]? (?: error | message_stop | response\.(?:completed|incomplete|failed|cancelled)) )
            | "type": \s* "(?: message_stop | response\.(?:completed|incomplete|failed|cancelled))" """
)
#: An upper bound on the bytes of a match.
_LAST_EVENT_BYTES = 128


def _has_last_event(near: bytes) -> bool:
    """Return whether the bytes contain a last event. Almost no piece has one of its words, and a search takes long."""
    may_have = b"[DONE]" in near or b"error" in near or b"message_stop" in near or b"response." in near
    return may_have and _LAST_EVENT.search(near) is not None


@record(slots=True)
class ProxiedRequest:
    """A request, and the state of its answer."""

    api: Form | None
    """The form of its body; None: another path of engines."""
    path: str
    query: bytes
    headers: RawHeaders
    body: bytes
    request_id: str
    send: AsgiSend
    began: float = field(default_factory=perf_counter)
    status: int = 0
    """The status of the answer; 0 while it has not begun."""


class StreamEnd:
    """Reads a stream of events for the last one, without which it is not whole."""

    def __init__(self, *, is_framed: bool) -> None:
        self._is_framed = is_framed
        self._tail = b"\n"
        self._has_last = False

    def take(self, piece: bytes) -> None:
        near = self._tail + piece
        self._has_last = self._has_last or _has_last_event(near)
        self._tail = near[-_LAST_EVENT_BYTES:]

    @property
    def is_whole(self) -> bool:
        """Whether the last event has arrived; always if only the end of the connection ends the answer."""
        return self.is_over or (self._has_last and self._is_framed)

    @property
    def is_over(self) -> bool:
        """Whether the last event has arrived completely, with the usage at its end."""
        return self._has_last and ends_event(self._tail)


class EngineAnswer(NamedTuple):
    """The engine that answers."""

    request: RequestUnderWay
    response: aiohttp.ClientResponse


class Proxy:
    def __init__(
        self, selector: RequestSelector, under_way: RequestsUnderWay, upstream: Upstream, metrics: Metrics
    ) -> None:
        self._avoided = Avoided(AVOID_SECONDS)
        self._selector = selector
        self._under_way = under_way
        self._upstream = upstream
        self._metrics = metrics

    async def pass_on(self, proxied: ProxiedRequest, prepared: PreparedRequest, extra: RawHeaders = ()) -> None:
        """Forward a request, with ``extra`` headers, and send its answer. Raise WaymarkError if no answer has begun."""
        answered = await self._answered(proxied, prepared)
        is_ok = True
        try:
            is_ok = await self._relay(proxied, answered, extra)
        except Interrupted as error:
            is_ok = False
            self._metrics.gateway_interrupted.inc()
            log.warning(
                "an answer broke off",
                extra=fields(request_id=proxied.request_id, engine=_instance(answered), reason=str(error)),
            )
            await self._send_error(proxied, answered.response)
        finally:
            # If the client has gone away, the engine has not failed.
            answered.request.end(is_ok=is_ok)
            answered.response.close()

    async def _answered(self, proxied: ProxiedRequest, prepared: PreparedRequest) -> EngineAnswer:
        """Return the head of an engine's answer."""
        failures: dict[str, str] = {}  # by engine
        is_every_one = False
        for attempt in range(1, ATTEMPTS + 1):
            try:
                routed = await self._take(prepared, frozenset(failures))
            except NoTarget:
                if failures:
                    is_every_one = True
                    break  # no further one is left
                raise
            # An unreachable engine is tried only if all are; without a walk it may not be known which ones are.
            is_every_one = routed.selected.is_degraded and routed.selected.walk is not None
            answered = await self._attempted(proxied, routed, is_last=attempt == ATTEMPTS)
            if isinstance(answered, EngineAnswer):
                return answered
            self._metrics.gateway_retries.labels(reason=answered).inc()
            instance_id = routed.selected.target.candidate.instance_id
            log.info(
                "an engine did not answer; the request goes to another engine",
                extra=fields(request_id=proxied.request_id, engine=instance_id, reason=answered),
            )
            failures[instance_id] = answered
        sentence = _no_answer(prepared.question.group.model_name, failures, is_every_one=is_every_one)
        raise RequestRejected(502, sentence, "no_answer", retry_after_seconds=1)

    async def _attempted(self, proxied: ProxiedRequest, routed: RoutedRequest, *, is_last: bool) -> EngineAnswer | str:
        """Send a request to one engine. Return the head of its answer, or why another engine should answer."""
        answer, failure, was_reached = None, "", True
        request = self._under_way.add(routed)
        instance_id = routed.selected.target.candidate.instance_id
        try:
            response = await self._send(proxied, routed)
            self._avoided.answered(instance_id)
            if response.status not in _PASSED_ON or is_last:
                answer = EngineAnswer(request, response)
            else:
                failure = str(response.status)
                response.close()
        except Unreachable as error:
            failure, was_reached = str(error), not error.is_connect
            if error.is_connect:
                self._avoided.failed(instance_id)
        finally:
            if answer is None:
                request.end(is_ok=False if failure else None, was_reached=was_reached)
        return failure if answer is None else answer

    async def _take(self, prepared: PreparedRequest, tried: frozenset[str]) -> RoutedRequest:
        """Return an untried target; an avoided one only if there is no other. Raise NoTarget without any."""
        avoided, milliseconds = self._avoided.now() - tried, self._under_way.reserved_ms
        if avoided:
            try:
                parameters = SelectParameters(exclude=tried | avoided, milliseconds=milliseconds, needs_address=True)
                return await self._selector.take(prepared, parameters)
            except (NoTarget, Saturated):
                pass  # an avoided engine may be reachable again
        parameters = SelectParameters(exclude=tried, milliseconds=milliseconds, needs_address=True)
        return await self._selector.take(prepared, parameters)

    async def _send(self, proxied: ProxiedRequest, routed: RoutedRequest) -> aiohttp.ClientResponse:
        selected = routed.selected
        headers = to_engine(proxied.headers)
        headers += [(name, value) for name, value in selected.headers.items() if not name.startswith("x-gateway-")]
        headers.append(("x-request-id", proxied.request_id))
        if selected.target.candidate.dp_rank:
            headers.append(("x-data-parallel-rank", str(selected.target.candidate.dp_rank)))
        body = proxied.body
        if selected.kv_hints is not None:
            body = orjson.dumps(orjson.loads(body) | {"kv_hints": selected.kv_hints})
        return await self._upstream.send(routed.address, proxied.path, proxied.query, body, headers)

    async def _relay(self, proxied: ProxiedRequest, answered: EngineAnswer, extra: RawHeaders) -> bool:
        """Forward the answer. Return whether the engine is free of blame."""
        response = answered.response
        proxied.status = response.status
        is_translated = response.status >= 400 and _is_translated(proxied, response)
        headers = [*_headers(answered, is_translated=is_translated), *extra]
        await proxied.send({"type": "http.response.start", "status": response.status, "headers": headers})
        body, usage = b"", NO_USAGE
        if is_translated:
            text, name = await self._short(response), _instance(answered)
            body = engine_error(response.status, text, proxied.api, engine=name, path=proxied.path)
        else:
            usage = await self._relay_body(proxied, answered)
        await answered.request.give_back(is_ok=response.status < 500, usage=usage)
        await proxied.send({"type": "http.response.body", "body": body, "more_body": False})
        return response.status < 500

    async def _relay_body(self, proxied: ProxiedRequest, answered: EngineAnswer) -> Usage:
        """Forward the body of an answer, and return its usage. Raise Interrupted without its end."""
        response, request = answered.response, answered.request
        marker = _CONTENT.get(proxied.api, b"") if proxied.api and is_events(response) else b""
        waits = response.status < 400
        has_end = proxied.api is not None and _is_readable(response) and response.status == 200
        end = StreamEnd(is_framed=is_framed(response)) if has_end else None
        reader = UsageReader() if _is_plain(response) else None
        async for piece in self._upstream.pieces(response):
            if end is not None:
                end.take(piece)
            if reader is not None:
                reader.take(piece)
            # A client may take the last event for the end, and go on with its next turn.
            is_last = response.content.at_eof() if end is None else end.is_over
            if waits and marker in piece:
                waits = False
                request.prefilled(is_last=is_last)
                self._metrics.ttft_seconds.observe(perf_counter() - proxied.began)
            if is_last:
                usage = NO_USAGE if reader is None else reader.usage
                await request.give_back(is_ok=response.status < 500, usage=usage)
            await proxied.send({"type": "http.response.body", "body": piece, "more_body": True})
        if end is not None and not end.is_whole:
            raise Interrupted("no_end")
        return NO_USAGE if reader is None else reader.usage

    async def _short(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an error, up to a bound. Raises Interrupted."""
        pieces, size = [], 0
        async for piece in self._upstream.pieces(response):
            size += len(piece)
            pieces.append(piece)
            if size > _ERROR_BYTES_MAX:
                raise Interrupted("too_long")
        return b"".join(pieces)

    async def _send_error(self, proxied: ProxiedRequest, response: aiohttp.ClientResponse) -> None:
        """Report to the client that the answer is incomplete, if its form allows it."""
        if not _is_readable(response):
            raise BrokenAnswer("the engine's answer broke off")
        rejected = RequestRejected(502, "the engine has broken off its answer; send the request again", "interrupted")
        # An event of its own, even if the last one is incomplete.
        body = b"\n\n" + event_of(rejected, proxied.api)
        await proxied.send({"type": "http.response.body", "body": body, "more_body": False})


def _no_answer(model: str, failures: Mapping[str, str], *, is_every_one: bool) -> str:
    """Return which engines did not answer, and why; ``is_every_one``: the model has no other engine to try."""
    names = ", ".join(f"{shown(name)} ({failure})" for name, failure in failures.items())
    if not is_every_one:
        return f"none of the engines that were tried answered: {names}; try again in a moment"
    if any(failure != CONNECT for failure in failures.values()):
        return f"none of the engines of model {shown(model)} answered: {names}; try again in a moment"
    return f"all engines of model {shown(model)} are unreachable; tried were {names}; start them, or try again later"


def _headers(answered: EngineAnswer, *, is_translated: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers for the client: those of the engine that still apply, and those of the decision."""
    headers = to_client(answered.response.raw_headers)
    if _is_readable(answered.response) or is_translated:  # an error may follow it, or have another length
        headers = [header for header in headers if header[0] != b"content-length"]
    if is_translated:
        headers = [header for header in headers if header[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
    headers += [(name.encode(), value.encode()) for name, value in answered.request.answer_headers.items()]
    headers.append((b"x-waymark-engine", quote(_instance(answered), safe=" /:@|,;=+()[]").encode()))
    return headers


def _is_plain(response: aiohttp.ClientResponse) -> bool:
    """Return whether the bytes of an answer are not compressed."""
    return response.headers.get("Content-Encoding", "identity") == "identity"


def _is_readable(response: aiohttp.ClientResponse) -> bool:
    """Return whether the gateway reads the events of an answer, and may add one."""
    return is_events(response) and _is_plain(response)


def _is_translated(proxied: ProxiedRequest, response: aiohttp.ClientResponse) -> bool:
    """Return whether an error may need another shape: each error of Anthropic's paths, and each one without JSON."""
    if is_events(response) or not _is_plain(response):
        return False
    is_json = "json" in response.headers.get("Content-Type", "").lower()
    return proxied.api is Form.MESSAGES or response.status in WITHOUT_PATH or not is_json


def _instance(answered: EngineAnswer) -> str:
    return answered.request.routed.selected.target.candidate.instance_id


# Engines that a connection has failed to a moment ago: other requests do not try them for a while.


_NAMES_MAX = 4096


class Avoided:
    """Instances by name, each for ``seconds``."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[str, float] = {}

    def failed(self, instance_id: str) -> None:
        """Note that a connection to an instance has failed."""
        if len(self._until) < _NAMES_MAX:
            self._until[instance_id] = self._clock() + self._seconds

    def answered(self, instance_id: str) -> None:
        self._until.pop(instance_id, None)

    def now(self) -> frozenset[str]:
        """Return the instances to avoid now."""
        if not self._until:
            return frozenset()
        now = self._clock()
        self._until = {name: end for name, end in self._until.items() if end > now}
        return frozenset(self._until)
