"""Answers that are sent on only when all of them is there.

A proxy can send a request again as long as nothing of its answer has gone to the client. If a picker or an engine dies
between the headers and the end of an answer that is one JSON object, the client has half of an object, which is of no
use. So the picker holds such an answer until its end. A stream of tokens is never held.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from waymark.base.errors import InvalidValue, NoTarget, Saturated, Starting, StoreUnavailable, WaymarkError
from waymark.chat.requests import Form
from waymark.epp.bodies import BodyBytes


def is_whole(headers: Mapping[str, str]) -> bool:
    """Whether the headers of an answer announce one JSON object."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


class HeldAnswer:
    """The messages to the proxy about one answer: sent at once until ``begin``, and after that together at the end.

    Its bytes count among those of all bodies. What is above a bound is held no longer: it goes on as it comes.
    """

    def __init__(self, bodies: BodyBytes, write: Callable[[Any], Awaitable[None]]) -> None:
        self._bodies = bodies
        self._write = write
        self._is_holding = False
        self._replies: list[Any] = []
        self._held = 0

    def begin(self) -> None:
        """Hold what comes."""
        self._is_holding = True

    async def send(self, replies: Sequence[Any], *, size: int, is_end: bool) -> None:
        """``size`` is the size of the body in them, in bytes."""
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
        """Hold nothing any more."""
        self._replies.clear()
        self._bodies.release(self._held)
        self._held = 0


# What a client gets in place of an engine's answer, in the shape of errors that its path has.


_RETRY_SECONDS = "1"
#: An error -> status, slug, the type that OpenAI's API gives such an error.
_KINDS: dict[type[WaymarkError], tuple[int, str, str]] = {
    NoTarget: (503, "no_target", "service_unavailable"),
    Starting: (503, "starting", "service_unavailable"),
    StoreUnavailable: (503, "unavailable", "service_unavailable"),
    Saturated: (429, "saturated", "rate_limit_exceeded"),
    InvalidValue: (400, "invalid", "invalid_request_error"),
}
#: Of Anthropic's API, by status.
_ANTHROPIC = {400: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class ImmediateAnswer(NamedTuple):
    """An HTTP answer that the proxy sends to the client at once, in place of an engine's."""

    status: int
    slug: str
    body: bytes
    headers: dict[str, str]


def rejection_of(error: WaymarkError, form: Form | None) -> ImmediateAnswer:
    """The answer to a request that gets no target. Raises the error itself where it is no rejection."""
    for kind, (status, slug, name) in _KINDS.items():
        if isinstance(error, kind):
            return _rejection(status, slug, name, str(error), form)
    raise error


def too_large(sentence: str, form: Form | None) -> ImmediateAnswer:
    """The answer to a body that is above a bound."""
    return _rejection(413, "too_large", "invalid_request_error", sentence, form)


def overloaded(sentence: str, form: Form | None) -> ImmediateAnswer:
    """The answer while all bodies together are above their bound."""
    return _rejection(503, "overloaded", "service_unavailable", sentence, form)


def misconfigured(sentence: str, form: Form | None) -> ImmediateAnswer:
    """The answer where the proxy's configuration does not let a target be picked."""
    return _rejection(500, "misconfigured", "server_error", sentence, form)


def _rejection(status: int, slug: str, name: str, sentence: str, form: Form | None) -> ImmediateAnswer:
    headers = {"retry-after": _RETRY_SECONDS} if status in (429, 503) else {}
    if form is Form.MESSAGES:
        said: dict[str, object] = {
            "type": "error",
            "error": {"type": _ANTHROPIC.get(status, "api_error"), "message": sentence},
        }
    else:
        said = {"error": {"message": sentence, "type": name, "param": None, "code": slug}}
    return ImmediateAnswer(status, slug, orjson.dumps(said), headers)
