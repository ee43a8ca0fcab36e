"""Remembers, for one stream, the block behind each engine hash, and its place.

The memory is complete: it has every block of the stream's live holders, with its copies, exactly as Redis has them. So
lookups do not need Redis, and parts can state results instead of differences. Former blocks stay as *gone*, because a
child or a placeholder may still name them; their number is bounded, and only ``trim`` forgets them. The tables come
from ``known``, in C if the module was built.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import Final, NamedTuple

from waymark.base.record import record
from waymark.domain.copies import SEVERAL_BYTES, HolderCopies
from waymark.domain.known import RunChanges, Spot, TakenBlocks
from waymark.domain.parts import NO_COPIES, UNCHANGED, Mode
from waymark.domain.pure_known import KnownBlocks, Neighbour, Places, new_known, new_places
from waymark.domain.rows import SHARED_BLOCKS, Place, shared_places
from waymark.domain.slices import SLICE_WORK, Slices

# Engine hashes of one rank whose blocks have left. A child or a placeholder may still name them.


RESTORED_MAX: Final = 32
"""If this many blocks were stored again after a removal that left a copy, and no block was removed twice, it cannot be
an accident: the engine removes a block only once.
"""
GONE_MAX = 16_384
"""The bound on the gone hashes of one rank. At least the last ``GONE_MAX / 2`` are remembered."""


class GoneHashes:
    """Hashes in two sets. ``trim`` empties the older one. A hash in both stands for the block in the newer one."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._new = new_known(places, has_keys=False)
        self._old = new_known(places, has_keys=False)

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    @property
    def bytes(self) -> int:
        return getsizeof(self._new) + getsizeof(self._old)

    def get(self, engine_hash: int) -> Spot | None:
        return self._new.get(engine_hash) or self._old.get(engine_hash)

    def add(self, engine_hash: int, spot: Spot) -> None:
        self._new.store(spot.place, spot.namespace, (spot.key,), (spot.depth,), (engine_hash,))

    @property
    def sets(self) -> tuple[KnownBlocks, ...]:
        """The two sets, the newer one first; a removed hash enters the newer one."""
        return self._new, self._old

    def discard(self, engine_hashes: Sequence[int]) -> None:
        """Remove hashes whose blocks have been stored again."""
        self._new.discard(engine_hashes)
        self._old.discard(engine_hashes)

    def is_over(self, entries_max: int) -> bool:
        return len(self._new) > entries_max // 2

    def trim(self, entries_max: int) -> None:
        """Forget the hashes that were gone before the last call. Their table is reused unless it is unusually large."""
        emptied = self._old if len(self._old) <= entries_max else new_known(self._places, has_keys=False)
        emptied.clear()
        self._old, self._new = self._new, emptied


class RemovedCopy(NamedTuple):
    """The state of a block after one of its hashes was removed."""

    spot: Spot
    copies: bytes
    """The new value of the field ``*<key>``."""
    is_there: bool
    """Whether the holder still has a copy of the block."""
    engine_hash: int
    """The engine hash in the block's entry."""


@record(slots=True)
class _HolderBlocks:
    """The blocks of a live holder."""

    dp_rank: int
    known: KnownBlocks
    """The first engine hash of a block is the one in its entry."""
    copies: HolderCopies

    @property
    def blocks(self) -> int:
        return self.known.blocks()


class HeldBlocks:
    """The memory of one stream. Ranks do not share hashes, but the media of one rank do.

    A holder belongs to a rank. A block of a holder has one place, one or more engine hashes (the first is the one in
    its entry), and a number of copies.
    """

    def __init__(self, gone_max: int = GONE_MAX, *, is_of_snapshot: bool = False) -> None:
        """With ``is_of_snapshot``, a block may leave and return until ``end_snapshot``, so no hash is forgotten."""
        self.full = FullPlaces()
        self._gone_max = gone_max
        self._is_of_snapshot = is_of_snapshot
        self._held: dict[int, _HolderBlocks] = {}
        self._gone: dict[int, GoneHashes] = {}
        self._ranks: dict[int, list[int]] = {}
        self._places = new_places()
        self.is_pure = type(self._places) is Places
        """Whether the tables are in Python."""
        self._ended: list[_HolderBlocks] = []
        self.blocks = 0
        """The number of blocks of all live holders."""

    # ---- holders -----------------------------------------------------------------------------------

    def begin(self, holder: int, dp_rank: int) -> None:
        """Begin to remember a holder."""
        if holder not in self._held:
            table = new_known(self._places, has_keys=True)
            copies = HolderCopies(table, notes_left=not self._is_of_snapshot)
            self._held[holder] = _HolderBlocks(dp_rank, table, copies)
            self._ranks.setdefault(dp_rank, []).append(holder)
            if dp_rank not in self._gone:
                self._gone[dp_rank] = GoneHashes(self._places)

    def end(self, holder: int) -> None:
        """Forget a holder, and with the last one of its rank the rank's gone hashes. The caller must then call
        ``release``.
        """
        blocks = self._held.pop(holder, None)
        if blocks is None:
            return
        self._ended.append(blocks)
        self.blocks -= blocks.blocks
        self._ranks[blocks.dp_rank].remove(holder)
        if not self._ranks[blocks.dp_rank]:
            del self._ranks[blocks.dp_rank], self._gone[blocks.dp_rank]

    def release(self) -> Slices[None]:
        """Free the tables of ended holders, in slices, because freeing a large one at once would delay other
        streams.
        """
        while self._ended:
            blocks = self._ended.pop()
            while blocks.copies.several:
                for _ in range(min(SLICE_WORK, len(blocks.copies.several))):
                    blocks.copies.several.popitem()
                yield
            while blocks.known.release():
                yield

    def drop(self) -> Slices[None]:
        """Forget all holders, and free their tables, because the memory is no longer used."""
        for holder in list(self._held):
            self.end(holder)
        yield from self.release()

    def blocks_of(self, holder: int) -> int:
        return self._held[holder].known.blocks()

    def copies(self, holder: int) -> HolderCopies:
        """Return the copies and further engine hashes of the holder's blocks."""
        return self._held[holder].copies

    # ---- finding the block of a hash ---------------------------------------------------------------

    def find(self, holder: int, engine_hash: int) -> Spot | None:
        """Find the block of a hash on this holder, else on another medium of its rank, else among the gone hashes."""
        blocks = self._held[holder]
        spot = blocks.known.get(engine_hash)
        if spot is not None:
            return spot
        for neighbour in self._ranks[blocks.dp_rank]:
            spot = self._held[neighbour].known.get(engine_hash)
            if spot is not None:
                return spot
        return self._gone[blocks.dp_rank].get(engine_hash)

    def held(self, holder: int, engine_hash: int) -> Spot | None:
        """Return the block that the holder has under this hash."""
        return self._held[holder].known.get(engine_hash)

    def held_block(self, holder: int, key: int) -> Spot | None:
        """Return the block with this key, if the holder has it."""
        return self._held[holder].known.get_block(key)

    def are_new(self, holder: int, engine_hashes: Sequence[int], keys: Sequence[int]) -> bool:
        """Return whether all these blocks and hashes are new to the holder, and each of them occurs only once."""
        return self._held[holder].known.are_new(engine_hashes, keys)

    def gone(self, holder: int, engine_hash: int) -> Spot | None:
        """Return the former block of a hash on the holder's rank, if it has left and is still remembered."""
        return self._gone[self._held[holder].dp_rank].get(engine_hash)

    def gone_blocks(self, holder: int, hashes: Sequence[int]) -> list[int | None]:
        """Return the seq_hashes of the former blocks of these hashes; None for a hash without one."""
        spots = [self.gone(holder, engine_hash) for engine_hash in hashes]
        return [None if spot is None else spot.seq_hash for spot in spots]

    # ---- changes -----------------------------------------------------------------------------------

    def store(
        self,
        holder: int,
        place: Place,
        namespace: int,
        keys: Sequence[int],
        depths: Sequence[int],
        hashes: Sequence[int],
    ) -> None:
        """Store blocks new to the holder, all at one place."""
        blocks = self._held[holder]
        blocks.known.store(place, namespace, keys, depths, hashes)
        self.blocks += len(keys)
        self._gone[blocks.dp_rank].discard(hashes)

    def take(self, holder: int, engine_hashes: Sequence[int]) -> list[TakenBlocks] | None:
        """Remove the blocks of a plain removal; see ``KnownBlocks``."""
        blocks = self._held[holder]
        groups = blocks.known.take(engine_hashes, self._gone[blocks.dp_rank].sets)
        if groups is not None:
            self.blocks -= len(engine_hashes)
        return groups

    def tables_of_run(
        self, holder: int, mode: Mode, generations: Sequence[int] = ()
    ) -> tuple[KnownBlocks, int, tuple[KnownBlocks, ...], tuple[Neighbour, ...], int]:
        """Return what a run of events takes of a holder: its table, its id, the gone hashes of its rank, the
        neighbours, and the bits of the run. ``generations`` are the other generations of the holder's name.
        """
        blocks = self._held[holder]
        former, neighbours = self._gone[blocks.dp_rank].sets, self.neighbours(holder, generations)
        return blocks.known, holder, former, neighbours, blocks.copies.bits(mode)

    def note_run(self, holder: int, ran: RunChanges) -> None:
        """Note what a run of events has changed and shown."""
        self._held[holder].copies.note_run(ran)
        self.blocks += ran.stored - ran.removed

    def neighbours(self, holder: int, generations: Sequence[int]) -> tuple[Neighbour, ...]:
        """Return the other holders of a holder's rank; see ``KnownBlocks.run``."""
        rank = self._ranks[self._held[holder].dp_rank]
        if len(rank) == 1:
            return ()
        return tuple((other, self._held[other].known, other in generations) for other in rank if other != holder)

    def has(self, holder: int) -> bool:
        """Return whether a holder is remembered."""
        return holder in self._held

    def tables(self, holder: int) -> tuple[KnownBlocks, tuple[KnownBlocks, ...]]:
        """Return the table of a holder's blocks, and those of the gone hashes of its rank, until the next ``trim``."""
        blocks = self._held[holder]
        return blocks.known, self._gone[blocks.dp_rank].sets

    def remove(
        self, holder: int, engine_hash: int, *, counts: bool, copies_left: int | None = None
    ) -> RemovedCopy | None:
        """Remove one copy if ``counts``, otherwise the block. Return None if the holder has no block under this hash.

        ``copies_left`` is the engine's own count of the remaining copies, if it gives one.
        """
        blocks = self._held[holder]
        spot = blocks.known.get(engine_hash)
        if spot is None:
            return None
        copies = blocks.copies.take(spot.key, copies_left, counts=counts)
        if copies is not None:
            return RemovedCopy(spot, copies.text, True, copies.hashes[0])
        gone_hashes, text = self._gone[blocks.dp_rank], blocks.copies.text_to_clear(spot.key)
        several = blocks.copies.several.pop(spot.key, None)
        hashes = [engine_hash] if several is None else several.hashes
        for each in hashes:
            blocks.known.pop(each)
            gone_hashes.add(each, spot)
        self.blocks -= 1
        return RemovedCopy(spot, text, False, hashes[0])

    def leave(self, holder: int, engine_hash: int, *, counts: bool) -> RemovedCopy:
        """Detach a hash before it names another block. Its former block stays only if it has another hash."""
        blocks = self._held[holder]
        spot = blocks.known.get(engine_hash)
        assert spot is not None
        several = blocks.copies.find(spot.key)
        blocks.known.pop(engine_hash)
        if len(several.hashes) == 1:
            is_kept = blocks.copies.several.pop(spot.key, None) is not None
            has_text = is_kept or several.copies > 1 or several.is_left
            self.blocks -= 1
            return RemovedCopy(spot, NO_COPIES if has_text else UNCHANGED, False, engine_hash)
        several.hashes.remove(engine_hash)
        several.copies = max(1, several.copies - counts)
        blocks.known.lead(several.hashes[0])
        text = several.text
        several.is_left = several.is_left and text != NO_COPIES
        blocks.copies.keep(spot.key, several)
        return RemovedCopy(spot, text, True, several.hashes[0])

    def take_contradictions(self) -> int:
        """Return the number of blocks whose copies were found to be miscounted since the last call."""
        count = 0
        for blocks in self._held.values():
            count += blocks.copies.contradictions
            blocks.copies.contradictions = 0
        return count

    @property
    def removes_once(self) -> bool:
        """Whether the events show that the engine removes a block only once, after its last copy."""
        copies = [blocks.copies for blocks in self._held.values()]
        return sum(copy.restored for copy in copies) >= RESTORED_MAX and not any(
            copy.are_removed_each for copy in copies
        )

    def mark_gone(self, holder: int, engine_hash: int, spot: Spot) -> None:
        """Remember a hash whose block was stored and removed elsewhere or earlier, because a child may name it."""
        hashes = self._gone[self._held[holder].dp_rank]
        if hashes.get(engine_hash) != spot:
            hashes.discard((engine_hash,))
            hashes.add(engine_hash, spot)

    def move(self, holder: int, key: int, place: Place, *, is_single: bool) -> None:
        """Note the new place of a block, if the holder has it as a single, or in a row if not ``is_single``."""
        blocks = self._held.get(holder)
        spot = None if blocks is None else blocks.known.get_block(key)
        if blocks is None or spot is None or spot.place.is_single != is_single:
            return
        first = blocks.known.first(key)
        assert first is not None
        several = blocks.copies.several.get(key)
        for engine_hash in [first] if several is None else several.hashes:
            blocks.known.move(engine_hash, place)

    def end_snapshot(self) -> None:
        """Note the end of the snapshot: blocks that leave from now on may be forgotten."""
        self._is_of_snapshot = False
        for blocks in self._held.values():
            blocks.copies.notes_left = True

    # ---- bounds ------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether too many gone hashes are remembered."""
        if not self._is_of_snapshot:
            for hashes in self._gone.values():
                if hashes.is_over(self._gone_max):
                    return True
        return False

    def trim(self) -> Slices[None]:
        """Forget the oldest gone hashes if there are too many. Call this between folds only."""
        for hashes in self._gone.values():
            if hashes.is_over(self._gone_max):
                hashes.trim(self._gone_max)
                yield

    @property
    def bytes(self) -> int:
        """The size of the tables; in Python it is an estimate."""
        tables = [self._places, *(blocks.known for blocks in [*self._held.values(), *self._ended])]
        several = SEVERAL_BYTES * sum(len(blocks.copies.several) for blocks in self._held.values())
        return several + sum(map(getsizeof, tables)) + sum(hashes.bytes for hashes in self._gone.values())

    def __len__(self) -> int:
        """Return the number of hashes, including the gone ones."""
        return sum(len(blocks.known) for blocks in self._held.values()) + sum(map(len, self._gone.values()))

    @property
    def places(self) -> int:
        return len(self._places)


# Places known to be full, so that the next block of a piece goes to another place.


FULL_MAX = 8_192
"""The most remembered full places."""


class FullPlaces:
    """Places known to be full: marked rows, and full branch rows. Their number is bounded. A wrong entry costs another
    call, or a separate branch row for a block for which a shared one has room again.
    """

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        self._apart: dict[int, None] = {}
        """Heads in whose shared branch rows the slots of this stream would be far apart."""

    def __contains__(self, place: Place) -> bool:
        return place in self.places

    def add(self, place: Place) -> None:
        self.places[place] = None
        if len(self.places) > FULL_MAX:
            del self.places[next(iter(self.places))]

    def discard(self, place: Place) -> None:
        self.places.pop(place, None)

    def keep_apart(self, head: int) -> None:
        """Note that the shared branch rows of a head have too many blocks of others."""
        self._apart[head] = None
        if len(self._apart) > FULL_MAX:
            del self._apart[next(iter(self._apart))]

    def beyond(self, place: Place, key: int, blocks: int) -> Place:
        """Return the branch row for ``blocks`` blocks, the first with ``key``, whose parent is at ``place``, which is
        full.
        """
        if place.branch is None and blocks <= SHARED_BLOCKS and place.head not in self._apart:
            for shared in shared_places(place.head, key):
                if shared not in self.places:
                    return shared
        return Place(place.head, key)
