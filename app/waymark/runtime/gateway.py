"""The parts that only a gateway has. ``runtime`` imports this module only for a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from waymark.api.application import GatewayAdmin, create_app, create_gateway_admin
from waymark.api.registrations import registration_of
from waymark.base.asgi import AsgiApplication
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.asked_pools import AskedPools
from waymark.decide.fail_open import IngestWatch, StartupGate
from waymark.decide.options import SelectionOptions
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.discovery.describe import Describer
from waymark.discovery.engines import EngineRegistrations, GivenEngines
from waymark.gateway.application import Gateway
from waymark.gateway.mongo import MongoArchive
from waymark.gateway.response_cache import ResponseCache
from waymark.gateway.responses import Responses
from waymark.gateway.shapes import body_of_rejection
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Tokenizers

__all__ = ["GatewayRole", "body_of_rejection"]


class GatewayRole:
    """The application of a gateway, and the tasks that it needs."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        tokenizers: Tokenizers,
        asker: Asker,
        stopping: asyncio.Event,
    ) -> None:
        """Create the parts of a gateway. ``stopping`` ends the answers that would not end by themselves."""
        self._archive = MongoArchive.of(settings, metrics, store)
        cache = ResponseCache.of(settings, metrics, store)
        self._watch = IngestWatch(store.heartbeats)
        gate = StartupGate(store.directory, settings.min_initial_workers, self._watch)
        admin = GatewayAdmin(gate, None if cache is None else cache.operated)
        admin_app: AsgiApplication
        if settings.redis_url == "memory://":  # no other process can serve the index of a trial
            admin_app = create_app(store, settings, metrics, tokenizers, asker, stopping, admin)
        else:
            admin_app = create_gateway_admin(store, settings, metrics, admin)
        responses = Responses.of(settings, metrics, store, self._archive)
        self._engines = _given_engines(store, settings, asker)
        waiting = self._engines.waiting
        selector = Selector(store, SelectionOptions.of(settings), metrics, pools=AskedPools(asker, metrics))
        requests = RequestSelector(store, settings, metrics, selector, tokenizers, gate)
        self.app = Gateway(store, settings, metrics, selector, requests, admin_app, cache, responses, waiting)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the tasks that run until the process ends."""
        return [self._begin(), *(part.run() for part in (self._archive, self._watch) if part is not None)]

    async def _begin(self) -> None:
        """Register the engines that the gateway was given, and then look for what is wrong with its settings."""
        await self._engines.run()
        await self.app.warn()

    async def close(self) -> None:
        await self.app.close()
        if self._archive is not None:
            self._archive.close()


def _given_engines(store: Store, settings: Settings, asker: Asker) -> GivenEngines:
    allowed = AllowedEndpoints(settings.allowed_endpoints)
    engines = EngineRegistrations(Describer(asker, allowed), partial(registration_of, allowed=allowed))
    return GivenEngines(store, engines, settings.gateway_engines)
