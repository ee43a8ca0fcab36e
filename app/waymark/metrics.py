"""Every metric, as one table.

A line is a metric: its name (without ``waymark_`` and ``_total``), kind, help and labels. A name or a label that is not
in the table is an error wherever it is counted. Names and labels are an API for
dashboards: ``tests/test_metrics.py`` holds the list, ``docs/operations.md`` says how each is added up over processes.
Labels are bounded: a matched route, never a path; a status, a kind, a reason, never an instance, a holder, a hash, a
tenant or an endpoint. A model is one only where it is registered, and only up to a ceiling.

Each ``Metrics`` owns its registry, so several roles in one process, or several tests, do not meet. It does no I/O;
``render`` is what ``GET /metrics`` answers.
"""

from __future__ import annotations

import platform

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from waymark import __version__
from waymark.instruments import Exposition, counter, gauge, histogram, rows, table

# In seconds. Literals: 100 * 1e-6 would be exported as 9.999999999999999e-05.
_REQUEST_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_SCRIPT_BUCKETS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# In blocks; the longest prompt that is read has 2,097,152 tokens.
_BLOCK_BUCKETS = (0.0, 1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0)
_ROUND_TRIP_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)

#: The label of models beyond the ceiling, and of queries for a model that nobody has registered.
OTHER_MODELS, NO_MODEL = "other", "none"


@table
class Metrics:
    """The metrics of one process; all are zero until something happens.

    ``role`` is the process's command, ``is_native`` whether its C is in use, ``models_max`` how many models have a
    label of their own.
    """

    # ---- the HTTP API
    http_requests = counter("How many HTTP requests were answered.", "route", "method", "status")
    http_request_duration_seconds = histogram("How long an HTTP request took.", _REQUEST_BUCKETS, "route")
    http_connections = gauge("How many HTTP connections are open.")
    http_connections_cut = counter("How many HTTP connections were cut before their time, by why.", "reason")
    http_trailer_fields_dropped = counter("How many fields behind the body of a request were dropped.")
    http_bodies_bytes = gauge("How many bytes of request bodies are held.")

    # ---- queries
    queries = counter("How many queries were answered, by registered model and by what was found.", "model", "result")
    query_blocks = histogram("How many complete blocks a query asked about.", _BLOCK_BUCKETS)
    query_matched_blocks = histogram("How many blocks the best instance of a query already had.", _BLOCK_BUCKETS)
    query_looked_up_blocks = counter("How many blocks queries looked up, in Redis or among the hot ones.")
    hot_block_hits = counter("How many of the blocks that queries looked up were at hand, as hot ones.")
    hot_block_bytes = gauge("How many bytes of hot blocks are kept.")
    answer_cache_hits = counter("How many answers had been counted for the same blocks.")
    answer_cache_bytes = gauge("How many bytes of answers are remembered.")
    text_cache_hits = counter("How many queries said the same as one before them, but for the prompt.")
    text_cache_bytes = gauge("How many bytes of texts of queries are remembered.")
    query_round_trips = histogram("How many times a query waited for Redis.", _ROUND_TRIP_BUCKETS)
    fetch_duration_seconds = histogram("How long a query waited for Redis, each time.", _SCRIPT_BUCKETS)
    query_partial = counter("How many queries were answered at their deadline with what was found by then.")

    # ---- what publishers send
    frames = counter("How many frames were received, live or by replay.")
    frame_bytes = counter("How many bytes of payload were received, live or by replay.")
    events = counter("How many events were decoded.", "type")
    batches = counter("How many batches were applied.")
    frames_malformed = counter("How many frames did not have the form of a frame.")
    batches_over_ceiling = counter("How many batches were lost, or read in part, because of a ceiling.", "ceiling")
    decode_errors = counter("How many events or payloads could not be decoded.", "kind")
    events_ignored = counter("How many events were understood and not applied.", "reason")

    # ---- order
    gaps = counter("How many times a frame came with batches missing before it.")
    batches_lost = counter("How many missing batches could not be had again.")
    replays = counter("How many replays ended, by how they ended.", "outcome")
    replays_running = gauge("How many replays run now.")
    replays_waiting = gauge("How many streams wait for a place to replay.")
    replay_places_yielded = counter("How many times a replay gave its place to another stream, by why.", "reason")
    restarts = counter("How many times a publisher began a new life.")
    stale_batches = counter("How many batches had been applied before.")
    lag_seconds = histogram("How long it took from a batch's own time until it was applied.", _LAG_BUCKETS)
    last_batch_timestamp_seconds = gauge(
        "Which Unix time it was when a batch was last applied; 0 before the first.", over="max"
    )

    # ---- the index
    blocks_applied = counter("How many blocks were added to or taken from the index, by model.", "op", "model")
    apply_duration_seconds = histogram("How long it took Redis to apply what was sent to it at once.", _REQUEST_BUCKETS)
    script_duration_seconds = histogram(
        "How long a call of a script took, the way there and back included.", _SCRIPT_BUCKETS, "script"
    )
    script_replies = counter("How many calls of scripts were answered, by script and verdict.", "script", "verdict")
    calls_waiting = gauge("How many calls wait until the blocks under way leave room for them.")
    waiting_blocks = gauge("How many blocks wait for their parent.")
    waiting_dropped = counter("How many blocks were dropped while they waited for their parent.")
    unresolved = counter("How many engine hashes of events named no block that is known.")
    buffer_bytes = gauge("How many bytes of frames wait in streams' buffers.")
    buffer_frames = gauge("How many frames wait in streams' buffers.")
    buffer_dropped = counter("How many frames did not fit into a stream's buffer and became a gap.")
    sweep_blocks = counter("How many blocks a dead holder was taken out of.")
    sweeps = counter("How many dead holders were swept to their end.")
    dead_holders = gauge("How many dead holders are still to be swept.", over="max")

    # ---- who does what
    workers = gauge("How many ingest workers are alive, as an ingest worker sees it.", over="max")
    publishers = gauge(
        "How many publishers are registered, by how they tell, as an ingest worker sees it.", "feed", over="max"
    )
    instances = gauge("How many instances are registered, as an ingest worker sees it.", over="max")
    groups = gauge("How many groups have a publisher, as an ingest worker sees it.", over="max")
    streams = gauge("How many streams this worker has, by status.", "status")
    streams_max = gauge("How many streams this worker takes at most, by its limit of open files.")
    streams_left = gauge("How many streams no ingest worker has room for, as an ingest worker sees it.", over="max")
    holders = gauge("How many live holders the streams of this worker have.")
    leases_taken = counter("How many times this worker took the lease of a stream.")
    leases_lost = counter("How many times a stream of this worker turned out to be another's.")

    # ---- the process
    redis_up = gauge("Whether Redis answered when last asked: 1 or 0.", over="min")
    publishers_refused = gauge("How many publishers of the file are registered otherwise than it says.", over="max")
    records_unreadable = gauge(
        "How many records in Redis this process cannot read, by what they are.", "kind", over="max"
    )
    redis_errors = counter("How many times Redis did not answer as it should, by how.", "kind")
    redis_misconfigured = gauge(
        "Whether something is wrong with a Redis that answers, by what: 1 or 0.", "reason", over="max"
    )
    redis_memory_bytes = gauge("How many bytes each primary of Redis uses.", "primary", over="max")
    redis_memory_max_bytes = gauge(
        "How many bytes each primary of Redis may use; 0 is no limit.", "primary", over="max"
    )
    redis_evicted_keys = gauge(
        "How many keys each primary of Redis has evicted since it started.", "primary", over="max"
    )
    build_info = gauge(
        "Which version runs, and as what; the value is always 1.",
        "version",
        "python",
        "role",
        "native",
    )

    def __init__(self, *, role: str = "none", is_native: bool = False, models_max: int = 100) -> None:
        for row in rows(Metrics):
            vars(self)[row.name] = row.instrument()
        self._models: set[str] = set()
        self._models_max = models_max
        self.registry = CollectorRegistry()
        self.registry.register(Exposition(self))
        ProcessCollector(registry=self.registry)
        self.build_info.labels(
            version=__version__, python=platform.python_version(), role=role, native=str(is_native).lower()
        ).set(1)

    def model(self, name: str) -> str:
        """A registered model as a label: its name, or ``other`` where as many as may be have one already."""
        if name not in self._models:
            if len(self._models) >= self._models_max:
                return OTHER_MODELS
            self._models.add(name)
        return name

    @staticmethod
    def markdown_table() -> str:
        """Every metric in a line: what it is, and how those of several processes make one number."""
        lines = ["| Metric | Labels | Over processes | What it is |", "|---|---|---|---|"]
        for row in rows(Metrics):
            labels = ", ".join(f"`{label}`" for label in row.labels)
            lines.append(f"| `{row.full_name}` | {labels} | {row.over} | {row.help} |")
        return "\n".join(lines)

    def render(self) -> tuple[bytes, str]:
        """The metrics as Prometheus text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
