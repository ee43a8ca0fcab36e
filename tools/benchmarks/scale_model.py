"""Measures the constants of the capacity model: how much a stream, a frame and a query each cost in each kind of
process.

    python -m tools.benchmarks.scale_model [--shards 12] [--engines 100] [--seconds 10] [--single]
                                           [--redis valkey-server] [--awake] [--json FILE]

It uses a Redis Cluster of three nodes, or one Redis, with one worker and one replica. The cost of idle parts is
measured in steps that add them: a worker, a quarter of the engines, which are silent, the other engines, and a second
worker.

Frames of each kind, and queries, arrive at random times, at two rates. At 100 a second most of them find their process
asleep. At the higher rate all processes share one core, which would be full if each frame cost as much as at 100 a
second. Redis gives way to the others, so frames and calls to Redis wait. The time in which a process was running or
ready to run gives the probability that a frame finds it busy. The constants are those that fit all steps best: the cost
of each kind of arrival at an idle process, and one share, the same for all kinds, that remains of the cost if the
process is busy. Each step is printed when it is done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from operator import mul
from pathlib import Path
from time import monotonic, sleep, strftime

from tools.benchmarks.capacity import (
    HEARTBEAT,
    KINDS,
    Cost,
    Model,
    Processes,
    Waiting,
    constants,
    rates,
    write_model,
)
from tools.benchmarks.processes import awake_cores
from tools.benchmarks.scale_fleet import (
    Askers,
    Engines,
    Spent,
    System,
    redis_program,
    started_engines,
    started_system,
)

#: The number of frames and queries in a second.
_RATE = 100.0
#: For each step: the kind of frame, N if one stream in N publishes, and the frames in a second. Heartbeats have
#: three steps, because one part of their cost grows with the frames, and another part with the streams that get any.
_FRAMES = (
    (HEARTBEAT, 1, _RATE),
    (HEARTBEAT, 8, _RATE),
    (HEARTBEAT, 8, 2.5 * _RATE),
    *((kind, 1, _RATE) for kind in KINDS),
)
#: The time from the start of a worker until everything is quiet, and from the last frame of a stream until it is
#: silent.
_SETTLE_SECONDS, _SILENT_SECONDS = 8.0, 4.0
#: The time in which frames of all kinds arrive before the measurement, so that it contains nothing that a process does
#: only once.
_WARM_SECONDS = 4.0
#: One in this many streams is registered first, and the others afterwards: the difference is the cost of streams alone,
#: without that of a worker.
_PART = 4
#: The number of blocks in a cache. Every removed block has been there from the beginning.
_BLOCKS = 2048
#: The names of arrivals other than the kinds of frames.
_AWAKE, _REPORT, _QUERY, _SHORT_QUERY = "awake", "report", "query", "short query"
_BYTES = ("received", "sent")
#: The number of iterations of ``least_squares``, each of which improves all figures in turn.
_SWEEPS = 1_000


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the measurement: the arrivals per second, how busy the processes were, and the cost per second."""

    counts: Mapping[str, float]
    busy: Processes
    """The share of the time in which a process was running or ready to run."""
    second: Cost


def constants_of(steps: Sequence[Step], nodes: int) -> tuple[Cost, dict[str, Cost], Waiting]:
    """Return the cost of an idle second, the cost of each kind of arrival if its process is asleep, and the share of
    that cost that remains if the process is busy.
    """
    names = list(dict.fromkeys(name for step in steps for name in step.counts))
    worker = _fitted(steps, names, ["worker"], nodes)
    redis = _fitted(steps, names, ["home", "other"], nodes)
    replica = _fitted(steps, names, ["replica"], nodes)
    counts = [[1.0, *(step.counts.get(name, 0.0) for name in names)] for step in steps]
    received, sent = (least_squares(counts, [getattr(step.second, name) for step in steps]) for name in _BYTES)
    costs = []
    for number in range(len(names) + 1):
        each = Processes(*(figures[number] for figures in (*worker.figures, *redis.figures, *replica.figures)))
        costs.append(Cost.of(each, 1, nodes, 1, received[number], sent[number]))
    waiting = Waiting(worker.waiting, redis.waiting, replica.waiting)
    return costs[0], dict(zip(names, costs[1:], strict=True)), waiting


@dataclass(frozen=True, slots=True)
class _Fit:
    waiting: float
    figures: list[list[float]]
    """For each process, the cost of a second, followed by the cost of each kind of arrival."""
    error: float


def _fitted(steps: Sequence[Step], names: Sequence[str], processes: Sequence[str], nodes: int) -> _Fit:
    """Fit the steps. Return the costs of these processes, and the share of costs that remains if a process is busy."""
    fits = []
    for waiting in (number / 50 for number in range(51)):
        fit = _Fit(waiting, [], 0.0)
        for process in processes:
            rows = []
            for step in steps:
                second = getattr(step.second.divided(1, nodes, 1), process)
                left = 1 - (1 - waiting) * getattr(step.busy, process)
                # Rows are scaled to a cost of 1, because the noise grows with the cost of a step.
                rows.append([part / second for part in (1.0, *(step.counts.get(name, 0.0) * left for name in names))])
            figures = least_squares(rows, [1.0] * len(rows))
            error = sum((sum(map(mul, row, figures)) - 1) ** 2 for row in rows)
            fit = _Fit(waiting, [*fit.figures, figures], fit.error + error)
        fits.append(fit)
    return min(fits, key=lambda fit: fit.error)


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the non-negative figures for which the rows come closest to the values."""
    columns = list(zip(*rows, strict=True))
    squares = [sum(map(mul, column, column)) for column in columns]
    figures, missing = [0.0] * len(columns), list(values)
    for _ in range(_SWEEPS):
        before = list(figures)
        for number, (column, square) in enumerate(zip(columns, squares, strict=True)):
            if square:
                step = max(-figures[number], sum(map(mul, column, missing)) / square)
                figures[number] += step
                missing = [value - part * step for value, part in zip(missing, column, strict=True)]
        if figures == before:
            break
    return figures


@dataclass
class _Steps:
    """A system with one worker and one replica, and the frames of its engines."""

    system: System
    seconds: float
    quiet: Cost = field(default_factory=Cost)
    """The cost of a second without arrivals."""
    frame_bytes: dict[str, float] = field(default_factory=dict)
    query_bytes: float = 0.0

    def rest(self) -> Cost:
        """Return the cost of a second in which nothing is published."""
        sleep(_SETTLE_SECONDS)
        before, began = self.system.spent(), monotonic()
        sleep(self.seconds)
        second = self.system.cost(self.system.spent().since(before), monotonic() - began)
        print(second, flush=True)
        return second

    def at_both_rates(self, come: Callable[[float], Step], rate: float) -> list[Step]:
        """Run a step at this rate, and one at the higher rate on one core."""
        alone = come(rate)
        quiet = _cpu(self.quiet)
        with self.system.on_one_core():
            return [alone, come(rate * max(1.0, (1e6 - quiet) / (_cpu(alone.second) - quiet)))]

    def published(self, engines: Engines, kind: str, every: int, per_second: float) -> Step:
        """Run a step in which every ``every``-th stream publishes frames of a kind."""
        each = per_second * every / len(engines.endpoints)
        if kind == HEARTBEAT:
            engines.make(self.seconds, heartbeats=each, every=every)
        else:
            engines.make(self.seconds, kinds=[kind], share=each / rates()[kind], every=every)
        sleep(_SILENT_SECONDS)
        before, began = self.system.spent(), monotonic()
        published = engines.publish()
        spent, seconds = self.system.spent().since(before), monotonic() - began
        if behind := self.system.behind(published.sequences):
            print(f"the machine is too busy: {behind} frames of kind {kind} were not applied in time", flush=True)
        self.system.wait_for(published.sequences)
        self.frame_bytes[kind] = published.bytes[kind] / published.frames[kind]
        counts = {kind: published.frames.total(), _AWAKE: published.awake, _REPORT: published.reports}
        return self._step(counts, spent, seconds)

    def asked(self, engines: Engines, is_short: bool, per_second: float) -> Step:
        """Run a step with queries of one length."""
        askers = Askers(self.system.replicas, list(engines.endpoints), is_short=is_short)
        with askers.asking(per_second, 2.0):
            pass
        askers.asked = 0
        before, began = self.system.spent(), monotonic()
        with askers.asking(per_second, self.seconds):
            pass
        spent, seconds = self.system.spent().since(before), monotonic() - began
        if not is_short:
            self.query_bytes = askers.body_bytes
        return self._step({_SHORT_QUERY if is_short else _QUERY: askers.asked}, spent, seconds)

    def _step(self, counts: Mapping[str, float], spent: Spent, seconds: float) -> Step:
        ready = self.system.ready(spent)
        busy = Processes(*(min(1.0, getattr(ready, each.name) / 1e6 / seconds) for each in fields(Processes)))
        step = Step({name: count / seconds for name, count in counts.items()}, busy, self.system.cost(spent, seconds))
        print(step, flush=True)
        return step


def _cpu(cost: Cost) -> float:
    return cost.worker + cost.redis + cost.replica


def measure(
    shards: int, engines: int = 100, seconds: float = 10.0, *, is_single: bool = False, block_bytes: float = 35.0
) -> tuple[Model, str]:
    """Return the model, and the description of the machine on which it was measured."""
    nodes = 1 if is_single else 3
    with ExitStack() as stack:
        system = stack.enter_context(started_system(shards, is_single=is_single))
        system.start(workers=0, replicas=1)
        steps = _Steps(system, seconds)
        alone = steps.rest()
        system.start(workers=1, replicas=0)
        another = (steps.rest() - alone).each(1)
        fleet = stack.enter_context(started_engines(engines, _BLOCKS))
        streams = len(fleet.endpoints)
        some = dict(islice(fleet.endpoints.items(), streams // _PART))
        system.register(some)
        few_quiet = steps.rest()
        system.register({name: each for name, each in fleet.endpoints.items() if name not in some})
        system.wait_for(fleet.fill())
        steps.quiet = steps.rest()
        fleet.make(_WARM_SECONDS, kinds=KINDS, share=_RATE / streams)
        system.wait_for(fleet.publish().sequences)
        nothing = Step({}, Processes(0.0, 0.0, 0.0, 0.0), steps.quiet)
        quiet, costs, waiting = constants_of([nothing, *_all_steps(steps, fleet)], nodes)
        silent = (quiet - few_quiet).each(streams - len(some))
        rest = (few_quiet - silent * len(some)).each(1)
        system.start(workers=1, replicas=0)
        system.register({})
        two = steps.rest()
        registered = (two - quiet - another).each(streams)
        about = f"{streams} streams, {strftime('%Y-%m-%d')}, {system.version()}"
    awake, report, query, short_query = (costs.pop(name) for name in (_AWAKE, _REPORT, _QUERY, _SHORT_QUERY))
    model = Model(
        shards, nodes, block_bytes, rest, another, silent, registered, awake, report, costs, steps.frame_bytes, query,
        short_query, steps.query_bytes, waiting,
    )  # fmt: skip
    return model, about


def _all_steps(steps: _Steps, fleet: Engines) -> list[Step]:
    found: list[Step] = []
    for kind, every, per_second in _FRAMES:
        found += steps.at_both_rates(partial(steps.published, fleet, kind, every), per_second)
    for is_short in (False, True):
        found += steps.at_both_rates(partial(steps.asked, fleet, is_short), _RATE)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.scale_model", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each step")
    parser.add_argument("--single", action="store_true", help="one Redis in place of the Cluster")
    parser.add_argument("--redis", default="redis-server", help="the program of the nodes, such as valkey-server")
    parser.add_argument("--block-bytes", type=float, default=35.0, help="of a block in Redis, by --only P6 (35)")
    parser.add_argument("--json", type=Path, help="write the model to this file")
    parser.add_argument("--awake", action="store_true", help="keep the cores awake, as those of a busy machine are")
    given = parser.parse_args()
    with redis_program(given.redis), awake_cores() if given.awake else nullcontext():
        shards = 1 if given.single else given.shards
        model, about = measure(
            shards, given.engines, given.seconds, is_single=given.single, block_bytes=given.block_bytes
        )
    print(constants(model))
    print(f"{shards} shards, {about}")
    if given.json is not None:
        write_model(given.json, model, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
