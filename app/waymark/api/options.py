"""The options of the HTTP API."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal, TypeAlias

from waymark.apply.options import ApplyOptions
from waymark.base.record import record
from waymark.decide.served import PromptOptions

ConductorShape: TypeAlias = Literal["auto", "published", "instances"]
"""The form of ``/query`` answers: the older one, the newer one, or the one implied by the format of the body."""


@record(frozen=True, slots=True)
class AccessOptions:
    """The allowed tokens and endpoints."""

    token: str | None = field(default=None, repr=False)
    """The bearer token that may do everything."""
    tokens_file: Path | None = None
    """The file of further tokens."""
    protects_reads: bool = False
    """Whether requests that only read need a token."""
    is_closed: bool = False
    """Whether operations that need a token are closed if none is set, because anyone may be a client of this port."""
    allowed_endpoints: tuple[str, ...] = ()
    """The endpoints that may be registered; empty: all."""
    warning: str | None = None
    """The warning that the port is open to everybody; None if it is not."""


@record(frozen=True, slots=True)
class ApiOptions:
    """The options of an application, without those of its decisions."""

    access: AccessOptions = field(default_factory=AccessOptions)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    apply: ApplyOptions = field(default_factory=ApplyOptions)
    body_bytes_max: int = 16 * 2**20
    shape: ConductorShape = "auto"
    inspect_seconds: float = 5.0
    """The deadline of an inspection."""
    min_initial_workers: int = 0
    """The instances that must be registered before decisions begin."""
    injects_cache_control: bool = False
    """Whether a gateway in this process marks prompts for caching, which ``/admin`` reports."""
    has_page: bool = True
    has_access_log: bool = False
