"""Measures queries during a cold start, in which many engines report their whole caches at once.

    python -m tools.benchmarks.cold_start [--engines 100] [--blocks 1500000] [--workers 2] [--scale 0.1] [--real-time]

Starts a Redis, ingest workers and a query replica. One engine reports before the others, and a process queries its
prompts at a steady rate: first while nothing else happens, then while the other engines report. Prints a table: latency
and refusals in both periods, and how long it took until everything was in the index.

On a machine with few cores most of the latency may be the wait for a core, which says nothing about Waymark. So each
latency is also given without the time in which the querying process, the replica and Redis were ready to run but had no
core, as counted by the kernel. ``--real-time``, which needs root, gives all processes of the benchmark real-time
priority, and these three a higher one than the others. Because only one of them works on a query at a time, two cores
are then enough, whatever else the machine does. If real-time processes use more than 95 % of a core, the kernel stops
them for some 50 ms of each second; the figures without the wait for cores exclude that time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tools.benchmarks import prompts
from tools.benchmarks.feed import STORE_BLOCKS, Publisher, payloads, publishers, wait_for
from tools.benchmarks.load import read_bodies, write_bodies
from tools.benchmarks.processes import RedisServer, prefer, queue_seconds, redis_server, wait_until, waymark
from tools.benchmarks.prompts import PIECE_BLOCKS
from tools.benchmarks.report import Row, table

QUERIES_PER_SECOND = 100
IDLE_SECONDS = 10.0
#: The length of the queried prompts, in pieces of 32 blocks.
ASKED_PIECES = 4
#: The length of the prompts that the engines report.
REPORTED_PIECES = 16
#: The bound on the 99th percentile during the cold start, as a multiple of that of an idle service.
BAR = 3.0


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to the steady queries of one period."""

    latencies_ms: list[float]
    """The latencies of answered queries, from the time at which each was due, ascending."""
    on_cores_ms: list[float]
    """The same, from the time at which each was sent, and without the waits for a core."""
    refused: int


def percentile(ascending: Sequence[float], percent: float) -> float:
    return ascending[min(len(ascending) - 1, int(len(ascending) * percent / 100))] if ascending else float("inf")


def measure(
    engines: int, blocks: int, workers: int, environ: Mapping[str, str] | None = None, *, is_real_time: bool = False
) -> list[Row]:
    """Measure a cold start. ``blocks`` is the number for all engines together; ``environ`` is for the ingest
    workers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        ingest = [stack.enter_context(waymark(folder, "ingest", redis.url, environ)) for _ in range(workers)]
        first, *others = stack.enter_context(publishers(engines + 1))
        for publisher in (first, *others):
            publisher.register(replica)
        asked = list(islice(prompts.synthetic(ASKED_PIECES), 64))
        for prompt in asked:
            first.store(prompt)
        wait_for([replica], {first.number: asked[-1]})
        bodies = write_bodies(folder / "bodies", map(prompts.by_tokens, asked))
        if is_real_time:
            prefer(2, redis.pid, replica.pid)
            prefer(1, os.getpid(), *(each.pid for each in ingest))
        probed = _Probed(replica.port, bodies, (replica.pid, redis.pid), is_real_time)
        idle = _idle(probed)
        backlogs = _backlogs(engines, blocks // max(1, engines))
        cpu = redis.cpu(), sum(each.cpu() for each in ingest)
        began = time.monotonic()
        probe = _Probe(probed)
        _report(others, backlogs)
        wait_until(lambda: _are_in(redis, others), "everything is in the index", seconds=1800.0, pause_seconds=0.2)
        seconds = time.monotonic() - began
        flood = probe.end()
        redis_cpu, worker_cpu = redis.cpu() - cpu[0], sum(each.cpu() for each in ingest) - cpu[1]
    reported = STORE_BLOCKS * sum(map(len, backlogs))
    return [
        *_rows("idle", idle),
        *_rows("cold start", flood),
        _beside("p99 of /query, cold start", flood.latencies_ms, idle.latencies_ms),
        _beside("p99 of /query, cold start, without the wait for cores", flood.on_cores_ms, idle.on_cores_ms),
        Row("B", "queries refused, cold start", flood.refused, "queries", bar=0.0),
        Row("B", f"until {reported:,} blocks of {engines} engines are in the index", seconds, "s"),
        Row("B", "blocks per second", reported / seconds, "blocks/s"),
        Row("B", "Redis' CPU", redis_cpu / seconds, "cores"),
        Row("B", f"CPU of {workers} ingest workers", worker_cpu / seconds, "cores"),
    ]  # fmt: skip


def _rows(when: str, answers: Answers) -> list[Row]:
    kinds = {"": answers.latencies_ms, " without the wait for cores": answers.on_cores_ms}
    return [
        *(
            Row("B", f"/query, {when}: {name}{kind}", percentile(latencies, percent), "ms")
            for kind, latencies in kinds.items()
            for name, percent in (("p50", 50), ("p99", 99), ("the slowest", 100))
        ),
        Row("B", f"/query, {when}: answered", len(answers.latencies_ms), "queries"),
    ]


def _beside(what: str, flood: Sequence[float], idle: Sequence[float]) -> Row:
    during, before = percentile(flood, 99), percentile(idle, 99)
    return Row("B", what, during, "ms", before, "idle", during / before, BAR)


def _backlogs(engines: int, blocks: int) -> list[list[bytes]]:
    """Return the batches of each engine, which store ``blocks`` blocks that no other engine has."""
    count = max(1, blocks // (REPORTED_PIECES * PIECE_BLOCKS))
    new = prompts.fresh(REPORTED_PIECES)
    return [[payload for prompt in islice(new, count) for payload in payloads(prompt)] for _ in range(engines)]


def _report(engines: Sequence[Publisher], backlogs: Sequence[Sequence[bytes]]) -> None:
    """Publish the batches of all engines, in turn."""
    for batches in zip(*backlogs, strict=True):
        for engine, payload in zip(engines, batches, strict=True):
            engine.send(payload)


def _are_in(redis: RedisServer, engines: Sequence[Publisher]) -> bool:
    """Return whether all blocks are in the index. Publishers have their ids in the order of registration; the queried
    one is the first."""
    pipeline = redis.client.pipeline(transaction=False)
    keys = list(redis.client.scan_iter("wm:*:publisher:*", count=1000))
    for key in keys:
        pipeline.hget(key, "watermark")
    watermarks = [int(found) for found in pipeline.execute() if found is not None]
    return sum(mark + 1 for mark in watermarks) >= sum(engine.seq for engine in engines)


# ---- steady queries --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Probed:
    port: int
    bodies: Path
    pids: tuple[int, ...]
    """The processes that take part in an answer."""
    is_real_time: bool


class _Probe:
    """A separate process that sends queries at a steady rate until it is stopped."""

    def __init__(self, of: _Probed) -> None:
        words = map(str, (of.port, of.bodies, *of.pids))
        command = (sys.executable, "-m", "tools.benchmarks.cold_start", "--probe", *words)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if of.is_real_time:
            prefer(2, self._process.pid)

    def end(self) -> Answers:
        output, _ = self._process.communicate(b"end\n", timeout=120)
        found = json.loads(output)
        return Answers(sorted(found["latencies_ms"]), sorted(found["on_cores_ms"]), found["refused"])


def _idle(of: _Probed) -> Answers:
    probe = _Probe(of)
    time.sleep(IDLE_SECONDS)
    return probe.end()


def probe(port: int, path: Path, pids: Sequence[int]) -> None:
    """Query until a line arrives on standard input. A query is sent when it is due and the previous one is answered;
    its latency counts from the time at which it was due."""
    bodies = list(read_bodies(path))
    chain = (os.getpid(), *pids)
    latencies: list[float] = []
    on_cores: list[float] = []
    refused = 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.perf_counter()
    number = 0
    while not select.select([sys.stdin], [], [], max(0.0, began + number / QUERIES_PER_SECOND - time.perf_counter()))[
        0
    ]:
        due = began + number / QUERIES_PER_SECOND
        body = bodies[number % len(bodies)]
        number += 1
        queued, sent = sum(map(queue_seconds, chain)), time.perf_counter()
        try:
            connection.request("POST", "/query", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            refused += 1
            continue
        answered = time.perf_counter()
        if answer.status == 200:
            latencies.append((answered - due) * 1e3)
            on_cores.append((answered - sent - sum(map(queue_seconds, chain)) + queued) * 1e3)
        else:
            refused += 1
    print(json.dumps({"latencies_ms": latencies, "on_cores_ms": on_cores, "refused": refused}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.cold_start")
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=1_500_000, help="of all engines together")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the blocks, such as 0.1 for a tenth")
    parser.add_argument("--set", action="append", default=[], metavar="WAYMARK_X=VALUE", help="of the ingest workers")
    parser.add_argument("--real-time", action="store_true", help="needs root: nothing of a query waits for a core")
    parser.add_argument("--probe", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.probe is not None:
        port, path, *pids = given.probe
        probe(int(port), Path(path), [int(pid) for pid in pids])
        return 0
    environ = dict(setting.split("=", 1) for setting in given.set)
    blocks = int(given.blocks * given.scale)
    print(table(measure(given.engines, blocks, given.workers, environ, is_real_time=given.real_time)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
