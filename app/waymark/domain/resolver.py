"""Turns events into parts: finds the block of each engine hash of a batch, and its place.

One resolver follows one life of one stream. ``plan`` looks at folded batches and returns the steps before they can be
resolved: holders to end and begin, facts to keep. ``resolve`` then turns each batch into parts, without waiting for
Redis. ``resolve`` changes the memory of the stream, so a batch is resolved once, and its parts are applied until Redis
has acknowledged them. All of this happens in slices.

It follows the rules of the event contract under "From an event to blocks". A block that cannot be placed is counted by
reason, and never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from waymark.domain import chunks
from waymark.domain.chunks import CHUNK_BLOCKS_MAX
from waymark.domain.events import Batch, Cleared, Event, PlainEvents, Removed, Stored
from waymark.domain.generations import BlockBounds, Generations, RemovalReason
from waymark.domain.hashing import extend
from waymark.domain.held import HeldBlocks
from waymark.domain.known import Spot
from waymark.domain.life_facts import COPIES_EACH, COPIES_LAST, COPIES_REUSED, EXTRA_KEYS, UNTRUSTED, LifeFacts
from waymark.domain.media import DEVICE
from waymark.domain.names import HolderName, Registration, Unit
from waymark.domain.objects import EARLY_MAX, WaitingObjects
from waymark.domain.part_list import PartList
from waymark.domain.parts import STEP, Mode, Parts
from waymark.domain.placing import Placer
from waymark.domain.plan import Plan, Planner
from waymark.domain.rows import Place
from waymark.domain.slices import EVENT_WORK, SLICE_WORK, Slices
from waymark.domain.waiting import WaitingRoom, WaitingStore

__all__ = ["EXTRA_KEYS", "UNTRUSTED", "Plan", "Resolver"]

_Placed: TypeAlias = list[tuple[int, Sequence[int]]]
"""Ranks with engine hashes that have a place now; stores may wait for one."""


class _PlainRun(NamedTuple):
    """Plain events of a batch, and the facts shared by those that can be resolved together."""

    events: PlainEvents
    holder: int
    dp_rank: int
    namespace: int
    may_store: bool
    may_remove: bool
    is_unsalted: bool
    """The stores are of a release whose events have no place for a salt or an image."""


_UNBOUNDED = BlockBounds()
_CHUNK_POSITIONS: Final = 2**28
"""From this position of a batch on, a removal removes only the last block of a chunk."""
_LATE_POSITION: Final = 2**29
_LATE_CHUNKS: Final = 2**22
"""The same for the chunks of a device, whose rest has positions from ``_LATE_POSITION`` on."""


class Resolver:
    def __init__(
        self,
        registration: Registration,
        publisher: int,
        *,
        seed: int,
        blocks_max: int,
        waiting_blocks: int,
        shards: int = 1,
        registered_ranks: frozenset[int] = frozenset(),
        memory: HeldBlocks | None = None,
        bounds: BlockBounds = _UNBOUNDED,
        reads_windows: bool = False,
    ) -> None:
        """Create a resolver. ``reads_windows``: groups of a hybrid model other than full attention have holders of
        their own.
        """
        self.registration = registration
        self._traits = registration.kind.traits
        self.memory = HeldBlocks() if memory is None else memory
        self.placer = Placer(self.memory, shards)
        self._blocks_max = blocks_max
        self.waiting = WaitingRoom(waiting_blocks)
        self.holders: dict[HolderName, int] = {}
        """Live holder ids by name."""
        self.event_ids: dict[int, int] = {}
        """Standard events: the last event_id per holder. It may be ahead of Redis by events that are resolved but not
        applied.
        """
        self._moved: dict[int, int] = {}
        self._is_part_seen = False
        """Whether the standard event whose parts are being resolved was seen before."""
        self.ignored: Counter[str] = Counter()
        """The number of ignored events, by reason; the owner reads and clears it."""
        self.unresolved = 0
        """The number of unknown hashes in removals and placeholders."""
        self.missing = 0
        """The approximate number of the publisher's blocks that are unknown here, besides those of the waiting room."""
        self.is_snapshot = False
        """The events are those of a snapshot, which stores and removes each copy."""
        self.before: Mapping[int, Spot] = {}
        """The blocks that hashes of a snapshot without tokens stood for in the life before it."""
        self.below_zero = 0
        """Removals of blocks of which no copy was there; the owner of a snapshot reads it."""
        self.contradictions = 0
        """Blocks of which the engine has another number of copies than was counted."""
        self.doubts: set[str] = set()
        """Flags of rules for copies that the events show, and that ``flags`` does not have yet; the owner adds them."""
        self.unsalted = 0
        """The number of stores from releases that cannot name a salt or an image: they may be indexed under a wrong
        identity.
        """
        self.objects = WaitingObjects(waiting_blocks, registration.object_shards)
        self._early = 0
        """The number of positions in use, of the ``EARLY_MAX`` of the next batch."""
        self._late_rests: list[tuple[int, Sequence[int], tuple[int, ...]]] = []
        """Chunks of a device that the batch removes: position, holders and hashes."""
        self._work = 0
        """Work since the loop had its turn, of all batches of a fold."""
        self.reported: Mapping[int, Spot] = {}
        """The blocks that engines of a pool's group have reported for the hashes looked up for this fold."""
        self.generations = Generations(bounds)
        self._holders_of: dict[HolderName, list[int]] = {}
        """The live holders of each lasting name, oldest first."""
        self._facts = LifeFacts(registration, reads_windows=reads_windows)
        self._planner = Planner(registration, publisher, registered_ranks, self.generations, self._facts)
        self._seed = seed

    @property
    def unknown(self) -> int:
        """About how many blocks the publisher has in this life that the index does not know."""
        waiting = self.waiting.blocks - self.waiting.removed + len(self.objects)
        return self.missing + self.waiting.dropped_there + waiting

    @property
    def _may_report(self) -> bool:
        """Whether a store of known blocks may be a report of the publisher's cache, although its kind otherwise
        announces copies: counts are not trusted, and the two cannot be told apart.
        """
        return (
            self._traits.copies == "count"
            and (self.registration.copies == "set" or UNTRUSTED in self.flags)
            and COPIES_REUSED not in self.flags
        )

    @property
    def flags(self) -> set[str]:
        return self._facts.flags

    @property
    def main_group(self) -> int | None:
        return self._facts.main_group

    @property
    def registered_ranks(self) -> frozenset[int]:
        """Ranks of the instance with a registration; the batches of all but this stream's own are not applied here."""
        return self._planner.registered_ranks

    @registered_ranks.setter
    def registered_ranks(self, ranks: frozenset[int]) -> None:
        self._planner.registered_ranks = ranks

    # ---- lives -------------------------------------------------------------------------------------

    def resume(
        self,
        holders: Mapping[HolderName, int],
        flags: frozenset[str],
        main_group: int | None,
        event_ids: Mapping[int, int],
    ) -> None:
        """Take over a stream as its record has it."""
        self._facts.restore(flags, main_group)
        self.event_ids = dict(event_ids)
        for name, holder in sorted(holders.items(), key=lambda each: each[1]):
            self._begin(name, holder)
        for name, holder in holders.items():
            self._inherit(name, holder)

    def begin(self, names: Sequence[HolderName], ids: Sequence[int]) -> None:
        """Note the holders that were begun for a plan."""
        for name, holder in zip(names, ids, strict=True):
            self._inherit(name, holder)
            if holder in self.event_ids:
                self._moved[holder] = self.event_ids[holder]
            self._begin(name, holder)

    def end(self, unit: Unit) -> int:
        """Forget the holders of a unit ('*': all, and the life with them); blocks that waited are counted."""
        names = [name for name in self.holders if name.is_of(unit)]
        ended = [self.holders.pop(name) for name in names]
        for name, holder in zip(names, ended, strict=True):
            self.generations.end(name)
            self.placer.others.pop(holder, None)
            self._holders_of[name.lasting].remove(holder)
            self._relate(name.lasting)
            self.memory.end(holder)
            self.event_ids.pop(holder, None)
            self._moved.pop(holder, None)
        if unit == "*":
            self._facts.forget()
        if not self.holders:
            self.missing = self.waiting.dropped_there = 0
        return self.waiting.clear(ended) + self.objects.end(ended)

    def over(self) -> list[tuple[HolderName, RemovalReason | None]]:
        """Return the generations beyond a bound, oldest first, with the reason; None for one without blocks."""
        return list(self.generations.over(self.holders, self.memory.blocks_of))

    def _inherit(self, name: HolderName, holder: int) -> None:
        """Continue the order of a standard stream in a new generation."""
        known = [self.event_ids[other] for other in self._holders_of.get(name.lasting, ()) if other in self.event_ids]
        if known:
            self.event_ids[holder] = max(known)

    def _begin(self, name: HolderName, holder: int) -> None:
        self.holders[name] = holder
        self.memory.begin(holder, name.dp_rank)
        self.generations.begin(name)
        self._holders_of.setdefault(name.lasting, []).append(holder)
        self._relate(name.lasting)

    def _relate(self, lasting: HolderName) -> None:
        """Give the placer the holders that are generations of one name."""
        holders = self._holders_of[lasting]
        for holder in holders:
            self.placer.others[holder] = tuple(other for other in holders if other != holder)
        if not holders:
            del self._holders_of[lasting]

    def _newest_beside(self, holder: int) -> int:
        """Return the newest generation of the holder's name."""
        return max((holder, *self.placer.others.get(holder, ())))

    def mode(self, holder: int) -> Mode:
        """Return the way in which copies of this holder count now."""
        if self.is_snapshot:
            return "count"
        if self.registration.copies == "set":
            return "set"
        return "all" if UNTRUSTED in self.flags or self._facts.removes_once else "count"

    # ---- before a fold -----------------------------------------------------------------------------

    def plan(self, batches: Sequence[Batch]) -> Slices[Plan]:
        """Find the holders to end and begin, and the facts to keep. Learns flags and the main group on the way."""
        if self.memory.is_over:
            yield from self.memory.trim()
        self.placer.begin_fold()
        return (yield from self._planner.plan(batches, self.holders, self.event_ids, self.memory.blocks_of))

    def hashes_to_find(self, batches: Sequence[Batch]) -> Slices[list[int]]:
        """Return the hashes of a pool that other engines may have reported, in a fold and in the waiting room, each
        once.
        """
        if self.registration.scope != "shared":
            return []
        hashes = self.objects.some()
        seen = set(hashes)
        for batch in batches:
            # Plain stores have their tokens.
            for event in () if type(batch.events) is PlainEvents else batch.events:
                self._work += EVENT_WORK
                if isinstance(event, Stored) and _is_reported_elsewhere(event):
                    self._work += len(event.engine_hashes)
                    new = [each for each in event.engine_hashes if each not in seen]
                    seen.update(new)
                    hashes += new
                if self._work > SLICE_WORK:
                    self._work = 0
                    yield
        return hashes

    def name_of(self, batch: Batch, event: Event) -> HolderName:
        """Return the lasting name of the event's holder in this stream."""
        return self._planner.name(batch, event).lasting

    # ---- a batch -----------------------------------------------------------------------------------

    def resolve(self, plan: Plan, index: int, seq: int, batch: Batch) -> Slices[Parts]:
        """Return the parts of one batch of the fold; ``index`` is its place in the fold."""
        parts = self.placer.begin_batch(seq)
        self._planner.epochs = plan.epochs[index] if plan.epochs else {}
        position = self._first_position
        self._early = 0
        self._late_rests.clear()
        waited = self.waiting.blocks
        placed: _Placed = []
        windows = self._facts.windows
        late: list[tuple[int, Stored | Removed]] = []
        plain = self._plain_run(plan, index, batch)
        j = -1
        while j + 1 < len(batch.events):
            j += 1
            if plain is not None:
                j, position = yield from self._run(parts, plain, j, position, placed)
                if j == len(batch.events):
                    break
            event = batch.events[j]
            if windows and not isinstance(event, Cleared) and self._facts.window_of(event) is not None:
                late.append((j, event))
                continue
            if windows and isinstance(event, Removed) and event.group is None and event.envelope is None:
                # Its engine names no groups in removals of main attention; nothing is left of the block.
                late += [(j, replace(event, group=group)) for group in windows]
            self._work += EVENT_WORK if isinstance(event, Cleared) else EVENT_WORK + len(event.engine_hashes)
            if self._work > SLICE_WORK:
                self._work = 0
                yield
            reason = self._planner.skip_reason(plan, batch, event, index, j)
            if reason in ("block_size_mismatch", "inside_block") and isinstance(event, Stored):
                self._drop(reason, event)
            elif reason is not None:
                self._ignore(reason, event)
            elif isinstance(event, Stored):
                if event.block_size > self.registration.block_size:
                    yield from self._chunks(parts, position, batch, event, placed)
                else:
                    self._stored(parts, position, batch, event, placed)
            elif isinstance(event, Removed):
                self._removed(parts, position, batch, event)
            else:
                self._cleared(plan, index, j, batch, event)
            position += self._positions(position, event)
        if late:
            position = yield from self._windows(parts, position, plan, index, batch, late)
        if placed:
            position = yield from self._children(parts, position, placed)
        # Objects that waited in a fold before come after the events of this one's first batch.
        if not index:
            for holder, engine_hash in (yield from self._found()):
                self._find_object(parts, position, holder, engine_hash)
                position += 1
                self._work += EVENT_WORK
                if self._work > SLICE_WORK:
                    self._work = 0
                    yield
        if self._traits.copies == "count":
            self._judge_copies(parts, position)
        if self._late_rests:
            yield from self._late_rests_removed(parts)
        if self.placer.aliased or self.placer.crowded:
            self._count_placed()
        if self._has_missing and self._may_report:
            self._reported_again(parts.parts, max(0, waited - self.waiting.blocks))
        return parts.parts

    def _judge_copies(self, parts: PartList, position: int) -> None:
        """Find contradictions in the counts of copies; once a removal is known to take all copies, remove the leftover
        ones.
        """
        found = self.memory.take_contradictions()
        self.contradictions += found
        if found and self.memory.removes_once and self._counts_copies:
            self.doubts.add(COPIES_LAST)
        if COPIES_LAST in self.flags:
            for holder in self.holders.values():
                for i, engine_hash in enumerate(self.memory.copies(holder).left_over()):
                    self.placer.remove(parts, holder, position + i, engine_hash, mode="all")

    @property
    def _counts_copies(self) -> bool:
        return self.registration.copies == "count" and UNTRUSTED not in self.flags and not self.is_snapshot

    def _removed_again(self, event: Removed) -> None:
        """Note that a block was removed twice without a store in between: it would have fewer copies than zero.

        If removals were believed to take all copies, that rule is wrong.
        """
        if not self._counts_copies or self._traits.may_alias or event.medium not in DEVICE or self.placer.is_behind:
            return
        self.contradictions += 1
        if self._facts.removes_once:
            self.doubts.add(COPIES_EACH)

    def _reported_again(self, parts: Parts, waited: int) -> None:
        """Count the new blocks of a batch that reports known ones again as recovered ones.

        ``waited`` of them had waited here, and were not missing.
        """
        stored = [part for part in parts if part.kind == "+"]
        if any(part.is_known for part in stored):
            new = sum(len(part.packed_hashes) // 8 for part in stored if not part.is_known)
            self._find(max(0, new - waited))

    @property
    def _has_missing(self) -> bool:
        return self.missing > 0 or self.waiting.dropped_there > 0

    def _windows(
        self,
        parts: PartList,
        position: int,
        plan: Plan,
        index: int,
        batch: Batch,
        late: Sequence[tuple[int, Stored | Removed]],
    ) -> Slices[int]:
        """Resolve the events of groups with windows, by their numbers; the position behind them.

        They name blocks of main attention, which may stand behind them in the batch.
        """
        for j, event in late:
            self._work += EVENT_WORK + len(event.engine_hashes)
            if self._work > SLICE_WORK:
                self._work = 0
                yield
            if self._planner.skip_reason(plan, batch, event, index, j) is None:
                self._window(parts, position, batch, event)
            position += len(event.engine_hashes)
        return position

    def _children(self, parts: PartList, position: int, placed: _Placed) -> Slices[int]:
        """Place the stores that waited for a block of this batch. Return the position after them.

        This comes after all of the batch's own events: their positions must not depend on waiting stores, and a removal
        among them still finds the waiting ones.
        """
        while placed:
            for waiting in self.waiting.take_children(*placed.pop(0)):
                assert waiting.event.parent is not None
                waiting.holder = self._newest_beside(waiting.holder)
                parent = self.memory.find(waiting.holder, waiting.event.parent)
                if parent is None:
                    self.waiting.add(waiting)
                else:
                    self._place(parts, position, waiting, parent, placed)
                # Twice as many: blocks that were removed while they waited are removed after it.
                position += 2 * len(waiting.event.engine_hashes)
                self._work += EVENT_WORK + len(waiting.event.engine_hashes)
                if self._work > SLICE_WORK:
                    self._work = 0
                    yield
        return position

    def _count_placed(self) -> None:
        """Count the hashes that the placer gave another meaning, or had no room for."""
        if self.placer.aliased:
            self.ignored["hash_stored_as_another_block"] += self.placer.aliased
        if self.placer.crowded:
            self.ignored["too_many_hashes_of_a_block"] += self.placer.crowded
        self.placer.aliased = self.placer.crowded = 0

    def _plain_run(self, plan: Plan, index: int, batch: Batch) -> _PlainRun | None:
        """Return the common facts of plain events, if some can be resolved together."""
        events, planner = batch.events, self._planner
        if type(events) is not PlainEvents or self.memory.blocks + events.blocks > self._blocks_max:
            return None
        store, removal, namespace = events.store, events.removal, 0
        holders: list[int] = []
        may_store = store is not None and self._may_run(plan, index, batch, store)
        if may_store:
            assert store is not None
            may_store = store.block_size == self.registration.block_size and self._is_plain(store)
            may_store = may_store and not (store.is_reused and self._has_missing)
            namespace = planner.spaces.at_root(store)
            holders += filter(None, [self.holders.get(planner.name(batch, store))])
        may_remove = removal is not None and removal.medium in DEVICE and self._may_run(plan, index, batch, removal)
        if may_remove and self.registration.scope != "shared" and not self._facts.has_units:
            assert removal is not None
            holders += self._holders_of.get(planner.name(batch, removal).lasting, ())
        else:
            may_remove = False
        # Each kind has one holder without another generation, which might already have a block of it.
        if not (may_store or may_remove) or len(holders) != may_store + may_remove or len(set(holders)) > 1:
            return None
        holder = holders[0]
        if self.placer.others.get(holder):
            return None
        is_unsalted = store is not None and not store.tells_salts and self._traits.has_saltless_releases
        first = store or removal
        assert first is not None
        rank = planner.rank(batch, first)
        return _PlainRun(events, holder, rank, namespace, may_store, may_remove, is_unsalted)

    def _may_run(self, plan: Plan, index: int, batch: Batch, event: Stored | Removed) -> bool:
        """Return whether the event and all similar ones are of main attention, and no rule says that they do not
        count.
        """
        if self._facts.windows:
            is_of_all = isinstance(event, Removed) and event.group is None
            if is_of_all or self._facts.window_of(event) is not None:
                return False
        return self._planner.skip_reason(plan, batch, event, index, 0) is None

    def _run(
        self, parts: PartList, plain: _PlainRun, at: int, position: int, placed: _Placed
    ) -> Slices[tuple[int, int]]:
        """Resolve plain events together, up to the first that needs a rule of its own: its number and position."""
        end = len(plain.events)
        while at < end:
            ran = self.placer.plain.run(
                parts,
                plain.holder,
                plain.events,
                at,
                position,
                seed=self._seed,
                namespace=plain.namespace,
                may_store=plain.may_store,
                may_remove=plain.may_remove and not self.waiting.blocks,
            )
            if ran is None or ran.at == at:
                break
            self.unsalted += ran.stores * plain.is_unsalted
            if self.waiting.blocks and ran.stores:
                placed.append((plain.dp_rank, plain.events.loop.hashes(at, ran.at)))
            at, position = ran.at, ran.position
            self._work += EVENT_WORK + ran.stored + ran.removed
            if self._work > SLICE_WORK:
                self._work = 0
                yield
        return at, position

    @property
    def _first_position(self) -> int:
        return 1 + (EARLY_MAX if self.registration.scope == "shared" else 0)

    def skip(self, counted: Mapping[tuple[int, int], tuple[int, int]], watermark: int | None) -> bool:
        """Note how much of the batches behind the watermark Redis has: by holder and shard, seq and position.

        Return whether there is any. Such a batch is resolved again, without the parts that Redis has.
        """
        self.placer.skip(counted)
        behind = -1 if watermark is None else watermark
        positions = [position // STEP for seq, position in counted.values() if seq > behind]
        self._early = max(positions, default=0)
        return bool(positions)

    def resolve_waiting(self, seq: int) -> Slices[Parts]:
        """Return the parts of objects that have waited, and whose blocks an engine has reported meanwhile.

        They begin batch ``seq``, which has not come yet.
        """
        parts = self.placer.begin_batch(seq)
        for holder, engine_hash in (yield from self._found()):
            if self._early < EARLY_MAX:
                self._early += 1
                self._find_object(parts, self._early, holder, engine_hash)
        return parts.parts

    def _found(self) -> Slices[list[tuple[int, int]]]:
        """Return the waiting objects whose blocks engines have reported, as holder and engine hash."""
        return (yield from self.objects.found(tuple(self.holders.values()), self.reported))

    def _ignore(self, reason: str, event: Event) -> None:
        """Count an ignored event, once whatever its parts."""
        if not event.part:
            self.ignored[reason] += 1

    def _drop(self, reason: str, event: Stored) -> None:
        """Ignore a store whose blocks the publisher has."""
        self._ignore(reason, event)
        self.missing += len(event.engine_hashes)

    def _cannot_find(self, count: int) -> None:
        """Count unknown hashes of removals. With them, missing blocks have left the publisher."""
        self.unresolved += count
        self._find(count)

    def _find(self, count: int) -> None:
        """So many blocks are not missing any more."""
        self.missing += self.waiting.dropped_there
        self.waiting.dropped_there = 0
        self.missing = max(0, self.missing - count)

    def take_event_ids(self) -> dict[int, int]:
        """Return per holder the last event_id resolved since the last call; the caller keeps it once it is applied."""
        moved, self._moved = self._moved, {}
        return moved

    def _stored(self, parts: PartList, position: int, batch: Batch, event: Stored, placed: _Placed) -> None:
        holder = self.holders.get(self._planner.name(batch, event))
        if holder is None:
            self._drop("too_many_media", event)
            return
        if self._is_seen(holder, event):
            return
        if self.memory.blocks + len(event.engine_hashes) > self._blocks_max:
            self._drop("too_many_blocks", event)
            return
        if not (event.tells_salts or event.part) and event.tokens and self._traits.has_saltless_releases:
            self.unsalted += 1
        if event.is_reused and self._has_missing:
            # Unknown ones were announced in a lost batch.
            self._find(sum(self.memory.held(holder, each) is None for each in event.engine_hashes))
        if self._is_plain(event) and self._extend(parts, position, holder, event):
            if self.waiting.blocks:
                placed.append((self._planner.rank(batch, event), event.engine_hashes))
            return
        waiting = WaitingStore(event, self._planner.rank(batch, event), holder)
        if event.is_identity:
            self._identity(parts, position, holder, event)
        elif self.registration.scope == "shared" and _is_reported_elsewhere(event):
            shard = "" if event.envelope is None else event.envelope.object_shard or ""
            for i, h in enumerate(event.engine_hashes):
                if self.memory.held(holder, h) is None:
                    self.objects.put(holder, h, shard)
                    self._find_object(parts, position + i, holder, h)
                    self.objects.trim()
        elif not event.tokens:
            self._placeholder(parts, position, waiting)
        elif len(event.tokens) > 4 * self.registration.block_size * len(event.engine_hashes):
            self._drop("sparse", event)
        elif event.parent is None:
            self._place(parts, position, waiting, None, placed)
        else:
            parent = self.memory.find(holder, event.parent)
            if parent is not None:
                self._place(parts, position, waiting, parent, placed)
            elif self._needs_no_parent(holder, event):
                self._place(parts, position, waiting, None, placed)
            elif self._is_behind_a_unit(event):
                self._drop("parent_not_announced", event)
            else:
                self.waiting.add(waiting)

    def _is_behind_a_unit(self, event: Stored) -> bool:
        """Whether the parent is a unit inside a physical block, which its engine never announces by itself."""
        return self._facts.has_units and len(event.engine_hashes) == 1 and event.medium in DEVICE

    def _chunks(self, parts: PartList, position: int, batch: Batch, event: Stored, placed: _Placed) -> Slices[None]:
        """Store the blocks of chunks."""
        for piece in chunks.split(event, self.registration.block_size):
            self._stored(parts, position, batch, piece, placed)
            position += len(piece.engine_hashes)
            yield

    def _extend(self, parts: PartList, position: int, holder: int, event: Stored) -> bool:
        """Store the blocks of a plain event in one step; whether that was possible."""
        if self.placer.others.get(holder):
            return False  # its blocks, and the one before them, may be in another generation
        ns, block_size = self._planner.spaces.at_root(event), self.registration.block_size
        hashes, tokens = event.engine_hashes, event.tokens
        return self.placer.plain.extend(
            parts, holder, position, ns, event.parent, hashes, tokens, block_size, self._seed
        )

    def _identity(self, parts: PartList, position: int, holder: int, event: Stored) -> None:
        """Store blocks whose hashes are seq_hashes; if the parent is unknown, their depth is unknown."""
        ns = self._planner.spaces.at_root(event)
        parent = None if event.parent is None else self._seq_parent(holder, event.parent, ns)
        self.placer.chain(
            parts,
            holder,
            position,
            ns,
            parent,
            [h ^ ns for h in event.engine_hashes] if ns else event.engine_hashes,
            event.engine_hashes,
            mode=self.mode(holder),
            is_identity=True,
            is_reused=event.is_reused is True,
            is_deep=event.is_deep or (event.parent is not None and parent is None),
        )

    def _seq_parent(self, holder: int, seq_hash: int, ns: int) -> Spot | None:
        """Return the place of the block with this seq_hash in namespace ``ns``, or None if its depth is unknown.

        A seq_hash stands for the same prefix in all namespaces of a stream, so the spot may be of another one. The
        prefix has the same depth and the same head in every namespace.
        """
        spot = self.memory.find(holder, seq_hash)
        if spot is None or spot.seq_hash != seq_hash:
            return None
        if spot.namespace == ns:
            return spot
        if spot.place.is_single:
            return None
        return Spot(Place(spot.place.head ^ spot.namespace ^ ns), ns, spot.depth, seq_hash ^ ns)

    def _place(
        self, parts: PartList, position: int, waiting: WaitingStore, parent: Spot | None, placed: _Placed
    ) -> None:
        """Place the blocks of a store that continues ``parent``, or begins at the root."""
        event = waiting.event
        if parent is None:
            ns = self._planner.spaces.at_root(event)
        else:
            ns = parent.namespace
            if not self._planner.spaces.has(event, ns):
                self._drop("adapter_mismatch", event)
                return
        hashes = event.engine_hashes
        if self._is_unsalted(event):
            self._unsalted(parts, position, waiting, ns, parent)
        else:
            seq_hashes = extend(
                None if parent is None else parent.seq_hash,
                event.tokens,
                self.registration.block_size,
                seed=self._seed,
                extras=event.extras,
            )
            hashes = hashes[: len(seq_hashes)]
            if hashes:
                keys = [seq_hash ^ ns for seq_hash in seq_hashes] if ns else seq_hashes
                self.placer.chain(
                    parts,
                    waiting.holder,
                    position,
                    ns,
                    parent,
                    keys,
                    hashes,
                    mode=self.mode(waiting.holder),
                    is_reused=event.is_reused is True,
                )
                self._remove_waited(parts, position, waiting, len(hashes))
        if self.waiting.blocks:
            placed.append((waiting.dp_rank, hashes))

    def _unsalted(self, parts: PartList, position: int, waiting: WaitingStore, ns: int, parent: Spot | None) -> None:
        """Place a store off the GPU: it has tokens, but lacks the salt or image that went into its hashes.

        A known hash names the same block. The rest continues the block before it, unless this life has reported a salt
        or an image: then its identity cannot be known.
        """
        event, width = waiting.event, 4 * self.registration.block_size
        may_hash = EXTRA_KEYS not in self.flags
        is_placed, above = parent is not None or event.parent is None, parent
        count = len(event.tokens) // width
        for i, h in enumerate(event.engine_hashes[:count]):
            spot = self.memory.find(waiting.holder, h)
            if spot is None and is_placed and may_hash:
                tokens = event.tokens[i * width : (i + 1) * width]
                before = None if above is None else above.seq_hash
                seq_hash = extend(before, tokens, self.registration.block_size, seed=self._seed)[0]
                spot = self.placer.next_spot(above, ns, seq_hash ^ ns)
            above = self._known(parts, position + i, waiting, h, spot, above)
            is_placed = above is not None
            ns = ns if above is None else above.namespace
        self._remove_waited(parts, position, waiting, count)

    def _placeholder(self, parts: PartList, position: int, waiting: WaitingStore) -> None:
        """Place a store without tokens: it says that blocks known by their hash are on its medium, too."""
        above: Spot | None = None
        for i, h in enumerate(waiting.event.engine_hashes):
            spot = self.memory.find(waiting.holder, h) or self.before.get(h)
            above = self._known(parts, position + i, waiting, h, spot, above)

    def _window(self, parts: PartList, position: int, batch: Batch, event: Stored | Removed) -> None:
        """Place the blocks of a group with a window: their hashes are those of the main-attention blocks that end with
        them.
        """
        name = self._planner.name(batch, event)
        holders = self._holders_of.get(name.lasting, ())
        newest = self.holders.get(name)
        is_full = self.memory.blocks + len(event.engine_hashes) > self._blocks_max
        for i, h in enumerate(event.engine_hashes):
            if isinstance(event, Removed):
                holder = next((each for each in holders if self.memory.held(each, h) is not None), None)
                if holder is not None:
                    left = None if event.copies_left is None else event.copies_left[i]
                    self.placer.remove(parts, holder, position + i, h, mode=self.mode(holder), copies_left=left)
            elif newest is not None and not is_full:
                spot = self.memory.find(newest, h)
                if spot is None:
                    self.unresolved += 1
                else:
                    is_reused = event.is_reused is True
                    self.placer.block(parts, newest, position + i, h, spot, mode=self.mode(newest), is_reused=is_reused)

    def spots_of(self, dp_rank: int, hashes: Collection[int]) -> dict[int, Spot]:
        """The blocks that these hashes stand for on a rank, or stood for."""
        holder = next((holder for name, holder in self.holders.items() if name.dp_rank == dp_rank), None)
        if holder is None:
            return {}
        return {each: spot for each in hashes if (spot := self.memory.find(holder, each)) is not None}

    def _find_object(self, parts: PartList, position: int, holder: int, engine_hash: int) -> None:
        """Store the block of a pool's object, if all of its object shards are there and its hash is reported."""
        spot = self.memory.find(holder, engine_hash) or self.reported.get(engine_hash)
        if spot is not None and self.objects.take(holder, engine_hash, self._facts.shards):
            self.placer.block(parts, holder, position, engine_hash, spot, mode=self.mode(holder))

    def _known(
        self,
        parts: PartList,
        position: int,
        waiting: WaitingStore,
        engine_hash: int,
        spot: Spot | None,
        above: Spot | None,
    ) -> Spot | None:
        """Store a block after its lookup; one without a spot is ignored."""
        if spot is None:
            self.unresolved += 1
            self.missing += 1
            return None
        if above is not None and (above.place.head != spot.place.head or above.depth + 1 != spot.depth):
            above = None
        return self.placer.block(
            parts,
            waiting.holder,
            position,
            engine_hash,
            spot,
            above,
            mode=self.mode(waiting.holder),
            is_reused=waiting.event.is_reused is True,
        )

    def _remove_waited(self, parts: PartList, position: int, waiting: WaitingStore, count: int) -> None:
        """Remove blocks that an event removed while they waited: they are gone, but a child may name them."""
        if not waiting.removed:
            return
        hashes = waiting.event.engine_hashes[:count]
        for i, h in enumerate(hashes):
            if h in waiting.removed:
                self.placer.remove(
                    parts,
                    waiting.holder,
                    position + len(waiting.event.engine_hashes) + i,
                    h,
                    mode=self.mode(waiting.holder),
                )

    def _removed(self, parts: PartList, position: int, batch: Batch, event: Removed) -> None:
        holders = self._holders_of.get(self._planner.name(batch, event).lasting, ())
        if not holders:
            self._cannot_find(len(event.engine_hashes))
        elif not self._is_seen(holders[-1], event):
            self._removed_from(parts, position, holders, event)
            if self._facts.chunk_blocks == 1:
                return
            if _may_be_chunks(position, event):
                self._rest_removed(parts, position + len(event.engine_hashes), holders, event)
            elif self._facts.has_units and event.medium in DEVICE:
                self._late_rests.append((position, holders, event.engine_hashes))

    def _removed_from(self, parts: PartList, position: int, holders: Sequence[int], event: Removed) -> None:
        """Remove blocks that one of ``holders`` has, the generations of one name."""
        newest = holders[-1]
        is_plain = not self.waiting.blocks and len(holders) == 1 and self.registration.scope != "shared"
        if (
            is_plain
            and not any(event.copies_left or ())
            and self.placer.plain.take(parts, newest, position, event.engine_hashes)
        ):
            return
        mode = self.mode(newest)
        for i, h in enumerate(event.engine_hashes):
            left = None if event.copies_left is None else event.copies_left[i]
            if self.waiting.blocks and not left and any(self.waiting.remove(holder, h) for holder in holders):
                continue
            holder = next((each for each in holders if self.memory.held(each, h) is not None), newest)
            if self._object_removed(holder, event, h):
                continue
            is_found = self.placer.remove(parts, holder, position + i, h, mode=mode, copies_left=left)
            self.below_zero += not is_found
            if is_found or left:
                continue
            if self.memory.gone(holder, h):
                self._removed_again(event)
            else:
                self._cannot_find(1)

    def _rest_removed(self, parts: PartList, position: int, holders: Sequence[int], event: Removed) -> None:
        """Remove the blocks of chunks, except the last ones; ``position`` is behind those."""
        for i, chunk in enumerate(event.engine_hashes):
            self._rest_of_chunk_removed(parts, position + i * (CHUNK_BLOCKS_MAX - 1), holders, chunk)

    def _late_rests_removed(self, parts: PartList) -> Slices[None]:
        """Remove the rest of each chunk that has left a device, behind all positions of the batch.

        The positions of hashes on a device must not depend on whether any of them is known to be a chunk. So the rests
        have positions of their own, which follow from those of the hashes.
        """
        for position, holders, hashes in self._late_rests:
            for at, chunk in enumerate(hashes, position):
                is_there = any(self.mode(each) != "count" and self.memory.held(each, chunk) for each in holders)
                if at < _LATE_CHUNKS and not is_there:  # otherwise the batch has stored it again
                    self._rest_of_chunk_removed(parts, _LATE_POSITION + at * CHUNK_BLOCKS_MAX, holders, chunk)
                self._work += EVENT_WORK
                if self._work > SLICE_WORK:
                    self._work = 0
                    yield

    def _rest_of_chunk_removed(self, parts: PartList, position: int, holders: Sequence[int], chunk: int) -> None:
        for i, h in enumerate(chunks.hashes_of(chunk, self._facts.chunk_blocks)[:-1]):
            if self.waiting.blocks and any(self.waiting.remove(holder, h) for holder in holders):
                continue
            holder = next((each for each in holders if self.memory.held(each, h) is not None), None)
            if holder is not None:
                self.placer.remove(parts, holder, position + i, h, mode=self.mode(holder))

    def _object_removed(self, holder: int, event: Removed, engine_hash: int) -> bool:
        """Note that an object shard has left a pool. Return whether the block was never indexed, so that this is
        all.
        """
        shard = "" if event.envelope is None else event.envelope.object_shard or ""
        if self.registration.scope != "shared" or event.is_identity:
            return False
        if self.memory.held(holder, engine_hash) is None:
            return self.objects.remove(holder, engine_hash, shard)
        self.objects.keep(holder, engine_hash, self._facts.shards - {shard})
        self.objects.trim()
        return False

    def _cleared(self, plan: Plan, i: int, j: int, batch: Batch, event: Cleared) -> None:
        """Keep the event_id of a clear for later events. The plan has already ended its unit."""
        if event.envelope is None:
            return
        name = self._planner.name(batch, event)
        if plan.last_clear.get(name.lasting) != (i, j):
            self.ignored["seen"] += 1
        elif (holder := self.holders.get(name)) is not None:
            self._moved[holder] = self.event_ids[holder] = event.envelope.event_id

    def _is_seen(self, holder: int, event: Stored | Removed) -> bool:
        """Return whether a standard event came before; its own order is its event_id."""
        if event.envelope is None:
            return False
        if not event.part:
            self._is_part_seen = event.envelope.event_id <= self.event_ids.get(holder, -1)
        if self._is_part_seen:
            self._ignore("seen", event)
            return True
        self._moved[holder] = self.event_ids[holder] = event.envelope.event_id
        return False

    def _positions(self, position: int, event: Event) -> int:
        """Return how many positions an event at ``position`` takes in its batch, even if it is ignored."""
        if isinstance(event, Cleared):
            return 1
        each = 1
        if isinstance(event, Removed):
            each = CHUNK_BLOCKS_MAX if _may_be_chunks(position, event) else 1
        elif event.block_size > self.registration.block_size:
            each = chunks.blocks_of(event, self.registration.block_size)
        return each * len(event.engine_hashes)

    # ---- kinds of events ---------------------------------------------------------------------------

    def _needs_no_parent(self, holder: int, event: Stored) -> bool:
        """Return whether a store with an unknown parent can be placed: at the root, or by known hashes."""
        if event.parent == 0 and event.may_begin:
            return True
        return self._is_unsalted(event) and any(self.memory.find(holder, h) is not None for h in event.engine_hashes)

    def _is_plain(self, event: Stored) -> bool:
        """Return whether the event has the tokens of all of its blocks, and its hashes cover only tokens."""
        dense = 4 * self.registration.block_size * len(event.engine_hashes)
        return len(event.tokens) == dense and event.extras is None and not self._is_unsalted(event)

    def _is_unsalted(self, event: Stored) -> bool:
        """Return whether the event may omit a salt or image that went into its hashes."""
        return (
            event.medium not in DEVICE
            and event.envelope is None
            and not self._traits.names_salts_off_device
            and not event.salts
            and not event.extras
        )


def _is_reported_elsewhere(event: Stored) -> bool:
    """Return whether a pool's event names blocks only by hashes of the engines in front of it."""
    return not event.tokens and not event.is_identity


def _may_be_chunks(position: int, event: Removed) -> bool:
    """Return whether blocks of chunks may leave with an event; ``position`` is its own, and has 32 bits in the end."""
    return event.medium not in DEVICE and event.envelope is None and position < _CHUNK_POSITIONS
