"""Replays a trace on simulated engines, and prints the block hit ratio for each way of routing.

    waymark bench --simulate [--trace FILE --requests N] [--json FILE] [--plot FILE]
    waymark bench --simulate --policies least-work,dynamo ...   times to the first token: ``decide``

Engines with prefix caches serve a trace on its own clock, once for each routing: by chance, by prefix stickiness, by
Waymark's answers, and by the contents of the caches, which is the upper bound. Waymark is real: a Redis of its own,
workers and replicas as processes, frames over ZMQ, queries over HTTP to the replicas in turn. In another run everything
but Redis is killed in the middle and started again. It is compared with a model of an indexer that loses its whole
index when it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.benchmarks import decide
from tools.benchmarks import simulate_report as report
from tools.benchmarks.prompts import BLOCK_SIZE
from tools.benchmarks.simulate_engines import Engine
from tools.benchmarks.simulate_index import ByIndex, Kill, Memory
from tools.benchmarks.simulate_routers import Chance, Router, Stickiness, Truth
from tools.benchmarks.simulate_run import Course, play
from tools.benchmarks.simulate_service import Waymark, started
from tools.benchmarks.simulate_trace import Request, made_up, traced
from waymark.base.errors import InvalidValue

KILLED_REPLICAS = 2
"""The number of replicas in the run with a kill."""
IDLE_REQUESTS = 50
"""How many of the last requests are sent again to every replica, when no frame is in transit any more."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """Everything that determines a simulation; the same values give the same engines for the same requests."""

    trace: Path | None = None
    requests: int = 3000
    engines: int = 8
    engine_blocks: int = 65_536
    tokens_per_second: float = 8000.0
    queue_tokens: float = 16_384.0
    prefix_blocks: int = 64
    replicas: tuple[int, ...] = (1, 2, 8)
    workers: int = 2
    lag_ms: float = 50.0
    kill_at: float = 0.5
    outage_seconds: float = 60.0
    seed: int = 0
    environ: tuple[tuple[str, str], ...] = ()
    """The settings of the workers and replicas that differ from the defaults."""

    def __post_init__(self) -> None:
        least: dict[str, float] = dict.fromkeys(("engines", "engine_blocks", "prefix_blocks", "workers"), 1)
        least |= {"requests": 2, "tokens_per_second": 1, "queue_tokens": 0, "lag_ms": 0, "outage_seconds": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not value >= bound:
                raise InvalidValue(f"--{name.replace('_', '-')} is {value:g}; it is at least {bound:g}", field=name)
        if not 0 < self.kill_at < 1:
            raise InvalidValue(f"--kill-at is {self.kill_at:g}; it is a part of the trace, above 0 and below 1")
        if not self.replicas or min(self.replicas) < 1:
            raise InvalidValue("--replicas has a number below 1, or none; give numbers from 1 on, such as 1,2,8")
        if self.trace is not None and not self.trace.is_file():
            raise InvalidValue(f"--trace: there is no file {self.trace}; leave it out for made-up conversations")

    def read(self) -> list[Request]:
        """Return the requests. Raise ``InvalidValue`` if the trace is not valid."""
        return made_up(self.requests, self.seed) if self.trace is None else traced(self.trace, self.requests)

    def kill(self, requests: Sequence[Request]) -> Kill:
        """Return the time of the kill. Raise ``InvalidValue`` if these requests end before everything is started
        again."""
        begin, end = requests[0].at_seconds, requests[-1].at_seconds
        kill = Kill(begin + self.kill_at * (end - begin), self.outage_seconds)
        if kill.at_seconds + kill.outage_seconds >= end:
            raise InvalidValue(
                f"--outage-seconds is {self.outage_seconds:g}, and the {len(requests)} requests end "
                f"{end - kill.at_seconds:.0f} s after the kill; give more --requests, or a shorter outage"
            )
        return kill


async def simulate(options: Simulation, requests: Sequence[Request], kill: Kill) -> list[Course]:
    """Simulate every routing, and return the courses. ``kill`` applies to the runs with a kill."""
    courses = [
        await plain(options, requests, report.CHANCE, lambda _: Chance(options.engines, options.seed)),
        await plain(options, requests, "stickiness", lambda _: _sticky(options)),
    ]
    for replicas in options.replicas:
        courses.append(await by_waymark(options, requests, report.waymark_name(replicas), replicas))
    courses.append(await plain(options, requests, report.CACHES, Truth))
    killed = await by_waymark(options, requests, report.KILLED, KILLED_REPLICAS, kill)
    courses.append(killed)
    # The model takes as long to restart as Waymark did.
    memory = Memory(options.engines, killed.restart_seconds or 0.0)
    courses.append(
        await plain(
            options,
            requests,
            report.MODEL,
            lambda engines: _by_index(options, memory, engines, kill),
        )
    )
    return courses


def main(arguments: Sequence[str]) -> int:
    """Simulate, print and write the results. Return 2, before anything is started, if an argument is not valid."""
    if any(word.partition("=")[0] in ("--policies", "--peer") for word in arguments):
        return decide.main(arguments)
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    json_path, plot_path, windows = given.pop("json"), given.pop("plot"), given.pop("windows")
    if windows < 1:
        parser.error(f"--windows is {windows}; it is at least 1")
    if plot_path is not None and find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install 'waymark[plot]', or leave it out", file=sys.stderr)
        return 2
    try:
        options = Simulation(**given)
        requests = options.read()
        kill = options.kill(requests)
    except InvalidValue as error:
        print(error.sentence, file=sys.stderr)
        return 2
    about = _about(options, requests)
    courses = asyncio.run(simulate(options, requests, kill))
    print(report.table(courses))
    print()
    print(report.kill_table(courses, kill))
    print()
    print("\n".join(report.sentences(courses)))
    print("; ".join(f"{name}: {value}" for name, value in about.items()))
    found = report.content(courses, kill, windows, about)
    if json_path is not None:
        report.write_json(json_path, found)
    if plot_path is not None:
        from tools.benchmarks.simulate_plot import draw  # only a plot needs matplotlib

        draw(plot_path, found)
    return 0


# ---- runs ------------------------------------------------------------------------------------------


def _engines(options: Simulation) -> list[Engine]:
    return [Engine(options.engine_blocks, options.tokens_per_second) for _ in range(options.engines)]


def _sticky(options: Simulation) -> Stickiness:
    return Stickiness(options.engines, options.prefix_blocks)


def _by_index(options: Simulation, index: Any, engines: Sequence[Engine], kill: Kill | None) -> ByIndex:
    return ByIndex(index, _sticky(options), Truth(engines), lag_seconds=options.lag_ms / 1000, kill=kill)


async def plain(options: Simulation, requests: Sequence[Request], name: str, router: Any) -> Course:
    """Run a routing without Waymark. ``router`` makes a router for the engines."""
    engines = _engines(options)
    return await _played(options, requests, name, engines, router(engines))


async def _played(
    options: Simulation, requests: Sequence[Request], name: str, engines: Sequence[Engine], router: Router
) -> Course:
    began = time.monotonic()
    course = await play(name, requests, engines, router, options.queue_tokens)
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return course


async def by_waymark(
    options: Simulation, requests: Sequence[Request], name: str, replicas: int, kill: Kill | None = None
) -> Course:
    engines = _engines(options)
    with tempfile.TemporaryDirectory(prefix="wm-") as folder:
        start = partial(started, engines=options.engines, workers=options.workers, replicas=replicas)
        async with start(Path(folder), environ=dict(options.environ)) as service:
            course = await _played(options, requests, name, engines, _by_index(options, service, engines, kill))
            await _ask_again(course, service, requests[-IDLE_REQUESTS:], Truth(engines))
    return course


async def _ask_again(course: Course, service: Waymark, requests: Sequence[Request], truth: Truth) -> None:
    for request in requests:
        expected = truth.matches(request.engine_hashes())
        for matches in await service.matches_of_all(request):
            course.idle_answers += 1
            course.idle_exact += matches is not None and list(matches) == expected


# ---- the command -----------------------------------------------------------------------------------


def _about(options: Simulation, requests: Sequence[Request]) -> dict[str, Any]:
    distinct = {name for request in requests for name in request.engine_hashes()}
    return {
        "prompts": "made up" if options.trace is None else options.trace.name,
        "requests": len(requests),
        "seconds": round(requests[-1].at_seconds - requests[0].at_seconds),
        "block size": BLOCK_SIZE,
        "blocks": sum(request.blocks for request in requests),
        "different blocks": len(distinct),
        "engines": options.engines,
        "blocks per engine": options.engine_blocks,
        "tokens/s per engine": options.tokens_per_second,
        "queue may be longer by": f"{options.queue_tokens:g} tokens",
        "sticky to the first": f"{options.prefix_blocks} blocks",
        "lag": f"{options.lag_ms:g} ms",
        "workers": options.workers,
        "seed": options.seed,
    }


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A formatter that adds the default to each option, and leaves the epilog as it is."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waymark bench --simulate",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"With --policies or --peer another simulation runs:\n\n{decide.parser().format_help()}",
        formatter_class=_Help,
    )
    plain = Simulation()

    def add(name: str, kind: Any, sentence: str) -> None:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(plain, name), help=sentence)

    add("trace", Path, "requests with hash_ids, one JSON object per line; None: generated conversations")
    add("requests", int, "how many requests")
    add("engines", int, "how many engines")
    add("engine_blocks", int, "blocks of 16 tokens that fit into an engine's cache")
    add("tokens_per_second", float, "how fast an engine computes prompts")
    add("queue_tokens", float, "how many tokens longer than the shortest queue the chosen engine's queue may be")
    add("prefix_blocks", int, "how many first blocks of a prompt sticky routing compares")
    add("replicas", _numbers, "the number of query replicas of each run, separated by commas")
    add("workers", int, "the number of ingest workers")
    add("lag_ms", float, "the delay until an event is in the index, in milliseconds of the trace")
    add("kill_at", float, "when everything but Redis is killed, as a fraction of the trace (0 to 1)")
    add("outage_seconds", float, "after how many seconds of the trace the killed processes start again")
    add("seed", int, "the seed of generated conversations and of random routing")
    parser.add_argument(
        "--windows", type=int, default=24, help="into how many windows of time the JSON and the plot divide the trace"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw the results into this file (.png or .svg); needs matplotlib")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
