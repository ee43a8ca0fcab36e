"""sweep_holder.lua, forget_dead.lua: a dead holder leaves its blocks in bounded pieces."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, hgetall, snapshot, stored
from waymark.store import keys
from waymark.store.scripts import Outcome, Scripts, Verdict

BLOCKS = list(range(1, 41))


async def sweep(scripts: Scripts, stream: Stream, holder: int, blocks: list[int]) -> int:
    """As a piece of a holder that is dead."""
    await stream.redis.sadd(keys.dead(1), str(holder))
    outcome = await called(scripts, stream, holder, blocks)
    assert outcome.verdict is Verdict.APPLIED
    return outcome.numbers[0]


async def called(scripts: Scripts, stream: Stream, holder: int, blocks: list[int], shard: int = 0) -> Outcome:
    return await scripts.sweep_holder(
        keys.engine(1, shard, holder),
        [stream.key(block) for block in blocks],
        None if shard else keys.dead(1),
        holder,
        [b"%016x" % b for b in blocks],
    )


async def test_a_piece_leaves_other_holders_and_other_blocks(scripts: Scripts, stream: Stream) -> None:
    gpu, cpu = await stream.begin("0 GPU", "0 CPU")
    await stream.apply(stored(gpu, BLOCKS), stored(cpu, BLOCKS[:2], first=41))
    assert await sweep(scripts, stream, gpu, BLOCKS[:20]) == 20
    assert await stream.values(BLOCKS) == [b"2"] * 2 + [None] * 18 + [b"1"] * 20
    assert set(await stream.engine(gpu)) == {b"%016x" % block for block in BLOCKS[20:]}
    assert len(await stream.engine(cpu)) == 2


@pytest.mark.parametrize("blocks", [BLOCKS[:20], []], ids=["a piece", "the end"])
async def test_a_holder_that_is_not_dead_keeps_all(
    redis: Redis, scripts: Scripts, stream: Stream, blocks: list[int]
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS))
    await redis.sadd(keys.dead(1), "11", "21")
    before = await snapshot(redis)
    assert await called(scripts, stream, gpu, blocks) == (Verdict.GONE, (0,))
    assert await snapshot(redis) == before


async def test_a_shard_without_the_dead_does_not_ask(scripts: Scripts, stream: Stream) -> None:
    assert await called(scripts, stream, 1, BLOCKS[:20], shard=1) == (Verdict.APPLIED, (20,))
    assert await called(scripts, stream, 1, [], shard=1) == (Verdict.APPLIED, (0,))


async def test_the_same_piece_again_changes_nothing(redis: Redis, scripts: Scripts, stream: Stream) -> None:
    gpu, cpu = await stream.begin("0 GPU", "0 CPU")
    await stream.apply(stored(gpu, BLOCKS), stored(cpu, BLOCKS[:2], first=41))
    await sweep(scripts, stream, gpu, BLOCKS[:20])
    before = await snapshot(redis)
    assert await sweep(scripts, stream, gpu, BLOCKS[:20]) == 20
    assert await snapshot(redis) == before


async def test_an_id_that_is_part_of_another_is_left_alone(redis: Redis, scripts: Scripts, stream: Stream) -> None:
    await redis.mset({stream.key(1): b"1 10 11 21", stream.key(2): b"11", stream.key(3): b"11 111"})
    await sweep(scripts, stream, 1, [1, 2, 3])
    assert await stream.values([1, 2, 3]) == [b"10 11 21", b"11", b"11 111"]
    await sweep(scripts, stream, 11, [1, 2, 3])
    assert await stream.values([1, 2, 3]) == [b"10 21", None, b"111"]


@pytest.mark.parametrize("ids", [[1], [1, 11], [1, 11, 111], [10, 11, 21], [2, 12, 21, 121, 211], [*range(1, 130)]])
async def test_any_one_of_the_ids_leaves_the_others_as_they_are(
    redis: Redis, scripts: Scripts, stream: Stream, ids: list[int]
) -> None:
    value = " ".join(map(str, ids)).encode()
    for gone in [*ids, max(ids) + 1]:
        await redis.set(stream.key(1), value)
        await sweep(scripts, stream, gone, [1])
        left = " ".join(str(each) for each in ids if each != gone).encode()
        assert await stream.values([1]) == [left or None]


async def test_a_piece_stops_after_32_kib_of_values(redis: Redis, scripts: Scripts, stream: Stream) -> None:
    crowd = b" ".join(b"%d" % holder for holder in range(1001, 1801))
    blocks = list(range(1, 257))
    await redis.mset({stream.key(block): b"7 " + crowd for block in blocks})
    done = await sweep(scripts, stream, 7, blocks)
    assert done == 16
    assert await stream.values(blocks) == [crowd] * done + [b"7 " + crowd] * (256 - done)


async def test_without_blocks_what_is_left_of_the_engine_hash_goes(
    redis: Redis, scripts: Scripts, stream: Stream
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, BLOCKS, seq=1), stored(gpu, BLOCKS, seq=2))
    await sweep(scripts, stream, gpu, BLOCKS)
    assert len(await hgetall(redis, keys.engine(1, 0, gpu))) == 42, "copies, how many, and the mark"
    assert await sweep(scripts, stream, gpu, []) == 0
    assert not await redis.exists(keys.engine(1, 0, gpu))


async def test_a_forgotten_holder_is_no_longer_dead(redis: Redis, scripts: Scripts, stream: Stream) -> None:
    await stream.begin("0 GPU", "0 CPU")
    await stream.end()
    for was_there in (1, 0):
        assert await scripts.forget_dead(keys.dead(1), 1) == (Verdict.APPLIED, (was_there,))
        assert (await snapshot(redis))[keys.dead(1).encode()][2] == {b"2"}
