"""Tables of what a stream knows: for each engine hash its block, and the place of that block.

A stream has one ``Places`` and, for each set of engine hashes, a ``KnownBlocks`` in it. A place is there as long as one
of its blocks is. The C module has both types, in some 35 bytes a block; here they are in Python, with the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from waymark import native
from waymark.domain.rows import PIECE_BLOCKS, Place

_PURE_BYTES = 300
"""Of a block or a place, in Python: two entries of dicts and their numbers."""


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


Piece: TypeAlias = tuple[Place, bytes, bytes, int, int | None]
"""New blocks at one place: their slots and engine hashes, packed; the index of the first in its event, and the key of
the block before it, where that is in the same piece."""


class Ran(NamedTuple):
    """How far a run of plain events went."""

    at: int
    """The number of the next event."""
    position: int
    """Of the next event."""
    stores: int
    stored: int
    """Blocks."""
    removed: int
    """Blocks."""


Group: TypeAlias = tuple[Place, int, bytes, bytes]
"""Blocks at one place that went together: its namespace, their slots and engine hashes, packed."""


class Places(Protocol):
    """The places of a stream, each of them once."""

    def __len__(self) -> int: ...

    def __sizeof__(self) -> int: ...


class KnownBlocks(Protocol):
    """Engine hashes, and the block of each.

    With ``has_keys`` blocks are found by their key, too: then one of the engine hashes of a block is its first.
    """

    def __len__(self) -> int:
        """Engine hashes."""

    def __sizeof__(self) -> int:
        """Bytes, without those of the places."""

    def blocks(self) -> int:
        """Blocks that are found by their key."""

    def get(self, engine_hash: int, /) -> Spot | None:
        """The block of an engine hash."""

    def get_block(self, key: int, /) -> Spot | None:
        """The block with a key."""

    def first(self, key: int, /) -> int | None:
        """The first engine hash of the block with a key."""

    def are_new(self, engine_hashes: Sequence[int], keys: Sequence[int], /) -> bool:
        """Whether none of these is here, and none of them is there twice."""

    def store(
        self, place: Place, namespace: int, keys: Sequence[int], depths: Sequence[int], engine_hashes: Sequence[int], /
    ) -> None:
        """Blocks of one place. An engine hash that is here already becomes that of its new block."""

    def name(self, engine_hash: int, key: int, /) -> None:
        """A further engine hash of a block; ``KeyError`` where there is no block with this key."""

    def lead(self, engine_hash: int, /) -> None:
        """It becomes the first engine hash of its block; ``KeyError`` where it is not here."""

    def pop(self, engine_hash: int, /) -> Spot | None:
        """Take an engine hash out. If it is the first one of its block, the block is found by no key then."""

    def discard(self, engine_hashes: Sequence[int], /) -> None:
        """Take engine hashes out, those that are here."""

    def move(self, engine_hash: int, place: Place, /) -> None:
        """Its block is at another place; ``KeyError`` where it is not here."""

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
        gone: tuple[KnownBlocks, ...],
        /,
    ) -> list[Piece] | None:
        """Hash a plain store, and put its blocks in: all of them are new, and go on from a block that is here, of the
        same namespace, at a place that is not ``full``; or they begin at the root. Their hashes are ``gone`` no more.

        None where the store is not plain, or this implementation has no short way for it; nothing has changed then.
        """

    def take(
        self, engine_hashes: Sequence[int], gone: tuple[KnownBlocks, ...], several: Mapping[int, object], /
    ) -> list[Group] | None:
        """A plain removal: each of these engine hashes goes to the first of ``gone``, and out of the others. All of
        them are here, none comes twice, and the key of none is among ``several``.

        None as of ``extend``.
        """

    def run(
        self,
        events: Any,
        at: int,
        position: int,
        hashes_max: int,
        parts: Any,
        holder: int,
        seed: int,
        namespace: int,
        full: Mapping[Place, object],
        piece_blocks: int,
        gone: tuple[KnownBlocks, ...],
        several: Mapping[int, object],
        may_store: bool,
        may_remove: bool,
        /,
    ) -> tuple[int, int, int, int, int] | None:
        """``extend`` and ``take`` with ``events`` from the one with number ``at`` on, whose parts join ``parts``; both
        are the C module's. It ends before the first event that is not plain, or that it may not take, and after some
        ``hashes_max`` hashes. Returns what ``Ran`` has, None as of ``extend``.
        """


def new_places() -> Places:
    if native.selected is not None:
        places: Places = native.selected.Places(Place, Spot)
        return places
    return PurePlaces()


def new_known(places: Places, *, has_keys: bool) -> KnownBlocks:
    """No engine hashes yet; their blocks will be in ``places``."""
    if isinstance(places, PurePlaces):
        return PureKnownBlocks(places, has_keys)
    assert native.selected is not None
    known: KnownBlocks = native.selected.KnownBlocks(places, has_keys)
    return known


class PurePlaces:
    """``Places`` in Python."""

    def __init__(self) -> None:
        self.places: list[tuple[Place, int]] = []
        """With their namespaces."""
        self._blocks: list[int] = []
        self._numbers: dict[tuple[Place, int], int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __sizeof__(self) -> int:
        return _PURE_BYTES * len(self._numbers)

    def enter(self, place: Place, namespace: int, count: int) -> int:
        """The number of a place, which has ``count`` blocks more now."""
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

    def __del__(self) -> None:
        for packed in self._spots.values():
            self._places.leave(packed >> 69)

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
        if any(depth >= PIECE_BLOCKS for depth in depths):
            raise ValueError(f"a depth in a piece is less than {PIECE_BLOCKS}")
        number = self._places.enter(place, namespace, len(keys) + 1)
        for key, depth, engine_hash in zip(keys, depths, engine_hashes, strict=True):
            self._put(engine_hash, number << 69 | depth << 64 | key)
        self._places.leave(number)

    def name(self, engine_hash: int, key: int, /) -> None:
        packed = self._spots[self._first[key]]
        self._places.enter(*self._places.places[packed >> 69], 1)
        self._put(engine_hash, packed)

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

    def extend(self, *_: object) -> None:
        """There is no short way for it here."""

    def take(self, *_: object) -> None:
        """There is no short way for it here."""

    def run(self, *_: object) -> None:
        """There is no short way for it here."""

    def _put(self, engine_hash: int, packed: int) -> None:
        if engine_hash in self._spots:
            self._drop(engine_hash)
        self._spots[engine_hash] = packed
        if self._has_keys:
            self._first.setdefault(_key_of(packed), engine_hash)

    def _drop(self, engine_hash: int) -> None:
        packed = self._spots.pop(engine_hash)
        if self._first.get(_key_of(packed)) == engine_hash:
            del self._first[_key_of(packed)]
        self._places.leave(packed >> 69)

    def _spot(self, packed: int) -> Spot:
        place, namespace = self._places.places[packed >> 69]
        return Spot(place, namespace, packed >> 64 & PIECE_BLOCKS - 1, _key_of(packed))


def _key_of(packed: int) -> int:
    return packed & 2**64 - 1
