"""Decisions are those of the recorded tree; ``python -m tests.decide.corpus`` compares all scenarios."""

from __future__ import annotations

import json

import pytest

from tests.decide import corpus
from waymark.decide.policies.presets import PRESETS

#: A part of the scenarios is enough to see that a rule has changed; it has every policy, door and picker file.
PART = range(1, corpus.SCENARIOS, 11)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded() -> dict[int, list[tuple[int, corpus.Question, str]]]:
    return corpus.recorded()


@pytest.mark.parametrize(
    ("seed", "is_straight"), [*((seed, False) for seed in PART), *((seed, True) for seed in PART[::2])]
)
async def test_decisions_are_as_recorded_on_both_ways(
    seed: int, is_straight: bool, recorded: dict[int, list[tuple[int, corpus.Question, str]]]
) -> None:
    complaints = await corpus.differences(seed, recorded[seed], is_straight=is_straight)
    assert complaints == []


def test_the_record_has_all_policies_and_doors(recorded: dict[int, list[tuple[int, corpus.Question, str]]]) -> None:
    questions = [question for rows in recorded.values() for _, question, _ in rows]
    assert len(questions) >= 2_000
    assert {each["body"].get("policy") for each in questions} >= set(PRESETS)
    assert {each.get("path") or each["request"] for each in questions} >= {
        *("/select", "/score", "/v1/completions", "/v1/chat/completions"),
        *("/dynamo/select", "/dynamo/overlap_scores", "/dynamo/potential_loads"),
    }
    answers = [json.loads(answer) for rows in recorded.values() for _, _, answer in rows]
    assert sum(each.get("status", 200) == 200 for each in answers) > 0.9 * len(answers)
