"""The parts that only a gateway has. ``runtime`` imports this module only for a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from waymark.api.application import GatewayParts, create_app, create_gateway_admin
from waymark.base.asgi import AsgiApplication
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide.asked_pools import AskedPools
from waymark.decide.fail_open import IngestWatch, StartupGate
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.discovery.describe import Describer
from waymark.discovery.engines import EngineRegistrations, GivenEngines
from waymark.gateway.application import Gateway, GatewayOptions
from waymark.gateway.mongo import DOCUMENT_BYTES_MAX, MongoArchive, MongoOptions
from waymark.gateway.response_cache import CacheOptions, ResponseCache
from waymark.gateway.responses import Archive, Responses, ResponsesOptions
from waymark.gateway.shapes import body_of_rejection
from waymark.gateway.upstream import Upstream
from waymark.runtime import parts
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Tokenizers

#: The most bytes of answers in a response cache, and of stored responses, unless a setting names other numbers.
ANSWERS_BYTES = 256 * 2**20
#: The largest answer may take one part in this many of those bytes.
_LARGEST_PART = 256

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
        self._archive = mongo_archive(settings, metrics, store)
        cache = response_cache(settings, metrics, store)
        self._watch = IngestWatch(store.heartbeats)
        gate = StartupGate(store.polled_claims, settings.min_initial_workers, self._watch)
        admin = GatewayParts(gate, cache)
        options, selection = parts.api_options(settings, is_gateway=True), parts.selection_options(settings)
        admin_app: AsgiApplication
        if settings.redis_url == "memory://":  # no other process can serve the index of a trial
            admin_app = create_app(store, options, selection, metrics, tokenizers, asker, stopping, admin)
        else:
            admin_app = create_gateway_admin(store, options, metrics, admin)
        responses = stored_responses(settings, metrics, store, self._archive)
        self._engines = _given_engines(store, settings, asker)
        waiting = self._engines.waiting
        selector = Selector(store, selection, metrics, pools=AskedPools(asker, metrics))
        requests = RequestSelector(store, options.prompts, metrics, selector, tokenizers, gate)
        self.app = Gateway(
            store,
            gateway_options(settings),
            metrics,
            selector,
            requests,
            upstream(settings),
            admin_app,
            cache,
            responses,
            waiting,
        )

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the tasks that run until the process ends."""
        return [self._begin(), *(part.run() for part in (self._archive, self._watch) if part is not None)]

    async def _begin(self) -> None:
        """Register the engines that the gateway was given, and then log each alias that no engine serves."""
        await self._engines.run()
        await self.app.warn()

    async def close(self) -> None:
        await self.app.close()
        if self._archive is not None:
            self._archive.close()


def _given_engines(store: Store, settings: Settings, asker: Asker) -> GivenEngines:
    allowed = AllowedEndpoints(settings.allowed_endpoints)
    engines = EngineRegistrations(Describer(asker, allowed))
    return GivenEngines(store, engines, settings.gateway_engines)


def gateway_options(settings: Settings) -> GatewayOptions:
    return GatewayOptions(
        keys=settings.gateway_keys,
        tenant_header=settings.tenant_header,
        origins=settings.gateway_origins,
        aliases=settings.model_aliases,
        key_requests=settings.gateway_key_limits.get("requests", 0),
        key_tokens=settings.gateway_key_limits.get("tokens", 0),
        body_bytes_max=settings.max_body_bytes,
        injects_cache_control=settings.cache_control_injection,
    )


def upstream(settings: Settings) -> Upstream:
    """Return the connections of a gateway to engines."""
    return Upstream(
        AllowedEndpoints(settings.allowed_endpoints),
        first_byte_seconds=2 * settings.gateway_idle_seconds,
        idle_seconds=settings.gateway_idle_seconds,
        key=parts.engine_key(settings),
        ca_file=settings.engine_ca_file,
    )


def response_cache(settings: Settings, metrics: Metrics, store: Store) -> ResponseCache | None:
    """Return the response cache of a gateway, or None if it is off."""
    place = settings.answers.get("cache", "off")
    if place == "off":
        return None
    bytes_max = settings.answers_bytes.get("cache", ANSWERS_BYTES)
    response_bytes = bytes_max // _LARGEST_PART
    options = CacheOptions(
        place=place,
        entries_max=max(1, 1000 * bytes_max // ANSWERS_BYTES),
        bytes_max=bytes_max,
        ttl_seconds=settings.answers_ttl.get("cache", 300),
        response_bytes=response_bytes,
        stream_bytes=10 * response_bytes,  # a stream repeats its frame around each token
        redis_ms=int(500 * settings.redis_timeout_seconds),  # a client waits for it before any engine is asked
    )
    return ResponseCache.open(options, metrics, store)


def stored_responses(settings: Settings, metrics: Metrics, store: Store, archive: Archive | None) -> Responses | None:
    """Return the stored responses of a gateway, or None if it stores none."""
    if settings.responses_place == "off":
        return None
    bytes_max = settings.answers_bytes.get("responses", ANSWERS_BYTES)
    entry_bytes = max(1024, bytes_max // _LARGEST_PART)
    options = ResponsesOptions(
        place=settings.responses_place,
        ttl_seconds=settings.answers_ttl.get("responses", 86_400),
        entry_bytes=entry_bytes if archive is None else min(entry_bytes, DOCUMENT_BYTES_MAX),
        entries_max=max(1, 10_000 * bytes_max // ANSWERS_BYTES),
        bytes_max=bytes_max,
    )
    return Responses.open(options, metrics, store, archive)


def mongo_archive(settings: Settings, metrics: Metrics, store: Store) -> MongoArchive | None:
    """Return the archive behind the stored responses, or None without a MongoDB."""
    if settings.responses_mongo_url is None:
        return None
    options = MongoOptions(
        settings.responses_mongo_url.get_secret_value(), settings.answers_ttl.get("mongo", 30 * 86_400)
    )
    return MongoArchive.open(options, metrics, store)
