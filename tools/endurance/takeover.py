"""Measures how a fast stream recovers when its ingest worker is killed, with the default lease.

    python -m tools.endurance.takeover [--kills 10] [--blocks-per-second 20000] [--lease-seconds 8]

A worker is killed repeatedly in the middle of its stream. Another one takes over, and the answers for every prompt of
the stream are compared with the engine's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from redis.asyncio import Redis

from tests.e2e.fleet import fleet_of
from tests.e2e.takeover import take_over


async def main(kills: int, blocks_per_second: int, lease_seconds: float) -> bool:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        settings = {"lease_seconds": lease_seconds}
        fleet = await stack.enter_async_context(fleet_of(directory, workers=2, replicas=1, settings=settings))
        redis = await stack.enter_async_context(Redis(port=fleet.redis.port, protocol=2))
        print(f"{'kill':>4}{'blocks':>10}{'blocks/s':>10}{'first batch':>14}{'caught up':>12}  wrong prompts, losses")
        takeovers, is_right = [], True
        for number in range(1, kills + 1):
            figures = await take_over(
                fleet.workers, fleet.replicas[0], redis, tenant_id=f"kill-{number}",
                blocks_per_second=blocks_per_second, seconds_before=3 + number % 4 / 2, seconds_after=lease_seconds + 4,
            )  # fmt: skip
            takeovers.append(figures.takeover_seconds)
            is_right = is_right and not figures.wrong and not any(figures.counters.values())
            print(
                f"{number:4}{figures.blocks:10,}{figures.blocks_per_second:10,.0f}{figures.takeover_seconds:12.2f} s"
                f"{figures.caught_up_seconds:10.2f} s  {len(figures.wrong)}, {figures.counters}"
            )
            await fleet.replicas[0].post("/unregister", tenant_id=f"kill-{number}", instance_id="fast")
        print(f"from the kill to the first batch of the other worker: {min(takeovers):.2f} to {max(takeovers):.2f} s")
        return is_right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill ingest workers under a fast stream and time the takeover.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--blocks-per-second", type=int, default=20_000)
    parser.add_argument("--lease-seconds", type=float, default=8)
    arguments = parser.parse_args()
    raise SystemExit(
        0 if asyncio.run(main(arguments.kills, arguments.blocks_per_second, arguments.lease_seconds)) else 1
    )
