"""``predicted-latency-scorer``: predicted times, the times that a client asks for, and what there is without either."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.policies.conftest import busy, prompt, target
from tests.decide.policies.test_presets import candidates, requests
from waymark.decide.policies.latency import PARAMETERS, needs_gauges, predicted_latency
from waymark.decide.policies.policy import Candidate, RoutingRequest, read_constants
from waymark.domain.answer_times import NO_SUMS, AnswerTimes, AskedTimes, TimeSums


def times(first_token_ms: float, token_ms: float | None = None, *, requests: int = 10) -> AnswerTimes:
    """Return the times of a target that needs the same for any work."""

    def same(ms: float | None) -> TimeSums:
        return NO_SUMS if ms is None else TimeSums(requests, requests, requests * ms, requests, requests * ms)

    return AnswerTimes(same(first_token_ms), same(token_ms))


def scores(request: RoutingRequest, *some: Candidate, **parameters: Any) -> list[float | None]:
    return predicted_latency(request, some, read_constants(PARAMETERS, parameters, "parameters"))


def asking(ttft_ms: float | None = None, tpot_ms: float | None = None) -> RoutingRequest:
    return prompt(64, asked=AskedTimes(ttft_ms, tpot_ms))


# ---- predictions -----------------------------------------------------------------------------------


def test_the_first_token_is_predicted_by_what_waits_and_what_is_new() -> None:
    # 10 ms, and 1 ms for each token.
    line = AnswerTimes(TimeSums(5, 1500, 1550, 550_000, 565_000))
    assert [line.first_token.predict(work) for work in (100, 300, 700)] == pytest.approx([110, 310, 710])
    some = [
        target("busy", answer_times=line, wait=600),
        target("cached", answer_times=line, device=64, wait=600),
        target("idle", answer_times=line),
        target("expected", answer_times=line, expected=64),
    ]

    # 138 tokens: with 64 of them there, 74 are left.
    assert scores(prompt(138), *some) == pytest.approx([0.0, 64 / 664, 600 / 664, 1.0])


def test_a_target_with_the_whole_prompt_computes_its_last_block() -> None:
    line = AnswerTimes(TimeSums(5, 1500, 1550, 550_000, 565_000))
    some = [
        target("whole", answer_times=line, device=64),
        target("all but one", answer_times=line, device=48),
        target("nothing", answer_times=line),
    ]

    assert scores(prompt(64), *some) == [1.0, 1.0, 0.0]


def test_further_tokens_are_predicted_by_the_requests_under_way() -> None:
    # 5 ms, and 1 ms for each request under way.
    further = TimeSums(5, 15, 40, 55, 130)
    assert [further.predict(count) for count in (1, 5)] == pytest.approx([6, 10])
    line = AnswerTimes(NO_SUMS, further)
    some = [target("busy", answer_times=line, active=4), target("idle", answer_times=line)]

    assert scores(prompt(64), *some) == [0.0, 1.0]


def test_both_times_count_by_their_weights() -> None:
    some = [target("a", answer_times=times(100, 30)), target("b", answer_times=times(300, 10))]

    assert scores(prompt(64), *some) == pytest.approx([0.8, 0.2]), "of targets that nobody asks to be in time"
    weights = {"negHeadroomTTFTWeight": 1, "negHeadroomTPOTWeight": 3}
    assert scores(prompt(64), *some, **weights) == pytest.approx([0.25, 0.75])


def test_a_time_that_is_the_same_everywhere_has_no_weight() -> None:
    some = [target("a", answer_times=times(100, 30)), target("b", answer_times=times(100, 10))]

    assert scores(prompt(64), *some) == [0.0, 1.0]
    assert scores(prompt(64), *some, negHeadroomTPOTWeight=0) == [1.0, 1.0], "nothing else tells them apart"


def test_a_target_without_figures_is_predicted_from_all_others() -> None:
    some = [
        target("slow", answer_times=times(300)),
        target("fast", answer_times=times(100)),
        target("new"),
        target("newer", answer_times=times(900, requests=4)),
    ]

    # (10 * 300 + 10 * 100 + 4 * 900) / 24 = 316.7, by a line that any amount of work finds flat.
    assert scores(prompt(64), *some) == pytest.approx([(316.67 - 300) / 216.67, 1.0, 0.0, 0.0], abs=1e-3)


def test_a_few_requests_of_each_are_enough_together() -> None:
    line = AnswerTimes(TimeSums(3, 300, 330, 30_500, 33_500))
    some = [target("busy", answer_times=line, wait=500), target("idle", answer_times=line)]

    assert scores(prompt(64), *some) == [0.0, 1.0]


# ---- what a client asks for ------------------------------------------------------------------------

FLEET = (
    target("ample", answer_times=times(100, 10)),
    target("near", answer_times=times(180, 18)),
    target("late", answer_times=times(400, 10)),
)


def test_of_the_targets_in_time_the_one_with_the_least_headroom_is_best() -> None:
    assert scores(asking(200, 20), *FLEET) == pytest.approx([0.01, 1.0, 0.0])


def test_or_the_one_with_the_most() -> None:
    assert scores(asking(200, 20), *FLEET, headroomSelectionStrategy="most") == pytest.approx([1.0, 0.01, 0.0])


def test_headroom_counts_by_its_weights() -> None:
    some = [target("a", answer_times=times(100, 18)), target("b", answer_times=times(180, 10))]

    found = scores(asking(200, 20), *some, headroomTTFTWeight=1, headroomTPOTWeight=3)
    assert found == pytest.approx([0.01 + 0.99 * 0.75, 0.01 + 0.99 * 0.25])


def test_a_time_that_nobody_asks_for_is_better_the_shorter_it_is() -> None:
    some = [target("a", answer_times=times(100, 18)), target("b", answer_times=times(180, 10))]

    assert scores(asking(200), *some) == pytest.approx([0.01 + 0.99 * 0.0, 1.0]), "least headroom and fastest tokens"
    most = scores(asking(200), *some, headroomSelectionStrategy="most")
    assert most == pytest.approx([0.01 + 0.99 * 0.8, 0.01 + 0.99 * 0.2])


def test_a_target_that_breaks_one_of_both_is_late() -> None:
    some = [target("a", answer_times=times(100, 30)), target("b", answer_times=times(190, 19))]

    assert scores(asking(200, 20), *some) == [0.0, 1.0]


def test_exactly_in_time_is_in_time() -> None:
    some = [target("a", answer_times=times(200)), target("b", answer_times=times(201))]

    assert scores(asking(200), *some) == [1.0, 0.0]


def test_exactly_in_time_is_the_least_headroom() -> None:
    some = [
        target("a", answer_times=times(200)),
        target("b", answer_times=times(201)),
        target("c", answer_times=times(9)),
    ]

    assert scores(asking(200), *some) == pytest.approx([1.0, 0.0, 0.01])
    assert scores(asking(201), *some) == pytest.approx([0.01 + 0.99 * 191 / 192, 1.0, 0.01])


@pytest.mark.parametrize(
    ("tpot_ms", "expected"),
    [
        # The request itself is one more under way: 2 ms at the idle one, 6 at the other.
        (1.9, [1.0, 0.0]),
        (2.0, [1.0, 0.0]),
        (5.9, [1.0, 0.0]),
        # With the least headroom the busy one is the better one, as soon as it is in time.
        (6.0, [0.01, 1.0]),
    ],
)
def test_the_request_is_under_way_itself(tpot_ms: float, expected: list[float]) -> None:
    # 1 ms, and 1 ms for each request under way.
    line = AnswerTimes(NO_SUMS, TimeSums(5, 15, 20, 55, 70))
    some = [target("idle", answer_times=line), target("busy", answer_times=line, active=4)]

    assert scores(asking(tpot_ms=tpot_ms), *some) == pytest.approx(expected)


def test_a_buffer_stretches_what_is_asked() -> None:
    some = [target("a", answer_times=times(100)), target("b", answer_times=times(210))]

    assert scores(asking(200), *some) == [1.0, 0.0]
    assert scores(asking(200), *some, sloBufferFactor=1.1) == pytest.approx([0.01, 1.0])
    assert scores(asking(200), *some, sloBufferFactor=0.4) == [1.0, 0.0], "both are late, b more"


def test_if_all_would_be_late_the_least_late_is_best() -> None:
    some = [
        target("a", answer_times=times(100, 50)),  # in time with its first token, and late with the others
        target("b", answer_times=times(300, 30)),
        target("c", answer_times=times(500, 20)),
    ]

    # Late by 0, 100 and 300 ms, and by 30, 10 and 0.
    assert scores(asking(200, 20), *some) == pytest.approx([0.8, 0.8 * 2 / 3 + 0.2 * 2 / 3, 0.2])
    most = scores(asking(200, 20), *some, headroomSelectionStrategy="most")
    assert most == scores(asking(200, 20), *some), "the most of what is missing would be the worst"


def test_what_is_asked_of_a_time_that_nobody_knows_makes_nobody_late() -> None:
    some = [target("a", answer_times=times(100)), target("b", answer_times=times(300))]

    assert scores(asking(tpot_ms=20), *some) == [1.0, 0.0]
    assert scores(asking(200, 20), *some) == [1.0, 0.0]


# ---- composites ------------------------------------------------------------------------------------


def test_without_any_figure_caches_and_loads_decide() -> None:
    some = [
        target("cached", device=32, active=4),
        target("expected", expected=64, active=2),
        target("idle"),
    ]

    # Of 64 tokens; no gauges, so the queue is what is under way.
    expected = [(0 + 0 + 0.5) / 3, (0 + 0.5 + 1) / 3, (0 + 1 + 0) / 3]
    assert scores(prompt(64), *some) == pytest.approx(expected)
    assert scores(asking(200, 20), *some) == pytest.approx(expected), "nobody can be in time"


@pytest.mark.parametrize(
    ("tokens", "fields", "expected"),
    [
        (64, {"device": 32}, 0.5),
        (64, {"expected": 48}, 0.75),
        (64, {"device": 16, "host": 16, "expected": 16}, 0.5),
        (64, {"device": 640}, 1.0),
        (1, {"device": 1}, 1.0),
        (0, {}, 0.0),
        (0, {"expected": 16}, 1.0),
    ],
)
def test_the_prefix_of_a_composite_is_a_share_of_the_prompt(
    tokens: int, fields: dict[str, int], expected: float
) -> None:
    alone = {"compositeKVWeight": 0, "compositeQueueWeight": 0, "compositePrefixWeight": 5}
    assert scores(prompt(tokens), target("a", **fields), target("b"), **alone) == pytest.approx([expected, 0.0])


def test_a_composite_goes_by_gauges_if_all_have_them() -> None:
    some = [
        target("a", gauges=busy(6, kv_usage=0.25), active=0, answer_times=times(100)),
        target("b", gauges=busy(2, kv_usage=0.75), active=9, answer_times=times(500)),
    ]
    weights = {"compositeKVWeight": 2, "compositeQueueWeight": 1, "compositePrefixWeight": 1}

    found = scores(prompt(64), *some, headroomSelectionStrategy="composite-only", **weights)
    assert found == pytest.approx([2 * 0.75 / 4, (2 * 0.25 + 1) / 4]), "whatever is predicted"
    without = [some[0], some[1]._replace(gauges=None)]
    found = scores(prompt(64), *without, headroomSelectionStrategy="composite-only", **weights)
    assert found == pytest.approx([(2 * 0.75 + 1) / 4, 0.0])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        pytest.param("composite-most", [1.0, 0.01 + 0.99 / 3, 0.0], id="most"),
        pytest.param("composite-least", [0.01, 0.01 + 0.99 * 2 / 3, 0.0], id="least"),
    ],
)
def test_a_composite_orders_the_targets_that_are_in_time(strategy: str, expected: list[float]) -> None:
    some = [
        target("full", device=64, gauges=busy(0, kv_usage=0.0), answer_times=times(150)),
        target("idle", gauges=busy(3, kv_usage=0.0), answer_times=times(100)),
        target("late", device=64, gauges=busy(0, kv_usage=0.0), answer_times=times(400)),
    ]

    assert scores(asking(200), *some, headroomSelectionStrategy=strategy) == pytest.approx(expected)


def test_weights_of_zero_tell_nothing_apart() -> None:
    some = [target("a", active=1), target("b")]
    weights = dict.fromkeys(("compositeKVWeight", "compositeQueueWeight", "compositePrefixWeight"), 0)

    assert scores(prompt(64), *some, **weights) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("least", False), ("most", False), ("composite-only", True), ("composite-most", True), ("composite-least", True)],
)
def test_only_a_composite_asks_for_gauges(strategy: str, expected: bool) -> None:
    assert needs_gauges(read_constants(PARAMETERS, {"headroomSelectionStrategy": strategy}, "p")) is expected


@pytest.mark.parametrize("strategy", PARAMETERS[5].choices)
@given(request=requests, some=candidates)
def test_every_strategy_scores_each_candidate_from_zero_to_one(
    strategy: str, request: RoutingRequest, some: list[Candidate]
) -> None:
    found = scores(request, *some, headroomSelectionStrategy=strategy)

    assert len(found) == len(some)
    assert all(score is not None and -1e-9 <= score <= 1 + 1e-9 for score in found)


@given(request=requests, some=candidates, ttft=st.floats(1, 1e6))
def test_a_target_in_time_beats_every_late_one(request: RoutingRequest, some: list[Candidate], ttft: float) -> None:
    request = request._replace(asked=AskedTimes(ttft))
    some = [each._replace(answer_times=times(1 + each.wait)) for each in some]
    in_time = [1 + each.wait <= ttft for each in some]
    found = [score or 0.0 for score in scores(request, *some)]

    if any(in_time):
        assert all((score > 0) is on_time for score, on_time in zip(found, in_time, strict=True))
    else:
        assert max(found) == 1.0


def test_each_parameter_has_its_range() -> None:
    """A file that another release takes must not be refused, nor a weight be taken that makes scores meaningless."""
    numbers = [each for each in PARAMETERS if not each.choices]
    assert (numbers[0].name, numbers[0].range_text()) == ("sloBufferFactor", "0.01 to 100")
    assert {each.range_text() for each in numbers[1:]} == {"0 to 1e+06"}
    assert [each.default for each in numbers] == [1.0, 0.8, 0.2, 0.8, 0.2, 1.0, 1.0, 1.0]
