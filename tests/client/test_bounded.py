"""A server that sends a byte now and then is given up when the time of the whole try is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.patience import patient, within
from waymark.base.errors import ServiceUnreachable
from waymark.client import AsyncClient, Client, Unavailable
from waymark.client.bounded import BoundedClient
from waymark.console.service import RemoteService

pytestmark = pytest.mark.outside

BODY = b'{"count":0,"services":[]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
LATE = "there was no answer in time"


#: What a client waits for the whole of an answer. One that drips takes some five times as long.
SECONDS = 0.1


@asynccontextmanager
async def dripping(at_once: int) -> AsyncIterator[str]:
    """A server that answers its first request at once, and each further one a byte at a time, after its first
    ``at_once`` bytes, with pauses of a fifth of ``SECONDS``; yields its URL. An answer ends if its client goes away.
    """
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                requests += 1
                count = len(HEAD + BODY) if requests == 1 else at_once
                writer.write((HEAD + BODY)[:count])
                for byte in (HEAD + BODY)[count:]:
                    try:
                        async with within(SECONDS / 5):
                            await reader.read(1)
                        return  # the client has gone away
                    except TimeoutError:
                        writer.write(bytes([byte]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, within(120):
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def of_router(url: str) -> Callable[[], Any]:
    return Client(url, timeout=patient(SECONDS), trust_env=False).services


def of_commands(url: str) -> Callable[[], Any]:
    service = RemoteService(url, seconds=patient(SECONDS))
    return lambda: service.get("/services")


@pytest.mark.parametrize("at_once", [0, len(HEAD)], ids=["head", "body"])
@pytest.mark.parametrize("client", [of_router, of_commands])
async def test_a_server_that_drips_costs_one_timeout(client: Callable[[str], Callable[[], Any]], at_once: int) -> None:
    async with dripping(at_once) as url:
        ask = client(url)
        assert await asyncio.to_thread(ask) is not None
        for _ in range(2):  # over the connection of the first request, and over a new one
            with pytest.raises((Unavailable, ServiceUnreachable), match=LATE):
                await asyncio.to_thread(ask)


@pytest.mark.parametrize("at_once", [0, len(HEAD)], ids=["head", "body"])
async def test_a_server_that_drips_costs_one_timeout_for_asyncio_too(at_once: int) -> None:
    async with dripping(at_once) as url, AsyncClient(url, timeout=patient(SECONDS), trust_env=False) as waymark:
        assert await waymark.services() == []
        with pytest.raises(Unavailable, match=LATE):
            await waymark.services()


async def test_the_deadline_of_a_call_bounds_the_whole_of_it() -> None:
    async with dripping(len(HEAD)) as url:
        with Client(url, timeout=patient(60), trust_env=False) as waymark:
            await asyncio.to_thread(waymark.services)
            late = await asyncio.to_thread(waymark.query, "m", [1], 1, deadline=patient(SECONDS), or_empty=True)
            assert late.is_partial


async def test_each_thread_has_a_bound_of_its_own_and_a_stream_that_of_its_head() -> None:
    def streamed(http: httpx.Client, url: str) -> bytes:
        with http.stream("GET", url) as answer:
            return answer.read()

    async with dripping(len(HEAD)) as url:
        with BoundedClient(timeout=patient(SECONDS), trust_env=False) as http:
            await asyncio.to_thread(http.get, url)
            ends = await asyncio.gather(
                asyncio.to_thread(streamed, http, url),
                *(asyncio.to_thread(http.get, url) for _ in range(3)),
                return_exceptions=True,
            )
    assert ends[0] == BODY
    assert [type(end) for end in ends[1:]] == [httpx.ReadTimeout] * 3
