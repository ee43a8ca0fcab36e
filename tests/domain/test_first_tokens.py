"""Predictions of times to the first token: a straight line through what was measured."""

from __future__ import annotations

import pytest

from waymark.domain.first_tokens import FirstTokens


def sums(*measured: tuple[float, float]) -> FirstTokens:
    """Of pairs of work and ms, without older ones counting for less."""
    return FirstTokens(
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


@pytest.mark.parametrize(
    "value", [b"", b"1 2 3 4", b"1 2 3 4 5 6", b"1 2 3 4 x", b"1 2 3 4 nan", b"1 2 -3 4 5", b"1 2 3 4 inf"]
)
def test_a_value_of_another_form_counts_as_none(value: bytes) -> None:
    assert FirstTokens.parse(value) is None
