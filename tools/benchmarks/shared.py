"""A system prompt that all engines have: the cost of answers that name every engine.

All engines have the first four rows of each prompt, and one engine has more rows. Each prompt is queried once. The
lengths of the longest matches are random, so that few answers equal an earlier one.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median

from tools.benchmarks import prompts
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, dynamo, redis_server, waymark
from tools.benchmarks.prompts import PIECE_BLOCKS, Prompt
from tools.benchmarks.report import Row, against

PEER = "dynamo.indexer"
ENGINES = (8, 64, 256)
#: The number of pieces that all engines have, and of a whole prompt.
_COMMON, _WHOLE = 4, 16


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each number of engines."""
    rounds, size = (1, 16) if options.is_quick else (7, 100)
    for count in ENGINES:
        yield _measured(options, count, rounds, size)


def _measured(options: Options, count: int, rounds: int, size: int) -> Row:
    (common,) = islice(prompts.fresh(_COMMON), 1)
    chosen = random.Random(count)
    asked: list[Prompt] = [common + rest for rest in islice(prompts.fresh(_WHOLE - _COMMON), (rounds + 1) * size)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        stack.enter_context(waymark(folder, "ingest", redis.url))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        peer = None if options.peer_python is None else stack.enter_context(dynamo(folder, options.peer_python))
        servers = [replica] if peer is None else [replica, peer]
        engines = stack.enter_context(publishers(count))
        last = dict.fromkeys((engine.number for engine in engines), common)
        for engine in engines:
            engine.register(*servers)
            engine.store(common)
        for prompt in asked:
            engine = chosen.choice(engines)
            known = prompt[: chosen.randint(_COMMON, _WHOLE)]
            engine.store(known)
            last[engine.number] = known
        wait_for(servers, last)
        ours, theirs = [], []
        for number in range(rounds + 1):
            part = asked[number * size : (number + 1) * size]
            mine = _cpu_ms(folder, replica, redis, part)
            others = None if peer is None else _cpu_ms(folder, peer, None, part)
            if number:  # the first round warms up
                ours.append(mine)
                theirs += [] if others is None else [others]
    blocks = _COMMON * PIECE_BLOCKS
    what = f"/query, {blocks} first blocks that all of {count} engines have: CPU of replica and Redis"
    if not theirs:
        return Row("shared", what, median(ours), "ms")
    return against("shared", what, "ms", ours, theirs, PEER)


def _cpu_ms(folder: Path, server: Server, redis: RedisServer | None, asked: list[Prompt]) -> float:
    file = write_bodies(folder / "bodies", map(prompts.by_tokens, asked))
    load = run(server.port, "/query", file, of=(server,) if redis is None else (server, redis))
    return sum(load.cpu) / len(asked) * 1e3
