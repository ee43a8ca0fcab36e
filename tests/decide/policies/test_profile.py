"""A profile: its filters, scorers and picker in their order, and the stages of a request by their deciders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decide.policies.conftest import prompt, target
from tests.unit import examples
from waymark.decide.policies.policy import Candidate, RoutingRequest, Scored
from waymark.decide.policies.profile import (
    PICKERS,
    HistoryTerms,
    Picker,
    PickerConfig,
    Profile,
    Speculation,
    WeightedScorer,
    always,
    by_chance,
    max_score,
    multimodal,
    prefix_based,
    weighted_by_chance,
)
from waymark.decide.policies.scorers import Scores

A, B, C = target("a", active=1), target("b", active=2), target("c", active=3)
ALL = [A, B, C]


def names(scored: Sequence[Scored]) -> list[str]:
    return [each.candidate.instance_id for each in scored]


def scorer(name: str, weight: float, *scores: float | None, is_prefix: bool = False, **needs: bool) -> WeightedScorer:
    """A scorer that gives these scores to a, b and c, wherever they are among the candidates."""
    by_name = dict(zip("abc", scores, strict=False))

    def score(request: RoutingRequest, candidates: Sequence[Candidate]) -> Scores:
        return [by_name[each.instance_id] for each in candidates]

    return WeightedScorer(name, weight, score, is_prefix=is_prefix, **needs)


def without(*left_out: str) -> Callable[[RoutingRequest, Sequence[Candidate]], list[Candidate]]:
    def keep(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [each for each in candidates if each.instance_id not in left_out]

    return keep


# ---- pickers ------------------------------------------------------------------------------------------


def picked(picker: Picker, scores: Sequence[float], random: Random) -> list[str]:
    """The candidates in the order in which they are taken."""
    numbers = picker(scores, random)
    return [f"t{place}" for place in sorted(range(len(scores)), key=lambda place: -numbers[place])]


@pytest.mark.parametrize("picker", PICKERS)
@settings(max_examples=examples(40))
@given(st.lists(st.floats(-1, 5), max_size=8), st.integers(0, 99))
def test_a_picker_orders_each_candidate_once(picker: str, values: list[float], seed: int) -> None:
    assert sorted(picked(PICKERS[picker], values, Random(seed))) == sorted(f"t{place}" for place in range(len(values)))


def test_the_greatest_score_is_first() -> None:
    assert picked(max_score, (0.1, 0.9, -3.0, 0.5), Random(1)) == ["t1", "t3", "t0", "t2"]


def test_any_may_be_first_by_chance() -> None:
    first = Counter(picked(by_chance, (0.0, 0.0, 9.0), Random(seed))[0] for seed in range(300))
    assert all(60 < first[name] < 140 for name in ("t0", "t1", "t2")), first


def test_a_greater_score_is_more_likely_first_and_a_score_of_zero_is_last() -> None:
    orders = [picked(weighted_by_chance, (3.0, 1.0, 0.0, -1.0), Random(seed)) for seed in range(400)]
    first = Counter(order[0] for order in orders)
    # Three of four, and one of four.
    assert 260 < first["t0"] < 340
    assert first["t0"] + first["t1"] == 400
    assert {frozenset(order[2:]) for order in orders} == {frozenset({"t2", "t3"})}


# ---- deciders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "tokens", "cached", "expected"),
    [
        (100, 100, 0, True),
        (100, 99, 0, False),
        (100, 150, 50, True),
        (100, 150, 51, False),
        (0, 10_000, 0, False),
        (1, 100, 100, False),
        (1, 100, 99, True),
    ],
)
def test_prefill_is_apart_from_so_many_uncached_tokens_on(bound: int, tokens: int, cached: int, expected: bool) -> None:
    halves = target("a", device=cached // 2, shared=cached - cached // 2)
    assert prefix_based(bound)(prompt(tokens), halves) is expected


def test_images_are_encoded_apart() -> None:
    assert multimodal(prompt(10, is_multimodal=True), A)
    assert not multimodal(prompt(10), A)
    assert always(prompt(10), A)


# ---- one profile --------------------------------------------------------------------------------------


def run(profile: Profile, request: RoutingRequest | None = None, some: Sequence[Candidate] = ALL) -> Sequence[Scored]:
    return profile.run(request or prompt(64), some, Random(1))


def test_scores_are_added_by_their_weights() -> None:
    found = run(Profile("p", scorers=(scorer("one", 2.0, 0.5, 1.0, 0.0), scorer("two", 0.5, 1.0, 0.0, None))))
    assert [(each.candidate.instance_id, each.value, dict(each.parts)) for each in found] == [
        ("b", 2.0, {"one": 2.0, "two": 0.0}),
        ("a", 1.5, {"one": 1.0, "two": 0.5}),
        ("c", 0.0, {"one": 0.0, "two": None}),
    ]


@pytest.mark.parametrize(("score", "counts"), [(7.0, 3.0), (-1.0, 0.0), (0.5, 1.5)])
def test_a_score_outside_of_its_range_counts_as_its_end(score: float, counts: float) -> None:
    found = run(Profile("p", scorers=(scorer("one", 3.0, score),)), some=[A])
    assert found[0].value == counts


def test_filters_come_one_behind_the_other_and_before_the_scorers() -> None:
    seen: list[list[str]] = []

    def watch(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
        seen.append([each.instance_id for each in candidates])
        return list(candidates)

    profile = Profile("p", (without("a"), watch, without("c"), watch), (scorer("one", 1.0, 9.0, 0.1, 9.0),))
    assert names(run(profile)) == ["b"]
    assert seen == [["b", "c"], ["b"]]
    assert run(Profile("p", (without("a", "b", "c"),))) == []
    assert run(Profile("p"), some=[]) == []


def test_without_scorers_all_are_equal() -> None:
    first = {names(Profile("p").run(prompt(64), ALL, Random(seed)))[0] for seed in range(50)}
    assert first == {"a", "b", "c"}


# ---- a profile without tokens -------------------------------------------------------------------------


class Places:
    """A key meets these instances in their order."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        return iter([(name, 0) for name in self.names])


def unread(*way: str) -> RoutingRequest:
    return prompt(64, prefix_key=b"k" * 32, has_tokens=False, ring=Places(*way))


def test_the_key_weighs_what_the_scorers_of_a_match_weigh() -> None:
    scorers = (
        scorer("match", 2.0, 0.0, 0.0, 0.0, is_prefix=True),
        scorer("history", 1.0, 0.0, 0.0, 0.0, is_prefix=True),
        scorer("load", 2.5, 1.0, 0.0, 0.0),
    )
    found = run(Profile("p", scorers=scorers), unread("b"))
    assert [(each.candidate.instance_id, each.value) for each in found] == [("b", 3.0), ("a", 2.5), ("c", 0.0)]
    assert found[0].parts["prefix-key"] == 3.0


def test_without_a_scorer_of_matches_the_key_decides_between_equal_ones_alone() -> None:
    load = scorer("load", 1.0, 1.0, 1.0, 0.0)
    assert names(run(Profile("p", scorers=(load,)), unread("c", "b")))[0] == "b"
    equal = Profile("p", scorers=(scorer("load", 1.0, 1.0, 1.0, 1.0),))
    assert names(run(equal, unread("c", "b")))[0] == "c"


def test_a_picker_by_chance_stays_one() -> None:
    profile = Profile("p", picker=by_chance)
    first = {names(profile.run(unread("c"), ALL, Random(seed)))[0] for seed in range(50)}
    assert first == {"a", "b", "c"}


def test_a_filter_leaves_the_target_of_the_key_out() -> None:
    profile = Profile("p", (without("b"),), (scorer("match", 1.0, 0.0, 0.0, 0.0, is_prefix=True),))
    assert names(run(profile, unread("b", "c")))[0] == "c"


# ---- stages -------------------------------------------------------------------------------------------

PROFILES = {
    "decode": Profile("decode", (without("c"),), (scorer("d", 1.0, 1.0, 0.0, 0.0),)),
    "prefill": Profile("prefill", scorers=(scorer("p", 1.0, 0.0, 0.5, 1.0),), endpoints_max=2),
    "encode": Profile("encode", (without("a", "b"),), endpoints_max=5),
    "nobody": Profile("nobody", (without("a", "b", "c"),)),
}


def config(**fields: Any) -> PickerConfig:
    return PickerConfig(PROFILES, "decode", **fields)


def test_decode_alone_is_one_stage() -> None:
    found = config().run(prompt(64), ALL, Random(1))
    assert (names(found.decode), found.prefill, found.encode) == (["a", "b"], (), ())


def test_a_stage_runs_if_its_decider_wants_it_with_as_many_as_it_may_have() -> None:
    asked: list[str] = []

    def decider(request: RoutingRequest, decode: Candidate) -> bool:
        asked.append(decode.instance_id)
        return request.tokens > 50

    both = config(prefill="prefill", encode="encode", prefill_decider=decider, encode_decider=decider)
    found = both.run(prompt(64), ALL, Random(1))
    assert (names(found.prefill), names(found.encode)) == (["c", "b"], ["c"])
    assert asked == ["a", "a"], "they are asked with the target of decode"
    short = both.run(prompt(10), ALL, Random(1))
    assert (names(short.decode), short.prefill, short.encode) == (["a", "b"], (), ())


@pytest.mark.parametrize(
    "fields",
    [{"prefill": "prefill"}, {"prefill_decider": always}, {"prefill": "nobody", "prefill_decider": always}],
    ids=["no decider", "no profile", "nobody fits"],
)
def test_a_stage_that_cannot_be_is_left_out(fields: dict[str, Any]) -> None:
    found = config(**fields).run(prompt(64), ALL, Random(1))
    assert (names(found.decode), list(found.prefill)) == (["a", "b"], [])


def test_without_a_target_of_decode_there_is_no_stage() -> None:
    found = PickerConfig(PROFILES, "nobody", prefill="prefill", prefill_decider=always).run(prompt(64), ALL, Random(1))
    assert (found.decode, found.prefill, found.encode) == ((), (), ())


# ---- what a file needs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "expected"),
    [({}, (False, False)), ({"needs_gauges": True}, (True, False)), ({"needs_answer_times": True}, (False, True))],
)
def test_a_file_needs_what_any_scorer_of_any_profile_needs(needs: dict[str, bool], expected: tuple[bool, bool]) -> None:
    profiles = {
        "one": Profile("one", scorers=(scorer("plain", 1.0, 1.0),)),
        "two": Profile("two", scorers=(scorer("plain", 1.0, 1.0), scorer("other", 1.0, 1.0, **needs))),
    }
    found = PickerConfig(profiles, "one")
    assert (found.needs_gauges, found.needs_answer_times) == expected
    assert (found.speculation, found.history) == (None, None)


def test_terms_say_what_they_are() -> None:
    assert Speculation(True).milliseconds == 2_000
    assert HistoryTerms(5, 4)._asdict() == {"capacity": 5, "prompt_blocks": 4}
