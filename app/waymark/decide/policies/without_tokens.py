"""Prompts without tokens: the prefix key counts in place of the blocks, which cannot be looked up.

Requests with the same key begin the same, so the target of the key on the ring probably has the blocks of earlier ones.
A policy ranks this target as if it had the prompt; its real blocks are unknown, so its offers, its answer and the
deciders of a file still see a target without a match. Of equally good targets, the first on the key's way around the
ring is chosen, so that equal beginnings go to one target if the load of the first is too high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waymark.decide.policies.columns import CandidateColumns, RankedColumns, columns_of
from waymark.decide.policies.policy import Candidate, Ranking, RoutingRequest, Scored
from waymark.domain.status import Decision


def by_prefix_key(
    request: RoutingRequest, candidates: Sequence[Candidate], rank: Callable[[Sequence[Candidate]], Ranking]
) -> Ranking:
    """Rank candidates with ``rank`` for a prompt without tokens; there is at least one candidate."""
    columns = columns_of(candidates)
    place = columns.home(request)
    if place is None:
        return Ranking(rank(columns).scored, Decision.LOAD)
    home = columns[place]
    # At least one token, so that policies that compare shares see it for the shortest prompt, too.
    scored = rank(columns.supposing(place, home._replace(device=max(1, request.tokens)))).scored
    if isinstance(scored, RankedColumns) and scored.is_by_key:
        scored.show(place, home)
        return Ranking(scored, Decision.PREFIX, home.publisher)
    scored = [
        candidate._replace(candidate=home) if candidate.candidate.publisher == home.publisher else candidate
        for candidate in scored
    ]
    return Ranking(first_by_key(request, scored), Decision.PREFIX, home.publisher)


def first_by_key(request: RoutingRequest, scored: Sequence[Scored]) -> Sequence[Scored]:
    """Put the first on the key's way around the ring before the others as good as the best."""
    equal = [candidate for candidate in scored if candidate.value == scored[0].value] if scored else []
    if len(equal) < 2:
        return scored
    first = home_of(request, equal)
    if first is None:
        return scored
    return sorted(scored, key=lambda candidate: candidate.candidate is not first)


def home_of(request: RoutingRequest, scored: Sequence[Scored]) -> Candidate | None:
    """Return the first candidate that the prefix key meets; None with tokens, or without a key."""
    if request.ring is None:
        return None
    if isinstance(scored, RankedColumns):
        columns = scored.columns
    else:
        columns = CandidateColumns([candidate.candidate for candidate in scored])
    place = columns.home(request)
    return None if place is None else columns[place]
