"""A gap that a late replay fills, over random histories: the index is the one of a stream that has lost nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, registration, stream_of
from waymark.apply.options import ApplyOptions
from waymark.apply.resuming import resumed, staged
from waymark.base.metrics import Metrics
from waymark.domain.engines import Copies, EngineKind
from waymark.domain.hashing import DEFAULT_SEED, extend, token_bytes
from waymark.domain.life_facts import UNTRUSTED
from waymark.domain.rows import ROW_SLOTS
from waymark.engines import decoder
from waymark.ingest.counters import BATCHES_LOST, FILLED
from waymark.ingest.frames import ReplayedBatch
from waymark.ingest.gap_fill import FillProgress, GapFill
from waymark.ingest.life import Life
from waymark.simulator.encode import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Encoder, WireEvent
from waymark.store.index import Index
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.parametrize("redis", ["real"], indirect=True)]

BLOCK_SIZE = 4
BLOCKS = 14
MEDIA = (GPU, GPU, CPU)
HISTORIES = 6
"""Of each case; half a second."""

Held = dict[str, set[int]]
"""Medium to blocks, by number."""


class Cache:
    """An engine's cache of a few blocks, in chains that branch, and the batches in which it changes."""

    def __init__(self, dice: random.Random, copies: Copies, *, may_orphan: bool) -> None:
        self.held: dict[str, Counter[int]] = {GPU: Counter(), CPU: Counter()}
        self.repeated: set[int] = set()
        """Blocks that had two copies on a medium."""
        self._dice = dice
        self._copies = copies
        self.may_orphan = may_orphan
        """Blocks stay behind one that leaves, and are stored behind one that has left. Only the worker that has read
        it knows the place of one that has left."""
        self._parents = [None if not n or dice.random() < 0.2 else dice.randrange(n) for n in range(BLOCKS)]
        self._known: set[int] = set()
        """Blocks that were stored since the cache was cleared last."""
        paths: list[tuple[int, ...]] = []
        for number, parent in enumerate(self._parents):
            paths.append(((*paths[parent], number)) if parent is not None else (number,))
        self.keys = [extend(None, token_bytes([n for n in path for _ in range(4)]), BLOCK_SIZE)[-1] for path in paths]

    def blocks(self) -> Held:
        return {medium: {block for block, count in held.items() if count} for medium, held in self.held.items()}

    def batch(self) -> list[WireEvent]:
        return list(self._events())

    def _events(self) -> Iterator[WireEvent]:
        for kind in self._dice.choices(("store", "remove", "clear"), (6, 4, 0.3), k=self._dice.randint(1, 4)):
            medium = self._dice.choice(MEDIA)
            held = [block for block, count in self.held[medium].items() if count]
            if kind == "clear":
                for counts in self.held.values():
                    counts.clear()
                self._known.clear()
                yield AllBlocksCleared()
            elif kind == "store" and (chain := self._chain(medium)):
                self.held[medium].update(chain)
                self.repeated |= {block for block in chain if self.held[medium][block] > 1}
                self._known.update(chain)
                parent = self._parents[chain[0]]
                tokens = tuple(block for block in chain for _ in range(BLOCK_SIZE))
                hashes = tuple(1000 + block for block in chain)
                yield BlockStored(hashes, None if parent is None else 1000 + parent, tokens, BLOCK_SIZE, medium)
            elif kind == "remove" and (held := self._removable(held)):
                gone = self._dice.sample(held, k=self._dice.randint(1, min(3, len(held))))
                for block in gone:
                    self.held[medium][block] -= 1 if self._copies == "count" else self.held[medium][block]
                yield BlockRemoved(tuple(1000 + block for block in gone), medium)

    def _removable(self, held: list[int]) -> list[int]:
        parents = {self._parents[block] for blocks in self.blocks().values() for block in blocks}
        return held if self.may_orphan else [block for block in held if block not in parents]

    def _chain(self, medium: str) -> list[int]:
        """Blocks that may be stored: the first continues a block that is there, or may have been there."""
        is_orphan = self.may_orphan and self._dice.random() < 0.3
        known = self._known if is_orphan else set().union(*self.blocks().values())
        may_repeat = self._dice.random() < 0.3
        ready = [n for n, parent in enumerate(self._parents) if parent is None or parent in known]
        ready = [n for n in ready if may_repeat or not self.held[medium][n]]
        chain = [self._dice.choice(ready)] if ready else []
        while chain and self._dice.random() < 0.6:
            children = [n for n, parent in enumerate(self._parents) if parent == chain[-1]]
            if not children:
                break
            chain.append(self._dice.choice(children))
        return chain


class Reader:
    """A stream of the cache's batches as a worker reads it, up to the sockets."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.options = ApplyOptions()
        self.life: Life

    async def resume(self) -> None:
        """Begin as the next worker, under a lease of its own."""
        self.stream = await self.stream.again()
        grant, store, metrics = self.stream.grant, self.stream.store, Metrics()
        applier, state = await resumed(grant, store, metrics, self.options)
        self.life = Life(
            applier,
            decoder(grant.claim.registration.kind, seed=DEFAULT_SEED),
            metrics,
            state,
            on_gap="keep",
            stage=lambda life: staged(grant, store, metrics, self.options, life.counters, frozenset()),
        )

    async def live(self, batch: ReplayedBatch) -> None:
        life, watermark = self.life, self.life.order.watermark
        if watermark is not None and batch.seq > watermark + 1:
            await life.flush()
            await life.open_gap(batch.seq, await life.lose(batch.seq))
        incoming = await life.decoder.decode(*batch)
        assert incoming is not None
        await life.take(incoming, ())

    async def fill(self, replies: list[ReplayedBatch], dice: random.Random, *, portions: int = 1000) -> bool:
        """Read a replay in portions, as many as given; whether the gap is filled."""
        await self.life.flush()
        applier = self.life.stage_to_fill(replies[0].seq)
        assert applier is not None
        fill, progress = GapFill(self.life, applier), FillProgress.GOES_ON
        assert await fill.begin(self._tick)
        while replies and portions and progress is FillProgress.GOES_ON:
            portion = replies[: dice.randint(1, 4)]
            count, progress = await fill.read(portion)
            replies, portions = replies[count:], portions - 1
        return progress is FillProgress.FILLED

    async def _tick(self) -> None:
        await self.life.applier.check_lease()

    async def held(self, cache: Cache) -> Held:
        """The blocks that the index has, as the next worker would read them."""
        await self.life.flush()
        applier, _ = await resumed(self.stream.grant, self.stream.store, Metrics(), ApplyOptions())
        held: Held = {GPU: set(), CPU: set()}
        for name, holder in applier.resolver.holders.items():
            blocks = [n for n, key in enumerate(cache.keys) if applier.resolver.memory.held_block(holder, key)]
            held[name.medium].update(blocks)
            assert applier.resolver.memory.blocks_of(holder) == len(blocks)
        return held


def batches_of(cache: Cache, count: int, first: int) -> list[ReplayedBatch]:
    encoder = Encoder("vllm-map")
    return [
        ReplayedBatch(seq, encoder.payload(cache.batch(), ts=float(seq)), b"") for seq in range(first, first + count)
    ]


def same(held: Held, cache: Cache, copies: Copies) -> bool:
    """Without counts that can be trusted, a removal may have taken a block of which a copy was left, and no other."""
    truth = cache.blocks()
    if copies == "set":
        return held == truth
    return all(held[medium] <= truth[medium] for medium in truth) and all(
        truth[medium] - held[medium] <= cache.repeated for medium in truth
    )


@pytest.mark.parametrize(
    ("shards", "copies", "ends"), [(1, "set", False), (1, "count", True), (3, "set", True), (3, "count", False)]
)
async def test_a_filled_gap_leaves_no_trace(redis: Redis, shards: int, copies: Copies, ends: bool) -> None:
    """With ``ends`` the worker stops in the middle, and the next one reads the whole replay again. In every other
    history the rows of the index are short, so that blocks are in branch rows.
    """
    client = RedisClient(redis, "redis://test")
    store, differed = Store(client, shards=shards), 0
    for number in range(HISTORIES):
        store.index = Index(client, store.scripts, row_slots=ROW_SLOTS if number % 2 else 3)
        dice = random.Random(f"{shards}/{copies}/{ends}/{number}")
        cache = Cache(dice, copies, may_orphan=not ends)
        reader = Reader(await stream_of(store, redis, registration(f"{number}", block_size=4, copies=copies)))
        await reader.resume()
        before, gap, after = (dice.randint(1, most) for most in (5, 3, 6))
        batches = batches_of(cache, before + gap + after, 0)
        for batch in [*batches[:before], *batches[before + gap :]]:
            await reader.live(batch)
        known = await reader.held(cache)
        differed += known != cache.blocks()
        replies = batches[max(1, before - dice.randrange(3)) :]
        if ends:
            assert not await reader.fill(replies[:-1], dice, portions=dice.randint(0, 3))
            await reader.resume()
            assert await reader.held(cache) == known
        assert await reader.fill(replies, dice)
        assert same(await reader.held(cache), cache, copies), number
        assert BATCHES_LOST not in reader.life.reasons
        assert FILLED in reader.life.applier.resolver.flags
        assert not reader.life.applier.resolver.unknown
        cache.may_orphan = False
        for batch in batches_of(cache, 3, len(batches)):
            await reader.live(batch)
        assert same(await reader.held(cache), cache, copies), number
    assert differed > HISTORIES / 4, "the histories lose something"


async def gapped(redis: Redis, **fields: Any) -> tuple[Reader, Cache, list[ReplayedBatch]]:
    """A stream whose batches 3 and 4, of eight, have not come."""
    store, dice = Store(RedisClient(redis, "redis://test")), random.Random(6)
    cache = Cache(dice, "set", may_orphan=False)
    reader = Reader(await stream_of(store, redis, registration(block_size=4, copies="set", **fields)))
    await reader.resume()
    batches = batches_of(cache, 8, 0)
    for batch in [*batches[:3], *batches[5:]]:
        await reader.live(batch)
    await reader.life.flush()
    return reader, cache, batches


async def progress_of(reader: Reader, replies: list[ReplayedBatch]) -> tuple[int, FillProgress, tuple[int, int] | None]:
    staged_applier = reader.life.stage_to_fill(replies[0].seq)
    assert staged_applier is not None
    fill = GapFill(reader.life, staged_applier)
    assert await fill.begin(reader._tick)
    count, progress = await fill.read(replies)
    await fill.drop()
    return count, progress, fill.hole


async def test_replies_that_cannot_fill_a_gap_change_nothing(redis: Redis) -> None:
    reader, cache, batches = await gapped(redis)
    before = await reader.held(cache)
    assert before != cache.blocks()
    another = batches[-1]._replace(payload=batches[0].payload)
    assert await progress_of(reader, [*batches[2:-1], another]) == (6, FillProgress.OTHER_LIFE, None)
    assert await progress_of(reader, [*batches[2:4], *batches[5:]]) == (2, FillProgress.BROKEN, (4, 5))
    large = batches[4]._replace(payload=b"\x93" + bytes(17 * 2**20))
    assert await progress_of(reader, [*batches[3:4], large, *batches[5:]]) == (1, FillProgress.BROKEN, None)
    assert await progress_of(reader, batches[2:6]) == (4, FillProgress.GOES_ON, None)
    assert await reader.held(cache) == before
    assert BATCHES_LOST in reader.life.reasons
    assert await reader.fill(batches[2:], random.Random(1))
    assert await reader.held(cache) == cache.blocks()


async def test_a_holder_that_ends_meanwhile_is_not_copied(redis: Redis) -> None:
    reader, cache, batches = await gapped(redis)
    before = await reader.held(cache)
    staged_applier = reader.life.stage_to_fill(2)
    assert staged_applier is not None

    async def end() -> None:
        await reader.life.applier.new_life(0)

    assert not await GapFill(reader.life, staged_applier).begin(end)
    assert await reader.held(cache) == {GPU: set(), CPU: set()} != before
    assert await reader.fill(batches[2:], random.Random(1))


async def test_a_gap_is_filled_though_a_repair_has_not_been_answered(redis: Redis) -> None:
    store, dice = Store(RedisClient(redis, "redis://test")), random.Random(6)
    cache = Cache(dice, "set", may_orphan=False)
    reader = Reader(await stream_of(store, redis, registration(block_size=4, copies="set")))
    await reader.resume()
    batches = batches_of(cache, 8, 0)
    for batch in batches[:3]:
        await reader.live(batch)
    await reader.life.flush()
    await reader.life.open_gap(3)
    for batch in batches[5:]:
        await reader.live(batch)
    assert await reader.fill(batches[2:], dice)
    assert await reader.held(cache) == cache.blocks()
    assert BATCHES_LOST not in reader.life.reasons
    assert reader.life.applier.resolver.flags == {FILLED, UNTRUSTED}


async def test_a_gap_behind_another_loss_leaves_the_stream_degraded(redis: Redis) -> None:
    reader, cache, _ = await gapped(redis)
    await reader.life.close()
    later = batches_of(cache, 4, 8)
    for batch in (later[0], *later[3:]):
        await reader.live(batch)
    await reader.life.flush()
    await reader.resume()
    assert await reader.fill(later, random.Random(1))
    assert BATCHES_LOST in reader.life.reasons
    await reader.resume()
    assert BATCHES_LOST in reader.life.reasons
    assert not reader.life.is_open


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"kind": EngineKind.STANDARD}, {}),
        ({"scope": "shared"}, {}),
        ({}, {"entry_ttl_seconds": 60}),
        ({}, {"max_entries": 100}),
    ],
    ids=["event_ids", "pool", "ages", "entries"],
)
async def test_a_stream_is_not_filled_if_more_than_its_blocks_counts(
    redis: Redis, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    reader, _, _ = await gapped(redis, **fields)
    if options:
        reader.options = ApplyOptions(**options)
        await reader.resume()
        reader.life.prove()
    assert reader.life.opening.gap_from == 3
    assert reader.life.stage_to_fill(3) is None
