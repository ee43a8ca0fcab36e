"""Measures how much of a message has arrived that its reader cannot see yet.

libzmq delivers a message when its last part has arrived, holds the parts until then, and does not bound their number.
An empty part is two bytes on the wire and 64 in memory. So the bytes that a connection has received since its last
message are compared with the memory of the process. The kernel counts these bytes for TCP. For another transport the
kernel only reports whether bytes wait to be read, so each look that finds some counts as a piece of a message. A
message that arrives so slowly that no look finds any stays unseen.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import zmq

from waymark.ingest.sockets import PublisherSocket

MEMORY_BYTES_MAX = 128 * 2**20
"""If the process has grown by this since a connection's last message, the connections with the most bytes are ended."""
UNFINISHED_BYTES_MIN = 2**20
"""A connection with fewer bytes is not blamed for the growth of the process."""
LONGEST_PARTS = 2
"""A message of several parts may have this many times the bytes of the longest valid message."""
LOOK_SECONDS = 0.05
_HEARTBEAT_BYTES = 16
"""The bytes per second that a connection may receive besides messages."""
_PIECE_BYTES = 2**20
#: Parameters of ``mallopt``, and their values: the size from which on glibc maps a block by itself, and the most bytes
#: that it keeps at the end of its heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_BYTES, _KEPT_BYTES = 2**20, 16 * 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: ``tcpi_bytes_received`` in the kernel's ``tcp_info``.
_BYTES_RECEIVED = struct.Struct("=128xQ")


class _LinkState(NamedTuple):
    """The state of a connection when it had delivered ``messages`` messages."""

    file: int
    messages: int
    received: int
    memory: int
    time: float


class UnfinishedMessage:
    """The bytes that one connection has received since its last message."""

    def __init__(self, link: PublisherSocket) -> None:
        self.bytes = 0
        """The number of bytes; a lower bound, if the transport is not TCP."""
        self.growth = 0
        """The bytes by which the process has grown in the same time."""
        self._link = link
        self._state: _LinkState | None = None
        self._pieces, self._piece_at = 0, float("-inf")

    def forget(self) -> None:
        """Begin again, because the process may keep memory for which this connection is not to blame."""
        self.bytes = self.growth = 0
        self._state = None

    def look(self, memory: int, now: float) -> None:
        """Look at the connection; ``memory`` is that of the process."""
        link, state = self._link, self._state
        if link.file is None or not link.is_up or link.is_over:
            return
        received = self._received(link.file, now)
        is_same = state is not None and (state.file, state.messages) == (link.file, link.messages.count)
        if state is None or not is_same or received < state.received:
            self.forget()
            self._state = _LinkState(link.file, link.messages.count, received, memory, now)
            return
        if memory < state.memory:
            # Other memory was freed. With the old reading, this message could grow by as much without being seen.
            self._state = state = state._replace(memory=memory)
        self.bytes = received - state.received - int(_HEARTBEAT_BYTES * (now - state.time))
        self.growth = memory - state.memory

    @property
    def is_hidden(self) -> bool:
        """Whether the bytes belong to a message that its reader cannot see: no complete one waits to be read."""
        return not int(self._link.socket.get(zmq.EVENTS)) & zmq.POLLIN

    def _received(self, file: int, now: float) -> int:
        counted, unread = _bytes_of_tcp(file), _unread_bytes(file)
        if counted is not None:
            return counted - unread
        if now - self._piece_at >= LOOK_SECONDS and unread:
            self._pieces, self._piece_at = self._pieces + 1, now
        return self._pieces * _PIECE_BYTES


def _bytes_of_tcp(file: int) -> int | None:
    """Return the bytes that a connection has received; None if the kernel does not count them."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):  # the transport is not TCP
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, file)
        try:
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        finally:
            connection.detach()
        if len(facts) == _BYTES_RECEIVED.size:
            return int(_BYTES_RECEIVED.unpack(facts)[0])
    return None


def _unread_bytes(file: int) -> int:
    """Return the number of arrived bytes that libzmq has not read."""
    size = array.array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(file, termios.FIONREAD, size)
    return size[0]


@cache
def _memory_file() -> int | None:
    """Open the file with the memory of this process. It stays open, because it is read twenty times a second."""
    with suppress(OSError):
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    return None


def process_memory() -> int:
    """Return the resident bytes of the process; 0 without ``/proc``."""
    file = _memory_file()
    return 0 if file is None else int(os.pread(file, 256, 0).split()[1]) * _PAGE_BYTES


def give_back_memory() -> None:
    """Give free memory of the process back to the system, if the C library can (glibc).

    It takes some milliseconds for each 100 MiB, and does not hold the GIL. libzmq's threads free the parts of an ended
    connection one by one, and glibc keeps the memory. In a process that never gave it back, each further connection was
    seen to take as much again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def map_long_blocks() -> None:
    """Let the C library (glibc) give each long block back to the system when it is freed.

    By default it stops doing so once it has freed such a block. From then on blocks of up to 32 MiB come from its heap,
    which keeps them: the frames of one burst left more than 100 MiB that nothing else could use.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
