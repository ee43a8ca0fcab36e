"""Sweeping by a worker: the pace of the setting on average, and slower where Redis takes long for a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.conftest import wait_until
from tests.store.factories import client_of, registration, stream_of
from tests.store.histories import Fleet
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.names import GroupName
from waymark.ingest import sweeping
from waymark.ingest.polling import Shares
from waymark.ingest.sweeping import LostGroups, Overdue, UnclaimedWatch
from waymark.store import keys, reservations
from waymark.store.directory import GroupEntry
from waymark.store.redis.client import RedisClient
from waymark.store.reservations import OVERDUE_MAX
from waymark.store.store import Store

PACE = 20_000
STEP_BLOCKS = 100
IDLE_SECONDS = 7.0
GROUP = GroupEntry(1, 1)


@dataclass
class Scene:
    """One dead holder: each step takes so many seconds of the clock, and each pause lasts ``late`` too long."""

    took: Iterable[float]
    late: float = 0.0
    now: float = 100.0
    pauses: list[float] = field(default_factory=list)
    is_swept: bool = False
    ended: float = 0.0

    async def left(self, entry: GroupEntry) -> int:
        return int(not self.is_swept)

    async def pick(self, entry: GroupEntry) -> int | None:
        return None if self.is_swept else 1

    async def steps(self, entry: GroupEntry, holder: int) -> AsyncIterator[int]:
        for seconds in self.took:
            self.now += seconds
            yield STEP_BLOCKS
        self.is_swept, self.ended = True, self.now

    async def sleep(self, seconds: float) -> None:
        if seconds == IDLE_SECONDS:
            raise asyncio.CancelledError
        self.now += seconds + self.late
        self.pauses.append(seconds)

    async def groups(self) -> dict[str, GroupEntry]:
        return {"llama": GROUP}


async def played(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> float:
    """How many seconds of the clock the sweep takes."""
    monkeypatch.setattr(sweeping, "asyncio", SimpleNamespace(sleep=scene.sleep))
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(perf_counter=lambda: scene.now))
    store = cast(Store, SimpleNamespace(sweeper=scene, directory=SimpleNamespace(groups=scene.groups)))
    began = scene.now
    with pytest.raises(asyncio.CancelledError):
        await sweeping.keep_sweeping(store, Metrics(), blocks_per_second=PACE, pause_seconds=IDLE_SECONDS)
    return scene.ended - began


async def test_a_defect_in_one_group_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group comes first in every round, so those after it would never be swept."""
    scene = Scene([0.0])
    pick = scene.pick

    async def fails_for_the_first(entry: GroupEntry) -> int | None:
        if entry is not GROUP:
            raise ValueError("a defect")
        return await pick(entry)

    async def groups() -> dict[str, GroupEntry]:
        return {"damaged": GroupEntry(9, 1), "llama": GROUP}

    monkeypatch.setattr(scene, "pick", fails_for_the_first)
    monkeypatch.setattr(scene, "groups", groups)
    await played(monkeypatch, scene)
    assert scene.is_swept


@pytest.mark.parametrize(
    ("took", "late"),
    [
        pytest.param([0.0], 0.0, id="at no cost"),
        pytest.param([0.002], 0.0, id="steps that take their time"),
        pytest.param([0.001], 0.002, id="pauses that last too long"),
        pytest.param([0.0005, 0.0005, 0.0005, 0.008], 0.001, id="now and then a slow step"),
    ],
)
async def test_the_pace_is_kept_on_average(monkeypatch: pytest.MonkeyPatch, took: list[float], late: float) -> None:
    blocks = 200_000
    scene = Scene(took * (blocks // STEP_BLOCKS // len(took)), late)
    step = STEP_BLOCKS / PACE
    assert await played(monkeypatch, scene) == pytest.approx(blocks / PACE, abs=4 * step)
    assert len(scene.pauses) == blocks // STEP_BLOCKS


async def test_where_redis_is_slow_it_has_half_of_the_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(repeat(0.03, 50))
    await played(monkeypatch, scene)
    assert scene.pauses == pytest.approx([0.03] * 50)


async def test_every_step_is_followed_by_a_pause_as_long_as_redis_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a sweep makes up for a step that took very long."""
    scene = Scene([0.002, 5.0, *[0.002] * 400])
    await played(monkeypatch, scene)
    assert min(scene.pauses) >= 0.002 - 1e-9


async def test_a_standstill_is_made_up_for_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 2000
    scene = Scene([*[0.0] * 10, 30.0, *[0.0] * steps])
    assert await played(monkeypatch, scene) == pytest.approx(30.0 + (steps * STEP_BLOCKS / PACE - 1.0), abs=0.1)


async def test_groups_are_valued_if_somebody_asks_and_one_that_fails_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = {name: GroupEntry(number, 1) for number, name in enumerate(("nobody", "damaged", "llama"), 1)}
    walks: list[int] = []
    pauses: list[float] = []

    async def walk(entry: GroupEntry, *, lease_seconds: float) -> AsyncIterator[int]:
        walks.append(entry.group_id)
        if entry.group_id == 2:
            raise ValueError("a defect")
        for blocks in (STEP_BLOCKS, PACE):
            yield blocks

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    async def read() -> set[int]:
        if not pauses:
            raise StoreUnavailable("redis is away")
        return {2, 3}

    async def all_groups() -> dict[str, GroupEntry]:
        return groups

    valuations = SimpleNamespace(walk=walk, asked=SimpleNamespace(read=read))
    store = cast(Store, SimpleNamespace(valuations=valuations, directory=SimpleNamespace(groups=all_groups)))
    monkeypatch.setattr(sweeping, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    with pytest.raises(asyncio.CancelledError):
        await sweeping.keep_valuing(store, blocks_per_second=PACE, pause_seconds=IDLE_SECONDS)
    assert walks == [2, 3]
    assert pauses == pytest.approx([IDLE_SECONDS, STEP_BLOCKS / PACE, 1.0 + STEP_BLOCKS / PACE, IDLE_SECONDS])


async def test_a_damaged_table_does_not_delay_the_next_group(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    stream = await stream_of(store, redis, registration("pod-1"))
    other = await stream_of(store, redis, registration("pod-2", model_name="another"))
    share = [GroupEntry(each.grant.group_id, 1) for each in (stream, other)]
    await redis.delete(keys.PUBLISHERS, keys.holders(stream.grant.group_id))
    await redis.set(keys.holders(stream.grant.group_id), "no hash")
    metrics = Metrics()
    watch = UnclaimedWatch(store, metrics, 0.0)
    for _ in 2 * share:  # it is found, and ends the next time
        await watch.check_next(share, [])
    assert await store.unclaimed.publishers(other.grant.group_id) == set()
    assert metrics.registry.get_sample_value("waymark_publishers_unclaimed_total") == 1


@pytest.fixture
def away(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Groups whose primary does not answer."""
    groups: set[int] = set()
    execute: Callable[..., Awaitable[Any]] = redis.execute_command

    async def reached(*command: Any) -> Any:
        if any(f"wm:{{{group_id}}}" in str(word) for word in command for group_id in groups):
            raise RedisConnectionError("its primary is away")
        return await execute(*command)

    monkeypatch.setattr(redis, "execute_command", reached)
    return groups


async def test_a_group_that_is_away_delays_the_sweep_of_no_other(redis: Redis, away: set[int]) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    streams = [await stream_of(store, redis, registration(f"{name}-pod", model_name=name)) for name in "ab"]
    for stream in streams:
        await stream.begin("0 GPU")
        await stream.end()
    away.add(streams[0].grant.group_id)
    sweeping_all = asyncio.create_task(
        sweeping.keep_sweeping(store, Metrics(), blocks_per_second=PACE, pause_seconds=0.01)
    )

    async def is_swept() -> bool:
        return await store.sweeper.left(streams[1].entry) == 0

    await wait_until(is_swept, "the other group is swept")
    sweeping_all.cancel()
    await asyncio.wait([sweeping_all])
    await UnclaimedWatch(store, Metrics(), 0.0).check_next([streams[0].entry], [])
    away.clear()
    assert await store.sweeper.left(streams[0].entry) == 1


async def test_a_fence_that_cannot_be_read_does_not_end_the_search(redis: Redis) -> None:
    """Of four polls, each one searches another shard."""
    store = Store(RedisClient(redis, "redis://test"), shards=4)
    stream = await stream_of(store, redis)
    await redis.set(keys.fence(1, 1), "some")  # of another type
    await redis.hset(keys.fence(1, 3), "blocks:77", str(stream.grant.publisher))
    claims, watch = await store.directory.claims(), UnclaimedWatch(store, Metrics(), 3600.0)
    for _ in range(4):
        await watch.check_next([stream.entry], claims)
    assert await redis.smembers(keys.dead(1)) == {b"77"}
    await redis.delete(keys.fence(1, 1))


async def test_a_publisher_without_a_claim_has_some_time(redis: Redis) -> None:
    """A worker that knows its claim may put it back."""
    store = Store(RedisClient(redis, "redis://test"))
    stream = await stream_of(store, redis)
    await redis.delete(keys.PUBLISHERS)
    share = [GroupEntry(stream.grant.group_id, 1)]
    watch = UnclaimedWatch(store, Metrics(), 3600.0)
    for _ in range(3):
        await watch.check_next(share, [])
    assert await store.unclaimed.publishers(stream.grant.group_id) == {stream.grant.publisher}


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
    monkeypatch.setattr(sweeping, "_AT_ONCE", 1)
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


async def test_a_defect_in_one_group_ends_reservations_of_others(
    store: Store, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with many overdue reservations gets further calls in the same round, also beside one with a defect."""
    for module in (sweeping, reservations):
        monkeypatch.setattr(module, "OVERDUE_MAX", 1)
    monkeypatch.setattr(sweeping, "_SECONDS", 3600.0)
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


async def test_a_table_that_is_whole_is_read_again_after_a_change(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ten thousand engines it has as many fields, and every worker looks at it each second."""
    store = Store(RedisClient(redis, "redis://test"))
    stream = await stream_of(store, redis)
    claims, share = await store.directory.claims(), [GroupEntry(stream.grant.group_id, 1)]
    readings, read = 0, store.unclaimed.publishers

    async def counted(group_id: int) -> set[int]:
        nonlocal readings
        readings += 1
        return await read(group_id)

    monkeypatch.setattr(store.unclaimed, "publishers", counted)
    metrics = Metrics()
    watch = UnclaimedWatch(store, metrics, 0.0)
    for _ in range(5):
        await watch.check_next(share, claims)
    assert readings == 1
    await stream.begin("0 GPU")  # the table has another version
    for _ in range(5):
        await watch.check_next(share, claims)
    assert readings == 2
    await redis.delete(keys.PUBLISHERS)
    for _ in range(3):  # another list of claims, which lacks it
        await watch.check_next(share, [])
    assert readings > 3
    assert metrics.registry.get_sample_value("waymark_publishers_unclaimed_total") == 1


async def test_a_publisher_of_a_group_that_comes_back_has_its_time_again(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    streams = [await stream_of(store, redis, registration(f"{name}-pod", model_name=name)) for name in "ab"]
    both = [GroupEntry(stream.grant.group_id, 1) for stream in streams]
    claims = [claim for claim in await store.directory.claims() if claim.group_id == both[1].group_id]
    watch = UnclaimedWatch(store, Metrics(), 3600.0)
    await watch.check_next(both, claims)
    await watch.check_next(both, claims)
    assert len(watch._since) == 1
    for _ in range(2):
        await watch.check_next(both[1:], claims)
    assert not watch._since


class Groups:
    """Groups of which Redis has the tables. Those of ``away`` are on a primary that does not answer."""

    def __init__(self, *away: int) -> None:
        self.away = set(away)
        self.kept: list[int] = []

    async def groups_by_table(self, entries: Iterable[GroupEntry]) -> dict[GroupName, GroupEntry]:
        if self.away:
            raise StoreUnavailable("a primary does not answer")
        return {GroupName("default", "b"): GroupEntry(2, 1)}

    async def keep_group(self, group: GroupName, entry: GroupEntry) -> None:
        if entry.group_id in self.away:
            raise StoreUnavailable("its primary does not answer")
        self.kept.append(entry.group_id)


def groups_of(**ids: int) -> dict[GroupName, GroupEntry]:
    return {GroupName("default", model): GroupEntry(group_id, 1) for model, group_id in ids.items()}


async def test_a_lost_group_that_cannot_be_reached_is_kept_later() -> None:
    redis = Groups(2)
    lost = LostGroups(cast("Store", SimpleNamespace(claim_writer=redis)))
    await lost.keep(groups_of(a=1, b=2, c=3))
    for _ in range(2):
        await lost.keep(groups_of(c=3))
    assert redis.kept == [1]
    redis.away.clear()
    for _ in range(2):
        await lost.keep(groups_of(a=1, c=3))
    assert redis.kept == [1, 2]


async def test_a_new_worker_keeps_the_groups_that_have_a_table() -> None:
    redis = Groups()
    lost = LostGroups(cast("Store", SimpleNamespace(claim_writer=redis)))
    for _ in range(2):
        await lost.keep(groups_of(a=1))
    assert redis.kept == [2]


async def test_tables_that_cannot_be_read_at_the_start_are_read_later() -> None:
    redis = Groups(2)
    lost = LostGroups(cast("Store", SimpleNamespace(claim_writer=redis)))
    for _ in range(2):
        await lost.keep(groups_of(a=1))
    assert not redis.kept
    redis.away.clear()
    await lost.keep(groups_of(a=1))
    assert redis.kept == [2]
