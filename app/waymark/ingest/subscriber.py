"""One publisher's live frames: a SUB socket, a bounded buffer, and the state of the connection.

These properties must hold:

- The publisher is never slowed. Frames are read as fast as they arrive; frames that do not fit into the buffer are
  dropped and counted, and the order of seqs shows them as a gap.
- ``connect`` succeeds without a peer, so only a finished handshake counts as a connection.
- Each frame has the number of the connection that it arrived on. Therefore a socket serves for one connection only: a
  socket that reconnects by itself queues frames of the new connection behind those of the old one, and the two cannot
  be distinguished. It would also never reconnect to an endpoint that once had a peer of a wrong socket type. So
  libzmq's own reconnecting is delayed for long, and a new socket connects once the old one is read to its end.

The event loop watches the descriptors of the sockets directly, because a future per frame costs more than the frame.
The descriptors are edge-triggered: they signal an event since the last call on the socket, so every callback reads
until the socket is empty, or schedules itself again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import zmq

from waymark.apply.slices import LoopTurns
from waymark.base.errors import InvalidValue
from waymark.ingest import sockets
from waymark.ingest.frames import Frame, FrameBuffer, FrameRoom, PayloadFacts, parse_live
from waymark.ingest.subscribers import Subscribers

FRAMES_PER_READ = 500
"""The frames read in one callback of the event loop, in about 2 ms."""
RECONNECT_SECONDS = 0.1
"""The pause before the first attempt after a lost connection; each failure doubles it. In this time libzmq also
delivers frames read before it reported the loss.
"""
RECONNECT_SECONDS_MAX = 5.0
REFUSED_SECONDS = 30.0
"""The pause after a connection was closed because of the bytes that it carried."""
UNREACHABLE_SECONDS = 2.0
"""A publisher whose connection is reset or refused twice within this time cannot be reached."""
UNREACHABLE_NOTE_SECONDS = 10.0
"""A note that the engine cannot be reached is valid for at least this time. It is repeated before it expires, so it
ends soon after its worker.
"""
BYTES_PER_READ = 2**20
"""The bytes of frames read in one callback of the event loop; one frame may exceed them."""

_ENDED_BY_THE_PEER = frozenset({sockets.ConnectionFailure.REFUSED, sockets.ConnectionFailure.NO_ZMQ})


class Subscriber:
    """The frames of one endpoint, oldest first, for one reader on one event loop.

    ``buffer_bytes`` (of topics and payloads) and ``buffer_frames`` bound the frames that wait to be taken, and so does
    the ``room``, which all ``subscribers`` of a worker share. Of a payload above ``payload_bytes_max`` only the size
    and the digest are kept. ``start`` opens the subscriber and ``close`` closes it, or ``async with`` does both, before
    the context is terminated.
    """

    def __init__(
        self,
        context: sockets.ZmqContext,
        endpoint: str,
        *,
        buffer_bytes: int,
        buffer_frames: int,
        room: FrameRoom | None = None,
        subscribers: Subscribers | None = None,
        message_bytes_max: int = sockets.MESSAGE_BYTES_MAX,
        payload_bytes_max: int = sockets.MESSAGE_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.connection = 0
        """The number of handshakes so far."""
        self.is_connected = False
        self.state_version = 0
        """A number that changes whenever ``connection`` or ``is_connected`` changes."""
        self.malformed = 0
        """The number of frames that could not be parsed."""
        self.is_refused = False
        """Whether the last connection was closed because of a message above ``message_bytes_max``, an endless message,
        or bytes other than ZMTP.
        """
        self.failure: sockets.ConnectionFailure | None = None
        """Why the last attempt to connect failed; None if it succeeded."""
        self.is_unreachable = False
        """Whether connections were reset or refused twice in a short time, and none has succeeded since."""
        self._failed = float("-inf")
        """When a connection was last reset or refused."""
        self._subscribers = subscribers or Subscribers(message_bytes_max=message_bytes_max)
        self._is_absent = False
        """Whether the publisher was never reached."""
        self._message_bytes_max = message_bytes_max
        self._payload_bytes_max = payload_bytes_max
        self._context = context
        self._clock = clock
        self._large_bytes = buffer_bytes // 2
        self._buffer = FrameBuffer(buffer_bytes, buffer_frames, room or FrameRoom(buffer_bytes))
        self._loop: asyncio.AbstractEventLoop
        self._link: sockets.LiveConnection | None = None
        self._dialling: asyncio.Handle | asyncio.Task[None] | None = None
        self._is_read_due = False
        self._pause = RECONNECT_SECONDS
        self._waiter: asyncio.Future[None] | None = None
        self._seen_version = 0
        self.on_frames: Callable[[], bool] | None = None
        """Called when frames were buffered, with one reader. It returns whether the reader may go on waiting."""

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Open the socket and begin to connect, on the running event loop. The publisher need not exist yet.

        Raises InvalidValue if libzmq cannot read the endpoint, and OSError if no socket is available.
        """
        self._loop = asyncio.get_running_loop()
        self._set_absent(True)
        try:
            self._dial(self._open_link)
        except (InvalidValue, OSError):
            self.close()
            raise

    def close(self) -> None:
        """Close the socket permanently."""
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        self._close_link()
        self._set_absent(False)
        self._buffer.leave()
        self._set_connected(False)
        self.wake()

    # ---- the reader's side -------------------------------------------------------------------------

    @property
    def buffered_frames(self) -> int:
        return len(self._buffer.frames)

    @property
    def buffered_bytes(self) -> int:
        return self._buffer.bytes

    @property
    def dropped(self) -> int:
        """The number of frames for which there was no room."""
        return self._buffer.dropped

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait until frames are buffered or the connection has changed since the last wait. Return False after a
        timeout.

        Only one task may wait.
        """
        if not self._has_news() and timeout_seconds > 0:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_seconds, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        has_news = self._has_news()
        self._seen_version = self.state_version
        return has_news

    @property
    def note_seconds(self) -> float:
        """The seconds for which a note that the engine cannot be reached is valid. If thousands of engines were never
        reached, attempts are rarer and notes last longer, so that a worker writes about a hundred notes a second at
        most.
        """
        return UNREACHABLE_NOTE_SECONDS + (3 * self._subscribers.pause_seconds if self._is_absent else 0.0)

    def take(self, limit: int) -> list[Frame]:
        """Return at most ``limit`` of the buffered frames, oldest first; their room is free again."""
        return self._buffer.take(limit)

    @property
    def waiting(self) -> Sequence[Frame]:
        """The buffered frames, oldest first; they stay buffered."""
        return self._buffer.frames

    def _has_news(self) -> bool:
        return self.state_version != self._seen_version or not self._offer()

    def wake(self) -> None:
        """End the present wait, whether or not there is anything new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the sockets' side -------------------------------------------------------------------------

    def _dial(self, open_link: Callable[[str], None]) -> None:
        """Begin to connect by ``open_link``, or to look up the host."""
        if sockets.has_name(self.endpoint):
            self._dialling = self._loop.create_task(self._look_up())
        else:
            open_link(self.endpoint)

    async def _look_up(self) -> None:
        endpoint = await sockets.looked_up(self.endpoint)
        self._dialling = None
        if endpoint is None:
            self.failure = sockets.ConnectionFailure.UNRESOLVED
            self._dial_later()
        else:
            self._open_or_retry(endpoint)

    def _open_or_retry(self, endpoint: str) -> None:
        try:
            self._open_link(endpoint)
        except OSError:
            # Without a free socket ``is_connected`` stays false, as with an absent peer.
            self._dial_later()

    def _open_link(self, endpoint: str) -> None:
        link = sockets.LiveConnection(self._context, endpoint, self._message_bytes_max)
        self._link = link
        self._subscribers.enter(link, read=self.read, refuse=self._refuse)
        messages, monitor = link.descriptors
        self._loop.add_reader(messages, self._read_messages, link)
        self._loop.add_reader(monitor, self.read)
        self.read()

    def _close_link(self) -> None:
        if self._link is None:
            return
        self._subscribers.leave(self._link)
        for descriptor in self._link.descriptors:
            self._loop.remove_reader(descriptor)
        self._link.close()
        self._link = None

    def _dial_again(self) -> None:
        """Replace a closed connection, once it is read to its end."""
        if self._link is not None and self._read_frames(self._link):
            self._dialling = self._loop.call_soon(self._dial_again)
            return
        if self._link is not None:
            self._read_monitor(self._link)
            if self._link.is_up and not self._link.is_retried:
                self._refuse()
                return
        self._close_link()
        self._dial(self._open_or_retry)

    def _refuse(self) -> None:
        """Close the connection, and reconnect later, because the publisher would soon send the same bytes again."""
        self.is_refused = True
        self._close_link()
        self._set_connected(False)
        self._pause = REFUSED_SECONDS
        self._dial_later()
        self.wake()

    def _dial_later(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
        seconds = max(self._pause, self._subscribers.pause_seconds if self._is_absent else 0.0)
        self._dialling = self._loop.call_later(seconds, self._dial_again)
        self._pause = min(2 * self._pause, RECONNECT_SECONDS_MAX)

    def read(self) -> None:
        """Read the monitor, and received frames within the bounds of one read. This is the callback of the monitor."""
        link = self._link
        if link is not None and not self._is_read_due:
            self._read_monitor(link)
            self._read_messages(link)

    def _read_messages(self, link: sockets.LiveConnection) -> None:
        """Read received frames. This is the callback of the socket.

        It does not read the monitor, which costs as much as a frame and has a callback of its own.
        """
        if not self._is_read_due and self._read_frames(link):
            self._is_read_due = True
            LoopTurns.of_loop().call(self._read_on)

    def _read_on(self) -> None:
        self._is_read_due = False
        self.read()

    def _read_monitor(self, link: sockets.LiveConnection) -> None:
        for is_up in link.changes():
            if is_up:
                self._set_absent(False)
                self._pause = RECONNECT_SECONDS
                self.connection += 1
                self.is_unreachable, self._failed = False, float("-inf")
            self._set_connected(is_up)
            if not is_up:
                self._note_failure(link)
                self._dial_later()
        self.failure = None if link.is_up else link.attempt.failure or self.failure

    def _note_failure(self, link: sockets.LiveConnection) -> None:
        if link.is_up or link.attempt.failure in _ENDED_BY_THE_PEER:
            now = self._clock()
            seconds_between = max(UNREACHABLE_SECONDS, 2 * self._subscribers.pause_seconds if self._is_absent else 0.0)
            self.is_unreachable = self.is_unreachable or now - self._failed <= seconds_between
            self._failed = now

    def _set_absent(self, is_absent: bool) -> None:
        self._subscribers.absent += is_absent - self._is_absent
        self._is_absent = is_absent

    def _set_connected(self, is_connected: bool) -> None:
        if self.is_connected != is_connected:
            self.is_connected = is_connected
            self.state_version += 1
            self.wake()

    def _read_frames(self, link: sockets.LiveConnection) -> bool:
        """Fill the buffer from the socket. Return True if there may be more to read."""
        if not link.is_up:
            # A frame may arrive before the monitor has reported the handshake; the monitor's callback reads it then.
            # Reading EVENTS resets the descriptor, which would otherwise keep the event loop busy until then.
            link.socket.get(zmq.EVENTS)
            return False
        received = self._clock()
        buffer = self._buffer
        receive: Callable[[], list[bytes] | None] = link.messages.receive
        if not buffer.has_room(self._large_bytes):
            # A burst for which there is no room is discarded as fast as it arrives, so that libzmq does not keep it.
            receive = partial(link.messages.receive_within, buffer.has_room)
        size, may_wait = 0, True
        try:
            for number in range(FRAMES_PER_READ):
                if number == 1:
                    may_wait = self._offer()  # a lone frame need not wait until it is known to be one
                    if not link.messages.are_there:
                        return False  # for a lone frame, asking is cheaper than libzmq's error
                parts = receive()
                if parts is None:
                    buffer.dropped += 1
                elif parts:
                    self.is_refused = False
                    frame = parse_live(parts, self.connection, received)
                    if frame is None:
                        self.malformed += 1
                    else:
                        buffer.put(frame if len(frame.payload) <= self._payload_bytes_max else _bounded(frame))
                    size += sum(map(len, parts))
                if size > BYTES_PER_READ:
                    break
        except zmq.Again:
            return False
        finally:
            # The reader may have taken the first frame and still have work to do for it.
            if not (self._offer() and may_wait):
                self.wake()
        return True

    def _offer(self) -> bool:
        """Offer the buffered frames to the reader. Return whether it may go on waiting."""
        return not self._buffer.frames or (self.on_frames is not None and self.on_frames())


def _bounded(frame: Frame) -> Frame:
    """Return a frame that keeps only the facts of its payload."""
    assert isinstance(frame.payload, bytes)
    return frame._replace(payload=PayloadFacts.of(frame.payload))
