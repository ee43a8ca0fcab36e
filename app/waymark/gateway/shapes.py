"""The paths that the gateway proxies, and errors in the shape that the clients of each path know."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import orjson

from waymark.base import errors
from waymark.base.bounded_json import TooMuchJson, bounded_loads
from waymark.base.shown import shown
from waymark.chat.multipart import fields_of_form, model_part
from waymark.chat.requests import Form, InferenceRequest, read_request

PATHS: Final[Mapping[str, Form]] = MappingProxyType({f"/v1{form}": form for form in Form})
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
#: Further paths of engines. Each body names a model. Its text is not looked up in the index, so the load alone decides.
FURTHER: Final = frozenset(
    {
        *("/v1/rerank", "/v2/rerank", "/v1/score", "/tokenize", "/detokenize", "/pooling", "/classify"),
        *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/v1/images/edits", "/v1/images/generations", "/v1/images/variations"),
    }
)
#: Statuses of a server without a path, and what such a server says in JSON.
WITHOUT_PATH: Final = frozenset({404, 405, 501})
_NO_PATH_SAID = ("Not Found", "Method Not Allowed")
_WITH_V1 = frozenset({*PATHS, "/v1/models"})


def form_of_errors(path: str) -> Form | None:
    """Return the form of the errors of a path, even if the path begins wrongly."""
    if path.endswith(("/v1/messages", COUNT_TOKENS)):
        return Form.MESSAGES
    return PATHS.get(path)


def is_without_v1(path: str) -> bool:
    """Return whether a client has left ``/v1`` out of its ``base_url``."""
    return f"/v1{path}" in _WITH_V1


def unknown_path(path: str) -> RequestRejected:
    """Return the rejection of an unknown path; it says if the ``base_url`` of a client is wrong."""
    if is_without_v1(path):
        sentence = f"there is no path {path}: the base_url of this client must end in /v1"
    elif path.startswith("/v1/v1/") and path.endswith(("/messages", "/messages/count_tokens")):
        sentence = f"there is no path {shown(path)}: this client adds /v1 itself, so leave it out of its base_url"
    elif any(path.startswith(f"{prefix}/v1/") for prefix in (COUNT_TOKENS, "/v1/messages")):
        sentence = f"there is no path {shown(path)}: the base_url of this client ends before /v1/messages"
    elif any(path.startswith(f"{prefix}/") for prefix in PATHS):
        sentence = (
            f"there is no path {shown(path)}: the base_url of this client must end in /v1, without a further path"
        )
    elif path.startswith("/v1/v1/"):
        sentence = f"there is no path {shown(path)}: the base_url of this client must end in /v1, once"
    else:
        sentence = "there is no such path; this gateway has " + ", ".join(sorted({*_WITH_V1, COUNT_TOKENS, *FURTHER}))
    return RequestRejected(404, sentence, "not_found")


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


class RequestRejected(errors.WaymarkError):
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


def rejected_by(error: errors.WaymarkError) -> RequestRejected:
    """Return the answer to an error of a decision. Any other error is raised again."""
    match error:
        case RequestRejected():
            return error
        case errors.InvalidValue(sentence=sentence, reason=reason, field=field):
            return RequestRejected(413 if reason == "too_large" else 400, sentence, reason, field=field)
        case errors.UnknownModel(model_name=name):
            return RequestRejected(
                404, f"the model {shown(name)} does not exist; GET /v1/models lists those that do",
                "model_not_found", field="model",
            )  # fmt: skip
        case errors.WaymarkError(sentence=sentence, answer=((429 | 503) as status, reason)):
            return RequestRejected(status, sentence, reason, retry_after_seconds=error.retry_after_seconds)
    raise error


def unknown_alias(alias: str, model: str) -> RequestRejected:
    """Return the rejection of an alias whose model has no engine."""
    return RequestRejected(
        404,
        f"the model {shown(alias)} is an alias of {shown(model)} here, and no engine serves that; GET /v1/models lists "
        "the models that exist",
        "model_not_found", field="model",
    )  # fmt: skip


def body_of(rejected: RequestRejected, api: Form | None) -> bytes:
    """Return the body of a rejected request in the shape of its API; OpenAI's if the path has no API."""
    return orjson.dumps(_error(rejected, api))


def body_of_rejection(path: str, status: int, sentence: str, reason: str) -> bytes | None:
    """Return the body of a request that the server rejects before the gateway sees it; None for paths of other
    parts.
    """
    if not path.startswith("/v1/"):
        return None
    return body_of(RequestRejected(status, sentence, reason), form_of_errors(path))


def engine_error(status: int, body: bytes, api: Form | None, *, engine: str, path: str) -> bytes:
    """Return the error of an engine in the shape of its path; an error in this shape stays as it is.

    An engine without the path, and an answer without JSON, as from a proxy, get a sentence that names ``engine``.
    """
    try:
        document = bounded_loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict) or (status in WITHOUT_PATH and document.get("detail") in _NO_PATH_SAID):
        return body_of(RequestRejected(status, _untold(status, body, engine, path), "engine_error"), api)
    if api is not Form.MESSAGES or document.get("type") == "error":
        return body
    error = document.get("error", document)
    if isinstance(error, dict):
        error = error.get("message", error.get("detail"))
    message = error if isinstance(error, str) else body.decode("utf-8", "replace")
    return body_of(RequestRejected(status, message, ""), Form.MESSAGES)


def _untold(status: int, body: bytes, engine: str, path: str) -> str:
    if status in WITHOUT_PATH:
        return f"the engine {shown(engine)} does not serve {path}"
    excerpt = f": {shown(body.decode('utf-8', 'replace'))}" if body else " and no body"
    return f"the engine {shown(engine)} answered {path} with {status}{excerpt}"


def event_of(rejected: RequestRejected, api: Form | None) -> bytes:
    """Return a rejected request as an event, for a stream under way."""
    if api is Form.RESPONSES:
        fields = {"type": "error", "code": rejected.code, "message": rejected.sentence, "param": None}
        return b"event: error\ndata: " + orjson.dumps(fields) + b"\n\n"
    name = b"event: error\n" if api is Form.MESSAGES else b""
    return name + b"data: " + orjson.dumps(_error(rejected, api)) + b"\n\n"


def _error(rejected: RequestRejected, api: Form | None) -> dict[str, Any]:
    openai, anthropic = _TYPES.get(rejected.status, _TYPES[400 if rejected.status < 500 else 500])
    if api is Form.MESSAGES:
        return {"type": "error", "error": {"type": anthropic, "message": rejected.sentence}}
    return {"error": {"message": rejected.sentence, "type": openai, "param": rejected.field, "code": rejected.code}}


# Bodies of requests as the gateway reads and changes them.


class InferenceBody(NamedTuple):
    """The fields of a body, and the request that they make."""

    fields: dict[str, Any]
    request: InferenceRequest


def body_of_request(path: str, body: bytes, content_type: bytes = b"") -> InferenceBody:
    """Read a body. Raise RequestRejected if it is not JSON, or its JSON is above a bound; InvalidValue without a model.

    Of a form with files, as of ``/v1/audio/transcriptions``, only the model is read.
    """
    if path == COUNT_TOKENS:
        path = path.removesuffix("/count_tokens")
    form = fields_of_form(body, content_type)
    if form is not None:
        return InferenceBody(form, read_request(path, form))
    try:
        fields = bounded_loads(body)
    except TooMuchJson as error:
        raise RequestRejected(400, f"the body cannot be read: {error}; send less", "invalid_value") from None
    except orjson.JSONDecodeError:
        raise RequestRejected(400, "the body is not valid JSON; send a JSON object", "invalid_json") from None
    return InferenceBody(fields, read_request(path, fields))


def with_model(body: InferenceBody, original: bytes, model: str, content_type: bytes = b"") -> bytes:
    """Return the bytes of a body that names another model."""
    position = model_part(original, content_type)
    if position is not None:
        return original[: position.start] + model.encode() + original[position.stop :]
    return orjson.dumps(body.fields | {"model": model})


def with_cache_control(body: InferenceBody, original: bytes) -> bytes:
    """Return the body with a mark after its system prompt, up to which Anthropic's API caches; unchanged if it has a
    mark.

    The mark is on the last text block: all blocks before it are cached with it, and a request may have four marks.
    """
    system = body.fields.get("system")
    if body.request.form is not Form.MESSAGES or not system:
        return original
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return original
    texts = [number for number, block in enumerate(blocks) if block.get("type") == "text"]
    if not texts or any("cache_control" in block for block in blocks):
        return original
    last = texts[-1]
    marked = [
        block | {"cache_control": {"type": "ephemeral"}} if number == last else block
        for number, block in enumerate(blocks)
    ]
    return orjson.dumps(body.fields | {"system": marked})
