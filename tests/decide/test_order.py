"""Targets by what they have to do, while their loads change one by one: as if all were sorted each time."""

from __future__ import annotations

from random import Random

import pytest

from tests.unit import seeds
from waymark.decide.group_loads import GroupLoads, LoadOrder, RequestSum
from waymark.decide.policies.policy import LoadCost, LoadWeights
from waymark.store.reservations import Load, LoadChanges

_IDLE = Load()


def value_of(load: Load) -> bytes:
    """As Redis has it."""
    return b" ".join(b"%d" % number for number in load)


@pytest.mark.parametrize("seed", seeds(30))
def test_an_order_that_follows_is_the_order_of_now(seed: int) -> None:
    random = Random(seed)
    weights = {publisher: random.choice((0.5, 1.0, 2.0)) for publisher in range(1, random.choice((2, 9, 200)))}
    first, second = (LoadWeights(*random.choices((0.0, 1.0, 512.0), k=len(LoadWeights._fields))) for _ in range(2))
    cost, beyond = LoadCost(first), random.choice((1, 40, 9000))
    if random.random() < 0.6:
        cost = LoadCost(first, second, lambda one, other: (one + 1) * (other + beyond))
    loads, order, total = GroupLoads(), LoadOrder(weights, cost, random), RequestSum(weights)
    stored: dict[bytes, bytes] = {}

    def work(publisher: int) -> float:
        load, weight = loads.get(publisher, _IDLE), weights[publisher]
        one, other = (
            0.0 if part is None else sum(a * b for a, b in zip(part, load, strict=False)) / weight
            for part in (cost.first, cost.second)
        )
        return cost.of(one, other)

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
        without = random.sample(sorted(weights), len(weights) // 3) if random.random() < 0.5 else []
        only = set(random.sample(sorted(weights), len(weights) // 2)) if random.random() < 0.5 else None
        most = random.choice((1, 2, 8, len(weights)))
        found = order.least(loads, cost, most, without, None if only is None else only.__contains__)
        wanted = [each for each in weights if each not in without and (only is None or each in only)]
        assert [value for value, _, _ in found] == sorted(map(work, wanted))[:most]
        assert [(work(each), order.cost_of(each, cost)) for _, _, each in found] == [
            (value,) * 2 for value, _, _ in found
        ]
        assert len({each for _, _, each in found} & set(wanted)) == len(found)


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
    weights, loads = dict.fromkeys(range(100), 1.0), GroupLoads({99: Load(1, 1)})
    two_parts = LoadCost(LoadWeights(requests=1.0), LoadWeights(tokens=1.0), lambda one, other: (one + 1) * (other + 9))
    for cost in (LoadCost(LoadWeights(requests=512.0)), two_parts):
        order = LoadOrder(weights, cost, Random(1))
        first = {order.least(loads, cost, 1)[0][2] for _ in range(1000)}
        assert len(first) > 90
        assert 99 not in first


def test_a_target_behind_a_dear_one_is_found_after_its_load_has_fallen() -> None:
    """Among few requests there is nobody cheap, so that only the least of the second part says to go on."""
    cost = LoadCost(LoadWeights(requests=1.0), LoadWeights(tokens=1.0), lambda one, other: (one + 1) * (other + 1))
    loads = GroupLoads({publisher: Load(1000, publisher) for publisher in range(9)})
    order = LoadOrder(dict.fromkeys(loads, 1.0), cost, Random(1))
    assert order.least(loads, cost, 1)[0][::2] == (1001, 0)
    loads.put(7, Load(0, 7))
    assert order.least(loads, cost, 1)[0][::2] == (8, 7)


def test_an_order_of_other_loads_is_sorted_again() -> None:
    cost = LoadCost(LoadWeights(tokens=1.0))
    order = LoadOrder({1: 1.0, 2: 1.0}, cost, Random(1))
    one, other = GroupLoads({1: Load(5, 1)}), GroupLoads({2: Load(5, 1)})

    def least(loads: GroupLoads | dict[int, Load]) -> list[int]:
        return [publisher for _, _, publisher in order.least(loads, cost, 9)]

    assert least(one) == [2, 1]
    assert least(other) == [1, 2]
    assert least({1: Load(9, 1)}) == [2, 1]
    assert least(other) == [1, 2]
    assert LoadOrder({}, cost, Random(1)).least(one, cost, 1) == []


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
