"""Speculative entries: at which depths, and what they name."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream
from waymark.store import keys
from waymark.store.speculative import depths
from waymark.store.store import Store


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (0, []),
        (1, [1]),
        (8, [8]),
        (9, [8, 9]),
        (40, [8, 12, 16, 24, 32, 40]),
        (512, [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]),
    ],
)
def test_depths_grow_by_a_third_or_a_half_and_end_with_the_prompt(blocks: int, expected: list[int]) -> None:
    assert depths(blocks) == expected


async def test_an_entry_names_a_publisher_and_junk_names_nobody(store: Store, redis: Redis) -> None:
    await redis.set(keys.spec(1, 7), b"17", px=60_000)
    await redis.set(keys.spec(1, 8), b"x", px=60_000)
    until = asyncio.get_running_loop().time() + 5
    assert await store.speculative.read(1, [7, 8, 9], until=until) == [17, None, None]
    await redis.delete(keys.spec(1, 8))


async def test_a_target_has_the_last_blocks_that_went_there_until_it_ends(
    store: Store, redis: Redis, stream: Stream
) -> None:
    publisher, until = stream.grant.publisher, asyncio.get_running_loop().time() + 60
    old, new, long = [1, 2, 3], [1, 2, 7, 8], list(range(100, 1300))

    async def has(*blocks: int) -> dict[int, int]:
        return await store.histories.match(1, [publisher, 9], blocks, until=until)

    assert await has(*old) == {}
    await store.histories.note(1, publisher, old, capacity=5)
    await store.histories.note(1, publisher, new, capacity=5)
    assert await has(*old, 4) == {publisher: 3}
    await store.histories.note(1, publisher, [20], capacity=5)
    assert await has(*old) == {publisher: 2}, "the block that went there longest ago is dropped"
    assert await has(*new) == {publisher: 4}
    await store.histories.note(1, publisher, long, capacity=1000)
    assert await has(*long) == {publisher: 1000}, "the beginning is left of a prompt"
    assert await redis.zcard(keys.history(1, publisher)) == 1000
    assert await redis.pttl(keys.history(1, publisher)) == -1
    assert await store.leases.end(stream.grant)
    await store.histories.note(1, publisher, old, capacity=5)
    assert not await redis.exists(keys.history(1, publisher))
