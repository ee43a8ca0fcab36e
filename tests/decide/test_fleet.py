"""The short list of a decision has the best few, as ranking all targets would find them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from random import Random
from typing import Any, Literal, NamedTuple

import pytest

from tests.unit import seeds
from waymark.decide import fleet as module
from waymark.decide.fleet import Allowed, Fleet, FleetMember, OpaquePrefix, PromptState, StagePart, candidate_of
from waymark.decide.policies import ring as ring_module
from waymark.decide.policies.policy import LoadCost, LoadWeights
from waymark.decide.question import GivenValues
from waymark.domain.answer_times import NO_SUMS, AnswerTimes
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName, Holder
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Gauges, Role, Target
from waymark.store.reservations import Load


def fleet_of(random: Random, count: int) -> Fleet:
    rows = {n: PublisherRow(f"pod-{n}", 0, 16, "instance", is_lost=random.random() < 0.1) for n in range(1, count + 1)}
    targets = {n: Target(weight=random.choice((0.0, 0.5, 1.0, 2.0)), role=random.choice(list(Role))) for n in rows}
    return Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}, b"", targets))


@pytest.mark.parametrize("seed", range(10))
def test_a_candidate_is_the_same_whatever_else_is_known_of_others(seed: int) -> None:
    """What is rarely known is not even looked for where it is known of nobody."""
    random = Random(seed)
    fleet = fleet_of(random, 30)
    rows = {each.name: TargetRow(*(random.randint(0, 10) for _ in range(4))) for each in fleet.members[::3]}
    loads = {each.publisher: Load(*(random.randint(0, 9) for _ in Load._fields)) for each in fleet.members[::2]}
    expected = {each.publisher: random.randint(1, 40) for each in fleet.members[::5]}
    of_another = {10_000: Gauges(1, 1, 0.5)}
    for known in (expected, {}):
        found = fleet.candidates(PromptState(rows, loads, known, {}), 16)
        assert found == fleet.candidates(PromptState(rows, loads, known, of_another), 16)
        assert len(found) == len(fleet.members)


def test_equal_targets_are_on_the_list_by_chance() -> None:
    rows = {n: PublisherRow(f"pod-{n}", 0, 16, "instance") for n in range(1, 101)}
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}))
    cost = LoadCost(LoadWeights(tokens=1.0))
    found = set()
    nothing = PromptState({}, {}, {}, {})
    for seed in range(60):
        # The draws of a fleet are made once for equal loads, so each seed begins at another place of one order.
        short = fleet.targets(None, "whole").shortlist(nothing, cost, 8, Random(seed))
        found |= {each.publisher for each in short}
    assert len(found) > 90


# ---- which targets are meant -----------------------------------------------------------------------

NAMED = {
    1: Target("http://10.0.0.1:8000", role=Role.PREFILL),
    2: Target("http://10.0.0.2:8000", role=Role.DECODE, adapters=("x",)),
    3: Target("http://10.0.0.3:8000", aliases=("x", "y")),
    4: Target(None, role=Role.ENCODE),
    5: Target("http://10.0.0.3:8000", labels={"llm-d.ai/role": "prefill"}),
    6: Target("http://10.0.0.6:8000", weight=0.0),
}


def named_fleet() -> Fleet:
    rows = {n: PublisherRow(f"pod-{n}", 0, 16 * n, "instance", is_lost=n == 7) for n in range(1, 8)}
    return Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}, b"", NAMED, silent=frozenset({3})))


def numbers(members: Iterable[FleetMember]) -> list[int]:
    return [each.publisher for each in members]


def test_members_are_neither_lost_nor_drained() -> None:
    fleet = named_fleet()

    assert numbers(fleet.members) == [1, 2, 3, 4, 5]
    assert fleet.block_sizes == {16 * n for n in range(1, 8)}, "a lost one is still registered with its size"
    assert (fleet.has_silent, fleet.has_stages, fleet.have_addresses) == (True, True, False)
    assert [each.tells_events for each in fleet.members] == [True, True, False, True, True]
    assert fleet.scraped == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("part", "expected"),
    [("any", [1, 2, 3, 4, 5]), ("whole", [2, 3]), ("decode", [2, 3]), ("prefill", [1, 5])],
)
def test_a_part_of_a_request_has_its_targets(part: StagePart, expected: list[int]) -> None:
    assert numbers(named_fleet().targets(None, part).members) == expected


def test_a_further_name_is_served_by_those_that_declare_it() -> None:
    fleet = named_fleet()

    assert numbers(fleet.serving("x")) == [2, 3]
    assert numbers(fleet.serving("y")) == [3]
    assert numbers(fleet.serving("z")) == numbers(fleet.serving(None)) == [1, 2, 3, 4, 5]
    assert numbers(fleet.targets("x", "whole").members) == [2, 3]
    assert numbers(fleet.targets("y", "prefill").members) == []


def test_a_request_for_an_address_goes_to_a_target_with_one() -> None:
    fleet = named_fleet()

    assert numbers(fleet.targets(None, "any", have_addresses=True).members) == [1, 2, 3, 5]
    assert numbers(fleet.targets(None, "any").members) == [1, 2, 3, 4, 5]


def test_publishers_are_meant_by_instance_url_or_place() -> None:
    fleet = named_fleet()

    assert fleet.publishers(["pod-1"]) == fleet.publishers(["10.0.0.1:8000", "http://10.0.0.1:8000"]) == {1}
    assert fleet.publishers(["10.0.0.3:8000", "pod-4"]) == {3, 4, 5}, "engines may share an address"
    assert fleet.publishers(["pod-6", "pod-7", "10.0.0.6:8000", "unknown"]) == frozenset()


@pytest.mark.parametrize("address", ["http://10.0.0.3:8000", "10.0.0.3:8000"])
def test_the_first_target_at_an_address(address: str) -> None:
    candidate = named_fleet().at(address)

    assert candidate is not None
    assert candidate.instance_id == "pod-3"
    assert named_fleet().at("10.0.0.6:8000") is None


def test_a_set_counts_and_names_what_is_allowed() -> None:
    some = named_fleet().targets(None, "any")
    cases = [
        (Allowed(), [1, 2, 3, 4, 5]),
        (Allowed(without=frozenset({2, 99})), [1, 3, 4, 5]),
        (Allowed(only=frozenset({5, 2, 99})), [2, 5]),
        (Allowed(only=frozenset({5, 2}), without=frozenset({5})), [2]),
        (Allowed(only=frozenset()), []),
        (Allowed(only=frozenset(range(100)), without=frozenset({3})), [1, 2, 4, 5]),
    ]
    for allowed, expected in cases:
        assert numbers(some.all(allowed)) == expected
        assert some.count(allowed) == len(expected)
        names = [(f"pod-{n}", 0) for n in range(1, 8)]
        assert some.among(names, allowed) == [(f"pod-{n}", 0) for n in expected]


def test_opaque_prefixes_are_hot_on_the_device_and_never_longer_than_the_prompt() -> None:
    rows = {1: PublisherRow("pod-1", 0, 16, "instance"), 2: PublisherRow("pod-2", 0, 16, "instance")}
    holders = {
        7: Holder(7, 1, "pod-1", 0, "GPU", 16, "", "instance"),
        8: Holder(8, 1, "pod-1", 0, "CPU", 16, "", "instance"),
        9: Holder(9, 2, "pod-2", 0, "GPU", 16, "", "instance"),
    }
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, holders, opaque=frozenset({1})))

    assert fleet.has_sources
    assert fleet.prefixes({7: 40, 8: 500, 9: 100, 99: 5}, 200) == {("pod-1", 0): OpaquePrefix(40, 200)}
    assert OpaquePrefix(40, 200).tokens == 200
    assert fleet.prefixes({}, 200) == {}


@pytest.mark.parametrize(("count", "points", "expected"), [(4, 256, 256), (4, 10_000, 256), (8, 151, 150), (8, 7, 7)])
def test_a_request_cannot_ask_for_a_ring_that_takes_seconds(
    monkeypatch: pytest.MonkeyPatch, count: int, points: int, expected: int
) -> None:
    monkeypatch.setattr(ring_module, "_POINTS_MAX", 1024)
    rows = {n: PublisherRow(f"pod-{n}", 0, 16, "instance") for n in range(count)}
    ring = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {})).ring(points)
    assert len(ring._points) == count * expected


def test_rings_are_kept_up_to_a_few() -> None:
    fleet = named_fleet()
    first = fleet.ring(10)
    assert fleet.ring(10) is first
    for points in range(11, 20):
        fleet.ring(points)
    assert len(fleet.rings) <= 4
    assert list(fleet.ring(10).clockwise(b"k" * 32)) == list(first.clockwise(b"k" * 32))


# ---- the few that a policy has to rank, by all of them --------------------------------------------------

ONE_PART = LoadCost(LoadWeights(tokens=1.0, requests=512.0))
TWO_PARTS = LoadCost(
    LoadWeights(requests=1.0), LoadWeights(tokens=1.0), lambda requests, wait: (wait + 100) * (requests + 1)
)


def cost_of(cost: LoadCost, load: Load, weight: float) -> float:
    """The cost of a target without a part of the prompt, from its load alone."""

    def value(part: LoadWeights | None) -> float:
        return 0.0 if part is None else (part.tokens * load.tokens + part.requests * load.requests) / weight

    return cost.of(value(cost.first), value(cost.second))


class Crowd(NamedTuple):
    """A fleet of targets with some loads, and who may be taken."""

    fleet: Fleet
    loads: dict[int, Load]
    allowed: Allowed

    def costs(self, cost: LoadCost, without: Collection[int] = ()) -> list[float]:
        """The costs of all that may be taken, least first."""
        return sorted(
            cost_of(cost, self.loads.get(each.publisher, Load()), each.target.weight)
            for each in self.fleet.members
            if self.allowed.has(each.publisher) and each.publisher not in without
        )

    def cost(self, cost: LoadCost, member: FleetMember) -> float:
        return cost_of(cost, self.loads.get(member.publisher, Load()), member.target.weight)


def crowd(seed: int) -> Crowd:
    random = Random(seed)
    numbers = range(1, random.choice((1, 2, 9, 40)) + 1)
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in numbers}
    targets = {number: Target(weight=random.choice((0.5, 1.0, 2.0))) for number in numbers}
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}, b"", targets))
    amounts = random.choice(((0, 1), (0, 500, 90_000), tuple(range(50))))
    loads = {
        number: Load(random.choice(amounts), random.choice((0, 1, 7))) for number in numbers if random.random() < 0.8
    }
    only = frozenset(number for number in numbers if random.random() < 0.7) if random.random() < 0.3 else None
    without = frozenset(number for number in numbers if random.random() < 0.2) if random.random() < 0.5 else frozenset()
    return Crowd(fleet, loads, Allowed(only, without))


@pytest.mark.parametrize("cost", [ONE_PART, TWO_PARTS], ids=["one part", "two parts"])
@pytest.mark.parametrize("seed", seeds(12))
def test_the_cheapest_is_that_of_all(cost: LoadCost, seed: int) -> None:
    of, random = crowd(seed), Random(seed)
    seen = PromptState({}, of.loads, {}, {})
    targets = of.fleet.targets(None, "whole")
    without = frozenset(range(1, 41, 3)) if seed % 2 else frozenset[int]()
    costs = of.costs(cost, without)
    found = targets.cheapest(seen, cost, random, of.allowed, without)
    if not costs:
        assert found is None
        return
    assert found is not None
    assert of.allowed.has(found.publisher)
    assert found.publisher not in without
    assert of.cost(cost, found) == pytest.approx(costs[0])


@pytest.mark.parametrize("cost", [ONE_PART, TWO_PARTS], ids=["one part", "two parts"])
@pytest.mark.parametrize("seed", seeds(12))
def test_the_list_has_the_cheapest_of_all_and_who_has_a_part(cost: LoadCost, seed: int) -> None:
    of, random = crowd(seed), Random(seed)
    members = of.fleet.members
    rows = {each.name: TargetRow(device=1) for each in members if random.random() < 0.1}
    expected = {random.choice(members).publisher: 3}
    seen = PromptState(rows, of.loads, expected, {})
    session, rival = random.choice(members).name[0], random.choice(members).publisher
    short = of.fleet.targets(None, "whole").shortlist(
        seen, cost, 4, random, allowed=of.allowed, session=session, rival=rival
    )
    named = {each.publisher for each in short}
    assert len(named) == len(short)
    assert all(map(of.allowed.has, named))
    has = {each.publisher for each in members if each.name in rows or each.publisher in {*expected, rival}}
    has |= {each.publisher for each in members if each.name[0] == session}
    assert {each for each in has if of.allowed.has(each)} <= named
    others = sorted(of.cost(cost, each) for each in short if each.publisher not in has)
    costs = of.costs(cost, has)[:4]
    assert others[: len(costs)] == pytest.approx(costs)


@pytest.mark.parametrize("seed", seeds(12))
def test_the_ring_goes_on_to_the_first_below_the_bound(seed: int) -> None:
    of, random = crowd(seed), Random(seed)
    targets, ring = of.fleet.targets(None, "whole"), of.fleet.ring(20)
    key, most = random.randbytes(32), random.choice((1, 3))
    found = targets.below_bound(of.loads, ring.clockwise(key), 0.25, most, allowed=of.allowed)
    some = [each for each in of.fleet.members if of.allowed.has(each.publisher)]
    if not some:
        assert (list(found.members), found.active_bound) == ([], None)
        return
    active = sum(of.loads.get(each.publisher, Load()).requests for each in some)
    limit = math.ceil(1.25 * (active + 1) / len(some))
    assert found.active_bound == limit
    way = [name for name in ring.clockwise(key) if of.allowed.has(int(name[0].removeprefix("pod-")))]
    expected: list[str] = []
    below = 0
    for name, _ in way:
        expected.append(name)
        below += of.loads.get(int(name.removeprefix("pod-")), Load()).requests < limit
        if below == most:
            break
    assert [each.name[0] for each in found.members] == expected


def test_the_ring_goes_on_to_the_ranks_of_a_session() -> None:
    rows = {number: PublisherRow(f"pod-{number // 2}", number % 2, 16, "instance") for number in range(2, 22)}
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}))
    ring, targets = fleet.ring(20), fleet.targets(None, "whole")
    key = b"k" * 32
    way = list(ring.clockwise(key))
    last = way[-1][0]
    found = targets.below_bound({}, ring.clockwise(key), 0.25, 1, session=last)
    assert [each.name for each in found.members] == way
    assert len(targets.below_bound({}, ring.clockwise(key), 0.25, 1).members) == 1
    allowed = Allowed(without=frozenset(each.publisher for each in fleet.members if each.name[0] == last))
    without = targets.below_bound({}, ring.clockwise(key), 0.25, 1, allowed=allowed, session=last)
    assert len(without.members) == 1, "a session whose instance is left out starts anew"


def test_of_equal_targets_the_key_names_the_first_that_is_as_cheap() -> None:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in range(1, 41)}
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}))
    targets = fleet.targets(None, "whole")
    busy, way = Load(500, 1), [(f"pod-{number}", 0) for number in range(1, 41)]
    # The first twenty that the key meets are busy, and the others equal.
    loads = dict.fromkeys(range(1, 21), busy)
    for seed in range(10):
        short = targets.shortlist(PromptState({}, loads, {}, {}), ONE_PART, 4, Random(seed), nearest=way)
        named = {each.publisher for each in short}
        assert {1, 2, 3, 4, 21} <= named
        assert len(named & set(range(21, 41))) in (4, 5)
        assert not named & set(range(5, 21)), "those that it meets behind its first four cost more"
    elsewhere = [("gone", 0), *way[30:], *way[:30]]
    allowed = Allowed(without=frozenset({31}))
    named = {
        each.publisher
        for each in targets.shortlist(
            PromptState({}, loads, {}, {}), ONE_PART, 4, Random(1), allowed=allowed, nearest=elsewhere
        )
    }
    assert 32 in named
    assert 31 not in named


@pytest.mark.parametrize(
    ("rest", "expected_near", "walked"),
    [
        # The four cheapest differ, so that the key adds its first four alone.
        ({31: 0, 32: 1, 33: 2, 34: 3}, [1, 2, 3, 4], 4),
        # Three are equal, and the fourth is not.
        ({31: 0, 32: 0, 33: 0, 34: 9}, [1, 2, 3, 4], 4),
        # All four are equal: the key decides between all that are as cheap, and the first that it meets is the 31st.
        ({31: 0, 32: 0, 33: 0, 34: 0}, [1, 2, 3, 4, 31], 31),
    ],
)
def test_the_key_is_followed_no_further_than_it_decides(
    rest: dict[int, int], expected_near: list[int], walked: int
) -> None:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in range(1, 41)}
    targets = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {})).targets(None, "whole")
    loads = {number: Load(rest.get(number, 900)) for number in rows}
    met = 0

    def way() -> Iterator[tuple[str, int]]:
        nonlocal met
        for met in range(1, 41):
            yield f"pod-{met}", 0

    short = targets.shortlist(PromptState({}, loads, {}, {}), ONE_PART, 4, Random(1), nearest=way())
    assert set(numbers(short)) == {*expected_near, *rest}
    assert len(short) == len({*expected_near, *rest})
    assert met == walked


@pytest.mark.parametrize(
    ("count", "allowed", "is_ordered"),
    [
        (3, Allowed(), False),
        (4, Allowed(), False),
        (5, Allowed(), True),
        (9, Allowed(only=frozenset({1, 2, 3, 4})), False),
        (9, Allowed(only=frozenset({1, 2, 3, 4, 5})), True),
        (9, Allowed(without=frozenset({1, 2, 3, 4, 5})), True),
    ],
)
def test_few_targets_are_ranked_without_an_order_of_loads(count: int, allowed: Allowed, is_ordered: bool) -> None:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in range(1, count + 1)}
    targets = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {})).targets(None, "whole")
    short = targets.shortlist(PromptState({}, {}, {}, {}), ONE_PART, 4, Random(1), allowed=allowed)
    assert len(short) == min(4, targets.count(allowed))
    assert all(allowed.has(each.publisher) for each in short)
    assert (len(targets._orders) == 1) is is_ordered


@pytest.mark.parametrize(
    ("requests", "most", "expected", "bound"),
    [
        # (1 + 0.25) * (requests + 1) / 4, rounded up.
        ([0, 0, 0, 0], 1, [1], 1),
        ([1, 0, 0, 0], 1, [1, 2], 1),
        ([1, 1, 0, 1], 1, [1], 2),
        ([2, 2, 0, 0], 1, [1, 2, 3], 2),
        ([2, 1, 0, 0], 1, [1, 2], 2),
        ([2, 1, 0, 0], 2, [1, 2, 3], 2),
        ([9, 9, 9, 0], 1, [1, 2, 3, 4], 9),
        ([9, 9, 9, 1], 1, [1], 10),
    ],
)
def test_a_target_at_the_bound_is_full(requests: list[int], most: int, expected: list[int], bound: int) -> None:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in range(1, 5)}
    targets = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {})).targets(None, "whole")
    loads = {number: Load(0, count) for number, count in enumerate(requests, 1)}
    way = [(f"pod-{number}", 0) for number in rows]
    found = targets.below_bound(loads, [("gone", 0), *way], 0.25, most)
    assert (numbers(found.members), found.active_bound) == (expected, bound)
    # A target that is not allowed has neither requests nor a place.
    allowed = Allowed(without=frozenset({1}))
    without = targets.below_bound(loads, way, 0.25, 9, allowed=allowed)
    assert (numbers(without.members), without.active_bound) == (
        [2, 3, 4],
        math.ceil(1.25 * (sum(requests[1:]) + 1) / 3),
    )


def test_having_names_who_has_a_part_and_the_rival() -> None:
    fleet = named_fleet()
    targets = fleet.targets(None, "any")
    seen = PromptState(
        {("pod-1", 0): TargetRow(device=1), ("gone", 0): TargetRow(device=1)},
        {},
        {2: 5, 99: 5},
        {},
        {("pod-3", 0): OpaquePrefix(7, 0)},
    )
    assert set(targets.having(seen, Allowed(), 4)) == {1, 2, 3, 4}
    assert set(targets.having(seen, Allowed(without=frozenset({2, 4})), 4)) == {1, 3}
    assert set(targets.having(PromptState({}, {}, {}, {}), Allowed(), 99)) == set()


# ---- what is kept is bounded ------------------------------------------------------------------------------


def test_sets_orders_and_names_that_callers_ask_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SETS_MAX", 3)
    fleet = named_fleet()
    first = fleet.targets(None, "whole")
    assert fleet.targets(None, "whole") is first
    for number in range(10):
        assert numbers(fleet.serving(f"name-{number}")) == [1, 2, 3, 4, 5]
        fleet.targets(f"name-{number}", "any")
    assert (len(fleet._sets) <= 3, len(fleet._serving) <= 3) == (True, True)
    nothing = PromptState({}, {}, {}, {})
    for weight in range(12):
        targets = fleet.targets(None, "any")
        targets.shortlist(nothing, LoadCost(LoadWeights(requests=float(weight))), 2, Random(1))
    assert len(fleet.targets(None, "any")._orders) <= 4


def test_what_is_kept_is_found_again() -> None:
    fleet, nothing = named_fleet(), PromptState({}, {}, {}, {})
    assert fleet.serving("x") is fleet.serving("x")
    assert fleet.targets("x", "whole") is fleet.targets("x", "whole")
    targets = fleet.targets(None, "any")
    for _ in range(2):
        targets.cheapest(nothing, ONE_PART, Random(1), Allowed(), ())
        targets.shortlist(nothing, TWO_PARTS, 2, Random(1))
    kept = dict(targets._orders)
    targets.cheapest(nothing, ONE_PART, Random(1), Allowed(), ())
    assert len(kept) == 2
    assert targets._orders == kept
    assert fleet.publishers(["pod-1"]) == {1}
    named = fleet._named
    assert fleet.publishers(["pod-2"]) == {2}
    assert fleet._named is named


def test_the_last_few_are_kept_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SETS_MAX", 3)
    monkeypatch.setattr(module, "_ORDERS_MAX", 3)
    monkeypatch.setattr(module, "_RINGS_MAX", 3)
    fleet, nothing = named_fleet(), PromptState({}, {}, {}, {})
    targets = fleet.targets(None, "any")
    sizes = []
    for number in range(5):
        targets.cheapest(nothing, LoadCost(LoadWeights(tokens=float(number))), Random(1), Allowed(), ())
        fleet.ring(number + 1)
        fleet.serving(f"name-{number}")
        sizes.append((len(targets._orders), len(fleet.rings), len(fleet._serving)))
    assert sizes == [(1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 1, 1), (2, 2, 2)]
    kept = []
    for number in range(5):
        fleet.targets(f"name-{number}", "whole")
        kept.append(len(fleet._sets))
    assert kept == [2, 3, 1, 2, 3]


# ---- what a table says altogether -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scopes", "targets", "has_pools"),
    [
        (["instance", "instance"], {}, False),
        (["instance", "shared"], {}, True),
        (["instance", "instance"], {1: Target(query_endpoint="http://10.0.0.9:9003")}, True),
        (["shared"], {1: Target(query_endpoint="http://10.0.0.9:9003")}, True),
        ([], {}, False),
    ],
)
def test_a_pool_is_registered_or_named_by_an_engine(
    scopes: list[Literal["instance", "shared"]], targets: dict[int, Target], has_pools: bool
) -> None:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, scope) for number, scope in enumerate(scopes, 1)}
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}, b"", targets))
    assert fleet.has_pools is has_pools
    assert numbers(fleet.members) == [number for number, scope in enumerate(scopes, 1) if scope == "instance"]


def test_blocks_are_copied_from_those_that_give_them_away() -> None:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance", is_lost=number == 4) for number in range(1, 6)}
    source = Target(kv_source="tcp://10.0.0.1:7777")
    drained = Target(kv_source="tcp://10.0.0.5:7777", weight=0.0)
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}, b"", {1: source, 3: source, 4: source, 5: drained}))
    assert numbers(fleet.kv_sources) == [1, 3], "neither a lost one nor one that is drained"
    assert Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {})).kv_sources == []


@pytest.mark.parametrize(
    ("metrics_url", "address", "is_scraped"),
    [
        (None, None, False),
        ("http://10.0.0.1:9000/metrics", None, True),
        (None, "http://10.0.0.1:8000", True),
        ("http://10.0.0.1:9000/metrics", "http://10.0.0.1:8000", True),
    ],
)
def test_gauges_are_at_an_address_or_at_a_url_of_their_own(
    metrics_url: str | None, address: str | None, is_scraped: bool
) -> None:
    targets = {1: Target(address, metrics_url=metrics_url), 2: Target("http://10.0.0.2:8000")}
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in targets}
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}, b"", targets))
    assert fleet.scraped == ([1, 2] if is_scraped else [2])
    assert fleet.have_addresses is (address is not None)


def test_a_fleet_of_whole_targets_that_tell_their_blocks_has_neither_stages_nor_silence() -> None:
    rows = {1: PublisherRow("pod-1", 0, 16, "instance"), 2: PublisherRow("pod-2", 0, 16, "instance")}
    fleet = Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}))
    assert (fleet.has_stages, fleet.has_silent, fleet.has_sources, fleet.newest) == (False, False, False, 0)
    labelled = {2: Target(labels={"llm-d.ai/role": "prefill"})}
    assert Fleet(HolderTable(b"v", GroupName("t", "m"), rows, {}, b"", labelled)).has_stages


@pytest.mark.parametrize(
    ("fields", "is_cold"),
    [
        ({}, True),
        ({"rows": {("pod-1", 0): TargetRow(device=1)}}, False),
        ({"expected": {1: 1}}, False),
        ({"prefixes": {("pod-1", 0): OpaquePrefix(hot=1)}}, False),
        ({"history": {1: 1}}, False),
        ({"history": {}}, True),
        ({"loads": {1: Load(1, 1, 1)}, "gauges": {1: Gauges()}, "answer_times": {1: AnswerTimes(NO_SUMS)}}, True),
    ],
)
def test_a_prompt_is_cold_if_nobody_has_or_gets_a_part_of_it(fields: dict[str, Any], is_cold: bool) -> None:
    assert PromptState(**({"rows": {}, "loads": {}, "expected": {}, "gauges": {}} | fields)).is_cold is is_cold


# ---- candidates -------------------------------------------------------------------------------------------


def test_a_candidate_has_each_part_of_its_target_in_tokens() -> None:
    fleet = named_fleet()
    seen = PromptState(
        {("pod-2", 0): TargetRow(1, 2, 3, 4)},
        {2: Load(50, 6, 70, ok=1, failed=2, cold=9)},
        {2: 5},
        {2: Gauges(1, 2, 0.5)},
        {("pod-2", 0): OpaquePrefix(30, 100)},
        history={2: 7},
    )
    (found,) = fleet.candidates(seen, 16, members=[fleet.by_publisher[2]])
    device, host, shared, disk = TargetRow(1, 2, 3, 4)
    assert (found.publisher, found.instance_id, found.role) == (2, "pod-2", Role.DECODE)
    assert (found.device, found.host, found.shared) == (max(16 * device, 30), 16 * host, 16 * shared)
    assert found.disk == max(16 * disk, 70), "what is warm alone is on disk"
    assert (found.expected, found.wait, found.active, found.context) == (80, 50, 6, 70)
    assert (found.health, found.last_cold, found.gauges, found.history) == (0.5, 9, Gauges(1, 2, 0.5), 112)


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        (GivenValues(tokens=0), "wait", 0),
        (GivenValues(requests=0), "active", 0),
        (GivenValues(health=0.0), "health", 0.0),
        (GivenValues(gauges=Gauges(9, 9, 0.9)), "gauges", Gauges(9, 9, 0.9)),
        (GivenValues(), "wait", 50),
        (GivenValues(), "active", 6),
        (GivenValues(), "health", 0.5),
        (GivenValues(), "gauges", Gauges(1, 2, 0.5)),
    ],
)
def test_a_given_value_wins_also_if_it_is_nothing(values: GivenValues, field: str, expected: object) -> None:
    fleet = named_fleet()
    seen = PromptState({}, {2: Load(50, 6, 70, ok=1, failed=2)}, {}, {2: Gauges(1, 2, 0.5)})
    (found,) = fleet.candidates(seen, 16, {("pod-2", 0): values, ("pod-9", 0): values})
    assert getattr(found, field) == expected


@pytest.mark.parametrize(
    ("ok", "failed", "expected"), [(0, 0, 1.0), (5, 0, 1.0), (0, 1, 0.5), (3, 1, 0.8), (0, 9, 0.1)]
)
def test_health_is_the_share_of_requests_that_succeeded(ok: int, failed: int, expected: float) -> None:
    fleet = named_fleet()
    load = Load(ok=ok, failed=failed)
    for gauges in ({}, {99: Gauges()}):  # the short way and the long one
        seen = PromptState({}, {2: load}, {}, gauges)
        (found,) = fleet.candidates(seen, 16, members=[fleet.by_publisher[2]])
        assert found.health == pytest.approx(expected)


TIMES = AnswerTimes(NO_SUMS)


@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        # Each alone of what is rarely known, beside nothing else.
        ({"prefixes": {("pod-2", 0): OpaquePrefix(30, 100)}}, "device", [0, 30]),
        ({"prefixes": {("pod-2", 0): OpaquePrefix(30, 100)}}, "disk", [0, 70]),
        ({"gauges": {2: Gauges(1, 2, 0.5)}}, "gauges", [None, Gauges(1, 2, 0.5)]),
        ({"answer_times": {2: TIMES}}, "answer_times", [None, TIMES]),
        ({"history": {2: 3}}, "history", [0, 48]),
        ({"history": {}}, "history", [0, 0]),
        ({}, "history", [None, None]),
        ({"rows": {("pod-2", 0): TargetRow(device=2)}}, "device", [0, 32]),
        ({"expected": {2: 2}}, "expected", [0, 32]),
        ({"loads": {2: Load(cold=7)}}, "last_cold", [0, 7]),
    ],
)
def test_a_candidate_has_what_is_known_of_it_alone(fields: dict[str, Any], field: str, expected: list[object]) -> None:
    fleet = named_fleet()
    seen = PromptState(**({"rows": {}, "loads": {}, "expected": {}, "gauges": {}} | fields))
    found = fleet.candidates(seen, 16, members=fleet.members[:2])
    assert [getattr(each, field) for each in found] == expected


def test_only_given_targets_are_candidates() -> None:
    fleet, nothing = named_fleet(), PromptState({}, {}, {}, {})
    given = {("pod-3", 0): GivenValues(7, 2, 0.5), ("pod-1", 0): GivenValues(), ("pod-6", 0): GivenValues(1, 1)}
    found = fleet.candidates(nothing, 16, given)
    assert [(each.instance_id, each.wait, each.active, each.health) for each in found] == [
        ("pod-1", 0, 0, 1.0),
        ("pod-3", 7, 2, 0.5),
    ]
    assert fleet.candidates(nothing, 16, {}) == []
    assert [each.publisher for each in fleet.candidates(nothing, 16, given, fleet.members[2:])] == [3]


def test_an_idle_target_without_a_part_is_one_object() -> None:
    member = named_fleet().members[1]
    assert candidate_of(member, None, None, 0, 16) is member.idle
    for row, load, expected in ((TargetRow(), None, 0), (None, Load(), 0), (None, None, 1)):
        found = candidate_of(member, row, load, expected, 16)
        assert found == member.idle._replace(expected=16 * expected)
