"""The places to which connections may be opened, whether a registration, a file or an engine names them, and the
addresses of their hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import AF_INET, AF_INET6, SOCK_STREAM, getaddrinfo
from threading import Thread
from typing import TypeAlias, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown

T = TypeVar("T")


class AllowedEndpoints:
    """Globs or CIDRs; without an entry every place is allowed.

    A CIDR (``10.0.0.0/8``, or a bare address) contains literal addresses. A host name is not looked up and is in no
    CIDR. A glob with a scheme (``tcp://*.engines.svc:5557``, ``http://10.0.0.*``, ``ipc:///run/engines/*``) must match
    the whole endpoint; for an ``http`` or ``https`` URL, that means ``scheme://host:port`` without its path. A glob
    without a scheme (``*.engines.svc``) must match the host.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._globs: list[str] = []
        for entry in allowed:
            try:
                self._networks.append(ip_network(entry, strict=False))
            except ValueError:
                self._globs.append(entry if entry.startswith("ipc://") else entry.lower())
        self._is_everywhere = not allowed

    def check(self, endpoint: str | None, field: str) -> None:
        """Raise ``InvalidValue`` on ``field`` if ``endpoint`` is not allowed."""
        if endpoint is None or self._is_everywhere or self._holds(endpoint):
            return
        raise InvalidValue(
            f"{field} {shown(endpoint)} is not among the endpoints that WAYMARK_ALLOWED_ENDPOINTS allows; "
            "use another endpoint, or ask the operator to add this one",
            field=field,
        )

    def is_named(self, endpoint: str) -> bool:
        """Return whether the operator has allowed this place by name, rather than every place."""
        return not self._is_everywhere and self._holds(endpoint)

    def _holds(self, endpoint: str) -> bool:
        text, host = _place(endpoint)
        for glob in self._globs:
            if fnmatchcase(text, glob) if "://" in glob else host is not None and fnmatchcase(host, glob):
                return True
        address = None if host is None else _address(host)
        return address is not None and any(address in network for network in self._networks)


def place_of(url: str) -> str:
    """Return ``http://host:port`` of a URL."""
    return _place(url)[0]


def _place(endpoint: str) -> tuple[str, str | None]:
    """Return the text that a glob with a scheme must match, and the host."""
    if endpoint.startswith("tcp://"):
        text = endpoint.lower()  # paths keep their case; in host names it has no meaning
        return text, text.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if endpoint.startswith(("http://", "https://")):
        try:
            url = urlsplit(endpoint)
            port = url.port
        except ValueError:
            return endpoint, None
        place = url.netloc.rpartition("@")[2].lower()
        if port is None:
            place = f"{place.rstrip(':')}:{443 if url.scheme == 'https' else 80}"
        return f"{url.scheme}://{place}", url.hostname
    return endpoint, None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a port on this host."""
    address = _address(host.strip("[]"))
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_address(host: str) -> bool:
    """Return whether a host of an endpoint is an address, and not a name."""
    return _address(host.strip("[]")) is not None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None  # a name
    return getattr(address, "ipv4_mapped", None) or address


# The addresses of host names. A name server that does not answer takes ten seconds or more of the thread that asks it,
# and an event loop has few threads for that: two such names would delay all others, with that of Redis among them. So
# each name is looked up in a thread of its own.

HostAddresses: TypeAlias = Sequence[tuple[int, str]]
"""Addresses with their families, in the order in which the system wants them tried."""

UNKNOWN_HOST = "its host has no address, or no name server answers"
LOOKUPS_MAX = 256
"""The most names that a process looks up at once."""
LOOKUP_SECONDS = 10.0
"""How long the answer for a name is waited for. A further question waits for the same answer."""
_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[HostAddresses]]] = WeakKeyDictionary()


async def addresses_of(host: str) -> HostAddresses:
    """Return the addresses of a host; none if it has none, or they are not known in time."""
    address = _address(host)
    if address is not None:
        return ((AF_INET if address.version == 4 else AF_INET6, host),)
    loop = asyncio.get_running_loop()
    under_way = _lookups.setdefault(loop, {})
    lookup = under_way.get(host)
    if lookup is None:
        if len(under_way) >= LOOKUPS_MAX:
            return ()
        lookup = under_way[host] = loop.create_future()
        lookup.add_done_callback(lambda _: under_way.pop(host))
        # It is a daemon, so that the end of the process does not wait for it.
        Thread(target=_look_up, args=(host, loop, lookup), name="lookup", daemon=True).start()
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            return await asyncio.shield(lookup)
    except TimeoutError:
        return ()


async def connected(host: str, connect: Callable[[str], Awaitable[T]]) -> T:
    """Return the first connection that ``connect`` makes to an address of a host. Raise OSError without any."""
    failure = OSError(UNKNOWN_HOST)
    for _, address in await addresses_of(host):
        try:
            return await connect(address)
        except TimeoutError:
            raise
        except OSError as exc:
            failure = exc
    raise failure


def _look_up(host: str, loop: asyncio.AbstractEventLoop, lookup: asyncio.Future[HostAddresses]) -> None:
    found: list[tuple[int, str]] = []
    with suppress(OSError, UnicodeError):
        found = [(int(family), str(place[0])) for family, *_, place in getaddrinfo(host, None, type=SOCK_STREAM)]
    with suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(lookup.set_result, found)
