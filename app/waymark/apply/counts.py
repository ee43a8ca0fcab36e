"""Counts each fold after Redis has acknowledged it, in the counters of the publisher's record and in the metrics; ends
the old generations of one stream, and counts blocks if the number of blocks in the group is bounded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final

from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.events import Batch, MixedEvents, PlainEvents, Removed, Stored
from waymark.domain.generations import RemovalReason
from waymark.domain.names import HolderName
from waymark.domain.parts import Part, blocks_of, stored_of
from waymark.domain.resolver import Resolver
from waymark.store.entries import GroupEntries
from waymark.store.records import BLOCKS, MISSING

log = logging.getLogger(__name__)


class Counts:
    """Counts for one stream. ``counters`` are the totals that the record of the stream contains."""

    def __init__(self, resolver: Resolver, counters: Counter[str], metrics: Metrics) -> None:
        self._resolver = resolver
        self._counters = counters
        self._metrics = metrics
        self._model = metrics.model(resolver.registration.model_name)
        self._waiting_dropped = 0

    def applied(self, batches: Sequence[Batch], parts: Sequence[Part], gaps: int, seconds: float) -> None:
        """Count a fold: its ``batches``, the ``parts`` they were resolved to, and the ``seconds`` that Redis took.

        ``gaps`` is how often event_ids were missing.
        """
        metrics = self._metrics
        metrics.apply_duration_seconds.observe(seconds)
        self._count_parts(parts)
        frames = sum([batch.frames for batch in batches])
        self._counters["batches"] += frames
        metrics.batches.inc(frames)
        metrics.last_batch_timestamp_seconds.set(time.time())
        times = [batch.ts for batch in batches if batch.ts is not None]
        if times:
            metrics.lag_seconds.observe(max(0.0, time.time() - max(times)))
        self._count_events(batches)
        if gaps:
            self._counters["gaps"] += gaps
            metrics.gaps.inc(gaps)
        self._count_resolved()
        self._count_held()

    def stored(self, parts: Sequence[Part]) -> None:
        """Count blocks that were stored between two folds."""
        self._count_parts(parts)
        self._count_resolved()
        self._count_held()

    def _count_parts(self, parts: Sequence[Part]) -> None:
        stored = stored_of(parts)
        for op, n in (("stored", stored), ("removed", blocks_of(parts) - stored)):
            self._counters[f"blocks_{op}"] += n
            if n:
                self._metrics.blocks_applied.labels(op=op, model=self._model).inc(n)

    def _count_held(self) -> None:
        """Set the counters of the blocks on each medium. Only the worker of the stream knows these numbers."""
        counters, resolver = self._counters, self._resolver
        for counter in [counter for counter in counters if counter.startswith(BLOCKS)]:
            counters[counter] = 0
        for name, holder in resolver.holders.items():
            if not name.has_window:
                counters[BLOCKS + name.medium] += resolver.memory.blocks_of(holder)

    def _count_events(self, batches: Sequence[Batch]) -> None:
        counters, metrics = self._counters, self._metrics
        kinds = {Stored.kind: 0, Removed.kind: 0}
        for batch in batches:
            if type(batch.events) is PlainEvents:
                kinds[Stored.kind] += batch.events.stores
                kinds[Removed.kind] += batch.events.removals
            elif type(batch.events) is MixedEvents:
                for form in batch.events.forms:
                    kinds[form.pattern.kind] += form.events
            else:
                for event in batch.events:
                    if not event.part:
                        kinds[event.kind] = kinds.get(event.kind, 0) + 1
            for name, count in batch.rejected.items():
                counters[f"decode_errors.{name}"] += count
                metrics.decode_errors.labels(reason=name).inc(count)
            if batch.ignored:
                self._count_ignored(batch.ignored)
        for kind, count in kinds.items():
            if count:
                counters[f"events.{kind}"] += count
                metrics.events.labels(type=kind).inc(count)

    def _count_ignored(self, ignored: Counter[str]) -> None:
        for reason, count in ignored.items():
            self._counters[f"ignored.{reason}"] += count
            self._metrics.events_ignored.labels(reason=reason).inc(count)

    def _count_resolved(self) -> None:
        counters, metrics, resolver = self._counters, self._metrics, self._resolver
        if resolver.ignored:
            if resolver.ignored["block_size_mismatch"] and not counters["ignored.block_size_mismatch"]:
                about = fields(stream=str(resolver.registration.name), registered=resolver.registration.block_size)
                log.warning("blocks are not indexed: their size is not the registered block_size", extra=about)
            self._count_ignored(+resolver.ignored)
            resolver.ignored.clear()
        counters["unresolved"] += resolver.unresolved
        counters["copies_contradicted"] += resolver.contradictions
        if resolver.unresolved or resolver.contradictions:
            metrics.unresolved.inc(resolver.unresolved)
            metrics.copies_contradicted.inc(resolver.contradictions)
            resolver.unresolved = resolver.contradictions = 0
        counters["unsalted_events"] += resolver.unsalted
        resolver.unsalted = 0
        all_dropped = resolver.waiting.dropped + resolver.objects.dropped
        dropped, self._waiting_dropped = all_dropped - self._waiting_dropped, all_dropped
        counters["waiting_dropped"] += dropped
        if dropped:
            metrics.waiting_dropped.inc(dropped)
        # These counters go into the record, so a worker that takes over knows how many blocks are lost.
        counters["waiting"] = resolver.waiting.blocks + len(resolver.objects)
        counters[MISSING] = resolver.unknown


#: Seconds between two writes of the block counts: few enough that a bound is enforced within a second.
_NOTE_SECONDS: Final = 0.4


class Bounding:
    def __init__(
        self,
        resolver: Resolver,
        metrics: Metrics,
        end: Callable[[HolderName], Awaitable[None]],
        note: Callable[[Mapping[int, int], int], Awaitable[GroupEntries]],
    ) -> None:
        """``end`` ends a holder. ``note`` writes how many blocks each holder has, and how many the group may have."""
        self.is_needed = resolver.generations.are_bounded
        """Whether the group has bounds."""
        self._resolver = resolver
        self._end = end
        self._tell = note
        self._metrics = metrics
        self._noted = 0.0

    def begin_fold(self) -> None:
        """Begin a fold. All generations of this fold use the time at which it began."""
        self._resolver.generations.now = int(1000 * time.time())

    async def check(self, *, at_once: bool = False) -> None:
        """End the generations too old or beyond the bound on blocks. Raises Fenced.

        With a bound on blocks, write the block counts and read the cut of the group (see ``store.entries``) every
        0.4 s, or now if ``at_once``.
        """
        generations = self._resolver.generations
        if not self.is_needed:
            return
        self.begin_fold()
        await self._end_over()
        now = time.monotonic()
        if generations.bounds.max_entries and (at_once or now - self._noted >= _NOTE_SECONDS):
            self._noted = now
            old_cut = generations.cut
            await self._note()
            if generations.cut != old_cut:
                await self._end_over()
                await self._note()

    async def end_beside(self, fold_holders: Collection[int]) -> None:
        """End the generations too old or beyond the last cut while a fold waits, except ``fold_holders``.
        Raises Fenced.
        """
        generations = self._resolver.generations
        if not self.is_needed:
            return
        now = generations.now
        self.begin_fold()
        generations_over = self._resolver.over()
        generations.now = now  # all generations of a fold use one time
        for name, reason in generations_over:
            if reason is not None and self._resolver.holders.get(name, 0) not in {0, *fold_holders}:
                await self._end_one(name, reason)

    async def _end_over(self) -> None:
        for name, reason in self._resolver.over():
            if name in self._resolver.holders:  # an earlier call in this loop may have ended this holder, too
                await self._end_one(name, reason)

    async def _end_one(self, name: HolderName, reason: RemovalReason | None) -> None:
        blocks = self._blocks_of(name)
        await self._end(name)
        if reason is not None and blocks:
            self._metrics.index_evictions.labels(reason=reason).inc(blocks)

    def _blocks_of(self, unit: HolderName) -> int:
        resolver = self._resolver
        return sum(resolver.memory.blocks_of(holder) for name, holder in resolver.holders.items() if name.is_of(unit))

    async def _note(self) -> None:
        resolver = self._resolver
        blocks = {holder: resolver.memory.blocks_of(holder) for holder in resolver.holders.values()}
        group = await self._tell(blocks, resolver.generations.bounds.max_entries)
        resolver.generations.publishers, resolver.generations.cut = max(1, group.publishers), group.cut
