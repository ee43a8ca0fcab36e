"""The policies: one function and one row of ``PRESETS`` each.

Most are published by others, and keep the constants they were published with. Costs are in tokens or blocks and the
least wins; scores are without unit and the greatest wins. A candidate's value is a sum of named ``parts``, so that a
decision can be explained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.decide.policies.columns import CandidateColumns, ColumnSums, RankedColumns, SumParts, columns_of
from waymark.decide.policies.policy import (
    CREDITS,
    Candidate,
    Constant,
    Inputs,
    Linear,
    LoadCost,
    LoadWeights,
    Preset,
    Ranking,
    RoutingRequest,
    Scored,
    Values,
    count_credits,
    count_new,
    nearest,
    ranked,
)
from waymark.decide.policies.ring import EPSILON, POINTS, Ring, bound
from waymark.decide.policies.scorers import free_shares, shortest_queues
from waymark.domain.status import Decision

# ---- ours -----------------------------------------------------------------------------------------


def _work(request: RoutingRequest, values: Values) -> Callable[[Candidate], Scored]:
    new_of = count_new(request, values)
    new_weight, active_weight = values.number("new_weight"), values.number("active_weight")

    def scored(candidate: Candidate) -> Scored:
        wait, new = candidate.queue, new_weight * new_of(candidate)
        active = active_weight * candidate.requests
        return Scored(candidate, wait + new + active, {"wait": wait, "new": new, "active": active})

    return scored


def _least_work(inputs: Inputs) -> Ranking:
    request, candidates, values, random, *_ = inputs
    return ranked(list(map(_work(request, values), candidates)), random, is_cost=True)


def _longest(inputs: Inputs) -> Ranking:
    request, candidates, values, random, *_ = inputs
    longest_wait = min([candidate.queue for candidate in candidates]) + values.number("wait_max")
    new_of, scored = count_new(request, values), []
    for candidate in candidates:
        new, wait = _LONGEST_NEW * new_of(candidate), candidate.queue
        penalty = _OVER if wait > longest_wait else 0.0
        scored.append(Scored(candidate, new + wait + penalty, {"new": new, "wait": wait, "over": penalty}))
    return ranked(scored, random, is_cost=True)


#: A token to be computed outweighs any queue that ``wait_max`` lets through.
_LONGEST_NEW = 2.0**20
#: The cost of a longer queue: more than any prompt, and still exact beside the other parts.
_OVER = 2.0**52

# ---- published by others --------------------------------------------------------------------------


def _composite(inputs: Inputs) -> Ranking:
    columns, values = columns_of(inputs.candidates), inputs.values
    overlaps = _overlaps(columns, values)
    if (fallback := _fallback(overlaps, values)) is not None:
        order = fallback.rank(inputs._replace(values=fallback.values({}))).scored
        return Ranking([Scored(candidate_scored.candidate, 0.0, {}) for candidate_scored in order], Decision.FALLBACK)
    requests = columns.requests
    most_active = max(requests)
    loads = [1.0 - active / most_active for active in requests] if most_active else [1.0] * len(columns)
    parts: SumParts = {
        "overlap": (values.number("overlap_weight"), overlaps),
        "load": (values.number("load_weight"), loads),
        "health": (values.number("health_weight"), columns.health),
    }
    return Ranking(ColumnSums(columns, parts).ranked(inputs.request, inputs.random, inputs.most, is_cost=False))


def _overlaps(columns: CandidateColumns, values: Values) -> list[float]:
    """Return the share of the longest match that each candidate has."""
    most_matched = max(columns.by_match(lambda candidate: candidate.matched), default=0)
    device, lower = values.number("gpu_tier_weight"), values.number("storage_tier_weight")

    def overlap(candidate: Candidate) -> float:
        tiered = device * candidate.device + lower * (candidate.matched - candidate.device)
        return tiered / most_matched if most_matched else 0.0

    return columns.by_match(overlap)


def _fallback(overlaps: Sequence[float], values: Values) -> Preset | None:
    """Return the policy that decides instead of ``composite``, if the best overlap is too low."""
    is_low = max(overlaps, default=0.0) < values.number("min_overlap_threshold")
    return PRESETS[values.word("fallback")] if is_low else None


def _composite_falls_back(having: Sequence[Candidate], values: Values) -> Preset | None:
    return _fallback(_overlaps(columns_of(having), values), values)


def _check_composite(values: Values) -> None:
    weights = {name: values.number(name) for name in ("overlap_weight", "load_weight", "health_weight")}
    total = sum(weights.values())
    if abs(total - 1.0) > 1e-6:
        text = ", ".join(f"{name} {value:g}" for name, value in weights.items())
        raise InvalidValue(f"{text}: the three weights add up to {total:g}; they must add up to 1", field="overrides")


def _dynamo(inputs: Inputs) -> Ranking:
    request, candidates, values, *_ = inputs
    tokens, size = request.tokens, request.block_size
    prefill_weight = values.number("overlap_score_weight") * values.number("prefill_load_scale")
    credits, columns = count_credits(values), columns_of(candidates)
    new = columns.by_match(lambda candidate: max(0.0, tokens - credits(candidate)))
    waits = columns.queue if values.is_on("track_prefill_tokens") else [0.0] * len(new)
    parts: SumParts = {
        "prefill": (1.0, [prefill_weight * (wait + rest) / size for wait, rest in zip(waits, new, strict=True)]),
        "decode": (1.0, [(context + tokens) / size for context in columns.context]),
        "active": (values.number("active_weight"), columns.requests),
    }
    return Ranking(_softened(ColumnSums(columns, parts), inputs))


def _softened(sums: ColumnSums, inputs: Inputs) -> Sequence[Scored]:
    """Return the candidates, lowest cost first. With a temperature above 0, drawn by a softmax over the costs, scaled
    to their range.
    """
    request, _, values, random, _, places, _ = inputs
    draw, log, least = random.random, math.log, min(sums.values)
    scale = (max(sums.values) - least) * values.number("router_temperature")
    if scale == 0:
        return sums.ranked(request, random, places, is_cost=True)
    # The largest of logits with Gumbel noise is a draw from their softmax, and so is each next one of the rest.
    noisy_costs = [(value - least) / scale + log(-log(1.0 - draw())) for value in sums.values]
    return RankedColumns(sums, noisy_costs, [0.0] * len(noisy_costs), 1.0, places)


def _hicache(inputs: Inputs) -> Ranking:
    request, candidates, values, random, *_ = inputs
    size = request.block_size
    scored = []
    for candidate in candidates:
        beyond = request.pool_blocks_beyond(candidate.device // size)
        prefill = candidate.queue + request.tokens - (candidate.device if values.is_on("deduct_device") else 0)
        reduction = values.number("shared_cache_multiplier") * beyond * size
        parts = {
            "prefill": values.number("overlap_score_weight") * max(0.0, prefill - reduction) / size,
            "decode": candidate.context / candidate.weight / size,
        }
        scored.append(Scored.sum_of(candidate, parts))
    return ranked(scored, random, is_cost=True)


def _lmetric(inputs: Inputs) -> Ranking:
    request, candidates, values, random, *_ = inputs
    new_of = count_new(request, values)
    scored = []
    for candidate in candidates:
        work = candidate.queue + new_of(candidate)
        requests = candidate.requests + 1
        scored.append(Scored(candidate, work * requests, {"work": work, "requests": requests}))
    return ranked(scored, random, is_cost=True)


def _llm_d(inputs: Inputs) -> Ranking:
    columns, values = columns_of(inputs.candidates), inputs.values
    weight, tokens = values.number("prefix_weight"), max(1, inputs.request.tokens)
    parts: SumParts = {
        "prefix": (1.0, columns.by_match(lambda candidate: weight * candidate.matched / tokens)),
        "kv_cache": (values.number("kv_cache_weight"), columns.by_gauges("free", free_shares)),
        "queue": (values.number("queue_weight"), columns.by_gauges("waiting", shortest_queues)),
    }
    return Ranking(ColumnSums(columns, parts).ranked(inputs.request, inputs.random, inputs.most, is_cost=False))


def _sticky(inputs: Inputs) -> Ranking:
    request, candidates, values, random, ring, most, limit = inputs
    if request.prefix_key is None:
        scored = [Scored(candidate, candidate.requests, {"active": candidate.requests}) for candidate in candidates]
        return ranked(scored, random, is_cost=True, decision=Decision.FALLBACK)
    by_name = {(candidate.instance_id, candidate.dp_rank): candidate for candidate in candidates}
    ring = ring or Ring(by_name, int(values.number("virtual_nodes")))
    if limit is None:
        active = sum(candidate.active for candidate in candidates)
        limit = bound(active, len(candidates), values.number("load_factor_epsilon"))
    under_bound: list[Candidate] = []
    over_bound: list[Candidate] = []
    home: Candidate | None = None
    for name in ring.clockwise(request.prefix_key):
        candidate = by_name.get(name)
        if candidate is None:
            continue
        home = home or candidate
        (under_bound if candidate.active < limit else over_bound).append(candidate)
        if len(under_bound) == most:
            break
    ordered = [*under_bound, *over_bound][:most]
    decision = Decision.PREFIX_HASH if ordered[0] is home else Decision.OVERFLOW
    return Ranking(
        [Scored(candidate, float(place), {"place": float(place)}) for place, candidate in enumerate(ordered)], decision
    )


# ---- who can win --------------------------------------------------------------------------------

# All targets that have nothing of a prompt have the same tokens to compute, so the cost of such a target is a function
# of its load. Each of these functions grows with the parts that it names: of two targets, the one whose parts are all
# lower costs no more, whatever the prompt. So if k of them cost no more than a target, it is not among the k best.


_QUEUE, _REQUESTS = LoadWeights(tokens=1.0), LoadWeights(requests=1.0)


def _least_work_by_load(request: RoutingRequest, values: Values) -> LoadCost:
    # wait + new_weight * new + active_weight * active, and new is the same for all.
    return LoadCost(LoadWeights(tokens=1.0, requests=values.number("active_weight")))


def _longest_by_load(request: RoutingRequest, values: Values) -> LoadCost:
    # The tokens to compute are the same for all, and a shorter queue is over the bound only if a longer one is.
    # The shortest queue of all, which sets the bound, is on the list: it is the first of the others, or has a part.
    return LoadCost(_QUEUE)


def _dynamo_by_load(request: RoutingRequest, values: Values) -> LoadCost | None:
    if values.number("router_temperature"):
        return None  # any target may be drawn
    # The cost in blocks, times the size of a block, without the prompt's own tokens, which all would have to compute.
    prefill = values.number("overlap_score_weight") * values.number("prefill_load_scale")
    tokens = prefill if values.is_on("track_prefill_tokens") else 0.0
    return LoadCost(LoadWeights(tokens, values.number("active_weight") * request.block_size, 1.0))


def _hicache_by_load(request: RoutingRequest, values: Values) -> LoadCost:
    # The cost itself: a pool's blocks are the same for all, and it grows with the queue and with the context.
    tokens, size, weight = request.tokens, request.block_size, values.number("overlap_score_weight")
    reduction = values.number("shared_cache_multiplier") * request.pool_blocks_beyond(0) * size
    return LoadCost(
        _QUEUE,
        LoadWeights(context=1.0),
        lambda wait, context: weight * max(0.0, wait + tokens - reduction) / size + context / size,
    )


def _lmetric_by_load(request: RoutingRequest, values: Values) -> LoadCost:
    # (wait + new) * (active + 1) is not a sum: which of two targets is better depends on the prompt. But it grows with
    # both, so a target cannot win if another has a shorter queue and fewer requests.
    tokens = request.tokens
    return LoadCost(_REQUESTS, _QUEUE, lambda requests, wait: (wait + tokens) * (requests + 1))


# ---- the table ----------------------------------------------------------------------------------

_PRESETS = (
    Preset(
        "least-work",
        "Waymark",
        "least `wait + new_weight * new + active_weight * active`",
        _least_work,
        is_cost=True,
        constants=(
            *CREDITS,
            Constant("new_weight", 3.0, "Cost of one token to compute: 1 for this request, and 2 for the requests that "
                     "wait behind it and the blocks that it evicts.", most=1e6),
            Constant("active_weight", 512.0, "Cost of one request in progress, in tokens.", most=1e9),
        ),
        linear=lambda values: Linear(values.number("new_weight"), values.number("active_weight")),
        sum_of=_work,
        by_load=_least_work_by_load,
    ),
    Preset(
        "composite",
        "Continuum Router",
        "greatest `overlap_weight * overlap * tier + load_weight * (1 - active / most active) + health_weight * "
        "health`; the policy `fallback` decides if the best overlap is below `min_overlap_threshold`",
        _composite,
        is_cost=False,
        constants=(
            Constant("overlap_weight", 0.6, "Weight of the cached share of the prompt.", most=1),
            Constant("load_weight", 0.3, "Weight of the number of requests in progress.", most=1),
            Constant("health_weight", 0.1, "Weight of the share of requests that succeeded.", most=1),
            Constant("gpu_tier_weight", 1.0, "What a token on the device is worth.", most=16),
            Constant("storage_tier_weight", 0.6, "What a token below the device is worth.", most=16),
            Constant("min_overlap_threshold", 0.3, "Minimum overlap. If the best overlap is lower, the policy "
                     "`fallback` decides.", most=1),
            Constant("fallback", "sticky", "The policy that decides below `min_overlap_threshold`.",
                     choices=("sticky", "least-work", "lmetric", "longest")),
        ),
        check=_check_composite,
        falls_back=_composite_falls_back,
    ),
    Preset(
        "dynamo",
        "NVIDIA Dynamo",
        "least `prefill_load_scale * (wait + prompt - cached) / block_size + (context + prompt) / block_size + "
        "active_weight * active`",
        _dynamo,
        is_cost=True,
        constants=(
            *CREDITS,
            Constant("prefill_load_scale", 1.0, "Weight of the blocks to be computed.", most=1e6),
            Constant("overlap_score_weight", 1.0, "Older name of `prefill_load_scale`. The two are multiplied.",
                     most=1e6),
            Constant("active_weight", 0.0, "Cost of one request in progress, in blocks.", most=1e9),
            Constant("router_temperature", 0.0, "0 picks the lowest cost. A higher value picks at random, with "
                     "softmax probabilities of the costs.", most=1e3),
            Constant("track_prefill_tokens", True, "Whether the prefill tokens that wait at a target count."),
            Constant("assume_kv_reuse", True, "No effect: a block that two requests share counts twice."),
        ),
        by_load=_dynamo_by_load,
    ),
    Preset(
        "hicache",
        "SGLang HiCache with Dynamo",
        "least `overlap_score_weight * max(0, prefill - shared_cache_multiplier * pool blocks beyond the device * "
        "block_size) / block_size + decode blocks`",
        _hicache,
        is_cost=True,
        constants=(
            Constant("overlap_score_weight", 1.0, "Weight of the blocks to be computed.", most=1e6),
            Constant("shared_cache_multiplier", 0.5, "What a block in the pool is worth; 0 ignores the pool.", most=16),
            Constant("deduct_device", True, "Whether `prefill` leaves out tokens on the device. `true` follows "
                     "HiCache's code, `false` the example in HiCache's documentation."),
        ),
        by_load=_hicache_by_load,
    ),
    Preset(
        "lmetric",
        "LMetric",
        "least `(wait + new) * (active + 1)`",
        _lmetric,
        is_cost=True,
        constants=CREDITS,
        by_load=_lmetric_by_load,
    ),
    Preset(
        "llm-d",
        "llm-d's guide",
        "greatest `prefix_weight * prefix + kv_cache_weight * (1 - kv_usage) + queue_weight * queue`",
        _llm_d,
        is_cost=False,
        constants=(
            Constant("prefix_weight", 2.0, "Weight of the share of the prompt that is cached.", most=1e6),
            Constant("kv_cache_weight", 1.0, "Weight of the free share of the KV cache.", most=1e6),
            Constant("queue_weight", 1.0, "Weight of the queue: 1 for the shortest queue of the candidates, 0 for the "
                     "longest.", most=1e6),
        ),
        needs_gauges=True,
    ),
    Preset(
        "sticky",
        "consistent hashing with bounded loads",
        "the first target clockwise from the prefix key with `active < ceil((1 + load_factor_epsilon) * mean)`; "
        "without a key least active",
        _sticky,
        is_cost=True,
        constants=(
            Constant("load_factor_epsilon", EPSILON, "How far the requests of a target may be above the mean, as a "
                     "share of the mean.", least=0.01, most=10),
            Constant("virtual_nodes", float(POINTS), "Number of points of each target on the hash ring. All targets "
                     "together have at most 65,536, unless each has 150 or fewer.", least=1, most=10_000),
        ),
    ),
    Preset(
        "longest",
        "Waymark",
        "longest match among targets whose wait is at most `wait_max` above the least",
        _longest,
        is_cost=True,
        constants=(*CREDITS, Constant("wait_max", 16_384.0, "How many tokens longer than the shortest wait the wait "
                                      "of a target may be.", most=1e9)),
        linear=lambda values: Linear(_LONGEST_NEW, 0.0),
        by_load=_longest_by_load,
    ),
)  # fmt: skip

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}
DEFAULT = "least-work"


def preset(name: str, field: str = "policy") -> Preset:
    """Return a policy by name. ``InvalidValue`` names the nearest one."""
    row = PRESETS.get(name)
    if row is None:
        raise InvalidValue(f"{field} is {shown(name)}, which is no policy; {nearest(name, PRESETS)}", field=field)
    return row
