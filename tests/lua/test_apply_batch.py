"""apply_batch.lua: folded batches of one stream, exactly once and in order."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, hgetall, registration, removed, snapshot, stored, stream_of
from waymark.domain.runs import Commit, Mode, Run
from waymark.errors import StoreUnavailable
from waymark.store import index, keys
from waymark.store.scripts import Scripts, Verdict
from waymark.store.store import Store

BLOCKS = list(range(0xA0, 0xA8))


@pytest.fixture
async def gpu(stream: Stream) -> int:
    """pod-1's holder on its device: the first of its group, so its id is 1."""
    (holder,) = await stream.begin("0 GPU")
    return holder


@pytest.fixture
async def other(store: Store, redis: Redis) -> Stream:
    """pod-2's stream."""
    return await stream_of(store, redis, registration("pod-2"))


async def calls_of(redis: Redis, command: str) -> int:
    about = (await redis.info("commandstats")).get(f"cmdstat_{command}")
    return about["calls"] if about else 0


async def test_new_blocks_have_the_holder_and_an_entry_each(stream: Stream, gpu: int) -> None:
    verdict = await stream.apply(stored(gpu, BLOCKS, hashes=range(1, 9)))
    assert verdict is Verdict.APPLIED
    assert await stream.values(BLOCKS) == [b"1"] * 8
    assert await stream.engine(gpu) == {b"%016x" % h: b"%016x" % b for h, b in zip(range(1, 9), BLOCKS, strict=True)}
    assert await stream.mark(gpu) == b"1 8"
    state = await stream.store.records.read(stream.grant)
    assert state is not None
    assert (state.watermark, state.ts, state.newest_ts, state.digest) == (1, 1.0, 1.0, f"{1:016x}")


async def test_an_entry_in_a_namespace_tells_both_and_one_of_identity_nothing(stream: Stream, gpu: int) -> None:
    salted = [block ^ 0xFF00 for block in BLOCKS[:2]]
    first, second = stored(gpu, salted, ns=0xFF00, hashes=[1, 2]), stored(gpu, BLOCKS[:1], first=3, is_identity=True)
    await stream.apply(first, second)
    assert await stream.engine(gpu) == {
        b"%016x" % 1: b"%016x:%016x" % (0xFF00, BLOCKS[0]),
        b"%016x" % 2: b"%016x:%016x" % (0xFF00, BLOCKS[1]),
        b"%016x" % BLOCKS[0]: b"",
    }
    assert await stream.values(salted) == [b"1", b"1"]
    assert await stream.store.index.entries(stream.grant, {gpu: [1, 2, BLOCKS[0], 99]}) == {
        gpu: {1: (0xFF00, BLOCKS[0]), 2: (0xFF00, BLOCKS[1]), BLOCKS[0]: (0, BLOCKS[0])}
    }


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_new_blocks_are_one_msetnx_and_no_count_is_read(redis: Redis, stream: Stream, gpu: int) -> None:
    await redis.config_resetstat()
    await stream.apply(stored(gpu, list(range(1, 513))))
    assert await calls_of(redis, "msetnx") == 1
    assert await calls_of(redis, "mget") == 0
    assert await calls_of(redis, "hmget") == 2, "the fence and the record, nothing else"
    await stream.apply(stored(gpu, BLOCKS[:1], seq=2))
    assert await calls_of(redis, "mget") == 1


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_value_takes_no_more_room_than_it_needs(redis: Redis, stream: Stream, other: Stream, gpu: int) -> None:
    """Redis would store the arguments of the call before, and those were longer."""
    blocks = list(range(1, 65))
    await stream.apply(stored(gpu, blocks))
    (second,) = await other.begin("0 GPU")
    await other.apply(stored(second, blocks))
    names = [keys.block_prefix(stream.grant.group_id, 0).decode() + f"{block:016x}" for block in blocks]
    assert len({await redis.memory_usage(name) for name in names}) == 1


async def test_a_second_holder_is_merged_in_ascending_order(stream: Stream, other: Stream, gpu: int) -> None:
    eleven = [f"{rank} GPU" for rank in range(11)]
    holders = await other.begin(*eleven)
    assert holders == list(range(2, 13))
    for seq, holder in enumerate((12, 3, 9, 10, 2)):
        await other.apply(stored(holder, BLOCKS, seq=seq))
    await stream.apply(stored(gpu, BLOCKS[:4]))
    assert await stream.values(BLOCKS) == [b"1 2 3 9 10 12"] * 4 + [b"2 3 9 10 12"] * 4


async def test_a_removal_leaves_the_other_holders(stream: Stream, other: Stream, gpu: int) -> None:
    (second, third) = await other.begin("0 GPU", "0 CPU")
    await stream.apply(stored(gpu, BLOCKS))
    await other.apply(stored(second, BLOCKS), stored(third, BLOCKS[:2]))
    await other.apply(removed(second, BLOCKS[:4]))
    assert await stream.values(BLOCKS) == [b"1 3"] * 2 + [b"1"] * 2 + [b"1 2"] * 4
    await stream.apply(removed(gpu, BLOCKS))
    assert await stream.values(BLOCKS) == [b"3"] * 2 + [None] * 2 + [b"2"] * 4
    assert await stream.engine(gpu) == {}


async def test_what_was_stored_twice_is_gone_when_it_was_removed_twice(stream: Stream, gpu: int) -> None:
    await stream.apply(stored(gpu, BLOCKS, seq=1), stored(gpu, BLOCKS[:2], seq=2), stored(gpu, BLOCKS[:1], seq=3))
    copies = {key: count for key, count in (await stream.engine(gpu)).items() if key.startswith(b"*")}
    assert copies == {b"*%016x" % BLOCKS[0]: b"3", b"*%016x" % BLOCKS[1]: b"2"}
    await stream.apply(removed(gpu, BLOCKS[:3], seq=4))
    assert await stream.values(BLOCKS[:3]) == [b"1", b"1", None]
    await stream.apply(removed(gpu, BLOCKS[:2], seq=5))
    assert await stream.values(BLOCKS[:2]) == [b"1", None]
    await stream.apply(removed(gpu, BLOCKS[:1], seq=6), removed(gpu, BLOCKS[3:], seq=7))
    assert await stream.values(BLOCKS) == [None] * 8
    assert await stream.engine(gpu) == {}


@pytest.mark.parametrize(
    ("mode", "is_whole", "left", "entries"),
    [
        pytest.param("count", False, b"1", 1, id="a-count-goes-down-by-one"),
        pytest.param("set", False, None, 0, id="a-set-has-it-or-not"),
        pytest.param("all", False, None, 0, id="a-count-not-trusted-goes-at-once"),
        pytest.param("count", True, None, 0, id="leaving-the-block-takes-every-copy"),
    ],
)
async def test_a_removal_after_three_stores(
    stream: Stream, gpu: int, mode: Mode, is_whole: bool, left: bytes | None, entries: int
) -> None:
    for seq in (1, 2, 3):
        await stream.apply(stored(gpu, BLOCKS[:1], seq=seq), mode="set" if mode == "set" else "count")
    await stream.apply(removed(gpu, BLOCKS[:1], seq=4, is_whole=is_whole), mode=mode)
    assert await stream.values(BLOCKS[:1]) == [left]
    names = (await stream.engine(gpu)).keys()
    assert len([name for name in names if not name.startswith(b"*")]) == entries
    assert [name for name in names if name.startswith(b"*")] == ([b"*%016x" % BLOCKS[0]] if left else [])


async def test_a_removal_of_what_is_not_there_changes_no_block(stream: Stream, other: Stream, gpu: int) -> None:
    (second,) = await other.begin("0 GPU")
    await other.apply(stored(second, BLOCKS[:4]))
    await stream.apply(removed(gpu, BLOCKS, seq=1))
    assert await stream.values(BLOCKS) == [b"2"] * 4 + [None] * 4
    assert await stream.engine(gpu) == {}


async def test_runs_of_one_call_see_each_other(stream: Stream, gpu: int) -> None:
    (cpu,) = await stream.begin("0 CPU")
    await stream.apply(
        stored(gpu, BLOCKS, first=1),
        removed(gpu, BLOCKS[:6], seq=1, first=9),
        stored(cpu, BLOCKS[4:], first=15),
        stored(gpu, BLOCKS[:1], first=19),
    )
    assert await stream.values(BLOCKS) == [b"1"] + [None] * 3 + [b"2"] * 2 + [b"1 2"] * 2
    assert (await stream.mark(gpu), await stream.mark(cpu)) == (b"1 19", b"1 18")


async def test_the_same_call_twice_changes_nothing(redis: Redis, stream: Stream, gpu: int) -> None:
    runs = stored(gpu, BLOCKS, seq=1), stored(gpu, BLOCKS, seq=2), removed(gpu, BLOCKS[:4], seq=3)
    assert await stream.apply(*runs) is Verdict.APPLIED
    before = await snapshot(redis)
    assert await stream.apply(*runs) is Verdict.STALE
    assert await snapshot(redis) == before


async def test_a_longer_fold_goes_on_where_the_shorter_one_ended(stream: Stream, gpu: int) -> None:
    await stream.apply(stored(gpu, BLOCKS[:4], seq=1), stored(gpu, BLOCKS[:4], seq=2))
    await stream.apply(stored(gpu, BLOCKS[:4], seq=1), stored(gpu, BLOCKS[:4], seq=2), stored(gpu, BLOCKS[:4], seq=3))
    copies = {count for key, count in (await stream.engine(gpu)).items() if key.startswith(b"*")}
    assert copies == {b"3"}
    assert await stream.mark(gpu) == b"3 4"


async def test_a_batch_goes_on_behind_its_mark_where_positions_have_holes(
    stream: Stream, scripts: Scripts, gpu: int
) -> None:
    """As on a shard that has some of the blocks only: positions 2, 5 and 9 of the batch."""

    async def apply(positions: str, blocks: list[int]) -> None:
        n = len(blocks)
        await scripts.apply_batch(
            keys.fence(1, 0),
            [keys.engine(1, 0, gpu)],
            [stream.key(block) for block in blocks],
            None,
            stream.grant.publisher,
            stream.grant.token,
            *("", "", "", "", ""),
            [gpu, "count"],
            [],
            ["+", 1, 7, int(positions.split(",")[0]), positions, "same", n],
        )

    await apply("2,5", BLOCKS[:2])
    assert await stream.mark(gpu) == b"7 5"
    await apply("2,5,9", BLOCKS[:3])
    assert await stream.mark(gpu) == b"7 9"
    assert await stream.values(BLOCKS[:3]) == [b"1"] * 3
    assert not [key for key in await stream.engine(gpu) if key.startswith(b"*")], "nothing was counted twice"


@pytest.mark.parametrize("why", ["an-older-token", "a-newer-record", "no-record", "no-fence"])
async def test_who_is_fenced_writes_nothing(redis: Redis, stream: Stream, gpu: int, why: str) -> None:
    await stream.apply(stored(gpu, BLOCKS[:4], seq=1))
    match why:
        case "an-older-token":
            await stream.again()
        case "a-newer-record":
            await stream.store.scripts.take_lease(
                stream.grant.lease, stream.grant.record, "", "0" * 16, "worker-2", 1000, 0, "1"
            )
        case "no-record":
            await redis.delete(stream.grant.record)
        case _:
            await stream.store.scripts.drop_fence(keys.fence(1, 0), stream.grant.publisher, stream.grant.token)
    before = await snapshot(redis)
    assert await stream.apply(stored(gpu, BLOCKS, seq=2), removed(gpu, BLOCKS[:2], seq=3)) is Verdict.FENCED
    assert await snapshot(redis) == before


async def test_what_is_stale_writes_nothing(redis: Redis, stream: Stream, gpu: int) -> None:
    await stream.apply(stored(gpu, BLOCKS[:4], seq=5))
    before = await snapshot(redis)
    for seq in (4, 5):
        assert await stream.apply(stored(gpu, BLOCKS, seq=seq), removed(gpu, BLOCKS[:2], seq=seq)) is Verdict.STALE
    assert await snapshot(redis) == before


async def test_a_batch_without_blocks_moves_the_watermark(stream: Stream) -> None:
    assert await stream.apply(watermark=12) is Verdict.APPLIED
    assert await stream.watermark() == 12


async def test_a_fold_over_the_watermark_applies_only_what_is_above_it(stream: Stream, gpu: int) -> None:
    await stream.apply(watermark=2)
    await stream.apply(stored(gpu, BLOCKS[:4], seq=2), stored(gpu, BLOCKS[4:], seq=3))
    assert await stream.values(BLOCKS) == [None] * 4 + [b"1"] * 4


async def test_seqs_of_64_bits_keep_every_digit_that_a_double_has(stream: Stream, gpu: int) -> None:
    seq = 2**53 - 1
    await stream.apply(stored(gpu, BLOCKS, seq=seq))
    assert await stream.watermark() == seq
    assert await stream.mark(gpu) == b"%d 8" % seq


async def test_a_call_stops_after_64_kib_of_values_and_says_how_far_it_came(
    redis: Redis, stream: Stream, gpu: int
) -> None:
    blocks = list(range(1, 513))
    crowd = b" ".join(b"%d" % holder for holder in range(1001, 1801))
    await redis.mset({stream.key(block): crowd for block in blocks})
    replies = stream.recorded()
    assert await stream.apply(stored(gpu, blocks)) is Verdict.APPLIED

    done = [outcome.numbers[0] for _, outcome in replies]
    assert sum(done) == 512
    bound = 65536 // len(crowd) + 1
    assert all(bound <= n <= bound + 16 for n in done[:-1]), "a piece of 16 blocks more than the bound at most"
    assert await stream.values(blocks) == [b"1 " + crowd] * 512
    assert len(await stream.engine(gpu)) == 512
    assert await stream.mark(gpu) == b"1 512"
    assert await stream.watermark() == 1

    replies.clear()
    await stream.apply(removed(gpu, blocks))
    assert len(replies) > 10
    assert await stream.values(blocks) == [crowd] * 512
    assert await stream.engine(gpu) == {}


async def test_after_a_piece_the_mark_is_exact_and_the_watermark_has_not_moved(
    redis: Redis, stream: Stream, scripts: Scripts, gpu: int
) -> None:
    blocks = list(range(1, 101))
    crowd = b" ".join(b"%d" % holder for holder in range(1001, 1801))
    await redis.mset({stream.key(block): crowd for block in blocks})
    outcome = await scripts.apply_batch(
        keys.fence(1, 0),
        [keys.engine(1, 0, gpu)],
        [stream.key(block) for block in blocks],
        stream.grant.record,
        stream.grant.publisher,
        stream.grant.token,
        1,
        *("", "", "0" * 16, ""),
        [gpu, "count"],
        [gpu, 5],
        ["+", 1, 1, 1, "", "same", 100],
    )
    done = outcome.numbers[0]
    assert 0 < done < 100
    assert await stream.mark(gpu) == b"1 %d" % done
    assert await stream.watermark() is None
    record = await hgetall(redis, stream.grant.record)
    assert not [name for name in record if name.startswith(b"event:")]
    assert await stream.values(blocks) == [b"1 " + crowd] * done + [crowd] * (100 - done)
    await stream.apply(stored(gpu, blocks, is_identity=True))
    assert await stream.values(blocks) == [b"1 " + crowd] * 100
    assert not [key for key in await stream.engine(gpu) if key.startswith(b"*")], "nothing was counted twice"


async def test_only_the_last_call_of_an_apply_moves_the_watermark(
    stream: Stream, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "CALL_BLOCKS", 3)
    seen: list[int | None] = []
    original = Scripts.apply_batch

    async def looked_at(self: Scripts, *args: object) -> object:
        seen.append(await stream.watermark())
        return await original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Scripts, "apply_batch", looked_at)
    await stream.apply(stored(gpu, BLOCKS, seq=1), stored(gpu, BLOCKS, seq=2))
    assert seen == [None] * 6
    assert await stream.watermark() == 2


async def test_more_blocks_than_one_unpack_can_hold(stream: Stream, gpu: int) -> None:
    blocks = list(range(1, 8201))
    replies = stream.recorded()
    await stream.apply(stored(gpu, blocks))
    assert len(replies) == 17
    assert set(await stream.values(blocks)) == {b"1"}
    found = await stream.store.index.entries(stream.grant, {gpu: [*blocks, 9999]})
    assert found == {gpu: {block: (0, block) for block in blocks}}
    await stream.apply(removed(gpu, blocks))
    assert set(await stream.values(blocks)) == {None}


async def test_a_call_of_more_than_7999_values_in_many_runs(
    stream: Stream, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "CALL_BLOCKS", 100_000)
    runs = [stored(gpu, range(1 + 400 * i, 401 + 400 * i), first=1 + 400 * i) for i in range(21)]
    replies = stream.recorded()
    await stream.apply(*runs)
    assert [outcome.numbers for _, outcome in replies] == [(8400,)]
    assert len(await stream.engine(gpu)) == 8400


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_out_of_memory_refuses_the_whole_call(redis: Redis, stream: Stream, gpu: int) -> None:
    await stream.apply(stored(gpu, BLOCKS, seq=1), stored(gpu, BLOCKS[:4], seq=2))
    before = await snapshot(redis)
    news = removed(gpu, BLOCKS, seq=3), stored(gpu, range(1, 9), seq=4), stored(gpu, BLOCKS, seq=5)
    await redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable):
            await stream.apply(*news)
        assert await snapshot(redis) == before
    finally:
        await redis.config_set("maxmemory", "0")
    assert await stream.apply(*news) is Verdict.APPLIED
    assert await stream.values(BLOCKS) == [b"1"] * 8
    assert await stream.watermark() == 5


@pytest.mark.parametrize("shards", [1, 3])
async def test_behind_what_redis_has_lost_nothing_is_written(redis: Redis, stream: Stream, gpu: int) -> None:
    """Batch 6 was acknowledged, and is not there any more: as after a failover. Batch 7 would hide that."""
    run: Run = stored(gpu, range(1, 10), seq=7)
    before = await snapshot(redis)
    for known in (6, 0):
        commit = Commit(7, None, None, "0" * 16, before=known)
        assert await stream.store.index.apply(stream.grant, [run], {gpu: "set"}, commit) is Verdict.FENCED
    assert await snapshot(redis) == before
    await stream.apply(stored(gpu, range(20, 30), seq=6))
    commit = Commit(7, None, None, "0" * 16, before=6)
    for _ in range(2):  # the second time as after a lost reply
        await stream.store.index.apply(stream.grant, [run], {gpu: "set"}, commit)
        assert await stream.watermark() == 7
        assert await stream.values(range(1, 10)) == [b"1"] * 9


@pytest.mark.parametrize("shards", [3])
async def test_each_shard_has_its_own_mark_and_learns_of_new_holders(redis: Redis, stream: Stream, gpu: int) -> None:
    blocks = [3, 6, 7, 9, 10]  # none on shard 2
    await stream.apply(stored(gpu, blocks))
    assert [await stream.mark(gpu, shard) for shard in range(3)] == [b"1 4", b"1 5", None]
    assert await stream.values(blocks) == [b"1"] * 5
    highest = [(await hgetall(redis, keys.fence(1, shard))).get(b"holder") for shard in range(3)]
    assert highest == [b"1", b"1", None]


@pytest.mark.parametrize("shards", [3])
async def test_a_fence_on_one_shard_holds_the_watermark_back(redis: Redis, stream: Stream, gpu: int) -> None:
    await stream.store.scripts.raise_fence(keys.fence(1, 1), stream.grant.publisher, "9." + "0" * 16)
    commit = Commit(1, None, None, "0" * 16)
    run: Run = stored(gpu, range(1, 10))
    assert await stream.store.index.apply(stream.grant, [run], {gpu: "set"}, commit) is Verdict.FENCED
    assert await stream.watermark() is None
    assert await stream.values([1, 4, 7]) == [None] * 3
