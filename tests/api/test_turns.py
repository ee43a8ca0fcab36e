"""turns: behind those whom Redis does not answer nobody waits his full time, and nobody is kept out afterwards."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import within
from waymark.api.turns import AT_ONCE, Turns
from waymark.errors import InvalidValue, StoreUnavailable
from waymark.store.client import CONNECTIONS


async def inside(turns: Turns, outcome: asyncio.Future[None]) -> None:
    if not turns.take():
        await turns.wait()
    is_away: bool | None = None
    try:
        await outcome
        is_away = False
    except StoreUnavailable:
        is_away = True
        raise
    finally:
        turns.give_back(is_away=is_away)


async def begun(turns: Turns, count: int) -> tuple[list[asyncio.Future[None]], list[asyncio.Task[None]]]:
    """So many requests, in order, and what each of them will come to once it is inside."""
    outcomes = [asyncio.get_running_loop().create_future() for _ in range(count)]
    tasks = [asyncio.ensure_future(inside(turns, outcome)) for outcome in outcomes]
    await asyncio.sleep(0)
    return outcomes, tasks


async def test_one_that_redis_does_not_answer_is_a_refusal_for_all_who_wait() -> None:
    turns = Turns(at_once=2, wait_seconds=60.0)
    outcomes, tasks = await begun(turns, 20)
    outcomes[0].set_exception(StoreUnavailable("gone"))
    async with within(5.0):
        waited = await asyncio.gather(*tasks[2:], return_exceptions=True)
    assert [type(each) for each in waited] == [StoreUnavailable] * 18
    assert all("try again" in str(each) for each in waited)
    assert not tasks[1].done(), "the other one inside goes on"
    outcomes[1].set_exception(StoreUnavailable("gone"))
    await asyncio.gather(*tasks, return_exceptions=True)

    later, tasks = await begun(turns, 2)
    for outcome in later:
        outcome.set_result(None)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("error", [None, InvalidValue("a body that does not fit")])
async def test_whatever_else_comes_of_one_the_next_goes_in(error: Exception | None) -> None:
    turns = Turns(at_once=1, wait_seconds=60.0)
    outcomes, tasks = await begun(turns, 3)
    if error is None:
        outcomes[0].set_result(None)
    else:
        outcomes[0].set_exception(error)
    for outcome in outcomes[1:]:
        outcome.set_result(None)
    async with within(5.0):
        _, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert others == [None, None]


async def test_who_goes_while_waiting_or_in_the_moment_of_his_turn_keeps_nobody_out() -> None:
    turns = Turns(at_once=1, wait_seconds=60.0)
    assert turns.take()
    outcomes, tasks = await begun(turns, 4)
    tasks[0].cancel()
    await asyncio.sleep(0)
    turns.give_back(is_away=False)
    tasks[1].cancel()  # it has been given the turn, and has not run since
    for outcome in outcomes[2:]:
        outcome.set_result(None)
    async with within(5.0):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each).__name__ for each in ended] == ["CancelledError", "CancelledError", "NoneType", "NoneType"]
    assert turns.take()
    assert not turns.take(), "no turn has come twice"


async def test_who_waits_for_too_long_is_told_so() -> None:
    turns = Turns(at_once=1, wait_seconds=0.01)
    outcomes, tasks = await begun(turns, 3)
    async with within(5.0):
        refused = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert ["for 0.01 s; try again" in str(each) for each in refused] == [True, True]
    outcomes[0].set_result(None)
    await tasks[0]
    assert turns.take()
    assert not turns.take(), "no turn has come twice"


def test_requests_that_work_leave_connections_for_all_else_that_asks_redis() -> None:
    assert AT_ONCE <= CONNECTIONS - 16, "health, the registry and a worker share them, one command at a time each"
