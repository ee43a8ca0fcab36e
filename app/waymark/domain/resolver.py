"""Turns events into parts: finds the block of each engine hash of a batch, and its place.

One resolver follows one life of one stream. ``plan`` looks at folded batches and returns the steps that come before
they are resolved: holders to end and begin, facts to keep. ``resolve`` then turns each batch into parts, without
waiting for Redis. ``resolve`` changes the state of the stream, so a batch is resolved once, and its parts are applied
until Redis has acknowledged them. All of this happens in slices.

``rules`` says how each kind of event is resolved. A block that cannot be placed is counted by reason; its place is
never guessed.

Plain events are resolved together, by ``plain_runs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from waymark.domain.events import (
    REMOVALS,
    STORES,
    Batch,
    Cleared,
    Event,
    PlainEvents,
    RemovalEvent,
    Removed,
    Stored,
    StoredObject,
    StoredReference,
    StoredWindow,
    StoreEvent,
)
from waymark.domain.held import HeldBlocks
from waymark.domain.life_facts import EXTRA_KEYS, UNTRUSTED
from waymark.domain.mixed_runs import MixedRun, MixedRuns
from waymark.domain.names import Holder, HolderName, Registration
from waymark.domain.parts import STEP, Parts, joined
from waymark.domain.plain_runs import AlikeFrames, BegunFrames, PlainRuns
from waymark.domain.plan import Plan, Planner, hashes_known_before
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.rules import BatchProgress, Rules
from waymark.domain.slices import EVENT_WORK, Slice, Slices
from waymark.domain.stream_blocks import StreamBlocks
from waymark.domain.waiting import EARLY_MAX

Fold: TypeAlias = Sequence[tuple[int, Batch]]
"""Batches to resolve together, each with the seq of its first frame."""


__all__ = ["EXTRA_KEYS", "UNTRUSTED", "Plan", "Resolver"]

_REPORTED_ELSEWHERE = (StoredReference, StoredObject)
"""The events of a pool that name blocks only by hashes of the engines in front of it."""


class Resolver(StreamBlocks):
    def __init__(
        self,
        registration: Registration,
        publisher: int,
        *,
        seed: int,
        registered_ranks: frozenset[int] = frozenset(),
        **options: Any,
    ) -> None:
        """Create a resolver; ``options`` are those of ``StreamBlocks``."""
        super().__init__(registration, **options)
        self._planner = Planner(registration, publisher, registered_ranks, self.generations, self.facts)
        self._rules = Rules(self, self._planner.spaces, seed)
        self._plain = PlainRuns(self, self._planner, self._rules.tokens, seed)
        self._mixed = MixedRuns(self, self._planner, self._rules, seed)
        self._seed = seed
        self._early = 0
        """How many of the next batch's ``EARLY_MAX`` positions are in use."""
        self._slice = Slice()
        """The work since the event loop last ran, over all batches of a fold."""

    def close(self) -> None:
        """Drop the rules, whose references to this object would keep it alive."""
        del self._rules, self._plain, self._mixed

    @property
    def registered_ranks(self) -> frozenset[int]:
        """The registered ranks of the instance. This stream skips batches of ranks with a stream of their own."""
        return self._planner.registered_ranks

    @registered_ranks.setter
    def registered_ranks(self, ranks: frozenset[int]) -> None:
        self._planner.registered_ranks = ranks

    # ---- before a fold -----------------------------------------------------------------------------

    @property
    def takes_frames(self) -> bool:
        """Whether a batch may stand for several frames. It may not if generations end with the frame that fills them,
        and it would save nothing in a pool.
        """
        return not (self.generations.bounds.max_entries or self.is_shared)

    def plan(self, batches: Sequence[Batch]) -> Slices[Plan]:
        """Find the holders to end and begin, and the facts to keep. This also learns flags and the main group."""
        if self.memory.is_over:
            yield from self.memory.trim()
        self.placer.begin_fold()
        return (yield from self._planner.plan(batches, self.holders, self.event_ids, self.memory.blocks_of))

    def hashes_to_find(self, batches: Sequence[Batch]) -> Slices[list[int]]:
        """Return the hashes of a pool's batches and waiting objects that other engines may have reported, each once."""
        if not self.is_shared:
            return []
        hashes = self.objects.some()
        distinct = set(hashes)
        for batch in batches:
            # Plain stores have tokens, so they need no lookup.
            for event in () if type(batch.events) is PlainEvents else batch.events:
                work = EVENT_WORK
                if isinstance(event, _REPORTED_ELSEWHERE):
                    work += len(event.engine_hashes)
                    new = [engine_hash for engine_hash in event.engine_hashes if engine_hash not in distinct]
                    distinct.update(new)
                    hashes += new
                if self._slice.is_full(work):
                    yield
        return hashes

    def name_of(self, batch: Batch, event: Event) -> HolderName:
        """Return the lasting name of the event's holder in this stream."""
        return self._planner.name(batch, event).lasting

    # ---- a batch -----------------------------------------------------------------------------------

    def resolve(self, plan: Plan, fold: Fold, begun: BegunFrames | None = None) -> Slices[Parts]:
        """Return the parts of the batches of a fold, in order. The first batch may have ``begun``."""
        parts: Parts = []
        for index, (first_seq, batch) in enumerate(fold):
            seq = first_seq
            rest: Batch | None = batch
            self._planner.epochs = begun.epochs if begun is not None else plan.epochs[index] if plan.epochs else {}
            while rest is not None:
                progress = BatchProgress(self.placer.begin_batch(seq), 1 + (EARLY_MAX if self.is_shared else 0))
                count, frames = 0, rest.frames
                if begun is not None:
                    (progress, count, *_), begun = begun, None
                elif frames > 1:
                    count = yield from self._plain.run_frames(progress, plan, index, seq, rest, self._slice)
                if count < frames:
                    yield from self._resolve_batch(progress, plan, index, rest if frames == 1 else rest.frame(count))
                    count += 1
                parts = joined(parts, progress.parts.parts)
                seq, rest = seq + count, None if count == frames else rest.behind(count)
        return parts

    def alike(self, last: Batch, patterns: Mapping[int | None, Batch], reading: tuple[Any, ...]) -> AlikeFrames | None:
        """Return the short way of further frames that differ from earlier ones of their rank in their blocks only; None
        if there is none.

        ``last`` is the batch that was resolved last, and ``patterns`` has for each rank the ``pattern`` of its batches.
        ``reading`` has the argument of ``run_frames`` that comes from the decoder.
        """
        if self.is_shared:
            return None
        return AlikeFrames.like(self, self._plain, last, patterns, reading, self._seed, self.resolve)

    def _resolve_batch(self, progress: BatchProgress, plan: Plan, index: int, batch: Batch) -> Slices[None]:
        """Resolve a batch of one frame from event ``progress.at`` on; ``index`` is the batch's index in the fold."""
        self._early = 0
        waited = self.waiting.blocks
        windows = self.facts.windows
        late: list[tuple[int, StoredWindow | Removed]] = []
        plain, mixed = self._plain.begin(plan, index, batch), self._mixed.begin(plan, index, batch)
        j = progress.at - 1
        while j + 1 < len(batch.events):
            j += 1
            if plain is not None:
                j = yield from self._plain.run(progress, plain, j, self._slice)
            elif mixed is not None:
                j = yield from self._mixed.run(progress, mixed, j, self._slice, is_late=False)
            if j == len(batch.events):
                break
            event = batch.events[j]
            if windows and isinstance(event, StoredWindow | Removed):
                if self.facts.window_of(event) is not None:
                    late.append((j, event))
                    continue
                if isinstance(event, Removed) and event.group is None and event.envelope is None and mixed is None:
                    late += [(j, removal) for removal in self._rules.windows.of_all(event)]
            if self._slice.is_full(EVENT_WORK if isinstance(event, Cleared) else EVENT_WORK + len(event.engine_hashes)):
                yield
            yield from self._resolve_event(progress, plan, index, j, batch)
        if mixed is not None:
            yield from self._resolve_late(progress, plan, index, batch, mixed)
        for j, late_event in late:
            if self._slice.is_full(EVENT_WORK + len(late_event.engine_hashes)):
                yield
            self._resolve_window(progress, plan, index, j, batch, late_event)
        if progress.placed:
            yield from self._place_children(progress)
        # Objects waiting since an earlier fold come after the events of the first batch.
        if not index and self.objects:
            for holder, engine_hash in (yield from self._found()):
                self._rules.objects.find(progress.parts, progress.position, holder, engine_hash)
                progress.position += 1
                if self._slice.is_full(EVENT_WORK):
                    yield
        self.judge_copies(progress.parts, progress.position)
        if progress.rests:
            yield from self._rules.chunks.remove_rests(progress, self._slice)
        self.count_placed()
        if self.has_missing and self.may_report:
            own = [part for part in progress.parts.parts if part.seq == progress.parts.seq]
            self.recover_reported(own, max(0, waited - self.waiting.blocks))

    def _resolve_event(self, progress: BatchProgress, plan: Plan, index: int, j: int, batch: Batch) -> Slices[None]:
        """Resolve event ``j`` of a batch by its rule, or count why it is ignored."""
        event = batch.events[j]
        end = progress.position + self._rules.chunks.positions(progress.position, event)
        reason = self._planner.skip_reason(plan, batch, event, index, j)
        if reason in ("block_size_mismatch", "inside_block") and isinstance(event, STORES):
            self.drop(reason, event)
        elif reason is not None:
            self.ignore(reason, event)
        elif isinstance(event, Stored) and event.block_size > self.registration.block_size:
            for piece in self._rules.chunks.stored(event):
                self._store(progress, batch, piece)
                progress.position += len(piece.engine_hashes)
                yield
        elif isinstance(event, Cleared):
            self._clear(plan, index, j, batch, event)
        elif isinstance(event, REMOVALS):
            self._remove(progress, batch, event)
        else:
            self._store(progress, batch, event)
        progress.position = end

    def _store(self, progress: BatchProgress, batch: Batch, event: StoreEvent) -> None:
        holder = self.holders.get(self._planner.name(batch, event))
        if holder is None:
            self.drop("too_many_media", event)
            return
        if self.is_seen(holder, event):
            return
        if self.memory.blocks + len(event.engine_hashes) > self.blocks_max:
            self.drop("too_many_blocks", event)
            return
        if event.is_reused and self.has_missing:
            # Hashes unknown here were announced in a lost batch.
            self.recover(sum(self.memory.held(holder, engine_hash) is None for engine_hash in event.engine_hashes))
        self._rules.of(event).stored(progress, holder, self._planner.rank(batch, event), event)

    def _remove(self, progress: BatchProgress, batch: Batch, event: RemovalEvent) -> None:
        holders = self.holders_of(self._planner.name(batch, event))
        if not holders:
            self.cannot_find(len(event.engine_hashes))
        elif not self.is_seen(holders[-1], event):
            self._rules.of(event).removed(progress, holders, event)
            self._rules.chunks.removed(progress, holders, event)

    def _clear(self, plan: Plan, i: int, j: int, batch: Batch, event: Cleared) -> None:
        """Keep the event_id of a clear for later events. The plan has already ended its unit."""
        if event.envelope is None:
            return
        name = self._planner.name(batch, event)
        if plan.last_clear.get(name.lasting) != (i, j):
            self.ignored["seen"] += 1
        elif (holder := self.holders.get(name)) is not None:
            self.note_event_id(holder, event.envelope.event_id)

    def _resolve_late(
        self, progress: BatchProgress, plan: Plan, index: int, batch: Batch, mixed: MixedRun
    ) -> Slices[None]:
        """Resolve the events of groups with windows in a batch of several forms."""
        j = yield from self._mixed.run(progress, mixed, 0, self._slice, is_late=True)
        while j < len(batch.events):
            event = batch.events[j]
            assert isinstance(event, StoredWindow | Removed)
            if isinstance(event, Removed) and event.group is None:
                for removal in self._rules.windows.of_all(event):
                    self._resolve_window(progress, plan, index, j, batch, removal)
            else:
                self._resolve_window(progress, plan, index, j, batch, event)
            j = yield from self._mixed.run(progress, mixed, j + 1, self._slice, is_late=True)

    def _resolve_window(
        self, progress: BatchProgress, plan: Plan, index: int, j: int, batch: Batch, event: StoredWindow | Removed
    ) -> None:
        """Resolve event ``j`` of a batch, of a group with a window.

        Such events name blocks of main attention, which may come later in the batch. So they are resolved after those.
        """
        if self._planner.skip_reason(plan, batch, event, index, j) is None:
            name = self._planner.name(batch, event)
            if isinstance(event, Removed):
                self._rules.windows.removed(progress, self.holders_of(name), event)
            elif name in self.holders:
                self._rules.windows.stored(progress, self.holders[name], name.dp_rank, event)
        progress.position += len(event.engine_hashes)

    def _place_children(self, progress: BatchProgress) -> Slices[None]:
        """Place the stores that waited for a block of this batch.

        This comes after all of the batch's own events: their positions must not depend on waiting stores, and a removal
        among them still finds the waiting ones.
        """
        while progress.placed:
            for waiting in self.waiting.take_children(*progress.placed.pop(0)):
                event = waiting.event
                assert event.parent is not None
                waiting.holder = self.newest_beside(waiting.holder)
                parent = self.memory.find(waiting.holder, event.parent)
                if parent is None:
                    self.waiting.add(waiting)
                else:
                    self._rules.tokens.place(progress, progress.position, waiting, parent)
                # Blocks that were removed while they waited need a second position each, for their removal.
                progress.position += 2 * len(event.engine_hashes)
                if self._slice.is_full(EVENT_WORK + len(event.engine_hashes)):
                    yield

    # ---- the blocks of another life of the stream --------------------------------------------------

    def holders_like(self, names: Iterable[HolderName]) -> dict[HolderName, Holder]:
        """Return new holders for the names of another life, whose facts this life has. A name with a window gets none
        if windows are no longer read.
        """
        holders = {name: self._planner.holder_of(name) for name in names}
        return {name: holder for name, holder in holders.items() if name.has_window == (holder.window is not None)}

    def copy(
        self, seq: int, position: int, holder: int, former: tuple[HeldBlocks, int], keys: Sequence[int]
    ) -> Slices[tuple[Parts, int]]:
        """Return the parts of batch ``seq`` that store the blocks with these keys, and the next position.

        ``former`` is the memory of another life, and its holder. In the parts each block has one copy.
        """
        self.placer.begin_fold()
        parts = self.placer.begin_batch(seq)
        for start in range(0, len(keys), PIECE_BLOCKS):
            position = self.placer.copy(parts, holder, position, former, keys[start : start + PIECE_BLOCKS])
            if self._slice.is_full(PIECE_BLOCKS):
                yield
        return parts.parts, position

    def recall(self, batches: Sequence[Batch], former: StreamBlocks) -> Slices[None]:
        """Remember the blocks that stores of the batches continue or name, if these blocks were gone in the life
        ``former``.
        """
        for batch in batches:
            for event in batch.events:
                if self._slice.is_full(EVENT_WORK):
                    yield
                if not isinstance(event, STORES):
                    continue
                rank = self._planner.rank(batch, event)
                holder, old_holder = self.some_holder(rank), former.some_holder(rank)
                if holder is None or old_holder is None:
                    continue
                for engine_hash in hashes_known_before(event):
                    if self.memory.find(holder, engine_hash) is None:
                        spot = former.memory.gone(old_holder, engine_hash)
                        if spot is not None:
                            self.memory.mark_gone(holder, engine_hash, spot)

    # ---- objects that wait, and batches that Redis has ---------------------------------------------

    def skip(self, counted: Mapping[tuple[int, int], tuple[int, int]], watermark: int | None) -> bool:
        """Note how much of the batches above the watermark Redis has. ``counted``: (holder, shard) -> (seq, position).

        Return whether it has any of them. Such a batch is resolved again, without the parts that Redis has.
        """
        self.placer.skip(counted)
        lowest = -1 if watermark is None else watermark
        positions = [position // STEP for seq, position in counted.values() if seq > lowest]
        self._early = max(positions, default=0)
        return bool(positions)

    def resolve_waiting(self, seq: int) -> Slices[Parts]:
        """Return the parts of waiting objects whose blocks an engine has reported meanwhile.

        These parts begin batch ``seq``, which has not arrived yet.
        """
        parts = self.placer.begin_batch(seq)
        for holder, engine_hash in (yield from self._found()):
            if self._early < EARLY_MAX:
                self._early += 1
                self._rules.objects.find(parts, self._early, holder, engine_hash)
        return parts.parts

    def _found(self) -> Slices[list[tuple[int, int]]]:
        """Return the waiting objects whose blocks engines have reported, as holder and engine hash."""
        return (yield from self.objects.found(tuple(self.holders.values()), self.reported))
