"""The response cache: the answer to a repeated request is sent without any engine.

Only one of several equal requests goes to an engine at a time; the others wait for its answer; if it cannot be cached,
each is sent on its own. A cached answer is complete, has status 200, and was finished by the model.

All gateways share the answers, in Redis; while it is unavailable, a gateway keeps answers in its own memory. The first
failure switches to memory, so no further request waits for Redis. Redis is checked every half minute; when it answers,
the gateway switches back, and forgets the answers kept meanwhile, because they could not be cleared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Literal, NamedTuple, TypeVar

from waymark.base.asgi import RawHeaders
from waymark.base.bounded_cache import CacheSize
from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.chat.prefix_key import as_written, cache_key, is_cacheable, telling_headers
from waymark.chat.requests import Form
from waymark.gateway.kept_answer import AnswerCollector, AnswerStore, CacheLookup, KeptAnswer, MemoryAnswers, send_again
from waymark.gateway.proxy import ProxiedRequest
from waymark.gateway.security import GatewayCaller, going_on
from waymark.gateway.shapes import InferenceBody
from waymark.store.responses import AnswersSize, CacheState, ReplicaCounts, StoredAnswers, kind_of_failure
from waymark.store.steps import StartTask
from waymark.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_SECONDS = 30.0
#: The prefixes, among the counts of all gateways, of the names of results and of the kinds of failures.
_COUNT = "response_cache."
_COUNT_ERROR = "response_cache.error."


class SharedAnswers:
    """The answers in Redis.

    ``beside`` has those of this gateway while Redis is unavailable; ``begin`` runs the look at Redis.
    Each call to Redis may take ``milliseconds``.
    """

    backend = "redis"

    def __init__(
        self,
        stored: StoredAnswers,
        in_memory: MemoryAnswers,
        metrics: Metrics,
        begin: StartTask,
        counts: ReplicaCounts,
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
        self._counts = counts
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
                pass  # counted; from now on answers are in memory
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
            with suppress(StoreUnavailable):  # counted; from now on answers are in memory
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
        self._counts.add(_COUNT_ERROR + kind)
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


Proceed = Callable[[RawHeaders], Awaitable[None]]
"""Sends the request to an engine; the headers are added to the answer."""

FALLBACK_ENTRIES = 1000
FALLBACK_TTL_SECONDS = 300
"""The bounds of the answers in memory while Redis is unavailable. They are forgotten when it is back, so few are worth
keeping, and not for long."""

#: The forms whose answers are cached. Answers of the other forms carry ids that belong to one request.
_FORMS = frozenset({Form.CHAT, Form.COMPLETIONS, Form.MESSAGES})
#: Directives of Cache-Control by which a client does not use the cache.
_ASKS_ANEW = frozenset({b"no-cache", b"no-store"})
#: The longest wait of a request for an equal one under way.
_FLIGHT_SECONDS = 60.0


class _SharedRequest(NamedTuple):
    """A request that an engine answers now, for all clients that ask the same."""

    clearing: bytes | int
    """The last clearing at the time of its lookup."""
    answer: asyncio.Future[KeptAnswer | None]
    """None if the others have to ask an engine themselves."""

    def end(self, answer: KeptAnswer | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


@record(frozen=True, slots=True)
class CacheOptions:
    place: Literal["memory", "redis"]
    entries_max: int
    bytes_max: int
    ttl_seconds: int
    """How old an answer may be."""
    response_bytes: int
    """The largest answer to keep."""
    stream_bytes: int
    """The largest streamed answer to keep."""
    redis_ms: int
    """How long the gateway waits for Redis before it uses its own memory."""


class ResponseCache:
    """The answers that a gateway gives without an engine."""

    def __init__(
        self,
        answers: AnswerStore,
        metrics: Metrics,
        begin: StartTask,
        counts: ReplicaCounts,
        *,
        response_bytes: int,
        stream_bytes: int,
    ) -> None:
        """``counts`` are those of all gateways together."""
        self._counts = counts
        self._evicted = 0
        """The evictions of this gateway already among the counts."""
        self._answers = answers
        self._begin = begin
        self._metrics = metrics
        self._response_bytes = response_bytes
        self._stream_bytes = stream_bytes
        self._under_way: dict[bytes, _SharedRequest] = {}
        self._results = {name: metrics.response_cache_requests.labels(result=name) for name in ("hit", "miss", "skip")}
        metrics.response_cache_hit_rate.set_function(lambda: self.hit_rate)
        metrics.response_cache_entries.set_function(lambda: answers.held.entries)
        metrics.response_cache_size_bytes.set_function(lambda: answers.held.bytes)
        metrics.cache_backend_type.labels(backend=answers.backend).set(1)

    @classmethod
    def open(cls, options: CacheOptions, metrics: Metrics, store: Store) -> ResponseCache:
        """Return the cache of a gateway over its store."""
        return cls(
            _answers(options, metrics, store),
            metrics,
            store.begin,
            store.counts,
            response_bytes=options.response_bytes,
            stream_bytes=options.stream_bytes,
        )

    async def serve(
        self, client: GatewayCaller, proxied: ProxiedRequest, body: InferenceBody, proceed: Proceed
    ) -> None:
        """Answer a request from the cache, or by ``proceed``, whose answer is cached if possible."""
        key = self._key(client, proxied, body)
        if key is None:
            self._count("skip")
            await proceed([(b"x-cache", b"BYPASS")])
            return
        answer, clearing = await self._find(key)
        if answer is not None:
            self._count("hit")
            proxied.status = 200
            await send_again(answer, proxied.send, key.hex().encode())
            return
        self._count("miss")
        await self._lead(key, clearing, proxied, proceed)

    def _count(self, result: str) -> None:
        self._results[result].inc()
        self._counts.add(_COUNT + result)

    async def _find(self, key: bytes) -> CacheLookup:
        lookup = await self._answers.find(key)
        flight = self._under_way.get(key)
        # An answer requested before the cache was cleared must not serve a later request.
        if lookup.answer is None and flight is not None and flight.clearing == lookup.clearing:
            try:
                async with asyncio.timeout(_FLIGHT_SECONDS):
                    return lookup._replace(answer=await asyncio.shield(flight.answer))
            except TimeoutError:
                pass  # it is sent to an engine itself
        return lookup

    async def _lead(self, key: bytes, clearing: bytes | int, proxied: ProxiedRequest, proceed: Proceed) -> None:
        """Let an engine answer; equal requests wait meanwhile. Without effect if another request leads already."""
        flight = None
        if key not in self._under_way:
            flight = self._under_way[key] = _SharedRequest(clearing, asyncio.get_running_loop().create_future())
        # A client that does not read its answer must not hold up the others.
        stalled = None if flight is None else partial(flight.end, None)
        assert proxied.api is not None  # only bodies of some forms have a key
        collector = AnswerCollector(
            proxied.send,
            proxied.api,
            response_bytes=self._response_bytes,
            stream_bytes=self._stream_bytes,
            stalled=stalled,
        )
        proxied.send = collector
        try:
            await proceed([(b"x-cache", b"MISS"), (b"x-cache-key", key.hex().encode())])
        finally:
            # A client may disconnect with its last byte; then this request is cancelled, and its answer is whole.
            answer = collector.kept()
            if flight is not None:
                flight.end(answer)
            self._begin(self._keep(key, clearing, answer, flight))

    async def _keep(
        self, key: bytes, clearing: bytes | int, answer: KeptAnswer | None, flight: _SharedRequest | None
    ) -> None:
        try:
            if answer is not None:
                await self._answers.keep(key, answer, clearing)
                evicted = int(self._metrics.response_cache_evictions.value)
                if evicted > self._evicted:
                    self._counts.add(_COUNT + "evictions", number=evicted - self._evicted)
                    self._evicted = evicted
        finally:
            if flight is not None:
                del self._under_way[key]

    def _key(self, client: GatewayCaller, proxied: ProxiedRequest, body: InferenceBody) -> bytes | None:
        if body.request.form not in _FORMS or _asks_anew(proxied.headers) or not is_cacheable(body.fields):
            return None
        return cache_key(
            proxied.path,
            client.tenant_id,
            body.fields,
            client.name,
            proxied.query.decode("latin-1"),
            telling_headers(going_on(proxied.headers)),
            as_written(proxied.body),
        )

    # ---- for operators -----------------------------------------------------------------------------

    @property
    def hit_rate(self) -> float:
        """The share of hits in the cacheable requests, 0 to 1."""
        hits, misses = self._results["hit"].value, self._results["miss"].value
        return hits / (hits + misses) if hits + misses else 0.0

    async def clear(self, key: bytes | None = None) -> int:
        """Forget the answer to one request, or all answers. Return how many there were. Raises StoreUnavailable."""
        return await self._answers.clear(key)

    async def state(self) -> CacheState:
        """Return the state of the cache. The counts are those of all gateways, except for the last second."""
        together, _ = await self._counts.read()
        answers, size = self._answers, await self._answers.count()
        return CacheState(
            backend=answers.backend,
            entries=size.entries,
            bytes=size.bytes,
            entries_max=answers.entries_max,
            ttl_seconds=answers.ttl_seconds,
            response_bytes=self._response_bytes,
            stream_bytes=self._stream_bytes,
            counts={name.removeprefix(_COUNT): n for name, n in together.items() if name.startswith(_COUNT)},
            connections=answers.connections if isinstance(answers, SharedAnswers) else None,
            is_away=answers.is_away if isinstance(answers, SharedAnswers) else False,
        )


def _asks_anew(headers: RawHeaders) -> bool:
    directives = b",".join(value for name, value in headers if name == b"cache-control").lower().split(b",")
    return not _ASKS_ANEW.isdisjoint(map(bytes.strip, directives))


def _answers(options: CacheOptions, metrics: Metrics, store: Store) -> AnswerStore:
    bounds = (options.entries_max, options.bytes_max, options.ttl_seconds)
    if options.place == "memory":
        return MemoryAnswers(*bounds, metrics)
    in_memory = MemoryAnswers(FALLBACK_ENTRIES, options.bytes_max, FALLBACK_TTL_SECONDS, metrics)
    entries_max, bytes_max, ttl_seconds = bounds
    return SharedAnswers(
        store.answers,
        in_memory,
        metrics,
        store.begin,
        store.counts,
        entries_max=entries_max,
        bytes_max=bytes_max,
        ttl_seconds=ttl_seconds,
        milliseconds=options.redis_ms,
    )
