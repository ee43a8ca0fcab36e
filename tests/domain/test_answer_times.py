"""Predictions of times to the first token: a straight line through what was measured."""

from __future__ import annotations

import pytest

from waymark.domain.answer_times import AnswerTimes, TimeSums, asked_times_of, tpot_ms


def sums(*measured: tuple[float, float]) -> TimeSums:
    """Of pairs of work and ms, without older ones counting for less."""
    return TimeSums(
        len(measured),
        sum(work for work, _ in measured),
        sum(ms for _, ms in measured),
        sum(work * work for work, _ in measured),
        sum(work * ms for work, ms in measured),
    )


def test_a_line_is_found_and_goes_on_beyond_what_was_measured() -> None:
    of = sums(*((work, 20 + work / 8) for work in (100, 2000, 500, 8000, 16_000)))

    assert [of.predict(work) for work in (0, 1000, 100_000)] == pytest.approx([20, 145, 12_520])


def test_too_few_requests_predict_nothing() -> None:
    assert sums(*[(100.0, 10.0)] * 4).predict(100) is None
    assert sums(*[(100.0, 10.0)] * 5).predict(100) == pytest.approx(10)


def test_equal_work_tells_no_slope_and_more_work_is_never_faster() -> None:
    assert sums((100, 10), (100, 20), (100, 30), (100, 10), (100, 30)).predict(9000) == pytest.approx(20)
    falling = sums((100, 50), (200, 40), (300, 30), (400, 20), (500, 10))
    assert falling.predict(0) == falling.predict(9000) == pytest.approx(30)


def test_sums_too_small_for_a_slope_predict_the_mean() -> None:
    assert TimeSums(5.0, 0.0, 10.0, 2.2e-309, 1.0).predict(1000.0) == 2.0


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"1 2 3 4",
        b"1 2 3 4 5 6",
        b"1 2 3 4 5 6 7 8 9 10 11",
        b"1 2 3 4 5 6 7 8 9 -1",
        b"1 2 3 4 x",
        b"1 2 3 4 nan",
        b"1 2 -3 4 5",
        b"1 2 3 4 inf",
    ],
)
def test_a_value_of_another_form_counts_as_none(value: bytes) -> None:
    assert AnswerTimes.parse(value) is None


def test_a_value_has_the_first_token_and_perhaps_the_further_ones() -> None:
    first, further = TimeSums(5, 10, 100, 30, 220), TimeSums(6, 7, 8, 9, 10)

    assert AnswerTimes.parse(b"5 10 100 30 220") == AnswerTimes(first)
    times = AnswerTimes.parse(b"5 10 100 30 220 6 7 8 9 10")
    assert times == AnswerTimes(first, further)
    assert AnswerTimes.of_numbers(times.numbers) == times


def test_sums_of_single_requests_add_up() -> None:
    assert TimeSums.of(100, 20).plus(TimeSums.of(300, 60)) == sums((100, 20), (300, 60))


@pytest.mark.parametrize(
    ("seconds", "tokens", "expected"),
    [
        pytest.param(2.0, 101, 20.0, id="each-token-after-the-first"),
        pytest.param(2.0, 1, None, id="one-token"),
        pytest.param(2.0, 0, None, id="none"),
        pytest.param(2.0, None, None, id="nobody-says"),
        pytest.param(0.005, 101, None, id="all-at-once"),
        pytest.param(0.01, 101, 0.1, id="the-fastest-engine"),
    ],
)
def test_a_time_per_token(seconds: float, tokens: int | None, expected: float | None) -> None:
    assert tpot_ms(seconds, tokens) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param({}, (None, None), id="none"),
        pytest.param({"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "12.5"}, (200.0, 12.5), id="both"),
        pytest.param({"x-slo-tpot-ms": "20"}, (None, 20.0), id="one"),
        pytest.param({"x-llm-d-slo-ttft-ms": "9", "x-llm-d-slo-tpot-ms": "8"}, (9.0, 8.0), id="the-later-names"),
        pytest.param({"x-slo-ttft-ms": "7", "x-llm-d-slo-ttft-ms": "9"}, (7.0, None), id="both-names"),
        pytest.param({"x-slo-ttft-ms": "", "x-llm-d-slo-ttft-ms": "9"}, (9.0, None), id="one-is-empty"),
        pytest.param({"x-slo-ttft-ms": "3600000"}, (3.6e6, None), id="an-hour"),
        *(
            pytest.param({"x-slo-ttft-ms": value, "x-slo-tpot-ms": value}, (None, None), id=value)
            for value in ("0", "-1", "soon", "nan", "inf", "1e3", "3600001", "9" * 5000, "1_0", "+5", " 5", "\u0665")
        ),
    ],
)
def test_headers_ask_for_times(headers: dict[str, str], expected: tuple[float | None, float | None]) -> None:
    assert asked_times_of(headers.get) == expected
