"""Who takes over a stream learns from the record how far each shard was."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, apart
from waymark.apply.applier import resumed
from waymark.apply.options import ApplyOptions
from waymark.domain.moves import Moves
from waymark.metrics import Metrics
from waymark.store.scripts import Verdict
from waymark.store.store import Store


@pytest.mark.parametrize("shards", [3])
async def test_a_shard_of_a_new_life_is_not_taken_for_as_far_as_it_was_in_the_old_one(
    store: Store, redis: Redis, stream: Stream
) -> None:
    """The numbers of a new life begin anew: a larger one that is left of the old life would hide what is lost."""
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*apart(gpu, range(1, 13), seq=500))
    await stream.end(is_restart=True)
    second = await stream.again()
    (gpu,) = await second.begin("0 GPU")
    await second.apply(*apart(gpu, range(1, 13), seq=3))
    names = await redis.keys("wm:{1.2}:*")
    before = {name: await redis.dump(name) for name in names}
    await second.apply(*apart(gpu, range(13, 25), seq=4))
    third = await stream.again("worker-3")
    await resumed(third.grant, store, Metrics(), ApplyOptions())
    assert not await store.index.has_lost(third.grant, third.grant.shard_seqs)
    await redis.delete(*await redis.keys("wm:{1.2}:*"))
    for name, value in before.items():
        assert value is not None
        await redis.restore(name, 0, value)
    fourth = await stream.again("worker-4")
    await resumed(fourth.grant, store, Metrics(), ApplyOptions())
    assert not fourth.grant.is_forgotten
    assert await store.index.has_lost(fourth.grant, [2])
    assert not await store.index.has_lost(fourth.grant, [1])


@pytest.mark.parametrize("shards", [3])
async def test_a_commit_tells_of_all_shards_that_got_blocks_since_the_last_one(store: Store, stream: Stream) -> None:
    """The calls of a large fold that come before its watermark have told of nothing."""
    (gpu,) = await stream.begin("0 GPU")
    grant, resolved = stream.grant, await stream.remembered()
    parts = resolved.parts(*apart(gpu, [1, 4], seq=5))
    assert await store.index.apply(grant, parts, Moves(resolved.memory), None) is Verdict.APPLIED
    state = await store.records.read(grant)
    assert state is not None
    assert state.shard_seqs == {}
    await stream.apply(*apart(gpu, [3, 8], seq=6))
    state = await store.records.read(grant)
    assert state is not None
    assert state.shard_seqs == {1: 5, 2: 6}
    await stream.end(is_restart=True)
    state = await store.records.read(grant)
    assert state is not None
    assert state.shard_seqs == {}
