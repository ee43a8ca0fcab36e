"""The listening sockets of a process, opened before anything else, so that a taken port ends it with one sentence."""

from __future__ import annotations

import errno
import socket

from waymark.base.errors import PortUnavailable

_WHY = {
    errno.EADDRINUSE: "another process listens on it",
    errno.EACCES: "this user may not open it",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
}


def listen(host: str, port: int, *, host_name: str, port_name: str) -> list[socket.socket]:
    """A bound socket for each address of ``host``. An error names the settings ``host_name`` and ``port_name``.

    Raises ``PortUnavailable``; then nothing is bound.
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
            # What another process has bound without listening is seen only now.
            bound.listen()
    except OSError as exc:
        for bound in opened:
            bound.close()
        reason = _WHY.get(exc.errno or 0) or (exc.strerror or str(exc)).lower()
        raise PortUnavailable(
            f"port {port} of {host} cannot be opened, {reason}; give another one with {port_name}, or another address "
            f"with {host_name}"
        ) from None
    return opened


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, kind, protocol, "", address) for family, kind, protocol, _, address in found))
