"""P1 to P4: the cost of a query of 512 blocks in a replica, compared with dynamo.indexer, which gets the same bodies.

Both are fed by the same sockets with the same frames, so both hold the same blocks: prompts of a trace on eight engines
in turn, and prompts that share nothing. In every round both get the same bodies, one server after the other; a body is
sent once, unless the row says "once more" or many connections send queries at the same time. The ``floor`` gets the
same bodies, too: the cost that a query adds to the floor's is the cost of the work.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import TypeAlias

from tools.benchmarks import prompts
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.floor import NAME as FLOOR
from tools.benchmarks.floor import floor
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, dynamo, redis_server, waymark
from tools.benchmarks.prompts import PIECE_TOKENS, Prompt
from tools.benchmarks.report import Row, against

ENGINES = 8
PEER = "dynamo.indexer"

Bars: TypeAlias = dict[str, tuple[float | None, float | None]]

#: The bounds on the ratio to the peer, with the C extension and without it. CPU is that of the replica and of Redis
#: together, since both serve the request.
BARS: Bars = {
    "trace": (0.7, 2.0),
    "new": (0.75, 2.3),
    "hash": (1.6, None),
    "short": (1.5, None),
    "p50": (0.8, None),
    "c8": (1.0, None),
    "c64 each": (0.8, None),
    "c64": (0.8, None),
    "c256": (0.8, None),
}
#: The same for the CPU of the replica alone.
ALONE_BARS: Bars = {"trace": (0.6, None)}
TARGETS = {
    "trace": "P1",
    "again": "P1",
    "new": "P2",
    "nobody": "P2",
    "hash": "P3",
    "local": "P3",
    "short": "P3b",
    "p50": "P4",
    "c8": "P4",
    "c64 each": "P4",
    "c64": "P4",
    "c256": "P4",
}
SENTENCES = {
    "trace": "/query, trace-shaped prompts: CPU",
    "again": "/query, the same prompts once more: CPU",
    "new": "/query, every prompt new: CPU",
    "nobody": "/query, prompts that nobody has: CPU",
    "hash": "/query_by_hash: CPU",
    "local": "/dynamo/query_by_hash, the peer's own bodies: CPU",
    "short": "/query, 16 blocks: CPU",
    "p50": "/query, every prompt new, one connection: p50",
    "c8": "/query, trace-shaped prompts, 8 connections: time per request",
    "c64 each": "/query, 64 connections: time per request",
    "c64": "/query, 64 connections: p99",
    "c256": "/query, 256 connections: p99",
}
#: The questions for which the cost of the floor is shown.
_FLOORS = ("trace", "new", "hash", "short", "p50", "c8", "c64 each")
#: The questions whose slowest answers are compared -> the number of connections.
CROWDS = {"c64": 64, "c256": 256}
#: The number of requests of each connection of a crowd in a round.
_TURNS = 4


@dataclass(frozen=True, slots=True)
class Question:
    """One kind of request: its prompts, and the path and the body for each contender."""

    name: str
    asked: Sequence[Prompt]
    body: Callable[[Prompt], bytes] = prompts.by_tokens
    peer_body: Callable[[Prompt], bytes] = prompts.by_tokens
    path: str = "/query"
    peer_path: str = "/query"
    connections: int = 1


@dataclass
class Figures:
    """The figures of each question and contender, one for each round."""

    cpu_ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    redis_ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    p50_ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    each_ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    p99_ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    overtaken: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """The share of answers, in percent, that arrived after the answer to a later request."""

    def together_ms(self) -> dict[tuple[str, str], list[float]]:
        """Return the CPU of a contender plus that of Redis. The peer does not use Redis."""
        return {
            key: ours if key[1] == PEER else [sum(pair) for pair in zip(ours, self.redis_ms[key], strict=True)]
            for key, ours in self.cpu_ms.items()
        }


def measure(options: Options) -> list[Row]:
    """Return the rows of P1 to P4."""
    rounds, size = (1, 16) if options.is_quick else (7, 200)
    shaped = prompts.synthetic() if options.trace is None else prompts.traced(options.trace)
    trace = list(islice(shaped, rounds * size))
    more = list(islice(shaped, rounds * size))
    new = list(islice(prompts.fresh(), rounds * size))
    nobody = list(islice(prompts.fresh(), rounds * size))
    warm = list(islice(prompts.fresh(), 40))
    figures = Figures()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        worker = stack.enter_context(waymark(folder, "ingest", redis.url))
        contenders: dict[str, Server] = {
            name: stack.enter_context(waymark(folder, "query", redis.url, is_pure=name == "pure"))
            for name in options.paths
        }
        first = next(iter(contenders.values()))
        if options.peer_python is not None:
            contenders = {PEER: stack.enter_context(dynamo(folder, options.peer_python)), **contenders}
        peers = [server for server in contenders.values() if server.name == PEER]
        engines = stack.enter_context(publishers(ENGINES))
        for engine in engines:
            engine.register(first, *peers)
        last = {}
        for i, prompt in enumerate([*warm, *trace, *more, *new]):
            engines[i % ENGINES].store(prompt)
            last[engines[i % ENGINES].number] = prompt
        wait_for([first, *peers], last)
        del worker
        contenders[FLOOR] = stack.enter_context(floor(folder, redis))

        asked = [Question("warm", warm)]
        for name, server in contenders.items():
            for question in (*asked, Question("warm", warm, prompts.by_hash, prompts.by_local_hash, *_HASH)):
                _ask(question, name, server, redis, folder, Figures())
        for number in range(rounds):
            part = slice(number * size, (number + 1) * size)
            for question in (*_questions(trace[part], more[part], new[part], nobody[part]), *_crowds(new)):
                for name, server in contenders.items():
                    if not (question.name == "local" and name in (PEER, FLOOR)):
                        _ask(question, name, server, redis, folder, figures)
        for name, server in contenders.items():
            if name != FLOOR:
                _check(server, name, trace[-1])
    return _rows(figures, list(options.paths))


_HASH = ("/query_by_hash", "/query_by_hash")


def _questions(
    trace: Sequence[Prompt], more: Sequence[Prompt], new: Sequence[Prompt], nobody: Sequence[Prompt]
) -> list[Question]:
    return [
        Question("trace", trace),
        Question("again", trace),
        Question("new", new),
        Question("nobody", nobody),
        Question("hash", new, prompts.by_hash, prompts.by_local_hash, *_HASH),
        Question("local", new, prompts.by_local_hash, path="/dynamo/query_by_hash"),
        Question("short", new, prompts.by_few_tokens, prompts.by_few_tokens),
        Question("c8", more, connections=8),
    ]


def _crowds(known: Sequence[Prompt]) -> list[Question]:
    """Return the questions that are sent over many connections at once. All their prompts are known."""
    return [
        Question(name, list(islice(cycle(known), _TURNS * connections)), connections=connections)
        for name, connections in CROWDS.items()
    ]


def _ask(question: Question, name: str, server: Server, redis: RedisServer, folder: Path, figures: Figures) -> None:
    is_peer = name == PEER
    body = question.peer_body if is_peer else question.body
    file = write_bodies(folder / "bodies", map(body, question.asked))
    path = question.peer_path if is_peer else question.path
    load = run(server.port, path, file, question.connections, of=(server, redis))
    key, (cpu, of_redis) = (question.name, name), load.cpu
    figures.cpu_ms[key].append(cpu / load.requests * 1e3)
    figures.redis_ms[key].append(of_redis / load.requests * 1e3)
    figures.p50_ms[key].append(load.p50_ms)
    figures.each_ms[key].append(1e3 / load.per_second)
    figures.p99_ms[key].append(load.percentile_ms(99))
    figures.overtaken[key].append(100 * load.overtaken / load.requests)


def _check(server: Server, name: str, prompt: Prompt) -> None:
    """Raise SystemExit if an answer is wrong, or if a replica runs a different implementation from the one that the row
    names."""
    if name != PEER and f'native="{str(name == "native").lower()}"' not in str(server.ask("GET", "/metrics")):
        raise SystemExit(f"{server.name} does not hash prompts the {name} way")
    asked = [(f"{server.prefix}/query", prompts.by_tokens), (f"{server.prefix}/query_by_hash", prompts.by_local_hash)]
    if name != PEER:
        asked += [("/query", prompts.by_tokens), ("/query_by_hash", prompts.by_hash)]
    for path, body in asked:
        answer = server.ask("POST", path, json.loads(body(prompt)))
        rows = answer["instances"] if "instances" in answer else answer["default"]
        found = max(row["longest_matched"] for row in rows.values())
        if found != len(prompt) * PIECE_TOKENS:
            raise SystemExit(f"{server.name} says at {path} {found} tokens of a prompt that an engine has whole")


def _row(name: str, what: str, path: str, found: Mapping[tuple[str, str], list[float]], bars: Bars) -> Row:
    asked = {"p50": "new", "local": "hash", "c64 each": "c64"}.get(name, name)
    ours, theirs = found[("local" if name == "local" else asked, path)], found.get((asked, PEER))
    if theirs is None:
        return Row(TARGETS[name], what, median(ours), "ms")
    return against(TARGETS[name], what, "ms", ours, theirs, PEER, bars.get(name, (None, None))[path == "pure"])


def _rows(figures: Figures, paths: Sequence[str]) -> list[Row]:
    timed = {"p50": figures.p50_ms, "c8": figures.each_ms, "c64 each": figures.each_ms}
    timed |= dict.fromkeys(CROWDS, figures.p99_ms)
    rows = []
    for name, sentence in SENTENCES.items():
        for path in paths:
            if name in timed:
                rows.append(_row(name, f"{sentence} ({path})", path, timed[name], BARS))
            else:
                together = f"{sentence} of replica and Redis ({path})"
                rows.append(_row(name, together, path, figures.together_ms(), BARS))
                rows.append(_row(name, f"{sentence} of the replica alone ({path})", path, figures.cpu_ms, ALONE_BARS))
    for name, connections in CROWDS.items():
        for path in (*paths, PEER):
            if shares := figures.overtaken.get((name, path)):
                what = f"/query, {connections} connections: answers overtaken ({path})"
                rows.append(Row("P4", what, median(shares), "%"))
    for name in _FLOORS:
        if name in timed:
            rows.append(_row(name, f"{SENTENCES[name]} (floor)", FLOOR, timed[name], {}))
        else:
            what = f"{SENTENCES[name]} of a server that only waits, and Redis (floor)"
            rows.append(_row(name, what, FLOOR, figures.together_ms(), {}))
    redis_ms = median(figures.redis_ms[("trace", paths[0])])
    rows.append(Row("P1", "/query, trace-shaped prompts: CPU of Redis alone", redis_ms, "ms"))
    return rows
