"""The gauges of a worker.

Values that change between two polls are computed in each scrape, because they change most while Redis is unavailable
and no poll succeeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from waymark.apply.applier import Applier
from waymark.base.metrics import Metrics
from waymark.domain.names import Registration
from waymark.domain.resolver import Resolver
from waymark.domain.status import StreamStatus
from waymark.ingest.replay_places import ReplayPlaces
from waymark.store.pacing import Pacer


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
        feeds = Counter("http" if registration.endpoint is None else "socket" for registration in registrations)
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
