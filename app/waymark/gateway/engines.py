"""Registers the engines that a gateway was given by their URLs, each as soon as it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from waymark.base.errors import Conflict, InvalidValue, RemoteUnavailable, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.shown import shown_url
from waymark.discovery.describe import base_of
from waymark.discovery.engines import EngineRegistrations
from waymark.domain.engines import WITHOUT_EVENTS
from waymark.domain.names import Origin, Registration
from waymark.store.store import Store

log = logging.getLogger(__name__)

_AGAIN_SECONDS, _AGAIN_SECONDS_MAX = 0.5, 10.0
#: Engines that a refusal names.
_SAID_MAX = 3


class GivenEngines:
    """``run`` ends when all are registered. An engine that cannot be is tried again, later and later."""

    def __init__(self, store: Store, engines: EngineRegistrations, urls: Sequence[str]) -> None:
        self._store = store
        self._engines = engines
        self._urls = tuple(dict.fromkeys(urls))
        self._waiting = dict.fromkeys(self._urls, "it has not answered yet")

    def waiting(self) -> str | None:
        """Return which engines are not registered yet, and why; None once all are."""
        complaints = [f"{shown_url(url)}: {reason}" for url, reason in self._waiting.items()]
        further = f"; and {len(complaints) - _SAID_MAX} more" if len(complaints) > _SAID_MAX else ""
        return "; ".join(complaints[:_SAID_MAX]) + further if complaints else None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for url in self._urls:
                tasks.create_task(self._keep_trying(url))

    async def _keep_trying(self, url: str) -> None:
        pause = _AGAIN_SECONDS
        last = ""
        while True:
            try:
                first = await self._register(url)
            except (Conflict, InvalidValue, RemoteUnavailable, StoreUnavailable) as error:
                if error.sentence != last:
                    log.warning("an engine is not registered yet", extra=fields(url=url, error=error.sentence))
                last = self._waiting[url] = error.sentence
                await asyncio.sleep(pause)
                pause = min(2 * pause, _AGAIN_SECONDS_MAX)
            else:
                about = {"url": url, "model": first.model_name, "type": str(first.kind), "block_size": first.block_size}
                log.info("an engine is registered", extra=fields(**about))
                del self._waiting[url]
                return

    async def _register(self, url: str) -> Registration:
        """Register all ranks of an engine, by its own description. Return the first one."""
        registrations = await self._engines.of(
            url, {}, Origin("url", base_of(url)), known={"type": str(WITHOUT_EVENTS)}
        )
        if not registrations[0].kind.traits.tells_events:
            log.warning(
                "an engine reports no event socket; until it does, requests go by the beginnings of their prompts",
                extra=fields(url=url),
            )
        for registration in registrations:
            await self._store.registry.check(registration)
        for registration in registrations:
            await self._store.registry.register(registration)
        return registrations[0]
