"""The error body, and the one place that turns an exception into a status code.

A sentence names the field, the value if it may be shown, and the way out. It never contains a salt, an access token or
a valid token id.
"""

from __future__ import annotations

from typing import Any

from waymark.base import errors
from waymark.base.shown import SHOWN_MAX, shown

_STATUS_OF_REASON = {"too_large": 413, "unsupported_content_type": 415}


class InvalidBody(errors.InvalidValue):
    """The body can be read, but its fields are invalid: 400 in the root API, 422 in Dynamo's."""


class Unauthorized(errors.WaymarkError):
    """A bearer token is needed, but is missing or wrong."""

    def __init__(self, *, is_set: bool = True) -> None:
        """``is_set=False``: this process has no token, so no client can send the right one."""
        super().__init__(
            ("" if is_set else "this Waymark has no token for such requests: start it again with WAYMARK_API_TOKEN; ")
            + "this request needs the header 'Authorization: Bearer <token>' with the token of WAYMARK_API_TOKEN"
        )


class Forbidden(errors.WaymarkError):
    """The token is known, but does not allow the operation; or a page of another site has sent the request."""


def short(name: str) -> str:
    """Return a name for a sentence that clients match on: unchanged, unless it is so long that it is quoted and cut."""
    return name if len(name) <= SHOWN_MAX else shown(name)


def status_of(error: errors.WaymarkError, *, unfit_status: int = 400) -> int:
    """Return the HTTP status of an error. ``unfit_status`` is that of the API for invalid fields."""
    match error:
        case errors.InvalidValue(reason=reason) if reason in _STATUS_OF_REASON:
            return _STATUS_OF_REASON[reason]
        case InvalidBody():
            return unfit_status
        case errors.InvalidValue():
            return 400
        case Unauthorized():
            return 401
        case Forbidden():
            return 403
        case errors.NotFound():
            return 404
        case errors.Conflict():
            return 409
        case errors.Saturated():
            return 429
        case errors.StoreUnavailable() | errors.RemoteUnavailable() | errors.NoTarget() | errors.Starting():
            return 503
    raise error


def body_of(error: errors.WaymarkError) -> dict[str, Any]:
    """Return the error body; absent ``field`` and ``index`` are left out."""
    body: dict[str, Any] = {"error": str(error)}
    match error:
        case errors.InvalidValue(reason=reason, field=field, index=index):
            body |= {"reason": reason, "field": field, "index": index}
        case Unauthorized() | Forbidden():
            body["reason"] = "unauthorized"
        case errors.NotFound(field=field):
            body |= {"reason": "not_found", "field": field}
        case errors.Conflict(field=field):
            body |= {"reason": "conflict", "field": field}
        case errors.NoTarget():
            body["reason"] = "no_target"
        case errors.Starting():
            body["reason"] = "starting"
        case errors.Saturated():
            body["reason"] = "saturated"
        case errors.StoreUnavailable() | errors.RemoteUnavailable():
            body["reason"] = "unavailable"
    return {name: value for name, value in body.items() if value is not None}


def headers_of(error: errors.WaymarkError) -> dict[str, str]:
    """Return the headers that the status of an error requires."""
    match error:
        case (
            errors.StoreUnavailable(retry_after_seconds=seconds) | errors.RemoteUnavailable(retry_after_seconds=seconds)
        ):
            return {"Retry-After": str(seconds)}
        case errors.NoTarget() | errors.Starting() | errors.Saturated():
            return {"Retry-After": "1"}
        case Unauthorized():
            return {"WWW-Authenticate": "Bearer"}
        case errors.InvalidValue(reason="too_large"):
            return {"Connection": "close"}  # the rest of the body is not read
    return {}
