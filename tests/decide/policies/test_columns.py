"""Columns of candidates: their sums and the least of these, in C and in Python, and orders that are made as needed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from tests.decide.policies.conftest import prompt, target
from waymark.base import native
from waymark.decide.policies.columns import CandidateColumns, Column, ColumnSums, PureColumns
from waymark.decide.policies.policy import Scored, ranked

pytestmark = pytest.mark.usefixtures("implementation_kept")


def loops(kind: str) -> Any:
    if kind == "pure":
        return PureColumns
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    return native.selected


BOTH = pytest.mark.parametrize("kind", ["native", "pure"])


@pytest.mark.parametrize("seed", range(60))
def test_both_implementations_give_the_same(seed: int) -> None:
    random, native_loops = Random(seed), loops("native")
    count = random.choice((0, 1, 7, 65, 300))

    def number() -> float | None:
        return random.choice((None, random.uniform(-0.5, 1.5), random.randrange(3), 0.1))

    columns = [(random.choice((0.0, 0.3, 2)), [number() for _ in range(count)]) for _ in range(random.randint(1, 5))]
    for is_clamped in (True, False):
        sums = [each.add_columns(columns, is_clamped) for each in (native_loops, PureColumns)]
        assert list(map(repr, sums[0])) == list(map(repr, sums[1])), "to the last bit"
    values, draws = [[random.choice((0.0, 0.5, random.random())) for _ in range(count)] for _ in range(2)]
    for most in (0, 1, 8, 64, 65, count, 1000):
        for sign in (1.0, -1.0):
            places = native_loops.least_of(values, draws, most, sign)
            assert places == PureColumns.least_of(values, draws, most, sign)
            assert places == sorted(range(count), key=lambda place: (sign * values[place], draws[place]))[:most]


@BOTH
def test_a_sum_is_made_from_the_first_column_to_the_last(kind: str) -> None:
    columns: list[tuple[float, Column]] = [(1.0, [0.1, None]), (1.0, [0.2, 0.2]), (2.0, [0.15, 0.0])]
    assert loops(kind).add_columns(columns, False) == [(0.1 + 0.2) + 2.0 * 0.15, 0.2]
    assert loops(kind).add_columns([(2.0, [-5, 0.25, 7])], True) == [0.0, 0.5, 2.0]


@BOTH
def test_equal_ones_are_in_the_order_of_their_draws_and_then_of_their_places(kind: str) -> None:
    values, draws = [1.0, 2.0, 1.0, 2.0, 2.0], [0.9, 0.5, 0.1, 0.5, 0.2]
    assert loops(kind).least_of(values, draws, 5, 1.0) == [2, 0, 4, 1, 3]
    assert loops(kind).least_of(values, draws, 2, -1.0) == [4, 1]


@BOTH
def test_columns_of_different_lengths_are_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"a column has 2 numbers|zip"):
        loops(kind).add_columns([(1.0, [1.0]), (1.0, [1.0, 2.0])], False)
    with pytest.raises(ValueError, match=r"a column has 1 numbers|zip"):
        loops(kind).least_of([1.0, 2.0], [0.5], 1, 1.0)


@pytest.mark.parametrize(
    ("columns", "error"),
    [([], "a first part"), ([5], "a first part"), ([(1.0, [1.0]), 5], "a weight"), ([(1.0, ["x"])], "real number")],
)
def test_what_is_no_column_is_an_error(columns: Sequence[Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        loops("native").add_columns(columns, False)
    with pytest.raises(TypeError):
        loops("native").least_of([None], [0.5], 1, 1.0)


# ---- orders -------------------------------------------------------------------------------------------

MANY = [target(f"t{number}", active=number % 5) for number in range(40)]


def sums_of(is_native: bool) -> ColumnSums:
    native.select(is_native)
    columns = CandidateColumns(MANY)
    return ColumnSums(columns, {"requests": (2.0, columns.requests)})


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("is_cost", [True, False])
@pytest.mark.parametrize("most", [0, 3, 40, None])
def test_an_order_is_that_of_all_candidates_however_few_are_made_at_once(
    is_native: bool, is_cost: bool, most: int | None
) -> None:
    found = sums_of(is_native).ranked(prompt(64), Random(1), most, is_cost=is_cost)
    plain = [Scored.sum_of(each, {"requests": 2.0 * each.requests}) for each in MANY]
    wanted = ranked(plain, Random(1), is_cost=is_cost).scored
    assert found[:2] == wanted[:2]
    assert found[-3:-1] == wanted[-3:-1]
    assert [found[0], found[-1], found[5]] == [wanted[0], wanted[-1], wanted[5]]
    assert (found[5:1:-2], found[9:3]) == (wanted[5:1:-2], [])
    assert list(found) == list(wanted)
    assert len(found) == 40
    with pytest.raises(IndexError):
        found[40]


def test_only_those_are_made_that_somebody_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    scored = ColumnSums.scored

    def noted(self: ColumnSums, place: int) -> Scored:
        made.append(place)
        return scored(self, place)

    monkeypatch.setattr(ColumnSums, "scored", noted)
    found = sums_of(True).ranked(prompt(64), Random(1), 3, is_cost=True)
    assert [found[0], *found[:3]]
    assert len(made) == 3
    assert found[3]
    assert sorted(made) == list(range(40)), "each once"


def test_nobody_is_in_an_order_of_nobody() -> None:
    found = ColumnSums(CandidateColumns([]), {}).ranked(prompt(64), Random(1), 8, is_cost=True)
    assert (len(found), list(found), found[:8]) == (0, [], [])


def test_without_parts_chance_decides() -> None:
    found = {
        ColumnSums(CandidateColumns(MANY), {}).ranked(prompt(64), Random(seed), 1, is_cost=True)[0].candidate.publisher
        for seed in range(60)
    }
    assert len(found) > 20
