"""The keeper of snapshots: one rule of age, and the last snapshot for the time without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.store.factories import registration
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide import snapshot as module
from waymark.decide.fleet import Fleet
from waymark.decide.snapshot import ReadingKind, SnapshotKeeper
from waymark.domain.names import GroupName
from waymark.store.directory import GroupEntry
from waymark.store.reservations import Load, LoadChanges, Offer, ReservationPart, ReservationTerms
from waymark.store.store import Store

HOUR = 3600.0
LOADS = (ReadingKind.LOADS,)
ALL = tuple(ReadingKind)
TERMS = ReservationTerms(context=30, milliseconds=3_600_000)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store.open("memory://")
    yield store
    await store.close()


async def group_of(store: Store, model: str = "m", targets: int = 2) -> tuple[GroupName, GroupEntry]:
    for number in range(targets):
        await store.registry.register(registration(f"{model}-{number}", model_name=model))
    group = GroupName("default", model)
    entry = await store.directory.group(group)
    assert entry is not None
    return group, entry


async def fleet_of(keeper: SnapshotKeeper, group: GroupName) -> Fleet:
    fleet = await keeper.newest_fleet(group)
    assert fleet is not None
    return fleet


def keeper_of(store: Store, seconds: float = HOUR) -> SnapshotKeeper:
    return SnapshotKeeper(store, seconds, HOUR, Metrics())


async def test_a_snapshot_is_at_hand_while_all_that_is_needed_is_young(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SIDE_SECONDS", HOUR)
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    assert keeper.at_hand(entry, fleet, LOADS) is None
    read = await keeper.of(entry, fleet, LOADS)
    assert keeper.at_hand(entry, fleet, LOADS) == read
    assert keeper.at_hand(entry, fleet, ALL) is None, "the gauges were never read"
    await keeper.of(entry, fleet, ALL)
    assert keeper.at_hand(entry, fleet, ALL) is not None


async def test_loads_of_age_zero_are_read_for_each_decision(store: Store) -> None:
    keeper = keeper_of(store, 0)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    publisher = fleet.members[0].publisher
    for requests in (1, 2, 3):
        await store.reservations.reserve(entry.group_id, [Offer(publisher, 10)], TERMS)
        assert keeper.at_hand(entry, fleet, LOADS) is None
        snapshot = await keeper.of(entry, fleet, LOADS)
        assert snapshot.loads[publisher][:3] == (10 * requests, requests, 30 * requests)


async def test_the_loads_follow_what_this_process_decides_and_ends(store: Store) -> None:
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    publisher = fleet.members[1].publisher
    snapshot = await keeper.of(entry, fleet, LOADS)
    assert publisher not in snapshot.loads
    keeper.saw(entry.group_id, publisher, Load(500, 2, 600))
    assert snapshot.loads[publisher] == Load(500, 2, 600)
    assert dict(keeper.requests_under_way()) == {"m-0": 0.0, "m-1": 0.0}, "no decision has used the group"
    keeper.used(group, entry)
    assert dict(keeper.requests_under_way()) == {"m-0": 0.0, "m-1": 2}
    keeper.released(entry.group_id, publisher, 100, 1, 200)
    assert snapshot.loads[publisher] == Load(100, 1, 200)
    keeper.released(entry.group_id, 999, 1, 1, 1)
    assert 999 not in snapshot.loads


async def test_who_cannot_be_reached_is_said_by_the_snapshot(store: Store) -> None:
    metrics = Metrics()
    keeper = SnapshotKeeper(store, HOUR, HOUR, metrics)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    publisher = fleet.members[0].publisher
    for _ in range(3):
        found = await store.reservations.reserve(entry.group_id, [Offer(publisher, 10)], TERMS)
        assert found.reservation is not None
        await store.reservations.release([found.reservation], ReservationPart.FAILED)
    assert metrics.unreachable_targets.value == 0
    assert (await keeper.of(entry, fleet, LOADS)).left_out == {publisher}
    assert metrics.unreachable_targets.value == 1
    keeper.used(group, entry)
    last = keeper.last(group)
    assert last is not None
    assert last.left_out == {publisher}


async def test_the_targets_are_made_once_for_each_table(store: Store) -> None:
    keeper = keeper_of(store)
    group, _ = await group_of(store)
    fleet = await fleet_of(keeper, group)
    ring = fleet.ring(150)
    assert keeper.fleet(group, fleet.table) is fleet
    again = await fleet_of(keeper, group)
    assert again is not fleet
    assert again.ring(150) is ring, "it depends on the names alone"
    await group_of(store, targets=3)
    more = await fleet_of(keeper, group)
    assert len(more.members) == 3
    assert more.ring(150) is not ring


async def test_after_redis_came_back_empty_only_the_targets_are_known(store: Store) -> None:
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    assert keeper.last(group) is None
    assert not keeper.was_there(group)
    fleet = await fleet_of(keeper, group)
    await keeper.of(entry, fleet, LOADS)
    assert keeper.last(group) is None, "no decision has found it"
    keeper.used(group, entry)
    keeper.saw(entry.group_id, fleet.members[0].publisher, Load(1, 1, 1))
    store.incarnation.forget()
    assert keeper.at_hand(entry, fleet, LOADS) is None
    assert keeper.was_there(group)
    last = keeper.last(group)
    assert last is not None
    assert (last.fleet, dict(last.loads), last.left_out) == (fleet, {}, frozenset())
    assert set(dict(keeper.requests_under_way()).values()) == {0.0}


async def test_gauges_that_cannot_be_read_do_not_refuse_a_decision(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> object:
        raise StoreUnavailable("Redis is away")

    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    monkeypatch.setattr(store.gauges, "read", away)
    snapshot = await keeper.of(entry, fleet, ALL)
    assert (dict(snapshot.gauges), dict(snapshot.answer_times)) == ({}, {})
    monkeypatch.setattr(store.reservations, "changes", away)
    with pytest.raises(StoreUnavailable):
        await keeper_of(store).of(entry, fleet, LOADS)


async def test_groups_are_bounded_and_the_one_not_used_for_longest_goes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GROUPS_MAX", 2)
    keeper = keeper_of(store)
    groups = []
    for model in ("a", "b", "c"):
        group, entry = await group_of(store, model, 1)
        fleet = await fleet_of(keeper, group)
        await keeper.of(entry, fleet, LOADS)
        keeper.used(group, entry)
        groups.append((group, entry, fleet))
    assert [keeper.last(group) is not None for group, _, _ in groups] == [False, True, True]
    assert [keeper.at_hand(entry, fleet, LOADS) is not None for _, entry, fleet in groups] == [False, True, True]


async def test_a_group_is_forgotten_after_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    await fleet_of(keeper, group)
    keeper.used(group, entry)
    assert keeper.was_there(group)
    monkeypatch.setattr(module, "_FORGOTTEN_SECONDS", 0.0)
    assert not keeper.was_there(group)


@pytest.mark.parametrize(("whole_seconds", "expected"), [(HOUR, [True, False, True]), (0.0, [True, True, True])])
async def test_all_loads_are_read_after_a_while_and_after_a_failure(
    store: Store, monkeypatch: pytest.MonkeyPatch, whole_seconds: float, expected: list[bool]
) -> None:
    monkeypatch.setattr(module, "_WHOLE_SECONDS", whole_seconds)
    monkeypatch.setattr(module, "_OVERDUE_SECONDS", HOUR)  # no reading of its own meanwhile
    keeper, read, asked = keeper_of(store, 0), store.reservations.changes, list[bool]()
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)

    async def changes(group_id: int, since: int, put: Sequence[int]) -> LoadChanges:
        asked.append(since < 0)
        return await read(group_id, since, put)

    async def away(*_: object) -> None:
        raise StoreUnavailable("Redis is away")

    for _ in range(2):
        monkeypatch.setattr(store.reservations, "changes", changes)
        await keeper.of(entry, fleet, LOADS)
    monkeypatch.setattr(store.reservations, "changes", away)
    with pytest.raises(StoreUnavailable):
        await keeper.of(entry, fleet, LOADS)
    monkeypatch.setattr(store.reservations, "changes", changes)
    await keeper.of(entry, fleet, LOADS)
    assert asked == expected


# ---- read again in the background ---------------------------------------------------------------------


class Read:
    """What is read of the loads of a group; Redis can be away."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.is_away = False
        read = store.reservations.changes

        async def changes(group_id: int, since: int, put: Sequence[int]) -> LoadChanges:
            self.count += 1
            if self.is_away:
                raise StoreUnavailable("Redis is away")
            return await read(group_id, since, put)

        monkeypatch.setattr(store.reservations, "changes", changes)


async def test_loads_are_read_again_before_a_decision_would_wait_for_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = keeper_of(store, 0.01)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    read = Read(store, monkeypatch)
    await keeper.of(entry, fleet, LOADS)
    keeper.used(group, entry)
    await wait_until(lambda: read.count >= 4, "they are read again and again")


async def test_a_group_without_requests_is_not_read_any_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ASKED_SECONDS", 0.0)
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    await keeper.of(entry, fleet, LOADS)
    readings = keeper._readings[entry.group_id]

    def is_over() -> bool:
        return readings.keeping is not None and readings.keeping.done()

    await wait_until(is_over, "nobody asks")
    assert keeper.at_hand(entry, fleet, LOADS) is None, "who asks again has it read again"
    await keeper.of(entry, fleet, LOADS)
    assert readings.keeping is not None


async def test_a_group_with_requests_under_way_is_read_until_they_have_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ASKED_SECONDS", 0.0)
    monkeypatch.setattr(module, "_OVERDUE_SECONDS", 0.005)
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    publisher = fleet.members[0].publisher
    found = await store.reservations.reserve(entry.group_id, [Offer(publisher, 10)], TERMS)
    assert found.reservation is not None
    read = Read(store, monkeypatch)
    await keeper.of(entry, fleet, LOADS)
    keeper.used(group, entry)
    await wait_until(lambda: read.count >= 3, "overdue reservations are looked for")
    await store.reservations.release([found.reservation], ReservationPart.OK)
    readings = keeper._readings[entry.group_id]

    def is_over() -> bool:
        return readings.keeping is not None and readings.keeping.done()

    await wait_until(is_over, "the last request has ended")


async def test_a_redis_that_is_away_is_asked_again_in_the_background(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OVERDUE_SECONDS", 0.005)
    keeper = keeper_of(store, 0.01)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    read = Read(store, monkeypatch)
    await keeper.of(entry, fleet, LOADS)
    keeper.used(group, entry)
    read.is_away = True
    before = read.count
    await wait_until(lambda: read.count > before + 2, "it is asked again")
    read.is_away = False
    publisher = fleet.members[0].publisher
    await store.reservations.reserve(entry.group_id, [Offer(publisher, 10)], TERMS)
    loads = keeper._readings[entry.group_id].loads
    await wait_until(lambda: loads.get(publisher, Load()).requests == 1, "what has changed meanwhile is known")


async def test_decisions_of_one_moment_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    read = Read(store, monkeypatch)
    found = await asyncio.gather(*(keeper.of(entry, fleet, LOADS) for _ in range(20)))
    assert read.count == 1
    assert len({id(each.loads) for each in found}) == 1


async def test_a_decision_that_goes_away_does_not_end_the_reading_of_another(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    first, second = (asyncio.ensure_future(keeper.of(entry, fleet, LOADS)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).fleet is fleet
    assert first.cancelled()


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ((), ({}, {}, {})),
        (LOADS, ({1: "load"}, {}, {})),
        ((ReadingKind.GAUGES,), ({}, {1: "gauges"}, {})),
        ((ReadingKind.ANSWER_TIMES,), ({}, {}, {1: "times"})),
    ],
)
async def test_a_snapshot_has_only_what_was_asked_for(
    store: Store, needs: tuple[ReadingKind, ...], expected: Any
) -> None:
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    await keeper.of(entry, fleet, ALL)
    readings = keeper._readings[entry.group_id]
    readings.gauges, readings.answer_times = {1: "gauges"}, {1: "times"}  # type: ignore[dict-item]
    readings.loads.put(1, "load")  # type: ignore[arg-type]
    found = keeper._snapshot(entry, fleet, readings, needs)
    shown: Any = dict(found.loads), dict(found.gauges), dict(found.answer_times)
    assert shown == expected
    assert (found.left_out, dict(found.drifts)) == (frozenset(), {})


async def test_a_load_of_a_group_that_nobody_reads_is_not_kept(store: Store) -> None:
    keeper = keeper_of(store)
    keeper.saw(99, 1, Load(1, 1, 1))
    keeper.released(99, 1, 0, 0, 0)
    assert keeper._readings == {}
    assert list(keeper.requests_under_way()) == []
