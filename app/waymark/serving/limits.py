"""Bounds the resources of the server that one client can occupy, and those that all clients can occupy together.

A request must arrive completely, and an answer must be read, within a time. The size of a head is bounded. Connections,
and the bytes of bodies, have a ceiling. At a ceiling the server closes the connection that made the server wait
longest, not the new one: a client that sends its request at once is served while others occupy as much as they can.

A client whose connection is closed gets an answer with the reason, unless it could take that answer for another one.
Each case is counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple, Protocol

import orjson

from waymark.base.asgi import StraightTable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics

log = logging.getLogger(__name__)

#: Bytes and lines of a request's head, or of the lines between pieces of its body.
HEAD_BYTES_MAX = 32 * 1024
HEAD_FIELDS_MAX = 100
#: Requests that may be sent ahead on one connection while an earlier one is answered.
AHEAD_MAX = 16
#: How long a client may go on sending after the server's last answer. If the connection were closed at once, while
#: bytes of the client are still on their way, it would be reset, and the client could lose that answer.
_LINGER_SECONDS = 2.0
#: File descriptors for everything but HTTP connections: Redis, engines, logs.
_OTHER_FILES = 256


class ServerBounds(NamedTuple):
    """The bounds of a server."""

    request_seconds: float
    connections_max: int
    bodies_max_bytes: int


class Rejection:
    """The reason why the server closes a connection, and the answer with that reason."""

    def __init__(self, why: str, status: str, reason: str, sentence: str, *lines: str) -> None:
        self.why = why
        """The label of the metric."""
        self.status = int(status[:3])
        self.reason = reason
        self.sentence = sentence
        self._status_line = f"HTTP/1.1 {status}\r\n".encode()
        self._body = orjson.dumps({"error": sentence, "reason": reason})
        own = ["content-type: application/json", *lines, "connection: close"]
        self._lines = "\r\n".join([*own, "", ""]).encode()

    def body(self, shape: Shape, path: str) -> bytes | None:
        """Return the body that a shape gives a path."""
        return shape(path, self.status, self.sentence, self.reason)

    def answer(self, default_lines: bytes, body: bytes | None = None, *, has_body: bool = True) -> bytes:
        """Return the answer on the wire. ``default_lines`` are in every answer; ``body`` replaces the usual JSON."""
        body = self._body if body is None else body
        length = b"content-length: %d\r\n" % len(body)
        return b"".join((self._status_line, default_lines, length, self._lines, body if has_body else b""))


Shape = Callable[[str, int, str, str], bytes | None]
"""The body of a rejection for a path, by its status, sentence and reason; None: the usual one."""


def _bad_request(sentence: str, status: str = "400 Bad Request") -> Rejection:
    return Rejection("not_http", status, "invalid_value", sentence)


NOT_HTTP = _bad_request("the request is not valid HTTP; send HTTP/1.1")
HOST = _bad_request("the request needs one Host header, as host or host:port; send exactly one")
TRANSFER_CODING = _bad_request(
    "the Transfer-Encoding is not chunked, or the request is HTTP/1.0; send chunked over HTTP/1.1, or a Content-Length",
    "501 Not Implemented",
)
LENGTH = Rejection(
    "length",
    "411 Length Required",
    "missing",
    "the request does not give the length of its body; send Content-Length, or Transfer-Encoding: chunked",
)
HEAD = Rejection(
    "head",
    "431 Request Header Fields Too Large",
    "too_large",
    f"the head of the request has more than {HEAD_BYTES_MAX} bytes or {HEAD_FIELDS_MAX} fields; send less",
)
SLOW = Rejection(
    "slow",
    "408 Request Timeout",
    "unavailable",
    "the request did not arrive within WAYMARK_REQUEST_SECONDS; send it faster",
)
BROKEN = Rejection(
    "broken", "502 Bad Gateway", "interrupted", "the engine has broken off its answer; send the request again"
)
FAULT = Rejection(
    "fault", "500 Internal Server Error", "internal", "this service has failed; its log contains the error"
)


def _busy(why: str, sentence: str) -> Rejection:
    return Rejection(why, "503 Service Unavailable", "unavailable", sentence, "retry-after: 1")


AHEAD = _busy("ahead", f"more than {AHEAD_MAX} requests were sent before their answers; wait for the answers")
CONNECTIONS = _busy(
    "connections", "more connections are open than WAYMARK_CONNECTIONS_MAX allows; try again in a moment"
)
BODIES = _busy(
    "bodies", "request bodies hold more bytes at once than WAYMARK_MAX_BODY_BYTES allows; try again in a moment"
)


class Connection(Protocol):
    """A connection, as its bounds use it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_holding(self) -> bool:
        """Whether it holds bytes of an incomplete body."""
        ...

    def reject(self, rejection: Rejection) -> None:
        """Answer with the reason, and close."""

    def close(self) -> None: ...

    def abort(self) -> None:
        """Close, and drop the bytes that were written and not sent."""


class Connections:
    """All connections of one server, by the event that each waits for. The dictionaries are in order of time."""

    def __init__(
        self,
        bounds: ServerBounds,
        metrics: Metrics,
        shape: Shape = lambda *_: None,
        straight: StraightTable | None = None,
    ) -> None:
        self.bounds = bounds
        self.shape = shape
        self.straight: StraightTable = {} if straight is None else straight
        self.keep_alive_seconds = math.inf
        """uvicorn's setting, known with the first connection."""
        self.bodies_bytes = 0
        self.arriving: dict[Connection, float] = {}
        """A request is due or has begun, is not whole, and no other is being answered."""
        self.idle: dict[Connection, float] = {}
        """Answered, and kept for a next request."""
        self.unread: dict[Connection, float] = {}
        """The client has not read all bytes written, or the end of the answer has been written."""
        self.lingering: dict[Connection, float] = {}
        """The last bytes have been written; later input is dropped."""
        self._waits = (self.arriving, self.idle, self.unread, self.lingering)
        self._open: set[Connection] = set()
        self.lines_of: list[tuple[bytes, bytes]] = []
        self.lines = b""
        """The headers in ``lines_of``, as lines."""
        self._metrics = metrics
        self._metrics.http_bodies_bytes.set_function(lambda: self.bodies_bytes)
        self._is_polling = False
        self._has_warned_full = False

    # ---- states of a connection ------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self._metrics.http_connections.set(len(self._open))
        self.arriving[connection] = connection.loop.time()
        if len(self._open) > self.bounds.connections_max:
            self._warn_full()
            self._make_room()
        if not self._is_polling:
            self._is_polling = True
            self._poll_later(connection.loop)

    def _warn_full(self) -> None:
        if not self._has_warned_full:
            self._has_warned_full = True
            log.warning(
                "WAYMARK_CONNECTIONS_MAX, or the limit of open files, allows no more HTTP connections; for each "
                "further one the longest idle one is closed",
                extra=fields(connections=self.bounds.connections_max),
            )

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._metrics.http_connections.set(len(self._open))
        self._forget(connection)

    def linger(self, connection: Connection) -> None:
        """Linger after the last bytes: the client may still be sending."""
        self._forget(connection)
        self.lingering[connection] = connection.loop.time()

    def closing(self, connection: Connection) -> None:
        """Note that the transport closes; if the client does not read the last bytes, the connection is dropped."""
        self._forget(connection)
        self.unread[connection] = connection.loop.time()

    def _forget(self, connection: Connection) -> None:
        for waiting in self._waits:
            waiting.pop(connection, None)

    # ---- ceilings --------------------------------------------------------------------------------------

    def take_body(self, connection: Connection, length: int) -> None:
        """Count received bytes of a body; the bodies that have been arriving longest make room for them."""
        self.bodies_bytes += length
        if self.bodies_bytes <= self.bounds.bodies_max_bytes:
            return
        for candidate in [*(candidate for candidate in self.arriving if candidate.is_holding), connection]:
            candidate.reject(BODIES)
            if self.bodies_bytes <= self.bounds.bodies_max_bytes:
                break

    def _make_room(self) -> None:
        """Close the connection that has been waiting longest; even the newest one may be closed."""
        if self.lingering:
            next(iter(self.lingering)).close()
            return
        firsts = [next(iter(waiting.items())) for waiting in (self.arriving, self.idle) if waiting]
        min(firsts, key=itemgetter(1))[0].reject(CONNECTIONS)

    # ---- time ------------------------------------------------------------------------------------------

    def _poll_later(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(min(1.0, self.bounds.request_seconds / 4), self._poll, loop)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the late connections. One timer for all, since there may be thousands."""
        now = loop.time()
        for connection in _until(self.arriving, now - self.bounds.request_seconds):
            connection.reject(SLOW)
        for connection in _until(self.unread, now - self.bounds.request_seconds):
            self.count_cut("unread")
            connection.abort()
        for waiting, seconds in ((self.idle, self.keep_alive_seconds), (self.lingering, _LINGER_SECONDS)):
            for connection in _until(waiting, now - seconds):
                connection.close()
        if self._open or self.unread:
            self._poll_later(loop)
        else:
            self._is_polling = False

    # ---- common headers, and counts --------------------------------------------------------------------

    def default_lines(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return uvicorn's headers of every answer, as lines; uvicorn makes a new list each second."""
        if headers is not self.lines_of:
            self.lines_of, self.lines = headers, b"".join([b"%b: %b\r\n" % header for header in headers])
        return self.lines

    def count_cut(self, why: str) -> None:
        self._metrics.http_connections_cut.labels(reason=why).inc()

    def count_trailer_field(self) -> None:
        self._metrics.http_trailer_fields_dropped.inc()


def _until(waiting: dict[Connection, float], moment: float) -> list[Connection]:
    late = []
    for connection, start in waiting.items():
        if start > moment:
            break
        late.append(connection)
    return late


def files_for(connections_max: int, other_files: int = 0) -> int:
    """Return how many connections the limit of open files allows, at most ``connections_max``; raise the soft limit if
    needed.

    ``other_files`` is the number of files of this process that another part has counted itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + other_files + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    allowed = max(1, soft - other_files - _OTHER_FILES)
    # ``Connections`` warns when a connection finds no room; few installations have so many.
    log.debug("the limit of open files limits the number of connections", extra=fields(connections=allowed, files=soft))
    return allowed
