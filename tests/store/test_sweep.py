"""Sweeping: a dead holder leaves all blocks of all shards, in bounded steps, whatever crashes meanwhile."""

from __future__ import annotations

from typing import cast

import pytest
from redis.asyncio import Redis

from tests.store.factories import (
    Dying,
    Meeting,
    Stream,
    apart,
    blocks_of,
    claim_of,
    hgetall,
    registration,
    snapshot,
    stored,
    stream_of,
)
from tests.store.flow import asked
from waymark.apply.options import ApplyOptions
from waymark.apply.resuming import resumed
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.store import keys, sweep
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Verdict
from waymark.store.store import Store
from waymark.store.sweep import UnclaimedPublisher

BLOCKS = list(range(1, 901))
SALTED = [block ^ 0xFF0000 for block in range(1, 101)]
MANY = [block << 20 for block in range(1, 601)]
"""Each begins a chain of its own."""
SHARDS = pytest.mark.parametrize("shards", [1, 3])


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "STEP_ROWS", 4)


@pytest.fixture
async def neighbour(store: Store, redis: Redis, stream: Stream) -> Stream:
    """pod-1 has died, with 1,000 blocks; pod-2 has 100 of them, and nothing else."""
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS), stored(gpu, SALTED, seq=2, ns=0xFF0000), stored(gpu, BLOCKS[:10], seq=3))
    neighbour = await stream_of(store, redis, registration("pod-2"))
    (other,) = await neighbour.begin("0 GPU")
    await neighbour.apply(stored(other, BLOCKS[:100]))
    await stream.end()
    return neighbour


async def swept(store: Store, stream: Stream) -> list[int]:
    holder = await store.sweeper.pick(stream.entry)
    assert holder == 1
    return [blocks async for blocks in store.sweeper.steps(stream.entry, holder)]


async def check_swept(redis: Redis, stream: Stream) -> None:
    assert await stream.who_has(BLOCKS) == [{2}] * 100 + [set()] * 800
    assert await stream.who_has(SALTED) == [set()] * 100
    assert len(await redis.keys("wm:{*}:????????????????")) == 4
    engines = await redis.keys("*:engine:1")
    assert len(engines) == stream.grant.shards
    for engine in engines:
        # So that a late call changes nothing.
        assert await redis.hkeys(engine) == [b"applied"]
        assert 0 < await redis.pttl(engine) <= 3_600_000
    assert not await redis.exists(keys.dead(1))


@SHARDS
async def test_a_dead_holder_leaves_every_block_and_takes_nobody_along(
    store: Store, redis: Redis, neighbour: Stream, shards: int
) -> None:
    assert await store.sweeper.left(neighbour.entry) == 1
    steps = await swept(store, neighbour)
    assert sum(steps) == 1000
    assert max(steps) <= 32 * 4
    await check_swept(redis, neighbour)
    assert await store.sweeper.left(neighbour.entry) == 0
    assert await store.sweeper.pick(neighbour.entry) is None


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@SHARDS
async def test_a_full_redis_lets_publishers_go(store: Store, redis: Redis, neighbour: Stream, shards: int) -> None:
    """Otherwise its memory stayed full, whatever is unregistered."""
    (gpu,) = await neighbour.begin("0 GPU")
    await redis.config_set("maxmemory", "1")
    try:
        assert await store.registry.clear(neighbour.grant.claim)
        assert b"%d" % gpu not in await hgetall(redis, keys.holders(1))
        assert await store.registry.unregister([neighbour.grant.claim.registration.name])
        while (holder := await store.sweeper.pick(neighbour.entry)) is not None:
            assert sum([blocks async for blocks in store.sweeper.steps(neighbour.entry, holder)])
    finally:
        await redis.config_set("maxmemory", "0")
    assert await blocks_of(redis) == {}


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@SHARDS
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("script", "call"),
    [("sweep_rows", 1), ("sweep_rows", 3), ("end_holder", 1), ("end_holder", 2), ("forget_dead", 1)],
)
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
    blocks = BLOCKS[:512]
    await stream.apply(stored(gpu, blocks))
    crowd = b"".join(b" %d:ffffffff" % holder for holder in range(1001, 1801))
    for head in blocks[::32]:
        await redis.append(cast("str", stream.key(head)), crowd)
    await stream.end()
    steps = await swept(store, stream)
    assert sum(steps) == 512
    assert max(steps) == 128
    assert await stream.who_has(blocks) == [set(range(1001, 1801))] * 512


async def test_an_empty_holder_is_swept(store: Store, redis: Redis, stream: Stream) -> None:
    await stream.begin("0 GPU")
    await stream.end()
    assert await swept(store, stream) == []
    assert keys.dead(1).encode() not in await snapshot(redis)


class OtherCursors(RedisClient):
    """Another server answers from the second step of a scan on: the cursor of the first one means its end there."""

    steps = 0

    async def hscan(self, key: str, cursor: int, count: int, match: str = "") -> tuple[int, dict[bytes, bytes]]:
        self.steps += 1
        return (0, {}) if self.steps == 2 else await super().hscan(key, cursor, count, match)


async def test_a_failover_in_the_middle_of_a_scan_leaves_no_block_behind(redis: Redis, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*(stored(gpu, [head], first=first) for first, head in enumerate(MANY, 1)))
    await stream.end()
    client = OtherCursors(redis, "redis://test")
    await swept(Store(client), stream)
    assert client.steps > 2
    assert await redis.keys("wm:{*}:????????????????") == []


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
        steps = store.sweeper.steps(old.entry, dead)
        for _ in range(step):
            await anext(steps)
        await redis.flushall()
        await store.registry.register(registration())
        new = await taken_over(store, redis)
        (gpu,) = await new.begin("0 GPU")
        assert gpu > dead
        await new.apply(stored(gpu, BLOCKS))
        before = await snapshot(redis)
        assert [blocks async for blocks in steps] == []
        assert await snapshot(redis) == before


@SHARDS
async def test_a_holder_that_is_alive_is_not_swept(store: Store, redis: Redis, neighbour: Stream, shards: int) -> None:
    """Whatever a sweeper believes: on every shard it is asked whether the holder is dead."""
    before = await snapshot(redis)
    assert [blocks async for blocks in store.sweeper.steps(neighbour.entry, 2)] == []
    assert await snapshot(redis) == before


@SHARDS
async def test_the_last_batch_of_all_is_not_taken_for_a_sweep(
    store: Store, redis: Redis, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seq is that in the mark of a swept holder."""
    monkeypatch.setattr("waymark.store.calls.CALL_PARTS", 1)
    (gpu,) = await stream.begin("0 GPU")
    assert await stream.apply(*apart(gpu, BLOCKS[:30], seq=2**53 - 1)) is Verdict.APPLIED
    assert len(await blocks_of(redis)) == 30
    again = await stream.again()
    _, state = await resumed(again.grant, store, Metrics(), ApplyOptions())
    assert [*state.holders.values()] == [gpu]


async def taken_over(store: Store, redis: Redis) -> Stream:
    """pod-1's stream; holder ids begin where they begin in an empty Redis."""
    grant = await store.leases.take(await claim_of(store, registration()), "worker-1", 60.0)
    assert grant is not None
    return Stream(store, redis, grant)


UNCLAIMED = list(range(1, 41))
NAME = keys.publisher_field(registration().name).decode()


def seat_of(stream: Stream) -> UnclaimedPublisher:
    return UnclaimedPublisher(stream.grant.publisher, stream.grant.group_id, stream.grant.shards)


async def with_blocks(stream: Stream) -> UnclaimedPublisher:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, UNCLAIMED))
    return seat_of(stream)


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_publisher_without_a_claim_ends(store: Store, redis: Redis, stream: Stream) -> None:
    ids = await with_blocks(stream)
    await redis.hdel(keys.PUBLISHERS, NAME)
    assert await asked(store, UNCLAIMED) == {"pod-1": 40}
    assert await store.unclaimed.publishers(ids.group_id) == {ids.publisher}
    assert await store.unclaimed.end(ids)
    assert await asked(store, UNCLAIMED) == {}
    assert await store.unclaimed.publishers(ids.group_id) == set()
    assert await hgetall(redis, stream.grant.record) == {}
    assert not await store.unclaimed.end(ids), "it has ended"


async def test_a_publisher_whose_name_was_registered_anew_ends(store: Store, redis: Redis, stream: Stream) -> None:
    ids = await with_blocks(stream)
    await redis.hdel(keys.PUBLISHERS, NAME)
    await store.registry.register(registration())
    anew = await claim_of(store, registration())
    assert await store.unclaimed.end(ids)
    assert await store.unclaimed.publishers(ids.group_id) == {anew.publisher}
    assert await store.directory.claims() == [anew]


@pytest.mark.parametrize("raw", [None, b'{"format":9}'])
async def test_a_publisher_with_a_claim_is_left_alone(
    store: Store, redis: Redis, stream: Stream, raw: bytes | None
) -> None:
    ids = await with_blocks(stream)
    if raw is not None:
        await redis.hset(keys.PUBLISHERS, NAME, raw)
    before = await hgetall(redis, stream.grant.record)
    assert not await store.unclaimed.end(ids)
    assert await hgetall(redis, stream.grant.record) == before
    assert await asked(store, UNCLAIMED) == {"pod-1": 40}


@pytest.mark.parametrize("is_put_back", [True, False])
@pytest.mark.parametrize("script", ["take_lease", "raise_fence", "write_record", "end_publisher"])
async def test_a_registration_that_comes_meanwhile_wins(
    store: Store, redis: Redis, client: RedisClient, stream: Stream, script: str, is_put_back: bool
) -> None:
    """It is of the same id: put back by a worker, or made anew by a Redis that has forgotten its last id, too."""
    ids = await with_blocks(stream)
    await redis.hdel(keys.PUBLISHERS, NAME)
    if not is_put_back:
        await redis.hdel(keys.GROUPS, "last_publisher")

    async def register() -> None:
        if is_put_back:
            assert await store.claim_writer.put_back(stream.grant.claim)
        else:
            assert await store.registry.register(registration())

    assert not await Store(Meeting(client, script, register)).unclaimed.end(ids)
    assert (await claim_of(store, registration())).publisher == ids.publisher
    assert await asked(store, UNCLAIMED) == {"pod-1": 40}
    assert b"unclaimed" not in await hgetall(redis, stream.grant.record)
    assert await store.leases.take(stream.grant.claim, "worker-2", 5.0), "its stream goes on at once"


async def test_a_publisher_whose_record_is_gone_ends(store: Store, redis: Redis, stream: Stream) -> None:
    """As a Redis that evicts keys leaves it: nothing but the table names it, with all of its holders."""
    ids = await with_blocks(stream)
    await redis.delete(stream.grant.record)
    await redis.hdel(keys.PUBLISHERS, NAME)
    assert await asked(store, UNCLAIMED) == {"pod-1": 40}
    assert await store.unclaimed.end(ids)
    assert await asked(store, UNCLAIMED) == {}
    assert await store.unclaimed.publishers(ids.group_id) == set()
    assert await redis.hkeys(keys.fence(ids.group_id, 0)) == [b"holder"]
    assert not await store.unclaimed.end(ids), "it has ended"


@pytest.mark.parametrize("is_evicted", [True, False])
@pytest.mark.parametrize("raw", [None, b'{"format":9}'])
async def test_without_a_name_any_claim_may_be_its_own(
    store: Store, redis: Redis, stream: Stream, is_evicted: bool, raw: bytes | None
) -> None:
    ids = await with_blocks(stream)
    if is_evicted:
        await redis.delete(stream.grant.record)
    else:
        await redis.hdel(stream.grant.record, "name")
    if raw is not None:
        await redis.hset(keys.PUBLISHERS, NAME, raw)
    assert not await store.unclaimed.end(ids)
    assert await asked(store, UNCLAIMED) == {"pod-1": 40}
    await redis.hdel(keys.PUBLISHERS, NAME)
    assert await store.unclaimed.end(ids)
    assert await asked(store, UNCLAIMED) == {}


async def test_unregistering_ends_a_publisher_whose_record_is_gone(store: Store, redis: Redis, stream: Stream) -> None:
    ids = await with_blocks(stream)
    await redis.delete(stream.grant.record)
    assert await store.registry.unregister([registration().name]) == [registration().name]
    assert await asked(store, UNCLAIMED) == {}
    assert await store.unclaimed.publishers(ids.group_id) == set()


async def test_a_record_that_is_made_again_knows_no_holders_and_none_is_left(
    store: Store, redis: Redis, stream: Stream
) -> None:
    """A worker that finds no record begins the publisher anew. Nobody would end the holders of before."""
    ids = await with_blocks(stream)
    await redis.delete(stream.grant.record)
    assert await store.claim_writer.begin(stream.grant.claim)
    assert await asked(store, UNCLAIMED) == {}
    assert await store.unclaimed.publishers(ids.group_id) == {ids.publisher}
    assert len(await redis.smembers(keys.dead(ids.group_id))) == 1, "its blocks are swept"
    again = await stream.again()
    (gpu,) = await again.begin("0 GPU")
    await again.apply(stored(gpu, UNCLAIMED[:7]))
    assert await asked(store, UNCLAIMED) == {"pod-1": 7}


async def test_a_record_that_is_made_meanwhile_wins(
    store: Store, redis: Redis, client: RedisClient, stream: Stream
) -> None:
    ids = await with_blocks(stream)
    await redis.delete(stream.grant.record)
    await redis.hdel(keys.PUBLISHERS, NAME)

    async def register() -> None:
        await redis.hdel(keys.GROUPS, "last_publisher")
        assert await store.registry.register(registration())

    assert not await Store(Meeting(client, "end_publisher", register)).unclaimed.end(ids)
    assert (await claim_of(store, registration())).publisher == ids.publisher
    assert await store.unclaimed.publishers(ids.group_id) == {ids.publisher}
