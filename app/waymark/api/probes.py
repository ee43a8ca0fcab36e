"""Liveness, readiness, metrics: the questions of an orchestrator and a scraper.

A process is alive while its event loop runs, and ready while Redis answers and has the scripts. Neither probe contacts
an engine. They never wait long for a Redis that hangs, because their caller has a time limit, usually of a second.
"""

from __future__ import annotations

import asyncio

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.texts import PromptTokenizer
from waymark.base.metrics import Metrics
from waymark.contract.publishers import HealthAnswer, ReadyAnswer
from waymark.decide.fail_open import StartupGate
from waymark.store.health import HealthReason, RedisHealth
from waymark.store.store import Store

_READY_SECONDS = 0.9
_ANSWERS_SECONDS = 0.5


class Probes:
    """Handlers of ``/health``, ``/ready`` and ``/metrics``."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        gate: StartupGate | None = None,
        tokenizer: PromptTokenizer | None = None,
        *,
        warning: str | None = None,
    ) -> None:
        """``gate``: for a process that decides. ``tokenizer``: for one that accepts text. ``warning`` always shows."""
        self._lasting = [] if warning is None else [warning]
        self._store = store
        self._tokenizer = tokenizer
        self._gate = gate
        self._metrics = metrics

    async def health(self, _: Body) -> Answer:
        return Answer(HealthAnswer(status="ok"))

    async def ready(self, _: Body) -> Answer:
        try:
            async with asyncio.timeout(_READY_SECONDS):
                reasons, no_answers = await asyncio.gather(
                    self._store.check(), self._store.why_no_answers(_ANSWERS_SECONDS)
                )
        except TimeoutError:
            no_answers = None
            reasons = [f"Redis did not answer within {_READY_SECONDS:g} s"]
        if reasons:
            self._metrics.redis_up.set(0)
            error = {"error": "not ready: " + "; ".join(reasons), "reason": "unavailable"}
            return Answer(error, 503, {"Retry-After": "1"})
        waiting = None if self._gate is None else await self._gate.waiting()
        if waiting is not None:
            return Answer({"error": f"not ready: {waiting}", "reason": "starting"}, 503, {"Retry-After": "1"})
        of_tokenizer = self._tokenizer.warnings() if self._tokenizer else ()
        of_workers = self._gate.watch.warnings() if self._gate is not None and self._gate.watch is not None else ()
        of_answers = () if no_answers is None else (no_answers,)
        warnings = [*self._lasting, *of_answers, *(await self._health()).warnings.values(), *of_tokenizer, *of_workers]
        return Answer(ReadyAnswer(status="ready", answers_redis=self._store.answers_url, warnings=warnings))

    async def metrics(self, _: Body) -> Answer:
        await self._health()
        text, media_type = self._metrics.render()
        return Answer(text, media_type=media_type.encode())

    async def _health(self) -> RedisHealth:
        """Return the health of Redis, and set the metrics from it. The embedded Redis has no data but that it is up."""
        health, metrics = await self._store.health.poll(), self._metrics
        metrics.redis_up.set(health.is_up)
        if health.primaries:
            for reason in HealthReason:
                metrics.redis_misconfigured.labels(reason=reason).set(reason in health.warnings)
            for gauge in (metrics.redis_memory_bytes, metrics.redis_memory_max_bytes, metrics.redis_evicted_keys):
                gauge.clear()  # a Cluster may have fewer primaries than before
            for number, primary in enumerate(health.primaries):
                metrics.redis_memory_bytes.labels(primary=number).set(primary.memory_bytes)
                metrics.redis_memory_max_bytes.labels(primary=number).set(primary.memory_max_bytes)
                metrics.redis_evicted_keys.labels(primary=number).set(primary.evicted_keys)
        return health
