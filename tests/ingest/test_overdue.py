"""The workers end overdue reservations of all groups, also of those that hold more than one call ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import client_of, registration, stream_of
from tests.store.histories import Fleet
from waymark.base.metrics import Metrics
from waymark.ingest import overdue
from waymark.ingest.overdue import Overdue
from waymark.ingest.shares import Shares
from waymark.store import keys, reservations
from waymark.store.reservations import OVERDUE_MAX
from waymark.store.store import Store


@pytest.fixture
async def store(redis: Redis) -> AsyncIterator[Store]:
    client = client_of(redis)
    yield Store(client)
    if client.reads is not None:
        client.reads.close()


@asynccontextmanager
async def ending(store: Store, groups: Sequence[int]) -> AsyncIterator[Metrics]:
    metrics = Metrics()
    ender = Overdue(store, metrics)
    ender.see(groups)
    task = asyncio.create_task(ender.keep_ending())
    yield metrics
    assert not task.done()
    task.cancel()


async def fleets_of(store: Store, redis: Redis, models: Sequence[str]) -> list[Fleet]:
    fleets = []
    for model in models:
        claim = (await stream_of(store, redis, registration(f"{model}-pod", model_name=model))).grant.claim
        fleets.append(Fleet(redis, claim.group_id, [claim.publisher]))
    return fleets


async def is_over(fleet: Fleet) -> None:
    """One reservation whose time has come."""
    member = (await fleet.taken(100, milliseconds=3_600_000)).member
    await fleet.redis.zadd(keys.reservations(fleet.group_id), {member: 1})


async def is_given_back(fleet: Fleet) -> None:
    async def is_so() -> bool:
        return [load[:3] for load in await fleet.loads()] == [(0, 0, 0)]

    await wait_until(is_so, "the load is given back")


@pytest.mark.parametrize("damaged", [keys.reservations, keys.load], ids=["reservations", "load"])
async def test_a_group_that_is_damaged_or_has_very_many_delays_no_other(
    store: Store, redis: Redis, damaged: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue, "_AT_ONCE", 1)
    bad, many, few = await fleets_of(store, redis, ["bad", "many", "few"])
    for fleet, count in ((bad, 1), (many, 2 * OVERDUE_MAX + 1), (few, 1)):
        members = [(await fleet.taken(100)).member for _ in range(count)]
        assert (await fleet.taken(7, milliseconds=3_600_000)).tokens == 7
        await redis.zadd(keys.reservations(fleet.group_id), dict.fromkeys(members, 1))
    await redis.set(damaged(bad.group_id), "of another type")

    async def is_left() -> bool:
        return [load[:2] for fleet in (many, few) for load in await fleet.loads()] == [(7, 1), (7, 1)]

    async with ending(store, [each.group_id for each in (bad, many, few)]) as metrics:
        await wait_until(is_left, "only what is not over is left")
    assert [await redis.zcard(keys.reservations(each.group_id)) for each in (many, few)] == [1, 1]
    assert metrics.registry.get_sample_value("waymark_reservations_expired_total") == 2 * OVERDUE_MAX + 2


async def test_groups_without_reservations_get_no_call(
    store: Store, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, *idle = await fleets_of(store, redis, ["busy", "idle-1", "idle-2"])
    await is_over(busy)
    called: list[int] = []
    end_overdue = store.reservations.end_overdue

    async def counted(group_id: int) -> int:
        called.append(group_id)
        return await end_overdue(group_id)

    monkeypatch.setattr(store.reservations, "end_overdue", counted)
    async with ending(store, [each.group_id for each in (*idle, busy)]):
        await is_given_back(busy)
        await is_over(busy)
        await is_given_back(busy)
    assert set(called) == {busy.group_id}


async def test_a_defect_in_one_group_delays_no_other(
    store: Store, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with many overdue reservations gets further calls in the same round, also beside one with a defect."""
    for module in (overdue, reservations):
        monkeypatch.setattr(module, "OVERDUE_MAX", 1)
    monkeypatch.setattr(overdue, "_SECONDS", 3600.0)
    bad, good = await fleets_of(store, redis, ["bad", "good"])
    for fleet in (bad, good):
        members = [(await fleet.taken(100, milliseconds=3_600_000)).member for _ in range(3)]
        await redis.zadd(keys.reservations(fleet.group_id), dict.fromkeys(members, 1))
    end_overdue = store.reservations.end_overdue

    async def fails_for_one(group_id: int) -> int:
        if group_id == bad.group_id:
            raise ValueError("a defect")
        return await end_overdue(group_id)

    monkeypatch.setattr(store.reservations, "end_overdue", fails_for_one)
    async with ending(store, [bad.group_id, good.group_id]):
        await is_given_back(good)


def test_each_group_has_one_worker_and_a_worker_that_comes_takes_only_its_own() -> None:
    groups = range(1, 301)

    def shared(names: Sequence[str]) -> list[set[int]]:
        found = []
        for name in names:
            shares = Shares(name)
            shares.of([], dict.fromkeys(names))
            found.append(set(shares.groups_of(groups)))
        return found

    names = ["worker-1", "worker-2", "worker-3"]
    before, after = shared(names[:2]), shared(names)
    assert sorted(group for share in after for group in share) == list(groups)
    assert all(len(share) > 50 for share in after)
    assert all(new <= old for old, new in zip(before, after, strict=False))
    assert set(Shares("worker-1").groups_of(groups)) == set(groups), "before the first poll"
