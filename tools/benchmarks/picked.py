"""P14: the CPU of a picker for a prompt of 100,000 tokens and 100 targets, and for each chunk of an answer.

    python -m tools.benchmarks.picked [--rounds 3]

The requests are sent as Envoy sends them, each on a stream of its own, four at a time: headers, the body in pieces of
64 KB, the head of the answer and its body. No engine has any block of the prompts. ``python -m tools.benchmarks.envoy``
puts a real Envoy in front of the picker, in one run without the bodies of answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import grpc

from tests.epp.proxy import Stream
from tools.benchmarks.messages import REDIS_SECONDS, picker, settled
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, cpu_seconds, redis_server, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL
from tools.benchmarks.report import Row, table

TARGETS, TOKENS = 100, 100_000
CHUNKS = (1, 1_000)
#: The bounds on a whole request in milliseconds, and on a chunk in microseconds.
BAR_MS, CHUNK_BAR_US = 6.0, 15.0
_AT_ONCE = 4
_PIECE_BYTES = 64 * 1024
_CHUNK = b'data: {"id":"a","object":"text_completion","choices":[{"index":0,"text":"word "}]}\n\n'


def measure(options: Options) -> list[Row]:
    """Return the rows of ``make bench``."""
    return measured(1 if options.is_quick else 3)


def measured(rounds: int) -> list[Row]:
    """Return the rows of P14 that do not need Envoy."""
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        folder = Path(name)
        with (
            redis_server(folder) as redis,
            waymark(folder, "query", redis.url, REDIS_SECONDS) as replica,
            waymark(folder, "ingest", redis.url, REDIS_SECONDS),
            picker(folder, redis.url) as (port, pid),
        ):
            for number in range(1, TARGETS + 1):
                replica.post(
                    "/register", type="none", modelname=MODEL, block_size=BLOCK_SIZE,
                    instance_id=f"pod-{number}", address=f"http://127.1.0.{number}:9",
                )  # fmt: skip
            long, long_redis = asyncio.run(_cost(port, pid, redis, rounds, 40, TOKENS, 1))
            few, _ = asyncio.run(_cost(port, pid, redis, rounds, 200, 1_000, CHUNKS[0]))
            many, _ = asyncio.run(_cost(port, pid, redis, rounds, 12, 1_000, CHUNKS[1]))
    what = f"picker, a prompt of {TOKENS:,} tokens, {TARGETS} targets: CPU of the picker"
    chunk = "picker, an answer whose body passes through it: CPU of the picker for a chunk"
    each = (many - few) / (CHUNKS[1] - CHUNKS[0]) * 1e3
    return [
        Row("P14", f"{what} and Redis", long + long_redis, "ms", bar=BAR_MS),
        Row("P14", f"{what} alone", long, "ms"),
        Row("P14", chunk, each, "us", bar=CHUNK_BAR_US),
        Row("P14", f"the same with {CHUNKS[1]:,} chunks over one", many, "ms", few, "one chunk", many / few),
    ]


async def _cost(
    port: int, pid: int, redis: RedisServer, rounds: int, requests: int, tokens: int, chunks: int
) -> tuple[float, float]:
    """Return the CPU of the picker and of Redis per request, in milliseconds."""
    rest = json.dumps(list(range(1, tokens)), separators=(",", ":"))[1:]
    found = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for number in range(rounds + 1):
            numbers = iter(range(number * requests, (number + 1) * requests))
            before, redis_before = cpu_seconds(pid), redis.cpu()
            await asyncio.gather(*(_pick(channel, numbers, rest, chunks) for _ in range(_AT_ONCE)))
            spent = cpu_seconds(pid) - before, redis.cpu() - redis_before
            found.append(tuple(each / requests * 1e3 for each in spent))
            settled(redis)
    picker_ms, redis_ms = zip(*found[1:], strict=True)  # the first round warms up
    return median(picker_ms), median(redis_ms)


async def _pick(channel: grpc.aio.Channel, numbers: Iterator[int], rest: str, chunks: int) -> None:
    """Send requests one after the other, each followed by its whole answer."""
    for number in numbers:
        body = f'{{"model":"{MODEL}","stream":true,"prompt":[{number},{rest}}}'.encode()
        stream = Stream(channel)
        await stream.headers("/v1/completions")
        for at in range(0, len(body), _PIECE_BYTES):
            await stream.body(body[at : at + _PIECE_BYTES], is_end=at + _PIECE_BYTES >= len(body))
        answer = await stream.receive()
        if answer is None or not answer.HasField("request_headers"):
            raise SystemExit(f"the picker has refused request {number}: {answer}")
        if await stream.request_back() != body:
            raise SystemExit(f"the picker has changed the body of request {number}")
        await stream.answered()
        for left in range(chunks, 0, -1):
            await stream.content(_CHUNK, is_end=left == 1)
        await stream.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    print(table(measured(parser.parse_args().rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
