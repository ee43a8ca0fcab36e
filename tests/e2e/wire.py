"""A wire between one process and Redis: it can be cut, and it keeps what was asked and answered over it.

While it is cut it holds what is sent, in both directions, and closes nothing; once it is healed all of that arrives,
also what its sender has long given up: a network that was away and delivers late.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import hiredis

_CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Call:
    """A command as it reached Redis, and its reply."""

    at: float
    """When it was sent on to Redis, on the monotonic clock."""
    words: tuple[bytes, ...]
    reply: Any

    @property
    def verdict(self) -> bytes | None:
        """What a script has decided; None where this was no script."""
        is_script = self.words[0].upper() == b"EVALSHA" and isinstance(self.reply, list)
        return self.reply[0] if is_script else None


class Wire:
    """Listens on ``port`` of 127.0.0.1 and passes everything on to the Redis on ``redis_port``."""

    def __init__(self, redis_port: int) -> None:
        self.calls: list[Call] = []
        self.port = 0
        self._redis_port = redis_port
        self._whole = asyncio.Event()
        self._whole.set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def with_token(self, token: bytes, since: float) -> list[Call]:
        """Scripts under this lease token that reached Redis after ``since``."""
        return [call for call in self.calls if call.verdict is not None and call.at > since and token in call.words]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until both ends are closed."""
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._redis_port)
        asked: deque[tuple[float, tuple[bytes, ...]]] = deque()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ask(reader, redis_writer, asked))
                tasks.create_task(self._answer(redis_reader, writer, asked))
        finally:
            writer.close()
            redis_writer.close()

    async def _ask(
        self, client: asyncio.StreamReader, redis: asyncio.StreamWriter, asked: deque[tuple[float, tuple[bytes, ...]]]
    ) -> None:
        parser = hiredis.Reader()
        while part := await _read(client):
            await self._whole.wait()
            parser.feed(part)
            while (words := parser.gets()) is not False:
                asked.append((time.monotonic(), tuple(words)))
            redis.write(part)
        await self._whole.wait()
        redis.write_eof()

    async def _answer(
        self, redis: asyncio.StreamReader, client: asyncio.StreamWriter, asked: deque[tuple[float, tuple[bytes, ...]]]
    ) -> None:
        parser = hiredis.Reader()
        while part := await _read(redis):
            parser.feed(part)
            while (reply := parser.gets()) is not False:
                if asked:  # what is published to a subscriber answers nothing
                    at, words = asked.popleft()
                    self.calls.append(Call(at, words, reply))
            await self._whole.wait()
            if not client.is_closing():
                client.write(part)
        client.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Some bytes; none where the other end is closed, well or badly."""
    try:
        return await reader.read(_CHUNK_BYTES)
    except ConnectionError:
        return b""


@asynccontextmanager
async def wire_to(redis_port: int) -> AsyncIterator[Wire]:
    wire = Wire(redis_port)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        wire.heal()
        server.close()
