"""Simulate a fleet of engines, and print the times to the first token for each policy.

    waymark bench --simulate --policies least-work,dynamo [--trace FILE --scale 1.3 --replicas 1,2,8]

Engines, prefill, decode and caches run on a simulated clock. The policies are the product's own. By default decisions
are made in this process, which is fast. With ``--live`` they are made by replicas over HTTP, on a real Redis, and the
engines publish their events to real ingest workers. With ``--gateways 1,2`` there is one run through one real gateway,
and one through two. With ``--peer`` ``dynamo.select_service`` decides for the same engines; with ``--round-robin`` each
engine gets a request in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from tools.benchmarks import decide_live as live
from tools.benchmarks.decide_books import Fast, RoundRobin, Rules
from tools.benchmarks.decide_gateways import gateways
from tools.benchmarks.decide_load import Arrival, Bursts, bursts, made_up, merged, traced
from tools.benchmarks.decide_run import HEAD, Figures, run
from tools.benchmarks.report import aligned
from waymark.base.errors import InvalidValue
from waymark.decide.policies.presets import PRESETS, preset

LAG_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a simulation. The same values give the same arrivals."""

    policies: tuple[str, ...]
    trace: Path | None = None
    first: int = 0
    requests: int = 1500
    scale: float = 1.0
    engines: int = 8
    replicas: tuple[int, ...] = (1,)
    gateways: tuple[int, ...] = ()
    round_robin: bool = False
    seeds: int = 1
    burst_every: float = 0.0
    seconds: float = 600.0
    speculative_ms: float = 0.0
    speculative_credit: float = 1.0
    own_loads: bool = False
    together: bool = False
    live: bool = False
    as_decided: bool = False
    peer: tuple[str, ...] = ()
    dynamo_python: str = sys.executable

    def arrivals(self, seed: int) -> list[Arrival]:
        if self.trace is None and self.burst_every and not self.requests:
            return bursts(Bursts(every_seconds=self.burst_every), self.seconds, seed)
        if self.trace is None:
            found = made_up(self.requests, self.scale, seed)
        else:
            found = traced(self.trace, self.first, self.requests, self.scale, is_spread=not self.together)
        if self.burst_every:
            of = Bursts(every_seconds=self.burst_every)
            found = merged(found, bursts(of, found[-1].at_seconds, seed))
        return found


async def simulate(options: Options) -> list[Figures]:
    """Run every combination, print the figures of each seed, and return the medians over the seeds."""
    found = []
    for one_run in _runs(options):
        found.append(_median([_shown(await one_run(seed)) for seed in range(options.seeds)]))
    return found


def _shown(figures: Figures) -> Figures:
    print(" | ".join(figures.row), file=sys.stderr, flush=True)
    return figures


def _runs(options: Options) -> Iterator[Callable[[int], Awaitable[Figures]]]:
    """Yield, for each line of the table, the function that simulates one seed."""
    if options.round_robin:
        yield partial(_in_turn, options)
    for count in options.gateways:
        for name in options.policies:
            yield partial(_through_gateways, options, name, count)
    for replicas in () if options.gateways else options.replicas:
        for name in options.policies:
            yield partial(_ours, options, name, replicas)
    for replicas in options.replicas:
        for kind in options.peer:
            yield partial(_theirs, options, kind, replicas)


async def _in_turn(options: Options, seed: int) -> Figures:
    engines = options.engines
    return await run("each engine in turn", options.arrivals(seed), engines, RoundRobin(engines), LAG_SECONDS)


async def _through_gateways(options: Options, name: str, count: int, seed: int) -> Figures:
    label = f"{name}, {count} gateway{'s' if count > 1 else ''}"
    async with gateways(name, options.engines, count) as decider:
        return await run(label, options.arrivals(seed), options.engines, decider, LAG_SECONDS)


async def _ours(options: Options, name: str, replicas: int, seed: int) -> Figures:
    label = f"{name}, {replicas} replica{'s' if replicas > 1 else ''}"
    if options.own_loads:
        label += ", own loads"
    if options.speculative_ms:
        label += ", speculative"
    arrivals = options.arrivals(seed)
    if options.live:
        async with live.ours(
            name, options.engines, replicas, options.speculative_ms > 0, is_as_decided=options.as_decided
        ) as decider:
            return await run(label + ", live", arrivals, options.engines, decider, LAG_SECONDS)
    policy = preset(name)
    rules = Rules(
        replicas,
        options.own_loads,
        speculative_seconds=options.speculative_ms / 1000,
        speculative_credit=options.speculative_credit,
    )
    fast = Fast(policy, policy.values({}), options.engines, rules, seed)
    return await run(label, arrivals, options.engines, fast, LAG_SECONDS)


async def _theirs(options: Options, kind: str, replicas: int, seed: int) -> Figures:
    label = f"dynamo.select_service, {kind}, {replicas} replica{'s' if replicas > 1 else ''}"
    async with live.theirs(kind, options.engines, replicas, options.dynamo_python) as decider:
        return await run(label, options.arrivals(seed), options.engines, decider, LAG_SECONDS)


def _median(several: Sequence[Figures]) -> Figures:
    def middle(field: str) -> float:
        return median(getattr(each, field) for each in several)

    first = several[0]
    return Figures(
        first.name,
        first.requests,
        middle("mean_first_token"),
        middle("p99_first_token"),
        middle("hit_ratio"),
        middle("mean_end"),
    )


def main(arguments: Sequence[str]) -> int:
    """Simulate, print and write the results. Return 2 if an argument is not valid."""
    parsed = parser()
    given = vars(parsed.parse_args(arguments))
    json_path = given.pop("json")
    options = Options(**given)
    try:
        for name in options.policies:
            preset(name)
        for kind in options.peer:
            live.check_kind(kind)
        if min(options.gateways, default=1) < 1:
            raise InvalidValue("--gateways must be numbers of at least 1, separated by commas")
        if min(options.replicas, default=0) < 1 or options.engines < 1 or options.scale <= 0 or options.seeds < 1:
            raise InvalidValue("--replicas, --engines and --seeds must be at least 1, and --scale must be above 0")
        options.arrivals(0)
    except InvalidValue as error:
        print(error.sentence, file=sys.stderr)
        return 2
    found = asyncio.run(simulate(options))
    print(aligned([HEAD, *(each.row for each in found)]))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="waymark bench --simulate",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    known = ", ".join(PRESETS)
    parser.add_argument(
        "--policies",
        type=_words,
        default=("least-work",),
        help=f"the policies to compare, separated by commas: {known}",
    )
    parser.add_argument("--trace", type=Path, help="requests with hash_ids, one JSON object per line")
    parser.add_argument("--first", type=int, default=0, help="how many first requests of the trace are left out")
    parser.add_argument("--requests", type=int, default=1500, help="how many requests; 0: only bursts")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times as fast as recorded requests arrive")
    parser.add_argument("--engines", type=int, default=8, help="how many engines")
    parser.add_argument(
        "--replicas", type=_numbers, default=(1,), help="the number of query replicas of each run, separated by commas"
    )
    parser.add_argument(
        "--gateways", type=_numbers, default=(), help="the number of gateways that decide, separated by commas"
    )
    parser.add_argument("--round-robin", action="store_true", help="also measure routing to each engine in turn")
    parser.add_argument(
        "--seeds", type=int, default=1, help="the number of runs; each figure is the median of all runs"
    )
    parser.add_argument("--burst-every", type=float, default=0.0, help="seconds between bursts; 0: none")
    parser.add_argument("--seconds", type=float, default=600.0, help="the length of a run with only bursts, in seconds")
    parser.add_argument("--speculative-ms", type=float, default=0.0, help="how long speculative entries last; 0: none")
    parser.add_argument(
        "--speculative-credit", type=float, default=1.0, help="the weight of a token of a speculative entry"
    )
    parser.add_argument("--own-loads", action="store_true", help="each replica knows its own decisions only")
    parser.add_argument("--together", action="store_true", help="decide requests that arrive at the same time at once")
    parser.add_argument("--live", action="store_true", help="decide by replicas over HTTP, on a real Redis")
    parser.add_argument(
        "--as-decided",
        action="store_true",
        help="with --live, engines get requests in the order in which Redis decided, not in the order of the answers",
    )
    parser.add_argument(
        "--peer",
        type=_words,
        default=(),
        help="compare with dynamo.select_service in these forms, separated by commas: defaults, tuned, mesh, "
        "tuned-mesh",
    )
    parser.add_argument("--dynamo-python", default=sys.executable, help="a Python that has ai-dynamo-runtime")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
