"""``grpc.health.v1``: whether a picker lives, and whether it takes requests."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ALIVE, READY = "liveness", "readiness"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Alive from the start; the other names are ready or not, all at once.

    A watcher that does not read holds up nobody.
    """

    def __init__(self, *services: str) -> None:
        """``services`` are names beside ``liveness``, ``readiness`` and that of the whole server, which is empty."""
        self._ready_names = frozenset({"", READY, *services})
        self.is_ready = False
        self._has_ended = False
        self._changed = asyncio.Event()

    def set(self, *, is_ready: bool) -> None:
        """Report it to every client that asks from now on, and to those that watch."""
        self.is_ready = is_ready
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """End every watch, so that none of them holds up the end of its server."""
        self._has_ended = True
        self.set(is_ready=False)

    def _status(self, service: str) -> Any:
        if service == ALIVE:
            return SERVING
        if service not in self._ready_names:
            return _UNKNOWN
        return SERVING if self.is_ready else NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        last = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            if self._has_ended:
                return
            await changed.wait()
