"""``waymark status`` and ``waymark inspect`` with only a URL of Redis: the handlers of a replica in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from waymark.api.application import create_inspections
from waymark.base.asgi import AsgiApplication
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.runtime import parts


@contextmanager
def inspecting(settings: Settings) -> Iterator[tuple[AsgiApplication, asyncio.Runner]]:
    """Yield the handlers over the Redis of the settings, and their loop. Nothing is written, and no replica has to run.

    Raise ``SettingsError`` if that Redis is inside another process.
    """
    if settings.redis_url == "memory://":
        raise SettingsError(
            "WAYMARK_REDIS_URL is memory://, an emulated Redis inside 'waymark serve' that no other process can see; "
            "give the URL of a real one (--redis-url redis://host:6379/0), or ask that process "
            "(--url http://127.0.0.1:13333, GET /workers)"
        )
    with asyncio.Runner() as runner:
        store, metrics = parts.open_store(settings), Metrics()
        tokenizers = parts.tokenizers(settings, metrics, store)

        async def close() -> None:
            await tokenizers.close()
            await store.close()

        try:
            yield create_inspections(store, parts.api_options(settings), metrics, tokenizers), runner
        finally:
            runner.run(close())
