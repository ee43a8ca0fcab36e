"""Renews the leases of all streams of a worker together, and looks whether Redis has lost writes to them.

A stream of its own accord does nothing while its engine is silent, so a worker may have thousands of them. ``renew``
makes a few calls for each group, and wakes only the streams for which it finds something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.store.leases import Grant
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: The number of shards of a group asked at each renewal, besides shard 0, whether they have lost writes.
_SHARDS_ASKED = 16
#: The publishers that one command asks about.
_ASKED_AT_ONCE = 256


class LeaseKeeper:
    """Keeps the leases of those who are inside ``keeping``."""

    def __init__(self, store: Store, seconds: float) -> None:
        """``seconds``: how long a lease lasts. It is renewed four times in this time."""
        self._store = store
        self._seconds = seconds
        self._kept: dict[str, tuple[Grant, Callable[[], None]]] = {}
        """By token."""
        self._rounds = 0

    @contextmanager
    def keeping(self, grant: Grant, wake: Callable[[], None]) -> Iterator[None]:
        """Keep the lease inside the context. ``wake`` is called if ``grant.renewal`` or ``grant.change`` has news."""
        self._kept[grant.token] = grant, wake
        try:
            yield
        finally:
            del self._kept[grant.token]

    async def keep_renewing(self) -> None:
        """Renew until cancelled. While Redis does not answer, try more often."""
        pause = self._seconds / 4
        loop, is_answered = asyncio.get_running_loop(), True
        while True:
            began = loop.time()
            try:
                await self.renew()
                is_answered = True
            except StoreUnavailable as exc:
                if is_answered:
                    log.warning("leases are not renewed", extra=fields(error=exc.sentence))
                is_answered = False
            await asyncio.sleep(max(pause / 4, (pause if is_answered else 0) - (loop.time() - began)))

    async def renew(self) -> None:
        """Renew all leases once. Raises StoreUnavailable."""
        kept = [grant for grant, _ in self._kept.values()]
        await self._store.leases.renew_all(kept, self._seconds)
        by_group: dict[int, list[Grant]] = {}
        for grant in kept:
            if not grant.renewal.is_fenced:
                by_group.setdefault(grant.group_id, []).append(grant)
        for grants in by_group.values():
            await self._look_for_losses(grants)
        self._rounds += 1
        for grant, wake in list(self._kept.values()):
            if grant.has_news:
                wake()

    async def _look_for_losses(self, grants: list[Grant]) -> None:
        others = range(1, grants[0].shards)
        few = [others[(_SHARDS_ASKED * self._rounds + i) % len(others)] for i in range(min(_SHARDS_ASKED, len(others)))]
        for start in range(0, len(grants), _ASKED_AT_ONCE):
            some = grants[start : start + _ASKED_AT_ONCE]
            for grant, shards in zip(some, await self._store.index.has_lost(some, [0, *few]), strict=True):
                grant.renewal.lost_shards |= shards
