"""Measures two trees of the repository alternately, to show whether a change made the ordinary path slower.

    python -m tools.benchmarks.compare TREE [--rounds 15] [--tree .]
        [--only hash,new,select,c64,c256,1,4,64,512,steps,live]

``TREE`` is a checkout, such as one of the parent commit, with an environment of its own in ``.venv``. The Redis, worker
and replica of both trees run at the same time, and every round sends both trees the same requests, one tree after the
other. CPU time is that of the servers; a row's ratio is the median of the ratios of all rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TypeAlias

from tools.benchmarks import prompts
from tools.benchmarks.decisions import forget_reservations
from tools.benchmarks.feed import Publisher, publishers, wait_for
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.processes import RedisServer, Server, redis_server, wait_until, waymark
from tools.benchmarks.prompts import PIECE_BLOCKS, Prompt
from tools.benchmarks.report import Row, against, table
from tools.benchmarks.streams import SEQUENCES, Payload, decode_steps, new_stores

#: The bounds on the ratio of CPU, and on that of latency.
BAR = 1.05
NAME = "the tree before"

QUERIES: dict[str, tuple[str, str, Callable[[Prompt], bytes]]] = {
    "hash": ("/query_by_hash", "/query_by_hash, every prompt new", prompts.by_hash),
    "new": ("/query", "/query, every prompt new", prompts.by_tokens),
}
#: The numbers of connections that send ``/query`` at the same time. Their slowest answers are compared.
CROWDS = {"c64": 64, "c256": 256}
STORES = {"1": 1, "4": 4, "64": 64, "512": 512}
#: The number of targets of a decision; one of them has the prompt.
TARGETS = 8
KINDS = (*QUERIES, "select", *CROWDS, *STORES, "steps", "live")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of requests to each tree in a round."""

    rounds: int
    queries: int = 60
    turns: int = 4
    """The number of queries on each connection of a crowd, and the number of decisions for each prompt."""
    frames: int = 640
    blocks_max: int = 16_384
    live_frames: int = 150


@dataclass(frozen=True, slots=True)
class Contender:
    """The processes of one tree, and the engine whose events they read."""

    redis: RedisServer
    worker: Server
    replica: Server
    engine: Publisher

    def take_in(self, backlog: Sequence[Payload], *, singly: bool) -> tuple[float, float]:
        """Return the CPU seconds of the worker and of Redis until a backlog is in the index. ``singly`` sends it batch
        by batch."""
        before = self.worker.cpu(), self.redis.cpu()
        for payload, _ in backlog:
            self.engine.send(payload)
            if singly:
                self._wait()
        self._wait()
        return self.worker.cpu() - before[0], self.redis.cpu() - before[1]

    def _wait(self) -> None:
        wait_until(self._has_all, "the worker has taken everything in", pause_seconds=0.001)

    def _has_all(self) -> bool:
        found = self.redis.client.hget("wm:{1}:publisher:1", "watermark")
        return found is not None and int(found) == self.engine.seq - 1


def measure(trees: Sequence[Path], kinds: Sequence[str], sizes: Sizes) -> list[Row]:
    """Return the rows. ``trees`` are the tree to examine and the one to compare it with."""
    needs_prompts = set(kinds) & {*QUERIES, "select", *CROWDS}
    asked = list(islice(prompts.fresh(), sizes.rounds * sizes.queries if needs_prompts else 0))
    warm = list(islice(prompts.fresh(), 40))
    figures: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        engines = TARGETS if "select" in kinds else 1
        contenders = [stack.enter_context(_started(folder, tree, engines)) for tree in trees]
        for each in contenders:
            for prompt in (*warm, *asked):
                each.engine.store(prompt)
            wait_for([each.replica], {each.engine.number: (*warm, *asked)[-1]})
        for number in range(-1, sizes.rounds):  # the first round warms up
            part = warm if number < 0 else asked[number * sizes.queries :][: sizes.queries]
            for kind in kinds:
                ask = _asked(kind, part, folder, sizes)
                for i in (0, 1) if number % 2 else (1, 0):
                    for name, figure in ask(contenders[i]).items():
                        if number >= 0:
                            figures[name][i].append(figure)
    return [
        against("compare", name, "us", ours, theirs, NAME, None if "Redis" in name else BAR)
        for name, (ours, theirs) in figures.items()
    ]


Ask: TypeAlias = Callable[[Contender], dict[str, float]]
"""A function that sends requests to a contender, and returns microseconds by the name of the row."""


def _asked(kind: str, part: Sequence[Prompt], folder: Path, sizes: Sizes) -> Ask:
    if kind in QUERIES:
        return _query(kind, part, folder)
    if kind == "select":
        return _select(part, folder, sizes)
    return _crowd(kind, part, folder, sizes) if kind in CROWDS else _ingest(kind, sizes)


def _query(kind: str, part: Sequence[Prompt], folder: Path) -> Ask:
    path, what, body = QUERIES[kind]
    bodies = write_bodies(folder / "bodies", map(body, part))

    def ask(contender: Contender) -> dict[str, float]:
        load = run(contender.replica.port, path, bodies, of=(contender.replica,))
        cpu = sum(load.cpu) / load.requests
        return {f"{what}: CPU of the replica": cpu * 1e6, f"{what}: p50": load.p50_ms * 1e3}

    return ask


def _select(part: Sequence[Prompt], folder: Path, sizes: Sizes) -> Ask:
    """Return a function that sends as many ``/select`` as ``/query`` for the prompts. It repeats each prompt, so that a
    round spans several reads of the loads, which happen every 80 ms.
    """
    asked = islice(cycle(part), sizes.turns * len(part))
    bodies = write_bodies(folder / "bodies", map(prompts.by_tokens, asked))

    def cost(contender: Contender, path: str) -> tuple[float, float]:
        load = run(contender.replica.port, path, bodies, of=(contender.replica, contender.redis))
        of_replica, of_redis = (seconds / load.requests * 1e6 for seconds in load.cpu)
        return of_replica, of_redis

    def ask(contender: Contender) -> dict[str, float]:
        query, select = cost(contender, "/query"), cost(contender, "/select")
        forget_reservations(contender.redis.client)
        of = f"/select, {TARGETS} targets"
        return {
            f"{of}: CPU of the replica": select[0],
            f"{of}: CPU of Redis": select[1],
            f"{of}, beyond /query: CPU of the replica": select[0] - query[0],
            f"{of}, beyond /query: CPU of Redis": select[1] - query[1],
            f"{of}, beyond /query: CPU of both": sum(select) - sum(query),
        }

    return ask


def _crowd(kind: str, part: Sequence[Prompt], folder: Path, sizes: Sizes) -> Ask:
    connections = CROWDS[kind]
    asked = islice(cycle(part), sizes.turns * connections)
    bodies = write_bodies(folder / "bodies", map(prompts.by_tokens, asked))
    what = f"/query, {connections} connections"

    def ask(contender: Contender) -> dict[str, float]:
        load = run(contender.replica.port, "/query", bodies, connections, of=(contender.replica,))
        cpu = sum(load.cpu) / load.requests
        return {f"{what}: CPU of the replica": cpu * 1e6, f"{what}: p99": load.percentile_ms(99) * 1e3}

    return ask


def _ingest(kind: str, sizes: Sizes) -> Ask:
    backlog, what = _backlog(kind, sizes), _what(kind)

    def ask(contender: Contender) -> dict[str, float]:
        worker, redis = contender.take_in(backlog, singly=kind == "live")
        return {
            f"{what}: CPU of the worker": worker / len(backlog) * 1e6,
            f"{what}: CPU of Redis": redis / len(backlog) * 1e6,
        }

    return ask


@contextmanager
def _started(folder: Path, tree: Path, engines: int) -> Iterator[Contender]:
    """Start the processes of a tree, with this number of engines. All engines are alive, but only the first one stores
    blocks."""
    command = (str(tree / ".venv" / "bin" / "waymark"),)
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        worker = stack.enter_context(waymark(folder, "ingest", redis.url, command=command))
        replica = stack.enter_context(waymark(folder, "query", redis.url, command=command))
        feeding = stack.enter_context(publishers(engines))
        for engine in feeding:
            engine.register(replica)
        yield Contender(redis, worker, replica, feeding[0])


def _what(kind: str) -> str:
    """Return a phrase about the contents of a batch of this kind."""
    if kind == "steps":
        return f"a batch of {SEQUENCES} stores of 1 block"
    if kind == "live":
        return "a batch of 1 block, one batch at a time"
    return f"a batch of {STORES[kind]} blocks" if STORES[kind] > 1 else "a batch of 1 block"


def _backlog(kind: str, sizes: Sizes) -> list[Payload]:
    if kind == "steps":
        return list(decode_steps(sizes.frames // 2 * SEQUENCES))
    blocks = 1 if kind == "live" else STORES[kind]
    frames = sizes.live_frames if kind == "live" else min(sizes.frames, sizes.blocks_max // blocks)
    if blocks >= PIECE_BLOCKS:
        return new_stores(frames * blocks, blocks)
    pieces = -(-frames * blocks // PIECE_BLOCKS)
    return new_stores(pieces * PIECE_BLOCKS, blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.compare")
    parser.add_argument("before", type=Path, metavar="TREE", help="the tree to hold against, with a .venv in it")
    parser.add_argument("--tree", type=Path, default=Path(), help="the tree that is asked about; else this one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    given = parser.parse_args(arguments)
    trees = [given.tree.absolute(), given.before.absolute()]
    for tree in trees:
        if not (tree / ".venv" / "bin" / "waymark").is_file():
            print(f"{tree} has no .venv/bin/waymark: install it into an environment of its own", file=sys.stderr)
            return 2
    kinds = given.only.split(",")
    for kind in kinds:
        if kind not in KINDS:
            print(f"--only: '{kind}' is none of {', '.join(KINDS)}", file=sys.stderr)
            return 2
    print(table(measure(trees, kinds, Sizes(given.rounds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
