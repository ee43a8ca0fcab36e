"""Keeps the blocks of publishers in memory between requests of ``POST /events``.

A request holds the lease of its publisher only while it applies. The blocks that it remembers are valid only until
another process takes that lease. The next request uses them under three conditions: no other lease was taken in between
(the counter of its lease is exactly one higher than the last), the record has the same contents, and every shard has
counted the same number of calls. Otherwise the request reads the blocks from Redis.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from waymark.base.metrics import Metrics
from waymark.domain.held import HeldBlocks
from waymark.domain.resolver import Resolver
from waymark.store.claims import Claim
from waymark.store.leases import Grant
from waymark.store.records import StreamRecord
from waymark.store.store import Store

BYTES_MAX = 64 * 2**20
"""The blocks of a publisher that is dropped are read from Redis, so the bound costs time, and never an answer."""


@dataclass(frozen=True, slots=True)
class _KeptMemory:
    memory: HeldBlocks = field(repr=False)
    size: int
    claim: Claim
    counter: int
    state: StreamRecord = field(repr=False)
    calls: dict[int, int] = field(repr=False)


class KeptMemories:
    """Memories by publisher, at most ``bytes_max`` together; the least recently used memory is dropped first."""

    def __init__(self, store: Store, bytes_max: int, metrics: Metrics) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[int, int], _KeptMemory] = OrderedDict()
        self.bytes = 0
        metrics.event_memory_bytes.set_function(lambda: self.bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0

    def take(self, grant: Grant, state: StreamRecord) -> HeldBlocks | None:
        """Remove the memory of a publisher, and return it if it agrees with Redis. ``keep`` stores it again."""
        memory = self._pop(grant)
        if memory is None or memory.claim != grant.claim or memory.counter + 1 != grant.counter:
            return None
        if not _is_same(memory.state, state) or memory.calls != grant.calls:
            return None
        return memory.memory

    async def keep(self, grant: Grant, resolver: Resolver) -> None:
        """Keep the memory of ``resolver``.

        Redis has acknowledged all its folds, and the caller still holds the lease.
        """
        size = resolver.memory.bytes
        if size > self._bytes_max:
            return
        changes = self._store.incarnation.changes
        state = await self._store.records.read(grant)
        if state is None or dict(state.holders) != resolver.holders:
            return
        if dict(state.event_ids) != resolver.event_ids:
            return  # Redis has lost writes during the request
        if changes != self._store.incarnation.changes:
            return
        self._pop(grant)
        self._kept[grant.group_id, grant.publisher] = _KeptMemory(
            resolver.memory, size, grant.claim, grant.counter, state, dict(grant.calls)
        )
        self.bytes += size
        while self.bytes > self._bytes_max:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= oldest.size

    def _pop(self, grant: Grant) -> _KeptMemory | None:
        memory = self._kept.pop((grant.group_id, grant.publisher), None)
        if memory is not None:
            self.bytes -= memory.size
        return memory


def _is_same(old: StreamRecord, now: StreamRecord) -> bool:
    """Return whether the record is unchanged since the memory was kept. Else Redis lost writes, or a new life began."""
    if old.is_damaged or now.is_damaged:
        return False
    return (old.life, old.holders, old.event_ids, old.flags) == (
        now.life,
        now.holders,
        now.event_ids,
        now.flags,
    )
