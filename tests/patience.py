"""The deadlines of tests, which grow with the load of the machine.

The only purpose of a deadline in a test is that a broken test ends; it is never a claim about speed. So every deadline
is written for a quiet machine and multiplied by ``patience()``. ``WAYMARK_TEST_PATIENCE`` sets the factor; without it
the factor depends on the load of the machine at that moment.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

VARIABLE = "WAYMARK_TEST_PATIENCE"
#: The value when the tests began. Tests do not see the variable, because to Waymark it would be an unknown setting.
_given = os.environ.get(VARIABLE, "")
#: The number of processes per processor from which on deadlines become longer.
_QUIET = 0.5
#: The pause between two calls of a predicate is this share of the time waited so far, within these bounds. A hundred
#: calls a second all the time would take the processor from the processes under test.
_PAUSE_PART, _PAUSE_MIN, _PAUSE_MAX = 0.1, 0.015, 0.1


def patience() -> float:
    """Return the factor for every deadline. It is at least 1, unless ``WAYMARK_TEST_PATIENCE`` sets it."""
    given = os.environ.get(VARIABLE, _given)
    if not given:
        return max(1.0, _busy() / (_QUIET * len(os.sched_getaffinity(0))))
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ValueError(f"{VARIABLE} is {given!r}; give a number above 0, such as 10 for a busy machine")
    return factor


def _busy() -> float:
    """Return the number of processes that are running or ready to run: the mean of the last minute, or the present
    number if that is larger."""
    now = Path("/proc/loadavg")
    running = int(now.read_text().split()[3].partition("/")[0]) if now.exists() else 0
    return max(os.getloadavg()[0], float(running))


def patient(seconds: float) -> float:
    """Return a deadline for the present load, from one for a quiet machine."""
    return seconds * patience()


def patient_settings() -> dict[str, Any]:
    """Return Waymark's own deadlines, by the names of their settings. They are longer on a busy machine, where Redis is
    slow, too. On a quiet machine they are the defaults. A test of a timeout sets its own value.
    """
    defaults = {
        "redis_timeout_seconds": 2.0,
        "query_deadline_ms": 1000,
    }
    most = {name: 60_000 if name.endswith("_ms") else 60.0 for name in defaults}
    return {name: type(value)(min(most[name], patient(value))) for name, value in defaults.items()}


def within(seconds: float) -> asyncio.Timeout:
    """Return an ``asyncio.timeout`` for tests."""
    return asyncio.timeout(patient(seconds))


async def wait_until(
    predicate: Callable[[], bool | Awaitable[bool]], description: str | Callable[[], str], seconds: float = 10.0
) -> None:
    """Wait until ``predicate``, plain or async, is true; fail with ``description`` after ``seconds``. If
    ``description`` is a function, it is called only for a failure.
    """
    began = time.monotonic()
    while True:
        answer = predicate()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        await anyio.sleep(_pause(_fail_when_late(began, description, seconds)))


def wait_for(predicate: Callable[[], bool], description: str | Callable[[], str], seconds: float = 10.0) -> None:
    """Wait like ``wait_until``, but without an event loop, for fixtures that outlive one."""
    began = time.monotonic()
    while not predicate():
        time.sleep(_pause(_fail_when_late(began, description, seconds)))


def _pause(waited: float) -> float:
    """Return the seconds to sleep before the next call of a predicate."""
    return min(_PAUSE_MAX, max(_PAUSE_MIN, _PAUSE_PART * waited))


def _fail_when_late(began: float, description: str | Callable[[], str], seconds: float) -> float:
    """Fail if the time is over, and return the seconds waited. The load is read each time, because it may have
    grown."""
    waited = time.monotonic() - began
    if waited >= patient(seconds):
        import pytest  # programs without pytest also use this module

        what = description() if callable(description) else description
        pytest.fail(f"after {waited:.1f} s it is still not so: {what}")
    return waited
