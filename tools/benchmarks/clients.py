"""The CPU of a query in the router's process: both clients, next to httpx and aiohttp alone with the same bytes.

    python -m tools.benchmarks.clients [--requests 2000] --redis-url redis://127.0.0.1:6379/0

The service is a process of its own, so only the caller's CPU is counted. "Alone" means that a prepared body is sent and
the answer is not parsed; a client also packs the tokens, retries, and parses the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import aiohttp
import httpx

from tests.live import start
from waymark.client import AsyncClient, Client, block_hashes, calls

MODEL, BLOCK_SIZE = "m", 16
ROUNDS = 5
ENGINES = 8

Asked = Callable[[int], Awaitable[None]]


async def measured(asked: Asked, requests: int) -> float:
    """Return the milliseconds of CPU per request, as the median of several rounds."""
    await asked(max(1, requests // 10))
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        await asked(requests)
        found.append((time.process_time() - began) / requests * 1000)
    return median(found)


async def rows(url: str, tokens: list[int], requests: int) -> list[tuple[str, float]]:
    """Return pairs of a client's name and the milliseconds of its request, for one prompt."""
    sent = calls.query(MODEL, tokens, BLOCK_SIZE).sent({})
    content, headers = sent["content"], sent["headers"]
    hashes = block_hashes(tokens, BLOCK_SIZE)
    async with (
        AsyncClient(url, trust_env=False) as client,
        httpx.AsyncClient(trust_env=False) as alone,
        aiohttp.ClientSession() as session,
    ):

        async def of_client(times: int) -> None:
            for _ in range(times):
                await client.query(MODEL, tokens, BLOCK_SIZE, deadline=5.0)

        async def by_hash(times: int) -> None:
            for _ in range(times):
                await client.query_by_hash(MODEL, hashes, BLOCK_SIZE, deadline=5.0)

        async def of_httpx(times: int) -> None:
            for _ in range(times):
                (await alone.post(f"{url}/query", content=content, headers=headers)).raise_for_status()

        async def of_aiohttp(times: int) -> None:
            for _ in range(times):
                async with session.post(f"{url}/query", data=content, headers=headers) as answer:
                    await answer.read()
                    assert answer.status == 200

        found = [
            ("`AsyncClient.query`", await measured(of_client, requests)),
            ("`AsyncClient.query_by_hash`, with hashes made before", await measured(by_hash, requests)),
            ("`httpx.AsyncClient` alone", await measured(of_httpx, requests)),
            ("`aiohttp` alone", await measured(of_aiohttp, requests)),
        ]
    with Client(url, trust_env=False) as blocking, httpx.Client(trust_env=False) as plain:

        async def of_blocking(times: int) -> None:
            for _ in range(times):
                blocking.query(MODEL, tokens, BLOCK_SIZE, deadline=5.0)

        def plainly() -> None:
            plain.post(f"{url}/query", content=content, headers=headers).raise_for_status()

        async def of_plain(times: int) -> None:
            for _ in range(times):
                plainly()

        found += [
            ("`Client.query`", await measured(of_blocking, requests)),
            ("`httpx.Client` alone", await measured(of_plain, requests)),
        ]
    return found


async def run(redis_url: str, requests: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with start("query", redis_url, Path(directory) / "log") as live:
            with Client(live.url, trust_env=False) as client:
                for n in range(ENGINES):
                    client.register(f"pod-{n}", f"tcp://127.0.0.1:{9 + n}", model=MODEL, block_size=BLOCK_SIZE)
            lengths = (64, 512)
            found = [await rows(live.url, list(range(n * BLOCK_SIZE)), requests) for n in lengths]
    print("| CPU of the caller, ms a query | 64 blocks | 512 blocks |\n|---|---|---|")
    for short, long in zip(*found, strict=True):
        print(f"| {short[0]} | {short[1]:.2f} | {long[1]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.clients", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=2000, help="of each kind, in each of five rounds (2000)")
    parser.add_argument("--redis-url", required=True, help="a Redis that may be written to")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.redis_url, arguments.requests))


if __name__ == "__main__":
    main()
