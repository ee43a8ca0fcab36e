"""P10: how soon a publisher's blocks disappear from answers, and how much sweeping them delays readers.

The publisher has 200,000 blocks when it clears its cache, restarts, or is unregistered. From then on a replica is
queried until its answer no longer counts them. Meanwhile a reader, in a process of its own, repeatedly reads 512 blocks
of another publisher from Redis. Its waits are given as if the reader and Redis each had their own core: a wait is
the CPU time of the reader and of all threads of Redis until the reply, but at most the clock time minus the time of the
reader in the scheduler's queue. This Redis has no persistence. The waits by the clock, which are given as well, include
the time in which other processes and a hypervisor used the cores.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

import redis

from tools.benchmarks import feed, prompts
from tools.benchmarks.feed import Publisher, publishers, wait_for
from tools.benchmarks.options import Options
from tools.benchmarks.processes import cpu_seconds, queue_seconds, wait_until
from tools.benchmarks.prompts import MODEL, PIECE_BLOCKS, Prompt
from tools.benchmarks.report import Row
from tools.benchmarks.streams import Bench, started

PIECES = 64
#: Five times the default, to finish sooner.
SWEEP = {"WAYMARK_SWEEP_BLOCKS_PER_SECOND": "100000"}
_READER_PAUSE_SECONDS = 0.001


def measure(options: Options) -> list[Row]:
    """Return the rows of P10."""
    blocks = 20_000 if options.is_quick else 200_000
    rows = []
    rounds = 1 if options.is_quick else 3
    ends: dict[str, Callable[[Bench, Publisher], None]]
    ends = {"clear": _clear, "restart": _restart, "unregister": _unregister}
    gone_ms: dict[str, list[float]] = {name: [] for name in ends}
    waits: dict[str, list[_Wait]] = {name: [] for name in ends}
    with started(options, SWEEP, has_peer=False) as bench, publishers(2) as (engine, neighbour):
        neighbour.register(bench.replica)
        kept = next(prompts.fresh())
        neighbour.store(kept)
        wait_for([bench.replica], {neighbour.number: kept})
        with _Reader(bench, kept) as quiet:
            time.sleep(1 if options.is_quick else 5)
        rows += _of_waits("a reader's longest wait, nothing else going on", quiet.waits, None)
        for _ in range(rounds):
            engine.register(bench.replica)
            for name, end in ends.items():
                last = _filled(bench, engine, blocks)
                with _Reader(bench, kept) as reader:
                    gone_ms[name].append(_gone_ms(bench, engine, last, end))
                    wait_until(lambda: bench.redis.client.scard("wm:{1}:dead") == 0, "all is swept")
                waits[name] += reader.waits
    for name in ends:
        what = f"{name} of a publisher with {blocks:,} blocks: "
        rows.append(Row("P10", what + "gone from answers", median(gone_ms[name]), "ms", bar=10.0))
        rows += _of_waits(what + "a reader's longest wait while it is swept", waits[name], 5.0)
    what = f"unregister of a publisher with {blocks:,} blocks: swept at the default speed"
    return [*rows, Row("P10", what, _swept_seconds(blocks), "s", bar=8.0)]


def _swept_seconds(blocks: int) -> float:
    """Return how many seconds the blocks of an unregistered publisher stay in Redis."""
    with started(Options(), has_peer=False) as bench, publishers(1) as (engine,):
        engine.register(bench.replica)
        _filled(bench, engine, blocks)
        began = time.perf_counter()
        _unregister(bench, engine)
        wait_until(lambda: bench.redis.client.scard("wm:{1}:dead") > 0, "its holders are dead")
        wait_until(lambda: bench.redis.client.scard("wm:{1}:dead") == 0, "all is swept", pause_seconds=0.05)
        return time.perf_counter() - began


def _of_waits(what: str, waits: Sequence[_Wait], bar: float | None) -> list[Row]:
    return [
        Row("P10", what, max(wait.ms for wait in waits), "ms", bar=bar),
        Row("P10", what + ", by the clock", max(wait.clock_ms for wait in waits), "ms"),
    ]


def _filled(bench: Bench, engine: Publisher, blocks: int) -> Prompt:
    """Store this number of new blocks. Return the last prompt."""
    some = list(islice(prompts.fresh(PIECES), blocks // (PIECES * PIECE_BLOCKS) + 1))
    for prompt in some:
        engine.store(prompt)
    wait_for([bench.replica], {engine.number: some[-1]})
    return some[-1]


def _clear(bench: Bench, engine: Publisher) -> None:
    engine.send(feed.cleared())


def _restart(bench: Bench, engine: Publisher) -> None:
    engine.seq = 0
    engine.store(next(prompts.fresh(1)))


def _unregister(bench: Bench, engine: Publisher) -> None:
    bench.replica.post("/dynamo/unregister", instance_id=engine.number, model_name=MODEL)


def _gone_ms(bench: Bench, engine: Publisher, held: Prompt, end: Callable[[Bench, Publisher], None]) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", bench.replica.port, timeout=60)
    body = json.dumps({"model_name": MODEL, "token_ids": prompts.tokens(held[:1])[: prompts.BLOCK_SIZE * 4]})

    def is_gone() -> bool:
        connection.request("POST", "/dynamo/query", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        return str(engine.number) not in answer["instances"]

    if is_gone():
        raise SystemExit("the publisher's blocks were not there")
    began = time.perf_counter()
    end(bench, engine)
    wait_until(is_gone, "the publisher's blocks are gone", pause_seconds=0.000_2)
    connection.close()
    return (time.perf_counter() - began) * 1e3


# ---- the reader, a process of its own --------------------------------------------------------------


class _Wait(NamedTuple):
    clock_ms: float
    ms: float
    """The wait as if the reader and Redis each had a core."""


class _Reader:
    def __init__(self, bench: Bench, prompt: Prompt) -> None:
        self.waits: list[_Wait] = []
        self._pid = bench.redis.pid
        self._words = [f"wm:{{1}}:{key:016x}" for key in prompts.seq_hashes(prompt)[::PIECE_BLOCKS]]
        self._path = bench.redis.path

    def __enter__(self) -> _Reader:
        command = (sys.executable, "-m", "tools.benchmarks.lives", self._path, str(self._pid))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._words) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        output, _ = self._process.communicate("stop\n", timeout=60)
        if kind is None:
            self.waits = [_Wait(*wait) for wait in json.loads(output)]


def _used(server: int) -> float:
    """Return the CPU seconds of this process and the server."""
    return time.process_time() + cpu_seconds(server)


def _read() -> None:
    words = json.loads(sys.stdin.readline())
    client, server, own = redis.Redis(unix_socket_path=sys.argv[1]), int(sys.argv[2]), os.getpid()
    client.mget(words)
    print("reading", flush=True)
    waits = []
    while not select.select([sys.stdin], [], [], _READER_PAUSE_SECONDS)[0]:
        used, queued, began = _used(server), queue_seconds(own), time.perf_counter()
        client.mget(words)
        seconds = time.perf_counter() - began
        queued = queue_seconds(own) - queued
        used = _used(server) - used
        # Redis continues to work while the reader is in the queue; that work does not count.
        waits.append((seconds * 1e3, max(0.0, min(used, seconds - queued)) * 1e3))
    print(json.dumps(waits))


if __name__ == "__main__":
    _read()
