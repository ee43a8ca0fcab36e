"""Requests a replay from the watermark, and draws conclusions from its replies.

The replay begins at the watermark, so its first reply shows whether the life is still the same. The same bytes prove
the same life. Other bytes, or an empty replay, prove that the publisher restarted unnoticed. If the replies end too
early, the rest is requested again. A missing batch is requested once more, because the publisher may only have been
slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Self

import zmq

from waymark.apply.applier import Incoming
from waymark.base.errors import InvalidValue
from waymark.ingest.frames import SEQ_BYTES, ReplayedBatch, is_end_marker, parse_replay
from waymark.ingest.gap_fill import FillProgress, GapFill
from waymark.ingest.life import Life
from waymark.ingest.options import StreamOptions
from waymark.ingest.received import ReceivedFrames, Settling
from waymark.ingest.replay_places import ReplayPace, ReplayPlace, YieldReason
from waymark.ingest.request import PublisherRequest
from waymark.ingest.sockets import MESSAGE_BYTES_MAX, ZmqContext
from waymark.ingest.unfinished import LONGEST_PARTS

_PORTION_BYTES = 8 * 2**20
_TRIES = 3
#: How often a replay tries to copy the known blocks for a gap. If blocks are missing each time, for example because a
#: row is damaged, the replay continues without a copy.
_COPIES = 2


class ReplayOutcome(StrEnum):
    """How a replay ended."""

    COMPLETE = "complete"
    """The end marker came, so everything that the publisher still had was sent."""
    IDLE = "idle"
    """No reply came within the idle time: the publisher is absent, or the replies stopped."""
    DEADLINE = "deadline"
    """The time for the whole replay has passed."""


class Replay:
    """One request, and its replies in portions.

    ``start`` is the first requested seq. ``idle_seconds`` bounds the wait for each reply. ``deadline``, by ``clock``,
    ends the replay in any case. ``portion_bytes`` bounds the payloads of one portion, which may exceed it by one
    payload. ``async with`` opens and closes the replay, before the context is terminated.
    """

    def __init__(
        self,
        context: ZmqContext,
        endpoint: str,
        start: int,
        *,
        idle_seconds: float,
        portion_bytes: int,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.outcome: ReplayOutcome | None = None
        """How the replay ended; None while more replies may come."""
        self.malformed = 0
        """The number of replies that could not be parsed."""
        self._idle_seconds = idle_seconds
        self._portion_bytes = portion_bytes
        self._deadline = float("inf") if deadline is None else deadline
        self._clock = clock
        self._request = PublisherRequest(
            context,
            endpoint,
            "replay_endpoint",
            start.to_bytes(SEQ_BYTES, "big"),
            part_max=message_bytes_max,
            message_max=LONGEST_PARTS * message_bytes_max,
        )

    async def __aenter__(self) -> Self:
        """Send the request. Raises the errors of ``PublisherRequest``."""
        await self._request.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._request.__aexit__()

    async def batches(self, limit: int) -> list[ReplayedBatch]:
        """Return the next replies, in order of arrival: at least one, and at most ``limit``.

        An empty list means that the replay has ended; ``outcome`` shows how. Only replies that can be parsed extend the
        idle timeout, and time spent outside this call does not count towards it.

        Replies that were not read yet stay in libzmq's queue. The queue has no high-water mark, because a ROUTER drops
        messages for a slow reader. The publisher's replay buffer bounds the queue: one request brings no more. Raise
        EndlessMessage, an OSError, if a reply is longer than any valid one.
        """
        if self.outcome is not None:
            return []
        idle_until = self._clock() + self._idle_seconds
        while self._clock() < self._deadline:
            replies, is_drained = self._read(limit)
            if replies or self.outcome is not None:
                return replies
            seconds = min(idle_until, self._deadline) - self._clock()
            if seconds <= 0:
                break
            if is_drained:
                await self._request.readable(seconds)
            else:
                await asyncio.sleep(0)
        self.outcome = ReplayOutcome.DEADLINE if self._clock() >= self._deadline else ReplayOutcome.IDLE
        return []

    def _read(self, limit: int) -> tuple[list[ReplayedBatch], bool]:
        """Read at most ``limit`` replies, and return them with whether the queue is empty."""
        replies: list[ReplayedBatch] = []
        room = self._portion_bytes
        try:
            for _ in range(limit):
                parts = self._request.messages.receive()
                if not parts:
                    continue
                reply = parse_replay(parts)
                if reply is None:
                    self.malformed += 1
                    continue
                if is_end_marker(reply.payload):
                    self.outcome = ReplayOutcome.COMPLETE
                    return replies, True
                replies.append(reply)
                room -= len(reply.payload)
                if room <= 0:
                    break
        except zmq.Again:
            return replies, True
        return replies, False


class AttemptResult(StrEnum):
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    """The replies ended early, and further requests brought no new ones."""
    SILENT = "silent"
    """No reply came."""
    YIELDED = "yielded"
    """Another stream needs the place. This stream requests the rest later, from its watermark."""
    WAITING = "waiting"
    """The replay waits for a place. Live frames that do not need the replay are applied meanwhile."""


class ReplayAttempt:
    """One replay of one stream, in at most a few requests. It may end early because another stream needs its place.

    ``between_portions`` is awaited between portions; it checks the lease during a long replay.
    """

    def __init__(
        self,
        life: Life,
        context: ZmqContext,
        endpoint: str,
        place: ReplayPlace,
        received: ReceivedFrames,
        options: StreamOptions,
        *,
        seconds: float,
        between_portions: Callable[[], Awaitable[None]],
    ) -> None:
        self.yielded: YieldReason | None = None
        """Why the place had to be given up before the end."""
        self._place = place
        self._received = received
        self._pace = ReplayPace(options.replay_bytes_per_second_min, options.replay_idle_seconds)
        self._life = life
        self._context = context
        self._endpoint = endpoint
        self._options = options
        self._deadline = time.monotonic() + seconds
        self._between_portions = between_portions
        self._hole: tuple[int, int] | None = None
        """(first missing seq, seq that came instead) of the last request. If the next request has the same hole, the
        publisher does not have these batches.
        """

    @property
    def is_slow(self) -> bool:
        """Whether the replies came more slowly than the lowest accepted rate."""
        return self._pace.is_slow

    async def run(self) -> AttemptResult:
        """Request and apply missing batches, or stop when another stream needs the place (YIELDED)."""
        order = self._life.order
        has_heard, tries, copies = False, 0, 0
        while tries < _TRIES and time.monotonic() < self._deadline:
            old_watermark = order.watermark
            may_fill = copies < _COPIES
            request = _ReplayRequest(self._life, self._received, self._hole, self._between_portions, may_fill=may_fill)
            try:
                outcome = await self._ask(request)
            except (InvalidValue, OSError):
                await request.end(None)
                raise
            await request.end(outcome)
            copies += request.cannot_copy
            has_heard = has_heard or not request.is_empty
            self._hole = request.hole
            if self.yielded is not None:
                return AttemptResult.YIELDED
            if request.is_over or (outcome is ReplayOutcome.COMPLETE and request.is_behind):
                pass
            elif outcome is ReplayOutcome.COMPLETE:
                if not request.is_empty or order.watermark is None:
                    return AttemptResult.COMPLETE
                # Even the batch at the watermark is missing, so the publisher restarted and has not published yet.
                await self._life.begin_anew("empty replay")
            elif not has_heard:
                return AttemptResult.SILENT
            tries = 0 if order.watermark != old_watermark else tries + 1
        return AttemptResult.INCOMPLETE

    async def _ask(self, request: _ReplayRequest) -> ReplayOutcome | None:
        replay = Replay(
            self._context,
            self._endpoint,
            self._life.replay_from,
            idle_seconds=self._options.replay_idle_seconds,
            portion_bytes=_PORTION_BYTES,
            message_bytes_max=self._options.message_bytes_max,
            deadline=self._deadline,
        )
        self._life.applier.slices.begin()
        async with replay:
            while portion := await self._portion(replay):
                await request.read(portion)
                await self._life.flush()
                await self._between_portions()
                if request.is_over:
                    break
                self.yielded = self._place.yield_reason(is_slow=self._pace.is_slow)
                if self.yielded is not None:
                    break
            self._life.count("frames_malformed", replay.malformed)
            return replay.outcome

    async def _portion(self, replay: Replay) -> list[ReplayedBatch]:
        began = time.monotonic()
        portion = await replay.batches(self._options.fold_batches)
        self._pace.add(sum(len(reply.payload) for reply in portion), time.monotonic() - began)
        return portion


class _ReplayRequest:
    """Applies the replies to one request, and between them the live frames that the publisher does not replay."""

    def __init__(
        self,
        life: Life,
        received: ReceivedFrames,
        known_hole: tuple[int, int] | None,
        tick: Callable[[], Awaitable[None]],
        *,
        may_fill: bool,
    ) -> None:
        self._life = life
        self._received = received
        self._known_hole = known_hole
        self._tick = tick
        self._may_fill = may_fill
        self._fill: GapFill | None = None
        self._is_first = True
        self.hole = known_hole
        self.is_empty = True
        self.is_over = False
        """Whether further replies to this request are ignored. The next request then begins at the present watermark.
        """
        self.cannot_copy = False
        """Whether the known blocks could not be copied to fill a gap, although Redis answers."""

    @property
    def is_behind(self) -> bool:
        """Whether all replies were older than the batch that proves the life, as those of a replay of a gap may be.
        That batch is requested next.
        """
        life = self._life
        return self._is_first and not (self.is_empty or life.is_proven) and life.order.watermark is not None

    async def read(self, portion: list[ReplayedBatch]) -> None:
        index = await self._fill_gap(portion)
        while index < len(portion) and not self.is_over:
            reply = portion[index]
            seq, payload, topic = reply
            life, watermark = self._life, self._life.order.watermark
            index += 1
            # The bytes of a batch at the end of a snapshot are unknown, so the process id proves the life.
            proven_from = watermark if watermark is None or life.order.digest else watermark - 1
            is_known = not life.is_open and proven_from is not None and seq <= proven_from
            incoming = await life.decoder.decode(seq, payload, topic, is_known=is_known)
            if incoming is not None:
                self.is_empty = False
                if self._lacks_batches_before(seq):
                    await self._read_received(incoming)
                if not self.is_over:
                    index += await self._read(incoming, _behind(reply, portion, index))

    async def end(self, outcome: ReplayOutcome | None) -> None:
        """Note that no more replies come. A gap that they have not filled stays open."""
        if self._fill is not None:
            await self._fill.drop()
            if outcome is ReplayOutcome.COMPLETE and not self.is_over:
                await self._life.close()

    async def _fill_gap(self, portion: Sequence[ReplayedBatch]) -> int:
        """Fill the gap of the life, if these replies belong to it. Return how many were read for it."""
        life = self._life
        if self._fill is None:
            staged = life.stage_to_fill(portion[0].seq) if self._may_fill else None
            if staged is None:
                return 0
            fill = GapFill(life, staged)
            if not await fill.begin(self._tick):
                self.is_over, self.cannot_copy = True, fill.lacks_blocks
                return 0
            self._fill = fill
        self.is_empty = False
        count, progress = await self._fill.read(portion)
        if progress is FillProgress.GOES_ON:
            return count
        if progress is FillProgress.FILLED:
            self._is_first = False
        elif progress is FillProgress.OTHER_LIFE:
            self.is_over = True
            await life.begin_anew("other batch at the watermark")
        elif self._fill.hole not in (None, self._known_hole):
            self.hole, self.is_over = self._fill.hole, True
        else:
            await life.close()
        if progress is not FillProgress.FILLED:
            await self._fill.drop()
        self._fill = None
        return count

    def _lacks_batches_before(self, seq: int) -> bool:
        watermark = self._life.order.watermark
        return seq > (self._life.first_seq if watermark is None else watermark + 1)

    async def _read_received(self, reply: Incoming) -> None:
        """Read the live frames before a reply as if they were replies."""
        life, order = self._life, self._life.order
        for received in await self._received.before(reply, order.last_live):
            frame = received.frame if isinstance(received, Settling) else received
            if order.watermark is not None and frame.seq <= order.watermark:
                continue
            if isinstance(received, Settling):
                incoming: Incoming | None = await received.whole(life.decoder)
            else:
                incoming = await life.decoder.decode(frame.seq, frame.payload, frame.topic)
            if incoming is not None and not life.is_of_another_process(incoming.batch):
                await self._read(incoming)
                if self.is_over:
                    return
                self._received.applied(incoming.seq)

    async def _read(self, incoming: Incoming, following: Iterable[ReplayedBatch] = ()) -> int:
        """Read a batch, which may reveal a loss before it or the end of the life. Return how many of the following
        replies were read with it.
        """
        life, order, seq = self._life, self._life.order, incoming.seq
        await life.close_opening(seq)
        if self._is_first and order.watermark is not None and seq >= life.proof[0]:
            self._is_first = False
            if not await self._is_same_life(incoming):
                self.is_over = True
                return 0
        if order.watermark is None:
            self._is_first = False
            if seq > life.first_seq:
                await life.join_late()
        elif seq <= order.watermark:
            return 0
        elif seq > order.watermark + 1:
            await life.flush()
            if self._known_hole != (order.watermark + 1, seq):
                self.hole, self.is_over = (order.watermark + 1, seq), True
                return 0
            await life.pass_hole(seq)
        return await life.take(incoming, following)

    async def _is_same_life(self, first: Incoming) -> bool:
        """Return whether the first reply proves the present life. If it does not, end this life."""
        life = self._life
        seq, digest = life.proof
        if first.seq == seq and digest:
            if first.digest == digest:
                life.prove()
                await life.found()
                return True
            await life.begin_anew("other batch at the watermark")
            return False
        if life.is_of_another_process(first.batch):
            await life.begin_anew("another publisher_id")
            return False
        if life.is_of_same_process(first.batch):
            life.prove()
            await life.found()
        if life.is_proven:
            assert life.order.watermark is not None
            if first.seq > life.order.watermark + 1:
                await life.lose(first.seq)
            return True
        await life.begin_anew("life cannot be proven")
        return False


def _behind(reply: ReplayedBatch, portion: Sequence[ReplayedBatch], index: int) -> Iterator[ReplayedBatch]:
    """Yield the replies from index ``index`` on that follow ``reply`` in order and have its topic."""
    for seq, following in enumerate(portion[index:], reply.seq + 1):
        if following.seq != seq or following.topic != reply.topic:
            return
        yield following
