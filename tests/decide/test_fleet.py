"""The short list of a decision has the best few, as ranking all targets would find them."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from waymark.decide.fleet import Allowed, Fleet, FleetMember, OpaquePrefix, PromptState, StagePart
from waymark.decide.policies.policy import LoadCost, LoadWeights
from waymark.domain.gauges import Gauges
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName, Holder
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Role, Target
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


def test_rings_are_kept_up_to_a_few() -> None:
    fleet = named_fleet()
    first = fleet.ring(10)
    assert fleet.ring(10) is first
    for points in range(11, 20):
        fleet.ring(points)
    assert len(fleet.rings) <= 4
    assert list(fleet.ring(10).clockwise(b"k" * 32)) == list(first.clockwise(b"k" * 32))
