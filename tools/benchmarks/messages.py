"""Measures the CPU of decisions by ``/select`` and by a picker, for chats without token ids, with 10 and 500 targets.

    python -m tools.benchmarks.messages [--targets 10,500] [--rounds 5]

A round is 600 chats of 2,000 characters, four at a time; the engines do not tokenize. The figures are the CPU of the
replica, or of the picker including gRPC, plus the CPU of Redis. A picker gets each request as Envoy sends it, on a
stream of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import grpc

from tests.epp.proxy import Stream
from tests.ports import unused_port
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import (
    START_SECONDS,
    RedisServer,
    Server,
    cpu_seconds,
    redis_server,
    running,
    wait_until,
    waymark,
)
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL
from tools.benchmarks.report import Row, table

TARGETS = (10, 500)
#: The bound on a decision by ``/select`` with the most targets.
WHOLE_MS = 3.0
#: The bound on the difference between decisions with the most and with the fewest targets.
BAR_MS = 3.0
_CHATS, _AT_ONCE = 600, 4
REDIS_SECONDS = {"WAYMARK_REDIS_TIMEOUT_SECONDS": "30"}  # only CPU is measured, so a busy machine may take its time


def _chat(number: int) -> bytes:
    text = f"Question {number}: " + "What is the weather in Paris today? " * 55
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()


def measure(options: Options) -> list[Row]:
    """Return the rows of ``make bench``."""
    return measured(TARGETS, 1 if options.is_quick else 3)


def measured(targets: Sequence[int], rounds: int) -> list[Row]:
    """Return the rows of both entry points for each number of targets."""
    found: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        folder = Path(name)
        with (
            redis_server(folder) as redis,
            waymark(folder, "query", redis.url, REDIS_SECONDS) as replica,
            waymark(folder, "ingest", redis.url, REDIS_SECONDS),
            picker(folder, redis.url) as (port, pid),
        ):
            known = 0
            for count in targets:
                for number in range(known + 1, count + 1):
                    replica.post(
                        "/register", type="none", modelname=MODEL, block_size=BLOCK_SIZE,
                        instance_id=f"pod-{number}", address=f"http://127.{1 + number // 250}.0.{1 + number % 250}:9",
                    )  # fmt: skip
                known = count
                found["/select", count] = _of_replica(replica, redis, folder, rounds)
                found["picker", count] = asyncio.run(_of_picker(port, pid, redis, rounds))
    return rows_of(found, targets[0])


def rows_of(found: Mapping[tuple[str, int], float], few: int) -> list[Row]:
    """Return the rows for these milliseconds, by entry point and number of targets. ``few`` is the smaller number."""
    rows = []
    for (door, count), ms in sorted(found.items()):
        what = f"{door}, {count:,} targets, messages without a tokenizer: CPU with Redis"
        bar = WHOLE_MS if door == "/select" and count == max(TARGETS) else None
        rows.append(Row("messages", what, ms, "ms", bar=bar))
        if count != few:
            rows.append(Row("messages", f"{what}, beyond that with {few}", ms - found[door, few], "ms", bar=BAR_MS))
    return rows


@contextmanager
def picker(folder: Path, url: str) -> Iterator[tuple[int, int]]:
    """Start a picker. Yield its port and its process id once it listens."""
    port = unused_port()
    values = {
        "REDIS_URL": url, "HOST": "127.0.0.1", "LOG_LEVEL": "warning", "EPP_PORT": str(port), "EPP_TLS": "false",
        "EPP_HEALTH_PORT": "0", "PROBE_PORT": str(unused_port()),
    }  # fmt: skip
    environ = {f"WAYMARK_{name}": value for name, value in values.items()} | REDIS_SECONDS

    def listens() -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=1.0)
            except grpc.FutureTimeoutError:
                return False
            return True

    with running(folder, f"epp-{port}", sys.executable, "-m", "waymark", "epp", **environ) as process:
        wait_until(listens, "the picker listens", START_SECONDS)
        yield port, process.pid


def settled(redis: RedisServer) -> None:
    """Delete the reservations of a round; otherwise the loads would grow, and the next round would depend on them."""
    client = redis.client
    client.delete(*(name for kind in ("reservations", "load", "changes") for name in client.keys(f"wm:*:{kind}")))


def _of_replica(replica: Server, redis: RedisServer, folder: Path, rounds: int) -> float:
    costs = []
    for number in range(rounds + 1):
        chats = range(number * _CHATS, (number + 1) * _CHATS)
        bodies = write_bodies(folder / "bodies", map(_chat, chats))
        load = run(replica.port, "/select", bodies, _AT_ONCE, of=(replica, redis))
        costs.append(sum(load.cpu) / _CHATS * 1e3)
        settled(redis)
    return median(costs[1:])  # the first round warms up


async def _of_picker(port: int, pid: int, redis: RedisServer, rounds: int) -> float:
    costs = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for number in range(rounds + 1):
            chats = iter(range(number * _CHATS, (number + 1) * _CHATS))
            before = cpu_seconds(pid) + redis.cpu()
            await asyncio.gather(*(_picked(channel, chats) for _ in range(_AT_ONCE)))
            costs.append((cpu_seconds(pid) + redis.cpu() - before) / _CHATS * 1e3)
            settled(redis)
    return median(costs[1:])


async def _picked(channel: grpc.aio.Channel, chats: Iterator[int]) -> None:
    """Send chats one after the other. Raise SystemExit if the picker refuses one."""
    for number in chats:
        stream = Stream(channel)
        answer = await stream.ask(_chat(number), modes=("FULL_DUPLEX_STREAMED", "NONE"))
        if answer is None or not answer.HasField("request_headers"):
            raise SystemExit(f"the picker has refused chat {number}: {answer}")
        stream.call.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(table(measured(tuple(map(int, options.targets.split(","))), options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
