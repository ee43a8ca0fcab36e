"""The state of one stream, and its changes: the next batch in order, a loss, and a new life.

Live frames and replays both change this state, so it has a module of its own. The open fold contains the batches that
are in order and not applied yet; ``FrameOrder`` includes them. ``flush`` applies the fold; it comes before every change
except the next batch in order.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Literal

from waymark.apply.applier import Applier, Incoming
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.events import Batch
from waymark.domain.life_facts import COPIES_LEARNED, publisher_of
from waymark.domain.parts import Commit
from waymark.domain.plain_runs import BegunFrames
from waymark.domain.resolver import UNTRUSTED
from waymark.domain.status import StreamStatus
from waymark.engines import Decoder
from waymark.ingest import counters
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.frames import Frame, ReplayedBatch
from waymark.ingest.order import FrameOrder, FramePosition
from waymark.store.activity import ActivityKind
from waymark.store.calls import CALL_BLOCKS
from waymark.store.records import MISSING, StreamRecord

log = logging.getLogger(__name__)

#: Bytes of frames in one fold. The decoded batches of a fold are in memory together.
_FOLD_BYTES = 2**20
_FORMER_IDS_MAX = 8


class Life:
    """The state of one stream, apart from its sockets."""

    def __init__(
        self,
        applier: Applier,
        decode: Decoder,
        metrics: Metrics,
        state: StreamRecord,
        *,
        on_gap: Literal["keep", "reset"],
        stage: Callable[[Life], Applier] | None = None,
    ) -> None:
        """Create a life. ``stage`` returns an applier for filling a gap in a life that readers do not see."""
        registration = applier.grant.claim.registration
        self.applier = applier
        self.name = str(registration.name)
        self.decoder = BatchDecoder(self.name, registration.topic, decode, applier.slices, self.count, metrics)
        is_shared = registration.topic is not None
        self.order = FrameOrder(state.watermark, state.digest, state.newest_ts, is_shared=is_shared)
        self.counters: Counter[str] = applier.counters
        self.first_seq = registration.kind.traits.first_seq
        self.reasons: set[str] = (
            {counters.BATCHES_LOST} if UNTRUSTED in state.flags and counters.FILLED not in state.flags else set()
        )
        self.reasons |= {counters.OVER_CEILING, counters.COPIES_DOUBTED, counters.JOINED_LATE} & state.flags
        self.details: dict[str, str] = {}
        """Sentences that replace those in ``REASONS``, by reason."""
        self.acknowledged = state.watermark
        """The watermark that Redis has acknowledged."""
        self.is_proven = False
        """Whether the publisher of this connection is proven to be in the life that the watermark belongs to."""
        self.publisher_id = publisher_of(state.flags) if state.watermark is not None else None
        """The id of the process whose life this is; None if its batches do not name it."""
        self.former_ids: deque[bytes] = deque(maxlen=_FORMER_IDS_MAX)
        """The ids of processes that another process has replaced on this connection; their frames are stale."""
        self._last_id = self.publisher_id
        self._has_one_process = registration.sequence == "publisher"
        self.begun = 0
        """How many lives have begun here after the first."""
        self.opening = counters.Opening(frozenset() if state.watermark is None else state.flags, self.first_seq)
        self._had_losses = False
        """Whether other batches had been lost before the last loss."""
        self._unproven: tuple[int, str] | None = None
        """The watermark and digest that a replay must repeat, if live frames were applied while it waited."""
        self.is_lost = state.status is StreamStatus.LOST
        """The publisher was unreachable for too long; readers do not count its holders."""
        self.has_written_status = False
        """A status was written since the last report, so the record may differ from that report."""
        self._dp_rank = registration.dp_rank
        self._metrics = metrics
        self._counted = counters.metrics_of_life(metrics)
        self._on_gap = on_gap
        self._stage = stage
        self._fold: list[Incoming] = []
        self._fold_bytes = self._fold_hashes = 0
        self._passed: Counter[counters.LifeCounter] = Counter()
        """Counts of the batches that the open fold skips. They are added to ``counters`` when the fold is applied."""

    # ---- forward -----------------------------------------------------------------------------------

    def rank_of(self, batch: Batch) -> int | None:
        """Return the rank that a batch names, else the registered rank; None if the payload could not be decoded."""
        if batch.dp_rank is not None:
            return batch.dp_rank
        return None if batch.rejected and not batch.events else self._dp_rank

    def is_of_another_process(self, batch: Batch) -> bool:
        """Return whether a batch names a process other than the one of this life."""
        publisher_id = batch.publisher_id if self._has_one_process else None
        return publisher_id is not None and self.publisher_id is not None and publisher_id != self.publisher_id

    def is_of_same_process(self, batch: Batch) -> bool:
        """Return whether a batch names the process of this life."""
        return self._has_one_process and batch.publisher_id is not None and batch.publisher_id == self.publisher_id

    def judge(self, position: FramePosition, batch: Batch) -> FramePosition:
        """Judge a live frame by its process, if it names one; ``position`` is the judgement by its number.

        An id is never used again, so another id means another life, whatever the number. With the same id, a number
        that does not grow belongs to an earlier frame.
        """
        if position is FramePosition.MIXED or not self._has_one_process:
            return position
        if batch.publisher_id in self.former_ids:
            return FramePosition.STALE
        if self.is_of_another_process(batch):
            return FramePosition.RESTART
        is_repeated = position is FramePosition.RESTART and self.is_of_same_process(batch)
        return FramePosition.STALE if is_repeated else position

    def _note_process(self, publisher_id: bytes | None) -> None:
        """Note the process of the next batch of this life."""
        if publisher_id == self.publisher_id:
            self.prove()
        if self._last_id is not None and publisher_id != self._last_id:
            self.former_ids.append(self._last_id)
        self.publisher_id = self._last_id = publisher_id

    def append(self, incoming: Incoming) -> None:
        """Put the next batch into the open fold."""
        if incoming.batch.publisher_id is not None and self._has_one_process:
            self._note_process(incoming.batch.publisher_id)
        self._fold.append(incoming)
        self._fold_bytes += incoming.size
        self._fold_hashes += incoming.plain_hashes
        self.order.advance(incoming.last_seq, incoming.digest, incoming.batch.ts)

    async def take(self, incoming: Incoming, following: Iterable[Frame | ReplayedBatch] | None) -> int:
        """Put the next batch into the open fold, with those of the next frames that can be applied together with it.

        ``following`` are the next frames, as far as they are in order; None if there are none. Return how many were
        taken with the batch. The fold is applied before it needs a second call to Redis, and when its frames are large.
        """
        if self._fold and self._fold_hashes + incoming.plain_hashes > CALL_BLOCKS:
            await self.flush()
        if following is not None and self.applier.resolver.takes_frames:
            room, size = CALL_BLOCKS - self._fold_hashes, _FOLD_BYTES - self._fold_bytes
            incoming = await self.decoder.go_on(incoming, following, hashes_max=room, bytes_max=size)
        self.append(incoming)
        if self._fold_bytes > _FOLD_BYTES:
            await self.flush()
        return incoming.batch.frames - 1

    async def flush(self, begun: BegunFrames | None = None) -> None:
        """Apply the open fold. Its last batch may have ``begun``, because its frames went straight."""
        if not self._fold:
            return
        fold = self._fold
        for incoming in fold:
            if incoming.batch.lost is not None:
                await self.give_up(incoming)
        if begun is None:
            await self.applier.apply(fold, self.commit)
        else:
            await self.applier.finish(fold, self.commit, begun)
        self.note_applied()
        if self.applier.resolver.doubts:
            await self._doubt_copies()
        await self.found()

    @property
    def commit(self) -> Commit:
        """The watermark after the open fold."""
        order = self.order
        assert order.watermark is not None
        return Commit(order.watermark, self._fold[-1].batch.ts, order.newest_ts, order.digest)

    def note_applied(self) -> None:
        """Note that Redis has acknowledged the open fold."""
        self.acknowledged = self.order.watermark
        self._fold, self._fold_bytes, self._fold_hashes = [], 0, 0
        self.count_passed()
        self.is_proven = self._unproven is None

    async def found(self) -> None:
        """Note that the publisher is reachable, as frames in order or a replay have shown."""
        if self.is_lost:
            self.is_lost = False
            await self.applier.set_lost(is_lost=False)
            self.applier.happened(ActivityKind.FOUND)
            log.info("publisher reconnected", extra=fields(stream=self.name))

    async def lost(self) -> None:
        """Note that the publisher was unreachable for too long: its blocks do not count until it is found again."""
        self.is_lost = True
        # The status is written first. If this worker stops before the next write, the next worker finds the publisher
        # lost, and marks it as found.
        await self.applier.write({"status": StreamStatus.LOST}, {})
        await self.applier.set_lost(is_lost=True)
        endpoint = self.applier.grant.claim.registration.endpoint
        self.applier.happened(
            ActivityKind.LOST, f"no connection to {endpoint} for longer than WAYMARK_PUBLISHER_TIMEOUT"
        )
        log.warning("publisher lost", extra=fields(stream=self.name))

    # ---- the proof of a life -----------------------------------------------------------------------

    @property
    def proof(self) -> tuple[int, str]:
        """(seq, digest) of the batch that a replay must repeat to prove the same life; seq -1 without a watermark."""
        if self._unproven is not None:
            return self._unproven
        return -1 if self.order.watermark is None else self.order.watermark, self.order.digest

    @property
    def replay_from(self) -> int:
        """The seq from which a replay is requested."""
        return 0 if self.is_open else max(0, self.proof[0])

    @property
    def is_open(self) -> bool:
        """Whether a replay from 0 may still bring missing batches of this life, because none was answered yet."""
        return self.opening.is_open

    def prove(self) -> None:
        """Note that a replay has proven the same life."""
        self.is_proven, self._unproven = True, None

    def go_on_unproven(self) -> None:
        """Keep the batch that a replay must repeat: live frames are applied before the replay can prove the life."""
        if not self.is_proven or self.is_open:
            self.reasons.add(counters.REPLAY_WAITING)
        if not self.is_proven and self._unproven is None and self.order.watermark is not None:
            self._unproven = self.order.watermark, self.order.digest

    async def open_at(self, seq: int) -> None:
        """Begin a life with the live frame ``seq``, although a replay may still bring the batches before it."""
        self.opening.opened_at = seq
        self.reasons.add(counters.JOINED_LATE)
        await self._flag(counters.JOINED_LATE, f"{counters.OPENED_AT}{seq}")

    async def open_gap(self, seq: int, last_seq: int | None = None) -> None:
        """Note that a replay may still bring the batches before ``seq``: those after ``last_seq``, or all."""
        if self.opening.gap_at is None or (last_seq is not None and self.opening.gap_from is None):
            await self._flag(*self.opening.open_gap(seq, last_seq, had_losses=self._had_losses))

    async def close_opening(self, seq: int) -> None:
        """Note that a replay begins at ``seq``, and does not fill the gap.

        If it begins before the first live frame, begin the life again there. If only a gap is open, do so for a replay
        of the whole life, because afterwards all counts of copies are right.
        """
        if self.is_open and self.opening.has_beginning(seq):
            await self._end("a replay has what was missing")
        elif self.is_open:
            await self.close()

    async def close(self) -> None:
        """Note that no replay can bring the missing batches any more."""
        self.opening.close(self.applier.resolver.flags)
        await self.applier.keep_facts()

    # ---- a life without its gap --------------------------------------------------------------------

    def stage_to_fill(self, seq: int) -> Applier | None:
        """Return an applier to fill the gap, if a replay that begins at ``seq`` may do so.

        All batches from the gap on are applied again, so event_ids and the age of blocks must not matter.
        """
        resolver = self.applier.resolver
        is_plain = not (resolver.is_shared or resolver.generations.are_bounded or resolver.traits.numbers_events)
        can_prove = self.is_proven or seq <= self.proof[0]
        if self._stage is None or not (self.opening.has_gap(seq) and is_plain and can_prove):
            return None
        return self._stage(self)

    async def take_filled(self, staged: Applier, ts: float | None) -> None:
        """Replace this life with one without the gap, which ``staged`` has applied up to the watermark."""
        order, resolver = self.order, staged.resolver
        assert order.watermark is not None
        self.opening.close(resolver.flags)
        if not resolver.flags & {counters.LOST_BEFORE, counters.OVER_CEILING}:
            resolver.flags.add(counters.FILLED)
            self.reasons.discard(counters.BATCHES_LOST)
        if self.reasons & counters.REPAIRABLE:
            resolver.missing = self.applier.resolver.missing
        commit = Commit(order.watermark, ts, order.newest_ts, order.digest)
        former = await self._move_to(staged, commit, is_repair=False)
        self.counters[MISSING] = resolver.unknown
        await staged.write({}, {MISSING: resolver.unknown})
        log.info("a late replay has filled a gap", extra=fields(stream=self.name, watermark=order.watermark))
        await former.forget()

    async def _move_to(self, staged: Applier, commit: Commit, *, is_repair: bool) -> Applier:
        """Replace this life with that of ``staged``, in one step for readers. Return the former applier."""
        await staged.take_place(commit, is_repair=is_repair)
        former, self.applier, self.decoder.slices = self.applier, staged, staged.slices
        self.count_passed()
        self.opening.close(set())
        self.prove()
        self.has_written_status = True
        return former

    # ---- new lives and losses ----------------------------------------------------------------------

    async def begin_anew(self, why: str) -> None:
        """End all holders and begin a new life without a watermark."""
        await self._end(why)
        self.applier.happened(ActivityKind.RESTART, why)
        self.count("restarts")

    async def _end(self, why: str) -> None:
        log.info("publisher begins a new life; its old blocks no longer count", extra=fields(stream=self.name, why=why))
        await self.applier.new_life()
        self.count_passed()
        self.begun += 1
        self.opening.close(set())
        self.acknowledged = self.publisher_id = self._unproven = None
        self.order.restart()
        # The other reasons belong to the old life.
        self.reasons &= {counters.REPLAY_SILENT}
        await self.found()

    @property
    def wants_snapshot(self) -> bool:
        """Whether this life lacks something that a snapshot would contain, or a repair was requested."""
        return bool(self.reasons & counters.REPAIRABLE) or self.applier.grant.change.wants_repair

    async def take_snapshot(self, staged: Applier, seq: int, ts: float | None, publisher_id: bytes | None) -> None:
        """Replace this life with a snapshot that ``staged`` has applied completely; its last batch is ``seq``."""
        await self.flush()
        staged.resolver.flags.update(self.applier.resolver.flags & COPIES_LEARNED)
        former = await self._move_to(staged, Commit(seq, ts, ts, ""), is_repair=True)
        self.begun += 1
        self.order.begin_behind(seq, ts)
        self.acknowledged = seq
        self._note_process(publisher_id)
        self.reasons.clear()
        self.details.clear()
        await self.found()
        await former.forget()

    def note_snapshot(self, outcome: str, why: str = "") -> None:
        """Count a snapshot; ``why`` says why it could not be used."""
        self.counters[f"snapshots.{outcome}"] += 1
        self._metrics.snapshots.labels(outcome=outcome).inc()
        self.reasons.discard(counters.SNAPSHOT_FAILED)
        if why:
            self.reasons.add(counters.SNAPSHOT_FAILED)
            self.details[counters.SNAPSHOT_FAILED] = f"{why}; it is asked for again"

    async def join_late(self) -> None:
        """Note, also for the next worker, that the life began before the first batch that can be replayed."""
        self.reasons.add(counters.JOINED_LATE)
        await self._flag(counters.JOINED_LATE)

    def has_holders_of(self, dp_rank: int) -> bool:
        return any(name.dp_rank == dp_rank for name in self.applier.resolver.holders)

    async def yield_ranks(self) -> None:
        """End the holders of other ranks once these are registered: other streams report them."""
        resolver = self.applier.resolver
        ranks = {name.dp_rank for name in resolver.holders} - {resolver.registration.dp_rank}
        for dp_rank in ranks & resolver.registered_ranks:
            await self.applier.new_life(dp_rank)

    async def lose(self, seq: int) -> int:
        """Give up the batches before ``seq``: go on without them, or end the life. Return the last seq before them."""
        last_seq = self.order.watermark
        assert last_seq is not None
        missing = seq - last_seq - 1
        self._had_losses = counters.BATCHES_LOST in self.reasons
        self._passed["batches_lost"] += missing
        log.warning(
            "batches are lost: no replay contains them",
            extra=fields(stream=self.name, missing=missing, on_gap=self._on_gap),
        )
        if self._on_gap == "reset":
            await self.begin_anew("batches lost")
        else:
            await self.step_over(seq)
        return last_seq

    async def pass_hole(self, seq: int) -> None:
        """Go on at ``seq``: the publisher itself does not have the batches before it."""
        assert self.order.watermark is not None
        self._passed["holes"] += 1
        self._passed["batches_lost"] += seq - self.order.watermark - 1
        await self.step_over(seq)

    async def give_up(self, incoming: Incoming) -> None:
        """Count an undecodable batch as lost, because a second request would return the same bytes.

        This never ends the life, whatever ``on_gap`` is: the replay after it would bring the same batch again.
        """
        assert incoming.batch.lost is not None
        log.warning(
            "a batch is lost, because it is larger than a limit",
            extra=fields(stream=self.name, seq=incoming.seq, why=incoming.batch.lost),
        )
        self._passed["batches_lost"] += 1
        self.reasons |= {counters.BATCHES_LOST, counters.OVER_CEILING}
        self.details[counters.OVER_CEILING] = f"batch {incoming.seq}: {incoming.batch.lost}"
        await self._flag(counters.OVER_CEILING, UNTRUSTED)
        self.applier.miss(1)

    async def step_over(self, seq: int) -> None:
        """Go on at ``seq``, though something before it is missing."""
        self.reasons.add(counters.BATCHES_LOST)
        await self.distrust_counts()
        assert self.order.watermark is not None
        self.applier.miss(seq - self.order.watermark - 1)
        self.order.watermark = seq - 1

    async def overflowed(self) -> None:
        """Note that frames were dropped for lack of room, and that a replay cannot recover them."""
        if counters.BUFFER_FULL not in self.reasons:
            log.warning("frames were dropped, and no replay can recover them", extra=fields(stream=self.name))
        self.reasons.add(counters.BUFFER_FULL)
        await self.distrust_counts()

    async def distrust_counts(self) -> None:
        """Note that stores or removals were missed: from now on a removal removes the block, however many copies are
        counted.
        """
        await self._flag(UNTRUSTED)

    async def _doubt_copies(self) -> None:
        """Count copies by another rule from now on. The old counts may be wrong."""
        doubts, self.applier.resolver.doubts = self.applier.resolver.doubts, set()
        log.warning(
            "the engine's events contradict the counts of its copies; they are counted by another rule now",
            extra=fields(stream=self.name, rule=" ".join(sorted(doubts))),
        )
        self.reasons.add(counters.COPIES_DOUBTED)
        self.applier.resolver.flags.difference_update(COPIES_LEARNED)
        await self._flag(counters.COPIES_DOUBTED, *doubts)

    async def _flag(self, *added: str) -> None:
        """Write flags of this life into the record before anything more is applied.

        Each flag means that the stream is degraded. The status is written in the same call, so a record with a
        watermark above a loss never has the status ``active``. A lost publisher keeps the status ``lost``, so that
        the next worker marks it as found.
        """
        flags = self.applier.resolver.flags
        is_new_loss = UNTRUSTED in added and counters.FILLED in flags
        if is_new_loss or not flags.issuperset(added):
            flags.update(added)
            flags -= {counters.FILLED} if is_new_loss else set()
            await self.applier.keep_facts(None if self.is_lost else {"status": StreamStatus.DEGRADED})
            self.has_written_status = True

    # ---- counting ----------------------------------------------------------------------------------

    def count(self, name: counters.LifeCounter, n: int = 1) -> None:
        """Count in the record, and in the metric of that name if there is one. An unknown name raises ``KeyError``."""
        metric = self._counted[name]
        if n:
            self.counters[name] += n
            if metric is not None:
                metric.inc(n)

    def count_passed(self) -> None:
        """Add the counts of skipped batches: the watermark in Redis is above them now, or their life has ended."""
        passed, self._passed = self._passed, Counter[counters.LifeCounter]()
        for name, n in passed.items():
            self.count(name, n)

    def count_replay(self, outcome: str) -> None:
        self.counters[f"replays.{outcome}"] += 1
        self._metrics.replays.labels(outcome=outcome).inc()
