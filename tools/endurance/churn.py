"""Ten minutes of churn: does the memory of any process grow?

    python -m tools.endurance.churn [--minutes 10] [--only registration --pause 0.75]

Engines replace the contents of their caches many times, clear them, restart, and are unregistered and registered again,
while replicas get queries. ``--only`` selects one of these events. Meanwhile the memory of every process is sampled.
The table compares the last third of the time with the middle third, because in the first third the caches still fill.
At the end everything is unregistered, and the remaining keys of Redis are shown: only tables that are never deleted may
be left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean
from typing import cast

from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.conftest import BLOCK_SIZE, Engines
from tests.e2e.fleet import Fleet, fleet_of
from tests.e2e.load import Load

ENGINES = 6
DISTURBANCES = ("restart", "clear", "registration")
#: An engine that has published this many batches is restarted before it is registered again. Otherwise replays, and the
#: memory of a worker during a replay, would be larger at the end than in the middle.
LIFE_BATCHES = 500
SAMPLE_SECONDS = 2.0
SETTLE_SECONDS = 60.0
#: If the last third exceeds the middle third by more than this share, a process has grown; less is noise of the
#: allocator.
GROWTH = 0.03
GROWTH_BYTES = 2 * 2**20
SETTINGS = {"lease_seconds": 2}
#: The keys that are never deleted, even when everything is unregistered.
LASTING = {
    b"wm:groups",
    b"wm:birth:{wm:publishers}",
    b"wm:workers",
    b"wm:discovery",
    b"wm:activity",
    b"wm:changes:{wm:publishers}",
    b"wm:unregistered:{wm:publishers}",
}


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(kilobytes) * 1024


class Churn:
    """The samples, by name of the process, and the events that disturb the engines."""

    def __init__(self, fleet: Fleet, engines: Engines, load: Load, redis: Redis, rng: random.Random) -> None:
        self.samples: dict[str, list[int]] = {}
        self.queries = 0
        self.disturbances: Counter[str] = Counter()
        self.disturbing = asyncio.Lock()
        """Held during an event, because a run that ended in the middle of one would leave an engine unregistered, or
        down."""
        self._fleet = fleet
        self._engines = engines
        self._load = load
        self._redis = redis
        self._rng = rng

    async def sample(self) -> None:
        while True:
            info = await self._redis.info("memory")
            found = {f"{member.name} RSS": resident_bytes(member.pid) for member in self._fleet.members}
            found |= {"redis RSS": resident_bytes(self._fleet.redis.pid), "redis used_memory": info["used_memory"]}
            found |= {"redis keys": await self._redis.dbsize()}
            for name, value in found.items():
                self.samples.setdefault(name, []).append(value)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def ask(self) -> None:
        while True:
            replica = self._rng.choice(self._fleet.replicas)
            await replica.query(self._rng.choice(self._load.prompts), **self._engines.group)
            self.queries += 1
            await asyncio.sleep(0.005)

    async def disturb(self, only: str | None, pause_seconds: float) -> None:
        """Restart or clear an engine, or unregister and register it again, now and then until cancelled."""
        while True:
            await asyncio.sleep(pause_seconds * self._rng.uniform(0.5, 1.5))
            name = self._rng.choice(list(self._engines.engines))
            what = only or self._rng.choice(DISTURBANCES)
            if what == "registration" and self._engines.engines[name].publisher.next_seq > LIFE_BATCHES:
                what = "restart"
            self.disturbances[what] += 1
            async with self.disturbing:
                await self._disturb(name, what)

    async def _disturb(self, name: str, what: str) -> None:
        engine, replica = self._engines.engines[name], self._fleet.replicas[0]
        if what == "registration":
            await replica.post("/unregister", tenant_id=self._engines.tenant_id, instance_id=name)
            await replica.post("/register", **self._engines.registrations[name])
            return
        # Prompts must wait: those during a restart would be in the cache of the engine, but not in its events.
        async with self._load.at_rest():
            await (engine.clear() if what == "clear" else engine.restart(rebind=True))

    async def unregister_all(self) -> None:
        for name in self._engines.engines:
            await self._fleet.replicas[0].post("/unregister", tenant_id=self._engines.tenant_id, instance_id=name)

    async def left(self) -> list[str]:
        """Return the keys that are left, apart from those that expire and those that are never deleted."""
        names = [key async for key in self._redis.scan_iter() if key not in LASTING]
        return [key.decode() for key in names if await self._redis.ttl(key) == -1]

    async def fields(self, key: str) -> str:
        if await self._redis.type(key) != b"hash":
            return ""
        return b" ".join(await cast("Awaitable[list[bytes]]", self._redis.hkeys(key))).decode()

    def table(self) -> tuple[list[str], bool]:
        """Return the lines of the table, and whether no process has grown."""
        lines, is_flat = [f"{'':24}{'first third':>14}{'middle third':>14}{'last third':>14}{'last/middle':>13}"], True
        for name, values in self.samples.items():
            third = len(values) // 3
            first, middle, last = mean(values[:third]), mean(values[third : 2 * third]), mean(values[2 * third :])
            has_grown = last > middle * (1 + GROWTH) and last - middle > (0 if "keys" in name else GROWTH_BYTES)
            is_flat = is_flat and not has_grown
            unit = 1 if "keys" in name else 2**20
            figures = "".join(f"{each / unit:14,.2f}" for each in (first, middle, last))
            lines.append(f"{name:24}{figures}{last / middle:13.3f}{'  GROWS' if has_grown else ''}")
        return lines, is_flat


async def main(minutes: float, seed: int, only: str | None, pause: float) -> bool:
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        fleet = await stack.enter_async_context(fleet_of(directory, workers=2, replicas=2, settings=SETTINGS))
        redis = await stack.enter_async_context(Redis(port=fleet.redis.port, protocol=2))
        engines = Engines(stack, "churn")
        for i in range(ENGINES):
            dialect = ("vllm-map", "sglang-map", "standard-tokens")[i % 3]
            # The caches are far smaller than all prompts together, so every prompt evicts another one.
            await engines.open(fleet.replicas[0], f"i{i}", dialect=dialect, gpu_blocks=600, cpu_blocks=300)
        load = await stack.enter_async_context(Load(engines, rng, prompts=2_000, blocks=64, pause_seconds=0.01))
        churn = Churn(fleet, engines, load, redis, rng)
        work = (churn.sample(), churn.ask(), churn.disturb(only, pause))
        tasks = [asyncio.create_task(each) for each in work]
        done, _ = await asyncio.wait(tasks, timeout=60 * minutes, return_when=asyncio.FIRST_EXCEPTION)
        async with churn.disturbing:
            for task in tasks:
                task.cancel()
        for task in done:
            task.result()
        lines, is_flat = churn.table()
        print("\n".join(lines))
        batches = sum(engine.publisher.counts["batches"] for engine in engines.engines.values())
        stored = sum(cache.totals.stored for engine in engines.engines.values() for cache in engine.caches)
        print(f"MiB; {batches:,} batches, {stored:,} blocks stored (of {BLOCK_SIZE} tokens), {churn.queries:,} queries")
        print(", ".join(f"{what} {count}" for what, count in sorted(churn.disturbances.items())))
        async with load.at_rest():
            await engines.agree(fleet.replicas, *rng.sample(load.prompts, 50), seconds=SETTLE_SECONDS)
            print("50 prompts, asked of every replica: the answers are the model's")
            await churn.unregister_all()
            began = time.monotonic()

            async def is_swept() -> bool:
                return not any("engine" in key or "dead" in key for key in await churn.left())

            await wait_until(is_swept, "what was unregistered is swept", SETTLE_SECONDS)
            print(
                f"everything unregistered and swept after {time.monotonic() - began:.1f} s; what is left, with fields:"
            )
            for key in sorted(await churn.left()):
                print(f"  {key}: {await churn.fields(key)}")
        print("flat" if is_flat else "something grows")
        return is_flat


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Sample the memory of every process while engines churn.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=DISTURBANCES, help="nothing but this happens to the engines")
    parser.add_argument("--pause", type=float, default=3.5, help="seconds from one of these to the next, on average")
    arguments = parser.parse_args()
    raise SystemExit(0 if asyncio.run(main(**vars(arguments))) else 1)
