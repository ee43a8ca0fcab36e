"""A connection that the other end has closed is an unavailable Redis, whichever event loop says so in its own words."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.listening import listening, port_of
from waymark.base.errors import StoreUnavailable
from waymark.store.redis.client import RedisClient


async def _ask_what_closes_at_once() -> set[type]:
    """What becomes of many commands to a server that accepts and closes."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with listening(close) as server:
        client = RedisClient.open(f"redis://127.0.0.1:{port_of(server)}/0", timeout_seconds=2)
        try:
            outcomes = await asyncio.gather(*(client.ping() for _ in range(200)), return_exceptions=True)
        finally:
            await client.close()
    return {type(outcome) for outcome in outcomes}


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_server_that_closes_every_connection_is_unavailable(loop_factory: type[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(_ask_what_closes_at_once()) == {StoreUnavailable}
