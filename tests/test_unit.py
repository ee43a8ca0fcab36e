"""``pytest --unit`` leaves out the right tests, and the others cannot open sockets or start processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from xdist.remote import WorkerInteractor

from tests import unit
from tests.patience import patient

ROOT = Path(__file__).parents[1]


class Item(SimpleNamespace):
    """A stub of a test item. Two items are equal only if they are the same object, as in pytest."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


def item(fixtures: tuple[str, ...] = (), mark: str = "", path: str = "tests/test_it.py", **parameters: str) -> Any:
    """Return a collected test, with the attributes on which the choice depends."""
    return Item(
        path=Path(path),
        nodeid=path,
        fixturenames=fixtures,
        callspec=SimpleNamespace(params=parameters),
        get_closest_marker=lambda name: name if name == mark else None,
    )


@pytest.mark.parametrize(
    ("test", "is_outside"),
    [
        (item(), False),
        (item(("redis",), redis="emulated"), False),
        (item(("redis",), redis="real"), True),
        (item(("store",), store="real"), True),
        (item(("free_port", "store")), True),
        (item(path="tests/lua/test_it.py"), True),
        (item(path="tests/store/redis/test_it.py"), True),
        (item(mark="outside"), True),
        (item(mark="slow"), True),
        (item(mark="peer"), False),
    ],
)
def test_what_is_outside(test: Any, is_outside: bool) -> None:
    assert unit.is_outside(test) is is_outside


def configuration(*, is_unit: bool) -> Any:
    plugins = SimpleNamespace(hasplugin=lambda name: name == "rerunfailures")
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    return SimpleNamespace(getoption=lambda _: is_unit, pluginmanager=plugins, hook=hook)


@pytest.mark.parametrize(
    ("is_unit", "expected"),
    [
        (True, ["store emulated", "only emulated", "redis emulated"]),
        (False, ["store real", "only emulated", "redis emulated", "redis real"]),
    ],
)
def test_above_the_store_a_test_has_one_redis(is_unit: bool, expected: list[str]) -> None:
    tests = [item(("store",), path=f"store {kind}", store=kind) for kind in ("emulated", "real")]
    tests.append(item(("store",), path="only emulated", store="emulated"))
    tests += [item(("redis",), path=f"redis {kind}", redis=kind) for kind in ("emulated", "real")]
    for test in tests:
        test.add_marker = lambda _: None
    unit.pytest_collection_modifyitems(configuration(is_unit=is_unit), tests)
    assert [str(test.path) for test in tests] == expected


def test_what_runs_once_more() -> None:
    marks: dict[str, list[Any]] = {"unit": [], "outside": []}
    tests = [item(), item(mark="outside")]
    for test, added in zip(tests, marks.values(), strict=True):
        test.add_marker = added.append
    unit.pytest_collection_modifyitems(configuration(is_unit=False), tests)
    assert not marks["unit"]
    assert [(mark.name, mark.kwargs) for mark in marks["outside"]] == [("flaky", {"reruns": 1})]


@pytest.mark.parametrize(
    ("processes", "expected"),
    [(1, "CFI ABDEGH"), (2, "CI AB F DEGH"), (3, "C AB F DE I GH"), (9, "C F I A B D E G H")],
)
def test_each_process_begins_with_its_part_of_the_long_tests(processes: int, expected: str) -> None:
    tests = [item(mark="long" if name in "CFI" else "", path=name) for name in "ABCDEFGHI"]
    assert in_order(tests, processes) == expected.replace(" ", "")


@pytest.mark.parametrize(
    ("processes", "expected"),
    [(1, "L VWXYZ ABCDE"), (2, "L VW AB CDE XYZ"), (3, "L V AB C WX YZ DE"), (5, "LV AW XB CY ZDE")],
)
def test_half_of_the_processes_wait_while_the_others_compute(processes: int, expected: str) -> None:
    tests = [item(path=name) for name in "ABCDE"]
    tests += [item(path=f"tests/{name}/V") for name in ("discovery", "e2e", "epp", "store/redis", "ui")]
    for test, name in zip(tests[5:], "VWXYZ", strict=True):
        test.path = Path(name)
    tests.append(item(mark="long", path="L"))
    assert in_order(tests, processes) == expected.replace(" ", "")


def in_order(tests: list[Any], processes: int) -> str:
    ordered = unit.in_order(tests, processes)
    assert sorted(test.path.name for test in ordered) == sorted(test.path.name for test in tests), "none is lost"
    return "".join(test.path.name for test in ordered)


@pytest.mark.parametrize("event", ["socket.bind", "socket.connect", "subprocess.Popen"])
def test_what_a_unit_test_may_not_do(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    with pytest.raises(RuntimeError, match=r"mark it with @pytest\.mark\.outside"):
        unit._refuse(event, ())
    monkeypatch.setattr(unit, "_is_inside", False)
    unit._refuse(event, ())


@pytest.mark.outside
def test_the_events_are_those_of_python() -> None:
    seen: set[str] = set()
    is_listening = True
    sys.addaudithook(lambda event, _: seen.add(event) if is_listening else None)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        subprocess.run([sys.executable, "-c", ""], check=True, timeout=patient(30))
    is_listening = False
    assert unit._FORBIDDEN.keys() <= seen


@pytest.mark.outside
def test_it_leaves_out_directories_and_marked_tests() -> None:
    command = [sys.executable, "-m", "pytest", "--unit", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["tests/lua", "tests/domain/test_hashing.py", "tests/cli/test_demonstration.py", "tests/test_unit.py"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stdout
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert not {path for path in collected if path.split("/")[1] in unit.OUTSIDE_DIRECTORIES}
    assert "tests/domain/test_hashing.py" in collected
    assert "tests/cli/test_demonstration.py" not in collected
    assert "test_the_events_are_those_of_python" not in done.stdout
    assert "test_what_is_outside" in done.stdout


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_test_process_reports_no_set_up_that_says_nothing(verbose: int) -> None:
    process, sent = object.__new__(WorkerInteractor), list[Any]()
    process.log = lambda *_: None
    process.channel = SimpleNamespace(send=sent.append)
    plugins = SimpleNamespace(get_plugins=lambda: {process, unit})
    config = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(verbose=verbose))
    unit.pytest_sessionstart(cast("pytest.Session", SimpleNamespace(config=config)))
    silent = {"when": "setup", "outcome": "passed", "sections": []}
    told = [silent | more for more in ({"when": "call"}, {"outcome": "failed"}, {"sections": [("out", "text")]})]
    for report in (silent, *told, silent | {"when": "teardown"}):
        process.sendevent("testreport", data=report)
    process.sendevent("runtest_protocol_complete", item_index=1)
    assert [fields.get("data") for _, fields in sent] == [*told, None]
    process.sendevent("logstart", nodeid="a test")
    assert len(sent) == len(told) + 1 + verbose


@pytest.mark.parametrize(
    ("is_unit", "is_random", "tried"),
    [
        (True, False, (10, 40, 4)),
        (True, True, (10, 40, 30)),
        (False, False, (10, 50, 4)),
        (False, True, (15, 400, 30)),
    ],
)
def test_a_property_is_tried_with_a_part_of_its_examples(
    is_unit: bool, is_random: bool, tried: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "_is_unit", is_unit)
    monkeypatch.setattr(unit, "_is_random", is_random)
    assert (unit.examples(15), unit.examples(400), len(unit.seeds(30))) == tried
    assert len(unit.seeds(3)) == 3
