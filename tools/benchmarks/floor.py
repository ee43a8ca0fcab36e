"""A server with the minimum cost of a query in Python: it parses a head, asks Redis for rows, and sends a fixed answer.

    python -m tools.benchmarks.floor PORT REDIS_SOCKET MODULES TRIPS ROW...

It uses the same libraries as a replica: uvloop, httptools and hiredis. It neither reads a body nor looks at a row. So
the CPU that a replica needs beyond this server's is the work of a query. No Python server that waits for Redis in an
event loop can need less CPU than this one.

``MODULES`` are the names of modules to import at the start, separated by commas. With the modules that every replica
imports, the time from the start to the first answer is the least that a replica can need. The server asks for the rows
TRIPS times, one after the other: a query needs one round trip, and a decision two.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import hiredis
import httptools
import uvloop

if TYPE_CHECKING:
    from tools.benchmarks.processes import RedisServer, Server

NAME = "floor"
#: The rows of a prompt of 512 blocks, 32 blocks in each.
_ROWS = 16
_BODY = b'{"default":{"1":{"longest_matched":8192,"GPU":8192,"DP":{"0":8192},"CPU":0,"DISK":0}}}'
#: The environment that ``waymark`` sets before it imports pydantic.
_LIKE_WAYMARK = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_ANSWER = HEAD % len(_BODY) + _BODY


@contextmanager
def floor(
    folder: Path, redis: RedisServer, modules: str = "", *, trips: int = 1, is_awaited: bool = True
) -> Iterator[Server]:
    """Start the server, which asks for rows that are in the index now."""
    # The server must not import the code that starts it.
    from tests.ports import unused_port
    from tools.benchmarks.processes import Server, running, wait_until

    rows = list(islice(cast("Any", redis.client.scan_iter(match="wm:{1}:????????????????", count=1000)), _ROWS))
    if len(rows) < _ROWS:
        raise SystemExit(f"the index has {len(rows)} rows; the floor asks for {_ROWS}")
    port = unused_port()
    words = (str(port), redis.path, modules, str(trips), *(row.decode() for row in rows))
    with running(folder, NAME, sys.executable, "-m", "tools.benchmarks.floor", *words, **_LIKE_WAYMARK) as process:
        server = Server(NAME, process.pid, port)
        if is_awaited:
            wait_until(server.is_up, "the floor is up")
        yield server


class _Waiting(Protocol):
    def answer(self, reply: Any, /) -> None: ...


class FloorRedis(asyncio.Protocol):
    """The connection to Redis, and the clients that wait for its replies, in the order of their requests."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._reader = hiredis.Reader(notEnoughData=...)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, client: _Waiting, packed: bytes) -> None:
        self._waiting.append(client)
        self._transport.write(packed)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not ...:
            self._waiting.popleft().answer(reply)


class FloorClient(asyncio.Protocol):
    def __init__(self, redis: FloorRedis, packed: bytes, trips: int = 1) -> None:
        self._redis = redis
        self._packed = packed
        self._trips = self._left = trips
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._redis.ask(self, self._packed)

    def answer(self, reply: Any) -> None:
        self._left -= 1
        if self._left:
            self._redis.ask(self, self._packed)
        else:
            self._left = self._trips
            self.transport.write(_ANSWER)


async def _serve(port: int, path: str, trips: int, rows: Sequence[str]) -> None:
    loop = asyncio.get_running_loop()
    _, redis = await loop.create_unix_connection(FloorRedis, path)
    packed = hiredis.pack_command(cast("Any", ("MGET", *rows)))
    server = await loop.create_server(lambda: FloorClient(redis, packed, trips), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()
    for name in filter(None, sys.argv[3].split(",")):
        import_module(name)
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[4]), sys.argv[5:]))
