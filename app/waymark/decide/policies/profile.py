"""A profile: filters, then scorers with their weights, then a picker; and which profiles a request goes through.

A picker turns scores into the order in which candidates are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from random import Random
from typing import NamedTuple, TypeAlias

from waymark.base.record import record
from waymark.decide.policies.columns import Column, ColumnSums, RankedColumns, columns_of
from waymark.decide.policies.policy import Candidate, Filter, RoutingRequest, Scored
from waymark.decide.policies.scorers import Scores

Picker: TypeAlias = Callable[[Sequence[float], Random], Sequence[float]]
"""A function of the scores that returns a number of each candidate; the one with the greatest number is taken first."""


def max_score(scores: Sequence[float], random: Random) -> Sequence[float]:
    """Take the greatest score first."""
    return scores


def by_chance(scores: Sequence[float], random: Random) -> Sequence[float]:
    """Take the candidates in random order."""
    return random.sample(range(len(scores)), len(scores))


def weighted_by_chance(scores: Sequence[float], random: Random) -> Sequence[float]:
    """Take the candidates in random order, those with greater scores more likely first.

    Each candidate gets ``u ** (1 / score)``, with ``u`` uniform in 0 to 1, and the greatest comes first. This is
    algorithm A-Res of Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006). A score of 0 comes
    after all others.
    """

    draw, log = random.random, math.log
    # A number above 0 has a logarithm.
    logarithms = [log(1.0 - draw()) for _ in scores]
    return [number / score if score > 0 else -math.inf for number, score in zip(logarithms, scores, strict=True)]


PICKERS: Mapping[str, Picker] = {
    "max-score-picker": max_score,
    "random-picker": by_chance,
    "weighted-random-picker": weighted_by_chance,
}


# Deciders: whether a request goes through a stage of its own before decode.


Decider: TypeAlias = Callable[[RoutingRequest, Candidate], bool]
"""Called with the target of decode."""


def prefix_based(non_cached_tokens: int) -> Decider:
    """Separate prefill from decode if at least so many tokens are not cached at the decode target; 0 for never."""

    def decide(request: RoutingRequest, decode: Candidate) -> bool:
        return non_cached_tokens > 0 and request.tokens - decode.matched >= non_cached_tokens

    return decide


def always(request: RoutingRequest, decode: Candidate) -> bool:
    """Separate every request."""
    return True


def multimodal(request: RoutingRequest, decode: Candidate) -> bool:
    """Separate requests with images, sound or video."""
    return request.is_multimodal


@record(frozen=True, slots=True)
class WeightedScorer:
    """A scorer as a profile refers to it, its parameters bound."""

    name: str
    weight: float
    score: Callable[[RoutingRequest, Sequence[Candidate]], Scores]
    needs_gauges: bool = False
    needs_answer_times: bool = False
    is_prefix: bool = False
    """Whether it scores a target's match of the prompt."""


#: The name of the prefix key among the parts of a score.
PREFIX_KEY = "prefix-key"


@record(frozen=True, slots=True)
class Profile:
    """The filters, scorers and the picker that find one target."""

    name: str
    filters: tuple[Filter, ...] = ()
    """Filters by registrations alone."""
    scorers: tuple[WeightedScorer, ...] = ()
    picker: Picker = max_score
    endpoints_max: int = 1
    """The number of targets that the picker gives to its caller."""
    prompt_filters: tuple[Filter, ...] = ()
    """Filters that look at the prompt, too."""

    def run(
        self, request: RoutingRequest, candidates: Sequence[Candidate], random: Random, most: int | None = None
    ) -> Sequence[Scored]:
        """Return the candidates that pass the filters, in the picker's order; the result may be empty.

        ``most`` is how many places the caller looks at; None: all.
        """
        remaining = columns_of(candidates).passing(request, self.filters)
        for keep in self.prompt_filters:
            remaining = columns_of(keep(request, remaining))
        if not remaining:
            return []
        parts: dict[str, tuple[float, Column]] = {
            scorer.name: (scorer.weight, scorer.score(request, remaining)) for scorer in self.scorers
        }
        home = remaining.home(request)
        if home is not None:
            # Its weight is that of the scorers that cannot see a match.
            weight = sum(scorer.weight for scorer in self.scorers if scorer.is_prefix)
            parts[PREFIX_KEY] = weight, [float(place == home) for place in range(len(remaining))]
        sums = ColumnSums(remaining, parts, is_clamped=True)
        if self.picker is max_score:
            return sums.ranked(request, random, most, is_cost=False)
        return RankedColumns(sums, self.picker(sums.values, random), [0.0] * len(remaining), -1.0, most)


class ProfileStages(NamedTuple):
    """The targets of a request: for decode, and for the stages before it that its deciders require."""

    decode: Sequence[Scored]
    prefill: Sequence[Scored] = ()
    encode: Sequence[Scored] = ()


SPECULATIVE_MILLISECONDS = 2_000
"""The time of a speculative entry, as in llm-d's picker: an event that confirms it comes sooner. A picker file may name
another time."""


class Speculation(NamedTuple):
    """The speculative entries of decisions by a file, for engines with events."""

    is_on: bool
    milliseconds: int = SPECULATIVE_MILLISECONDS


class HistoryTerms(NamedTuple):
    """The memory of ``prefix-cache-scorer``: the blocks of prompts that went to each target."""

    capacity: int
    """The most blocks of a target."""
    prompt_blocks: int
    """The most blocks of one prompt."""


@record(frozen=True, slots=True)
class PickerConfig:
    """The part of an ``EndpointPickerConfig`` about picking."""

    profiles: Mapping[str, Profile]
    decode: str
    """The profile that finds the primary target."""
    prefill: str | None = None
    encode: str | None = None
    prefill_decider: Decider | None = None
    encode_decider: Decider | None = None
    notes: tuple[str, ...] = field(default=())
    """Sentences for the log at start about fields that belong elsewhere."""
    speculation: Speculation | None = None
    """None: as the settings say."""
    history: HistoryTerms | None = None
    """None without a ``prefix-cache-scorer``."""

    @property
    def needs_gauges(self) -> bool:
        return any(scorer.needs_gauges for profile in self.profiles.values() for scorer in profile.scorers)

    @property
    def needs_answer_times(self) -> bool:
        return any(scorer.needs_answer_times for profile in self.profiles.values() for scorer in profile.scorers)

    def run(
        self, request: RoutingRequest, candidates: Sequence[Candidate], random: Random, most: int | None = None
    ) -> ProfileStages:
        """Run decode first; then encode and prefill, each if its decider wants it and it has a target.

        ``most`` is how many places of a stage the caller looks at; None: all.
        """
        decode = self.profiles[self.decode].run(request, candidates, random, most)
        if not decode:
            return ProfileStages(())
        target = decode[0].candidate

        def stage(name: str | None, decider: Decider | None) -> Sequence[Scored]:
            if name is None or decider is None or not decider(request, target):
                return ()
            profile = self.profiles[name]
            return profile.run(request, candidates, random, most)[: profile.endpoints_max]

        return ProfileStages(decode, stage(self.prefill, self.prefill_decider), stage(self.encode, self.encode_decider))
