"""Leases: a grant is complete when the fence stands on every shard, and the highest token wins."""

from __future__ import annotations

from asyncio import gather

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import (
    Dying,
    Meeting,
    Stream,
    claim_of,
    hgetall,
    registration,
    snapshot,
    stored,
    stream_of,
)
from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Verdict
from waymark.store.store import Store

SHARDS = pytest.mark.parametrize("shards", [1, 3])


@SHARDS
async def test_a_grant_has_its_fence_on_every_shard(store: Store, redis: Redis, stream: Stream, shards: int) -> None:
    assert stream.grant.above == 0
    for shard in range(shards):
        assert (await hgetall(redis, keys.fence(1, shard)))[b"1"] == stream.grant.token.encode()


async def test_a_stream_that_is_taken_cannot_be_taken_until_it_is_given_back(store: Store, stream: Stream) -> None:
    claim = stream.grant.claim
    assert await store.leases.take(claim, "worker-2", 60.0) is None
    await store.leases.drop(stream.grant)
    second = await store.leases.take(claim, "worker-2", 60.0)
    assert second is not None
    assert second.token.startswith("2.")


async def test_of_many_workers_at_once_one_gets_the_stream(store: Store) -> None:
    await store.registry.register(registration())
    claim = await claim_of(store, registration())
    grants = await gather(*(store.leases.take(claim, f"worker-{i}", 60.0) for i in range(10)))
    assert sum(grant is not None for grant in grants) == 1


async def test_a_lease_that_ran_out_can_be_taken_and_the_old_grant_is_fenced(store: Store, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.redis.pexpire(stream.grant.lease, 1)

    async def taken() -> bool:
        return await store.leases.take(stream.grant.claim, "worker-2", 60.0) is not None

    await wait_until(taken, "the lease has run out and somebody else has it")
    assert await stream.apply(stored(gpu, [1])) is Verdict.FENCED
    assert not await store.leases.renew(stream.grant, 60.0)
    assert await store.leases.highest_holder(stream.grant) is None
    assert not await store.leases.end(stream.grant)


async def test_a_lease_of_a_fraction_of_a_millisecond_is_one(store: Store) -> None:
    await store.registry.register(registration())
    assert await store.leases.take(await claim_of(store, registration()), "worker-1", 0.0001) is not None


@SHARDS
async def test_a_record_that_a_failover_set_back_does_not_bring_an_old_token_back(
    store: Store, redis: Redis, stream: Stream, shards: int
) -> None:
    """The last shard remembers more than the record: the new token goes above it."""
    await store.scripts.run(
        "raise_fence", fence=keys.fence(1, shards - 1), publisher=1, token="41." + "a" * 16, first=""
    )
    await store.leases.drop(stream.grant)
    grant = await store.leases.take(stream.grant.claim, "worker-2", 60.0)
    assert grant is not None
    assert grant.token.startswith("42.")
    assert (await hgetall(redis, grant.record))[b"token"] == grant.token.encode()
    assert await redis.get(grant.lease) == grant.token.encode()


@pytest.mark.parametrize("shards", [3])
async def test_new_holders_begin_above_what_any_shard_has_seen(store: Store, redis: Redis, stream: Stream) -> None:
    await redis.hset(keys.fence(1, 2), "holder", "90")
    assert await store.leases.highest_holder(stream.grant) == 90
    again = await stream.again()
    assert again.grant.above == 90
    assert await again.begin("0 GPU") == [91]


@pytest.mark.parametrize("shards", [3])
async def test_a_worker_that_died_between_two_fences_is_in_nobodys_way(
    store: Store, client: RedisClient, redis: Redis
) -> None:
    await store.registry.register(registration())
    claim = await claim_of(store, registration())
    dying = Store(Dying(client, "raise_fence", call=2))
    with pytest.raises(Exception, match="died"):
        await dying.leases.take(claim, "worker-1", 60.0)
    await redis.pexpire(keys.lease(1, claim.publisher), 1)

    async def taken() -> bool:
        return await store.leases.take(claim, "worker-2", 60.0) is not None

    await wait_until(taken, "another worker has the stream")
    assert {value[2][b"1"][:1] for name, value in (await snapshot(redis)).items() if b"fence" in name} == {b"2"}


@SHARDS
async def test_an_unregister_shuts_the_worker_out_before_it_ends_its_holders(store: Store, redis: Redis) -> None:
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await store.registry.unregister([stream.grant.claim.registration.name])
    before = await snapshot(redis)
    assert await stream.apply(stored(gpu, range(1, 10))) is Verdict.FENCED
    assert await store.leases.take(stream.grant.claim, "worker-1", 60.0) is None
    assert await snapshot(redis) == before


@pytest.mark.parametrize("shards", [3])
@pytest.mark.parametrize("call", [1, 2, 3])
async def test_a_publisher_that_ends_between_a_lease_and_its_fences_leaves_nothing(
    store: Store, client: RedisClient, redis: Redis, call: int
) -> None:
    await store.registry.register(registration())
    claim = await claim_of(store, registration())

    async def unregister() -> None:
        await store.registry.unregister([registration().name])

    late = Store(Meeting(client, "raise_fence", unregister, call=call))
    grant = await late.leases.take(claim, "worker-1", 60.0)
    if grant is not None:
        assert await late.records.read(grant) is None
        await late.leases.drop(grant)
    assert await fences(redis) == {}


@pytest.mark.parametrize("shards", [3])
@pytest.mark.parametrize("is_done", [False, True])
async def test_what_an_unregister_that_died_left_in_the_fences_goes_with_the_next(
    store: Store, client: RedisClient, redis: Redis, is_done: bool
) -> None:
    stream = await stream_of(store, redis)
    name = stream.grant.claim.registration.name
    with pytest.raises(StoreUnavailable):
        await Store(Dying(client, "drop_fence", call=2, is_done=is_done)).registry.unregister([name])
    assert await fences(redis) != {}
    assert await store.registry.unregister([name]) == [name]
    assert await fences(redis) == {}


async def fences(redis: Redis) -> dict[bytes, dict[bytes, bytes]]:
    """What each fence says of publishers, where it says something."""
    found = {key: value for key, (_, _, value) in (await snapshot(redis)).items() if key.endswith(b":fence")}
    of_publishers = {key: {name: value[name] for name in value if name != b"holder"} for key, value in found.items()}
    return {key: value for key, value in of_publishers.items() if value}


async def test_giving_back_what_somebody_else_has_does_nothing(store: Store, redis: Redis, stream: Stream) -> None:
    await stream.again()
    before = await snapshot(redis)
    await store.leases.drop(stream.grant)
    assert await snapshot(redis) == before
