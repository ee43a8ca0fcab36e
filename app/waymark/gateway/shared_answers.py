"""Kept answers that all gateways share, in Redis; in the memory of this gateway while Redis is unavailable.

The first failure changes over, so no further request waits for Redis. A look at Redis every half a minute changes back,
and the answers kept meanwhile are forgotten, because they could not be cleared.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from time import perf_counter
from typing import Final, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.gateway.answer_store import CacheLookup, MemoryAnswers
from waymark.gateway.bounded import CacheSize
from waymark.gateway.kept_answer import KeptAnswer
from waymark.store.responses import AnswersSize, StoredAnswers, kind_of_failure
from waymark.store.steps import StartTask

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_SECONDS = 30.0
#: The words of Continuum Router for kinds of failures.
ERRORS: Final = ("connection", "timeout", "other")


class SharedAnswers:
    """The answers in Redis.

    ``beside`` has those of this gateway while Redis is unavailable; ``begin`` runs the look at Redis.
    Each call to Redis has ``milliseconds``.
    """

    backend = "redis"

    def __init__(
        self,
        stored: StoredAnswers,
        in_memory: MemoryAnswers,
        metrics: Metrics,
        begin: StartTask,
        *,
        entries_max: int,
        bytes_max: int,
        ttl_seconds: int,
        milliseconds: int,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self.entries_max = entries_max
        self.ttl_seconds = ttl_seconds
        self.is_away = False
        """Whether the answers are in memory, since Redis is unavailable."""
        self._stored = stored
        self._beside = in_memory
        self._metrics = metrics
        self._begin = begin
        self._bytes_max = bytes_max
        self._seconds = milliseconds / 1000
        self._look_seconds = look_seconds
        self._room = AnswersSize(0, 0)
        self.errors: Counter[str] = Counter()
        metrics.cache_fallback_active.set_function(lambda: float(self.is_away))
        metrics.cache_redis_connections_active.set_function(lambda: stored.connections()[0])
        metrics.cache_redis_connections_idle.set_function(lambda: stored.connections()[1])

    @property
    def held(self) -> CacheSize:
        return self._beside.held if self.is_away else CacheSize(self._room.entries, self._room.bytes)

    @property
    def connections(self) -> tuple[int, int]:
        """The number of used and of idle connections to Redis."""
        return self._stored.connections()

    async def find(self, key: bytes) -> CacheLookup:
        if not self.is_away:
            try:
                answer = await self._timed("get", self._stored.find(key))
            except StoreUnavailable:
                pass  # counted, and changed over
            else:
                return CacheLookup(None if answer.value is None else KeptAnswer.of(answer.value), answer.nonce)
        return await self._beside.find(key)

    async def keep(self, key: bytes, answer: KeptAnswer, clearing: bytes | int) -> None:
        if not isinstance(clearing, bytes):
            await self._beside.keep(key, answer, clearing)
            return
        if self.is_away:
            return
        keeping = self._stored.keep(
            key,
            answer.packed,
            clearing,
            milliseconds=1000 * self.ttl_seconds,
            entries_max=self.entries_max,
            bytes_max=self._bytes_max,
        )
        try:
            room = await self._timed("set", keeping)
        except StoreUnavailable:
            return
        if room is not None:
            self._room = room
            self._metrics.response_cache_evictions.inc(room.evicted)

    async def clear(self, key: bytes | None = None) -> int:
        self._beside.forget(key)
        count = await self._timed("delete", self._stored.clear(key))
        if key is None:
            self._room = AnswersSize(0, 0)
        return count

    async def count(self) -> CacheSize:
        if not self.is_away:
            with suppress(StoreUnavailable):  # counted, and changed over
                self._room = await self._timed("get", self._stored.room())
        return self.held

    async def _timed(self, operation: str, asked: Awaitable[T]) -> T:
        """Time a call to Redis. Raise StoreUnavailable after changing over."""
        began = perf_counter()
        try:
            async with asyncio.timeout(self._seconds):
                return await asked
        except TimeoutError:
            sentence = f"Redis has not answered within {self._seconds:g} s; look at its load"
            self._change_over("timeout", sentence)
            raise StoreUnavailable(sentence) from None
        except StoreUnavailable as error:
            self._change_over(kind_of_failure(error), error.sentence)
            raise
        finally:
            self._metrics.cache_redis_latency_seconds.labels(operation=operation).observe(perf_counter() - began)

    def _change_over(self, kind: str, sentence: str) -> None:
        self.errors[kind] += 1
        self._metrics.cache_redis_errors.labels(type=kind).inc()
        if not self.is_away:
            self.is_away = True
            log.warning("the response cache is in memory until Redis answers again", extra=fields(error=sentence))
            self._begin(self._come_back())

    async def _come_back(self) -> None:
        while self.is_away:
            await asyncio.sleep(self._look_seconds)
            try:
                self._room = await self._timed("get", self._stored.room())
            except StoreUnavailable:
                continue
            self.is_away = False
            self._beside.forget()
            log.info("the response cache is in Redis again")
