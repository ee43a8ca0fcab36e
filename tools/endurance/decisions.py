"""A replica is killed while it decides requests: no request may be refused, and afterwards the loads must be right.

    python -m tools.endurance.decisions [--per-second 200] [--by-client 10] [--seconds 20] [--reserved-seconds 5]

Starts a Redis and two query replicas. Callers with both URLs ask for a decision, run for a moment, and release: a few a
second by the Python client, the others by two plain HTTP calls each, which cost this process a tenth of the CPU. After
half of the time the first replica gets SIGKILL. Until then other callers use this replica alone and never release, as
if they had died with it: their loads must be gone when their reservations expire.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from tests.conftest import wait_until
from tests.e2e.conftest import Service, starting
from tests.e2e.redis_server import RedisServer, redis_server
from tools.benchmarks.processes import queue_seconds
from waymark.client import AsyncClient, ClientError

PODS = [f"pod-{number}" for number in range(8)]
PROMPT = list(range(512))
FORGOTTEN = 100
_LOOK_SECONDS = 0.1
#: The bounds on the duration of a request.
RUNS_SECONDS = (0.05, 0.5)


class RefusedError(Exception):
    """No replica has decided a request."""


class Plain:
    """A router with both URLs. If one replica does not answer, the router sends the same body, with the same
    ``request_id``, to the other replica."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self._session = session
        self._urls = list(urls)
        self._chance = random.Random(2)

    async def request(self) -> None:
        """Run a request from its decision to its end. Raise RefusedError if no replica decides."""
        of = {"model": "m", "token_ids": PROMPT, "expect": False, "timeout_seconds": 3600}
        taken = await self._ask("/select", of | {"request_id": uuid4().hex})
        await asyncio.sleep(self._chance.uniform(*RUNS_SECONDS))
        await self._ask("/release", {"reservation": taken["reservation"]})

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        came: list[str] = []
        for url in self._chance.sample(self._urls, len(self._urls)):
            try:
                async with self._session.post(url + path, json=body) as answer:
                    if answer.status == 200:
                        found: dict[str, Any] = await answer.json()
                        return found
                    came.append(f"{url}: {answer.status} {await answer.text()}")
            except (aiohttp.ClientError, TimeoutError) as error:
                came.append(f"{url}: {error!r}")
                if len(self._urls) > 1 and isinstance(error, aiohttp.ClientConnectorError):
                    self._urls = [each for each in self._urls if each != url]  # no process listens there
        raise RefusedError("; ".join(came))


class Callers:
    """A source of requests at a steady rate, and their outcomes."""

    def __init__(self, request: Callable[[], Awaitable[None]], per_second: float) -> None:
        self.decided = 0
        self.refused: list[str] = []
        self._request = request
        self._per_second = per_second

    async def run(self, seconds: float) -> float:
        """Begin requests for this time, and wait until all have ended. Return the decisions per second."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (now := time.monotonic() - began) < seconds:
                group.create_task(self._one())
                self.decided += 1
                await asyncio.sleep(max(0.0, self.decided / self._per_second - now))
        return self.decided / max(seconds, time.monotonic() - began - RUNS_SECONDS[1])

    async def _one(self) -> None:
        try:
            await self._request()
        except (ClientError, RefusedError) as error:
            self.refused.append(str(error))


def of_client(client: AsyncClient) -> Callable[[], Awaitable[None]]:
    chance = random.Random(1)

    async def request() -> None:
        async with client.select("m", PROMPT, expect=False, timeout_seconds=3600) as target:
            await target.first_token()
            await asyncio.sleep(chance.uniform(*RUNS_SECONDS))

    return request


async def main(per_second: float, by_client: float, seconds: float, reserved_seconds: float) -> bool:
    used = time.process_time()
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server())
        await redis.start()
        start = await stack.enter_async_context(starting(directory))
        first, second = [await start("query", redis.url) for _ in range(2)]
        for name in PODS:
            await first.post("/register", type="none", model="m", instance_id=name, block_size=16)
        client = await stack.enter_async_context(AsyncClient([first.url, second.url], timeout=10.0))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=10.0))
        )
        plain = Plain(session, [first.url, second.url])
        several = [
            Callers(of_client(client), by_client),
            Callers(plain.request, per_second - by_client),
        ]
        running = asyncio.gather(*(callers.run(seconds) for callers in several))
        await asyncio.sleep(seconds / 2)
        of: dict[str, Any] = {"model": "m", "token_ids": PROMPT, "expect": False, "timeout_seconds": reserved_seconds}
        made = await asyncio.gather(*(first.post("/select", **of) for _ in range(FORGOTTEN)))
        await first.kill()
        gone = await _gone(redis, [each["reservation"].split(".")[4] for each in made], reserved_seconds)
        rates = await running
        await _are_released(redis, second)
    refused = [each for callers in several for each in callers.refused]
    decided = sum(callers.decided for callers in several)
    print(
        f"{decided:,} decisions, {sum(rates):.0f} a second, {rates[0]:.0f} of them by the client; "
        f"refused: {len(refused)} {refused[:3]}"
    )
    print(
        f"the callers used {time.process_time() - used:.1f} s of CPU, and waited {queue_seconds(os.getpid()):.1f} s "
        "for a core"
    )
    print(
        f"{FORGOTTEN} reservations of {reserved_seconds:g} s that nobody released were gone {gone:.1f} s after the kill"
    )
    return not refused


async def _gone(redis: RedisServer, nonces: Sequence[str], reserved_seconds: float) -> float:
    """Wait until these reservations are gone. Return the seconds that it took."""
    began = time.monotonic()

    def left() -> set[str]:
        with redis.admin() as admin:
            return {member.decode().split()[3] for member in admin.zrange("wm:{1}:reservations", 0, -1)}

    async def are_gone() -> bool:
        # Check rarely, and in a thread, because the callers share this loop.
        await asyncio.sleep(_LOOK_SECONDS)
        return (await asyncio.to_thread(left)).isdisjoint(nonces)

    await wait_until(are_gone, "what nobody released is over", reserved_seconds + 10.0)
    return time.monotonic() - began


async def _are_released(redis: RedisServer, service: Service) -> None:
    """Check that no target has a load after every request has ended."""
    left: list[int] = []

    async def are_none() -> bool:
        nonlocal left
        rows = (await service.post("/score", model="m", token_ids=PROMPT))["scores"]
        with redis.admin() as admin:
            left = [admin.zcard("wm:{1}:reservations"), *(row["active_requests"] + row["wait_tokens"] for row in rows)]
        return not any(left)

    await wait_until(are_none, lambda: f"reservations and loads are {left}", 10.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--per-second", type=float, default=200.0)
    parser.add_argument("--by-client", type=float, default=10.0, help="so many of them by the Python client")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--reserved-seconds", type=float, default=5.0)
    options = parser.parse_args()
    sys.exit(0 if asyncio.run(main(**vars(options))) else 1)
