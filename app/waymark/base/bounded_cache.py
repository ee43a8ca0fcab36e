"""A cache in memory. It evicts the least recently used value first, and no value outlives its time."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class CacheSize(NamedTuple):
    """The number of entries, and their bytes."""

    entries: int
    bytes: int


class BoundedCache(Generic[K, V]):
    """Bounded in entries and in bytes; ``size`` measures a value; ``evicted`` is called for each evicted value.

    ``entry_bytes`` is the memory of an entry besides its value: key, tuple, dictionary.
    """

    def __init__(
        self,
        *,
        entries_max: float = math.inf,
        bytes_max: float = math.inf,
        ttl_seconds: float = math.inf,
        size: Callable[[V], int] = lambda _: 0,
        entry_bytes: int = 0,
        evicted: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._ttl_seconds = ttl_seconds
        self._size = size
        self._entry_bytes = entry_bytes
        self._evicted = evicted
        self._clock = clock
        self.bytes = 0
        self._held: OrderedDict[K, tuple[V, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> CacheSize:
        return CacheSize(len(self._held), self.bytes)

    def find(self, key: K) -> V | None:
        """Return the value under a key, unless its time is over."""
        entry = self._held.get(key)
        if entry is None:
            return None
        value, _, expires_at = entry
        if expires_at != math.inf and self._clock() >= expires_at:
            self.pop(key)
            return None
        self._held.move_to_end(key)
        return value

    def keep(self, key: K, value: V) -> bool:
        """Keep a value; evict others if there is no room. Return False, and do not keep it, if it is larger than the
        whole cache.
        """
        self.pop(key)
        size = self._size(value) + self._entry_bytes
        if size > self._bytes_max or not self._entries_max:
            return False
        while self._held and (len(self._held) >= self._entries_max or self.bytes + size > self._bytes_max):
            self.pop(next(iter(self._held)))
            self._evicted()
        expires_at = math.inf if self._ttl_seconds == math.inf else self._clock() + self._ttl_seconds
        self._held[key] = value, size, expires_at
        self.bytes += size
        return True

    def pop(self, key: K) -> V | None:
        """Remove a value and return it, whether or not its time is over."""
        entry = self._held.pop(key, None)
        if entry is None:
            return None
        self.bytes -= entry[1]
        return entry[0]

    def clear(self) -> int:
        """Forget all values. Return how many there were."""
        count = len(self._held)
        self._held.clear()
        self.bytes = 0
        return count
