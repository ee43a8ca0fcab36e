"""Redis may lose writes that it has acknowledged, between any two calls and unseen: nothing is missing in the end.

A failover leaves a shard as it was some calls ago. The connection is made again, and no call has failed.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, blocks_of, stream_of
from waymark.apply.applier import Applier, Fenced, Incoming, resumed
from waymark.apply.options import ApplyOptions
from waymark.domain.events import Batch, Cleared, Event, Removed, Stored
from waymark.domain.parts import Commit
from waymark.metrics import Metrics
from waymark.store.client import RedisClient, Reply
from waymark.store.store import Store

BLOCK_SIZE = 16
SHARDS = 2
#: Scripts whose effect must not be lost.
_WRITING = ("new_life", "apply_rows", "commit_batch")


def stored(chain: int, blocks: int, *, after: int | None = None, medium: str = "GPU") -> Stored:
    """A chain of its own, or what goes on after a block."""
    tokens = b"".join(struct.pack("<16I", *[1000 * chain + block] * BLOCK_SIZE) for block in range(blocks))
    hashes = tuple(1000 * chain + block for block in range(blocks))
    return Stored(hashes, after, tokens, BLOCK_SIZE, medium)


FOLDS: Sequence[Sequence[Event]] = (
    (stored(1, 70), stored(3, 9, medium="CPU")),
    (Cleared(), stored(1, 70), stored(2, 40, after=1031), Removed((1060, 1061, 1062), "GPU")),
    (stored(3, 40, medium="CPU"), stored(4, 36, after=1031)),
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
        self._kept: dict[bytes, bytes] = {}

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        if name not in _WRITING:
            return await super().run(name, keys, args)
        if self.calls + 1 == self._at:
            await self.come_back()
        reply = await super().run(name, keys, args)
        self.calls += 1
        if self.calls == self._to:
            self._kept = {key: cast("bytes", await self._real.dump(key)) for key in await self._keys()}
        return reply

    async def come_back(self) -> None:
        """Without its last writes, once."""
        if self._is_back or not self._to:
            return
        self._is_back = True
        for key in await self._keys():
            await self._real.delete(key)
        for key, value in self._kept.items():
            await self._real.restore(key, 0, value)

    async def _keys(self) -> list[bytes]:
        tag = f"1.{self._shard}" if self._shard else "1"
        return cast("list[bytes]", await self._real.keys(f"wm:{{{tag}}}:*"))


async def index_of(redis: Redis, stream: Stream) -> Counter[tuple[str, int]]:
    """Blocks by holder name and key, of live holders."""
    state = await stream.store.records.read(stream.grant)
    assert state is not None
    names = {holder: str(name) for name, holder in state.holders.items()}
    return Counter(
        (names[holder], key) for key, ids in (await blocks_of(redis)).items() for holder in ids if holder in names
    )


class Worker:
    """Applies the folds as a stream does, and takes the stream up again when it is fenced."""

    def __init__(self, client: SetBack, store: Store, stream: Stream) -> None:
        self._client = client
        self._store = store
        self.stream = stream
        self.fenced = 0

    async def run(self) -> None:
        """To the end, and on until nothing more is noticed."""
        while True:
            try:
                applier = await self._to_the_end()
                await self._client.come_back()
                for _ in range(SHARDS):
                    await applier.renew(60.0)
            except Fenced:
                self.fenced += 1
                assert self.fenced < 10
            else:
                return

    async def _to_the_end(self) -> Applier:
        applier, watermark = await self._taken_up()
        first = 0
        for fold in FOLDS:
            batches = [(seq, event) for seq, event in enumerate(fold, first) if seq > watermark]
            first += len(fold)
            if batches:
                incoming = [Incoming(seq, f"{seq:016x}", Batch(0.0, (event,))) for seq, event in batches]
                seq = batches[-1][0]
                await applier.apply(incoming, Commit(seq, 0.0, 0.0, f"{seq:016x}"))
        return applier

    async def _taken_up(self) -> tuple[Applier, int]:
        self.stream = await self.stream.again()
        grant = self.stream.grant
        applier, state = await resumed(grant, self._store, Metrics(), ApplyOptions())
        if state.watermark is not None and grant.has_lost(state.shard_calls):
            await applier.new_life()
            applier, state = await resumed(grant, self._store, Metrics(), ApplyOptions())
        return applier, -1 if state.watermark is None else state.watermark


async def outcome(redis: Redis, shards: int, client: SetBack) -> tuple[Counter[tuple[str, int]], int]:
    """What is in the index in the end, and how often the worker was fenced."""
    await redis.flushall()
    store = Store(client, shards=shards)
    worker = Worker(client, store, await stream_of(store, redis))
    await worker.run()
    return await index_of(redis, worker.stream), worker.fenced


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold has several portions, and a portion several calls."""
    monkeypatch.setattr("waymark.apply.portions._PARTS", 2)
    monkeypatch.setattr("waymark.store.index.CALL_PARTS", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("shards", [1, SHARDS])
async def test_a_call_that_is_lost_after_its_reply_is_made_again(redis: Redis, shards: int) -> None:
    client = SetBack(redis)
    right, fenced = await outcome(redis, shards, client)
    assert fenced == 0
    assert len(right) == 70 - 3 + 40 + 40 + 36
    calls, noticed = client.calls, 0
    for to in range(1, calls):
        for shard in range(shards):
            found, fenced = await outcome(redis, shards, SetBack(redis, shard=shard, to=to, at=to + 2))
            assert found == right, f"shard {shard} lost call {to + 1} of {calls}"
            noticed += fenced > 0
    assert noticed == calls - 1, "the loss of every call is noticed, and nothing else is"
