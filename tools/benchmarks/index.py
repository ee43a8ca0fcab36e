"""P5 and P6: the cost of a block in Redis, in CPU and in bytes.

The blocks are applied by the store itself, one call per store and without a worker, so that Redis does nothing else.
Its CPU is compared with that of plain commands that store as much; both run alternately. A worker puts the stores of a
backlog into fewer calls: ``streams`` measures those, and has the bar for them.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, redis_server
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL
from tools.benchmarks.report import Row, against
from waymark.domain.engines import EngineKind
from waymark.domain.held import HeldBlocks
from waymark.domain.moves import Moves
from waymark.domain.names import Holder, HolderName, Registration
from waymark.domain.parts import Commit
from waymark.domain.placing import Placer
from waymark.store.leases import Grant
from waymark.store.records import NewHolder
from waymark.store.store import Store

STORE_BLOCKS = 64
VLLM_BYTES = "one holder, with a vLLM publisher's entry"
STANDARD_BYTES = "one holder, with a standard publisher's entry"
REDIS_STORED = "Redis' CPU per block, stores of 64 new blocks"
PLAIN = "MSET and HSET"
REDIS_REMOVED = "Redis' CPU per block, removals of 64 that nobody else has"
LATER_HOLDERS = 4
FIRST_ID = 28_000_000_000_000
"""An id that an empty Redis could assign in 2026, because the cost of a holder depends on the length of its id."""

Measured: TypeAlias = Callable[[Options, RedisServer, Store], Awaitable[list[Row]]]


def measure(options: Options) -> list[Row]:
    """Return the rows of P5 for Redis, and those of P6."""
    return [*in_redis(options, _bytes), *in_redis(options, _cpu)]


def in_redis(options: Options, measured: Measured) -> list[Row]:
    """Run ``measured`` with a new Redis and a store on it, and return its rows."""

    async def with_store(redis: RedisServer) -> list[Row]:
        store = Store.open(redis.url)
        try:
            return await measured(options, redis, store)
        finally:
            await store.close()

    with tempfile.TemporaryDirectory(prefix="wm-") as folder, redis_server(Path(folder)) as redis:
        return asyncio.run(with_store(redis))


# ---- blocks without a worker -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """A publisher, its stream, and its GPU holders by rank."""

    store: Store
    grant: Grant
    holders: list[int]
    memory: HeldBlocks = field(default_factory=HeldBlocks)

    async def apply(
        self,
        blocks: Sequence[int],
        kind: str = "+",
        *,
        first_seq: int = 0,
        rank: int = 0,
        is_identity: bool = False,
        store_blocks: int = STORE_BLOCKS,
    ) -> None:
        """Apply blocks as stores (or removals) of ``store_blocks`` blocks, each in a call of its own."""
        holder = self.holders[rank]
        for seq, start in enumerate(range(0, len(blocks), store_blocks), first_seq):
            part = list(blocks[start : start + store_blocks])
            hashes = part if is_identity else [~key & (2**64 - 1) for key in part]
            self.memory.begin(holder, rank)
            placer = Placer(self.memory, self.grant.shards)
            parts = placer.begin_batch(seq)
            if kind == "+":
                above = self.memory.held_block(holder, blocks[start - 1]) if start else None
                placer.chain(parts, holder, 1, 0, above, part, hashes, mode="count", is_identity=is_identity)
            else:
                for position, engine_hash in enumerate(hashes, 1):
                    placer.remove(parts, holder, position, engine_hash, mode="count")
            commit = Commit(seq, 1.0, 1.0, "0" * 16)
            await self.store.index.apply(self.grant, parts.parts, Moves(self.memory), commit)


async def owner(store: Store, instance_id: str, kind: EngineKind = EngineKind.VLLM, ranks: int = 1) -> Owner:
    registration = Registration(
        kind, instance_id, "default", 0, MODEL, BLOCK_SIZE, "tcp://127.0.0.1:1", None, None, None,
        "instance", "count", "publisher",
    )  # fmt: skip
    await store.registry.register(registration)
    claim = next(claim for claim in await store.directory.claims() if claim.registration == registration)
    grant = await store.leases.take(claim, "bench", 600)
    assert grant is not None
    begin = [
        NewHolder(
            HolderName(rank, "GPU"),
            Holder(0, grant.publisher, instance_id, rank, "GPU", BLOCK_SIZE, instance_id, "instance"),
        )
        for rank in range(ranks)
    ]
    ids = await store.records.new_life(grant, unit="", is_restart=False, begin=begin, above=max(grant.above, FIRST_ID))
    assert ids is not None
    return Owner(store, grant, list(ids))


def keys(seed: object, count: int) -> list[int]:
    chosen = random.Random(str(seed))
    return [chosen.getrandbits(64) for _ in range(count)]


# ---- bytes -----------------------------------------------------------------------------------------


async def _bytes(options: Options, redis: RedisServer, store: Store) -> list[Row]:
    count = 30_000 if options.is_quick else 1_000_000
    some = keys("bytes", count)

    async def added(instance_id: str, kind: EngineKind = EngineKind.VLLM) -> tuple[float, float]:
        """Return the bytes per block of one more holder: those of the block itself, and those of its entry."""
        one = await owner(store, instance_id, kind)
        is_identity = kind is EngineKind.STANDARD
        # After this store Redis has allocated the memory that it needs only once.
        await one.apply(keys("before", STORE_BLOCKS), is_identity=is_identity)
        before = redis.used()
        await one.apply(some, first_seq=1, is_identity=is_identity)
        with_entries = redis.used()
        redis.client.delete(f"wm:{{{one.grant.group_id}}}:engine:{one.holders[0]}")
        return (redis.used() - before) / count, (with_entries - redis.used()) / count

    block, entry = await added("first")
    second = sum(await added("second"))
    later = [sum(await added(f"later-{number}")) for number in range(LATER_HOLDERS)]
    standard_later, standard_entry = await added("standard", EngineKind.STANDARD)
    return [
        Row("P6", VLLM_BYTES, block + entry, "bytes", bar=40),
        Row("P6", STANDARD_BYTES, block + standard_entry, "bytes", bar=28),
        Row("P6", "second holder, with a vLLM publisher's entry", second, "bytes", bar=14),
        Row("P6", "each later holder, with a vLLM publisher's entry", sum(later) / len(later), "bytes", bar=14),
        Row("P6", "a further holder, with a standard publisher's entry", standard_later + standard_entry, "bytes"),
        Row("P6", f"one holder, without its entry, of {count:,} blocks", block, "bytes"),
        Row("P6", "entry of a vLLM publisher", entry, "bytes"),
        Row("P6", "entry of a standard publisher", standard_entry, "bytes"),
    ]


# ---- CPU of Redis ----------------------------------------------------------------------------------


async def _cpu(options: Options, redis: RedisServer, store: Store) -> list[Row]:
    rounds, size = (3, 6_400) if options.is_quick else (9, 25_600)
    one, two, large = [await owner(store, name) for name in ("one", "two", "large")]
    new: list[float] = []
    plain: list[float] = []
    shared: list[float] = []
    fewer: list[float] = []
    last: list[float] = []
    in_512: list[float] = []
    for number in range(rounds):
        part = keys(number, size)
        seq, further = number * size, (rounds + number) * size
        new.append(await _spent(redis, size, one.apply(part, first_seq=seq)))
        plain.append(plain_commands(redis, [key ^ 1 for key in part]))
        shared.append(await _spent(redis, size, two.apply(part, first_seq=2 * seq)))
        fewer.append(await _spent(redis, size, two.apply(part, "-", first_seq=2 * seq + size)))
        # Only some of them, so that the index grows from round to round.
        some = part[: size // 4]
        last.append(await _spent(redis, len(some), one.apply(some, "-", first_seq=seq + size // 2)))
        bigger = [key ^ 2 for key in part]
        in_512.append(await _spent(redis, size, large.apply(bigger, first_seq=further, store_blocks=512)))
    return [
        against("P5", REDIS_STORED, "us", new, plain, PLAIN),
        against("P5", "Redis' CPU per block, stores of 512 new blocks", "us", in_512, plain, PLAIN),
        against("P5", "Redis' CPU per block, stores of 64 that another holder has", "us", shared, plain, PLAIN),
        against("P5", "Redis' CPU per block, removals of 64 that another holder has", "us", fewer, plain, PLAIN),
        against("P5", REDIS_REMOVED, "us", last, plain, PLAIN),
    ]


async def _spent(redis: RedisServer, blocks: int, applied: Awaitable[None]) -> float:
    """Await ``applied``, and return Redis' CPU per block, in microseconds."""
    before = redis.cpu()
    await applied
    return (redis.cpu() - before) / blocks * 1e6


def plain_commands(redis: RedisServer, blocks: Sequence[int]) -> float:
    """Return Redis' CPU for MSET and HSET of as many keys and entries, in microseconds per block."""
    before = redis.cpu()
    for start in range(0, len(blocks), STORE_BLOCKS):
        values: list[bytes | str] = []
        entries: list[bytes | str] = []
        for key in blocks[start : start + STORE_BLOCKS]:
            values += (b"wm:{1}:%016x" % key, "1")
            entries += (b"%016x" % (~key & (2**64 - 1)), b"%016x" % key)
        pipeline = redis.client.pipeline(transaction=False)
        pipeline.execute_command("MSET", *values)  # type: ignore[no-untyped-call]
        pipeline.execute_command("HSET", "plain", *entries)  # type: ignore[no-untyped-call]
        pipeline.execute()
    return (redis.cpu() - before) / len(blocks) * 1e6
