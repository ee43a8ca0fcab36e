"""A client of httpx whose timeout bounds a whole try. httpx itself bounds each read only, so a server that sends a byte
now and then would never be given up.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import httpx


class BoundedClient(httpx.Client):
    """An ``httpx.Client``. The read timeout of a request bounds the time from its beginning to the end of its answer,
    or to the end of the head of a streamed one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._bound = _Bound()
        for transport in (self._transport, *self._mounts.values()):
            pool: Any = getattr(transport, "_pool", None)
            if hasattr(pool, "_network_backend"):  # httpx has no other way; the tests fail if it changes
                pool._network_backend = _BoundedConnections(pool._network_backend, self._bound)

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request. Raise ``httpx.ReadTimeout`` if the whole of the answer is late."""
        seconds = request.extensions.get("timeout", {}).get("read")
        self._bound.until = None if seconds is None else time.monotonic() + seconds
        try:
            return super().send(request, **options)
        finally:
            self._bound.until = None


class _Bound(threading.local):
    """When the request of this thread has to be over."""

    until: float | None = None

    def left(self, timeout: float | None) -> float | None:
        """Return the seconds that one step may take. Raise ``httpx.ReadTimeout`` if no time is left."""
        if self.until is None:
            return timeout
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise httpx.ReadTimeout("the whole of the answer is late")
        return seconds if timeout is None else min(seconds, timeout)


def _count_of(host: str, port: int) -> int:
    """Return how many addresses a host has. ``socket.create_connection`` waits for each of them in turn."""
    try:
        return len(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)) or 1
    except OSError:
        return 1  # the connection fails with the same error


class _BoundedConnections:
    """Opens connections like ``backend``, an ``httpcore.NetworkBackend``."""

    def __init__(self, backend: Any, bound: _Bound) -> None:
        self._backend = backend
        self._bound = bound

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **options: Any) -> _BoundedConnection:
        seconds = self._bound.left(timeout)
        if seconds is not None:
            seconds /= _count_of(host, port)
        stream = self._backend.connect_tcp(host, port, timeout=seconds, **options)
        return _BoundedConnection(stream, self._bound)

    def connect_unix_socket(self, path: str, timeout: float | None = None, **options: Any) -> _BoundedConnection:
        stream = self._backend.connect_unix_socket(path, timeout=self._bound.left(timeout), **options)
        return _BoundedConnection(stream, self._bound)

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _BoundedConnection:
    """One connection, an ``httpcore.NetworkStream``."""

    def __init__(self, stream: Any, bound: _Bound) -> None:
        self._stream = stream
        self._bound = bound

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = self._stream.read(max_bytes, timeout=self._bound.left(timeout))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout=self._bound.left(timeout))

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> _BoundedConnection:
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout=self._bound.left(timeout))
        return _BoundedConnection(stream, self._bound)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def close(self) -> None:
        self._stream.close()
