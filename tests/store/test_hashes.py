"""keep_hashes.lua: engine hashes in generations, of which the oldest goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, found_hashes
from waymark.domain.known import Spot
from waymark.domain.rows import Place
from waymark.store import keys
from waymark.store.hashes import FIND_HASHES, GENERATIONS, ReportedBlock
from waymark.store.scripts import Outcome, Scripts
from waymark.store.store import Store


def block(engine_hash: int, namespace: int = 0) -> ReportedBlock:
    return ReportedBlock(engine_hash, Spot(Place(7 * engine_hash), namespace, engine_hash % 32, 11 * engine_hash))


async def test_what_was_kept_is_found(store: Store, stream: Stream) -> None:
    blocks = [block(i) for i in range(1, 1500)] + [block(2**64 - 1 - i, namespace=5) for i in range(3)]
    blocks = [each for each in blocks if each.spot.key < 2**64 and each.spot.place.head < 2**64]
    await store.hashes.kept(stream.grant, 1_000_000).keep(blocks)
    found = await found_hashes(store, 1, [each.engine_hash for each in blocks] + [99_999])
    assert found == {each.engine_hash: each.spot for each in blocks}
    assert await store.hashes.find(2, [1]) == {}


async def test_many_are_kept_in_calls_that_are_short(
    store: Store, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them the lease of a stream is renewed, and queries have their turn."""
    sent: list[int] = []
    run = Scripts.run

    async def counting(scripts: Scripts, name: str, /, **values: Any) -> Outcome:
        if name == "keep_hashes":
            sent.append(len(values["entry"]) // 2)
        return await run(scripts, name, **values)

    monkeypatch.setattr(Scripts, "run", counting)
    await store.hashes.kept(stream.grant, 1_000_000).keep([block(i) for i in range(1, 2001)])
    assert sum(sent) == 2000
    assert max(sent) <= 512


async def test_the_oldest_go_when_there_are_too_many(redis: Redis, store: Store, stream: Stream) -> None:
    for i in range(40):
        await store.hashes.kept(stream.grant, 1000).keep([block(j) for j in range(100 * i + 1, 100 * i + 101)])
    names = await redis.keys("wm:{1}:hash:*")
    assert sum([await redis.hlen(name) for name in names]) <= 1000
    assert len(names) <= GENERATIONS
    found = await found_hashes(store, 1, list(range(1, 4001)))
    assert min(found) >= 3001
    assert set(range(3201, 4001)) <= set(found)


async def test_a_hash_that_was_kept_again_is_found_in_its_newest_generation(store: Store, stream: Stream) -> None:
    await store.hashes.kept(stream.grant, 1000).keep([block(i) for i in range(1, 101)])
    newer = ReportedBlock(5, Spot(Place(1), 0, 0, 1))
    await store.hashes.kept(stream.grant, 1000).keep([newer])
    assert await store.hashes.find(1, [5]) == {5: newer.spot}


async def test_writers_at_once_agree_on_the_newest_generation(store: Store, stream: Stream) -> None:
    await asyncio.gather(
        *(store.hashes.kept(stream.grant, 1000).keep([block(20 * i + j + 1) for j in range(20)]) for i in range(30))
    )
    assert len(await found_hashes(store, 1, list(range(1, 601)))) == 600


async def test_everything_ends_by_its_time(redis: Redis, store: Store, stream: Stream) -> None:
    await store.hashes.kept(stream.grant, 1000).keep([block(i) for i in range(1, 250)])
    for name in await redis.keys("wm:{1}:hash*"):
        assert 0 < await redis.pttl(name) <= 7 * 86_400_000


async def test_more_hashes_than_one_call_takes_are_refused(store: Store, stream: Stream) -> None:
    await store.hashes.kept(stream.grant, 1000).keep([block(1)])
    assert set(await store.hashes.find(1, range(1, FIND_HASHES + 1))) == {1}
    with pytest.raises(ValueError, match=rf"^engine_hashes has {FIND_HASHES + 1} elements"):
        await store.hashes.find(1, range(1, FIND_HASHES + 2))


async def test_a_value_that_nobody_wrote_is_no_block(redis: Redis, store: Store, stream: Stream) -> None:
    await store.hashes.kept(stream.grant, 1000).keep([block(1)])
    await redis.hset(keys.hashes(1, 0), (1).to_bytes(8, "big"), b"junk")
    assert await store.hashes.find(1, [1]) == {}
    await redis.delete(keys.hashes(1, 0))
