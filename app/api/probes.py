"""Liveness, readiness, metrics: what an orchestrator and a scraper ask.

Alive is that the loop turns; ready is that Redis answers and the scripts are there. Neither asks an engine.
"""

from __future__ import annotations

from app.api.bodies import Body
from app.api.operations import Answer
from app.metrics import Metrics
from app.store.store import Store


class Probes:
    """Handlers of ``/health``, ``/ready`` and ``/metrics``."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    async def health(self, _: Body) -> Answer:
        return Answer({"status": "ok"})

    async def ready(self, _: Body) -> Answer:
        reasons = await self._store.check()
        if reasons:
            error = {"error": "not ready: " + "; ".join(reasons), "reason": "unavailable"}
            return Answer(error, 503, {"Retry-After": "1"})
        return Answer({"status": "ready"})

    async def metrics(self, _: Body) -> Answer:
        text, media_type = self._metrics.render()
        return Answer(text, media_type=media_type)
