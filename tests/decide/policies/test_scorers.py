"""Scorers by the numbers of their published descriptions, and at the edges of their ranges."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.policies.conftest import busy, prompt, target
from tests.decide.policies.test_presets import candidates, requests
from waymark.base.errors import InvalidValue
from waymark.decide.policies.policy import Candidate, RoutingRequest, read_constants
from waymark.decide.policies.scorers import SCORERS, Scores, context_ranges, context_score, scored_by_label


def scores(name: str, request: RoutingRequest, *some: Candidate, **parameters: Any) -> Scores:
    row = SCORERS[name]
    return row.score(request, some, read_constants(row.parameters, parameters, "parameters"))


def test_a_block_below_the_device_counts_four_fifths() -> None:
    request = prompt(100)  # six blocks of 16, and a rest
    found = scores("precise-prefix-cache-scorer", request, target("a", device=96), target("b", host=48), target("c"))

    assert found == pytest.approx([1.0, 0.4, 0.0])
    assert scores("precise-prefix-cache-scorer", prompt(15), target("a")) == [0.0]


def test_only_the_first_blocks_of_an_expected_prefix_count() -> None:
    request = prompt(16 * 512)

    assert scores("prefix-cache-scorer", request, target("a", expected=16 * 128)) == [0.5]
    assert scores("prefix-cache-scorer", request, target("a", expected=16 * 400)) == [1.0]
    assert scores("prefix-cache-scorer", request, target("a", expected=16 * 400, history=16 * 64)) == [0.25]
    assert scores("prefix-cache-scorer", request, target("a", expected=16 * 128), maxPrefixBlocksToMatch=512) == [0.25]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        pytest.param({}, [1.0, 0.8, 0.5, 0.0], id="defaults"),
        pytest.param({"idleThreshold": 2}, [1.0, 1.0, 0.5, 0.0], id="two-are-idle"),
        pytest.param({"maxBusyScore": 0.5}, [1.0, 0.4, 0.25, 0.0], id="a-gap-between-idle-and-busy"),
    ],
)
def test_active_requests_are_scaled_to_the_busiest(parameters: dict[str, float], expected: list[float]) -> None:
    some = [target(str(active), active=active) for active in (0, 2, 5, 10)]

    assert scores("active-request-scorer", prompt(64), *some, **parameters) == pytest.approx(expected)


def test_an_empty_queue_is_half_and_the_threshold_is_nothing() -> None:
    some = [target(str(n), gauges=busy(n)) for n in (0, 64, 128, 1000)]

    assert scores("load-aware-scorer", prompt(64), *some, target("silent")) == [0.5, 0.25, 0.0, 0.0, None]


def test_a_cold_prompt_goes_to_the_one_that_took_such_a_one_longest_ago() -> None:
    some = [target("recent", last_cold=300), target("never"), target("old", last_cold=100), target("also never")]

    assert scores("no-hit-lru-scorer", prompt(64), *some) == pytest.approx([0.0, 1.0, 1 / 3, 2 / 3])
    assert scores("no-hit-lru-scorer", prompt(64), some[0]) == [1.0]
    assert scores("no-hit-lru-scorer", prompt(64), *some, target("warm", device=16)) == [0.5] * 5
    assert scores("no-hit-lru-scorer", prompt(64), *some, target("sent", history=16)) == [0.5] * 5


def test_a_session_is_one_target() -> None:
    assert scores("session-affinity-scorer", prompt(64, session="b"), target("a"), target("b")) == [0.0, 1.0]
    assert scores("session-affinity-scorer", prompt(64), target("a")) == [0.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("queue-scorer", [1.0, 0.5, 0.0, None], id="queue"),
        pytest.param("running-requests-size-scorer", [0.0, 0.5, 1.0, None], id="running"),
        pytest.param("kv-cache-utilization-scorer", [0.9, 0.5, 0.1, None], id="kv-cache"),
    ],
)
def test_gauges_are_null_where_an_engine_reports_none(name: str, expected: Scores) -> None:
    some = [
        target("a", gauges=busy(0, 30, 0.1)),
        target("b", gauges=busy(10, 20, 0.5)),
        target("c", gauges=busy(20, 10, 0.9)),
        target("silent"),
    ]

    assert scores(name, prompt(64), *some) == pytest.approx(expected)
    assert scores(name, prompt(64), target("silent")) == [None]


def test_equal_queues_all_score_one() -> None:
    assert scores("queue-scorer", prompt(64), *(target(n, gauges=busy(7)) for n in "ab")) == [1.0, 1.0]


def test_an_adapter_is_best_where_it_runs() -> None:
    def with_adapters(running: str, waiting: str = "", most: int = 4) -> Candidate:
        gauges = busy(0, adapters_running=frozenset(running), adapters_waiting=frozenset(waiting), adapters_max=most)
        return target("t", gauges=gauges)

    some = [with_adapters("ax"), with_adapters("xy"), with_adapters("xyz", "a"), with_adapters("wxyz")]

    assert scores("lora-affinity-scorer", prompt(64, lora_name="a"), *some) == [1.0, 0.8, 0.6, 0.0]


def test_lmetric_scorer_counts_whole_blocks_times_requests() -> None:
    some = [target("a", device=64, active=1), target("b", active=0), target("c", device=48, active=5)]
    # (8-4)*16*2 = 128, 8*16*1 = 128, (8-3)*16*6 = 480
    assert scores("lmetric-scorer", prompt(128), *some) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "label", "expected"),
    [
        pytest.param(1000, None, 0.5, id="no-label"),
        pytest.param(1000, "1000-1000", 1.0, id="a-range-of-one"),
        pytest.param(0, "0-10000", 0.3 + 0.7 * (0.7 / 2 + 0.3), id="in-range-with-all-the-room"),
        pytest.param(10000, "0-10000", 0.3 + 0.7 * 0.7 / 2, id="in-range-at-its-end"),
        pytest.param(3000, "0-2000", 0.3 / 2, id="above"),
        pytest.param(1000, "2000-4000", 0.3 / 2, id="below"),
        pytest.param(3000, "0-2000, 3000-3000", 1.0, id="the-best-of-several"),
        pytest.param(1000, "short", 0.0, id="no-range"),
    ],
)
def test_context_lengths_fit_better_in_tighter_ranges(tokens: int, label: str | None, expected: float) -> None:
    assert context_score(tokens, label) == pytest.approx(expected)


@given(tokens=st.integers(0, 10**6), low=st.integers(0, 10**6), width=st.integers(0, 10**6))
def test_in_range_always_beats_out_of_range(tokens: int, low: int, width: int) -> None:
    score = context_score(tokens, f"{low}-{low + width}")

    assert (0.3 < score <= 1.0) if low <= tokens <= low + width else (0.0 <= score < 0.3)
    assert context_ranges(f"{low}-{low + width}") == [(low, low + width)]


@pytest.mark.parametrize("name", SCORERS)
@given(request=requests, some=candidates)
def test_every_scorer_gives_each_candidate_null_or_zero_to_one(
    name: str, request: RoutingRequest, some: list[Candidate]
) -> None:
    found = scores(name, request, *some)

    assert len(found) == len(some)
    if name != "precise-prefix-cache-scorer":  # random candidates may hold more than the prompt has
        assert all(score is None or 0.0 <= score <= 1.0 for score in found)
    if SCORERS[name].needs_gauges:
        assert [score is None for score in found] == [each.gauges is None for each in some]


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
    assert scores("load-aware-scorer", prompt(64), target("a", gauges=busy(waiting))) == pytest.approx([expected])


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
    assert scored_by_label(prompt(tokens), some, "l") == pytest.approx([expected])


@pytest.mark.parametrize("tokens", [0, 1, 1000, 10**9])
def test_a_fit_is_between_nothing_and_one(tokens: int) -> None:
    for label in ("0-0", "0-1000", "999-1000", "0-1000000000", "1-2,500-10000"):
        found = context_score(tokens, label)
        assert 0.0 <= found <= 1.0
        assert math.isfinite(found)


def test_each_parameter_has_its_default_and_its_range() -> None:
    """A scorer without one takes none; those of the predicted latency have a test beside them."""
    parameters = {
        each.name: (each.default, each.range_text())
        for scorer in SCORERS.values()
        if not scorer.needs_answer_times
        for each in scorer.parameters
    }
    assert parameters == {
        "maxPrefixBlocksToMatch": (256, "1 to 1e+06"),
        "lruCapacityPerServer": (31_250, "1 to 1e+06"),
        "idleThreshold": (0, "0 to 1e+06"),
        "maxBusyScore": (1, "0 to 1"),
        "threshold": (128, "1 to 1e+06"),
    }
