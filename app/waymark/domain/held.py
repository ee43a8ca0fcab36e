"""Remembers, for one stream, which block each engine hash stands for, and where that block is.

The memory is whole: it has every block of the stream's live holders, with its copies, exactly as Redis has them. So
nothing is looked up in Redis, and what a part writes is absolute. Blocks that have left stay as *gone*, because a child
or a placeholder may still name them; those are bounded, and only ``trim`` forgets them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from waymark.domain.parts import NO_COPIES, UNCHANGED
from waymark.domain.rows import Place
from waymark.domain.slices import Slices

_FORGOTTEN_AT_ONCE = 16_384
GONE_MAX = 65_536
"""Hashes that are gone, of one rank."""
FULL_MAX = 65_536
"""Places that are known to be full."""


class Spot(NamedTuple):
    """A block and its place."""

    place: Place
    namespace: int
    depth: int
    """Within its piece."""
    key: int
    """seq_hash XOR namespace."""

    @property
    def seq_hash(self) -> int:
        return self.key ^ self.namespace


class Left(NamedTuple):
    """What becomes of a block of which a hash was removed."""

    spot: Spot
    copies: bytes
    """What ``*<key>`` says from now on."""
    is_there: bool
    """A copy is left."""
    engine_hash: int
    """The one in the block's entry."""


class BlockMemory(Protocol):
    """The shape of a stream's memory. ``HeldBlocks`` is the one in Python; others must agree with it.

    A holder belongs to a rank. A block of a holder has one place, one or more engine hashes (the first is the one in
    its entry), and a number of copies.
    """

    full: Places

    @property
    def blocks(self) -> int:
        """Of all live holders."""
        ...

    @property
    def is_over(self) -> bool: ...
    def trim(self) -> Slices[None]: ...
    def begin(self, holder: int, dp_rank: int) -> None: ...
    def end(self, holder: int) -> None: ...
    def find(self, holder: int, engine_hash: int) -> Spot | None: ...
    def held(self, holder: int, engine_hash: int) -> Spot | None: ...
    def held_block(self, holder: int, key: int) -> Spot | None: ...
    def are_new(self, holder: int, engine_hashes: Sequence[int], keys: Sequence[int]) -> bool: ...
    def store(
        self,
        holder: int,
        place: Place,
        namespace: int,
        keys: Sequence[int],
        depths: Sequence[int],
        hashes: Sequence[int],
    ) -> None: ...
    def store_again(self, holder: int, engine_hash: int, key: int, *, counts: bool) -> tuple[int, bytes]: ...
    def remove(self, holder: int, engine_hash: int, *, counts: bool) -> Left | None: ...
    def leave(self, holder: int, engine_hash: int, *, counts: bool) -> Left: ...
    def mark_gone(self, holder: int, engine_hash: int, spot: Spot) -> None: ...
    def is_gone(self, holder: int, engine_hash: int) -> bool: ...
    def restore(self, holder: int, key: int, copies: int, further: Iterable[int]) -> None: ...
    def move(self, holder: int, key: int, place: Place) -> None: ...
    def blocks_of(self, holder: int) -> int: ...


class Places:
    """Places that are known to be full: marked rows, and full branch rows. Bounded; a wrong one costs a reply."""

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._places

    def add(self, place: Place) -> None:
        self._places[place] = None
        if len(self._places) > FULL_MAX:
            del self._places[next(iter(self._places))]

    def discard(self, place: Place) -> None:
        self._places.pop(place, None)


@dataclass(slots=True)
class _Several:
    """A block with copies, or with further engine hashes."""

    copies: int
    hashes: list[int]
    """The first is the one in the entry."""

    @property
    def text(self) -> bytes:
        further = b"".join(b" %016x" % each for each in self.hashes[1:])
        return NO_COPIES if self.copies < 2 and not further else b"%d%b" % (self.copies, further)


@dataclass(slots=True)
class _Held:
    """The blocks of a live holder."""

    dp_rank: int
    spots: dict[int, int] = field(default_factory=dict)
    """Engine hash to packed spot."""
    hashes: dict[int, int] = field(default_factory=dict)
    """Block key to the engine hash in its entry."""
    several: dict[int, _Several] = field(default_factory=dict)
    """By block key."""


class HeldBlocks:
    """Engine hashes of one stream. Ranks do not share hashes; media of one rank do."""

    def __init__(self, gone_max: int = GONE_MAX) -> None:
        self.full = Places()
        self._gone_max = gone_max
        self._held: dict[int, _Held] = {}
        self._gone: dict[int, dict[int, int]] = {}
        self._ranks: dict[int, list[int]] = {}
        self._table = _Table()

    # ---- holders -----------------------------------------------------------------------------------

    def begin(self, holder: int, dp_rank: int) -> None:
        """A holder to remember for."""
        if holder not in self._held:
            self._held[holder] = _Held(dp_rank)
            self._ranks.setdefault(dp_rank, []).append(holder)
            self._gone.setdefault(dp_rank, {})

    def end(self, holder: int) -> None:
        """Forget a holder; with the last one of its rank, what is gone there too."""
        held = self._held.pop(holder, None)
        if held is None:
            return
        self._table.drop(held.spots.values())
        self._ranks[held.dp_rank].remove(holder)
        if not self._ranks[held.dp_rank]:
            del self._ranks[held.dp_rank]
            self._table.drop(self._gone.pop(held.dp_rank).values())

    @property
    def blocks(self) -> int:
        """Blocks of all live holders."""
        return sum(len(held.hashes) for held in self._held.values())

    def blocks_of(self, holder: int) -> int:
        return len(self._held[holder].hashes)

    # ---- what a hash stands for --------------------------------------------------------------------

    def find(self, holder: int, engine_hash: int) -> Spot | None:
        """What the hash stands for on this holder, else on another medium of its rank, else what it stood for."""
        held = self._held[holder]
        packed = held.spots.get(engine_hash)
        if packed is None:
            for other in self._ranks[held.dp_rank]:
                packed = self._held[other].spots.get(engine_hash)
                if packed is not None:
                    break
            else:
                packed = self._gone[held.dp_rank].get(engine_hash)
        return None if packed is None else self._table.spot(packed)

    def held(self, holder: int, engine_hash: int) -> Spot | None:
        """The block that the holder has under this hash."""
        packed = self._held[holder].spots.get(engine_hash)
        return None if packed is None else self._table.spot(packed)

    def held_block(self, holder: int, key: int) -> Spot | None:
        """The block with this key, where the holder has it."""
        held = self._held[holder]
        engine_hash = held.hashes.get(key)
        return None if engine_hash is None else self._table.spot(held.spots[engine_hash])

    def are_new(self, holder: int, engine_hashes: Sequence[int], keys: Sequence[int]) -> bool:
        """Whether the holder has none of these blocks, under no hash; and no key or hash is there twice."""
        held = self._held[holder]
        return (
            held.spots.keys().isdisjoint(engine_hashes)
            and held.hashes.keys().isdisjoint(keys)
            and len(set(engine_hashes)) == len(engine_hashes)
            and len(set(keys)) == len(keys)
        )

    def is_gone(self, holder: int, engine_hash: int) -> bool:
        return engine_hash in self._gone[self._held[holder].dp_rank]

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
        """Blocks that are new to the holder, all at one place."""
        held = self._held[holder]
        base = self._table.base(place, namespace, len(keys))
        held.spots.update(zip(hashes, [base | d << 64 | k for k, d in zip(keys, depths, strict=True)], strict=True))
        held.hashes.update(zip(keys, hashes, strict=True))
        gone = self._gone[held.dp_rank]
        if gone:
            for engine_hash in gone.keys() & set(hashes):
                self._table.drop((gone.pop(engine_hash),))

    def store_again(self, holder: int, engine_hash: int, key: int, *, counts: bool) -> tuple[int, bytes]:
        """A block that the holder has, once more: the hash in its entry, and what ``*<key>`` says if it changes."""
        held = self._held[holder]
        first = held.hashes[key]
        several = held.several.get(key) or _Several(1, [first])
        before = several.text
        several.copies += counts
        if engine_hash not in several.hashes:
            several.hashes.append(engine_hash)
            held.spots[engine_hash] = self._table.again(held.spots[first])
        if several.text == before:
            return first, UNCHANGED
        held.several[key] = several
        return first, several.text

    def restore(self, holder: int, key: int, copies: int, further: Iterable[int]) -> None:
        """What Redis says of the copies of a block, which the holder has."""
        held = self._held[holder]
        first = held.hashes[key]
        hashes = [first, *(each for each in further if each not in held.spots)]
        for each in hashes[1:]:
            held.spots[each] = self._table.again(held.spots[first])
        held.several[key] = _Several(copies, hashes)

    def remove(self, holder: int, engine_hash: int, *, counts: bool) -> Left | None:
        """Take a copy, where ``counts``, else the block; None where the holder has none under this hash."""
        held = self._held[holder]
        packed = held.spots.get(engine_hash)
        if packed is None:
            return None
        spot = self._table.spot(packed)
        several = held.several.get(spot.key)
        if counts and several is not None and several.copies > 1:
            several.copies -= 1
            text = several.text
            if text == NO_COPIES:
                del held.several[spot.key]
            return Left(spot, text, True, several.hashes[0])
        first = held.hashes.pop(spot.key)
        gone = self._gone[held.dp_rank]
        for each in [first] if several is None else several.hashes:
            old = gone.pop(each, None)
            if old is not None:
                self._table.drop((old,))
            gone[each] = held.spots.pop(each)
        held.several.pop(spot.key, None)
        return Left(spot, UNCHANGED if several is None else NO_COPIES, False, first)

    def leave(self, holder: int, engine_hash: int, *, counts: bool) -> Left:
        """The hash comes to mean another block: the one that it meant stays only where it has another hash."""
        held = self._held[holder]
        packed = held.spots[engine_hash]
        spot = self._table.spot(packed)
        several = held.several.get(spot.key)
        self._table.drop((held.spots.pop(engine_hash),))
        if several is None or len(several.hashes) == 1:
            held.hashes.pop(spot.key)
            held.several.pop(spot.key, None)
            return Left(spot, UNCHANGED if several is None else NO_COPIES, False, engine_hash)
        several.hashes.remove(engine_hash)
        several.copies = max(1, several.copies - counts)
        held.hashes[spot.key] = several.hashes[0]
        text = several.text
        if text == NO_COPIES:
            del held.several[spot.key]
        return Left(spot, text, True, several.hashes[0])

    def mark_gone(self, holder: int, engine_hash: int, spot: Spot) -> None:
        """A hash whose block was stored and removed elsewhere, or before: a child may name it."""
        gone = self._gone[self._held[holder].dp_rank]
        if engine_hash not in gone:
            gone[engine_hash] = self._table.base(spot.place, spot.namespace, 1) | spot.depth << 64 | spot.key

    def move(self, holder: int, key: int, place: Place) -> None:
        """The block is at another place, if the holder has it."""
        held = self._held.get(holder)
        first = None if held is None else held.hashes.get(key)
        if held is None or first is None:
            return
        several = held.several.get(key)
        for each in [first] if several is None else several.hashes:
            packed = held.spots[each]
            spot = self._table.spot(packed)
            held.spots[each] = self._table.base(place, spot.namespace, 1) | spot.depth << 64 | key
            self._table.drop((packed,))

    # ---- bounds ------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """There are too many that are gone."""
        return any(len(gone) > self._gone_max for gone in self._gone.values())

    def trim(self) -> Slices[None]:
        """Forget the oldest that are gone, down to nine tenths of the ceiling. Between folds only."""
        for gone in self._gone.values():
            surplus = len(gone) - self._gone_max * 9 // 10
            while surplus > 0 and len(gone) > self._gone_max * 9 // 10:
                oldest = list(islice(gone, min(surplus, _FORGOTTEN_AT_ONCE)))
                self._table.drop([gone.pop(engine_hash) for engine_hash in oldest])
                surplus -= len(oldest)
                yield

    def __len__(self) -> int:
        """Hashes, those that are gone included."""
        return sum(len(held.spots) for held in self._held.values()) + sum(map(len, self._gone.values()))

    @property
    def places(self) -> int:
        return len(self._table)


class _Table:
    """The places in use, so that a spot is one number: place << 69 | depth << 64 | key."""

    def __init__(self) -> None:
        self._places: list[tuple[Place, int] | None] = []
        self._used: list[int] = []
        self._numbers: dict[tuple[Place, int], int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def base(self, place: Place, namespace: int, count: int) -> int:
        """The part of a spot that is its place; it is used ``count`` more times."""
        name = (place, namespace)
        number = self._numbers.get(name)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._places[number], self._used[number] = name, 0
            else:
                number = len(self._places)
                self._places.append(name)
                self._used.append(0)
            self._numbers[name] = number
        self._used[number] += count
        return number << 69

    def again(self, packed: int) -> int:
        """The same spot, used once more."""
        self._used[packed >> 69] += 1
        return packed

    def spot(self, packed: int) -> Spot:
        found = self._places[packed >> 69]
        assert found is not None
        return Spot(found[0], found[1], packed >> 64 & 31, packed & 0xFFFF_FFFF_FFFF_FFFF)

    def drop(self, packed: Iterable[int]) -> None:
        for number, count in Counter(each >> 69 for each in packed).items():
            self._used[number] -= count
            if not self._used[number]:
                name = self._places[number]
                assert name is not None
                del self._numbers[name]
                self._places[number] = None
                self._free.append(number)
