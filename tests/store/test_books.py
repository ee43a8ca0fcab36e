"""Books: what was promised and what came, added up by the script that ends a reservation, and the drift of a target."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import registration, stream_of
from waymark.base.errors import InvalidValue
from waymark.domain.books import Promise, Sums, Usage
from waymark.store import books, keys
from waymark.store.reservations import (
    DRIFT,
    Offer,
    Reservation,
    ReservationPart,
    ReservationTerms,
    parse_reservations,
)
from waymark.store.store import Store

_EMPTY = Promise(0, 0, 0, 0, 0, 0, 0)


@pytest.fixture
async def target(store: Store, redis: Redis) -> tuple[int, int]:
    """The ids of a group and of its target."""
    grant = (await stream_of(store, redis, registration("pod-0"))).grant
    return grant.group_id, grant.publisher


async def taken(store: Store, target: tuple[int, int], promise: Promise, request_id: str | None = None) -> Reservation:
    terms = ReservationTerms(context=100, request_id=request_id, promises=[str(promise)])
    found = await store.reservations.reserve(target[0], [Offer(target[1], 10)], terms)
    assert found.reservation is not None
    return found.reservation


async def ended(store: Store, reservation: Reservation, cached: int | None, drift_max: float = 1.0) -> float | None:
    """End it well; the drift that this has shown."""
    found: list[float | None] = []
    usage = Usage(cached, None if cached is None else 100, 7)
    await store.reservations.release(
        [reservation],
        ReservationPart.OK,
        usage=usage,
        drift_max=drift_max,
        booked=lambda _, drift: found.append(drift),
    )
    return found[0] if found else None


async def sums_of(store: Store, target: tuple[int, int]) -> Sums:
    total = Sums()
    async for line in store.books.lines([target[0]], 0):
        assert (line.group_id, line.publisher) == target
        total = total.plus(line.sums)
    return total


@pytest.mark.parametrize("is_prefilled", [False, True])
async def test_each_request_counts_once_with_its_promise_and_its_usage(
    store: Store, target: tuple[int, int], *, is_prefilled: bool
) -> None:
    promises = [Promise(90, 40, 10, 5, 5, 64, 12), Promise(1000, 0, 0, 0, 0, 0, 333)]
    for promise, cached in zip(promises, (48, 0), strict=True):
        reservation = parse_reservations(str(await taken(store, target, promise)))[0]
        if is_prefilled:
            await store.reservations.release([reservation], ReservationPart.PREFILL, ttft_ms=20.4)
        await ended(store, reservation, cached)
        await ended(store, reservation, 99)  # it is gone, so this changes nothing

    first = (2, 40) if is_prefilled else (0, 0)
    assert await sums_of(store, target) == Sums(2, 0, 1090, 40, 10, 5, 5, 64, 48, 345, 200, 14, *first)


async def test_a_request_without_usage_is_counted_apart_and_a_failed_one_not_at_all(
    store: Store, target: tuple[int, int]
) -> None:
    promise = Promise(90, 40, 10, 5, 5, 64, 12)
    await ended(store, await taken(store, target, promise), None)
    await store.reservations.release([await taken(store, target, promise)], ReservationPart.FAILED)
    await store.reservations.release([await taken(store, target, promise)], ReservationPart.UNANSWERED)
    await store.reservations.release([await taken(store, target, promise)], ReservationPart.RENEW)

    assert await sums_of(store, target) == Sums(requests=1, unreported=1)


async def test_a_repeated_request_has_the_promise_of_the_first(store: Store, target: tuple[int, int]) -> None:
    first = await taken(store, target, Promise(1, 2, 3, 4, 5, 6, 7), request_id="0" * 16)
    again = await taken(store, target, _EMPTY, request_id="0" * 16)

    assert again == first
    assert await store.reservations.release([again], ReservationPart.OK) == (1, 0)


async def test_a_changed_promise_is_another_reservation(store: Store, target: tuple[int, int]) -> None:
    reservation = await taken(store, target, _EMPTY)
    forged = reservation._replace(promise=str(Promise(9, 9, 9, 9, 9, 9, 9)))

    assert await store.reservations.release([forged], ReservationPart.OK, usage=Usage(0)) == (0, 1)
    assert await sums_of(store, target) == Sums()


async def test_several_requests_have_no_usage_together(store: Store, target: tuple[int, int]) -> None:
    both = [await taken(store, target, _EMPTY) for _ in range(2)]

    await store.reservations.release(both, ReservationPart.OK, usage=Usage(5, 10, 1))

    assert await sums_of(store, target) == Sums(requests=2, unreported=2)


async def test_an_hour_has_room_for_so_many_lines_and_then_one_for_all_others(
    store: Store, redis: Redis, target: tuple[int, int]
) -> None:
    await ended(store, await taken(store, target, _EMPTY), 1)
    (line,) = [line async for line in store.books.lines([target[0]], 0)]
    name = keys.books(target[0], line.minute // 60)
    await redis.delete(name)
    await redis.hset(name, mapping={f"61 {n}": "" for n in range(16384)})

    for _ in range(2):
        await ended(store, await taken(store, target, _EMPTY), 1)

    found = [line async for line in store.books.lines([target[0]], 0)]
    assert [each.publisher for each in found] in ([0], [0, 0])  # a minute may have ended between the two
    assert sum(each.sums.delivered for each in found) == 2
    await redis.delete(name)  # the fields that fill it are not in the key table


async def test_a_line_of_another_form_is_left_out(store: Store, redis: Redis, target: tuple[int, int]) -> None:
    await ended(store, await taken(store, target, _EMPTY), 3)
    (line,) = [line async for line in store.books.lines([target[0]], 0)]
    name = keys.books(target[0], line.minute // 60)
    await redis.hset(name, mapping={"x y": "1", "5 7": "1 2", "77 7": " ".join(["1"] * 14)})

    assert [line async for line in store.books.lines([target[0]], 0)] == [line]
    assert [line async for line in store.books.lines([target[0]], line.minute + 1)] == []
    await redis.delete(name)  # fields of other forms are not in the key table


# ---- drift --------------------------------------------------------------------------------------


async def drifts_of(store: Store, target: tuple[int, int], cached: Sequence[int | None]) -> list[float | None]:
    """What each of some requests shows, of which 256 cached tokens are expected."""
    promise = Promise(256, 256, 0, 0, 0, 256, 0)
    return [await ended(store, await taken(store, target, promise), each, 0.2) for each in cached]


async def mark(redis: Redis, target: tuple[int, int]) -> bytes | None:
    return await redis.hget(keys.load(target[0]), DRIFT.decode() + str(target[1]))  # type: ignore[return-value]


async def test_an_engine_that_begins_to_evict_is_noticed_within_fifty_requests(
    store: Store, redis: Redis, target: tuple[int, int]
) -> None:
    assert not any(await drifts_of(store, target, [256] * 60))
    assert await mark(redis, target) is None

    shown = await drifts_of(store, target, [0] * 50)

    at, drift = next((at, each) for at, each in enumerate(shown) if each is not None)
    assert at < 50
    assert 0.2 < drift <= 0.4
    assert await mark(redis, target) is not None


async def test_it_is_healed_by_the_next_fifty_that_come_as_expected(
    store: Store, redis: Redis, target: tuple[int, int]
) -> None:
    await drifts_of(store, target, [0] * 50)
    assert await mark(redis, target) is not None

    assert await drifts_of(store, target, [256] * 50) == [None] * 49 + [0]
    assert await mark(redis, target) is None


async def test_above_half_of_the_bound_it_stays_with_the_newer_share(
    store: Store, redis: Redis, target: tuple[int, int]
) -> None:
    await drifts_of(store, target, [0] * 50)

    shown = await drifts_of(store, target, [256 - 38] * 50)

    assert shown[:-1] == [None] * 49
    assert shown[-1] == pytest.approx(0.148, abs=0.001)
    assert await mark(redis, target) is not None


@pytest.mark.parametrize("cached", [None, 230, 256, 5000])
async def test_who_says_nothing_or_delivers_enough_is_not_punished(
    store: Store, redis: Redis, target: tuple[int, int], cached: int | None
) -> None:
    assert not any(await drifts_of(store, target, [cached] * 55))
    assert await mark(redis, target) is None


async def test_more_than_was_expected_of_one_request_pays_for_no_other(
    store: Store, redis: Redis, target: tuple[int, int]
) -> None:
    assert any(await drifts_of(store, target, [0, 512] * 25))


async def test_what_is_known_of_its_last_requests_is_forgotten_after_a_day(
    store: Store, redis: Redis, target: tuple[int, int]
) -> None:
    name, day = keys.drift(*target), 24 * 3600 * 1000
    for count in (1, 2, 24, 40):
        await drifts_of(store, target, [256] * count)
        assert 0 < await redis.pttl(name) <= day
    await redis.pexpire(name, 5000)
    await drifts_of(store, target, [256] * 2)
    assert await redis.pttl(name) <= 5000, "only the first request of each 25 gives it another day"
    await drifts_of(store, target, [256] * 25)
    assert await redis.pttl(name) > day / 2


async def test_few_tokens_show_nothing(store: Store, redis: Redis, target: tuple[int, int]) -> None:
    promise = Promise(100, 100, 0, 0, 0, 100, 0)
    for _ in range(99):
        assert await ended(store, await taken(store, target, promise), 0, 0.2) is None
    assert await ended(store, await taken(store, target, promise), 0, 0.2) == 1.0


async def test_it_ends_with_its_target(store: Store, redis: Redis, target: tuple[int, int]) -> None:
    await drifts_of(store, target, [0] * 50)
    (claim,) = await store.directory.claims()

    await store.registry.unregister([claim.registration.name])

    assert await mark(redis, target) is None


async def test_the_status_of_the_stream_says_it(store: Store, redis: Redis, target: tuple[int, int]) -> None:
    (claim,) = await store.directory.claims()
    await redis.hset(keys.record(*target), "status", "active")
    (before,) = await store.publisher_states.of([claim])
    await drifts_of(store, target, [0] * 50)

    (after,) = await store.publisher_states.of([claim])

    assert (before.status, after.status) == ("active", "degraded")
    assert "reuses 100 % fewer tokens than the index expects" in (after.last_error or "")


@pytest.mark.parametrize("seed", range(3))
async def test_sums_are_those_of_a_plain_model(store: Store, target: tuple[int, int], seed: int) -> None:
    random, wanted = Random(seed), Sums()
    for _ in range(60):
        promise = Promise(*(random.randrange(1000) for _ in Promise._fields))
        reservation, cached = await taken(store, target, promise), random.randrange(1000)
        if random.random() < 0.2:
            await store.reservations.release([reservation], ReservationPart.FAILED)
            continue
        is_known = random.random() < 0.8
        for _ in range(random.choice((1, 1, 2))):
            await ended(store, reservation, cached if is_known else None)
        if is_known:
            of = promise._asdict() | {"delivered": cached, "prompt": 100, "completion": 7, "requests": 1}
            wanted = wanted.plus(Sums(**of))
        else:
            wanted = wanted.plus(Sums(requests=1, unreported=1))

    assert await sums_of(store, target) == wanted


def test_a_promise_is_read_as_it_is_written() -> None:
    promise = Promise(1, 2, 3, 4, 5, 6, 7)
    assert Promise.of(str(promise)) == promise
    for wrong in ("", "1-2-3-4-5-6", "1-2-3-4-5-6-x", "1-2-3-4-5-6-7-8", "-1-2-3-4-5-6-7"):
        with pytest.raises(InvalidValue):
            parse_reservations(f"1.2.3.4.{'0' * 16}.0.{wrong}")


def test_reservations_with_and_without_promise_are_read_as_they_are_written() -> None:
    plain = Reservation(1, 2, 3, 4, "0" * 16)
    several = [
        plain,
        plain._replace(waited=5),
        plain._replace(promise="1-2-3-4-5-6-7"),
        plain._replace(waited=0, promise="1-2-3-4-5-6-7"),
    ]
    assert parse_reservations(",".join(map(str, several))) == several


async def test_a_day_of_many_targets_gives_the_loop_turns(
    store: Store, redis: Redis, target: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = int(time.time() // 3600)
    sums: Any = {f"{n % 60} {n}": " ".join(["1"] * len(Sums._fields)) for n in range(1000)}
    for each in (hour - 1, hour):
        await redis.hset(keys.books(target[0], each), mapping=sums)
        await redis.expire(keys.books(target[0], each), 60)
    monkeypatch.setattr(books, "_FIELDS_AT_ONCE", 1000)
    turns = most = since = 0

    async def turn() -> None:
        nonlocal turns, since
        while True:
            turns, since = turns + 1, 0
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    async for line in store.books.lines([target[0]], 60 * (hour - 1)):
        assert line.sums.requests == 1
        since += 1
        most = max(most, since)
    turning.cancel()
    assert turns > 2000 / 256
    assert most <= 256
