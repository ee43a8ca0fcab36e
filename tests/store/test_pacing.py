"""Calls under way are bounded, whoever comes and goes: nothing is let through too early, nothing is forgotten."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.conftest import wait_until
from tests.patience import within
from waymark.store import pacing
from waymark.store.pacing import _CALL_COST, EndCall, Pacer

FULL = 512
BLOCKS_MAX = 2 * (FULL + _CALL_COST)


class Calls:
    """Calls that last until they are told to end, and what of them is under way."""

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.under_way: list[int] = []
        self.ended: list[int] = []
        self.most = 0
        self._ends: dict[int, asyncio.Event] = {}

    async def call(self, number: int, blocks: int = FULL, server: object = None) -> None:
        end = self._ends.setdefault(number, asyncio.Event())
        async with self.pacer.admit(server, blocks):
            self.under_way.append(number)
            self.most = max(self.most, len(self.under_way))
            try:
                await end.wait()
            finally:
                self.under_way.remove(number)
                self.ended.append(number)

    def end(self, number: int) -> None:
        self._ends.setdefault(number, asyncio.Event()).set()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_as_many_blocks_are_under_way_as_may_be_in_order_of_arrival() -> None:
    calls = Calls(Pacer(BLOCKS_MAX))
    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(calls.call(number))
        await settled()
        assert calls.under_way == [0, 1]
        assert calls.pacer.waiting == 3
        for number in range(5):
            calls.end(number)
            await wait_until(lambda number=number: number in calls.ended, "it has ended")  # type: ignore[misc]
    assert calls.ended == [0, 1, 2, 3, 4]
    assert calls.most == 2
    assert calls.pacer.waiting == 0


async def test_small_calls_are_let_through_in_numbers_and_do_not_overtake() -> None:
    calls = Calls(Pacer(BLOCKS_MAX))
    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(calls.call(number, 4))
        await settled()
        assert len(calls.under_way) == 20
        tasks.create_task(calls.call(20))
        tasks.create_task(calls.call(21, 1))
        await settled()
        assert len(calls.under_way) == 20, "the small one waits behind the large one"
        for number in range(22):
            calls.end(number)


async def test_servers_do_not_wait_for_each_other() -> None:
    calls = Calls(Pacer(FULL))
    async with asyncio.TaskGroup() as tasks:
        for number, server in enumerate("aabb"):
            tasks.create_task(calls.call(number, server=server))
        await settled()
        assert calls.under_way == [0, 2]
        for number in range(4):
            calls.end(number)


async def test_a_bound_of_none_holds_nothing_up() -> None:
    calls = Calls(Pacer(0))
    async with asyncio.TaskGroup() as tasks:
        for number in range(50):
            tasks.create_task(calls.call(number))
        await settled()
        assert len(calls.under_way) == 50
        for number in range(50):
            calls.end(number)


@pytest.mark.parametrize(("workers", "at_once"), [(1, 8), (2, 4), (4, 2), (8, 1), (100, 1)])
async def test_a_workers_share_is_by_how_many_there_are_and_never_nothing(workers: int, at_once: int) -> None:
    pacer = Pacer(8 * (FULL + _CALL_COST))
    pacer.workers = workers
    calls = Calls(pacer)
    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(calls.call(number))
        await settled()
        assert len(calls.under_way) == at_once
        for number in range(10):
            calls.end(number)
    assert sorted(calls.ended) == list(range(10))


async def test_a_worker_with_less_than_a_call_takes_the_pauses_of_several_calls_together() -> None:
    now = 0.0
    pacer = Pacer(FULL + _CALL_COST, clock=lambda: now)
    pacer.workers = 5
    for _ in range(3):
        async with within(5), pacer.admit(None, FULL):
            now += 0.01
    waiting = asyncio.create_task(Calls(pacer).call(0))
    await settled()
    assert pacer.waiting == 1
    # Four times as long as these calls took: then all five together keep one under way.
    now += 0.119
    await settled()
    assert pacer.waiting == 1
    now += 0.002
    await wait_until(lambda: pacer.waiting == 0, "the pause is over")
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_worker_owes_no_pause_for_calls_that_were_far_enough_apart() -> None:
    now = 0.0
    pacer = Pacer(FULL + _CALL_COST, clock=lambda: now)
    pacer.workers = 5
    for _ in range(20):
        async with within(5), pacer.admit(None, FULL):
            now += 0.01
        now += 0.041


@pytest.mark.parametrize("workers", [2, 5, 20])
async def test_a_worker_sends_its_share_on_average_and_little_more_at_first(workers: int) -> None:
    now = busy = ahead = 0.0
    pacer = Pacer(FULL + _CALL_COST, clock=lambda: now)
    pacer.workers = workers
    seconds = random.Random(workers)
    for _ in range(400):
        ends: list[EndCall] = []
        while not ends:
            give_up = pacer.admit_soon(None, FULL, ends.append)
            give_up()
            now += 0 if ends else 0.001
        took = 0.0005 + 0.001 * seconds.random()
        now, busy = now + took, busy + took
        ends[0](True)
        ahead = max(ahead, busy * workers - now)
    assert busy * workers == pytest.approx(now, rel=0.1)
    assert 0 < ahead < 0.1 + 0.0015 * workers


async def test_the_share_shrinks_while_calls_are_slow_and_grows_again() -> None:
    now = 0.0
    pacer = Pacer(2 * (FULL + _CALL_COST), clock=lambda: now)

    async def took(seconds: float, times: int) -> None:
        nonlocal now
        for _ in range(times):
            async with pacer.admit(None, FULL):
                now += seconds
            now += 10 * seconds  # whatever the pause is, it is over

    async def at_once() -> int:
        calls = Calls(pacer)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(calls.call(number)) for number in range(4)]
            await settled()
            found = len(calls.under_way)
            for task in running:
                task.cancel()
        return found

    await took(0.002, 20)
    assert await at_once() == 2
    await took(0.05, 1)
    assert await at_once() == 2, "one slow call means nothing"
    await took(0.02, 60)
    assert await at_once() == 1
    await took(0.002, 200)
    assert await at_once() == 2


async def test_whoever_waits_is_called_upon_to_renew_and_an_error_of_it_ends_the_wait() -> None:
    pacer = Pacer(FULL)
    calls_while_waiting = 0

    async def while_waiting() -> None:
        nonlocal calls_while_waiting
        calls_while_waiting += 1
        if calls_while_waiting == 2:
            raise LookupError

    async def waits() -> None:
        async with pacer.admit(None, FULL, while_waiting):
            raise AssertionError("it must not be let through")

    calls = Calls(pacer)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(calls.call(0))
        await settled()
        with pytest.raises(LookupError):
            await waits()
        assert pacer.waiting == 0
        tasks.create_task(calls.call(1))
        calls.end(0)
        calls.end(1)
    assert calls.ended == [0, 1]


async def test_a_call_given_up_in_the_moment_of_its_admission_gives_its_place_back() -> None:
    pacer, ends, unwanted = Pacer(FULL + _CALL_COST, clock=lambda: 0.0), list[EndCall](), list[EndCall]()
    pacer.admit_soon(None, FULL, ends.append)
    give_up = pacer.admit_soon(None, FULL, unwanted.append)
    ends[0](True)
    give_up()
    pacer.admit_soon(None, FULL, ends.append)
    await settled()
    assert (len(ends), len(unwanted)) == (2, 0)
    assert pacer.waiting == 0


@pytest.mark.parametrize("seed", range(10))
async def test_cancellations_and_errors_leave_no_room_behind(seed: int) -> None:
    chosen = random.Random(seed)
    pacer = Pacer(BLOCKS_MAX, clock=lambda: 0.0)
    under_way = most = 0

    async def call() -> None:
        nonlocal under_way, most
        blocks = chosen.choice((1, 30, 200, FULL))
        async with pacer.admit(None, blocks):
            under_way += blocks + _CALL_COST
            most = max(most, under_way)
            try:
                for _ in range(chosen.randrange(4)):
                    await asyncio.sleep(0)
                if chosen.random() < 0.2:
                    raise LookupError
            finally:
                under_way -= blocks + _CALL_COST

    tasks = [asyncio.create_task(call()) for _ in range(200)]
    async with within(20):
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if chosen.random() < 0.3:
                chosen.choice(tasks).cancel()
    assert {type(task.exception()) for task in tasks if not task.cancelled()} <= {type(None), LookupError}
    assert most <= BLOCKS_MAX
    assert (under_way, pacer.waiting) == (0, 0)
    calls = Calls(pacer)
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(calls.call(number))
        await settled()
        assert len(calls.under_way) == 2
        for number in range(3):
            calls.end(number)


# ---- turns -----------------------------------------------------------------------------------------


class Streams:
    """Streams that make a call each, at their turn."""

    def __init__(self, pacer: Pacer) -> None:
        self.calls = Calls(pacer)
        self.begun: list[int] = []
        self.ticks = 0

    async def _tick(self) -> None:
        self.ticks += 1

    async def make(self, number: int, *, calls: bool = True, instead: asyncio.Event | None = None) -> None:
        async with self.calls.pacer.turn(None, self._tick):
            self.begun.append(number)
            if instead is not None:
                await instead.wait()
            if calls:
                await self.calls.call(number)


async def test_while_calls_wait_a_stream_does_not_make_another_one() -> None:
    streams = Streams(Pacer(FULL + _CALL_COST))
    pacer, calls = streams.calls.pacer, streams.calls
    async with within(20), asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(streams.make(number))
        await settled()
        assert (streams.begun, calls.under_way, pacer.waiting) == ([0, 1, 2], [0], 5)
        for number in range(6):
            calls.end(number)
            await settled()
            assert streams.begun == list(range(min(6, number + 4))), "one more for each call that waits no longer"
    assert calls.ended == list(range(6))
    assert pacer.waiting == 0
    assert not pacer.is_crowded(None)


async def test_a_turn_without_a_call_is_given_to_the_next_stream() -> None:
    streams = Streams(Pacer(FULL + _CALL_COST))
    async with within(20), asyncio.TaskGroup() as tasks:
        for number in range(9):
            tasks.create_task(streams.make(number, calls=number in (0, 1, 2, 8)))
        await settled()
        assert streams.begun == [0, 1, 2]
        for number in (0, 1, 2):
            streams.calls.end(number)
        await settled()
        assert streams.begun == list(range(9))
        streams.calls.end(8)


async def test_a_stream_passes_its_turn_on_before_something_long() -> None:
    streams, long = Streams(Pacer(FULL + _CALL_COST)), asyncio.Event()
    async with within(20), asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(streams.make(number, instead=long if number > 2 else None))
        await settled()
        streams.calls.pacer.pass_turn(None)
        await settled()
        assert streams.begun == [0, 1, 2], "the next call does so"
        for number in range(3):
            streams.calls.end(number)
        await settled()
        assert streams.begun == list(range(7))
        streams.calls.pacer.pass_turn(None)
        await settled()
        assert streams.begun == list(range(8))
        long.set()
        for number in range(8):
            streams.calls.end(number)


async def test_a_long_turn_does_not_hold_the_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_WAITING_SECONDS", 0.01)
    streams, long = Streams(Pacer(FULL + _CALL_COST)), asyncio.Event()
    async with within(20), asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(streams.make(number, instead=long if number > 2 else None))
        await settled()
        assert len(streams.begun) == 3
        for number in range(3):
            streams.calls.end(number)
        await wait_until(lambda: len(streams.begun) == 8, "all have their turn")
        assert streams.ticks > 0
        long.set()
        for number in range(8):
            streams.calls.end(number)


@pytest.mark.parametrize("seed", range(10))
async def test_cancelled_streams_leave_their_turns_to_others(seed: int) -> None:
    chosen, streams = random.Random(seed), Streams(Pacer(FULL + _CALL_COST))
    for number in range(60):
        streams.calls.end(number)
    tasks = [asyncio.create_task(streams.make(number, calls=chosen.random() < 0.7)) for number in range(60)]
    async with within(20):
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if chosen.random() < 0.5:
                chosen.choice(tasks).cancel()
    assert streams.calls.pacer.waiting == 0
    await streams.make(0)


async def test_a_stream_cancelled_in_the_moment_of_its_turn_passes_it_on() -> None:
    streams, long = Streams(Pacer(FULL + _CALL_COST)), asyncio.Event()
    async with within(20), asyncio.TaskGroup() as group:
        tasks = [group.create_task(streams.make(number, instead=long if number > 2 else None)) for number in range(9)]
        await settled()
        for number in range(3):
            streams.calls.end(number)
        await settled()
        assert streams.begun == list(range(7))
        streams.calls.pacer.pass_turn(None)
        tasks[7].cancel()
        await settled()
        assert streams.begun == [*range(7), 8]
        long.set()
        for number in range(9):
            streams.calls.end(number)


async def test_without_a_bound_it_is_always_everybodys_turn() -> None:
    streams = Streams(Pacer())
    async with within(20), asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(streams.make(number))
        await settled()
        assert len(streams.calls.under_way) == 6
        for number in range(6):
            streams.calls.end(number)
