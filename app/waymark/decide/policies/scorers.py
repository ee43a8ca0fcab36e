"""Scorers: each gives every candidate a score from 0 to 1; a profile adds them up, each with its weight.

Names, parameters and formulas come from the ``EndpointPickerConfig`` plugins of llm-d's router and of Heimdall, which
began as a copy of that router. A scorer of gauges gives None, and not 0, to a candidate without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.decide.policies import latency
from waymark.decide.policies.columns import columns_of
from waymark.decide.policies.policy import Candidate, Constant, RoutingRequest, Values, least_is_one
from waymark.domain.targets import Gauges

Scores: TypeAlias = Sequence[float | None]
"""The scores of the candidates, in their order."""
ScoreFunction: TypeAlias = Callable[[RoutingRequest, Sequence[Candidate], Values], Scores]


@record(frozen=True, slots=True)
class Scorer:
    """A scorer by its plugin type."""

    name: str
    sentence: str
    score: ScoreFunction
    parameters: tuple[Constant, ...] = ()
    needs_gauges: bool = False
    needs_answer_times: bool = False
    is_prefix: bool = False
    """Whether it scores a target's match of the prompt."""


# ---- scores by cache -------------------------------------------------------------------------------


def _precise_prefix(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    whole = request.blocks * request.block_size
    if whole == 0:
        return [0.0] * len(candidates)
    return columns_of(candidates).by_match(
        lambda candidate: (candidate.device + 0.8 * (candidate.matched - candidate.device)) / whole
    )


def _expected_prefix(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    whole = min(request.blocks, int(values.number("maxPrefixBlocksToMatch"))) * request.block_size
    if whole == 0:
        return [0.0] * len(candidates)
    return columns_of(candidates).by_match(lambda candidate: min(_history(candidate), whole) / whole)


def _history(candidate: Candidate) -> int:
    return candidate.expected if candidate.history is None else candidate.history


def _no_hit_lru(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    columns = columns_of(candidates)
    if any(columns.by_match(lambda candidate: candidate.matched or candidate.expected or candidate.history or 0)):
        return [0.5] * len(columns)
    if len(columns) == 1:
        return [1.0]
    # Those that never took a cold request come first, in their order; then the one that did so longest ago.
    places = sorted(range(len(columns)), key=columns.last_cold.__getitem__)
    scores = [0.0] * len(columns)
    for rank, index in enumerate(places):
        scores[index] = 1.0 - rank / (len(columns) - 1)
    return scores


def _session(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    return [1.0 if instance == request.session else 0.0 for instance in columns_of(candidates).instances]


# ---- load ------------------------------------------------------------------------------------------


def _active_requests(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    columns = columns_of(candidates)
    active, requests = columns.active, columns.requests
    most, idle, best_busy = max(requests), values.number("idleThreshold"), values.number("maxBusyScore")
    return [
        1.0 if count <= idle else (most - weighted) / most * best_busy
        for count, weighted in zip(active, requests, strict=True)
    ]


def _lmetric(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    columns, size = columns_of(candidates), request.block_size
    new = columns.by_match(lambda candidate: (request.blocks - candidate.matched // size) * size)
    costs = [tokens * (requests + 1) for tokens, requests in zip(new, columns.requests, strict=True)]
    return least_is_one(costs)


# ---- scores by gauges ------------------------------------------------------------------------------


def _kv_cache(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    return columns_of(candidates).by_gauges("free", free_shares)


def _queue(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    return columns_of(candidates).by_gauges("waiting", shortest_queues)


def _running(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    return columns_of(candidates).by_gauges(
        "running", lambda gauges: _by_gauge(gauges, lambda reading: reading.running)
    )


def _load_aware(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    threshold = values.number("threshold")
    return columns_of(candidates).by_gauges(
        ("load", threshold),
        lambda gauges: [
            None if reading is None else 0.5 * (1.0 - min(reading.waiting, threshold) / threshold) for reading in gauges
        ],
    )


def _adapter(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> Scores:
    return [
        None if gauges is None else _of_adapter(request.lora_name, gauges) for gauges in columns_of(candidates).gauges
    ]


def _of_adapter(name: str | None, gauges: Gauges) -> float:
    if name in gauges.adapters_running:
        return 1.0
    if len(gauges.adapters_running) + len(gauges.adapters_waiting) < gauges.adapters_max:
        return 0.8
    return 0.6 if name in gauges.adapters_waiting else 0.0


# ---- labels ----------------------------------------------------------------------------------------

CONTEXT_LABEL = "mif.moreh.io/context-length-range"


def context_ranges(text: str) -> list[tuple[int, int]]:
    """Return ``"0-2048,8192-32768"`` as pairs of least and most tokens. Raise ``InvalidValue`` for any other text."""
    ranges = []
    for part in text.split(","):
        least, dash, most = part.partition("-")
        if not (dash and least.strip().isdecimal() and most.strip().isdecimal() and int(least) <= int(most)):
            raise InvalidValue(f"a range of context lengths is {shown(part)}; it must be least-most, such as 0-2048")
        ranges.append((int(least), int(most)))
    return ranges


def context_score(tokens: int, label: str | None) -> float:
    """Return how well a range fits: 0.3 to 1 inside, tighter and with more room above is better; below 0.3 outside."""
    if label is None:
        return 0.5
    try:
        return max(_in_range(tokens, least, most) for least, most in context_ranges(label))
    except InvalidValue:
        return 0.0  # a label is the operator's, and no request waits for its repair


def _in_range(tokens: int, least: int, most: int) -> float:
    if not least <= tokens <= most:
        distance = tokens - most if tokens > most else least - tokens
        return 0.3 / (1.0 + distance / 1000.0)
    width = most - least
    if width == 0:
        return 1.0
    return 0.3 + 0.7 * (0.7 / (1.0 + width / 10_000.0) + 0.3 * (most - tokens) / width)


# ---- how they are made ----------------------------------------------------------------------------


def free_shares(gauges: Sequence[Gauges | None]) -> list[float | None]:
    """Return the free share of each KV cache."""
    return [None if reading is None else 1.0 - reading.kv_usage for reading in gauges]


def shortest_queues(gauges: Sequence[Gauges | None]) -> list[float | None]:
    """Return 1 for the shortest queue, and 0 for the longest."""
    return _by_gauge(gauges, lambda reading: reading.waiting)


def _by_gauge(gauges: Sequence[Gauges | None], amount: Callable[[Gauges], int]) -> list[float | None]:
    """Return the scores of ``least_is_one`` for engines with gauges; None for the others."""
    costs = [float(amount(reading)) for reading in gauges if reading is not None]
    scores = iter(least_is_one(costs) if costs else ())
    return [None if reading is None else next(scores) for reading in gauges]


# ---- the table ------------------------------------------------------------------------------------

_SCORERS = (
    Scorer(
        "precise-prefix-cache-scorer",
        "share of the prompt's blocks that are cached: 1 for a block on the device, 0.8 below it",
        _precise_prefix,
        is_prefix=True,
    ),
    Scorer(
        "prefix-cache-scorer",
        "share of the prompt that the target will probably have, because it was sent there before",
        _expected_prefix,
        (
            Constant("maxPrefixBlocksToMatch", 256.0, "Blocks that are looked at.", least=1, most=1e6),
            Constant("lruCapacityPerServer", 31_250.0, "Blocks that are remembered of a target.", least=1, most=1e6),
        ),
        is_prefix=True,
    ),
    Scorer(
        "no-hit-lru-scorer",
        "if no target has a block of the prompt: 1 for the target that got its last such prompt longest ago, less for "
        "each later one; else 0.5",
        _no_hit_lru,
    ),
    Scorer("session-affinity-scorer", "1 for the target that the session token names", _session),
    Scorer(
        "active-request-scorer",
        "1 up to `idleThreshold` requests in progress, and less with each further request",
        _active_requests,
        (
            Constant("idleThreshold", 0.0, "Requests up to which a target is idle.", most=1e6),
            Constant("maxBusyScore", 1.0, "The best score of a busy target.", most=1),
        ),
    ),
    Scorer("lmetric-scorer", "1 for the lowest `new blocks * (active + 1)`", _lmetric),
    Scorer(
        "predicted-latency-scorer",
        "1 for the shortest predicted times, to the first token and of each further one. If the client asks for times, "
        "a target that would be late gets 0, unless all would",
        latency.predicted_latency,
        latency.PARAMETERS,
        needs_answer_times=True,
    ),
    Scorer("kv-cache-utilization-scorer", "free share of the KV cache", _kv_cache, needs_gauges=True),
    Scorer("queue-scorer", "1 for the shortest queue, 0 for the longest", _queue, needs_gauges=True),
    Scorer("running-requests-size-scorer", "1 for the fewest running requests", _running, needs_gauges=True),
    Scorer(
        "load-aware-scorer",
        "0.5 for an empty queue, falling to 0 at `threshold`",
        _load_aware,
        (Constant("threshold", 128.0, "Waiting requests from which the score is 0.", least=1, most=1e6),),
        needs_gauges=True,
    ),
    Scorer(
        "lora-affinity-scorer",
        "1 if the engine runs the adapter, 0.8 if it has room for it, 0.6 if the adapter waits there, else 0",
        _adapter,
        needs_gauges=True,
    ),
)
SCORERS: Mapping[str, Scorer] = {scorer.name: scorer for scorer in _SCORERS}


def scored_by_label(request: RoutingRequest, candidates: Sequence[Candidate], label: str) -> Scores:
    """Score as ``context-length-aware`` does: by the range of lengths in each candidate's label."""
    texts = [labels.get(label) for labels in columns_of(candidates).labels]
    scores = {text: context_score(request.tokens, text) for text in set(texts)}
    return [scores[text] for text in texts]
