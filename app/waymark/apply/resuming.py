"""Makes the applier of a stream: from its record in Redis, and from its blocks in this process or in Redis.

The blocks of publishers stay in memory between requests of ``POST /events``. A request holds the lease of its publisher
only while it applies. The blocks that it remembers are valid only until another process takes that lease. The next
request uses them under three conditions: no other lease was taken in between (the counter of its lease is exactly one
higher than the last), the record has the same contents, and every shard has counted the same number of calls. Otherwise
the request reads the blocks from Redis.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import field

from waymark.apply.applier import Applier
from waymark.apply.options import ApplyOptions
from waymark.apply.redis_calls import Fenced
from waymark.base.bounded_cache import BoundedCache
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.domain.generations import BlockBounds
from waymark.domain.held import HeldBlocks
from waymark.domain.resolver import Resolver
from waymark.store.claims import Claim
from waymark.store.hashes import KEPT
from waymark.store.leases import Grant
from waymark.store.records import MISSING, StreamRecord
from waymark.store.store import Store
from waymark.store.takeover import SWEPT

BYTES_MAX = 64 * 2**20
"""The blocks of a dropped publisher are read from Redis, so the bound costs time, and never an answer."""


@record(frozen=True, slots=True)
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
        self._kept: BoundedCache[tuple[int, int], _KeptMemory] = BoundedCache(
            bytes_max=bytes_max, size=lambda memory: memory.size
        )
        metrics.event_memory_bytes.set_function(lambda: self.bytes)

    @property
    def bytes(self) -> int:
        return self._kept.bytes

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()

    def take(self, grant: Grant, state: StreamRecord) -> HeldBlocks | None:
        """Remove the memory of a publisher, and return it if it agrees with Redis. ``keep`` stores it again."""
        memory = self._kept.pop((grant.group_id, grant.publisher))
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
        memory = _KeptMemory(resolver.memory, size, grant.claim, grant.counter, state, dict(grant.calls))
        self._kept.keep((grant.group_id, grant.publisher), memory)


def _is_same(old: StreamRecord, now: StreamRecord) -> bool:
    """Return whether the record is unchanged since the memory was kept. Else Redis lost writes, or a new life began."""
    if old.is_damaged or now.is_damaged:
        return False
    return (old.life, old.holders, old.event_ids, old.flags) == (now.life, now.holders, now.event_ids, now.flags)


log = logging.getLogger(__name__)


async def resumed(
    grant: Grant,
    store: Store,
    metrics: Metrics,
    options: ApplyOptions,
    *,
    registered_ranks: frozenset[int] = frozenset(),
    is_patient: bool = True,
    kept: KeptMemories | None = None,
) -> tuple[Applier, StreamRecord]:
    """Return an applier with the state in the stream's record, and that state. Raises Fenced if there is no record.

    ``registered_ranks`` are the ranks of the instance, if several are registered. A new life begins if the record is
    damaged, or if a shard has lost blocks that the record counts as applied.
    If ``kept`` has the blocks of the stream, the applier uses these; else it reads them from Redis.
    """
    state = await store.records.read(grant)
    if state is None:
        raise Fenced
    # Every call from here on is counted, and could hide a loss.
    has_lost, has_lost_first = grant.has_lost(state.shard_calls), grant.has_lost_first
    memory = None if kept is None else kept.take(grant, state)
    resolver = _resolver(grant, state, options, registered_ranks, memory)
    has_skipped = is_swept = False
    if memory is None:
        ranks = {holder: name.dp_rank for name, holder in state.holders.items()}
        marks = await store.takeover.fill(grant, ranks, resolver.memory)
        has_skipped = resolver.skip(marks, state.watermark)
        is_swept = SWEPT in marks.values()
    counters = Counter(state.counters)
    resolver.missing = counters[MISSING]
    # Only the previous process had the blocks that waited for their parents, so they are lost now.
    counters["waiting_lost"] += counters["waiting"]
    counters["waiting"] = 0
    applier = Applier(
        grant, store, resolver, metrics, counters, pool_hashes_max=options.pool_hashes_max, is_patient=is_patient
    )
    if state.has_staged:
        # The previous worker stopped in the middle of a snapshot.
        await applier.drop_staged()
    about = fields(stream=str(grant.claim.registration.name))
    # A new publisher has no fence either, as if a shard had lost it.
    has_begun = state.watermark is not None or bool(state.event_ids)
    if has_lost_first or (has_begun and has_lost):
        log.warning("redis has lost writes; the stream begins a new life", extra=about)
        state = await _begun_anew(applier, store, grant, state)
    elif state.is_damaged or is_swept:
        # Shard 0 may have lost the end of a holder that another shard has swept: no store would count there any more.
        log.warning("record of a stream is damaged, or older than its blocks", extra=about)
        state = await _begun_anew(applier, store, grant, state)
    elif has_skipped and KEPT in resolver.flags:
        # Shard 0 may have lost engine hashes of blocks on other shards. The resolver skips these blocks when they are
        # applied again, so their hashes would stay missing. Without the flag all hashes are written again.
        resolver.flags.discard(KEPT)
        await applier.keep_facts()
    if has_lost_first:  # otherwise each worker would begin another life until shard 0 has made as many calls again
        await applier.calls.answered(lambda: store.leases.forget_told(grant))
    await applier.bounding.check(at_once=True)
    return applier, state


async def _begun_anew(applier: Applier, store: Store, grant: Grant, damaged: StreamRecord) -> StreamRecord:
    """Begin a new life, and return its record. Raises Fenced if there is none."""
    await store.records.adopt(grant, damaged)
    await applier.new_life()
    applier.resolver.resume({}, frozenset(), None, {})
    state = await store.records.read(grant)
    if state is None:
        raise Fenced
    return state


def staged(
    grant: Grant,
    store: Store,
    metrics: Metrics,
    options: ApplyOptions,
    counters: Counter[str],
    registered_ranks: frozenset[int],
) -> Applier:
    """Return an applier for a snapshot, which begins without blocks; readers see its life when it is whole."""
    resolver = _resolver(grant, None, options, registered_ranks, HeldBlocks(is_of_snapshot=True))
    resolver.is_snapshot = True
    return Applier(grant, store, resolver, metrics, counters, pool_hashes_max=options.pool_hashes_max, is_staged=True)


def _resolver(
    grant: Grant,
    state: StreamRecord | None,
    options: ApplyOptions,
    registered_ranks: frozenset[int],
    memory: HeldBlocks | None,
) -> Resolver:
    """Return a resolver with the holders, flags and event_ids of the record. Without ``memory`` it knows no blocks.

    Without ``state`` it begins a life.
    """
    resolver = Resolver(
        grant.claim.registration,
        grant.publisher,
        seed=options.hash_seed,
        blocks_max=options.stream_blocks_max,
        shards=grant.shards,
        waiting_blocks=options.waiting_blocks,
        registered_ranks=registered_ranks,
        memory=memory,
        # A source of opaque prefixes has no blocks. It has its own bounds.
        bounds=BlockBounds() if grant.claim.registration.kind.traits.is_opaque else options.bounds,
        reads_windows=options.hybrid == "boundary",
    )
    if state is None:
        return resolver
    main_group = int(state.main_groups) if state.main_groups else None
    resolver.resume(state.holders, state.flags, main_group, state.event_ids)
    return resolver
