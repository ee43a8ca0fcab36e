"""Policies, and what they need: constants, the request and its candidates, and the count of cached and new tokens.

A constant has a name, a default, a range and a sentence. One table of constants defines the overrides of a request, the
fields of a file, and the text of the docs.

A target is a registered publisher of scope ``instance``, the smallest unit that a router can pick. A candidate is a
target with its share of one prompt and its load at that moment. All amounts are tokens unless the name says otherwise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import SHOWN_MAX, shown
from waymark.domain.answer_times import NO_TIMES, AnswerTimes, AskedTimes
from waymark.domain.status import Decision
from waymark.domain.targets import Gauges, Role


@record(frozen=True, slots=True)
class Constant:
    """One number, switch or word; the type of the default is the type of the value."""

    name: str
    default: float | bool | str
    sentence: str
    least: float = 0.0
    most: float = math.inf
    choices: tuple[str, ...] = ()
    """The values that a word can have; empty for a number or a switch."""

    def read(self, value: Any, field: str) -> float | bool | str:
        """Check a value and return it. ``InvalidValue`` names field, value and range."""
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise InvalidValue(
                    f"{field} is {shown(value)}; it must be true or false", field=field, reason="invalid_type"
                )
            return value
        if isinstance(self.default, str):
            if value not in self.choices:
                raise InvalidValue(
                    f"{field} is {shown(value)}; it must be one of {', '.join(self.choices)}", field=field
                )
            return str(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue(f"{field} is {shown(value)}; it must be a number", field=field, reason="invalid_type")
        if not self.least <= value <= min(self.most, sys.float_info.max):  # an integer in a file may exceed a float
            raise InvalidValue(
                f"{field} is {shown(value)}; it must be {self.range_text()}", field=field, reason="out_of_range"
            )
        return float(value)

    def range_text(self) -> str:
        """Return the allowed values in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return ", ".join(self.choices)
        if math.isinf(self.most):
            return f"at least {self.least:g}"
        return f"{self.least:g} to {self.most:g}"


_CREDIT_NAMES = "overlap_score_credit", "host_credit", "disk_credit", "shared_cache_multiplier"


class Values:
    """The constants of a table with their values, asked by name and type."""

    def __init__(self, values: Mapping[str, float | bool | str]) -> None:
        self._values = dict(values)
        self._numbers = {name: float(value) for name, value in values.items() if not isinstance(value, bool | str)}
        self.credits: tuple[float, float, float, float] | None = None
        """The values of ``CREDITS``, if they are among the constants."""
        if all(name in self._numbers for name in _CREDIT_NAMES):
            device, host, disk, shared = map(self.number, _CREDIT_NAMES)
            self.credits = device, host, disk, shared

    def number(self, name: str) -> float:
        return self._numbers[name]

    def is_on(self, name: str) -> bool:
        return self._values[name] is True

    def word(self, name: str) -> str:
        return str(self._values[name])


def read_constants(table: Iterable[Constant], given: Mapping[str, Any], field: str) -> Values:
    """Return all constants of a table: the given ones, checked, and the defaults of the rest.

    An unknown name raises ``InvalidValue`` that names the nearest known one.
    """
    by_name = {constant.name: constant for constant in table}
    for name in given:
        if name not in by_name:
            place = f"{field}.{name[:SHOWN_MAX]}"
            raise InvalidValue(f"{place} is not known; {nearest(name, by_name)}", field=place, reason="invalid_value")
    return Values(
        {
            name: constant.read(given[name], f"{field}.{name}") if name in given else constant.default
            for name, constant in by_name.items()
        }
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the way out of a misspelt name: the nearest known one, else all."""
    names = sorted(known)
    # Comparing a name of a megabyte takes half a second, and it would not be near any other.
    close = get_close_matches(name, names, n=1) if len(name) <= SHOWN_MAX else []
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(names)}" if names else "it takes none"


_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class RingPlaces(Protocol):
    """Where the targets are on a ring."""

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Yield instance and rank of each target, in the order in which the key meets them."""


class RoutingRequest(NamedTuple):
    """The request that a policy ranks targets for."""

    tokens: int
    """The length of the prompt; an estimate if ``has_tokens`` is false."""
    block_size: int
    pool: int = 0
    """A bitmap of the prompt's blocks that a pool holds: bit i is block i."""
    lora_name: str | None = None
    session: str | None = None
    """The instance that the session token names."""
    prefix_key: bytes | None = None
    """32 bytes by which ``sticky`` finds its place on the ring."""
    is_multimodal: bool = False
    has_tokens: bool = True
    """Whether the tokens are known, or any match of a target; else only the prefix key is."""
    ring: RingPlaces | None = None
    """The places by which the prefix key names a target, if it has one and ``has_tokens`` is false."""
    asked: AskedTimes = NO_TIMES
    """The times that the client asks for."""

    @property
    def blocks(self) -> int:
        """Complete blocks."""
        return self.tokens // self.block_size

    def pool_blocks_beyond(self, blocks: int) -> int:
        """Return how many blocks a pool holds at positions ``blocks`` and later, contiguous or not."""
        return (self.pool >> blocks).bit_count()


class Candidate(NamedTuple):
    """One target, seen by one request.

    ``device``, ``host``, ``shared`` and ``disk`` count each token of the matched prefix once, at its best place in this
    order. ``expected`` counts the tokens that the target will hold soon, because the prompt was sent there before.
    """

    publisher: int
    """The target's id, a small integer, never used again."""
    instance_id: str
    dp_rank: int = 0
    address: str | None = None
    role: Role = Role.BOTH
    weight: float = 1.0
    """The size of the target relative to others. Its load is divided by it."""
    labels: Mapping[str, str] = _NO_LABELS
    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0
    expected: int = 0
    wait: int = 0
    """Prefill tokens of its reservations still to be computed."""
    active: int = 0
    """The number of requests under way."""
    context: int = 0
    """Prompt tokens of those requests."""
    health: float = 1.0
    """Share of requests that succeeded, 0 to 1."""
    last_cold: int = 0
    """The time of the last request to it of which no target had any block, in ms; 0: never."""
    answer_times: AnswerTimes | None = None
    """How fast it answers; None if it is unknown."""
    gauges: Gauges | None = None
    """The gauges of the engine; None without fresh ones."""
    history: int | None = None
    """Tokens from the beginning of the prompt that went to it before, for ``prefix-cache-scorer``; None: not asked."""

    @property
    def matched(self) -> int:
        """The tokens of the prompt that need not be computed, wherever they are."""
        return self.device + self.host + self.disk + self.shared

    @property
    def queue(self) -> float:
        """``wait`` of a target of weight 1."""
        return self.wait / self.weight

    @property
    def requests(self) -> float:
        """``active`` of a target of weight 1."""
        return self.active / self.weight


class Scored(NamedTuple):
    """A candidate, its value under the policy, and the parts of that sum or product."""

    candidate: Candidate
    value: float
    parts: Mapping[str, float | None]

    @classmethod
    def sum_of(cls, candidate: Candidate, parts: Mapping[str, float | None]) -> Scored:
        """Return the sum of the parts; a part of None adds 0."""
        total = 0.0
        for part in parts.values():  # ``sum`` rounds differently in later releases of Python
            total += part or 0.0
        return cls(candidate, total, parts)


@record(frozen=True, slots=True)
class Ranking:
    """All candidates, best first; at least the first ``Inputs.most``."""

    scored: Sequence[Scored]
    decision: Decision = Decision.KV_AWARE
    home: int | None = None
    """The publisher of the target that the prefix key names, if that counted."""
    is_degraded: bool = False
    """Whether the only targets left are ones whose engines cannot be reached."""


class Linear(NamedTuple):
    """A cost that Redis can compute again when it reserves: ``(wait + active * requests) / weight + new * tokens``."""

    new: float
    active: float


class LoadWeights(NamedTuple):
    """A part of a cost: ``(tokens * wait + requests * active + context * context tokens) / weight`` of a target."""

    tokens: float = 0.0
    requests: float = 0.0
    context: float = 0.0


def _first(first: float, second: float) -> float:
    return first


class LoadCost(NamedTuple):
    """The cost of a target that has no part of the prompt; it grows with each of its parts, or stays the same."""

    first: LoadWeights
    second: LoadWeights | None = None
    of: Callable[[float, float], float] = _first
    """Makes the cost, or a value with the same order, from the values of both parts."""


class Inputs(NamedTuple):
    """The input of a policy; it has at least one candidate."""

    request: RoutingRequest
    candidates: Sequence[Candidate]
    values: Values
    random: Random
    ring: RingPlaces | None = None
    """A ring of the targets' names; without one it is built for the call."""
    most: int | None = None
    """The number of places that the caller looks at, if the others need no place; None: all."""
    active_bound: int | None = None
    """For ``sticky``: the requests that a target may have, if the candidates are not all targets."""


RankFunction: TypeAlias = Callable[[Inputs], Ranking]
Filter: TypeAlias = Callable[[RoutingRequest, Sequence[Candidate]], list[Candidate]]
"""Returns the candidates that a request may go to, in their order. It looks at each by itself."""

# ---- common functions of all policies -------------------------------------------------------------

CREDITS = (
    Constant(_CREDIT_NAMES[0], 1.0, "What a token on the device is worth.", most=16),
    Constant(_CREDIT_NAMES[1], 0.75, "What a token in the host's memory is worth.", most=16),
    Constant(_CREDIT_NAMES[2], 0.25, "What a token on disk is worth.", most=16),
    Constant(_CREDIT_NAMES[3], 0.5, "What a token in a shared pool is worth.", most=16),
)


def count_credits(values: Values) -> Callable[[Candidate], float]:
    """Return a function that counts the tokens that a candidate need not compute, each weighted by its place."""
    assert values.credits is not None, "the policy has no such constants"
    device_credit, host_credit, disk_credit, shared_credit = values.credits

    def credits(candidate: Candidate) -> float:
        has = device_credit * candidate.device + host_credit * candidate.host
        return has + (disk_credit * candidate.disk + shared_credit * candidate.shared)

    return credits


def least_new(request: RoutingRequest) -> int:
    """Return the tokens that every target computes: those after the last block boundary before the prompt's end."""
    return tokens_behind(request.tokens, request.block_size)


def tokens_behind(tokens: int, block_size: int) -> int:
    """Return how many tokens of a prompt are after the last block boundary before its end."""
    return tokens - max(0, tokens - 1) // block_size * block_size


def count_new(request: RoutingRequest, values: Values) -> Callable[[Candidate], float]:
    """Return a function that counts the tokens that a candidate would have to compute: for one request, and many
    candidates.
    """
    credits, tokens, least = count_credits(values), request.tokens, least_new(request)

    def new(candidate: Candidate) -> float:
        return max(tokens - max(credits(candidate), candidate.expected), least)

    return new


def least_is_one(costs: Sequence[float]) -> list[float]:
    """Return 1 for the least cost and 0 for the greatest; all equal ones get 1."""
    least, most = min(costs), max(costs)
    return [(most - cost) / (most - least) if most > least else 1.0 for cost in costs]


def ranked(
    scored: Sequence[Scored], random: Random, *, is_cost: bool, decision: Decision = Decision.KV_AWARE
) -> Ranking:
    """Order best first, equal ones by chance, so that many callers do not all take the same one."""
    draw = random.random
    sign = 1 if is_cost else -1
    return Ranking(sorted(scored, key=lambda candidate: (sign * candidate.value, draw())), decision)


# ---- one policy ---------------------------------------------------------------------------------


def _accept(values: Values) -> None:
    """Accept constants whose own ranges are the only condition."""


@record(frozen=True, slots=True)
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
    """The cost by load alone. It means that only a target with a part of the prompt can win, or the least loaded of the
    others. None, or a function that returns None: the policy compares all targets."""
    falls_back: Callable[[Sequence[Candidate], Values], Preset | None] | None = None
    """Returns the policy that decides instead, by the candidates that have a part of the prompt; None: this one."""
    needs_gauges: bool = False

    def values(self, overrides: Mapping[str, Any]) -> Values:
        """Return the constants with overrides. ``InvalidValue`` names the wrong one and the way out."""
        values = read_constants(self.constants, overrides, "overrides")
        self.check(values)
        return values
