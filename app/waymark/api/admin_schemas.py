"""The bodies and answers of the paths under ``/admin``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from waymark.api.http.fields import RequestBody
from waymark.api.http.models import Model


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


class InvalidateAnswer(Model):
    """What was cleared."""

    success: bool
    action: str
    cleared_entries: int


class ClearAnswer(Model):
    """What was cleared."""

    success: bool
    entries_before_clear: int = Field(description="how many entries all publishers had before the clear")
    cleared_entries: int = Field(description="how many of these entries were removed")


class PrefixRoutingConfig(Model):
    max_prefix_length: int
    load_factor_epsilon: float
    virtual_nodes: int
    anthropic_cache_control_injection: bool


class PrefixRoutingDecisions(Model):
    total: int
    prefix_hash: int
    overflow: int
    fallback: int
    overflow_rate: str = Field(description="a text: a number from 0 to 1 with four decimals")


class BackendLoad(Model):
    backend: str = Field(description="the instance_id")
    in_flight_requests: int


class PrefixRoutingStats(Model):
    """The decisions of the policy sticky."""

    enabled: bool
    config: PrefixRoutingConfig
    routing_decisions: PrefixRoutingDecisions
    backend_distribution: list[BackendLoad]
    unique_prefixes: int = Field(description="the approximate number of different prefix keys")


class IndexScoring(Model):
    overlap_weight: float
    load_weight: float
    health_weight: float
    min_overlap_threshold: float


class IndexConfig(Model):
    backend: str
    max_entries: int
    entry_ttl_seconds: int
    event_sources_count: int
    scoring: IndexScoring


class IndexContents(Model):
    prefix_count: int = Field(description="the number of opaque prefixes")
    entry_count: int = Field(
        description="the number of blocks and opaque prefixes; one that two holders have counts twice"
    )
    total_hits: int
    total_evictions: int


class EventSourceState(Model):
    backend_name: str
    connected: bool
    events_received: int
    events_dropped: int
    last_event_at: str | None
    reconnect_count: int


class IndexDecisions(Model):
    kv_aware: int
    fallback: int
    total: int


class IndexStats(Model):
    """What the index contains, and how many decisions used it."""

    enabled: bool
    config: IndexConfig
    index: IndexContents
    event_sources: list[EventSourceState]
    routing_decisions: IndexDecisions
    query_latency_count: int
    overlap_score_count: int


class BackendConnection(Model):
    connected: bool
    reconnect_count: int
    last_event_at: str | None


class BackendEvents(Model):
    received: int
    dropped: int
    index_created: int
    index_evicted: int


class BackendState(Model):
    backend_name: str
    connection: BackendConnection
    events: BackendEvents


class IndexBackends(Model):
    """The event counts of each publisher."""

    enabled: bool
    backends: list[BackendState]
