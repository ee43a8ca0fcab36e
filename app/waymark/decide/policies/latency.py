"""``predicted-latency-scorer``: by the predicted times of an answer, and by the times that its client asks for.

The plugin of llm-d's router asks a model that is trained beside it. Here a straight line through the target's own
latest requests predicts the time to the first token, and another one the time of each further token. A target with too
few requests is predicted from those of all candidates together.

Headroom is what is left of a time that the client asks for. A time that it does not ask for has none: less is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from waymark.decide.policies.policy import Candidate, Constant, RoutingRequest, Values, least_is_one, least_new
from waymark.domain.answer_times import NO_SUMS, AnswerTimes, TimeSums

_STRATEGY = "headroomSelectionStrategy"
PARAMETERS = (
    Constant("sloBufferFactor", 1.0, "By this the times that a client asks for are multiplied.", least=0.01, most=100),
    Constant("headroomTTFTWeight", 0.8, "The weight of the first token between targets that are in time.", most=1e6),
    Constant("headroomTPOTWeight", 0.2, "The weight of further tokens between targets that are in time.", most=1e6),
    Constant("negHeadroomTTFTWeight", 0.8, "The weight of the first token if no target is in time.", most=1e6),
    Constant("negHeadroomTPOTWeight", 0.2, "The weight of further tokens if no target is in time.", most=1e6),
    Constant(
        _STRATEGY,
        "least",
        "Of the targets that are in time, the one with the least headroom, or with the most, is the best.",
        choices=("least", "most", "composite-least", "composite-most", "composite-only"),
    ),
    Constant("compositeKVWeight", 1.0, "The weight of the free share of the KV cache in a composite.", most=1e6),
    Constant("compositeQueueWeight", 1.0, "The weight of a short queue in a composite.", most=1e6),
    Constant("compositePrefixWeight", 1.0, "The weight of the cached share of the prompt in a composite.", most=1e6),
)
#: What the worst target that is in time scores: more than any that is not.
_LEAST_IN_TIME = 0.01


def needs_gauges(values: Values) -> bool:
    """Return whether a composite is asked for."""
    return values.word(_STRATEGY).startswith("composite")


class _Aspect(NamedTuple):
    """One of the two times of an answer, for each candidate."""

    predicted: Sequence[float]
    asked: float
    """What the client asks for, with the buffer; 0: nothing."""
    weight: float
    """Its weight between targets that are in time."""
    weight_late: float

    def is_in_time(self, at: int) -> bool:
        return not self.asked or self.predicted[at] <= self.asked

    def late(self, at: int) -> float:
        """Return the ms beyond what the client asks for."""
        return max(0.0, self.predicted[at] - self.asked)

    def headroom(self, at: int, *, is_least: bool) -> float:
        """Return a cost by which targets that are in time are compared."""
        return self.asked - self.predicted[at] if is_least and self.asked else self.predicted[at]


def predicted_latency(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> list[float | None]:
    """Score candidates that are in time above all others, which score 0; without one, the least late ones are best.

    Where nothing is predicted of any candidate, a composite of caches and loads scores them.
    """
    aspects, strategy = _aspects(request, candidates, values), values.word(_STRATEGY)
    if not aspects or strategy == "composite-only":
        return list(_composite(request, candidates, values))
    everyone = range(len(candidates))
    in_time: Sequence[int] = ()
    if any(aspect.asked for aspect in aspects):
        in_time = [at for at in everyone if all(aspect.is_in_time(at) for aspect in aspects)]
    if not in_time:
        return list(_blend([([each.late(at) for at in everyone], each.weight_late) for each in aspects]))
    is_least = strategy.endswith("least")
    if needs_gauges(values):
        found = _composite(request, [candidates[at] for at in in_time], values)
        if is_least:
            found = [1.0 - score for score in found]
    else:
        found = _blend([([each.headroom(at, is_least=is_least) for at in in_time], each.weight) for each in aspects])
    scores: list[float | None] = [0.0] * len(candidates)
    for at, score in zip(in_time, found, strict=True):
        scores[at] = _LEAST_IN_TIME + (1.0 - _LEAST_IN_TIME) * score
    return scores


def _aspects(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> list[_Aspect]:
    least, buffer = least_new(request), values.number("sloBufferFactor")
    work = [each.wait + max(request.tokens - max(each.matched, each.expected), least) for each in candidates]
    first = _predictions(candidates, lambda times: times.first_token, work)
    further = _predictions(candidates, lambda times: times.further_tokens, [each.active + 1 for each in candidates])
    return [
        _Aspect(
            predicted,
            (asked or 0.0) * buffer,
            values.number(f"headroom{name}Weight"),
            values.number(f"negHeadroom{name}Weight"),
        )
        for predicted, asked, name in ((first, request.asked.ttft_ms, "TTFT"), (further, request.asked.tpot_ms, "TPOT"))
        if predicted is not None
    ]


def _predictions(
    candidates: Sequence[Candidate], sums_of: Callable[[AnswerTimes], TimeSums], work: Sequence[float]
) -> list[float] | None:
    """Return the ms of each candidate for its work; None if that is known of none."""
    sums = [NO_SUMS if each.answer_times is None else sums_of(each.answer_times) for each in candidates]
    own = [each.predict(amount) for each, amount in zip(sums, work, strict=True)]
    known = [ms for ms in own if ms is not None]
    if len(known) == len(own):
        return known
    together = TimeSums(*map(sum, zip(*sums, strict=True)))
    found = [together.predict(amount) if ms is None else ms for ms, amount in zip(own, work, strict=True)]
    complete = [ms for ms in found if ms is not None]
    return complete if len(complete) == len(found) else None


def _composite(request: RoutingRequest, candidates: Sequence[Candidate], values: Values) -> list[float]:
    """Score candidates by what is there without a prediction: free caches, short queues, and the prompt's prefix."""
    gauges = [each.gauges for each in candidates]
    free = [0.0 if each is None else 1.0 - each.kv_usage for each in gauges]
    queue = [float(each.waiting) for each in gauges if each is not None]
    if len(queue) < len(gauges):
        queue = [each.requests for each in candidates]
    tokens = max(1, request.tokens)
    prefix = [min(1.0, max(each.matched, each.expected) / tokens) for each in candidates]
    parts = (
        (free, values.number("compositeKVWeight")),
        (least_is_one(queue), values.number("compositeQueueWeight")),
        (prefix, values.number("compositePrefixWeight")),
    )
    total = sum(weight for _, weight in parts) or 1.0
    return [sum(weight * part[at] for part, weight in parts) / total for at in range(len(candidates))]


def _blend(costs: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Score the least costs best. Costs that are equal for all do not tell targets apart, so they have no weight."""
    parts = [(least_is_one(each), weight) for each, weight in costs if weight and min(each) < max(each)]
    if not parts:
        return [1.0] * len(costs[0][0])
    total = sum(weight for _, weight in parts)
    return [sum(weight * part[at] for part, weight in parts) / total for at in range(len(parts[0][0]))]
