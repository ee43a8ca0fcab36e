"""An ingest worker: its capacity, its tasks, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from typing import NamedTuple

import zmq

from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.ingest.options import WorkerOptions
from waymark.ingest.polling import Poller
from waymark.ingest.replay_places import ReplayPlaces
from waymark.ingest.running import StreamRunner
from waymark.ingest.scraping import Scraper
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.sweeping import Overdue, keep_sweeping, keep_valuing
from waymark.store.store import Store

log = logging.getLogger(__name__)


# How many streams the limit of open files of this process allows.
#
# libzmq uses one descriptor for each socket to wake its owner, and one for each connection. Without free descriptors a
# stream cannot connect, a replay cannot be requested and Redis cannot be reached. So a worker takes only as many
# streams as it has descriptors for, and leaves the others to workers that have room.

#: The descriptors of a SUB socket, of both ends of its monitor, and of its connection.
FILES_PER_STREAM = 4
#: The descriptors of a DEALER socket, of both ends of its monitor, and of its connection.
FILES_PER_REPLAY = 4
#: The descriptors of libzmq's threads, polling, sweeping, hints and the port of the probes, and a few in reserve.
OTHER_FILES = 24
#: If descriptors are few, there is at most one replay for this many of them.
_FREE_PER_REPLAY = 16


class WorkerCapacity(NamedTuple):
    """The most streams and replays that a worker may take."""

    streams: int
    replays: int
    files: int
    """The descriptors that these streams and replays need, together with everything else."""
    is_limited: bool
    """Whether the worker takes fewer than the settings ask for."""


def room_for(streams_max: int, replays_max: int, *, part: float = 1.0) -> WorkerCapacity:
    """Return the capacity if this worker may use the share ``part`` of all free descriptors. Raise the soft limit of
    open files if that helps.
    """
    wanted = _files(streams_max, replays_max)
    already = len(os.listdir("/dev/fd"))
    limit = _raised(already + int(wanted / part))
    room = fit(streams_max, replays_max, int((limit - already) * part))
    if room.is_limited:
        about = fields(streams=room.streams, wanted=streams_max, replays=room.replays, files=limit)
        # The worker warns once a stream finds no room; few installations have so many streams.
        log.debug("this worker takes fewer streams than configured: the limit of open files is too low", extra=about)
    return room


def fit(streams_max: int, replays_max: int, files: int) -> WorkerCapacity:
    """Return how many streams and replays fit into ``files`` descriptors; at least one of each in any case."""
    wanted = _files(streams_max, replays_max)
    if wanted <= files:
        return WorkerCapacity(streams_max, replays_max, wanted, is_limited=False)
    free = files - OTHER_FILES
    replays = max(1, min(replays_max, free // _FREE_PER_REPLAY))
    free -= FILES_PER_REPLAY * replays
    # Each stream may make a call to Redis over a connection of its own, as long as the pool has connections.
    streams = free // (FILES_PER_STREAM + 1)
    if streams > Store.CONNECTIONS:
        streams = (free - Store.CONNECTIONS) // FILES_PER_STREAM
    streams = max(1, min(streams_max, streams))
    return WorkerCapacity(streams, replays, _files(streams, replays), is_limited=True)


def _files(streams: int, replays: int) -> int:
    calls = min(streams, Store.CONNECTIONS)
    return FILES_PER_STREAM * streams + calls + FILES_PER_REPLAY * replays + OTHER_FILES


def _raised(wanted: int) -> int:
    """Return the limit of open files, raised to ``wanted`` as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


#: How long to wait for a hint, and how long before subscribing to the channel again.
_HINT_SECONDS = 2.0
_SOCKETS_PER_STREAM = 4
#: Room for closed sockets that libzmq has not released yet while new ones are opened.
_CLOSING_SOCKETS = 64


class Worker:
    def __init__(self, store: Store, metrics: Metrics, options: WorkerOptions, asker: Asker | None = None) -> None:
        """``asker`` reads metrics and event streams of engines; it is closed with the worker."""
        self._asker = asker or Asker(AllowedEndpoints(options.allowed_endpoints))
        self._store = store
        self._metrics = metrics
        self._options = options
        self._places = ReplayPlaces(options.replays_max, patience_seconds=options.stream.replay_idle_seconds)
        self._runner = StreamRunner(store, metrics, options, self._places, self._asker)
        self._scraper = Scraper(store, metrics, self._asker, options.gauges_seconds)
        self._overdue = Overdue(store, metrics)
        self.poller = Poller(store, metrics, options, self._runner, self._scraper, self._overdue)

    async def run(self) -> None:
        """Run until cancelled; then leases are released at once."""
        context: ZmqContext = zmq.Context(io_threads=2)
        # A subscriber needs three sockets: its own, and the two ends of its monitor. A replay needs three, too, but
        # only few run at once.
        context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_STREAM * self._options.streams_max + _CLOSING_SOCKETS)
        self._runner.context = context
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                tasks.create_task(self._runner.leases.keep_renewing())
                tasks.create_task(self._runner.subscribers.keep_watching())
                tasks.create_task(
                    keep_sweeping(
                        self._store,
                        self._metrics,
                        blocks_per_second=self._options.sweep_blocks_per_second,
                        pause_seconds=self._options.poll_seconds,
                    )
                )
                tasks.create_task(
                    keep_valuing(
                        self._store,
                        blocks_per_second=self._options.sweep_blocks_per_second,
                        pause_seconds=self._options.poll_seconds,
                    )
                )
                tasks.create_task(self._overdue.keep_ending())
                tasks.create_task(self.poller.keep_polling(tasks))
        finally:
            try:
                await self._scraper.close()
                await self._asker.close()
                await self._leave()
            finally:  # before Python 3.11.4 a timeout in a cancelled task is another cancellation
                context.term()

    async def _leave(self) -> None:
        try:
            await self._store.heartbeats.report(
                self._options.worker_id, keep_seconds=60, streams_max=self._options.streams_max, is_leaving=True
            )
            await self._store.announce_free()
        except StoreUnavailable as exc:
            log.debug("worker record not removed", extra=fields(error=exc.sentence))

    async def _listen(self) -> None:
        """Poll as soon as registrations change or another worker releases streams.

        If the message is lost, the next poll is at most two seconds later.
        """
        while True:
            try:
                async with self._store.hints() as hints:
                    while True:
                        if await hints.get_message(seconds=_HINT_SECONDS) is not None:
                            self.poller.hint.set()
            except StoreUnavailable:
                await asyncio.sleep(_HINT_SECONDS)
