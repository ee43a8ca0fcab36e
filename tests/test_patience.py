"""Deadlines of tests: all of them are multiplied by the same factor."""

from __future__ import annotations

import ast
import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import patience
from waymark.base.settings import Settings

TESTS = Path(__file__).parent
#: Programs that are not tests, such as measurements.
PROGRAMS = {"benchmarks", "chaos", "conformance", "endurance", "sanitize"}
#: Calls of the standard library that wait -> the function to use in tests.
INSTEAD = {
    "asyncio.timeout": "within",
    "asyncio.timeout_at": "within",
    "asyncio.wait_for": "within",
    "anyio.fail_after": "within",
    "anyio.move_on_after": "within",
}
#: ``asyncio.wait`` returns at its timeout and does not fail. A test uses it to show that something does not happen.
MAY_RETURN = {"asyncio.wait"}
SLEEPS = {"anyio.sleep", "asyncio.sleep", "time.sleep"}
#: Files that sleep for a fixed time -> the reason. None of them waits in this way for a state that it asserts.
MAY_SLEEP = {
    "api/test_activity.py": "Redis is away for a while",
    "api/test_hostile_connections.py": "a client that sends slowly",
    "base/test_asker.py": "a server that never answers",
    "discovery/test_describe.py": "an engine that never answers",
    "e2e/test_behind_nginx.py": "the pace of a load",
    "e2e/test_hostile_template.py": "the pace of a load",
    "e2e/test_redis_away.py": "the pace of a load, and of a fault",
    "gateway/test_long_streams.py": "the pace of looks at what is to last for a while",
    "hostile/api_server.py": "the pace of an API server's answer to a watch",
    "hostile/beside.py": "the pace of looks at the memory, and at a neighbour",
    "hostile/engine_client.py": "how long an attack lasts",
    "hostile/engine_server.py": "the pause between two looks at how often it was asked",
    "hostile/gateway_client.py": "how long an attack lasts",
    "hostile/gateway_engine.py": "an engine that says nothing",
    "hostile/page.py": "how long an attack lasts",
    "hostile/picker_stream.py": "how long an attack lasts",
    "ingest/test_catch_up.py": "the pace of a publisher's endless replay",
    "ingest/test_large_frames.py": "the pace of a flood",
    "ingest/test_late_answers.py": "the pace of a publisher",
    "ingest/test_replay.py": "the pace of a publisher's endless replay",
    "ingest/test_scraping.py": "an engine that never answers",
    "ingest/test_subscribers.py": "the pace of looks at what is to last for a while",
    "ingest/test_worker.py": "slow calls, and the pace of a load",
    "serving/wire.py": "pieces of a request in packets of their own",
    "store/histories.py": "the pause between two looks at a process",
    "tokenization/record.py": "the pace of a program that records, and is no test",
    "tokenization/test_local.py": "turns of the loop while a thread works",
    "tokenization/test_remote.py": "a service that never answers",
}
#: Calls that wait for a process, and without a ``timeout`` do so forever.
FOR_A_PROCESS = {f"subprocess.{name}" for name in ("call", "check_call", "check_output", "run")}
#: The endings of names of measured times, and of calls whose differences are measured times.
MEASURED = ("elapsed", "seconds", "took", "waited")
CLOCKS = (".monotonic", ".perf_counter", ".time")
#: Words without which a source has neither a deadline nor a measured time. They are searched first, because to parse a
#: source takes long.
ABOUT_TIME = re.compile(
    r"timeout|fail_after|move_on_after|wait_for|process\.wait|\.join\(\s*\d|subprocess|time\(|"
    + "|".join((*MEASURED, *(clock.removeprefix(".") for clock in CLOCKS[:2])))
)


def bare_deadlines(source: str) -> list[str]:
    """Return the line and the reason for each deadline that ignores the load, in a source and in the programs that it
    has as strings."""
    found: list[str] = []
    if ABOUT_TIME.search(source) is None:
        return found
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call():
                found += [f"line {node.lineno}: {why}" for why in bare_waits(node)]
            case ast.Assert(test=ast.Compare() as test) if is_time_below_a_number(test):
                found.append(f"line {node.lineno}: {ast.unparse(test)} is false on a busy machine; use patient()")
            case ast.Constant(value=str(program)) if "import " in program and "\n" in program:
                found += [f"line {node.lineno}: in the program: {why}" for why in bare_deadlines_in(program)]
    return found


def bare_waits(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    if name in INSTEAD:
        yield f"{name}() does not know the load; use patience.{INSTEAD[name]}()"
    for keyword in call.keywords:
        is_wait = keyword.arg in {"timeout", "socket_timeout", "request_timeout"} and name not in MAY_RETURN
        if is_wait and isinstance(keyword.value, (ast.Constant, ast.Name)) and not _is_none(keyword.value):
            value = ast.unparse(keyword.value)
            yield f"{keyword.arg}={value} does not know the load; use patient({value})"
    if name.endswith(("process.wait", ".join")) and call.args and _is_number(call.args[0]):
        yield f"{name}({ast.unparse(call.args[0])}) does not know the load"
    may_end = {keyword.arg for keyword in call.keywords if not _is_none(keyword.value)}
    if name in FOR_A_PROCESS and not {"timeout", None} & may_end:
        yield f"{name}() may wait for ever; give timeout=patient(...)"


def bare_deadlines_in(program: str) -> list[str]:
    """Return the deadlines of a program in a string that are numbers. It has no ``patience``, so they should be its
    arguments."""
    try:
        tree = ast.parse(program)
    except SyntaxError:  # the string is prose, or only a part of a program
        return []
    return [
        ast.unparse(call)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        if any(keyword.arg == "timeout" and _is_number(keyword.value) for keyword in call.keywords)
        or (dotted(call.func) in INSTEAD and _is_number(call.args[-1]))
    ]


def is_time_below_a_number(test: ast.Compare) -> bool:
    """Return whether a comparison demands that a measured time is below a bound that ignores the load."""
    sides = [test.left, *test.comparators]
    for lower, order, upper in zip(sides, test.ops, sides[1:], strict=False):
        measured, bound = (lower, upper) if isinstance(order, (ast.Lt, ast.LtE)) else (upper, lower)
        if isinstance(order, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) and _is_measured(measured):
            calls = {dotted(node.func) for node in ast.walk(bound) if isinstance(node, ast.Call)}
            if not calls & {"patient", "patience.patient"} and not _is_measured(bound):
                return True
    return False


def _is_measured(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return any(dotted(each.func).endswith(CLOCKS) for each in ast.walk(node) if isinstance(each, ast.Call))
    return dotted(node).endswith(MEASURED)


def dotted(node: ast.expr) -> str:
    """Return a dotted name, without the part before a call or a subscript."""
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


def fixed_sleeps(source: str) -> list[int]:
    """Return the lines in which a source sleeps for a fixed time."""
    found: list[int] = []
    if "sleep(" not in source:
        return found  # to parse a source takes long
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and dotted(node.func) in SLEEPS:
            times = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            if any(isinstance(each, (int, float)) and each > 0 for each in times):
                found.append(node.lineno)
    return found


@pytest.mark.slow
def test_no_test_sleeps_where_it_could_wait_for_something() -> None:
    paths = [path for path in TESTS.rglob("*.py") if not PROGRAMS & set(path.parts)]
    found = {str(path.relative_to(TESTS)) for path in paths if fixed_sleeps(path.read_text(encoding="utf-8"))}
    assert found == set(MAY_SLEEP)


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("asyncio.sleep(0.1)", True),
        ("time.sleep(patient(1))", True),
        ("asyncio.sleep(0)", False),
        ("asyncio.sleep(pause)", False),
    ],
)
def test_a_fixed_sleep_is_found(call: str, is_found: bool) -> None:
    assert bool(fixed_sleeps(call)) is is_found


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
        "    subprocess.check_output(x)\n"
        "    subprocess.run(x, **options)\n"
        "    subprocess.run(x, timeout=None)\n"
    )
    lines = {found.partition(":")[0] for found in bare_deadlines(source)}
    assert lines == {f"line {n}" for n in (2, 3, 4, 5, 6, 9, 11)}


@pytest.mark.parametrize(
    ("claim", "is_found"),
    [
        ("figures.takeover_seconds < TAKEOVER_SECONDS", True),
        ("0.1 <= waited <= 5", True),
        ("5 > time.monotonic() - began", True),
        ("loop.time() - began < 2 * timeout", True),
        ("time.monotonic() - began < 2 + patient(1)", False),
        ("time.monotonic() - began >= 2", False),
        ("first_seconds < second_seconds", False),
        ("len(found) < 2", False),
    ],
)
def test_a_claim_about_speed_is_found(claim: str, is_found: bool) -> None:
    assert bool(bare_deadlines(f"assert {claim}")) is is_found


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("asyncio.wait_for(x, 60)", True),
        ("urlopen(x, timeout=60)", True),
        ("asyncio.wait_for(x, float(sys.argv[1]))", False),
        ("urlopen(x, timeout=seconds)", False),
    ],
)
def test_a_bare_deadline_is_found_in_a_program_that_is_a_string(call: str, is_found: bool) -> None:
    assert bool(bare_deadlines(f"RUN = {f'import asyncio{chr(10)}{call}'!r}")) is is_found


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
    defaults = {name: getattr(Settings, name) for name in settings}
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
