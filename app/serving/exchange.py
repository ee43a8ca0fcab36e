"""One request and its answer: what an ASGI application receives from and sends to.

uvicorn has the same, for whatever an application may do. Here what is usual costs less: a body that came whole is
given out at once, and head and body of an answer whose length is told go out in one piece. What is not usual is left
to uvicorn, and on the wire nobody can tell the two apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

log = logging.getLogger("uvicorn.error")

#: Headers that say more than what the body is.
_OF_THE_CONNECTION = frozenset({b"connection", b"transfer-encoding", b"upgrade"})


class Exchange(RequestResponseCycle):
    """``on_response`` is called once the answer has been written, ``on_end`` once the application is done."""

    def __init__(  # not the parent's, which makes more than is needed
        self,
        scope: Any,
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        default_headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        expects_continue: bool,
        on_response: Callable[[], None],
        on_end: Callable[[Exchange], None],
    ) -> None:
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.logger = log
        self.access_log = False
        self.default_headers = default_headers
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_continue
        self.on_response = on_response
        self.disconnected = False
        self.body: bytes | bytearray = b""  # type: ignore[assignment]
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding = None
        self.expected_content_length = 0
        self.held = 0
        """Bytes of its body, from their arrival until it has been answered."""
        self.task: asyncio.Task[None] | None = None
        self._on_end = on_end
        self._is_due = False  # there is something to receive
        self._changed: asyncio.Event | None = None  # made by the first who has to wait
        self._start: Any = None

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]
        """What uvicorn sets when there may be something to receive."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def take(self, piece: bytes) -> None:
        """A piece of the body; nobody is woken for one that will soon be whole."""
        # Mostly it is all, and need not be copied.
        if not self.body:
            self.body = piece
        elif isinstance(self.body, bytearray):
            self.body += piece
        else:
            self.body = bytearray(self.body) + piece
        self.held += len(piece)
        if len(self.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
            self._wake()

    def end_body(self) -> None:
        self.more_body = False
        self._wake()

    def _wake(self) -> None:
        self._is_due = True
        if self._changed is not None:
            self._changed.set()

    async def run(self, app: Any) -> None:
        """Have the request answered, whatever the application does."""
        try:
            await self.run_asgi(app)
        finally:
            self._on_end(self)

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        while not (self.disconnected or self.response_complete):
            if self._is_due:
                self._is_due = False
                body, self.body = bytes(self.body), b""
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        start = self._start
        if start is None:
            if self.response_started or message["type"] != "http.response.start":
                await super().send(message)
                return
            self._start = message
            self.response_started = True  # from here on a failure can no longer be answered
            self.waiting_for_100_continue = False
            return
        self._start = None
        if self.disconnected:
            return
        body = message.get("body", b"")
        head = None if message.get("more_body", False) else _head(start, len(body), self.default_headers)
        if head is None or self.flow.write_paused or not self.keep_alive or self.scope["method"] == "HEAD":
            self.response_started = False
            await super().send(start)
            await super().send(message)
            return
        self.transport.write(head + body)
        self.response_complete = True
        if self._changed is not None:
            self._changed.set()
        self.on_response()


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
