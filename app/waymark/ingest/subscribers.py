"""The facts that the subscribers of a worker share, and the end of messages without an end.

libzmq gives a message to its reader when the last part has arrived, holds the parts until then, and has no bound on
their number. An empty part is two bytes on the wire and 64 in memory. So the worker compares the bytes that a
connection has received since its last message, which the kernel counts, and the memory of the process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from waymark.ingest.sockets import LiveConnection

ATTEMPT_SECONDS = 0.01
"""Between two attempts of a worker at publishers that it has never reached: an attempt takes up to a millisecond. Of
thousands whose engines have not started, each is tried less often.
"""
MEMORY_BYTES_MAX = 128 * 2**20
"""The growth of the process since the last message of a connection; then the connections with most bytes end."""
_MESSAGES_MAX = 2
"""An unfinished message may have the bytes of so many longest parts."""
_UNFINISHED_BYTES_MIN = 2**20
"""With fewer bytes no connection is held responsible for the growth of the process."""
_HEARTBEAT_BYTES = 16
"""The bytes of a second that are no part of a message."""
_CHECK_SECONDS, _CHECK_BYTES = 1.0, 16 * 2**20
"""All connections are checked after this time, or after this growth of the process."""
_LOOK_SECONDS = 0.05
#: ``tcpi_bytes_received`` in the kernel's ``tcp_info``.
_BYTES_RECEIVED = struct.Struct("=128xQ")


class _LinkState(NamedTuple):
    """The state of a connection when it had delivered so many messages."""

    messages: int
    connection_bytes: int
    memory: int
    time: float


class Subscribers:
    """The subscribers of a worker."""

    def __init__(self, *, message_bytes_max: int) -> None:
        self.absent = 0
        """Publishers that were never reached."""
        self._message_max = _MESSAGES_MAX * message_bytes_max
        self._states: dict[LiveConnection, _LinkState | None] = {}
        self._refuse: dict[LiveConnection, Callable[[], None]] = {}

    @property
    def pause_seconds(self) -> float:
        """How long a subscriber whose publisher was never reached waits between two attempts, at least."""
        return self.absent * ATTEMPT_SECONDS

    def enter(self, link: LiveConnection, refuse: Callable[[], None]) -> None:
        """Watch a connection; ``refuse`` ends it."""
        self._states[link], self._refuse[link] = None, refuse

    def leave(self, link: LiveConnection) -> None:
        """Watch a connection no longer."""
        self._states.pop(link, None)
        self._refuse.pop(link, None)

    async def keep_watching(self) -> None:
        """Check all connections now and then, and at once when the process grows, until cancelled."""
        last_memory, last_time = 0, float("-inf")
        while True:
            memory, now = _memory(), time.monotonic()
            if memory - last_memory > _CHECK_BYTES or now - last_time > _CHECK_SECONDS:
                self.check(memory, now)
                last_memory, last_time = memory, now
            await asyncio.sleep(_LOOK_SECONDS)

    def check(self, memory: int, now: float) -> None:
        """End connections whose message is too long; ``memory`` is that of the process."""
        suspects: dict[LiveConnection, int] = {}
        for link, state in list(self._states.items()):
            connection_bytes = _connection_bytes(link)
            if connection_bytes is None:
                continue
            if state is None or state.messages != link.messages.count:
                self._states[link] = _LinkState(link.messages.count, connection_bytes, memory, now)
                continue
            heartbeats = int(_HEARTBEAT_BYTES * (now - state.time))
            message_bytes = connection_bytes - state.connection_bytes - heartbeats
            if message_bytes > self._message_max:
                self._refuse[link]()
            elif message_bytes > _UNFINISHED_BYTES_MIN and memory - state.memory > MEMORY_BYTES_MAX:
                suspects[link] = message_bytes
        if suspects:
            largest = max(suspects.values())
            for link, message_bytes in suspects.items():
                if 2 * message_bytes >= largest:
                    self._refuse[link]()
            # The process may keep the memory, for which the other connections are not to blame.
            self._states = dict.fromkeys(self._states)


def _connection_bytes(link: LiveConnection) -> int | None:
    """Return the bytes that a connection has received; None if it has ended, or the kernel does not count them."""
    if link.file is None or not link.is_up or link.is_over or sys.platform != "linux":
        return None
    with suppress(OSError):  # another transport than TCP
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, link.file)
        try:
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        finally:
            connection.detach()
        if len(facts) == _BYTES_RECEIVED.size:
            return int(_BYTES_RECEIVED.unpack(facts)[0])
    return None


def _memory() -> int:
    """Return the resident bytes of the process; 0 without ``/proc``."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
