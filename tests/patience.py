"""How long a test waits before it fails.

A deadline in a test is only there so that a broken test ends: it is never a claim about speed. So every deadline is
written for a quiet machine and multiplied by ``patience()``. ``WAYMARK_TEST_PATIENCE`` gives the factor; without it
the factor follows from the load that the machine has at that moment.
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
#: As it was when the tests began. A test itself does not see the variable: to Waymark it would be an unknown setting.
_given = os.environ.get(VARIABLE, "")
#: Processes per processor that the machine may run before deadlines get longer.
_QUIET = 0.5
#: A predicate is asked again after this part of the time that it has been waited for, within these seconds: to ask a
#: hundred times a second for as long as it takes would keep the processor from the processes that are waited for.
_PAUSE_PART, _PAUSE_MIN, _PAUSE_MAX = 0.1, 0.015, 0.1


def patience() -> float:
    """The factor for every deadline, at least 1 unless ``WAYMARK_TEST_PATIENCE`` says otherwise."""
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
    """Processes that run or want to: the mean of the last minute, or of this moment where that is more."""
    now = Path("/proc/loadavg")
    running = int(now.read_text().split()[3].partition("/")[0]) if now.exists() else 0
    return max(os.getloadavg()[0], float(running))


def patient(seconds: float) -> float:
    """A deadline, given as it should be on a quiet machine."""
    return seconds * patience()


def patient_settings() -> dict[str, Any]:
    """Waymark's own deadlines, by the names of their settings: on a busy machine Redis is slow, too.

    On a quiet machine they are the defaults. A test that sets one of them shows what happens at its end.
    """
    defaults = {
        "redis_timeout_seconds": 2.0,
        "query_deadline_ms": 1000,
    }
    most = {name: 60_000 if name.endswith("_ms") else 60.0 for name in defaults}
    return {name: type(value)(min(most[name], patient(value))) for name, value in defaults.items()}


def within(seconds: float) -> asyncio.Timeout:
    """``asyncio.timeout`` for tests."""
    return asyncio.timeout(patient(seconds))


async def wait_until(
    predicate: Callable[[], bool | Awaitable[bool]], description: str | Callable[[], str], seconds: float = 10.0
) -> None:
    """Return as soon as ``predicate``, plain or async, is true; fail with ``description`` after ``seconds``.

    A ``description`` that is a function is asked for its sentence only when it is needed.
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
    """``wait_until`` for fixtures that outlive one event loop."""
    began = time.monotonic()
    while not predicate():
        time.sleep(_pause(_fail_when_late(began, description, seconds)))


def _pause(waited: float) -> float:
    """How long to sleep before a predicate is asked again."""
    return min(_PAUSE_MAX, max(_PAUSE_MIN, _PAUSE_PART * waited))


def _fail_when_late(began: float, description: str | Callable[[], str], seconds: float) -> float:
    """Return the seconds waited. Asked anew each time, so that load that came meanwhile counts too."""
    waited = time.monotonic() - began
    if waited >= patient(seconds):
        import pytest  # programs that are no tests wait by this module, too, where there is no pytest

        what = description() if callable(description) else description
        pytest.fail(f"after {waited:.1f} s it is still not so: {what}")
    return waited
