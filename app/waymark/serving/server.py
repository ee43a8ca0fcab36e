"""The server of a process: it accepts connections on open sockets, and ends after the requests under way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from email.utils import formatdate

from waymark.base.asgi import AsgiApplication
from waymark.serving.connection import HttpConnection
from waymark.serving.limits import Connections

#: Connections that the kernel keeps while the loop is busy.
_BACKLOG = 2048
#: How long it may take until an accepted connection is made: a few turns of the loop.
_ACCEPTED_SECONDS = 0.05
#: The header Date has seconds.
_DATE_SECONDS = 1.0


class HttpServer:
    """Serves an ASGI application until ``stop``."""

    def __init__(self, app: AsgiApplication, connections: Connections, *, shutdown_seconds: float) -> None:
        """``shutdown_seconds`` is the time for the requests under way once the server has to end."""
        self.connections = connections
        self._app = app
        self._shutdown_seconds = shutdown_seconds
        self._is_stopping = asyncio.Event()

    def stop(self) -> None:
        """Let ``serve`` end."""
        self._is_stopping.set()

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serve the sockets until ``stop``. Then accept no more connections, and end each after its requests."""
        loop = asyncio.get_running_loop()
        listeners = [await loop.create_server(self._connection, sock=each, backlog=_BACKLOG) for each in sockets]
        try:
            await self._until_stopped()
        finally:
            for listener in listeners:
                listener.close()
        # Accepted connections are set up first, so that they are asked to end, too.
        await asyncio.sleep(_ACCEPTED_SECONDS)
        await self.connections.end(self._shutdown_seconds)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._app, self.connections)

    async def _until_stopped(self) -> None:
        while not self._is_stopping.is_set():
            self.connections.default_lines = b"date: %b\r\n" % formatdate(usegmt=True).encode()
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._is_stopping.wait()
