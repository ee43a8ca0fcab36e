"""A stub of the master of a pool without events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


class Master:
    """A stub of Mooncake's master: ``has`` has its keys, and ``asked`` the keys of each request."""

    def __init__(self) -> None:
        self.url = ""
        self.has: set[str] = set()
        self.asked: list[list[str]] = []
        self.looked_up: list[list[int]] = []
        self.answer: Callable[[], Awaitable[web.Response]] | None = None

    async def look_up(self, request: web.Request) -> web.Response:
        self.looked_up.append((await request.json())["tokens"])
        assert self.answer is not None
        return await self.answer()

    async def handle(self, request: web.Request) -> web.Response:
        keys = request.query["keys"].split(",")
        self.asked.append(keys)
        if self.answer is not None:
            return await self.answer()
        data = {
            key: {"ok": True, "values": []} if key in self.has else {"ok": False, "error": "OBJECT_NOT_FOUND"}
            for key in keys
        }
        return web.json_response({"success": True, "data": data})


@asynccontextmanager
async def started_master() -> AsyncIterator[Master]:
    """Start a master on a free port, and yield it."""
    found = Master()
    app = web.Application(client_max_size=2**20)
    app.router.add_get("/batch_query_keys", found.handle)
    app.router.add_post("/lookup", found.look_up)
    runner = web.AppRunner(app, max_line_size=2**20, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()
