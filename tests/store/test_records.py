"""Records: what a stream knows of itself, and what ``/workers`` tells of it."""

from __future__ import annotations

import time

import pytest
from redis.asyncio import Redis

from tests.patience import patient
from tests.store.factories import GROUP, Stream, registration, stored, stream_of
from waymark.domain.held import HeldBlocks
from waymark.domain.moves import Moves
from waymark.domain.names import HolderName
from waymark.domain.parts import Commit
from waymark.store.records import Facts, StreamRecord
from waymark.store.scripts import Verdict
from waymark.store.store import Store


async def state_of(stream: Stream) -> StreamRecord:
    state = await stream.store.records.read(stream.grant)
    assert state is not None
    return state


async def test_a_new_stream_knows_nothing(stream: Stream) -> None:
    state = await state_of(stream)
    assert len(state.life) == 16
    assert (state.watermark, state.ts, state.newest_ts, state.digest) == (None, None, None, "")
    assert (state.flags, state.main_groups, state.status) == (frozenset(), "", "starting")
    assert (state.holders, state.event_ids, state.counters) == ({}, {}, {})


async def test_what_is_written_is_read(stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(watermark=7, event_ids={gpu: 9})
    written: Facts = {"status": "active", "flags": "a b", "main_groups": "1"}
    assert await stream.store.records.write(stream.grant, written, {"gaps": 3, "restarts": 0})
    state = await state_of(stream)
    assert (state.status, state.flags, state.main_groups) == ("active", frozenset({"a", "b"}), "1")
    assert (state.holders, state.event_ids, state.counters) == (
        {HolderName(0, "GPU"): gpu},
        {gpu: 9},
        {"gaps": 3, "restarts": 0},
    )
    assert await stream.store.records.write(stream.grant, {"flags": "", "main_groups": ""}, {})
    assert (await state_of(stream)).flags == frozenset()


async def test_holders_of_every_form_of_name_are_read(stream: Stream) -> None:
    """A standard publisher's holder on a medium whose blocks go by time has all four parts."""
    names = ["0 GPU", "0 DISK #7", "1 DISK 0123456789abcdef", "1 DISK 0123456789abcdef #7"]
    ids = await stream.begin(*names)
    state = await state_of(stream)
    assert {str(name): holder for name, holder in state.holders.items()} == dict(zip(names, ids, strict=True))
    assert not state.is_damaged


@pytest.mark.parametrize("ts", [None, 0.0, 1767225600.123456])
async def test_the_clock_of_a_publisher_comes_back_as_it_was(stream: Stream, ts: float | None) -> None:
    commit = Commit(5, ts, ts, "d" * 16)
    assert await stream.store.index.apply(stream.grant, [], Moves(HeldBlocks()), commit) is Verdict.APPLIED
    state = await state_of(stream)
    assert (state.watermark, state.ts, state.newest_ts, state.digest) == (5, ts, ts, "d" * 16)


async def test_a_worker_that_was_fenced_reads_and_writes_nothing(stream: Stream) -> None:
    await stream.again()
    records, grant = stream.store.records, stream.grant
    assert await records.read(grant) is None
    assert not await records.write(grant, {"status": "active"}, {})
    assert not await records.set_lost(grant, is_lost=True)
    assert await records.new_life(grant, unit="*", is_restart=True, begin=[], above=0) is None


async def test_a_lost_publisher_is_marked_and_comes_back(store: Store, stream: Stream) -> None:
    for is_lost in (True, False):
        assert await store.records.set_lost(stream.grant, is_lost=is_lost)
        table = await store.reader.table(GROUP)
        assert table is not None
        assert table.publishers[stream.grant.publisher].is_lost is is_lost


@pytest.mark.parametrize("shards", [1, 3])
async def test_workers_tells_status_watermark_lag_and_blocks_by_medium(
    store: Store, redis: Redis, stream: Stream
) -> None:
    gpu, cpu = await stream.begin("0 GPU", "0 CPU")
    await stream.begin("1 DISK")
    # Marks are spread over the shards; each engine hash has one.
    await stream.apply(stored(gpu, range(1, 31)), stored(cpu, range(1, 7), first=31))
    an_hour_ago = time.time() - 3600
    commit = Commit(8, an_hour_ago, an_hour_ago, "d" * 16)
    assert await stream.store.index.apply(stream.grant, [], Moves(HeldBlocks()), commit)
    counters = {"gaps": 1, "blocks.GPU": 30, "blocks.CPU": 6}
    await store.records.write(stream.grant, {"status": "degraded", "last_error": "no replay"}, counters)
    await store.registry.register(registration("pod-2"))

    first, second = await store.publisher_states.of(await store.directory.claims())
    assert (first.registration, first.id, first.group_id) == (registration(), 1, 1)
    assert (first.status, first.watermark, first.counters) == ("degraded", 8, {"gaps": 1})
    assert (first.last_error, first.worker) == ("no replay", "worker-1")
    assert first.blocks == {"GPU": 30, "CPU": 6, "DISK": 0}
    assert first.lag_seconds is not None
    assert 3600 <= first.lag_seconds < 3600 + patient(100)
    assert second.registration == registration("pod-2")
    assert (second.status, second.watermark, second.lag_seconds, second.worker) == ("starting", None, None, None)
    assert (second.blocks, second.counters) == ({}, {})


async def test_without_publishers_there_is_nothing_to_tell(store: Store) -> None:
    assert await store.publisher_states.of([]) == []


async def test_workers_that_are_alive_know_of_each_other(store: Store) -> None:
    assert list(await store.heartbeats.report("a", keep_seconds=60)) == ["a"]
    assert list(await store.heartbeats.report("b", keep_seconds=60)) == ["a", "b"]
    assert list(await store.heartbeats.report("a", keep_seconds=60, is_leaving=True)) == ["b"]
    assert list(await store.heartbeats.report("", keep_seconds=60)) == ["b"]


async def test_a_redis_that_came_back_empty_has_another_incarnation(store: Store, redis: Redis) -> None:
    incarnation = await store.read_incarnation()
    assert await store.read_incarnation() == incarnation
    await redis.flushall()
    assert await store.read_incarnation() != incarnation


async def test_two_lives_of_two_publishers_never_have_the_same_word(store: Store, redis: Redis) -> None:
    first, second = [await stream_of(store, redis, registration(f"pod-{i}")) for i in range(2)]
    lives = {(await state_of(first)).life, (await state_of(second)).life}
    await first.end(is_restart=True)
    lives.add((await state_of(first)).life)
    assert len(lives) == 3
