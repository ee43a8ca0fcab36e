"""A worker that polls reads the registrations that have changed, and otherwise two short replies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from tests.store.factories import Readings, claim_of, registration
from waymark.domain.names import GroupName, Registration
from waymark.domain.targets import Target
from waymark.store import directory, keys
from waymark.store.claims import Claim
from waymark.store.directory import EngineAddresses, FromClaims
from waymark.store.store import Store

POD = registration()


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """All claims are read without a reason only where a test says so."""
    monkeypatch.setattr(directory, "_WHOLE_SECONDS", 86_400.0)


@pytest.fixture
async def readings(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Readings]:
    """Of a worker that has polled once; afterwards, its last poll was right."""
    await store.registry.register(POD)
    readings = Readings(store, monkeypatch)
    assert await store.polled_claims.poll() == await store.directory.claims()
    readings()
    yield readings
    assert await store.polled_claims.poll() == await store.directory.claims()


async def test_a_poll_without_a_change_reads_no_claim(store: Store, readings: Readings) -> None:
    first = await store.polled_claims.registrations()
    for _ in range(100):  # a process may poll with each request
        assert [claim.registration for claim in await store.polled_claims.poll()] == [POD]
    assert readings() == 0
    assert await store.polled_claims.registrations() is first


async def test_every_change_is_seen_by_the_next_poll(store: Store, readings: Readings) -> None:
    other, second = Store(store.client), registration("pod-2")

    async def seen(of: Registration) -> list[Claim]:
        claims = await store.polled_claims.poll()
        assert (readings(), readings.names) == (1, [keys.publisher_field(of.name)])
        await store.polled_claims.poll()
        assert readings() == 0, "once for each change"
        assert claims == await other.directory.claims()
        for each in (POD, second):
            of_instance = [claim.registration for claim in claims if claim.registration.name == each.name]
            kept = [
                registration for registration in of_instance if registration in await other.directory.registrations()
            ]
            assert await store.polled_claims.registrations_of(each.instance_id, each.tenant_id) == kept
        return claims

    await other.registry.register(second)
    assert [claim.registration for claim in await seen(second)] == [POD, second]
    assert await other.registry.set_weight(second.name, 0)
    assert [claim.registration.target.weight for claim in await seen(second)] == [1, 0]
    await other.registry.register(replace(second, target=Target(address="http://10.0.0.1:8000")))
    await seen(second)
    await other.registry.register(replace(POD, endpoint="tcp://10.0.0.9:1"))
    assert [claim.publisher for claim in await seen(POD)] == [2, 3]
    claim = await claim_of(other, POD)
    assert await other.claim_writer.replace(POD.name, claim.raw, replace(claim, is_leaving=True)) is not None
    assert [claim.is_leaving for claim in await seen(POD)] == [False, True]
    await other.claim_writer.finish(await claim_of(other, POD))
    assert [claim.registration.instance_id for claim in await seen(POD)] == ["pod-2"]
    await other.registry.unregister([second.name])
    assert await seen(second) == []


@pytest.mark.parametrize(("most", "count", "names"), [(1000, 9, 9), (5, 9, 0)])
async def test_several_changes_are_seen_by_one_poll(
    store: Store, readings: Readings, monkeypatch: pytest.MonkeyPatch, most: int, count: int, names: int
) -> None:
    """All registrations are read if too many have changed."""
    monkeypatch.setattr(directory, "_CHANGES_MAX", most)
    for number in range(count):
        await Store(store.client).registry.register(registration(f"pod-{number + 2}"))
    assert len(await store.polled_claims.poll()) == 1 + count
    assert (readings(), len(readings.names)) == (1, names)


async def test_polls_at_the_same_time_miss_nothing(
    store: Store, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll that reads all may take longer than others that begin after it."""
    other, dice = Store(store.client), random.Random(5)
    by_field, some = store.directory.by_field, store.directory.some

    async def slowly(reading: Awaitable[dict[bytes, Claim | None]]) -> dict[bytes, Claim | None]:
        claims = await reading
        for _ in range(dice.randrange(200)):
            await asyncio.sleep(0)
        return claims

    monkeypatch.setattr(store.directory, "by_field", lambda: slowly(by_field()))
    monkeypatch.setattr(store.directory, "some", lambda fields: slowly(some(fields)))
    monkeypatch.setattr(directory, "monotonic", lambda: float(dice.random() < 0.2))
    monkeypatch.setattr(directory, "_WHOLE_SECONDS", 1.0)

    async def change() -> None:
        each = registration(f"pod-{dice.randrange(9)}")
        if dice.random() < 0.8:
            await other.registry.register(replace(each, target=Target(weight=dice.random())))
        else:
            await other.registry.unregister([each.name])

    async def several(call: Callable[[], Awaitable[object]]) -> None:
        for _ in range(12):
            await call()

    for _ in range(12):
        polls = [several(store.polled_claims.poll) for _ in range(3)]
        await asyncio.gather(several(change), *polls)
        assert await store.polled_claims.poll() == await other.directory.claims()


async def test_a_poll_that_another_one_set_back_reads_again(
    store: Store, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow reading of all claims ends between the two steps of a poll that reads what has changed."""
    other, claims = Store(store.client), store.polled_claims
    by_field, some, gates = store.directory.by_field, store.directory.some, (asyncio.Event(), asyncio.Event())
    have_read = asyncio.Semaphore(0)

    async def late(reading: Awaitable[dict[bytes, Claim | None]], gate: asyncio.Event) -> dict[bytes, Claim | None]:
        found = await reading
        have_read.release()
        await gate.wait()
        return found

    async def weigh(weight: float, number: int) -> None:
        each = registration(f"pod-{number}")
        await other.registry.register(replace(each, target=Target(weight=weight)))

    await weigh(0.1, 1)
    await weigh(0.1, 2)
    await claims.poll()
    with monkeypatch.context() as patch:
        patch.setattr(store.directory, "by_field", lambda: late(by_field(), gates[0]))
        claims._until = float("-inf")
        slow = asyncio.create_task(claims.poll())
        await have_read.acquire()
        claims._until = float("inf")
        await weigh(0.2, 1)
        await claims.poll()
        await weigh(0.2, 2)
        patch.setattr(store.directory, "some", lambda fields: late(some(fields), gates[1]))
        poll = asyncio.create_task(claims.poll())
        await have_read.acquire()
        for gate, task in zip(gates, (slow, poll), strict=True):
            gate.set()
            await task
    assert await claims.poll() == await other.directory.claims()


async def test_a_claim_that_was_deleted_by_hand_is_missed_at_once(
    store: Store, readings: Readings, redis: Redis
) -> None:
    await redis.hdel(keys.PUBLISHERS, keys.publisher_field(POD.name))
    assert await store.polled_claims.poll() == []


async def test_a_claim_that_was_changed_by_hand_is_seen_after_a_while(
    store: Store, readings: Readings, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(await claim_of(Store(store.client), POD), shards=2)
    await redis.hset(keys.PUBLISHERS, keys.publisher_field(POD.name), changed.encode())
    assert [claim.shards for claim in await store.polled_claims.poll()] == [1]
    with monkeypatch.context() as patch:
        patch.setattr(directory, "monotonic", lambda: float("inf"))
        assert [claim.shards for claim in await store.polled_claims.poll()] == [2]
    assert readings() == 1


async def test_a_value_is_computed_again_when_a_claim_has_changed(
    store: Store, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[list[str]] = []

    def names(claims: Sequence[Claim]) -> list[str]:
        computed.append([claim.registration.instance_id for claim in claims])
        return computed[-1]

    value = FromClaims(store.polled_claims, names)
    assert computed == [[]]
    for _ in range(2):
        assert await value() == ["pod-1"]
    with monkeypatch.context() as patch:  # all claims are read, and none has changed
        patch.setattr(directory, "monotonic", lambda: float("inf"))
        assert await value() == ["pod-1"]
    other = Store(store.client)
    await other.registry.register(registration("pod-2"))
    claim = await claim_of(other, POD)
    assert await other.claim_writer.replace(POD.name, claim.raw, replace(claim, is_leaving=True)) is not None
    assert await value() == ["pod-2"]
    assert len(computed) == 3


async def test_a_redis_that_came_back_empty_is_read_by_each_poll(
    store: Store, readings: Readings, redis: Redis
) -> None:
    await redis.flushall()
    for _ in range(2):
        assert await store.polled_claims.poll() == []
        assert readings() == 1
    await Store(store.client).registry.register(POD)
    assert [claim.registration for claim in await store.polled_claims.poll()] == [POD]


async def test_a_redis_that_lost_its_last_writes_is_read_again(store: Store, readings: Readings, redis: Redis) -> None:
    """As after a failover: the version comes back that was before, and with it the claims of then."""
    before = {key: await redis.dump(key) for key in (keys.PUBLISHERS, keys.PUBLISHERS_CHANGES)}
    await Store(store.client).registry.register(registration("pod-2"))
    assert len(await store.polled_claims.poll()) == 2
    for key, value in before.items():
        assert value is not None
        await redis.restore(key, 0, value, replace=True)
    assert [claim.registration for claim in await store.polled_claims.poll()] == [POD]


async def test_a_reading_that_fails_is_made_up_for(
    store: Store, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Store(store.client).registry.register(registration("pod-2"))

    async def fails(*fields: object) -> dict[bytes, Claim | None]:
        raise ValueError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(store.directory, "some", fails)
        for _ in range(2):
            with pytest.raises(ValueError, match="a defect"):
                await store.polled_claims.poll()
    assert len(await store.polled_claims.poll()) == 2


async def test_addresses_of_engines_are_read_when_a_registration_has_changed(
    store: Store, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_ADDRESSES_SECONDS", 0.0)
    computed, compute = list[int](), directory._addresses_of

    def counted(claims: Sequence[Claim]) -> dict[GroupName, list[str]]:
        computed.append(len(claims))
        return compute(claims)

    monkeypatch.setattr(directory, "_addresses_of", counted)
    addresses = EngineAddresses(store.directory, store.polled_claims)
    for _ in range(100):
        assert not await addresses(POD.group)
    assert readings() == 0
    other = Store(store.client)
    for number in range(2):
        target = Target(address=f"http://10.0.0.1:800{number}")
        await other.registry.register(replace(POD, target=target))
        assert await addresses(POD.group) == [target.address]
    assert readings() == 2
    await other.registry.unregister([POD.name])
    assert not await addresses(POD.group)
    assert computed == [0, 1, 1, 1, 0], "the first one is of no claims"
