"""Two processes with the minimum cost of ingest in Python: one sends the numbers of frames to Redis, one reads them.

    python -m tools.benchmarks.floor_visible forward ENDPOINT REDIS_SOCKET
    python -m tools.benchmarks.floor_visible answer PORT REDIS_SOCKET

The first process subscribes with pyzmq and sets a key to the number of the newest frame, once for up to eight waiting
frames. It neither reads a payload nor runs a script. The second one answers every request with that number. So no index
in Redis whose workers and replicas are Python processes with an event loop can show a block sooner, or apply a frame
for less CPU.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hiredis
import uvloop
import zmq

from tools.benchmarks.floor import HEAD, FloorClient, FloorRedis

if TYPE_CHECKING:
    from tools.benchmarks.processes import RedisServer, Server

NAME = "floor"
_KEY = "floor:seq"
#: The most frames per command: as many as a call of a worker holds if each removes 64 blocks.
_FRAMES = 8


def _packed(*words: str | int) -> bytes:
    return hiredis.pack_command(cast("Any", words))


_ASKED = _packed("GET", _KEY)


@contextmanager
def floor(folder: Path, redis: RedisServer, endpoint: str, port: int) -> Iterator[Server]:
    """Start both processes. Yield the one that forwards, which answers no requests."""
    # The processes must not import the code that starts them.
    from tools.benchmarks.processes import Server, running, wait_until

    command = (sys.executable, "-m", "tools.benchmarks.floor_visible")
    redis.client.set(_KEY, -1)
    with running(folder, "answer", *command, "answer", str(port), redis.path) as answering:
        wait_until(Server(NAME, answering.pid, port).is_up, "the floor is up")
        with running(folder, "forward", *command, "forward", endpoint, redis.path) as forwarding:
            yield Server(NAME, forwarding.pid, 0)


def newest(redis: RedisServer) -> int:
    """Return the number of the newest frame that was forwarded; -1 before the first one."""
    return int(redis.client.get(_KEY) or -1)


class _Client(FloorClient):
    def answer(self, reply: Any) -> None:
        self.transport.write(HEAD % len(reply) + reply)


async def _answer(port: int, path: str) -> None:
    loop = asyncio.get_running_loop()
    _, redis = await loop.create_unix_connection(FloorRedis, path)
    server = await loop.create_server(lambda: _Client(redis, _ASKED), "127.0.0.1", port)
    await server.serve_forever()


class _Forwarded:
    """A receiver of replies that nobody waits for."""

    def answer(self, reply: Any) -> None:
        pass


async def _forward(endpoint: str, path: str) -> None:
    loop = asyncio.get_running_loop()
    _, redis = await loop.create_unix_connection(FloorRedis, path)
    forwarded = _Forwarded()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)

    def read() -> None:
        # The descriptor becomes readable only once for several messages, so take all of them.
        while taken := list(islice(frames(), _FRAMES)):
            redis.ask(forwarded, _packed("SET", _KEY, int.from_bytes(taken[-1][1], "big")))

    def frames() -> Iterator[list[bytes]]:
        while cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN:
            yield socket.recv_multipart(zmq.NOBLOCK)

    loop.add_reader(socket.FD, read)
    read()
    await asyncio.Event().wait()


if __name__ == "__main__":
    gc.disable()
    how, where, path = sys.argv[1:]
    uvloop.run(_forward(where, path) if how == "forward" else _answer(int(where), path))
