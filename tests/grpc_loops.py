"""For every test that uses gRPC in its own process: ``from tests.grpc_loops import events_of_this_loop``.

gRPC has one queue of events for a process. Whichever loop reads it hands each event to the loop that it is for. That
raises where that loop belonged to a test that is over, and the error failed the test that runs now.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


@pytest.fixture(autouse=True)
async def events_of_this_loop(anyio_backend: str) -> None:
    """Applies to all tests of the module, or of the directory of the ``conftest.py``, that imports it."""
    leave_out_closed_loops(asyncio.get_running_loop())


def leave_out_closed_loops(loop: asyncio.AbstractEventLoop) -> None:
    """An event for a loop that is closed is no error of the test that runs in ``loop``; any other error is."""
    report = loop.get_exception_handler()
    assert report is not None, "anyio collects what callbacks raise"

    def report_others(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            report(loop, context)

    loop.set_exception_handler(report_others)
