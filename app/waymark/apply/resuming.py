"""Makes the applier of a stream: from its record in Redis, and from its blocks in this process or in Redis."""

from __future__ import annotations

import logging
from collections import Counter

from waymark.apply.applier import Applier
from waymark.apply.kept import KeptMemories
from waymark.apply.options import ApplyOptions
from waymark.apply.redis_calls import Fenced
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.generations import BlockBounds
from waymark.domain.held import HeldBlocks
from waymark.domain.resolver import Resolver
from waymark.store.hashes import KEPT
from waymark.store.leases import Grant
from waymark.store.records import MISSING, StreamRecord
from waymark.store.store import Store

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

    ``registered_ranks`` are the ranks of the instance, if several are registered. A damaged record begins a new life.
    If ``kept`` has the blocks of the stream, the applier uses these; else it reads them from Redis.
    """
    state = await store.records.read(grant)
    if state is None:
        raise Fenced
    memory = None if kept is None else kept.take(grant, state)
    resolver = _resolver(grant, state, options, registered_ranks, memory)
    has_skipped = False
    if memory is None:
        ranks = {holder: name.dp_rank for name, holder in state.holders.items()}
        has_skipped = resolver.skip(await store.takeover.fill(grant, ranks, resolver.memory), state.watermark)
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
    if state.is_damaged:
        log.warning("record of a stream is damaged", extra=fields(stream=str(grant.claim.registration.name)))
        await store.records.adopt(grant, state)
        await applier.new_life()
        resolver.resume({}, frozenset(), None, {})
        state = await store.records.read(grant)
        if state is None:
            raise Fenced
    elif has_skipped and KEPT in resolver.flags:
        # Shard 0 may have lost engine hashes of blocks on other shards. The resolver skips these blocks when they are
        # applied again, so their hashes would stay missing. Without the flag all hashes are written again.
        resolver.flags.discard(KEPT)
        await applier.keep_facts()
    await applier.bounding.check(at_once=True)
    return applier, state


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
