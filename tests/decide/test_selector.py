"""What a refusal says of a question whose constraints leave nobody."""

from __future__ import annotations

from typing import Any

import pytest

from waymark.decide.fleet import Fleet
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import PolicyChoice, Question, SelectParameters
from waymark.decide.request_prompts import no_prompt
from waymark.decide.selector import _none_allowed
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Target

GROUP = GroupName("t", "m")
TARGETS = {
    1: Target("http://10.0.0.1:8000", aliases=("other",)),
    2: Target("http://10.0.0.2:8000"),
    3: Target(None),
    4: Target("http://10.0.0.4:8000", weight=0.0),
}


def fleet() -> Fleet:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in range(1, 5)}
    rows[5] = PublisherRow("pod-5", 0, 16, "instance", is_lost=True)
    rows[6] = PublisherRow("pool", 0, 16, "shared")
    return Fleet(HolderTable(b"v", GROUP, rows, {}, b"", TARGETS))


def refusal(served_as: str | None = None, **terms: Any) -> str:
    policy = PolicyChoice.of(PRESETS["least-work"])
    question = Question(GROUP, no_prompt, policy, served_as=served_as, parameters=SelectParameters(**terms))
    said = _none_allowed(fleet(), question)
    assert said.startswith('no target is left for model "m": of 5 registered ones '), "a pool is no target"
    counts, _, way_out = said.partition(" registered ones ")[2].partition("; ")
    assert way_out.startswith("'waymark drain NAME --resume' sends a drained one requests again")
    return counts


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        pytest.param(
            {"exclude": frozenset({"pod-1", "10.0.0.2:8000", "pod-3"})},
            "1 lost, 1 drained, 3 in exclude",
            id="exclude",
        ),
        pytest.param({"only": frozenset({"pod-9"})}, "1 lost, 1 drained, 3 not in only", id="only"),
        pytest.param(
            {"only": frozenset({"pod-3"}), "needs_address": True},
            "1 lost, 1 drained, 2 not in only, 1 without an address",
            id="address",
        ),
        pytest.param(
            {"only": frozenset({"pod-1"}), "exclude": frozenset({"pod-1"})},
            "1 lost, 1 drained, 1 in exclude, 2 not in only",
            id="both",
        ),
        pytest.param({}, "1 lost, 1 drained, 3 left out by roles or by the filters of the policy", id="policy"),
    ],
)
def test_each_constraint_is_named_with_how_many_it_removes(terms: dict[str, Any], expected: str) -> None:
    assert refusal(**terms) == expected


def test_a_further_name_leaves_out_targets_that_do_not_serve_it() -> None:
    assert refusal("other", exclude=frozenset({"pod-1"})) == (
        "1 lost, 1 drained, 1 in exclude, 2 not serving this name"
    )
