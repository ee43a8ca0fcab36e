"""The state that the subscribers of a worker share, and the watch for endless messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from waymark.ingest import unfinished
from waymark.ingest.sockets import LiveConnection

ATTEMPT_SECONDS = 0.01
"""The pause between two attempts of a worker to connect to publishers that it has never reached. An attempt takes up to
a millisecond. If there are thousands of such publishers, each is tried less often.
"""
_CHECK_SECONDS, _CHECK_BYTES = 1.0, 16 * 2**20
"""All connections are checked after ``_CHECK_SECONDS``, or once the process has grown by ``_CHECK_BYTES``."""
_GIVE_BACK_BYTES, _GIVE_BACK_SECONDS_MAX = 64 * 2**20, 32.0
"""If the process is larger than its smallest size by ``_GIVE_BACK_BYTES``, it gives free memory back, because a burst
leaves a lot. It tries after a second; after each attempt that freed nothing the pause doubles, up to
``_GIVE_BACK_SECONDS_MAX``.
"""
_FREED_SECONDS = 0.25
"""The parts of a closed connection are mostly free by then. Only after this time is another one blamed for the growth
of the process.
"""
_FORGOTTEN_SECONDS = 1.0
"""The parts of a closed connection are all free by then. Any remaining growth is memory that the process keeps."""


class _Watched:
    """A watched connection."""

    def __init__(self, link: LiveConnection, read: Callable[[], None], refuse: Callable[[], None]) -> None:
        self.message = unfinished.UnfinishedMessage(link)
        self.refuse = refuse
        self._read = read

    @property
    def is_to_blame(self) -> bool:
        """Whether the message of the connection is unfinished. A finished one that waits is read now."""
        is_hidden = self.message.is_hidden
        if not is_hidden:
            self._read()  # looking has reset the descriptor, so it will not signal
        return is_hidden


class Subscribers:
    """The subscribers of a worker."""

    def __init__(self, *, message_bytes_max: int) -> None:
        self.absent = 0
        """The number of publishers that were never reached."""
        self._message_max = unfinished.LONGEST_PARTS * message_bytes_max
        self._watched: dict[LiveConnection, _Watched] = {}
        self._has_long = False
        """Whether a connection had a long unfinished message at the last check."""
        self._ended_at: float | None = None
        """When a connection was last closed; None again a second later."""

    @property
    def pause_seconds(self) -> float:
        """The shortest pause between two attempts of a subscriber whose publisher was never reached."""
        return self.absent * ATTEMPT_SECONDS

    def enter(self, link: LiveConnection, *, read: Callable[[], None], refuse: Callable[[], None]) -> None:
        """Watch a connection; ``read`` reads what has arrived, and ``refuse`` ends it."""
        self._watched[link] = _Watched(link, read, refuse)

    def leave(self, link: LiveConnection) -> None:
        """Stop watching a connection."""
        self._watched.pop(link, None)

    async def keep_watching(self) -> None:
        """Check all connections regularly, and at once when the process grows, until cancelled.

        Give free memory back to the system, too.
        """
        unfinished.map_long_blocks()
        last_memory, last_time = 0, float("-inf")
        least = least_since = unfinished.process_memory()
        given, pause = (0, float("-inf")), _CHECK_SECONDS
        giving: asyncio.Future[None] | None = None
        while True:
            memory, now = unfinished.process_memory(), time.monotonic()
            last_memory, least, least_since = min(last_memory, memory), min(least, memory), min(least_since, memory)
            if memory - last_memory > _CHECK_BYTES or now - last_time > _CHECK_SECONDS:
                self.check(memory, now)
                last_memory, last_time = memory, now
            if giving is not None and giving.done():
                was_free = given[0] - memory > _CHECK_BYTES
                giving, pause = None, _CHECK_SECONDS if was_free else min(2 * pause, _GIVE_BACK_SECONDS_MAX)
                least_since = memory
            # A long message fills free memory first, which hides its growth. And a process that has grown since the
            # last attempt may have freed more by now.
            wait = _CHECK_SECONDS if self._has_long or memory - least_since > _CHECK_BYTES else pause
            is_due = memory - least > _GIVE_BACK_BYTES and now - given[1] > wait
            if giving is None and (is_due or self._ended_at is not None):
                # Connections are checked meanwhile, because this takes half a second on a busy machine.
                giving, given = asyncio.ensure_future(asyncio.to_thread(unfinished.give_back_memory)), (memory, now)
            await asyncio.sleep(unfinished.LOOK_SECONDS)

    def check(self, memory: int, now: float) -> None:
        """Close connections whose message is too long. ``memory`` is that of the process."""
        is_freed = self._ended_at is None or now - self._ended_at > _FREED_SECONDS
        if self._ended_at is not None and now - self._ended_at > _FORGOTTEN_SECONDS:
            self._ended_at = None
            for watched in self._watched.values():
                watched.message.forget()
        suspects: list[_Watched] = []
        self._has_long = False
        for watched in list(self._watched.values()):
            message = watched.message
            message.look(memory, now)
            if message.bytes > self._message_max:
                if watched.is_to_blame:
                    self._end(watched, now)
                continue
            is_large = message.bytes > unfinished.UNFINISHED_BYTES_MIN
            self._has_long = self._has_long or is_large
            if is_large and is_freed and message.growth > unfinished.MEMORY_BYTES_MAX and watched.is_to_blame:
                suspects.append(watched)
        largest = max((watched.message.bytes for watched in suspects), default=0)
        for watched in suspects:
            if 2 * watched.message.bytes >= largest:
                self._end(watched, now)

    def _end(self, watched: _Watched, now: float) -> None:
        watched.refuse()
        self._ended_at = now
