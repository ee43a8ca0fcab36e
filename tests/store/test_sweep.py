"""Sweeping: a dead holder leaves all blocks of all shards, in bounded steps, whatever crashes meanwhile."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import Dying, Stream, claim_of, registration, snapshot, stored, stream_of
from waymark.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.client import RedisClient
from waymark.store.store import Store
from waymark.store.sweep import STEP_BLOCKS

BLOCKS = list(range(1, 901))
SALTED = [block ^ 0xFF0000 for block in range(1, 101)]
SHARDS = pytest.mark.parametrize("shards", [1, 3])


@pytest.fixture
async def neighbour(store: Store, redis: Redis, stream: Stream) -> Stream:
    """pod-1 has died, with 1,000 blocks; pod-2 has 100 of them, and one of its own."""
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS), stored(gpu, SALTED, seq=2, ns=0xFF0000), stored(gpu, BLOCKS[:10], seq=3))
    neighbour = await stream_of(store, redis, registration("pod-2"))
    (other,) = await neighbour.begin("0 GPU")
    await neighbour.apply(stored(other, [*BLOCKS[:100], 5000]))
    await stream.end()
    return neighbour


async def swept(store: Store, stream: Stream) -> list[int]:
    holder = await store.sweeper.pick(stream.entry)
    assert holder == 1
    return [blocks async for blocks in store.sweeper.steps(stream.entry, holder)]


async def check_swept(redis: Redis, stream: Stream) -> None:
    assert await stream.values(BLOCKS) == [b"2"] * 100 + [None] * 800
    assert await stream.values([*SALTED, 5000]) == [None] * 100 + [b"2"]
    assert await redis.keys("*:engine:1") == []
    assert not await redis.exists(keys.dead(1))


@SHARDS
async def test_a_dead_holder_leaves_every_block_and_takes_nobody_along(
    store: Store, redis: Redis, neighbour: Stream, shards: int
) -> None:
    assert await store.sweeper.left(neighbour.entry) == 1
    steps = await swept(store, neighbour)
    assert sum(steps) == 1000
    assert max(steps) <= STEP_BLOCKS
    assert len(steps) >= 4
    await check_swept(redis, neighbour)
    assert await store.sweeper.left(neighbour.entry) == 0
    assert await store.sweeper.pick(neighbour.entry) is None


@SHARDS
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("script", "call"), [("sweep_holder", 1), ("sweep_holder", 3), ("forget_dead", 1)])
async def test_a_sweeper_that_died_is_followed_by_another(
    store: Store,
    client: RedisClient,
    redis: Redis,
    neighbour: Stream,
    shards: int,
    script: str,
    call: int,
    is_done: bool,
) -> None:
    dying = Store(Dying(client, script, call=call, is_done=is_done))
    with pytest.raises(StoreUnavailable):
        await swept(dying, neighbour)
    if (script, is_done) != ("forget_dead", True):
        await swept(store, neighbour)
    await check_swept(redis, neighbour)


async def test_two_sweepers_of_one_holder_are_no_harm(store: Store, redis: Redis, neighbour: Stream) -> None:
    first, second = (store.sweeper.steps(neighbour.entry, 1) for _ in range(2))
    async for _ in first:
        async for _ in second:
            break
    async for _ in second:
        pass
    await check_swept(redis, neighbour)


async def test_long_values_make_a_step_smaller(store: Store, redis: Redis, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    blocks = BLOCKS[:256]
    await stream.apply(stored(gpu, blocks))
    crowd = b" ".join(b"%d" % holder for holder in range(1001, 1801))
    await redis.mset({stream.key(block): b"1 " + crowd for block in blocks})
    await stream.end()
    steps = await swept(store, stream)
    assert sum(steps) == 256
    assert max(steps) == 16
    assert await stream.values(blocks) == [crowd] * 256


async def test_an_empty_holder_is_swept(store: Store, redis: Redis, stream: Stream) -> None:
    await stream.begin("0 GPU")
    await stream.end()
    assert await swept(store, stream) == []
    assert keys.dead(1).encode() not in await snapshot(redis)


class OtherCursors(RedisClient):
    """Another server answers from the second step of a scan on: the cursor of the first one means its end there."""

    steps = 0

    async def hscan(self, key: str, cursor: int, count: int) -> tuple[int, dict[bytes, bytes]]:
        self.steps += 1
        return (0, {}) if self.steps == 2 else await super().hscan(key, cursor, count)


async def test_a_failover_in_the_middle_of_a_scan_leaves_no_block_behind(redis: Redis, neighbour: Stream) -> None:
    client = OtherCursors(redis, "redis://test")
    await swept(Store(client), neighbour)
    assert client.steps > 2
    await check_swept(redis, neighbour)


@SHARDS
async def test_a_sweep_of_a_redis_that_came_back_empty_ends_and_takes_nothing(
    store: Store, client: RedisClient, redis: Redis, shards: int
) -> None:
    """Again and again: at any step of a sweep Redis is emptied, and a publisher of the new one stores the same."""
    for step in range(6):
        await redis.flushall()
        await store.registry.register(registration())
        old = await taken_over(store, redis)
        (dead,) = await old.begin("0 GPU")
        await old.apply(stored(dead, BLOCKS))
        await old.end()
        sweep = store.sweeper.steps(old.entry, dead)
        for _ in range(step):
            await anext(sweep)
        await redis.flushall()
        await store.registry.register(registration())
        new = await taken_over(store, redis)
        (gpu,) = await new.begin("0 GPU")
        assert gpu > dead
        await new.apply(stored(gpu, BLOCKS))
        before = await snapshot(redis)
        assert [blocks async for blocks in sweep] == []
        assert await snapshot(redis) == before


@SHARDS
async def test_a_holder_that_is_alive_is_not_swept(store: Store, redis: Redis, neighbour: Stream, shards: int) -> None:
    """Whatever a sweeper believes: on every shard it is asked whether the holder is dead."""
    before = await snapshot(redis)
    assert [blocks async for blocks in store.sweeper.steps(neighbour.entry, 2)] == []
    assert await snapshot(redis) == before


async def taken_over(store: Store, redis: Redis) -> Stream:
    """pod-1's stream; holder ids begin where they begin in an empty Redis."""
    grant = await store.leases.take(await claim_of(store, registration()), "worker-1", 60.0)
    assert grant is not None
    return Stream(store, redis, grant)
