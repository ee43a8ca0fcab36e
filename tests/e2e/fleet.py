"""Processes that a test kills and starts again: a Redis of its own, workers and replicas that keep their addresses.

They are started and ended one by one, so that a test can have any of them down at any time; whatever still runs at
the end is killed.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import wait_until
from tests.e2e.conftest import EXIT_SECONDS, READY_SECONDS, Service, spawn
from tests.e2e.redis_server import RedisServer
from tests.forked import Process
from tests.patience import patient
from tests.ports import unused_port

HTTP_SECONDS = 30.0


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
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def log_path(self) -> Path:
        """Of this process; one that is started again has another."""
        return self._log

    @property
    def port(self) -> int:
        return int(self._environ["WAYMARK_PROBE_PORT" if self.role == "ingest" else "WAYMARK_PORT"])

    def _spawn(self) -> tuple[Process, Path]:
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
            self._process.wait(patient(EXIT_SECONDS))


async def new_member(
    stack: AsyncExitStack, directory: Path, name: str, role: str, settings: Mapping[str, Any]
) -> Member:
    """A process that ends with ``stack``; it is not ready at once. ``settings`` are by their field names."""
    port = unused_port()
    own = {"probe_port": port, "worker_id": name} if role == "ingest" else {"port": port}
    values = {"host": "127.0.0.1"} | own | dict(settings)
    environ = {f"WAYMARK_{key.upper()}": str(value) for key, value in values.items()}
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patient(HTTP_SECONDS), trust_env=False)
    member = Member(name, role, environ, directory, await stack.enter_async_context(client))
    stack.callback(member.end)
    return member


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
        values = {"redis_url": self.redis.url} | self._settings | settings
        member = await new_member(self._stack, self._directory, name, role, values)
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
        stack.callback(redis.kill)
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
