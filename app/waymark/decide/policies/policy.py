"""Policies, and their common part: the count of a candidate's cached and new tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple, TypeAlias

from waymark.decide.policies.constants import Constant, Values, read_constants
from waymark.decide.policies.ring import Ring
from waymark.decide.policies.target import Candidate, RoutingRequest


class Decision(StrEnum):
    """How the target was chosen."""

    KV_AWARE = "kv_aware"
    FALLBACK = "fallback"
    PREFIX_HASH = "prefix_hash"
    OVERFLOW = "overflow"
    SESSION = "session"
    PREFIX = "prefix"
    """Without tokens: the target that the prefix key names, in the order of a policy."""
    LOAD = "load"
    """Without tokens: another target than that one."""


class Scored(NamedTuple):
    """A candidate, its value under the policy, and the parts of that sum or product."""

    candidate: Candidate
    value: float
    parts: Mapping[str, float | None]

    @classmethod
    def sum_of(cls, candidate: Candidate, parts: Mapping[str, float | None]) -> Scored:
        """Return the sum of the parts; a part of None adds 0."""
        return cls(candidate, sum(part or 0.0 for part in parts.values()), parts)


@dataclass(frozen=True, slots=True)
class Ranking:
    """All candidates, best first; at least the first ``Inputs.most``."""

    scored: Sequence[Scored]
    decision: Decision = Decision.KV_AWARE
    home: int | None = None
    """The publisher of the target that the prefix key names, if that counted."""


class Linear(NamedTuple):
    """A cost that Redis can compute again when it reserves: ``(wait + active * requests) / weight + new * tokens``."""

    new: float
    active: float


class LoadWeights(NamedTuple):
    """A part of a cost: ``(tokens * wait + requests * active + context * context tokens) / weight`` of a target."""

    tokens: float = 0.0
    requests: float = 0.0
    context: float = 0.0


class LoadCost(NamedTuple):
    """The cost of a target that has no part of the prompt; it grows with each of the parts, or stays the same."""

    parts: tuple[LoadWeights, ...]
    of: Callable[[Sequence[float]], float] = sum
    """Makes the cost, or what orders targets as the cost does, of the values of the parts."""


class Inputs(NamedTuple):
    """The input of a policy; it has at least one candidate."""

    request: RoutingRequest
    candidates: Sequence[Candidate]
    values: Values
    random: Random
    ring: Ring | None = None
    """A ring of the targets' names; without one it is built for the call."""
    most: int | None = None
    """The number of places that the caller looks at, if the others need no place; None: all."""
    active_bound: int | None = None
    """For ``sticky``: the requests that a target may have, if the candidates are not all targets."""


RankFunction: TypeAlias = Callable[[Inputs], Ranking]

# ---- common functions of all policies -------------------------------------------------------------

CREDITS = (
    Constant("overlap_score_credit", 1.0, "What a token on the device is worth.", most=16),
    Constant("host_credit", 0.75, "What a token in the host's memory is worth.", most=16),
    Constant("disk_credit", 0.25, "What a token on disk is worth.", most=16),
    Constant("shared_cache_multiplier", 0.5, "What a token in a shared pool is worth.", most=16),
)


def credited(candidate: Candidate, values: Values) -> float:
    """Return the tokens that the candidate need not compute, each weighted by its place."""
    return (
        values.number("overlap_score_credit") * candidate.device
        + values.number("host_credit") * candidate.host
        + values.number("disk_credit") * candidate.disk
        + values.number("shared_cache_multiplier") * candidate.shared
    )


def least_new(request: RoutingRequest) -> int:
    """Return the tokens that every target computes: those behind the last block boundary before the prompt's end."""
    return request.tokens - max(0, request.tokens - 1) // request.block_size * request.block_size


def count_new(request: RoutingRequest, values: Values) -> Callable[[Candidate], float]:
    """Return a function that counts the tokens that a candidate would have to compute: for one request, and many
    candidates.
    """
    device_credit, host_credit = values.number("overlap_score_credit"), values.number("host_credit")
    disk_credit, shared_credit = values.number("disk_credit"), values.number("shared_cache_multiplier")
    tokens, least = request.tokens, least_new(request)

    def new(candidate: Candidate) -> float:
        has = device_credit * candidate.device + host_credit * candidate.host
        has += disk_credit * candidate.disk + shared_credit * candidate.shared
        return max(tokens - max(has, candidate.expected), least)

    return new


def new_tokens(request: RoutingRequest, candidate: Candidate, values: Values) -> float:
    """Return the tokens that the candidate would have to compute."""
    return count_new(request, values)(candidate)


def ranked(
    scored: Sequence[Scored], random: Random, *, is_cost: bool, decision: Decision = Decision.KV_AWARE
) -> Ranking:
    """Best first; equal ones in an order by chance, so that many callers do not all take the same one."""
    draw = random.random
    sign = 1 if is_cost else -1
    return Ranking(sorted(scored, key=lambda candidate: (sign * candidate.value, draw())), decision)


# ---- one policy ---------------------------------------------------------------------------------


def _accept(values: Values) -> None:
    """Accept constants whose own ranges are the only condition."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A policy by name, with its constants."""

    name: str
    source: str
    order: str
    """The order in a line, for the docs."""
    rank: RankFunction
    is_cost: bool
    constants: tuple[Constant, ...] = ()
    check: Callable[[Values], None] = field(default=_accept)
    linear: Callable[[Values], Linear] | None = None
    """The cost as a formula by which Redis ranks the best few again when it reserves; None if it has no such
    formula.
    """
    sum_of: Callable[[RoutingRequest, Values], Callable[[Candidate], Scored]] | None = None
    """Makes the cost of a candidate for one request, if that is exactly such a sum, independent of other candidates."""
    by_load: Callable[[RoutingRequest, Values], LoadCost | None] | None = None
    """The cost by load alone, if only those can win that have a part of the prompt, and the least loaded of the others.
    None, or a function that returns None: the policy compares all targets."""
    needs_gauges: bool = False

    def values(self, overrides: Mapping[str, Any]) -> Values:
        """Return the constants with overrides. ``InvalidValue`` names the wrong one and the way out."""
        values = read_constants(self.constants, overrides, "overrides")
        self.check(values)
        return values
