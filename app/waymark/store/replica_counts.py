"""Counts of all replicas together: each replica adds its counts once a second.

The counts are not exact. If a reply of Redis is lost, a count may be added twice. A replica that ends abruptly loses
the counts of its last second.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.store import keys
from waymark.store.background import StartTask
from waymark.store.parsing import lenient_text
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.0
#: Prefix keys that wait to be added; further ones are left out while Redis is unavailable.
_PREFIXES_MAX = 10_000
_PREFIXES_PER_CALL = 1_000


class ReplicaCounts:
    """The counts of this process that are not in Redis yet, and the counts of all. ``begin`` runs the flush."""

    def __init__(self, client: RedisClient, scripts: Scripts, begin: StartTask) -> None:
        self._client = client
        self._scripts = scripts
        self._begin = begin
        self._counts: Counter[str] = Counter()
        self._prefixes: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.prefixes_seen = 0
        """About how many different prefix keys all replicas had seen when this replica last added its own."""

    def add(self, name: str, prefix_key: bytes | None = None, *, number: int = 1) -> None:
        """Count a decision, and the prefix key of its request, or ``number`` of something else."""
        self._counts[name] += number
        if prefix_key is not None and len(self._prefixes) < _PREFIXES_MAX:
            self._prefixes.add(prefix_key.hex())
        if self._task is None or self._task.done():
            self._task = self._begin(self._flush())

    async def _flush(self) -> None:
        while self._counts or self._prefixes:
            await asyncio.sleep(_FLUSH_SECONDS)
            counts, self._counts = self._counts, Counter()
            prefixes = [self._prefixes.pop() for _ in range(min(_PREFIXES_PER_CALL, len(self._prefixes)))]
            try:
                count = [part for pair in counts.items() for part in pair]
                added = await self._scripts.add_counts(counts=keys.COUNTS, seen=keys.SEEN, count=count, prefix=prefixes)
            except StoreUnavailable as exc:
                log.debug("counts not added yet", extra=fields(error=exc.sentence))
                self._counts += counts
                self._prefixes.update(prefixes)
            else:
                self.prefixes_seen = added.numbers[0]

    async def read(self) -> tuple[Mapping[str, int], int]:
        """Return the counts of all replicas by name, and an estimate of the number of different prefix keys."""
        raw_counts, estimate = await self._client.several(
            [("HGETALL", keys.COUNTS), ("PFCOUNT", keys.SEEN)], is_lenient=True
        )
        pairs = (
            raw_counts.items()
            if isinstance(raw_counts, dict)
            else zip((raw_counts or [])[::2], (raw_counts or [])[1::2], strict=True)
        )
        return {lenient_text(name): int(value) for name, value in pairs if value.isdigit()}, estimate or 0
