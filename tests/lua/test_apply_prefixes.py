"""apply_prefixes: what each change leaves, held against a plain model; times, bounds and other writers."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import Stream, registration, stream_of
from waymark.domain.prefixes import Change, PrefixChange, prefix_key
from waymark.store import keys
from waymark.store.store import Store

NAMES = [prefix_key(f"{number:x}") for number in range(6)]


class Source:
    """A stream with its two holders."""

    def __init__(self, stream: Stream, hot: int, warm: int, ttl_seconds: int = 600) -> None:
        self.stream, self.hot, self.warm, self.ttl_seconds = stream, hot, warm, ttl_seconds

    @classmethod
    async def of(cls, stream: Stream, ttl_seconds: int = 600) -> Source:
        hot, warm = await stream.begin("0 GPU", "0 DISK")
        return cls(stream, hot, warm, ttl_seconds)

    async def apply(self, *changes: tuple[int, Change, int | None]) -> int | None:
        return await self.stream.store.prefixes.apply(
            self.stream.grant,
            self.hot,
            self.warm,
            [PrefixChange(NAMES[name], change, tokens) for name, change, tokens in changes],
            ttl_seconds=self.ttl_seconds,
        )

    async def held(self, name: int = 0) -> tuple[int | None, int | None]:
        """Tokens on the device and in storage."""
        found = await read(self.stream.store, name)
        return found.get(self.hot), found.get(self.warm)


async def read(store: Store, name: int) -> dict[int, int]:
    return await store.prefixes.read(1, NAMES[name], until=asyncio.get_running_loop().time() + 5)


@pytest.fixture
async def source(stream: Stream) -> Source:
    return await Source.of(stream)


async def test_each_change_moves_an_entry_as_it_says(source: Source) -> None:
    assert await source.apply((0, Change.HOT, 100)) == 1
    assert await source.held() == (100, None)
    assert await source.apply((0, Change.DEMOTE, None)) == 1
    assert await source.held() == (None, 100)
    await source.apply((0, Change.DEMOTE, None))
    assert await source.held() == (None, 100), "what was not on the device is nowhere new"
    await source.apply((0, Change.HOT, None))
    assert await source.held() == (100, None), "an event without a count keeps the count"
    await source.apply((0, Change.WARM, 70))
    assert await source.held() == (None, 70)
    assert await source.apply((0, Change.REMOVE, None)) == 0
    assert await source.held() == (None, None)
    await source.apply((0, Change.WARM, None))
    assert await source.held() == (None, 1), "a count that nobody has told is one token"


async def test_random_changes_are_those_of_a_plain_model(source: Source, redis: Redis) -> None:
    rng = random.Random(1)
    hot: dict[int, int] = {}
    warm: dict[int, int] = {}
    for _ in range(60):
        changes = []
        for _ in range(rng.randrange(1, 9)):
            name, change = rng.randrange(len(NAMES)), rng.choice(list(Change))
            tokens = rng.choice([None, rng.randrange(1, 1000)])
            changes.append((name, change, tokens))
            had_hot, had_warm = hot.pop(name, None), warm.pop(name, None)
            match change:
                case Change.HOT:
                    hot[name] = tokens or had_warm or had_hot or 1
                case Change.WARM:
                    warm[name] = tokens or had_hot or had_warm or 1
                case Change.DEMOTE if had_hot or had_warm:
                    warm[name] = had_hot or had_warm or 0
                case Change.FORGET_HOT if had_warm:
                    warm[name] = had_warm
                case Change.FORGET_WARM if had_hot:
                    hot[name] = had_hot
        assert await source.apply(*changes) == len(hot) + len(warm)
        for name in range(len(NAMES)):
            assert await source.held(name) == (hot.get(name), warm.get(name))
    assert await redis.zcard(keys.opaque_prefixes(1, source.hot)) == len(hot)
    assert await redis.zcard(keys.opaque_prefixes(1, source.warm)) == len(warm)
    assert await redis.zcard(keys.opaque_prefixes(1)) == len(hot.keys() | warm.keys())
    # Nothing is left of a prefix that nobody holds.
    left = {key async for key in redis.scan_iter(match=b"wm:{1}:prefix:*")}
    assert left == {keys.opaque_prefix(1, NAMES[name]).encode() for name in hot.keys() | warm.keys()}


async def test_an_entry_ends_by_its_time_and_that_of_another_source_stays(store: Store, redis: Redis) -> None:
    long = await Source.of(await stream_of(store, redis, registration("pod-1")), 3600)
    short = await Source.of(await stream_of(store, redis, registration("pod-2")), 1)
    await long.apply((0, Change.HOT, 10), (1, Change.HOT, 11))
    await short.apply((0, Change.HOT, 20), (2, Change.HOT, 22))
    assert await read(store, 0) == {long.hot: 10, short.hot: 20}

    async def has_ended() -> bool:
        return await read(store, 0) == {long.hot: 10} and await read(store, 2) == {}

    await wait_until(has_ended, "the entries of a second have ended", 20)
    assert await short.apply((0, Change.REMOVE, None)) == 0
    assert await read(store, 0) == {long.hot: 10}
    assert 3000 < await redis.ttl(keys.opaque_prefix(1, NAMES[0])) <= 3600
    assert 3000 < await redis.ttl(keys.opaque_prefixes(1)) <= 3600


async def test_the_longest_time_of_a_prefix_is_that_of_its_key(store: Store, redis: Redis) -> None:
    short = await Source.of(await stream_of(store, redis, registration("pod-1")), 60)
    long = await Source.of(await stream_of(store, redis, registration("pod-2")), 3600)
    for first, second in ((short, long), (long, short)):
        await first.apply((0, Change.HOT, 1))
        await second.apply((0, Change.HOT, 2))
        assert await redis.ttl(keys.opaque_prefix(1, NAMES[0])) > 3000
        assert await read(store, 0) == {first.hot: 1, second.hot: 2}


async def test_a_worker_that_has_lost_the_stream_writes_nothing(source: Source) -> None:
    await source.stream.again()
    assert await source.apply((0, Change.HOT, 100)) is None
    assert await source.held() == (None, None)


async def test_fields_of_holders_that_have_ended_do_not_pile_up(stream: Stream, redis: Redis) -> None:
    name = keys.opaque_prefix(1, NAMES[0])
    for number in range(300):
        source = Source(stream, 1000 + 2 * number, 1001 + 2 * number, 600)
        await source.apply((0, Change.HOT, 5))
        await redis.hset(name, str(source.hot), "5 1")
    assert await redis.hlen(name) <= 64


async def test_the_oldest_entries_are_named_first(source: Source, redis: Redis) -> None:
    await source.apply(*((name, Change.HOT, 1) for name in range(3)))
    for holder, name, end in ((source.hot, 1, 5), (source.hot, 2, 7), (source.hot, 0, 8)):
        await redis.zadd(keys.opaque_prefixes(1, holder), {NAMES[name]: 2**50 + end})
    await source.apply((3, Change.WARM, 1))
    await redis.zadd(keys.opaque_prefixes(1, source.warm), {NAMES[3]: 2**50 + 6})
    oldest = await source.stream.store.prefixes.oldest(source.stream.grant, source.hot, source.warm, 30)
    assert [(each.key, each.change) for each in oldest] == [
        (NAMES[1], Change.FORGET_HOT),
        (NAMES[3], Change.FORGET_WARM),
        (NAMES[2], Change.FORGET_HOT),
    ]
