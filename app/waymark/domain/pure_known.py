"""``Places`` and ``KnownBlocks`` in Python, for a build without the C module, and as the types that mypy knows of those
in C; and the functions that create tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from waymark.base import native
from waymark.domain.known import COPIES_MAX, NewBlocks, Spot, TakenBlocks
from waymark.domain.rows import PIECE_BLOCKS, Place

_PURE_BYTES = 300
"""The approximate memory of a block or a place, in bytes: two dict entries and their integers."""
_ONE = 1, False
"""The copies of a new block."""
_RELEASED = 4096
"""The number of blocks that one call of ``release`` forgets, in about a millisecond."""


class Places:
    """The places of a stream, each stored once."""

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

    def _enter(self, place: Place, namespace: int, count: int) -> int:
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

    def _leave(self, number: int) -> None:
        self._blocks[number] -= 1
        if not self._blocks[number]:
            del self._numbers[self.places[number]]
            self._free.append(number)


Neighbour: TypeAlias = "tuple[int, KnownBlocks, bool]"
"""Another holder of a rank, its table, and whether it is a generation of the same name."""


class KnownBlocks:
    """Engine hashes, and the block of each.

    With ``has_keys`` blocks are found by their key, too, and one engine hash of each block is its first one.

    ``extend``, ``take`` and ``run`` may raise an exception after some blocks have changed, and ``store`` a MemoryError;
    no part names these blocks. The caller then drops the parts, and all tables of the ``Places``. After any other
    exception the table is unchanged.
    """

    def __init__(self, places: Places, has_keys: bool) -> None:
        self._places = places
        self._has_keys = has_keys
        self._spots: dict[int, int] = {}  # place << 69 | depth << 64 | key
        self._first: dict[int, int] = {}
        self._copies: dict[int, tuple[int, bool]] = {}
        """The copies of the blocks whose count is not ``_ONE``, by first hash."""

    def __del__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all blocks. The C module keeps the memory of the table for new ones."""
        for packed in self._spots.values():
            self._places._leave(packed >> 69)
        self._spots, self._first, self._copies = {}, {}, {}

    def release(self) -> bool:
        """Forget some blocks of a table no longer in use, and return whether any are left.

        Freeing a million blocks at once would block the process for a hundredth of a second.
        """
        self._first, self._copies = {}, {}
        for _ in range(min(_RELEASED, len(self._spots))):
            self._places._leave(self._spots.popitem()[1] >> 69)
        return bool(self._spots)

    def __len__(self) -> int:
        """Return the number of engine hashes."""
        return len(self._spots)

    def __sizeof__(self) -> int:
        """Return the size in bytes, without the places."""
        return _PURE_BYTES * len(self._spots)

    def blocks(self) -> int:
        """Return the number of blocks that can be found by their key."""
        return len(self._first)

    def get(self, engine_hash: int, /) -> Spot | None:
        """Return the block of an engine hash."""
        packed = self._spots.get(engine_hash)
        return None if packed is None else self._spot(packed)

    def get_block(self, key: int, /) -> Spot | None:
        """Return the block with a key."""
        first = self._first.get(key)
        return None if first is None else self._spot(self._spots[first])

    def first(self, key: int, /) -> int | None:
        """Return the first engine hash of the block with a key."""
        return self._first.get(key)

    def are_new(self, engine_hashes: Sequence[int], keys: Sequence[int], /) -> bool:
        """Return whether all hashes and keys are new to the table, and each occurs only once."""
        hashes, distinct = set(engine_hashes), set(keys)
        if len(hashes) < len(engine_hashes) or len(distinct) < len(keys):
            return False
        return self._spots.keys().isdisjoint(hashes) and self._first.keys().isdisjoint(distinct)

    def store(
        self, place: Place, namespace: int, keys: Sequence[int], depths: Sequence[int], engine_hashes: Sequence[int], /
    ) -> None:
        """Store blocks at one place. An engine hash that the table already has moves to its new block."""
        if not len(keys) == len(depths) == len(engine_hashes):
            sentence = f"{len(keys)} keys have {len(depths)} depths and {len(engine_hashes)} engine hashes"
            raise ValueError(sentence)
        for i, depth in enumerate(depths):
            if not 0 <= depth < PIECE_BLOCKS:
                raise ValueError(f"depths[{i}] is {depth}; a depth in a piece is less than {PIECE_BLOCKS}")
        number = self._places._enter(place, namespace, len(keys) + 1)
        for key, depth, engine_hash in zip(keys, depths, engine_hashes, strict=True):
            self._put(engine_hash, number << 69 | depth << 64 | key)
        self._places._leave(number)

    def name(self, engine_hash: int, key: int, /) -> None:
        """Add an engine hash to a block. Raise ``KeyError`` if there is no block with this key."""
        packed = self._spots[self._first[key]]
        self._places._enter(*self._places.places[packed >> 69], 1)
        self._put(engine_hash, packed)
        self._copies[engine_hash] = 0, False

    def lead(self, engine_hash: int, /) -> None:
        """Make a hash the first one of its block. Raise ``KeyError`` if the table does not have it."""
        packed = self._spots[engine_hash]
        if not self._has_keys:
            raise KeyError(engine_hash)
        self._first[_key_of(packed)] = engine_hash

    def pop(self, engine_hash: int, /) -> Spot | None:
        """Remove an engine hash. If it is the first one of its block, the block can no longer be found by its key."""
        packed = self._spots.get(engine_hash)
        if packed is None:
            return None
        spot = self._spot(packed)
        self._drop(engine_hash)
        return spot

    def discard(self, engine_hashes: Sequence[int], /) -> None:
        """Remove engine hashes; unknown ones are ignored."""
        for engine_hash in self._spots.keys() & set(engine_hashes) if self._spots else ():
            self._drop(engine_hash)

    def move(self, engine_hash: int, place: Place, /) -> None:
        """Move the block of a hash to another place. Raise ``KeyError`` if the table does not have the hash."""
        packed = self._spots[engine_hash]
        former = packed >> 69
        number = self._places._enter(place, self._places.places[former][1], 1)
        self._spots[engine_hash] = number << 69 | packed & (1 << 69) - 1
        self._places._leave(former)

    def copies(self, key: int, /) -> tuple[int, bool]:
        """Return the copies of a block, 0 if it has further hashes, and whether its last event was a removal that left
        a copy. Raise ``KeyError`` if there is no block with this key.

        A new block has one copy. The count belongs to the block's first hash, and leaves with it.
        """
        return self._copies.get(self._first[key], _ONE)

    def set_copies(self, key: int, copies: int, is_left: bool, /) -> None:
        """Set what ``copies`` returns, up to ``COPIES_MAX``. Raise ``KeyError`` as ``copies`` does."""
        first = self._first[key]
        if copies > COPIES_MAX:
            raise ValueError(f"copies is {copies}; a table counts up to {COPIES_MAX}")
        if (copies, is_left) == _ONE:
            self._copies.pop(first, None)
        else:
            self._copies[first] = copies, is_left

    def left(self) -> list[int]:
        """Return the hashes of the blocks that a removal left with a copy."""
        return [engine_hash for engine_hash, (_, is_left) in self._copies.items() if is_left]

    def extend(
        self,
        parent: int | None,
        engine_hashes: Sequence[int],
        tokens: bytes,
        block_size: int,
        seed: int,
        namespace: int,
        full: Mapping[Place, object],
        piece_blocks: int,
        former: tuple[KnownBlocks, ...],
        /,
    ) -> list[NewBlocks] | None:
        """Hash a plain store and add its blocks. All must be new, and begin at the root, or continue a block of the
        same namespace in this table, at a place that is not ``full``. Their hashes are removed from ``former``.

        Return None, without a change, if the store is not plain or this implementation has no shortcut for it.
        """
        return None

    def take(self, engine_hashes: Sequence[int], former: tuple[KnownBlocks, ...], /) -> list[TakenBlocks] | None:
        """Apply a plain removal: move each of its engine hashes to the first of ``former``.

        The table must have all, each once, with one copy that no removal has left, and without further hashes.

        Return None as ``extend`` does.
        """
        return None

    def run(
        self,
        events: Any,
        start: int,
        position: int,
        hashes_max: int,
        parts: Any,
        holder: int,
        seed: int,
        namespace: int,
        full: Mapping[Place, object],
        piece_blocks: int,
        former: tuple[KnownBlocks, ...],
        may: int,
        following: list[tuple[int, Any]],
        waves: Any,
        neighbours: tuple[Neighbour, ...],
        /,
    ) -> tuple[int, int, int, int, int, int, int, int, int, bool] | None:
        """Run ``extend`` and ``take`` over ``events`` from number ``start`` on, and add their parts to ``parts``.

        ``events``, ``parts`` and ``waves`` are the C module's, and ``may`` has the bits above. With ``MAY_REPEAT`` a
        store may begin with blocks that the table has, and blocks may have several copies. Stop before the first event
        that is not plain or may not be applied, and after about ``hashes_max`` hashes. After the last event, continue
        with the batches in ``following``, each a seq and its events, up to the first batch whose events differ from the
        others in more than their blocks.

        A store may also continue a block of one of the ``neighbours``. Its blocks must be new to all generations among
        these, and a removal may take blocks with a single copy out of them.

        Return the fields of an ``EventRun``, or None as ``extend`` does.
        """
        return None

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
        self._places._leave(packed >> 69)

    def _spot(self, packed: int) -> Spot:
        place, namespace = self._places.places[packed >> 69]
        return Spot(place, namespace, packed >> 64 & PIECE_BLOCKS - 1, _key_of(packed))


def _key_of(packed: int) -> int:
    return packed & 2**64 - 1


def new_places() -> Places:
    if native.selected is not None:
        places: Places = native.selected.Places(Place, Spot)
        return places
    return Places()


def new_known(places: Places, *, has_keys: bool) -> KnownBlocks:
    """Return an empty table; its blocks will be in ``places``."""
    if type(places) is Places:  # the C module has a type of the same name
        return KnownBlocks(places, has_keys)
    assert native.selected is not None
    table: KnownBlocks = native.selected.KnownBlocks(places, has_keys)
    return table
