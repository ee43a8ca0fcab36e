"""The connections to engines: a request out, the head of its answer back, then its body as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from yarl import URL

from waymark.base.asker import EngineKey, TrustedCertificates, is_framed, open_session, resolver
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, SettingsError

#: Below the five seconds after which engines close an idle connection: a request may meet one that is closed just now.
_KEEP_ALIVE_SECONDS = 4.0
_CONNECT_SECONDS = 5.0
CONNECT = "connect"


#: Whether the last connection of this task was kept from an earlier request.
_was_kept: ContextVar[bool] = ContextVar("_was_kept", default=False)
#: The status line of an answer, and the bytes after it.
_STATUS_LINE = re.compile(rb"(?s)[\r\n]*HTTP/[0-9.]+ ([0-9]*)[^\n]*\n(.)")
_END_OF_HEAD = re.compile(rb"\n\r?\n")
#: Bytes of interim answers before an answer, and of its line of status.
_HEAD_BYTES_MAX = 2**16


class Unreachable(Exception):
    """The engine has begun no answer; the request may be sent to another. The text is a short reason."""

    @property
    def is_connect(self) -> bool:
        """Whether there was not even a connection."""
        return str(self) == CONNECT


class Interrupted(Exception):
    """The answer has begun and will not end. The text is a short reason."""


class _IdleWatch:
    """Ends the wait for a piece of a body with Interrupted once it has lasted for ``seconds``.

    One timer for the whole body, which looks at the present wait when it ends: an answer has a thousand pieces, and a
    timer for each is a large part of what a piece costs.
    """

    def __init__(self, content: aiohttp.StreamReader, seconds: float) -> None:
        self._content = content
        self._seconds = seconds
        loop = asyncio.get_running_loop()
        self.time = loop.time
        self._call_later = loop.call_later
        self.since: float | None = None
        """When the present wait began; None while the client takes a piece, however long."""
        self._timer = self._call_later(seconds, self._look)

    def _look(self) -> None:
        seconds = self._seconds if self.since is None else self.since + self._seconds - self.time()
        if seconds > 0:
            self._timer = self._call_later(seconds, self._look)
        else:
            self._content.set_exception(Interrupted("idle"))

    def end(self) -> None:
        self._timer.cancel()


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
        self._certificates = TrustedCertificates(ca_file)
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, address: str, path: str, query: bytes, body: bytes, headers: Sequence[tuple[str, str]]
    ) -> aiohttp.ClientResponse:
        """POST a body. Raise Unreachable if no answer begins."""
        try:
            self._allowed.check(address, "address")
        except InvalidValue:
            raise Unreachable("not_allowed") from None
        own = [("accept-encoding", "identity"), *self._key.headers(address).items()]
        url = address.rstrip("/") + path + ("?" + query.decode("latin-1") if query else "")
        try:
            trusted = self._certificates.context()
        except SettingsError as error:
            raise SettingsError(f"WAYMARK_ENGINE_CA_FILE: {error}") from None
        if self._session is None:
            self._session = self._open()
        session = self._session

        async def post() -> aiohttp.ClientResponse:
            return await session.post(
                URL(url, encoded=True), data=body, headers=[*headers, *own], allow_redirects=False, ssl=trusted
            )

        try:
            async with asyncio.timeout(self._first_byte_seconds):
                try:
                    response = await post()
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    if not _was_kept.get():
                        raise
                    # The engine has closed a kept connection, and has not begun to answer on it.
                    response = await post()
        except TimeoutError:
            raise Unreachable("timeout") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            error.__traceback__ = None  # as in ``pieces``
            raise Unreachable(CONNECT if isinstance(error, aiohttp.ClientConnectorError) else "broken") from None
        if not _is_answer(response):
            response.close()
            raise Unreachable("invalid")
        return response

    async def pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; bytes that arrive together come together. Raise Interrupted if it breaks
        off.
        """
        content = response.content
        watch = _IdleWatch(content, self._idle_seconds)
        try:
            while not content.at_eof():
                watch.since = watch.time()
                piece = await content.readany()
                watch.since = None
                if piece:
                    yield piece
        except (Interrupted, aiohttp.ClientError, OSError) as error:
            reason = str(error) if isinstance(error, Interrupted) else type(error).__name__
            # The reader keeps its error, and with its traceback the request, until the garbage collector runs.
            error.__traceback__ = None
            raise Interrupted(reason) from None
        finally:
            watch.end()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        # As many connections as there are requests; these have a bound of their own.
        connector = _Connector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, resolver=resolver())
        return open_session(connector, connect_seconds=_CONNECT_SECONDS)


def is_events(response: aiohttp.ClientResponse) -> bool:
    return response.headers.get("Content-Type", "").lower().startswith("text/event-stream")


def _is_answer(response: aiohttp.ClientResponse) -> bool:
    """Return whether it is an answer with an end, in a form that can be forwarded unchanged."""
    codings = response.headers.getall("Transfer-Encoding", ())
    return (
        200 <= response.status < 600
        and response.version in (aiohttp.HttpVersion10, aiohttp.HttpVersion11)
        and all(coding.strip().lower() == "chunked" for coding in codings)
        and (is_framed(response) or is_events(response) or response.status in (204, 304))
    )


class _AnswerReader(ResponseHandler):
    """A reader of one connection that refuses whitespace after the status line.

    The parser takes the rest for a header, and RFC 9112 (2.2) requires a server to refuse or ignore it.
    """

    _head: bytes | None = None
    had_request = False
    """Whether the connection was used before."""

    def set_response_params(self, **params: Any) -> None:
        self.had_request = True
        self._head = b""
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            if not self._is_sane():
                self.set_exception(aiohttp.ClientPayloadError("the answer begins with no line of status"))
                self.close()
                return
        super().data_received(data)

    def _is_sane(self) -> bool:
        """Return whether the status lines received so far are free of whitespace at their ends."""
        head, self._head = self._head or b"", None
        while (line := _STATUS_LINE.match(head)) is not None:
            if line[2] in b" \t":
                return False
            if not line[1].startswith(b"1"):
                return True
            # The head of an interim answer is followed by another head.
            end = _END_OF_HEAD.search(head, line.end(1))
            if end is None:
                break
            head = head[end.end() :]
        self._head = head
        return len(head) <= _HEAD_BYTES_MAX


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # aiohttp has no other way; the tests fail if it changes.
        self._factory = partial(_AnswerReader, loop=self._loop)  # type: ignore[assignment]

    async def connect(self, *arguments: Any, **options: Any) -> Connection:
        _was_kept.set(False)
        connection = await super().connect(*arguments, **options)
        _was_kept.set(isinstance(connection.protocol, _AnswerReader) and connection.protocol.had_request)
        return connection
