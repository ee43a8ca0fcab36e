"""A replica is killed while requests are decided all the time: none is refused, and the loads are right again.

    python -m tests.endurance.decisions [--per-second 200] [--seconds 20] [--reserved-seconds 5]

Starts a Redis and two query replicas. Callers with both URLs decide, run for a moment, and release. After half of the
time the first replica gets SIGKILL. Before, others decided through it alone, and never release, as if they had died
with it: their loads must be gone when their reservations are over.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.conftest import wait_until
from tests.e2e.conftest import Service, starting
from tests.e2e.redis_server import RedisServer, redis_server
from waymark.client import AsyncClient, ClientError

PODS = [f"pod-{number}" for number in range(8)]
PROMPT = list(range(512))
FORGOTTEN = 100
#: How long a request runs.
RUNS_SECONDS = (0.05, 0.5)


class Callers:
    """Requests that begin so many times a second, and what came of them."""

    def __init__(self, client: AsyncClient, per_second: float) -> None:
        self.decided = 0
        self.refused: list[str] = []
        self._client = client
        self._per_second = per_second
        self._chance = random.Random(1)

    async def run(self, seconds: float) -> float:
        """Decisions a second, as they came to be."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (now := time.monotonic() - began) < seconds:
                group.create_task(self._one())
                self.decided += 1
                await asyncio.sleep(max(0.0, self.decided / self._per_second - now))
            lasted = time.monotonic() - began
        return self.decided / lasted

    async def _one(self) -> None:
        try:
            async with self._client.select("m", PROMPT, expect=False, timeout_seconds=3600) as target:
                await target.first_token()
                await asyncio.sleep(self._chance.uniform(*RUNS_SECONDS))
        except ClientError as error:
            self.refused.append(str(error))


async def main(per_second: float, seconds: float, reserved_seconds: float) -> bool:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server())
        await redis.start()
        start = await stack.enter_async_context(starting(directory))
        first, second = [await start("query", redis.url) for _ in range(2)]
        for name in PODS:
            await first.post("/register", type="none", model="m", instance_id=name, block_size=16)
        client = await stack.enter_async_context(AsyncClient([first.url, second.url], timeout=10.0))
        callers = Callers(client, per_second)
        running = asyncio.create_task(callers.run(seconds))
        await asyncio.sleep(seconds / 2)
        of: dict[str, Any] = {"model": "m", "token_ids": PROMPT, "expect": False, "timeout_seconds": reserved_seconds}
        made = await asyncio.gather(*(first.post("/select", **of) for _ in range(FORGOTTEN)))
        await first.kill()
        gone = await _gone(redis, [each["reservation"].split(".")[4] for each in made], reserved_seconds)
        per_second = await running
        await _are_released(redis, second)
    refused = f"{len(callers.refused)} {callers.refused[:3]}"
    print(f"{callers.decided:,} decisions, {per_second:.0f} a second; refused: {refused}")
    print(
        f"{FORGOTTEN} reservations of {reserved_seconds:g} s that nobody released were gone {gone:.1f} s after the kill"
    )
    return not callers.refused


async def _gone(redis: RedisServer, nonces: Sequence[str], reserved_seconds: float) -> float:
    """Seconds until these reservations are gone."""
    began = time.monotonic()

    def are_gone() -> bool:
        with redis.admin() as admin:
            left = {member.decode().split()[3] for member in admin.zrange("wm:{1}:reservations", 0, -1)}
        return left.isdisjoint(nonces)

    await wait_until(are_gone, "what nobody released is over", reserved_seconds + 10.0)
    return time.monotonic() - began


async def _are_released(redis: RedisServer, service: Service) -> None:
    """Every request has ended, so no target has a load."""
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
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--reserved-seconds", type=float, default=5.0)
    options = parser.parse_args()
    sys.exit(0 if asyncio.run(main(options.per_second, options.seconds, options.reserved_seconds)) else 1)
