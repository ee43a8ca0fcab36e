"""A proxy between one process and Redis that can abort, hold or delay connections, and record their calls.

While connections are held, they stay open. Afterwards everything that was sent arrives, even from a sender that has
given up long ago, as in a network that was interrupted and delivers late.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import hiredis

_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Call:
    """A command that reached Redis, and its reply."""

    at: float
    """The time at which it was forwarded to Redis, on the monotonic clock."""
    words: tuple[bytes, ...]
    reply: Any

    @property
    def verdict(self) -> bytes | None:
        """Return the verdict of a script; None if the call was not a script."""
        is_script = self.words[0].upper() == b"EVALSHA" and isinstance(self.reply, list)
        return self.reply[0] if is_script else None


class Proxy:
    """A proxy that listens on ``port`` of 127.0.0.1 and forwards to ``redis``, which is a port of 127.0.0.1 or the path
    of a socket. If ``redis`` changes, new connections use the new value.

    With ``keeps_calls``, ``calls`` has every call since the start, without a bound.
    """

    def __init__(self, redis: int | str, *, keeps_calls: bool = False) -> None:
        self.port = 0
        self.delay_seconds = 0.0
        """The delay of each piece, in each direction."""
        self.lost_replies = 0
        """The number of replies to drop, each by aborting its connection, after Redis has run the command."""
        self.calls: list[Call] = []
        self._keeps_calls = keeps_calls
        self.redis = redis
        self._whole = asyncio.Event()
        self._whole.set()
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold(self) -> None:
        """Hold all data, in both directions, until ``heal``."""
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()
        self.delay_seconds = 0.0

    def cut(self) -> None:
        """Abort every connection, and drop the data in transit."""
        for writers in self._connections.values():
            for writer in writers:
                writer.transport.abort()

    async def close(self) -> None:
        self.heal()
        while self._connections:
            self.cut()
            await asyncio.wait(self._connections, timeout=0.1)

    def with_token(self, token: bytes, since: float) -> list[Call]:
        """Return the calls of scripts with this lease token that reached Redis after ``since``."""
        return [call for call in self.calls if call.verdict is not None and call.at > since and token in call.words]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until both ends are closed."""
        task = asyncio.current_task()
        assert task is not None
        writers = self._connections[task] = [writer]
        task.add_done_callback(self._connections.pop)
        try:
            if isinstance(self.redis, str):
                redis_reader, redis_writer = await asyncio.open_unix_connection(self.redis)
            else:
                redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self.redis)
        except OSError:
            writer.transport.abort()
            return
        writers.append(redis_writer)
        conversation = _Conversation(self.calls) if self._keeps_calls else None
        try:
            await asyncio.gather(
                self._to_redis(reader, redis_writer, conversation), self._to_client(redis_reader, writer, conversation)
            )
        finally:
            writer.close()
            redis_writer.close()

    async def _to_redis(
        self, client: asyncio.StreamReader, redis: asyncio.StreamWriter, conversation: _Conversation | None
    ) -> None:
        with suppress(OSError):  # to write EOF to a closed connection raises an OSError that is not a ConnectionError
            while part := await _read(client):
                await self._passage()
                if conversation is not None:
                    conversation.asks(part)
                redis.write(part)
                await redis.drain()
            await self._whole.wait()
            redis.write_eof()

    async def _to_client(
        self, redis: asyncio.StreamReader, client: asyncio.StreamWriter, conversation: _Conversation | None
    ) -> None:
        while part := await _read(redis):
            if conversation is not None:
                conversation.answers(part)
            await self._passage()
            if self.lost_replies:
                self.lost_replies -= 1
                client.transport.abort()
            if not client.is_closing():  # calls are recorded even if their client is gone
                client.write(part)
                with suppress(ConnectionError):
                    await client.drain()
        client.close()

    async def _passage(self) -> None:
        """Wait until a piece may pass."""
        await self._whole.wait()
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)


class _Conversation:
    """The calls of one connection, in order."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._asked: deque[tuple[float, tuple[bytes, ...]]] = deque()
        self._commands, self._replies = hiredis.Reader(), hiredis.Reader()

    def asks(self, part: bytes) -> None:
        self._commands.feed(part)
        while (words := self._commands.gets()) is not False:
            self._asked.append((time.monotonic(), tuple(words)))

    def answers(self, part: bytes) -> None:
        self._replies.feed(part)
        while (reply := self._replies.gets()) is not False:
            if self._asked:  # a message to a subscriber is not a reply to a command
                at, words = self._asked.popleft()
                self._calls.append(Call(at, words, reply))


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return some bytes; none if the other end is closed, cleanly or not."""
    try:
        return await reader.read(_CHUNK_BYTES)
    except ConnectionError:
        return b""


@asynccontextmanager
async def proxy_to(redis: int | str, *, keeps_calls: bool = False) -> AsyncIterator[Proxy]:
    proxy = Proxy(redis, keeps_calls=keeps_calls)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
