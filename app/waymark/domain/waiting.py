"""Blocks that cannot be placed yet: stores whose parent is unknown, and objects of a pool.

A block cannot be placed without its parent, and placing it at the root would be wrong. So the store waits until its
parent arrives; the number of waiting blocks is bounded. A removal or a clear also finds its blocks here.

An object of a pool waits while an object shard is missing, or no engine has reported its hash. A block is complete when
all of its object shards are stored: as many as the registration says, or else as many as the keys of that pool have
named so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from waymark.domain.events import Stored
from waymark.domain.slices import SLICE_WORK, Slices

SHARD = "shard:"
"""The prefix of the flags that name the object shards in the keys of this life."""
SHARDS_MAX = 1024
"""The most object shards of a block; further ones are ignored."""
FIND_MAX = 512
"""The number of waiting hashes looked up at once."""
EARLY_MAX = 1_000_000
"""The number of positions before those of the events in a pool's batch. A block whose object has waited is stored at
one of these, at the beginning of a future batch.
"""


@dataclass(slots=True, eq=False)
class WaitingStore:
    """A waiting store."""

    event: Stored
    dp_rank: int
    holder: int
    removed: set[int] = field(default_factory=set)
    """The engine hashes of the store that were removed while it waited."""


class WaitingStores:
    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._by_parent: dict[tuple[int, int], list[WaitingStore]] = {}
        self._by_hash: dict[tuple[int, int], list[WaitingStore]] = {}  # by holder and engine hash
        self.blocks = 0
        self.dropped = 0
        """The total number of blocks that were dropped for lack of room."""
        self.dropped_there = 0
        """The number of dropped blocks that had not been removed. The resolver counts them as missing, and resets this
        number.
        """
        self.removed = 0
        """The number of waiting blocks that were removed while they waited."""

    def add(self, waiting: WaitingStore) -> None:
        """Add a waiting store; if there is no room, drop the oldest."""
        parent, hashes = waiting.event.parent, waiting.event.engine_hashes
        assert parent is not None
        if len(hashes) > self._blocks_max:
            self.dropped += len(hashes)
            self.dropped_there += len(hashes)
            return
        self._by_parent.setdefault((waiting.dp_rank, parent), []).append(waiting)
        for engine_hash in hashes:
            self._by_hash.setdefault((waiting.holder, engine_hash), []).append(waiting)
        self.blocks += len(hashes)
        while self.blocks > self._blocks_max:
            key = next(iter(self._by_parent))
            group = self._by_parent.pop(key)
            self.dropped += self._leave(group)
            self.dropped_there += sum(len(store.event.engine_hashes) - len(store.removed) for store in group)

    def take_children(self, dp_rank: int, parents: Iterable[int]) -> list[WaitingStore]:
        """Return the stores that waited for one of ``parents``, and remove them."""
        children: list[WaitingStore] = []
        if self._by_parent:
            for parent in parents:
                waiting = self._by_parent.pop((dp_rank, parent), None)
                if waiting is not None:
                    self._leave(waiting)
                    children += waiting
        return children

    def remove(self, holder: int, engine_hash: int) -> bool:
        """Note that a hash was removed, so that it is not stored later. Return whether it waits for this holder."""
        for waiting in self._by_hash.get((holder, engine_hash), ()):
            if engine_hash not in waiting.removed:
                waiting.removed.add(engine_hash)
                self.removed += 1
                return True
        return False

    def clear(self, holders: Iterable[int]) -> int:
        """Forget the stores that wait for these holders. Return the number of their blocks."""
        ended, forgotten = set(holders), 0
        for key, group in list(self._by_parent.items()):
            remaining = [waiting for waiting in group if waiting.holder not in ended]
            forgotten += self._leave([waiting for waiting in group if waiting.holder in ended])
            if remaining:
                self._by_parent[key] = remaining
            else:
                del self._by_parent[key]
        return forgotten

    def _leave(self, group: list[WaitingStore]) -> int:
        """Forget stores that no longer wait. Return how many blocks they had."""
        blocks = 0
        for waiting in group:
            blocks += len(waiting.event.engine_hashes)
            self.removed -= len(waiting.removed)
            for engine_hash in waiting.event.engine_hashes:
                stores = self._by_hash[waiting.holder, engine_hash]
                stores.remove(waiting)
                if not stores:
                    del self._by_hash[waiting.holder, engine_hash]
        self.blocks -= blocks
        return blocks


class WaitingObjects:
    """The objects that wait for their blocks. Beyond a bound, the oldest are dropped."""

    def __init__(self, objects_max: int, shards: int = 0) -> None:
        """``shards`` is the number of object shards that make up a block; 0: as many as have been seen."""
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
        """Keep the remaining shards of a block that was complete."""
        for shard in shards:
            self.put(holder, engine_hash, shard)

    def take(self, holder: int, engine_hash: int, shards: Collection[str]) -> bool:
        """Return whether the block is complete; then it no longer waits. ``shards`` are all that the life has named."""
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
        """Return hashes to look up again, each once. Each call continues after those of the last one."""
        names = list(islice(self._shards, FIND_MAX))
        if len(self._shards) > FIND_MAX:
            for name in names:  # the next call begins after them
                self._shards[name] = self._shards.pop(name)
        return list(dict.fromkeys(engine_hash for _, engine_hash in names))

    def found(self, holders: Collection[int], reported: Mapping[int, object]) -> Slices[list[tuple[int, int]]]:
        """Return the waiting objects whose hashes have since been reported, as holder and engine hash."""
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
