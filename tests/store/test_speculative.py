"""Speculative entries: at which depths, and what they name."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

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
