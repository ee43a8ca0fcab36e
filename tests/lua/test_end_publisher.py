"""begin_publisher.lua, mark_publisher.lua, end_publisher.lua: a publisher's row, from first to last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from tests.store.factories import GROUP, Stream, claim_of, hgetall, registration, snapshot
from waymark.domain.targets import Target
from waymark.store import keys
from waymark.store.scripts import Scripts, Verdict
from waymark.store.store import Store

NAME = b'["pod-1","t",0]'


async def begin(
    scripts: Scripts, group: bytes, row: bytes = b'{"row":1}', *, target: bytes = b"", version: str = "a" * 16
) -> Verdict:
    outcome = await scripts.run(
        "begin_publisher",
        holders=keys.holders(1),
        record=keys.record(1, 1),
        publisher=1,
        name=NAME,
        row=row,
        group=group,
        version=version,
        life="b" * 16,
        target=target,
    )
    return outcome.verdict


async def test_a_publisher_begins_with_a_record_and_a_row(redis: Redis, scripts: Scripts) -> None:
    assert await begin(scripts, b'["t","m"]') is Verdict.APPLIED
    record = {b"name": NAME, b"life": b"b" * 16, b"status": b"starting", b"format": b"1"}
    assert await hgetall(redis, keys.record(1, 1)) == record
    assert await hgetall(redis, keys.holders(1)) == {
        b"group": b'["t","m"]',
        b"publisher:1": b'{"row":1}',
        b"version": b"a" * 16,
        b"incarnation": b"a" * 16,
    }


async def test_a_record_of_another_publisher_is_left_alone(redis: Redis, scripts: Scripts) -> None:
    await begin(scripts, b'["t","m"]')
    before = await snapshot(redis)
    outcome = await scripts.run(
        "begin_publisher",
        holders=keys.holders(1),
        record=keys.record(1, 1),
        publisher=1,
        name=b'["pod-2","t",0]',
        row=b'{"row":2}',
        group=b'["t","m"]',
        version="c" * 16,
        life="d" * 16,
        target=b"{}",
    )
    assert outcome == (Verdict.OTHER, (1,))
    assert await snapshot(redis) == before


async def test_beginning_again_changes_nothing(redis: Redis, scripts: Scripts) -> None:
    await begin(scripts, b'["t","m"]')
    before = await snapshot(redis)
    assert await begin(scripts, b'["t","m"]', b'{"row":2}') is Verdict.APPLIED
    assert await snapshot(redis) == before


async def test_what_it_is_as_a_target_changes_in_place(redis: Redis, scripts: Scripts) -> None:
    await begin(scripts, b'["t","m"]', target=b'{"weight":2}')
    first = await hgetall(redis, keys.holders(1))
    assert first[b"target:1"] == b'{"weight":2}'
    await begin(scripts, b'["t","m"]', target=b'{"weight":2}', version="c" * 16)
    assert await hgetall(redis, keys.holders(1)) == first, "nothing has changed"
    await begin(scripts, b'["t","m"]', b'{"row":2}', target=b'{"weight":0}', version="c" * 16)
    assert await hgetall(redis, keys.holders(1)) == first | {b"target:1": b'{"weight":0}', b"version": b"c" * 16}
    await begin(scripts, b'["t","m"]', version="d" * 16)
    left = await hgetall(redis, keys.holders(1))
    assert (b"target:1" in left, left[b"version"]) == (False, b"d" * 16)


async def test_a_table_that_was_lost_is_made_good(redis: Redis, scripts: Scripts) -> None:
    await begin(scripts, b'["t","m"]')
    whole = await snapshot(redis)
    await redis.delete(keys.holders(1))
    assert await begin(scripts, b'["t","m"]') is Verdict.APPLIED
    assert await snapshot(redis) == whole


async def test_a_row_without_a_record_has_to_end_first(redis: Redis, scripts: Scripts) -> None:
    """Its holders would be nobody's."""
    await begin(scripts, b'["t","m"]')
    await redis.delete(keys.record(1, 1))
    left = await snapshot(redis)
    assert await begin(scripts, b'["t","m"]') is Verdict.GONE
    assert await snapshot(redis) == left


async def test_the_table_of_another_group_is_not_touched(redis: Redis, scripts: Scripts) -> None:
    await begin(scripts, b'["t","m"]')
    before = await snapshot(redis)
    assert await begin(scripts, b'["other","m"]') is Verdict.OTHER
    assert await snapshot(redis) == before


async def test_a_mark_is_seen_by_readers(redis: Redis, stream: Stream) -> None:
    before = (await hgetall(redis, keys.holders(1)))[b"version"]
    assert await stream.store.records.set_lost(stream.grant, is_lost=True)
    table = await stream.store.reader.table(GROUP)
    assert table is not None
    assert table.publishers[1].is_lost
    assert table.version != before


async def test_an_end_takes_row_holders_record_and_lease_and_leaves_the_neighbour(
    redis: Redis, stream: Stream, store: Store
) -> None:
    await stream.begin("0 GPU", "0 CPU")
    await store.registry.register(registration("pod-2"))
    neighbour = (await claim_of(store, registration("pod-2"))).publisher
    of = stream.grant.claim.registration
    assert await store.registry.register(replace(of, target=Target(weight=2.0)))
    assert b"target:1" in await hgetall(redis, keys.holders(1))
    assert await store.leases.end(stream.grant)
    left = await snapshot(redis)
    assert left[keys.dead(1).encode()][2] == {b"1", b"2"}
    assert left[keys.holders(1).encode()][2].keys() == {
        b"group",
        b"version",
        b"incarnation",
        b"publisher:%d" % neighbour,
    }
    assert stream.grant.record.encode() not in left
    assert stream.grant.lease.encode() not in left
    assert left[keys.fence(1, 0).encode()][2] == {b"holder": b"2"}


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_more_holders_than_one_unpack_can_hold_end(redis: Redis, stream: Stream, store: Store) -> None:
    for start in range(0, 8100, 900):
        await stream.begin(*(f"0 GPU {number:016x}" for number in range(start, start + 900)))
    assert await store.leases.end(stream.grant)
    assert await redis.scard(keys.dead(1)) == 8100
    assert (await hgetall(redis, keys.holders(1))).keys() == {b"group", b"version", b"incarnation"}
