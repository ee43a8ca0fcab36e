"""Valuations: one walk over the rows of a group, on any number of shards, and what it leaves in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import Dying, Stream, apart, registration, stored, stream_of
from waymark.base.errors import StoreUnavailable
from waymark.domain.packing import pack
from waymark.domain.rows import Row
from waymark.domain.worth import CacheWorth, PrefixUse, Tally
from waymark.store import keys, worth
from waymark.store.kept_decisions import KeptDecision
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store
from waymark.store.worth import Valuation, sample

SIZE = 16
BLOCKS = list(range(1, 201))
SHARDS = pytest.mark.parametrize("shards", [1, 3])


async def walked(store: Store, stream: Stream, prompts: Sequence[Sequence[int]] = ()) -> Valuation | None:
    """The result after a walk that no earlier one holds up."""
    await stream.redis.delete(keys.valuing(1))
    for number, each in enumerate(prompts):
        store.kept_decisions.note_decision(1, decision(number, each))

    async def are_kept() -> bool:
        return len((await store.kept_decisions.read(1, since_ms=0, decisions_max=100)).decisions) == len(prompts)

    await wait_until(are_kept, "the decisions are kept")
    async for blocks in store.valuations.walk(stream.entry):
        assert 0 < blocks <= worth.STEP_BLOCKS
    return (await store.valuations.read([1])).get(1)


def decision(number: int, blocks: Sequence[int]) -> KeptDecision:
    """A kept decision for a prompt that begins with these blocks."""
    return KeptDecision(
        0, f"{number:016x}", "default", "dynamo", "kv_aware", SIZE * len(blocks), SIZE, 1, 0, 0, blocks=pack(blocks)
    )


def plain(tokens: int, only: int, few: int) -> CacheWorth:
    return CacheWorth(*(SIZE * blocks for blocks in (tokens, only, few, only, few)))


@SHARDS
async def test_each_row_is_counted_once(store: Store, redis: Redis, stream: Stream, shards: int) -> None:
    other, third = [await stream_of(store, redis, registration(name)) for name in ("pod-2", "pod-3")]
    (gpu, cpu), (others,), (thirds,) = [
        await stream.begin("0 GPU", "0 CPU"),
        await other.begin("0 GPU"),
        await third.begin("0 GPU"),
    ]
    await stream.apply(stored(gpu, BLOCKS), stored(cpu, BLOCKS[:50], first=201))
    await other.apply(stored(others, BLOCKS[:100]), *apart(others, [5000, 6000, 7001], first=101))
    await third.apply(stored(thirds, BLOCKS[:10]))
    # pod-2 has two branches beside it in the row of block 1.
    await other.apply(stored(others, [900, 901], seq=2, after=1))

    found = await walked(store, stream)

    assert found is not None
    assert found.worths == {
        "pod-1": plain(200, 100, 190),
        "pod-2": plain(105, 5, 95),
        "pod-3": plain(10, 0, 0),
    }
    assert (found.share, found.decisions, found.prefixes) == (1.0, 0, [])
    assert 0 < await redis.pttl(keys.worth(1)) <= 1000 * 1300


@SHARDS
async def test_engines_that_have_ended_are_not_in_the_next_result(
    store: Store, redis: Redis, stream: Stream, shards: int
) -> None:
    other = await stream_of(store, redis, registration("pod-2"))
    (gpu,), (others,) = await stream.begin("0 GPU"), await other.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    await other.apply(stored(others, BLOCKS[:100]))
    await other.end()

    found = await walked(store, stream)

    assert found is not None
    assert found.worths == {"pod-1": plain(200, 200, 200)}


async def test_what_prompts_ask_for_is_worth_more_and_comes_first(store: Store, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS[:40]))

    found = await walked(store, stream, [BLOCKS[:3], BLOCKS[:2], [77], []])

    assert found is not None
    assert found.worths == {"pod-1": CacheWorth(40 * SIZE, 40 * SIZE, 40 * SIZE, 45 * SIZE, 45 * SIZE)}
    assert found.prefixes == [
        PrefixUse(None, SIZE, 2, (1, 2)),
        PrefixUse(0, SIZE, 1, (3,)),
        PrefixUse(None, SIZE, 1, (77,)),
    ]
    assert found.decisions == 3


async def test_rows_of_many_engines_give_the_loop_turns(
    monkeypatch: pytest.MonkeyPatch, store: Store, redis: Redis, stream: Stream
) -> None:
    """A row with a thousand holders takes two milliseconds, and a step has 64 rows."""
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*apart(gpu, range(1, 41)))
    strangers = b"".join(b" %d:1" % holder for holder in range(gpu + 1, gpu + 300))
    for block in range(1, 41):
        await redis.append(stream.key(block), strangers)
    rows = most = 0
    count = Tally.count

    def counted(tally: Tally, row: Row) -> int:
        nonlocal rows, most
        rows += 1
        most = max(most, rows)
        return count(tally, row)

    async def turn() -> None:
        nonlocal rows
        while True:
            rows = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(Tally, "count", counted)
    turning = asyncio.create_task(turn())
    found = await walked(store, stream)
    turning.cancel()
    assert found is not None
    assert found.worths == {"pod-1": plain(40, 40, 40)}
    assert 0 < most <= 1 + worth._BYTES_A_TURN // len(strangers)


async def test_there_is_one_walk_at_a_time_and_then_a_pause(store: Store, redis: Redis, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*apart(gpu, range(1, 200)))
    first, second = (store.valuations.walk(stream.entry) for _ in range(2))
    assert await anext(first) > 0
    assert [blocks async for blocks in second] == []
    await redis.set(keys.valuing(1), "0" * 16, px=30_000)  # as if it had stopped for longer than it holds
    assert [blocks async for blocks in first] == []
    assert await store.valuations.read([1]) == {}

    assert await walked(store, stream) is not None
    assert [blocks async for blocks in store.valuations.walk(stream.entry)] == []


async def test_a_walk_without_redis_says_so_and_keeps_the_last_result(
    store: Store, client: RedisClient, stream: Stream
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    before = await walked(store, stream)
    with pytest.raises(StoreUnavailable):
        await walked(Store(Dying(client, "keep_worth", call=2)), stream)

    assert await store.valuations.read([1]) == {1: before}


async def test_rows_and_results_that_cannot_be_read_are_left_out(store: Store, redis: Redis, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*apart(gpu, range(1, 11)))
    await redis.set(stream.key(3), b"a stranger wrote this")
    await redis.delete(stream.key(4))

    found = await walked(store, stream)

    assert found is not None
    assert found.worths == {"pod-1": plain(8, 8, 8)}
    await redis.set(stream.key(3), b"%016x0 1:1" % 3)
    for value in (b"[]", b"{}", b'{"format":2}', b"no JSON", b'{"format":1,"ended":0,"seconds":0,"share":1}'):
        await redis.set(keys.worth(1), value, px=60_000)
        assert await store.valuations.read([1]) == {}, value
    await redis.delete(keys.worth(1))


@SHARDS
async def test_a_large_group_is_estimated_from_a_sample(
    monkeypatch: pytest.MonkeyPatch, store: Store, stream: Stream, shards: int
) -> None:
    """Names of blocks are hashes, so these are spread as hashes are."""
    monkeypatch.setattr(worth, "ROWS_MAX", 500)
    (gpu,) = await stream.begin("0 GPU")
    spread = [at * 0x9E3779B97F4A7C15 % 2**64 for at in range(1, 2001)]
    for at in range(0, 2000, 500):
        await stream.apply(*apart(gpu, spread[at : at + 500], seq=1 + at))
    read: list[Row] = []
    count = Tally.count

    def counted(tally: Tally, row: Row) -> int:
        read.append(row)
        return count(tally, row)

    monkeypatch.setattr(Tally, "count", counted)

    found = await walked(store, stream)

    assert found is not None
    assert 0 < len(read) <= 550
    assert found.share < 0.26
    assert found.worths["pod-1"].tokens == pytest.approx(2000 * SIZE, rel=0.1)


@pytest.mark.parametrize("entries", [0, 1, 65_536, 65_537, 10**6, 2 * 10**6, 10**8, 10**10])
def test_a_sample_has_no_more_rows_than_fit(entries: int) -> None:
    match, share = sample(entries, 65_536)
    assert entries * share <= 65_536
    assert 2 * entries * share >= min(entries, 65_536), "and not much fewer"
    assert (match == "") == (share == 1.0)
    assert sample(2 * 10**6, 65_536) == ("0[01234567]*", 8 / 256)


async def test_groups_are_asked_for_and_forgotten(store: Store, redis: Redis) -> None:
    await store.valuations.asked.add([1, 2])
    assert await store.valuations.asked.read() == {1, 2}
    await redis.hset(keys.VALUED, "1", "1")
    assert await store.valuations.asked.read() == {2}
    await store.valuations.asked.add([2])
    assert await redis.hlen(keys.VALUED) == 1
