"""Reader: few round trips, exact answers, and never a row of somebody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from tests.store.factories import (
    GROUP,
    Meeting,
    Stream,
    begins,
    hgetall,
    registration,
    removed,
    snapshot,
    stored,
    stream_of,
)
from tests.store.test_chain import value
from waymark.base.errors import StoreUnavailable
from waymark.domain.hashing import namespace
from waymark.domain.match import ConductorRow, conductor_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.store import keys, reader
from waymark.store.reader import Reader, Reading
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

CHAIN = list(range(1, 3001))
SHARDS = pytest.mark.parametrize("shards", [1, 3])


class Source:
    """A prompt's block keys, asked for piece by piece."""

    def __init__(self, blocks: Sequence[int], before: Callable[[int], None] = lambda call: None) -> None:
        self.asked: list[int] = []
        self._blocks = list(blocks)
        self._before = before

    def __call__(self, count: int) -> bytes:
        self.asked.append(count)
        self._before(len(self.asked))
        piece, self._blocks = self._blocks[:count], self._blocks[count:]
        return pack(piece)


async def read(reader: Reader, source: Source | Sequence[int], group: GroupName = GROUP) -> Reading:
    source = source if isinstance(source, Source) else Source(source)
    reading = await reader.read(group, 16, source, deadline_seconds=30.0)
    assert reading is not None
    return reading


def rows(reading: Reading) -> dict[str, ConductorRow]:
    return conductor_rows(reading.walk)


def longest(reading: Reading) -> dict[str, int]:
    return {instance: row.longest for instance, row in rows(reading).items()}


@pytest.fixture
async def held(stream: Stream) -> Stream:
    """pod-1 has the whole chain on its device, and its first ten blocks on the host."""
    gpu, cpu = await stream.begin("0 GPU", "0 CPU")
    await stream.apply(stored(gpu, CHAIN), stored(cpu, CHAIN[:10], first=3001))
    return stream


@SHARDS
async def test_a_chain_is_walked_in_a_small_portion_then_in_large_ones(store: Store, held: Stream, shards: int) -> None:
    source = Source(CHAIN)
    reading = await read(store.reader, source)
    # A walk that goes on beyond the first portion mostly goes on for long: a third size in between costs a round trip.
    assert source.asked == [129, 2048, 2048], "one beyond the portion says whether the chain goes on"
    assert longest(reading) == {"pod-1": 3000}
    assert rows(reading)["pod-1"].media == {"GPU": 3000, "CPU": 10}
    assert (reading.blocks, reading.is_partial) == (3000, False)
    assert reading.round_trips == 3 + 1, "the table, once"
    assert (await read(store.reader, CHAIN)).round_trips == 3


@SHARDS
async def test_a_walk_ends_at_the_first_block_that_nobody_has(client: RedisClient, held: Stream, shards: int) -> None:
    for hole in (0, 1, 31, 32, 127, 128, 129, 2175, 2176):
        prompt = [*CHAIN[:hole], 9999, *CHAIN[hole + 1 :]]
        reader, source = Store(client).reader, Source(prompt)
        await read(reader, [])
        reading = await read(reader, source)
        assert longest(reading) == {"pod-1": hole}
        assert reading.round_trips == len(source.asked) == (1 if hole < 128 else 2 if hole < 2176 else 3)


async def test_a_walk_ends_where_no_instance_goes_on(store: Store, redis: Redis, held: Stream) -> None:
    """Blocks beyond are held, but by one that does not have the beginning."""
    other = await stream_of(store, redis, registration("pod-2"))
    (gpu,) = await other.begin("0 GPU")
    await other.apply(stored(gpu, [*CHAIN[:64], *range(5000, 5200)]), removed(gpu, CHAIN[40:64]))
    source = Source([*CHAIN[:64], *range(5000, 6000)])
    reading = await read(store.reader, source)
    assert longest(reading) == {"pod-1": 64, "pod-2": 40}
    assert source.asked == [129]


@SHARDS
async def test_an_empty_prompt_has_a_row_for_everybody(store: Store, held: Stream, shards: int) -> None:
    reading = await read(store.reader, [])
    assert longest(reading) == {"pod-1": 0}
    assert rows(reading)["pod-1"].ranks == {0: 0}
    assert (reading.blocks, reading.is_partial) == (0, False)


async def test_an_unknown_group_is_none_and_creates_nothing(store: Store, redis: Redis) -> None:
    assert await store.reader.read(GROUP, 16, Source(CHAIN), deadline_seconds=30.0) is None
    assert await store.reader.table(GROUP) is None
    assert await snapshot(redis) == {}


async def test_a_group_is_found_as_soon_as_it_is_registered(store: Store, redis: Redis) -> None:
    assert await store.reader.read(GROUP, 16, Source(CHAIN), deadline_seconds=30.0) is None
    await store.registry.register(registration())
    assert longest(await read(store.reader, CHAIN)) == {"pod-1": 0}


async def test_a_namespace_finds_its_own_blocks_only(store: Store, stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    salted = namespace(None, ["salt"])
    await stream.apply(stored(gpu, [block ^ salted for block in CHAIN[:50]], ns=salted))
    assert longest(await read(store.reader, CHAIN[:50])) == {"pod-1": 0}
    assert longest(await read(store.reader, [block ^ salted for block in CHAIN[:50]])) == {"pod-1": 50}


async def test_every_change_of_the_table_is_seen_by_the_next_query(store: Store, held: Stream, redis: Redis) -> None:
    reader = store.reader
    assert longest(await read(reader, CHAIN)) == {"pod-1": 3000}
    await store.registry.register(registration("pod-2"))
    assert longest(await read(reader, CHAIN)) == {"pod-1": 3000, "pod-2": 0}
    await store.records.set_lost(held.grant, is_lost=True)
    assert longest(await read(reader, CHAIN)) == {"pod-1": 0, "pod-2": 0}
    await store.records.set_lost(held.grant, is_lost=False)
    assert longest(await read(reader, CHAIN)) == {"pod-1": 3000, "pod-2": 0}
    await held.end("0 GPU")
    assert longest(await read(reader, CHAIN)) == {"pod-1": 10, "pod-2": 0}
    await store.registry.unregister([registration().name])
    assert longest(await read(reader, CHAIN)) == {"pod-2": 0}
    await store.registry.unregister([registration("pod-2").name])
    assert longest(await read(reader, CHAIN)) == {}


async def test_a_holder_that_began_during_the_query_is_counted(store: Store, client: RedisClient, held: Stream) -> None:
    """Its id is above all ids of the table that was read: the table is read again, once, and all is walked anew."""
    other = await stream_of(store, held.redis, registration("pod-2"))

    async def begin_and_store() -> None:
        (gpu,) = await other.begin("0 GPU")
        await other.apply(stored(gpu, CHAIN))

    reader = Store(Meeting(client, "ask", begin_and_store, call=3)).reader
    await read(reader, [])  # the table is known, without the new one
    reading = await read(reader, CHAIN)
    assert longest(reading) == {"pod-1": 3000, "pod-2": 0}, "no holder of pod-2 was in the first portion's table"


async def test_a_block_of_an_unknown_holder_makes_the_table_be_read_again_once(store: Store, held: Stream) -> None:
    reader = store.reader
    await read(reader, [])
    assert (await read(reader, CHAIN[:20])).round_trips == 1
    for head in (CHAIN[0], CHAIN[704]):
        await held.redis.append(held.key(head).decode(), " 77:20")
    reading = await read(reader, CHAIN[:20])
    assert (longest(reading), reading.round_trips) == ({"pod-1": 20}, 2)
    reading = await read(reader, CHAIN)
    assert (longest(reading), reading.round_trips) == ({"pod-1": 3000}, 3 + 1)


async def test_a_table_that_is_behind_its_blocks_catches_up_within_the_query(
    store: Store, client: RedisClient, held: Stream
) -> None:
    """As on a replica whose table lags: the word is the old one still, the blocks are new."""
    reader = store.reader
    await read(reader, [])
    version = (await hgetall(held.redis, keys.holders(1)))[b"version"]
    (more,) = await held.begin("1 GPU")
    await held.apply(stored(more, CHAIN[:50], seq=2))
    await held.redis.hset(keys.holders(1), "version", version.decode())
    reading = await read(reader, CHAIN)
    assert rows(reading)["pod-1"].ranks == {0: 3000, 1: 50}


async def test_another_redis_never_gives_another_tenants_row(redis: Redis, client: RedisClient) -> None:
    """It came back empty, and the groups were registered in another order: ids have changed places."""
    store, reader = Store(client), Store(client).reader
    mine, theirs = GROUP, GroupName("other", "m")
    for names, expected in ((("default", "other"), 30), (("other", "default"), 20)):
        await redis.flushall()
        for name in names:
            stream = await stream_of(store, redis, registration(f"pod-of-{name}", tenant_id=name))
            (gpu,) = await stream.begin("0 GPU")
            await stream.apply(stored(gpu, CHAIN[: 30 if name == names[0] else 20]))
        assert longest(await read(reader, CHAIN, mine)) == {"pod-of-default": expected}
        assert longest(await read(reader, CHAIN, theirs)) == {"pod-of-other": 50 - expected}


async def test_a_group_that_is_gone_with_its_redis_is_unknown(store: Store, redis: Redis, held: Stream) -> None:
    assert longest(await read(store.reader, CHAIN)) == {"pod-1": 3000}
    await redis.flushall()
    assert await store.reader.read(GROUP, 16, Source(CHAIN), deadline_seconds=30.0) is None
    await store.registry.register(registration("pod-9", model_name="another"))
    assert await store.reader.read(GROUP, 16, Source(CHAIN), deadline_seconds=30.0) is None


async def test_800_holders_of_one_prompt(store: Store, redis: Redis) -> None:
    """Ten instances of 80 ranks each; every rank has one block fewer than the one before it."""
    streams = [await stream_of(store, redis, registration(f"pod-{i}")) for i in range(10)]
    held: dict[int, list[int]] = {}
    for i, stream in enumerate(streams):
        names = [f"{rank} GPU" for rank in range(80)]
        ids = await store.records.new_life(
            stream.grant, unit="", is_restart=False, begin=begins(stream.grant.claim, *names), above=0
        )
        assert ids is not None
        held |= {holder: CHAIN[: 800 - 80 * i - rank] for rank, holder in enumerate(ids)}
    for start in range(0, 800, 32):
        piece = CHAIN[start : start + 32]
        owners = {holder: [block for block in piece if block <= len(of)] for holder, of in held.items()}
        await redis.set(streams[0].key(piece[0]).decode(), value(piece, 0, owners))
    reading = await read(store.reader, CHAIN)
    assert longest(reading) == {f"pod-{i}": 800 - 80 * i for i in range(10)}
    assert rows(reading)["pod-3"].ranks == {rank: 560 - rank for rank in range(80)}


# ---- the last block of a prompt -------------------------------------------------------------------


async def test_the_holders_of_last_blocks_are_found_in_rows_branch_rows_and_singles(
    store: Store, stream: Stream, redis: Redis
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    # Rows have 64 slots, so the last of these chains has a branch row.
    chains = [[1, *range(start, start + 30)] for start in (100, 200, 300)]
    await stream.apply(*(stored(gpu, chain, seq=seq) for seq, chain in enumerate(chains, 1)))
    absent = [[1, 2], [7, 8, 9]]
    pieces = [pack(chain) for chain in (*chains, *absent, chains[0][:1])]
    await read(store.reader, chains[0])
    found = await store.reader.last_holders(stream.entry, pieces)
    assert found == [{gpu}, {gpu}, {gpu}, set(), set(), {gpu}]
    await redis.set(stream.key(9) + b":s", value([9], 0, {gpu: [9]}))
    await store.records.keep_singles(stream.grant)
    await read(store.reader, chains[0])
    assert await store.reader.last_holders(stream.entry, [pack([9]), pack([10])]) == [{gpu}, set()]


async def test_rows_without_the_last_block_are_not_parsed(
    store: Store, held: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_row(value: bytes | None) -> None:
        raise AssertionError(f"{value!r} was parsed")

    await read(store.reader, CHAIN)
    monkeypatch.setattr("waymark.store.places.read_row", read_row)
    pieces = [pack([*CHAIN[:3], 99_999]), pack([CHAIN[32], 99_998]), pack([99_997])]
    assert await store.reader.last_holders(held.entry, pieces) == [set(), set(), set()]
    with pytest.raises(AssertionError, match="was parsed"):
        await store.reader.last_holders(held.entry, [pack(CHAIN[:32])])


# ---- deadline --------------------------------------------------------------------------------------


@pytest.fixture
def paused(redis_url: str) -> Callable[[], None]:
    """Makes the real Redis answer nobody for a while; whoever asks then waits."""

    def pause() -> None:
        with SyncRedis.from_url(redis_url, protocol=2) as admin:
            admin.client_pause(600)

    return pause


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_what_was_walked_by_the_deadline_is_answered(
    store: Store, held: Stream, paused: Callable[[], None]
) -> None:
    await read(store.reader, [])
    source = Source(CHAIN, before=lambda call: paused() if call == 3 else None)
    reading = await store.reader.read(GROUP, 16, source, deadline_seconds=0.1)
    assert reading is not None
    assert reading.is_partial
    assert longest(reading) == {"pod-1": 128 + 2048}
    assert longest(await read(store.reader, CHAIN)) == {"pod-1": 3000}, "and afterwards all is as before"


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_without_any_answer_by_the_deadline_redis_is_away(
    store: Store, held: Stream, paused: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_LAST_SECONDS", 0.05)
    paused()
    with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
        await store.reader.read(GROUP, 16, Source(CHAIN), deadline_seconds=0.05)
    for asking in (
        store.reader.table(GROUP, deadline_seconds=0.05),
        store.reader.is_tenant_known(GROUP.tenant_id, deadline_seconds=0.05),
        store.reader.last_holders(held.entry, [pack(CHAIN[:1])]),
    ):
        with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
            await asking
    assert longest(await read(store.reader, CHAIN)) == {"pod-1": 3000}
