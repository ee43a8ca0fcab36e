"""Orders by columns: whom the prefix key puts first, an instance that goes before all others, and what is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from tests.decide.policies.conftest import busy, prompt, target
from waymark.decide.policies.columns import CandidateColumns, Column, ColumnSums, RankedColumns, columns_of
from waymark.decide.policies.policy import Candidate, RoutingRequest, Scored
from waymark.domain.targets import Gauges

pytestmark = pytest.mark.usefixtures("implementation")

KEY = b"k" * 32


class Places:
    """A ring on which every key meets the same targets, and how many of them were looked at."""

    def __init__(self, *names: str | tuple[str, int]) -> None:
        self.names = [name if isinstance(name, tuple) else (name, 0) for name in names]
        self.looked_at = 0

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        assert key == KEY
        for name in self.names:
            self.looked_at += 1
            yield name


def asked(ring: Places | None, key: bytes | None = KEY) -> RoutingRequest:
    return prompt(64, prefix_key=key, ring=ring)


def sums_of(candidates: Sequence[Candidate]) -> ColumnSums:
    """The requests of each candidate."""
    columns = CandidateColumns(candidates)
    return ColumnSums(columns, {"requests": (1.0, columns.requests)})


def busied(**active: int) -> list[Candidate]:
    return [target(name, active=number) for name, number in active.items()]


def names(found: Sequence[Scored]) -> list[str]:
    return [each.candidate.instance_id for each in found]


# ---- the prefix key -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("met", "is_cost", "expected"),
    [
        # The first that the key meets is not among the best.
        (("c", "b", "a"), True, "b"),
        (("c", "a", "b"), True, "a"),
        (("gone", "a", "b"), True, "a"),
        (("a", "b", "d", "c"), False, "d"),
        (("b", "c", "d"), False, "c"),
    ],
)
def test_the_key_decides_between_those_that_are_as_good_as_the_best(
    met: tuple[str, ...], is_cost: bool, expected: str
) -> None:
    some = busied(a=1, b=1, c=5, d=5)
    for seed in range(20):
        found = sums_of(some).ranked(asked(Places(*met)), Random(seed), None, is_cost=is_cost)
        assert names(found)[0] == expected
        assert set(names(found)[:2]) == ({"a", "b"} if is_cost else {"c", "d"}), "no worse one comes before"
        assert found.is_by_key


@pytest.mark.parametrize("request_", [asked(None), asked(Places("b"), None), asked(Places("gone")), asked(Places())])
def test_without_a_place_of_the_key_equal_ones_are_taken_by_chance(request_: RoutingRequest) -> None:
    firsts = {
        names(sums_of(busied(a=1, b=1, c=1)).ranked(request_, Random(seed), 1, is_cost=True))[0] for seed in range(40)
    }
    assert firsts == {"a", "b", "c"}


def test_the_key_draws_as_many_numbers_as_chance_does() -> None:
    """So a decision by the key does not change the decisions behind it."""
    drawn = []
    for ring in (None, Places("b")):
        random = Random(7)
        sums_of(busied(a=1, b=1)).ranked(asked(ring), random, None, is_cost=True)
        drawn.append(random.random())
    assert drawn[0] == drawn[1]


def test_a_place_on_the_ring_is_of_one_rank() -> None:
    some = [target("a", dp_rank=0), target("a", dp_rank=1), target("b", dp_rank=1)]
    columns = CandidateColumns(some)
    assert columns.home(asked(Places(("a", 1), ("b", 1)))) == 1
    assert columns.home(asked(Places(("b", 0), ("b", 1)))) == 2, "no such rank is a candidate"
    assert columns.home(asked(Places(("a", 2)))) is None


def test_the_key_looks_no_further_than_to_the_first_that_counts() -> None:
    ring = Places("a", "b", "c", "d")
    columns = CandidateColumns(busied(a=1, b=1, c=1, d=1))
    assert columns.home(asked(ring), {2, 3}) == 2
    assert ring.looked_at == 3
    ring.looked_at = 0
    assert columns.home(asked(ring)) == 0
    assert ring.looked_at == 1
    assert columns.home(asked(ring), ()) is None


# ---- an instance before all others --------------------------------------------------------------------

RANKS = [
    target("b", active=0),
    target("a", dp_rank=0, active=5),
    target("c", active=3),
    target("a", dp_rank=1, active=1),
    target("a", dp_rank=2, active=9),
]


def ranked(*, is_cost: bool = True, most: int | None = None) -> RankedColumns:
    return sums_of(RANKS).ranked(prompt(64), Random(3), most, is_cost=is_cost)


def shown(found: Sequence[Scored]) -> list[str]:
    return [f"{each.candidate.instance_id}{each.candidate.dp_rank}" for each in found]


@pytest.mark.parametrize("most", [0, 1, 3, 5, None])
@pytest.mark.parametrize(
    ("is_cost", "expected"),
    [(True, ["a1", "a0", "a2", "b0", "c0"]), (False, ["a2", "a0", "a1", "c0", "b0"])],
)
def test_the_ranks_of_an_instance_come_first_in_their_own_order(
    is_cost: bool, expected: list[str], most: int | None
) -> None:
    found = ranked(is_cost=is_cost, most=most)
    assert found.put_first("a")
    assert shown(found) == expected
    assert (len(found), shown(found[1:4]), shown(found[::-2])) == (5, expected[1:4], expected[::-2])
    assert shown([found[-1], found[0]]) == [expected[-1], expected[0]]


def test_an_instance_that_is_no_candidate_changes_nothing() -> None:
    found = ranked()
    before = list(found)
    assert not found.put_first("z")
    assert list(found) == before


def test_the_last_instance_that_was_put_first_is_first() -> None:
    found = ranked(most=2)
    assert found.put_first("c")
    assert shown(found[:2]) == ["c0", "b0"]
    assert found.put_first("a")
    assert shown(found) == ["a1", "a0", "a2", "b0", "c0"]


def test_an_instance_that_is_put_first_makes_no_more_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    scored = ColumnSums.scored

    def noted(self: ColumnSums, place: int) -> Scored:
        made.append(place)
        return scored(self, place)

    some = [target("a", dp_rank=rank, active=rank) for rank in range(3)]
    some += [target(f"t{number}", active=10 + number) for number in range(40)]
    monkeypatch.setattr(ColumnSums, "scored", noted)
    found = sums_of(some).ranked(prompt(64), Random(1), 5, is_cost=True)
    made.clear()
    assert found.put_first("a")
    assert shown(found[:5]) == ["a0", "a1", "a2", "t00", "t10"]
    assert made == [0, 1, 2, 3, 4]


def test_equal_ranks_of_an_instance_are_in_the_order_of_their_draws() -> None:
    some = [target("a", dp_rank=rank, active=1) for rank in range(4)]
    orders = set()
    for seed in range(30):
        found = sums_of(some).ranked(prompt(64), Random(seed), None, is_cost=True)
        before = shown(found)
        assert found.put_first("a")
        assert shown(found) == before
        orders.add(tuple(before))
    assert len(orders) > 10


# ---- what is shown ------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 4, None])
def test_a_candidate_is_shown_in_place_of_the_supposed_one(most: int | None) -> None:
    some = busied(a=4, b=3, c=2, d=1)
    found = sums_of(some).ranked(prompt(64), Random(1), most, is_cost=True)
    first, last = (some[place]._replace(device=64, active=9) for place in (3, 0))
    found.show(3, first)
    found.show(0, last)
    assert [found[0].candidate, found[-1].candidate] == [first, last]
    assert [each.candidate for each in found[1:3]] == [some[2], some[1]], "the others are as they were"
    assert [each.value for each in found] == [1.0, 2.0, 3.0, 4.0], "the order is that of what was supposed"
    assert found[0].parts == {"requests": 1.0}


def test_what_is_supposed_of_one_candidate_is_supposed_of_it_alone() -> None:
    columns = CandidateColumns(busied(a=4, b=3, c=2))
    other = target("b", active=7, device=16)
    supposed = columns.supposing(1, other)
    assert (list(supposed.active), [each.device for each in supposed]) == ([4, 7, 2], [0, 16, 0])
    assert (list(columns.active), columns[1].device) == ([4, 3, 2], 0), "nothing is supposed of them elsewhere"
    assert supposed.home(asked(Places("b"))) == 1


@pytest.mark.parametrize(
    ("number", "clamped", "plain"),
    [
        (-0.5, 0.0, -1.5),
        (0.0, 0.0, 0.0),
        (0.25, 0.75, 0.75),
        (1.0, 3.0, 3.0),
        (1.5, 3.0, 4.5),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("is_clamped", [True, False])
def test_the_parts_of_a_sum_are_what_was_added(
    is_clamped: bool, number: float | None, clamped: float | None, plain: float | None
) -> None:
    parts: dict[str, tuple[float, Column]] = {"one": (3.0, [number, 0.5]), "two": (0.0, [1.0, 1.0])}
    found = ColumnSums(CandidateColumns(busied(a=0, b=0)), parts, is_clamped=is_clamped).scored(0)
    expected = clamped if is_clamped else plain
    assert found.parts == {"one": expected, "two": 0.0}
    assert found.value == (expected or 0.0)


# ---- columns ------------------------------------------------------------------------------------------


def test_a_column_has_one_number_of_each_candidate() -> None:
    some = [
        target("a", weight=2.0, wait=300, active=4, context=90, health=0.5, last_cold=7, labels={"zone": "x"}),
        target("b", gauges=busy(3)),
    ]
    columns = columns_of(some)
    assert (columns.instances, columns.labels) == (["a", "b"], [{"zone": "x"}, {}])
    assert (columns.active, columns.requests) == ([4, 0], [2.0, 0.0])
    assert (columns.queue, columns.context) == ([150.0, 0.0], [45.0, 0.0])
    assert (columns.health, columns.last_cold, columns.gauges) == ([0.5, 1.0], [7, 0], [None, busy(3)])
    assert columns.by_match(lambda each: each.weight) == [2.0, 1.0]
    assert (columns[1:], len(columns), columns[-1]) == ([some[1]], 2, some[1])


def test_a_column_by_gauges_is_made_of_those_of_all_candidates() -> None:
    given: list[Sequence[Gauges | None]] = []

    def make(gauges: Sequence[Gauges | None]) -> Column:
        given.append(gauges)
        return [None if each is None else float(each.waiting) for each in gauges]

    columns = columns_of([target("a", gauges=busy(3)), target("b")])
    assert columns.by_gauges("waiting", make) == [3.0, None]
    assert given == [[busy(3), None]]


def test_filters_come_one_behind_the_other_and_none_changes_nothing() -> None:
    seen: list[list[str]] = []

    def keep(request: RoutingRequest, some: Sequence[Candidate]) -> list[Candidate]:
        assert request.tokens == 64
        seen.append([each.instance_id for each in some])
        return list(some[1:])

    columns = CandidateColumns(busied(a=1, b=2, c=3))
    assert columns.passing(prompt(64), ()) is columns
    assert columns.passing(prompt(64), (keep, keep)).instances == ["c"]
    assert seen == [["a", "b", "c"], ["b", "c"]]
    assert columns.instances == ["a", "b", "c"]
    assert len(columns.passing(prompt(64), (keep,) * 3)) == 0
