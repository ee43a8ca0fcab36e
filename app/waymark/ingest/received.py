"""The live frames of a stream that were received and are not applied yet, oldest first.

A replay delays these frames. A publisher replays only its last batches, so a frame may have a batch that the replay
lacks. The replay therefore takes such a batch from here, in its place in the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import chain

from waymark.apply.applier import Incoming
from waymark.ingest.frames import Frame, digest
from waymark.ingest.subscriber import Subscriber


class ReceivedFrames:
    def __init__(self, subscriber: Subscriber) -> None:
        self.connection = 0
        """The number of the connection whose frames are being read."""
        self.settling: Incoming | None = None
        """The batch that was read last, if it waits for a replay."""
        self._subscriber = subscriber
        self._taken: deque[Frame] = deque()
        self._applied: set[int] = set()
        """The seqs of the frames of this connection that a replay has applied."""

    @property
    def is_unbroken(self) -> bool:
        """Whether the connection whose frames are being read is still open."""
        return self._subscriber.is_connected and self._subscriber.connection == self.connection

    def connected(self, connection: int) -> None:
        """Note that frames of another connection follow."""
        self.connection = connection
        self._applied.clear()

    def take(self, limit: int) -> bool:
        """Take at most ``limit`` frames from the subscriber, for ``next``. Return whether there are any."""
        self._taken.extend(self._subscriber.take(limit))
        return bool(self._taken)

    def next(self) -> Frame | None:
        """Remove the oldest of the taken frames, and return it."""
        return self._taken.popleft() if self._taken else None

    def is_applied(self, seq: int) -> bool:
        """Return whether a replay has applied the last frame read, which has this seq. True only once for a frame."""
        is_applied = seq in self._applied
        self._applied.discard(seq)
        return is_applied

    # ---- the replay's side -------------------------------------------------------------------------

    async def before(self, reply: Incoming, last_live: int | None) -> list[Incoming | Frame]:
        """Return the frames with lower seqs than ``reply``, whose predecessor a replay lacks.

        The list is empty if the frames may be of another process than the reply. ``last_live`` is the seq of the last
        live frame on this connection.
        """
        # Received frames are read first: the loop may have seen the reply earlier.
        self._subscriber.read()
        await asyncio.sleep(0)
        return list(self._below(reply)) if self._is_of_process_of(reply, last_live) else []

    def applied(self, seq: int) -> None:
        """Note that a replay has applied the frame ``seq``."""
        self._applied.add(seq)

    def _is_of_process_of(self, reply: Incoming, last_live: int | None) -> bool:
        """Return whether the frames are free of a restart.

        Their seqs rise, on an open connection, and a frame with the seq of the reply has the same bytes.
        """
        settling = self.settling
        last = -1 if last_live is None else last_live
        if settling is not None:
            last = settling.seq
            if last == reply.seq and settling.digest != reply.digest:
                return False
        for frame in chain(self._taken, self._subscriber.waiting):
            if frame.connection != self.connection or frame.seq <= last:
                return False
            if frame.seq == reply.seq and digest(frame.payload) != reply.digest:
                return False
            last = frame.seq
        return self.is_unbroken

    def _below(self, reply: Incoming) -> Iterator[Incoming | Frame]:
        if self.settling is not None and self.settling.seq < reply.seq:
            yield self.settling
        for frame in chain(self._taken, self._subscriber.waiting):
            if frame.seq >= reply.seq:
                return
            yield frame
