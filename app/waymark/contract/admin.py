"""The answers of the admin paths, with the names of Continuum Router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from waymark.base.shape import AnswerShape


class InvalidateAnswer(AnswerShape):
    """The result of a clear."""

    success: bool
    """Always true."""
    action: str
    """``clear_all`` or ``clear_key``."""
    cleared_entries: int
    """The number of cleared entries."""


class ClearAnswer(AnswerShape):
    """The result of a clear."""

    success: bool
    """Always true."""
    entries_before_clear: int
    """The number of entries that all publishers had before the clear."""
    cleared_entries: int
    """The number of these entries that were removed."""


class PrefixRoutingConfig(AnswerShape):
    """The constants of the policy sticky."""

    max_prefix_length: int
    """The bytes of a prompt that its prefix key is made of."""
    load_factor_epsilon: float
    """The share of requests above the average that a target may have."""
    virtual_nodes: int
    """The points of a target on the hash ring."""
    anthropic_cache_control_injection: bool
    """True if a gateway adds ``cache_control`` to requests."""


class PrefixRoutingDecisions(AnswerShape):
    """The decisions of the policy sticky, by how the target was chosen."""

    total: int
    """The number of decisions."""
    prefix_hash: int
    """The decisions for the target of the prefix key."""
    overflow: int
    """The decisions for another target, because the target of the prefix key had too much load."""
    fallback: int
    """The decisions without a prefix key."""
    overflow_rate: str
    """The share of ``overflow`` in all decisions, as a text: a number from 0 to 1 with four decimals."""


class BackendLoad(AnswerShape):
    """The requests of one engine."""

    backend: str
    """The instance_id."""
    in_flight_requests: int
    """The requests under way."""


class PrefixRoutingStats(AnswerShape):
    """The decisions of the policy sticky."""

    enabled: bool
    """Always true."""
    config: PrefixRoutingConfig
    """The constants of the policy."""
    routing_decisions: PrefixRoutingDecisions
    """The numbers of decisions."""
    backend_distribution: Sequence[BackendLoad]
    """The requests of each engine."""
    unique_prefixes: int
    """The approximate number of different prefix keys."""


class IndexScoring(AnswerShape):
    """The constants of the policy composite."""

    overlap_weight: float
    """The weight of the matched share of a prompt."""
    load_weight: float
    """The weight of the load."""
    health_weight: float
    """The weight of the health."""
    min_overlap_threshold: float
    """The matched share below which a match does not count."""


class IndexConfig(AnswerShape):
    """The configuration of the index."""

    backend: str
    """Always redis."""
    max_entries: int
    """The most entries of a source of opaque prefixes."""
    entry_ttl_seconds: int
    """How long the index keeps such an entry."""
    event_sources_count: int
    """The number of publishers."""
    scoring: IndexScoring
    """The weights by which targets are scored."""


class IndexContents(AnswerShape):
    """The contents of the index."""

    prefix_count: int
    """The number of opaque prefixes."""
    entry_count: int
    """The number of blocks and opaque prefixes; one that two holders have counts twice."""
    total_hits: int
    """The number of decisions."""
    total_evictions: int
    """The number of entries that engines have evicted."""


class EventSourceState(AnswerShape):
    """The state of one publisher."""

    backend_name: str
    """The name of the engine, with its rank unless that is 0."""
    connected: bool
    """True if the stream is connected."""
    events_received: int
    """The number of received events."""
    events_dropped: int
    """The number of dropped events."""
    last_event_at: str | None
    """The time of the last event; null before the first."""
    reconnect_count: int
    """The number of new connections."""


class IndexDecisions(AnswerShape):
    """The decisions, by whether the index decided."""

    kv_aware: int
    """The decisions by the index."""
    fallback: int
    """The decisions without a prefix key."""
    total: int
    """The number of decisions."""


class IndexStats(AnswerShape):
    """The contents of the index, and the number of decisions that used it."""

    enabled: bool
    """Always true."""
    config: IndexConfig
    """The configuration."""
    index: IndexContents
    """The numbers of its entries."""
    event_sources: Sequence[EventSourceState]
    """The state of each publisher."""
    routing_decisions: IndexDecisions
    """The numbers of decisions."""
    query_latency_count: int
    """The number of decisions."""
    overlap_score_count: int
    """The number of decisions by the index."""


class BackendConnection(AnswerShape):
    """The connection to one publisher."""

    connected: bool
    """True if the stream is connected."""
    reconnect_count: int
    """The number of new connections."""
    last_event_at: str | None
    """The time of the last event; null before the first."""


class BackendEvents(AnswerShape):
    """The counts of the events of one publisher."""

    received: int
    """The number of received events."""
    dropped: int
    """The number of dropped events."""
    index_created: int
    """The number of entries that were added to the index."""
    index_evicted: int
    """The number of entries that were removed from the index."""


class BackendState(AnswerShape):
    """One publisher."""

    backend_name: str
    """The name of the engine, with its rank unless that is 0."""
    connection: BackendConnection
    """The state of its connection."""
    events: BackendEvents
    """The counts of its events."""


class IndexBackends(AnswerShape):
    """The event counts of each publisher."""

    enabled: bool
    """Always true."""
    backends: Sequence[BackendState]
    """The publishers."""


class ResponseCacheRequests(AnswerShape):
    """The requests to the gateways, by what the cache did for them."""

    hit: int
    """The requests that were answered from the cache."""
    miss: int
    """The requests that an engine answered."""
    skip: int
    """The requests that cannot be answered from a cache."""
    total: int
    """The sum."""


class ResponseCacheConfig(AnswerShape):
    """The configuration of the response cache."""

    backend: str
    """``memory`` or ``redis``."""
    ttl: str
    """How long an answer stays, such as ``30m``."""
    capacity: int
    """The most answers."""
    max_response_size: int
    """The most bytes of an answer."""
    max_stream_buffer_size: int
    """The most bytes of an answer that is streamed."""


class CacheConnections(AnswerShape):
    """The connections to Redis."""

    active: int
    """The connections in use."""
    idle: int
    """The other connections."""


class CacheErrors(AnswerShape):
    """The errors of Redis, by kind."""

    connection: int
    """The lost connections."""
    timeout: int
    """The answers of Redis that came too late."""
    other: int
    """All other errors."""


class ResponseCacheRedis(AnswerShape):
    """The Redis of the response cache, as this gateway sees it."""

    connections: CacheConnections
    """The connections to Redis."""
    fallback_active: bool
    """True while Redis is unavailable, and the gateway keeps answers in its own memory."""
    errors: CacheErrors
    """The errors of Redis at all gateways."""


class ResponseCacheStats(AnswerShape):
    """The contents of the response cache, and the number of requests that it answered. If it is off, only ``enabled``
    is there.
    """

    OPTIONAL: ClassVar = (
        *("backend_type", "entries", "capacity", "requests", "hit_rate", "evictions"),
        *("size_bytes", "config", "redis"),
    )

    enabled: bool
    """False if the cache is off."""
    backend_type: str | None = None
    """``memory`` or ``redis``."""
    entries: int | None = None
    """The number of answers: in Redis, or in the memory of this gateway if ``backend_type`` is ``memory``."""
    capacity: int | None = None
    """The most answers."""
    requests: ResponseCacheRequests | None = None
    """The requests to the gateways."""
    hit_rate: str | None = None
    """A text: the share of ``hit`` in hits and misses, with four decimals."""
    evictions: int | None = None
    """The number of answers that were removed to make room for others, by all gateways."""
    size_bytes: int | None = None
    """The bytes of the answers."""
    config: ResponseCacheConfig | None = None
    """The configuration."""
    redis: ResponseCacheRedis | None = None
    """The Redis of the answers; absent if they are in memory."""
