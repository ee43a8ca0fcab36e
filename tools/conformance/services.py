"""The two compared services, as processes: a released service of Dynamo, and Waymark with a real Redis."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

START_SECONDS = 30.0


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def process(log: Path, *command: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    with log.open("wb") as output:
        running = await asyncio.create_subprocess_exec(*command, env=kept | environ, stdout=output, stderr=output)
    try:
        yield running
    finally:
        if running.returncode is None:
            running.terminate()
            try:
                async with asyncio.timeout(10):
                    await running.wait()
            except TimeoutError:
                running.kill()
                await running.wait()


async def until_up(client: httpx.AsyncClient, path: str, running: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            if running.returncode is not None:
                raise SystemExit(f"it did not start:\n{_text(log)}")
            try:
                if (await client.get(path)).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it is not up yet
            await asyncio.sleep(0.05)


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


@asynccontextmanager
async def dynamo(directory: Path, python: str, module: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start a ``dynamo.indexer`` or ``dynamo.select_service``, and yield a client."""
    port, log = unused_port(), directory / f"{module}.log"
    async with (
        process(log, python, "-m", module, "--port", str(port)) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client,
    ):
        await until_up(client, "/health", running, log)
        yield client


@asynccontextmanager
async def waymark(directory: Path, **environ: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start a ``waymark serve`` with a new Redis, and yield a client whose base path is that of the Dynamo API."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        raise SystemExit("no redis-server on PATH")
    port, path, log = unused_port(), directory / "redis.sock", directory / "waymark.log"
    settings = {"WAYMARK_REDIS_URL": f"unix://{path}", "WAYMARK_PORT": str(port), "WAYMARK_HOST": "127.0.0.1"} | environ
    options = ("--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory))
    async with (
        process(directory / "redis.log", server, *options),
        process(log, sys.executable, "-m", "waymark", "serve", **settings) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/dynamo", timeout=10, trust_env=False) as client,
    ):
        await until_up(client, f"http://127.0.0.1:{port}/ready", running, log)
        yield client
