"""What a scorer says at the edges of its range, of nobody, and of targets that say nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.decide.policies.conftest import busy, prompt, target
from waymark.base.errors import InvalidValue
from waymark.decide.policies.policy import Candidate, RoutingRequest, read_constants
from waymark.decide.policies.scorers import SCORERS, Scores, context_ranges, context_score, scored_by_label


def scores(name: str, request: RoutingRequest, *some: Candidate, **parameters: Any) -> Scores:
    scorer = SCORERS[name]
    return scorer.score(request, some, read_constants(scorer.parameters, parameters, "parameters"))


# ---- by cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["precise-prefix-cache-scorer", "prefix-cache-scorer"])
@pytest.mark.parametrize("tokens", [0, 1, 15])
def test_a_prompt_below_one_block_has_no_match(name: str, tokens: int) -> None:
    assert scores(name, prompt(tokens, 16), target("a", device=16, expected=16), target("b")) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device": 64}, 1.0),
        ({"host": 64}, 0.8),
        ({"disk": 32, "shared": 32}, 0.8),
        ({"device": 32, "host": 16}, 0.5 + 0.2),
        ({"expected": 64}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_block_counts_by_where_it_is(fields: dict[str, int], expected: float) -> None:
    (found,) = scores("precise-prefix-cache-scorer", prompt(70, 16), target("a", **fields))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "parameters", "expected"),
    [
        ({"expected": 32}, {}, 0.5),
        ({"history": 32}, {}, 0.5),
        # What is remembered counts, also if it is nothing.
        ({"expected": 64, "history": 0}, {}, 0.0),
        ({"expected": 10**6}, {}, 1.0),
        ({"expected": 32}, {"maxPrefixBlocksToMatch": 2}, 1.0),
        ({"expected": 16}, {"maxPrefixBlocksToMatch": 2}, 0.5),
        ({"device": 64}, {}, 0.0),
    ],
)
def test_a_prompt_that_went_there_before_is_expected_there(
    fields: dict[str, int], parameters: dict[str, int], expected: float
) -> None:
    assert scores("prefix-cache-scorer", prompt(70, 16), target("a", **fields), **parameters) == [expected]


@pytest.mark.parametrize("field", ["device", "host", "disk", "shared", "expected", "history"])
def test_a_hit_of_any_kind_is_no_cold_prompt(field: str) -> None:
    some = [target("a", last_cold=5), target("b", **{field: 16})]
    assert scores("no-hit-lru-scorer", prompt(64), *some) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([7], [1.0]),
        ([0, 0, 0], [1.0, 0.5, 0.0]),
        ([30, 10, 20], [0.0, 1.0, 0.5]),
        ([30, 0, 20], [0.0, 1.0, 0.5]),
        ([5, 5], [1.0, 0.0]),
    ],
)
def test_a_cold_prompt_goes_to_the_one_longest_without(times: list[int], expected: list[float]) -> None:
    some = [target(f"t{place}", last_cold=each) for place, each in enumerate(times)]
    assert scores("no-hit-lru-scorer", prompt(64), *some) == expected


@pytest.mark.parametrize(("session", "expected"), [("b", [0.0, 1.0]), ("gone", [0.0, 0.0]), (None, [0.0, 0.0])])
def test_a_session_names_one_instance_or_nobody(session: str | None, expected: list[float]) -> None:
    request = prompt(64, session=session)
    assert scores("session-affinity-scorer", request, target("a"), target("b")) == expected


# ---- by load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("active", "parameters", "expected"),
    [
        ([0, 0], {}, [1.0, 1.0]),
        ([0, 4], {}, [1.0, 0.0]),
        ([1, 4], {}, [0.75, 0.0]),
        ([1, 4], {"idleThreshold": 1}, [1.0, 0.0]),
        ([2, 4], {"maxBusyScore": 0.5}, [0.25, 0.0]),
        ([4, 4], {"idleThreshold": 4}, [1.0, 1.0]),
    ],
)
def test_an_idle_target_scores_one_and_the_busiest_nothing(
    active: list[int], parameters: dict[str, float], expected: list[float]
) -> None:
    some = [target(f"t{place}", active=each) for place, each in enumerate(active)]
    assert scores("active-request-scorer", prompt(64), *some, **parameters) == expected


def test_new_blocks_times_requests_are_compared() -> None:
    some = [target("a", device=48, active=1), target("b", active=0), target("c", active=3)]
    # 1 block times 2, 4 times 1, 4 times 4, of 16 tokens each.
    assert scores("lmetric-scorer", prompt(64, 16), *some) == pytest.approx([1.0, 12 / 14, 0.0])


# ---- by gauges ----------------------------------------------------------------------------------------

BY_GAUGES = sorted(name for name, scorer in SCORERS.items() if scorer.needs_gauges)


@pytest.mark.parametrize("name", BY_GAUGES)
def test_engines_without_gauges_have_no_score(name: str) -> None:
    assert scores(name, prompt(64), target("a"), target("b")) == [None, None]
    first, second = scores(name, prompt(64), target("a"), target("b", gauges=busy(0)))
    assert first is None
    assert second is not None


@pytest.mark.parametrize("name", ["queue-scorer", "running-requests-size-scorer"])
def test_the_shortest_scores_one_and_the_longest_nothing(name: str) -> None:
    some = [target(each, gauges=busy(number, number)) for each, number in (("a", 2), ("b", 10), ("c", 6))]
    assert scores(name, prompt(64), *some) == [1.0, 0.0, 0.5]
    assert scores(name, prompt(64), *some[:1]) == [1.0]


@pytest.mark.parametrize(("waiting", "expected"), [(0, 0.5), (64, 0.25), (127, 0.5 / 128), (128, 0.0), (10**9, 0.0)])
def test_a_queue_counts_up_to_its_threshold(waiting: int, expected: float) -> None:
    assert scores("load-aware-scorer", prompt(64), target("a", gauges=busy(waiting))) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("gauges", "expected"),
    [
        ({"adapters_running": frozenset({"sql"})}, 1.0),
        ({"adapters_running": frozenset({"sql"}), "adapters_waiting": frozenset({"sql"})}, 1.0),
        ({"adapters_running": frozenset({"x"}), "adapters_max": 2}, 0.8),
        ({"adapters_waiting": frozenset({"sql"}), "adapters_max": 2}, 0.8),
        ({"adapters_running": frozenset({"x"}), "adapters_waiting": frozenset({"sql"}), "adapters_max": 2}, 0.6),
        ({"adapters_running": frozenset({"x", "y"}), "adapters_max": 2}, 0.0),
        ({}, 0.0),
    ],
)
def test_an_adapter_is_best_where_it_runs_and_then_where_it_has_room(gauges: dict[str, Any], expected: float) -> None:
    request = prompt(64, lora_name="sql")
    assert scores("lora-affinity-scorer", request, target("a", gauges=busy(0, **gauges))) == [expected]


# ---- labels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2048", [(0, 2048)]), (" 5 - 5 ", [(5, 5)]), ("0-1,9-90", [(0, 1), (9, 90)]), ("7-7,7-7", [(7, 7), (7, 7)])],
)
def test_ranges_of_lengths_are_pairs(text: str, expected: list[tuple[int, int]]) -> None:
    assert context_ranges(text) == expected


@pytest.mark.parametrize("text", ["", "5", "5-", "-5", "9-5", "a-b", "0-5,", "0-5;6-9", "1.5-2", "0--5", "٣-x"])
def test_a_text_that_is_no_range_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"it must be least-most, such as 0-2048"):
        context_ranges(text)
    assert context_score(100, text) == 0.0, "no request waits for the repair of a label"


@pytest.mark.parametrize(
    ("tokens", "label", "expected"),
    [
        (100, None, 0.5),
        (100, "100-100", 1.0),
        (0, "0-1000", 0.3 + 0.7 * (0.7 / 1.1 + 0.3)),
        (1000, "0-1000", 0.3 + 0.7 * (0.7 / 1.1)),
        (500, "0-1000", 0.3 + 0.7 * (0.7 / 1.1 + 0.15)),
        (1001, "0-1000", 0.3 / 1.001),
        (3000, "0-1000", 0.1),
        (50, "1050-2000", 0.15),
        # The range that fits best counts.
        (100, "5000-6000,100-100", 1.0),
    ],
)
def test_a_tight_range_with_room_above_fits_best(tokens: int, label: str | None, expected: float) -> None:
    assert context_score(tokens, label) == pytest.approx(expected)
    some = [target("a", labels={} if label is None else {"l": label})]
    assert scored_by_label(prompt(tokens), some, "l") == [pytest.approx(expected)]


@pytest.mark.parametrize("tokens", [0, 1, 1000, 10**9])
def test_a_fit_is_between_nothing_and_one(tokens: int) -> None:
    for label in ("0-0", "0-1000", "999-1000", "0-1000000000", "1-2,500-10000"):
        found = context_score(tokens, label)
        assert 0.0 <= found <= 1.0
        assert math.isfinite(found)
