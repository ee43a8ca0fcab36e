"""beat.lua, name_birth.lua: who is alive, and in which Redis."""

from __future__ import annotations

from redis.asyncio import Redis

from waymark.store import keys
from waymark.store.scripts import Scripts


async def test_who_beats_is_alive_until_it_leaves(scripts: Scripts) -> None:
    assert await scripts.reply("beat", workers=keys.WORKERS, worker="", keep_seconds=10, leaving="") == [
        b"applied",
    ]
    assert await scripts.reply("beat", workers=keys.WORKERS, worker="a", keep_seconds=10, leaving="") == [
        b"applied",
        b"a",
    ]
    assert await scripts.reply("beat", workers=keys.WORKERS, worker="b", keep_seconds=10, leaving="") == [
        b"applied",
        b"a",
        b"b",
    ]
    assert await scripts.reply("beat", workers=keys.WORKERS, worker="", keep_seconds=10, leaving="") == [
        b"applied",
        b"a",
        b"b",
    ], "who only asks is not counted"
    assert await scripts.reply("beat", workers=keys.WORKERS, worker="a", keep_seconds=10, leaving="1") == [
        b"applied",
        b"b",
    ]


async def test_who_is_silent_for_too_long_is_forgotten(redis: Redis, scripts: Scripts) -> None:
    seconds, _ = await redis.time()
    await redis.zadd(keys.WORKERS, {"silent": seconds - 60, "recent": seconds - 20})
    assert await scripts.reply("beat", workers=keys.WORKERS, worker="now", keep_seconds=40, leaving="") == [
        b"applied",
        b"recent",
        b"now",
    ]
    assert await redis.zcard(keys.WORKERS) == 2


async def test_a_redis_keeps_the_first_word_it_was_given(redis: Redis, scripts: Scripts) -> None:
    assert await scripts.reply("name_birth", incarnation=keys.INCARNATION, nonce="a" * 16) == [b"applied", b"a" * 16]
    assert await scripts.reply("name_birth", incarnation=keys.INCARNATION, nonce="b" * 16) == [b"applied", b"a" * 16]
    await redis.flushall()
    assert await scripts.reply("name_birth", incarnation=keys.INCARNATION, nonce="c" * 16) == [b"applied", b"c" * 16]
