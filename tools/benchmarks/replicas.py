"""P7 and P9: how soon a new replica answers, and how much throughput a second one adds."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median

from tools.benchmarks import index, prompts
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.floor import floor
from tools.benchmarks.load import Generator, Load, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, dynamo, redis_server, wait_until, waymark
from tools.benchmarks.prompts import PIECE_TOKENS, Prompt
from tools.benchmarks.report import Row
from tools.benchmarks.streams import new_stores, started, taken_in
from waymark.store.store import Store

PEER = "dynamo.indexer"
INSTANCE = 7
#: The libraries that any replica needs, in two steps.
_MODULES = ("redis.asyncio", "redis.asyncio,pydantic.main,pydantic.types")
#: The pieces of each prompt in the peer's index: 2,048 blocks.
LONG_PIECES = 64


async def fill(redis: RedisServer, held: Sequence[Prompt], blocks: int) -> None:
    """Fill the index: one engine gets these prompts, and random blocks until the index has ``blocks`` blocks."""
    store = Store.open(redis.url)
    try:
        engine = await index.owner(store, str(INSTANCE))
        for seq, prompt in enumerate(held):
            await engine.apply(prompts.seq_hashes(prompt), first_seq=100 * seq, store_blocks=512)
        size = int(redis.client.dbsize())
        await engine.apply(index.keys("fill", max(0, blocks - size)), first_seq=10**6, store_blocks=512)
    finally:
        await store.close()


# ---- a new replica ---------------------------------------------------------------------------------


def measure_start(options: Options) -> Iterator[Row]:
    """Yield the rows of P7. The peer's is last, because on a busy machine its new replica may give up loading the index
    and never answer correctly."""
    blocks = 100_000 if options.is_quick else 1_000_000
    yield from _of_command(3 if options.is_quick else 15)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        asked = next(prompts.fresh())
        for size in (blocks // 10, blocks):
            redis.client.flushall()
            asyncio.run(fill(redis, [asked], size))
            # The first start may have to read its files from the disk.
            starts = [_first_answer(folder, redis, asked) for _ in range(3 if options.is_quick else 10)][1:]
            ours, cpu = (median(each) for each in zip(*starts, strict=True))
            what = f"new replica: from its start to its first right answer, {size:,} blocks"
            yield Row("P7", what, ours, "s", bar=0.3)
            yield Row("P7", "the same: its CPU until then", cpu, "s")
        for modules in _MODULES:
            least, cpu = _first_of_floor(folder, redis, modules)
            yield Row("P7", f"the least: uvloop, httptools, hiredis, {modules.replace(',', ', ')} (floor)", least, "s")
            yield Row("P7", "the same: its CPU until then", cpu, "s")
        if options.peer_python is not None:
            theirs = _of_peer(folder, options.peer_python, blocks)
            what = "the same, and a peer that takes the index over from another"
            yield Row("P7", what, ours, "s", theirs, PEER, ours / theirs)


def _of_command(starts: int) -> Iterator[Row]:
    """Yield the time of ``waymark --version``, the minimum for any use of the command."""
    command, wall, cpu = (sys.executable, "-m", "waymark", "--version"), [], []
    for _ in range(starts + 1):
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.monotonic() - began)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # The first run does not count, because it may have read its files from the disk.
    yield Row("P7", "waymark --version: from its start to its end", median(wall[1:]), "s", bar=0.1)
    yield Row("P7", "the same: its CPU", median(cpu[1:]), "s")


def _first_answer(folder: Path, redis: RedisServer, prompt: Prompt) -> tuple[float, float]:
    """Start a replica. Return the seconds until its first right answer, and the seconds of its CPU."""
    began = time.monotonic()
    with waymark(folder, "query", redis.url, is_awaited=False) as replica:
        _until_right(replica, prompt)
        return time.monotonic() - began, replica.cpu()


def _first_of_floor(folder: Path, redis: RedisServer, modules: str) -> tuple[float, float]:
    """Start a server that only imports these modules. Return the seconds until it answers, and the seconds of its
    CPU."""
    starts = []
    for _ in range(3):
        began = time.monotonic()
        with floor(folder, redis, modules, is_awaited=False) as server:
            wait_until(server.is_up, "the floor is up", pause_seconds=0.005)
            starts.append((time.monotonic() - began, server.cpu()))
    clock, cpu = (median(each) for each in zip(*starts, strict=True))
    return clock, cpu


def _of_peer(folder: Path, python: str, blocks: int) -> float:
    """Return how many seconds a new dynamo.indexer takes to copy an index of this number of blocks from another one."""
    with dynamo(folder, python) as first, publishers(1, INSTANCE) as (engine,):
        engine.register(first)
        some = list(islice(prompts.fresh(LONG_PIECES), blocks // (LONG_PIECES * PIECE_TOKENS // prompts.BLOCK_SIZE)))
        for prompt in some:
            engine.store(prompt, 512)
        wait_for([first], {INSTANCE: some[-1]})
        began = time.monotonic()
        with dynamo(folder, python, "--peers", f"http://127.0.0.1:{first.port}", is_awaited=False) as second:
            _until_right(second, some[-1])
            return time.monotonic() - began


def _until_right(server: Server, prompt: Prompt) -> None:
    body = prompts.by_tokens(prompt)

    def is_right() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request("POST", "/query", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read()) if answer.status == 200 else {}
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        row = found.get("instances", found.get("default", {})).get(str(INSTANCE), {})
        return bool(row.get("longest_matched") == len(prompt) * PIECE_TOKENS)

    wait_until(is_right, f"{server.name} answers right", pause_seconds=0.005)


# ---- two replicas ----------------------------------------------------------------------------------


def measure_more(options: Options) -> list[Row]:
    """Return the rows of P9. The bar is for CPU, because two replicas, Redis and the load generators may share two
    cores."""
    rounds, size = (2, 30) if options.is_quick else (7, 200)
    some = list(islice(prompts.fresh(), size))
    one_ms: list[float] = []
    two_ms: list[float] = []
    one_rate: list[float] = []
    two_rate: list[float] = []
    redis_ratio: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        asyncio.run(fill(redis, some, 0))
        first, second = [stack.enter_context(waymark(folder, "query", redis.url)) for _ in range(2)]
        file = write_bodies(folder / "bodies", map(prompts.by_tokens, some))
        for number in range(rounds + 1):
            cpu, alone = _loaded([first], redis, file)
            both_cpu, together = _loaded([first, second], redis, file)
            if number:
                one_ms.append(cpu[0])
                two_ms.append(both_cpu[0])
                redis_ratio.append(both_cpu[1] / cpu[1])
                one_rate.append(sum(load.per_second for load in alone))
                two_rate.append(sum(load.per_second for load in together))
    gain = [2 * a / b for a, b in zip(one_ms, two_ms, strict=True)]
    by_wall = [b / a for a, b in zip(one_rate, two_rate, strict=True)]
    what = "two replicas over one, queries per second "
    return [
        Row("P9", what + "of their CPU", median(gain), "times", bar=1.9, is_least=True),
        Row("P9", what + "on this machine, with Redis and the load on its cores", median(by_wall), "times"),
        Row("P9", "Redis' CPU per query, with two replicas over one", median(redis_ratio), "times"),
        *_ingest_beside(options),
    ]


def _loaded(replicas: Sequence[Server], redis: RedisServer, file: Path) -> tuple[tuple[float, float], list[Load]]:
    """Return the CPU per request of the replicas and of Redis, in ms, and the result of each replica's load."""
    generators = [Generator(replica.port, "/query", file, 4) for replica in replicas]
    before, redis_before = sum(replica.cpu() for replica in replicas), redis.cpu()
    for generator in generators:
        generator.begin()
    loads = [generator.end() for generator in generators]
    requests = sum(load.requests for load in loads)
    spent = sum(replica.cpu() for replica in replicas) - before
    return (spent / requests * 1e3, (redis.cpu() - redis_before) / requests * 1e3), loads


def _ingest_beside(options: Options) -> list[Row]:
    """Return the rows of the CPU of the worker and of Redis per block, measured alternately with one replica and with
    four. Every other round begins with four, because later blocks meet a larger index. A short backlog comes first, as
    the caches are cold when processes have just started."""
    rounds, blocks = (2, 3_200) if options.is_quick else (8, 65_536)
    ratios = []
    with started(options, has_peer=False) as bench, publishers(1) as (engine,):
        engine.register(bench.replica)
        for number in range(rounds):
            seconds = {}
            for more in (0, 3) if number % 2 else (3, 0):
                with ExitStack() as stack:
                    for _ in range(more):
                        stack.enter_context(waymark(bench.folder, "query", bench.redis.url))
                    taken_in(bench, engine, new_stores(blocks // 8))
                    worker, redis, _ = taken_in(bench, engine, new_stores(blocks))
                    seconds[more] = worker + redis
            ratios.append(seconds[3] / seconds[0])
    what = "worker's and Redis' CPU per block, beside four replicas over beside one"
    return [Row("P9", what, median(ratios), "times", bar=1.1)]
