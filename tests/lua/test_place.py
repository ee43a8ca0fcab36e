"""place, match_placements and drop_placements: what is noted, for how long, who is found by it, and the bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from waymark.store import speculative
from waymark.store.speculative import BLOCKS_PER_CALL
from waymark.store.store import Store

HOUR = 3_600_000
DROPPED = f"wm:{{1}}:placement:{2**64 - 1:016x}"


async def place(store: Store, blocks: range, holder: str = "a", ms: int = HOUR, blocks_max: int = 1000) -> int:
    return await store.placements.place(1, list(blocks), holder, milliseconds=ms, blocks_max=blocks_max)


async def match(store: Store, blocks: Sequence[int]) -> dict[str, int]:
    return await store.placements.match(1, blocks, until=asyncio.get_running_loop().time() + 10)


async def holders(store: Store, blocks: range) -> list[set[str]]:
    return [set(await match(store, [block])) for block in blocks]


async def test_each_block_has_the_holders_that_were_sent_it(store: Store, redis: Redis) -> None:
    assert await holders(store, range(2)) == [set(), set()]
    await place(store, range(3))
    await place(store, range(2), "http://10.0.0.2:8000")
    both = {"a", "http://10.0.0.2:8000"}
    assert await holders(store, range(4)) == [both, both, {"a"}, set()]
    assert 0 < await redis.pttl("wm:{1}:placement:0000000000000002") <= HOUR
    assert 0 < await redis.pttl("wm:{1}:placements") <= HOUR


async def test_a_note_ends_by_its_time_and_a_shorter_one_shortens_no_other(store: Store, redis: Redis) -> None:
    await place(store, range(2), "long")
    await place(store, range(1, 3), "short", ms=1)

    async def is_over() -> bool:
        return await holders(store, range(3)) == [{"long"}, {"long"}, set()]

    await wait_until(is_over, "the short one is over")
    await place(store, range(9, 10))
    assert await redis.zrange("wm:{1}:placements", 0, -1) == [b"%016x" % n for n in (0, 1, 9)]


async def test_the_oldest_go_where_a_group_has_too_many(store: Store, redis: Redis) -> None:
    many = 2 * BLOCKS_PER_CALL + 50
    await place(store, range(40), ms=HOUR // 2)
    await place(store, range(40, 80))
    await place(store, range(20), ms=HOUR)  # renewed, so no longer the oldest
    assert await place(store, range(100, 100 + many), blocks_max=many + 60) == 20
    assert await redis.zcard("wm:{1}:placements") == many + 60
    found = await holders(store, range(80))
    assert [block for block, who in enumerate(found) if not who] == list(range(20, 40))


async def test_what_was_renewed_meanwhile_is_not_dropped(store: Store) -> None:
    await place(store, range(2), ms=1000)
    names = [f"wm:{{1}}:placement:{n:016x}" for n in range(2)]
    last = (await store.client.several([("ZRANGE", "wm:{1}:placements", 0, 0, "WITHSCORES")]))[0]
    score = float(last[0][1] if isinstance(last[0], list | tuple) else last[1])
    await place(store, range(1), ms=HOUR)
    outcome = await store.scripts.run(
        "drop_placements", placements="wm:{1}:placements", placement=names, before=f"{score:.0f}"
    )
    assert outcome.numbers == (1,)
    assert await holders(store, range(2)) == [{"a"}, set()]


async def test_a_block_has_a_bound_of_holders_and_those_whose_time_is_over_make_room(
    store: Store, redis: Redis
) -> None:
    name = ["wm:{1}:placement:0000000000000007"]
    for holder, ms in (("a", 1), ("b", HOUR)):
        await store.scripts.run(
            "place", placements="wm:{1}:placements", placement=name, holder=holder, milliseconds=ms, holders_max=2
        )

    async def has_room() -> bool:
        await store.scripts.run(
            "place", placements="wm:{1}:placements", placement=name, holder="c", milliseconds=HOUR, holders_max=2
        )
        return await redis.hkeys(name[0]) == [b"b", b"c"]

    await wait_until(has_room, "the first one is over")
    await store.scripts.run(
        "place", placements="wm:{1}:placements", placement=name, holder="d", milliseconds=HOUR, holders_max=2
    )
    assert await redis.hkeys(name[0]) == [b"b", b"c"]
    await store.scripts.run(
        "place", placements="wm:{1}:placements", placement=name, holder="b", milliseconds=HOUR, holders_max=2
    )
    assert speculative._HOLDERS_MAX > 2


async def test_each_holder_has_the_blocks_that_it_was_sent_from_the_first_on(store: Store, redis: Redis) -> None:
    await place(store, range(60), "whole")
    await place(store, range(40), "half")
    await place(store, range(1), "one")
    await place(store, range(1, 50), "not the first")
    await redis.hdel(f"wm:{{1}}:placement:{30:016x}", "half")
    assert await match(store, range(70)) == {"whole": 60, "half": 30, "one": 1}
    assert await match(store, []) == {}
    assert await match(store, range(5000, 5010)) == {}


async def test_a_long_prompt_is_walked_in_several_calls(
    store: Store, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculative, "_MATCHED_PER_CALL", 7)
    await place(store, range(30), "whole")
    await place(store, range(14), "up to a call's end")
    await place(store, range(15), "beyond it")
    assert await match(store, range(40)) == {"whole": 30, "up to a call's end": 14, "beyond it": 15}


async def test_a_call_looks_at_few_fields_and_the_next_goes_on_from_there(store: Store) -> None:
    for holder in "abc":
        await place(store, range(10), holder)
    await place(store, range(10, 20), "b")
    names = [f"wm:{{1}}:placement:{n:016x}" for n in range(20)]

    async def matches(placement: list[str], fields_max: int, holder: str = "") -> tuple[int, dict[bytes, int]]:
        _, count, found = await store.scripts.reply(
            "match_placements", dropped=DROPPED, placement=placement, fields_max=fields_max, holder=list(holder)
        )
        return count, dict(zip(found[::2], found[1::2], strict=True))

    assert await matches(names, 7) == (3, {b"a": 3, b"b": 3, b"c": 3})
    assert await matches(names[3:], 22, "abc") == (8, {b"a": 7, b"b": 8, b"c": 7})
    assert await matches(names[11:], 22, "b") == (9, {b"b": 9})
    # More holders than one call looks at, which only another program can have written: those are left out.
    assert await matches(names, 2) == (1, {b"a": 1, b"b": 1})


async def test_what_others_wrote_under_the_name_of_a_block_has_no_holders(store: Store, redis: Redis) -> None:
    await place(store, range(4))
    await redis.set("wm:{1}:placement:0000000000000002", "text")
    await redis.hset("wm:{1}:placement:0000000000000001", "b", "no number")
    await redis.hset("wm:{1}:placement:0000000000000000", "b", "no number")
    assert await match(store, range(4)) == {"a": 2}
    assert await match(store, [2, 3]) == {}
    await redis.flushall()
