"""A failover may forget which ids were handed out last, on one slot, while what they name stands on others."""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis

from tests.store.factories import GROUP, Stream, claim_of, hgetall, registration, stored, stream_of
from tests.store.flow import asked
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.scripts import Verdict
from waymark.store.store import Store

BLOCKS = list(range(1, 41))


async def test_a_publisher_id_that_was_forgotten_is_not_another_publishers(store: Store, redis: Redis) -> None:
    """Both would share one record, one row, and one token."""
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    await redis.hset(keys.GROUPS, "last_publisher", "0")

    other = await stream_of(store, redis, registration("pod-2"))
    assert other.grant.publisher > stream.grant.publisher
    assert await asked(store, BLOCKS) == {"pod-1": 40}
    await store.registry.unregister([registration("pod-2").name])
    assert await asked(store, BLOCKS) == {"pod-1": 40}


async def of_the_same_id(stream: Stream) -> Claim:
    """A claim of pod-2 with the ids of pod-1's: the hash of ids was emptied between the two."""
    other = replace(stream.grant.claim, registration=registration("pod-2"))
    other = replace(other, raw=other.encode())
    await stream.redis.hset(keys.PUBLISHERS, keys.publisher_field(other.registration.name).decode(), other.raw)
    return other


async def test_of_two_registrations_with_one_id_the_later_gets_another(store: Store, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    other = await of_the_same_id(stream)
    assert not await store.claim_writer.begin(other), "it is another's"
    now = await claim_of(store, other.registration)
    assert now.publisher > other.publisher
    assert await store.claim_writer.begin(now)
    assert await store.claim_writer.begin(stream.grant.claim)
    assert await stream.apply(stored(gpu, [41], seq=2)) is Verdict.APPLIED, "nobody has taken its lease"
    assert await asked(store, [*BLOCKS, 41]) == {"pod-1": 41}


async def test_who_is_unregistered_under_the_id_of_another_takes_nothing_from_him(store: Store, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    other = await of_the_same_id(stream)
    assert await store.registry.unregister([other.registration.name]) == [other.registration.name]
    assert await store.directory.claims() == [stream.grant.claim]
    assert await asked(store, BLOCKS) == {"pod-1": 40}


async def test_a_group_that_was_forgotten_is_found_again_by_its_publishers(store: Store, redis: Redis) -> None:
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    await redis.delete(keys.GROUPS)
    assert await store.directory.group(GROUP) is None

    assert not await store.registry.register(registration())
    assert await store.directory.group(GROUP) == GroupEntry(1, 1)
    assert await asked(store, BLOCKS) == {"pod-1": 40}
    assert (await stream_of(store, redis, registration("pod-2"))).grant.publisher == 2


async def test_a_group_id_that_was_forgotten_is_not_another_groups(store: Store, redis: Redis) -> None:
    stream = await stream_of(store, redis)
    await redis.delete(keys.GROUPS)
    other = registration("pod-2", model_name="another")
    await store.registry.register(other)
    assert (await claim_of(store, other)).group_id > stream.grant.group_id

    assert not await store.registry.register(registration())
    assert await store.directory.group(GROUP) == GroupEntry(1, 1)


async def test_a_publisher_of_a_group_that_has_another_id_now_moves_there(store: Store, redis: Redis) -> None:
    stream = await stream_of(store, redis)
    await redis.delete(keys.GROUPS)
    await redis.hset(keys.GROUPS, keys.group_field(GROUP).decode(), "5 1")
    assert await store.registry.register(registration()), "it is begun anew"
    assert (await claim_of(store, registration())).group_id == 5
    assert await hgetall(redis, stream.grant.record) == {}


async def test_a_record_without_a_name_is_of_whoever_has_the_claim(redis: Redis, stream: Stream) -> None:
    """As those that were begun before records had names."""
    await redis.hdel(stream.grant.record, "name")
    assert await stream.store.claim_writer.begin(stream.grant.claim)


async def test_a_registration_that_was_lost_is_put_back_once(store: Store, stream: Stream) -> None:
    claim = stream.grant.claim
    await stream.redis.delete(keys.PUBLISHERS)
    assert await store.claim_writer.put_back(claim)
    assert await store.directory.claims() == [claim]
    assert await store.claim_writer.put_back(claim), "another worker was faster"
    assert await store.directory.claims() == [claim]


async def test_a_record_that_was_begun_again_after_an_unregistration_ends(
    store: Store, stream: Stream, redis: Redis
) -> None:
    claim = stream.grant.claim
    await store.registry.unregister([claim.registration.name])
    await store.claim_writer._begin(claim)
    assert await redis.exists(stream.grant.record)
    assert not await store.claim_writer.put_back(claim)
    assert not await redis.exists(stream.grant.record)
    assert await store.directory.claims() == []


async def test_a_publisher_that_was_unregistered_is_not_put_back(store: Store, stream: Stream) -> None:
    await store.registry.unregister([registration().name])
    assert not await store.claim_writer.put_back(stream.grant.claim)
    assert await store.directory.claims() == []


async def test_a_lost_registration_that_was_made_anew_leaves_no_ghost(store: Store, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    await stream.redis.delete(keys.PUBLISHERS)
    assert await store.registry.register(registration())
    anew = await claim_of(store, registration())
    assert anew.publisher != stream.grant.publisher

    assert await store.claim_writer.put_back(stream.grant.claim)
    assert await store.directory.claims() == [anew]
    assert await asked(store, BLOCKS) == {}
