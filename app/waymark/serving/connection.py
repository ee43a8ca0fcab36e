"""uvicorn's HTTP protocol, within the bounds of ``Connections``."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from waymark.serving.connections import (
    AHEAD,
    AHEAD_MAX,
    CONNECTIONS,
    HEAD,
    HEAD_BYTES_MAX,
    HEAD_FIELDS_MAX,
    NOT_HTTP,
    Connections,
    Refusal,
)
from waymark.serving.exchange import Exchange
from waymark.serving.heads import Head, head_of

#: A target that is just a path, and means what it says.
_PLAIN_PATH = re.compile(rb"(?:/[A-Za-z0-9_.-]+)+").fullmatch


def protocol(connections: Connections) -> type[asyncio.Protocol]:
    """What uvicorn is given as ``http``."""

    class Bounded(Connection):
        all = connections

    return Bounded


class Connection(HttpToolsProtocol):
    """One connection; ``all`` is where it is kept with the others."""

    all: ClassVar[Connections]
    cycle: Exchange
    pipeline: deque[tuple[Exchange, Any]]  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answering: Exchange | None = None
        self._refusal: Refusal | None = None
        self._scope_of_all: dict[str, Any] = {}
        self._head: Head | None = None  # of the request before
        self._unplaced = 0  # bytes since a piece of a body or the end of a request
        self._head_bytes = 0

    # ---- the connection --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.all.keep_alive_seconds = self.timeout_keep_alive
        self._scope_of_all = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
        }
        self.all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells only the newest request; the one that is being answered may be another.
        if self._answering is not None:
            self._answering.disconnected = True
        super().connection_lost(exc)
        self.all.closed(self)
        for exchange in self._exchanges():
            if exchange is not self._answering:
                self._release(exchange)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        before = self.cycle
        is_between = self in self.all.idle  # else a request is arriving, or being answered
        if is_between and self._head is not None:
            known = self._head.read(data)
            if known is not None:
                headers, body = known
                del self.all.idle[self]
                self.all.arriving[self] = self.loop.time()  # it may be the one body too many
                self._begin(self._head.scope | {"headers": headers, "state": self.app_state.copy()})
                self.on_body(body)
                self.on_message_complete()
                return
        self._unplaced += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered as if the client had not asked for another protocol; what follows it would be in that one.
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self.refuse(self._refusal or NOT_HTTP)
        if self._unplaced > HEAD_BYTES_MAX:
            self.refuse(HEAD)
        elif is_between and self.cycle is not before and not self.cycle.more_body and self.cycle.keep_alive:
            self._head = head_of(data, self.cycle.scope, self.headers)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.all.unread[self] = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.all.unread.pop(self, None)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.all.closing(self)

    def refuse(self, refusal: Refusal) -> None:
        """Cut, with an answer if the client has begun a request and no other is being answered."""
        if self.transport.is_closing():
            return
        self.all.count_cut(refusal.why)
        exchange = self.cycle
        if exchange is None or exchange.response_complete:
            has_begun = self._unplaced > 0 or refusal is CONNECTIONS
        else:
            has_begun = exchange.more_body and not exchange.response_started and not self.pipeline
        if has_begun:
            self.transport.write(refusal.answer)
        self.transport.close()
        self.all.closing(self)
        for exchange in self._exchanges():
            self._release(exchange)

    # ---- the parser's callbacks ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_bytes = 0
        self.all.idle.pop(self, None)
        self.all.arriving.setdefault(self, self.loop.time())

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._stop(HEAD)
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        name = name.lower()
        self.headers.append((name, value))
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers) > HEAD_FIELDS_MAX:
            self._stop(HEAD)
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        url = self.url
        scope = self._scope_of_all | {
            "http_version": version,
            "method": self.parser.get_method().decode("ascii"),
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        if _PLAIN_PATH(url):
            scope["path"], scope["raw_path"], scope["query_string"] = url.decode("ascii"), url, b""
        else:
            target = httptools.parse_url(url)
            scope["path"], scope["raw_path"] = unquote(target.path.decode("ascii")), target.path
            scope["query_string"] = target.query or b""
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        self._begin(scope, keep_alive=keep_alive, expects_continue=self.expect_100_continue)

    def _begin(self, scope: dict[str, Any], *, keep_alive: bool = True, expects_continue: bool = False) -> None:
        before = self.cycle
        defaults = self.server_state.default_headers
        self.cycle = exchange = Exchange(
            scope,
            self.transport,
            self.flow,
            default_headers=defaults,
            default_lines=self.all.default_lines(defaults),
            keep_alive=keep_alive,
            expects_continue=expects_continue,
            on_response=self.on_response_complete,
            on_end=self._ended,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(exchange, self.app)
            return
        self.flow.pause_reading()
        self.pipeline.appendleft((exchange, self.app))
        if len(self.pipeline) > AHEAD_MAX:
            self._stop(AHEAD)

    def on_body(self, body: bytes) -> None:
        self._unplaced = 0
        if not self.cycle.response_complete:
            self.cycle.take(body)
            self.all.take_body(len(body))

    def on_message_complete(self) -> None:
        self._unplaced = 0
        self.all.arriving.pop(self, None)
        if not self.cycle.response_complete:
            self.cycle.end_body()
        elif not self.transport.is_closing():
            self.all.idle[self] = self.loop.time()  # answered before it was whole

    def _stop(self, refusal: Refusal) -> None:
        """End the parser's work; its caller finds the refusal."""
        self._refusal = refusal
        raise ValueError(refusal.why)

    # ---- requests and answers --------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes of bodies whose requests have not been answered."""
        return sum(exchange.held for exchange in self._exchanges())

    def _exchanges(self) -> list[Exchange]:
        """Those that may hold something: being answered, waiting for it, arriving."""
        known = [self._answering, *(exchange for exchange, _ in self.pipeline), self.cycle]
        return [exchange for exchange in known if exchange is not None]

    def _start_asgi_task(self, cycle: Exchange, app: Any) -> None:  # type: ignore[override]
        self._answering = cycle
        cycle.task = self.loop.create_task(cycle.run(app))
        self.tasks.add(cycle.task)

    def _ended(self, exchange: Exchange) -> None:
        if exchange.task is not None:
            self.tasks.discard(exchange.task)
        self._release(exchange)

    def _release(self, exchange: Exchange) -> None:
        self.all.bodies_bytes -= exchange.held
        exchange.held = 0

    def on_response_complete(self) -> None:
        # As uvicorn's, but without a timer for each answer: there is one for all connections.
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
        if self.transport.is_closing():
            self.all.closing(self)
        elif not self.pipeline and self not in self.all.arriving:
            self.all.idle[self] = self.loop.time()
