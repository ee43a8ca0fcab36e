"""The reader of rows, over values made by hand: few round trips, exact answers, and what cannot be read is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import GROUP, Stream, registration, stream_of
from tests.store.test_chain import CHAIN, SHARED, TAIL, Values, branching, name, value, whole
from tests.store.test_reader import Source, longest, read, rows
from waymark.base.metrics import Metrics
from waymark.domain.names import GroupName
from waymark.store import keys
from waymark.store.directory import Directory
from waymark.store.hot import HOLDERS_MIN, HotRows
from waymark.store.incarnation import Incarnation
from waymark.store.parsing import RecordParser
from waymark.store.reader import Reader
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

SHARDS = pytest.mark.parametrize("shards", [1, 3])


def reader_of(client: RedisClient, hot: HotRows | None = None, parser: RecordParser | None = None) -> Any:
    parser = parser or RecordParser()
    incarnation = Incarnation()
    hot = incarnation.cache(HotRows(0, 0) if hot is None else hot)
    return Reader(client, Directory(client, parser), incarnation, hot, parser)


@pytest.fixture(autouse=True)
async def emptied(redis: Redis) -> AsyncIterator[None]:
    """Rows are in no table of keys yet."""
    yield
    await redis.flushall()


async def put(stream: Stream, values: Values, heads: dict[bytes, int] | None = None) -> None:
    """Write values into their shards; ``heads``: the heads of those that are not at their own."""
    for each, text in values.items():
        head = (heads or {}).get(each, int(each[:16], 16))
        prefix = keys.block_prefix(stream.grant.group_id, head % stream.grant.shards)
        await stream.redis.set((prefix + each).decode(), text)


@SHARDS
async def test_a_chain_is_walked_in_a_small_portion_then_in_large_ones(
    client: RedisClient, stream: Stream, shards: int
) -> None:
    chain = list(range(1, 3001))
    gpu, cpu = await stream.begin("0 GPU", "0 CPU")
    values = whole(chain, gpu)
    values[name(1)] = value(chain[:32], 0, {gpu: chain[:32], cpu: chain[:10]})
    await put(stream, values)
    reader, source = reader_of(client), Source(chain)
    reading = await read(reader, source)
    assert source.asked == [129, 2048, 2048], "one beyond the portion says whether the chain goes on"
    assert longest(reading) == {"pod-1": 3000}
    assert rows(reading)["pod-1"].media == {"GPU": 3000, "CPU": 10}
    assert (reading.blocks, reading.is_partial) == (3000, False)
    assert reading.round_trips == 3 + 1, "the table, once"
    assert (await read(reader, chain)).round_trips == 3
    for hole in (0, 1, 31, 32, 127, 128, 129, 2175, 2176):
        prompt = [*chain[:hole], 9999, *chain[hole + 1 :]]
        other, source = reader_of(client), Source(prompt)
        await read(other, [])
        reading = await read(other, source)
        assert longest(reading) == {"pod-1": hole}
        assert reading.round_trips == len(source.asked) == (1 if hole < 128 else 2 if hole < 2176 else 3)


async def test_the_first_portion_is_as_large_as_what_prompts_lately_had(client: RedisClient, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await put(stream, whole(CHAIN, gpu))
    reader, sizes = reader_of(client), []
    for prompt in [CHAIN] * 8 + [CHAIN[:20]] * 5 + [list(range(5000, 5500))] * 8:
        source = Source(prompt)
        await read(reader, source)
        sizes.append(source.asked[0])
    assert sizes == [129] * 4 + [513] * 4 + [513] * 5 + [513] * 6 + [129] * 2


@SHARDS
async def test_branch_rows_are_found_at_the_end_of_a_prompt_and_before_it(
    client: RedisClient, stream: Stream, shards: int
) -> None:
    one, two = await stream.begin("0 GPU", "1 GPU")
    assert (one, two) == (1, 2)
    values = branching(90)
    await put(stream, values, {name(TAIL[0], ":b"): SHARED[96]})
    hot = HotRows(60.0, 1 << 20)
    reader = reader_of(client, hot)
    await read(reader, [])
    for tail, round_trips in ((20, 2), (20, 1), (90, 2)):
        reading = await read(reader, [*SHARED, *TAIL[:tail]])
        assert rows(reading)["pod-1"].ranks == {0: 100 + tail, 1: 100}
        assert reading.round_trips == round_trips


async def test_a_walk_that_no_live_holder_goes_on_asks_for_nothing_more(client: RedisClient, stream: Stream) -> None:
    ended, gpu = await stream.begin("0 GPU", "1 GPU")
    await stream.end("0 GPU")
    values = branching(50) | whole(SHARED[:96], ended, gpu)
    values[name(SHARED[64])] = value(SHARED[64:96], 0, {gpu: SHARED[64:90], ended: SHARED[64:96]})
    await put(stream, values)
    reader = reader_of(client)
    await read(reader, [])
    reading = await read(reader, [*SHARED, *TAIL[:50]])
    assert (longest(reading), reading.round_trips) == ({"pod-1": 90}, 1)


async def test_a_value_that_cannot_be_read_is_named_and_counts_for_nobody_of_this_tenant_alone(
    client: RedisClient, redis: Redis, stream: Stream
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await put(stream, whole(CHAIN, gpu))
    theirs = await stream_of(stream.store, redis, registration("pod-9", tenant_id="other"))
    (their_gpu,) = await theirs.begin("0 GPU")
    await put(theirs, whole(CHAIN, their_gpu))
    key = keys.block_prefix(stream.grant.group_id, 0).decode() + name(33).decode()
    for broken in (b"17 21", b"", whole(CHAIN, 10**17)[name(33)], whole(CHAIN, gpu)[name(33)][:300], b"\xff" * 5000):
        await redis.set(key, broken)
        parser = RecordParser(Metrics())
        reader = reader_of(client, parser=parser)
        assert longest(await read(reader, CHAIN)) == {"pod-1": 32}
        assert [(place.kind, place.key) for place in parser.unreadable] == [("block", key)]
        assert longest(await read(reader, CHAIN, GroupName("other", "m"))) == {"pod-9": 300}
    await redis.delete(key)
    await redis.hset(key, "a", "hash")
    assert longest(await read(reader_of(client), CHAIN)) == {"pod-1": 32}
    await redis.delete(key)


async def test_singles_count_in_a_group_that_says_that_it_has_some(
    client: RedisClient, redis: Redis, stream: Stream
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    values = whole(CHAIN[:40], gpu)
    values |= {name(block, ":s"): value([block], 0, {gpu: [block]}) for block in CHAIN[40:70]}
    await put(stream, values)
    reader = reader_of(client)
    assert longest(await read(reader, CHAIN)) == {"pod-1": 40}
    await redis.hset(keys.holders(stream.grant.group_id), mapping={"singles": "1", "version": "another"})
    reading = await read(reader, CHAIN)
    assert (longest(reading), reading.round_trips) == ({"pod-1": 70}, 1 + 1 + 1), "the table, and the singles"
    reading = await read(reader, CHAIN)
    assert (longest(reading), reading.round_trips) == ({"pod-1": 70}, 1)
    await redis.hdel(keys.holders(stream.grant.group_id), "singles")


async def test_hot_rows_are_not_asked_for_again_and_ended_holders_vanish_at_once(
    client: RedisClient, redis: Redis, stream: Stream
) -> None:
    gpu, *others = await stream.begin(*(f"{rank} GPU" for rank in range(HOLDERS_MIN + 1)))
    await put(stream, whole(CHAIN, gpu, *others))
    metrics = Metrics()
    reader = reader_of(client, HotRows(60.0, 1 << 20, metrics))
    assert longest(await read(reader, CHAIN)) == {"pod-1": 300}
    await put(stream, whole(CHAIN, others[0]))
    reading = await read(reader, CHAIN)
    assert (longest(reading), reading.round_trips) == ({"pod-1": 300}, 1), "the version alone"
    assert metrics.registry.get_sample_value("waymark_hot_block_hits_total") == 10
    assert (metrics.registry.get_sample_value("waymark_hot_block_bytes") or 0) > 0
    assert rows(reading)["pod-1"].ranks == dict.fromkeys(range(HOLDERS_MIN + 1), 300)
    await stream.end("*")
    assert longest(await read(reader, CHAIN)) == {"pod-1": 0}


@pytest.mark.parametrize("holders", [HOLDERS_MIN - 1, HOLDERS_MIN])
async def test_only_rows_that_many_holders_share_may_be_old(client: RedisClient, stream: Stream, holders: int) -> None:
    ids = await stream.begin(*(f"{rank} GPU" for rank in range(holders)))
    await put(stream, whole(CHAIN, *ids))
    hot = HotRows(60.0, 1 << 20, Metrics())
    await read(reader_of(client, hot), CHAIN)
    assert bool(len(hot)) == (holders == HOLDERS_MIN)


async def test_another_redis_never_gives_another_tenants_row(redis: Redis, client: RedisClient) -> None:
    """It came back empty, and the groups were registered in another order: ids have changed places."""
    store_reader = reader_of(client, HotRows(60.0, 1 << 20))
    store = Store(client)
    mine, theirs = GROUP, GroupName("other", "m")
    for names, expected in ((("default", "other"), 200), (("other", "default"), 100)):
        await redis.flushall()
        for tenant in names:
            stream = await stream_of(store, redis, registration(f"pod-of-{tenant}", tenant_id=tenant))
            (gpu,) = await stream.begin("0 GPU")
            await put(stream, whole(CHAIN[: 200 if tenant == names[0] else 100], gpu, *range(1, HOLDERS_MIN + 1)))
        assert longest(await read(store_reader, CHAIN, mine)) == {"pod-of-default": expected}
        assert longest(await read(store_reader, CHAIN, theirs)) == {"pod-of-other": 300 - expected}


async def test_a_table_that_is_behind_its_rows_catches_up_within_the_query(client: RedisClient, stream: Stream) -> None:
    """As on a replica whose table lags: the word is the old one still, the rows are new."""
    reader = reader_of(client)
    (gpu,) = await stream.begin("0 GPU")
    await read(reader, [])
    version = await stream.redis.hget(keys.holders(1), "version")
    (more,) = await stream.begin("1 GPU")
    await put(stream, whole(CHAIN, gpu, more))
    await stream.redis.hset(keys.holders(1), "version", version)
    assert rows(await read(reader, CHAIN))["pod-1"].ranks == {0: 300, 1: 300}
