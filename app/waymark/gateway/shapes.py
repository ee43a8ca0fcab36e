"""The paths that the gateway proxies, and errors in the shape that the clients of each path know."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import orjson

from waymark.base.bounded_json import TooMuchJson, bounded_loads
from waymark.base.errors import (
    InvalidValue,
    NoTarget,
    RemoteUnavailable,
    Saturated,
    Starting,
    StoreUnavailable,
    UnknownModel,
    WaymarkError,
)
from waymark.base.shown import shown
from waymark.chat.requests import Form, InferenceRequest, read_request
from waymark.serving.limits import Rejection

PATHS: Final[Mapping[str, Form]] = MappingProxyType({f"/v1{form}": form for form in Form})

#: Status -> the type of an error, in OpenAI's and in Anthropic's words.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    502: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "api_error"),
}


class RequestRejected(WaymarkError):
    """The answer that the gateway gives itself. ``code`` is a short word for programs."""

    def __init__(
        self, status: int, sentence: str, code: str, *, field: str | None = None, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.code = code
        self.field = field
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def rejected_by(error: WaymarkError) -> RequestRejected:
    """How an error of a decision is answered. Anything else is raised again."""
    match error:
        case RequestRejected():
            return error
        case InvalidValue(sentence=sentence, reason=reason, field=field):
            return RequestRejected(413 if reason == "too_large" else 400, sentence, reason, field=field)
        case UnknownModel(model_name=name):
            return RequestRejected(
                404, f"the model {shown(name)} does not exist; GET /v1/models lists those that do",
                "model_not_found", field="model",
            )  # fmt: skip
        case NoTarget(sentence=sentence):
            return RequestRejected(503, sentence, "no_target", retry_after_seconds=1)
        case Starting(sentence=sentence):
            return RequestRejected(503, sentence, "starting", retry_after_seconds=1)
        case Saturated(sentence=sentence):
            return RequestRejected(429, sentence, "saturated", retry_after_seconds=1)
        case StoreUnavailable(sentence=sentence) | RemoteUnavailable(sentence=sentence):
            return RequestRejected(503, sentence, "unavailable", retry_after_seconds=error.retry_after_seconds)
    raise error


def body_of(rejected: RequestRejected, api: Form | None) -> bytes:
    """The body of a rejected request in the shape of its API; in that of OpenAI where the path has none."""
    return orjson.dumps(_error(rejected, api))


def body_of_rejection(path: str, rejection: Rejection) -> bytes | None:
    """The body of a request that the server rejects before the gateway sees it; None: the path is not the gateway's."""
    if not path.startswith("/v1/"):
        return None
    return body_of(RequestRejected(rejection.status, rejection.sentence, rejection.reason), PATHS.get(path))


def event_of(rejected: RequestRejected, api: Form) -> bytes:
    """A rejected request as an event, for a stream that has begun."""
    if api is Form.RESPONSES:
        fields = {"type": "error", "code": rejected.code, "message": rejected.sentence, "param": None}
        return b"event: error\ndata: " + orjson.dumps(fields) + b"\n\n"
    name = b"event: error\n" if api is Form.MESSAGES else b""
    return name + b"data: " + orjson.dumps(_error(rejected, api)) + b"\n\n"


def _error(rejected: RequestRejected, api: Form | None) -> dict[str, Any]:
    openai, anthropic = _TYPES.get(rejected.status, _TYPES[400 if rejected.status < 500 else 500])
    if api is Form.MESSAGES:
        return {"type": "error", "error": {"type": anthropic, "message": rejected.sentence}}
    return {
        "error": {"message": rejected.sentence, "type": openai, "param": rejected.field, "code": rejected.code},
    }


# Bodies of requests as the gateway reads and changes them.


class InferenceBody(NamedTuple):
    """The fields of a body, and the request that they make."""

    fields: dict[str, Any]
    request: InferenceRequest


def body_of_request(path: str, body: bytes) -> InferenceBody:
    """Read a body. Raises RequestRejected where it is no JSON, or too much; InvalidValue without a model."""
    try:
        fields = bounded_loads(body)
    except TooMuchJson as error:
        raise RequestRejected(400, f"the body cannot be read: {error}; send less", "invalid_value") from None
    except orjson.JSONDecodeError:
        raise RequestRejected(400, "the body is not valid JSON; send a JSON object", "invalid_json") from None
    return InferenceBody(fields, read_request(path, fields))


def with_cache_control(body: InferenceBody, given: bytes) -> bytes:
    """The body with a mark behind its system prompt, up to which Anthropic's API caches; as it is where it has one.

    The mark is on the last text block: all blocks before it are cached with it, and a request may have four marks.
    """
    system = body.fields.get("system")
    if body.request.form is not Form.MESSAGES or not system:
        return given
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return given
    texts = [number for number, block in enumerate(blocks) if block.get("type") == "text"]
    if not texts or any("cache_control" in block for block in blocks):
        return given
    last = texts[-1]
    marked = [
        block | {"cache_control": {"type": "ephemeral"}} if number == last else block
        for number, block in enumerate(blocks)
    ]
    return orjson.dumps(body.fields | {"system": marked})
