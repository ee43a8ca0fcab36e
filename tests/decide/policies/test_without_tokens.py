"""The prefix key in place of the blocks: the target that it names, and what that counts for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.decide.policies.conftest import prompt, target
from waymark.decide.policies.policy import Candidate, Ranking, RoutingRequest, Scored
from waymark.decide.policies.ring import by_prefix_key, first_by_key, home_of
from waymark.domain.status import Decision

KEY = b"k" * 32


class Places:
    """A key meets these instances in their order."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[bytes] = []

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        self.asked.append(key)
        for name in self.names:
            yield name, 0


def unread(*names: str, tokens: int = 100, **fields: Any) -> RoutingRequest:
    """A prompt without tokens, whose key meets these instances."""
    given: dict[str, Any] = {"prefix_key": KEY, "has_tokens": False, "ring": Places(*names)} | fields
    return prompt(tokens, 16, **given)


def names(scored: Sequence[Scored]) -> list[str]:
    return [each.candidate.instance_id for each in scored]


A, B, C = target("a"), target("b"), target("c")


# ---- the target of a key ------------------------------------------------------------------------------


def listed(candidates: Sequence[Candidate]) -> list[Scored]:
    return [Scored(each, 0.0, {}) for each in candidates]


@pytest.mark.parametrize(
    ("request_", "candidates", "expected"),
    [
        (unread("a", "b"), [A, B], A),
        (unread("gone", "b", "a"), [A, B], B),
        (unread("a", "b"), [C], None),
        (unread("a", "b"), [], None),
        (unread(), [A], None),
        (unread("a", prefix_key=None), [A], None),
        (unread("a", ring=None), [A], None),
    ],
    ids=["first", "next", "elsewhere", "nobody", "no place", "no key", "no ring"],
)
def test_a_key_names_the_first_candidate_that_it_meets(
    request_: RoutingRequest, candidates: Sequence[Candidate], expected: Candidate | None
) -> None:
    assert home_of(request_, listed(candidates)) is expected


def test_the_rank_belongs_to_the_name() -> None:
    second = target("a", dp_rank=1)
    assert home_of(unread("a"), listed([second])) is None
    assert home_of(unread("a"), listed([second, A])) is A


# ---- a policy without tokens --------------------------------------------------------------------------


def by_match(seen: list[Sequence[Candidate]]) -> Any:
    """A policy that ranks by what is on the device, and notes what it was shown."""

    def rank(candidates: Sequence[Candidate]) -> Ranking:
        seen.append(candidates)
        scored = [Scored(each, float(-each.device), {}) for each in candidates]
        return Ranking(sorted(scored, key=lambda each: each.value), Decision.KV_AWARE)

    return rank


def test_a_policy_ranks_the_target_of_the_key_as_if_it_had_the_prompt() -> None:
    seen: list[Sequence[Candidate]] = []
    found = by_prefix_key(unread("b"), [A, B, C], by_match(seen))
    ((a, b, c),) = seen
    assert (a.device, b.device, c.device) == (0, 100, 0)
    assert names(found.scored)[0] == "b"
    assert found.scored[0].candidate is B, "its real blocks are unknown, and the answer shows them so"
    assert (found.decision, found.home) == (Decision.PREFIX, B.publisher)


@pytest.mark.parametrize(("tokens", "supposed"), [(0, 1), (1, 1), (100, 100)])
def test_the_shortest_prompt_is_still_a_match(tokens: int, supposed: int) -> None:
    seen: list[Sequence[Candidate]] = []
    by_prefix_key(unread("a", tokens=tokens), [A, B], by_match(seen))
    assert seen[0][0].device == supposed


def test_without_a_target_of_the_key_the_load_decides() -> None:
    seen: list[Sequence[Candidate]] = []
    found = by_prefix_key(unread("gone"), [A, B], by_match(seen))
    assert [each.device for each in seen[0]] == [0, 0]
    assert (found.decision, found.home, sorted(names(found.scored))) == (Decision.LOAD, None, ["a", "b"])


def test_a_policy_may_still_prefer_another_one() -> None:
    def by_name(candidates: Sequence[Candidate]) -> Ranking:
        return Ranking([Scored(each, place, {}) for place, each in enumerate(candidates)])

    found = by_prefix_key(unread("b"), [A, B], by_name)
    assert names(found.scored) == ["a", "b"]
    assert found.home == B.publisher, "who reserves says whether it is the one that is taken"


# ---- equal ones ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "way", "expected"),
    [
        ([1.0, 1.0, 1.0], ["c", "a"], ["c", "a", "b"]),
        ([1.0, 1.0, 2.0], ["c", "b", "a"], ["b", "a", "c"]),
        ([1.0, 2.0, 2.0], ["c", "b"], ["a", "b", "c"]),
        ([1.0, 1.0, 1.0], ["gone"], ["a", "b", "c"]),
        ([1.0], ["a"], ["a"]),
        ([], ["a"], []),
    ],
    ids=["all equal", "two best", "one best", "elsewhere", "alone", "nobody"],
)
def test_of_equally_good_ones_the_first_on_the_way_is_taken(
    values: list[float], way: list[str], expected: list[str]
) -> None:
    scored = [Scored(each, value, {}) for each, value in zip((A, B, C), values, strict=False)]
    assert names(first_by_key(unread(*way), scored)) == expected


def test_the_others_keep_their_order() -> None:
    many = [target(f"t{number}") for number in range(6)]
    scored = [Scored(each, 1.0 if place < 4 else 2.0, {}) for place, each in enumerate(many)]
    assert names(first_by_key(unread("t3"), scored)) == ["t3", "t0", "t1", "t2", "t4", "t5"]
