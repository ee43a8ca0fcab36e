"""Values in memory: the least recently used goes first, and a value never outlives its time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")

#: The memory of an entry besides its value: key, tuple, dictionary.
ENTRY_BYTES = 512


class CacheSize(NamedTuple):
    """The number of entries, and their bytes."""

    entries: int
    bytes: int


class BoundedCache(Generic[V]):
    """Bounded in entries and in bytes; ``size`` measures a value; ``evicted`` is called for each that makes room."""

    def __init__(
        self,
        entries_max: int,
        bytes_max: int,
        ttl_seconds: float,
        size: Callable[[V], int],
        *,
        evicted: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._ttl_seconds = ttl_seconds
        self._size = size
        self._evicted = evicted
        self._clock = clock
        self._bytes = 0
        self._held: OrderedDict[bytes, tuple[float, V]] = OrderedDict()

    @property
    def held(self) -> CacheSize:
        return CacheSize(len(self._held), self._bytes)

    def find(self, key: bytes) -> V | None:
        """Return the value under a key, unless its time is over."""
        entry = self._held.get(key)
        if entry is None:
            return None
        expires_at, value = entry
        if self._clock() >= expires_at:
            self.remove(key)
            return None
        self._held.move_to_end(key)
        return value

    def keep(self, key: bytes, value: V) -> bool:
        """Keep a value; others go if there is no room. Return False if it is larger than the whole room, and not
        kept.
        """
        self.remove(key)
        size = self._size(value) + ENTRY_BYTES
        if size > self._bytes_max or not self._entries_max:
            return False
        while self._held and (len(self._held) >= self._entries_max or self._bytes + size > self._bytes_max):
            self.remove(next(iter(self._held)))
            self._evicted()
        self._held[key] = self._clock() + self._ttl_seconds, value
        self._bytes += size
        return True

    def remove(self, key: bytes) -> None:
        entry = self._held.pop(key, None)
        if entry is not None:
            self._bytes -= self._size(entry[1]) + ENTRY_BYTES

    def clear(self) -> int:
        """Forget all; how many there were."""
        count = len(self._held)
        self._held.clear()
        self._bytes = 0
        return count
