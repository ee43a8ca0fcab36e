"""What a client gets in place of an engine's answer, in the shape of errors that its path has."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from waymark.base.errors import InvalidValue, NoTarget, Saturated, Starting, StoreUnavailable, WaymarkError
from waymark.chat.requests import Form

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
