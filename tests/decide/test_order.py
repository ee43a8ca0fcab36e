"""Targets by what they have to do, while their loads change one by one: as if all were sorted each time."""

from __future__ import annotations

from random import Random

import pytest

from tests.unit import seeds
from waymark.decide.group_loads import GroupLoads, LoadOrder, RequestSum
from waymark.decide.policies.policy import LoadWeights
from waymark.store.reservations import Load, LoadChanges

_IDLE = Load()


def value_of(load: Load) -> bytes:
    """As Redis has it."""
    return b" ".join(b"%d" % number for number in load)


@pytest.mark.parametrize("seed", seeds(30))
def test_an_order_that_follows_is_the_order_of_now(seed: int) -> None:
    random = Random(seed)
    weights = {publisher: random.choice((0.5, 1.0, 2.0)) for publisher in range(1, random.choice((2, 9, 200)))}
    part = LoadWeights(*(random.choice((0.0, 1.0, 512.0)) for _ in LoadWeights._fields))
    loads, order, total = GroupLoads(), LoadOrder(weights, part, random), RequestSum(weights)
    stored: dict[bytes, bytes] = {}

    def work(publisher: int) -> float:
        load = loads.get(publisher, _IDLE)
        return float(sum(a * b for a, b in zip(part, load, strict=False)) / weights[publisher])

    for _ in range(60):
        for _ in range(random.choice((0, 1, 3, 80, 5000))):
            publisher, load = random.choice([*weights, 999]), Load(*(random.randrange(4) for _ in Load._fields))
            if random.random() < 0.5:
                loads.put(publisher, load)
            elif random.random() < 0.1:
                stored.pop(b"%d" % publisher, None)
            else:
                stored[b"%d" % publisher] = value_of(load)
        if random.random() < 0.5:
            loads.read(stored)
            assert dict(loads) == {int(name): Load.parse(value) for name, value in stored.items()}
        assert total.of(loads) == sum(loads.get(each, _IDLE).requests for each in weights)
        found = [entry.publisher for entry in order.least(loads)]
        assert [order.value_of[each] for each in found] == [work(each) for each in found]
        assert sorted(found) == sorted(weights)
        assert [work(each) for each in found] == sorted(map(work, weights))


def test_what_a_decision_has_put_does_not_outlive_the_next_reading() -> None:
    loads = GroupLoads()
    loads.read({b"7": value_of(Load(10, 1))})
    loads.put(7, Load(500, 2))
    # Reserved and released between two readings: Redis has what it had.
    loads.read({b"7": value_of(Load(10, 1))})
    assert loads[7] == Load(10, 1)
    loads.put(8, Load(500, 2))
    loads.read({b"7": value_of(Load(10, 1)), b"no target": b"1"})
    assert dict(loads) == {7: Load(10, 1)}


def test_only_what_has_changed_is_told() -> None:
    loads = GroupLoads()
    values = {b"%d" % publisher: value_of(Load(publisher, 1)) for publisher in range(100)}
    loads.read(values)
    version = loads.version
    loads.read(values)
    assert list(loads.changed_since(version) or ()) == []
    loads.read(values | {b"7": value_of(Load(0, 2))})
    loads.put(9, Load())
    assert list(loads.changed_since(version) or ()) == [7, 9]
    for _ in range(5000):
        loads.put(9, Load())
    assert loads.changed_since(version) is None, "who is too far behind looks at all of them"


def test_equal_targets_come_first_by_chance() -> None:
    weights = dict.fromkeys(range(100), 1.0)
    loads, order = GroupLoads({99: Load(1, 1)}), LoadOrder(weights, LoadWeights(requests=512.0), Random(1))
    first = {next(order.least(loads)).publisher for _ in range(1000)}
    assert len(first) > 90
    assert 99 not in first


def test_an_order_of_other_loads_is_sorted_again() -> None:
    order = LoadOrder({1: 1.0, 2: 1.0}, LoadWeights(tokens=1.0), Random(1))
    one, other = GroupLoads({1: Load(5, 1)}), GroupLoads({2: Load(5, 1)})

    def least(loads: GroupLoads | dict[int, Load]) -> list[int]:
        return [entry.publisher for entry in order.least(loads)]

    assert least(one) == [2, 1]
    assert least(other) == [1, 2]
    assert least({1: Load(9, 1)}) == [2, 1]
    assert least(other) == [1, 2]
    assert list(LoadOrder({}, LoadWeights(tokens=1.0), Random(1)).least(one)) == []


def test_a_decision_that_was_put_after_a_newer_reading_is_asked_for() -> None:
    """Its reply may come behind a reading that has later changes of the same target, which is not told again."""
    loads = GroupLoads()
    loads.apply(LoadChanges(5, {b"7": value_of(Load(10, 1))}, is_all=True))
    loads.apply(LoadChanges(9, {b"7": value_of(Load(0, 0)), b"health:7": b""}))
    loads.put(7, Load(500, 2))
    assert (loads[7], loads.take_put(), loads.last_change) == (Load(500, 2), [7], 9)
    loads.apply(LoadChanges(9, {b"7": value_of(Load(0, 0)), b"health:7": b""}))
    assert (loads[7], loads.take_put()) == (Load(0, 0), [])


def test_changes_are_told_to_who_follows() -> None:
    loads = GroupLoads()
    values = {b"%d" % publisher: value_of(Load(publisher, 1)) for publisher in (1, 2, 3)}
    loads.apply(LoadChanges(3, values | {b"health:2": b"0 0 900 5 - 0"}, is_all=True))
    version = loads.version
    loads.apply(
        LoadChanges(6, {b"1": value_of(Load(8, 1)), b"2": values[b"2"], b"3": b"", b"health:1": b"0 0 0 0 - 700"})
    )
    assert list(loads.changed_since(version) or ()) == [1, 3]
    assert dict(loads) == {1: Load(8, 1), 2: Load(2, 1)}
    assert [loads.left_out(now_ms) for now_ms in (0, 700, 900)] == [{1, 2}, {2}, set()]
    loads.apply(LoadChanges(7, {b"2": values[b"2"], b"health:2": b""}))
    assert loads.left_out(0) == {1}
