"""Pickers: from scores to the chosen candidate, and the next best behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias

from waymark.decide.policies.policy import Scored, ranked

Picker: TypeAlias = Callable[[Sequence[Scored], Random], Sequence[Scored]]
"""A function that returns all candidates, in the order in which they would be taken."""


def max_score(scored: Sequence[Scored], random: Random) -> Sequence[Scored]:
    """Greatest score first; equal ones by chance."""
    return ranked(scored, random, is_cost=False).scored


def by_chance(scored: Sequence[Scored], random: Random) -> Sequence[Scored]:
    """Return the candidates in random order."""
    return random.sample(list(scored), len(scored))


def weighted_by_chance(scored: Sequence[Scored], random: Random) -> Sequence[Scored]:
    """Return the candidates in random order, those with greater scores more likely first.

    Each candidate gets ``u ** (1 / score)``, with ``u`` uniform in 0 to 1, and the greatest comes first. This is
    algorithm A-Res of Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006). A score of 0 comes
    after all others.
    """

    def key(candidate: Scored) -> float:
        uniform = 1.0 - random.random()  # above 0, so that it has a logarithm
        return math.log(uniform) / candidate.value if candidate.value > 0 else -math.inf

    return sorted(scored, key=key, reverse=True)


PICKERS: Mapping[str, Picker] = {
    "max-score-picker": max_score,
    "random-picker": by_chance,
    "weighted-random-picker": weighted_by_chance,
}
