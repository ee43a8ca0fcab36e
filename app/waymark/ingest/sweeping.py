"""Sweeps and values while a worker runs: removes dead holders from blocks, and finds the worth of caches.

Each keeps the pace of the setting. Any worker may sweep any group. If two workers sweep the same holder, they do the
same work twice, which is harmless; only one worker at a time values a group. A worker has one step of each under way at
a time, so a reader waits for at most two steps of each worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine

from waymark.base.errors import RecordDamaged, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.names import GroupName
from waymark.store.activity import ActivityKind
from waymark.store.directory import GroupEntry
from waymark.store.store import Store
from waymark.store.worth import LEASE_SECONDS, STEP_BLOCKS

log = logging.getLogger(__name__)

#: A sweep behind its pace makes up for at most this many seconds.
_BEHIND_SECONDS = 1.0
#: The pause after a step is at least as long as the shortest of this many steps. The shortest one shows how long Redis
#: takes for a step. In the others this process may also have waited for a core.
_STEPS = 4


class SweepPace:
    """Pauses between steps, so that ``blocks_per_second`` are swept. Times are monotonic seconds.

    A sweep keeps the pace on average: after a step or a pause that was too long, the next pauses are shorter. At least
    half of the time is a pause, so the pace is not reached if Redis takes long for a step.
    """

    def __init__(self, blocks_per_second: int) -> None:
        self._seconds_per_block = 1 / blocks_per_second
        self._due = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def start(self, now: float) -> None:
        """Begin a sweep. The time since the last sweep need not be made up for."""
        self._due = max(self._due, now)

    def pause(self, blocks: int, began: float, now: float) -> float:
        """Return how many seconds to wait after a step of ``blocks`` blocks."""
        self._steps.append(now - began)
        self._due = max(self._due, now - _BEHIND_SECONDS) + blocks * self._seconds_per_block
        return max(self._due - now, min(self._steps))


async def keep_sweeping(store: Store, metrics: Metrics, *, blocks_per_second: int, pause_seconds: float) -> None:
    """Sweep until cancelled."""
    pace = SweepPace(blocks_per_second)
    while True:
        remaining = swept = 0
        try:
            groups = await store.directory.groups()
            entries = list(groups.values())
            for entry in entries:
                remaining += await _unless_damaged(store.sweeper.left(entry))
            metrics.dead_holders.set(remaining)
            for group, entry in groups.items():
                swept += await _sweep_one(store, group, entry, pace)
            metrics.dead_holders.set(remaining - swept)
        except StoreUnavailable as exc:
            log.debug("sweep waits for redis", extra=fields(error=exc.sentence))
        if remaining <= swept or not swept:
            await asyncio.sleep(pause_seconds)


async def _sweep_one(store: Store, group: GroupName, entry: GroupEntry, pace: SweepPace) -> bool:
    """Sweep one dead holder of a group, if there is one. A group that cannot be swept delays no other."""
    try:
        holder = await store.sweeper.pick(entry)
        if holder is None:
            return False
        began = time.perf_counter()
        pace.start(began)
        count = 0
        async for blocks in store.sweeper.steps(entry, holder):
            count += blocks
            await asyncio.sleep(pace.pause(blocks, began, time.perf_counter()))
            began = time.perf_counter()
        store.activity.note(
            ActivityKind.SWEEP,
            tenant_id=group.tenant_id,
            model=group.model_name,
            detail=f"holder {holder}: {count} blocks",
        )
    except StoreUnavailable as exc:
        log.debug("sweep waits for redis", extra=fields(group=entry.group_id, error=exc.sentence))
        return False
    except Exception:
        # Any release may have written the data of a dead holder. If this code fails on them, the worker must go on.
        log.exception("sweep failed, will be tried again", extra=fields(group=entry.group_id))
        return False
    return True


async def keep_valuing(store: Store, *, blocks_per_second: int, pause_seconds: float) -> None:
    """Value the caches of the groups that somebody asks about, until cancelled."""
    pace = SweepPace(blocks_per_second)
    lease_seconds = max(LEASE_SECONDS, 4 * STEP_BLOCKS / blocks_per_second)
    while True:
        try:
            asked = await store.valuations.asked.read()
            groups = await store.directory.groups() if asked else {}
            for entry in groups.values():
                if entry.group_id in asked:
                    await _value(store, entry, pace, lease_seconds)
        except StoreUnavailable as exc:
            log.debug("valuation waits for redis", extra=fields(error=exc.sentence))
        await asyncio.sleep(pause_seconds)


async def _value(store: Store, entry: GroupEntry, pace: SweepPace, lease_seconds: float) -> None:
    """Walk over the rows of a group. A group that cannot be valued delays no other."""
    began = time.perf_counter()
    pace.start(began)
    try:
        async for blocks in store.valuations.walk(entry, lease_seconds=lease_seconds):
            await asyncio.sleep(pace.pause(blocks, began, time.perf_counter()))
            began = time.perf_counter()
    except StoreUnavailable as exc:
        log.debug("valuation waits for redis", extra=fields(group=entry.group_id, error=exc.sentence))
    except Exception:
        # Any release may have written these rows. If this code fails on them, the worker must go on.
        log.exception("valuation failed, will be tried again", extra=fields(group=entry.group_id))


async def _unless_damaged(step: Coroutine[None, None, int]) -> int:
    """Return the result of a step for one group; 0 if the data of the group in Redis cannot be used."""
    try:
        return await step
    except RecordDamaged as exc:
        log.debug("group cannot be swept", extra=fields(error=exc.sentence))
        return 0
