"""A query replica for any ASGI server, without a process of its own.

The settings are those of the environment. The server must speak the lifespan protocol: the application opens its
connections when it starts, and closes them when it ends. The bounds of ``waymark query`` on connections and on slow
requests are in Waymark's server, so another server needs bounds of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from waymark.api.application import create_app
from waymark.base import native
from waymark.base.asgi import AsgiReceive, AsgiScope, AsgiSend
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.runtime import parts
from waymark.runtime.replica import FormatCheck, report_redis


class AsgiReplica:
    """An application without a process of its own. It answers between the startup and the shutdown of its server."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise RuntimeError("waymark.asgi:app was not started; turn the lifespan protocol of the server on")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: AsgiReceive, send: AsgiSend) -> None:
        """Open everything, answer until the server ends, and close everything. Report why it cannot start."""
        await receive()
        try:
            await self._answer(receive, send)
        except SettingsError as error:  # a server that did not hear of it would go on without an application
            await send({"type": "lifespan.startup.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, receive: AsgiReceive, send: AsgiSend) -> None:
        """Raise ``SettingsError`` if it cannot start."""
        settings = Settings.from_env()
        if settings.redis_url == "memory://":
            raise SettingsError("WAYMARK_REDIS_URL is memory://, which no worker reaches; give a redis:// URL")
        is_native = native.select(settings.native) == "native"
        metrics, stopping = Metrics(role="query", is_native=is_native), asyncio.Event()
        store = parts.open_store(settings, metrics)
        tokenizers, asker = parts.tokenizers(settings, metrics, store), parts.asker(settings)
        try:
            check = FormatCheck(store)
            await check.begin()
            await report_redis(store)
            store.begin(check.run(stopping))
            self._app = create_app(
                store,
                parts.api_options(settings),
                parts.selection_options(settings),
                metrics,
                tokenizers,
                asker,
                stopping,
            )
            await send({"type": "lifespan.startup.complete"})
            await receive()
            stopping.set()
        finally:
            self._app = None
            await tokenizers.close()
            await asker.close()
            await store.close()


app = AsgiReplica()
