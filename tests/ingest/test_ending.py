"""A worker that is told to end does, at whatever point of its beginning that comes."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

from tests.conftest import wait_until
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.ingest.options import StreamOptions, WorkerOptions
from waymark.ingest.running import StreamRunner
from waymark.ingest.worker import Worker
from waymark.store.store import Store

TRIES = 30
LAST_SECONDS = 0.02


async def test_a_worker_that_is_told_to_end_while_it_begins_ends(redis_url: str) -> None:
    """Connections are made then, and the driver may swallow a cancellation while it sends."""
    for i in range(TRIES):
        store = Store.open(redis_url)
        worker = asyncio.create_task(Worker(store, Metrics(), WorkerOptions("w", StreamOptions())).run())
        await asyncio.sleep(LAST_SECONDS * i / TRIES)
        worker.cancel()
        await wait_until(
            worker.done, f"the worker has ended, cancelled {1000 * LAST_SECONDS * i / TRIES:.1f} ms after its start"
        )
        await store.close()


async def test_a_lease_that_redis_does_not_take_back_during_the_end_is_no_defect() -> None:
    """The lease ends by itself. asyncio would log an error that nobody reads, with a traceback."""
    goes_on, said = asyncio.Event(), list[Any]()

    async def drop(grant: object) -> None:
        await goes_on.wait()
        raise StoreUnavailable("Redis is away")

    store: Any = SimpleNamespace(leases=SimpleNamespace(drop=drop))
    unused: Any = None
    runner = StreamRunner(store, Metrics(), WorkerOptions("w", StreamOptions()), unused, unused)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    giving_back = asyncio.create_task(runner._give_back(unused))
    await asyncio.sleep(0)
    giving_back.cancel()
    await asyncio.gather(giving_back, return_exceptions=True)
    goes_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()
    assert said == []
