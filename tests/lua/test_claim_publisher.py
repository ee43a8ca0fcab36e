"""claim_publisher.lua, new_ids.lua: names are claimed once, ids are handed out once."""

from __future__ import annotations

from asyncio import gather
from typing import Any

from redis.asyncio import Redis

from tests.store.factories import hgetall, snapshot
from waymark.store import keys
from waymark.store.leases import random_nonce
from waymark.store.scripts import Scripts, Verdict

NAME, OTHER = b'["pod","t",0]', b'["pod","t",1]'
GROUP, LARGE = b'["t","m"]', b'["t","large"]'
SEED = 2**64 - 1


async def claim(
    scripts: Scripts, expected: bytes, registration: bytes, name: bytes = NAME, *, restores: str = "0"
) -> Verdict:
    return (
        await scripts.run(
            "claim_publisher",
            publishers=keys.PUBLISHERS,
            unregistered=keys.UNREGISTERED,
            changes=keys.PUBLISHERS_CHANGES,
            publisher=name,
            expected=expected,
            registration=registration,
            restores=restores,
            nonce=random_nonce(),
        )
    ).verdict


async def test_a_claim_is_written_replaced_and_taken_out(redis: Redis, scripts: Scripts) -> None:
    assert await claim(scripts, b"", b'{"a":1}') is Verdict.APPLIED
    assert await claim(scripts, b"", b'{"b":1}', OTHER) is Verdict.APPLIED
    assert await claim(scripts, b'{"a":1}', b'{"a":2}') is Verdict.APPLIED
    assert await hgetall(redis, keys.PUBLISHERS) == {NAME: b'{"a":2}', OTHER: b'{"b":1}'}
    assert await claim(scripts, b'{"a":2}', b"") is Verdict.APPLIED
    assert await hgetall(redis, keys.PUBLISHERS) == {OTHER: b'{"b":1}'}


async def test_a_claim_that_is_not_as_it_was_seen_stays(redis: Redis, scripts: Scripts) -> None:
    await claim(scripts, b"", b'{"a":1}')
    before = await snapshot(redis)
    for expected in (b"", b'{"a":2}'):
        for wanted in (b'{"a":3}', b""):
            assert await claim(scripts, expected, wanted) is Verdict.STALE
    assert await claim(scripts, b'{"b":1}', b'{"b":2}', OTHER) is Verdict.STALE
    assert await snapshot(redis) == before


async def test_a_claim_whose_reply_was_lost_is_written(redis: Redis, scripts: Scripts) -> None:
    await claim(scripts, b"", b'{"a":1}')
    before = await snapshot(redis)
    assert await claim(scripts, b"", b'{"a":1}') is Verdict.APPLIED
    assert await snapshot(redis) == before
    await claim(scripts, b'{"a":1}', b"")
    assert await claim(scripts, b'{"a":1}', b"") is Verdict.STALE, "another caller may have unregistered it"


async def test_each_change_is_noted_and_nothing_else_is(redis: Redis, scripts: Scripts) -> None:
    async def changes() -> Any:
        entries: Any = await redis.xrange(keys.PUBLISHERS_CHANGES)
        return [entry for _, entry in entries]

    for expected, wanted in [(b"", b'{"a":1}'), (b'{"a":1}', b'{"a":2}'), (b'{"a":2}', b""), (b"", b'{"a":1}')]:
        assert await claim(scripts, expected, wanted) is Verdict.APPLIED
    last = await changes()
    assert [entry[b"publisher"] for entry in last] == [NAME] * 4
    assert len({entry[b"nonce"] for entry in last}) == 4
    await claim(scripts, b"", b'{"a":1}')
    await claim(scripts, b'{"b":1}', b'{"b":2}')
    await claim(scripts, b"", b"", OTHER)
    await claim(scripts, b"", b'{"b":1}', OTHER, restores="1")
    assert await changes() == last


async def test_what_was_unregistered_is_not_put_back(redis: Redis, scripts: Scripts) -> None:
    await claim(scripts, b"", b'{"a":1}')
    await claim(scripts, b'{"a":1}', b"")
    assert await claim(scripts, b"", b'{"a":1}', restores="1") is Verdict.GONE
    assert await hgetall(redis, keys.PUBLISHERS) == {}
    assert await claim(scripts, b"", b'{"b":1}', OTHER, restores="1") is Verdict.APPLIED
    assert await claim(scripts, b"", b'{"a":2}') is Verdict.APPLIED
    assert await redis.zcard(keys.UNREGISTERED) == 0, "it is registered anew"


async def test_of_the_unregistered_only_the_last_are_remembered(redis: Redis, scripts: Scripts) -> None:
    await redis.zadd(keys.UNREGISTERED, {f'["pod","t",{i}]': i for i in range(2, 10_002)})
    await claim(scripts, b"", b"")
    assert await redis.zcard(keys.UNREGISTERED) == 10_000
    assert await claim(scripts, b"", b'{"a":1}', restores="1") is Verdict.GONE
    assert await claim(scripts, b"", b'{"a":1}', b'["pod","t",2]', restores="1") is Verdict.APPLIED


async def test_of_twenty_claims_at_once_one_stands(redis: Redis, scripts: Scripts) -> None:
    verdicts = await gather(*(claim(scripts, b"", b'{"a":%d}' % i) for i in range(20)))
    assert verdicts.count(Verdict.APPLIED) == 1
    assert await hgetall(redis, keys.PUBLISHERS) == {NAME: b'{"a":%d}' % verdicts.index(Verdict.APPLIED)}


async def test_a_group_keeps_its_id_and_shards_and_publishers_get_new_ones(scripts: Scripts) -> None:
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=GROUP,
            shards=1,
            above=0,
            publisher_above=0,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (1, 1, 1)
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=LARGE,
            shards=3,
            above=0,
            publisher_above=0,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (2, 3, 2)
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=GROUP,
            shards=8,
            above=0,
            publisher_above=0,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (1, 1, 3)


async def test_a_group_whose_id_was_anothers_gets_one_above_it(redis: Redis, scripts: Scripts) -> None:
    await scripts.run(
        "new_ids",
        groups=keys.GROUPS,
        group=GROUP,
        shards=1,
        above=0,
        publisher_above=0,
        hash_seed=SEED,
        format=keys.FORMAT,
    )
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=GROUP,
            shards=2,
            above=6,
            publisher_above=0,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (7, 2, 2)
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=GROUP,
            shards=3,
            above=6,
            publisher_above=0,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (7, 2, 3)
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=LARGE,
            shards=1,
            above=0,
            publisher_above=0,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (8, 1, 4)
    assert await hgetall(redis, keys.GROUPS) == {
        GROUP: b"7 2",
        LARGE: b"8 1",
        b"last_group": b"8",
        b"last_publisher": b"4",
        b"hash_seed": b"18446744073709551615",
        b"format": keys.FORMAT.encode(),
    }


async def test_a_publisher_whose_id_was_anothers_gets_one_above_it(redis: Redis, scripts: Scripts) -> None:
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=GROUP,
            shards=1,
            above=0,
            publisher_above=41,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (1, 1, 42)
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=GROUP,
            shards=1,
            above=0,
            publisher_above=5,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (1, 1, 43)


async def test_the_first_hash_seed_stays(redis: Redis, scripts: Scripts) -> None:
    await scripts.run(
        "new_ids",
        groups=keys.GROUPS,
        group=GROUP,
        shards=1,
        above=0,
        publisher_above=0,
        hash_seed=SEED,
        format=keys.FORMAT,
    )
    await scripts.run(
        "new_ids",
        groups=keys.GROUPS,
        group=LARGE,
        shards=1,
        above=0,
        publisher_above=0,
        hash_seed=1337,
        format=keys.FORMAT,
    )
    assert await redis.hget(keys.GROUPS, "hash_seed") == b"18446744073709551615"


async def test_ids_that_were_forgotten_are_known_again_and_come_not_twice(redis: Redis, scripts: Scripts) -> None:
    assert await scripts.run(
        "keep_ids", groups=keys.GROUPS, group=GROUP, id=7, shards=2, publisher=30, format=keys.FORMAT
    ) == (
        Verdict.APPLIED,
        (7,),
    )
    assert await scripts.run(
        "keep_ids", groups=keys.GROUPS, group=GROUP, id=7, shards=2, publisher=12, format=keys.FORMAT
    ) == (
        Verdict.APPLIED,
        (7,),
    )
    assert await hgetall(redis, keys.GROUPS) == {
        GROUP: b"7 2",
        b"last_group": b"7",
        b"last_publisher": b"30",
        b"format": keys.FORMAT.encode(),
    }
    assert (
        await scripts.run(
            "new_ids",
            groups=keys.GROUPS,
            group=LARGE,
            shards=1,
            above=0,
            publisher_above=0,
            hash_seed=SEED,
            format=keys.FORMAT,
        )
    ).numbers == (8, 1, 31)

    before = await hgetall(redis, keys.GROUPS)
    assert await scripts.run(
        "keep_ids", groups=keys.GROUPS, group=LARGE, id=9, shards=2, publisher=50, format=keys.FORMAT
    ) == (
        Verdict.OTHER,
        (8,),
    )
    assert await hgetall(redis, keys.GROUPS) == before


async def test_an_index_of_another_format_gets_no_ids(redis: Redis, scripts: Scripts) -> None:
    await redis.hset(keys.GROUPS, mapping={"last_group": "1", "format": "rows 32 64"})
    before = await hgetall(redis, keys.GROUPS)
    new = await scripts.run(
        "new_ids",
        groups=keys.GROUPS,
        group=GROUP,
        shards=1,
        above=0,
        publisher_above=0,
        hash_seed=SEED,
        format=keys.FORMAT,
    )
    kept = await scripts.run(
        "keep_ids", groups=keys.GROUPS, group=GROUP, id=7, shards=2, publisher=30, format=keys.FORMAT
    )
    assert new.verdict is kept.verdict is Verdict.OTHER
    assert await hgetall(redis, keys.GROUPS) == before
    await redis.delete(keys.GROUPS)  # the key table has this format only
