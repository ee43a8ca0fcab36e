"""What our connection and h11 make of the same bytes: the requests, and the status that ends a connection.

Ours runs over a transport that only remembers, so an example of a property takes a millisecond and needs no socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tests.serving.wire import answer, answers, connections, whole
from waymark.serving.connection import protocol

#: More turns of the loop than any request needs.
_TURNS = 200


class Reading(NamedTuple):
    """A request that was read whole."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def __str__(self) -> str:
        body = self.body.decode("latin-1")
        return f"{self.method} {self.target} {body}".rstrip()


class Readings(NamedTuple):
    """What was read over one connection."""

    requests: list[Reading]
    status: int = 0
    """Of the answer that refuses what comes next; 0 where nothing was refused."""

    @property
    def shown(self) -> list[str]:
        return [*map(str, self.requests), *([str(self.status)] if self.status else [])]


class _Transport(asyncio.Transport):
    """Remembers what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_paused = False
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._is_closing
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def ours(pieces: Iterable[bytes]) -> Readings:
    """What our connection makes of the pieces."""
    requests: list[Reading] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await whole(receive)
        if body is None:
            return
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        requests.append(Reading(scope["method"], target, tuple(scope["headers"]), body))
        await answer(send, 200, b"ok")

    config = uvicorn.Config(app, log_config=None, lifespan="off")
    config.load()
    make: Any = protocol(connections())
    connection, transport = make(config=config, server_state=ServerState(), app_state={}), _Transport()
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.is_closing():
            connection.data_received(piece)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            if not (transport.is_paused or any(cycle.is_whole for cycle in connection._cycles)):
                break
        assert transport.is_closing() or not transport.is_paused, "what is read is answered, and then more is read"
    given = answers(bytes(transport.written), [each.method for each in requests])
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert [each.status for each in given[: len(requests)]] == [200] * len(requests), "in order, each once"
    refused = given[len(requests) :]
    assert len(refused) <= 1
    return Readings(requests, refused[0].status if refused else 0)


def of_h11(pieces: Iterable[bytes]) -> Readings:
    """What h11 makes of the pieces."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=64 * 1024)
    requests: list[Reading] = []
    head, body = h11.Request(method="GET", target="/", headers=[("host", "x")]), b""
    for piece in pieces:
        server.receive_data(piece)
        while True:
            try:
                event = server.next_event()
            except h11.RemoteProtocolError as exc:
                return Readings(requests, exc.error_status_hint)
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                headers = tuple((bytes(name), bytes(value)) for name, value in head.headers)
                requests.append(Reading(head.method.decode(), head.target.decode(), headers, bytes(body)))
                server.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                server.send(h11.EndOfMessage())
                if server.our_state is not h11.DONE or server.their_state is not h11.DONE:
                    return Readings(requests)
                server.start_next_cycle()
            else:
                break
    return Readings(requests)
