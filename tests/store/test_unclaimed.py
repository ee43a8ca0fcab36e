"""A publisher that a holder table names and that has no claim ends, unless a registration comes meanwhile."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import Meeting, Stream, claim_of, hgetall, registration, stored
from tests.store.flow import asked
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store
from waymark.store.unclaimed import UnclaimedPublisher

BLOCKS = list(range(1, 41))
NAME = keys.publisher_field(registration().name).decode()


def seat_of(stream: Stream) -> UnclaimedPublisher:
    return UnclaimedPublisher(stream.grant.publisher, stream.grant.group_id, stream.grant.shards)


async def with_blocks(stream: Stream) -> UnclaimedPublisher:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    return seat_of(stream)


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_publisher_without_a_claim_ends(store: Store, redis: Redis, stream: Stream) -> None:
    ids = await with_blocks(stream)
    await redis.hdel(keys.PUBLISHERS, NAME)
    assert await asked(store, BLOCKS) == {"pod-1": 40}
    assert await store.unclaimed.publishers(ids.group_id) == {ids.publisher}
    assert await store.unclaimed.end(ids)
    assert await asked(store, BLOCKS) == {}
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
    assert await asked(store, BLOCKS) == {"pod-1": 40}


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
    assert await asked(store, BLOCKS) == {"pod-1": 40}
    assert b"unclaimed" not in await hgetall(redis, stream.grant.record)
    assert await store.leases.take(stream.grant.claim, "worker-2", 5.0), "its stream goes on at once"


async def test_a_publisher_whose_record_is_gone_ends(store: Store, redis: Redis, stream: Stream) -> None:
    """As a Redis that evicts keys leaves it: nothing but the table names it, with all of its holders."""
    ids = await with_blocks(stream)
    await redis.delete(stream.grant.record)
    await redis.hdel(keys.PUBLISHERS, NAME)
    assert await asked(store, BLOCKS) == {"pod-1": 40}
    assert await store.unclaimed.end(ids)
    assert await asked(store, BLOCKS) == {}
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
    assert await asked(store, BLOCKS) == {"pod-1": 40}
    await redis.hdel(keys.PUBLISHERS, NAME)
    assert await store.unclaimed.end(ids)
    assert await asked(store, BLOCKS) == {}


async def test_unregistering_ends_a_publisher_whose_record_is_gone(store: Store, redis: Redis, stream: Stream) -> None:
    ids = await with_blocks(stream)
    await redis.delete(stream.grant.record)
    assert await store.registry.unregister([registration().name]) == [registration().name]
    assert await asked(store, BLOCKS) == {}
    assert await store.unclaimed.publishers(ids.group_id) == set()


async def test_a_record_that_is_made_again_knows_no_holders_and_none_is_left(
    store: Store, redis: Redis, stream: Stream
) -> None:
    """A worker that finds no record begins the publisher anew. Nobody would end the holders of before."""
    ids = await with_blocks(stream)
    await redis.delete(stream.grant.record)
    assert await store.claim_writer.begin(stream.grant.claim)
    assert await asked(store, BLOCKS) == {}
    assert await store.unclaimed.publishers(ids.group_id) == {ids.publisher}
    assert len(await redis.smembers(keys.dead(ids.group_id))) == 1, "its blocks are swept"
    again = await stream.again()
    (gpu,) = await again.begin("0 GPU")
    await again.apply(stored(gpu, BLOCKS[:7]))
    assert await asked(store, BLOCKS) == {"pod-1": 7}


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
