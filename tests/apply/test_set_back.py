"""Redis may lose writes that it has acknowledged, between any two calls and unseen: nothing is missing in the end.

A failover leaves a shard as it was some calls ago. The connection is made again, and no call has failed.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, blocks_of, found_hashes, hgetall, stream_of
from tests.store.flow import searched, swept
from waymark.apply.applier import Applier, Incoming
from waymark.apply.options import ApplyOptions
from waymark.apply.redis_calls import Fenced
from waymark.apply.resuming import resumed
from waymark.base.metrics import Metrics
from waymark.domain.events import Batch, Cleared, Envelope, Event, Removed, Stored, StoredIdentity
from waymark.domain.parts import Commit
from waymark.domain.status import StreamStatus
from waymark.ingest.running import LeaseKeeper
from waymark.store import keys
from waymark.store.hashes import KEPT
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.store import Store

BLOCK_SIZE = 16
SHARDS = 2
#: Scripts whose effect must not be lost.
_WRITING = (
    "new_life",
    "apply_rows",
    "commit_batch",
    "write_record",
    "mark_publisher",
    "keep_singles",
    "keep_hashes",
    "apply_prefixes",
)


def stored(chain: int, blocks: int, *, after: int | None = None, medium: str = "GPU") -> Stored:
    """A chain of its own, or what goes on after a block."""
    tokens = b"".join(struct.pack("<16I", *[1000 * chain + block] * BLOCK_SIZE) for block in range(blocks))
    hashes = tuple(1000 * chain + block for block in range(blocks))
    return Stored(hashes, after, tokens, BLOCK_SIZE, medium)


FOLDS: Sequence[Sequence[Event]] = (
    (stored(1, 70), stored(3, 9, medium="CPU")),
    (Cleared(), stored(1, 70), stored(2, 40, after=1031), Removed((1060, 1061, 1062), "GPU")),
    (
        stored(3, 40, medium="CPU"),
        stored(4, 36, after=1031),
        StoredIdentity((77, 78), None, "GPU", Envelope(1, "pod-1", "default", None, None, None), is_deep=True),
    ),
)
"""The events of each fold; every event is a batch."""


class SetBack(RedisClient):
    """Before the call ``at``, a shard is as it was after the call ``to``; calls of writing scripts count from 1."""

    def __init__(self, redis: Redis, *, shard: int = 0, to: int = 0, at: int = 0) -> None:
        super().__init__(redis, "redis://test")
        self.calls = 0
        self._real = redis
        self._is_back = False
        self._shard, self._to, self._at = shard, to, at
        self._kept: dict[bytes, tuple[bytes, int]] = {}

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        if name not in _WRITING:
            return await super().run(name, keys, args)
        if self.calls + 1 == self._at:
            await self.come_back()
        reply = await super().run(name, keys, args)
        self.calls += 1
        if self.calls == self._to:
            await self.keep()
        return reply

    async def keep(self) -> None:
        """Remember the shard as it is now."""
        self._kept = {
            key: (cast("bytes", await self._real.dump(key)), max(0, await self._real.pttl(key)))
            for key in await self._keys()
        }

    async def come_back(self) -> None:
        """Without its last writes, once."""
        if self._is_back or not self._kept:
            return
        self._is_back = True
        for key in await self._keys():
            await self._real.delete(key)
        for key, (value, milliseconds) in self._kept.items():
            await self._real.restore(key, milliseconds, value)

    async def _keys(self) -> list[bytes]:
        tag = f"1.{self._shard}" if self._shard else "1"
        return cast("list[bytes]", await self._real.keys(f"wm:{{{tag}}}:*"))


class Meeting(RedisClient):
    """Lets something else happen right before the call of that number that a script gets on shard 1."""

    def __init__(self, redis: Redis, script: str, call: int, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(redis, "redis://test")
        self._script, self._meanwhile = script, meanwhile
        self.calls_left = call

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        if name == self._script and "{1.1}" in str(keys[0]):
            self.calls_left -= 1
            if self.calls_left == 0:
                await self._meanwhile()
        return await super().run(name, keys, args)


class Ended(Exception):
    """The worker ends here, and another one goes on."""


class EndsAfter(SetBack):
    """The worker that makes the call ``at`` ends before it reads the reply."""

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        reply = await super().run(name, keys, args)
        if name in _WRITING and self.calls == self._at:
            self._at = 0
            raise Ended
        return reply


@dataclass
class Kept:
    """What Redis has of a stream in the end."""

    blocks: Counter[tuple[str, int]]
    """By holder name and key, of live holders."""
    hashes: set[int]
    """The engine hashes whose blocks are known to pools."""
    has_singles: bool
    flags: frozenset[str]
    status: str
    is_lost: bool
    """Whether its row says so, by which readers leave it out."""


async def kept_of(redis: Redis, stream: Stream) -> Kept:
    store, grant = stream.store, stream.grant
    state = await store.records.read(grant)
    assert state is not None
    names = {holder: str(name) for name, holder in state.holders.items()}
    told = [
        engine_hash
        for fold in FOLDS
        for event in fold
        if isinstance(event, Stored)
        for engine_hash in event.engine_hashes
    ]
    table = await hgetall(redis, keys.holders(grant.group_id))
    return Kept(
        Counter(
            (names[holder], key) for key, ids in (await blocks_of(redis)).items() for holder in ids if holder in names
        ),
        set(await found_hashes(store, grant.group_id, told)),
        b"singles" in table,
        state.flags,
        state.status,
        table[b"publisher:%d" % grant.publisher] == grant.claim.row(is_lost=True),
    )


class Worker:
    """Applies the folds as a stream does, and takes the stream up again when it is fenced."""

    def __init__(self, client: SetBack, store: Store, stream: Stream) -> None:
        self._client = client
        self._store = store
        self.stream = stream
        self.folds = FOLDS
        self.fenced = 0

    async def run(self, taken_up: tuple[Applier, int] | None = None) -> None:
        """To the end, and on until nothing more is noticed."""
        while True:
            try:
                applier = await self._to_the_end(*(taken_up or await self.take_up()))
                await self._client.come_back()
                keeper = LeaseKeeper(self._store, 60.0)
                with keeper.keeping(applier.grant, lambda: None):
                    await keeper.renew()
                await applier.check_lease()
            except (Fenced, Ended):
                taken_up = None
                self.fenced += 1
                assert self.fenced < 10
            else:
                return

    async def _to_the_end(self, applier: Applier, watermark: int) -> Applier:
        first = 0
        for fold in self.folds:
            batches = [(seq, event) for seq, event in enumerate(fold, first) if seq > watermark]
            first += len(fold)
            if batches:
                incoming = [Incoming(seq, f"{seq:016x}", Batch(0.0, (event,))) for seq, event in batches]
                seq = batches[-1][0]
                await applier.apply(incoming, Commit(seq, 0.0, 0.0, f"{seq:016x}"))
        # A stream that is lost for a while, and told to be careful from now on.
        await applier.set_lost(is_lost=True)
        await applier.set_lost(is_lost=False)
        applier.resolver.flags.add("extra")
        await applier.keep_facts({"status": StreamStatus.ACTIVE})
        return applier

    async def take_up(self) -> tuple[Applier, int]:
        """The stream under a new lease, and the last batch that was applied; -1 for none."""
        self.stream = await self.stream.again()
        grant = self.stream.grant
        applier, state = await resumed(grant, self._store, Metrics(), ApplyOptions())
        applier.pool_hashes.is_wanted = True
        while KEPT not in applier.resolver.flags:
            await applier.pool_hashes.tick(state.watermark)
        return applier, -1 if state.watermark is None else state.watermark


async def outcome(redis: Redis, shards: int, client: SetBack) -> tuple[Kept, int]:
    """What Redis has in the end, and how often the worker was fenced."""
    await redis.flushall()
    store = Store(client, shards=shards)
    worker = Worker(client, store, await stream_of(store, redis))
    await worker.run()
    return await kept_of(redis, worker.stream), worker.fenced


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold has several portions, and a portion several calls."""
    monkeypatch.setattr("waymark.apply.applier._PARTS", 2)
    monkeypatch.setattr("waymark.store.calls.CALL_PARTS", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("shards", [1, SHARDS])
async def test_a_call_that_is_lost_after_its_reply_is_made_again(redis: Redis, shards: int) -> None:
    client = SetBack(redis)
    right, fenced = await outcome(redis, shards, client)
    assert fenced == 0
    assert len(right.blocks) == 70 - 3 + 40 + 40 + 36 + 2
    assert (len(right.hashes), right.has_singles, right.is_lost) == (70 + 9 + 40 + 31 + 36, True, False)
    assert right.flags == {KEPT, "extra"}
    calls, noticed = client.calls, 0
    for to in range(1, calls):
        for shard in range(shards):
            found, fenced = await outcome(redis, shards, SetBack(redis, shard=shard, to=to, at=to + 2))
            assert found == right, f"shard {shard} lost call {to + 1} of {calls}"
            noticed += fenced > 0
    assert noticed == calls - 1, "the loss of every call is noticed, and nothing else is"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("shards", [1, SHARDS])
async def test_a_worker_that_ends_after_any_call_leaves_nothing_out(redis: Redis, shards: int) -> None:
    client = SetBack(redis)
    right, _ = await outcome(redis, shards, client)
    for at in range(1, client.calls + 1):
        assert await outcome(redis, shards, EndsAfter(redis, at=at)) == (right, 1), f"call {at} of {client.calls}"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_several_calls_that_one_of_two_shards_loses_are_made_again(redis: Redis) -> None:
    """What the other shard has of them is not sent again, and still nothing is left out."""
    client = SetBack(redis)
    right, _ = await outcome(redis, SHARDS, client)
    for to in range(1, client.calls - 5, 2):
        found, fenced = await outcome(redis, SHARDS, SetBack(redis, to=to, at=to + 6))
        assert (found, fenced > 0) == (right, True), f"shard 0 lost calls {to + 1} to {to + 5} of {client.calls}"


CHAINS = range(1, 13)
PARENTS_GO: Sequence[Sequence[Event]] = (
    [stored(chain, 64) for chain in CHAINS],
    [stored(20 + chain, 3, after=1000 * chain + 63) for chain in CHAINS],
    [Removed(tuple(1000 * chain + 63 for chain in CHAINS), "GPU")],
)
"""Blocks behind the last one of a row, which is removed later. Some are on another shard than that one."""


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("folds_kept", [1, 2])
async def test_shard_0_loses_blocks_whose_parents_another_shard_has_removed(redis: Redis, folds_kept: int) -> None:
    """By the record that came back, their batches are to be applied again, and nobody knows where their blocks go."""
    await redis.flushall()
    client = SetBack(redis)
    store = Store(client, shards=SHARDS)
    worker = Worker(client, store, await stream_of(store, redis))
    applier, watermark = await worker.take_up()
    worker.folds = PARENTS_GO[:folds_kept]
    await worker._to_the_end(applier, watermark)
    await client.keep()
    worker.folds = PARENTS_GO
    await worker.run()  # which sets the shard back when all is applied
    assert worker.fenced == 1
    kept = await kept_of(redis, worker.stream)
    assert kept.blocks.total() == len(CHAINS) * (63 + 3)


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_loss_of_shard_0_begins_one_life_also_if_the_other_shard_gets_no_further_call(redis: Redis) -> None:
    await redis.flushall()
    client = SetBack(redis)
    store = Store(client, shards=SHARDS)
    worker = Worker(client, store, await stream_of(store, redis))
    worker.folds = PARENTS_GO[:1]
    await worker._to_the_end(*await worker.take_up())
    await client.keep()
    worker.folds = PARENTS_GO
    await worker._to_the_end(*await worker.take_up())
    await client.come_back()
    applier, watermark = await worker.take_up()
    assert watermark == -1
    await applier.apply([Incoming(90, f"{90:016x}", Batch(0.0, ()))], Commit(90, 0.0, 0.0, f"{90:016x}"))
    lives = set()
    for _ in range(2):
        _, watermark = await worker.take_up()
        state = await store.records.read(worker.stream.grant)
        assert state is not None
        lives.add(state.life)
        assert watermark == 90
    assert len(lives) == 1


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("loss", ["all", "all, as its worker notices", "beginning"])
async def test_blocks_of_a_holder_whose_beginning_shard_0_has_lost_are_swept(redis: Redis, loss: str) -> None:
    await redis.flushall()
    client = SetBack(redis)
    store = Store(client, shards=SHARDS)
    worker = Worker(client, store, await stream_of(store, redis))
    taken_up = await worker.take_up()
    await client.keep()
    await worker._to_the_end(*taken_up)
    if loss == "beginning":
        await client.come_back()
    else:
        await redis.delete(*await redis.keys("wm:{1}:*"))
        if loss != "all":
            assert await store.leases.take(worker.stream.grant.claim, "another", 60.0) is None
        worker.stream = await stream_of(store, redis)
    await worker.run()
    state = await store.records.read(worker.stream.grant)
    assert state is not None
    await searched(store, worker.stream.entry)
    await swept(store, worker.stream.entry)
    assert {holder for ids in (await blocks_of(redis)).values() for holder in ids} == set(state.holders.values())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_holders_that_come_back_after_their_sweep_end_again(redis: Redis) -> None:
    """The other shard has swept them, and would skip all that they store."""
    await redis.flushall()
    client = SetBack(redis)
    store = Store(client, shards=SHARDS)
    worker = Worker(client, store, await stream_of(store, redis))
    await worker.run()
    right = await kept_of(redis, worker.stream)
    await client.keep()
    await worker.stream.end(is_restart=True)
    await swept(store, worker.stream.entry)
    await client.come_back()
    await worker.run()
    assert await kept_of(redis, worker.stream) == right


MORE: Sequence[Event] = (stored(5, 80), stored(6, 70, medium="CPU"), stored(7, 60), stored(8, 50, medium="CPU"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize(
    ("script", "call", "lost_on"),
    [
        pytest.param("end_holder", 1, [0], id="begin"),
        pytest.param("sweep_rows", 1, [0, 1], id="step"),
        pytest.param("end_holder", 2, [0, 1], id="end"),
    ],
)
async def test_a_late_step_of_a_sweep_takes_nothing_from_a_holder_that_has_come_back(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, script: str, call: int, lost_on: Sequence[int]
) -> None:
    """The sweeper has read that the holder is dead, and waits. Then a failover forgets that, and the stream goes on."""
    monkeypatch.setattr("waymark.store.sweep.STEP_ROWS", 1)
    await redis.flushall()
    client = SetBack(redis)
    store = Store(client, shards=SHARDS)
    worker = Worker(client, store, await stream_of(store, redis))
    worker.folds = (*FOLDS, MORE)
    await worker.run()
    right = await kept_of(redis, worker.stream)

    await redis.flushall()
    store = Store(client, shards=SHARDS)
    worker = Worker(client, store, await stream_of(store, redis))
    await worker.run()
    state = await store.records.read(worker.stream.grant)
    assert state is not None
    others = [SetBack(redis, shard=shard) for shard in lost_on]
    for other in others:
        await other.keep()
    await worker.stream.end(is_restart=True)

    taken_up: list[tuple[Applier, int]] = []

    async def fail_over() -> None:
        for other in others:
            await other.come_back()
        taken_up.append(await worker.take_up())

    meeting = Meeting(redis, script, call, fail_over)
    sweeper = Store(meeting, shards=SHARDS).sweeper
    for holder in state.holders.values():
        async for _ in sweeper.steps(worker.stream.entry, holder):
            pass
    worker.folds = (*FOLDS, MORE)
    await worker.run(*taken_up)
    assert taken_up
    assert await kept_of(redis, worker.stream) == right
    await swept(store, worker.stream.entry)
    state = await store.records.read(worker.stream.grant)
    assert state is not None
    assert {holder for ids in (await blocks_of(redis)).values() for holder in ids} == set(state.holders.values())
