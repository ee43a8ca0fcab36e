"""write_record.lua, commit_batch.lua: what a stream keeps of itself."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, hgetall, snapshot
from waymark.store import keys
from waymark.store.scripts import Scripts, Verdict


def of(stream: Stream, token: str | None = None) -> dict[str, Any]:
    """What the scripts are told of a stream that has acknowledged no call."""
    grant = stream.grant
    return {
        "record": grant.record,
        "fence": keys.fence(1, 0),
        "publisher": grant.publisher,
        "token": token or grant.token,
        "calls": 0,
    }


def commit(watermark: int | str, ts: str, newest_ts: str, digest: str) -> dict[str, Any]:
    return {"watermark": watermark, "ts": ts, "newest_ts": newest_ts, "digest": digest}


async def test_fields_are_written_and_an_empty_one_goes(redis: Redis, scripts: Scripts, stream: Stream) -> None:
    record = stream.grant.record
    before = await hgetall(redis, record)
    fields = ["status", "active", "flags", "a b", "count:gaps", "3"]
    assert await scripts.run("write_record", **of(stream), field=fields) == (Verdict.APPLIED, (1,))
    own = {b"count:gaps": b"3", b"late": b"0"}
    assert await hgetall(redis, record) == before | own | {b"status": b"active", b"flags": b"a b"}
    await scripts.run("write_record", **of(stream), field=["flags", "", "never", "", "status", "lost"])
    assert await hgetall(redis, record) == before | own | {b"status": b"lost"}


async def test_a_commit_moves_the_watermark_and_what_is_beside_it(
    redis: Redis, scripts: Scripts, stream: Stream
) -> None:
    record = stream.grant.record
    assert await scripts.run(
        "commit_batch", **of(stream), **commit(7, "1.5", "2.5", "d" * 16), shards=[], event=[]
    ) == (
        Verdict.APPLIED,
        (7, 1),
    )
    fields = await hgetall(redis, record)
    beside = [fields[name] for name in (b"watermark", b"ts", b"newest_ts", b"digest")]
    assert beside == [b"7", b"1.5", b"2.5", b"d" * 16]
    assert await scripts.run("commit_batch", **of(stream), **commit(12, "", "2.5", "e" * 16), shards=[], event=[]) == (
        Verdict.APPLIED,
        (12, 2),
    )


@pytest.mark.parametrize("seq", [0, 9, 10])
async def test_a_watermark_never_goes_back(redis: Redis, scripts: Scripts, stream: Stream, seq: int) -> None:
    await scripts.run("commit_batch", **of(stream), **commit(10, "", "", "d" * 16), shards=[], event=[])
    before = await snapshot(redis)
    outcome = await scripts.run("commit_batch", **of(stream), **commit(seq, "", "", "e" * 16), shards=[], event=[7, 8])
    assert outcome == (Verdict.STALE, (10, 1))
    assert await snapshot(redis) == before


@pytest.mark.parametrize("watermark", [3, ""])
async def test_event_ids_move_with_a_commit_whether_or_not_it_has_a_watermark(
    redis: Redis, scripts: Scripts, stream: Stream, watermark: int | str
) -> None:
    record = stream.grant.record
    before = await hgetall(redis, record)
    outcome = await scripts.run(
        "commit_batch", **of(stream), **commit(watermark, "", "", "d" * 16), shards=[], event=[7, 2**64 - 1, 8, 1]
    )
    assert outcome == (Verdict.APPLIED, (watermark or 0, 1))
    beside = {b"watermark": b"3", b"ts": b"", b"newest_ts": b"", b"digest": b"d" * 16} if watermark else {}
    assert await hgetall(redis, record) == before | beside | {b"event:7": b"18446744073709551615", b"event:8": b"1"}
    assert (
        await scripts.run("commit_batch", **of(stream, "0.0"), **commit(watermark, "", "", ""), shards=[], event=[7, 5])
    ).verdict is Verdict.FENCED
    assert (await hgetall(redis, record))[b"event:7"] == b"18446744073709551615"


async def test_a_commit_keeps_how_far_each_shard_is(redis: Redis, scripts: Scripts, stream: Stream) -> None:
    record = stream.grant.record
    await scripts.run("commit_batch", **of(stream), **commit(5, "", "", "d" * 16), shards=[1, 4, 3, 5], event=[7, 1])
    await scripts.run("commit_batch", **of(stream), **commit(6, "", "", "d" * 16), shards=[3, 6], event=[7, 2])
    fields = await hgetall(redis, record)
    found = {name: value for name, value in fields.items() if name.startswith((b"shard:", b"event:"))}
    assert found == {b"shard:1": b"4", b"shard:3": b"6", b"event:7": b"2"}
    assert await scripts.run("commit_batch", **of(stream), **commit(6, "", "", ""), shards=[1, 9], event=[]) == (
        Verdict.STALE,
        (6, 2),
    )
    assert (
        await scripts.run("commit_batch", **of(stream, "0.0"), **commit(7, "", "", ""), shards=[1, 9], event=[])
    ).verdict is Verdict.FENCED
    assert (await hgetall(redis, record)) == fields
