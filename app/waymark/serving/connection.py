"""One HTTP connection: it has its requests answered in order, within the bounds of ``Connections``.

``request_reader`` turns bytes into requests. Before a connection sends the answer of a rejection, it sends the
answers to all complete requests that came before.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

from waymark.base.asgi import AsgiApplication
from waymark.serving.cycle import WHOLE, RequestCycle
from waymark.serving.limits import AHEAD, AHEAD_MAX, CONNECTIONS, SLOW, Connections, Rejection
from waymark.serving.request_reader import RequestReader, Stop

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState


def protocol(shared: Connections) -> type[asyncio.Protocol]:
    """Return the class that uvicorn takes as ``http``."""

    class Bounded(HttpConnection):
        connections = shared

    return Bounded


class HttpConnection(asyncio.Protocol):
    """One connection; ``connections`` contains it and the others."""

    connections: ClassVar[Connections]

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = _loop or asyncio.get_running_loop()
        self.is_full = False
        """Whether the client reads more slowly than the answer is written."""
        self._app: AsgiApplication = config.loaded_app
        self._server = server_state
        self.connections.keep_alive_seconds = config.timeout_keep_alive
        self._cycles: deque[RequestCycle] = deque()
        """Begun requests without an answer; the answer of the first is under way."""
        self._reading: RequestCycle | None = None
        """The request whose body is arriving, answered or not."""
        self._is_done = False
        """Nothing that arrives is read any more."""
        self._rejection: Rejection | None = None
        """The rejection to send once all requests before it are answered."""
        self._is_paused = False
        self._drained: asyncio.Event | None = None
        self._scope: dict[str, Any] = {}  # the common fields of all requests of the connection
        self._reader = RequestReader(self)

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
        self.connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._is_done = True
        self._drop_requests()
        self.connections.closed(self)
        self.resume_writing()
        self._reader.close()

    def data_received(self, data: bytes) -> None:
        if not self._is_done:
            self._reader.feed(data)

    def pause_writing(self) -> None:
        self.is_full = True
        self.connections.unread.setdefault(self, self.loop.time())

    def resume_writing(self) -> None:
        self.is_full = False
        if not self._transport.is_closing():
            self.connections.unread.pop(self, None)
        if self._drained is not None:
            self._drained.set()

    # ---- calls of the reader ---------------------------------------------------------------------------

    def take_whole(self, scope: dict[str, Any], body: bytes) -> bool:
        """Take a plain request that has arrived as a whole, if it goes the straight way and is the only one; otherwise
        return False. It does in one call what the next four methods do for any request.
        """
        shared = self.connections
        question = shared.straight.get(scope["raw_path"])
        if (
            question is None
            or self._cycles
            or self._is_done
            or self.is_full
            or shared.bodies_bytes + len(body) > shared.bounds.bodies_max_bytes
        ):
            return False
        request = question.open(scope["headers"])
        if request is None:
            return False
        shared.idle.pop(self, None)
        shared.arriving.pop(self, None)
        shared.bodies_bytes += len(body)
        cycle = RequestCycle(self, scope, keep_alive=True, straight=request, body=body)
        self._cycles.append(cycle)
        request.begin(body, cycle)
        return True

    def request_begins(self) -> None:
        if self._is_done:
            raise Stop  # the request before was the last one
        self.connections.idle.pop(self, None)
        if not self._cycles:
            self.connections.arriving.setdefault(self, self.loop.time())

    def take_head(self, scope: dict[str, Any], *, keep_alive: bool, expects_continue: bool) -> None:
        self._reading = cycle = RequestCycle(self, scope, keep_alive=keep_alive, expects_continue=expects_continue)
        self._cycles.append(cycle)
        if len(self._cycles) == 1:
            if self.is_full or expects_continue or not cycle.open_straight(self.connections.straight):
                self.start(cycle)
            return
        self.pause_reading()
        if len(self._cycles) > AHEAD_MAX + 1:
            self.reject(AHEAD)
            raise Stop

    def take_body(self, piece: bytes) -> None:
        cycle = self._reading
        if cycle is None:
            raise Stop  # rejected within these bytes
        if not cycle.is_answered:
            cycle.take(piece)
            self.connections.take_body(self, len(piece))

    def request_ends(self) -> None:
        cycle, self._reading = self._reading, None
        if cycle is None:
            raise Stop
        self._is_done = not cycle.keep_alive
        self.connections.arriving.pop(self, None)
        if not cycle.is_answered:
            cycle.end_body()
        elif not self._transport.is_closing():
            self.connections.idle[self] = self.loop.time()

    # ---- requests and answers --------------------------------------------------------------------------

    def start(self, cycle: RequestCycle) -> None:
        """Have the request answered by the ASGI application."""
        cycle.scope = {**self._scope, **cycle.scope}
        cycle.task = self.loop.create_task(cycle.run(self._app))
        self._server.tasks.add(cycle.task)

    def answered(self, cycle: RequestCycle, *, is_fault: bool = False) -> None:
        self._server.total_requests += 1
        self._cycles.popleft()
        if not cycle.keep_alive:
            self._drop_requests()
            self._part(may_be_sending=is_fault)
            return
        if self._cycles:
            self.start(self._cycles[0])
        elif self._is_done:
            self._part()
            return
        elif self._is_paused:
            self.resume_reading()
        if self._reader.is_open:
            if len(self._cycles) <= (self._reading is not None):
                self.connections.arriving.setdefault(self, self.loop.time())
        elif not self._cycles:
            self.connections.idle[self] = self.loop.time()

    def ended(self, cycle: RequestCycle) -> None:
        """Note that the application has finished the request."""
        if cycle.task is not None:
            self._server.tasks.discard(cycle.task)
            cycle.task = None
        self.connections.bodies_bytes -= cycle.held
        cycle.held = 0

    @property
    def is_holding(self) -> bool:
        """Whether it holds bytes of an incomplete body."""
        return self._reading is not None and self._reading.held > 0

    def _release(self, cycle: RequestCycle) -> None:
        self.connections.bodies_bytes -= cycle.held
        cycle.held = 0

    def _drop_requests(self) -> None:
        """Drop the requests under way: their answers are not wanted any more."""
        for cycle in self._cycles:
            cycle.disconnect()
            if cycle.task is None:
                self._release(cycle)
        self._cycles.clear()
        self._reading = None

    # ---- the ends of a connection ----------------------------------------------------------------------

    def reject(self, rejection: Rejection) -> None:
        """Answer the complete requests, send the reason for stopping, and close."""
        if self._is_done:
            return
        self._is_done = True
        self.connections.count_cut(rejection.why)
        reading, self._reading = self._reading, None
        if reading is None:
            # Without a request there is no answer to give, but a rejected client gets one.
            is_owed = self._reader.is_open or self._reader.unplaced > 0 or rejection is not SLOW
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

    def _part(self, *, may_be_sending: bool = False) -> None:
        """Send the rejection, if there is one, and close. If the client may be sending, its bytes are still taken for a
        moment: otherwise its system could drop the answer.
        """
        self._is_done = True
        if self._rejection is not None:
            body = self._rejection.body(self.connections.shape, self._reader.path)
            self.write(self._rejection.answer(self.default_lines, body))
        # A connection that makes room is closed at once, whatever its client is sending.
        may_be_sending |= self._reader.is_open or self._rejection is not None
        may_be_sending &= self._rejection is not CONNECTIONS
        if may_be_sending and self._transport.can_write_eof() and not self._transport.is_closing():
            self.resume_reading()
            self._transport.write_eof()
            self.connections.linger(self)
        else:
            self.close()

    def close(self) -> None:
        """Close; the bytes written so far are still sent."""
        self._is_done = True
        self._drop_requests()
        if not self._transport.is_closing():
            self._transport.close()
            self.connections.closing(self)

    def abort(self) -> None:
        """Close, and drop the bytes that were written and not sent."""
        self._transport.abort()

    def reset(self) -> None:
        """Close so that the client sees an error."""
        opened = self._transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def shutdown(self) -> None:
        """End after the requests under way are answered; uvicorn calls it when the process ends."""
        if self._cycles:
            self._cycles[-1].keep_alive = False
        else:
            self.close()

    # ---- the flow of bytes -----------------------------------------------------------------------------

    @property
    def default_lines(self) -> bytes:
        """The lines of every answer."""
        shared, headers = self.connections, self._server.default_headers
        return shared.lines if headers is shared.lines_of else shared.default_lines(headers)

    def write(self, piece: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(piece)

    async def drain(self) -> None:
        """Wait until the client has read enough of the bytes written."""
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
