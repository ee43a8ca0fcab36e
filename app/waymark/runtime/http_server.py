"""The HTTP server of a process: uvicorn, with connections of our own.

A query replica imports it after its first answers. Until then it listens with an ``EarlyServer``, whose sockets and
connections uvicorn takes over.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from waymark.base.metrics import Metrics
from waymark.serving.connection import protocol
from waymark.serving.limits import Connections, ServerBounds, Shape
from waymark.serving.listening import KEEP_ALIVE_SECONDS, EarlyServer

#: The time in which requests in progress must end.
SHUTDOWN_SECONDS = 5
#: How long it may take until an accepted connection is made: a few turns of the loop.
_ACCEPTED_SECONDS = 0.05


class _UvicornServer(uvicorn.Server):
    """uvicorn, with the signals left to us: it would end the process before the worker has released its leases."""

    def __init__(self, config: uvicorn.Config, early: EarlyServer | None) -> None:
        super().__init__(config)
        self._early = early
        if early is not None:
            self.server_state = early.state  # type: ignore[assignment]  # it has what uvicorn uses

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, unless the process does so already."""
        if self._early is None:
            await super().startup(sockets)
        else:
            self.servers = self._early.servers
            self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End. Accepted connections are set up first, so that they are asked to end, too."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(_ACCEPTED_SECONDS)
        await super().shutdown(sockets)


def http_server(
    app: Any,
    bounds: ServerBounds,
    metrics: Metrics,
    *,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
    shape: Shape = lambda *_: None,
    early: EarlyServer | None = None,
) -> uvicorn.Server:
    """Return an HTTP server that ends at ``should_exit``. It takes over from ``early``, which has the same ``app``."""
    connections = Connections(bounds, metrics, shape) if early is None else early.connections
    return _UvicornServer(
        uvicorn.Config(
            app,
            http=protocol(connections),
            interface="asgi3",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # no handler uses the client's address
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=shutdown_seconds,
        ),
        early,
    )
