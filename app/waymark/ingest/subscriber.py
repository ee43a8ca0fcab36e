"""One publisher's live frames: a SUB socket, a bounded buffer, and the truth about the connection.

What must stay true:

- The publisher is never slowed. Frames are read as fast as they come; what the buffer cannot hold is dropped and
  counted, and the seq order shows it as a gap.
- ``connect`` succeeds without a peer, so only a finished handshake counts as connected.
- A frame bears the connection it came over, exactly. That is why a socket serves for one connection only: one
  that reconnects by itself queues the new connection's frames behind the old one's and nothing tells them
  apart. It would also give up for good on a peer of another socket type, which may be replaced by the right one.
  So libzmq's own reconnecting is put off, and a fresh socket is dialled once the old one is read to its end.

The sockets' descriptors are watched by the event loop directly, because a future per frame costs more than the
frame. They are edge-triggered: they tell that something happened since the last call on the socket, so every
wake-up reads until there is nothing left, or comes back by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias

import zmq

from waymark.errors import InvalidValue
from waymark.ingest.frames import Frame, parse_live

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]

FRAMES_PER_TURN = 500
"""Frames read before the event loop gets its turn: some 2 ms."""
RECONNECT_SECONDS = 0.1
"""Before the first attempt after a lost connection; doubled by every attempt that fails. Also the time in which
libzmq hands over what it had read when it told of the loss."""
RECONNECT_SECONDS_MAX = 5.0
REFUSED_SECONDS = 30.0
"""Before the next attempt after a connection that libzmq has ended for what came over it."""
CONNECT_MILLISECONDS = 10_000
"""For a TCP connect, and once more for the handshake."""
HEARTBEAT_INTERVAL_MILLISECONDS = 5_000
HEARTBEAT_TIMEOUT_MILLISECONDS = 15_000
BYTES_PER_TURN = 8 * 2**20
"""Bytes of frames read before the event loop gets its turn, exceeded by at most one frame."""
MESSAGE_BYTES_MAX = 64 * 2**20
"""A publisher that sends more in one part loses its connection, before the part is in memory."""

_NEVER_MILLISECONDS = 24 * 3600 * 1000
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
# Any of these, whichever comes first, ends a connection or an attempt at one. A name that does not resolve tells
# only the last.
_OVER = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CONNECT_RETRIED
)
_monitor_numbers = itertools.count(1)


def open_socket(
    context: Context, kind: int, endpoint: str, message_bytes_max: int = MESSAGE_BYTES_MAX
) -> zmq.Socket[bytes]:
    """A socket with the options of both transports, not connected yet; OSError where none is to be had."""
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"no socket for {endpoint}: {error.strerror}") from error
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, message_bytes_max)
    socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
    socket.set(zmq.HANDSHAKE_IVL, CONNECT_MILLISECONDS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MILLISECONDS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    if endpoint.startswith("tcp://["):
        socket.set(zmq.IPV6, 1)
    return socket


def connect(socket: zmq.Socket[bytes], endpoint: str, field: str) -> None:
    """Begin to connect; InvalidValue naming ``field`` where libzmq cannot read the endpoint."""
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        sentence = f"{field} {endpoint!r} cannot be connected to ({error.strerror}); give tcp://host:port or ipc://path"
        raise InvalidValue(sentence, field=field) from error


class _Link:
    """A SUB socket for one connection, or one attempt at it, with its monitor."""

    __slots__ = ("descriptors", "is_over", "is_retried", "is_up", "monitor", "socket")

    def __init__(self, context: Context, endpoint: str, message_bytes_max: int) -> None:
        self.is_up = False
        """The handshake succeeded. It stays true when the connection is over: there may be frames to read."""
        self.is_over = False
        self.is_retried = False
        """libzmq would connect again: after a lost connection, but not after one that it has ended itself."""
        self.socket = open_socket(context, zmq.SUB, endpoint, message_bytes_max)
        try:
            self.socket.set(zmq.RECONNECT_IVL, _NEVER_MILLISECONDS)
            self.socket.subscribe(b"")
            # pyzmq would name the monitor by the socket's descriptor, which a closing socket may still have.
            address = f"inproc://waymark-monitor-{next(_monitor_numbers)}"
            self.monitor = self.socket.get_monitor_socket(_UP | _OVER, address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise OSError(error.errno, f"no monitor for {endpoint}: {error.strerror}") from error
        try:
            connect(self.socket, endpoint, "endpoint")
        except InvalidValue:
            self.close()
            raise
        self.descriptors = (self.socket.FD, self.monitor.FD)

    def close(self) -> None:
        # In this order: libzmq's side of the monitor would wait for room in a pipe nobody reads.
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class Subscriber:
    """The frames of one endpoint, oldest first, for one reader on one event loop.

    ``buffer_bytes`` and ``buffer_frames`` bound what waits to be taken (topics and payloads counted). Opened by
    ``start`` and closed by ``close``, or both by ``async with``, before the context is terminated.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        buffer_bytes: int,
        buffer_frames: int,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.connection = 0
        """Handshakes so far."""
        self.is_connected = False
        self.state_version = 0
        """Moves whenever ``connection`` or ``is_connected`` does."""
        self.buffered_bytes = 0
        self.dropped = 0
        """Frames for which there was no room."""
        self.malformed = 0
        """Frames that were not of the contract's form."""
        self.is_refused = False
        """libzmq has ended the last connection, for a message above ``message_bytes_max`` or bytes that are no ZMTP."""
        self._message_bytes_max = message_bytes_max
        self._context = context
        self._buffer_bytes = buffer_bytes
        self._buffer_frames = buffer_frames
        self._clock = clock
        self._buffer: deque[Frame] = deque()
        self._loop: asyncio.AbstractEventLoop
        self._link: _Link | None = None
        self._dialling: asyncio.Handle | None = None
        self._is_turn_due = False
        self._pause = RECONNECT_SECONDS
        self._waiter: asyncio.Future[None] | None = None
        self._seen_version = 0

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Open the socket and begin to connect, on the running event loop; nobody need be there yet.

        InvalidValue where libzmq cannot read the endpoint, OSError where there are no sockets left.
        """
        self._loop = asyncio.get_running_loop()
        self._open_link()

    def close(self) -> None:
        """Close the socket, for good. What is buffered can still be taken."""
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        self._close_link()
        self._set_connected(False)
        self.wake()

    # ---- the reader's side -------------------------------------------------------------------------

    @property
    def buffered_frames(self) -> int:
        return len(self._buffer)

    async def wait(self, timeout_seconds: float) -> bool:
        """True as soon as frames are buffered or the connection changed since the last wait; False after the time.

        For one waiter at a time.
        """
        if not self._has_news() and timeout_seconds > 0:
            self._waiter = self._loop.create_future()
            try:
                await asyncio.wait([self._waiter], timeout=timeout_seconds)
            finally:
                self._waiter = None
        has_news = self._has_news()
        self._seen_version = self.state_version
        return has_news

    def take(self, limit: int) -> list[Frame]:
        """At most ``limit`` of the buffered frames, oldest first; their room is free again.

        Frames of ``BYTES_PER_TURN`` at most, or one that is larger: what is taken is in memory beside the buffer.
        """
        buffer, frames, size = self._buffer, list[Frame](), 0
        while buffer and len(frames) < limit and (not frames or size + len(buffer[0].payload) <= BYTES_PER_TURN):
            size += len(buffer[0].payload)
            frames.append(buffer.popleft())
        self.buffered_bytes -= sum(len(frame.topic) + len(frame.payload) for frame in frames)
        return frames

    def _has_news(self) -> bool:
        return bool(self._buffer) or self.state_version != self._seen_version

    def wake(self) -> None:
        """End the present wait, whether or not there is anything new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the sockets' side -------------------------------------------------------------------------

    def _open_link(self) -> None:
        link = _Link(self._context, self.endpoint, self._message_bytes_max)
        self._link = link
        for descriptor in link.descriptors:
            self._loop.add_reader(descriptor, self._turn)
        self._turn()

    def _close_link(self) -> None:
        if self._link is None:
            return
        for descriptor in self._link.descriptors:
            self._loop.remove_reader(descriptor)
        self._link.close()
        self._link = None

    def _dial_again(self) -> None:
        """Leave a connection that is over, once it is read to the end, for the next attempt."""
        if self._link is not None and self._read_frames(self._link):
            self._dialling = self._loop.call_soon(self._dial_again)
            return
        if self._link is not None:
            self._read_monitor(self._link)
            if self._link.is_up and not self._link.is_retried:
                # It would do the same again at once.
                self.is_refused = True
                self._close_link()
                self._pause = REFUSED_SECONDS
                self._dial_later()
                self.wake()
                return
        self._close_link()
        try:
            self._open_link()
        except OSError:
            # No socket to be had: ``is_connected`` stays false, as with a peer that is not there.
            self._dial_later()

    def _dial_later(self) -> None:
        self._dialling = self._loop.call_later(self._pause, self._dial_again)
        self._pause = min(2 * self._pause, RECONNECT_SECONDS_MAX)

    def _turn(self) -> None:
        """Read what is there, or a good piece of it; the one callback of both descriptors."""
        link = self._link
        if link is None or self._is_turn_due:
            return
        self._read_monitor(link)
        if self._read_frames(link):
            self._is_turn_due = True
            self._loop.call_soon(self._due_turn)

    def _due_turn(self) -> None:
        self._is_turn_due = False
        self._turn()

    def _read_monitor(self, link: _Link) -> None:
        while True:
            try:
                event, _ = link.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # The event's number is the first two bytes, in the machine's order; a value follows.
            number = int.from_bytes(event[:2], sys.byteorder)
            if number == zmq.EVENT_CONNECT_RETRIED:
                link.is_retried = True
            if number & _UP:
                link.is_up = True
                self._pause = RECONNECT_SECONDS
                self.connection += 1
                self._set_connected(True)
            elif not link.is_over:
                link.is_over = True
                self._set_connected(False)
                self._dial_later()

    def _set_connected(self, is_connected: bool) -> None:
        if self.is_connected != is_connected:
            self.is_connected = is_connected
            self.state_version += 1
            self.wake()

    def _read_frames(self, link: _Link) -> bool:
        """Fill the buffer from the socket; True if there may be more to read."""
        if not link.is_up:
            # A frame that is here already came after a handshake the monitor will tell in a moment; it is read then.
            # Asking for the events takes the edge off the descriptor, which would keep the loop busy till then.
            link.socket.get(zmq.EVENTS)
            return False
        received = self._clock()
        size = 0
        try:
            for _ in range(FRAMES_PER_TURN):
                parts = link.socket.recv_multipart(zmq.NOBLOCK)
                self.is_refused = False
                self._keep(parse_live(parts, self.connection, received))
                size += len(parts[-1])
                if size > BYTES_PER_TURN:
                    break
        except zmq.Again:
            return False
        finally:
            if self._buffer:
                self.wake()
        return True

    def _keep(self, frame: Frame | None) -> None:
        if frame is None:
            self.malformed += 1
            return
        size = len(frame.topic) + len(frame.payload)
        if len(self._buffer) >= self._buffer_frames or self.buffered_bytes + size > self._buffer_bytes:
            self.dropped += 1
            return
        self._buffer.append(frame)
        self.buffered_bytes += size
