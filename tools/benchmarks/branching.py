"""Prompts that part inside a row: what that costs in bytes, in Redis' time and in round trips.

    python -m tools.benchmarks.branching [--trace FILE]... [--prompts 600] [--json FILE]

A shared system prompt that does not end with a row and is followed by tails of its own for each prompt, and
conversations with a few blocks put in front, so that they part inside rows. One holder has all prompts; each is a call
of its own, as an engine stores it. Then every prompt is asked for twice: without the rows that a replica keeps for a
moment, and with them. Prints one table.
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
from waymark.domain.keys import KEY_BYTES, pack
from waymark.domain.moves import Moves
from waymark.domain.names import GroupName
from waymark.domain.parts import Commit
from waymark.domain.placing import Placer
from waymark.domain.rows import parse
from waymark.store.hot import HotRows
from waymark.store.store import Store

GROUP = GroupName("default", MODEL)
#: Not a multiple of a row's 32 blocks.
SYSTEM_BLOCKS = 1_003
TAILS = (1, 4, 16, 100)
#: Blocks in front of a conversation.
FRONT_BLOCKS = 11

Chain: TypeAlias = list[int]
"""The block keys of a prompt."""


@dataclass(frozen=True, slots=True)
class Found:
    """One line of the table. Shares are of 1."""

    case: str
    blocks: int
    """Different blocks, which one holder has."""
    bytes_a_block: float
    marked: float
    """Share of rows that are marked."""
    in_branches: float
    """Share of blocks that are in branch rows."""
    redis_us: float
    """Redis' CPU for each call that stores."""
    dearest_us: int
    """The longest call that Redis logged as slow, 0 for none above its bound."""
    marks_met: float
    """Share of queries that found a marked row without all of their blocks."""
    second_trips: float
    """Share of queries that cost a round trip more than their rows, with nothing kept."""
    second_trips_kept: float
    """The same with the rows that a replica keeps."""


def cases(count: int, traces: Sequence[Path]) -> Iterator[tuple[str, list[Chain]]]:
    chosen = random.Random(7)

    def blocks(number: int) -> Chain:
        return [chosen.getrandbits(64) for _ in range(number)]

    for tail in TAILS:
        system = blocks(SYSTEM_BLOCKS)
        yield f"system prompt of {SYSTEM_BLOCKS}, tails of {tail}", [system + blocks(tail) for _ in range(count)]
    shaped = [("synthetic conversations", prompts.synthetic())]
    shaped += [(path.stem, prompts.traced(path)) for path in traces]
    for name, found in shaped:
        front = blocks(FRONT_BLOCKS)
        yield name, [front + _of_pieces(prompt) for prompt in islice(found, count // 4)]


def _of_pieces(prompt: prompts.Prompt) -> Chain:
    """Block keys that follow from the numbers of pieces, each of which stands for its whole prefix."""
    return [
        random.Random(number * PIECE_BLOCKS + at).getrandbits(64) for number in prompt for at in range(PIECE_BLOCKS)
    ]


# ---- one case ----------------------------------------------------------------------------------------


async def _measure(case: str, chains: Sequence[Chain], redis: RedisServer) -> Found:
    redis.client.flushall()
    redis.client.config_set("slowlog-log-slower-than", "1000")
    redis.client.slowlog_reset()
    store = Store.open(redis.url)
    try:
        engine = await owner(store, "engine")
        before, cpu = redis.used(), redis.cpu()
        calls = 0
        for chain in chains:
            calls += await _store(engine, chain, calls)
        cpu = redis.cpu() - cpu
        used = redis.used() - before
        dearest = max((int(entry["duration"]) for entry in redis.client.slowlog_get(128)), default=0)
        total, in_branches, rows, marked = _placed(redis)
        met, plain = await _asked(redis, chains, HotRows(0, 0))
        _, kept = await _asked(redis, chains, HotRows(60.0, 64 << 20))
    finally:
        await store.close()
    return Found(
        case, total, used / total, marked / rows, in_branches / total, cpu / calls * 1e6, dearest, met, plain, kept
    )


async def _store(engine: Owner, chain: Chain, seq: int) -> int:
    """Store what the holder has not of a chain, in calls of up to 512 blocks; how many they were."""
    (holder,) = engine.holders
    engine.memory.begin(holder, 0)
    known = next((at for at in range(len(chain), 0, -1) if engine.memory.held_block(holder, chain[at - 1])), 0)
    starts = range(known, len(chain), 512)
    for number, start in enumerate(starts, seq):
        keys = chain[start : start + 512]
        placer = Placer(engine.memory, engine.grant.shards)
        parts = placer.begin_batch(number)
        above = engine.memory.held_block(holder, chain[start - 1]) if start else None
        placer.chain(parts, holder, 1, 0, above, keys, [~key & (2**64 - 1) for key in keys], mode="count")
        await engine.store.index.apply(
            engine.grant, parts.parts, Moves(engine.memory), Commit(number, 1.0, 1.0, "0" * 16)
        )
    return len(starts)


def _placed(redis: RedisServer) -> tuple[int, int, int, int]:
    """Blocks, blocks in branch rows, rows, marked rows."""
    total = in_branches = rows = marked = 0
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
                marked += row.is_marked
    return total, in_branches, rows, marked


async def _asked(redis: RedisServer, chains: Sequence[Chain], hot: HotRows) -> tuple[float, float]:
    """The shares of queries that met a mark, and that cost a round trip beyond their rows."""
    store = Store.open(redis.url, hot=hot)
    reader, met, more = store.reader, 0, 0
    try:
        for chain in chains:
            keys, sizes = pack(chain), list[int]()

            def source(count: int, keys: bytes = keys, sizes: list[int] = sizes) -> bytes:
                at = KEY_BYTES * sum(sizes)
                sizes.append(count)
                return keys[at : at + KEY_BYTES * count]

            asked = redis.calls("mget")
            reading = await reader.read(GROUP, BLOCK_SIZE, source, deadline_seconds=30.0)
            if reading is None or reading.walk.blocks != len(chain):
                raise SystemExit("a prompt that is stored is not found whole")
            # A request for keys that the source still had is one for rows.
            chunks = sum(KEY_BYTES * sum(sizes[:number]) < len(keys) for number in range(len(sizes)))
            more += redis.calls("mget") - asked > chunks
            met += _is_marked(redis, chain)
    finally:
        await store.close()
    return met / len(chains), more / len(chains)


def _value(redis: RedisServer, key: bytes) -> bytes:
    value = redis.client.get(key)
    assert isinstance(value, bytes)
    return value


def _is_marked(redis: RedisServer, chain: Chain) -> bool:
    """Whether a row on the way is marked and does not list all blocks of its piece."""
    for start in range(0, len(chain), PIECE_BLOCKS):
        row = parse(_value(redis, b"wm:{1}:%016x" % chain[start]))
        if row.is_marked and not set(chain[start : start + PIECE_BLOCKS]) <= set(row.keys):
            return True
    return False


# ---- the program -------------------------------------------------------------------------------------


def table(found: Sequence[Found]) -> str:
    head: tuple[str, ...] = (
        "case",
        "blocks",
        "B/block",
        "marked",
        "in branches",
        "us/call",
        "dearest",
        "marks met",
        "trips",
        "kept",
    )
    lines = [head]
    for each in found:
        shares = [f"{share:.1%}" for share in (each.marked, each.in_branches)]
        trips = [f"{share:.0%}" for share in (each.marks_met, each.second_trips, each.second_trips_kept)]
        dearest = str(each.dearest_us or "<1000")
        lines.append(
            (each.case, str(each.blocks), f"{each.bytes_a_block:.1f}", *shares, f"{each.redis_us:.0f}", dearest, *trips)
        )
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
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="wm-") as folder, redis_server(Path(folder)) as redis:
        for case, chains in cases(given.prompts, given.trace):
            found.append(asyncio.run(_measure(case, chains, redis)))
    print(table(found))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
