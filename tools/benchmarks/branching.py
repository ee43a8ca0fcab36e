"""Measures prompts that branch inside a row: their cost in bytes, in Redis' time and in round trips.

    python -m tools.benchmarks.branching [--trace FILE]... [--prompts 600] [--json FILE]

The prompts have a shared system prompt that ends inside a row, and different tails; or they are conversations with a
few blocks put in front, so that they branch inside rows. One engine has all prompts, or many engines share them; each
prompt is stored in a call of its own, as engines do. Then at most 1,000 prompts are queried twice: without the rows
that a replica keeps for a moment, and with them. Prints one table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from tools.benchmarks import prompts
from tools.benchmarks.index import Owner, owner
from tools.benchmarks.processes import RedisServer, redis_server
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, PIECE_BLOCKS
from tools.benchmarks.report import aligned
from waymark.domain.moves import Moves
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES, pack
from waymark.domain.parts import Commit
from waymark.domain.placing import Placer
from waymark.domain.rows import parse
from waymark.store.hot import HotRows
from waymark.store.store import Store

GROUP = GroupName("default", MODEL)
#: Not a multiple of a row's 32 blocks.
SYSTEM_BLOCKS = 1_003
TAILS = (1, 4, 16, 100)
#: The number of engines among which the prompts with the shortest tails are divided.
CROWD = 40
CROWD_TAILS = (1, 4)
#: Blocks in front of a conversation.
FRONT_BLOCKS = 11
ASKED_MAX = 1_000
#: A call may have to wait on a busy machine.
TIMEOUT_SECONDS = 60.0

Chain: TypeAlias = list[int]
"""The block keys of a prompt."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. Shares are from 0 to 1."""

    case: str
    blocks: int
    """The number of blocks; a block counts once for each engine that has it."""
    bytes_a_block: float
    bytes_a_tail_block: float
    """The bytes per block of the blocks after the shared prompt; 0 for conversations."""
    marked: float
    """Share of rows that are marked."""
    in_branches: float
    """Share of blocks that are in branch rows."""
    redis_us: float
    """Redis' CPU for each call that stores."""
    longest_us: int
    """The longest call that Redis logged as slow; 0 if none was."""
    marks_met: float
    """Share of queries that found a marked row without all the blocks asked for."""
    second_trips: float
    """The share of queries that needed another round trip after the one for their rows, without kept rows."""
    second_trips_kept: float
    """The same, with the rows that a replica keeps."""


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts, and the number of engines that store them in turn."""

    name: str
    chains: list[Chain]
    engines: int = 1
    shared: int = 0
    """The number of blocks with which all prompts begin; every engine has them before the measurement begins."""


def cases(count: int, traces: Sequence[Path]) -> Iterator[Case]:
    chosen = random.Random(7)

    def blocks(number: int) -> Chain:
        return [chosen.getrandbits(64) for _ in range(number)]

    for engines, tails in ((1, TAILS), (CROWD, CROWD_TAILS)):
        for tail in tails:
            system = blocks(SYSTEM_BLOCKS)
            chains = [system + blocks(tail) for _ in range(count)]
            name = f"system prompt of {SYSTEM_BLOCKS}, tails of {tail}"
            yield Case(name if engines == 1 else f"{name}, {engines} engines", chains, engines, SYSTEM_BLOCKS)
    shaped = [("synthetic conversations", prompts.synthetic())]
    shaped += [(path.stem, prompts.traced(path)) for path in traces]
    for name, found in shaped:
        front = blocks(FRONT_BLOCKS)
        yield Case(name, [front + _of_pieces(prompt) for prompt in islice(found, count // 4)])


def _of_pieces(prompt: prompts.Prompt) -> Chain:
    """Return block keys computed from the numbers of pieces, each of which stands for its whole prefix."""
    return [
        random.Random(number * PIECE_BLOCKS + at).getrandbits(64) for number in prompt for at in range(PIECE_BLOCKS)
    ]


# ---- one case ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Engine:
    owner: Owner
    calls: int = 0


async def _measure(case: Case, redis: RedisServer) -> Result:
    redis.client.flushall()
    redis.client.config_set("slowlog-log-slower-than", "1000")
    redis.client.slowlog_reset()
    store = Store.open(redis.url, timeout_seconds=TIMEOUT_SECONDS)
    try:
        engines = [Engine(await owner(store, f"engine-{number}")) for number in range(case.engines)]
        begun = _used(redis)
        for engine in engines:
            await _store(engine, case.chains[0][: case.shared])
        before, cpu, calls = _used(redis), redis.cpu(), sum(engine.calls for engine in engines)
        for number, chain in enumerate(case.chains):
            await _store(engines[number % len(engines)], chain)
        cpu = redis.cpu() - cpu
        longest = max((int(entry["duration"]) for entry in redis.client.slowlog_get(128)), default=0)
        used = _used(redis)
        calls = sum(engine.calls for engine in engines) - calls
        total, in_branches, rows, marked = _placed(redis)
        some = case.chains[:: -(-len(case.chains) // ASKED_MAX)]
        met, plain = await _asked(redis, some, marked, HotRows(0, 0))
        _, kept = await _asked(redis, some, marked, HotRows(60.0, 64 << 20))
    finally:
        await store.close()
    tails = sum(len(chain) - case.shared for chain in case.chains)
    return Result(
        case.name,
        total,
        (used - begun) / total,
        (used - before) / tails if case.shared else 0.0,
        len(marked) / rows,
        in_branches / total,
        cpu / calls * 1e6,
        longest,
        met,
        plain,
        kept,
    )


async def _store(engine: Engine, chain: Chain) -> None:
    """Store the blocks of a chain that the engine does not have, in calls of up to 512 blocks."""
    owned, memory = engine.owner, engine.owner.memory
    (holder,) = owned.holders
    memory.begin(holder, 0)
    known = next((at for at in range(len(chain), 0, -1) if memory.held_block(holder, chain[at - 1])), 0)
    for start in range(known, len(chain), 512):
        keys = chain[start : start + 512]
        placer = Placer(memory, owned.grant.shards)
        parts = placer.begin_batch(engine.calls)
        above = memory.held_block(holder, chain[start - 1]) if start else None
        placer.chain(parts, holder, 1, 0, above, keys, [~key & (2**64 - 1) for key in keys], mode="count")
        commit = Commit(engine.calls, 1.0, 1.0, "0" * 16)
        await owned.store.index.apply(owned.grant, parts.parts, Moves(memory), commit)
        engine.calls += 1


def _used(redis: RedisServer) -> int:
    """Return the bytes of all keys, and of the hash table in which Redis finds them. The memory that Redis reports also
    includes Lua, its log of slow calls, and connections, which take as much as hundreds of tails.
    """
    asked = redis.client.pipeline(transaction=False)
    for key in redis.client.scan_iter(count=1000):
        asked.memory_usage(key, samples=0)
    found = asked.execute()
    return sum(found) + 8 * (1 << (len(found) - 1).bit_length())


MarkedRows: TypeAlias = dict[int, frozenset[int]]
"""The blocks that a marked row lists, by its head."""


def _placed(redis: RedisServer) -> tuple[int, int, int, MarkedRows]:
    """Return the numbers of blocks, blocks in branch rows, rows, and marked rows."""
    total = in_branches = rows = 0
    marked: MarkedRows = {}
    for key in redis.client.scan_iter("wm:{1}:*", count=1000):
        name = bytes(key).rsplit(b"}:", 1)[1]
        if len(name) == 2 * KEY_BYTES or name.endswith(b":b"):
            row = parse(_value(redis, key))
            held = sum(bitmap.bit_count() for bitmap in row.holders.values())
            total += held
            if name.endswith(b":b"):
                in_branches += held
            else:
                rows += 1
                if row.is_marked:
                    marked[int(name, 16)] = frozenset(row.keys)
    return total, in_branches, rows, marked


async def _asked(redis: RedisServer, chains: Sequence[Chain], marked: MarkedRows, hot: HotRows) -> tuple[float, float]:
    """Return the share of queries that met a mark, and the share of queries that needed a further round trip."""
    store = Store.open(redis.url, hot=hot, timeout_seconds=TIMEOUT_SECONDS)
    reader, met, more = store.reader, 0, 0
    try:
        for chain in chains:
            keys, sizes = pack(chain), list[int]()

            def source(count: int, keys: bytes = keys, sizes: list[int] = sizes) -> bytes:
                at = KEY_BYTES * sum(sizes)
                sizes.append(count)
                return keys[at : at + KEY_BYTES * count]

            asked = redis.calls("mget")
            reading = await reader.read(GROUP, BLOCK_SIZE, source, deadline_seconds=TIMEOUT_SECONDS)
            if reading is None or reading.walk.blocks != len(chain):
                raise SystemExit("a prompt that is stored is not found whole")
            # Requests only ask for rows until the source has given all keys.
            chunks = sum(KEY_BYTES * sum(sizes[:number]) < len(keys) for number in range(len(sizes)))
            more += redis.calls("mget") - asked > chunks
            met += _meets_mark(chain, marked)
    finally:
        await store.close()
    return met / len(chains), more / len(chains)


def _value(redis: RedisServer, key: bytes) -> bytes:
    value = redis.client.get(key)
    assert isinstance(value, bytes)
    return value


def _meets_mark(chain: Chain, marked: MarkedRows) -> bool:
    """Return whether a row of the query is marked and does not list all blocks of its piece."""
    starts = range(0, len(chain), PIECE_BLOCKS)
    listed = [(start, marked[chain[start]]) for start in starts if chain[start] in marked]
    return any(not keys.issuperset(chain[start : start + PIECE_BLOCKS]) for start, keys in listed)


# ---- the program -------------------------------------------------------------------------------------


def table(found: Sequence[Result]) -> str:
    head: tuple[str, ...] = (
        "case",
        "blocks",
        "B/block",
        "of tails",
        "marked",
        "in branches",
        "us/call",
        "longest",
        "marks met",
        "trips",
        "kept",
    )
    lines = [head]
    for each in found:
        shares = [f"{share:.1%}" for share in (each.marked, each.in_branches)]
        trips = [f"{share:.0%}" for share in (each.marks_met, each.second_trips, each.second_trips_kept)]
        sizes = f"{each.bytes_a_block:.1f}", f"{each.bytes_a_tail_block:.1f}" if each.bytes_a_tail_block else ""
        longest = str(each.longest_us or "<1000")
        lines.append((each.case, str(each.blocks), *sizes, *shares, f"{each.redis_us:.0f}", longest, *trips))
    return aligned(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file of requests with hash_ids")
    parser.add_argument("--prompts", type=int, default=600, help="of each system prompt; a quarter of it of each trace")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    given = parser.parse_args(arguments)
    for path in given.trace:
        if not path.is_file():
            print(f"--trace: there is no file {path}", file=sys.stderr)
            return 2
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="wm-") as folder, redis_server(Path(folder)) as redis:
        for case in cases(given.prompts, given.trace):
            found.append(asyncio.run(_measure(case, redis)))
            print(found[-1].case, file=sys.stderr, flush=True)
    print(table(found))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
