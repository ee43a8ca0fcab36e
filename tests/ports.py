"""TCP ports of 127.0.0.1 for servers that a test starts.

A port that was free a moment ago may be another's when its server starts, or while its server is down. So a port is
reserved until this process ends: it is bound for UDP, where no server listens, and other test processes see that. It
lies below the ports that the kernel gives to connections.
"""

from __future__ import annotations

import random
import socket

#: Distance from the port of a Cluster's node to the port of its bus.
BUS_OFFSET = 10_000
_PORTS = range(24_000, 32_000)
#: Neither these nor those of their buses are among ``_PORTS``.
_NODE_PORTS = range(10_000, 14_000)
_TRIES = 1000
#: Held until the process ends.
_reserved: list[socket.socket] = []
#: Not the generator that tests seed.
_random = random.SystemRandom()


def unused_port() -> int:
    """A port that no process listens on, and that no other caller gets."""
    return _reserve(_PORTS)


def unused_ports(count: int) -> int:
    """The first of so many ports in a row."""
    return _reserve(_PORTS, *range(1, count))


def unused_node_port() -> int:
    """The same for a node of a Cluster: the port of its bus is reserved with it."""
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
    """A reservation of the port, or None where it is reserved or in use."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        reservation.bind(("127.0.0.1", port))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        reservation.close()
        return None
    return reservation
