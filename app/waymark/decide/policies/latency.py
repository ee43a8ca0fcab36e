"""``predicted-latency-scorer``: by the predicted times of an answer, and by the times that its client asks for.

The plugin of llm-d's router asks a model that is trained beside it. Here a straight line through the target's own
latest requests predicts the time to the first token, and another one the time of each further token. A target with too
few requests is predicted from those of all candidates together.

Headroom is the rest of a time that the client asks for. If it does not ask for a time, less is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from waymark.decide.policies.policy import Candidate, Constant, RoutingRequest, Values, least_is_one, least_new
from waymark.domain.answer_times import NO_SUMS, AnswerTimes, TimeSums

_STRATEGY = "headroomSelectionStrategy"
PARAMETERS = (
    Constant("sloBufferFactor", 1.0, "By this the times that a client asks for are multiplied.", least=0.01, most=100),
    Constant("headroomTTFTWeight", 0.8, "The weight of the first token between targets in time.", most=1e6),
    Constant("headroomTPOTWeight", 0.2, "The weight of further tokens between targets in time.", most=1e6),
    Constant("negHeadroomTTFTWeight", 0.8, "The weight of the first token if no target is in time.", most=1e6),
    Constant("negHeadroomTPOTWeight", 0.2, "The weight of further tokens if no target is in time.", most=1e6),
    Constant(
        _STRATEGY,
        "least",
        "Of the targets in time, the one with the least headroom, or with the most, is the best.",
        choices=("least", "most", "composite-least", "composite-most", "composite-only"),
    ),
    Constant("compositeKVWeight", 1.0, "The weight of the free share of the KV cache in a composite.", most=1e6),
    Constant("compositeQueueWeight", 1.0, "The weight of a short queue in a composite.", most=1e6),
    Constant("compositePrefixWeight", 1.0, "The weight of the cached share of the prompt in a composite.", most=1e6),
)
#: The score of the worst target in time: more than any late one has.
_LEAST_IN_TIME = 0.01


def needs_gauges(values: Values) -> bool:
    """Return whether the scorer reads gauges, as each composite strategy does."""
    return values.word(_STRATEGY).startswith("composite")


class _Aspect(NamedTuple):
    """One of the two times of an answer, for each candidate."""

    predicted: Sequence[float]
    bound: float
    """The time that the client asks for, with the buffer; 0 without one."""
    weight: float
    """Its weight in a comparison of targets that are predicted to be in time."""
    weight_late: float

    def is_in_time(self, index: int) -> bool:
        return not self.bound or self.predicted[index] <= self.bound

    def late(self, index: int) -> float:
        """Return the ms beyond the bound."""
        return max(0.0, self.predicted[index] - self.bound)

    def headroom(self, index: int, *, is_least: bool) -> float:
        """Return a cost by which targets in time are compared."""
        return self.bound - self.predicted[index] if is_least and self.bound else self.predicted[index]


def predicted_latency(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> list[float | None]:
    """Score the candidates in time above all late ones, which score 0; if all are late, the least late are best.

    Without any prediction a composite of caches and loads scores them.
    """
    aspects, strategy = _aspects(request, candidates, values), values.word(_STRATEGY)
    if not aspects or strategy == "composite-only":
        return [*_composite(request, candidates, values)]
    everyone = range(len(candidates))
    in_time: Sequence[int] = ()
    if any(aspect.bound for aspect in aspects):
        in_time = [index for index in everyone if all(aspect.is_in_time(index) for aspect in aspects)]
    if not in_time:
        return [*_blend([([aspect.late(index) for index in everyone], aspect.weight_late) for aspect in aspects])]
    is_least = strategy.endswith("least")
    if needs_gauges(values):
        relative = _composite(request, [candidates[index] for index in in_time], values)
        if is_least:
            relative = [1.0 - score for score in relative]
    else:
        relative = _blend(
            [
                ([aspect.headroom(index, is_least=is_least) for index in in_time], aspect.weight)
                for aspect in aspects
            ]
        )  # fmt: skip
    scores: list[float | None] = [0.0] * len(candidates)
    for index, score in zip(in_time, relative, strict=True):
        scores[index] = _LEAST_IN_TIME + (1.0 - _LEAST_IN_TIME) * score
    return scores


def _aspects(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> list[_Aspect]:
    least, buffer, asked = least_new(request), values.number("sloBufferFactor"), request.asked
    prefill = [
        candidate.wait + max(request.tokens - max(candidate.matched, candidate.expected), least)
        for candidate in candidates
    ]
    under_way = [candidate.active + 1 for candidate in candidates]
    first = _predictions(candidates, lambda times: times.first_token, prefill)
    further = _predictions(candidates, lambda times: times.further_tokens, under_way)
    return [
        _Aspect(
            predicted,
            (bound or 0.0) * buffer,
            values.number(f"headroom{name}Weight"),
            values.number(f"negHeadroom{name}Weight"),
        )
        for predicted, bound, name in ((first, asked.ttft_ms, "TTFT"), (further, asked.tpot_ms, "TPOT"))
        if predicted is not None
    ]


def _predictions(
    candidates: Sequence[Candidate], sums_of: Callable[[AnswerTimes], TimeSums], work: Sequence[float]
) -> list[float] | None:
    """Return the ms of each candidate for its work, or None without enough requests of all together."""
    sums = [NO_SUMS if candidate.answer_times is None else sums_of(candidate.answer_times) for candidate in candidates]
    predicted = [own.predict(amount) for own, amount in zip(sums, work, strict=True)]
    if None in predicted:
        together = TimeSums(*map(sum, zip(*sums, strict=True)))
        predicted = [
            together.predict(amount) if ms is None else ms for ms, amount in zip(predicted, work, strict=True)
        ]  # fmt: skip
    complete = [ms for ms in predicted if ms is not None]
    return complete if len(complete) == len(predicted) else None


def _composite(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> list[float]:
    """Score candidates without a prediction: by free caches, short queues, and the prompt's prefix."""
    gauges = [candidate.gauges for candidate in candidates]
    free = [0.0 if gauge is None else 1.0 - gauge.kv_usage for gauge in gauges]
    queue = [float(gauge.waiting) for gauge in gauges if gauge is not None]
    if len(queue) < len(gauges):
        queue = [candidate.requests for candidate in candidates]
    tokens = max(1, request.tokens)
    prefix = [min(1.0, max(candidate.matched, candidate.expected) / tokens) for candidate in candidates]
    parts = (
        (free, values.number("compositeKVWeight")),
        (least_is_one(queue), values.number("compositeQueueWeight")),
        (prefix, values.number("compositePrefixWeight")),
    )
    total = sum(weight for _, weight in parts) or 1.0
    return [sum(weight * part[index] for part, weight in parts) / total for index in range(len(candidates))]


def _blend(costs: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Score the least costs best. Costs that are equal for all do not tell targets apart, so they have no weight."""
    parts = [(least_is_one(column), weight) for column, weight in costs if weight and min(column) < max(column)]
    if not parts:
        return [1.0] * len(costs[0][0])
    total = sum(weight for _, weight in parts)
    return [sum(weight * part[index] for part, weight in parts) / total for index in range(len(parts[0][0]))]
