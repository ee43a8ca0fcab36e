"""The straight way of frames: while the task of a stream waits, a callback applies the frames that are alike.

A frame goes straight if it is the next one in order, and differs from the last applied one of its rank in its blocks
only. It is read, resolved and packed in one step, and the callback of the last reply counts it and moves the watermark.
The task is woken by every other frame, and goes on where a frame that went straight could not be applied as a whole. If
the stream has to wait for its turn, the task does, and frames go straight in the turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from waymark.apply.applier import Applier, Incoming
from waymark.apply.straight import StraightFrames
from waymark.base.metrics import Metrics
from waymark.domain.events import Batch, PlainEvents
from waymark.domain.plain_runs import ALIKE_HASHES_MAX, AlikeRun
from waymark.ingest.batch_decoder import SEQ_MAX
from waymark.ingest.frames import PayloadFacts, digest
from waymark.ingest.life import Life
from waymark.ingest.received import ReceivedFrames
from waymark.ingest.subscriber import Subscriber
from waymark.store.alike_calls import SentCalls

_FRAMES_MAX: Final = 128
"""The most frames to read at once. Each has parts of its own, and a call has no room for more."""
_PAUSE_MAX: Final = 16
"""While each frame says something else, a straight way is looked for after so many ordinary batches at least."""
_BYTES_MAX: Final = 327_680
"""The most bytes of frames to read at once: those of a call that stores blocks, in about a millisecond."""
_RANKS_MAX: Final = 1024
"""The most ranks whose frames go straight."""


class StraightWay:
    """The straight way of one stream. It is open only while the task of the stream waits for frames."""

    def __init__(self, life: Life, subscriber: Subscriber, received: ReceivedFrames, metrics: Metrics) -> None:
        self.heard = 0.0
        """When a frame last went straight."""
        self._life, self._subscriber, self._received, self._metrics = life, subscriber, received, metrics
        registration = life.applier.grant.claim.registration
        self._is_plain = registration.sequence == "publisher" and registration.topic is None
        self._dp_rank = registration.dp_rank
        self._bytes_max = life.decoder.plain_bytes_max
        """The bytes of the longest frame that goes straight."""
        self._last: Batch | None = None
        """The last batch that was applied in the ordinary way, until it is known whether others can follow it."""
        self._last_of_ranks: dict[int | None, Batch] = {}
        """The last one of each rank in its fold."""
        subscriber.on_frames = self.take
        self._patterns: dict[int | None, Batch] = {}
        """The pattern of the batches of each rank."""
        self._pattern_life: tuple[Applier, int, bytes | None] | None = None
        """The applier, the life and the process of these batches."""
        self._frames: StraightFrames | None = None
        self._ranks: frozenset[int] = frozenset()
        """The registered ranks for which ``_frames`` is right."""
        self._rest, self._pause = 0, 1
        """After how many ordinary batches to look for a straight way again, and the same for the next frame that says
        something else.
        """
        self._is_open = self._is_turn = False
        self._wakes = False
        """Whether each reply wakes the task, because it waits for longer than its usual pause."""
        self._run: AlikeRun | None = None
        """The frames that are not applied yet."""
        self._digest = ""
        """The digest of the last frame."""
        self._calls: SentCalls | None = None
        """The calls for them, until these end."""
        self._ended: asyncio.Future[None] | None = None
        """Done when the calls end, while the task waits for that."""
        self._error: Exception | None = None

    def drop(self) -> None:
        """Note another event of the stream. No frame goes straight before the next ordinary one is applied."""
        self.pause()
        self._pattern_life = None

    def pause(self) -> None:
        """Note that frames go the ordinary way."""
        self._last = self._frames = None
        self._last_of_ranks.clear()

    def note(self, batch: Batch) -> None:
        """Note a batch of a fold."""
        self._last = batch
        if type(batch.events) is PlainEvents:
            self._last_of_ranks[batch.dp_rank] = batch

    def open(self, *, wakes: bool) -> None:
        """Let frames go straight until ``close``, if the stream is in a steady state. The task is about to wait;
        ``wakes`` says whether a reply wakes it.
        """
        life, applier = self._life, self._life.applier
        self._wakes = wakes
        last, self._last = self._last, None
        batches, self._last_of_ranks = self._last_of_ranks, {}
        # A frame of a new rank says something else only once.
        if last is not None and (self._is_due() or not batches.keys() <= self._patterns.keys()):
            self._learn(last, batches)
            reading = life.decoder.reading_of(last, ALIKE_HASHES_MAX) if self._is_plain else None
            if reading is not None and life.is_proven and not (life.is_open or life.is_lost):
                self._frames = applier.alike(last, self._patterns, reading)
                self._ranks = applier.resolver.registered_ranks
        if self._frames is not None and self._frames.may_send:
            self._is_open = applier.resolver.registered_ranks == self._ranks

    def _is_due(self) -> bool:
        """Return whether to look for a straight way now. Looking is wasted while each frame says something else."""
        self._rest = max(0, self._rest - 1)
        return not self._rest

    def _learn(self, last: Batch, batches: Mapping[int | None, Batch]) -> None:
        """Learn the patterns of the batches of the last fold, beside those before them in their life."""
        pattern_life = self._life.applier, self._life.begun, last.publisher_id
        if pattern_life != self._pattern_life or len(self._patterns) > _RANKS_MAX:
            self._pattern_life, self._patterns = pattern_life, {}
        for rank, batch in batches.items():
            self._patterns[rank] = batch.pattern(self._patterns.get(rank))

    async def close(self) -> None:
        """End the straight way for now, and finish the frames that went straight and are not applied. Raise their
        error, if there was one."""
        self._is_open = False
        if self._calls is not None:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
        if self._error is not None:
            raise self._error
        if self._run is not None:
            run, self._run = self._run, None
            self.pause()
            self._life.applier.slices.begin()
            for part in run.batches:
                self._life.append(Incoming(part.seq, self._digest, part.batch))
                self.note(part.batch)
            await self._life.flush(run.begun)

    async def in_turn(self, frames_max: int) -> bool:
        """Take the frames that are buffered now, if they may go straight, and wait until they are applied. It is the
        stream's turn, which ends after ``frames_max`` frames or somewhat more. Return whether any were taken.
        """
        # Few frames arrive in a turn; more of them are there in the next one.
        frames, frames_due = 0, min(frames_max, self._subscriber.buffered_frames)
        while frames < frames_due:
            self.open(wakes=False)
            self._is_turn = True
            self.take()
            self._is_turn, run = False, self._run
            await self.close()
            if run is None:
                break
            frames += run.frames
        return frames > 0

    def leave(self) -> None:
        """Ignore the replies of the calls under way, because the stream has ended. Let go of the blocks."""
        self._is_open, self._subscriber.on_frames = False, None
        self.drop()
        if self._calls is not None:
            self._calls.drop()

    # ---- callbacks ---------------------------------------------------------------------------------

    def take(self) -> bool:
        """Take the buffered frames, if they may go straight. Return whether the task may go on waiting."""
        if not self._is_open or self._run is not None:
            return self._calls is not None  # their replies come first
        if not (self._is_turn or self._may_begin):
            return False
        try:
            payloads = self._payloads()
            return bool(payloads) and self._go(tuple(payloads))
        except Exception as error:  # the task raises it, because the tables may be half changed
            self._error, self._is_open = error, False
            return False

    @property
    def _may_begin(self) -> bool:
        return self._frames is not None and self._frames.may_begin

    def _payloads(self) -> Sequence[bytes]:
        """Return the payloads of the first buffered frames that continue the order."""
        order, payloads, waiting = self._life.order, list[bytes](), self._subscriber.waiting
        first, seq, connection, room = waiting[0], order.next_seq, self._received.connection, _BYTES_MAX
        if order.last_live is not None and first.seq <= order.last_live:
            return ()
        for frame in islice(waiting, _FRAMES_MAX):
            payload = frame.payload
            size = len(payload)
            room -= size
            is_next = frame.seq == seq <= SEQ_MAX and frame.connection == connection and frame.topic == first.topic
            if not is_next or room < 0 or size > self._bytes_max or isinstance(payload, PayloadFacts):
                break
            payloads.append(payload)
            seq += 1
        return payloads

    def _go(self, payloads: tuple[bytes, ...]) -> bool:
        straight, order = self._frames, self._life.order
        assert straight is not None
        run = straight.take(order.next_seq, payloads)
        if run is None:
            self._frames, self._is_open = None, False
            self._rest, self._pause = self._pause, min(2 * self._pause, _PAUSE_MAX)
            return False
        self._rest, self._pause = 0, 1
        digested = digest(payloads[run.frames - 1])
        # The calls are sent first, because readers wait for them.
        calls = straight.send(run, order.commit_at(run.last_seq, digested, run.ts), self._end)
        self._run, self._digest = run, digested
        self._note(run)
        if calls is None or calls.done():
            return False
        self._calls = calls
        return True

    def _note(self, run: AlikeRun) -> None:
        """Note frames that were taken as the ordinary way does before it applies them."""
        frames, rank, life = self._subscriber.take(run.frames), run.last_rank, self._life
        self.heard = time.monotonic()
        self._metrics.frames.inc(len(frames))
        self._metrics.frame_bytes.inc(sum([len(frame.payload) for frame in frames]))
        life.order.take_straight(frames[-1], self._digest, run.ts, self._dp_rank if rank is None else rank)

    def _end(self, outcome: bool | Exception) -> None:
        """End the calls; see ``StraightFrames.send``."""
        calls, self._calls = self._calls, None
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if outcome and calls is not None:
                self._applied(calls)
        except Exception as error:  # the task raises it; a connection to Redis calls this
            self._error, self._is_open = error, False
        if calls is None:
            return  # the first one could not be sent
        if self._ended is not None:
            if not self._ended.done():
                self._ended.set_result(None)
            self._ended = None
        elif self._run is not None or self._wakes or (self._subscriber.buffered_frames and not self.take()):
            self._subscriber.wake()

    def _applied(self, calls: SentCalls) -> None:
        """Move the watermark, and count."""
        run, straight = self._run, self._frames
        assert run is not None
        assert straight is not None
        may_go_on = straight.applied(run, calls.seconds)
        self._life.note_applied()
        self._run = None
        if not may_go_on:
            self._frames, self._is_open = None, False
