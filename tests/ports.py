"""TCP ports of 127.0.0.1 for servers that a test starts.

A port that was free a moment ago may be in use when its server starts, or starts again. So each port is reserved until
this process ends: it is bound for UDP, which no server uses, and other test processes see that. The ports are below
those that the kernel assigns to connections.
"""

from __future__ import annotations

import random
import socket

#: The distance from the port of a Cluster node to the port of its bus.
BUS_OFFSET = 10_000
_PORTS = range(24_000, 32_000)
#: The ports of Cluster nodes. Neither they nor the ports of their buses are in ``_PORTS``.
_NODE_PORTS = range(10_000, 14_000)
_TRIES = 1000
#: The reservations, which are held until the process ends.
_reserved: list[socket.socket] = []
#: A generator of its own, because tests seed the global one.
_random = random.SystemRandom()


def unused_port() -> int:
    """Return a port on which no process listens, and which no other caller gets."""
    return _reserve(_PORTS)


def unused_ports(count: int) -> int:
    """Return the first of ``count`` consecutive unused ports."""
    return _reserve(_PORTS, *range(1, count))


def unused_node_port() -> int:
    """Return an unused port for a Cluster node, and reserve the port of its bus, too."""
    return _reserve(_NODE_PORTS, BUS_OFFSET)


def _reserve(ports: range, *offsets: int) -> int:
    for _ in range(_TRIES):
        port = _random.choice(ports)
        held = [_bound(port + offset) for offset in (0, *offsets)]
        found = [each for each in held if each is not None]
        if len(found) == len(held):
            _reserved.extend(found)
            return port
        for each in found:
            each.close()
    raise RuntimeError(f"no free port between {ports.start} and {ports.stop}")


def _bound(port: int) -> socket.socket | None:
    """Reserve a port. Return None if it is reserved or in use."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        reservation.bind(("127.0.0.1", port))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        reservation.close()
        return None
    return reservation
