"""The loads of a group as changes of Redis leave them, with the targets that are left out or deliver too little."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from waymark.decide.group_loads import GroupLoads
from waymark.store.reservations import DRIFT, HEALTH, Load, LoadChanges

BUSY = Load(500, 2, 900)


def value_of(load: Load) -> bytes:
    """As Redis has it."""
    return b" ".join(b"%d" % number for number in load)


def left_out(until_ms: int, by_stream_ms: int = 0) -> bytes:
    return b"0 0 %d 5000 - %d" % (until_ms, by_stream_ms)


class Marks(NamedTuple):
    """What a time shows: who is left out, and who delivers too little."""

    left_out: set[int]
    drifts: dict[int, float]


def marks(loads: GroupLoads, now_ms: int) -> Marks:
    return Marks(set(loads.left_out(now_ms)), dict(loads.drifts(now_ms)))


def changed(loads: GroupLoads, values: dict[bytes, bytes], last: int = 1, *, is_all: bool = False) -> None:
    loads.apply(LoadChanges(last, values, is_all))


@pytest.mark.parametrize("is_all", [True, False])
def test_a_change_is_the_load_from_now_on(is_all: bool) -> None:
    loads = GroupLoads({3: Load(1, 1, 1)})
    changed(loads, {b"3": value_of(BUSY), b"4": value_of(Load(7, 1, 7))}, 12, is_all=is_all)

    assert dict(loads) == {3: BUSY, 4: Load(7, 1, 7)}
    assert (loads.last_change, len(loads), loads.get(9), loads.get(9, BUSY)) == (12, 2, None, BUSY)
    assert not loads.has_marks


def test_a_load_without_a_value_is_gone() -> None:
    loads = GroupLoads()
    changed(loads, {b"3": value_of(BUSY)})
    seen = loads.version
    changed(loads, {b"3": b"", b"4": b""})

    assert dict(loads) == {}
    assert list(loads.changed_since(seen) or ()) == [3], "the other one was never there"


def test_a_reading_of_all_loads_forgets_the_others() -> None:
    loads = GroupLoads()
    changed(loads, {b"3": value_of(BUSY), b"4": value_of(BUSY), HEALTH + b"4": left_out(900), DRIFT + b"4": b"300 900"})
    seen = loads.version
    changed(loads, {b"3": value_of(BUSY)}, is_all=True)

    assert dict(loads) == {3: BUSY}
    assert list(loads.changed_since(seen) or ()) == [4], "the same value again is no change"
    assert (marks(loads, 0), loads.has_marks) == (({}.keys() & set(), {}), False)


def test_the_same_value_again_is_no_change() -> None:
    loads = GroupLoads()
    changed(loads, {b"3": value_of(BUSY)})
    seen = loads.version
    changed(loads, {b"3": value_of(BUSY)})
    assert list(loads.changed_since(seen) or ()) == []

    # A decision has changed it meanwhile, so that the same value of Redis is another one.
    loads.put(3, Load(900, 3, 1))
    changed(loads, {b"3": value_of(BUSY)})
    assert loads[3] == BUSY
    assert list(loads.changed_since(seen) or ()) == [3, 3]


def test_what_was_put_is_named_once_to_the_next_reading() -> None:
    loads = GroupLoads()
    for publisher in (3, 4, 3):
        loads.put(publisher, BUSY)

    assert sorted(loads.take_put()) == [3, 4]
    assert list(loads.take_put()) == []


def test_a_reader_that_is_too_far_behind_looks_at_all() -> None:
    loads = GroupLoads()
    loads.put(1, BUSY)
    seen = loads.version
    for number in range(4095):
        loads.put(number, BUSY)
    assert len(list(loads.changed_since(seen) or ())) == 4095
    loads.put(7, BUSY)

    assert loads.changed_since(seen) is None
    assert list(loads.changed_since(loads.version) or ()) == []
    assert list(loads.changed_since(loads.version - 1) or ()) == [7]


@pytest.mark.parametrize("is_all", [True, False])
def test_a_target_is_left_out_for_its_time(is_all: bool) -> None:
    loads = GroupLoads()
    changed(
        loads, {HEALTH + b"3": left_out(900), HEALTH + b"4": left_out(0, 1500), b"3": value_of(BUSY)}, is_all=is_all
    )

    assert loads.has_marks
    assert [marks(loads, now).left_out for now in (0, 899, 900, 1499, 1500)] == [{3, 4}, {3, 4}, {4}, {4}, set()]
    assert dict(loads) == {3: BUSY}


def test_a_health_that_is_gone_or_cannot_be_read_leaves_nobody_out() -> None:
    loads = GroupLoads()
    changed(loads, {HEALTH + b"3": left_out(900), HEALTH + b"4": left_out(900)})
    changed(loads, {HEALTH + b"3": b"", HEALTH + b"4": b"soon"})
    assert marks(loads, 1).left_out == set()
    changed(loads, {HEALTH + b"x": left_out(900), HEALTH + b"4": left_out(900)}, is_all=True)
    assert marks(loads, 1).left_out == {4}, "a field of a stranger is no target"
    changed(loads, {HEALTH + b"4": b""})
    assert not loads.has_marks


@pytest.mark.parametrize("is_all", [True, False])
def test_a_drift_ends_by_itself(is_all: bool) -> None:
    loads = GroupLoads()
    changed(loads, {DRIFT + b"3": b"250 900", DRIFT + b"4": b"7000 500"}, is_all=is_all)

    assert loads.has_marks
    assert [marks(loads, now).drifts for now in (0, 499, 500, 899, 900)] == [
        {3: 0.25, 4: 1.0},
        {3: 0.25, 4: 1.0},
        {3: 0.25},
        {3: 0.25},
        {},
    ]


def test_a_drift_that_is_gone_or_cannot_be_read_counts_for_nothing() -> None:
    loads = GroupLoads()
    changed(loads, {DRIFT + b"3": b"250 900"})
    changed(loads, {DRIFT + b"3": b""})
    assert (marks(loads, 1).drifts, loads.has_marks) == ({}, False)
    changed(loads, {DRIFT + b"3": b"much", DRIFT + b"x": b"250 900", DRIFT + b"5": b"100 900"}, is_all=True)
    assert marks(loads, 1).drifts == {5: 0.1}
