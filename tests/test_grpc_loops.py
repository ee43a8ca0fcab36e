"""Each test that uses gRPC in its own process ignores events for closed loops."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from tests.grpc_loops import leave_out_closed_loops

TESTS = Path(__file__).parent
USES_GRPC = re.compile(r"^(import grpc|from grpc|from waymark\.(epp\.server|tokenization\.uds) )", re.MULTILINE)
HAS_FIXTURE = "import events_of_this_loop"


def test_every_module_that_uses_grpc_has_the_fixture() -> None:
    modules = [path for path in TESTS.rglob("test_*.py") if USES_GRPC.search(path.read_text(encoding="utf-8"))]
    assert len(modules) > 4
    without = [path.name for path in modules if not any(map(_has_fixture, (path, path.with_name("conftest.py"))))]
    assert without == [], "see tests/grpc_loops.py"


def _has_fixture(path: Path) -> bool:
    return path.exists() and HAS_FIXTURE in path.read_text(encoding="utf-8")


async def test_other_errors_of_callbacks_are_still_reported() -> None:
    loop = asyncio.get_running_loop()
    before, reported = loop.get_exception_handler(), list[Any]()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    try:
        leave_out_closed_loops(loop)
        other = RuntimeError("Event loop is busy")
        for error in (RuntimeError("Event loop is closed"), other, ValueError("Event loop is closed")):
            loop.call_exception_handler({"message": "m", "exception": error})
    finally:
        loop.set_exception_handler(before)
    assert [str(error) for error in reported] == [str(other), "Event loop is closed"]
