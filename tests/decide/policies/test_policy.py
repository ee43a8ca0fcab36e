"""What all policies share: constants with their ranges, what a candidate has to compute, and an order by values."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decide.policies.conftest import prompt, target
from tests.unit import examples
from waymark.base.errors import InvalidValue
from waymark.base.shown import SHOWN_MAX
from waymark.decide.policies.policy import (
    CREDITS,
    Constant,
    Preset,
    Ranking,
    Scored,
    Values,
    count_credits,
    count_new,
    least_is_one,
    least_new,
    nearest,
    ranked,
    read_constants,
)
from waymark.domain.status import Decision

NUMBER = Constant("number", 2.0, "A number.", least=1, most=10)
OPEN = Constant("open", 2.0, "A number without a greatest value.")
SWITCH = Constant("switch", True, "A switch.")
WORD = Constant("word", "one", "A word.", choices=("one", "two"))

# ---- constants ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constant", "value", "expected"),
    [
        (NUMBER, 1, 1.0),
        (NUMBER, 10, 10.0),
        (NUMBER, 2.5, 2.5),
        (OPEN, 0, 0.0),
        (OPEN, 1e300, 1e300),
        (SWITCH, False, False),
        (WORD, "two", "two"),
    ],
)
def test_a_value_in_its_range_is_taken(constant: Constant, value: Any, expected: Any) -> None:
    found = constant.read(value, "overrides.x")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("constant", "value", "sentence", "reason"),
    [
        (NUMBER, 0.999, "overrides.x is 0.999; it must be 1 to 10", "out_of_range"),
        (NUMBER, 10.001, "overrides.x is 10.001; it must be 1 to 10", "out_of_range"),
        (NUMBER, math.nan, "it must be 1 to 10", "out_of_range"),
        (OPEN, math.inf, "it must be at least 0", "out_of_range"),
        (OPEN, 10**400, "overrides.x is an integer of 1329 bits; it must be at least 0", "out_of_range"),
        (OPEN, -1, "overrides.x is -1; it must be at least 0", "out_of_range"),
        (NUMBER, True, "overrides.x is true; it must be a number", "invalid_type"),
        (NUMBER, "5", 'overrides.x is "5"; it must be a number', "invalid_type"),
        (NUMBER, None, "it must be a number", "invalid_type"),
        (NUMBER, [1], "it must be a number", "invalid_type"),
        (SWITCH, 1, "overrides.x is 1; it must be true or false", "invalid_type"),
        (SWITCH, "true", "it must be true or false", "invalid_type"),
        (WORD, "three", 'overrides.x is "three"; it must be one of one, two', "invalid_value"),
        (WORD, 1, "it must be one of one, two", "invalid_value"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_range(
    constant: Constant, value: Any, sentence: str, reason: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        constant.read(value, "overrides.x")
    assert refused.value.sentence.endswith(sentence)
    assert (refused.value.field, refused.value.reason) == ("overrides.x", reason)


def test_a_range_is_said_in_words() -> None:
    assert [each.range_text() for each in (NUMBER, OPEN, SWITCH, WORD)] == [
        "1 to 10",
        "at least 0",
        "true or false",
        "one, two",
    ]


def test_constants_have_their_defaults_unless_they_are_given() -> None:
    values = read_constants((NUMBER, OPEN, SWITCH, WORD), {"number": 7, "switch": False}, "overrides")
    assert (values.number("number"), values.number("open")) == (7.0, 2.0)
    assert (values.is_on("switch"), values.word("word")) == (False, "one")
    with pytest.raises(InvalidValue, match=r"overrides\.number is 11; it must be 1 to 10"):
        read_constants((NUMBER,), {"number": 11}, "overrides")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("numbre", "overrides.numbre is not known; did you mean number?"),
        ("zzz", "overrides.zzz is not known; known are number, switch"),
    ],
)
def test_an_unknown_constant_is_refused_with_the_nearest_one(name: str, sentence: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        read_constants((SWITCH, NUMBER), {name: 1}, "overrides")
    assert refused.value.sentence == sentence
    assert refused.value.field == f"overrides.{name}"


def test_an_unknown_name_of_any_length_is_refused_with_its_beginning() -> None:
    with pytest.raises(InvalidValue) as refused:
        read_constants((NUMBER,), {"x" * 10**6: 1}, "overrides")
    assert refused.value.field == "overrides." + "x" * SHOWN_MAX
    assert nearest("number" * 10**6, ["number"]) == "known are number"
    assert nearest("x" * (SHOWN_MAX - 1) + "y", ["x" * SHOWN_MAX]).startswith("did you mean x")
    assert nearest("anything", []) == "it takes none"


def test_a_value_is_asked_for_by_its_type() -> None:
    values = Values({"number": 3, "switch": True, "word": "one"})
    assert values.number("number") == 3.0
    assert (values.is_on("switch"), values.is_on("word")) == (True, False)
    for name in ("switch", "word"):
        with pytest.raises(KeyError):
            values.number(name)


def test_a_preset_checks_what_its_constants_are_together() -> None:
    def refuse(values: Values) -> None:
        if values.number("number") > 5:
            raise InvalidValue("it is too much", field="overrides")

    preset = Preset("p", "us", "least", lambda inputs: Ranking(()), True, (NUMBER,), refuse)
    assert preset.values({"number": 5}).number("number") == 5
    with pytest.raises(InvalidValue, match="it is too much"):
        preset.values({"number": 6})
    assert not preset.needs_gauges
    assert (preset.linear, preset.sum_of, preset.by_load) == (None, None, None)


# ---- what is to be computed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [(0, 16, 0), (1, 16, 1), (16, 16, 16), (17, 16, 1), (32, 16, 16), (33, 16, 1), (5, 1, 1), (5, 100, 5)],
)
def test_every_target_computes_what_is_behind_the_last_boundary(tokens: int, size: int, expected: int) -> None:
    assert least_new(prompt(tokens, size)) == expected


@settings(max_examples=examples(50))
@given(st.integers(1, 10_000), st.integers(1, 600))
def test_an_engine_computes_at_least_one_token_and_at_most_a_block(tokens: int, size: int) -> None:
    assert 1 <= least_new(prompt(tokens, size)) <= min(tokens, size)


PLACES = {"device": 100, "host": 40, "disk": 8, "shared": 2}
CREDIT = read_constants(CREDITS, {}, "overrides")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, 100 + 0.75 * 40 + 0.25 * 8 + 0.5 * 2),
        ({"overlap_score_credit": 0}, 0.75 * 40 + 0.25 * 8 + 0.5 * 2),
        ({"host_credit": 2}, 100 + 2 * 40 + 0.25 * 8 + 0.5 * 2),
        ({"disk_credit": 3}, 100 + 0.75 * 40 + 3 * 8 + 0.5 * 2),
        ({"shared_cache_multiplier": 0}, 100 + 0.75 * 40 + 0.25 * 8),
    ],
)
def test_a_cached_token_is_worth_what_its_place_is(overrides: dict[str, float], expected: float) -> None:
    values = read_constants(CREDITS, overrides, "overrides")
    some = target("a", **PLACES)
    assert count_credits(values)(some) == pytest.approx(expected)
    assert count_new(prompt(1000), values)(some) == pytest.approx(1000 - expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 200),
        ({"device": 96}, 104),
        ({"device": 192}, 8),
        # Nobody has less to compute than the rest behind the last boundary.
        ({"device": 208}, 8),
        ({"expected": 64}, 136),
        ({"device": 96, "expected": 64}, 104),
        ({"host": 64, "expected": 64}, 136),
        ({"expected": 10**6}, 8),
    ],
)
def test_what_a_target_will_have_counts_where_it_is_more(fields: dict[str, int], expected: float) -> None:
    assert count_new(prompt(200), CREDIT)(target("a", **fields)) == expected


# ---- orders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "expected"),
    [([1.0], [1.0]), ([3.0, 3.0], [1.0, 1.0]), ([0.0, 5.0, 10.0], [1.0, 0.5, 0.0]), ([-4.0, 0.0], [1.0, 0.0])],
)
def test_the_least_cost_scores_one_and_the_greatest_nothing(costs: list[float], expected: list[float]) -> None:
    assert least_is_one(costs) == expected


def scored(*values: float) -> list[Scored]:
    return [Scored(target(f"t{place}"), value, {}) for place, value in enumerate(values)]


@pytest.mark.parametrize(("is_cost", "expected"), [(True, ["t1", "t2", "t0"]), (False, ["t0", "t2", "t1"])])
def test_the_best_is_first(is_cost: bool, expected: list[str]) -> None:
    found = ranked(scored(3.0, -1.0, 2.0), Random(1), is_cost=is_cost, decision=Decision.FALLBACK)
    assert [each.candidate.instance_id for each in found.scored] == expected
    assert (found.decision, found.home, found.is_degraded) == (Decision.FALLBACK, None, False)
    assert ranked([], Random(1), is_cost=is_cost).decision is Decision.KV_AWARE


def test_equal_ones_are_in_any_order() -> None:
    orders = {
        tuple(
            each.candidate.instance_id for each in ranked(scored(1.0, 1.0, 1.0, 5.0), Random(seed), is_cost=True).scored
        )
        for seed in range(100)
    }
    assert len(orders) == 6
    assert {order[-1] for order in orders} == {"t3"}


def test_a_sum_leaves_out_the_parts_that_nobody_knows() -> None:
    found = Scored.sum_of(target("a"), {"one": 1.5, "two": None, "three": -0.5})
    assert (found.value, found.parts) == (1.0, {"one": 1.5, "two": None, "three": -0.5})
    assert Scored.sum_of(target("a"), {}).value == 0


@pytest.mark.parametrize(("pool", "blocks", "expected"), [(0b1011, 0, 3), (0b1011, 1, 2), (0b1011, 3, 1), (0b1, 1, 0)])
def test_a_pool_has_blocks_beyond_a_place(pool: int, blocks: int, expected: int) -> None:
    assert prompt(64, pool=pool).pool_blocks_beyond(blocks) == expected


def test_a_load_is_divided_by_the_weight() -> None:
    some = target("a", wait=300, active=6, weight=2.0, device=1, host=2, disk=3, shared=4, expected=99)
    assert (some.queue, some.requests, some.matched) == (150.0, 3.0, 10)
    assert prompt(63, 16).blocks == 3
