"""admission: no request waits its full time behind an unavailable Redis, and none is kept out afterwards."""

from __future__ import annotations

import asyncio

import pytest

from tests.conftest import wait_until
from tests.patience import within
from waymark.api.http.admission import AT_ONCE, AdmissionQueue
from waymark.base.errors import Contended, InvalidValue, RecordDamaged, StoreUnavailable
from waymark.store.redis.client import CONNECTIONS


async def inside(queue: AdmissionQueue, outcome: asyncio.Future[None]) -> None:
    async def work() -> None:
        await outcome

    await queue.run(work)


async def begun(queue: AdmissionQueue, count: int) -> tuple[list[asyncio.Future[None]], list[asyncio.Task[None]]]:
    """So many requests, in order, and what each of them will come to once it is inside."""
    outcomes = [asyncio.get_running_loop().create_future() for _ in range(count)]
    tasks = [asyncio.ensure_future(inside(queue, outcome)) for outcome in outcomes]
    await asyncio.sleep(0)
    return outcomes, tasks


async def test_one_that_redis_does_not_answer_is_a_refusal_for_all_that_wait() -> None:
    queue = AdmissionQueue(at_once=2, wait_seconds=60.0)
    outcomes, tasks = await begun(queue, 20)
    outcomes[0].set_exception(StoreUnavailable("gone"))
    async with within(5.0):
        waited = await asyncio.gather(*tasks[2:], return_exceptions=True)
    assert [type(each) for each in waited] == [StoreUnavailable] * 18
    assert all("try again" in str(each) for each in waited)
    assert not tasks[1].done(), "the other one inside goes on"
    outcomes[1].set_exception(StoreUnavailable("gone"))
    await asyncio.gather(*tasks, return_exceptions=True)

    later, tasks = await begun(queue, 2)
    for outcome in later:
        outcome.set_result(None)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    "error", [None, InvalidValue("a body that does not fit"), RecordDamaged("of one model"), Contended("one publisher")]
)
async def test_whatever_else_comes_of_one_the_next_goes_in(error: Exception | None) -> None:
    queue = AdmissionQueue(at_once=1, wait_seconds=60.0)
    outcomes, tasks = await begun(queue, 3)
    if error is None:
        outcomes[0].set_result(None)
    else:
        outcomes[0].set_exception(error)
    for outcome in outcomes[1:]:
        outcome.set_result(None)
    async with within(5.0):
        _, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert others == [None, None]


async def test_a_request_that_is_cancelled_while_it_waits_or_is_admitted_keeps_none_out() -> None:
    queue = AdmissionQueue(at_once=1, wait_seconds=60.0)
    assert queue.try_enter()
    outcomes, tasks = await begun(queue, 4)
    tasks[0].cancel()
    await asyncio.sleep(0)
    queue.leave(is_unavailable=False)
    tasks[1].cancel()  # it is admitted, and has not run since
    for outcome in outcomes[2:]:
        outcome.set_result(None)
    async with within(5.0):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each).__name__ for each in ended] == ["CancelledError", "CancelledError", "NoneType", "NoneType"]
    assert queue.try_enter()
    assert not queue.try_enter(), "no place was given twice"


async def test_a_request_that_waits_for_too_long_is_told_so() -> None:
    queue = AdmissionQueue(at_once=1, wait_seconds=0.01)
    outcomes, tasks = await begun(queue, 3)
    async with within(5.0):
        refused = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert ["for 0.01 s; try again" in str(each) for each in refused] == [True, True]
    outcomes[0].set_result(None)
    await tasks[0]
    assert queue.try_enter()
    assert not queue.try_enter(), "no place was given twice"


async def test_each_request_that_waits_has_its_own_time() -> None:
    queue, loop = AdmissionQueue(at_once=1, wait_seconds=0.05), asyncio.get_running_loop()
    assert queue.try_enter()
    _, (first,) = await begun(queue, 1)
    since = loop.time()
    await wait_until(lambda: loop.time() > since + 0.001, "a moment has passed")
    _, (second,) = await begun(queue, 1)
    async with within(5.0):
        refused = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(each) for each in refused] == [StoreUnavailable] * 2


def test_requests_that_work_leave_connections_for_all_else_that_asks_redis() -> None:
    queues = 3
    assert AT_ONCE * queues <= CONNECTIONS - 16, "health, the registry and a worker share them"


async def test_a_refusal_of_redis_is_forgotten_before_the_next_requests_wait() -> None:
    queue = AdmissionQueue(at_once=1, wait_seconds=60.0)
    (outcome,), (task,) = await begun(queue, 1)
    outcome.set_exception(StoreUnavailable("gone"))
    await asyncio.gather(task, return_exceptions=True)
    outcomes, tasks = await begun(queue, 2)
    outcomes[0].set_exception(InvalidValue("an unknown model, as Redis says"))
    outcomes[1].set_result(None)
    async with within(5.0):
        _, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert second is None
