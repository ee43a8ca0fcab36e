"""The live frames of a stream that were received and are not applied yet, oldest first.

A replay delays these frames. A publisher replays only its last batches, so a frame may have a batch that the replay
lacks. The replay therefore takes such a batch from here, in its place in the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Self

from waymark.apply.applier import Incoming
from waymark.base.record import record
from waymark.engines.batches import SHORT_BYTES
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.frames import Frame, digest
from waymark.ingest.subscriber import Subscriber


@record(frozen=True, slots=True)
class Settling:
    """The batch that was read last, while it waits for a replay.

    The events of a long batch are not kept meanwhile, because they take up to fifty times as much memory as its frame,
    and the room of the worker bounds frames only. They are decoded again later.
    """

    incoming: Incoming
    frame: Frame
    is_short_of_events: bool

    @classmethod
    def of(cls, frame: Frame, incoming: Incoming) -> Self:
        is_long = len(frame.payload) > SHORT_BYTES and bool(incoming.batch.events)
        kept = incoming._replace(batch=replace(incoming.batch, events=())) if is_long else incoming
        return cls(kept, frame, is_long)

    async def whole(self, decoder: BatchDecoder) -> Incoming:
        """Return the batch with its events."""
        if not self.is_short_of_events:
            return self.incoming
        return self.incoming._replace(batch=await decoder.batch(self.frame.payload))


class ReceivedFrames:
    def __init__(self, subscriber: Subscriber) -> None:
        self.connection = 0
        """The number of the connection whose frames are being read."""
        self.settling: Settling | None = None
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
        """Remove and return the oldest taken frame."""
        return self._taken.popleft() if self._taken else None

    def put_back(self, frame: Frame) -> None:
        """Make the frame that was returned last the next one again."""
        self._taken.appendleft(frame)

    def behind(self, frame: Frame) -> Iterator[Frame] | None:
        """Return the frames after one that was read, taken ones and then buffered ones, without removing them, until
        one is out of order or of another topic.

        None if there are none.
        """
        return self._behind(frame) if self._taken or self._subscriber.buffered_frames else None

    def _behind(self, frame: Frame) -> Iterator[Frame]:
        seq = frame.seq
        for following in chain(self._taken, self._subscriber.waiting):
            seq += 1
            is_next = following.seq == seq and following.connection == frame.connection
            if not is_next or following.topic != frame.topic or seq in self._applied:
                return
            yield following

    def skip(self, count: int) -> None:
        """Remove the oldest ``count`` frames, which were read together with the frame before them."""
        taken = min(count, len(self._taken))
        for _ in range(taken):
            self._taken.popleft()
        if count > taken:
            self._subscriber.take(count - taken)

    def is_applied(self, seq: int) -> bool:
        """Return whether a replay has applied the last frame read, which has this seq; True only once for a frame."""
        is_applied = seq in self._applied
        self._applied.discard(seq)
        return is_applied

    # ---- the replay's side -------------------------------------------------------------------------

    async def before(self, reply: Incoming, last_live: int | None) -> list[Settling | Frame]:
        """Return the frames with lower seqs than ``reply``, because the replay lacks the batch before the reply.

        The list is empty if the frames may come from another process than the reply. ``last_live`` is the seq of the
        last live frame on this connection.
        """
        # Frames already here are read now, because the event loop may have read a later reply before them.
        self._subscriber.read()
        await asyncio.sleep(0)
        return list(self._below(reply)) if self._is_of_process_of(reply, last_live) else []

    def applied(self, seq: int) -> None:
        """Note that a replay has applied the frame ``seq``."""
        self._applied.add(seq)

    def _is_of_process_of(self, reply: Incoming, last_live: int | None) -> bool:
        """Return whether frames and reply come from the same process.

        They do if the connection is open, the seqs of the frames rise, and a frame with the seq of the reply has the
        same bytes.
        """
        settling = self.settling
        last = -1 if last_live is None else last_live
        if settling is not None:
            last = settling.frame.seq
            if last == reply.seq and settling.incoming.digest != reply.digest:
                return False
        for frame in chain(self._taken, self._subscriber.waiting):
            if frame.connection != self.connection or frame.seq <= last:
                return False
            if frame.seq == reply.seq and digest(frame.payload) != reply.digest:
                return False
            last = frame.seq
        return self.is_unbroken

    def _below(self, reply: Incoming) -> Iterator[Settling | Frame]:
        if self.settling is not None and self.settling.frame.seq < reply.seq:
            yield self.settling
        for frame in chain(self._taken, self._subscriber.waiting):
            if frame.seq >= reply.seq:
                return
            yield frame
