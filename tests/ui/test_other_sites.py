"""What a page of another site makes a real browser send: no write of it counts, also over plain HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import wait_until
from tests.live import Live, start
from tests.ui.browser import visitor

pytestmark = pytest.mark.outside

#: What needs no permission of the server: a body without a type, bytes, text, a form, and a beacon.
WRITES = """
async ([url, body]) => {
  const bytes = new TextEncoder().encode(body);
  const bodies = [new Blob([body]), bytes, body, new URLSearchParams(JSON.parse(body))];
  for (const each of bodies) {
    await fetch(url, {method: "POST", mode: "no-cors", body: each}).catch(() => {});
  }
  navigator.sendBeacon(url, new Blob([body]));
  navigator.sendBeacon(url, bytes);
  await fetch(url, {method: "POST", headers: {"Content-Type": "application/json"}, body}).catch(() => {});
}
"""
#: Each of these reaches the server; the last one, which must ask first, does so without a body.
REQUESTS = 7
#: What is tried: to send an engine no more requests, to plant another one, to take the index's word from it, to end it.
BODIES: dict[str, dict[str, Any]] = {
    "/weight": {"instance_id": "pod-1", "weight": 0},
    "/register": {"type": "standard", "modelname": "m", "instance_id": "planted", "block_size": 4},
    "/events": {"event_id": 1, "event_type": "cleared", "backend_id": "pod-1"},
    "/unregister": {"instance_id": "pod-1"},
}
#: The path and the status of each of these requests in the access log.
STATUS = re.compile(r"route=(/weight|/register|/events|/unregister) .*status=(\d+)")


@asynccontextmanager
async def other_site() -> AsyncIterator[str]:
    """A page on another port: the same site for a browser, and another origin."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>elsewhere</title>", content_type="text/html")

    application = web.Application()
    application.router.add_get("/", page)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def weight(live: Live) -> float:
    async with live.client() as client:
        (publisher,) = (await client.get("/workers")).json()["publishers"]
        found: float = publisher["weight"]
        return found


# Browsers take 127.0.0.1 for a safe place, and send Sec-Fetch-Site there. To any other name they do not without TLS.
CASES = list(product(("127.0.0.1", "waymark.test"), ("127.0.0.1", "evil.test")))


async def test_a_page_of_another_site_changes_nothing(redis_url: str, tmp_path: Path) -> None:
    async with start("serve", redis_url, tmp_path / "log", access_log=True) as live, live.client() as client:
        body = {"type": "standard", "modelname": "m", "instance_id": "pod-1", "block_size": 4}
        (await client.post("/register", json=body)).raise_for_status()
        for host, elsewhere in CASES:
            await its_page_changes_nothing(live, host, elsewhere)


async def its_page_changes_nothing(live: Live, host: str, elsewhere: str) -> None:
    """A browser has the page of another site, and then our own."""

    def logged() -> list[tuple[str, str]]:
        return STATUS.findall(live.said())

    begun, own_write = len(logged()), ("/weight", "200")
    async with live.client() as client:
        (await client.post("/weight", json={"instance_id": "pod-1", "weight": 1})).raise_for_status()

    await wait_until(lambda: own_write in logged()[begun:], "the own write is in the log")
    before = len(logged())
    async with other_site() as port, visitor() as page:
        await page.goto(f"http://{elsewhere}:{port}/")
        own = f"http://{host}:{live.port}"
        for path, written in BODIES.items():
            await page.evaluate(WRITES, [own + path, json.dumps(written)])
        await wait_until(
            lambda: len(logged()) >= before + REQUESTS * len(BODIES),
            lambda: f"all have arrived:\n{live.said()}",
            20,
        )
        assert {status for _, status in logged()[before:]} <= {"403", "405", "415"}, live.said()
        assert await weight(live) == 1.0, "the engine is still there, and alone"
        # The own page may, from the same browser.
        await page.goto(f"{own}/ui")
        status = await page.evaluate(
            """async body => (await fetch("/weight", {
                method: "POST", headers: {"Content-Type": "application/json"}, body})).status""",
            json.dumps(BODIES["/weight"]),
        )
        assert status == 200
        assert await weight(live) == 0.0
        await wait_until(lambda: own_write in logged()[before:], "the write of the own page is in the log")
