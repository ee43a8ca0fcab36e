"""new_life.lua: holders end and begin in one step that readers see at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from redis.asyncio import Redis

from tests.store.factories import GROUP, Stream, hgetall, registration, snapshot, stored, stream_of
from waymark.store import keys
from waymark.store.records import StreamRecord
from waymark.store.scripts import Outcome, Scripts, Verdict
from waymark.store.store import Store

A, B, C = "a" * 16, "b" * 16, "c" * 16


async def state_of(stream: Stream) -> StreamRecord:
    state = await stream.store.records.read(stream.grant)
    assert state is not None
    return state


async def holders_of(stream: Stream) -> dict[str, int]:
    return {str(name): holder for name, holder in (await state_of(stream)).holders.items()}


async def dead_of(redis: Redis) -> set[bytes]:
    return set((await snapshot(redis)).get(keys.dead(1).encode(), ("set", False, set()))[2])


async def called(
    scripts: Scripts,
    stream: Stream,
    before: str,
    version: str,
    *,
    unit: str = "",
    life: str = "",
    begin: Sequence[str] = (),
    above: int = 0,
) -> Outcome:
    """The script as it is, for the holders of these names."""
    holders = [word for name in begin for word in (name, '{"a":1}')]
    return await scripts.run(
        "new_life",
        holders=keys.holders(1),
        record=stream.grant.record,
        fence=keys.fence(1, 0),
        dead=keys.dead(1),
        publisher=1,
        token=stream.grant.token,
        calls=0,
        before=before,
        version=version,
        above=above,
        unit=unit,
        life=life,
        begin=holders,
    )


async def test_ids_of_an_empty_redis_begin_where_no_earlier_one_can_have_come_to(redis: Redis, store: Store) -> None:
    """At the microseconds since 2026 by the clock of Redis; in a Redis that has ids they go on."""
    highest = 0
    for _ in range(3):
        stream = await stream_of(store, redis)
        await redis.delete(keys.fence(1, 0))
        stream = await stream.again()
        before = await microseconds(redis)
        first, second = await stream.begin("0 GPU", "0 CPU")
        assert highest < before < first <= await microseconds(redis) + 1
        assert second == first + 1 < 2**53
        assert len(str(first)) >= 14
        assert {b"%d" % first, b"%d" % second} <= (await hgetall(redis, keys.holders(1))).keys()
        highest = (await stream.begin("1 GPU"))[0]
        assert highest == second + 1
        await redis.flushall()


async def test_ids_of_a_shard_that_came_back_empty_are_above_those_of_the_others(
    redis: Redis, scripts: Scripts, stream: Stream
) -> None:
    await redis.delete(keys.fence(1, 0))
    above = 2**52
    outcome = await called(scripts, stream, "", A, begin=["0 GPU"], above=above)
    assert outcome == (Verdict.APPLIED, (1, above + 1))


async def microseconds(redis: Redis) -> int:
    seconds, fraction = await redis.time()
    return (seconds - int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())) * 1_000_000 + fraction


async def test_ids_ascend_and_a_live_name_keeps_its_own(stream: Stream) -> None:
    assert await stream.begin("0 GPU", "0 CPU") == [1, 2]
    assert await stream.begin("0 CPU", "1 GPU", "0 GPU") == [2, 3, 1]
    assert await holders_of(stream) == {"0 GPU": 1, "0 CPU": 2, "1 GPU": 3}


async def test_beginning_what_is_there_changes_only_the_version_and_is_counted(redis: Redis, stream: Stream) -> None:
    await stream.begin("0 GPU")
    before = await snapshot(redis)
    await stream.begin("0 GPU")
    after = await snapshot(redis)
    record, fence = stream.grant.record, keys.fence(1, 0)
    for key, field in ((keys.holders(1), b"version"), (record, b"turn"), (record, b"late"), (fence, b"calls:1")):
        assert before[key.encode()][2].pop(field) != after[key.encode()][2].pop(field)
    assert after == before


async def test_the_table_says_what_an_id_is(stream: Stream) -> None:
    await stream.begin("0 GPU", "3 DISK")
    table = await stream.store.reader.table(GROUP)
    assert table is not None
    assert {holder.id: (holder.instance_id, holder.dp_rank, holder.medium) for holder in table.holders.values()} == {
        1: ("pod-1", 0, "GPU"),
        2: ("pod-1", 3, "DISK"),
    }


@pytest.mark.parametrize(
    ("unit", "left"),
    [
        pytest.param("*", [], id="all"),
        pytest.param("0", ["10 GPU", "10 CPU"], id="a-rank-and-not-one-that-begins-with-its-digit"),
        pytest.param("0 GPU", ["0 CPU", "10 GPU", "10 CPU"], id="a-name-and-those-that-go-on-from-it"),
        pytest.param("0 GPU 0123456789abcdef", ["0 GPU", "0 CPU", "10 GPU", "10 CPU"], id="the-longest-name"),
        pytest.param("1", ["0 GPU", "0 GPU 0123456789abcdef", "0 CPU", "10 GPU", "10 CPU"], id="nobody"),
        pytest.param("", ["0 GPU", "0 GPU 0123456789abcdef", "0 CPU", "10 GPU", "10 CPU"], id="none"),
    ],
)
async def test_a_unit_ends(redis: Redis, stream: Stream, unit: str, left: list[str]) -> None:
    names = ["0 GPU", "0 GPU 0123456789abcdef", "0 CPU", "10 GPU", "10 CPU"]
    ids = dict(zip(names, await stream.begin(*names), strict=True))
    await stream.end(unit)
    assert await holders_of(stream) == {name: ids[name] for name in left}
    table = await stream.store.reader.table(GROUP)
    assert table is not None
    assert table.holders.keys() == {ids[name] for name in left}
    assert await dead_of(redis) == {b"%d" % ids[name] for name in names if name not in left}


async def test_an_id_is_never_used_again(stream: Stream) -> None:
    assert await stream.begin("0 GPU") == [1]
    await stream.end()
    assert await stream.begin("0 GPU") == [2]
    assert (await stream.store.registry.unregister([stream.grant.claim.registration.name])) != []
    other = await stream_of(stream.store, stream.redis, registration("pod-2"))
    assert await other.begin("0 GPU") == [3]


async def test_a_new_id_is_above_all_that_other_shards_have_seen(stream: Stream, scripts: Scripts) -> None:
    assert await called(scripts, stream, "", A, begin=["0 GPU"], above=40) == (Verdict.APPLIED, (1, 41))
    assert await called(scripts, stream, A, B, unit="*") == (Verdict.APPLIED, (2,))
    assert await called(scripts, stream, B, C, begin=["0 GPU"]) == (Verdict.APPLIED, (3, 42))


@pytest.mark.parametrize(
    ("unit", "life", "begin", "ids"),
    [
        pytest.param("", "", ["0 GPU", "0 DISK"], (1, 3), id="begins"),
        pytest.param("0", "", [], (), id="ends"),
        pytest.param("*", B, [], (), id="a-new-life"),
        pytest.param("0 GPU", "", ["0 CPU", "0 GPU"], (2, 3), id="ends-and-begins"),
    ],
)
async def test_the_same_call_again_answers_the_same_and_changes_nothing(
    redis: Redis, scripts: Scripts, stream: Stream, unit: str, life: str, begin: list[str], ids: tuple[int, ...]
) -> None:
    await called(scripts, stream, "", A, begin=["0 GPU", "0 CPU"])
    assert await called(scripts, stream, A, B, unit=unit, life=life, begin=begin) == (Verdict.APPLIED, (2, *ids))
    before = await snapshot(redis)
    assert await called(scripts, stream, A, B, unit=unit, life=life, begin=begin) == (Verdict.APPLIED, (2, *ids))
    assert await snapshot(redis) == before


@pytest.mark.parametrize(("unit", "begin"), [("0 GPU", []), ("", ["0 GPU", "0 CPU"]), ("*", ["0 GPU"])])
async def test_a_call_that_comes_late_changes_nothing(
    redis: Redis, scripts: Scripts, stream: Stream, unit: str, begin: list[str]
) -> None:
    assert (await called(scripts, stream, "", A, unit=unit, begin=begin)).is_applied
    assert (await called(scripts, stream, A, B, unit="*", life=B)).is_applied
    assert (await called(scripts, stream, B, C, begin=["0 GPU"])).is_applied
    before = await snapshot(redis)
    assert await called(scripts, stream, "", A, unit=unit, begin=begin) == (Verdict.FENCED, ())
    assert await snapshot(redis) == before


async def test_a_record_that_has_lost_the_last_change_refuses_the_next(
    redis: Redis, scripts: Scripts, stream: Stream
) -> None:
    await called(scripts, stream, "", A, begin=["0 GPU"])
    before = await snapshot(redis)
    assert await called(scripts, stream, B, C, unit="*") == (Verdict.FENCED, ())
    assert await snapshot(redis) == before


async def test_who_takes_over_need_not_know_the_last_change(redis: Redis, stream: Stream) -> None:
    assert await stream.begin("0 GPU") == [1]
    heir = await stream.again()
    assert await heir.begin("0 CPU", "0 GPU") == [2, 1]
    record = await hgetall(redis, heir.grant.record)
    assert record[b"turn"] == f"{heir.grant.token} {heir.grant.change.nonce}".encode()


async def test_a_restart_forgets_what_the_old_life_knew(stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, [1, 2], seq=7), event_ids={gpu: 3})
    await stream.store.records.write(
        stream.grant, {"flags": "extra", "main_groups": "1", "status": "active"}, {"gaps": 4}
    )
    before = await state_of(stream)
    assert (before.watermark, before.flags, before.main_groups) == (7, frozenset({"extra"}), "1")
    assert before.event_ids == {gpu: 3}
    await stream.end(is_restart=True)
    after = await state_of(stream)
    assert after.life != before.life
    assert (after.watermark, after.ts, after.newest_ts, after.digest) == (None, None, None, "")
    assert (after.flags, after.main_groups, after.event_ids, after.holders) == (frozenset(), "", {}, {})
    assert (after.status, after.counters) == ("active", {"gaps": 4}), "a publisher's counters outlive its lives"


async def test_a_cleared_rank_goes_on_with_the_life_and_its_watermark(stream: Stream) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, [1, 2], seq=7))
    before = await state_of(stream)
    await stream.end("0")
    after = await state_of(stream)
    assert (after.life, after.watermark) == (before.life, 7)


async def test_the_last_event_of_a_holder_ends_with_it(stream: Stream) -> None:
    first, second = await stream.begin("0 GPU aa", "0 GPU bb")
    await stream.apply(watermark=7, event_ids={first: 3, second: 4})
    await stream.end("0 GPU aa")
    assert (await state_of(stream)).event_ids == {second: 4}


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_more_holders_than_one_unpack_can_hold_begin_and_end(redis: Redis, stream: Stream) -> None:
    for start in range(0, 8100, 900):
        await stream.begin(*(f"0 GPU {number:016x}" for number in range(start, start + 900)))
    await stream.apply(watermark=7, event_ids=dict.fromkeys(range(1, 8101), 1))
    await stream.end("0 GPU", is_restart=True)
    assert len(await dead_of(redis)) == 8100
    assert (await hgetall(redis, keys.holders(1))).keys() == {b"group", b"version", b"incarnation", b"publisher:1"}
    assert (await state_of(stream)).event_ids == {}
