"""Kept answers on each kind of Redis: bounded, ended by their time, and cleared for good."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from waymark.store import keys
from waymark.store.answers import AnswersSize
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

KEYS = [bytes([n]) * 32 for n in range(8)]
LONG = 600_000
#: Of an entry, beside its value.
ENTRY = 512


@pytest.fixture
def store(redis: Redis) -> Store:
    return Store(RedisClient(redis, "redis://test"))


async def keep(
    store: Store, number: int, value: bytes = b"v", nonce: bytes = b"", milliseconds: int = LONG, **bounds: int
) -> AnswersSize | None:
    limits = {"entries_max": 3, "bytes_max": 10_000} | bounds
    return await store.answers.keep(KEYS[number], value, nonce, milliseconds=milliseconds, **limits)


async def held(store: Store) -> list[bool]:
    return [(await store.answers.find(key)).value is not None for key in KEYS[:5]]


async def test_the_answers_that_end_first_make_room(store: Store) -> None:
    for number in range(3):
        assert await keep(store, number) == AnswersSize(number + 1, (number + 1) * (ENTRY + 1))
    assert await keep(store, 1, b"other") == AnswersSize(3, 3 * (ENTRY + 1) + 4)
    assert (await store.answers.find(KEYS[1])).value == b"other"
    assert await keep(store, 3) == AnswersSize(3, 3 * (ENTRY + 1) + 4, evicted=1)
    assert await held(store) == [False, True, True, True, False]
    assert await keep(store, 4, b"x" * 8600) == AnswersSize(2, 2 * ENTRY + 8601, evicted=2)
    assert await held(store) == [False, False, False, True, True]
    assert await store.answers.room() == AnswersSize(2, 2 * ENTRY + 8601)


async def test_what_is_larger_than_all_room_removes_nothing(store: Store) -> None:
    await keep(store, 0)
    assert await keep(store, 1, b"x" * 10_000) == AnswersSize(1, ENTRY + 1)
    assert await held(store) == [True, False, False, False, False]


async def test_an_answer_ends_with_its_time(store: Store, redis: Redis) -> None:
    await keep(store, 0)
    await keep(store, 1, milliseconds=1)
    await wait_until(lambda: _is_over(store), "the second answer has ended", 20)
    assert (await store.answers.room()).entries == 1
    assert await keep(store, 2, entries_max=2) == AnswersSize(2, 2 * (ENTRY + 1))
    assert await redis.hlen(keys.ANSWERS_KEPT) == 2
    # A short one does not shorten the others'.
    assert await redis.pttl(keys.ANSWERS_KEPT) > LONG / 2
    await redis.pexpire(keys.ANSWERS_KEPT, 1)
    await redis.pexpire(keys.ANSWERS_DUE, 1)
    await wait_until(lambda: _are_gone(redis), "both keys have ended", 20)
    assert await store.answers.room() == AnswersSize(0, 0)
    assert await keep(store, 3) == AnswersSize(1, ENTRY + 1)


async def _is_over(store: Store) -> bool:
    return (await store.answers.find(KEYS[1])).value is None


async def _are_gone(redis: Redis) -> bool:
    return not await redis.exists(keys.ANSWERS_KEPT, keys.ANSWERS_DUE)


async def test_what_was_asked_for_before_a_clearing_is_not_kept(store: Store) -> None:
    before = (await store.answers.find(KEYS[0])).nonce
    await keep(store, 1, nonce=before)
    assert await store.answers.clear() == 1
    assert await keep(store, 0, nonce=before) is None
    after = (await store.answers.find(KEYS[0])).nonce
    assert after != before
    assert await keep(store, 0, nonce=after) == AnswersSize(1, ENTRY + 1)
    assert await held(store) == [True, False, False, False, False]


async def test_a_clearing_whose_reply_was_lost_says_the_same_again(store: Store) -> None:
    await keep(store, 0)
    names = {"answers": keys.ANSWERS, "kept": keys.ANSWERS_KEPT, "due": keys.ANSWERS_DUE}
    for verdict in ("applied", "repeated"):
        outcome = await store.scripts.clear_answers(**names, nonce="0" * 16, name="")
        assert (outcome.verdict, outcome.numbers) == (verdict, (1,))


async def test_answers_whose_times_were_evicted_do_not_stay(store: Store, redis: Redis) -> None:
    await keep(store, 0)
    await redis.delete(keys.ANSWERS_DUE)
    assert await keep(store, 1) == AnswersSize(1, ENTRY + 1)
    assert await redis.hlen(keys.ANSWERS_KEPT) == 1
