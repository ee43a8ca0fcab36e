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

    answer = 401, "unauthorized"

    def __init__(self, *, is_set: bool = True) -> None:
        """``is_set=False``: this process has no token, so no client can send the right one."""
        super().__init__(
            ("" if is_set else "this Waymark has no token for such requests: start it again with WAYMARK_API_TOKEN; ")
            + "this request needs the header 'Authorization: Bearer <token>' with the token of WAYMARK_API_TOKEN"
        )


class Forbidden(errors.WaymarkError):
    """The token is known, but does not allow the operation; or a page of another site has sent the request."""

    answer = 403, "unauthorized"


def short(name: str) -> str:
    """Return a name for a sentence that clients match on: unchanged, unless it is so long that it is quoted and cut."""
    return name if len(name) <= SHOWN_MAX else shown(name)


def status_of(error: errors.WaymarkError, *, unfit_status: int = 400) -> int:
    """Return the HTTP status of an error. ``unfit_status`` is that of the API for invalid fields."""
    if isinstance(error, errors.InvalidValue):
        return _STATUS_OF_REASON.get(error.reason) or (unfit_status if isinstance(error, InvalidBody) else 400)
    if error.answer is None:
        raise error
    return error.answer[0]


def body_of(error: errors.WaymarkError) -> dict[str, Any]:
    """Return the error body; absent ``field`` and ``index`` are left out."""
    reason = error.reason if isinstance(error, errors.InvalidValue) else error.answer and error.answer[1]
    body = {"error": str(error), "reason": reason} | {name: getattr(error, name, None) for name in ("field", "index")}
    return {name: value for name, value in body.items() if value is not None}


def headers_of(error: errors.WaymarkError) -> dict[str, str]:
    """Return the headers that the status of an error requires."""
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, errors.InvalidValue) and error.reason == "too_large":
        return {"Connection": "close"}  # the rest of the body is not read
    is_for_now = error.answer is not None and error.answer[0] in (429, 503)
    return {"Retry-After": str(error.retry_after_seconds)} if is_for_now else {}
