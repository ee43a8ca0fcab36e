"""nginx as operators are given it, in front of replicas that fail by order: a client sees none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_until
from tests.e2e.nginx import Nginx
from tests.patience import patient

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
REQUESTS = 40


class Replica:
    """Answers every request; the next one ends its connection instead, where ``breaks`` is set."""

    def __init__(self) -> None:
        self.breaks = False
        self.port = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As after a kill: connections end, and new ones are refused."""
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while not reader.at_eof():
                await reader.readuntil(b"\r\n\r\n")
                if self.breaks:
                    self.breaks = False
                    break
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    async with AsyncExitStack() as stack:
        replicas = [Replica() for _ in range(3)]
        for replica in replicas:
            await replica.start()
            stack.push_async_callback(replica.stop)
        yield replicas


@pytest.fixture
async def client(tmp_path: Path, replicas: list[Replica]) -> AsyncIterator[httpx.AsyncClient]:
    nginx = Nginx(tmp_path, [replica.port for replica in replicas])
    try:
        await nginx.start()
        async with httpx.AsyncClient(base_url=nginx.url, timeout=patient(30.0), trust_env=False) as client:
            yield client
    finally:
        nginx.kill()


async def statuses(client: httpx.AsyncClient, count: int) -> set[int]:
    return {(await client.get("/")).status_code for _ in range(count)}


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_error_of_each_replica_and_two_gone_are_no_error_of_a_client(
    replicas: list[Replica], client: httpx.AsyncClient, at_once: bool
) -> None:
    for replica in replicas:
        replica.breaks = True
        if not at_once:
            await wait_until(partial(_has_broken, replica, client), "the replica was asked, and broke")
    assert await statuses(client, REQUESTS) == {200}
    assert not any(replica.breaks for replica in replicas), "each had its error"

    for replica in replicas[1:]:
        await replica.stop()
        assert await statuses(client, REQUESTS) == {200}
    for replica in replicas[1:]:
        await replica.start()
    assert await statuses(client, REQUESTS) == {200}


async def _has_broken(replica: Replica, client: httpx.AsyncClient) -> bool:
    assert (await client.get("/")).status_code == 200
    return not replica.breaks
