"""Reservations: loads that any number of callers share, against a model that is a few lines of Python."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import hiredis
import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import Stream, claim_of, registration, snapshot, stream_of
from tests.store.histories import Fleet, History
from tests.unit import seeds
from waymark.base.errors import InvalidValue
from waymark.base.metrics import Metrics
from waymark.decide.group_loads import GroupLoads
from waymark.decide.order import PLACE_HANDICAP, PLACE_WEIGHT
from waymark.domain.answer_times import AnswerTimes, TimeSums
from waymark.store import keys, reservations
from waymark.store.redis.client import SCRIPTS, RedisClient, Reply
from waymark.store.reservations import (
    CANDIDATES_MAX,
    CHANGES_MAX,
    Load,
    Offer,
    Reservation,
    ReservationPart,
    Reservations,
    ReservationTerms,
    parse_reservations,
)
from waymark.store.scripts import Scripts, Verdict
from waymark.store.store import Store

LEAST_WORK = {"weight_new": 3.0, "weight_active": 512.0}


async def fleet_of(store: Store, redis: Redis, count: int = 3) -> Fleet:
    streams: list[Stream] = [await stream_of(store, redis, registration(f"pod-{n}")) for n in range(count)]
    claims = [stream.grant.claim for stream in streams]
    return Fleet(redis, claims[0].group_id, [claim.publisher for claim in claims])


@pytest.fixture
async def fleet(store: Store, redis: Redis) -> Fleet:
    return await fleet_of(store, redis)


# ---- one decision ----------------------------------------------------------------------------------


async def test_the_least_cost_is_reserved_and_adds_to_its_load(fleet: Fleet) -> None:
    found = await fleet.reserve(900, 100, 400, **LEAST_WORK)

    assert found.verdict is Verdict.APPLIED
    assert found.reservation is not None
    assert (found.reservation.publisher, found.reservation.tokens) == (fleet.publishers[1], 100)
    assert await fleet.loads() == [Load(), Load(100, 1, 100), Load()]


async def test_the_second_decision_sees_the_first(fleet: Fleet) -> None:
    picked = [(await fleet.taken(100, 100, 100, **LEAST_WORK)).publisher for _ in range(6)]

    assert sorted(picked) == sorted(fleet.publishers * 2)


async def test_decisions_at_one_instant_are_ordered_by_redis(fleet: Fleet) -> None:
    found = await asyncio.gather(*(fleet.taken(100, 100, 100, **LEAST_WORK) for _ in range(30)))

    assert [load.requests for load in await fleet.loads()] == [10, 10, 10]
    assert len({each.nonce for each in found}) == 30


async def test_a_target_of_twice_the_weight_takes_twice_as_much(fleet: Fleet) -> None:
    offers = [Offer(publisher, 100, weight=weight) for publisher, weight in zip(fleet.publishers, (2.0, 1.0, 1.0))]  # noqa: B905
    for _ in range(40):
        await fleet.reservations.reserve(fleet.group_id, offers, ReservationTerms(context=1, weight_active=1.0))

    assert [load.requests for load in await fleet.loads()] == [20, 10, 10]


def _counted(head: bytes, words: int) -> bytes:
    return b"*%d\r\n%b" % (words, head)


async def test_a_plain_call_has_the_words_of_the_signature(fleet: Fleet) -> None:
    """Whether another call with the same terms has come before or not."""
    promises, words = ["1-0-0-0-0-0-0"] * 3, ["1 5 0.0 1.0 0 0 1-0-0-0-0-0-0"]
    for context, is_cold, milliseconds in ((7, True, 50), (8, False, 50), (9, True, 60)):
        terms = ReservationTerms(context, 3.0, 512.0, milliseconds, 2, 9, is_cold, promises=promises, words=words)
        for publishers in (fleet.publishers, fleet.publishers[:2]):
            call = fleet.reservations.call(fleet.group_id, [Offer(each, 5) for each in publishers], terms)
            by_signature = fleet.reservations._step(fleet.group_id, terms, call.nonce, publishers, words)
            assert (call.step.keys, call.step.args) == (by_signature.keys, by_signature.args)
            of = context, "1" if is_cold else "0"
            packed = fleet.reservations.packed(fleet.group_id, terms[1:6], of, _counted, (), lambda: ((), ()))
            by_signature = fleet.reservations._step(fleet.group_id, terms, packed.nonce, publishers, words)
            head = by_signature.args[: -2 - len(publishers) - len(words)]
            command = ("EVALSHA", SCRIPTS["reserve"].sha, 4, *by_signature.keys, *head)
            assert packed._pack() == hiredis.pack_command(command)


async def test_in_an_order_by_place_the_first_target_is_taken_whatever_its_load(fleet: Fleet) -> None:
    offers = [Offer(publisher, 10**14, PLACE_HANDICAP, PLACE_WEIGHT) for publisher in fleet.publishers]
    for _ in range(3):
        await fleet.reservations.reserve(fleet.group_id, offers, ReservationTerms(context=1))

    assert [load.requests for load in await fleet.loads()] == [3, 0, 0]


async def test_a_target_at_the_limit_is_passed_over_and_all_of_them_is_saturated(fleet: Fleet) -> None:
    for _ in range(3):
        await fleet.taken(1, 1, 1, limit=1)
    before = await snapshot(fleet.redis)

    assert (await fleet.reserve(1, 1, 1, limit=1)).verdict is Verdict.SATURATED
    assert await snapshot(fleet.redis) == before


async def test_a_group_with_too_many_reservations_is_full(fleet: Fleet) -> None:
    for _ in range(4):
        await fleet.taken(1, reservations_max=4)
    before = await snapshot(fleet.redis)

    assert (await fleet.reserve(1, reservations_max=4)).verdict is Verdict.FULL
    assert await snapshot(fleet.redis) == before


async def test_a_target_that_was_unregistered_meanwhile_is_not_taken(store: Store, fleet: Fleet) -> None:
    gone = (await claim_of(store, registration("pod-0"))).registration.name
    held = await fleet.taken(1)
    assert held.publisher == fleet.publishers[0]

    await store.registry.unregister([gone])

    assert (await fleet.loads())[0] == Load()
    assert (await fleet.taken(1, 900, 900, **LEAST_WORK)).publisher != fleet.publishers[0]
    assert (await fleet.reserve(1)).verdict is Verdict.SATURATED
    assert await fleet.reservations.release([held], ReservationPart.OK) == (1, 0)
    assert fleet.publishers[0] not in await fleet.reservations.loads(fleet.group_id)


async def test_the_same_request_again_gets_the_same_reservation(fleet: Fleet) -> None:
    first = await fleet.reserve(5, 9, 9, request_id="00000000000000aa")
    again = await fleet.reserve(900, 1, 1, request_id="00000000000000aa")

    assert (again.verdict, again.reservation) == (Verdict.REPEATED, first.reservation)
    assert sum(load.requests for load in await fleet.loads()) == 1
    other = await fleet.reserve(900, 1, 1, request_id="00000000000000ab")
    assert other.verdict is Verdict.APPLIED


@pytest.mark.parametrize("part", [ReservationPart.FAILED, ReservationPart.UNANSWERED])
async def test_a_request_whose_reservation_has_ended_gets_another(fleet: Fleet, part: ReservationPart) -> None:
    first = await fleet.taken(5, 9, 9, request_id="00000000000000aa")
    await fleet.reservations.release([first], part)

    again = await fleet.reserve(900, 1, 900, request_id="00000000000000aa", **LEAST_WORK)
    assert again.verdict is Verdict.APPLIED
    assert [load.requests for load in await fleet.loads()] == [0, 1, 0]
    assert (await fleet.reserve(1, 1, 1, request_id="00000000000000aa")).reservation == again.reservation


async def test_speculative_entries_name_the_target_beyond_what_it_has_and_end_by_themselves(fleet: Fleet) -> None:
    names = [keys.spec(fleet.group_id, block) for block in (0xA8, 0xAC, 0xB0)]
    first, second, _ = fleet.publishers
    offers = [Offer(first, 9), Offer(second, 1, spec_from=1, spec_milliseconds=60_000)]
    await fleet.reservations.reserve(
        fleet.group_id, offers, ReservationTerms(context=9, weight_new=1.0, spec_keys=names)
    )

    assert await fleet.redis.mget(names) == [None, b"%d" % second, b"%d" % second]
    assert 0 < await fleet.redis.pttl(names[1]) <= 60_000

    offers = [Offer(first, 0), Offer(second, 1, spec_from=1, spec_milliseconds=60_000)]
    terms = ReservationTerms(context=9, weight_new=100.0, spec_keys=names, request_id="0" * 16)
    found = await fleet.reservations.reserve(fleet.group_id, offers, terms)
    assert found.reservation is not None
    assert found.reservation.publisher == first
    assert await fleet.redis.mget(names) == [None, b"%d" % second, b"%d" % second], "the first one writes none"


async def test_a_cold_pick_is_remembered(fleet: Fleet) -> None:
    await fleet.taken(1, is_cold=True)

    assert (await fleet.loads())[0].cold > 1_700_000_000_000


# ---- its end ---------------------------------------------------------------------------------------


async def test_prefill_is_given_back_before_the_rest(fleet: Fleet) -> None:
    found = await fleet.taken(500)

    assert await fleet.reservations.release([found], ReservationPart.PREFILL) == (1, 0)
    assert (await fleet.loads())[0] == Load(0, 1, 100)
    # The caller still names it as it was written, and so may whoever gave the prefill back.
    assert await fleet.reservations.release([found], ReservationPart.PREFILL) == (1, 0)
    assert await fleet.reservations.release([found], ReservationPart.OK) == (1, 0)
    load = (await fleet.loads())[0]
    assert load[:5] == (0, 0, 0, 1, 0)


@pytest.mark.parametrize(
    "part", [ReservationPart.PREFILL, ReservationPart.OK, ReservationPart.FAILED, ReservationPart.RENEW]
)
async def test_what_is_gone_changes_nothing(fleet: Fleet, part: ReservationPart) -> None:
    found = await fleet.taken(500)
    await fleet.reservations.release([found], ReservationPart.OK)
    before = await snapshot(fleet.redis)

    assert await fleet.reservations.release([found], part) == (0, 1)
    assert await snapshot(fleet.redis) == before


async def test_after_flushall_an_older_release_changes_nothing(fleet: Fleet) -> None:
    found = await fleet.taken(500)
    await fleet.redis.flushall()

    assert await fleet.reservations.release([found], ReservationPart.OK) == (0, 1)
    assert await snapshot(fleet.redis) == {}


async def test_outcomes_are_halved_every_minute(fleet: Fleet) -> None:
    for part in (*[ReservationPart.OK] * 3, ReservationPart.FAILED, ReservationPart.UNANSWERED):
        await fleet.reservations.release([await fleet.taken(1)], part)
    load = (await fleet.loads())[0]
    assert (load.requests, load.ok, load.failed, load.health) == (0, 3, 1, 0.8)

    field, value = str(fleet.publishers[0]), f"0 0 0 8 4 {load.minute - 2} 0"
    await fleet.redis.hset(keys.load(fleet.group_id), field, value)
    await fleet.reservations.release([await fleet.taken(1)], ReservationPart.OK)
    assert (await fleet.loads())[0][3:5] == (3, 1)


async def test_a_clock_that_was_ahead_does_not_keep_outcomes_for_ever(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for seconds, expected in ((365 * 86400, 1), (0, 2), (-30, 3), (60, 2)):
        monkeypatch.setattr(reservations, "time", SimpleNamespace(time=partial(float, now + seconds)))
        await fleet.reservations.release([await fleet.taken(1)], ReservationPart.OK)
        assert (await fleet.loads())[0].ok == expected


async def test_what_nobody_releases_is_given_back_by_the_next_decision(fleet: Fleet) -> None:
    forgotten = [await fleet.taken(100) for _ in range(10)]
    for each in forgotten:
        await fleet.overdue(each)

    found = await fleet.reserve(1, 9, 9)
    assert found.overdue == 8
    assert sum(load.requests for load in await fleet.loads()) == 3
    assert await fleet.reservations.end_overdue(fleet.group_id) == 2
    assert [load.requests for load in await fleet.loads()] == [0, 1, 0]


async def test_a_renewed_reservation_stays(fleet: Fleet) -> None:
    found = await fleet.taken(100, milliseconds=50)
    assert await fleet.reservations.release([found], ReservationPart.RENEW, milliseconds=60_000) == (1, 0)
    other = await fleet.taken(9, 1, milliseconds=1)

    async def other_is_over() -> bool:
        await fleet.reservations.end_overdue(fleet.group_id)
        return await fleet.redis.zscore(keys.reservations(fleet.group_id), other.member) is None

    await wait_until(other_is_over, "the other one's time is over")
    assert (await fleet.loads())[0].requests == 1


async def test_a_list_is_released_at_once(fleet: Fleet) -> None:
    found = [await fleet.taken(1, 1, 1) for _ in range(70)]
    strangers = [Reservation(fleet.group_id, 1, 1, 1, "f" * 16)]

    assert await fleet.reservations.release([*found, *strangers], ReservationPart.OK) == (70, 1)
    assert [load.requests for load in await fleet.loads()] == [0, 0, 0]


class _Held(RedisClient):
    """A Redis whose decisions wait, each as one that is sent again over a connection that is still opened; or another
    script."""

    def __init__(self, redis: Redis, script: str = "reserve") -> None:
        super().__init__(redis, "redis://test")
        self.may_decide = asyncio.Event()
        self._script = script
        self.asked: list[str] = []
        self.ended: list[str] = []

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        self.asked.append(name)
        try:
            if name == self._script:
                await self.may_decide.wait()
            return await super().run(name, keys, args)
        finally:
            self.ended.append(name)


async def test_a_decision_that_nobody_waits_for_is_not_sent_behind_its_end(fleet: Fleet) -> None:
    client = _Held(fleet.redis)
    decisions = Reservations(client, Scripts(client), asyncio.ensure_future)
    offer = [Offer(fleet.publishers[0], 9)]
    deciding = asyncio.create_task(decisions.reserve(fleet.group_id, offer, ReservationTerms(context=1)))
    await wait_until(lambda: client.asked == ["reserve"], "it is under way")
    deciding.cancel()
    await wait_until(lambda: "release" in client.ended, "it is taken back")
    client.may_decide.set()
    await wait_until(lambda: "reserve" in client.ended, "it is over")
    assert await fleet.loads() == [Load(), Load(), Load()]
    assert await fleet.redis.zcard(keys.reservations(fleet.group_id)) == 0


async def test_a_release_whose_caller_is_gone_is_counted_and_not_repeated(fleet: Fleet) -> None:
    metrics, client = Metrics(), _Held(fleet.redis, "release")
    found = await fleet.reserve(9)
    assert found.reservation is not None
    ending = asyncio.create_task(
        Reservations(client, Scripts(client, metrics)).release([found.reservation], ReservationPart.OK)
    )
    await wait_until(lambda: client.asked == ["release"], "it is under way")
    ending.cancel()
    await wait_until(lambda: client.ended == ["release"], "the call ends, too")
    assert metrics.script_replies.labels(script="release", verdict="none").value == 1
    assert await fleet.redis.zcard(keys.reservations(fleet.group_id)) == 1


# ---- targets that cannot be reached ----------------------------------------------------------------


async def failed(fleet: Fleet, count: int, *, at: int = 0) -> None:
    """So many requests to one target fail."""
    offer = [Offer(fleet.publishers[at], 1)]
    for _ in range(count):
        found = await fleet.reservations.reserve(fleet.group_id, offer, ReservationTerms(context=1))
        assert found.reservation is not None
        await fleet.reservations.release([found.reservation], ReservationPart.FAILED)


async def left_out(fleet: Fleet) -> list[int]:
    """The targets that decisions leave out, as a replica reads it, by their place."""
    await fleet.reservations.end_overdue(fleet.group_id)
    loads = GroupLoads()
    loads.read(await fleet.reservations.values(fleet.group_id))
    return sorted(map(fleet.publishers.index, loads.left_out(fleet.reservations.now_ms())))


async def later(fleet: Fleet, milliseconds: int, at: int = 0) -> list[int]:
    """Move the times of a target's health so far into the past, and return them: two failures, until, pause."""
    name, field = keys.load(fleet.group_id), f"health:{fleet.publishers[at]}"
    value: Any = await fleet.redis.hget(name, field)
    first, second, until, pause, probe, away = value.decode().split()
    times = [max(0, int(each) - milliseconds) for each in (first, second, until)]
    await fleet.redis.hset(name, field, " ".join([*map(str, times), pause, probe, away]))
    return [*times, int(pause)]


async def test_three_failures_leave_a_target_out_and_an_answer_brings_it_back(fleet: Fleet) -> None:
    running = await fleet.taken(1)
    await failed(fleet, 2)
    assert await left_out(fleet) == []
    await failed(fleet, 1)
    assert await left_out(fleet) == [0]
    assert (await fleet.taken(1, 900, **LEAST_WORK)).publisher == fleet.publishers[1]

    await fleet.reservations.release([running], ReservationPart.OK)
    assert await left_out(fleet) == []
    assert (await fleet.taken(1, 900, **LEAST_WORK)).publisher == fleet.publishers[0]


async def test_an_answer_between_failures_begins_the_count_anew(fleet: Fleet) -> None:
    for part, ttft_ms in ((ReservationPart.OK, None), (ReservationPart.PREFILL, 5.0)):
        await failed(fleet, 2)
        await fleet.reservations.release([await fleet.taken(1)], part, ttft_ms=ttft_ms)
        await failed(fleet, 2)
        assert await left_out(fleet) == []


async def test_a_client_that_goes_away_says_nothing_of_the_engine(fleet: Fleet) -> None:
    running = [await fleet.taken(1) for _ in range(2)]
    await failed(fleet, 2)
    await fleet.reservations.release(running[:1], ReservationPart.UNANSWERED)
    await failed(fleet, 1)
    assert await left_out(fleet) == [0]
    await fleet.reservations.release(running[1:], ReservationPart.UNANSWERED)
    assert await left_out(fleet) == [0]
    assert [load.requests for load in await fleet.loads()] == [0, 0, 0]


async def test_failures_of_more_than_ten_seconds_do_not_count_together(fleet: Fleet) -> None:
    await failed(fleet, 2)
    await later(fleet, 10_500)
    await failed(fleet, 2)
    assert await left_out(fleet) == []
    await failed(fleet, 1)
    assert await left_out(fleet) == [0]


async def test_one_request_of_several_sequences_is_one_failure(fleet: Fleet) -> None:
    await fleet.reservations.release([await fleet.taken(1) for _ in range(5)], ReservationPart.FAILED)
    assert await left_out(fleet) == []


async def test_a_target_is_tried_by_one_request_and_for_longer_each_time(fleet: Fleet) -> None:
    await failed(fleet, 3)
    pauses = []
    for _ in range(6):
        pauses.append((await later(fleet, 120_000))[3])
        assert await left_out(fleet) == []
        taken = [await fleet.taken(1, 900, 900, **LEAST_WORK) for _ in range(4)]
        assert [each.publisher == fleet.publishers[0] for each in taken] == [True, False, False, False]
        assert await left_out(fleet) == [0]
        await fleet.reservations.release(taken[:1], ReservationPart.FAILED)
        await fleet.reservations.release(taken[1:], ReservationPart.OK)
        assert await left_out(fleet) == [0]
    assert pauses == [5_000, 10_000, 20_000, 40_000, 60_000, 60_000]

    await later(fleet, 120_000)
    await fleet.reservations.release([await fleet.taken(1, 900, 900, **LEAST_WORK)], ReservationPart.OK)
    assert [(await fleet.taken(1, 900, 900, **LEAST_WORK)).publisher for _ in range(2)] == fleet.publishers[:1] * 2


async def test_requests_from_before_do_not_make_the_time_longer(fleet: Fleet) -> None:
    before = [await fleet.taken(1) for _ in range(12)]
    for each in before:
        await fleet.reservations.release([each], ReservationPart.FAILED)
    assert (await later(fleet, 0))[3] == 5_000


async def test_if_nobody_else_is_left_one_that_is_left_out_is_taken(fleet: Fleet) -> None:
    for at in range(3):
        await failed(fleet, 3, at=at)
    assert await left_out(fleet) == [0, 1, 2]
    assert (await fleet.taken(900, 1, 900, **LEAST_WORK)).publisher == fleet.publishers[1]


async def test_an_event_stream_without_its_engine_leaves_the_target_out(store: Store, redis: Redis) -> None:
    streams = [await stream_of(store, redis, registration(f"pod-{n}")) for n in range(2)]
    fleet = Fleet(redis, streams[0].grant.group_id, [stream.grant.publisher for stream in streams])
    grant = streams[0].grant

    assert await store.records.note_health(grant, milliseconds=10_000)
    assert await left_out(fleet) == [0]
    running = await fleet.taken(1, 900, **LEAST_WORK)
    assert running.publisher == fleet.publishers[1]
    await failed(fleet, 1)
    await fleet.reservations.release([await fleet.taken(1)], ReservationPart.OK)
    assert await left_out(fleet) == [0], "an answer from before says nothing about it"

    await failed(fleet, 3)
    assert await store.records.note_health(grant, milliseconds=0)
    assert await left_out(fleet) == []
    assert (await fleet.taken(1, 900, **LEAST_WORK)).publisher == fleet.publishers[0]

    assert await store.records.note_health(grant, milliseconds=1)

    async def is_over() -> bool:
        return await left_out(fleet) == []

    await wait_until(is_over, "the note of a worker that says nothing more")
    assert not await store.records.note_health(replace(grant, token="1.0123456789abcdef"), milliseconds=9)


async def test_the_health_of_a_target_goes_with_it(store: Store, redis: Redis, fleet: Fleet) -> None:
    await failed(fleet, 3)
    running = await fleet.taken(1)
    await store.registry.unregister([registration("pod-0").name])
    await fleet.reservations.release([running], ReservationPart.FAILED)
    assert await left_out(fleet) == []
    assert await fleet.redis.hget(keys.load(fleet.group_id), f"health:{fleet.publishers[0]}") is None


# ---- times to the first token ----------------------------------------------------------------------


async def answer_times(store: Store, fleet: Fleet) -> AnswerTimes | None:
    return (await store.answer_times.read(fleet.group_id, fleet.publishers)).get(fleet.publishers[0])


async def test_times_to_the_first_token_predict_the_next_one(store: Store, fleet: Fleet) -> None:
    for tokens in (100, 300, 500, 700, 900, 1100):
        taken = await fleet.taken(tokens)
        await fleet.reservations.release([taken], ReservationPart.OK, ttft_ms=10 + tokens / 2)

    found = await answer_times(store, fleet)
    assert found is not None
    assert found.first_token.predict(2000) == pytest.approx(1010)


async def test_what_waited_before_counts_as_work(store: Store, fleet: Fleet) -> None:
    before, behind = await fleet.taken(400), await fleet.taken(100)
    assert (before.waited, behind.waited) == (0, 400)
    await fleet.reservations.release([behind], ReservationPart.PREFILL, ttft_ms=70)

    assert await answer_times(store, fleet) == AnswerTimes(TimeSums.of(500, 70))
    assert (await fleet.redis.pttl(keys.answer_times(fleet.group_id, fleet.publishers[0]))) > 0


async def test_a_prompt_that_was_cached_tells_how_long_the_target_takes_without_work(
    store: Store, fleet: Fleet
) -> None:
    await fleet.reservations.release([await fleet.taken(0)], ReservationPart.PREFILL, ttft_ms=8)

    assert await answer_times(store, fleet) == AnswerTimes(TimeSums.of(0, 8))


async def test_a_time_to_the_first_token_counts_once(store: Store, fleet: Fleet) -> None:
    taken = await fleet.taken(100, request_id="0" * 16)
    # The index was faster than the caller.
    await fleet.reservations.release([taken], ReservationPart.PREFILL)
    assert await answer_times(store, fleet) is None
    for part in (ReservationPart.PREFILL, ReservationPart.PREFILL, ReservationPart.RENEW):
        await fleet.reservations.release([taken], part, ttft_ms=50)
    again = await fleet.reserve(100, request_id="0" * 16)
    assert again.reservation == taken
    for _ in range(2):
        await fleet.reservations.release([taken], ReservationPart.OK, ttft_ms=50)

    assert await answer_times(store, fleet) == AnswerTimes(TimeSums.of(100, 50))
    assert await fleet.loads() == [Load(ok=1, minute=(await fleet.loads())[0].minute), Load(), Load()]


async def test_the_time_of_each_further_token_grows_with_the_requests_under_way(store: Store, fleet: Fleet) -> None:
    taken = [await fleet.taken(100) for _ in range(3)]
    await fleet.reservations.release(taken[:1], ReservationPart.PREFILL, ttft_ms=50, tpot_ms=9)
    for each, ms in zip(taken, (30, 20, 10), strict=True):
        await fleet.reservations.release([each], ReservationPart.OK, tpot_ms=ms)

    found = await answer_times(store, fleet)
    assert found is not None
    assert found.first_token == TimeSums.of(100, 50)
    expected = TimeSums()
    for under_way, ms in ((3, 30), (2, 20), (1, 10)):
        expected = TimeSums(*(0.98 * number for number in expected)).plus(TimeSums.of(under_way, ms))
    assert found.further_tokens == pytest.approx(expected)


async def test_a_time_of_each_token_is_of_the_target_that_answered(store: Store, fleet: Fleet) -> None:
    decode = (await fleet.taken(10))._replace(waited=None)
    prefill = await fleet.taken(900, 400, **LEAST_WORK)
    await fleet.reservations.release([decode, prefill], ReservationPart.OK, ttft_ms=70, tpot_ms=20)

    found = await store.answer_times.read(fleet.group_id, fleet.publishers)
    assert found == {
        decode.publisher: AnswerTimes(TimeSums(), TimeSums.of(1, 20)),
        prefill.publisher: AnswerTimes(TimeSums.of(400, 70)),
    }


@pytest.mark.parametrize("part", [ReservationPart.FAILED, ReservationPart.PREFILL, ReservationPart.RENEW])
async def test_only_a_request_that_has_ended_well_tells_the_time_of_a_token(
    store: Store, fleet: Fleet, part: ReservationPart
) -> None:
    await fleet.reservations.release([await fleet.taken(100)], part, tpot_ms=20)

    assert await answer_times(store, fleet) is None


async def test_a_timed_reservation_runs_out_as_any_other(fleet: Fleet) -> None:
    taken = await fleet.taken(100)
    await fleet.reservations.release([taken], ReservationPart.PREFILL, ttft_ms=50)
    await fleet.redis.zadd(keys.reservations(fleet.group_id), {f"{taken.publisher} 0 100 {taken.nonce} timed": 1})

    assert await fleet.reservations.end_overdue(fleet.group_id) == 1
    assert [load[:3] for load in await fleet.loads()] == [(0, 0, 0)] * 3


async def test_nobody_learns_from_prefill_that_was_computed_elsewhere(store: Store, fleet: Fleet) -> None:
    await fleet.reservations.release([(await fleet.taken(0))._replace(waited=None)], ReservationPart.OK, ttft_ms=50)
    unknown = Reservation(fleet.group_id, fleet.publishers[0], 5, 5, "0" * 16, 7)
    await fleet.reservations.release([unknown], ReservationPart.OK, ttft_ms=50)

    assert await answer_times(store, fleet) is None


# ---- texts and values of strangers -----------------------------------------------------------------


def test_a_reservation_is_a_text_and_back() -> None:
    first, second = Reservation(3, 17, 4096, 8192, "5f0c2a9e11d04b7c"), Reservation(3, 18, 0, 8192, "0" * 16)

    assert str(first) == "3.17.4096.8192.5f0c2a9e11d04b7c"
    assert parse_reservations(f"{first},{second}") == [first, second]
    timed = Reservation(3, 17, 4096, 8192, "5f0c2a9e11d04b7c", 512)
    assert str(timed) == f"{first}.512"
    assert parse_reservations(str(timed)) == [timed]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "3.17.1.1",
        "3.17.-1.1." + "0" * 16,
        "3.0.1.1." + "0" * 16,
        "3.17.1.1." + "G" * 16,
        "3.17.1.1.0*,",
        "3.17.1.1." + "0" * 16 + ".",
    ],
)
def test_a_text_that_is_no_reservation_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="reservation is not a reservation; send the text"):
        parse_reservations(text)


@pytest.mark.parametrize("value", [b"", b"abc", b"1 2", b"1 2 3 4 5 6 7.5", b"-1 0 0 0 0 0 0", b"9" * 5000])
async def test_a_load_that_cannot_be_read_counts_as_none(fleet: Fleet, value: bytes) -> None:
    assert Load.parse(value) == Load()


async def test_too_many_candidates_are_the_callers_mistake(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="9 candidates"):
        await fleet.reservations.reserve(1, [Offer(1, 1)] * (CANDIDATES_MAX + 1), ReservationTerms(context=1))


# ---- against a model -------------------------------------------------------------------------------


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("seed", seeds(16))
async def test_random_histories_agree_with_the_model(store: Store, redis: Redis, seed: int) -> None:
    fleet = await fleet_of(store, redis, Random(seed).randint(1, CANDIDATES_MAX))
    await History(fleet, seed).run(80)


async def test_a_history_finds_a_load_that_is_wrong(fleet: Fleet) -> None:
    await fleet.redis.hset(keys.load(fleet.group_id), str(fleet.publishers[0]), "1 1 1 0 0 0 0")
    with pytest.raises(AssertionError):
        await History(fleet, 0).run(1)


# ---- what has changed ------------------------------------------------------------------------------


async def test_only_what_has_changed_is_read(fleet: Fleet) -> None:
    await fleet.taken(900, 100, 400, **LEAST_WORK)
    whole = await fleet.reservations.changes(fleet.group_id, -1)
    assert whole.is_all
    assert set(whole.values) == {b"%d" % fleet.publishers[1]}
    nothing = await fleet.reservations.changes(fleet.group_id, whole.last)
    assert nothing == (whole.last, {}, False)

    await fleet.taken(0, 9000, 9000, **LEAST_WORK)
    named = await fleet.reservations.changes(fleet.group_id, whole.last, [fleet.publishers[1]])
    assert not named.is_all
    assert {int(name) for name in named.values if name.isdigit()} == set(fleet.publishers[:2])
    assert (await fleet.reservations.changes(fleet.group_id, named.last + 1)).is_all, "a number of another Redis"


async def test_a_target_that_ended_is_gone_for_those_who_follow(store: Store, redis: Redis) -> None:
    fleet, follower = await fleet_of(store, redis), GroupLoads()
    for _ in fleet.publishers:
        await fleet.taken(100, 100, 100, **LEAST_WORK)
    follower.apply(await fleet.reservations.changes(fleet.group_id, -1))
    assert set(follower) == set(fleet.publishers)

    await store.registry.unregister([registration("pod-0").name])
    follower.apply(await fleet.reservations.changes(fleet.group_id, follower.last_change))
    assert set(follower) == set(fleet.publishers[1:])


async def test_more_changes_than_one_call_reads_are_a_reading_of_all(fleet: Fleet, redis: Redis) -> None:
    await fleet.taken(900, 100, 400, **LEAST_WORK)
    last = (await fleet.reservations.changes(fleet.group_id, -1)).last
    await redis.zadd(keys.load_changes(fleet.group_id), {str(n): last + n for n in range(1, CHANGES_MAX + 2)})
    assert (await fleet.reservations.changes(fleet.group_id, last)).is_all
    assert not (await fleet.reservations.changes(fleet.group_id, last + 1)).is_all


async def test_a_log_that_comes_after_another_gives_no_number_twice(fleet: Fleet, redis: Redis) -> None:
    await fleet.taken(900, 100, 400, **LEAST_WORK)
    last = (await fleet.reservations.changes(fleet.group_id, -1)).last
    await redis.delete(keys.load_changes(fleet.group_id))
    assert (await fleet.reservations.changes(fleet.group_id, last)).is_all
    await fleet.taken(900, 100, 400, **LEAST_WORK)
    assert (await fleet.reservations.changes(fleet.group_id, last)).last > last
