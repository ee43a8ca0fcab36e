"""Sweeping, for as long as a worker lives: dead holders are taken out of their blocks at the pace of the setting.

Any worker may sweep any group. Two that sweep the same holder do it twice, which changes nothing.
"""

from __future__ import annotations

import asyncio
import logging

from app.errors import StoreUnavailable
from app.logs import fields
from app.metrics import Metrics
from app.store.store import Store

log = logging.getLogger(__name__)


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
                async for blocks in store.sweeper.steps(entry, holder):
                    metrics.sweep_blocks.inc(blocks)
                    await asyncio.sleep(blocks / blocks_per_second)
                metrics.sweeps.inc()
                left -= 1
            metrics.dead_holders.set(left)
        except StoreUnavailable as exc:
            log.debug("sweeping waits for redis", extra=fields(error=exc.sentence))
            left = 0
        if left <= 0:
            await asyncio.sleep(pause_seconds)
