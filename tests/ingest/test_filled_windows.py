"""A gap that a late replay fills, if blocks are named by hashes alone: those of windows, and of a further medium."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from tests.ingest.test_filled_gaps import Reader
from tests.store.factories import registration, stream_of
from waymark.apply.options import ApplyOptions
from waymark.apply.resuming import resumed
from waymark.base.metrics import Metrics
from waymark.domain.hashing import extend, token_bytes
from waymark.ingest.frames import ReplayedBatch
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.parametrize("redis", ["real"], indirect=True)]

BLOCK_SIZE = 4
TOKENS = tuple(range(6 * BLOCK_SIZE))
KEYS = extend(None, token_bytes(TOKENS), BLOCK_SIZE)
GROUPS: dict[str, dict[str, Any]] = {
    "GPU": {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
    "GPU g1": {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9},
    "GPU g2": {"group_idx": 2, "kv_cache_spec_kind": "mamba"},
}
HYBRID = ("GPU", "GPU g1", "GPU g2")
HISTORIES = (*range(8), 24)
"""Of each case; in some, a block has left that a batch of the gap names. They take half a second."""

Event = dict[str, Any]


class Cache:
    """One chain of blocks in several groups or media, which store a block only while the first one has it."""

    def __init__(self, dice: random.Random, units: tuple[str, ...]) -> None:
        self.held: dict[str, set[int]] = {unit: set() for unit in units}
        self._dice = dice

    def store(self, unit: str, block: int) -> Event:
        self.held[unit].add(block)
        event: Event = {"type": "BlockStored", "block_hashes": [block + 1]}
        if unit == "CPU":
            return event | {"parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": "CPU"}
        tokens = TOKENS[BLOCK_SIZE * block : BLOCK_SIZE * (block + 1)]
        event |= {"parent_block_hash": block or None, "token_ids": list(tokens), "block_size": BLOCK_SIZE}
        return event | {"medium": "GPU"} | GROUPS[unit]

    def batch(self) -> list[Event]:
        events = [event for _ in range(self._dice.randint(1, 4)) if (event := self._event())]
        if self._dice.random() < 0.03:
            for held in self.held.values():
                held.clear()
            events.append({"type": "AllBlocksCleared"})
        return events

    def _event(self) -> Event | None:
        unit = self._dice.choice(["GPU", *self.held])
        held, main = self.held[unit], self.held["GPU"]
        if self._dice.random() < 0.6:
            may_be = [n for n in range(len(KEYS)) if not n or n - 1 in main] if unit == "GPU" else sorted(main)
            ready = [n for n in may_be if n not in held]
            return self.store(unit, self._dice.choice(ready)) if ready else None
        if not held:
            return None
        block = self._dice.choice(sorted(held))
        held.remove(block)
        event: Event = {"type": "BlockRemoved", "block_hashes": [block + 1], "medium": unit[:3]}
        return event | ({"group_idx": GROUPS[unit]["group_idx"]} if unit in GROUPS else {})


async def held(reader: Reader, units: tuple[str, ...]) -> dict[str, set[int]]:
    """The blocks that the index has, as the next worker would read them."""
    await reader.life.flush()
    applier, _ = await resumed(reader.stream.grant, reader.stream.store, Metrics(), ApplyOptions())
    memory, blocks = applier.resolver.memory, {unit: set[int]() for unit in units}
    for name, holder in applier.resolver.holders.items():
        unit = f"{name.medium} {name.digest}".strip()
        blocks[unit] = {number for number, key in enumerate(KEYS) if memory.held_block(holder, key)}
    return blocks


def batches_of(cache: Cache, count: int) -> list[ReplayedBatch]:
    """The first batch stores the first block everywhere."""
    events = [[cache.store(unit, 0) for unit in cache.held], *(cache.batch() for _ in range(count - 1))]
    return [ReplayedBatch(seq, msgpack.packb([float(seq), batch, 0]), b"") for seq, batch in enumerate(events)]


@pytest.mark.parametrize("units", [HYBRID, ("GPU", "CPU")], ids=["hybrid", "offloaded"])
@pytest.mark.parametrize("shards", [1, 3])
async def test_blocks_named_by_hashes_are_known_after_a_gap(redis: Redis, shards: int, units: tuple[str, ...]) -> None:
    """A block of main attention may have left behind the gap, while its window, or its copy off the device, stays."""
    store = Store(RedisClient(redis, "redis://test"), shards=shards)
    for number in HISTORIES:
        dice = random.Random(number)
        cache = Cache(dice, units)
        reader = Reader(await stream_of(store, redis, registration(f"{number}", block_size=BLOCK_SIZE, copies="set")))
        await reader.resume()
        before, gap, after = dice.randint(3, 8), dice.randint(1, 4), dice.randint(1, 8)
        batches = batches_of(cache, before + gap + after)
        for batch in [*batches[:before], *batches[before + gap :]]:
            await reader.live(batch)
        assert await reader.fill(batches[before - 1 :], dice)
        assert await held(reader, units) == cache.held, number
        assert not reader.life.applier.resolver.unknown


async def test_a_block_that_nobody_has_reported_is_missing_after_a_gap(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    cache = Cache(random.Random(1), ("GPU", "CPU"))
    reader = Reader(await stream_of(store, redis, registration(block_size=BLOCK_SIZE, copies="set")))
    await reader.resume()
    events = [cache.store("GPU", 0)], [cache.store("CPU", 5)], [cache.store("GPU", 1)]
    batches = [ReplayedBatch(seq, msgpack.packb([float(seq), batch, 0]), b"") for seq, batch in enumerate(events)]
    for batch in (batches[0], batches[2]):
        await reader.live(batch)
    assert await reader.fill(batches[1:], random.Random(1))
    assert reader.life.applier.resolver.unknown == 1
    assert await held(reader, ("GPU", "CPU")) == {"GPU": {0, 1}, "CPU": set()}


async def test_windows_that_are_not_read_any_more_keep_no_gap_open(redis: Redis) -> None:
    store, dice = Store(RedisClient(redis, "redis://test")), random.Random(1)
    cache = Cache(dice, HYBRID)
    reader = Reader(await stream_of(store, redis, registration(block_size=BLOCK_SIZE, copies="set")))
    await reader.resume()
    batches = batches_of(cache, 8)
    for batch in [*batches[:3], *batches[5:]]:
        await reader.live(batch)
    await reader.life.flush()
    reader.options = ApplyOptions(hybrid="off")
    await reader.resume()
    assert any(name.has_window for name in reader.life.applier.resolver.holders)
    assert await reader.fill(batches[2:], dice)
    assert await held(reader, HYBRID) == {unit: cache.held[unit] if unit == "GPU" else set() for unit in HYBRID}
