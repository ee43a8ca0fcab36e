"""Stored responses on each kind of Redis: bounded altogether, and never given up before MongoDB has them."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.responses import AnswersSize, ResponseBounds, ResponseChange
from waymark.store.scripts import Outcome
from waymark.store.store import Store

KEYS = [bytes([n]) * 32 for n in range(8)]
LONG = 600_000


async def keep(
    store: Store, number: int, value: bytes = b"v", nonce: bytes = b"", milliseconds: int = LONG, **bounds: int
) -> AnswersSize | None:
    limits = {"entries_max": 3, "bytes_max": 10_000} | bounds
    return await store.answers.keep(KEYS[number], value, nonce, milliseconds=milliseconds, **limits)


async def held_answers(store: Store) -> list[bool]:
    return [(await store.answers.find(key)).value is not None for key in KEYS[:5]]


async def test_the_answers_that_end_first_make_room(store: Store) -> None:
    for number in range(3):
        assert await keep(store, number) == AnswersSize(number + 1, (number + 1) * (ENTRY + 1))
    assert await keep(store, 1, b"other") == AnswersSize(3, 3 * (ENTRY + 1) + 4)
    assert (await store.answers.find(KEYS[1])).value == b"other"
    assert await keep(store, 3) == AnswersSize(3, 3 * (ENTRY + 1) + 4, evicted=1)
    assert await held_answers(store) == [False, True, True, True, False]
    assert await keep(store, 4, b"x" * 8600) == AnswersSize(2, 2 * ENTRY + 8601, evicted=2)
    assert await held_answers(store) == [False, False, False, True, True]
    assert await store.answers.room() == AnswersSize(2, 2 * ENTRY + 8601)


async def test_what_is_larger_than_all_room_removes_nothing(store: Store) -> None:
    await keep(store, 0)
    assert await keep(store, 1, b"x" * 10_000) == AnswersSize(1, ENTRY + 1)
    assert await held_answers(store) == [True, False, False, False, False]


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
    assert await held_answers(store) == [True, False, False, False, False]


async def test_a_clearing_whose_reply_was_lost_says_the_same_again(store: Store) -> None:
    await keep(store, 0)
    names = {"answers": keys.ANSWERS, "kept": keys.ANSWERS_KEPT, "due": keys.ANSWERS_DUE}
    for verdict in ("applied", "repeated"):
        outcome = await store.scripts.run("clear_answers", **names, nonce="0" * 16, name="")
        assert (outcome.verdict, outcome.numbers) == (verdict, (1,))


async def test_answers_whose_times_were_evicted_do_not_stay(store: Store, redis: Redis) -> None:
    await keep(store, 0)
    await redis.delete(keys.ANSWERS_DUE)
    assert await keep(store, 1) == AnswersSize(1, ENTRY + 1)
    assert await redis.hlen(keys.ANSWERS_KEPT) == 1


NAMES = [f"{n}" * 32 for n in range(8)]
#: Of an entry, beside its value.
ENTRY = 512
ALONE = ResponseBounds(600_000, entries_max=3, bytes_max=10_000)
BEFORE_MONGO = ALONE._replace(queue_max=1000)


@pytest.fixture
def store(redis: Redis) -> Store:
    return Store(RedisClient(redis, "redis://test"))


async def held(store: Store) -> list[int]:
    """The responses that are there, by their numbers."""
    found = await store.responses.find(NAMES)
    return [number for number, value in enumerate(found) if value]


async def fill(store: Store, bounds: ResponseBounds) -> None:
    for number in range(3):
        changed = await store.responses.keep(NAMES[number], b"{}", bounds)
        assert changed == ResponseChange(True, AnswersSize(number + 1, (number + 1) * (ENTRY + 2)))


async def copy(store: Store, count: int) -> None:
    await store.responses.end(await store.responses.take("one", count, idle_ms=600_000))


async def test_the_responses_that_end_first_make_room(store: Store) -> None:
    await fill(store, ALONE)
    assert await store.responses.keep(NAMES[3], b"{}", ALONE) == ResponseChange(
        True, AnswersSize(3, 3 * (ENTRY + 2), evicted=1)
    )
    assert await held(store) == [1, 2, 3]
    large = await store.responses.keep(NAMES[4], b"{%s}" % (b"x" * 8900), ALONE)
    assert large == ResponseChange(True, AnswersSize(2, 2 * ENTRY + 8904, evicted=2))
    assert await held(store) == [3, 4]
    assert await store.responses.delete(NAMES[4], ALONE) == ResponseChange(True, AnswersSize(1, ENTRY + 2))
    assert await held(store) == [3]


@pytest.mark.parametrize("bounds", [ALONE, BEFORE_MONGO])
async def test_what_is_larger_than_all_room_changes_nothing(store: Store, bounds: ResponseBounds) -> None:
    await fill(store, bounds)
    for name in (NAMES[0], NAMES[3]):
        assert await store.responses.keep(name, b"x" * 10_000, bounds) == ResponseChange(
            False, AnswersSize(3, 3 * (ENTRY + 2))
        )
    assert await store.responses.find(NAMES[:4]) == [b"{}", b"{}", b"{}", None]


async def test_only_what_mongodb_has_makes_room(store: Store, redis: Redis) -> None:
    await fill(store, BEFORE_MONGO)
    refused = ResponseChange(False, AnswersSize(3, 3 * (ENTRY + 2)))
    assert await store.responses.keep(NAMES[3], b"{}", BEFORE_MONGO) == refused
    assert await store.responses.delete(NAMES[3], BEFORE_MONGO) == refused
    assert (await held(store), await redis.xlen(keys.RESPONSES_QUEUE)) == ([0, 1, 2], 3)
    await copy(store, 2)
    # The second one changes after its copy, so only the first one may go.
    assert (await store.responses.keep(NAMES[1], b"{ }", BEFORE_MONGO)).is_done
    assert await store.responses.keep(NAMES[3], b"{}", BEFORE_MONGO) == ResponseChange(
        True, AnswersSize(3, 3 * (ENTRY + 2) + 1, 1)
    )
    assert not (await store.responses.keep(NAMES[4], b"{}", BEFORE_MONGO)).is_done
    assert await held(store) == [1, 2, 3]


async def test_an_earlier_copy_does_not_make_a_later_change_one_that_may_go(store: Store) -> None:
    await fill(store, BEFORE_MONGO)
    taken = await store.responses.take("one", 3, idle_ms=600_000)
    await store.responses.delete(NAMES[0], BEFORE_MONGO)
    await store.responses.end(taken)
    for number in (3, 4):
        assert (await store.responses.keep(NAMES[number], b"{}", BEFORE_MONGO)).room.evicted == 1
    assert not (await store.responses.keep(NAMES[5], b"{}", BEFORE_MONGO)).is_done
    assert await store.responses.find(NAMES[:3]) == [b"", None, None], "the deletion is not forgotten"


async def test_what_comes_back_from_mongodb_may_go_and_hides_no_deletion(store: Store, redis: Redis) -> None:
    assert (await store.responses.put_back(NAMES[0], b"{}", BEFORE_MONGO)).is_done
    assert await redis.xlen(keys.RESPONSES_QUEUE) == 0
    await store.responses.delete(NAMES[1], BEFORE_MONGO)
    assert (await store.responses.put_back(NAMES[1], b"{}", BEFORE_MONGO)).room.entries == 2
    assert await store.responses.find(NAMES[:2]) == [b"{}", b""]
    for number in (2, 3):
        await store.responses.keep(NAMES[number], b"{}", BEFORE_MONGO)
    assert await held(store) == [2, 3]
    # A copy that does not fit is no error: MongoDB has it.
    assert not (await store.responses.put_back(NAMES[4], b"{}", BEFORE_MONGO)).is_done


@pytest.mark.parametrize("bounds", [ALONE, BEFORE_MONGO])
async def test_a_response_ends_with_its_time_whoever_has_it(store: Store, redis: Redis, bounds: ResponseBounds) -> None:
    await store.responses.keep(NAMES[0], b"{}", bounds)
    await store.responses.keep(NAMES[1], b"{}", bounds._replace(milliseconds=1))

    async def is_over() -> bool:
        return await held(store) == [0]

    await wait_until(is_over, "the second response has ended", 20)
    room = (await store.responses.keep(NAMES[2], b"{}", bounds._replace(entries_max=2))).room
    assert room == AnswersSize(2, 2 * (ENTRY + 2)), "one that has ended is none that was evicted"
    assert await redis.hlen(keys.RESPONSES_KEPT) == 2


async def test_all_end_together_where_nothing_is_kept_any_more(store: Store, redis: Redis) -> None:
    await store.responses.keep(NAMES[0], b"{}", BEFORE_MONGO)
    await copy(store, 1)
    found = (keys.RESPONSES, keys.RESPONSES_KEPT, keys.RESPONSES_DUE, keys.RESPONSES_COPIED)
    assert all([0 < await redis.pttl(key) <= BEFORE_MONGO.milliseconds for key in found])
    for key in found:
        await redis.pexpire(key, 1)

    async def is_gone() -> bool:
        return not await redis.exists(*found)

    await wait_until(is_gone, "all keys have ended", 20)
    assert await store.responses.keep(NAMES[1], b"{}", ALONE) == ResponseChange(True, AnswersSize(1, ENTRY + 2))


async def test_responses_whose_times_were_evicted_do_not_stay(store: Store, redis: Redis) -> None:
    await store.responses.keep(NAMES[0], b"{}", ALONE)
    await redis.delete(keys.RESPONSES_DUE)
    assert await store.responses.keep(NAMES[1], b"{}", ALONE) == ResponseChange(True, AnswersSize(1, ENTRY + 2))
    assert await redis.hlen(keys.RESPONSES_KEPT) == 1


async def test_counts_whose_reply_was_lost_are_added_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waymark.store.responses._FLUSH_SECONDS", 0.01)
    run, losses = store.scripts.run, 2

    async def lose(name: str, /, **values: Any) -> Outcome:
        nonlocal losses
        outcome = await run(name, **values)
        if losses and name == "add_counts":
            losses -= 1
            store.counts.add("kv_index.load", b"other", number=4)
            raise StoreUnavailable("the reply is lost")
        return outcome

    monkeypatch.setattr(store.scripts, "run", lose)
    store.counts.add("kv_index.load", b"key", number=3)

    async def are_added() -> bool:
        return (await store.counts.read())[0].get("kv_index.load", 0) >= 11

    await wait_until(are_added, "all counts are added")
    assert await store.counts.read() == ({"kv_index.load": 11}, 2)
