"""The listening sockets of a process, opened before anything else, so that a taken port ends it with one sentence; and
the server that answers on them until uvicorn is imported.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from waymark.base.asgi import AsgiApplication
from waymark.base.errors import PortUnavailable
from waymark.serving.connection import protocol
from waymark.serving.limits import Connections

#: How long a connection is kept for a next request: longer than load balancers keep theirs, usually 60 s.
KEEP_ALIVE_SECONDS = 65
#: The connections that the kernel accepts before this process does; uvicorn's number.
_BACKLOG = 2048

_WHY = {
    errno.EADDRINUSE: "another process listens on it",
    errno.EACCES: "this user may not open it",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
}


#: The time for an answer of the process on the port, and the bytes read from it.
_ASKED_SECONDS, _ANSWER_BYTES_MAX = 1.0, 2**20
_ROLE = re.compile(rb'^waymark_build_info\{[^}\n]*\brole="([a-z]+)"', re.MULTILINE)


def listen(host: str, port: int, *, host_name: str, port_name: str) -> list[socket.socket]:
    """Bind a socket for each address of ``host``. An error names the settings ``host_name`` and ``port_name``.

    If it raises ``PortUnavailable``, no socket stays bound.
    """
    opened: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in _addresses(host, port):
            bound = socket.socket(family, kind, protocol)
            opened.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
            # A port that another process has bound without listening is noticed only now.
            bound.listen(_BACKLOG)
    except (OSError, UnicodeError) as exc:  # not a valid host name
        for bound in opened:
            bound.close()
        number = getattr(exc, "errno", None) or 0
        reason = _WHY.get(number) or (getattr(exc, "strerror", None) or str(exc)).lower()
        role = _role_at(host, port) if number == errno.EADDRINUSE else None
        if role is not None:
            reason += f": 'waymark {role}'"
        raise PortUnavailable(
            f"port {port} of {host} cannot be opened, {reason}; give another one with {port_name}, or another address "
            f"with {host_name}"
        ) from None
    return opened


def _role_at(host: str, port: int) -> str | None:
    """Return the role of the Waymark that listens on a port, by its metrics; None if it is another program, or
    silent.
    """
    from http.client import HTTPConnection, HTTPException  # only this error needs it

    connection = HTTPConnection("127.0.0.1" if host in ("", "0.0.0.0") else host, port, timeout=_ASKED_SECONDS)
    try:
        connection.request("GET", "/metrics")
        match = _ROLE.search(connection.getresponse().read(_ANSWER_BYTES_MAX))
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
    return None if match is None else match[1].decode()


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    # If the host is a text, Python imports its codec of international names, so an address is given as bytes.
    name = host.encode() if host.replace(".", "").isdecimal() and host.isascii() else host
    addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(
        dict.fromkeys((family, kind, protocol, "", address) for family, kind, protocol, _, address in addresses)
    )


class EarlyState:
    """The parts of uvicorn's ``ServerState`` that uvicorn and connections use."""

    def __init__(self) -> None:
        self.total_requests = 0
        self.connections: set[Any] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        self.default_headers = [(b"date", date.encode())]
        """uvicorn replaces them each second."""


class EarlyServer:
    """A server that listens, and accepts connections. It takes a thirtieth of a second less to import than uvicorn."""

    def __init__(self, app: AsgiApplication, connections: Connections) -> None:
        self.connections = connections
        self.state = EarlyState()
        self.servers: list[asyncio.Server] = []
        config = SimpleNamespace(loaded_app=app, timeout_keep_alive=KEEP_ALIVE_SECONDS)
        kind: Any = protocol(connections)
        self._connection = partial(kind, config, self.state, {})

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for bound in sockets:
            self.servers.append(await loop.create_server(self._connection, sock=bound, backlog=_BACKLOG))
