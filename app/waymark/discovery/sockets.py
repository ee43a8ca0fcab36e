"""Which sockets an engine may name as its own: at its own host, or where the operator allows connections.

An engine says where it binds, which is a wildcard more often than not; subscribers connect to the host that it was
asked at. Any other host could be anybody's, so a registration by URL never leads there by itself.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from waymark.base.endpoints import AllowedEndpoints, is_loopback
from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.domain.names import ENDPOINT, is_endpoint

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})


class UnusableSocket(Exception):
    """The sentence that says what is wrong with a socket."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class HostNames:
    """Turns what an engine says of its sockets into endpoints to connect to."""

    def __init__(self, allowed: AllowedEndpoints) -> None:
        self._allowed = allowed

    async def own(self, url: str, endpoint: str, field: str, rank: int) -> str:
        """The endpoint of ``rank`` of the engine at ``url``. Raises UnusableSocket, InvalidValue where not allowed."""
        asked_at = urlsplit(url).hostname or ""
        about = f"rank {rank} says that its {field} is {shown(endpoint)}"
        host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not endpoint.startswith("tcp://") or not colon:
            raise UnusableSocket(f"{about}, which cannot be reached from elsewhere; it must be tcp://*:port")
        host = host.strip("[]")
        if host not in _WILDCARDS and host.lower() != asked_at and not await _is_same(host, asked_at):
            if is_loopback(host):
                raise UnusableSocket(
                    f"{about}, which only processes on its own host can reach; it must be tcp://*:port"
                )
            if not self._allowed.is_named(endpoint):
                raise UnusableSocket(
                    f"{about}, on another host than its URL; allow that host in WAYMARK_ALLOWED_ENDPOINTS"
                )
            own = endpoint
        else:
            own = f"tcp://{f'[{asked_at}]' if ':' in asked_at else asked_at}:{port}"
        if not is_endpoint(own):
            raise UnusableSocket(f"{about}, and an endpoint is {ENDPOINT}")
        try:
            self._allowed.check(own, field)
        except InvalidValue as error:
            raise UnusableSocket(error.sentence) from None
        return own


async def _is_same(host: str, asked_at: str) -> bool:
    """Whether the host that was asked has this address; two names of the loopback are the same."""
    if is_loopback(host) and is_loopback(asked_at):
        return True
    try:
        found = await asyncio.get_running_loop().getaddrinfo(asked_at, None, type=socket.SOCK_STREAM)
        return ip_address(host) in {ip_address(each[4][0]) for each in found}
    except (OSError, ValueError):
        return False
