"""Kills processes at random, for a given time; after each round every answer must still equal that of the model.

    python -m tools.endurance.kills [--minutes 10] [--seed 1]

Starts a Redis, three ingest workers, two query replicas and six simulated engines that publish all the time. In each
round some processes, which may include Redis, are killed, paused, ended or started again; Redis comes back with or
without its data. After each round the engines rest, a controller registers lost publishers again, and all answers are
compared with the engines' caches. The seed determines which process has which fault, but not the exact step of the
process at which it occurs; so the same seed makes a failure likely, but does not repeat it exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tests.conftest import wait_until
from tests.e2e.conftest import Engines
from tests.e2e.fleet import Fleet, Member, fleet_of
from tests.e2e.load import Load

ENGINES = 6
LEASE_SECONDS = 2
#: The time limit of a recovery on a busy machine: a lease, a poll, a reconnect and a replay.
SETTLE_SECONDS = 60.0
STEP_SECONDS = (0.05, 1.0)
SETTINGS = {"lease_seconds": LEASE_SECONDS, "redis_timeout_seconds": 1, "probe_seconds": 5}
#: More batches than an engine publishes in a life, so that a replay has the whole life.
BUFFER_BATCHES = 1_000_000


class Kills:
    """Rounds of faults on a fleet and its engines. ``done`` counts the faults by kind and process."""

    def __init__(self, fleet: Fleet, engines: Engines, load: Load, rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._engines = engines
        self._load = load
        self._rng = rng
        self._paused: set[Member] = set()
        self._is_redis_down = False
        self._is_redis_paused = False

    async def round(self, steps: int) -> None:
        """Cause this number of faults. Then start everything again, and compare."""
        for _ in range(steps):
            await self._choose()()
            await asyncio.sleep(self._rng.uniform(*STEP_SECONDS))
        await self._recover()
        await self.compare()

    async def compare(self) -> None:
        """Check that every answer of every replica, by tokens and by hash, equals that of the model."""
        async with self._load.at_rest():
            await self._engines.agree(self._fleet.replicas, *self._load.prompts, seconds=SETTLE_SECONDS)

    def _choose(self) -> Callable[[], Awaitable[None]]:
        chosen = self._rng.choices((self._member, self._redis, self._engine), weights=(6, 2, 2))
        return chosen[0]

    # ---- one fault -------------------------------------------------------------------------------------

    async def _member(self) -> None:
        """Choose a worker or a replica. Kill, pause or end it if it runs; start or resume it if it does not."""
        member = self._rng.choice(self._fleet.members)
        if member in self._paused:
            self._paused.remove(member)
            member.resume()
            self.done[f"{member.role} resumed"] += 1
        elif not member.is_running:
            member.start()
            self.done[f"{member.role} started"] += 1
        else:
            what = self._rng.choice(("killed", "paused", "ended"))
            self.done[f"{member.role} {what}"] += 1
            if what == "killed":
                await member.kill()
            elif what == "paused":
                self._paused.add(member)
                member.pause()
            else:
                member.ask_to_end()

    async def _redis(self) -> None:
        redis = self._fleet.redis
        if self._is_redis_paused:
            self._is_redis_paused = False
            redis.thaw()
            self.done["redis resumed"] += 1
        elif self._is_redis_down:
            await self._start_redis()
        elif self._rng.random() < 0.3:
            self._is_redis_paused = True
            redis.freeze()
            self.done["redis paused"] += 1
        else:
            self._is_redis_down = True
            redis.kill()
            self.done["redis killed"] += 1

    async def _start_redis(self) -> None:
        self._is_redis_down = False
        is_empty = self._rng.random() < 0.5
        if is_empty:
            self._fleet.redis.forget()
        self.done["redis started empty" if is_empty else "redis started with its data"] += 1
        await self._fleet.redis.start()

    async def _engine(self) -> None:
        engine = self._rng.choice(list(self._engines.engines.values()))
        # Prompts must wait: those during a restart would be in the cache of the engine, but not in its events.
        async with self._load.at_rest():
            if self._rng.random() < 0.3:
                self.done["engine cleared"] += 1
                await engine.clear()
            else:
                self.done["engine killed and started"] += 1
                await engine.restart(rebind=True)

    # ---- recovery --------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        if self._is_redis_paused:
            await self._redis()
        if self._is_redis_down:
            await self._start_redis()
        for member in self._paused:
            member.resume()
        self._paused.clear()
        for member in self._fleet.members:
            if member.is_ending:
                await wait_until(lambda member=member: not member.is_running, f"{member.name} has ended")  # type: ignore[misc]
            if not member.is_running:
                member.start()
        for member in self._fleet.members:
            await member.ready()
        await self._engines.register_missing(self._fleet.replicas[0])


async def main(minutes: float, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        fleet = await stack.enter_async_context(
            fleet_of(directory, workers=3, replicas=2, keeps_data=True, settings=SETTINGS)
        )
        engines = Engines(stack, "kills")
        await open_engines(engines, fleet)
        load = await stack.enter_async_context(Load(engines, rng, prompts=24))
        kills = Kills(fleet, engines, load, rng)
        number = 0
        while time.monotonic() - began < 60 * minutes:
            number += 1
            at = time.monotonic()
            await kills.round(rng.randint(1, steps))
            print(f"{time.monotonic() - began:6.0f} s  round {number} is right after {time.monotonic() - at:.1f} s")
        print(f"{number} rounds, {sum(kills.done.values())} faults and recoveries, every answer was the model's:")
        for what, count in sorted(kills.done.items()):
            print(f"  {count:5} {what}")


async def open_engines(engines: Engines, fleet: Fleet) -> None:
    """Open engines of several kinds and sizes, and register them with the first replica."""
    for i in range(ENGINES):
        await engines.open(
            fleet.replicas[0],
            f"i{i}",
            dialect=("vllm-map", "vllm-map", "sglang-map", "standard-tokens")[i % 4],
            gpu_blocks=24,
            cpu_blocks=16 if i % 2 else 0,
            buffer_batches=BUFFER_BATCHES,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill everything at random and compare every answer with a model.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--steps", type=int, default=30, help="at most so many faults in a round")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.minutes, arguments.seed, arguments.steps))
