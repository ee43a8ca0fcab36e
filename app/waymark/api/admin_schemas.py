"""The bodies and answers of the paths under ``/admin``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from waymark.api.http.fields import RequestBody


class ClearRequest(RequestBody):
    """What is cleared from the index."""

    scope: Literal["prefixes", "all"] = Field(
        default="prefixes",
        description="prefixes or all: prefixes removes opaque prefixes only; all removes the entries of all publishers",
    )


class InvalidateRequest(RequestBody):
    """What is cleared from the response cache."""

    clear_all: Literal[True] | None = Field(default=None, description="true: all answers are cleared")
    key: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="the X-Cache-Key of one answer, 64 hex digits: only this answer is cleared",
    )
