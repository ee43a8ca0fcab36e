"""The state of one stream, and its changes: forward in order, over a loss, into a new life.

Live frames and replays both change this state, so it has a module of its own. ``Order`` is ahead of Redis by the open
fold. ``flush`` applies the fold; it comes before every change except the next batch in order.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

from waymark.apply.applier import Applier, Incoming
from waymark.domain.events import Batch
from waymark.domain.parts import Commit
from waymark.domain.resolver import UNTRUSTED
from waymark.domain.status import StreamStatus
from waymark.engines import Decoder
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.order import Order
from waymark.ingest.reasons import (
    BATCHES_LOST,
    BUFFER_FULL,
    JOINED_LATE,
    OPENED_AT,
    OVER_CEILING,
    REPLAY_SILENT,
    REPLAY_WAITING,
    opened_at,
)
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.store.activity import ActivityKind
from waymark.store.records import StreamState

log = logging.getLogger(__name__)

#: Bytes of frames in one fold; what they come to is in memory at once.
_FOLD_BYTES = 2**20


class Life:
    """The state of one stream that is not its sockets'."""

    def __init__(
        self,
        applier: Applier,
        decode: Decoder,
        metrics: Metrics,
        state: StreamState,
        *,
        on_gap: Literal["keep", "reset"],
    ) -> None:
        registration = applier.grant.claim.registration
        self.applier = applier
        self.name = str(registration.name)
        self.decoder = BatchDecoder(self.name, registration.topic, decode, applier.slices, self.count, metrics)
        is_shared = registration.topic is not None
        self.order = Order(state.watermark, state.digest, state.newest_ts, is_shared=is_shared)
        self.counters: Counter[str] = applier.counters
        self.first_seq = registration.kind.traits.first_seq
        self.reasons: set[str] = {BATCHES_LOST} if UNTRUSTED in state.flags else set()
        if OVER_CEILING in state.flags:
            self.reasons.add(OVER_CEILING)
        self.details: dict[str, str] = {}
        """What is known of a reason beyond its sentence in ``REASONS``."""
        if JOINED_LATE in state.flags and state.watermark is not None:
            self.reasons.add(JOINED_LATE)
        self.acknowledged = state.watermark
        """The watermark that Redis has acknowledged."""
        self.is_proven = False
        """The watermark is known to belong to what is behind this connection."""
        self.begun = 0
        """How many times holders and watermark have ended here."""
        self.opened_at = opened_at(state.flags) if state.watermark is not None else None
        """The first live frame of a life that began before any replay was answered to its end."""
        self._unproven: tuple[int, str] | None = None
        """(watermark, digest) of before live frames were applied on a connection whose replay waits for a place."""
        self.is_lost = state.status is StreamStatus.LOST
        """Its socket has been down for too long; readers do not count its holders."""
        self.has_written_status = False
        """The status in the record may differ from the last report."""
        self._dp_rank = registration.dp_rank
        self._metrics = metrics
        self._on_gap = on_gap
        self._fold: list[Incoming] = []
        self._fold_bytes = 0
        self._passed: Counter[str] = Counter()
        """Counts of what the open fold steps over: they are the record's when its watermark is."""

    # ---- forward -----------------------------------------------------------------------------------

    def rank_of(self, batch: Batch) -> int | None:
        """The rank of a batch: the rank it names, else the registered one; None where it is no batch."""
        if batch.dp_rank is not None:
            return batch.dp_rank
        return None if batch.rejected and not batch.events else self._dp_rank

    def append(self, incoming: Incoming) -> None:
        """Put the next batch into the open fold."""
        self._fold.append(incoming)
        self._fold_bytes += incoming.size
        self.order.advance(incoming.seq, incoming.digest, incoming.batch.ts)

    async def flush(self) -> None:
        """Apply the open fold."""
        if not self._fold:
            return
        fold, order = self._fold, self.order
        assert order.watermark is not None
        for incoming in fold:
            if incoming.batch.lost is not None:
                await self.give_up(incoming)
        commit = Commit(order.watermark, fold[-1].batch.ts, order.newest_ts, order.digest)
        await self.applier.apply(fold, commit)
        self.acknowledged = commit.watermark
        self._fold, self._fold_bytes = [], 0
        self.count_passed()
        self.is_proven = self._unproven is None
        await self.found()

    @property
    def is_fold_full(self) -> bool:
        """What is open is much already: it is applied before more is read."""
        return self._fold_bytes > _FOLD_BYTES

    async def found(self) -> None:
        """The publisher is there: frames in order, or a replay, have shown it."""
        if self.is_lost:
            self.is_lost = False
            await self.applier.set_lost(is_lost=False)
            self.applier.happened(ActivityKind.FOUND)
            log.info("publisher reconnected", extra=fields(stream=self.name))

    async def lost(self) -> None:
        """The publisher was unreachable for too long: its blocks are not counted until it is found again."""
        self.is_lost = True
        # Written first: after a crash in between, the worker that takes over marks it found again.
        await self.applier.write({"status": StreamStatus.LOST}, {})
        await self.applier.set_lost(is_lost=True)
        endpoint = self.applier.grant.claim.registration.endpoint
        self.applier.happened(
            ActivityKind.LOST, f"no connection to {endpoint} for longer than WAYMARK_PUBLISHER_TIMEOUT"
        )
        log.warning("publisher lost", extra=fields(stream=self.name))

    # ---- what a replay has to show -----------------------------------------------------------------

    @property
    def proof(self) -> tuple[int, str]:
        """(seq, digest) of the batch by which a replay shows the same life; -1 where there is no watermark."""
        if self._unproven is not None:
            return self._unproven
        return -1 if self.order.watermark is None else self.order.watermark, self.order.digest

    @property
    def replay_from(self) -> int:
        """The seq that a replay has to ask for."""
        return 0 if self.opened_at is not None else max(0, self.proof[0])

    def prove(self) -> None:
        """A replay has shown the same life."""
        self.is_proven, self._unproven = True, None

    def go_on_unproven(self) -> None:
        """Live frames are applied before the replay that would prove the life: keep what it will have to show."""
        if not self.is_proven or self.opened_at is not None:
            self.reasons.add(REPLAY_WAITING)
        if not self.is_proven and self._unproven is None and self.order.watermark is not None:
            self._unproven = self.order.watermark, self.order.digest

    async def open_at(self, seq: int) -> None:
        """Begin with a live frame though a replay may still bring what was before it."""
        self.opened_at = seq
        self.reasons.add(JOINED_LATE)
        await self._flag(JOINED_LATE, f"{OPENED_AT}{seq}")

    async def close_opening(self, seq: int) -> None:
        """A replay begins at ``seq``: if that is before the first live frame, the life begins again from there."""
        if self.opened_at is None:
            return
        if seq < self.opened_at:
            await self._end("a replay has its beginning")
            return
        self.applier.resolver.flags.discard(f"{OPENED_AT}{self.opened_at}")
        self.opened_at = None
        await self.applier.keep_facts()

    # ---- new lives and losses ----------------------------------------------------------------------

    async def begin_anew(self, why: str) -> None:
        """All holders end; there is no watermark any more."""
        await self._end(why)
        self.applier.happened(ActivityKind.RESTART, why)
        self.count("restarts")

    async def _end(self, why: str) -> None:
        log.info("publisher begins a new life; its old blocks no longer count", extra=fields(stream=self.name, why=why))
        await self.applier.new_life()
        self.count_passed()
        self.begun += 1
        self.opened_at = self._unproven = None
        self.acknowledged = None
        self.order.restart()
        # The other reasons are of the life that has ended.
        self.reasons &= {REPLAY_SILENT}
        await self.found()

    async def join_late(self) -> None:
        """The life began before the first batch that can be replayed. The record keeps this for the next worker."""
        self.reasons.add(JOINED_LATE)
        await self._flag(JOINED_LATE)

    def has_holders_of(self, dp_rank: int) -> bool:
        return any(name.dp_rank == dp_rank for name in self.applier.resolver.holders)

    async def yield_ranks(self) -> None:
        """End the holders of ranks that meanwhile have a registration of their own, whose stream reports them."""
        resolver = self.applier.resolver
        ranks = {name.dp_rank for name in resolver.holders}
        for dp_rank in ranks & resolver.foreign_ranks:
            await self.applier.new_life(dp_rank)

    async def lose(self, seq: int) -> None:
        """The batches before ``seq`` cannot be recovered: go on without them, or end the life."""
        assert self.order.watermark is not None
        missing = seq - self.order.watermark - 1
        self._passed["batches_lost"] += missing
        log.warning(
            "batches are lost: no replay contains them",
            extra=fields(stream=self.name, missing=missing, on_gap=self._on_gap),
        )
        if self._on_gap == "reset":
            await self.begin_anew("batches lost")
        else:
            await self.step_over(seq)

    async def pass_hole(self, seq: int) -> None:
        """Go on at ``seq``: the publisher itself does not have the batches before it."""
        assert self.order.watermark is not None
        self._passed["holes"] += 1
        self._passed["batches_lost"] += seq - self.order.watermark - 1
        await self.step_over(seq)

    async def give_up(self, incoming: Incoming) -> None:
        """A batch is not read and never will be, because a second request would return the same bytes.

        It never ends the life, whatever is set for gaps: the replay that follows would bring it again.
        """
        assert incoming.batch.lost is not None
        log.warning(
            "a batch is lost, because it is larger than a limit",
            extra=fields(stream=self.name, seq=incoming.seq, why=incoming.batch.lost),
        )
        self._passed["batches_lost"] += 1
        self.reasons |= {BATCHES_LOST, OVER_CEILING}
        self.details[OVER_CEILING] = f"batch {incoming.seq}: {incoming.batch.lost}"
        await self._flag(OVER_CEILING, UNTRUSTED)
        self.applier.miss(1)

    async def step_over(self, seq: int) -> None:
        """Go on at ``seq``, though something before it is missing."""
        self.reasons.add(BATCHES_LOST)
        await self.distrust_counts()
        assert self.order.watermark is not None
        self.applier.miss(seq - self.order.watermark - 1)
        self.order.watermark = seq - 1

    async def overflowed(self) -> None:
        """Frames were dropped for lack of room, and no replay can recover them."""
        if BUFFER_FULL not in self.reasons:
            log.warning("frames were dropped, and no replay can recover them", extra=fields(stream=self.name))
        self.reasons.add(BUFFER_FULL)
        await self.distrust_counts()

    async def distrust_counts(self) -> None:
        """Stores or removals were missed: from now on a removal takes the block, whatever its count."""
        await self._flag(UNTRUSTED)

    async def _flag(self, *added: str) -> None:
        """Keep flags of this life before anything more is applied.

        Each of them means that the stream is degraded. The status changes in the same step, so a watermark behind
        a loss never comes with ``active``. A lost publisher keeps its status, by which the next worker finds it again.
        """
        flags = self.applier.resolver.flags
        if not flags.issuperset(added):
            flags.update(added)
            await self.applier.keep_facts(None if self.is_lost else {"status": StreamStatus.DEGRADED})
            self.has_written_status = True

    # ---- counting ----------------------------------------------------------------------------------

    def count(self, name: str, n: int = 1) -> None:
        """Count in the record and, where there is a metric of that name, there too."""
        if n:
            self.counters[name] += n
            metric = getattr(self._metrics, name, None)
            if metric is not None:
                metric.inc(n)

    def count_passed(self) -> None:
        """What was stepped over is behind the watermark now, or its life has ended."""
        passed, self._passed = self._passed, Counter()
        for name, n in passed.items():
            self.count(name, n)

    def count_replay(self, outcome: str) -> None:
        self.counters[f"replays.{outcome}"] += 1
        self._metrics.replays.labels(outcome=outcome).inc()
