"""Sweeping, for as long as a worker lives: dead holders are taken out of their blocks at the pace of the setting.

Any worker may sweep any group. Two that sweep the same holder do it twice, which changes nothing. A worker has one
step on its way at a time, and pauses for a multiple of what it took: where Redis is busy, other workers sweep too, or
values are long, readers come in between.
"""

from __future__ import annotations

import asyncio
import logging
import time

from waymark.errors import StoreUnavailable
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: The least pause after a step, in times of what the step took.
PAUSE_STEPS = 3


async def keep_sweeping(store: Store, metrics: Metrics, *, blocks_per_second: int, pause_seconds: float) -> None:
    """Until cancelled."""
    while True:
        left = 0
        try:
            entries = list((await store.registry.groups()).values())
            for entry in entries:
                left += await store.sweeper.left(entry)
            metrics.dead_holders.set(left)
            for entry in entries:
                holder = await store.sweeper.pick(entry)
                if holder is None:
                    continue
                began = time.perf_counter()
                async for blocks in store.sweeper.steps(entry, holder):
                    await asyncio.sleep(max(blocks / blocks_per_second, PAUSE_STEPS * (time.perf_counter() - began)))
                    began = time.perf_counter()
                left -= 1
            metrics.dead_holders.set(left)
        except StoreUnavailable as exc:
            log.debug("sweeping waits for redis", extra=fields(error=exc.sentence))
            left = 0
        if left <= 0:
            await asyncio.sleep(pause_seconds)
