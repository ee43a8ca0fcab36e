"""The keeper of snapshots: one rule of age, and the last snapshot for the time without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from waymark.domain.targets import Target
from waymark.store.directory import GroupEntry
from waymark.store.reservations import OVERDUE_MAX, Load, LoadChanges, Offer, ReservationPart, ReservationTerms
from waymark.store.store import Store

HOUR = 3600.0
LOADS = (ReadingKind.LOADS,)
ALL = tuple(ReadingKind)
TERMS = ReservationTerms(context=30, milliseconds=3_600_000)


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


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
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(*_: object) -> object:
        raise StoreUnavailable("Redis is away")

    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    monkeypatch.setattr(store.gauges, "read", away)
    with caplog.at_level("DEBUG"):
        snapshot = await keeper.of(entry, fleet, ALL)
    told = [record.__dict__["fields"] for record in caplog.records if record.message == "values of targets not read"]
    assert told == [{"error": "Redis is away"}]
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
    before = readings.keeping
    assert keeper.at_hand(entry, fleet, LOADS) is None, "who asks again has it read again"
    await keeper.of(entry, fleet, LOADS)
    assert readings.keeping is not before


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


async def test_a_group_that_is_forgotten_is_not_read_any_more(store: Store) -> None:
    keeper = keeper_of(store, 0.005)
    group, entry = await group_of(store)
    await keeper.of(entry, await fleet_of(keeper, group), LOADS)
    keeping = keeper._readings[entry.group_id].keeping
    assert keeping is not None
    assert not keeping.done()
    del keeper._last[group]
    await wait_until(keeping.done, "nobody knows its targets")
    assert keeping.exception() is None


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


# ---- by a clock of the test's own ---------------------------------------------------------------------


async def nothing_behind(*_: object) -> None:
    """Stands for the reading in the background, which is due as soon as the clock is moved."""
    await asyncio.Event().wait()


class Clock:
    """The time of the loop and of the process, which stands still unless it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(SnapshotKeeper, "_keep", nothing_behind)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "loads_seconds", "age", "is_at_hand"),
    [
        (ReadingKind.LOADS, 5.0, 0.0, True),
        (ReadingKind.LOADS, 5.0, 5.0, True),
        (ReadingKind.LOADS, 5.0, 5.001, False),
        (ReadingKind.LOADS, 0.0, 0.0, False),
        (ReadingKind.GAUGES, 5.0, 0.25, True),
        (ReadingKind.GAUGES, 5.0, 0.251, False),
        (ReadingKind.GAUGES, 0.0, 0.25, True),
        (ReadingKind.ANSWER_TIMES, 5.0, 0.25, True),
        (ReadingKind.ANSWER_TIMES, 5.0, 0.251, False),
    ],
)
async def test_a_reading_is_as_old_as_it_may_be(
    store: Store, clock: Clock, kind: ReadingKind, loads_seconds: float, age: float, is_at_hand: bool
) -> None:
    keeper = keeper_of(store, loads_seconds)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    await keeper.of(entry, fleet, [kind])
    clock.now += age
    assert (keeper.at_hand(entry, fleet, [kind]) is not None) is is_at_hand
    reading = keeper._readings[entry.group_id].by_kind[kind]
    assert reading.read_at == 1000.0
    assert reading.asked_at == (clock.now if is_at_hand else 1000.0), "what is at hand is asked for, too"


async def test_only_what_is_needed_and_old_is_read(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, read = keeper_of(store, 5.0), list[str]()
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)

    def noting(name: str, of: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def noted(*arguments: Any) -> Any:
            read.append(name)
            return await of(*arguments)

        return noted

    monkeypatch.setattr(store.reservations, "changes", noting("loads", store.reservations.changes))
    monkeypatch.setattr(store.gauges, "read", noting("gauges", store.gauges.read))
    monkeypatch.setattr(store.answer_times, "read", noting("times", store.answer_times.read))
    await keeper.of(entry, fleet, ())
    assert keeper._readings[entry.group_id].keeping is None, "what nobody needs is not read behind them either"
    assert keeper.at_hand(entry, fleet, ()) is None
    for age, needs, expected in (
        (0.0, (), []),
        (0.0, LOADS, ["loads"]),
        (0.0, LOADS, []),
        (0.0, ALL, ["gauges", "times"]),
        (0.3, LOADS, []),
        (0.0, ALL, ["gauges", "times"]),
        (5.1, (ReadingKind.GAUGES,), ["gauges"]),
        (0.0, ALL, ["loads", "times"]),
    ):
        clock.now += age
        read.clear()
        await keeper.of(entry, fleet, needs)
        assert sorted(read) == sorted(expected), (age, needs)


async def test_gauges_are_read_of_engines_with_metrics_and_times_of_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, asked = keeper_of(store), dict[str, list[int]]()
    group, entry = await group_of(store, targets=1)
    scraped = registration("scraped", model_name="m", target=Target("http://10.0.0.1:8000"))
    await store.registry.register(scraped)
    fleet = await fleet_of(keeper, group)
    for name, reader in (("gauges", store.gauges), ("times", store.answer_times)):

        async def noted(group_id: int, publishers: Sequence[int], name: str = name) -> dict[int, Any]:
            assert group_id == entry.group_id
            asked[name] = list(publishers)
            return {}

        monkeypatch.setattr(reader, "read", noted)
    await keeper.of(entry, fleet, ALL)
    assert len(fleet.scraped) == 1
    assert asked == {"gauges": fleet.scraped, "times": [each.publisher for each in fleet.members]}


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ([0], 0),
        ([3], 3),
        # As many as one call ends may leave others.
        ([OVERDUE_MAX, OVERDUE_MAX, 1], 2 * OVERDUE_MAX + 1),
        ([OVERDUE_MAX, 0], OVERDUE_MAX),
    ],
)
async def test_overdue_reservations_are_ended_to_the_last_one(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, ended: list[int], expected: int
) -> None:
    metrics = Metrics()
    keeper, answers = SnapshotKeeper(store, 0, HOUR, metrics), list(ended)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)

    async def end_overdue(group_id: int) -> int:
        assert group_id == entry.group_id
        return answers.pop(0)

    monkeypatch.setattr(store.reservations, "end_overdue", end_overdue)
    await keeper.of(entry, fleet, LOADS)
    assert (answers, metrics.reservations_expired.value) == ([], expected)
    clock.now += 0.999
    await keeper.of(entry, fleet, LOADS)  # it would fail without an answer
    clock.now += 0.001
    answers.append(2)
    await keeper.of(entry, fleet, LOADS)
    assert (answers, metrics.reservations_expired.value) == ([], expected + 2)


async def test_a_decision_waits_for_the_end_of_a_few_overdue_reservations_only(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, ended = keeper_of(store, 0), [OVERDUE_MAX] * 5 + [3]
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)

    async def end_overdue(_: int) -> int:
        clock.now += 0.06
        return ended.pop(0)

    monkeypatch.setattr(store.reservations, "end_overdue", end_overdue)
    for left in (4, 2, 0, 0):
        await keeper.of(entry, fleet, LOADS)
        assert len(ended) == left


async def test_all_loads_are_read_once_in_ten_seconds(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, asked, read = keeper_of(store, 0), list[int](), store.reservations.changes
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)

    async def changes(group_id: int, since: int, put: Sequence[int]) -> LoadChanges:
        asked.append(since)
        return await read(group_id, since, put)

    monkeypatch.setattr(store.reservations, "changes", changes)
    for seconds in (0.0, 0.0, 9.9, 0.1, 0.0):
        clock.now += seconds
        await keeper.of(entry, fleet, LOADS)
        await store.reservations.reserve(entry.group_id, [Offer(fleet.members[0].publisher, 10)], TERMS)
    assert [since < 0 for since in asked] == [True, False, False, True, False]
    assert asked[1] < asked[2] < asked[4], "what has changed since the last reading"


async def test_the_group_that_was_used_longest_ago_is_forgotten(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GROUPS_MAX", 3)
    keeper, known = keeper_of(store), dict[str, tuple[GroupName, GroupEntry]]()
    for model in ("a", "b", "c"):
        known[model] = group, entry = await group_of(store, model, 1)
        await fleet_of(keeper, group)
        keeper.used(group, entry)
        clock.now += 1
    keeper.used(*known["a"])
    more, _ = await group_of(store, "d", 1)
    await fleet_of(keeper, more)
    assert {model for model, (group, _) in known.items() if keeper.last(group) is not None} == {"a", "c"}
    assert keeper.last(more) is None, "it has targets, and no decision has found it"
    assert more in keeper._last


async def test_readings_that_were_asked_for_longest_ago_are_dropped_and_not_kept_up(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GROUPS_MAX", 2)
    keeper, known = keeper_of(store), list[tuple[GroupEntry, Fleet]]()
    for model in ("a", "b"):
        group, entry = await group_of(store, model, 1)
        known.append((entry, await fleet_of(keeper, group)))
        await keeper.of(*known[-1], LOADS)
        clock.now += 1
    # The first one is asked for again, by another kind of values.
    await keeper.of(*known[0], [ReadingKind.GAUGES])
    keeping = [keeper._readings[entry.group_id].keeping for entry, _ in known]
    group, entry = await group_of(store, "c", 1)
    await keeper.of(entry, await fleet_of(keeper, group), LOADS)
    assert set(keeper._readings) == {known[0][0].group_id, entry.group_id}
    assert keeping[1] is not None
    await asyncio.wait([keeping[1]])
    assert keeping[1].cancelled()
    assert keeping[0] is not None
    assert not keeping[0].done()
    keeper.clear()
    await asyncio.wait([keeping[0]])
    assert keeping[0].cancelled(), "of a Redis that came back empty nothing is read on"
    assert keeper._readings == {}


@pytest.mark.parametrize(("age", "expected"), [(0.0, True), (29.9, True), (30.0, False), (1e6, False)])
async def test_a_group_was_there_for_half_a_minute(store: Store, clock: Clock, age: float, expected: bool) -> None:
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    await fleet_of(keeper, group)
    assert not keeper.was_there(group), "no decision has found it"
    keeper.used(group, entry)
    clock.now += age
    assert keeper.was_there(group) is expected
    keeper.used(GroupName("default", "never"), entry)
    assert not keeper.was_there(GroupName("default", "never"))
    assert keeper.last(GroupName("default", "never")) is None


async def test_loads_without_an_age_are_read_by_each_decision_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading that began before a decision may miss what was reserved meanwhile."""
    for seconds, expected in ((0.0, 3), (HOUR, 1)):
        keeper = keeper_of(store, seconds)
        group, entry = await group_of(store)
        fleet = await fleet_of(keeper, group)
        read, gate = 0, asyncio.Event()
        of = store.reservations.changes

        async def changes(*arguments: Any, of: Any = of, gate: asyncio.Event = gate) -> LoadChanges:
            nonlocal read
            read += 1
            await gate.wait()
            found = await of(*arguments)
            assert isinstance(found, LoadChanges)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(store.reservations, "changes", changes)
            decisions = [asyncio.ensure_future(keeper.of(entry, fleet, LOADS)) for _ in range(3)]
            for _ in range(20):
                await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*decisions)
        assert read == expected


async def test_the_reservations_of_all_groups_are_measured(store: Store) -> None:
    metrics = Metrics()
    keeper = SnapshotKeeper(store, HOUR, HOUR, metrics)
    assert (metrics.reservations.value, metrics.unreachable_targets.value) == (0, 0)
    for number, model in enumerate(("a", "b"), 1):
        group, entry = await group_of(store, model, 2)
        fleet = await fleet_of(keeper, group)
        await keeper.of(entry, fleet, LOADS)
        for member in fleet.members:
            keeper.saw(entry.group_id, member.publisher, Load(10, number, 10))
    assert metrics.reservations.value == 2 * 1 + 2 * 2


async def test_targets_at_hand_are_those_of_the_last_walk(store: Store) -> None:
    keeper = keeper_of(store)
    group, _ = await group_of(store)
    assert keeper.fleet_at_hand(group) is None, "no walk has used a table"
    assert await keeper.newest_fleet(GroupName("default", "never")) is None
    fleet = await fleet_of(keeper, group)
    assert keeper.fleet(group, fleet.table) is fleet
