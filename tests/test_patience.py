"""Deadlines of tests: all of them are multiplied by the same factor."""

from __future__ import annotations

import ast
import asyncio
import os
from pathlib import Path

import pytest

from tests import patience
from waymark.settings import Settings

TESTS = Path(__file__).parent
#: Programs that measure, and are no tests.
PROGRAMS = {"benchmarks", "chaos", "conformance", "endurance", "sanitize"}
#: Calls of the standard library that wait, and what stands for them here.
INSTEAD = {
    "asyncio.timeout": "within",
    "asyncio.timeout_at": "within",
    "asyncio.wait_for": "within",
    "anyio.fail_after": "within",
    "anyio.move_on_after": "within",
}
#: ``asyncio.wait`` returns at its timeout and does not fail: a test uses it to see that something does not happen.
MAY_RETURN = {"asyncio.wait"}


def bare_deadlines(source: str) -> list[str]:
    """Line and reason of each deadline in ``source`` that does not depend on the load."""
    found = []
    for call in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]:
        name = dotted(call.func)
        if name in INSTEAD:
            found.append(f"line {call.lineno}: {name}() does not know the load; use patience.{INSTEAD[name]}()")
        for keyword in call.keywords:
            is_wait = keyword.arg in {"timeout", "socket_timeout", "request_timeout"} and name not in MAY_RETURN
            if is_wait and isinstance(keyword.value, (ast.Constant, ast.Name)) and not _is_none(keyword.value):
                value = ast.unparse(keyword.value)
                found.append(f"line {call.lineno}: {keyword.arg}={value} does not know the load; use patient({value})")
        if name.endswith(("process.wait", ".join")) and call.args and _is_number(call.args[0]):
            found.append(f"line {call.lineno}: {name}({ast.unparse(call.args[0])}) does not know the load")
    return found


def dotted(node: ast.expr) -> str:
    """A name with its dots; what is before a call or a subscript in it is left out."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{dotted(value)}.{attribute}"
    return ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


@pytest.mark.slow
def test_every_deadline_knows_the_load() -> None:
    paths = [path for path in TESTS.rglob("*.py") if not PROGRAMS & set(path.parts) and path.name != "patience.py"]
    found = {str(path.relative_to(TESTS)): bare_deadlines(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_bare_deadline_is_found() -> None:
    source = (
        "async def f():\n"
        "    async with asyncio.timeout(5): pass\n"
        "    await asyncio.wait_for(x, 5)\n"
        "    subprocess.run(x, timeout=30)\n"
        "    Redis(socket_timeout=SECONDS)\n"
        "    process.wait(10)\n"
        "    await asyncio.wait({x}, timeout=0.2)\n"
        "    subprocess.run(x, timeout=patient(30))\n"
    )
    assert sorted(found.partition(":")[0] for found in bare_deadlines(source)) == [f"line {n}" for n in (2, 3, 4, 5, 6)]


async def test_the_variable_is_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patience.VARIABLE, "2.5")
    assert patience.patient(4) == 10.0
    async with patience.within(1) as deadline:
        left = (deadline.when() or 0.0) - asyncio.get_running_loop().time()
    assert 1.0 < left <= 2.5


@pytest.mark.parametrize("value", ["many", "0", "-1", "nan", "inf"])
def test_a_factor_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(patience.VARIABLE, value)
    with pytest.raises(ValueError, match=f"{patience.VARIABLE} is '{value}'; give a number above 0"):
        patience.patience()


def test_a_test_has_the_factor_and_not_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience.VARIABLE not in os.environ
    monkeypatch.setattr(patience, "_given", "7")
    assert patience.patience() == 7.0


def test_without_the_variable_the_load_is_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_given", "")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for busy, factor in ((0.0, 1.0), (1.0, 1.0), (2.0, 2.0), (10.0, 10.0)):
        monkeypatch.setattr(patience, "_busy", lambda busy=busy: busy)
        assert patience.patience() == factor


@pytest.mark.parametrize(("factor", "times"), [("1", 1.0), ("3", 3.0), ("1000", None)])
def test_deadlines_of_waymark_are_the_defaults_times_the_factor(
    monkeypatch: pytest.MonkeyPatch, factor: str, times: float | None
) -> None:
    monkeypatch.setenv(patience.VARIABLE, factor)
    settings = patience.patient_settings()
    defaults = {name: Settings.model_fields[name].default for name in settings}
    most = {name: 60_000 if name.endswith("_ms") else 60.0 for name in settings}
    assert settings == ({name: times * default for name, default in defaults.items()} if times else most)
    monkeypatch.delenv(patience.VARIABLE)
    assert Settings(**settings).redis_timeout_seconds == settings["redis_timeout_seconds"]


async def test_waiting_ends_with_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patience.VARIABLE, "0.001")
    with pytest.raises(pytest.fail.Exception, match="it is still not so: the sun is up"):
        await patience.wait_until(lambda: False, "the sun is up")
    with pytest.raises(pytest.fail.Exception, match="it is still not so: made late"):
        patience.wait_for(lambda: False, lambda: "made late", seconds=0.01)


async def test_load_that_comes_while_a_test_waits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "patience", lambda: 1e9)
    answers = iter([False] * 5)
    await patience.wait_until(lambda: next(answers, True), "five times asked", seconds=0.001)
