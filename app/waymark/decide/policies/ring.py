"""Consistent hashing with bounded loads: a key keeps its target while that one is not much busier than the others.

Every target has 150 points on a ring of 64-bit numbers, XXH3-64 of ``<instance>|<rank>#<i>``. A key starts at the
big-endian number of its first eight bytes, and takes the first target clockwise whose load is below the bound: the mean
load, the new request included, times ``1 + epsilon``, rounded up.

Mirrokni, Thorup and Zadimoghaddam describe the scheme in "Consistent Hashing with Bounded Loads" (2016).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from waymark.decide.policies.columns import CandidateColumns, RankedColumns, columns_of
from waymark.decide.policies.policy import Candidate, Ranking, RoutingRequest, Scored
from waymark.domain.hashing import text_hash
from waymark.domain.status import Decision

POINTS = 150
EPSILON = 0.25
#: The most points of a ring whose targets have more than the usual number: a million take three seconds.
_POINTS_MAX = 2**16


def bounded_points(points: int, targets: int) -> int:
    """Return the points of each target, fewer in a large fleet, if a request asks for ``points``."""
    return min(points, max(POINTS, _POINTS_MAX // max(1, targets)))


class Ring:
    """The points of some targets. It depends on their names only, so it is built once for a set of targets."""

    def __init__(self, names: Iterable[tuple[str, int]], points: int = POINTS) -> None:
        """``names`` are instance id and rank of each target."""
        placed = sorted(
            (text_hash(f"{instance_id}|{dp_rank}#{i}"), (instance_id, dp_rank))
            for instance_id, dp_rank in names
            for i in range(points)
        )
        self._points = [point for point, _ in placed]
        self._names = [name for _, name in placed]

        self._count = len(set(self._names))

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Yield the names of all targets, each once, in the order in which the key meets them.

        A caller that stops after the first few costs no more than these few points.
        """
        start, names = bisect_left(self._points, int.from_bytes(key[:8], "big")), self._names
        visited: set[tuple[str, int]] = set()
        for index in chain(range(start, len(names)), range(start)):
            if names[index] not in visited:
                visited.add(names[index])
                yield names[index]
                if len(visited) == self._count:
                    return


class LazyRing:
    """A ring that is made when a key first asks it: the ring of a large fleet takes long to make."""

    def __init__(self, make: Callable[[], Ring]) -> None:
        self._make = make

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Yield the names of all targets; see ``Ring``."""
        return self._make().clockwise(key)


def bound(active: int, targets: int, epsilon: float = EPSILON) -> int:
    """Return the requests that a target may have: the mean with the new one, times ``1 + epsilon``, rounded up.

    ``active`` are the requests of all ``targets``.
    """
    return math.ceil((1 + epsilon) * (active + 1) / targets)


# Prompts without tokens: the prefix key counts in place of the blocks, which cannot be looked up.
#
# Requests with the same key begin the same, so the target of the key on the ring probably has the blocks of earlier
# ones. A policy ranks this target as if it had the prompt; its real blocks are unknown, so its offers, its answer and
# the deciders of a file still see a target without a match. Of equally good targets, the first on the key's way around
# the ring is chosen, so that equal beginnings go to one target if the load of the first is too high.


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
