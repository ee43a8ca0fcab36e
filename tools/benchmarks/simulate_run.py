"""One run of a simulation: one routing sends the requests of a trace to engines, on the trace's own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.benchmarks.simulate_engines import Engine, pick
from tools.benchmarks.simulate_index import ByIndex
from tools.benchmarks.simulate_routers import Router
from tools.benchmarks.simulate_trace import Request


class Step(NamedTuple):
    """One request, and its engine."""

    at_seconds: float
    engine: int
    blocks: int
    hits: int
    computed_tokens: int
    first_token_seconds: float


@dataclass
class Course:
    """The course of a run."""

    name: str
    steps: list[Step]
    answers: int = 0
    """The number of answers of an index, if the routing asks one."""
    exact: int = 0
    """The number of answers that equalled the contents of the caches."""
    fallbacks: int = 0
    restart_seconds: float | None = None
    """The real time that the restart took."""
    idle_answers: int = 0
    """The number of answers of all replicas after the last request, when no frame was in transit any more."""
    idle_exact: int = 0

    def hit_ratio(self, begin: float = float("-inf"), end: float = float("inf")) -> float | None:
        """Return the share of blocks that were in caches, for requests that arrived in [begin, end); None if there are
        none."""
        some = [step for step in self.steps if begin <= step.at_seconds < end]
        blocks = sum(step.blocks for step in some)
        return sum(step.hits for step in some) / blocks if blocks else None

    @property
    def computed_tokens(self) -> int:
        return sum(step.computed_tokens for step in self.steps)

    @property
    def first_token_seconds(self) -> float:
        """Return the mean time to the first token of all requests, by the model of the engines' queues."""
        return sum(step.first_token_seconds for step in self.steps) / len(self.steps)


async def play(
    name: str, requests: Sequence[Request], engines: Sequence[Engine], router: Router, queue_tokens: float
) -> Course:
    """Route every request, in order, and return the course of the run."""
    steps = []
    for request in requests:
        now, names = request.at_seconds, request.engine_hashes()
        for engine in engines:
            engine.advance(now)
        number = pick(engines, await router.keys(request, names), queue_tokens)
        served = engines[number].serve(request, names)
        if served.events:
            router.hear(now, number, served.events)
        steps.append(Step(now, number, request.blocks, served.hits, served.computed_tokens, served.first_token_seconds))
    if not isinstance(router, ByIndex):
        return Course(name, steps)
    await router.finish()
    return Course(name, steps, router.answers, router.exact, router.fallbacks, router.restart_seconds)
