"""Stores whose parent is not known yet.

A block cannot be placed without its parent, and placing it at the root would be wrong. So the store waits, bounded in
blocks, until its parent arrives. A removal or a clear also finds its blocks here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from waymark.domain.events import Stored


@dataclass(slots=True, eq=False)
class WaitingStore:
    """One store that waits."""

    event: Stored
    dp_rank: int
    holder: int
    removed: set[int] = field(default_factory=set)
    """Its engine hashes that were removed while it waited."""


class WaitingRoom:
    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._by_parent: dict[tuple[int, int], list[WaitingStore]] = {}
        self._by_hash: dict[tuple[int, int], list[WaitingStore]] = {}  # of those that wait for a holder
        self.blocks = 0
        self.dropped = 0
        """Blocks that were dropped for lack of room, in all."""
        self.dropped_there = 0
        """The number of dropped blocks that were not removed before. The resolver counts them as missing and sets this
        to 0."""
        self.removed = 0
        """The number of waiting blocks that were removed while they waited."""

    def add(self, waiting: WaitingStore) -> None:
        """Add a waiting store; if there is no room, drop those that have waited longest."""
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
        """Return whether the hash waits for this holder; then it will not be stored when its turn comes."""
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
        """They are out of the room; how many blocks."""
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
