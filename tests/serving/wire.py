"""A server in this process, a client that sends bytes as they are, and what came back as h11 reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import h11
import orjson
import uvicorn
from starlette.types import Receive, Scope, Send

from tests.patience import patient, within
from waymark.base.asgi import StraightTable
from waymark.base.metrics import Metrics
from waymark.serving.connection import protocol
from waymark.serving.limits import Connections, ServerBounds, Shape

#: How long a test waits for what must come; far longer than it takes.
SECONDS = 60.0

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Answer(NamedTuple):
    """One final response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"

    @property
    def reason(self) -> str:
        """The slug of an error."""
        return str(orjson.loads(self.body)["reason"])

    @property
    def echo(self) -> Any:
        """What ``echo`` has told of its request."""
        return orjson.loads(self.body)


async def whole(receive: Receive) -> bytes | None:
    """The body of a request; None where its client has gone away."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        if not message["more_body"]:
            return bytes(body)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with all that it is told."""
    body = await whole(receive)
    if body is None:
        return
    told = {name: scope[name] for name in ("method", "path", "http_version")}
    told |= {name: scope[name].decode("latin-1") for name in ("raw_path", "query_string")}
    told["headers"] = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    content = orjson.dumps(told | {"body": body.decode("latin-1")})
    await answer(send, 200, content)


async def answer(send: Send, status: int, content: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Send a whole answer."""
    length = (b"content-length", b"%d" % len(content))
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": content})


def connections(
    metrics: Metrics | None = None, shape: Shape | None = None, straight: StraightTable | None = None, **bounds: Any
) -> Connections:
    """A server's connections; wide bounds, but for those that are given."""
    wide = {"request_seconds": patient(SECONDS), "connections_max": 1000, "bodies_max_bytes": 2**26}
    shape = shape or (lambda *_: None)
    return Connections(ServerBounds(**wide | bounds), metrics or Metrics(), shape, straight)


@asynccontextmanager
async def served(application: Application, http: Any = None, **config: Any) -> AsyncIterator[int]:
    """The port of a server with that protocol, ours where none is given."""
    settings = uvicorn.Config(
        application,
        host="127.0.0.1",
        port=0,
        http=http or protocol(connections()),
        ws="none",
        lifespan="off",
        log_config=None,
        **{"date_header": False, **config},
    )
    server = uvicorn.Server(settings)
    settings.load()
    server.lifespan = settings.lifespan_class(settings)
    server.server_state.default_headers = settings.encoded_headers
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await server.shutdown()


async def wire(port: int, *pieces: bytes) -> bytes:
    """All that comes back over one connection until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)  # so that each comes in a packet of its own, mostly
        async with within(SECONDS):
            return await reader.read()
    finally:
        writer.close()


def answers(wire: bytes, methods: Sequence[str] = ()) -> list[Answer]:
    """The answers in what came back, in order; ``methods`` of their requests, GET where there is none."""
    found: list[Answer] = []
    while wire:
        client = h11.Connection(h11.CLIENT)
        method = methods[len(found)] if len(found) < len(methods) else "GET"
        client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(wire)
        client.receive_data(b"")  # whatever has no length ends here
        status, headers, body = 0, dict[str, str](), b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            assert not isinstance(event, h11.ConnectionClosed | type(h11.NEED_DATA)), wire
            if isinstance(event, h11.InformationalResponse) and not client.trailing_data[0]:
                return found  # the client may send its body, and has not
            if isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += event.data
        found.append(Answer(status, headers, body))
        wire = client.trailing_data[0]
    return found


async def ask(port: int, *pieces: bytes, methods: Sequence[str] = ()) -> list[Answer]:
    """The answers that come back until the server closes the connection."""
    return answers(await wire(port, *pieces), methods)


def request(path: str = "/", method: str = "GET", *lines: str, version: str = "1.1") -> bytes:
    """A request's head, with a Host."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: x", *lines, "", ""]).encode()


def post(body: bytes, *lines: str, path: str = "/") -> bytes:
    return request(path, "POST", f"content-length: {len(body)}", *lines) + body


LAST = request("/last", "GET", "connection: close")
"""Sent after what a test is about: its answer shows that the connection was still good, and ends it."""
