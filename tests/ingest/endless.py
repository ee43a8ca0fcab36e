"""Publishers that send what they like, and messages without an end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from threading import Thread

from tests.hostile.engine_client import GREETING, READY
from tests.listening import listening, port_of

PART_MAX = 2**20
#: An empty part, and one that is as long as a part may be; more parts of the message follow.
EMPTY, LONGEST = b"\x01\x00" * 30_000, b"\x03" + PART_MAX.to_bytes(8, "big") + bytes(PART_MAX)
#: Topic, seq and payload.
FRAME = b"\x01\x00" + b"\x01\x08" + bytes(8) + b"\x02" + PART_MAX.to_bytes(8, "big") + bytes(PART_MAX)
#: What a socket that answers requests says before its first message.
ROUTER = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
_OTHER_IS_READY = b"Socket-Type"


@asynccontextmanager
async def publishing(
    *pieces: bytes, then: bytes = b"", ready: bytes = READY, gate: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """A publisher that sends these, all but the first behind the ``gate``, and then ``then`` for ever."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + ready)
        await reader.readuntil(_OTHER_IS_READY)
        for piece in chain(pieces, repeat(then) if then else ()):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # to drain waits for nothing while libzmq keeps up
            if gate is not None:
                await gate.wait()
        await reader.read(-1)

    async with listening(speak) as server:
        yield f"tcp://127.0.0.1:{port_of(server)}"


@asynccontextmanager
async def publishing_at(path: Path, *pieces: bytes, then: bytes = b"", ready: bytes = READY) -> AsyncIterator[str]:
    """The same at a Unix socket, as a process beside this one: in a thread, so that it sends while this one looks."""

    def speak(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(GREETING + ready)
            received = b""
            while _OTHER_IS_READY not in received:
                received += (piece := connection.recv(4096))
                if not piece:
                    return
            for piece in chain(pieces, repeat(then) if then else ()):
                connection.sendall(piece)
            while connection.recv(4096):
                pass

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                speak(server.accept()[0])

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield f"ipc://{path}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(thread.join)
