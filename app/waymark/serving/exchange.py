"""One request and its answer: what an ASGI application receives from and sends to.

uvicorn has the same, for whatever an application may do. Here what is usual costs less: a body that came whole is
given out at once, and an answer that is whole may be given to ``respond`` instead of being sent in messages. On the
wire nobody can tell the two apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

log = logging.getLogger("uvicorn.error")

#: Where ``respond`` is found among the extensions of an ASGI scope.
RESPOND = "waymark.respond"


class Exchange(RequestResponseCycle):
    """``on_response`` is called once the answer has been written, ``on_end`` once the application is done."""

    def __init__(  # not the parent's, which makes more than is needed
        self,
        scope: Any,
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        default_headers: list[tuple[bytes, bytes]],
        default_lines: bytes,
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
        scope["extensions"] = {RESPOND: self.respond}
        self._default_lines = default_lines
        self._on_end = on_end
        self._is_due = False  # there is something to receive
        self._changed: asyncio.Event | None = None  # made by the first who has to wait

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
            self.scope.pop("extensions", None)  # it refers to this object; both would wait for the garbage collector
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

    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a whole answer at once; False, and nothing has been done, where it has to be sent in messages.

        ``headers`` tell its type and length, and nothing of the connection.
        """
        if self.response_started or self.flow.write_paused or not self.keep_alive or self.scope["method"] == "HEAD":
            return False
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        if not lines.count(b"\n") == lines.count(b"\r") == len(headers):
            return False  # a line break in a value would begin a line of its own
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        if not self.disconnected:
            self.transport.write(b"".join((STATUS_LINE[status], self._default_lines, lines, b"\r\n", body)))
            if self._changed is not None:
                self._changed.set()
            self.on_response()
        return True
