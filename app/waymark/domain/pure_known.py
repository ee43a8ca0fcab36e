"""``Places`` and ``KnownBlocks`` in Python, for a build without the C module; and the functions that create tables."""

from __future__ import annotations

from collections.abc import Sequence

from waymark.base import native
from waymark.domain.known import COPIES_MAX, KnownBlocks, Places, Spot
from waymark.domain.rows import PIECE_BLOCKS, Place

_PURE_BYTES = 300
"""The approximate memory of a block or a place, in bytes: two dict entries and their integers."""
_ONE = 1, False
"""The copies of a new block."""
_RELEASED = 4096
"""The number of blocks that one call of ``release`` forgets, in about a millisecond."""


class PurePlaces:
    """``Places`` in Python."""

    def __init__(self) -> None:
        self.places: list[tuple[Place, int]] = []
        """Places with their namespaces."""
        self._blocks: list[int] = []
        self._numbers: dict[tuple[Place, int], int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __sizeof__(self) -> int:
        return _PURE_BYTES * len(self._numbers)

    def enter(self, place: Place, namespace: int, count: int) -> int:
        """Return the number of a place, after adding ``count`` blocks to it."""
        name = (place, namespace)
        number = self._numbers.get(name)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.places[number] = name
            else:
                number = len(self.places)
                self.places.append(name)
                self._blocks.append(0)
            self._numbers[name] = number
        self._blocks[number] += count
        return number

    def leave(self, number: int) -> None:
        self._blocks[number] -= 1
        if not self._blocks[number]:
            del self._numbers[self.places[number]]
            self._free.append(number)


class PureKnownBlocks:
    """``KnownBlocks`` in Python."""

    def __init__(self, places: PurePlaces, has_keys: bool) -> None:
        self._places = places
        self._has_keys = has_keys
        self._spots: dict[int, int] = {}  # place << 69 | depth << 64 | key
        self._first: dict[int, int] = {}
        self._copies: dict[int, tuple[int, bool]] = {}
        """The copies of the blocks whose count is not ``_ONE``, by first hash."""

    def __del__(self) -> None:
        self.clear()

    def clear(self) -> None:
        for packed in self._spots.values():
            self._places.leave(packed >> 69)
        self._spots, self._first, self._copies = {}, {}, {}

    def release(self) -> bool:
        self._first, self._copies = {}, {}
        for _ in range(min(_RELEASED, len(self._spots))):
            self._places.leave(self._spots.popitem()[1] >> 69)
        return bool(self._spots)

    def __len__(self) -> int:
        return len(self._spots)

    def __sizeof__(self) -> int:
        return _PURE_BYTES * len(self._spots)

    def blocks(self) -> int:
        return len(self._first)

    def get(self, engine_hash: int, /) -> Spot | None:
        packed = self._spots.get(engine_hash)
        return None if packed is None else self._spot(packed)

    def get_block(self, key: int, /) -> Spot | None:
        first = self._first.get(key)
        return None if first is None else self._spot(self._spots[first])

    def first(self, key: int, /) -> int | None:
        return self._first.get(key)

    def are_new(self, engine_hashes: Sequence[int], keys: Sequence[int], /) -> bool:
        hashes, distinct = set(engine_hashes), set(keys)
        if len(hashes) < len(engine_hashes) or len(distinct) < len(keys):
            return False
        return self._spots.keys().isdisjoint(hashes) and self._first.keys().isdisjoint(distinct)

    def store(
        self, place: Place, namespace: int, keys: Sequence[int], depths: Sequence[int], engine_hashes: Sequence[int], /
    ) -> None:
        if not len(keys) == len(depths) == len(engine_hashes):
            sentence = f"{len(keys)} keys have {len(depths)} depths and {len(engine_hashes)} engine hashes"
            raise ValueError(sentence)
        for i, depth in enumerate(depths):
            if not 0 <= depth < PIECE_BLOCKS:
                raise ValueError(f"depths[{i}] is {depth}; a depth in a piece is less than {PIECE_BLOCKS}")
        number = self._places.enter(place, namespace, len(keys) + 1)
        for key, depth, engine_hash in zip(keys, depths, engine_hashes, strict=True):
            self._put(engine_hash, number << 69 | depth << 64 | key)
        self._places.leave(number)

    def name(self, engine_hash: int, key: int, /) -> None:
        packed = self._spots[self._first[key]]
        self._places.enter(*self._places.places[packed >> 69], 1)
        self._put(engine_hash, packed)
        self._copies[engine_hash] = 0, False

    def lead(self, engine_hash: int, /) -> None:
        packed = self._spots[engine_hash]
        if not self._has_keys:
            raise KeyError(engine_hash)
        self._first[_key_of(packed)] = engine_hash

    def pop(self, engine_hash: int, /) -> Spot | None:
        packed = self._spots.get(engine_hash)
        if packed is None:
            return None
        spot = self._spot(packed)
        self._drop(engine_hash)
        return spot

    def discard(self, engine_hashes: Sequence[int], /) -> None:
        for engine_hash in self._spots.keys() & set(engine_hashes) if self._spots else ():
            self._drop(engine_hash)

    def move(self, engine_hash: int, place: Place, /) -> None:
        packed = self._spots[engine_hash]
        former = packed >> 69
        number = self._places.enter(place, self._places.places[former][1], 1)
        self._spots[engine_hash] = number << 69 | packed & (1 << 69) - 1
        self._places.leave(former)

    def copies(self, key: int, /) -> tuple[int, bool]:
        return self._copies.get(self._first[key], _ONE)

    def set_copies(self, key: int, copies: int, is_left: bool, /) -> None:
        first = self._first[key]
        if copies > COPIES_MAX:
            raise ValueError(f"copies is {copies}; a table counts up to {COPIES_MAX}")
        if (copies, is_left) == _ONE:
            self._copies.pop(first, None)
        else:
            self._copies[first] = copies, is_left

    def left(self) -> list[int]:
        return [engine_hash for engine_hash, (_, is_left) in self._copies.items() if is_left]

    def extend(self, *_: object) -> None:
        """Return None: the pure implementation has no shortcut."""

    take = run = extend

    def _put(self, engine_hash: int, packed: int) -> None:
        if engine_hash in self._spots:
            self._drop(engine_hash)
        self._spots[engine_hash] = packed
        if self._has_keys:
            self._first.setdefault(_key_of(packed), engine_hash)

    def _drop(self, engine_hash: int) -> None:
        packed = self._spots.pop(engine_hash)
        self._copies.pop(engine_hash, None)
        if self._first.get(_key_of(packed)) == engine_hash:
            del self._first[_key_of(packed)]
        self._places.leave(packed >> 69)

    def _spot(self, packed: int) -> Spot:
        place, namespace = self._places.places[packed >> 69]
        return Spot(place, namespace, packed >> 64 & PIECE_BLOCKS - 1, _key_of(packed))


def _key_of(packed: int) -> int:
    return packed & 2**64 - 1


def new_places() -> Places:
    if native.selected is not None:
        places: Places = native.selected.Places(Place, Spot)
        return places
    return PurePlaces()


def new_known(places: Places, *, has_keys: bool) -> KnownBlocks:
    """Return an empty table; its blocks will be in ``places``."""
    if isinstance(places, PurePlaces):
        return PureKnownBlocks(places, has_keys)
    assert native.selected is not None
    table: KnownBlocks = native.selected.KnownBlocks(places, has_keys)
    return table
