"""The costs of targets without a part of a prompt, by their loads alone, against the policies themselves."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decide.policies.conftest import prompt, target
from tests.unit import examples
from waymark.decide.policies.policy import Candidate, Inputs, LoadCost, LoadWeights
from waymark.decide.policies.presets import PRESETS

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
    assert set(BY_LOAD) == {"least-work", "dynamo", "lmetric", "longest"}


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


def test_a_policy_that_draws_lots_needs_all_targets() -> None:
    assert cost_by("dynamo", router_temperature=0.1) is None
    assert cost_by("dynamo", router_temperature=0) is not None
