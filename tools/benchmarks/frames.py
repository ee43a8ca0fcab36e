"""Measures the cost of each step of a frame: first in this process and without Redis, then in a real worker.

    python -m tools.benchmarks.frames [--no-worker | --only-worker] [--shards 4] [--generations 10]

In each round a stream stores and removes 32,768 blocks twice. A figure is the minimum of eight rounds, in microseconds
of CPU per frame. The first table leaves out the sockets, the order of frames, the calls of the script, and the work of
a worker while no frames arrive. ``--shards`` is the number of shards of the index. With ``--generations``, blocks have
a bound on their age, and the blocks of a round are stored once, in that number of generations. The second table has the
whole cost: a worker with clocks around its steps (``hops``) applies the backlogs of ``streams``, and a figure is the
median of the rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

from tests.factories import registration
from tools.benchmarks import feed, hops, prompts
from tools.benchmarks.feed import publishers
from tools.benchmarks.processes import redis_server, wait_until, waymark
from tools.benchmarks.report import aligned
from tools.benchmarks.streams import Bench, as_published, backlogs, taken_in
from waymark.apply.applier import portions_of
from waymark.domain.engines import EngineKind
from waymark.domain.generations import GENERATIONS, BlockBounds
from waymark.domain.moves import Moves
from waymark.domain.parts import shares_of
from waymark.domain.resolver import Resolver
from waymark.domain.slices import finish
from waymark.engines import decoder
from waymark.store.calls import CALL_BLOCKS, ApplyCalls

STEPS = ("decode", "plan", "resolve", "pack")
SIZES = (64, 512)
_BLOCKS, _ROUNDS, _FOLD = 32_768, 9, 64
_SEED: Final = 1337
_CALLS = "calls of scripts"


class Stream:
    """One stream, from payloads to the arguments of the script."""

    def __init__(self, shards: int, generations: int) -> None:
        self._shards, self._generations = shards, generations
        self._decode = decoder(EngineKind.VLLM, seed=_SEED)
        bounds = BlockBounds(ttl=GENERATIONS if generations else 0)  # a second for each generation
        of = registration(block_size=prompts.BLOCK_SIZE)
        self._resolver = Resolver(
            of, 1, seed=_SEED, shards=shards, blocks_max=4_000_000, waiting_blocks=1_000, bounds=bounds
        )
        self._seq = self._holders = 0

    def take(self, payloads: Sequence[bytes]) -> list[float]:
        """Run all steps for the frames, and return the seconds of each step."""
        seconds = [0.0] * len(STEPS)
        at = time.process_time()

        def passed(step: int) -> None:
            nonlocal at
            now = time.process_time()
            seconds[step] += now - at
            at = now

        resolver = self._resolver
        start, began = 0, resolver.generations.now
        while start < len(payloads):
            resolver.generations.now = began + start * self._generations // len(payloads) * 1000
            batch = self._decode(payloads[start])
            if resolver.takes_frames:
                batch = self._decode.go_on(batch, payloads[start + 1 : start + _FOLD], CALL_BLOCKS)
            batches = [batch]
            start += batch.frames
            passed(0)
            plan = finish(resolver.plan(batches))
            if plan.begun:
                self._holders += 1
                resolver.begin(list(plan.begun), [self._holders])
            passed(1)
            parts = finish(resolver.resolve(plan, list(enumerate(batches, self._seq))))
            self._seq += batch.frames
            passed(2)
            for portion in portions_of(parts, self._shards):
                for shares in shares_of(portion, self._shards):
                    for share in shares.values():
                        calls = ApplyCalls(share, Moves(resolver.memory), b"wm:{1}:")
                        calls.done(len(calls.next().words))
                        while calls.are_left:
                            calls.done(len(calls.next().words))
            passed(3)
        for name, _ in resolver.over():
            resolver.end(name)
        finish(resolver.memory.release())
        return seconds


def in_one_process(shards: int, generations: int) -> None:
    lines: list[tuple[str, ...]] = [("a frame of", *STEPS, "together")]
    for size in SIZES:
        stream, rounds = Stream(shards, generations), dict[str, list[list[float]]]()
        for _ in range(_ROUNDS):
            new = list(islice(prompts.fresh(size // prompts.PIECE_BLOCKS), _BLOCKS // size))
            hashes = [[each for number in prompt for each in prompts.engine_hashes(number)] for prompt in new]
            stores = [payload for prompt in new for payload in feed.payloads(prompt, 0, size)]
            removals = [feed.removed(each) for each in hashes]
            again = () if generations else (("stored again", stores), ("removed, a copy left", removals))
            for what, payloads in (("stored", stores), *again, ("removed", removals)):
                rounds.setdefault(what, []).append([1e6 * each / len(payloads) for each in stream.take(payloads)])
        for what, found in rounds.items():
            least = [min(figures) for figures in zip(*found[1:], strict=True)]  # the first round warms up
            lines.append((f"{size} blocks {what}", *(f"{each:.1f}" for each in [*least, sum(least)])))
    print(aligned(lines))


def in_a_worker(rounds: int) -> None:
    """Print the cost of each step of a frame in a real worker, for each backlog."""
    found: dict[str, list[Counter[str]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        clocks = folder / "clocks"
        redis = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        command = (sys.executable, "-m", "tools.benchmarks.hops", str(clocks))
        worker = stack.enter_context(waymark(folder, "ingest", redis.url, command=command))
        (publisher,) = stack.enter_context(publishers(1))
        publisher.register(replica)
        bench = Bench(folder, redis, worker, replica, None)
        for number in range(rounds + 1):
            for name, backlog in backlogs(_BLOCKS):
                before = hops.read(worker.pid, clocks, wait_until)
                _, of_redis, calls = taken_in(bench, publisher, as_published(name, backlog))
                spent = hops.read(worker.pid, clocks, wait_until)
                spent.subtract(before)
                if number:  # the first round warms up
                    spent |= Counter({"Redis": int(1e9 * of_redis), _CALLS: calls * 1000})
                    found.setdefault(name, []).append(Counter({k: v / len(backlog) for k, v in spent.items()}))
    steps = [*hops.STEPS, *hops.TASKS.values(), hops.OTHERS, hops.LOOP, hops.THREADS]
    lines: list[tuple[str, ...]] = [("us a frame", *found)]
    figures = {
        step: [median(each[step] for each in of) / 1000 for of in found.values()] for step in [*steps, "Redis", _CALLS]
    }
    figures["together"] = [sum(each) for each in zip(*(figures[step] for step in steps), strict=True)]
    for step in [*steps, "together", "Redis"]:
        lines.append((step, *(f"{each:.1f}" for each in figures[step])))
    lines.append((_CALLS, *(f"{each:.3f}" for each in figures[_CALLS])))
    print(aligned(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-worker", action="store_true", help="print the first table only")
    which.add_argument("--only-worker", action="store_true", help="print the second table only")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the second table")
    parser.add_argument("--shards", type=int, default=1, help="shards of the first table's index")
    parser.add_argument("--generations", type=int, default=0, help="generations of the first table's blocks")
    given = parser.parse_args()
    if not given.only_worker:
        in_one_process(given.shards, given.generations)
    if not given.no_worker:
        in_a_worker(given.rounds)


if __name__ == "__main__":
    main()
