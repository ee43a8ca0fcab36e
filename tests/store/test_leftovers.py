"""What shard 0 has forgotten, and another shard has not: it is found by that shard's fence, and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, begins, blocks_of, hgetall, registration, removed, snapshot, stored, stream_of
from tests.store.flow import searched, swept
from waymark.store import keys
from waymark.store.store import Store

pytestmark = pytest.mark.parametrize("shards", [3])
BLOCKS = list(range(1, 97))
"""Of three rows, one on each shard."""
MANY = 40
"""More holders than any list of a few would have."""


async def keep(redis: Redis, tag: str) -> dict[bytes, bytes]:
    """All keys of a shard, as they are now."""
    names: Any = await redis.keys(f"wm:{{{tag}}}:*")
    return {name: value for name in names if (value := await redis.dump(name)) is not None}


async def come_back(redis: Redis, tag: str, kept: dict[bytes, bytes]) -> None:
    """A shard is as it was then."""
    await redis.delete(*await redis.keys(f"wm:{{{tag}}}:*"))
    for name, value in kept.items():
        await redis.restore(name, 0, value)


async def begun(stream: Stream, names: Sequence[str]) -> list[int]:
    holders = await stream.begin(*names)
    for seq, holder in enumerate(holders, 1):
        await stream.apply(stored(holder, BLOCKS, seq=seq))
    return holders


async def check_empty(redis: Redis, shards: int) -> None:
    """Nothing of anybody is left but the marks by which late calls are refused."""
    assert await blocks_of(redis) == {}
    for shard in range(shards):
        assert set(await hgetall(redis, keys.fence(1, shard))) <= {b"holder"}
    for engine in await redis.keys("*:engine:*"):
        assert await redis.pttl(engine) > 0


async def test_shard_0_comes_back_empty_while_holders_are_to_be_swept(
    store: Store, redis: Redis, stream: Stream, shards: int
) -> None:
    await begun(stream, [f"0 GPU {number:016x}" for number in range(MANY)])
    await store.registry.unregister([stream.grant.claim.registration.name])
    await redis.delete(*await redis.keys("wm:{1}:*"))
    await searched(store, stream.entry)
    await swept(store, stream.entry)
    await check_empty(redis, shards)


async def test_shard_0_and_the_registrations_come_back_empty(
    store: Store, redis: Redis, stream: Stream, shards: int
) -> None:
    """The publisher is registered again, under another id, and has its new blocks only."""
    await begun(stream, ["0 GPU", "0 CPU"])
    await redis.delete(*await redis.keys("wm:{1}:*"), keys.PUBLISHERS)
    again = await stream_of(store, redis)
    assert again.grant.publisher != stream.grant.publisher
    (gpu,) = await begun(again, ["0 GPU"])
    await searched(store, again.entry)
    await swept(store, again.entry)
    assert await blocks_of(redis) == {block: {gpu} for block in BLOCKS}
    for shard in range(shards):
        fence = await hgetall(redis, keys.fence(1, shard))
        assert {int(name.rpartition(b":")[2]) for name in fence if name != b"holder"} <= {gpu, again.grant.publisher}


async def test_another_shard_comes_back_with_what_was_swept(
    store: Store, redis: Redis, stream: Stream, shards: int
) -> None:
    await begun(stream, ["0 GPU"])
    kept = await keep(redis, "1.2")
    await store.registry.unregister([stream.grant.claim.registration.name])
    await swept(store, stream.entry)
    await come_back(redis, "1.2", kept)
    assert await blocks_of(redis) != {}
    await searched(store, stream.entry)
    await swept(store, stream.entry)
    await check_empty(redis, shards)


async def test_holders_that_live_or_will_live_stay(store: Store, redis: Redis, stream: Stream) -> None:
    (gpu,) = await begun(stream, ["0 GPU"])
    ids = await store.records.stage(stream.grant, begins(stream.grant.claim, "0 GPU"), gpu, "7" * 16)
    assert ids is not None
    await stream.apply(stored(ids[0], BLOCKS, seq=9))
    before = await snapshot(redis)
    await searched(store, stream.entry)
    assert await snapshot(redis) == before


async def test_a_holder_is_known_as_long_as_it_may_have_blocks(store: Store, redis: Redis, stream: Stream) -> None:
    (gpu,) = await begun(stream, ["0 GPU"])
    await stream.apply(removed(gpu, BLOCKS, seq=2))
    await stream.end()
    await searched(store, stream.entry)
    assert await redis.smembers(keys.dead(1)) == {b"%d" % gpu}
    assert await redis.hget(keys.fence(1, 2), f"blocks:{gpu}") == b"%d" % stream.grant.publisher
    await swept(store, stream.entry)
    assert await redis.hget(keys.fence(1, 2), f"blocks:{gpu}") is None


async def test_a_fence_that_was_raised_too_late_is_dropped(
    store: Store, redis: Redis, stream: Stream, shards: int
) -> None:
    """As by a worker that is killed right after it."""
    other = await stream_of(store, redis, registration("pod-2"))
    await store.registry.unregister([stream.grant.claim.registration.name])
    for shard in range(shards):
        await store.scripts.run(
            "raise_fence",
            fence=keys.fence(1, shard),
            publisher=stream.grant.publisher,
            token=stream.grant.token,
            first="",
        )
    await searched(store, stream.entry)
    for shard in range(shards):
        assert set(await hgetall(redis, keys.fence(1, shard))) - {b"holder"} == {b"%d" % other.grant.publisher}


@pytest.mark.parametrize("field", [b"blocks:some", b"blocks:", b"some", b"calls:x", b"blocks:12345678901234567"])
async def test_other_fields_of_a_fence_are_left_alone(store: Store, redis: Redis, stream: Stream, field: bytes) -> None:
    await redis.hset(keys.fence(1, 1), field, b"some")
    before = await snapshot(redis)
    await searched(store, stream.entry)
    assert await snapshot(redis) == before
    await redis.hdel(keys.fence(1, 1), field.decode())
