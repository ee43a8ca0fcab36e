"""One HTTP connection: it turns bytes into requests, within the bounds of ``Connections``, and runs the application.

``httptools`` parses. ``heads`` rejects what httptools lets pass and RFC 9112 forbids. Before a connection sends the
answer of a rejection, it sends the answers to all complete requests that came before, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn.server import ServerState

from waymark.asgi import AsgiApplication
from waymark.serving.cycle import WHOLE, RequestCycle
from waymark.serving.heads import HeadCheck, target_of
from waymark.serving.limits import (
    AHEAD,
    AHEAD_MAX,
    CONNECTIONS,
    HEAD,
    HEAD_BYTES_MAX,
    HEAD_FIELDS_MAX,
    NOT_HTTP,
    SLOW,
    Connections,
    Rejection,
)


def protocol(connections: Connections) -> type[asyncio.Protocol]:
    """What uvicorn is given as ``http``."""

    class Bounded(HttpConnection):
        all = connections

    return Bounded


class _Stop(Exception):
    """Raised out of the parser's callbacks: nothing more is read."""


class HttpConnection(asyncio.Protocol):
    """One connection; ``all`` is where it is kept with the others."""

    all: ClassVar[Connections]

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = _loop or asyncio.get_running_loop()
        self.is_full = False
        """The client takes what is written more slowly than it comes."""
        self._app: AsgiApplication = config.loaded_app
        self._server = server_state
        self.all.keep_alive_seconds = config.timeout_keep_alive
        self._cycles: deque[RequestCycle] = deque()
        """Requests that have begun and are not answered; the first one is being answered."""
        self._reading: RequestCycle | None = None
        """The request whose body is arriving, answered or not."""
        self._is_done = False
        """Nothing that arrives is read any more."""
        self._rejection: Rejection | None = None
        """The last word, once all requests before it are answered."""
        self._is_paused = False
        self._drained: asyncio.Event | None = None
        self._scope: dict[str, Any] = {}  # what all requests of the connection share
        self._head_check = HeadCheck()
        self._unplaced = 0  # bytes since a piece of a body or the end of a request
        self._parser = httptools.HttpRequestParser(self)
        self._begin_head(is_open=False)

    def _begin_head(self, *, is_open: bool) -> None:
        self._is_open = is_open
        """A request has begun and has not come to its end."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._head_fields = 0
        self._without_upgrade: bytes | None = None

    # ---- the transport's callbacks ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "root_path": "",
            "extensions": {WHOLE: {}},
        }
        self._server.connections.add(self)  # type: ignore[arg-type]  # uvicorn calls shutdown() of each
        self.all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._is_done = True
        self._drop_requests()
        self.all.closed(self)
        self.resume_writing()
        del self._parser  # it refers to this object

    def data_received(self, data: bytes) -> None:
        if self._is_done:
            return
        self._unplaced += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self._is_done:
                self.reject(NOT_HTTP)
        else:
            if self._unplaced > HEAD_BYTES_MAX and not self._is_done:
                self.reject(HEAD)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                # The parser takes what follows for another protocol. RFC 9110, 7.8: a server may ignore an Upgrade.
                assert self._without_upgrade is not None
                data = self._without_upgrade + data[stopped.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            else:
                return

    def pause_writing(self) -> None:
        self.is_full = True
        self.all.unread.setdefault(self, self.loop.time())

    def resume_writing(self) -> None:
        self.is_full = False
        if not self._transport.is_closing():
            self.all.unread.pop(self, None)
        if self._drained is not None:
            self._drained.set()

    # ---- the parser's callbacks ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_done:
            raise _Stop  # the request before was the last one
        self._begin_head(is_open=True)
        self.all.idle.pop(self, None)
        if not self._cycles:
            self.all.arriving.setdefault(self, self.loop.time())

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._stop(HEAD)
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        self._head_bytes += len(name) + len(value)
        if self._head_fields > HEAD_FIELDS_MAX or self._head_bytes > HEAD_BYTES_MAX:
            self._stop(HEAD)
        if self._reading is None:
            self._headers.append((name.lower(), value))
        else:  # behind the body: nobody has asked for it, and it must not pass for a part of the head
            self.all.count_trailer_field()

    def on_headers_complete(self) -> None:
        parser, url, headers = self._parser, self._url, self._headers
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        named = dict(headers)
        rejection = self._head_check.rejection(method, version, headers, named)
        if rejection is not None:
            self._stop(rejection)
        if parser.should_upgrade():
            lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
            start = b"%b %b HTTP/%b\r\n" % (method.encode(), url, version.encode())
            self._without_upgrade = b"".join((start, *lines, b"\r\n"))
            return
        scope = self._scope.copy()
        scope["method"], scope["http_version"], scope["headers"] = method, version, headers
        scope["path"], scope["raw_path"], scope["query_string"] = target_of(url)
        is_new = version == "1.1"
        self._reading = cycle = RequestCycle(
            self,
            scope,
            keep_alive=is_new and parser.should_keep_alive(),
            expects_continue=is_new and named.get(b"expect", b"").lower() == b"100-continue",
        )
        self._cycles.append(cycle)
        if len(self._cycles) == 1:
            self._start(cycle)
            return
        self.pause_reading()
        if len(self._cycles) > AHEAD_MAX + 1:
            self._stop(AHEAD)

    def on_body(self, body: bytes) -> None:
        self._unplaced = 0
        cycle = self._reading
        if cycle is None:
            raise _Stop  # rejected within these bytes
        if not cycle.is_answered:
            cycle.take(body)
            self.all.take_body(self, len(body))

    def on_message_complete(self) -> None:
        if self._without_upgrade is not None:
            return  # its body is still to be read
        cycle, self._reading = self._reading, None
        if cycle is None:
            raise _Stop
        self._unplaced = 0
        self._is_open = False
        self._is_done = not cycle.keep_alive
        self.all.arriving.pop(self, None)
        if not cycle.is_answered:
            cycle.end_body()
        elif not self._transport.is_closing():
            self.all.idle[self] = self.loop.time()

    def _stop(self, rejection: Rejection) -> None:
        self.reject(rejection)
        raise _Stop

    # ---- requests and answers --------------------------------------------------------------------------

    def _start(self, cycle: RequestCycle) -> None:
        cycle.task = self.loop.create_task(cycle.run(self._app))
        self._server.tasks.add(cycle.task)

    def answered(self, cycle: RequestCycle) -> None:
        """The whole answer of the first request has been written."""
        self._server.total_requests += 1
        self._cycles.popleft()
        if not cycle.keep_alive:
            self._drop_requests()
            self._part()
            return
        if self._cycles:
            self._start(self._cycles[0])
        elif self._is_done:
            self._part()
            return
        else:
            self.resume_reading()
        if self._is_open:
            if len(self._cycles) <= (self._reading is not None):
                self.all.arriving.setdefault(self, self.loop.time())
        elif not self._cycles:
            self.all.idle[self] = self.loop.time()

    def ended(self, cycle: RequestCycle) -> None:
        """The application is done with the request."""
        if cycle.task is not None:
            self._server.tasks.discard(cycle.task)
            cycle.task = None
        self._release(cycle)

    @property
    def owes_answers(self) -> bool:
        """Whether a request that is whole has not been answered."""
        return any(cycle.is_whole for cycle in self._cycles)

    @property
    def is_holding(self) -> bool:
        """Whether it holds bytes of a body that is not whole."""
        return self._reading is not None and self._reading.held > 0

    def _release(self, cycle: RequestCycle) -> None:
        self.all.bodies_bytes -= cycle.held
        cycle.held = 0

    def _drop_requests(self) -> None:
        """Nobody waits for the answers of those that have begun."""
        for cycle in self._cycles:
            cycle.disconnect()
            if cycle.task is None:
                self._release(cycle)
        self._cycles.clear()
        self._reading = None

    # ---- the ends of a connection ----------------------------------------------------------------------

    def reject(self, rejection: Rejection) -> None:
        """Answer the requests that are whole, say why no more is read, and close."""
        if self._is_done:
            return
        self._is_done = True
        self.all.count_cut(rejection.why)
        reading, self._reading = self._reading, None
        if reading is None:
            # Without a request there is nothing to answer, but a client that is turned away gets an answer.
            is_owed = self._is_open or self._unplaced > 0 or rejection is not SLOW
        else:
            is_owed = not (reading.is_answered or reading.is_on_wire)
            if not reading.is_answered:
                self._cycles.pop()
                reading.disconnect()
                self._release(reading)
        if is_owed:
            self._rejection = rejection
        if not self._cycles:
            self._part()

    def _part(self) -> None:
        """Say the last word, if there is one, and close."""
        self._is_done = True
        if self._rejection is not None:
            path = self._url.partition(b"?")[0].decode("latin-1")
            self.write(self._rejection.answer(self.default_lines, self.all.shape(path, self._rejection)))
        # A connection that makes room is closed at once, whatever its client is sending.
        may_be_sending = self._rejection is not CONNECTIONS and (self._is_open or self._rejection is not None)
        if may_be_sending and self._transport.can_write_eof() and not self._transport.is_closing():
            self.resume_reading()
            self._transport.write_eof()
            self.all.linger(self)
        else:
            self.close()

    def close(self) -> None:
        """Close; what has been written is still sent."""
        self._is_done = True
        self._drop_requests()
        if not self._transport.is_closing():
            self._transport.close()
            self.all.closing(self)

    def abort(self) -> None:
        """Close, and drop what has been written and not been sent."""
        self._transport.abort()

    def shutdown(self) -> None:
        """End after what has begun is answered; uvicorn calls it when the process ends."""
        if self._cycles:
            self._cycles[-1].keep_alive = False
        else:
            self.close()

    # ---- the flow of bytes -----------------------------------------------------------------------------

    @property
    def default_lines(self) -> bytes:
        """The lines of every answer."""
        return self.all.default_lines(self._server.default_headers)

    def write(self, piece: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(piece)

    async def drain(self) -> None:
        """Until the client has taken enough of what was written."""
        while self.is_full:
            self._drained = self._drained or asyncio.Event()
            self._drained.clear()
            await self._drained.wait()

    def pause_reading(self) -> None:
        if not (self._is_paused or self._transport.is_closing()):
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
