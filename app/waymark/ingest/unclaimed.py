"""Finds publishers in a group's holder table without a claim, and ends them.

Each poll reads the table of one group, in turn. The workers share the groups, so that a poll costs one command for each
worker, however many groups there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from waymark.base.errors import RecordDamaged
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.store import Store
from waymark.store.sweep import UnclaimedPublisher

log = logging.getLogger(__name__)


class UnclaimedWatch:
    """Ends a publisher without a claim for two polls and for ``patience_seconds``.

    Within ``patience_seconds`` every live worker polls, and puts back a claim that it knows and Redis has lost.
    """

    def __init__(self, store: Store, metrics: Metrics, patience_seconds: float) -> None:
        self._store = store
        self._metrics = metrics
        self._patience_seconds = patience_seconds
        self._last = 0
        """The group that was checked last."""
        self._since: dict[UnclaimedPublisher, float] = store.incarnation.cache({})
        """Publishers without a claim, with the monotonic second at which each was found."""

    async def check_next(self, share: Sequence[GroupEntry], claims: Sequence[Claim]) -> None:
        """Check the next group of this worker's share. Raises StoreUnavailable."""
        entry = self._next(share)
        if entry is None:
            self._since.clear()
            return
        try:
            await self._check(entry, claims, {group_entry.group_id for group_entry in share})
        except RecordDamaged as exc:
            # Readers of the table log this, too. A group that cannot be searched delays no other.
            log.debug("group cannot be searched", extra=fields(group=entry.group_id, error=exc.sentence))

    async def _check(self, entry: GroupEntry, claims: Sequence[Claim], mine: set[int]) -> None:
        claimed = {claim.publisher for claim in claims}
        rows = await self._store.unclaimed.publishers(entry.group_id) - claimed
        unclaimed = {UnclaimedPublisher(publisher, entry.group_id, entry.shards) for publisher in rows}
        now = time.monotonic()
        for ids in list(self._since):
            if ids.group_id not in mine or (ids.group_id == entry.group_id and ids not in unclaimed):
                del self._since[ids]
        for ids in unclaimed:
            first_seen = self._since.setdefault(ids, now)
            if first_seen < now and now - first_seen >= self._patience_seconds:
                del self._since[ids]
                if await self._store.unclaimed.end(ids):
                    self._metrics.publishers_unclaimed.inc()
                    about = fields(group=entry.group_id, publisher=ids.publisher)
                    log.warning("removed a publisher that has no registration", extra=about)

    def _next(self, share: Sequence[GroupEntry]) -> GroupEntry | None:
        """Return the group after the last one, or None if there is none."""
        ordered = sorted(share, key=lambda group_entry: group_entry.group_id)
        if not ordered:
            return None
        entry = next((group_entry for group_entry in ordered if group_entry.group_id > self._last), ordered[0])
        self._last = entry.group_id
        return entry
