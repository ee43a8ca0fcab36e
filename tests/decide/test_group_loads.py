"""The loads of a group as changes of Redis leave them, and the orders and sums that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decide.policies.conftest import prompt, target
from tests.unit import examples, seeds
from waymark.decide.group_loads import GroupLoads, LoadColumns, LoadOrder, RequestSum
from waymark.decide.policies.policy import Candidate, Inputs, LoadCost, LoadWeights
from waymark.decide.policies.presets import PRESETS
from waymark.store.reservations import DRIFT, HEALTH, Load, LoadChanges

BUSY = Load(500, 2, 900)
_IDLE = Load()


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


def test_a_load_that_is_gone_can_come_back_as_it_was() -> None:
    loads = GroupLoads()
    assert loads.last_change == -1, "nothing was read"
    for value, expected in ((value_of(BUSY), {3: BUSY}), (b"", {}), (value_of(BUSY), {3: BUSY})):
        changed(loads, {b"3": value})
        assert dict(loads) == expected


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
    assert len(loads._changes) == 1, "what nobody may ask for is not kept"
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


# ---- orders and sums that follow ---------------------------------------------------------------------


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


def test_equal_targets_come_first_by_chance() -> None:
    weights, loads = dict.fromkeys(range(100), 1.0), GroupLoads({99: Load(1, 1)})
    two = LoadOrder({1: 1.0, 2: 1.0}, LoadCost(LoadWeights(requests=1.0)), Random(1))
    assert {two.least(loads, LoadCost(LoadWeights(requests=1.0)), 1)[0][2] for _ in range(20)} == {1, 2}
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


def counted(loads: GroupLoads, asked: list[int]) -> GroupLoads:
    """Note which targets are looked at."""
    get = loads.get

    def noted(publisher: int, default: Load | None = None) -> Load | None:
        asked.append(publisher)
        return get(publisher, default)

    loads.get = noted
    return loads


@pytest.mark.parametrize("kind", ["order", "sum", "columns"])
@pytest.mark.parametrize(
    ("changed", "looked_at"),
    [
        ([], 0),
        ([7], 1),
        ([7, 7, 7], 1),
        (range(1, 11), 10),
        # With more than an eighth of the targets all are looked at again.
        (range(1, 12), 80),
        # These are no targets of the order.
        (range(900, 905), 0),
        ([7, 900], 1),
        # Too many changes to know which.
        ([7] * 5000, 80),
    ],
)
def test_a_follower_looks_at_what_has_changed(kind: str, changed: Sequence[int], looked_at: int) -> None:
    weights, asked = dict.fromkeys(range(1, 81), 1.0), list[int]()
    loads, cost = counted(GroupLoads(), asked), LoadCost(LoadWeights(requests=1.0))
    order, total, columns = LoadOrder(weights, cost, Random(1)), RequestSum(weights), LoadColumns(weights)

    def follow() -> int:
        asked.clear()
        if kind == "order":
            order.least(loads, cost, 1)
        elif kind == "sum":
            total.of(loads)
        else:
            columns.of(loads)
        return len(asked)

    assert follow() == 80, "the first time"
    for publisher in changed:
        loads.put(publisher, BUSY)
    assert follow() == looked_at
    assert follow() == 0, "nothing has changed since"
    loads.put(9, BUSY)
    assert follow() == 1


def test_a_mapping_that_tells_no_changes_is_read_each_time() -> None:
    weights, cost = {1: 1.0, 2: 1.0}, LoadCost(LoadWeights(requests=1.0))
    order, total, loads = LoadOrder(weights, cost, Random(1)), RequestSum(weights), {1: Load(0, 5), 3: Load(0, 9)}
    assert (total.of(loads), [each[2] for each in order.least(loads, cost, 2)]) == (5, [2, 1])
    loads[2] = Load(0, 7)
    assert (total.of(loads), [each[2] for each in order.least(loads, cost, 2)]) == (12, [1, 2])


PRODUCT = LoadCost(LoadWeights(requests=1.0), LoadWeights(tokens=1.0), lambda one, other: (one + 1) * (other + 1))


@pytest.mark.parametrize(
    ("loads", "most", "expected"),
    [
        # The second costs more than the best so far, and the first of the next part is the best of all.
        ({1: (5, 0), 2: (9, 0), 3: (0, 1)}, 1, [(2.0, 3)]),
        ({1: (5, 0), 2: (9, 0), 3: (0, 1), 4: (1, 1)}, 2, [(2.0, 3), (4.0, 4)]),
        # Two parts that are dear altogether come before one that is not.
        ({1: (5, 0), 2: (9, 0), 3: (8, 1), 4: (9, 1), 5: (0, 2)}, 1, [(3.0, 5)]),
        # Nothing behind the third can cost less, since no queue is empty.
        ({1: (2, 0), 2: (3, 0), 3: (2, 1), 4: (2, 2)}, 1, [(3.0, 1)]),
        ({1: (2, 0), 2: (3, 0), 3: (2, 1), 4: (2, 2)}, 9, [(3.0, 1), (4.0, 2), (6.0, 3), (9.0, 4)]),
        ({}, 3, []),
    ],
)
def test_the_least_products_are_found_in_the_order_of_one_factor(
    loads: dict[int, tuple[int, int]], most: int, expected: list[tuple[float, int]]
) -> None:
    order = LoadOrder(dict.fromkeys(loads, 1.0), PRODUCT, Random(1))
    found = order.least({publisher: Load(*load) for publisher, load in loads.items()}, PRODUCT, most)
    assert [(cost, publisher) for cost, _, publisher in found] == expected


def test_an_order_looks_no_further_than_it_has_to() -> None:
    """However many targets there are, a decision looks at a few."""
    loads, looked_at = GroupLoads({number: Load(number, 50) for number in range(1000)}), 0

    def added(one: float, other: float) -> float:
        nonlocal looked_at
        looked_at += 1
        return one + other

    cost = LoadCost(LoadWeights(tokens=1.0), LoadWeights(requests=1.0), added)
    order = LoadOrder(dict.fromkeys(loads, 1.0), cost, Random(1))
    assert [each[2] for each in order.least(loads, cost, 8)] == list(range(8))
    assert looked_at <= 10, "nobody has less than 50 requests"
    for publisher, requests in ((999, 40), (998, 90)):
        loads.put(publisher, Load(publisher, requests))
        looked_at = 0
        order.least(loads, cost, 8)
    looked_at = 0
    assert [each[2] for each in order.least(loads, cost, 8)] == list(range(8))
    assert 18 <= looked_at <= 40, "somebody with up to 17 tokens could have 40 requests"


# ---- costs by load, against the policies themselves --------------------------------------------------

BY_LOAD = [name for name, preset in PRESETS.items() if preset.by_load is not None]
LOADS = st.lists(
    st.builds(
        lambda wait, active, context, weight: {"wait": wait, "active": active, "context": context, "weight": weight},
        st.sampled_from((0, 1, 500, 16_000, 17_000, 90_000)),
        st.integers(0, 9),
        st.sampled_from((0, 100, 64_000)),
        st.sampled_from((0.5, 1.0, 2.0)),
    ),
    min_size=1,
    max_size=8,
)


def cost_of(cost: LoadCost, candidate: Candidate) -> float:
    def value(part: LoadWeights | None) -> float:
        if part is None:
            return 0.0
        work = part.tokens * candidate.wait + part.requests * candidate.active + part.context * candidate.context
        return work / candidate.weight

    return cost.of(value(cost.first), value(cost.second))


def cost_by(name: str, tokens: int = 640, **overrides: Any) -> LoadCost | None:
    preset = PRESETS[name]
    assert preset.by_load is not None
    return preset.by_load(prompt(tokens), preset.values(overrides))


def test_these_policies_need_few_targets_of_many() -> None:
    assert set(BY_LOAD) >= {"least-work", "dynamo", "hicache", "lmetric", "longest"}


@pytest.mark.parametrize("name", BY_LOAD)
@settings(max_examples=examples(60))
@given(loads=LOADS, tokens=st.sampled_from((1, 16, 640, 100_000)))
def test_the_cost_by_load_orders_targets_as_the_policy_does(
    name: str, loads: list[dict[str, Any]], tokens: int
) -> None:
    some = [target(f"t{place}", **each) for place, each in enumerate(loads)]
    preset, cost = PRESETS[name], cost_by(name, tokens)
    assert cost is not None
    ranking = preset.rank(Inputs(prompt(tokens), some, preset.values({}), Random(1)))
    costs = [cost_of(cost, each.candidate) for each in ranking.scored]
    assert costs == pytest.approx(sorted(costs), rel=1e-9)


@pytest.mark.parametrize("name", BY_LOAD)
@settings(max_examples=examples(60))
@given(loads=LOADS)
def test_more_load_never_costs_less(name: str, loads: list[dict[str, Any]]) -> None:
    cost = cost_by(name)
    assert cost is not None
    for each in loads:
        least = cost_of(cost, target("a", **each))
        for part in ("wait", "active", "context"):
            assert cost_of(cost, target("a", **(each | {part: each[part] + 100}))) >= least


@pytest.mark.parametrize(
    ("name", "overrides", "load", "expected"),
    [
        ("least-work", {}, {"wait": 300, "active": 2}, 300 + 2 * 512),
        ("least-work", {"active_weight": 0}, {"wait": 300, "active": 2}, 300),
        ("least-work", {}, {"wait": 300, "active": 2, "weight": 2.0}, 150 + 512),
        ("least-work", {}, {"context": 9_999}, 0),
        ("longest", {}, {"wait": 300, "active": 2, "context": 9}, 300),
        # In tokens, without those of the prompt itself, which are the same for all.
        ("dynamo", {}, {"wait": 300, "active": 2, "context": 50}, 350),
        ("dynamo", {"active_weight": 3}, {"wait": 300, "active": 2, "context": 50}, 350 + 2 * 3 * 16),
        ("dynamo", {"prefill_load_scale": 10}, {"wait": 300, "context": 50}, 3_050),
        ("dynamo", {"overlap_score_weight": 2, "prefill_load_scale": 10}, {"wait": 300, "context": 50}, 6_050),
        ("dynamo", {"track_prefill_tokens": False}, {"wait": 300, "context": 50}, 50),
        # In blocks, with those of the prompt.
        ("hicache", {}, {"wait": 360, "active": 2, "context": 160}, (360 + 640) / 16 + 10),
        ("hicache", {"overlap_score_weight": 3}, {"wait": 360, "context": 160, "weight": 2.0}, 3 * 820 / 16 + 5),
        ("lmetric", {}, {"wait": 360, "active": 2}, (360 + 640) * 3),
        ("lmetric", {}, {"wait": 360, "active": 2, "weight": 2.0}, (180 + 640) * 2),
    ],
)
def test_a_cost_by_load_is_the_published_one(
    name: str, overrides: dict[str, Any], load: dict[str, Any], expected: float
) -> None:
    cost = cost_by(name, **overrides)
    assert cost is not None
    assert cost_of(cost, target("a", **load)) == pytest.approx(expected)


@pytest.mark.parametrize("blocks", [0, 10, 40, 200])
def test_blocks_of_a_pool_are_cheaper_for_all_targets(blocks: int) -> None:
    preset = PRESETS["hicache"]
    assert preset.by_load is not None
    request = prompt(640, pool=(1 << blocks) - 1)
    cost = preset.by_load(request, preset.values({}))
    assert cost is not None
    some = [target("a", wait=32, context=48)]
    assert cost_of(cost, some[0]) == max(0, 32 + 640 - 8 * blocks) / 16 + 3
    (scored,) = preset.rank(Inputs(request, some, preset.values({}), Random(1))).scored
    assert scored.value == cost_of(cost, some[0])


def test_a_policy_that_draws_lots_needs_all_targets() -> None:
    assert cost_by("dynamo", router_temperature=0.1) is None
    assert cost_by("dynamo", router_temperature=0) is not None
