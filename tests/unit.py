"""``pytest --unit``: runs the tests that need only Python, for the inner loop (``make check``).

A test is left out if it needs a real Redis, or if it is marked ``outside`` (it opens a socket or starts a process) or
``slow`` (all its cases together take a second or more). If any other test opens a socket or starts a process, it fails,
in the whole suite, too.

A test of a layer above the store has the fixture ``store``, which is emulated in the inner loop and real in the whole
suite. The tests of the store and of its scripts have the fixture ``redis``, and run on both.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

#: The directories of tests/ in which every test is ``outside``.
OUTSIDE_DIRECTORIES = {
    "chaos",
    "deploy",
    "e2e",
    "epp",
    "hostile",
    "ingest",
    "lua",
    "serving",
    "store",
}
#: The directories whose tests wait for at least two thirds of their time.
WAITING_DIRECTORIES = {"discovery", "e2e", "epp", "gateway", "ingest", "redis", "ui"}
#: The fixtures that start a server or open a socket.
OUTSIDE_FIXTURES = {"free_port", "redis_socket", "redis_url", "silent_port"}
#: Matches the mark of a file in which every test is ``outside`` or ``slow``.
WHOLE_FILE = re.compile(r"^pytestmark = pytest\.mark\.(outside|slow)$", re.MULTILINE)
#: The number of examples for a property that does not set it.
UNIT_EXAMPLES, WHOLE_EXAMPLES, RANDOM_EXAMPLES = 10, 12, 100
#: If a property sets its number of examples, or a test its number of random histories, the number is divided by these.
UNIT_PART, WHOLE_PART = 10, 8
#: The number of random histories of a test among the unit tests, which is also the minimum in the whole suite.
UNIT_SEEDS = 4
#: With the variable, a run has random examples, and all of them.
_is_random = "WAYMARK_TEST_RANDOM" in os.environ
#: The number of test processes per processor: more than one, because many tests wait for other processes. The second
#: number is a bound, for the sake of memory.
_PER_PROCESSOR, _PROCESSES_MAX = 3, 8
#: The number of new objects after which garbage is collected. With the default of 700, this took a twentieth of the
#: CPU.
_GARBAGE = 20_000
_FORBIDDEN = {"socket.bind": "binds a socket", "socket.connect": "connects", "subprocess.Popen": "starts a process"}
#: Whether a test that is not ``outside`` is running.
_is_inside = False
_is_unit = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unit", action="store_true", help="only tests without sockets, processes, Redis, slow properties"
    )


def pytest_configure(config: pytest.Config) -> None:
    global _is_unit
    is_unit = _is_unit = config.getoption("--unit")
    sys.addaudithook(_refuse)
    # No deadline for an example, because a busy machine makes it slow. The examples are the same in each run, so that a
    # failure can be repeated; WAYMARK_TEST_RANDOM=1 chooses others.
    whole = RANDOM_EXAMPLES if _is_random else WHOLE_EXAMPLES
    settings.register_profile(
        "waymark",
        max_examples=UNIT_EXAMPLES if is_unit else whole,
        deadline=None,
        derandomize=not _is_random,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("waymark")


def examples(count: int) -> int:
    """Return the number of examples for a property that asks for ``count``: all of them in a random run, otherwise a
    part."""
    if _is_random and not _is_unit:
        return count
    return max(UNIT_EXAMPLES, count // (UNIT_PART if _is_unit else WHOLE_PART))


def seeds(count: int) -> list[Any]:
    """Return parameters for a test of ``count`` random histories: a part of them, of which the first few are also unit
    tests."""
    tried = count if _is_random else min(count, max(UNIT_SEEDS, count // WHOLE_PART))
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= UNIT_SEEDS else []) for seed in range(tried)]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a test process report a set-up or a tear-down only if it failed or has output, and the start of a test only
    with ``-v``, which shows it. To read the reports of 14,000 tests takes the main process 20 s of CPU, and most
    reports are of these kinds.
    """
    shows_starts = session.config.option.verbose > 0
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = partial(_send_if_needed, plugin.sendevent, shows_starts)


def _send_if_needed(send: Callable[..., None], shows_starts: bool, name: str, **fields: Any) -> None:
    report = fields.get("data")
    if (name == "logstart" and not shows_starts) or (name == "testreport" and is_silent(report)):
        return
    send(name, **fields)


def is_silent(report: Any) -> bool:
    """Return whether a report only says that a set-up or a tear-down succeeded."""
    return report["when"] != "call" and report["outcome"] == "passed" and not report["sections"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of test processes for ``--numprocesses auto``."""
    return min(_PER_PROCESSOR * len(os.sched_getaffinity(0)), _PROCESSES_MAX)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that are left out as a whole, because some of them import much."""
    return True if config.getoption("--unit") and _is_left_out(collection_path) else None


def _is_left_out(path: Path) -> bool:
    if path.suffix == ".py":
        return WHOLE_FILE.search(path.read_text(encoding="utf-8")) is not None
    return path.parent.name == "tests" and path.name in OUTSIDE_DIRECTORIES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    outside = [item for item in items if is_outside(item)]
    is_unit = config.getoption("--unit")
    left_out = outside if is_unit else emulated_twins(items)
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    remaining = [item for item in items if item not in gone]
    items[:] = in_order(remaining, getattr(config, "workerinput", {}).get("workercount", 1))
    if not is_unit and config.pluginmanager.hasplugin("rerunfailures"):
        # If the machine stops for seconds, tests can fail that have no deadline. The closing lines name each test that
        # was run again; one that fails twice has failed.
        for item in outside:
            item.add_marker(pytest.mark.flaky(reruns=1))


def emulated_twins(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the emulated cases of tests that also run on a real Redis."""
    names = {item.nodeid for item in items}

    def is_twin(item: pytest.Item) -> bool:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        return parameters.get("store") == "emulated" and item.nodeid.replace("emulated", "real") in names

    return [item for item in items if is_twin(item)]


def in_order(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return the tests in an order in which each process begins with its share of those marked ``long``, because a long
    test at the end delays the whole run. After that, every second process runs its waiting tests first, and the other
    processes run theirs last, so that the processes do not all wait at once. xdist gives each process the same number
    of consecutive tests, and later moves the last tests of a busy process to an idle one.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    waiting = deque(item for item in others if is_waiting(item))
    computing = deque(item for item in others if not is_waiting(item))
    ordered: list[pytest.Item] = []
    for process in range(processes):
        begins = long[process::processes]
        share = (len(items) - len(ordered)) // (processes - process) - len(begins)
        waits = _taken(waiting, min(share, len(waiting) // (processes - process)))
        computes = _taken(computing, share - len(waits))
        ordered += [*begins, *(computes + waits if process % 2 else waits + computes)]
    return [*ordered, *computing, *waiting]


def _taken(items: deque[pytest.Item], count: int) -> list[pytest.Item]:
    return [items.popleft() for _ in range(min(max(0, count), len(items)))]


def is_waiting(item: pytest.Item) -> bool:
    """Return whether a test mostly waits for other processes."""
    return not WAITING_DIRECTORIES.isdisjoint(item.nodeid.partition("::")[0].split("/"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turn off garbage collection while tests are collected: thousands of objects stay, and searching them takes a
    third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(_GARBAGE, 10, 10)
        gc.enable()


def is_outside(item: pytest.Item) -> bool:
    """Return whether a test needs more than Python, or takes more than a moment."""
    needs = OUTSIDE_FIXTURES.intersection(getattr(item, "fixturenames", ()))
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_real = "real" in (parameters.get("redis"), parameters.get("store"), parameters.get("any_bench"))
    is_in_directory = not OUTSIDE_DIRECTORIES.isdisjoint(item.nodeid.partition("::")[0].split("/"))
    return bool(
        is_in_directory or needs or is_real or item.get_closest_marker("outside") or item.get_closest_marker("slow")
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Mark the time in which sockets and processes are opened by the test itself, not by pytest or a plugin."""
    global _is_inside
    _is_inside = not is_outside(item)
    try:
        return (yield)
    finally:
        _is_inside = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_inside and event in _FORBIDDEN:
        raise RuntimeError(f"a unit test {_FORBIDDEN[event]}; mark it with @pytest.mark.outside")
