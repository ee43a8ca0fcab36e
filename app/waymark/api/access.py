"""Who may call what, and where a registration may point to."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Literal, TypeAlias

from waymark.api.bodies import Headers
from waymark.api.errors import Unauthorized
from waymark.errors import InvalidValue
from waymark.shown import shown

Access: TypeAlias = Literal["open", "read", "write"]


class Gate:
    """Checks the bearer token: for what writes where a token is set, for what reads where reads are protected."""

    def __init__(self, token: str | None, *, protect_reads: bool) -> None:
        self._token = token.encode() if token else None
        self._protect_reads = protect_reads

    def check(self, access: Access, headers: Headers) -> None:
        """Raise ``Unauthorized`` unless the request may pass."""
        if self._token is None or access == "open" or (access == "read" and not self._protect_reads):
            return
        for name, value in headers:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token):
                    return
        raise Unauthorized


class AllowedEndpoints:
    """Where sockets may be opened to: globs or CIDRs; everywhere when there are none.

    A CIDR (``10.0.0.0/8``, or a bare address) holds addresses written as such; a host name is not looked up and
    is in no CIDR. A glob is held against the whole endpoint if it has a scheme (``tcp://*.engines.svc:5557``,
    ``ipc:///run/engines/*``), else against the host of a tcp endpoint (``*.engines.svc``).
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._globs: list[str] = []
        for entry in allowed:
            try:
                self._networks.append(ip_network(entry, strict=False))
            except ValueError:
                self._globs.append(entry if entry.startswith("ipc://") else entry.lower())
        self._is_everywhere = not allowed

    def check(self, endpoint: str | None, field: str) -> None:
        """Raise ``InvalidValue`` on ``field`` where ``endpoint`` is not allowed."""
        if endpoint is None or self._is_everywhere or self._holds(endpoint):
            return
        raise InvalidValue(
            f"{field} {shown(endpoint)} is not among the endpoints that WAYMARK_ALLOWED_ENDPOINTS allows; "
            "use another endpoint, or ask the operator to add this one",
            field=field,
        )

    def _holds(self, endpoint: str) -> bool:
        host, text = None, endpoint
        if endpoint.startswith("tcp://"):
            text = endpoint.lower()  # paths keep their case; host names have none
            host = text.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        for glob in self._globs:
            if fnmatchcase(text, glob) if "://" in glob else host is not None and fnmatchcase(host, glob):
                return True
        address = None if host is None else _address(host)
        return address is not None and any(address in network for network in self._networks)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None  # a name
    return getattr(address, "ipv4_mapped", None) or address
