"""The response cache: the answer to a repeated request is sent without any engine.

Only one of several equal requests goes to an engine at a time; the others wait for its answer; if it cannot be cached,
each is sent on its own. A cached answer is complete, has status 200, and was finished by the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from waymark.base.asgi import RawHeaders
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.chat.prefix_key import as_written, cache_key, is_cacheable, telling_headers
from waymark.chat.requests import Form
from waymark.gateway.answer_store import AnswerStore, CacheLookup, MemoryAnswers
from waymark.gateway.kept_answer import AnswerCollector, KeptAnswer, send_again
from waymark.gateway.proxy import ProxiedRequest
from waymark.gateway.security import GatewayCaller, going_on
from waymark.gateway.shapes import InferenceBody
from waymark.gateway.shared_answers import ERRORS, SharedAnswers
from waymark.store.responses import ReplicaCounts
from waymark.store.steps import StartTask
from waymark.store.store import Store

Proceed = Callable[[RawHeaders], Awaitable[None]]
"""Has an engine answer, with further headers."""

FALLBACK_ENTRIES = 1000
FALLBACK_TTL_SECONDS = 300
"""The bounds of the answers in memory while Redis is unavailable. They are forgotten when it is back, so few are worth
keeping, and not for long."""

#: Answers of the others carry ids that belong to one request.
_FORMS = frozenset({Form.CHAT, Form.COMPLETIONS, Form.MESSAGES})
#: Before the names of the results among the counts of all gateways.
_COUNT = "response_cache."
#: The longest wait of a request for an equal one under way.
_FLIGHT_SECONDS = 60.0


class _SharedRequest(NamedTuple):
    """A request that an engine answers now, for all clients that ask the same."""

    clearing: bytes | int
    """The last clearing at the time of its lookup."""
    answer: asyncio.Future[KeptAnswer | None]


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
    def of(cls, settings: Settings, metrics: Metrics, store: Store) -> ResponseCache | None:
        """Return the cache of the settings, or None if it is off."""
        if settings.response_cache == "off":
            return None
        return cls(
            _answers(settings, metrics, store),
            metrics,
            store.begin,
            store.counts,
            response_bytes=settings.response_cache_response_bytes,
            stream_bytes=settings.response_cache_stream_bytes,
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
        answer = await self._answers.find(key)
        flight = self._under_way.get(key)
        # An answer requested before the cache was cleared must not serve a later request.
        if answer.kept is None and flight is not None and flight.clearing == answer.clearing:
            try:
                async with asyncio.timeout(_FLIGHT_SECONDS):
                    return answer._replace(kept=await asyncio.shield(flight.answer))
            except TimeoutError:
                return answer
        return answer

    async def _lead(self, key: bytes, clearing: bytes | int, proxied: ProxiedRequest, proceed: Proceed) -> None:
        """Let an engine answer; equal requests wait meanwhile. Without effect if another request leads already."""
        flight = None
        if key not in self._under_way:
            flight = self._under_way[key] = _SharedRequest(clearing, asyncio.get_running_loop().create_future())
        assert proxied.api is not None  # only bodies of some forms have a key
        collector = AnswerCollector(
            proxied.send, proxied.api, response_bytes=self._response_bytes, stream_bytes=self._stream_bytes
        )
        proxied.send = collector
        try:
            await proceed([(b"x-cache", b"MISS"), (b"x-cache-key", key.hex().encode())])
        finally:
            # A client may disconnect with its last byte; then this request is cancelled, and its answer is whole.
            answer = collector.kept()
            if flight is not None:
                flight.answer.set_result(answer)
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
        headers = dict(proxied.headers)
        asks_anew = headers.get(b"cache-control", b"").lower() in (b"no-cache", b"no-store")
        if body.request.form not in _FORMS or asks_anew or not is_cacheable(body.fields):
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
    def operated(self) -> tuple[Callable[[], Awaitable[Mapping[str, Any]]], Callable[[bytes | None], Awaitable[int]]]:
        """The operations of an operator: reading its state, and clearing it."""
        return self.stats, self.clear

    @property
    def hit_rate(self) -> float:
        """Hits among the requests that could be one, 0 to 1."""
        hits, misses = self._results["hit"].value, self._results["miss"].value
        return hits / (hits + misses) if hits + misses else 0.0

    async def clear(self, key: bytes | None = None) -> int:
        """Forget the answer to one request, or all answers; how many there were. Raises StoreUnavailable."""
        return await self._answers.clear(key)

    async def stats(self) -> Mapping[str, Any]:
        """Return the state in the shape of Continuum Router. Requests are those of all gateways, except for the last
        second.
        """
        together, _ = await self._counts.read()
        counts = {name: together.get(_COUNT + name, 0) for name in self._results}
        asked = counts["hit"] + counts["miss"]
        answers, size = self._answers, await self._answers.count()
        return {
            "enabled": True,
            "backend_type": answers.backend,
            "entries": size.entries,
            "capacity": answers.entries_max,
            "requests": counts | {"total": sum(counts.values())},
            "hit_rate": f"{counts['hit'] / asked if asked else 0:.4f}",
            "evictions": together.get(_COUNT + "evictions", 0),
            "size_bytes": size.bytes,
            "config": {
                "backend": answers.backend,
                "ttl": duration(answers.ttl_seconds),
                "capacity": answers.entries_max,
                "max_response_size": self._response_bytes,
                "max_stream_buffer_size": self._stream_bytes,
            },
            **({"redis": _redis_stats(answers)} if isinstance(answers, SharedAnswers) else {}),
        }


def _answers(settings: Settings, metrics: Metrics, store: Store) -> AnswerStore:
    bounds = (settings.response_cache_entries, settings.response_cache_bytes, settings.response_cache_ttl_seconds)
    if settings.response_cache == "memory":
        return MemoryAnswers(*bounds, metrics)
    in_memory = MemoryAnswers(
        FALLBACK_ENTRIES,
        settings.response_cache_bytes,
        FALLBACK_TTL_SECONDS,
        metrics,
    )
    entries_max, bytes_max, ttl_seconds = bounds
    return SharedAnswers(
        store.answers,
        in_memory,
        metrics,
        store.begin,
        entries_max=entries_max,
        bytes_max=bytes_max,
        ttl_seconds=ttl_seconds,
        milliseconds=settings.response_cache_redis_ms,
    )


def _redis_stats(answers: SharedAnswers) -> Mapping[str, Any]:
    active, idle = answers.connections
    return {
        "connections": {"active": active, "idle": idle},
        "fallback_active": answers.is_away,
        "errors": {kind: answers.errors[kind] for kind in ERRORS},
    }


def duration(seconds: int) -> str:
    """Format a duration like Continuum Router, such as ``30m``."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
