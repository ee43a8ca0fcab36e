"""Measures storing and querying blocks with very many holders, such as those of a system prompt that all engines have.

The values of these blocks are long, with a few bytes for each holder, and are read whole.
"""

from __future__ import annotations

import asyncio
import tempfile
from itertools import islice
from pathlib import Path

from tools.benchmarks import index, prompts
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, redis_server, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, Prompt
from tools.benchmarks.report import Row
from waymark.store.store import Store

RANKS = 8
SYSTEM_TOKENS = 2_000
#: The number of complete blocks of the system prompt.
SYSTEM_BLOCKS = SYSTEM_TOKENS // BLOCK_SIZE


def measure(options: Options) -> list[Row]:
    instances = 10 if options.is_quick else 100
    asked = 40 if options.is_quick else 300
    # All prompts begin with these tokens, of which the first ``SYSTEM_TOKENS`` are the system prompt.
    system = next(prompts.fresh(4))
    long = [system + next(prompts.fresh(12)) for _ in range(asked)]
    plain = list(islice(prompts.fresh(16), asked))
    with tempfile.TemporaryDirectory(prefix="wm-") as directory:
        folder = Path(directory)
        with redis_server(folder) as redis:
            rows = asyncio.run(_filled(redis, instances, system, [*long, *plain]))
            for path in options.paths:
                with waymark(folder, "query", redis.url, is_pure=path == "pure") as replica:
                    for name, some in (("", plain), (f", of which {instances * RANKS} have the first 125", long)):
                        for connections in (1, 8):
                            file = write_bodies(folder / "bodies", map(prompts.by_tokens, some))
                            load = run(replica.port, "/query", file, connections, of=(replica, redis))
                            what = f"/query, 512 blocks{name}, {connections} at a time ({path}): "
                            cpu, of_redis = (seconds / load.requests * 1e3 for seconds in load.cpu)
                            rows.append(Row("long", what + "CPU", cpu, "ms"))
                            rows.append(Row("long", what + "Redis' CPU", of_redis, "ms"))
    return rows


async def _filled(redis: RedisServer, instances: int, system: Prompt, held: list[Prompt]) -> list[Row]:
    """Fill the index: every rank of every instance has the system prompt, and one rank has the rest of each prompt.
    Then measure the cost of one more holder for 512 blocks."""
    store = Store.open(redis.url)
    try:
        shared = prompts.seq_hashes(system)[:SYSTEM_BLOCKS]
        others = index.keys("others", 512 - SYSTEM_BLOCKS)
        engines = [await index.owner(store, f"engine-{number}", ranks=RANKS) for number in range(instances)]
        for engine in engines:
            for rank in range(RANKS):
                await engine.apply([*shared, *others], rank=rank, first_seq=10 * rank, store_blocks=512)
        for seq, prompt in enumerate(held, 1):
            known = len(shared) if prompt[: len(system)] == system else 0
            await engines[0].apply(prompts.seq_hashes(prompt)[known:], rank=7, first_seq=100 * seq, store_blocks=512)
        newcomer = await index.owner(store, "newcomer")
        before, calls = redis.cpu(), redis.calls("evalsha")
        await newcomer.apply([*shared, *others], store_blocks=512)
        what = f"512 blocks that {instances * RANKS} holders have, one holder more: "
        return [
            Row("long", what + "Redis' CPU", (redis.cpu() - before) * 1e3, "ms"),
            Row("long", what + "calls, between which readers get their turn", redis.calls("evalsha") - calls, "calls"),
        ]
    finally:
        await store.close()
