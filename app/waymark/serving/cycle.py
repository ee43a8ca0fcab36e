"""One request and its answer: ``receive`` and ``send`` of an ASGI application.

If possible, an answer is one write: the head is written together with the first piece of the body. So a request whose
application fails between the two is answered with 500.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Protocol

from waymark.base import asgi
from waymark.base.logs import failure, fields
from waymark.serving.limits import BROKEN, FAULT, Connections, Rejection

log = logging.getLogger(__name__)


#: Bytes of a body that wait for the application before the client is no longer read.
_BODY_BYTES_MAX = 65536

_STATUS_LINES = {status.value: f"HTTP/1.1 {status} {status.phrase}\r\n".encode() for status in HTTPStatus}
_WHOLE = _STATUS_LINES[200] + b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
_WITHOUT_BODY = frozenset({204, 304})
#: An extension of ASGI, named in the scope: a message of this type is a whole answer with status 200, in place of two
#: messages. It has a ``content_type``, which is not checked, and a ``body``.
WHOLE = "waymark.response.whole"

#: Lines of a head as RFC 9110 (5.1, 5.5) has them.
_ARE_LINES = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t\x20-\x7e\x80-\xff]*\r\n)*").fullmatch


class Carrier(Protocol):
    """The connection that a request arrived on, as the request uses it."""

    @property
    def connections(self) -> Connections: ...

    @property
    def is_full(self) -> bool: ...

    @property
    def default_lines(self) -> bytes:
        """The lines of every answer."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write(self, piece: bytes) -> None: ...

    async def drain(self) -> None:
        """Wait until the client has read enough of the bytes written."""

    def start(self, cycle: RequestCycle) -> None:
        """Have the request answered by the ASGI application."""

    def answered(self, cycle: RequestCycle, *, is_fault: bool = False) -> None:
        """Note that the whole answer of the first request has been written. After a fault, the client does not know yet
        that it is the last one of the connection.
        """

    def ended(self, cycle: RequestCycle) -> None:
        """Note that the application has finished the request."""

    def close(self) -> None:
        """Close; the bytes written so far are still sent."""

    def reset(self) -> None:
        """Close so that the client sees an error."""


class RequestCycle:
    """A request as it arrives, and its answer as it is given."""

    __slots__ = (
        *("_body", "_changed", "_connection", "_expects_continue", "_head", "_is_chunked", "_is_due", "_left"),
        *("_straight", "held", "is_answered", "is_disconnected", "is_on_wire", "is_whole", "keep_alive", "scope"),
        *("task",),
    )

    def __init__(
        self,
        connection: Carrier,
        scope: asgi.AsgiScope,
        *,
        keep_alive: bool,
        expects_continue: bool = False,
        straight: asgi.StraightRequest | None = None,
        body: bytes = b"",
    ) -> None:
        """Create the cycle of a request whose head has arrived. If the whole has arrived, it is ``straight`` and has
        its ``body``.
        """
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_whole = straight is not None
        """Whether the whole request has arrived."""
        self.is_disconnected = False
        """Whether no client waits for the answer any more."""
        self.is_on_wire = False
        """Whether a part of the answer has been written."""
        self.is_answered = False
        self.held = len(body)
        """Bytes of the body, from their arrival until the application is done."""
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._expects_continue = expects_continue
        self._body: bytes | bytearray = body
        self._is_due = False  # there is something to receive
        self._changed: asyncio.Event | None = None  # made when the application has to wait
        self._head: bytes | None = None  # of the answer; empty once it is on the wire
        self._left: int | None = None  # bytes of the answer's body by its Content-Length
        self._is_chunked = False
        self._straight = straight

    # ---- the request -----------------------------------------------------------------------------------

    def take(self, piece: bytes) -> None:
        """Keep a piece of the body; the application is not woken before the end of a short body."""
        # Mostly the piece is the whole body, and need not be copied.
        if not self._body:
            self._body = piece
        elif isinstance(self._body, bytearray):
            self._body += piece
        else:
            self._body = bytearray(self._body) + piece
        self.held += len(piece)
        if len(self._body) > _BODY_BYTES_MAX and self._straight is None:
            self._connection.pause_reading()
            self._wake()

    def end_body(self) -> None:
        """Note that the request is complete."""
        self.is_whole = True
        if self._straight is None:
            self._wake()
        else:
            self._body = bytes(self._body)
            self._straight.begin(self._body, self)

    def disconnect(self) -> None:
        """Note that the client has gone: the answer cannot be sent."""
        self.is_disconnected = True
        if self._straight is None:
            self._wake()
        else:
            self._body = b""
            if self._straight.disconnected():
                self._straight = None  # a reference cycle would keep it until the garbage collector runs

    def _wake(self) -> None:
        self._is_due = True
        if self._changed is not None:
            self._changed.set()

    async def receive(self) -> asgi.AsgiMessage:
        if self._expects_continue and not self.is_on_wire:
            self._expects_continue = False
            if not self._is_due:  # otherwise the client sent the body without waiting
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.is_disconnected or self.is_answered):
            if self._is_due:
                self._is_due = False
                body, self._body = bytes(self._body), b""
                return {"type": "http.request", "body": body, "more_body": not self.is_whole}
            self._connection.resume_reading()
            if self._changed is None:
                self._changed = asyncio.Event()
            await self._changed.wait()
            self._changed.clear()
        return {"type": "http.disconnect"}

    # ---- the straight way ------------------------------------------------------------------------------

    def open_straight(self, table: asgi.StraightTable) -> bool:
        """Take the straight way, if ``table`` has the question and the request is usual."""
        scope = self.scope
        question = table.get(scope["raw_path"])
        if question is not None and scope["method"] == "POST" and not scope["query_string"]:
            self._straight = question.open(scope["headers"])
        return self._straight is not None

    def reply(self, status: int, media_type: bytes, headers: asgi.RawHeaders, body: bytes) -> None:
        try:
            if self.is_disconnected:
                return
            if status == 200 and not headers:
                self._answer(media_type, body)
                return
            lines = [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *headers]
            self._start({"type": "http.response.start", "status": status, "headers": lines})
            self._go_on({"type": "http.response.body", "body": body})
        except RuntimeError as exc:  # an invalid header
            self._fault(exc)
        finally:
            self._connection.ended(self)

    def pass_on(self, pause: Any = None) -> None:
        self._straight = None
        self.scope["pause"] = pause
        if self.is_disconnected:
            self._connection.ended(self)
        else:
            self._wake()
            self._connection.start(self)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._fault(error)
        else:
            self._break_off()
        self._connection.ended(self)

    # ---- the answer ------------------------------------------------------------------------------------

    async def run(self, app: asgi.AsgiApplication) -> None:
        """Have the request answered, whatever the application does."""
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.is_answered or self.is_disconnected):
                raise RuntimeError("the application has ended without a whole answer")
        except asyncio.CancelledError:  # the process ends, and has waited for long enough
            self._break_off()
            raise
        except asgi.BrokenAnswer:  # the application has said so in the log
            self._fail(BROKEN)
        except Exception as exc:
            self._fault(exc)
        finally:
            self._connection.ended(self)

    def _fault(self, error: Exception) -> None:
        log.error("request failed", extra=fields(request_id=self.scope.get("request_id", "none"), **failure(error)))
        self._fail(FAULT)

    def _fail(self, rejection: Rejection) -> None:
        if self.is_answered or self.is_disconnected:
            return
        if self.is_on_wire:
            self._break_off()
            return
        self.keep_alive = False
        body = rejection.body(self._connection.connections.shape, self.scope["path"])
        self._write(rejection.answer(self._connection.default_lines, body, has_body=self.scope["method"] != "HEAD"))
        self._end(is_fault=True)

    def _break_off(self) -> None:
        """End the connection, which alone shows the client that bytes are missing.

        If the end of the connection ends the body, a plain close would make it look complete, so this resets.
        """
        if self.is_on_wire and not (self.is_answered or self._is_chunked or self._left is not None):
            self._connection.reset()
        else:
            self._connection.close()

    async def send(self, message: asgi.AsgiMessage) -> None:
        """Send a message of the answer. Raise ``RuntimeError`` if it breaks the rules of ASGI or HTTP."""
        if self._connection.is_full:
            await self._connection.drain()
        if self.is_disconnected:
            return
        if self._head is None:
            if message["type"] == WHOLE:
                self._answer(message["content_type"], message["body"])
                return
            self._start(message)
        else:
            self._go_on(message)

    def _answer(self, content_type: bytes, body: bytes) -> None:
        if self._expects_continue and not self.is_whole:
            self.keep_alive = False  # the client may or may not send the body now
        end = b"" if self.keep_alive else b"connection: close\r\n"
        content = b"" if self.scope["method"] == "HEAD" else body
        self._head = b""
        self.is_on_wire = True
        self._connection.write(_WHOLE % (self._connection.default_lines, content_type, len(body), end, content))
        self._end()

    def _start(self, message: asgi.AsgiMessage) -> None:
        if message["type"] != "http.response.start":
            raise RuntimeError(f"an answer begins with http.response.start, not with {message['type']}")
        headers: Iterable[tuple[bytes, bytes]] = message.get("headers", ())
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = b"".join(lines)
        # A line break in a value would begin a line of its own.
        if _ARE_LINES(head) is None or head.count(b"\n") != len(lines):
            raise RuntimeError("a header of the answer has an invalid name or value")
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"transfer-encoding":
                raise RuntimeError("the server decides how an answer is framed; leave out transfer-encoding")
            elif name == b"connection":
                self.keep_alive = False
                lines.remove(b"connection: %b\r\n" % value)
                head = b"".join(lines)
        status: int = message["status"]
        if status in _WITHOUT_BODY or self.scope["method"] == "HEAD":
            self._left = 0
        status_line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        self._head = b"".join((status_line, self._connection.default_lines, head))

    def _go_on(self, message: asgi.AsgiMessage) -> None:
        if self.is_answered or message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} cannot follow what has been sent of the answer")
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            body = b""
        if not self.is_on_wire:
            self._frame(len(body), is_last=is_last)
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("the body of the answer is longer or shorter than its content-length")
        elif self._is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        self._write(self._head + body if self._head else body)
        self._head = b""
        if is_last:
            self._end()

    def _frame(self, length: int, *, is_last: bool) -> None:
        """Say in the head how long the answer is, and whether it is the last one on this connection."""
        assert self._head is not None
        if self._left is None:
            if is_last:
                self._left = length
                self._head += b"content-length: %d\r\n" % length
            elif self.scope["http_version"] == "1.0":
                self.keep_alive = False  # the body ends with the connection
            else:
                self._is_chunked = True
                self._head += b"transfer-encoding: chunked\r\n"
        if self._expects_continue and not self.is_whole:
            self.keep_alive = False  # the client may or may not send the body now
        self._head += b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"

    def _write(self, piece: bytes) -> None:
        self.is_on_wire = True
        self._connection.write(piece)

    def _end(self, *, is_fault: bool = False) -> None:
        self.is_answered = True
        if self._changed is not None:
            self._changed.set()
        self._connection.answered(self, is_fault=is_fault)
