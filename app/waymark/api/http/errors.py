"""The error body, and the one place that turns an exception into a status code.

A sentence names the field, the value if it may be shown, and the way out. It never contains a salt, an access token or
a valid token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from waymark.base.errors import (
    Conflict,
    InvalidValue,
    NoTarget,
    NotFound,
    RemoteUnavailable,
    Saturated,
    Starting,
    StoreUnavailable,
    WaymarkError,
)
from waymark.base.shown import SHOWN_MAX, is_beyond_64_bits, kind, shown, shown_url

#: Fields whose values are secrets of a tenant; an error names the field without its value.
_SECRET = frozenset({"additionalsalt", "additional_salt", "cache_salt"})
#: Fields whose values may hold a password.
_URLS = frozenset(
    {
        "url", "address", "metrics_url", "endpoint", "replay_endpoint", "snapshot_endpoint", "medium_endpoints",
        "kv_events_endpoint", "kv_events_endpoints",
    }
)  # fmt: skip

_STATUS_OF_REASON = {"too_large": 413, "unsupported_content_type": 415}

_SHAPE_ERRORS = frozenset({"missing", "invalid_type", "invalid_value", "out_of_range"})


class ErrorBody(BaseModel):
    """The body of every answer outside the Dynamo API that is not a 2xx."""

    model_config = ConfigDict(defer_build=True)

    error: str = Field(description="a sentence with the problem, the value and the remedy")
    reason: str = Field(
        description="one of: invalid_json, invalid_msgpack, missing, invalid_type, invalid_value, out_of_range, "
        "conflict, gap, not_found, method_not_allowed, too_large, unsupported_content_type, unauthorized, "
        "unavailable, no_target, starting, saturated, no_tokenizer, internal"
    )
    field: str | None = Field(
        default=None, description="the field that the sentence is about, as the client spelled it"
    )
    index: int | None = Field(default=None, description="the position inside that field, counted from 0")
    applied: int | None = Field(default=None, description="the number of events that were applied before a gap")
    expected: int | None = Field(default=None, description="the event_id to continue from after a gap")


class InvalidBody(InvalidValue):
    """The body can be read, but its fields are invalid: 400 in the root API, 422 in Dynamo's."""


class Unauthorized(WaymarkError):
    """A bearer token is needed, but is missing or wrong."""

    def __init__(self, *, is_set: bool = True) -> None:
        """``is_set=False``: this process has no token, so no client can send the right one."""
        super().__init__(
            ("" if is_set else "this Waymark has no token for such requests: start it again with WAYMARK_API_TOKEN; ")
            + "this request needs the header 'Authorization: Bearer <token>' with the token of WAYMARK_API_TOKEN"
        )


class Forbidden(WaymarkError):
    """The token is known, but does not allow the operation; or a page of another site has sent the request."""


def short(name: str) -> str:
    """Return a name for a sentence that clients match on: unchanged, unless it is so long that it is quoted and cut."""
    return name if len(name) <= SHOWN_MAX else shown(name)


def unfit(error: ValidationError, model: type[BaseModel], spelled: Mapping[str, str]) -> InvalidBody:
    """Return the first of pydantic's errors as an ``InvalidBody``. ``spelled`` maps field names to the client's
    spelling.
    """
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    described = model.model_fields[name]
    field = spelled.get(name) or described.alias or name
    wanted = described.description or "as documented"
    if first["type"] == "missing":
        return InvalidBody(f"{field} is missing; it must be {wanted}", reason="missing", field=field)
    value = first["input"]
    if name in _SECRET:
        text = kind(value)
    else:
        text = shown_url(value) if name in _URLS and isinstance(value, str) else shown(value)
    return InvalidBody(f"{field} is {text}; it must be {wanted}", reason=_slug(first["type"], value), field=field)


def _slug(pydantic_type: str, value: Any) -> str:
    if is_beyond_64_bits(value) or pydantic_type.startswith(("greater_than", "less_than", "string_too")):
        return "out_of_range"
    if pydantic_type in _SHAPE_ERRORS:
        return pydantic_type
    return "invalid_type" if pydantic_type.endswith("_type") else "invalid_value"


def status_of(error: WaymarkError, *, unfit_status: int = 400) -> int:
    """Return the HTTP status of an error. ``unfit_status`` is that of the API for invalid fields."""
    match error:
        case InvalidValue(reason=reason) if reason in _STATUS_OF_REASON:
            return _STATUS_OF_REASON[reason]
        case InvalidBody():
            return unfit_status
        case InvalidValue():
            return 400
        case Unauthorized():
            return 401
        case Forbidden():
            return 403
        case NotFound():
            return 404
        case Conflict():
            return 409
        case Saturated():
            return 429
        case StoreUnavailable() | RemoteUnavailable() | NoTarget() | Starting():
            return 503
    raise error


def body_of(error: WaymarkError) -> dict[str, Any]:
    """Return the error body; absent ``field`` and ``index`` are left out."""
    body: dict[str, Any] = {"error": str(error)}
    match error:
        case InvalidValue(reason=reason, field=field, index=index):
            body |= {"reason": reason, "field": field, "index": index}
        case Unauthorized() | Forbidden():
            body["reason"] = "unauthorized"
        case NotFound(field=field):
            body |= {"reason": "not_found", "field": field}
        case Conflict(field=field):
            body |= {"reason": "conflict", "field": field}
        case NoTarget():
            body["reason"] = "no_target"
        case Starting():
            body["reason"] = "starting"
        case Saturated():
            body["reason"] = "saturated"
        case StoreUnavailable() | RemoteUnavailable():
            body["reason"] = "unavailable"
    return {name: value for name, value in body.items() if value is not None}


def headers_of(error: WaymarkError) -> dict[str, str]:
    """Return the headers that the status of an error requires."""
    match error:
        case StoreUnavailable(retry_after_seconds=seconds) | RemoteUnavailable(retry_after_seconds=seconds):
            return {"Retry-After": str(seconds)}
        case NoTarget() | Starting() | Saturated():
            return {"Retry-After": "1"}
        case Unauthorized():
            return {"WWW-Authenticate": "Bearer"}
        case InvalidValue(reason="too_large"):
            return {"Connection": "close"}  # the rest of the body is not read
    return {}
