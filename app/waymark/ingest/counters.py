"""The counters in a stream's record, with the metrics that count the same, and the reasons for which it is degraded;
and the gauges of a worker.

The reasons are flags, from which the next worker learns them. Gauges that change between two polls are computed in each
scrape, because they change most while Redis is unavailable and no poll succeeds.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, Protocol, TypeAlias

from waymark.apply.applier import Applier
from waymark.base.instruments import Counter
from waymark.base.metrics import Metrics
from waymark.domain import life_facts
from waymark.domain.names import Registration
from waymark.domain.resolver import Resolver
from waymark.domain.status import StreamStatus
from waymark.ingest.replay_places import ReplayPlaces
from waymark.store.pacing import Pacer

LifeCounter: TypeAlias = Literal[
    "batches_lost", "buffer_dropped", "frames_malformed", "gaps", "holes", "restarts", "stale_batches"
]
"""The counters of a stream of frames, without those that change once in a fold (``apply.counts``)."""

PrefixCounter: TypeAlias = Literal[
    "created", "evicted", "evictions", "events_dropped", "events_received", "frames_malformed", "reconnects"
]
"""The counters of a stream of prefixes."""

PrefixCounterByReason: TypeAlias = Literal["decode_errors", "events_ignored"]
"""The counters of a stream of prefixes whose names end with a dot and a reason."""


def metrics_of_life(metrics: Metrics) -> dict[LifeCounter, Counter | None]:
    """Return the metric of each counter, or None if only the record has the count."""
    return {
        "batches_lost": metrics.batches_lost,
        "buffer_dropped": metrics.buffer_dropped,
        "frames_malformed": metrics.frames_malformed,
        "gaps": metrics.gaps,
        "holes": None,
        "restarts": metrics.restarts,
        "stale_batches": metrics.stale_batches,
    }


EVENTS_MISSING = life_facts.EVENTS_MISSING
COPIES_DOUBTED = life_facts.COPIES_DOUBTED
JOINED_LATE = "joined_late"
BATCHES_LOST = "batches_lost"
OVER_CEILING = "over_ceiling"
REPLAY_SILENT = "replay_silent"
REPLAY_INCOMPLETE = "replay_incomplete"
REPLAY_WAITING = "replay_waiting"
BUFFER_FULL = "buffer_full"
SNAPSHOT_FAILED = "snapshot_failed"

#: The reasons that no longer apply after a snapshot of the engine's cache.
REPAIRABLE = frozenset({JOINED_LATE, BATCHES_LOST, OVER_CEILING, BUFFER_FULL, COPIES_DOUBTED})

#: A flag of a life that began before a replay was answered. The seq of its first live frame follows.
OPENED_AT = "opened_at:"
#: A flag of a life with a gap for which no replay was answered. The seq of the first frame after the gap follows.
GAP_AT = "gap_at:"
#: A flag of the same life, with the seq of the first missing frame. A replay from there on fills the gap.
GAP_FROM = "gap_from:"
#: A flag of a life that had lost other batches before its gap.
LOST_BEFORE = "lost_before"
#: A flag of a life whose lost batches have all arrived later. Its counts of copies are still not trusted.
FILLED = "filled"

#: The sentences of the reasons for which a stream is degraded.
REASONS = {
    JOINED_LATE: "this life began before the first batch that the publisher can replay",
    BATCHES_LOST: "batches of this life were lost and cannot be replayed",
    EVENTS_MISSING: "event_ids of this life are missing: the publisher left events out of its batches",
    OVER_CEILING: "a batch of this life was above a ceiling and was not read",
    REPLAY_SILENT: "the replay endpoint does not answer",
    REPLAY_INCOMPLETE: "the last replay ended early",
    REPLAY_WAITING: "this stream waits for a place to replay; live frames are applied meanwhile",
    COPIES_DOUBTED: "copies of blocks were counted by a rule that the events of the engine contradict",
    SNAPSHOT_FAILED: "no snapshot of the engine's cache could be had; it is asked for again",
    BUFFER_FULL: "frames were dropped that no replay can recover: WAYMARK_STREAM_BUFFER_BYTES was reached",
}


def seq_in(flags: frozenset[str], name: str) -> int | None:
    """Return the seq in the flag ``name``, such as ``OPENED_AT``, or None if it is not set."""
    return next((int(flag.removeprefix(name)) for flag in flags if flag.startswith(name)), None)


class Opening:
    """The batches of a life that a replay may still bring, because none was answered completely: the first ones, or
    those of a gap.
    """

    def __init__(self, flags: frozenset[str], first_seq: int) -> None:
        self._first_seq = first_seq
        self.opened_at = seq_in(flags, OPENED_AT)
        """The seq of the first live frame, if the life began with it; else None."""
        self.gap_at = seq_in(flags, GAP_AT)
        """The first seq after the first gap; None if there is no gap."""
        self.gap_from = None if self.gap_at is None else seq_in(flags, GAP_FROM)
        """The first missing seq of that gap, if all batches from there on fill it."""

    @property
    def is_open(self) -> bool:
        return self.opened_at is not None or self.gap_at is not None

    def has_beginning(self, seq: int) -> bool:
        """Return whether a replay that begins at ``seq`` has the missing beginning: batches before the first live
        frame, or, if only a gap is open, the whole life.
        """
        return seq <= self._first_seq if self.opened_at is None else seq < self.opened_at

    def has_gap(self, seq: int) -> bool:
        """Return whether a replay that begins at ``seq`` may have all batches of the gap, though not the beginning."""
        return self.gap_from is not None and seq <= self.gap_from and not self.has_beginning(seq)

    def open_gap(self, seq: int, last_seq: int | None, *, had_losses: bool) -> list[str]:
        """Note the gap between two batches, and return the flags for the record."""
        self.gap_at, flags = seq, [f"{GAP_AT}{seq}"]
        if last_seq is not None:
            self.gap_from = last_seq + 1
            flags += [f"{GAP_FROM}{self.gap_from}", *[LOST_BEFORE] * had_losses]
        return flags

    def close(self, flags: set[str]) -> None:
        """Note, also in the flags of the life, that no missing batch can come any more."""
        flags -= {flag for flag in flags if flag.startswith((OPENED_AT, GAP_AT, GAP_FROM))}
        self.opened_at = self.gap_at = self.gap_from = None


class ServedStream(Protocol):
    """A stream that a worker applies: frames of a socket, or an event stream over HTTP."""

    @property
    def status(self) -> StreamStatus: ...

    @property
    def applier(self) -> Applier:
        """The current applier; a snapshot replaces it."""

    @property
    def buffered(self) -> tuple[int, int]:
        """(bytes, frames or events) that were received and are not applied yet."""

    async def run(self) -> None:
        """Run until cancelled, or until another worker has the stream."""

    def wake(self) -> None:
        """Wake ``run`` if it waits for events."""


ServedPair = tuple[ServedStream, Resolver]


class WorkerGauges:
    """The gauges of one worker. ``streams`` returns the streams that the worker applies now."""

    def __init__(
        self,
        metrics: Metrics,
        streams: Callable[[], Iterable[ServedPair]],
        places: ReplayPlaces,
        pacer: Pacer,
        *,
        streams_max: int,
        statuses: Sequence[str],
    ) -> None:
        self._metrics = metrics
        self._streams = streams
        self._registrations: Sequence[Registration] | None = None
        """The list in the last call of ``saw``."""
        metrics.buffer_bytes.set_function(partial(self._sum, lambda stream, _: stream.buffered[0]))
        metrics.buffer_frames.set_function(partial(self._sum, lambda stream, _: stream.buffered[1]))
        metrics.waiting_blocks.set_function(partial(self._sum, lambda _, resolver: resolver.waiting.blocks))
        metrics.missing_blocks.set_function(partial(self._sum, lambda _, resolver: resolver.unknown))
        metrics.known_blocks.set_function(partial(self._sum, lambda _, resolver: resolver.memory.blocks))
        metrics.known_bytes.set_function(partial(self._sum, lambda _, resolver: resolver.memory.bytes))
        metrics.holders.set_function(partial(self._sum, lambda _, resolver: len(resolver.holders)))
        metrics.streams_max.set(streams_max)
        metrics.calls_waiting.set_function(lambda: pacer.waiting)
        metrics.replays_running.set_function(lambda: places.running)
        metrics.replays_waiting.set_function(lambda: places.waiting)
        for status in statuses:
            metrics.streams.labels(status=status).set_function(partial(self._count, status))

    def saw(self, workers: Sequence[str], registrations: Sequence[Registration]) -> None:
        """Set the gauges for the results of a poll, which are the same for every worker."""
        metrics = self._metrics
        metrics.workers.set(len(workers))
        if registrations is self._registrations:
            return
        self._registrations = registrations
        feeds = collections.Counter(
            "http" if registration.endpoint is None else "socket" for registration in registrations
        )
        for feed in ("http", "socket"):
            metrics.publishers.labels(feed=feed).set(feeds[feed])
        metrics.instances.set(
            len({(registration.tenant_id, registration.instance_id) for registration in registrations})
        )
        metrics.groups.set(len({registration.group for registration in registrations}))

    def _sum(self, number: Callable[[ServedStream, Resolver], int]) -> int:
        return sum(number(stream, resolver) for stream, resolver in self._streams())

    def _count(self, status: str) -> int:
        return sum(stream.status == status for stream, _ in self._streams())
