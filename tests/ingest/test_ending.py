"""A worker that is told to end does, at whatever point of its beginning that comes."""

from __future__ import annotations

import asyncio

from tests.conftest import wait_until
from waymark.base.metrics import Metrics
from waymark.ingest.options import WorkerOptions
from waymark.ingest.stream import StreamOptions
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
