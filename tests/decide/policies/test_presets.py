"""Policies: the worked examples of those who published them, and what must hold of every one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.decide.policies.conftest import busy, prompt, target
from waymark.base.errors import InvalidValue
from waymark.base.settings import Settings
from waymark.decide.policies import policy as policies
from waymark.decide.policies.policy import Candidate, Inputs, Ranking, RoutingRequest, Scored, count_new
from waymark.decide.policies.presets import DEFAULT, PRESETS, preset
from waymark.decide.policies.ring import Ring, bound
from waymark.domain.answer_times import AnswerTimes, AskedTimes, TimeSums
from waymark.domain.status import Decision
from waymark.domain.targets import Gauges, Role


def rank(name: str, request: RoutingRequest, *candidates: Candidate, seed: int = 1, **overrides: Any) -> Ranking:
    policy = preset(name)
    return policy.rank(Inputs(request, candidates, policy.values(overrides), Random(seed)))


def order(ranking: Ranking) -> list[str]:
    return [each.candidate.instance_id for each in ranking.scored]


def values(ranking: Ranking) -> dict[str, float]:
    return {each.candidate.instance_id: each.value for each in ranking.scored}


# ---- what is published -----------------------------------------------------------------------------

TIERS = {"overlap_score_credit": 1.0, "host_credit": 0.75, "disk_credit": 0.25, "shared_cache_multiplier": 0.5}


def test_policies_have_their_published_constants() -> None:
    defaults = {name: {each.name: each.default for each in policy.constants} for name, policy in PRESETS.items()}
    published = {
        "least-work": TIERS | {"new_weight": 3.0, "active_weight": 512.0},
        "composite": {
            "overlap_weight": 0.6,
            "load_weight": 0.3,
            "health_weight": 0.1,
            "gpu_tier_weight": 1.0,
            "storage_tier_weight": 0.6,
            "min_overlap_threshold": 0.3,
            "fallback": "sticky",
        },
        "dynamo": TIERS
        | {
            "prefill_load_scale": 1.0,
            "overlap_score_weight": 1.0,
            "active_weight": 0.0,
            "router_temperature": 0.0,
            "track_prefill_tokens": True,
            "assume_kv_reuse": True,
        },
        "hicache": {"overlap_score_weight": 1.0, "shared_cache_multiplier": 0.5, "deduct_device": True},
        "lmetric": TIERS,
        "llm-d": {"prefix_weight": 2.0, "kv_cache_weight": 1.0, "queue_weight": 1.0},
        "sticky": {"load_factor_epsilon": 0.25, "virtual_nodes": 150.0},
        "longest": TIERS | {"wait_max": 16_384.0},
    }
    assert defaults | published == defaults
    assert DEFAULT == Settings().policy == "least-work"


# ---- worked examples -------------------------------------------------------------------------------


def test_hicache_worked_example_of_its_page_has_prefill_undeducted() -> None:
    """Four blocks of one token; the pool has all four. W0 has two on the device, W1 none."""
    request = prompt(4, 1, pool=0b1111)
    w0, w1 = target("W0", device=2), target("W1")

    page = rank("hicache", request, w0, w1, deduct_device=False, shared_cache_multiplier=0.5)

    assert values(page) == {"W0": 3.0, "W1": 2.0}
    assert order(page) == ["W1", "W0"]
    # As the program computes it, W0 needs two blocks, and the pool has both.
    program = rank("hicache", request, w0, w1)
    assert values(program) == {"W0": 1.0, "W1": 2.0}


def test_hicache_counts_pool_blocks_behind_a_hole() -> None:
    request = prompt(64, 16, pool=0b1010)

    assert [request.pool_blocks_beyond(n) for n in range(5)] == [2, 2, 1, 1, 0]
    # Multiplier 0 asks the pool and ignores it.
    assert values(rank("hicache", request, target("a"), shared_cache_multiplier=0)) == {"a": 4.0}


def test_dynamo_logs_these_costs_for_a_prompt_of_four_blocks() -> None:
    request = prompt(4, 1)
    workers = (target("1", device=2), target("2", device=1, host=2), target("3", disk=4))

    assert values(rank("dynamo", request, *workers)) == {"1": 6.0, "2": 5.5, "3": 7.0}
    prefill = {each.candidate.instance_id: each.parts["prefill"] for each in rank("dynamo", request, *workers).scored}
    assert prefill == {"1": 2.0, "2": 1.5, "3": 3.0}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # 100 tokens wait; 64 of the prompt, of which 16 are on the device; 200 of requests under way.
        ({}, (100 + 48) / 16 + (200 + 64) / 16),
        ({"overlap_score_credit": 2}, (100 + 32) / 16 + (200 + 64) / 16),
        ({"prefill_load_scale": 10}, 10 * (100 + 48) / 16 + (200 + 64) / 16),
        ({"overlap_score_weight": 3}, 3 * (100 + 48) / 16 + (200 + 64) / 16),
        ({"track_prefill_tokens": False}, 48 / 16 + (200 + 64) / 16),
        ({"active_weight": 7}, (100 + 48) / 16 + (200 + 64) / 16 + 7 * 3),
        ({"assume_kv_reuse": False}, (100 + 48) / 16 + (200 + 64) / 16),
    ],
    ids=str,
)
def test_dynamo_adds_load_and_takes_its_overrides(overrides: dict[str, Any], expected: float) -> None:
    loaded = target("loaded", device=16, wait=100, context=200, active=3)

    assert values(rank("dynamo", prompt(64), loaded, **overrides)) == {"loaded": expected}


def test_a_shared_pool_is_worth_what_its_multiplier_says() -> None:
    pooled = target("pooled", shared=32)

    assert values(rank("dynamo", prompt(64), pooled)) == {"pooled": (64 - 16) / 16 + 4}
    assert values(rank("dynamo", prompt(64), pooled, shared_cache_multiplier=0)) == {"pooled": 4.0 + 4.0}
    assert values(rank("least-work", prompt(64), pooled, shared_cache_multiplier=1)) == {"pooled": 3.0 * 32}


def test_dynamo_temperature_draws_by_a_softmax_over_the_scaled_costs() -> None:
    request = prompt(4, 1)
    workers = (target("near", device=4), target("far"))  # costs 4 and 8, scaled to 0 and 1
    drawn = [order(rank("dynamo", request, *workers, seed=seed, router_temperature=1.0))[0] for seed in range(4000)]

    assert drawn.count("near") / len(drawn) == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    assert order(rank("dynamo", request, *workers, router_temperature=0.0)) == ["near", "far"]

    several = (target("near", device=4), *(target(f"far-{number}") for number in range(4)))
    # The least number there is, times the range of the costs, is 0.
    assert order(rank("dynamo", request, *workers, router_temperature=5e-324))[0] == "near"
    drawn = [order(rank("dynamo", request, *several, seed=seed, router_temperature=0.5))[0] for seed in range(4000)]
    assert drawn.count("near") / len(drawn) == pytest.approx(1 / (1 + 4 * math.exp(-2)), abs=0.03)


def test_weights_that_do_not_add_up_are_refused_with_their_field() -> None:
    with pytest.raises(InvalidValue, match="they must add up to 1") as refused:
        PRESETS["composite"].values({"overlap_weight": 1.0, "load_weight": 0.4})
    assert refused.value.field == "overrides"


def test_composite_is_continuums_weighted_sum() -> None:
    """2048 tokens on the device against 512: the more tokens the higher, and a warm tier counts 0.6."""
    request = prompt(4096)
    hot, warm, little = target("hot", device=2048, active=4), target("warm", disk=2048), target("little", device=512)

    found = rank("composite", request, hot, warm, little)

    assert values(found) == pytest.approx(
        {"hot": 0.6 * 1.0 + 0.0 + 0.1, "warm": 0.6 * 0.6 + 0.3 + 0.1, "little": 0.6 * 0.25 + 0.3 + 0.1}
    )
    assert order(found)[0] == "warm"
    parts = next(each.parts for each in found.scored if each.candidate is warm)
    assert parts == pytest.approx({"overlap": 0.36, "load": 0.3, "health": 0.1})


def test_composite_scores_a_warm_backend_below_a_hot_one_and_a_failing_one_below_both() -> None:
    """100 tokens each, no load: Continuum's page has the first two so."""
    hot, warm = target("hot", device=100), target("warm", disk=100)
    failing = target("failing", device=100, health=0.25)

    assert values(rank("composite", prompt(160), hot, warm, failing)) == pytest.approx(
        {"hot": 1.0, "warm": 0.6 * 0.6 + 0.3 + 0.1, "failing": 0.6 + 0.3 + 0.1 * 0.25}
    )


def test_composite_decides_from_an_overlap_of_three_tenths_on() -> None:
    """The best overlap is 1 by its definition, unless it is on a tier that counts for less."""
    warm = target("warm", disk=100)

    assert rank("composite", prompt(160), warm).decision is Decision.KV_AWARE
    assert rank("composite", prompt(160), warm, storage_tier_weight=0.3).decision is Decision.KV_AWARE
    assert rank("composite", prompt(160), warm, storage_tier_weight=0.29).decision is Decision.FALLBACK
    assert rank("composite", prompt(160), target("cold")).decision is Decision.FALLBACK


def test_composite_with_less_load_than_anybody_and_all_of_it_cached_scores_one() -> None:
    best = target("best", device=1024)

    assert values(rank("composite", prompt(1024), best, target("other", active=3)))["best"] == pytest.approx(1.0)


def test_composite_below_its_threshold_scores_zero_and_falls_back_to_sticky() -> None:
    request = prompt(4096, prefix_key=b"k" * 32)
    # Nobody has anything on a tier that reaches 0.3: the best is warm at 0.6 * 0.4.
    targets = [target("a", disk=400), target("b", disk=1000), target("c")]

    found = rank("composite", request, *targets, storage_tier_weight=0.25)

    assert found.decision is Decision.FALLBACK
    assert set(values(found).values()) == {0.0}
    assert order(found) == order(rank("sticky", request, *targets))
    assert rank("composite", request, *targets, storage_tier_weight=0.3).decision is Decision.KV_AWARE


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        pytest.param({"overlap_weight": 0.7}, "add up to 1.1; they must add up to 1", id="sum"),
        pytest.param({"overlap_weight": -0.1}, "it must be 0 to 1", id="negative"),
        pytest.param({"overlap_weight": math.nan}, "it must be 0 to 1", id="nan"),
        pytest.param({"overlap_weight": "0.6"}, "it must be a number", id="text"),
        pytest.param({"overlap_weight": True}, "it must be a number", id="switch"),
        pytest.param({"min_overlap_treshold": 0.3}, "did you mean min_overlap_threshold?", id="misspelt"),
        pytest.param({"fallback": "random"}, "it must be one of sticky", id="fallback"),
    ],
)
def test_a_wrong_constant_is_refused_by_name(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidValue, match=r"overrides|weight") as refused:
        preset("composite").values(overrides)
    assert sentence in refused.value.sentence


def test_an_unknown_policy_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidValue, match="did you mean least-work"):
        preset("leastwork")


def test_a_long_name_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "get_close_matches", lambda *_, **__: pytest.fail("it was compared"))
    with pytest.raises(InvalidValue, match="known are composite, dynamo"):
        preset("long" * 25_000)


# ---- ours ------------------------------------------------------------------------------------------


def test_least_work_adds_wait_three_times_new_and_512_a_request() -> None:
    request = prompt(8192)
    warm = target("warm", device=4096, wait=5120, active=3)

    (found,) = rank("least-work", request, warm).scored

    assert found.parts == {"wait": 5120.0, "new": 3 * 4096.0, "active": 512 * 3.0}
    assert found.value == 5120 + 3 * 4096 + 1536


def test_a_target_of_twice_the_weight_waits_half_as_long() -> None:
    request = prompt(16)
    large, small = target("large", wait=4000, active=4, weight=2.0), target("small", wait=2100, active=2)

    assert order(rank("least-work", request, large, small)) == ["large", "small"]


@pytest.mark.parametrize(
    ("tokens", "device", "expected"),
    [
        pytest.param(64, 64, 16, id="all-of-it-cached-computes-the-last-block"),
        pytest.param(70, 64, 6, id="the-rest-behind-the-last-block"),
        pytest.param(70, 0, 70, id="nothing-cached"),
        pytest.param(0, 0, 0, id="no-prompt"),
    ],
)
def test_somebody_always_computes_what_is_behind_the_last_block_boundary(
    tokens: int, device: int, expected: int
) -> None:
    assert count_new(prompt(tokens), preset("least-work").values({}))(target("a", device=device)) == expected


def test_what_a_target_will_hold_counts_as_if_it_were_there() -> None:
    constants = preset("least-work").values({})

    assert count_new(prompt(8192), constants)(target("a", expected=4096)) == 4096
    assert count_new(prompt(8192), constants)(target("a", expected=4096, device=6144)) == 2048


def test_longest_passes_over_a_queue_that_is_too_long() -> None:
    request = prompt(8192)
    held, empty = target("held", device=8192, wait=20_000), target("empty")

    assert order(rank("longest", request, held, empty)) == ["empty", "held"]
    assert order(rank("longest", request, held, empty, wait_max=20_000)) == ["held", "empty"]
    for wait, first in ((16_384, "held"), (16_385, "empty")):
        assert order(rank("longest", request, target("held", device=16, wait=wait), empty))[0] == first


def test_lmetric_is_work_times_requests() -> None:
    (found,) = rank("lmetric", prompt(1024), target("a", device=512, wait=100, active=2)).scored

    assert found.value == (100 + 512) * 3


def test_llm_d_leaves_out_what_no_engine_reported() -> None:
    request = prompt(1000, 10)
    told = target("told", device=500, gauges=busy(10, kv_usage=0.4))
    idle = target("idle", gauges=busy(0, kv_usage=0.9))
    silent = target("silent", device=1000)

    found = {each.candidate.instance_id: each for each in rank("llm-d", request, told, idle, silent).scored}

    assert found["told"].parts == pytest.approx({"prefix": 1.0, "kv_cache": 0.6, "queue": 0.0})
    assert found["idle"].parts == pytest.approx({"prefix": 0.0, "kv_cache": 0.1, "queue": 1.0})
    assert found["silent"].parts == {"prefix": 2.0, "kv_cache": None, "queue": None}


# ---- sticky ----------------------------------------------------------------------------------------


def test_a_key_keeps_its_target_until_that_one_is_a_quarter_above_the_mean() -> None:
    request = prompt(64, prefix_key=bytes(range(32)))
    names = ["a", "b", "c", "d"]
    home = order(rank("sticky", request, *map(target, names)))[0]

    # With 8 requests on 4 targets the bound is ceil(1.25 * 9 / 4) = 3.
    def loaded(at_home: int) -> Ranking:
        others = iter([2, 2, 8 - 4 - at_home])
        return rank("sticky", request, *(target(n, active=at_home if n == home else next(others)) for n in names))

    assert (order(loaded(2))[0], loaded(2).decision) == (home, Decision.PREFIX_HASH)
    assert order(loaded(3))[0] != home
    assert loaded(3).decision is Decision.OVERFLOW
    assert sorted(order(loaded(3))) == names


@pytest.mark.parametrize("seed", range(30))
def test_sticky_goes_as_far_on_the_ring_as_its_caller_looks(seed: int) -> None:
    random = Random(seed)
    some = [
        target(f"engine-{n}", dp_rank=n % 2, active=random.choice((0, 0, 2, 9))) for n in range(random.randint(1, 40))
    ]
    ring = Ring([(each.instance_id, each.dp_rank) for each in some] + [("no candidate", 0)])
    policy, request = PRESETS["sticky"], prompt(64, prefix_key=random.randbytes(32))
    inputs = Inputs(request, some, policy.values({}), random, ring)
    limit = math.ceil(1.25 * (sum(each.active for each in some) + 1) / len(some))

    # The order by definition: all clockwise, and then those below the bound before the others.
    clockwise = list(ring.clockwise(cast("bytes", request.prefix_key)))
    places = {name: place for place, name in enumerate(clockwise)}
    by_place = sorted(some, key=lambda each: places[each.instance_id, each.dp_rank])
    expected = sorted(by_place, key=lambda each: each.active >= limit)
    for most in (1, 8, 1_000, None):
        found = policy.rank(inputs._replace(most=most))
        assert [each.candidate for each in found.scored] == expected[:most]
        assert (found.decision is Decision.PREFIX_HASH) == (expected[0] is by_place[0])


def test_a_walk_over_the_ring_that_stops_early_visits_few_points() -> None:
    class Counted(list[Any]):
        visited = 0

        def __getitem__(self, at: Any) -> Any:
            Counted.visited += 1
            return super().__getitem__(at)

    ring = Ring((f"engine-{n}", 0) for n in range(100))
    ring._names = Counted(ring._names)
    next(ring.clockwise(bytes(range(32))))
    assert Counted.visited <= 3
    assert len(list(ring.clockwise(bytes(range(32))))) == 100


def test_without_a_key_sticky_takes_the_least_active() -> None:
    found = rank("sticky", prompt(64), target("a", active=3), target("b", active=1))

    assert (order(found), found.decision) == (["b", "a"], Decision.FALLBACK)


def test_a_target_that_leaves_moves_only_its_own_keys() -> None:
    names = [(f"engine-{i}", 0) for i in range(10)]
    ring, without = Ring(names), Ring(names[1:])
    keys = [Random(seed).randbytes(32) for seed in range(500)]

    before = {key: next(ring.clockwise(key)) for key in keys}
    after = {key: next(without.clockwise(key)) for key in keys}

    assert all(after[key] == home for key, home in before.items() if home != names[0])
    counts = [list(before.values()).count(name) for name in names]
    assert min(counts) > 500 / 10 / 2


def test_the_ring_is_the_same_in_every_process() -> None:
    """Points are XXH3-64 of a text, so these are the places of any replica."""
    ring = Ring([("vllm-1", 0), ("vllm-2", 0), ("vllm-2", 1)])

    places = [list(ring.clockwise(bytes([first]) * 32)) for first in (0, 64, 128, 192)]

    assert all(sorted(place) == [("vllm-1", 0), ("vllm-2", 0), ("vllm-2", 1)] for place in places)
    points = {
        name: [xxh3_64_intdigest(f"{name[0]}|{name[1]}#{i}".encode()) for i in range(150)] for name in sorted(places[0])
    }
    for first, place in zip((0, 64, 128, 192), places, strict=True):
        start = first * 0x0101010101010101
        assert place[0] == min(points, key=lambda name: min((point - start) % 2**64 for point in points[name]))


# ---- of every policy -------------------------------------------------------------------------------

amounts = st.integers(0, 10**6)
gauges = st.none() | st.builds(Gauges, waiting=st.integers(0, 1000), running=amounts, kv_usage=st.floats(0, 1))
candidates = st.lists(
    st.builds(
        Candidate,
        publisher=amounts,
        instance_id=st.text(min_size=1, max_size=8),
        dp_rank=st.integers(0, 7),
        address=st.none(),
        role=st.sampled_from(Role),
        labels=st.just({}),
        weight=st.floats(0.1, 16),
        device=amounts,
        host=amounts,
        disk=amounts,
        shared=amounts,
        expected=amounts,
        history=st.none() | amounts,
        wait=amounts,
        active=st.integers(0, 1000),
        context=amounts,
        health=st.floats(0, 1),
        last_cold=amounts,
        answer_times=st.none() | st.builds(AnswerTimes, *[st.builds(TimeSums, *[st.floats(0, 1e12)] * 5)] * 2),
        gauges=gauges,
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: (each.instance_id, each.dp_rank),
)
requests = st.builds(
    RoutingRequest,
    tokens=amounts,
    block_size=st.sampled_from([1, 16, 64]),
    pool=st.integers(0, 2**64),
    prefix_key=st.none() | st.binary(min_size=32, max_size=32),
    ring=st.none(),
    asked=st.builds(AskedTimes, *[st.none() | st.floats(0.1, 1e6)] * 2),
)


@pytest.mark.parametrize("name", PRESETS)
@given(request=requests, some=candidates, seed=st.integers(0, 2**32))
def test_every_policy_orders_all_candidates_by_finite_values(
    name: str, request: RoutingRequest, some: list[Candidate], seed: int
) -> None:
    policy = PRESETS[name]
    found = policy.rank(Inputs(request, some, policy.values({}), Random(seed))).scored

    assert sorted(id(each.candidate) for each in found) == sorted(map(id, some))
    assert all(math.isfinite(each.value) for each in found)
    ordered = [each.value for each in found]
    assert ordered == sorted(ordered, reverse=not policy.is_cost)
    again = policy.rank(Inputs(request, some, policy.values({}), Random(seed))).scored
    assert [each.candidate for each in again] == [each.candidate for each in found]


@pytest.mark.parametrize("name", [name for name, each in PRESETS.items() if each.linear is not None])
@given(request=requests, some=candidates)
def test_a_linear_cost_is_what_redis_computes_again(name: str, request: RoutingRequest, some: list[Candidate]) -> None:
    policy = PRESETS[name]
    constants = policy.values({})
    assert policy.linear is not None
    linear = policy.linear(constants)

    def cost(each: Scored) -> float:
        load = (each.candidate.wait + linear.active * each.candidate.active) / each.candidate.weight
        return load + linear.new * count_new(request, constants)(each.candidate) + each.parts.get("over", 0.0)  # type: ignore[operator]

    for each in policy.rank(Inputs(request, some, constants, Random(1))).scored:
        assert cost(each) == pytest.approx(each.value)


def test_equal_candidates_are_taken_by_chance() -> None:
    request = prompt(64)
    taken = {order(rank("least-work", request, *map(target, "abcd"), seed=seed))[0] for seed in range(100)}

    assert taken == set("abcd")


@pytest.mark.parametrize(
    ("active", "targets", "epsilon", "expected"), [(0, 4, 0.25, 1), (3, 4, 0.0, 1), (4, 4, 0.0, 2), (7, 4, 0.25, 3)]
)
def test_the_bound_counts_the_new_request_and_is_rounded_up(
    active: int, targets: int, epsilon: float, expected: int
) -> None:
    assert bound(active, targets, epsilon) == expected


# ---- against their formulas, written out ---------------------------------------------------------------

#: Other values than their own, all different: one that stands for another is seen.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "least-work": {"overlap_score_credit": 0.9, "host_credit": 0.7, "disk_credit": 0.3, "shared_cache_multiplier": 0.6,
                   "new_weight": 5, "active_weight": 77},
    "longest": {"overlap_score_credit": 0.9, "host_credit": 0.7, "disk_credit": 0.3, "shared_cache_multiplier": 0.6,
                "wait_max": 100},
    "lmetric": {"overlap_score_credit": 0.9, "host_credit": 0.7, "disk_credit": 0.3, "shared_cache_multiplier": 0.6},
    "dynamo": {"overlap_score_credit": 0.9, "host_credit": 0.7, "disk_credit": 0.3, "shared_cache_multiplier": 0.6,
               "prefill_load_scale": 3, "overlap_score_weight": 5, "active_weight": 7},
    "hicache": {"overlap_score_weight": 3, "shared_cache_multiplier": 0.7},
    "llm-d": {"prefix_weight": 5, "kv_cache_weight": 7, "queue_weight": 11},
    "composite": {"overlap_weight": 0.5, "load_weight": 0.2, "health_weight": 0.3, "gpu_tier_weight": 0.9,
                  "storage_tier_weight": 0.7, "min_overlap_threshold": 0},
}  # fmt: skip


def written_out(
    name: str, request: RoutingRequest, each: Candidate, some: list[Candidate], of: Mapping[str, Any]
) -> float:
    """The value of a candidate by the formula of the docs, from the facts alone."""
    size, tokens = request.block_size, request.tokens
    wait, active = each.wait / each.weight, each.active / each.weight
    cached = 0.0
    if "host_credit" in of:
        cached = of["overlap_score_credit"] * each.device + of["host_credit"] * each.host
        cached += of["disk_credit"] * each.disk + of["shared_cache_multiplier"] * each.shared
    rest = tokens % size or min(tokens, size)
    new = max(tokens - max(cached, each.expected), rest)
    matched = each.device + each.host + each.disk + each.shared
    if name == "least-work":
        return wait + of["new_weight"] * new + of["active_weight"] * active
    if name == "lmetric":
        return (wait + new) * (active + 1)
    if name == "longest":
        is_over = wait > min(other.wait / other.weight for other in some) + of["wait_max"]
        return 2**20 * new + wait + (2**52 if is_over else 0)
    if name == "dynamo":
        prefill = of["prefill_load_scale"] * of["overlap_score_weight"] * (wait + max(0.0, tokens - cached)) / size
        return prefill + (each.context / each.weight + tokens) / size + of["active_weight"] * active
    if name == "hicache":
        beyond = bin(request.pool)[2:][::-1][each.device // size :].count("1")
        prefill = wait + tokens - each.device - of["shared_cache_multiplier"] * beyond * size
        return of["overlap_score_weight"] * max(0.0, prefill) / size + each.context / each.weight / size
    if name == "llm-d":
        prefix = of["prefix_weight"] * matched / max(1, tokens)
        if each.gauges is None:
            return prefix
        waiting = [other.gauges.waiting for other in some if other.gauges is not None]
        spread = max(waiting) - min(waiting)
        queue = (max(waiting) - each.gauges.waiting) / spread if spread else 1.0
        return prefix + of["kv_cache_weight"] * (1 - each.gauges.kv_usage) + of["queue_weight"] * queue
    most = max(other.device + other.host + other.disk + other.shared for other in some)
    most_active = max(other.active / other.weight for other in some)
    tiered = of["gpu_tier_weight"] * each.device + of["storage_tier_weight"] * (matched - each.device)
    overlap = tiered / most if most else 0.0
    load = 1 - active / most_active if most_active else 1.0
    return of["overlap_weight"] * overlap + of["load_weight"] * load + of["health_weight"] * each.health


def some_of(random: Random) -> tuple[RoutingRequest, list[Candidate]]:
    """A prompt, and candidates of which each has some of what counts."""
    amounts = random.choice(((0, 1), (0, 17, 900), (0, 40_000, 10**6)))
    tokens, size = random.choice((0, 1, 64, 1000, 40_001)), random.choice((1, 16, 64))
    some = []
    for number in range(random.choice((1, 2, 7))):
        fields = {
            name: random.choice(amounts)
            for name in ("device", "host", "disk", "shared", "expected", "wait", "context")
            if random.random() < 0.7
        }
        gauges = busy(random.randrange(2, 9), 1, random.random()) if random.random() < 0.7 else None
        weight, active = random.choice((0.5, 1.0, 3.0)), random.randrange(6)
        some.append(target(f"t{number}", weight=weight, active=active, health=random.random(), gauges=gauges, **fields))
    return prompt(tokens, size, pool=random.getrandbits(70)), some


@pytest.mark.parametrize("is_own", [True, False], ids=["own constants", "others"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_value_is_that_of_the_formula_and_the_sum_of_its_parts(name: str, is_own: bool) -> None:
    policy = PRESETS[name]
    overrides: Mapping[str, Any] = OTHERS[name]
    if is_own:
        overrides = {"min_overlap_threshold": 0} if name == "composite" else {}
    of = {constant.name: overrides.get(constant.name, constant.default) for constant in policy.constants}
    for seed in range(50):
        request, some = some_of(Random(seed))
        found = policy.rank(Inputs(request, some, policy.values(overrides), Random(seed))).scored
        assert len(found) == len(some)
        for each in found:
            assert each.value == pytest.approx(written_out(name, request, each.candidate, some, of), rel=1e-9, abs=1e-9)
            parts = [part or 0.0 for part in each.parts.values()]
            assert (math.prod(parts) if name == "lmetric" else sum(parts)) == pytest.approx(each.value)


@pytest.mark.parametrize(
    ("waits", "devices", "expected"),
    [
        # 16,384 tokens above the least are not too many, and one more is.
        ([0, 16_384, 16_385], [160, 320, 480], ["b", "a", "c"]),
        ([100, 16_484, 16_485], [160, 320, 480], ["b", "a", "c"]),
        ([16_385, 0, 0], [480, 320, 160], ["b", "c", "a"]),
        ([16_384, 0, 0], [480, 320, 160], ["a", "b", "c"]),
        # Of those that are too long, too, the longest match comes first.
        ([0, 20_000, 20_000], [0, 160, 320], ["a", "c", "b"]),
    ],
)
def test_longest_has_a_bound_that_is_still_short(waits: list[int], devices: list[int], expected: list[str]) -> None:
    some = [target(name, wait=wait, device=device) for name, wait, device in zip("abc", waits, devices, strict=True)]
    assert order(rank("longest", prompt(640), *some)) == expected


def test_a_temperature_draws_between_costs_that_differ_and_equal_ones_are_taken_by_chance() -> None:
    equal = [target(name) for name in "ab"]
    first = {order(rank("dynamo", prompt(64), *equal, seed=seed, router_temperature=0.5))[0] for seed in range(40)}
    assert first == {"a", "b"}
    apart = [target("a"), target("b", wait=1600)]
    for temperature, both in ((0.0, {"a"}), (0.001, {"a"}), (2.0, {"a", "b"})):
        found = [rank("dynamo", prompt(64), *apart, seed=seed, router_temperature=temperature) for seed in range(60)]
        assert {order(each)[0] for each in found} == both
        assert all(values(each) == values(found[0]) for each in found), "the values stay the costs"


@pytest.mark.parametrize(
    ("active_bound", "expected"),
    [
        (None, ["a", "b", "c"]),  # 1.25 * 7 / 3 = 2.9, so that two requests are below the bound
        (2, ["c", "a", "b"]),
        (1, ["a", "b", "c"]),  # all are full, in the order of the ring
        (9, ["a", "b", "c"]),
    ],
)
def test_sticky_takes_the_bound_of_a_caller_that_has_seen_all(active_bound: int | None, expected: list[str]) -> None:
    policy = PRESETS["sticky"]
    some = [target("a", active=2), target("b", active=2), target("c", active=1)]
    some[2] = some[2]._replace(active=2 if active_bound is None else 1)
    ring: Any = SimpleNamespace(clockwise=lambda key: iter([("gone", 0), ("a", 0), ("b", 0), ("c", 0)]))
    request = prompt(64, prefix_key=b"k" * 32)
    found = policy.rank(Inputs(request, some, policy.values({}), Random(1), ring, None, active_bound))
    assert order(found) == expected
    assert found.decision is (Decision.PREFIX_HASH if expected[0] == "a" else Decision.OVERFLOW)
    assert [each.value for each in found.scored] == [0.0, 1.0, 2.0]
    few = policy.rank(Inputs(request, some, policy.values({}), Random(1), ring, 2, active_bound))
    assert order(few) == expected[:2]


@pytest.mark.parametrize("fallback", ["sticky", "least-work", "lmetric", "longest"])
def test_composite_falls_back_to_the_policy_that_it_names(fallback: str) -> None:
    request = prompt(640, prefix_key=b"k" * 32)
    some = [target("a", wait=90, active=4), target("b", wait=800, active=1), target("c", wait=17_000)]
    found = rank("composite", request, *some, fallback=fallback)
    assert order(found) == order(rank(fallback, request, *some))
    assert (found.decision, set(values(found).values())) == (Decision.FALLBACK, {0.0})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_its_name_alone(name: str) -> None:
    assert preset(name) is PRESETS[name]
    with pytest.raises(InvalidValue, match=r"WAYMARK_POLICY is .* which is no policy") as refused:
        preset(f"{name}!", "WAYMARK_POLICY")
    assert refused.value.field == "WAYMARK_POLICY"
    assert f"did you mean {name}?" in refused.value.sentence
