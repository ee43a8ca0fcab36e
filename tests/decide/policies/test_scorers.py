"""Scorers, filters, pickers and deciders, each by the numbers of its published description."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.policies.conftest import busy, prompt, target
from tests.decide.policies.test_presets import candidates, requests
from waymark.decide.policies import filters, profile
from waymark.decide.policies.policy import Candidate, RoutingRequest, Scored, read_constants
from waymark.decide.policies.profile import PICKERS
from waymark.decide.policies.scorers import SCORERS, Scores, context_ranges, context_score, scored_by_label
from waymark.domain.targets import Role

LABEL = "mif.moreh.io/context-length-range"


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


# ---- filters ---------------------------------------------------------------------------------------


def kept(keep: filters.Filter, *some: Candidate, request: RoutingRequest | None = None) -> list[str]:
    return [each.instance_id for each in keep(request or prompt(64), some)]


def test_roles_come_from_the_registration_or_from_a_label() -> None:
    some = [
        target("p", role=Role.PREFILL),
        target("lp", labels={"llm-d.ai/role": "prefill"}),
        target("d", labels={"mif.moreh.io/role": "decode"}),
        target("b", labels={"mif.moreh.io/role": "both"}),
        target("none"),
        target("e", role=Role.ENCODE_PREFILL),
        target("le", labels={"mif.moreh.io/role": "encode"}),
    ]

    assert kept(filters.prefill_filter, *some) == ["p", "lp"]
    assert kept(filters.decode_filter, *some) == ["d", "b", "none"]
    assert kept(filters.encode_filter, *some) == ["e", "le"]


def test_labels_are_kept_by_value_and_by_selector() -> None:
    some = [target("a", labels={"zone": "a", "gpu": "h100"}), target("b", labels={"zone": "b"}), target("c")]

    assert kept(filters.by_label("zone", frozenset("a"), False), *some) == ["a"]
    assert kept(filters.by_label("zone", frozenset("b"), True), *some) == ["b", "c"]
    assert kept(filters.by_selector({"zone": "a"}, []), *some) == ["a"]
    for operator, values, expected in [
        ("In", {"a", "b"}, ["a", "b"]),
        ("NotIn", {"a"}, ["b", "c"]),
        ("Exists", set(), ["a", "b"]),
        ("DoesNotExist", set(), ["c"]),
    ]:
        requirement = filters.Requirement("zone", operator, frozenset(values))
        assert kept(filters.by_selector({}, [requirement]), *some) == expected


def test_context_length_filters_by_the_ranges_of_a_label() -> None:
    some = [
        target("short", labels={LABEL: "0-100"}),
        target("long", labels={LABEL: "0-10,101-9000"}),
        target("any"),
        target("broken", labels={LABEL: "long"}),
    ]

    assert kept(filters.by_context_length(LABEL), *some, request=prompt(2000)) == ["long", "any"]
    assert scored_by_label(prompt(2000), some, LABEL)[2:] == [0.5, 0.0]


# ---- pickers and deciders --------------------------------------------------------------------------


def scored(**values: float) -> list[Scored]:
    return [Scored(target(name), value, {}) for name, value in values.items()]


def first(name: str, some: list[Scored], seeds: int = 3000) -> Counter[str]:
    return Counter(PICKERS[name](some, Random(seed))[0].candidate.instance_id for seed in range(seeds))


def test_the_greatest_score_is_picked_and_equal_ones_by_chance() -> None:
    assert first("max-score-picker", scored(a=0.2, b=0.9, c=0.5)) == {"b": 3000}
    assert set(first("max-score-picker", scored(a=0.9, b=0.9, c=0.5))) == {"a", "b"}


def test_random_pickers_are_fair_and_weighted() -> None:
    fair = first("random-picker", scored(a=0.0, b=1.0))
    assert fair["a"] / 3000 == pytest.approx(0.5, abs=0.04)
    # The chance to be the first is a score's share of the sum.
    weighted = first("weighted-random-picker", scored(a=3.0, b=1.0, never=0.0))
    assert weighted["a"] / 3000 == pytest.approx(0.75, abs=0.04)
    assert weighted["never"] == 0


@pytest.mark.parametrize("name", PICKERS)
def test_a_picker_loses_nobody(name: str) -> None:
    some = scored(a=0.1, b=0.0, c=1.0)

    assert sorted(map(id, PICKERS[name](some, Random(1)))) == sorted(map(id, some))


def test_prefill_is_apart_from_a_number_of_uncached_tokens_on() -> None:
    decide = profile.prefix_based(16)

    assert decide(prompt(64), target("a", device=32, host=16))
    assert not decide(prompt(64), target("a", device=32, disk=17))
    assert not profile.prefix_based(0)(prompt(64), target("a"))
    assert profile.always(prompt(64), target("a"))
    assert profile.multimodal(prompt(64, is_multimodal=True), target("a"))
    assert not profile.multimodal(prompt(64), target("a"))


def test_a_range_of_lengths_includes_its_ends_and_a_registered_role_wins() -> None:
    keep = filters.by_context_length(LABEL)
    some = [target("a", labels={LABEL: "16-64"})]
    assert [len(keep(prompt(tokens), some)) for tokens in (15, 16, 64, 65)] == [0, 1, 1, 0]
    registered = target("b", role=Role.DECODE, labels={filters.ROLE_LABELS[0]: Role.PREFILL.value})
    assert filters.role_of(registered) == Role.DECODE
