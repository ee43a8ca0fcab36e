"""Computes how many streams fit into the limit of open files of this process.

libzmq uses one descriptor for each socket to wake its owner, and one for each connection. Without free descriptors a
stream cannot connect, a replay cannot be requested and Redis cannot be reached. So a worker takes only as many streams
as it has descriptors for, and leaves the others to workers that have room.
"""

from __future__ import annotations

import logging
import os
import resource
from typing import NamedTuple

from waymark.base.logs import fields
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: The descriptors of a SUB socket, of both ends of its monitor, and of its connection.
FILES_PER_STREAM = 4
#: The descriptors of a DEALER socket, of both ends of its monitor, and of its connection.
FILES_PER_REPLAY = 4
#: The descriptors of libzmq's threads, polling, sweeping, hints and the port of the probes, and a few in reserve.
OTHER_FILES = 24
#: If descriptors are few, there is at most one replay for this many of them.
_FREE_PER_REPLAY = 16


class WorkerCapacity(NamedTuple):
    """The most that a worker may take."""

    streams: int
    replays: int
    files: int
    """The descriptors that these streams and replays need, with all else."""
    is_limited: bool
    """The worker takes less than the settings ask for."""


def room_for(streams_max: int, replays_max: int, *, part: float = 1.0) -> WorkerCapacity:
    """Return the room in a share ``part`` of free descriptors. Raises the soft limit of open files if that helps."""
    wanted = _files(streams_max, replays_max)
    already = _open_files()
    limit = _raised(already + int(wanted / part))
    room = fit(streams_max, replays_max, int((limit - already) * part))
    if room.is_limited:
        about = fields(streams=room.streams, wanted=streams_max, replays=room.replays, files=limit)
        # The worker warns where a stream finds no room; few installations have so many.
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
    # Each stream may have a call to Redis under way, over its own connection, as long as there are connections.
    streams = free // (FILES_PER_STREAM + 1)
    if streams > Store.CONNECTIONS:
        streams = (free - Store.CONNECTIONS) // FILES_PER_STREAM
    streams = max(1, min(streams_max, streams))
    return WorkerCapacity(streams, replays, _files(streams, replays), is_limited=True)


def _files(streams: int, replays: int) -> int:
    calls = min(streams, Store.CONNECTIONS)
    return FILES_PER_STREAM * streams + calls + FILES_PER_REPLAY * replays + OTHER_FILES


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _raised(wanted: int) -> int:
    """The limit of open files, raised to ``wanted`` as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
