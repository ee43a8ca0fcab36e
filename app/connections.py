"""uvicorn's HTTP protocol, bounded: what one client can keep from us, and what all of them can keep together.

uvicorn waits for ever for a request to arrive and for an answer to be taken, and it keeps headers, requests sent
ahead and bodies without end. Here a request has a time to arrive whole, a head has a size, and connections and
bytes of bodies have a ceiling. At a ceiling it is not the newcomer that is turned away but the one that has been
keeping us waiting longest: a client that sends its request at once is served while others hold what they can.

What is cut is told so where an answer can still be told apart from another, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import httptools
import orjson
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.logs import fields
from app.metrics import Metrics

log = logging.getLogger(__name__)

#: Bytes and lines of a request's head, or of what comes between pieces of its body.
HEAD_BYTES_MAX = 32 * 1024
HEAD_FIELDS_MAX = 100
#: Requests that may be sent ahead on one connection while an earlier one is answered.
AHEAD_MAX = 16
#: Headers that say more than what the body is.
_OF_THE_CONNECTION = frozenset({b"connection", b"transfer-encoding", b"upgrade"})
#: File descriptors for everything but HTTP connections: Redis, engines, logs.
_OTHER_FILES = 256


class Bounds(NamedTuple):
    """What a server holds at most."""

    request_seconds: float
    connections_max: int
    bodies_max_bytes: int


class _Refusal:
    """Why a connection is cut, and the answer that says so."""

    def __init__(self, why: str, status: str, reason: str, sentence: str, *headers: str) -> None:
        self.why = why
        body = orjson.dumps({"error": sentence, "reason": reason})
        lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
        self.answer = "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


_NOT_HTTP = _Refusal("not_http", "400 Bad Request", "invalid_value", "this is no HTTP request; send HTTP/1.1")
_HEAD = _Refusal(
    "head",
    "431 Request Header Fields Too Large",
    "too_large",
    f"the head of the request has more than {HEAD_BYTES_MAX} bytes or {HEAD_FIELDS_MAX} fields; send less",
)
_AHEAD = _Refusal(
    "ahead",
    "503 Service Unavailable",
    "unavailable",
    f"more than {AHEAD_MAX} requests were sent ahead of their answers; wait for answers",
    "retry-after: 1",
)
_SLOW = _Refusal(
    "slow",
    "408 Request Timeout",
    "unavailable",
    "the request did not arrive within WAYMARK_REQUEST_SECONDS; send it faster",
)
_CONNECTIONS = _Refusal(
    "connections",
    "503 Service Unavailable",
    "unavailable",
    "more connections came than WAYMARK_CONNECTIONS_MAX; try again in a moment",
    "retry-after: 1",
)
_BODIES = _Refusal(
    "bodies",
    "503 Service Unavailable",
    "unavailable",
    "more is being sent at once than WAYMARK_BODIES_MAX_BYTES; try again in a moment",
    "retry-after: 1",
)


class Connections:
    """All connections of one server, by what they are waiting for. Dictionaries are in order of time."""

    def __init__(self, bounds: Bounds, metrics: Metrics) -> None:
        self.bounds = bounds
        self.keep_alive_seconds = math.inf
        """Told by the first connection; uvicorn's setting."""
        self.bodies_bytes = 0
        self.arriving: dict[Connection, float] = {}
        """A request is due or has begun, and is not whole."""
        self.idle: dict[Connection, float] = {}
        """Answered, and kept for a next request."""
        self.unread: dict[Connection, float] = {}
        """More was written than the client has taken, or the end of it has been written."""
        self._open: set[Connection] = set()
        self._metrics = metrics
        self._metrics.http_bodies_bytes.set_function(lambda: self.bodies_bytes)
        self._is_looking = False

    def protocol(self) -> type[asyncio.Protocol]:
        """What uvicorn is given as ``http``."""

        class Bounded(Connection):
            all = self

        return Bounded

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self._metrics.http_connections.set(len(self._open))
        self.arriving[connection] = connection.loop.time()
        if len(self._open) > self.bounds.connections_max:
            self._longest_waiting().refuse(_CONNECTIONS)
        if not self._is_looking:
            self._is_looking = True
            self._look_again(connection.loop)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._metrics.http_connections.set(len(self._open))
        for waiting in (self.arriving, self.idle, self.unread):
            waiting.pop(connection, None)

    def closing(self, connection: Connection) -> None:
        """The last bytes have been written; if they are not taken the connection is thrown away."""
        for waiting in (self.arriving, self.idle, self.unread):
            waiting.pop(connection, None)
        self.unread[connection] = connection.loop.time()

    def take_body(self, length: int) -> None:
        """Bytes of a body have arrived; those that have been arriving longest make room for them."""
        self.bodies_bytes += length
        if self.bodies_bytes > self.bounds.bodies_max_bytes:
            for connection in [connection for connection in self.arriving if connection.held]:
                connection.refuse(_BODIES)
                if self.bodies_bytes <= self.bounds.bodies_max_bytes:
                    break

    def count_cut(self, why: str) -> None:
        self._metrics.http_connections_cut.labels(reason=why).inc()

    def _longest_waiting(self) -> Connection:
        """There is one: the newest connection has not sent its request yet."""
        firsts = [next(iter(waiting.items())) for waiting in (self.arriving, self.idle) if waiting]
        return min(firsts, key=itemgetter(1))[0]

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(min(1.0, self.bounds.request_seconds / 4), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cut who is late. One timer for all, since there may be thousands."""
        since = loop.time() - self.bounds.request_seconds
        for connection in _until(self.arriving, since):
            connection.refuse(_SLOW)
        for connection in _until(self.unread, since):
            self.count_cut("unread")
            connection.transport.abort()
        for connection in _until(self.idle, loop.time() - self.keep_alive_seconds):
            connection.timeout_keep_alive_handler()
        if self._open or self.unread:
            self._look_again(loop)
        else:
            self._is_looking = False


def _until(waiting: dict[Connection, float], moment: float) -> list[Connection]:
    late = []
    for connection, since in waiting.items():
        if since > moment:
            break
        late.append(connection)
    return late


class _Answer:
    """The sending side of one request: head and body go out in one piece.

    What is not the usual answer, one body of a length that is told, goes out as uvicorn sends it.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._as_usual = cycle.send
        self._start: Any = None

    async def send(self, message: Any) -> None:
        cycle, start = self._cycle, self._start
        if start is None:
            if cycle.response_started or message["type"] != "http.response.start":
                await self._as_usual(message)
                return
            self._start = message
            cycle.response_started = True  # from here on a failure can no longer be answered
            cycle.waiting_for_100_continue = False
            return
        self._start = None
        if cycle.disconnected:
            return
        body = message.get("body", b"")
        head = None if message.get("more_body", False) else _head(start, len(body), cycle.default_headers)
        if head is None or cycle.flow.write_paused or not cycle.keep_alive or cycle.scope["method"] == "HEAD":
            cycle.response_started = False
            await self._as_usual(start)
            await self._as_usual(message)
            return
        cycle.transport.write(head + body)
        cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()


def _head(start: Any, length: int, defaults: list[tuple[bytes, bytes]]) -> bytes | None:
    """The head of an answer with a body of ``length`` bytes; None where it is not a usual one."""
    headers = [*defaults, *start["headers"]]
    told = b"%d" % length
    lines = [STATUS_LINE[start["status"]]]
    is_told = False
    for name, value in headers:
        if name == b"content-length":
            is_told = value == told
        elif name in _OF_THE_CONNECTION:
            return None
        lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(b"\r\n")
    head = b"".join(lines)
    # A line break in a value would begin a line of its own.
    return head if is_told and head.count(b"\n") == head.count(b"\r") == len(headers) + 2 else None


class Connection(HttpToolsProtocol):
    """One connection; ``all`` is where it is kept with the others."""

    all: ClassVar[Connections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bytes of bodies, by request, from their arrival until the request has been answered.
        self.held: dict[RequestResponseCycle, int] = {}
        self._answering: RequestResponseCycle | None = None
        self._refusal: _Refusal | None = None
        self._unplaced = 0  # bytes since a piece of a body or the end of a request
        self._head_bytes = 0
        self._head_fields = 0

    # ---- the connection --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.all.keep_alive_seconds = self.timeout_keep_alive
        self.all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells only the newest request; the one that is being answered may be another.
        if self._answering is not None:
            self._answering.disconnected = True
        super().connection_lost(exc)
        self.all.closed(self)
        for cycle in [cycle for cycle in self.held if cycle is not self._answering]:
            self._release(cycle)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unplaced += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered as if the client had not asked for another protocol; what follows it would be in that one.
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self.refuse(self._refusal or _NOT_HTTP)
        if self._unplaced > HEAD_BYTES_MAX:
            self.refuse(_HEAD)

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

    def refuse(self, refusal: _Refusal) -> None:
        """Cut, with an answer if the client has begun a request and no other is being answered."""
        if self.transport.is_closing():
            return
        self.all.count_cut(refusal.why)
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            has_begun = self._unplaced > 0 or refusal is _CONNECTIONS
        else:
            has_begun = cycle.more_body and not cycle.response_started and not self.pipeline
        if has_begun:
            self.transport.write(refusal.answer)
        self.transport.close()
        self.all.closing(self)
        for cycle in list(self.held):
            self._release(cycle)

    # ---- the parser's callbacks ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._head_fields = 0
        self.all.idle.pop(self, None)
        self.all.arriving.setdefault(self, self.loop.time())

    def on_url(self, url: bytes) -> None:
        self._measure_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        self._measure_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if len(self.pipeline) > AHEAD_MAX:
            self._stop(_AHEAD)

    def on_body(self, body: bytes) -> None:
        self._unplaced = 0
        cycle = self.cycle
        if not cycle.response_complete:
            # As uvicorn's, but nobody is woken for a body that will soon be whole.
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
                cycle.message_event.set()
            self.held[cycle] = self.held.get(cycle, 0) + len(body)
            self.all.take_body(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unplaced = 0
        self.all.arriving.pop(self, None)

    def _measure_head(self, length: int) -> None:
        self._head_bytes += length
        if self._head_bytes > HEAD_BYTES_MAX or self._head_fields > HEAD_FIELDS_MAX:
            self._stop(_HEAD)

    def _stop(self, refusal: _Refusal) -> None:
        """End the parser's work; its caller finds the refusal."""
        self._refusal = refusal
        raise ValueError(refusal.why)

    # ---- requests and answers --------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.send = _Answer(cycle).send  # type: ignore[method-assign]
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        self._answering = cycle
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        for cycle in [cycle for cycle in self.held if cycle.response_complete or cycle.disconnected]:
            self._release(cycle)

    def _release(self, cycle: RequestResponseCycle) -> None:
        self.all.bodies_bytes -= self.held.pop(cycle, 0)

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


def files_for(connections_max: int) -> int:
    """How many connections the limit of open files allows, at most those asked for; raises the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    allowed = max(1, soft - _OTHER_FILES)
    log.warning("fewer connections than set: the limit of open files", extra=fields(connections=allowed, files=soft))
    return allowed
