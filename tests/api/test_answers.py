"""Answers may be given whole; on the wire nobody can tell them from those that uvicorn sends in messages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from tests.patience import within
from waymark.api import operations
from waymark.metrics import Metrics
from waymark.serving.connection import protocol
from waymark.serving.connections import Bounds, Connections
from waymark.serving.exchange import RESPOND

pytestmark = pytest.mark.outside

LENGTH_2 = (b"content-length", b"2")
START: dict[str, Any] = {"type": "http.response.start", "status": 200}
BODY: dict[str, Any] = {"type": "http.response.body", "body": b"ok"}
USUAL = [START | {"headers": [(b"content-type", b"text/plain"), LENGTH_2]}, BODY]
CASES: dict[str, list[dict[str, Any]]] = {
    "/usual": USUAL,
    "/refused": [START | {"status": 404, "headers": [(b"content-length", b"0")]}, BODY | {"body": b""}],
    "/without-length": [START | {"headers": []}, BODY],
    "/in-pieces": [START | {"headers": []}, BODY | {"more_body": True}, BODY],
    "/pieces-of-a-length": [START | {"headers": [(b"content-length", b"4")]}, BODY | {"more_body": True}, BODY],
    "/closes": [START | {"headers": [LENGTH_2, (b"connection", b"close")]}, BODY],
    "/another-line": [START | {"headers": [LENGTH_2, (b"x-note", b"a\r\nset-cookie: b")]}, BODY],
    "/bare-line": [START | {"headers": [LENGTH_2, (b"x-note", b"a\nset-cookie: b")]}, BODY],
    "/too-long": [START | {"headers": [(b"content-length", b"1")]}, BODY],
    "/too-short": [START | {"headers": [(b"content-length", b"3")]}, BODY],
    "/nothing": [],
    "/twice": [*USUAL, BODY],
}
#: Not for ``respond``, which is told a length and says nothing of the connection.
UNFIT = {"/without-length", "/closes", "/too-long", "/too-short"}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    for message in CASES[scope["path"]]:
        await send(message)


async def whole(scope: Scope, receive: Receive, send: Send) -> None:
    """The same, at once where that is offered and an answer is whole."""
    messages = CASES[scope["path"]]
    respond = scope.get("extensions", {}).get(RESPOND)
    if respond is not None and len(messages) == 2 and scope["path"] not in UNFIT:
        start, body = messages
        if respond(start["status"], start["headers"], body["body"]):
            return
    await app(scope, receive, send)


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    await send(USUAL[0])
    raise ArithmeticError(scope["path"])


@asynccontextmanager
async def served(http: Any, application: Callable[[Scope, Receive, Send], Awaitable[None]]) -> AsyncIterator[int]:
    """The port of a server with that protocol, and with a header of its own."""
    config = uvicorn.Config(
        application,
        host="127.0.0.1",
        port=0,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        date_header=False,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    server.server_state.default_headers = [(b"x-of-all", b"1")]
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await server.shutdown()


async def wire(port: int, *requests: bytes) -> bytes:
    """Everything that comes back over one connection; the last request closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(requests))
    try:
        async with within(20):
            return await reader.read()
    finally:
        writer.close()


def request(path: str, method: str = "GET", *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def bounded() -> type[asyncio.Protocol]:
    return protocol(Connections(Bounds(30, 100, 2**20), Metrics()))


async def test_an_answer_is_on_the_wire_what_uvicorn_sends() -> None:
    last = request("/usual", "GET", "connection: close")
    async with (
        served("httptools", app) as theirs,
        served(bounded(), app) as ours,
        served(bounded(), whole) as at_once,
    ):
        for path in CASES:
            for talk in (
                [request(path), last],
                [request(path, "HEAD"), last],
                [request(path, "GET", "connection: close")],
                [b"GET %b HTTP/1.0\r\n\r\n" % path.encode()],
                [request("/usual"), request(path), last],
            ):
                expected = await wire(theirs, *talk)
                assert await wire(ours, *talk) == expected, talk
                assert await wire(at_once, *talk) == expected, talk
                assert path != "/usual" or expected.count(b"x-of-all: 1\r\n") == len(talk)


async def test_what_fails_after_its_head_is_cut_and_not_answered_twice() -> None:
    async with served("httptools", broken) as theirs, served(bounded(), broken) as ours:
        assert (await wire(theirs, request("/x"))).endswith(b"\r\n\r\n")
        assert await wire(ours, request("/x")) == await wire(theirs, request("/x"))


def test_who_offers_to_answer_at_once_and_who_accepts_call_it_the_same() -> None:
    assert RESPOND == operations.RESPOND


async def test_an_answer_at_once_is_one_write_and_the_last() -> None:
    outcomes: list[Any] = []

    async def twice(scope: Scope, receive: Receive, send: Send) -> None:
        respond = scope["extensions"][RESPOND]
        outcomes.append(respond(200, USUAL[0]["headers"], b"ok"))
        outcomes.append(respond(200, USUAL[0]["headers"], b"ok"))

    async with served(bounded(), twice) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/x"))
        async with within(20):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\nx-of-all: 1\r\n")
            writer.write(request("/x"))
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\nx-of-all: 1\r\n")
        writer.close()
    assert outcomes == [True, False, True, False]


async def test_a_request_leaves_nothing_for_the_garbage_collector() -> None:
    async with served(bounded(), whole) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                writer.write(request("/usual"))
                async with within(20):
                    await reader.readuntil(b"ok")
            assert gc.collect() < 100
        finally:
            gc.enable()
            writer.close()
