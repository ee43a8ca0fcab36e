"""One run of a simulation: a decider sends arrivals to engines, on the simulated clock."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tools.benchmarks.decide_books import Decider
from tools.benchmarks.decide_engines import PIECE_TOKENS, Change, Engine, Job
from tools.benchmarks.decide_load import Arrival


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run; times are in seconds."""

    name: str
    requests: int
    mean_first_token: float
    p99_first_token: float
    hit_ratio: float
    """The share of prompt tokens that were in the engine's cache."""
    mean_end: float

    @property
    def row(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.mean_first_token:.3f} s",
            f"{self.p99_first_token:.2f} s",
            f"{self.hit_ratio:.1%}",
            f"{self.mean_end:.2f} s",
        )


HEAD = ("policy", "mean TTFT", "p99 TTFT", "hits", "end to end")


async def run(name: str, arrivals: Sequence[Arrival], engines: int, decider: Decider, lag_seconds: float) -> Figures:
    """Decide every arrival. Those of one instant are decided together."""
    fleet = [Engine(number) for number in range(engines)]
    jobs: list[Job] = []
    pending: list[tuple[float, int, Change]] = []
    ties = 0
    for at, group in groupby(arrivals, key=lambda each: each.at_seconds):
        for engine in fleet:
            engine.advance(at)
            ties = _collect(engine, pending, ties, lag_seconds)
        await _tell(fleet, pending, at, decider)
        together = [_job(number, each) for number, each in enumerate(group, start=len(jobs))]
        jobs += together
        for job, number in await decider.decide(at, together):
            fleet[number].take(job)
    while any(not engine.is_idle for engine in fleet):
        for engine in fleet:
            engine.advance(engine.now + 3600.0)
    return _figures(name, jobs)


def _job(number: int, of: Arrival) -> Job:
    complete = of.pieces[: of.input_tokens // PIECE_TOKENS]
    return Job(number, of.at_seconds, of.input_tokens, of.output_tokens, complete)


def _collect(engine: Engine, pending: list[tuple[float, int, Change]], ties: int, lag_seconds: float) -> int:
    for change in engine.changes:
        ties += 1
        heapq.heappush(pending, (change.at_seconds + lag_seconds, ties, change))
    engine.changes.clear()
    return ties


async def _tell(fleet: Sequence[Engine], pending: list[tuple[float, int, Change]], at: float, decider: Decider) -> None:
    """Report everything that is visible at this time: blocks, first tokens, ends. The results of an iteration are
    visible when it is over."""
    visible = []
    while pending and pending[0][0] <= at:
        visible.append(heapq.heappop(pending)[2])
    if visible:
        await decider.hear(visible)
    for engine in fleet:
        begun, engine.begun = _until(engine.begun, at, "first_token_at")
        for job in begun:
            await decider.begun(job)
        ended, engine.ended = _until(engine.ended, at, "ended_at")
        for job in ended:
            await decider.ended(job)


def _until(jobs: list[Job], at: float, field: str) -> tuple[list[Job], list[Job]]:
    over = [job for job in jobs if getattr(job, field) <= at]
    return over, [job for job in jobs if getattr(job, field) > at] if len(over) < len(jobs) else []


def _figures(name: str, jobs: Sequence[Job]) -> Figures:
    waits = sorted(job.first_token_at - job.at_seconds for job in jobs)
    cached = sum(job.hits * PIECE_TOKENS for job in jobs)
    return Figures(
        name,
        len(jobs),
        sum(waits) / len(waits),
        waits[min(len(waits) - 1, int(0.99 * len(waits)))],
        cached / sum(job.input_tokens for job in jobs),
        sum(job.ended_at - job.at_seconds for job in jobs) / len(jobs),
    )
