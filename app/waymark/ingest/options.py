"""The options of an ingest worker, except those of each stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from waymark.apply.options import ApplyOptions
from waymark.domain.names import Registration
from waymark.ingest.stream import StreamOptions

#: The seconds between two polls of a worker, at most.
_POLL_SECONDS = 2.0
#: The replays that a worker runs at once. Each holds unapplied batches in memory, and all of them share one core. If
#: more are needed at once, another worker takes half of the streams, and runs as many.
REPLAYS_MAX = 8


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker, under the names of the settings."""

    worker_id: str
    stream: StreamOptions
    apply: ApplyOptions = field(default_factory=ApplyOptions)
    replays_max: int = REPLAYS_MAX
    sweep_blocks_per_second: int = 20_000
    streams_max: int = 4096
    gauges_seconds: float = 0.0
    """How often the metrics of each engine are read; 0: never."""
    allowed_endpoints: Sequence[str] = ()
    publishers: Sequence[Registration] = ()
    """The registrations in the publishers file."""

    @property
    def poll_seconds(self) -> float:
        """The pause between two polls. Several polls fit into a lease, so that no live worker seems dead."""
        return min(_POLL_SECONDS, self.stream.lease_seconds / 8)
