"""The counters of a stream: those in its record, and the metrics with the same counts in this process."""

from __future__ import annotations

from typing import Literal, TypeAlias

from waymark.base.instruments import Counter
from waymark.base.metrics import Metrics

LifeCounter: TypeAlias = Literal[
    "batches_lost", "buffer_dropped", "frames_malformed", "gaps", "holes", "restarts", "stale_batches"
]
"""The counters of a stream of frames that change one by one. A fold's are in ``apply.counts``."""

PrefixCounter: TypeAlias = Literal[
    "created", "evicted", "evictions", "events_dropped", "events_received", "frames_malformed", "reconnects"
]
"""The counters of a stream of prefixes."""

PrefixCounterByReason: TypeAlias = Literal["decode_errors", "events_ignored"]
"""The counters of a stream of prefixes with a reason after a dot."""


def metrics_of_life(metrics: Metrics) -> dict[LifeCounter, Counter | None]:
    """Return the metric of each counter; None if the record alone has the count."""
    return {
        "batches_lost": metrics.batches_lost,
        "buffer_dropped": metrics.buffer_dropped,
        "frames_malformed": metrics.frames_malformed,
        "gaps": metrics.gaps,
        "holes": None,
        "restarts": metrics.restarts,
        "stale_batches": metrics.stale_batches,
    }
