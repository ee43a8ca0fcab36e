"""Ends overdue reservations of groups that get no requests, for example because their only replica was killed.

Each group has one worker that looks after it. Two workers that end the same reservation change the load once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.store.reservations import OVERDUE_MAX
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: How often each group is looked at.
_SECONDS = 1.0
#: Calls under way at once, so that a group whose server is slow delays no other.
_AT_ONCE = 8


class Overdue:
    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._reservations = store.reservations
        self._metrics = metrics
        self._groups: list[int] = store.incarnation.cache([])
        self._places = asyncio.Semaphore(_AT_ONCE)

    def see(self, groups: Iterable[int]) -> None:
        """Look after these groups from now on."""
        self._groups[:] = groups

    async def keep_ending(self) -> None:
        """End overdue reservations until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            deadline = loop.time() + _SECONDS
            group_ids = await self._under_way()
            # A group with more of them gets its next call after the others; a new round sees all groups again.
            while group_ids and loop.time() < deadline:
                ended = await asyncio.gather(*map(self._end, group_ids))
                group_ids = [group_id for group_id, count in zip(group_ids, ended, strict=True) if count == OVERDUE_MAX]
            await asyncio.sleep(max(0.0, deadline - loop.time()))

    async def _under_way(self) -> Sequence[int]:
        """Return the groups that have reservations; all groups if Redis does not answer."""
        groups = list(self._groups)
        try:
            return await self._reservations.under_way(groups) if groups else ()
        except StoreUnavailable as exc:
            log.debug("reservations cannot be counted", extra=fields(error=exc.sentence))
            return groups

    async def _end(self, group_id: int) -> int:
        """Make one call for a group. Return how many reservations it ended; 0 if it fails."""
        async with self._places:
            try:
                ended = await self._reservations.end_overdue(group_id)
            except StoreUnavailable as exc:
                log.debug("overdue reservations could not be ended", extra=fields(group=group_id, error=exc.sentence))
                return 0
            except Exception:
                # Any release may have written the data of a group. If this code fails on them, the worker must go on.
                log.exception(
                    "overdue reservations could not be ended; the worker tries again", extra=fields(group=group_id)
                )
                return 0
        self._metrics.reservations_expired.inc(ended)
        return ended
