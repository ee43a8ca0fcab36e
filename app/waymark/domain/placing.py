"""Gives each stored block of a stream its place, records the changes as parts, and keeps the memory in step.

A block at depth d belongs to the piece whose head is its ancestor at depth d - d mod 32. A block that the holder has is
addressed at its present place. A new block goes to its parent's place, or to a branch row if that place is full; the
head of a piece begins a new row.

``PlainPlacer`` places the blocks of one or many plain events in one step of ``KnownBlocks``. A step that does not fit
the holder's blocks has no effect; the caller then stores or removes block by block with ``Placer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from waymark.domain.held import HeldBlocks, RemovedCopy
from waymark.domain.known import EventRun, HolderChanges, MixedProgress, Spot
from waymark.domain.packing import KEY_BYTES
from waymark.domain.parts import STEP, Mode, PartKind, PartList, Waves, new_part_list, new_waves, packed
from waymark.domain.rows import PIECE_BLOCKS, SAME_HASH, SLOT_CHARS, Place, keys_of

RUN_HASHES: Final = 2048
"""A run ends with the event that reaches this number of hashes, after a millisecond or two."""


class PlainPlacer:
    """A placer of plain events, which shares memory, waves and marks with a ``Placer``."""

    def __init__(self, memory: HeldBlocks, waves: Waves, applied: AppliedMarks, piece_blocks: int) -> None:
        self._memory = memory
        self._waves = waves
        self._applied = applied
        self._piece_blocks = piece_blocks

    def extend(
        self,
        parts: PartList,
        holder: int,
        position: int,
        namespace: int,
        parent: int | None,
        hashes: Sequence[int],
        tokens: bytes,
        block_size: int,
        seed: int,
    ) -> bool:
        """Hash and store a plain store's blocks at once. Return whether it was plain. See ``KnownBlocks.extend``."""
        if self._applied.marks or SAME_HASH in hashes:
            return False
        previous = self._memory.held(holder, parent) if self._waves.is_needed and parent is not None else None
        has_left = self._waves.has_left
        former = self._memory.gone_blocks(holder, hashes) if has_left else []
        known, gone = self._memory.tables(holder)
        rest = seed, namespace, self._memory.full.places, self._piece_blocks, gone
        pieces = known.extend(parent, hashes, tokens, block_size, *rest)
        if pieces is None:
            return False
        for place, slots, some_hashes, start, previous_key in pieces:
            self._memory.blocks += len(slots) // SLOT_CHARS
            waits = False
            if has_left:
                keys = keys_of(slots)
                blocks = [*former[start : start + len(keys)], *(key ^ namespace for key in keys)]
                waits = self._waves.store(blocks, place)
            if previous is not None:
                self._waves.use(previous.seq_hash, place)
            offset = STEP * (position + start) + 1
            parts.add_packed(
                "+", holder, offset, place, namespace, slots, some_hashes, parent=previous_key, waits=waits
            )
        return True

    def take(self, parts: PartList, holder: int, position: int, hashes: Sequence[int]) -> bool:
        """Remove the blocks of a plain removal at once. Return whether it was plain. See ``KnownBlocks.take``."""
        groups = None if self._applied.marks else self._memory.take(holder, hashes)
        if groups is None:
            return False
        needs_waves = self._waves.is_needed
        for place, namespace, slots, some_hashes in groups:
            waits, start = False, 0
            if needs_waves:
                blocks = [key ^ namespace for key in keys_of(slots)]
                if start := self._waves.first_that_waits(blocks, place):
                    self._waves.leave(blocks[:start], place)
                    first_slots, first_hashes = slots[: SLOT_CHARS * start], some_hashes[: KEY_BYTES * start]
                    offset = STEP * position + 1
                    parts.add_packed("-", holder, offset, place, namespace, first_slots, first_hashes, is_known=True)
                waits = self._waves.leave(blocks[start:], place)
            offset = STEP * (position + start) + 1
            slots_left, hashes_left = slots[SLOT_CHARS * start :], some_hashes[KEY_BYTES * start :]
            parts.add_packed("-", holder, offset, place, namespace, slots_left, hashes_left, is_known=True, waits=waits)
            position += len(slots) // SLOT_CHARS
        return True

    def run(
        self,
        parts: PartList,
        holder: int,
        loop: Any,
        at: int,
        position: int,
        *,
        seed: int,
        namespace: int,
        may: int,
        mode: Mode,
        following: list[tuple[int, Any]],
        generations: Sequence[int],
    ) -> EventRun | None:
        """Store and remove the blocks of the plain events ``loop`` from index ``at`` on, and return the progress.

        ``may`` has the bits ``MAY_STORE``, ``MAY_REMOVE`` and ``MAY_REPEAT``. ``following`` has the seqs and events of
        the next batches. ``generations`` are the other generations of the holder's name. Return None if the events
        cannot be placed in this way. See ``KnownBlocks.run``.
        """
        memory, packed_parts = self._memory, packed(parts.parts)
        if packed_parts is None or self._applied.marks:
            return None
        known, _, gone, neighbours, bits = memory.tables_of_run(holder, mode, generations)
        rest = seed, namespace, memory.full.places, self._piece_blocks, gone, may | bits, following, self._waves
        result = known.run(loop, at, position, RUN_HASHES, packed_parts, holder, *rest, neighbours)
        if result is None:
            return None
        ran = EventRun(*result)
        memory.note_run(holder, ran)
        return ran

    def run_mixed(
        self,
        parts: PartList,
        holders: Sequence[tuple[int, Mode]],
        forms: tuple[tuple[int, int, int, int, int], ...],
        loop: Any,
        start: int,
        position: int,
        *,
        seed: int,
    ) -> MixedProgress | None:
        """Store and remove the blocks of the events ``loop`` from index ``start`` on, and return the progress.

        Return None if they cannot be placed in this way. See ``mixed_runs``.
        """
        memory, packed_parts = self._memory, packed(parts.parts)
        if packed_parts is None or self._applied.marks:
            return None
        tables = tuple([memory.tables_of_run(holder, mode) for holder, mode in holders])
        rest = seed, memory.full.places, self._piece_blocks, self._waves
        ran = MixedProgress(*loop.run(start, position, RUN_HASHES, packed_parts, tables, forms, *rest))
        for (holder, _), changes in zip(holders, ran.holders, strict=True):
            memory.note_run(holder, HolderChanges(*changes))
        return ran

    def running(self, holder: int, seed: int, namespace: int, generations: Sequence[int]) -> tuple[Any, ...]:
        """Return the arguments that all frames share in ``Parts.run_frames``."""
        memory = self._memory
        neighbours = memory.neighbours(holder, generations)
        return holder, seed, namespace, memory.full.places, self._piece_blocks, self._waves, neighbours


# The parts beyond the watermark that Redis has when a worker takes over a stream.
#
# The worker resolves their batches again, and leaves these parts out. It read its memory of the blocks from Redis, so
# the memory includes these parts.


class AppliedMarks:
    """The last applied part of each holder on each shard."""

    def __init__(self, shards: int) -> None:
        self.marks: dict[tuple[int, int], tuple[int, int]] = {}
        """The seq and the position of the last part, by holder and shard. Empty once the stream is beyond all these
        parts.
        """
        self._shards = shards

    def restore(self, marks: Mapping[tuple[int, int], tuple[int, int]]) -> None:
        self.marks = dict(marks)

    def begin_batch(self, seq: int) -> None:
        if self.marks and all(seq > applied for applied, _ in self.marks.values()):
            self.marks = {}

    def has(self, seq: int, offset: int, holder: int, place: Place) -> bool:
        """Return whether Redis has the part that a batch writes at this position."""
        if not self.marks:
            return False
        mark = self.marks.get((holder, place.shard(self._shards)))
        return mark is not None and (seq, offset) <= mark


class Placer:
    """Places the blocks of one stream. Positions count the hashes of a batch, from 1."""

    def __init__(self, memory: HeldBlocks, shards: int, piece_blocks: int = PIECE_BLOCKS) -> None:
        self.memory = memory
        self.aliased = 0
        """The number of hashes that changed to another block."""
        self.crowded = 0
        """The number of hashes refused because their blocks have too many."""
        self._waves = new_waves(shards)
        self._applied = AppliedMarks(shards)
        self._piece_blocks = piece_blocks
        self.plain = PlainPlacer(memory, self._waves, self._applied, piece_blocks)
        self.others: dict[int, tuple[int, ...]] = {}
        """The other generations of each holder's name; a block is in only one generation."""

    def skip(self, marks: Mapping[tuple[int, int], tuple[int, int]]) -> None:
        """Leave out the parts that Redis has; see ``AppliedMarks.marks``."""
        self._applied.restore(marks)

    @property
    def is_behind(self) -> bool:
        """Whether Redis may already have parts of the current fold, so that the blocks removed by these are gone."""
        return bool(self._applied.marks)

    def begin_fold(self) -> None:
        """Begin a fold after Redis has acknowledged all earlier parts."""
        self._waves.begin()

    def begin_batch(self, seq: int) -> PartList:
        self._applied.begin_batch(seq)
        return new_part_list(seq)

    def chain(
        self,
        parts: PartList,
        holder: int,
        position: int,
        namespace: int,
        parent: Spot | None,
        keys: Sequence[int],
        hashes: Sequence[int],
        *,
        mode: Mode,
        is_identity: bool = False,
        is_deep: bool = False,
        is_reused: bool = False,
    ) -> None:
        """Store consecutive blocks of a chain that continues ``parent``, or begins at the root.

        ``is_reused``: blocks that the holder already has are only announced again. ``is_deep``: the chain begins
        neither after ``parent`` nor at the root, so its depth is unknown.
        """
        start, previous = 0, parent
        while start < len(keys):
            depth = 0 if previous is None else (previous.depth + 1) % self._piece_blocks
            end = min(len(keys), start + self._piece_blocks - depth)
            piece, engine_hashes = keys[start:end], hashes[start:end]
            is_single = is_deep or (previous is not None and previous.place.is_single)
            is_plain = not is_single and not self._applied.marks and SAME_HASH not in engine_hashes
            if is_plain and self._are_new(holder, engine_hashes, piece):
                place = self._next_place(previous, depth, piece[0], len(piece))
                depths = range(depth, depth + len(piece))
                waits = self._begins_wave(holder, place, namespace, piece, engine_hashes)
                if parent is not None:
                    self._waves.use(parent.seq_hash, place)
                self.memory.store(holder, place, namespace, piece, depths, engine_hashes)
                parts.add(
                    "+",
                    holder,
                    STEP * (position + start) + 1,
                    place,
                    namespace,
                    piece,
                    depths,
                    engine_hashes,
                    is_identity=is_identity,
                    parent=previous.key if depth and previous is not None else None,
                    waits=waits,
                )
                previous = Spot(place, namespace, depths[-1], piece[-1])
            else:
                for i, (key, engine_hash) in enumerate(zip(piece, engine_hashes, strict=True), start):
                    spot = _single(namespace, key) if is_deep else self.next_spot(previous, namespace, key)
                    previous = self.block(
                        parts,
                        holder,
                        position + i,
                        engine_hash,
                        spot,
                        previous,
                        mode=mode,
                        is_identity=is_identity,
                        is_reused=is_reused,
                    )
                    if parent is not None:
                        self._waves.use(parent.seq_hash, previous.place)
            start = end

    def block(
        self,
        parts: PartList,
        holder: int,
        position: int,
        engine_hash: int,
        spot: Spot,
        previous: Spot | None = None,
        *,
        mode: Mode,
        is_identity: bool = False,
        is_reused: bool = False,
    ) -> Spot:
        """Store one block, and return its spot. ``spot`` is the one to use if the block is new to the holder."""
        memory, offset = self.memory, STEP * position + 1
        copies_of = memory.copies(holder)
        old, same_block = memory.held(holder, engine_hash), memory.held_block(holder, spot.key)
        here = same_block or spot
        if self._applied.has(parts.seq, offset, holder, here.place):
            if old is None:
                memory.mark_gone(holder, engine_hash, spot)
            return here
        if old is not None and old.key != spot.key:
            self.aliased += 1
            self._leave(parts, holder, position, engine_hash, mode)
        if same_block is not None and copies_of.is_crowded(engine_hash, spot.key):
            # The hash counts as removed at once, so children still find their parent, and its removal has no effect.
            self.crowded += 1
            memory.mark_gone(holder, engine_hash, same_block)
            return same_block
        carried: tuple[int, list[int]] | None = None
        for sibling in self.others.get(holder, ()):
            there = memory.held_block(sibling, spot.key)
            if there is not None and self._applied.has(parts.seq, offset, sibling, there.place):
                return there  # this store was applied there before a takeover
            carried = self._leave_generation(parts, sibling, position, engine_hash, spot.key, mode) or carried
        waits = self._begins_wave(holder, here.place, here.namespace, [here.key], [engine_hash], old)
        self._waves.use(here.seq_hash, here.place)
        if same_block is None:
            memory.store(holder, spot.place, spot.namespace, [spot.key], [spot.depth], [engine_hash])
            first, copies = engine_hash, copies_of.tell(spot.key)
            if carried is not None:
                there_before, names = carried
                copies = copies_of.carry(spot.key, there_before - is_reused, names, counts=mode == "count")
        else:
            counts = mode == "count" and not is_reused
            first, copies = copies_of.store_again(engine_hash, spot.key, counts=counts, replaces=mode == "all")
        parts.add_block(
            "+",
            holder,
            offset,
            here,
            first,
            same_block is not None,
            is_identity and first == here.seq_hash,
            previous.key if spot.depth and previous is not None else None,
            copies,
            waits,
        )
        if self._waves.is_needed and here.place.is_single != spot.place.is_single:
            # After the block has left, a worker that takes over looks for this store on the shard of ``spot``.
            parts.add_block("*", holder, offset, spot, first, is_known=True)
            self._waves.use(here.seq_hash, spot.place)
        return here

    def copy(
        self, parts: PartList, holder: int, position: int, former: tuple[HeldBlocks, int], keys: Sequence[int]
    ) -> int:
        """Store the blocks with these keys at the places that they have in another memory; return the next position.

        The other holder keeps its blocks meanwhile, so their rows have slots for them, and the blocks of one part need
        not form a chain.
        """
        memory, old_holder = former
        run: list[tuple[Spot, int]] = []
        for key in dict.fromkeys(keys):
            spot, copies = memory.held_block(old_holder, key), memory.copies(old_holder).of(key)
            if spot is None or copies is None or self.memory.held_block(holder, key) is not None:
                continue
            is_plain = spot.place == Place(spot.place.head) and len(copies[1]) == 1 and SAME_HASH not in copies[1]
            if run and not (is_plain and (spot.place, spot.namespace) == (run[0][0].place, run[0][0].namespace)):
                position = self._copy_run(parts, holder, position, run)
                run = []
            if is_plain:
                run.append((spot, copies[1][0]))
                continue
            for engine_hash in copies[1]:
                self.block(parts, holder, position, engine_hash, spot, mode="set")
                position += 1
        return self._copy_run(parts, holder, position, run)

    def _copy_run(self, parts: PartList, holder: int, position: int, run: Sequence[tuple[Spot, int]]) -> int:
        if run:
            place, namespace = run[0][0].place, run[0][0].namespace
            keys, depths = [spot.key for spot, _ in run], [spot.depth for spot, _ in run]
            hashes = [engine_hash for _, engine_hash in run]
            self.memory.store(holder, place, namespace, keys, depths, hashes)
            parts.add("+", holder, STEP * position + 1, place, namespace, keys, depths, hashes)
        return position + len(run)

    def next_spot(self, previous: Spot | None, namespace: int, key: int) -> Spot:
        """Return the spot of a new block that follows ``previous``, or begins at the root."""
        if previous is not None and previous.place.is_single:
            return _single(namespace, key)
        depth = 0 if previous is None else (previous.depth + 1) % self._piece_blocks
        return Spot(self._next_place(previous, depth, key), namespace, depth, key)

    def remove(
        self,
        parts: PartList,
        holder: int,
        position: int,
        engine_hash: int,
        *,
        mode: Mode,
        copies_left: int | None = None,
    ) -> bool:
        """Remove the block of a hash, or one of its copies. Return False if the holder does not have it.

        ``copies_left`` is the engine's own count of the remaining copies, if it gives one.
        """
        spot, offset = self.memory.held(holder, engine_hash), STEP * position + 1
        if spot is None:
            return False
        if self._applied.has(parts.seq, offset, holder, spot.place):
            return True
        remaining = self.memory.remove(holder, engine_hash, counts=mode == "count", copies_left=copies_left)
        assert remaining is not None
        waits = not remaining.is_there and self._waves.leave([spot.seq_hash], spot.place)
        _add_left(parts, "*" if remaining.is_there else "-", holder, offset, remaining, waits=waits)
        return True

    def _leave(self, parts: PartList, holder: int, position: int, engine_hash: int, mode: Mode) -> None:
        remaining = self.memory.leave(holder, engine_hash, counts=mode != "set")
        spot = remaining.spot
        if self._applied.has(parts.seq, STEP * position, holder, spot.place):
            return
        waits = self._waves.leave([spot.seq_hash], spot.place)
        _add_left(parts, "+" if remaining.is_there else "-", holder, STEP * position, remaining, waits=waits)

    def _begins_wave(
        self,
        holder: int,
        place: Place,
        namespace: int,
        keys: Sequence[int],
        hashes: Sequence[int],
        old: Spot | None = None,
    ) -> bool:
        """Return whether the part with these blocks must wait; ``old`` is the former block of the hash."""
        if not self._waves.has_left:
            return False
        blocks = [*self.memory.gone_blocks(holder, hashes), *(key ^ namespace for key in keys)]
        return self._waves.store([*blocks, None if old is None else old.seq_hash], place)

    def _are_new(self, holder: int, engine_hashes: Sequence[int], keys: Sequence[int]) -> bool:
        siblings = self.others.get(holder, ())
        return all(self.memory.are_new(sibling, engine_hashes, keys) for sibling in (holder, *siblings))

    def _leave_generation(
        self, parts: PartList, sibling: int, position: int, engine_hash: int, key: int, mode: Mode
    ) -> tuple[int, list[int]] | None:
        """Remove a block from generation ``sibling``, because it is stored in another one. Return its copies and engine
        hashes, if it was there.
        """
        memory = self.memory
        old = memory.held(sibling, engine_hash)
        is_aliased = old is not None and old.key != key
        if is_aliased:
            self.aliased += 1
            self._leave(parts, sibling, position, engine_hash, mode)
        carried = memory.copies(sibling).of(key)
        if carried is not None:
            remaining = memory.remove(sibling, carried[1][0], counts=False)
            assert remaining is not None
            waits = self._waves.leave([remaining.spot.seq_hash], remaining.spot.place)
            # Two parts of one holder need two positions.
            _add_left(parts, "-", sibling, STEP * position + is_aliased, remaining, waits=waits)
        return carried

    def _next_place(self, previous: Spot | None, depth: int, key: int, blocks: int = 1) -> Place:
        if previous is None or depth == 0:
            return Place(key)
        place = previous.place
        return self.memory.full.beyond(place, key, blocks) if place in self.memory.full else place


def _single(namespace: int, key: int) -> Spot:
    return Spot(Place(key, is_single=True), namespace, 0, key)


def _add_left(parts: PartList, kind: PartKind, holder: int, offset: int, removed: RemovedCopy, *, waits: bool) -> None:
    """Add the part for a block that lost a hash or a copy."""
    spot, engine_hash = removed.spot, removed.engine_hash
    parts.add_block(kind, holder, offset, spot, engine_hash, is_known=True, copies=removed.copies, waits=waits)
