"""The reservation of a stream that outlasts it, by a gateway that is a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from tests.conftest import wait_until
from tests.gateway.conftest import chat, events, registration
from tests.patience import patient
from tests.ports import unused_port
from waymark.store.store import Store

pytestmark = pytest.mark.outside

#: A gateway whose reservations are shorter than half a minute.
PROGRAM = """
import sys
from waymark.cli import main
from waymark.decide.under_way import RequestsUnderWay
RequestsUnderWay.reserved_ms, RequestsUnderWay.renew_seconds = int(sys.argv.pop()), float(sys.argv.pop())
raise SystemExit(main(sys.argv[1:]))
"""
RESERVED_SECONDS = 1.0


def reserved_seconds() -> float:
    """Return how long a reservation lasts: a busy machine renews one late, but a test waits for the end of it."""
    return min(patient(RESERVED_SECONDS), 3 * RESERVED_SECONDS)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store.open(redis_url)
    yield store
    await store.close()


@asynccontextmanager
async def engine(until: asyncio.Event) -> AsyncIterator[str]:
    """An engine whose answers end when ``until`` is set."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        return await events(request, b'data: {"choices": []}\n\n', b"data: [DONE]\n\n", until=until)

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)  # and not its ``/render``: a stream without end, too
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def gateway(redis_url: str, log: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Callable[[], None]]]:
    """A client of a gateway, and what kills that."""
    port, seconds = unused_port(), reserved_seconds()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    environ |= {"WAYMARK_REDIS_URL": redis_url, "WAYMARK_HOST": "127.0.0.1", "WAYMARK_PORT": str(port)}
    words = [sys.executable, "-c", PROGRAM, "gateway", str(seconds / 5), str(int(1000 * seconds))]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*words, env=environ, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=patient(60), trust_env=False) as client:

            async def is_ready() -> bool:
                assert process.returncode is None, f"the gateway has ended: {log}"
                try:
                    return (await client.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await wait_until(is_ready, "the gateway is ready", 60)
            yield client, process.kill
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def requests(store: Store) -> int:
    """The requests under way, after what is overdue has ended as an ingest worker would end it."""
    (group,) = (await store.directory.groups()).values()
    await store.reservations.end_overdue(group.group_id)
    return sum(load.requests for load in (await store.reservations.loads(group.group_id)).values())


async def becomes(store: Store, number: int) -> None:
    async def is_so() -> bool:
        return await requests(store) == number

    await wait_until(is_so, f"{number} requests are under way", 30)


async def test_a_stream_is_reserved_until_it_ends(redis_url: str, store: Store, tmp_path: Path) -> None:
    until = asyncio.Event()
    async with engine(until) as url, gateway(redis_url, tmp_path / "log") as (client, _):
        await store.registry.register(registration(url, 0))
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat("a", stream=True)))
        await becomes(store, 1)
        looked_until = asyncio.get_running_loop().time() + 1.3 * reserved_seconds()
        while asyncio.get_running_loop().time() < looked_until:
            assert await requests(store) == 1
            await asyncio.sleep(0.1)
        assert not asking.done()
        until.set()
        assert (await asking).text.endswith("data: [DONE]\n\n")
        await becomes(store, 0)


async def test_the_reservation_of_a_killed_gateway_ends_by_itself(redis_url: str, store: Store, tmp_path: Path) -> None:
    async with engine(asyncio.Event()) as url, gateway(redis_url, tmp_path / "log") as (client, kill):
        await store.registry.register(registration(url, 0))
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat("a", stream=True)))
        await becomes(store, 1)
        kill()
        with pytest.raises(httpx.TransportError):
            await asking
        await becomes(store, 0)
