"""Answers forwarded only when they are complete.

A proxy can send a request again as long as the client has not received any of its answer. If a picker or an engine dies
between the headers and the end of a JSON answer, the client has a useless half of an object. So the
picker holds such an answer until its end. A stream of tokens is never held.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from waymark.base.errors import InvalidValue, NoTarget, Saturated, Starting, StoreUnavailable, WaymarkError
from waymark.base.metrics import Metrics
from waymark.chat.requests import Form


def is_whole(headers: Mapping[str, str]) -> bool:
    """Return whether the headers of an answer announce one JSON object."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


class HeldAnswer:
    """The messages to the proxy about one answer: sent at once until ``begin``, and after that together at the end.

    Its bytes count among those of all bodies. Above a bound the rest is not held: it is forwarded as it comes.
    """

    def __init__(self, bodies: BodyBytes, write: Callable[[Any], Awaitable[None]]) -> None:
        self._bodies = bodies
        self._write = write
        self._is_holding = False
        self._replies: list[Any] = []
        self._held = 0

    def begin(self) -> None:
        """Begin to hold messages."""
        self._is_holding = True

    async def send(self, replies: Sequence[Any], *, size: int, is_end: bool) -> None:
        """Send messages, or hold them; ``size`` is the bytes of the body in them."""
        if self._is_holding:
            if is_end or self._bodies.exceeded(self._held, size) is not None:
                self._is_holding = False
            else:
                self._held += size
                self._replies.extend(replies)
                return
        for reply in (*self._replies, *replies):
            await self._write(reply)
        self.drop()

    def drop(self) -> None:
        """Drop the held messages."""
        self._replies.clear()
        self._bodies.release(self._held)
        self._held = 0


# Answers to a client in place of an engine's, in the shape of the errors of its path.


_RETRY_SECONDS = "1"
#: An error -> status, slug, the type that OpenAI's API gives such an error.
_KINDS: dict[type[WaymarkError], tuple[int, str, str]] = {
    NoTarget: (503, "no_target", "service_unavailable"),
    Starting: (503, "starting", "service_unavailable"),
    StoreUnavailable: (503, "unavailable", "service_unavailable"),
    Saturated: (429, "saturated", "rate_limit_exceeded"),
    InvalidValue: (400, "invalid", "invalid_request_error"),
}
#: The error types of Anthropic's API, by status.
_ANTHROPIC = {400: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class ImmediateAnswer(NamedTuple):
    """An HTTP answer that the proxy sends to the client at once, in place of an engine's."""

    status: int
    slug: str
    body: bytes
    headers: dict[str, str]


def rejection_of(error: WaymarkError, form: Form | None) -> ImmediateAnswer:
    """Return the answer to a request without a target. Raise the error itself if it is not a rejection."""
    for kind, (status, slug, name) in _KINDS.items():
        if isinstance(error, kind):
            return _rejection(status, slug, name, str(error), form)
    raise error


def too_large(sentence: str, form: Form | None) -> ImmediateAnswer:
    """Return the answer to a body above a bound."""
    return _rejection(413, "too_large", "invalid_request_error", sentence, form)


def overloaded(sentence: str, form: Form | None) -> ImmediateAnswer:
    """Return the answer while all bodies together are above their bound."""
    return _rejection(503, "overloaded", "service_unavailable", sentence, form)


def misconfigured(sentence: str, form: Form | None) -> ImmediateAnswer:
    """Return the answer if the proxy's configuration does not let a target be picked."""
    return _rejection(500, "misconfigured", "server_error", sentence, form)


def _rejection(status: int, slug: str, name: str, sentence: str, form: Form | None) -> ImmediateAnswer:
    headers = {"retry-after": _RETRY_SECONDS} if status in (429, 503) else {}
    if form is Form.MESSAGES:
        fields: dict[str, object] = {
            "type": "error",
            "error": {"type": _ANTHROPIC.get(status, "api_error"), "message": sentence},
        }
    else:
        fields = {"error": {"message": sentence, "type": name, "param": None, "code": slug}}
    return ImmediateAnswer(status, slug, orjson.dumps(fields), headers)


# The number of held bytes of bodies: of one request, and of all.
#
# When all bodies together are at their bound, the largest unfinished one gives way: a peer that sends large bodies
# without end only loses its own requests.


class BodyBytes:
    """The number of bytes of all bodies that a process holds, with its bounds."""

    def __init__(self, one_max: int, all_max: int, metrics: Metrics) -> None:
        self.one_max = one_max
        self.all_max = all_max
        self._held = 0
        self._gauge = metrics.epp_bodies_bytes
        self._arriving: set[ArrivingBody] = set()

    def exceeded(self, bytes_held: int, more: int) -> Literal["one", "all"] | None:
        """Return the bound that a body of ``bytes_held`` bytes exceeds with ``more``; None if they are counted."""
        if bytes_held + more > self.one_max:
            return "one"
        if self._held + more > self.all_max:
            return "all"
        self._held += more
        self._gauge.set(self._held)
        return None

    def release(self, bytes_held: int) -> None:
        """Release a body."""
        self._held -= bytes_held
        self._gauge.set(self._held)

    def arriving(self, give_up: Callable[[], None]) -> ArrivingBody:
        """Return a body before its first bytes; ``give_up`` is called when it has to give way."""
        body = ArrivingBody(self, give_up)
        self._arriving.add(body)
        return body

    def settle(self, body: ArrivingBody) -> None:
        """Mark the body as complete, or not wanted any more: it does not give way."""
        self._arriving.discard(body)

    def make_room(self, body: ArrivingBody, more: int) -> bool:
        """Let larger bodies give way to ``more`` bytes of this one. Return False if there is no larger one."""
        while self._held + more > self.all_max:
            largest = max(self._arriving, key=lambda arriving_body: arriving_body.held, default=body)
            if largest.held <= body.held + more:
                return False
            largest.give_up()
        return True


class ArrivingBody:
    """The body of one request, in the parts received so far."""

    def __init__(self, bodies: BodyBytes, give_up: Callable[[], None]) -> None:
        self._bodies = bodies
        self._give_up = give_up
        self.parts: list[bytes] = []
        self.held = 0
        self.is_given_up = False

    def add(self, part: bytes) -> Literal["one", "all"] | None:
        """Hold one more part. If it is above a bound, return which one; the part is not held then."""
        bound = self._bodies.exceeded(self.held, len(part))
        if bound == "all" and self._bodies.make_room(self, len(part)):
            bound = self._bodies.exceeded(self.held, len(part))
        if bound is None:
            self.held += len(part)
            self.parts.append(part)
        return bound

    def settle(self) -> None:
        """Mark the body as complete."""
        self._bodies.settle(self)

    def whole(self) -> bytes:
        """Return the body, which is held in one part from now on."""
        self.parts = [b"".join(self.parts)]
        return self.parts[0]

    def give_up(self) -> None:
        """Give way to another body."""
        self.is_given_up = True
        self.drop()
        self._give_up()

    def drop(self) -> None:
        """Drop the held bytes."""
        self.settle()
        self.parts.clear()
        self._bodies.release(self.held)
        self.held = 0
