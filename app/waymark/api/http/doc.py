"""The published description of an operation, and its consequences for requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pydantic import BaseModel

from waymark.api.http.access import Reach
from waymark.contract.shape import AnswerShape

Queue: TypeAlias = Literal["read", "write", "decide"]


@dataclass(frozen=True, slots=True)
class Doc:
    """The published description of an operation, beside the facts that follow from its method and access."""

    summary: str
    request: type[BaseModel] | None = None
    answer: type[BaseModel | AnswerShape] | None = None
    """The type of the answer; None if the answer is not JSON, or has no fixed shape."""
    status: int = 200
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    """404 and 409, if it has them."""
    needs_redis: bool = True
    may_be_list: bool = False
    """A list of bodies is as good as one."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers of a successful answer, each with its meaning."""
    parameters: tuple[str, ...] = ()
    """The parameters of the query string; all are optional."""
    request_headers: tuple[str, ...] = ()
    """Headers that it reads beside those of every operation; a handler finds them among its parameters."""
    reach: Reach = "all"
    """The tenants that it shows. A path without this field is closed to tokens of some tenants."""
    queue: Queue | None = None
    """The queue in which its requests wait; None: that of all requests with the same access."""
