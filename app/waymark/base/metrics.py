"""Every metric, as one table.

A line is a metric: its name (without ``waymark_`` and ``_total``), kind, help and labels. An unknown name or label
raises an error. Names and labels are an API: ``tests/base/test_metrics.py`` has the list, ``docs/operations.md`` says
how the numbers of several processes are added up. Labels are bounded: a matched route, never a path; a status, a
reason, never a holder, a hash, a tenant or an endpoint. A label may be a registered model, up to a ceiling. It may be
an instance only in metrics that another project's dashboards name, up to the same ceiling.

Each ``Metrics`` has its own registry, so several roles in one process, or several tests, do not share numbers. It does
no I/O; ``GET /metrics`` answers with ``render``.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from waymark import __version__
from waymark.base.instruments import counter, gauge, histogram, rows, table

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# In seconds. These are literals, because 100 * 1e-6 would be exported as 9.999999999999999e-05.
_REQUEST_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SCRIPT_BUCKETS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# In blocks; the longest allowed prompt has 2,097,152 tokens.
_BLOCK_BUCKETS = (0.0, 1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0)
_SHARE_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_ROUND_TRIP_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)

MODELS_MAX = 100
"""The most models, and the most instances, with a label of their own. Each has dozens of series in Prometheus, and a
hundred are too many to look at; /workers and /books list all of them."""
#: The labels of models beyond the ceiling, and of queries for an unregistered model.
OTHER_MODELS, NO_MODEL = "other", "none"


@table
class Metrics:
    """The metrics of one process. They all start at zero.

    ``role`` is the process's command, ``is_native`` whether its C is in use, ``models_max`` the number of models with a
    label of their own.
    """

    # ---- the HTTP API
    http_requests = counter("How many HTTP requests were answered.", "route", "method", "status")
    http_request_duration_seconds = histogram("How long an HTTP request took.", _REQUEST_BUCKETS, "route")
    http_connections = gauge("How many HTTP connections are open.")
    http_connections_cut = counter("How many HTTP connections this process closed early, by reason.", "reason")
    http_trailer_fields_dropped = counter("How many trailer fields of requests were dropped.")
    http_bodies_bytes = gauge("How many bytes of request bodies this process holds in memory.")

    # ---- queries
    queries = counter("How many queries were answered, by registered model and result.", "model", "result")
    query_blocks = histogram("How many complete blocks the prompt of a query had.", _BLOCK_BUCKETS)
    query_matched_blocks = histogram("How many blocks the best instance of a query already had.", _BLOCK_BUCKETS)
    query_looked_up_blocks = counter("How many blocks queries looked up, in Redis or in the cache of hot rows.")
    hot_block_hits = counter("How many rows were found in the cache of hot rows.")
    hot_block_bytes = gauge("How many bytes the cache of hot rows holds.")
    event_memory_bytes = gauge(
        "How many bytes of publishers' blocks this replica keeps in memory between requests of POST /events."
    )
    answer_cache_hits = counter("How many answers came from the answer cache.")
    answer_cache_bytes = gauge("How many bytes the answer cache holds.")
    text_cache_hits = counter(
        "How many queries differed from an earlier one in their prompt only and were found in the request cache."
    )
    text_cache_bytes = gauge("How many bytes the request cache holds.")
    query_round_trips = histogram("How many times a query waited for Redis.", _ROUND_TRIP_BUCKETS)
    fetch_duration_seconds = histogram("How long one round trip of a query to Redis took.", _SCRIPT_BUCKETS)
    query_partial = counter("How many queries reached their deadline and were answered in part.")

    # ---- decisions
    decisions = counter(
        "How many decisions were made, by policy and by how the target was chosen.", "policy", "decision"
    )
    decisions_without_tokens = counter(
        "How many decisions used the prefix key and loads, because the prompt had no token ids, by reason.", "reason"
    )
    decision_duration_seconds = histogram(
        "How long a part of a decision took: token ids, look-up of blocks (`walk`), policy, reservation.",
        _SCRIPT_BUCKETS,
        "part",
    )
    reservations = gauge("How many reservations exist now, as this replica sees it.", over="max")
    unreachable_targets = gauge(
        "How many targets decisions leave out now, as this replica sees it: requests fail, or the stream is gone.",
        over="max",
    )
    reservations_expired = counter("How many reservations expired without a release.")
    prefill_released = counter(
        "How many prefills of reservations ended, by what ended them: `index`, `estimate`, `caller` or `end`.", "by"
    )
    speculative_tokens = counter("How many tokens speculative entries added to the cached tokens of chosen targets.")

    tokens_available = counter(
        "How many prompt tokens the best allowed target had, of requests whose engine says what it has reused."
    )
    tokens_chosen = counter("How many prompt tokens the chosen target had, of these requests.")
    tokens_expected = counter("How many prompt tokens the engine was expected to reuse, of these requests.")
    tokens_delivered = counter("How many prompt tokens the engine has reused, of these requests.")
    drifts = counter("How many times a target was found to reuse less than 80 % of the expected tokens.")

    shadow_decisions = counter(
        "How many decisions a shadow ordered, by whether it prefers the same target, another one, or none.",
        "shadow",
        "choice",
    )
    shadow_tokens = counter(
        "How many prompt tokens the preferred targets should reuse: those of the shadow, and those of the policy.",
        "shadow",
        "by",
    )
    decision_records = counter("How many records of decisions, and of what became of them, were kept in Redis.")
    decision_records_dropped = counter(
        "How many of these records were dropped: too many waited (`full`), or Redis did not take them (`redis`).",
        "reason",
    )

    prefix_routing_requests = counter(
        "How many decisions went by the prefix key, by how the target was chosen.", "strategy"
    )
    prefix_routing_backend_distribution = gauge(
        "How many requests each instance has in progress, as this replica sees it.", "backend", over="max"
    )
    prefix_routing_prefix_cardinality = gauge(
        "How many different prefix keys decisions had, as an estimate for all replicas.", over="max"
    )
    kv_index_routing_decisions = counter(
        "How many decisions the policies that use the index made, by how the target was chosen.", "decision"
    )
    kv_index_overlap_score = histogram("Which share of a prompt the target of a decision had.", _SHARE_BUCKETS)
    avoidable_prefill_tokens = counter(
        "How many tokens targets of decisions had to compute although another instance had them."
    )
    router_shared_cache_hit_rate = histogram(
        "Which share of a prompt's blocks a shared pool had, in decisions of groups with a pool.", _SHARE_BUCKETS
    )
    router_shared_cache_beyond_blocks = histogram(
        "How many blocks a shared pool had beyond those on the target's device, in decisions of groups with a pool.",
        _BLOCK_BUCKETS,
    )

    # ---- the gateway
    gateway_requests = gauge("How many requests of clients the gateway is serving now.")
    gateway_retries = counter("How many times a request was sent to another engine, by reason.", "reason")
    gateway_interrupted = counter("How many answers of engines to the gateway ended before they were complete.")
    ttft_seconds = histogram("How long it took from a request to the first content of its answer.", _TTFT_BUCKETS)

    # ---- the endpoint picker
    index_streams = gauge("How many streams of the gRPC service `radix_index.RadixIndex` are open.")
    index_queries = counter(
        "How many queries of the gRPC service `radix_index.RadixIndex` were answered, by outcome.", "outcome"
    )
    pool_queries = counter(
        "How many times decisions needed the blocks that a pool without events has, by outcome.", "outcome"
    )
    prefix_queries = counter(
        "How many queries of the gRPC service `kv_indexer.v1.KVIndexer` were answered, by outcome.", "outcome"
    )
    placements = counter(
        "How many placements (a chain of blocks that a router sent to an engine) were reported, by outcome.", "outcome"
    )
    placements_dropped = counter("How many blocks of placements were dropped, because their model had too many.")
    epp_requests = counter("How many requests of Envoy the picker answered, by outcome.", "outcome")
    epp_streams = gauge("How many requests of Envoy the picker is serving now.")
    epp_streams_cut = counter("How many streams of Envoy the picker ended early, by reason.", "reason")
    epp_bodies_bytes = gauge("How many bytes of request bodies the picker holds in memory.")

    # ---- activity
    activity_clients = gauge("How many clients follow the activity list.")
    activity_dropped = counter("How many entries of the activity list were dropped while Redis was unavailable.")

    # ---- the response cache of a gateway
    response_cache_requests = counter("How many requests were looked up in the response cache, by result.", "result")
    response_cache_entries = gauge(
        "How many answers the response cache has; a cache in Redis counts the answers of all gateways.", over="max"
    )
    response_cache_size_bytes = gauge(
        "How many bytes the response cache has; a cache in Redis counts the bytes of all gateways.", over="max"
    )
    response_cache_evictions = counter("How many answers left the response cache because it was full.")
    response_cache_hit_rate = gauge(
        "Which share of the cacheable requests the response cache answered, 0 to 1, since the start.", over="max"
    )

    cache_backend_type = gauge("Which backend stores the response cache; the value is always 1.", "backend")
    cache_redis_connections_active = gauge("How many connections to Redis the response cache uses now.")
    cache_redis_connections_idle = gauge("How many connections to Redis the response cache has open and idle.")
    cache_redis_latency_seconds = histogram(
        "How long an operation of the response cache in Redis took.", _SCRIPT_BUCKETS, "operation"
    )
    cache_redis_errors = counter("How many operations of the response cache in Redis failed, by type.", "type")
    cache_fallback_active = gauge(
        "Whether the response cache is in memory because Redis is unavailable: 1 or 0.", over="max"
    )

    responses = counter("How many attempts to store a response of `/v1/responses` there were, by outcome.", "outcome")
    responses_stored = gauge(
        "How many responses of `/v1/responses` are stored; a store in Redis counts those of all gateways.", over="max"
    )
    responses_stored_bytes = gauge(
        "How many bytes the stored responses take; a store in Redis counts the bytes of all gateways.", over="max"
    )
    responses_evicted = counter("How many stored responses were deleted before they expired, to make room for others.")
    responses_copied = counter(
        "How many stored responses were copied to MongoDB, and how many attempts failed, by outcome.", "outcome"
    )

    # ---- input from publishers
    frames = counter("How many frames were received, live or by replay.")
    frame_bytes = counter("How many bytes of payload were received, live or by replay.")
    events = counter("How many events were decoded.", "type")
    batches = counter("How many batches were applied.")
    frames_malformed = counter("How many frames were malformed.")
    batches_over_ceiling = counter(
        "How many batches were lost, or read in part, because they were above a ceiling.", "ceiling"
    )
    decode_errors = counter("How many events or payloads could not be decoded, by reason.", "reason")
    events_ignored = counter("How many events were decoded and not applied.", "reason")

    # ---- discovery
    discovery_leader = gauge("Whether this worker discovers engines: 1 or 0.")
    discovery_engines = gauge("How many engines discovery knows, by state: registered or waiting.", "state")
    discovery_requests = counter("How many requests to the API server of Kubernetes ended, by outcome.", "outcome")
    discovery_unregistered = counter("How many publishers discovery unregistered.")

    # ---- order
    gaps = counter("How many gaps there were: batches were missing before a frame, or event_ids before an event.")
    batches_lost = counter("How many missing batches no replay could recover.")
    replays = counter("How many replays ended, by outcome.", "outcome")
    replays_running = gauge("How many replays are running.")
    replays_waiting = gauge("How many streams wait for a place to replay.")
    replay_places_yielded = counter("How many times a replay gave up its place to another stream, by reason.", "reason")
    snapshots = counter("How many snapshots of an engine's cache ended, by outcome.", "outcome")
    restarts = counter("How many times a publisher restarted and began a new life.")
    stale_batches = counter("How many batches were skipped because they had been applied before.")
    lag_seconds = histogram("How long it took from the timestamp of a batch until the batch was applied.", _LAG_BUCKETS)
    last_batch_timestamp_seconds = gauge(
        "When this worker last applied a batch, in Unix time (seconds); 0 before the first batch.", over="max"
    )

    # ---- sources of opaque prefixes, with the names of Continuum Router
    kv_event_received = counter("How many events arrived from each publisher of opaque prefixes.", "backend")
    kv_event_processed = counter("How many events of each publisher of opaque prefixes were applied.", "backend")
    kv_event_dropped = counter(
        "How many events of each publisher of opaque prefixes did not fit into its buffer and were dropped.", "backend"
    )
    kv_consumer_connected = gauge(
        "Whether this worker has a connection to a publisher of opaque prefixes: 1 or 0.", "backend", over="max"
    )
    kv_consumer_reconnects = counter(
        "How many times this worker connected to a publisher of opaque prefixes again.", "backend"
    )

    # ---- tokens
    tokenize_duration_seconds = histogram(
        "How long it took to tokenize a text or messages, by source.", _REQUEST_BUCKETS, "source"
    )
    tokenize_segments = counter(
        "How many text segments were tokenized, by whether the cache had their token ids; a cached text counts once.",
        "known",
    )
    renderings_stopped = counter(
        "How many renderings of a chat template were stopped, by the bound that stopped them.", "reason"
    )
    tokenizers_closed = counter("How many tokenizers were closed to open another: so many are open at most.")
    tokenizers_long_bytes = gauge("How many bytes of long texts are being encoded; they take the most memory.")
    tokenizers_open = gauge("How many tokenizers are open, each in a process of its own.")
    tokenizers_whole = gauge(
        "How many open tokenizers encode each text as a whole, because their segments cannot be cached."
    )
    tokens_cache_bytes = gauge("How many bytes the token cache holds.")

    # ---- the index
    blocks_applied = counter("How many blocks were added to the index or removed from it, by model.", "op", "model")
    apply_duration_seconds = histogram(
        "How long it took to apply the batches of one call to Redis, including the wait for other calls.",
        _REQUEST_BUCKETS,
    )
    script_duration_seconds = histogram(
        "How long a script call took, including the round trip.", _SCRIPT_BUCKETS, "script"
    )
    script_replies = counter("How many script calls were answered, by script and verdict.", "script", "verdict")
    calls_waiting = gauge(
        "How many calls wait because calls in progress already send the maximum number of blocks to Redis."
    )
    index_evictions = counter("How many entries were removed from the index because of a bound, by bound.", "reason")
    known_blocks = gauge("How many blocks the streams of this worker have in memory.")
    known_bytes = gauge(
        "How many bytes of memory the streams' blocks take in this worker, including recently removed blocks."
    )
    waiting_blocks = gauge("How many blocks wait for the block before them.")
    missing_blocks = gauge(
        "How many blocks the publishers of this worker have that are not in the index (an estimate)."
    )
    waiting_dropped = counter("How many blocks were dropped because the block before them did not arrive.")
    copies_contradicted = counter("How many times an engine had another number of copies of a block than was counted.")
    unresolved = counter("How many engine hashes in events named an unknown block.")
    buffer_bytes = gauge("How many bytes of frames wait in the buffers of streams.")
    buffer_frames = gauge("How many frames wait in the buffers of streams.")
    buffer_dropped = counter("How many frames were dropped because the buffer of their stream was full.")
    sweep_blocks = counter("How many times a sweep removed a dead holder from a block.")
    sweeps = counter("How many dead holders were swept completely.")
    dead_holders = gauge("How many dead holders have not been swept yet.", over="max")

    # ---- workers and streams
    workers = gauge("How many ingest workers are alive, as seen by an ingest worker.", over="max")
    publishers = gauge(
        "How many publishers are registered, by the way their events arrive, as seen by an ingest worker.",
        "feed",
        over="max",
    )
    instances = gauge("How many instances are registered, as seen by an ingest worker.", over="max")
    groups = gauge("How many groups have a publisher, as seen by an ingest worker.", over="max")
    streams = gauge("How many streams this worker applies, by status.", "status")
    streams_max = gauge("How many streams this worker can apply within its limit of open files.")
    streams_left = gauge("How many streams no ingest worker has room for, as seen by an ingest worker.", over="max")
    holders = gauge("How many live holders belong to the streams of this worker.")
    leases_taken = counter("How many times this worker took the lease of a stream.")
    takeovers = counter("How many streams this worker took over from another worker that had not released them.")
    publishers_unclaimed = counter("How many publishers without a registration this worker removed.")
    leases_lost = counter("How many times this worker lost the lease of a stream to another worker.")

    gauge_scrapes = counter("How many times this worker read the metrics of an engine, by outcome.", "outcome")

    # ---- the process
    redis_up = gauge("Whether Redis answered the last check of this process: 1 or 0.", over="min")
    publishers_refused = gauge(
        "How many publishers in the publishers file are registered with other values.", over="max"
    )
    records_unreadable = gauge("How many records in Redis this process cannot read, by kind.", "record", over="max")
    redis_errors = counter("How many calls to Redis failed, by reason.", "reason")
    redis_misconfigured = gauge(
        "Whether a Redis that answers is misconfigured, by reason: 1 or 0.", "reason", over="max"
    )
    redis_memory_bytes = gauge("How many bytes each primary of Redis uses.", "primary", over="max")
    redis_memory_max_bytes = gauge(
        "How many bytes each primary of Redis may use; 0 is no limit.", "primary", over="max"
    )
    redis_evicted_keys = gauge(
        "How many keys each primary of Redis has evicted since it started.", "primary", over="max"
    )
    build_info = gauge(
        "Which version and role this process has; the value is always 1.", "version", "python", "role", "native"
    )

    def __init__(self, *, role: str = "none", is_native: bool = False, models_max: int = MODELS_MAX) -> None:
        for row in rows(Metrics):
            vars(self)[row.name] = row.instrument()
        self._models: set[str] = set()
        self._backends: set[str] = set()
        self._models_max = models_max
        self.build_info.labels(
            version=__version__, python=platform.python_version(), role=role, native=str(is_native).lower()
        ).set(1)

    def model(self, name: str) -> str:
        """Return a registered model as a label: its name, or ``other`` if ``models_max`` models have a label
        already.
        """
        return self._label(name, self._models)

    def backend(self, name: str) -> str:
        """Return a registered instance as a label: its name, or ``other`` if ``models_max`` instances have a label
        already.
        """
        return self._label(name, self._backends)

    def _label(self, name: str, labels: set[str]) -> str:
        if name not in labels:
            if len(labels) >= self._models_max:
                return OTHER_MODELS
            labels.add(name)
        return name

    def backends(self, numbers: Iterable[tuple[str, float]]) -> dict[tuple[str, ...], float]:
        """Return the numbers of instances as series, added up by name; those beyond ``models_max`` become ``other``."""
        sums: dict[tuple[str, ...], float] = {}
        for name, number in numbers:
            label = (name,) if (name,) in sums or len(sums) < self._models_max else (OTHER_MODELS,)
            sums[label] = sums.get(label, 0.0) + number
        return sums

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The registry of the Prometheus library."""
        from waymark.base import exposition

        return exposition.registry(self)

    def render(self) -> tuple[bytes, str]:
        """Return the metrics as Prometheus text, and its content type."""
        from waymark.base import exposition

        return exposition.render(self.registry)
