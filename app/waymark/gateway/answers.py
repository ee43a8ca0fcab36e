"""Kept answers in the memory of a gateway: the least recently used goes first, and none is older than its time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from waymark.gateway.kept import Kept
from waymark.metrics import Metrics

#: What an entry takes in addition to its body: key, tuple, dictionary.
_ENTRY_BYTES = 512


class MemoryAnswers:
    """Bounded in entries and in bytes."""

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
        self.bytes = 0
        self.generation = 0
        """Another one after every ``clear``."""
        self._bytes_max = bytes_max
        self._clock = clock
        self._metrics = metrics
        self._held: OrderedDict[bytes, tuple[float, Kept]] = OrderedDict()
        metrics.response_cache_entries.set_function(lambda: len(self._held))
        metrics.response_cache_size_bytes.set_function(lambda: self.bytes)

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: bytes) -> Kept | None:
        """The answer under a key, unless its time is over."""
        found = self._held.get(key)
        if found is None:
            return None
        until, kept = found
        if self._clock() >= until:
            self._remove(key)
            return None
        self._held.move_to_end(key)
        return kept

    def keep(self, key: bytes, kept: Kept) -> None:
        """Keep an answer; others go where there is no room. One that is larger than all room is not kept."""
        if key in self._held:
            self._remove(key)
        size = _size(kept)
        if size > self._bytes_max:
            return
        while self._held and (len(self._held) >= self.entries_max or self.bytes + size > self._bytes_max):
            self._remove(next(iter(self._held)))
            self._metrics.response_cache_evictions.inc()
        self._held[key] = self._clock() + self.ttl_seconds, kept
        self.bytes += size

    def clear(self) -> int:
        """Forget all; how many there were. What is under way now is not kept."""
        count = len(self._held)
        self._held.clear()
        self.bytes = 0
        self.generation += 1
        return count

    def _remove(self, key: bytes) -> None:
        _, kept = self._held.pop(key)
        self.bytes -= _size(kept)


def _size(kept: Kept) -> int:
    return len(kept.body) + _ENTRY_BYTES
