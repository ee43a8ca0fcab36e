"""A server of a few lines whose connections end with it.

``asyncio.Server.close`` leaves accepted connections open, and a handler that still waits when the loop is closed never
closes its connection. Python warns of that when it collects garbage, in whichever test runs then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[asyncio.Server]:
    """Run a server on ``host`` while the block runs. At the end cancel the handlers, and abort their connections."""
    open_connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_connections[task] = writer
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed the connection
        except asyncio.CancelledError:
            pass  # the server ends; asyncio would report a cancelled task
        finally:
            del open_connections[task]
            writer.close()

    server = await asyncio.start_server(handle, host, port)
    try:
        yield server
    finally:
        server.close()
        left = dict(open_connections)
        for task, writer in left.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
