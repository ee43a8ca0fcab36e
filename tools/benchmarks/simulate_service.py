"""The Waymark of a simulation: a real Redis, ingest workers and query replicas as processes, and real sockets of
engines.

It implements ``Index``, like the model in ``simulate_index``, so a router can use either.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path

from tools.benchmarks.processes import START_SECONDS, RedisServer, Server, redis_server, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL
from tools.benchmarks.simulate_trace import Request
from waymark.client import AsyncClient, Unavailable
from waymark.simulator.encode import Encoder, WireEvent
from waymark.simulator.publisher import SimulatedPublisher
from waymark.store import keys

SETTLE_SECONDS = 120.0
#: A long timeout, so that a busy machine changes no answer; speed does not matter here.
QUERY_SECONDS = 30.0
_PAUSE_SECONDS = 0.001
#: The first group of an empty Redis; its publishers are numbered in the order of their registration.
_GROUP = 1


class Waymark:
    """A running Waymark, opened by ``started``. Engine i is instance ``engine-<i>`` and publisher i + 1."""

    def __init__(
        self,
        folder: Path,
        redis: RedisServer,
        publishers: Sequence[SimulatedPublisher],
        counts: Mapping[str, int],
        environ: Mapping[str, str],
        addresses: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._redis = redis
        self._publishers = publishers
        self._unsettled: set[int] = set()
        self._counts = counts
        self._environ = environ
        self._addresses = addresses
        self._processes = ExitStack()
        self._servers: list[Server] = []
        self._clients: list[AsyncClient] = []
        self._turns = cycle(self._clients)

    # ---- as an index -----------------------------------------------------------------------------------

    def tell(self, engine: int, events: list[WireEvent]) -> None:
        self._publishers[engine].publish(events, ts=time.time())
        self._unsettled.add(engine)

    async def settle(self) -> None:
        await _until(self._is_settled, "the index has what engines have published", SETTLE_SECONDS)

    async def matches(self, request: Request, names: Sequence[int]) -> Sequence[int] | None:
        """Return the matches by the next replica in turn."""
        return await self._asked(next(self._turns), request)

    async def matches_of_all(self, request: Request) -> list[Sequence[int] | None]:
        """Return the matches by every replica."""
        return [await self._asked(client, request) for client in self._clients]

    async def kill(self) -> None:
        """Send SIGKILL to every worker and replica, and wait until no engine has a subscriber."""
        self._end()
        await _until(lambda: not any(p.subscribers for p in self._publishers), "engines see nobody", START_SECONDS)

    async def restart(self) -> float:
        """Start new processes in their place, which know only the address of Redis. Return the seconds that it
        takes."""
        began = time.monotonic()
        await self.start()
        await self._until_heard()
        return time.monotonic() - began

    # ---- processes -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all workers and replicas at once, and wait until they are ready."""
        for client in self._clients:
            await client.close()
        self._clients.clear()
        environ = {"WAYMARK_QUERY_DEADLINE_MS": str(int(QUERY_SECONDS * 1000)), **self._environ}
        for role, count in self._counts.items():
            for _ in range(count):
                process = waymark(self._folder, role, self._redis.url, environ, is_awaited=False)
                self._servers.append(self._processes.enter_context(process))
        async with AsyncExitStack() as stack:
            for server in self._servers:
                client = _client(server)
                if server.name.endswith("query"):
                    self._clients.append(client)
                else:
                    stack.push_async_callback(client.close)
                await _until(client.ready, f"{server.name} is ready", START_SECONDS)
        self._turns = cycle(self._clients)

    async def register(self) -> None:
        """Register every engine, in order, and wait until each has a subscriber."""
        for engine, publisher in enumerate(self._publishers):
            await self._clients[0].register(
                f"engine-{engine}",
                publisher.endpoint,
                replay_endpoint=publisher.replay_endpoint,
                model=MODEL,
                block_size=BLOCK_SIZE,
                address=self._addresses[engine] if self._addresses else None,
            )
        await self._until_heard()

    async def start_gateways(self, count: int) -> list[str]:
        """Start gateways, wait until they know every engine, and return their URLs."""
        servers = [
            self._processes.enter_context(
                waymark(self._folder, "gateway", self._redis.url, self._environ, is_awaited=False)
            )
            for _ in range(count)
        ]
        self._servers += servers
        for server in servers:
            async with _client(server) as client:
                await _until(client.ready, f"{server.name} is ready", START_SECONDS)
        return [f"http://127.0.0.1:{server.port}" for server in servers]

    async def until_reserved(self, requests: int, begun: int) -> None:
        """Wait until ``requests`` requests are reserved, and ``begun`` of them have had their first token."""

        def is_so() -> bool:
            found = self._redis.client.zrange(keys.reservations(_GROUP), 0, -1)
            timed = sum(isinstance(each, bytes) and each.endswith(b" timed") for each in found)
            return (len(found), timed) == (requests, begun)

        await _until(is_so, f"{requests} requests are reserved, {begun} of them with their first token", SETTLE_SECONDS)

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the replicas."""
        return [f"http://127.0.0.1:{server.port}" for server in self._servers if server.name.endswith("query")]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        self._end()

    # ---- inside ----------------------------------------------------------------------------------------

    def _end(self) -> None:
        for server in self._servers:
            os.kill(server.pid, signal.SIGKILL)
        self._processes.close()
        self._servers.clear()

    async def _asked(self, client: AsyncClient, request: Request) -> Sequence[int] | None:
        try:
            matches = await client.query(MODEL, request.tokens(), BLOCK_SIZE)
        except Unavailable:
            return None
        return [matches[f"engine-{engine}"].longest_matched for engine in range(len(self._publishers))]

    async def _until_heard(self) -> None:
        """Wait until every engine has a subscriber, and everything that it has published is in the index."""
        self._unsettled.update(range(len(self._publishers)))
        await _until(lambda: all(p.subscribers for p in self._publishers), "every engine is heard", SETTLE_SECONDS)
        await self.settle()

    def _is_settled(self) -> bool:
        self._unsettled = {engine for engine in self._unsettled if not self._has_all_of(engine)}
        return not self._unsettled

    def _has_all_of(self, engine: int) -> bool:
        watermark = self._redis.client.hget(keys.record(_GROUP, engine + 1), "watermark")
        return (-1 if watermark is None else int(watermark)) == self._publishers[engine].next_seq - 1


@asynccontextmanager
async def started(
    folder: Path,
    *,
    engines: int,
    workers: int,
    replicas: int,
    environ: Mapping[str, str],
    addresses: Sequence[str] = (),
) -> AsyncIterator[Waymark]:
    """Start a Waymark on an empty Redis of its own, and register its engines, with ``addresses`` if there are any."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        publishers = [
            await stack.enter_async_context(
                SimulatedPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", encoder=Encoder("vllm-map"))
            )
            for _ in range(engines)
        ]
        service = Waymark(folder, redis, publishers, {"ingest": workers, "query": replicas}, environ, addresses)
        stack.push_async_callback(service.close)
        await service.start()
        await service.register()
        yield service


def _client(server: Server) -> AsyncClient:
    # No query is sent twice, because a router that gets no answer continues without one.
    return AsyncClient(f"http://127.0.0.1:{server.port}", timeout=QUERY_SECONDS, retry_seconds=0.0, trust_env=False)


async def _until(predicate: Callable[[], bool | Awaitable[bool]], description: str, seconds: float) -> None:
    """Wait like ``processes.wait_until``, but keep this event loop running, so that the engines' replay sockets can
    answer."""
    deadline = time.monotonic() + seconds
    while True:
        answer = predicate()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        if time.monotonic() >= deadline:
            raise SystemExit(f"after {seconds:g} s it is still not so: {description}")
        await asyncio.sleep(_PAUSE_SECONDS)
