"""A call whose reply did not come is sent again, and its first copy may arrive when much else has been written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import Stream, apart, begins, hgetall, snapshot, stored, stream_of
from tests.store.flow import swept
from waymark.base.errors import StoreUnavailable
from waymark.domain.moves import Moves
from waymark.domain.status import StreamStatus
from waymark.store import keys
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.scripts import Scripts, Verdict
from waymark.store.store import Store


class Remembering(RedisClient):
    """Remembers every call."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client._redis, client.url, reads=client.reads)
        self.calls: list[tuple[str, Sequence[Any], Sequence[Any]]] = []
        self.before_end: Callable[[str], Awaitable[None]] | None = None
        """Awaited before the sweep of a holder ends on a shard, with the key of its engine hashes there."""

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        self.calls.append((name, keys, args))
        if name == "end_holder" and int(args[-1]) and self.before_end is not None:
            await self.before_end(keys[0])
        return await super().run(name, keys, args)

    async def again(self, name: str) -> bytes:
        """The first copy of the last call of this script arrives."""
        keys, args = next((keys, args) for each, keys, args in reversed(self.calls) if each == name)
        verdict: bytes = (await super().run(name, keys, args))[0]
        return verdict


@dataclass
class Late:
    redis: Redis
    client: Remembering
    stream: Stream

    async def changes_nothing(self, name: str) -> None:
        before = await snapshot(self.redis)
        assert await self.client.again(name) == b"fenced"
        assert await snapshot(self.redis) == before


@pytest.fixture(params=[1, 3], ids=["one shard", "three shards"])
async def late(request: pytest.FixtureRequest, redis: Redis, client: RedisClient) -> Late:
    remembering = Remembering(client)
    stream = await stream_of(Store(remembering, shards=request.param), redis)
    await stream.begin("0 GPU")
    return Late(redis, remembering, stream)


async def test_a_status_is_not_written_over_a_later_one(late: Late) -> None:
    records, grant = late.stream.store.records, late.stream.grant
    assert await records.write(grant, {"status": StreamStatus.ACTIVE, "flags": "one"}, {"gaps": 1})
    status = late.client.calls[-1]
    assert await records.write(grant, {"status": StreamStatus.DEGRADED, "flags": "one untrusted"}, {"gaps": 2})
    late.client.calls.append(status)
    await late.changes_nothing("write_record")


async def test_a_call_that_comes_twice_before_the_next_is_written_twice(late: Late) -> None:
    """Its reply may have been lost, and who sent it waits for another."""
    records, grant = late.stream.store.records, late.stream.grant
    await records.write(grant, {"status": StreamStatus.ACTIVE}, {})
    assert await late.client.again("write_record") == b"applied"
    assert await records.write(grant, {"status": StreamStatus.DEGRADED}, {})
    assert (await hgetall(late.redis, grant.record))[b"status"] == b"degraded"


async def test_flags_of_a_life_do_not_come_into_the_next(late: Late) -> None:
    assert await late.stream.store.records.write(late.stream.grant, {"flags": "untrusted"}, {})
    await late.stream.end(is_restart=True)
    await late.changes_nothing("write_record")


async def test_a_publisher_that_was_found_is_not_lost_again(late: Late) -> None:
    records, grant = late.stream.store.records, late.stream.grant
    assert await records.set_lost(grant, is_lost=True)
    lost = late.client.calls[-1]
    assert await records.set_lost(grant, is_lost=False)
    late.client.calls.append(lost)
    await late.changes_nothing("mark_publisher")


@pytest.mark.parametrize("milliseconds", [0, 10_000])
async def test_a_note_that_an_engine_is_away_or_back_does_not_come_after_a_later_one(
    late: Late, milliseconds: int
) -> None:
    """Decisions would leave out an engine that is there, or name one that is not."""
    records, grant = late.stream.store.records, late.stream.grant
    assert await records.note_health(grant, milliseconds=milliseconds)
    first = late.client.calls[-1]
    assert await records.note_health(grant, milliseconds=10_000 - milliseconds)
    late.client.calls.append(first)
    await late.changes_nothing("note_health")


@pytest.mark.parametrize("step", ["a new life", "a snapshot", "a lost publisher"])
async def test_a_watermark_does_not_come_into_the_next_life(late: Late, step: str) -> None:
    """The new life begins again at 0: all that it brings would count as seen."""
    stream = late.stream
    await stream.apply(stored(1, [1, 2, 3], seq=9))
    if step == "a new life":
        await stream.end(is_restart=True)
    elif step == "a snapshot":
        assert await stream.store.records.take_staged(stream.grant, None, {}, [], "f" * 16)
    else:
        await stream.end(is_restart=True)
        assert await stream.store.records.set_lost(stream.grant, is_lost=True)
    await late.changes_nothing("apply_rows" if stream.grant.shards == 1 else "commit_batch")


async def test_what_was_removed_is_not_stored_again(late: Late) -> None:
    """The holder of these blocks is gone, and the sweep is over: nobody would remove them."""
    stream = late.stream
    await stream.apply(stored(1, [1, 2, 3], seq=9))
    call = next(each for each in late.client.calls if each[0] == "apply_rows" and each[1][-1] == stream.grant.record)
    await stream.end(is_restart=True)
    async for _ in stream.store.sweeper.steps(stream.entry, 1):
        continue
    late.client.calls.append(call)
    await late.changes_nothing("apply_rows")


@pytest.mark.parametrize("moment", ["before the sweep", "during the sweep", "before its end", "after the sweep"])
async def test_what_was_removed_is_not_stored_again_on_any_shard(late: Late, moment: str) -> None:
    """Only one shard has the record, which knows the life of the stream."""
    stream = late.stream
    await stream.apply(stored(1, list(range(1, 200)), seq=9))
    calls = [each for each in late.client.calls if each[0] == "apply_rows"]
    assert len(calls) >= stream.grant.shards
    for engine in await late.redis.keys("wm:{1.*}:engine:1"):
        # As if the first copy of the call had not arrived yet: on these shards nothing counts as applied.
        await late.redis.hset(engine, "applied", "1 0")
    await stream.end(is_restart=True)
    steps = stream.store.sweeper.steps(stream.entry, 1)

    async def arrive(engine: str = "") -> None:
        for call in calls:
            if engine in ("", call[1][1]):
                await super(Remembering, late.client).run(*call)

    if moment == "before the sweep":
        await arrive()
    if moment == "before its end":
        late.client.before_end = arrive
    async for _ in steps:
        if moment == "during the sweep":
            await arrive()
    if moment == "after the sweep":
        await arrive()
    assert not await rows_of(late.redis)
    assert await late.redis.keys("*:branches") == []


async def test_what_a_snapshot_had_stored_is_not_stored_again(late: Late) -> None:
    """Its life was given up. No script looked at its record, because the watermark there is that of another life."""
    stream = late.stream
    records, grant = stream.store.records, stream.grant
    ids = await records.stage(grant, begins(grant.claim, "0 CPU"), grant.above, "1" * 16)
    assert ids is not None
    resolved = await stream.remembered()
    parts, moves = resolved.parts(stored(ids[0], list(range(1, 200)))), Moves(resolved.memory)
    assert await stream.store.index.apply(grant, parts, moves, None, is_staged=True) is Verdict.APPLIED
    calls = [each for each in late.client.calls if each[0] == "apply_rows"]
    assert len(calls) >= grant.shards
    assert await records.drop_staged(grant, "2" * 16)
    await swept(stream.store, stream.entry)
    for call in calls:
        await RedisClient.run(late.client, *call)
    assert not await rows_of(late.redis)


@pytest.mark.parametrize("late", [3], indirect=True)
async def test_a_fold_is_repeated_when_no_shard_is_at_work_on_it(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first attempt and its repetition would both move blocks, to places of which one is remembered."""
    run, may_answer, asked, answered = late.client.run, asyncio.Event(), set[int](), list[int]()

    async def run_but_one(name: str, names: Sequence[Any], args: Sequence[Any]) -> Reply:
        shard = next((shard for shard in (1, 2) if names[0] == keys.fence(1, shard)), 0) if name == "apply_rows" else 0
        asked.add(shard)
        if shard == 1:
            raise StoreUnavailable("its primary is away")
        if shard == 2:
            await may_answer.wait()
        reply = await run(name, names, args)
        answered.append(shard)
        return reply

    monkeypatch.setattr(late.client, "run", run_but_one)
    applying = asyncio.create_task(late.stream.apply(*apart(1, range(1, 13), seq=7)))
    await wait_until(lambda: asked >= {1, 2}, "all shards are asked")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not applying.done()
    may_answer.set()
    with pytest.raises(StoreUnavailable):
        await applying
    assert 2 in answered


@pytest.mark.parametrize("late", [1], indirect=True)
async def test_an_opaque_prefix_that_was_removed_does_not_come_back(late: Late) -> None:
    stream = late.stream

    async def change(kind: str) -> None:
        outcome = await Scripts(late.client).run(
            "apply_prefixes",
            **stream.grant.fenced_call,
            prefixes=keys.opaque_prefixes(1),
            hot=keys.opaque_prefixes(1, 1),
            warm=keys.opaque_prefixes(1, 2),
            prefix=[keys.opaque_prefix(1, "a" * 32)],
            milliseconds=60_000,
            hot_holder=1,
            warm_holder=2,
            change=[kind, 5],
        )
        assert stream.grant.counted(outcome)

    await change("hot")
    stored_then = late.client.calls[-1]
    await change("remove")
    late.client.calls.append(stored_then)
    await late.changes_nothing("apply_prefixes")


async def test_the_next_worker_is_not_late_though_the_fence_is_gone(late: Late) -> None:
    """As in a Redis that evicts keys: the calls are counted from 0 again."""
    stream = late.stream
    assert await stream.store.records.write(stream.grant, {"status": StreamStatus.ACTIVE}, {})
    await late.redis.delete(keys.fence(1, 0))
    after = await stream.again()
    assert after.grant.first_calls == 0
    assert await after.store.records.write(after.grant, {"status": StreamStatus.DEGRADED}, {})


async def rows_of(redis: Redis) -> set[bytes]:
    names = await snapshot(redis)
    return {name for name in names if name.count(b":") == 2 and len(name.split(b":")[2]) == 16}
