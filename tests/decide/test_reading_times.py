"""How old readings are: by the moment at which they were asked for, and by a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.decide.test_snapshot import ALL, HOUR, LOADS, Clock, fleet_of, group_of, keeper_of
from waymark.base.errors import StoreUnavailable
from waymark.decide import fail_open
from waymark.decide.fail_open import OwnReservations
from waymark.decide.group_loads import GroupLoads
from waymark.decide.snapshot import ReadingKind, SnapshotKeeper
from waymark.domain.names import GroupName
from waymark.store.directory import GroupEntry
from waymark.store.reservations import DRIFT, HEALTH, Load, LoadChanges, ReservationPart
from waymark.store.store import Store


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def of_loads(store: Store, seconds: float = HOUR) -> tuple[SnapshotKeeper, GroupName, GroupEntry]:
    """A keeper that has read the loads of a group."""
    keeper = keeper_of(store, seconds)
    group, entry = await group_of(store)
    await keeper.of(entry, await fleet_of(keeper, group), LOADS)
    keeper.used(group, entry)
    return keeper, group, entry


# ---- a reading ----------------------------------------------------------------------------------------


def slow(clock: Clock, read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a reading whose answer takes a while."""

    async def slowly(*given: Any) -> Any:
        clock.now += 0.2
        return await read(*given)

    return slowly


@pytest.mark.parametrize("kind", ReadingKind)
async def test_a_reading_is_as_old_as_the_question_for_it(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: ReadingKind
) -> None:
    """What has changed while its answer was under way may be missing in it."""
    keeper = keeper_of(store)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)
    for reader, name in (
        (store.reservations, "changes"),
        (store.gauges, "read"),
        (store.answer_times, "read"),
    ):
        monkeypatch.setattr(reader, name, slow(clock, getattr(reader, name)))
    await keeper.of(entry, fleet, [kind])
    assert clock.now == 1000.2
    assert keeper._readings[entry.group_id].by_kind[kind].read_at == 1000.0


async def test_a_reading_that_has_failed_is_asked_for_again(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, _, entry = await of_loads(store, 5.0)
    fleet = keeper.fleet_at_hand(GroupName("default", "m")) or await fleet_of(keeper, GroupName("default", "m"))
    clock.now += 5.1
    with monkeypatch.context() as broken:

        async def away(*_: object) -> LoadChanges:
            raise StoreUnavailable("Redis is away")

        broken.setattr(store.reservations, "changes", away)
        with pytest.raises(StoreUnavailable):
            await keeper.of(entry, fleet, LOADS)
    reading = keeper._readings[entry.group_id].by_kind[ReadingKind.LOADS]
    assert (reading.read_at, reading.asked_at) == (1000.0, clock.now)
    await keeper.of(entry, fleet, LOADS)
    assert reading.read_at == clock.now


@pytest.mark.parametrize(
    ("seconds", "answers", "expected"),
    [
        (1.0, [True, False, False], [True, False, False]),
        # As long as they were not all read, all are asked for.
        (1.0, [False, False, True, False], [True, True, True, False]),
        (6.0, [True, False, True, False], [True, False, True, False]),
        # All that come without being asked for are all the same.
        (6.0, [True, True, False], [True, False, False]),
    ],
)
async def test_all_loads_are_asked_for_until_all_were_read(
    store: Store,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    answers: list[bool],
    expected: list[bool],
) -> None:
    keeper, asked, left = keeper_of(store, 0), list[bool](), list(answers)
    group, entry = await group_of(store)
    fleet = await fleet_of(keeper, group)

    async def changes(group_id: int, since: int, put: Sequence[int]) -> LoadChanges:
        asked.append(since < 0)
        return LoadChanges(len(asked), {}, left.pop(0))

    monkeypatch.setattr(store.reservations, "changes", changes)
    for _ in answers:
        await keeper.of(entry, fleet, LOADS)
        clock.now += seconds
    assert asked == expected


# ---- loads for a usual decision -----------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "age", "is_there"), [(5.0, 5.0, True), (5.0, 5.001, False), (0.0, 0.0, False)])
async def test_loads_are_at_hand_while_they_are_young(
    store: Store, clock: Clock, seconds: float, age: float, is_there: bool
) -> None:
    keeper, _, entry = await of_loads(store, seconds)
    clock.now += age
    found = keeper.loads_at_hand(entry.group_id)
    assert (found is not None) is is_there
    reading = keeper._readings[entry.group_id].by_kind[ReadingKind.LOADS]
    assert reading.asked_at == (clock.now if is_there else 1000.0), "so they are read again behind it"


async def test_loads_of_a_group_that_nobody_reads_are_not_at_hand(store: Store, clock: Clock) -> None:
    keeper, group, entry = await of_loads(store)
    fleet = await fleet_of(keeper, group)
    assert keeper.loads_at_hand(entry.group_id + 1) is None
    assert isinstance(keeper.loads_at_hand(entry.group_id), GroupLoads)
    readings = keeper._readings[entry.group_id]
    keeping = readings.keeping
    assert keeping is not None
    readings.stop()
    await asyncio.wait([keeping])
    assert keeper.loads_at_hand(entry.group_id) is None, "they would be older with each decision"
    assert keeper.at_hand(entry, fleet, LOADS) is None
    readings.keeping = None
    assert keeper.loads_at_hand(entry.group_id) is None
    assert keeper.at_hand(entry, fleet, LOADS) is None


@pytest.mark.parametrize(
    ("name", "value"), [(HEALTH, b"0 0 5000 0 0 5000"), (DRIFT, b"250 5000")], ids=["left out", "drift"]
)
async def test_a_mark_needs_more_than_loads_until_its_time_is_over(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: bytes, value: bytes
) -> None:
    keeper, group, entry = await of_loads(store)
    fleet = await fleet_of(keeper, group)
    now_ms = 4999
    monkeypatch.setattr(store.reservations, "now_ms", lambda: now_ms)
    keeper._readings[entry.group_id].loads.apply(LoadChanges(9, {name + b"1": value}))
    found = await keeper.of(entry, fleet, LOADS)
    assert (found.left_out, dict(found.drifts)) == (({1}, {}) if name == HEALTH else (frozenset(), {1: 0.25}))
    assert keeper.loads_at_hand(entry.group_id) is None
    now_ms = 5000
    found = await keeper.of(entry, fleet, LOADS)
    assert (found.left_out, dict(found.drifts)) == (frozenset(), {})
    assert keeper.loads_at_hand(entry.group_id) is not None


async def test_requests_of_all_ranks_of_an_instance_are_told(store: Store, clock: Clock) -> None:
    keeper, group, entry = await of_loads(store)
    fleet = await fleet_of(keeper, group)
    first, second = (member.publisher for member in fleet.members)
    keeper.saw(entry.group_id, first, Load(9, 3, 9))
    assert list(keeper.requests_under_way()) == [("m-0", 3), ("m-1", 0.0)]
    keeper.released(entry.group_id, second, 1, 1, 1)
    assert list(keeper.requests_under_way()) == [("m-0", 3), ("m-1", 0.0)], "a load that nobody knows has no rest"
    keeper.released(entry.group_id, first, 4, 2, 5)
    assert keeper._readings[entry.group_id].loads[first] == Load(4, 2, 5)
    assert keeper.at_hand(entry, fleet, ALL) is None, "the gauges were never read"


# ---- what was decided without Redis -------------------------------------------------------------------

GROUP = GroupName("default", "m")


def requests(own: OwnReservations, group: GroupName = GROUP) -> dict[int, int]:
    return {publisher: load.requests for publisher, load in own.loads(group).items()}


async def test_a_reservation_of_this_process_lasts_to_the_end_of_its_time(clock: Clock) -> None:
    own = OwnReservations()
    made = own.reserve(GROUP, 7, 1, 64, 1_000)
    assert (made.group_id, made.publisher, made.tokens, made.context, made.promise) == (7, 1, 0, 64, "")
    clock.now += 0.999
    assert requests(own) == {1: 1}
    clock.now = 1001.0
    assert requests(own) == {}
    assert own.release([made], ReservationPart.OK, 0) == [made], "it is over"


@pytest.mark.parametrize(("renewed_ms", "expected"), [(1_000, [1, 1, 0]), (150, [1, 0, 0]), (10_000, [1, 1, 1])])
async def test_a_renewed_reservation_lasts_from_now_on(clock: Clock, renewed_ms: int, expected: list[int]) -> None:
    own, found = OwnReservations(), []
    made = own.reserve(GROUP, 7, 1, 64, 1_000)
    clock.now += 0.9
    assert own.release([made], ReservationPart.RENEW, renewed_ms) == []
    for seconds in (0.1, 0.3, 1.0):
        clock.now += seconds
        found.append(requests(own).get(1, 0))
    assert found == expected


@pytest.mark.parametrize("part", ReservationPart)
async def test_every_end_of_a_request_ends_its_reservation(clock: Clock, part: ReservationPart) -> None:
    own = OwnReservations()
    first, second, other = (own.reserve(GROUP, 7, publisher, 64, 60_000) for publisher in (1, 1, 2))
    assert len({first.nonce, second.nonce, other.nonce}) == 3
    assert own.release([first, other], part, 60_000) == []
    is_over = part not in (ReservationPart.PREFILL, ReservationPart.RENEW)
    assert requests(own) == ({1: 1} if is_over else {1: 2, 2: 1})
    again = own.release([second, first], part, 60_000)
    assert again == ([first] if is_over else []), "what is over here may be known to Redis"


async def test_groups_have_requests_of_their_own(clock: Clock) -> None:
    own, another = OwnReservations(), GroupName("another", "m")
    one, two = own.reserve(GROUP, 7, 1, 64, 1_000), own.reserve(another, 8, 1, 64, 2_000)
    assert (requests(own), requests(own, another), requests(own, GroupName("t", "n"))) == ({1: 1}, {1: 1}, {})
    clock.now += 1.5
    assert (requests(own), requests(own, another)) == ({}, {1: 1})
    assert own.release([one, two], ReservationPart.OK, 0) == [one]
    assert own._requests == {}, "nothing is left of either"


async def test_the_oldest_reservation_makes_room_and_its_end_ends_no_other(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fail_open, "_RESERVATIONS_MAX", 2)
    own = OwnReservations()
    made = [own.reserve(GROUP, 7, publisher, 64, milliseconds) for publisher, milliseconds in ((1, 500), (1, 9_000))]
    own.reserve(GROUP, 7, 2, 64, 9_000)
    assert requests(own) == {1: 1, 2: 1}
    clock.now += 1.0
    assert requests(own) == {1: 1, 2: 1}, "the one that has made room was over by now"
    assert own.release(made, ReservationPart.OK, 0) == made[:1]


async def test_renewals_take_no_more_room_and_the_last_one_counts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fail_open, "_ENDS_SPARE", 3)
    own = OwnReservations()
    made = own.reserve(GROUP, 7, 1, 64, 1_000)
    for _ in range(50):
        clock.now += 0.5
        own.release([made], ReservationPart.RENEW, 1_000)
        assert len(own._ends) <= 2 + 3 + 1
    clock.now = 1025.999
    assert requests(own) == {1: 1}
    clock.now = 1026.0
    assert requests(own) == {}
    assert own._ends == []
