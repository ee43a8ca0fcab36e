"""Kept answers in the memory of a gateway: the least recently used goes first, and none is older than its time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from waymark.gateway.kept import Kept
from waymark.metrics import Metrics

#: What an entry takes in addition to its body: key, tuple, dictionary.
_ENTRY_BYTES = 512


class Lookup(NamedTuple):
    """What is kept for a request, and which clearing was the last; an answer is kept if that is so still."""

    kept: Kept | None
    turn: bytes | int


class Held(NamedTuple):
    """How much is kept."""

    entries: int
    bytes: int


class Answers(Protocol):
    """Where the answers of a response cache are."""

    backend: str
    entries_max: int
    ttl_seconds: int

    @property
    def held(self) -> Held:
        """How much is kept, as far as this process knows."""
        ...

    async def find(self, key: bytes) -> Lookup: ...

    async def keep(self, key: bytes, kept: Kept, turn: bytes | int) -> None:
        """Keep an answer, unless all was cleared since its request was looked up."""
        ...

    async def clear(self) -> int:
        """Forget all; how many there were. Raises StoreUnavailable where others would keep theirs."""
        ...

    async def count(self) -> Held:
        """How much is kept now."""
        ...


class MemoryAnswers:
    """Bounded in entries and in bytes."""

    backend = "memory"

    def __init__(
        self,
        entries_max: int,
        bytes_max: int,
        ttl_seconds: int,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.entries_max = entries_max
        self.ttl_seconds = ttl_seconds
        self._bytes = 0
        self._generation = 0
        """Another one after every ``clear``."""
        self._bytes_max = bytes_max
        self._clock = clock
        self._metrics = metrics
        self._held: OrderedDict[bytes, tuple[float, Kept]] = OrderedDict()

    @property
    def held(self) -> Held:
        return Held(len(self._held), self._bytes)

    async def count(self) -> Held:
        return self.held

    async def find(self, key: bytes) -> Lookup:
        """The answer under a key, unless its time is over."""
        found = self._held.get(key)
        if found is None:
            return Lookup(None, self._generation)
        until, kept = found
        if self._clock() >= until:
            self._remove(key)
            return Lookup(None, self._generation)
        self._held.move_to_end(key)
        return Lookup(kept, self._generation)

    async def keep(self, key: bytes, kept: Kept, turn: bytes | int) -> None:
        """Keep an answer; others go where there is no room. One that is larger than all room is not kept."""
        if turn != self._generation:
            return
        if key in self._held:
            self._remove(key)
        size = _size(kept)
        if size > self._bytes_max or not self.entries_max:
            return
        while self._held and (len(self._held) >= self.entries_max or self._bytes + size > self._bytes_max):
            self._remove(next(iter(self._held)))
            self._metrics.response_cache_evictions.inc()
        self._held[key] = self._clock() + self.ttl_seconds, kept
        self._bytes += size

    async def clear(self) -> int:
        return self.forget()

    def forget(self) -> int:
        """Forget all; how many there were. What is under way now is not kept."""
        count = len(self._held)
        self._held.clear()
        self._bytes = 0
        self._generation += 1
        return count

    def _remove(self, key: bytes) -> None:
        _, kept = self._held.pop(key)
        self._bytes -= _size(kept)


def _size(kept: Kept) -> int:
    return len(kept.body) + _ENTRY_BYTES
