"""The short list of a decision has the best few, as ranking all targets would find them."""

from __future__ import annotations

from random import Random

import pytest

from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.policies.policy import LoadCost, LoadWeights
from waymark.domain.gauges import Gauges
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
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
    cost = LoadCost((LoadWeights(tokens=1.0),))
    found = set()
    nothing = PromptState({}, {}, {}, {})
    for seed in range(60):
        # The draws of a fleet are made once for equal loads, so each seed begins at another place of one order.
        short = fleet.targets(None, "whole").shortlist(nothing, cost, 8, Random(seed))
        found |= {each.publisher for each in short}
    assert len(found) > 90
