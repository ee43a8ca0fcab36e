"""Commands with only a URL of Redis: they look at the index by the handlers of a replica, move it, or delete it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from waymark.api.application import create_inspections
from waymark.base.asgi import AsgiApplication
from waymark.base.errors import InvalidValue, NotFound, SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.runtime import parts
from waymark.store.exporting import Exported, export_index
from waymark.store.importing import Imported, import_index
from waymark.store.index_file import IndexFile
from waymark.store.store import Store


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


async def export_to(settings: Settings, path: Path, *, model: str | None, tenant: str | None) -> tuple[Exported, int]:
    """Write the index to a file. Return the report and the size of the file.

    It is written under another name first, so that a file of the given name is always whole. After a failure no file
    remains.
    Raise ``NotFound`` without a publisher: that may be another Redis than the one that was meant.
    """
    async with _store(settings) as store:
        try:
            # A salt may be a secret of its tenant: only its owner reads the file.
            number, part = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
            try:
                with os.fdopen(number, "w+b") as file:
                    report = await export_index(store, file, model=model, tenant=tenant)
                    if not report.publishers:
                        raise NotFound(f"there is no publisher to export, so {path} is not written")
                    file.flush()
                    os.fsync(file.fileno())
                    size = file.tell()
                os.replace(part, path)
            except BaseException:
                os.unlink(part)
                raise
        except OSError as exc:
            raise InvalidValue(f"{path} cannot be written: {exc.strerror}") from None
    return report, size


async def import_from(
    settings: Settings, path: Path, *, model: str | None, tenant: str | None, replaces: bool
) -> Imported:
    """Put the index of a file into Redis."""
    async with _store(settings) as store:
        return await import_index(
            store, IndexFile.read(path), hash_seed=settings.hash_seed, model=model, tenant=tenant, replaces=replaces
        )


async def reset(settings: Settings) -> int:
    """Delete all keys of Waymark. Return their number."""
    async with _store(settings) as store:
        return await store.reset()


@asynccontextmanager
async def _store(settings: Settings) -> AsyncIterator[Store]:
    store = parts.open_store(settings)
    try:
        yield store
    finally:
        await store.close()
