"""Every metric, declared once.

An attribute is called as its metric, without ``waymark_`` and without ``_total``. Names and labels are an API for
dashboards: ``tests/test_metrics.py`` holds the list. Labels are bounded: a matched route, never a path; a status, a
kind, a reason, never an instance, a holder, a hash, a tenant or an endpoint.

Each ``Metrics`` owns its registry, so several roles in one process, or several tests, do not meet. It does no I/O;
``render`` is what ``GET /metrics`` answers.
"""

from __future__ import annotations

import platform

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

from app import __version__

# Without this every counter comes with a second series that says when the process began.
disable_created_metrics()  # type: ignore[no-untyped-call]

# In seconds. Literals: 100 * 1e-6 would be exported as 9.999999999999999e-05.
_REQUEST_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The metrics of one process; all are zero until something happens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)

        def counter(name: str, sentence: str, *labels: str) -> Counter:
            return Counter(f"waymark_{name}", sentence, labels, registry=self.registry)

        def gauge(name: str, sentence: str, *labels: str) -> Gauge:
            return Gauge(f"waymark_{name}", sentence, labels, registry=self.registry)

        def histogram(name: str, sentence: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"waymark_{name}", sentence, labels, buckets=buckets, registry=self.registry)

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

        # ---- queries
        self.query_blocks = counter("query_blocks", "How many complete blocks queries asked about.")
        self.query_matched_blocks = counter(
            "query_matched_blocks", "How many blocks the best instance of each query already had."
        )
        self.query_round_trips = counter("query_round_trips", "How many times queries waited for Redis.")
        self.query_partial = counter(
            "query_partial", "How many queries were answered at their deadline with what was found by then."
        )

        # ---- what publishers send
        self.events = counter("events", "How many events were decoded.", "type")
        self.batches = counter("batches", "How many batches were applied.")
        self.frames_malformed = counter("frames_malformed", "How many frames did not have the form of a frame.")
        self.decode_errors = counter("decode_errors", "How many events or payloads could not be decoded.", "kind")
        self.events_ignored = counter("events_ignored", "How many events were understood and not applied.", "reason")

        # ---- order
        self.gaps = counter("gaps", "How many times a frame came with batches missing before it.")
        self.batches_lost = counter("batches_lost", "How many missing batches could not be had again.")
        self.replays = counter("replays", "How many replays ended, by how they ended.", "outcome")
        self.restarts = counter("restarts", "How many times a publisher began a new life.")
        self.stale_batches = counter("stale_batches", "How many batches had been applied before.")
        self.lag_seconds = histogram(
            "lag_seconds", "How long it took from a batch's own time until it was applied.", _LAG_BUCKETS
        )

        # ---- the index
        self.blocks_applied = counter("blocks_applied", "How many blocks were added to or taken from the index.", "op")
        self.apply_duration_seconds = histogram(
            "apply_duration_seconds", "How long it took Redis to apply what was sent to it at once.", _REQUEST_BUCKETS
        )
        self.streams = gauge("streams", "How many streams this worker has, by status.", "status")
        self.waiting_blocks = gauge("waiting_blocks", "How many blocks wait for their parent.")
        self.waiting_dropped = counter(
            "waiting_dropped", "How many blocks were dropped while they waited for their parent."
        )
        self.unresolved = counter("unresolved", "How many engine hashes of events named no block that is known.")
        self.buffer_dropped = counter(
            "buffer_dropped", "How many frames did not fit into a stream's buffer and became a gap."
        )
        self.sweep_blocks = counter("sweep_blocks", "How many blocks a dead holder was taken out of.")
        self.dead_holders = gauge("dead_holders", "How many dead holders are still to be swept.")

        # ---- the process
        self.redis_up = gauge("redis_up", "Whether Redis answered when last asked: 1 or 0.")
        self.build_info = gauge("build_info", "Which version runs; the value is always 1.", "version", "python")
        self.build_info.labels(version=__version__, python=platform.python_version()).set(1)

    def render(self) -> tuple[bytes, str]:
        """The metrics as Prometheus text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
