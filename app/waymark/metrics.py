"""Every metric, declared once.

An attribute is called as its metric, without ``waymark_`` and without ``_total``. Names and labels are an API for
dashboards: ``tests/test_metrics.py`` holds the list, ``docs/operations.md`` says how each is added up over processes.
Labels are bounded: a matched route, never a path; a status, a kind, a reason, never an instance, a holder, a hash, a
tenant or an endpoint. A model is one only where it is registered, and only up to a ceiling.

Each ``Metrics`` owns its registry, so several roles in one process, or several tests, do not meet. It does no I/O;
``render`` is what ``GET /metrics`` answers.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.samples import Sample

from waymark import __version__

# Without this every counter comes with a second series that says when the process began.
disable_created_metrics()  # type: ignore[no-untyped-call]

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


class _Counter(Counter):
    """The library's, which takes a lock for each number.

    A query counts some ten times, always in the loop's thread. So numbers are only added up here, and told to the
    library when it is asked for them.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._total = 0.0

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount < 0:
            raise ValueError(f"a counter only rises, and {amount:g} is less than 0")
        self._total += amount

    def _child_samples(self) -> Iterable[Sample]:
        self._value.set(self._total)
        return super()._child_samples()


class _Histogram(Histogram):
    """As ``_Counter``; the library's also looks at one bucket after the other."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._seen = [0] * len(self._upper_bounds)
        self._total = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._total += amount
        self._seen[bisect_left(self._upper_bounds, amount)] += 1

    def _child_samples(self) -> Iterable[Sample]:
        self._sum.set(self._total)
        for bucket, seen in zip(self._buckets, self._seen, strict=True):
            bucket.set(seen)
        return super()._child_samples()


class Metrics:
    """The metrics of one process; all are zero until something happens.

    ``role`` is the process's command, ``is_native`` whether its C is in use, ``models_max`` how many models have a
    label of their own.
    """

    def __init__(self, *, role: str = "none", is_native: bool = False, models_max: int = 100) -> None:
        self.over: dict[str, str] = {}
        """How the gauges of several processes make one number; counters and histograms are summed."""
        self._models: set[str] = set()
        self._models_max = models_max
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)

        def counter(name: str, sentence: str, *labels: str) -> Counter:
            return _Counter(f"waymark_{name}", sentence, labels, registry=self.registry)

        def gauge(name: str, sentence: str, *labels: str, over: Literal["sum", "max", "min"] = "sum") -> Gauge:
            self.over[name] = over
            return Gauge(f"waymark_{name}", sentence, labels, registry=self.registry)

        def histogram(name: str, sentence: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return _Histogram(f"waymark_{name}", sentence, labels, buckets=buckets, registry=self.registry)

        # ---- the HTTP API
        self.http_requests = counter(
            "http_requests", "How many HTTP requests were answered.", "route", "method", "status"
        )
        self.http_request_duration_seconds = histogram(
            "http_request_duration_seconds", "How long an HTTP request took.", _REQUEST_BUCKETS, "route"
        )
        self.http_connections = gauge("http_connections", "How many HTTP connections are open.")
        self.http_connections_cut = counter(
            "http_connections_cut", "How many HTTP connections were cut before their time, by why.", "reason"
        )
        self.http_trailer_fields_dropped = counter(
            "http_trailer_fields_dropped", "How many fields behind the body of a request were dropped."
        )
        self.http_bodies_bytes = gauge("http_bodies_bytes", "How many bytes of request bodies are held.")

        # ---- queries
        self.queries = counter(
            "queries", "How many queries were answered, by registered model and by what was found.", "model", "result"
        )
        self.query_blocks = histogram("query_blocks", "How many complete blocks a query asked about.", _BLOCK_BUCKETS)
        self.query_matched_blocks = histogram(
            "query_matched_blocks", "How many blocks the best instance of a query already had.", _BLOCK_BUCKETS
        )
        self.query_looked_up_blocks = counter(
            "query_looked_up_blocks", "How many blocks queries looked up, in Redis or among the hot ones."
        )
        self.hot_block_hits = counter(
            "hot_block_hits", "How many of the blocks that queries looked up were at hand, as hot ones."
        )
        self.hot_block_bytes = gauge("hot_block_bytes", "How many bytes of hot blocks are kept.")
        self.answer_cache_hits = counter("answer_cache_hits", "How many answers had been counted for the same blocks.")
        self.answer_cache_bytes = gauge("answer_cache_bytes", "How many bytes of answers are remembered.")
        self.text_cache_hits = counter(
            "text_cache_hits", "How many queries said the same as one before them, but for the prompt."
        )
        self.text_cache_bytes = gauge("text_cache_bytes", "How many bytes of texts of queries are remembered.")
        self.query_round_trips = histogram(
            "query_round_trips", "How many times a query waited for Redis.", _ROUND_TRIP_BUCKETS
        )
        self.fetch_duration_seconds = histogram(
            "fetch_duration_seconds", "How long a query waited for Redis, each time.", _SCRIPT_BUCKETS
        )
        self.query_partial = counter(
            "query_partial", "How many queries were answered at their deadline with what was found by then."
        )

        # ---- what publishers send
        self.frames = counter("frames", "How many frames were received, live or by replay.")
        self.frame_bytes = counter("frame_bytes", "How many bytes of payload were received, live or by replay.")
        self.events = counter("events", "How many events were decoded.", "type")
        self.batches = counter("batches", "How many batches were applied.")
        self.frames_malformed = counter("frames_malformed", "How many frames did not have the form of a frame.")
        self.decode_errors = counter("decode_errors", "How many events or payloads could not be decoded.", "kind")
        self.events_ignored = counter("events_ignored", "How many events were understood and not applied.", "reason")

        # ---- order
        self.gaps = counter("gaps", "How many times a frame came with batches missing before it.")
        self.batches_lost = counter("batches_lost", "How many missing batches could not be had again.")
        self.replays = counter("replays", "How many replays ended, by how they ended.", "outcome")
        self.replays_running = gauge("replays_running", "How many replays run now.")
        self.replays_waiting = gauge("replays_waiting", "How many streams wait for a place to replay.")
        self.replay_places_yielded = counter(
            "replay_places_yielded", "How many times a replay gave its place to another stream, by why.", "reason"
        )
        self.restarts = counter("restarts", "How many times a publisher began a new life.")
        self.stale_batches = counter("stale_batches", "How many batches had been applied before.")
        self.lag_seconds = histogram(
            "lag_seconds", "How long it took from a batch's own time until it was applied.", _LAG_BUCKETS
        )
        self.last_batch_timestamp_seconds = gauge(
            "last_batch_timestamp_seconds",
            "Which Unix time it was when a batch was last applied; 0 before the first.",
            over="max",
        )

        # ---- the index
        self.blocks_applied = counter(
            "blocks_applied", "How many blocks were added to or taken from the index, by model.", "op", "model"
        )
        self.apply_duration_seconds = histogram(
            "apply_duration_seconds", "How long it took Redis to apply what was sent to it at once.", _REQUEST_BUCKETS
        )
        self.script_duration_seconds = histogram(
            "script_duration_seconds", "How long a call of a script took, the way there and back included.",
            _SCRIPT_BUCKETS, "script",
        )  # fmt: skip
        self.script_replies = counter(
            "script_replies", "How many calls of scripts were answered, by script and verdict.", "script", "verdict"
        )
        self.waiting_blocks = gauge("waiting_blocks", "How many blocks wait for their parent.")
        self.waiting_dropped = counter(
            "waiting_dropped", "How many blocks were dropped while they waited for their parent."
        )
        self.unresolved = counter("unresolved", "How many engine hashes of events named no block that is known.")
        self.buffer_bytes = gauge("buffer_bytes", "How many bytes of frames wait in streams' buffers.")
        self.buffer_frames = gauge("buffer_frames", "How many frames wait in streams' buffers.")
        self.buffer_dropped = counter(
            "buffer_dropped", "How many frames did not fit into a stream's buffer and became a gap."
        )
        self.sweep_blocks = counter("sweep_blocks", "How many blocks a dead holder was taken out of.")
        self.sweeps = counter("sweeps", "How many dead holders were swept to their end.")
        self.dead_holders = gauge("dead_holders", "How many dead holders are still to be swept.", over="max")

        # ---- who does what
        self.workers = gauge("workers", "How many ingest workers are alive, as an ingest worker sees it.", over="max")
        self.publishers = gauge(
            "publishers",
            "How many publishers are registered, by how they tell, as an ingest worker sees it.",
            "feed",
            over="max",
        )
        self.instances = gauge(
            "instances", "How many instances are registered, as an ingest worker sees it.", over="max"
        )
        self.groups = gauge("groups", "How many groups have a publisher, as an ingest worker sees it.", over="max")
        self.streams = gauge("streams", "How many streams this worker has, by status.", "status")
        self.streams_max = gauge(
            "streams_max", "How many streams this worker takes at most, by its limit of open files."
        )
        self.streams_left = gauge(
            "streams_left",
            "How many streams no ingest worker has room for, as an ingest worker sees it.",
            over="max",
        )
        self.holders = gauge("holders", "How many live holders the streams of this worker have.")
        self.leases_taken = counter("leases_taken", "How many times this worker took the lease of a stream.")
        self.leases_lost = counter("leases_lost", "How many times a stream of this worker turned out to be another's.")

        # ---- the process
        self.redis_up = gauge("redis_up", "Whether Redis answered when last asked: 1 or 0.", over="min")
        self.publishers_refused = gauge(
            "publishers_refused", "How many publishers of the file are registered otherwise than it says.", over="max"
        )
        self.records_unreadable = gauge(
            "records_unreadable",
            "How many records in Redis this process cannot read, by what they are.",
            "kind",
            over="max",
        )
        self.redis_errors = counter("redis_errors", "How many times Redis did not answer as it should, by how.", "kind")
        self.redis_misconfigured = gauge(
            "redis_misconfigured",
            "Whether something is wrong with a Redis that answers, by what: 1 or 0.",
            "reason",
            over="max",
        )
        self.redis_memory_bytes = gauge(
            "redis_memory_bytes", "How many bytes each primary of Redis uses.", "primary", over="max"
        )
        self.redis_memory_max_bytes = gauge(
            "redis_memory_max_bytes",
            "How many bytes each primary of Redis may use; 0 is no limit.",
            "primary",
            over="max",
        )
        self.redis_evicted_keys = gauge(
            "redis_evicted_keys",
            "How many keys each primary of Redis has evicted since it started.",
            "primary",
            over="max",
        )
        self.build_info = gauge(
            "build_info",
            "Which version runs, and as what; the value is always 1.",
            "version",
            "python",
            "role",
            "native",
        )
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

    def markdown_table(self) -> str:
        """Every metric in a line: what it is, and how those of several processes make one number."""
        lines = ["| Metric | Labels | Over processes | What it is |", "|---|---|---|---|"]
        for metric in vars(self).values():
            if isinstance(metric, (Counter, Gauge, Histogram)):
                (family,) = metric.describe()
                name = family.name.removeprefix("waymark_")
                full = f"waymark_{name}" + ("_total" if family.type == "counter" else "")
                labels = ", ".join(f"`{label}`" for label in metric._labelnames)
                lines.append(f"| `{full}` | {labels} | {self.over.get(name, 'sum')} | {family.documentation} |")
        return "\n".join(lines)

    def render(self) -> tuple[bytes, str]:
        """The metrics as Prometheus text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
