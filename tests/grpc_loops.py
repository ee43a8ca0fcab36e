"""A fixture for every test that uses gRPC in its own process: ``from tests.grpc_loops import events_of_this_loop``.

gRPC has one queue of events per process. The loop that reads the queue hands each event to the loop for which it is
meant. If that loop is closed, because it belonged to an earlier test, this raises an error, which would fail the
present test.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


@pytest.fixture(autouse=True)
async def events_of_this_loop(anyio_backend: str) -> None:
    """Ignore events for closed loops, in all tests of the module, or below the ``conftest.py``, that imports this
    fixture."""
    leave_out_closed_loops(asyncio.get_running_loop())


def leave_out_closed_loops(loop: asyncio.AbstractEventLoop) -> None:
    """Let ``loop`` ignore errors because another loop is closed, and report all other errors."""
    report = loop.get_exception_handler()
    assert report is not None, "anyio collects what callbacks raise"

    def report_others(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            report(loop, context)

    loop.set_exception_handler(report_others)
