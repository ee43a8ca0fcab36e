"""Simulates a day of an engine that stores and evicts, as fast as possible, and shows the contents of Redis hour by
hour.

    python -m tools.benchmarks.evictions [--hours 24] [--prompts 400] [--capacity 8000] [--seed 0]

An engine with a full cache answers prompts that share a system prompt and then differ, decodes a few blocks of each,
and evicts the least recently used blocks. The system prompt changes every four hours and ends inside a piece, so that
rows are marked. Every eight hours the engine restarts, and its old blocks are swept. Finally the engine ends.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from tests.store.factories import registration
from tools.benchmarks.processes import redis_server
from waymark.domain.held import HeldBlocks
from waymark.domain.moves import Moves
from waymark.domain.parts import Commit, PartList
from waymark.domain.placing import Placer
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.index import Index
from waymark.store.leases import Grant
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts, Verdict
from waymark.store.sweep import Sweeper

GROUP, PUBLISHER, TOKEN = 1, 1, f"1.{1:016x}"
SYSTEM_BLOCKS, DECODED = 75, 8
TAILS = (1, 4, 16, 100)


@dataclass(frozen=True)
class Sample:
    """The contents of Redis after an hour."""

    hour: int
    stored: int
    """The blocks stored since the beginning."""
    held: int
    places: int
    """The rows and branch rows with blocks of the engine, as the worker knows them."""
    rows: int
    branch_rows: int
    marked: int
    bytes: int
    """The bytes of all keys of the index."""


class Engine:
    def __init__(self, redis: Redis, *, capacity: int, seed: int) -> None:
        self.redis = redis
        self.dice = random.Random(seed)
        self.capacity = capacity
        client = RedisClient(redis, "redis://day")
        scripts = Scripts(client)
        self.index, self.sweeper = Index(client, scripts), Sweeper(client, scripts)
        self.grant = Grant(Claim(registration("pod"), PUBLISHER, GROUP, 1), TOKEN, 0, {})
        self.seq = self.stored = self.holder = 0
        self.system: list[int] = []

    async def begin(self) -> None:
        """Begin a new life; the blocks of the previous one are swept."""
        await self.redis.hset(keys.fence(GROUP, 0), str(PUBLISHER), TOKEN)
        await self.redis.hset(self.grant.record, "token", TOKEN)
        if self.holder:
            await self.redis.sadd(keys.dead(GROUP), str(self.holder))
            async for _ in self.sweeper.steps(GroupEntry(GROUP, 1), self.holder):
                pass
        self.holder += 1
        self.memory = HeldBlocks()
        self.memory.begin(self.holder, 0)
        self.placer = Placer(self.memory, 1)
        self.used: OrderedDict[int, None] = OrderedDict()
        """The engine hashes of held blocks, the next to be evicted first."""

    def new(self, count: int) -> list[int]:
        return [self.dice.getrandbits(64) for _ in range(count)]

    async def answer(self) -> None:
        """Evict blocks to make room for one prompt and its decoded blocks, and store them."""
        chain = self.system + self.new(self.dice.choice(TAILS))
        await self.store(chain, self.known(chain))
        for _ in range(DECODED):
            chain += self.new(1)
            await self.store(chain, len(chain) - 1)
        for each in reversed(chain):
            self.used[each] = None
            self.used.move_to_end(each)

    def known(self, chain: list[int]) -> int:
        return next((i for i, each in enumerate(chain) if each not in self.used), len(chain))

    async def store(self, chain: list[int], start: int) -> None:
        parts = self.begin_batch()
        position = 1
        for _ in range(len(self.used) + len(chain) - start - self.capacity):
            gone, _ = self.used.popitem(last=False)
            assert self.placer.remove(parts, self.holder, position, gone, mode="count")
            position += 1
        start = min(start, self.known(chain)) if start < len(chain) - 1 else start
        parent = self.memory.find(self.holder, chain[start - 1]) if start else None
        new = chain[start:]
        # Keys differ from engine hashes, as those of most engines do.
        self.placer.chain(parts, self.holder, position, 0, parent, [each ^ 1 for each in new], new, mode="count")
        self.used.update(dict.fromkeys(new))
        self.stored += len(new)
        commit = Commit(self.seq, None, None, "0" * 16)
        verdict = await self.index.apply(self.grant, parts.parts, Moves(self.memory), commit)
        assert verdict is Verdict.APPLIED

    def begin_batch(self) -> PartList:
        self.seq += 1
        if self.memory.is_over:
            for _ in self.memory.trim():
                pass
        self.placer.begin_fold()
        return self.placer.begin_batch(self.seq)

    async def sample(self, hour: int) -> Sample:
        prefix = keys.block_prefix(GROUP, 0)
        names = [name async for name in self.redis.scan_iter(prefix + b"*", count=1000)]
        rows = [name for name in names if len(name) == len(prefix) + 16]
        branch_rows = [name for name in names if name.endswith(b":b")]
        return Sample(
            hour,
            self.stored,
            self.memory.blocks,
            len({self.place_of(each) for each in self.used}),
            len(rows),
            len(branch_rows),
            int(await self.redis.hlen(keys.branches(GROUP, 0))),
            sum([await self.redis.memory_usage(name, samples=0) or 0 for name in names]),
        )

    def place_of(self, engine_hash: int) -> bytes:
        spot = self.memory.held(self.holder, engine_hash)
        assert spot is not None
        return spot.place.name


async def day(engine: Engine, *, hours: int, prompts: int) -> AsyncIterator[Sample]:
    """Yield a sample after each hour, and one after the engine has ended."""
    await engine.begin()
    for hour in range(1, hours + 1):
        if hour % 4 == 1:
            engine.system = engine.new(SYSTEM_BLOCKS)
        if hour % 8 == 0:
            await engine.begin()
        for _ in range(prompts):
            await engine.answer()
        yield await engine.sample(hour)
    await engine.begin()
    yield await engine.sample(hours + 1)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=400, help="in an hour")
    parser.add_argument("--capacity", type=int, default=8000, help="blocks of the engine's cache")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("hour   stored     held   places     rows  branch rows  marked  bytes a held block")
    with tempfile.TemporaryDirectory(prefix="wm-") as folder, redis_server(Path(folder)) as server:
        async with Redis.from_url(server.url, protocol=2) as redis:
            engine = Engine(redis, capacity=given.capacity, seed=given.seed)
            async for each in day(engine, hours=given.hours, prompts=given.prompts):
                cost = f"{each.bytes / each.held:8.1f}" if each.held else f"{each.bytes:8} in all"
                print(
                    f"{each.hour:4} {each.stored:8} {each.held:8} {each.places:8} {each.rows:8} "
                    f"{each.branch_rows:12} {each.marked:7} {cost}",
                    flush=True,
                )


if __name__ == "__main__":
    asyncio.run(main())
