"""A line between one process and Redis that is cut, held or slowed down; it looks at nothing that passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_CHUNK_BYTES = 65_536


class Proxy:
    """Listens on ``port`` of 127.0.0.1 and passes everything on to ``redis_port``."""

    def __init__(self, redis_port: int) -> None:
        self.port = 0
        self.delay_seconds = 0.0
        """Before each piece, in each direction."""
        self._redis_port = redis_port
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold(self) -> None:
        """Keep what is sent, in both directions; after ``heal`` it arrives, late."""
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()
        self.delay_seconds = 0.0

    def cut(self) -> None:
        """Every connection is gone at once, with what was on its way."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.heal()
        while self._serving:
            self.cut()
            await asyncio.wait(self._serving, timeout=0.1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until one end is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._redis_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            ways = [asyncio.ensure_future(self._pass(reader, back)), asyncio.ensure_future(self._pass(there, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._writers -= {writer, back}
            writer.close()
            back.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while part := await reader.read(_CHUNK_BYTES):
                await self._whole.wait()
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                writer.write(part)
                await writer.drain()


@asynccontextmanager
async def proxy_to(redis_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(redis_port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
