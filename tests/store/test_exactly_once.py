"""Exactly once and in order, whatever is lost, sent again, or done by another worker in between.

A counter per holder and block is the whole model. What is checked is the store as its callers use it: batches are
folded at will, replies are lost, workers die between two calls to a shard, others go on from the watermark. A batch
that is resolved again has the same positions; what a removal named may by then be unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tests.store.factories import Dying, Stream, registration, stream_of
from waymark.domain.runs import Commit, Mode, Run
from waymark.errors import StoreUnavailable
from waymark.store import index
from waymark.store.client import RedisClient
from waymark.store.index import Index
from waymark.store.scripts import Scripts, Verdict
from waymark.store.store import Store

BLOCKS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
NS = 0x5500

#: kind, which of the publisher's holders, which of BLOCKS; kind "" is a hash that comes to nothing.
Op = tuple[str, int, int]
Batches = list[list[Op]]

MODES: tuple[Mode, ...] = ("count", "set", "all")


Reached = dict[tuple[int, int], tuple[int, int]]
"""(holder, shard) to the (seq, position) up to which it is done."""


def copies_after(batches: Batches, modes: Sequence[Mode], shards: int, reached: Reached) -> list[Counter[int]]:
    """The model: how many copies of each block each of a publisher's holders has."""
    copies: list[Counter[int]] = [Counter() for _ in modes]
    for seq, batch in enumerate(batches, 1):
        for position, (kind, i, block) in enumerate(batch, 1):
            own, mode = copies[i], modes[i]
            if (seq, position) > reached[i, key_of(i, block) % shards]:
                continue
            if kind == "+":
                own[block] = 1 if mode == "set" else own[block] + 1
            elif kind == "-" and mode == "count":
                own[block] = max(0, own[block] - 1)
            elif kind:
                own[block] = 0
    return copies


def engine_hash(block: int) -> int:
    return block * 1000


def key_of(holder: int, block: int) -> int:
    return block ^ forms_of(holder)[0]


def forms_of(holder: int) -> tuple[int, bool]:
    """Namespace and identity: each holder's entries have another form."""
    return (NS, False) if holder == 1 else (0, holder == 2)


@dataclass
class Publisher:
    stream: Stream
    ids: list[int]
    modes: Sequence[Mode]
    batches: Batches
    applied: int = 0
    """Batches that are in Redis for certain."""

    async def resolve(self, batches: Batches, first_seq: int) -> list[Run]:
        """As a worker does that knows nothing: what a removal names is looked up, or was stored in this fold."""
        wanted = {holder: [self.hash_of(i, block) for block in BLOCKS] for i, holder in enumerate(self.ids)}
        found = await self.stream.store.index.entries(self.stream.grant, wanted)
        known = {(i, h) for i, holder in enumerate(self.ids) for h in found[holder]}
        runs: list[Run] = []
        for seq, batch in enumerate(batches, first_seq):
            run: Run | None = None
            for position, (kind, i, block) in enumerate(batch, 1):
                own, (ns, is_identity) = self.hash_of(i, block), forms_of(i)
                if not kind or (kind != "+" and (i, own) not in known):
                    run = None
                    continue
                known.add((i, own))
                key = key_of(i, block)
                if run is None or (run.kind, run.holder) != (kind, self.ids[i]) or key in run.keys:
                    run = Run(kind, self.ids[i], seq, position, [], [], ns, is_identity)  # type: ignore[arg-type]
                    runs.append(run)
                run.keys.append(key)
                run.hashes.append(own)
        return runs

    def hash_of(self, i: int, block: int) -> int:
        return block if forms_of(i)[1] else engine_hash(block)

    async def apply(self, count: int) -> Verdict:
        """Apply the next ``count`` batches in one fold."""
        fold = self.batches[self.applied : self.applied + count]
        runs = await self.resolve(fold, self.applied + 1)
        watermark = self.applied + len(fold)
        modes = dict(zip(self.ids, self.modes, strict=True))
        commit = Commit(watermark, None, None, f"{watermark:016x}")
        return await self.stream.store.index.apply(self.stream.grant, runs, modes, commit)

    async def take_over(self) -> None:
        """Another worker goes on, from the watermark it finds."""
        self.stream = await self.stream.again()
        self.applied = await self.stream.watermark() or 0


async def check(redis: Redis, publishers: Sequence[Publisher]) -> None:
    """Block values, entries, copies and watermarks are the model's, and nothing else is there.

    What was begun before a worker died may be there already, on some shards and not on others: then the marks tell
    exactly how far each is.
    """
    shards = publishers[0].stream.grant.shards
    values: dict[int, list[int]] = {}
    for publisher in publishers:
        assert (await publisher.stream.watermark() or 0) == publisher.applied
        reached: Reached = {}
        entries: list[dict[bytes, bytes]] = [{} for _ in publisher.ids]
        for i, holder in enumerate(publisher.ids):
            for shard in range(shards):
                mark = (await publisher.stream.mark(holder, shard) or b"0 0").split()
                reached[i, shard] = max((int(mark[0]), int(mark[1])), (publisher.applied + 1, 0))
                entries[i] |= await publisher.stream.engine(holder, shard)
        copies = copies_after(publisher.batches, publisher.modes, shards, reached)
        for i, holder in enumerate(publisher.ids):
            ns, is_identity = forms_of(i)
            expected: dict[bytes, bytes] = {}
            for block, count in copies[i].items():
                if count:
                    values.setdefault(block ^ ns, []).append(holder)
                    entry = b"" if is_identity else b"%016x:%016x" % (ns, block) if ns else b"%016x" % block
                    expected[b"%016x" % publisher.hash_of(i, block)] = entry
                if count > 1:
                    expected[b"*%016x" % (block ^ ns)] = b"%d" % count
            assert entries[i] == expected
    stream = publishers[0].stream
    found = {key: await redis.get(key) for key in await redis.keys("wm:{*}:????????????????")}
    assert found == {stream.key(key): b" ".join(b"%d" % i for i in sorted(ids)) for key, ids in values.items()}


def operations() -> st.SearchStrategy[list[Op]]:
    """Runs as engines make them: some blocks in a row, stored or removed."""
    several = st.tuples(
        st.sampled_from(["+", "+", "+", "-", "-", "!", ""]),
        st.integers(0, len(MODES) - 1),
        st.integers(0, len(BLOCKS) - 1),
        st.integers(1, 6),
    )
    return st.lists(several, max_size=5).map(
        lambda rows: [(kind, i, block) for kind, i, at, n in rows for block in BLOCKS[at : at + n]]
    )


BATCHES = st.lists(operations(), min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),  # whose stream
        st.integers(1, 4),  # how many batches in the fold
        st.sampled_from(["answered", "answered", "lost", "died", "died after"]),
        st.integers(1, 4),  # at which call
    ),
    max_size=10,
)


async def play(redis: Redis, shards: int, batches: Sequence[Batches], modes: Sequence[Mode], steps: Any) -> None:
    await redis.flushall()
    client = RedisClient(redis, "redis://test")
    store = Store(client, shards=shards)
    publishers: list[Publisher] = []
    for i, each in enumerate(batches):
        stream = await stream_of(store, redis, registration(f"pod-{i}"))
        ids = await stream.begin("0 GPU", "0 CPU", "0 DISK")
        publishers.append(Publisher(stream, ids, modes, each))
    for whose, count, fate, call in steps:
        publisher = publishers[whose]
        left = len(publisher.batches) - publisher.applied
        if not left:
            continue
        match fate:
            case "answered":
                assert await publisher.apply(count) is Verdict.APPLIED
                publisher.applied += min(count, left)
                await check(redis, publishers)
            case "lost":
                # Everything was done; who does not know it sends a longer fold, from the same batch on.
                assert await publisher.apply(count) is Verdict.APPLIED
                if count >= left:
                    assert await publisher.apply(count) is Verdict.STALE
                else:
                    assert await publisher.apply(count + 1) is Verdict.APPLIED
                publisher.applied += min(count + 1, left)
                await check(redis, publishers)
            case _:
                dying = Dying(client, "apply_batch", call=call, is_done=fate == "died after")
                alive, publisher.stream.store.index = publisher.stream.store.index, Index(dying, Scripts(dying))
                try:
                    await publisher.apply(count)
                    publisher.applied += min(count, left)  # it had fewer calls to make than to die at
                except StoreUnavailable:
                    await publisher.take_over()
                publisher.stream.store.index = alive
                await check(redis, publishers)
    for publisher in publishers:
        if publisher.applied < len(publisher.batches):
            assert await publisher.apply(len(publisher.batches)) is Verdict.APPLIED
            publisher.applied = len(publisher.batches)
    await check(redis, publishers)
    for publisher in publishers:
        await publisher.take_over()
        assert publisher.applied == len(publisher.batches)


@pytest.fixture(autouse=True)
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a few blocks: a fold is many of them, and there is much to die between."""
    monkeypatch.setattr(index, "CALL_BLOCKS", 4)


@pytest.mark.parametrize("shards", [1, 3])
@settings(max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.tuples(BATCHES, BATCHES), modes=st.permutations(MODES), steps=STEPS)
async def test_blocks_are_as_if_every_batch_had_come_once(
    redis: Redis, shards: int, batches: Sequence[Batches], modes: Sequence[Mode], steps: Any
) -> None:
    await play(redis, shards, batches, modes, steps)
