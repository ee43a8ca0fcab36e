"""Who takes over a stream learns from the record which calls each shard has acknowledged."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, apart, hgetall
from waymark.domain.moves import Moves
from waymark.store import keys
from waymark.store.leases import Grant
from waymark.store.records import StreamRecord
from waymark.store.scripts import Verdict
from waymark.store.store import Store


async def state_of(stream: Stream) -> StreamRecord:
    state = await stream.store.records.read(stream.grant)
    assert state is not None
    return state


@pytest.mark.parametrize("shards", [3])
async def test_a_takeover_notices_what_a_shard_has_lost_before_also_after_a_restart(
    redis: Redis, stream: Stream
) -> None:
    """Numbers of calls go on in a new life, so that none of an old one hides what is lost."""
    (gpu,) = await stream.begin("0 GPU")
    for seq in range(500, 503):
        await stream.apply(*apart(gpu, range(1, 13), seq=seq))
    await stream.end(is_restart=True)
    second = await stream.again()
    (gpu,) = await second.begin("0 GPU")
    await second.apply(*apart(gpu, range(1, 13), seq=3))
    names = await redis.keys("wm:{1.2}:*")
    before = {name: await redis.dump(name) for name in names}
    await second.apply(*apart(gpu, range(13, 25), seq=4))
    third = await stream.again("worker-3")
    assert not third.grant.has_lost((await state_of(third)).shard_calls)
    await redis.delete(*await redis.keys("wm:{1.2}:*"))
    for name, value in before.items():
        assert value is not None
        await redis.restore(name, 0, value)
    fourth = await stream.again("worker-4")
    assert not fourth.grant.is_forgotten
    told = (await state_of(fourth)).shard_calls
    assert fourth.grant.has_lost({2: told[2]})
    assert not fourth.grant.has_lost({1: told[1]})


@pytest.mark.parametrize("shards", [3])
async def test_a_commit_tells_of_all_shards_that_got_blocks_since_the_last_one(store: Store, stream: Stream) -> None:
    """The calls of a large fold that come before its watermark have told of nothing."""
    (gpu,) = await stream.begin("0 GPU")
    grant, resolved = stream.grant, await stream.remembered()
    parts = resolved.parts(*apart(gpu, [1, 4], seq=5))
    assert await store.index.apply(grant, parts, Moves(resolved.memory), None) is Verdict.APPLIED
    assert (await state_of(stream)).shard_calls == {}
    await stream.apply(*apart(gpu, [3, 8], seq=6))
    assert (await state_of(stream)).shard_calls == {1: 1, 2: 1}
    await stream.end(is_restart=True)
    assert (await state_of(stream)).shard_calls == {}


@pytest.mark.parametrize("shards", [3])
async def test_a_number_that_cannot_be_read_is_none_at_all(redis: Redis, store: Store, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*apart(gpu, range(1, 13), seq=7))
    await redis.hset(keys.fence(1, 2), f"calls:{stream.grant.publisher}", "some")
    assert await store.index.has_lost([stream.grant], range(3)) == [{2}]
    second = await stream.again()
    assert second.grant.has_lost((await state_of(second)).shard_calls)
    await redis.hdel(keys.fence(1, 2), f"calls:{stream.grant.publisher}")


@pytest.mark.parametrize("shards", [3])
async def test_a_late_call_tells_a_shard_of_no_fewer_calls_of_shard_0(
    redis: Redis, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    for seq in (5, 6):
        await stream.apply(*apart(gpu, range(1, 13), seq=seq))
    told = await told_of(redis, stream)
    assert told[1] == told[2] > 1
    monkeypatch.setattr(Grant, "first_calls", 1)
    await stream.apply(*apart(gpu, [13, 14, 16, 17], seq=7))
    assert await told_of(redis, stream) == told


@pytest.mark.parametrize("shards", [3])
async def test_shards_forget_only_the_calls_of_shard_0_that_it_has_lost(
    redis: Redis, store: Store, stream: Stream
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*apart(gpu, [1], seq=5))
    before = await told_of(redis, stream)
    await stream.apply(*apart(gpu, [2], seq=6))
    told = await told_of(redis, stream)
    assert told[1] == before[1] < told[2]
    await store.leases.forget_told(stream.grant)
    assert await told_of(redis, stream) == told
    assert (await stream.again()).grant.first_told == told[2]
    second = await stream.again()
    second.grant.calls[0] = told[1]
    await store.leases.forget_told(second.grant)
    assert await told_of(redis, stream) == {1: told[1], 2: told[1]}
    await store.leases.forget_told(stream.grant)  # it has the stream no longer
    assert (await stream.again()).grant.first_told == told[1]


async def told_of(redis: Redis, stream: Stream) -> dict[int, int]:
    """By shard, how many calls of shard 0 it was told of."""
    field = b"first:%d" % stream.grant.publisher
    return {shard: int((await hgetall(redis, keys.fence(1, shard))).get(field, 0)) for shard in (1, 2)}
