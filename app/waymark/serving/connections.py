"""What one client can keep from us, and what all of them can keep together.

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
from typing import TYPE_CHECKING, NamedTuple

import orjson

from waymark.logs import fields
from waymark.metrics import Metrics

if TYPE_CHECKING:
    from waymark.serving.connection import Connection

log = logging.getLogger(__name__)

#: Bytes and lines of a request's head, or of what comes between pieces of its body.
HEAD_BYTES_MAX = 32 * 1024
HEAD_FIELDS_MAX = 100
#: Requests that may be sent ahead on one connection while an earlier one is answered.
AHEAD_MAX = 16
#: File descriptors for everything but HTTP connections: Redis, engines, logs.
_OTHER_FILES = 256


class Bounds(NamedTuple):
    """What a server holds at most."""

    request_seconds: float
    connections_max: int
    bodies_max_bytes: int


class Refusal:
    """Why a connection is cut, and the answer that says so."""

    def __init__(self, why: str, status: str, reason: str, sentence: str, *headers: str) -> None:
        self.why = why
        body = orjson.dumps({"error": sentence, "reason": reason})
        lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
        self.answer = "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


NOT_HTTP = Refusal("not_http", "400 Bad Request", "invalid_value", "this is no HTTP request; send HTTP/1.1")
HEAD = Refusal(
    "head",
    "431 Request Header Fields Too Large",
    "too_large",
    f"the head of the request has more than {HEAD_BYTES_MAX} bytes or {HEAD_FIELDS_MAX} fields; send less",
)
AHEAD = Refusal(
    "ahead",
    "503 Service Unavailable",
    "unavailable",
    f"more than {AHEAD_MAX} requests were sent ahead of their answers; wait for answers",
    "retry-after: 1",
)
SLOW = Refusal(
    "slow",
    "408 Request Timeout",
    "unavailable",
    "the request did not arrive within WAYMARK_REQUEST_SECONDS; send it faster",
)
CONNECTIONS = Refusal(
    "connections",
    "503 Service Unavailable",
    "unavailable",
    "more connections came than WAYMARK_CONNECTIONS_MAX; try again in a moment",
    "retry-after: 1",
)
BODIES = Refusal(
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
        self._defaults: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")
        self._metrics = metrics
        self._metrics.http_bodies_bytes.set_function(lambda: self.bodies_bytes)
        self._is_looking = False

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self._metrics.http_connections.set(len(self._open))
        self.arriving[connection] = connection.loop.time()
        if len(self._open) > self.bounds.connections_max:
            self._longest_waiting().refuse(CONNECTIONS)
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
                connection.refuse(BODIES)
                if self.bodies_bytes <= self.bounds.bodies_max_bytes:
                    break

    def default_lines(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """uvicorn's headers of every answer, as lines; it makes new ones each second."""
        if headers is not self._defaults[0]:
            self._defaults = headers, b"".join([b"%b: %b\r\n" % header for header in headers])
        return self._defaults[1]

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
            connection.refuse(SLOW)
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
