"""Applies folds of decoded batches to Redis: plan, resolve, apply, count.

A fold is a list of consecutive batches, applied together. An applier has these states; it may be ahead and
waiting at the same time:

- **in step**: the applier remembers the holders, flags, engine hashes and event_ids that Redis has. Every fold begins
  in this state.
- **ahead**: a fold is resolved, and Redis has not acknowledged it. The resolver remembers blocks and event_ids that
  Redis may not have yet; only the calls of this fold write them to Redis. After the acknowledgement ``counts`` counts
  the fold, and the applier is in step again.
- **waiting**: Redis is unavailable, and ``calls.last_error`` says why. A patient applier, which applies a stream,
  repeats its call until Redis answers; Redis may therefore run a call twice. If Redis has no memory left, old
  generations end meanwhile, except those with holders of the fold. An applier that serves a request raises
  ``StoreUnavailable`` at once instead.
- **over**: the applier raised an exception, for example ``Fenced``, ``StoreUnavailable`` or ``MemoryError``, or was
  cancelled. It may be ahead of Redis, and its tables may be half changed. So it is discarded, and the next applier
  reads the record.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from waymark.apply.counts import Bounding, Counts
from waymark.apply.pool_hashes import PoolHashes
from waymark.apply.redis_calls import Fenced, RedisCalls
from waymark.apply.slices import SliceRunner
from waymark.apply.straight import StraightFrames
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.events import STORES, Batch, PlainEvents
from waymark.domain.known import Spot
from waymark.domain.moves import Moves
from waymark.domain.names import Holder, HolderName, Unit
from waymark.domain.parts import Commit, Part, Parts, blocks_of, has_singles, packed
from waymark.domain.plain_runs import BegunFrames
from waymark.domain.resolver import Plan, Resolver
from waymark.store.activity import ActivityKind, about
from waymark.store.alike_calls import AlikeCalls
from waymark.store.calls import CALL_BLOCKS
from waymark.store.entries import GroupEntries
from waymark.store.leases import Grant, random_nonce
from waymark.store.records import MISSING, Facts, NewHolder
from waymark.store.scripts import Verdict
from waymark.store.store import Store

log = logging.getLogger(__name__)


class Incoming(NamedTuple):
    """A batch on its way into the index, which may stand for several frames."""

    seq: int
    """The seq of its first frame."""
    digest: str
    """The digest of its last frame."""
    batch: Batch
    size: int = 0
    """The bytes of the payloads."""

    @property
    def last_seq(self) -> int:
        return self.seq + self.batch.frames - 1

    @property
    def plain_hashes(self) -> int:
        """The number of hashes if the events are plain. Other events do not count towards a fold."""
        events = self.batch.events
        return events.hashes if type(events) is PlainEvents else 0


class Applier:
    """Applies folds of one stream under one grant. With ``is_patient`` it waits for Redis."""

    def __init__(
        self,
        grant: Grant,
        store: Store,
        resolver: Resolver,
        metrics: Metrics,
        counters: Counter[str],
        *,
        pool_hashes_max: int = 0,
        is_patient: bool = True,
        is_staged: bool = False,
    ) -> None:
        """Create an applier. ``is_staged``: the blocks belong to a life hidden from readers until
        ``take_place``.
        """
        self.grant = grant
        self.resolver = resolver
        self.counters = counters
        """The counters of the record, as totals. Some count applied blocks, others received ones."""
        self._store = store
        self.bounding = Bounding(resolver, metrics, self.new_life, self._note_entries)
        self.slices = SliceRunner()
        self.calls = calls = RedisCalls(metrics, self.slices.begin, is_patient=is_patient)
        calls.while_full = self._free_memory
        self._kept_hashes = kept = store.hashes.kept(grant, pool_hashes_max)
        self.pool_hashes = PoolHashes(
            grant,
            resolver,
            store.hashes,
            store.takeover,
            self.calls.answered,
            self.slices,
            self._apply_early,
            lambda blocks: calls.accepted(partial(kept.keep, blocks)),
            lambda entries: calls.accepted(partial(kept.keep_entries, entries)),
            self.keep_facts,
        )
        self._is_staged = is_staged
        self._counts = Counts(resolver, counters, metrics)
        self._staged: list[NewHolder] = []
        self._has_singles = False
        self._fold_holders: Callable[[], set[int]] = set
        """Returns the holders that the fold under way needs."""
        self._is_freeing = False
        self._alike_calls: AlikeCalls | None = None
        """The calls for frames that go straight, which take longer to create than to send."""

    def close(self) -> None:
        """Let go of the parts that refer to this object, so that the blocks do not wait for the garbage collector."""
        self.calls.while_full = None
        del self.bounding, self.pool_hashes
        self.resolver.close()

    @property
    def server(self) -> object:
        """An object that identifies the server of its group, as far as it is known."""
        return self._store.server_of(self.grant.group_id)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait until it is this stream's turn to apply frames; see ``Pacer.turn``."""
        return self._store.pacer.turn(self.server, self.check_lease)

    def pass_turn(self) -> None:
        """Let another stream have its turn; see ``Pacer.pass_turn``."""
        self._store.pacer.pass_turn(self.server)

    async def spots_of(self, batch: Batch) -> dict[int, Spot]:
        """Return the blocks that hashes of the batch stand for, as this life or its group's engines reported them."""
        resolver = self.resolver
        hashes = {
            engine_hash for event in batch.events if isinstance(event, STORES) for engine_hash in event.engine_hashes
        }
        spots = resolver.spots_of(resolver.registration.dp_rank, hashes)
        return spots | await self.pool_hashes.spots_of(hashes - spots.keys())

    def happened(self, kind: ActivityKind, detail: str = "") -> None:
        """Add an entry about the publisher to the activity list."""
        self._store.activity.note(kind, **about(self.grant.claim.registration), detail=detail)

    async def apply(self, fold: Sequence[Incoming], commit: Commit | None) -> None:
        """Apply batches in order. The last call also writes their event_ids and, with ``commit``, the watermark.

        Raises Fenced, and StoreUnavailable if the applier is not patient.
        """
        if len(fold) > 1:
            *first_folds, fold = _cut_at_clears(fold)
            for part_of_fold in first_folds:
                await self._apply_fold(part_of_fold, None)
        await self._apply_fold(fold, commit)

    async def _apply_fold(self, fold: Sequence[Incoming], commit: Commit | None) -> None:
        resolver, batches = self.resolver, [incoming.batch for incoming in fold]
        self.bounding.begin_fold()
        plan = await self.slices.run(resolver.plan(batches))
        self._fold_holders = lambda: resolver.holders_of_epochs(plan.epochs)
        if plan.facts_changed:
            await self.keep_facts()
        for unit in plan.ended:
            await self._end(unit, is_restart=False)
        if plan.begun:
            await self.begin(plan.begun)
        if resolver.is_shared:
            await self.pool_hashes.find(batches)
        parts = await self.slices.run(resolver.resolve(plan, [(incoming.seq, incoming.batch) for incoming in fold]))
        await self._apply_parts(batches, parts, commit, plan.gaps)

    async def _apply_parts(self, batches: Sequence[Batch], parts: Parts, commit: Commit | None, gaps: int = 0) -> None:
        """Apply the parts of batches, and count them."""
        event_ids = self.resolver.take_event_ids()
        self._fold_holders = lambda: {*event_ids, *(part.holder for part in parts)}
        if has_singles(parts):
            await self._keep_singles()
        await self.pool_hashes.keep(parts)
        moves = Moves(self.resolver.memory)
        *portions, last = portions_of(parts, self.grant.shards)
        began = time.perf_counter()
        # Until the new watermark is written, a worker that takes over applies every portion again.
        for portion in portions:
            await self._apply(portion, moves, None, {})
        await self._apply(last, moves, commit, event_ids)
        self._fold_holders = set
        self._counts.applied(batches, parts, gaps, time.perf_counter() - began)

    async def finish(self, fold: Sequence[Incoming], commit: Commit, begun: BegunFrames) -> None:
        """Resolve the rest of the last batch, which has ``begun``, and apply all as ``apply`` does.

        This is for frames that went straight, so their plan is empty, and Redis may have all of their parts.
        """
        parts = begun.parts
        if parts is None:
            work = self.resolver.resolve(Plan(), [(fold[-1].seq, fold[-1].batch)], begun)
            parts = await self.slices.run(work)
        await self._apply_parts([incoming.batch for incoming in fold], parts, commit)

    def alike(
        self, last: Batch, patterns: Mapping[int | None, Batch], reading: tuple[Any, ...]
    ) -> StraightFrames | None:
        """Return the straight way of further frames like ``patterns``, which are those of batches that were applied, up
        to ``last``; None if there is none.

        Anything else that happens to the stream ends this way.
        """
        frames = None if self._is_staged else self.resolver.alike(last, patterns, reading)
        if frames is None:
            return None
        if self._alike_calls is None:
            self._alike_calls = self._store.index.alike_calls(self.grant, self._kept_hashes)
        return StraightFrames(frames, self._alike_calls, self._counts, self.pool_hashes, self.bounding)

    async def _apply_early(self, parts: Sequence[Part]) -> None:
        """Apply parts that come before the events of the next batch."""
        await self._apply_all(parts)
        self._counts.stored(parts)

    async def _apply_all(self, parts: Sequence[Part]) -> None:
        moves = Moves(self.resolver.memory)
        self._fold_holders = lambda: {part.holder for part in parts}
        for portion in portions_of(parts, self.grant.shards):
            await self._apply(portion, moves, None, {})
        self._fold_holders = set

    async def _free_memory(self) -> None:
        """End old generations while a call waits for memory, because nothing else ends those of this stream."""
        if self._is_staged or self._is_freeing:
            return
        self._is_freeing = True
        try:
            await self.bounding.end_beside(self._fold_holders())
        finally:
            self._is_freeing = False

    async def _keep_singles(self) -> None:
        """Mark the group as one with blocks of unknown depth, before the first such block is written."""
        if not self._has_singles:
            await self.calls.accepted(lambda: self._store.records.keep_singles(self.grant))
            self._has_singles = True

    async def _apply(
        self, parts: Sequence[Part], moves: Moves, commit: Commit | None, event_ids: Mapping[int, int]
    ) -> None:
        index = self._store.index
        hold = self.check_lease if self.calls.is_patient else None
        verdict = await self.calls.answered(
            lambda: index.apply(self.grant, parts, moves, commit, event_ids, hold=hold, is_staged=self._is_staged)
        )
        if verdict is Verdict.LOST:
            await self._lost()
        if verdict is Verdict.FENCED:
            raise Fenced

    async def new_life(self, unit: Unit = "*") -> None:
        """End the holders of ``unit``; '*' ends the whole life, with its watermark and flags."""
        await self._end(unit, is_restart=unit == "*")

    async def _note_entries(self, blocks: Mapping[int, int], max_entries: int) -> GroupEntries:
        group = await self.calls.answered(lambda: self._store.entries.note(self.grant, blocks, max_entries))
        if group is None:
            raise Fenced
        return group

    async def keep_facts(self, facts: Facts | None = None) -> None:
        """Write the flags, the main KV-cache group, and the further facts in ``facts`` into the record.

        The next worker reads the flags and the main KV-cache group before it applies a batch.
        """
        if not self._is_staged:
            await self.write({**self._facts, **(facts or {})}, {})

    @property
    def _facts(self) -> Facts:
        resolver = self.resolver
        group = "" if resolver.main_group is None else str(resolver.main_group)
        return {"flags": " ".join(sorted(resolver.flags)), "main_groups": group}

    async def write(self, facts: Facts, counters: Mapping[str, int]) -> None:
        await self.calls.accepted(lambda: self._store.records.write(self.grant, facts, counters))

    async def set_lost(self, *, is_lost: bool) -> None:
        await self.calls.accepted(lambda: self._store.records.set_lost(self.grant, is_lost=is_lost))

    async def note_health(self, milliseconds: int) -> None:
        """Note that the engine cannot be reached, for this many milliseconds, or with 0 that it can."""
        await self.calls.accepted(lambda: self._store.records.note_health(self.grant, milliseconds=milliseconds))

    async def check_lease(self) -> None:
        """Raise Fenced if the last renewal has found that another worker has the stream, or that Redis has lost writes.

        Raise RecordDamaged if it could not read the record.
        """
        renewal = self.grant.renewal
        if renewal.error is not None:
            raise renewal.error
        if renewal.is_fenced or 0 in renewal.lost_shards:
            raise Fenced  # the record is on shard 0 and shows the same loss to the next applier
        if renewal.lost_shards:
            await self._lost()

    async def _lost(self) -> None:
        """End the life, because a shard has lost writes.

        The watermark is on another shard and does not show the loss.
        """
        log.warning(
            "redis has lost writes; the stream begins a new life",
            extra=fields(stream=str(self.grant.claim.registration.name)),
        )
        await self.new_life()
        raise Fenced

    async def _end(self, unit: Unit, *, is_restart: bool) -> None:
        if self._is_staged and unit != "*":
            await self._end_staged(unit)
        else:
            await self._change(unit=str(unit), is_restart=is_restart, begin=[])
        self.counters["waiting_lost"] += self.resolver.end(unit)
        self.counters["waiting"] = self.resolver.waiting.blocks + len(self.resolver.objects)
        self.counters[MISSING] = self.resolver.unknown
        await self.slices.run(self.resolver.memory.release())

    async def forget(self) -> None:
        """Free what is known of the blocks: the applier is of no further use."""
        await self.slices.run(self.resolver.memory.drop())

    def miss(self, batches: int) -> None:
        """Count the blocks of lost batches as missing: for each batch, the average number of blocks per batch."""
        stored, applied = self.counters["blocks_stored"], self.counters["batches"]
        self.resolver.missing += batches * stored // max(1, applied)

    async def begin(self, new_holders: Mapping[HolderName, Holder]) -> None:
        """Begin holders by their names; the resolver knows their ids afterwards. Raises Fenced."""
        begin = [NewHolder(name, holder) for name, holder in new_holders.items()]
        if self._is_staged:
            ids = await self._stage(begin)
        else:
            ids = await self._change(unit="", is_restart=False, begin=begin)
        self.resolver.begin(list(new_holders), ids)

    # ---- a life that readers do not see ------------------------------------------------------------

    async def _stage(self, begin: Sequence[NewHolder]) -> list[int]:
        highest, nonce = await self._above(), random_nonce()
        ids = await self.calls.answered(lambda: self._store.records.stage(self.grant, begin, highest, nonce))
        if ids is None:
            raise Fenced
        self._staged += begin
        return ids

    async def _end_staged(self, unit: Unit) -> None:
        holders = [holder for holder in self._staged if holder.name.is_of(unit)]
        if holders:
            self._staged = [holder for holder in self._staged if holder not in holders]
            nonce, records = random_nonce(), self._store.records
            await self.calls.accepted(lambda: records.drop_staged(self.grant, nonce, holders))

    async def copy(self, former: Applier, seq: int, tick: Callable[[], Awaitable[None]]) -> bool:
        """Give the staged life all blocks of another life of the stream, as if batch ``seq`` had stored them, except
        those of windows that are not read any more.

        ``tick`` is awaited between portions. Return whether all are there: a holder may end meanwhile, and a row in
        Redis may be damaged.
        """
        resolver, source, position = self.resolver, former.resolver, 1
        resolver.facts.restore(frozenset(source.flags), source.main_group)
        holders = dict(source.holders)
        new_holders = resolver.holders_like(holders)
        if new_holders:
            await self.begin(new_holders)
        for name in new_holders:
            async for keys in self._store.takeover.keys_of(self.grant, holders[name]):
                if source.holders != holders:
                    return False
                work = resolver.copy(seq, position, resolver.holders[name], (source.memory, holders[name]), keys)
                parts, position = await self.slices.run(work)
                await self._apply_all(parts)
                await tick()
        if source.holders != holders:
            return False
        return resolver.memory.blocks == sum(source.memory.blocks_of(holders[name]) for name in new_holders)

    async def take_place(self, commit: Commit, *, is_repair: bool) -> None:
        """End the life of the stream, and replace it by the staged one. Raise Fenced if another worker has the
        stream. See ``Records.take_staged``.
        """
        nonce, records = random_nonce(), self._store.records
        await self.calls.accepted(
            lambda: records.take_staged(self.grant, commit, self._facts, self._staged, nonce, is_repair=is_repair)
        )
        if is_repair:
            self.grant.change.wants_repair = False
        self._is_staged, self._staged = False, []
        self.resolver.is_snapshot = False
        self.resolver.memory.end_snapshot()

    async def drop_staged(self) -> None:
        """Forget the staged blocks, of this applier or of a former worker; the life of the stream stays. Raises
        Fenced.
        """
        nonce = random_nonce()
        await self.calls.accepted(lambda: self._store.records.drop_staged(self.grant, nonce))
        if self._is_staged:
            await self.forget()

    async def _change(self, *, unit: str, is_restart: bool, begin: Sequence[NewHolder]) -> list[int]:
        """End holders, or begin others, and return the ids of those begun. Redis makes a repeated change only once."""
        highest, nonce = await self._above(), random_nonce()
        ids = await self.calls.answered(
            lambda: self._store.records.new_life(
                self.grant, unit=unit, is_restart=is_restart, begin=begin, above=highest, nonce=nonce
            )
        )
        if ids is None:
            raise Fenced
        return ids

    async def _above(self) -> int:
        """Return the highest holder id on any shard. It is read again each time if other shards may have raised it."""
        if self.grant.shards == 1:
            return self.grant.above
        highest = await self.calls.answered(lambda: self._store.leases.highest_holder(self.grant))
        if highest is None:
            raise Fenced
        return highest


def _cut_at_clears(fold: Sequence[Incoming]) -> list[Sequence[Incoming]]:
    """Cut the fold into pieces, each of which begins with the fold or with a batch that clears a device alone.

    Events off the device name blocks that were on the device before the clear. A fold leaves out blocks that it clears
    later, so these blocks must be in an earlier fold.
    """
    starts = [i for i, incoming in enumerate(fold) if i and incoming.batch.clears_device]
    return [fold[start:end] for start, end in pairwise([0, *starts, len(fold)])]


# Cuts a large fold into portions, so that each call to Redis is bounded, however large a batch is.
#
# An ordinary fold is one portion. The applier waits for Redis after each portion, so the event loop runs other tasks.


_BLOCKS = CALL_BLOCKS
_BLOCKS_MAX = 16_384
_PARTS = 1024


def portions_of(parts: Sequence[Part], shards: int) -> list[Sequence[Part]]:
    """Split the parts, in order, into portions with bounded numbers of parts and blocks. There is at least one."""
    if len(parts) < _PARTS and blocks_of(parts) <= _BLOCKS:
        return [parts]
    blocks_max = min(_BLOCKS * shards, _BLOCKS_MAX)
    packed_parts = packed(parts)
    if packed_parts is not None:
        ends = [0]
        while ends[-1] < len(parts):
            ends.append(packed_parts.end(ends[-1], _PARTS, blocks_max))
        return [packed_parts.cut(start, end) for start, end in pairwise(ends)]
    portions: list[Sequence[Part]] = []
    portion: list[Part] = []
    blocks = 0
    for part in parts:
        if portion and (len(portion) >= _PARTS or blocks + part.count > blocks_max):
            portions.append(portion)
            portion, blocks = [], 0
        portion.append(part)
        blocks += part.count
    return [*portions, portion]
