"""Measures how long one call of the scripts that store and sweep takes Redis, and whether sweeping keeps its pace.

    python -m tools.benchmarks.calls [--rounds 9] [--blocks 100000] [--calls 2000] [--holders 3200]

Redis answers no other client while a script runs, so a call may take at most 2 ms. Each case is repeated, with calls as
large as the ceilings allow; Redis' slow log says how long each call took. On a busy machine that includes the time in
which Redis had no core, so the shortest round of each call counts. Prints three tables: the calls; a sweep of
``--blocks`` blocks at the default pace; and the cost of a fleet of decoding engines that store with one call per step.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tools.benchmarks.index import Owner, keys, owner
from tools.benchmarks.processes import RedisServer, redis_server
from tools.benchmarks.report import aligned
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.domain.moves import Moves
from waymark.domain.parts import Commit
from waymark.domain.placing import Placer
from waymark.ingest.sweeping import keep_sweeping
from waymark.store import keys as names
from waymark.store.calls import CALL_BLOCKS
from waymark.store.redis.client import SCRIPTS
from waymark.store.store import Store

BAR_US = 2_000
#: A fleet that decodes: with 16 sequences in steps of 20 ms an engine fills one block of 16 tokens in each step.
ENGINES, STEPS_PER_SECOND, SEQUENCES = 100, 50, 16
PIECE = 32


@dataclass(frozen=True)
class Timed:
    """One line of the first table. Times are in microseconds, measured by Redis."""

    case: str
    calls: float
    """The number of calls in a round."""
    longest: int
    """The longest of these calls, if each call counts with its shortest time in any round."""
    middle: int
    """The median, over the rounds, of the longest call."""


class Engine:
    """A publisher that stores or removes whole chains in one batch. Its batches have ascending numbers."""

    def __init__(self, owned: Owner) -> None:
        self._owned = owned
        self._seq = 0

    @property
    def holders(self) -> Sequence[int]:
        return self._owned.holders

    async def store(self, chains: Sequence[Sequence[int]], *, above: int | None = None, rank: int = 0) -> None:
        """Store chains that begin at the root, or after the block ``above``."""
        await self._apply([(above, chain) for chain in chains], rank, is_store=True)

    async def extend(self, tails: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Store chains, each after a block of this engine."""
        await self._apply(tails, 0, is_store=True)

    async def remove(self, chains: Sequence[Sequence[int]], rank: int = 0) -> None:
        await self._apply([(None, chain) for chain in chains], rank, is_store=False)

    async def _apply(self, chains: Sequence[tuple[int | None, Sequence[int]]], rank: int, *, is_store: bool) -> None:
        owned, holder = self._owned, self._owned.holders[rank]
        self._seq += 1
        owned.memory.begin(holder, rank)
        placer = Placer(owned.memory, owned.grant.shards)
        parts, position = placer.begin_batch(self._seq), 1
        for above, chain in chains:
            if is_store:
                parent = None if above is None else owned.memory.held_block(holder, above)
                hashes = [~key & (2**64 - 1) for key in chain]
                placer.chain(parts, holder, position, 0, parent, chain, hashes, mode="count")
                position += len(chain)
                continue
            for key in chain:
                placer.remove(parts, holder, position, ~key & (2**64 - 1), mode="count")
                position += 1
        commit = Commit(self._seq, 1.0, 1.0, "0" * 16)
        await owned.store.index.apply(owned.grant, parts.parts, Moves(owned.memory), commit)


# ---- calls -------------------------------------------------------------------------------------------


def durations(redis: RedisServer, script: str) -> list[int]:
    """Return the microseconds of each call of a script since the previous reading, and clear Redis' slow log."""
    sha = SCRIPTS[script].sha.encode()
    found = [
        int(entry["duration"]) for entry in redis.client.slowlog_get(100_000) if sha in bytes(entry["command"])[:60]
    ]
    redis.client.slowlog_reset()
    return found


async def calls(redis: RedisServer, rounds: int, holders: int) -> list[Timed]:
    redis.client.config_set("slowlog-max-len", "100000")
    redis.client.config_set("slowlog-log-slower-than", "0")
    timed: dict[str, list[list[int]]] = {}

    def note(case: str, script: str = "apply_rows") -> None:
        timed.setdefault(case, []).append(durations(redis, script))

    store = Store.open(redis.url)
    try:
        fleet = Engine(await owner(store, "fleet", ranks=holders))
        common = keys("common", 2 * PIECE)
        for rank in range(holders):
            await fleet.store([common], rank=rank)
        for number in range(rounds):
            engine = Engine(await owner(store, f"engine-{number}", ranks=2))
            long, short = keys(f"long {number}", CALL_BLOCKS), [keys(f"short {number}/{i}", 1) for i in range(128)]
            durations(redis, "apply_rows")
            await engine.store([long])
            note(f"one prompt of {CALL_BLOCKS:,} new blocks")
            await engine.store([long], rank=1)
            note("the same, which another holder has")
            await engine.remove([long])
            note(f"{CALL_BLOCKS:,} blocks removed that another holder has")
            await engine.store(short)
            note("128 prompts of one new block")
            await engine.store([keys(f"tail {number}/{i}", 1) for i in range(128)], above=short[0][0])
            note("128 tails of one block after the same block")
            await engine.remove(short)
            note("128 prompts of one block removed")
            await engine.store([common])
            note(f"64 blocks that {holders:,} holders have, one holder more")
            await engine.remove([common])
            note(f"64 blocks that {holders:,} holders have, one holder fewer")
            await engine.store([common, *(keys(f"own {number}/{i}", PIECE) for i in range(30))])
            await _swept(store, f"engine-{number}")
            note("a step of a sweep", "sweep_rows")
    finally:
        await store.close()
    return [
        Timed(
            case,
            sum(map(len, found)) / len(found),
            max(map(min, zip(*found, strict=False))),
            int(median(map(max, found))),
        )
        for case, found in timed.items()
    ]


async def _swept(store: Store, instance: str) -> None:
    """Unregister a publisher, and sweep its blocks at once."""
    claim = next(each for each in await store.directory.claims() if each.registration.instance_id == instance)
    await store.registry.unregister([claim.registration.name])
    (entry,) = (await store.directory.groups()).values()
    while (holder := await store.sweeper.pick(entry)) is not None:
        async for _ in store.sweeper.steps(entry, holder):
            pass


# ---- the pace ----------------------------------------------------------------------------------------


async def pace(redis: RedisServer, blocks: int, per_second: int) -> list[tuple[str, str]]:
    """Store this number of blocks, in prompts of 64; unregister their publisher; and sweep them at this pace."""
    redis.client.flushall()
    redis.client.config_set("slowlog-log-slower-than", "-1")
    store = Store.open(redis.url)
    try:
        owned = await owner(store, "engine")
        before = redis.cpu()
        for at in range(0, blocks, 64):
            await owned.apply(keys(at, 64), first_seq=at)
        stored = redis.cpu() - before
        (claim,) = await store.directory.claims()
        await store.registry.unregister([claim.registration.name])
        before, began = redis.cpu(), time.perf_counter()
        sweeping = asyncio.create_task(
            keep_sweeping(store, Metrics(), blocks_per_second=per_second, pause_seconds=0.05)
        )
        while True:
            if not redis.client.exists(names.dead(owned.grant.group_id)):
                break
            await asyncio.sleep(0.01)
        seconds, swept = time.perf_counter() - began, redis.cpu() - before
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping
    finally:
        await store.close()
    return [
        ("swept", f"{blocks:,} blocks in {seconds:.1f} s"),
        ("blocks a second", f"{blocks / seconds:,.0f}, of {per_second:,} that the setting allows"),
        ("Redis' CPU to store", f"{stored / blocks * 1e6:.2f} us a block"),
        ("Redis' CPU to sweep", f"{swept / blocks * 1e6:.2f} us a block"),
        ("sweeping over storing", f"{swept / stored:.2f} (bar 0.5: {'yes' if swept <= stored / 2 else 'no'})"),
    ]


# ---- decode ------------------------------------------------------------------------------------------


async def decode(redis: RedisServer, blocks: int, calls: int) -> str:
    """Return the line of the table for an engine with 16 sequences that stores this number of blocks with each call."""
    redis.client.flushall()
    store = Store.open(redis.url)
    try:
        engine = Engine(await owner(store, "engine"))
        sequences = [keys(f"sequence {number}", 20) for number in range(SEQUENCES)]
        await engine.store(sequences)
        ends = [sequence[-1] for sequence in sequences]
        before, began = redis.cpu(), time.process_time()
        for call in range(calls):
            new = keys(f"new {call}", blocks)
            await engine.store([new], above=ends[call % SEQUENCES])
            ends[call % SEQUENCES] = new[-1]
        ours, cpu = time.process_time() - began, redis.cpu() - before
    finally:
        await store.close()
    rate = ENGINES * STEPS_PER_SECOND
    return (
        f"{blocks} new blocks a call: Redis {cpu / calls * 1e6:.0f} us, who sends it {ours / calls * 1e6:.0f} us; "
        f"{ENGINES} engines, {STEPS_PER_SECOND} a second each: {cpu / calls * rate:.2f} cores of Redis"
    )


# ---- the program -------------------------------------------------------------------------------------


def table(timed: Sequence[Timed]) -> str:
    lines: list[tuple[str, ...]] = [("longest call, us", "calls", "longest", "as met", "within 2 ms")]
    for each in timed:
        holds = "yes" if each.longest <= BAR_US else f"no, {each.longest / BAR_US:.1f} times"
        lines.append((each.case, f"{each.calls:.0f}", f"{each.longest:,}", f"{each.middle:,}", holds))
    return aligned(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=100_000, help="to sweep")
    parser.add_argument("--calls", type=int, default=2000, help="of one engine that decodes")
    parser.add_argument("--holders", type=int, default=3200, help="of the row that everybody has")
    given = parser.parse_args(arguments)
    per_second = Settings.sweep_blocks_per_second
    with tempfile.TemporaryDirectory(prefix="wm-") as folder, redis_server(Path(folder)) as redis:
        print(table(asyncio.run(calls(redis, given.rounds, given.holders))))
        print()
        for name, figure in asyncio.run(pace(redis, given.blocks, per_second)):
            print(f"{name:<24}{figure}")
        print()
        for tail in (1, 2, 4):
            print(asyncio.run(decode(redis, tail, given.calls)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
