"""Servers of tests leave no connection open."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from tests.listening import listening, port_of
from tests.patience import within


async def _leave_a_handler_waiting() -> None:
    waits = asyncio.Event()

    async def handler(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        waits.set()
        await asyncio.Event().wait()

    async with listening(handler) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        await waits.wait()
    async with within(20):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.outside
def test_a_connection_ends_with_its_server() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asyncio.run(_leave_a_handler_waiting())
        gc.collect()
    assert [str(each.message) for each in told] == []
