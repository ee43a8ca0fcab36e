"""Asks engines over HTTP for gauges, tokens and their own description; and asks the API server of Kubernetes.

An engine is not trusted. Each call is bounded in time and in bytes, goes only to an allowed place, and follows no
redirect. The key of the engines and the trusted certificates are the same for all calls.

aiohttp is imported by the first call: it is an eighth of a query replica's imports, and most replicas ask no engine.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from waymark.base.endpoints import UNKNOWN_HOST, AllowedEndpoints, addresses_of, place_of
from waymark.base.errors import InvalidValue, SettingsError, Unanswered
from waymark.base.shown import shown
from waymark.base.watched_file import WatchedFile

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver

#: The most connections to all engines together. The time of a call includes its wait for a connection.
_CONNECTIONS_MAX = 256
_PIECE_BYTES = 2**16
#: A peer that disappears silently ends an idle stream after about a minute and a half.
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 60, 10, 3


class HttpReply(NamedTuple):
    """The answer of an engine."""

    status: int
    body: bytes


class StreamBeginning(NamedTuple):
    """The beginning of an answer without an end."""

    status: int
    content_type: str
    pieces: AsyncIterator[bytes]
    """The bytes of the answer as they arrive. Raises Unanswered if the answer breaks off."""


class EngineKey:
    """The key of the engines. It goes only to hosts that the operator has named, since a client may register any host.

    ``hosts`` None: to every host.
    """

    def __init__(
        self,
        key: str | None,
        hosts: AllowedEndpoints | None = None,
        urls: Iterable[str] = (),
        keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``urls``: further places that the operator has named. ``keys``: the keys of single hosts, which take
        precedence."""
        self._headers = {} if key is None else _bearer(key)
        self._hosts = hosts
        self._places = frozenset(map(place_of, urls))
        self._own = [(AllowedEndpoints([host]), _bearer(secret)) for host, secret in keys.items()]

    def headers(self, url: str) -> Mapping[str, str]:
        """Return the headers with the key for a request to this URL; empty if the key may not go there."""
        for host, headers in self._own:
            if host.is_named(url):
                return headers
        if self._hosts is None or self._hosts.is_named(url) or (self._places and place_of(url) in self._places):
            return self._headers
        return {}


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class TrustedCertificates:
    """The certificates that connections trust: the system's, or those of a file, read again when the file changes."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: WatchedFile[ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext | bool:
        """Return the ``ssl`` of a request. Raise ``SettingsError`` if the file could not be read so far."""
        if self._path is None:
            return True
        if self._file is None:
            self._file = WatchedFile(Path(self._path), _contexts, "certificates")
        return self._file.entries[0]


def _contexts(path: Path) -> list[ssl.SSLContext]:
    try:
        return [ssl.create_default_context(cafile=path)]
    except OSError as error:
        raise SettingsError(f"the certificates {path} cannot be read: {error}") from None


class Asker:
    """The HTTP client of a process. It opens connections when it is asked, and keeps them."""

    def __init__(
        self, allowed: AllowedEndpoints | None = None, *, key: EngineKey | None = None, ca_file: str | None = None
    ) -> None:
        self._allowed = allowed or AllowedEndpoints()
        self._key = key or EngineKey(None)
        self._certificates = TrustedCertificates(ca_file)
        self._session: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    async def ask(
        self,
        url: str,
        *,
        seconds: float,
        bytes_max: int,
        json: bytes | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """GET a URL, or POST ``json`` to it. Raise Unanswered, or InvalidValue if the place is not allowed."""
        async with self.stream(url, seconds=seconds, json=json, method=method, headers=headers) as response:
            if response.status == 200 and not is_framed(response):
                raise Unanswered("its answer has neither a Content-Length nor chunks, so nobody knows where it ends")
            return HttpReply(response.status, await _read(response, bytes_max))

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        *,
        seconds: float,
        json: bytes | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer while it arrives, for at most ``seconds`` in all. The caller bounds the bytes that it reads.
        Raises as ``ask``.
        """
        import aiohttp

        self._allowed.check(url, "url")
        trusted = self._trusted()
        headers = {**self._key.headers(url), **(headers or {})}
        if json is not None:
            headers.setdefault("Content-Type", "application/json")
        if self._session is None:
            self._session = self._open(_CONNECTIONS_MAX)
        session = self._session
        verb = "GET" if json is None else method
        # aiohttp writes bytes in one piece, and a file in many.
        data = BytesIO(json) if json is not None and len(json) > _PIECE_BYTES else json
        try:
            async with (
                asyncio.timeout(seconds),
                session.request(verb, url, data=data, headers=headers, allow_redirects=False, ssl=trusted) as response,
            ):
                if 300 <= response.status < 400:
                    location = shown(response.headers.get("Location", ""))
                    raise Unanswered(
                        f"it redirects to {location}, and no redirect is followed; give the URL that answers"
                    )
                yield response
        except TimeoutError:
            raise Unanswered(f"it has not answered within {seconds:g} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Closing its connections makes aiohttp cancel a name lookup, and with it this call.
            raise Unanswered("its connections were closed") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _unanswered(error) from None

    @asynccontextmanager
    async def follow(self, url: str, headers: Mapping[str, str], *, seconds: float) -> AsyncIterator[StreamBeginning]:
        """GET a URL whose answer has no end, with at most ``seconds`` until it begins. Raises as ``ask``.

        The call has its own connection, which does not count among those of the other calls.
        """
        import aiohttp

        self._allowed.check(url, "url")
        trusted = self._trusted()
        if self._streams is None:
            self._streams = self._open(0)
        try:
            async with asyncio.timeout(seconds):
                own = {**self._key.headers(url), **headers}
                response = await self._streams.get(url, headers=own, allow_redirects=False, ssl=trusted)
        except TimeoutError:
            raise Unanswered(f"it has not answered within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _unanswered(error) from None
        try:
            yield StreamBeginning(response.status, response.headers.get("Content-Type", ""), _pieces(response))
        finally:
            response.close()

    async def close(self) -> None:
        """Close its connections."""
        sessions, self._session, self._streams = (self._session, self._streams), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    def _trusted(self) -> ssl.SSLContext | bool:
        try:
            return self._certificates.context()
        except SettingsError as error:
            raise InvalidValue(str(error)) from None

    def _open(self, connections_max: int) -> aiohttp.ClientSession:
        import aiohttp

        return open_session(
            aiohttp.TCPConnector(limit=connections_max, socket_factory=_kept_alive, resolver=resolver()),
            headers={"Accept-Encoding": "identity"},
        )


def resolver() -> AbstractResolver:
    """Return the resolver of the addresses of engines for a session."""
    from aiohttp.abc import AbstractResolver, ResolveResult

    class EngineResolver(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
            found = await addresses_of(host)
            if not found:
                raise OSError(None, UNKNOWN_HOST)
            return [
                ResolveResult(hostname=host, host=address, port=port, family=own, proto=0, flags=0)
                for own, address in found
                if family in (0, own)
            ]

        async def close(self) -> None:
            """Do no work: a lookup ends by itself."""

    return EngineResolver()


def open_session(
    connector: aiohttp.BaseConnector, *, connect_seconds: float | None = None, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session for requests to engines. The caller bounds the time of each request."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        # A few bytes could decompress to any number of bytes, so no request asks for compression.
        auto_decompress=False,
    )


def is_framed(response: aiohttp.ClientResponse) -> bool:
    """Return whether the end of an answer is known; otherwise the end of the connection is the end of the answer."""
    return response.content_length is not None or "Transfer-Encoding" in response.headers


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol = address[:3]
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_SECONDS), ("TCP_KEEPINTVL", _PROBE_SECONDS), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    import aiohttp

    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, OSError) as error:
        raise _unanswered(error) from None


def _unanswered(error: Exception) -> Unanswered:
    return Unanswered(_reason(error)[:200] or type(error).__name__)


def _reason(error: Exception) -> str:
    import aiohttp

    if not isinstance(error, aiohttp.ClientConnectorError) or isinstance(error, aiohttp.ClientSSLError):
        return str(error)
    # aiohttp's text speaks of its own TLS options, even without TLS.
    number = error.os_error.errno or 0
    message = os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
    return f"no connection to {error.host} port {error.port}: {message}"


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """Yield an answer in pieces, and let the event loop run between them: a long one takes time to read."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
        await asyncio.sleep(0)


async def _read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    pieces, length = [], 0
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        length += len(piece)
        if length > bytes_max:
            response.close()
            raise Unanswered(f"its answer is longer than {bytes_max} bytes")
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)
