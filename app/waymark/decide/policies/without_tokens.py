"""Prompts without tokens: the prefix key counts in place of the blocks, which cannot be looked up.

Requests with the same key begin the same, so the target of the key on the ring probably has the blocks of earlier ones.
A policy ranks this target as if it had the prompt; its real blocks are unknown, so its offers, its answer and the
deciders of a file still see a target without a match. Of equally good targets, the first on the key's way around the
ring is chosen, so that equal beginnings go to one target if the load of the first is too high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waymark.decide.policies.policy import Candidate, Ranking, RoutingRequest, Scored
from waymark.domain.status import Decision


def by_prefix_key(
    request: RoutingRequest, candidates: Sequence[Candidate], rank: Callable[[Sequence[Candidate]], Ranking]
) -> Ranking:
    """Rank candidates with ``rank`` for a prompt without tokens; there is at least one candidate."""
    home = home_of(request, candidates)
    if home is None:
        return Ranking(rank(candidates).scored, Decision.LOAD)
    # At least one token, so that policies that compare shares see it for the shortest prompt, too.
    supposed = [
        candidate._replace(device=max(1, request.tokens)) if candidate is home else candidate
        for candidate in candidates
    ]
    scored = [
        candidate._replace(candidate=home) if candidate.candidate.publisher == home.publisher else candidate
        for candidate in rank(supposed).scored
    ]
    return Ranking(first_by_key(request, scored), Decision.PREFIX, home.publisher)


def with_home(
    request: RoutingRequest, candidates: Sequence[Candidate], scored: Sequence[Scored], name: str, weight: float
) -> Sequence[Scored]:
    """Add the prefix key to scores, as a scorer that gives 1 to the target that it names."""
    home = home_of(request, candidates)
    if home is None:
        return scored
    result = []
    for candidate in scored:
        score = weight if candidate.candidate is home else 0.0
        result.append(Scored(candidate.candidate, candidate.value + score, {**candidate.parts, name: score}))
    return result


def first_by_key(request: RoutingRequest, scored: Sequence[Scored]) -> Sequence[Scored]:
    """Put the first on the key's way around the ring before the others as good as the best."""
    equal = [candidate for candidate in scored if candidate.value == scored[0].value] if scored else []
    if len(equal) < 2:
        return scored
    first = home_of(request, [candidate.candidate for candidate in equal])
    if first is None:
        return scored
    return sorted(scored, key=lambda candidate: candidate.candidate is not first)


def home_of(request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the first candidate that the prefix key meets; None with tokens, or without a key."""
    if request.ring is None or request.prefix_key is None:
        return None
    by_name = {(candidate.instance_id, candidate.dp_rank): candidate for candidate in candidates}
    return next((by_name[name] for name in request.ring.clockwise(request.prefix_key) if name in by_name), None)
