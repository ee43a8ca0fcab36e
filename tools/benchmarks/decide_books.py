"""Decisions on the simulated clock, by the product's own policies, with a few dictionaries in place of Redis.

A replica ranks all targets by loads that are at most 100 ms old, and then ranks the best eight again by the present
loads, as ``reserve`` does. With ``own_loads`` each replica knows only its own decisions.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple, Protocol

from tools.benchmarks.decide_engines import PIECE_TOKENS, Change, Job
from waymark.decide.policies.policy import (
    CREDITS,
    Candidate,
    Inputs,
    Preset,
    RoutingRequest,
    Values,
    count_new,
    read_constants,
)
from waymark.decide.policies.ring import Ring
from waymark.domain.targets import Gauges
from waymark.store.reservations import CANDIDATES_MAX
from waymark.store.speculative import depths

_CREDITS = read_constants(CREDITS, {}, "overrides")
_BLOCK_TOKENS = 16
_PIECE_BLOCKS = PIECE_TOKENS // _BLOCK_TOKENS


class Placed(NamedTuple):
    """A decision."""

    job: Job
    engine: int


class Decider(Protocol):
    """The interface of a component that chooses an engine for each request of a simulation."""

    async def decide(self, now: float, jobs: Sequence[Job]) -> list[Placed]:
        """Return the decisions for the jobs of one instant; the load of each job counts from now on. The decisions are
        in the order of their answers: a request is sent as soon as its engine is known, and engines serve requests in
        that order.
        """

    async def hear(self, changes: Sequence[Change]) -> None:
        """Apply the events of engines, which are visible from now on."""

    async def begun(self, job: Job) -> None:
        """Record that the first token of a job has arrived."""

    async def ended(self, job: Job) -> None:
        """Record that the answer of a job is complete."""


async def as_answered(decisions: Iterable[Coroutine[Any, Any, Placed]]) -> list[Placed]:
    """Start the decisions in order, run them concurrently, and return them in the order of their answers."""
    answered: list[Placed] = []

    async def answer(decision: Coroutine[Any, Any, Placed]) -> None:
        answered.append(await decision)

    await asyncio.gather(*map(answer, decisions))
    return answered


class RoundRobin:
    """A decider that picks each engine in turn, whatever its cache and its load."""

    def __init__(self, engines: int) -> None:
        self._numbers = cycle(range(engines))

    async def decide(self, now: float, jobs: Sequence[Job]) -> list[Placed]:
        return [Placed(job, next(self._numbers)) for job in jobs]

    async def hear(self, changes: Sequence[Change]) -> None: ...

    async def begun(self, job: Job) -> None: ...

    async def ended(self, job: Job) -> None: ...


@dataclass(slots=True)
class _Load:
    tokens: int = 0
    requests: int = 0
    context: int = 0


@dataclass(slots=True)
class _Books:
    """The loads, and the copy that one replica read last."""

    loads: list[_Load]
    seen: list[_Load] = field(default_factory=list)
    seen_at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a decision apart from the policy."""

    replicas: int = 1
    has_own_loads: bool = False
    loads_seconds: float = 0.1
    speculative_seconds: float = 0.0
    """0: none."""
    speculative_credit: float = 1.0
    """The credit of a token that a target will have soon."""
    gauges_seconds: float = 1.0


class Fast:
    """Decisions in this process."""

    def __init__(self, preset: Preset, values: Values, engines: int, rules: Rules, seed: int) -> None:
        self._preset = preset
        self._values = values
        self._rules = rules
        self._random = random.Random(f"{seed}/{preset.name}")
        self._names = [f"engine-{number}" for number in range(engines)]
        self._ring = Ring((name, 0) for name in self._names)
        self._held: list[set[int]] = [set() for _ in range(engines)]
        shared = [_Load() for _ in range(engines)]
        self._books = [
            _Books([_Load() for _ in range(engines)] if rules.has_own_loads else shared) for _ in range(rules.replicas)
        ]
        self._jobs: dict[int, tuple[_Load, int]] = {}
        """For each job, by number: the target whose load contains it, and its prefill tokens there."""
        self._spec: dict[tuple[int, int], tuple[int, float]] = {}
        self._turn = 0
        self._queues = [(0, 0)] * engines
        self._queues_at = float("-inf")

    async def decide(self, now: float, jobs: Sequence[Job]) -> list[Placed]:
        return [Placed(job, self._decide(now, job)) for job in jobs]

    async def hear(self, changes: Sequence[Change]) -> None:
        for change in changes:
            held = self._held[change.engine]
            (held.add if change.is_stored else held.discard)(change.piece)

    async def begun(self, job: Job) -> None:
        load, tokens = self._jobs[job.number]
        load.tokens -= tokens
        self._jobs[job.number] = load, 0

    async def ended(self, job: Job) -> None:
        load, _ = self._jobs.pop(job.number)
        load.requests -= 1
        load.context -= job.input_tokens

    def _decide(self, now: float, job: Job) -> int:
        books = self._books[self._turn % len(self._books)]
        self._turn += 1
        if now - books.seen_at > self._rules.loads_seconds:
            books.seen = [_Load(each.tokens, each.requests, each.context) for each in books.loads]
            books.seen_at = now
        expected = self._expected(now, job, books)
        request = RoutingRequest(
            job.input_tokens,
            PIECE_TOKENS,
            prefix_key=job.pieces[0].to_bytes(32, "big") if job.pieces else None,
        )
        candidates = [
            Candidate(
                number,
                name,
                address=name,
                device=self._matched(number, job.pieces),
                expected=expected.get(number, 0),
                wait=load.tokens,
                active=load.requests,
                context=load.context,
                gauges=self._gauges(now, number, books) if self._preset.needs_gauges else None,
            )
            for number, (name, load) in enumerate(zip(self._names, books.seen, strict=True))
        ]
        ranking = self._preset.rank(Inputs(request, candidates, self._values, self._random, self._ring))
        best = ranking.scored[0].candidate
        if self._preset.linear is not None:
            linear = self._preset.linear(self._values)
            least = None
            for scored in ranking.scored[:CANDIDATES_MAX]:
                before, load = scored.candidate, books.loads[scored.candidate.publisher]
                cost = scored.value + load.tokens - before.wait + linear.active * (load.requests - before.active)
                if least is None or cost < least:
                    best, least = before, cost
        number = best.publisher
        has_credits = CREDITS[0] in self._preset.constants
        tokens = int(count_new(request, self._values if has_credits else _CREDITS)(best))
        load = books.loads[number]
        load.tokens += tokens
        load.requests += 1
        load.context += job.input_tokens
        self._jobs[job.number] = load, tokens
        if self._rules.speculative_seconds:
            for depth, piece in _spec_keys(job):
                self._spec[piece, depth] = number, now + self._rules.speculative_seconds
        return number

    def _gauges(self, now: float, number: int, books: _Books) -> Gauges:
        if now - self._queues_at > self._rules.gauges_seconds:
            self._queues = [(each.requests, each.context) for each in books.loads]
            self._queues_at = now
        requests, context = self._queues[number]
        return Gauges(waiting=requests, kv_usage=min(1.0, context / (2048 * PIECE_TOKENS)))

    def _expected(self, now: float, job: Job, books: _Books) -> dict[int, int]:
        if not self._rules.speculative_seconds:
            return {}
        found: dict[int, int] = {}
        for depth, piece in _spec_keys(job):
            entry = self._spec.get((piece, depth))
            if entry is not None and entry[1] > now:
                found[entry[0]] = int(self._rules.speculative_credit * depth * _BLOCK_TOKENS)
        return found

    def _matched(self, number: int, pieces: Sequence[int]) -> int:
        held = self._held[number]
        for at, piece in enumerate(pieces):
            if piece not in held:
                return at * PIECE_TOKENS
        return len(pieces) * PIECE_TOKENS


def _spec_keys(job: Job) -> list[tuple[int, int]]:
    """Return the depth in blocks and the piece of each speculative entry of a prompt."""
    blocks = len(job.pieces) * _PIECE_BLOCKS
    return [(depth, job.pieces[(depth - 1) // _PIECE_BLOCKS]) for depth in depths(blocks)]
