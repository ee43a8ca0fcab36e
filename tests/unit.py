"""``pytest --unit``: the tests that need nothing but Python, for the inner loop (``make check``).

A test is left out when it needs a real Redis, when it is marked ``outside`` (it opens a socket or starts a process) or
``slow`` (it takes a second, or as much in all its cases). A socket or a process in one of the others is an error, in
the whole suite, too.

A test above the store has the fixture ``store``, which is emulated in the inner loop and real in the whole suite: what
differs between the two is below. The tests of the store and of its scripts have the fixture ``redis`` and run on both.
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

#: Directories of tests/ in which every test is outside.
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
#: Those whose tests wait at least two thirds of their time.
WAITING_DIRECTORIES = {"discovery", "e2e", "epp", "gateway", "ingest", "redis", "ui"}
#: Fixtures that start a server or open a socket.
OUTSIDE_FIXTURES = {"free_port", "redis_socket", "redis_url", "silent_port"}
#: The mark of a file in which every test is outside or slow.
WHOLE_FILE = re.compile(r"^pytestmark = pytest\.mark\.(outside|slow)$", re.MULTILINE)
#: How many examples a property is tried with that does not say it itself.
UNIT_EXAMPLES, WHOLE_EXAMPLES, RANDOM_EXAMPLES = 10, 12, 100
#: The part of the examples of a property that says how many it needs, and of the random histories of a test.
UNIT_PART, WHOLE_PART = 10, 8
#: How many random histories of a test are among the unit tests, and how many are in the suite at least.
UNIT_SEEDS = 4
#: Another run looks for other examples, and has them all.
_is_random = "WAYMARK_TEST_RANDOM" in os.environ
#: Test processes for each processor: many tests wait for other processes. With three a run took longer, because each of
#: them collects all tests and the processors are in use already. And at most so many, for the memory's sake.
_PER_PROCESSOR, _PROCESSES_MAX = 2, 8
#: New objects after which garbage is looked for. With the default of 700 a twentieth of the CPU went there.
_GARBAGE = 20_000
_FORBIDDEN = {"socket.bind": "binds a socket", "socket.connect": "connects", "subprocess.Popen": "starts a process"}
#: A test that is not ``outside`` runs.
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
    # A busy machine makes an example slow, and that is no fault of the code. The same tests have the same examples, so
    # that a run that fails fails again; WAYMARK_TEST_RANDOM=1 looks for others.
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
    """How many examples a property is tried with that has ``count``: a part of them, unless others are looked for."""
    if _is_random and not _is_unit:
        return count
    return max(UNIT_EXAMPLES, count // (UNIT_PART if _is_unit else WHOLE_PART))


def seeds(count: int) -> list[Any]:
    """Parameters of a test of ``count`` random histories: a part of them, and the first few in the inner loop too."""
    tried = count if _is_random else min(count, max(UNIT_SEEDS, count // WHOLE_PART))
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= UNIT_SEEDS else []) for seed in range(tried)]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a test process report a set-up or a tear-down only if it says something, and the start of a test only with
    ``-v``, which shows it: to read the reports of 14,000 tests takes the main process 20 s of CPU, and most are these.
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
    """Whether the report only says that a set-up or a tear-down went well."""
    return report["when"] != "call" and report["outcome"] == "passed" and not report["sections"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``--numprocesses auto``."""
    return min(_PER_PROCESSOR * len(os.sched_getaffinity(0)), _PROCESSES_MAX)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out as a whole is not even imported: some of it imports much."""
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
        # A machine that stops for seconds breaks what no deadline covers. The closing lines name each test that was
        # run again, and one that fails twice has failed.
        for item in outside:
            item.add_marker(pytest.mark.flaky(reruns=1))


def emulated_twins(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests above the store that are also there on a real Redis."""
    names = {item.nodeid for item in items}

    def is_twin(item: pytest.Item) -> bool:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        return parameters.get("store") == "emulated" and item.nodeid.replace("emulated", "real") in names

    return [item for item in items if is_twin(item)]


def in_order(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Let each process begin with its part of the tests that are marked ``long``: one that begins last is waited for.
    Then every second process runs its waiting tests before its others, and the rest run them after: while all
    processes wait, the processors are idle.

    xdist gives each process as many tests as the others, in their order, and later to an idle one of another's last.
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
    """Whether the test waits for other processes most of its time."""
    return not WAITING_DIRECTORIES.isdisjoint(item.nodeid.partition("::")[0].split("/"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes thousands of objects that stay: to look for garbage among them takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(_GARBAGE, 10, 10)
        gc.enable()


def is_outside(item: pytest.Item) -> bool:
    """Whether the test needs more than Python and a moment."""
    needs = OUTSIDE_FIXTURES.intersection(getattr(item, "fixturenames", ()))
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_real = "real" in (parameters.get("redis"), parameters.get("store"), parameters.get("any_bench"))
    is_in_directory = not OUTSIDE_DIRECTORIES.isdisjoint(item.nodeid.partition("::")[0].split("/"))
    return bool(
        is_in_directory or needs or is_real or item.get_closest_marker("outside") or item.get_closest_marker("slow")
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Mark the time in which a socket or a process is the test's own, and not pytest's or a plugin's."""
    global _is_inside
    _is_inside = not is_outside(item)
    try:
        return (yield)
    finally:
        _is_inside = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_inside and event in _FORBIDDEN:
        raise RuntimeError(f"a unit test {_FORBIDDEN[event]}; mark it with @pytest.mark.outside")
