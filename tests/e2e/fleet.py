"""Processes that a test kills and starts again: a Redis of its own, workers and replicas that keep their addresses.

They are started and ended one by one, so that a test can have any of them down at any time; whatever still runs at
the end is killed.
"""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.conftest import wait_until
from tests.e2e.conftest import EXIT_SECONDS, READY_SECONDS, Service, spawn

HTTP_SECONDS = 30.0


def steady_port() -> int:
    """A free port below those that the system gives to connections, so that nobody takes it while its owner is down."""
    for _ in range(100):
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    pytest.fail("no free port between 15000 and 32000", pytrace=False)


class RedisServer:
    """A redis-server on a port; with ``keeps_data`` everything it has answered survives a kill."""

    def __init__(self, directory: Path, *, keeps_data: bool = False) -> None:
        self.port = steady_port()
        self._directory = directory
        self._keeps_data = keeps_data
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        self._spawn()
        await wait_until(self._answers, "redis-server answers", READY_SECONDS)

    def _spawn(self) -> None:
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        if server is None:
            pytest.fail("no redis-server on PATH: install it (Debian: apt-get install redis-server)", pytrace=False)
        keeping = ("--appendonly", "yes", "--appendfsync", "always") if self._keeps_data else ("--appendonly", "no")
        options = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory), "--save", "")
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([server, *options, *keeping], stdout=log, stderr=log)

    async def _answers(self) -> bool:
        try:
            async with Redis(port=self.port, protocol=2, socket_timeout=1) as redis:
                return bool(await redis.ping())
        except RedisError:
            return False

    async def kill(self) -> None:
        """End it at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """What it kept is lost; it is to be down."""
        shutil.rmtree(self._directory / "appendonlydir", ignore_errors=True)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class Member(Service):
    """A worker or replica; started again it has the same name, address and settings."""

    def __init__(self, name: str, role: str, environ: dict[str, str], directory: Path, client: httpx.AsyncClient):
        self.name = name
        self.role = role
        self._environ = environ
        self._directory = directory
        self._starts = 0
        self.is_ending = False
        """It was told to end, and need not have done so yet."""
        process, log = self._spawn()
        super().__init__(process, log, client)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self._environ["WAYMARK_INGEST_PORT" if self.role == "ingest" else "WAYMARK_PORT"])

    def _spawn(self) -> tuple[subprocess.Popen[bytes], Path]:
        self._starts += 1
        log = self._directory / f"{self.name}-{self._starts}.log"
        return spawn(self.role, self._environ, log), log

    def start(self) -> None:
        """Again, after it has ended. It is not ready at once."""
        assert not self.is_running
        self.is_ending = False
        self._process, self._log = self._spawn()

    def ask_to_end(self) -> None:
        """As an orchestrator does; it takes its time."""
        self.is_ending = True
        self._process.send_signal(signal.SIGTERM)

    async def ready(self) -> None:
        await wait_until(self.is_ready, f"{self.name} is ready", READY_SECONDS)

    def end(self) -> None:
        """Make an end of it, paused or not."""
        if self.is_running:
            self._process.kill()
            self._process.wait(EXIT_SECONDS)


class Fleet:
    """A Redis, ingest workers and query replicas."""

    def __init__(self, directory: Path, redis: RedisServer, stack: AsyncExitStack, settings: dict[str, Any]) -> None:
        self.redis = redis
        self.workers: list[Member] = []
        self.replicas: list[Member] = []
        self._directory = directory
        self._stack = stack
        self._settings = settings

    async def add(self, name: str, role: str, **settings: Any) -> Member:
        """One more process; it is not ready at once."""
        port = steady_port()
        values = {"redis_url": self.redis.url, "host": "127.0.0.1"} | self._settings | settings
        if role == "ingest":
            values |= {"ingest_port": port, "worker_id": name}
        else:
            values |= {"port": port}
        environ = {f"WAYMARK_{key.upper()}": str(value) for key, value in values.items()}
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HTTP_SECONDS, trust_env=False)
        member = Member(name, role, environ, self._directory, await self._stack.enter_async_context(client))
        self._stack.callback(member.end)
        (self.workers if role == "ingest" else self.replicas).append(member)
        return member

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.replicas]


@asynccontextmanager
async def fleet_of(
    directory: Path, *, workers: int, replicas: int, keeps_data: bool = False, settings: dict[str, Any]
) -> AsyncIterator[Fleet]:
    """All of them ready; ``settings``, by their field names, are for each of them."""
    async with AsyncExitStack() as stack:
        redis = RedisServer(directory, keeps_data=keeps_data)
        stack.push_async_callback(redis.kill)
        await redis.start()
        fleet = Fleet(directory, redis, stack, settings)
        for i in range(workers):
            await fleet.add(f"worker-{i}", "ingest")
        for i in range(replicas):
            await fleet.add(f"replica-{i}", "query")
        for member in fleet.members:
            await member.ready()
        yield fleet


def owners(publishers: Sequence[dict[str, Any]]) -> dict[str, str | None]:
    """The worker of each instance, of what ``/workers`` says."""
    return {publisher["instance_id"]: publisher["worker"] for publisher in publishers}
