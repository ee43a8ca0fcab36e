"""The interface of a store for the answers of a response cache, and the store in the memory of a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from waymark.base.metrics import Metrics
from waymark.gateway.bounded import BoundedCache, CacheSize
from waymark.gateway.kept_answer import KeptAnswer


class CacheLookup(NamedTuple):
    """The cached answer to a request, and the last clearing. A new answer is kept if no other clearing follows."""

    kept: KeptAnswer | None
    clearing: bytes | int


class AnswerStore(Protocol):
    """The place of the answers of a response cache: memory or Redis."""

    backend: str
    entries_max: int
    ttl_seconds: int

    @property
    def held(self) -> CacheSize:
        """How much is kept, as far as this process knows."""
        ...

    async def find(self, key: bytes) -> CacheLookup: ...

    async def keep(self, key: bytes, answer: KeptAnswer, clearing: bytes | int) -> None:
        """Keep an answer, unless all was cleared since its request was looked up."""
        ...

    async def clear(self, key: bytes | None = None) -> int:
        """Forget one answer, or all. Return how many there were. Raise StoreUnavailable if other gateways would keep
        theirs.

        The answer to a request under way now is not kept afterwards.
        """
        ...

    async def count(self) -> CacheSize:
        """Return the size of the cache."""
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
        self._generation = 0
        """A number that every ``clear`` raises."""
        evicted = metrics.response_cache_evictions.inc
        self._answers: BoundedCache[KeptAnswer] = BoundedCache(
            entries_max, bytes_max, ttl_seconds, lambda answer: len(answer.body), evicted=evicted, clock=clock
        )

    @property
    def held(self) -> CacheSize:
        return self._answers.held

    async def count(self) -> CacheSize:
        return self.held

    async def find(self, key: bytes) -> CacheLookup:
        return CacheLookup(self._answers.find(key), self._generation)

    async def keep(self, key: bytes, answer: KeptAnswer, clearing: bytes | int) -> None:
        if clearing == self._generation:
            self._answers.keep(key, answer)

    async def clear(self, key: bytes | None = None) -> int:
        return self.forget(key)

    def forget(self, key: bytes | None = None) -> int:
        """Forget one answer, or all. Return how many there were. Answers under way now are not kept."""
        self._generation += 1
        if key is None:
            return self._answers.clear()
        answer = self._answers.find(key)
        self._answers.remove(key)
        return int(answer is not None)
