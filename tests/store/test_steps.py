"""Steps: how they end if nobody waits for them any more, or if they take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.patience import patient
from waymark.store.steps import Steps, TimeLimit, Waiting, Within, finished


class Work:
    """Steps that wait for an event, and say how they end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.said: list[str] = []

    async def _wait(self) -> str:
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.said.append("cancelled")
            raise
        return "done"

    def steps(self) -> Steps[str]:
        try:
            result: str = yield Waiting(self._wait())
        except GeneratorExit:
            self.said.append("closed")
            raise
        return result


def within(seconds: float, steps: Steps[str]) -> Steps[str]:
    result: str = yield Within(TimeLimit(seconds), steps)
    return result


async def test_steps_within_their_time_have_their_result() -> None:
    work = Work()
    work.may_end.set()
    assert await finished(within(60, work.steps())) == "done"
    assert work.said == []


async def test_an_error_within_the_time_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("wrong")

    def steps() -> Steps[str]:
        yield Waiting(fails())
        return ""

    with pytest.raises(ValueError, match="wrong"):
        await finished(within(60, steps()))


async def test_late_steps_end_with_what_they_wait_for() -> None:
    work = Work()
    with pytest.raises(TimeoutError):
        await finished(within(0.001, work.steps()))
    assert work.said[0] == "closed"
    await wait_until(lambda: work.said == ["closed", "cancelled"], "the task is cancelled, too")


async def test_steps_with_one_limit_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that end in time are forgotten, and the first of the others is late at its own time."""
    loop, limit, timers = asyncio.get_running_loop(), TimeLimit(patient(0.2)), list[float]()
    call_at = loop.call_at

    def at(moment: float, callback: Any, *arguments: Any, **named: Any) -> asyncio.TimerHandle:
        if getattr(callback, "__self__", None) is limit:
            timers.append(moment)
        return call_at(moment, callback, *arguments, **named)

    async def limited(work: Work) -> str:
        def steps() -> Steps[str]:
            return (yield Within(limit, work.steps()))

        return await finished(steps())

    in_time = [Work() for _ in range(100)]
    for work in in_time:
        work.may_end.set()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_at", at)
        assert [await limited(work) for work in in_time] == ["done"] * 100
        assert len(limit._running) == 1
        began = loop.time()
        with pytest.raises(TimeoutError):
            await limited(late := Work())
        assert late.said[0] == "closed"
        assert loop.time() - began >= limit.seconds - 0.01
    assert 1 <= len(timers) <= 3  # the first was for those that had ended by then
    assert not limit._running


@pytest.mark.parametrize("wrap", [lambda steps: steps, lambda steps: within(60, steps)], ids=["alone", "within"])
async def test_the_steps_of_a_cancelled_caller_end(wrap: Callable[[Steps[str]], Steps[str]]) -> None:
    work, results = Work(), list[str]()
    caller = asyncio.create_task(finished(wrap(work.steps()), unwanted=results.append))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await wait_until(lambda: work.said == ["closed", "cancelled"], "both have ended")
    assert results == []


async def test_a_result_that_comes_as_its_caller_is_cancelled_is_unwanted() -> None:
    class Now:
        def begin(self, receiver: object) -> None:
            self.receiver = receiver

    step, results = Now(), list[str]()

    def steps() -> Steps[str]:
        result: str = yield step
        return result

    caller = asyncio.create_task(finished(steps(), unwanted=results.append))
    await asyncio.sleep(0)
    step.receiver.set_result("a reservation")  # type: ignore[attr-defined]
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert results == ["a reservation"]
