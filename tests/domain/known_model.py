"""A table of engine hashes in as few words as possible, and random steps for it and for the real ones."""

from __future__ import annotations

from waymark.domain.known import Spot
from waymark.domain.pure_known import KnownBlocks
from waymark.domain.rows import Place

STEPS = ["store", "store", "store", "pop", "pop", "discard", "name", "lead", "move", "are_new", "copies", "copies"]


class Model:
    """All blocks in a dict, and which engine hash is the first of a key."""

    def __init__(self) -> None:
        self.spots: dict[int, Spot] = {}
        self.firsts: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        """Of an engine hash, if it is the first of its block."""
        self.left: set[int] = set()
        """The hashes whose blocks have a left copy."""

    def step(self, step: str, one: int, other: int, place: Place, count: int) -> object:
        """One of ``STEPS``, with an engine hash, a key, a place and a number of blocks."""
        match step:
            case "store":
                for i in range(count):
                    self._put(one ^ i, Spot(place, other % 3, other % 27 + i, other ^ i))
            case "pop":
                return self._pop(one)
            case "discard":
                for engine_hash in (one, one ^ 1, other):
                    self._pop(engine_hash)
            case "name" if other in self.firsts:
                self._put(one, self.spots[self.firsts[other]], 0)
            case "lead" if one in self.spots:
                self.firsts[self.spots[one].key] = one
            case "move" if one in self.spots:
                self.spots[one] = self.spots[one]._replace(place=place)
            case "are_new":
                return self.spots.keys().isdisjoint([one, one ^ 1]) and self.firsts.keys().isdisjoint(
                    [other, other ^ 1]
                )
            case "copies" if other in self.firsts:
                self.copies[self.firsts[other]] = count
                (self.left.add if one & 1 else self.left.discard)(self.firsts[other])
                return self.copies_of(other), set(self.left)
            case "name" | "lead" | "move" | "copies":
                return "unknown"
        return None

    def copies_of(self, key: int) -> tuple[int, bool] | None:
        """The copies of the block with a key, and whether a removal left one."""
        first = self.firsts.get(key)
        return None if first is None else (self.copies[first], first in self.left)

    def state(self, one: int, other: int) -> tuple[int, Spot | None, int | None]:
        """How many there are, the block of an engine hash, and the first engine hash of a key."""
        return len(self.spots), self.spots.get(one), self.firsts.get(other)

    @property
    def blocks(self) -> int:
        return len(self.firsts)

    @property
    def places(self) -> int:
        return len({(spot.place, spot.namespace) for spot in self.spots.values()})

    def _put(self, engine_hash: int, spot: Spot, copies: int = 1) -> None:
        self._pop(engine_hash)
        self.spots[engine_hash] = spot
        self.copies[engine_hash] = copies
        self.firsts.setdefault(spot.key, engine_hash)

    def _pop(self, engine_hash: int) -> Spot | None:
        spot = self.spots.pop(engine_hash, None)
        self.copies.pop(engine_hash, None)
        self.left.discard(engine_hash)
        if spot is not None and self.firsts.get(spot.key) == engine_hash:
            del self.firsts[spot.key]
        return spot


def play(table: KnownBlocks, step: str, one: int, other: int, place: Place, count: int) -> object:
    """The same step on a real table."""
    try:
        match step:
            case "store":
                keys, hashes = [other ^ i for i in range(count)], [one ^ i for i in range(count)]
                table.store(place, other % 3, keys, range(other % 27, other % 27 + count), hashes)
            case "pop":
                return table.pop(one)
            case "discard":
                table.discard((one, one ^ 1, other))
            case "name":
                table.name(one, other)
            case "lead":
                table.lead(one)
            case "move":
                table.move(one, place)
            case "are_new":
                return table.are_new((one, one ^ 1), [other, other ^ 1])
            case "copies":
                table.set_copies(other, count, bool(one & 1))
                return table.copies(other), set(table.left())
    except KeyError:
        return "unknown"
    return None
