"""Objects of a pool whose blocks are not indexed yet: an object shard is missing, or no engine has reported the hash.

A block is there when all of its object shards are: as many as the registration says, else as many as different ones
stood in the keys of that pool so far.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

from waymark.domain.slices import SLICE_WORK, Slices

SHARD = "shard:"
"""Flags of this life that begin so name the object shards that stood in its keys."""
SHARDS_MAX = 1024
"""Further ones are ignored."""
FIND_MAX = 512
"""Hashes that wait and are looked up at once."""
EARLY_MAX = 1_000_000
"""Positions of a batch of a pool that come before those of its events. A block whose object has waited is stored there,
at the beginning of a future batch.
"""


class WaitingObjects:
    """The objects that wait for their blocks, bounded: those that have waited longest are dropped."""

    def __init__(self, objects_max: int, shards: int = 0) -> None:
        """``shards`` make up a block; 0: as many as have been seen."""
        self._objects_max = objects_max
        self._needed = shards
        self._shards: dict[tuple[int, int], set[str]] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._shards)

    def put(self, holder: int, engine_hash: int, shard: str) -> None:
        self._shards.setdefault((holder, engine_hash), set()).add(shard)

    def trim(self) -> None:
        """Drop objects beyond the bound, after each object that did not find its block at once."""
        while len(self._shards) > self._objects_max:
            del self._shards[next(iter(self._shards))]
            self.dropped += 1

    def keep(self, holder: int, engine_hash: int, shards: Collection[str]) -> None:
        """Keep the remaining shards of a block that was whole."""
        for shard in shards:
            self.put(holder, engine_hash, shard)

    def take(self, holder: int, engine_hash: int, shards: Collection[str]) -> bool:
        """Add the shards seen so far. Return whether all shards of a block are there; then it stops waiting."""
        present = self._shards.get((holder, engine_hash))
        if present is None or not (len(present) >= self._needed if self._needed else present.issuperset(shards)):
            return False
        del self._shards[holder, engine_hash]
        return True

    def remove(self, holder: int, engine_hash: int, shard: str) -> bool:
        """Remove a shard. Return whether it waited."""
        present = self._shards.get((holder, engine_hash))
        if present is None or shard not in present:
            return False
        present.discard(shard)
        if not present:
            del self._shards[holder, engine_hash]
        return True

    def some(self) -> list[int]:
        """Return hashes to look up again, each once; further ones with each call."""
        names = list(islice(self._shards, FIND_MAX))
        if len(self._shards) > FIND_MAX:
            for name in names:  # the next call begins behind them
                self._shards[name] = self._shards.pop(name)
        return list(dict.fromkeys(engine_hash for _, engine_hash in names))

    def found(self, holders: Collection[int], reported: Mapping[int, object]) -> Slices[list[tuple[int, int]]]:
        """Return the waiting objects whose hashes have been reported meanwhile, as holder and engine hash."""
        names: list[tuple[int, int]] = []
        for holder in holders if self._shards else ():
            for i, engine_hash in enumerate(reported, 1):
                if (holder, engine_hash) in self._shards:
                    names.append((holder, engine_hash))
                if i % SLICE_WORK == 0:
                    yield
        return names

    def end(self, holders: Collection[int]) -> int:
        """Forget the objects that wait for these holders. Return how many."""
        count = len(self._shards)
        self._shards = {name: shards for name, shards in self._shards.items() if name[0] not in holders}
        return count - len(self._shards)
