"""The options of an ingest worker, and of each of its streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from waymark.apply.options import ApplyOptions
from waymark.base.record import record
from waymark.domain.names import Registration
from waymark.ingest.sockets import MESSAGE_BYTES_MAX

#: The most seconds between two polls of a worker.
_POLL_SECONDS = 2.0
#: The number of replays that a worker runs at once. Each holds unapplied batches in memory, and all share one core. If
#: more are needed at once, another worker takes half of the streams, and runs as many.
REPLAYS_MAX = 8

BYTES_PER_SECOND_MIN = 16_384
"""A slower replay lets a waiting stream replay first. On a working network every replay is faster, unless it has almost
stopped.
"""

REPLAY_IDLE_SECONDS = 2.0
"""How long to wait for the next message of a replay. An engine sends its replies one right after the other, so after a
longer pause it has stopped or is overloaded, and the rest is requested again.
"""

REPLAY_SECONDS = 600.0
"""The time limit of one replay. A slow replay lets others go first, and one that stops ends sooner, so this limit is
for a replay that would never end.
"""

FOLD_BATCHES = 64
"""How many waiting frames are applied together. The number of blocks in a call to Redis has its own bound, so queries
do not wait longer.
"""


@record(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream, under the names of the settings if they are settings."""

    on_gap: Literal["keep", "reset"] = "keep"
    probe_seconds: float = 30.0
    replay_idle_seconds: float = REPLAY_IDLE_SECONDS
    replay_seconds: float = REPLAY_SECONDS
    replay_bytes_per_second_min: int = BYTES_PER_SECOND_MIN
    publisher_timeout: float = 60.0
    lease_seconds: float = 8.0
    stream_buffer_bytes: int = 64 * 2**20
    stream_buffer_frames: int = 20_000
    fold_batches: int = FOLD_BATCHES
    message_bytes_max: int = MESSAGE_BYTES_MAX
    snapshot_answer_seconds: float = 30.0
    snapshot_seconds: float = 120.0
    snapshot_pause_seconds: float = 60.0


@record(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker, under the names of the settings."""

    worker_id: str
    stream: StreamOptions
    apply: ApplyOptions = field(default_factory=ApplyOptions)
    replays_max: int = REPLAYS_MAX
    sweep_blocks_per_second: int = 30_000
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
