"""The connections to engines: a request out, the head of its answer back, then its body as it arrives."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
from yarl import URL

from waymark.asker import EngineKey
from waymark.endpoints import AllowedEndpoints
from waymark.errors import InvalidValue, SettingsError
from waymark.settings import Settings

#: Below the five seconds after which engines close a connection that is idle: one that is closed just now costs a try.
_KEEP_ALIVE_SECONDS = 4.0
_CONNECT_SECONDS = 5.0
_CONNECT = "connect"


class Unreachable(Exception):
    """The engine has begun no answer; the request may be sent to another. The text is a short reason."""

    @property
    def is_connect(self) -> bool:
        """Whether there was not even a connection."""
        return str(self) == _CONNECT


class Interrupted(Exception):
    """The answer has begun and will not end. The text is a short reason."""


class Upstream:
    """The HTTP client of a gateway.

    ``first_byte_seconds`` bounds the wait for the head of an answer, ``idle_seconds`` each pause in its body.
    """

    def __init__(
        self,
        allowed: AllowedEndpoints,
        *,
        first_byte_seconds: float,
        idle_seconds: float,
        key: EngineKey | None = None,
        ca_file: str | None = None,
    ) -> None:
        self._allowed = allowed
        self._first_byte_seconds = first_byte_seconds
        self._idle_seconds = idle_seconds
        self._key = key or EngineKey(None)
        self._ca_file = ca_file
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, settings: Settings) -> Upstream:
        return cls(
            AllowedEndpoints(settings.allowed_endpoints),
            first_byte_seconds=settings.gateway_first_byte_seconds,
            idle_seconds=settings.gateway_idle_seconds,
            key=EngineKey.of(settings),
            ca_file=settings.engine_ca_file,
        )

    async def send(
        self, address: str, path: str, query: bytes, body: bytes, headers: Sequence[tuple[str, str]]
    ) -> aiohttp.ClientResponse:
        """POST a body. Raises Unreachable where no answer begins."""
        try:
            self._allowed.check(address, "address")
        except InvalidValue:
            raise Unreachable("not_allowed") from None
        own = [("accept-encoding", "identity"), *self._key.headers(address).items()]
        url = address.rstrip("/") + path + ("?" + query.decode("latin-1") if query else "")
        if self._session is None:
            self._session = self._open()
        try:
            async with asyncio.timeout(self._first_byte_seconds):
                return await self._session.post(
                    URL(url, encoded=True), data=body, headers=[*headers, *own], allow_redirects=False
                )
        except TimeoutError:
            raise Unreachable("timeout") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(_CONNECT if isinstance(error, aiohttp.ClientConnectorError) else "broken") from None

    async def pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The body as it arrives; what has arrived together comes together. Raises Interrupted."""
        content = response.content
        try:
            while not content.at_eof():
                async with asyncio.timeout(self._idle_seconds):
                    piece = await content.readany()
                if piece:
                    yield piece
        except TimeoutError:
            raise Interrupted("idle") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(type(error).__name__) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        context: ssl.SSLContext | bool = True
        if self._ca_file is not None:
            try:
                context = ssl.create_default_context(cafile=Path(self._ca_file))
            except OSError as error:
                raise SettingsError(f"WAYMARK_ENGINE_CA_FILE {self._ca_file} cannot be read: {error}") from None
        return aiohttp.ClientSession(
            # As many as there are requests; these have a bound of their own.
            connector=aiohttp.TCPConnector(limit=0, ssl=context, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
