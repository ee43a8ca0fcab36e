"""Connections to Redis for requests, which are packed commands with their replies. Several requests may be unanswered
at once.

There is one connection to each server. Redis answers the requests of a connection in their order, so they wait in one
queue. The library's parser reads the replies. A request whose caller has been cancelled stays in the queue until its
replies have arrived.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import hiredis

from waymark.base.endpoints import connected
from waymark.base.record import record
from waymark.store.redis import errors
from waymark.store.redis.address import Address, HostPort
from waymark.store.redis.credentials import Credentials, SecretUnreadable

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

#: The most unanswered requests on one connection. The server handles fewer requests at once.
REQUESTS_MAX = 1024

_NOT_YET = object()
#: What Redis 6.2 writes before the error of a command in a script.
_IN_SCRIPT = re.compile(r"(?:ERR )?Error running script \(call to [^)]*\): .*?: -(?=[A-Z]+ )")


class _NotResp(Exception):
    """The data are not RESP."""


def reply_error(text: str) -> errors.RedisError:
    """Return the error for the text of an error reply, the same for a command in a script as for any other."""
    from redis._parsers import BaseParser  # there are queries before it is imported

    before = _IN_SCRIPT.match(text)
    error = BaseParser.parse_error(text if before is None else text[before.end() :])  # type: ignore[no-untyped-call]
    return cast("errors.RedisError", error)


class ReplyReader(Protocol[T_co]):
    """Reads the replies to one request."""

    @property
    def count(self) -> int:
        """The number of replies."""

    def parsed(self, replies: list[Any]) -> T_co:
        """Return the result for replies that the library has parsed, none of which is an error. May raise
        RedisError.
        """


class Replies:
    """A ``ReplyReader`` that returns the replies unchanged."""

    def __init__(self, count: int) -> None:
        self.count = count

    def parsed(self, replies: list[Any]) -> list[Any]:
        return replies


class ReplyReceiver(Protocol[T_contra]):
    """An object that gets one result: a future, or an object that continues immediately instead of in a task."""

    def done(self) -> bool:
        """Return whether the result is no longer wanted."""

    def set_result(self, result: T_contra, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


class _PendingRead(Generic[T]):
    __slots__ = ("_is_ended", "answer", "reader", "replies", "until")

    def __init__(self, reader: ReplyReader[T], answer: ReplyReceiver[T], deadline: float) -> None:
        self.reader = reader
        self.answer = answer
        self.until = deadline
        self.replies: list[Any] = []
        """The parsed replies so far."""
        self._is_ended = False

    def done(self) -> bool:
        """Return whether no caller waits for the answer."""
        return self._is_ended or self.answer.done()

    def end(self, answer: Any, error: Exception | None) -> None:
        if self._is_ended or self.answer.done():
            return
        self._is_ended = True  # a late request stays in the queue, and may be ended again with its connection
        if error is None:
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(error)


class ReadConnection(asyncio.Protocol):
    """A connection to Redis for reads.

    It counts as lost if a reply is missing and no data arrive for ``silent_seconds``.
    """

    def __init__(self, silent_seconds: float, on_lost: Callable[[ReadConnection], None]) -> None:
        self._silent_seconds = silent_seconds
        self._lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._requests: deque[_PendingRead[Any]] = deque()
        self._parser = hiredis.Reader(protocolError=_NotResp, replyError=reply_error, notEnoughData=_NOT_YET)
        self._unsent: list[bytes] = []
        self._heard = 0.0
        # There is one timer for all requests, because a timer for each would cost as much as the rest of ``ask``.
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._is_retired = False

    def ask(self, packed: bytes, reader: ReplyReader[T], deadline: float | None) -> asyncio.Future[T]:
        """Send a request, and return the result that ``reader`` makes from the replies.

        Raise TimeoutError at ``deadline``, by the loop's clock, and RedisError if a reply is one or the connection is
        lost.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        self.send(packed, reader, answer, deadline)
        return answer

    def send(
        self,
        packed: bytes,
        reader: ReplyReader[T],
        answer: ReplyReceiver[T],
        deadline: float | None,
        *,
        is_urgent: bool = False,
    ) -> None:
        """Send a request as ``ask`` does, with ``answer`` instead of a future. ``answer`` may get an error before this
        method returns. With ``is_urgent`` the request does not wait for others of the same turn of the loop.
        """
        now = self._loop.time()
        if self._transport is None:
            answer.set_exception(errors.ConnectionError("the connection was lost"))
        elif deadline is not None and deadline <= now:
            answer.set_exception(TimeoutError())
        elif len(self._requests) >= REQUESTS_MAX:
            answer.set_exception(errors.ConnectionError(f"{REQUESTS_MAX} commands are under way"))
        else:
            if not self._requests:
                self._heard = now
            request = _PendingRead(reader, answer, math.inf if deadline is None else deadline)
            self._requests.append(request)
            due = min(request.until, self._heard + self._silent_seconds)
            if due < self._due:
                self._check_by(due)
            self._unsent.append(packed)
            if is_urgent:
                self._write()
            elif len(self._unsent) == 1:
                self._loop.call_soon(self._write)

    @property
    def is_lost(self) -> bool:
        """Whether no request can be sent any more."""
        return self._transport is None

    def silent_at(self) -> float:
        """Return the time of the loop's clock by which Redis has to answer a request sent now."""
        return self._loop.time() + self._silent_seconds

    def _write(self) -> None:
        """Send the requests of one turn of the loop together, because a write costs more than a short request."""
        unsent, self._unsent = self._unsent, []
        if self._transport is None or not unsent:
            return
        try:
            self._transport.write(b"".join(unsent))
        except RuntimeError as exc:  # uvloop's error for a connection that the other end has closed
            self.lose(errors.ConnectionError(str(exc)))

    def retire(self) -> None:
        """Close the connection when all requests are answered. No new request may follow."""
        self._is_retired = True
        if not self._requests:
            self.lose(errors.ConnectionError("the connection was closed"))

    def lose(self, error: Exception) -> None:
        """Close at once; every unanswered request fails with ``error``."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        transport.abort()
        self._lost(self)
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, math.inf
        while self._requests:
            self._requests.popleft().end(None, type(error)(*error.args))

    # ---- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(errors.ConnectionError(f"the connection was lost{f': {exc}' if exc else ''}"))

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._parse(data)
        except errors.RedisError as exc:  # the data are not RESP, or are a reply to no request
            self.lose(exc)
            return
        if self._is_retired and not self._requests:
            self.retire()

    def _parse(self, data: bytes) -> None:
        parser, requests = self._parser, self._requests
        parser.feed(data)
        while requests:
            try:
                reply = parser.gets()
            except _NotResp as exc:
                raise errors.InvalidResponse(*exc.args) from None
            if reply is _NOT_YET:
                return
            request = requests[0]
            replies, reader = request.replies, request.reader
            replies.append(reply)
            if len(replies) < reader.count:
                continue
            requests.popleft()
            answer: Any = None
            error: Exception | None = None
            for reply in replies:
                if isinstance(reply, Exception):
                    error = reply
                    break
            else:
                try:
                    answer = reader.parsed(replies)
                except errors.RedisError as exc:
                    error = exc.with_traceback(None)  # which would keep the request alive in a cycle
            request.end(answer, error)
            if error is not None and isinstance(error, errors.InvalidResponse):  # a start imports no errors
                raise errors.InvalidResponse(*error.args)
        if parser.has_data():
            raise errors.InvalidResponse("more replies than commands")

    # ---- ends --------------------------------------------------------------------------------------------

    def _check_by(self, due: float) -> None:
        """Check the deadlines at ``due``, which is earlier than the planned check."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = self._loop.call_at(due, self._check_deadlines), due

    def _check_deadlines(self) -> None:
        """Fail the late requests; lose the connection if a reply has been due for too long."""
        self._timer, self._due = None, math.inf
        now = self._loop.time()
        if self._fail_late(now):
            self.lose(errors.ConnectionError("Redis has not answered an earlier command"))
        elif self._requests and now >= self._heard + self._silent_seconds:
            self.lose(errors.ConnectionError(f"Redis did not reply within {self._silent_seconds:g} s"))
        elif self._requests:
            untils = [request.until for request in self._requests if not request.done()]
            self._check_by(min([self._heard + self._silent_seconds, *untils]))

    def _fail_late(self, now: float) -> bool:
        """Fail the late requests. Return whether the oldest open request was late."""
        waiting = [request for request in self._requests if not request.done()]
        for request in waiting:
            if request.until <= now:
                request.end(None, TimeoutError())  # the receiver may ask another request at once
        return bool(waiting) and waiting[0].until <= now


OnLost = Callable[[ReadConnection], None]
FindServers = Callable[[], Awaitable[Sequence[HostPort]]]
"""Returns the servers that may be asked, the best first."""


@record(frozen=True, slots=True)
class Dialer:
    """Connects to the first server of ``find`` that can be reached; to a unix socket if ``find`` is None."""

    address: Address
    credentials: Credentials
    timeout_seconds: float
    find: FindServers | None

    async def dial(self, on_lost: OnLost) -> ReadConnection:
        """Return a connection, authenticated and ready. Raise RedisError if that fails."""
        if self.find is None:
            return await self._dial(None, on_lost)
        failure: errors.RedisError | None = None
        for endpoint in await self.find():
            try:
                return await self._dial(endpoint, on_lost)
            except errors.RedisError as exc:
                failure = exc
        raise failure or errors.ConnectionError("there is no server")

    async def _dial(self, endpoint: HostPort | None, on_lost: OnLost) -> ReadConnection:
        connection: ReadConnection | None = None
        try:
            async with asyncio.timeout(self.timeout_seconds):
                connection = await self._connect(endpoint, on_lost)
                await self._greet(connection)
            if connection.is_lost:  # it was lost just now, before any caller could notice
                raise errors.ConnectionError("the connection was lost")
        except TimeoutError as exc:
            self._give_up(connection)
            raise errors.TimeoutError("Timeout connecting to server") from exc
        except SecretUnreadable as exc:
            self._give_up(connection)
            raise errors.AuthenticationError(str(exc)) from exc
        except OSError as exc:
            raise errors.ConnectionError(
                f"{exc.strerror or exc} connecting to {_shown(endpoint, self.address)}"
            ) from exc
        except BaseException:
            self._give_up(connection)
            raise
        return connection

    async def _connect(self, endpoint: HostPort | None, on_lost: OnLost) -> ReadConnection:
        loop = asyncio.get_running_loop()

        def make() -> ReadConnection:
            return ReadConnection(self.timeout_seconds, on_lost)

        if endpoint is None:
            _, connection = await loop.create_unix_connection(make, self.address.path)
            return connection
        host, port = endpoint
        context = self._context()
        name = None if context is None else host
        transport, connection = await connected(
            host, lambda address: loop.create_connection(make, address, port, ssl=context, server_hostname=name)
        )
        opened: socket.socket = transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _context(self) -> ssl.SSLContext | None:
        return self.credentials.context(self.address)

    async def _greet(self, connection: ReadConnection) -> None:
        commands: list[tuple[str, ...]] = []
        if secret := self.credentials.secret(self.address):
            commands.append(("AUTH", *secret))
        if self.address.db:
            commands.append(("SELECT", str(self.address.db)))
        if self.address.kind == "cluster" and self.address.is_replica:
            commands.append(("READONLY",))  # without it a replica of a Cluster redirects reads
        if commands:
            packed = b"".join(hiredis.pack_command(cast("Any", command)) for command in commands)
            await connection.ask(packed, Replies(len(commands)), None)

    @staticmethod
    def _give_up(connection: ReadConnection | None) -> None:
        if connection is not None:
            connection.lose(errors.ConnectionError("the connection was abandoned"))


class ReadPool:
    """The connection to one server, opened when it is needed, and again when it was lost."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._scripts: ReadPool | None = None
        self._opening: asyncio.Task[ReadConnection] | None = None
        """The one attempt to open the connection, for all that wait for it."""
        self._is_closed = False
        self._retirements = 0
        self.connection: ReadConnection | None = None
        """The open connection; None before the first one is opened, and after it was lost."""

    @property
    def seconds(self) -> float:
        """The time limit of a command."""
        return self._dialer.timeout_seconds

    @property
    def scripts(self) -> ReadPool:
        """The connection to the same server for scripts, which take longer than a read may wait."""
        if self._scripts is None:
            self._scripts = ReadPool(self._dialer)
        return self._scripts

    def ask(self, packed: bytes, reader: ReplyReader[T], deadline: float | None) -> Awaitable[T]:
        """Send a request as ``ReadConnection.ask`` does, after opening a connection if necessary."""
        if self.connection is not None:
            return self.connection.ask(packed, reader, deadline)
        return self._ask_opened(packed, reader, deadline)

    async def _ask_opened(self, packed: bytes, reader: ReplyReader[T], deadline: float | None) -> T:
        connection = await self.opened(deadline)
        return await connection.ask(packed, reader, deadline)

    async def opened(self, deadline: float | None) -> ReadConnection:
        """Return the open connection, or open one.

        Raises TimeoutError at ``deadline``, by the loop's clock, and RedisError if no connection can be opened.
        """
        if self.connection is not None:
            return self.connection
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        # An attempt continues after its caller's deadline. Otherwise an attempt that takes longer than a query may
        # would never succeed.
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(self._opening)

    async def _open(self) -> ReadConnection:
        retirements = self._retirements
        try:
            connection = await self._dialer.dial(self._forget)
        finally:
            self._opening = None
        if self._is_closed:
            connection.lose(errors.ConnectionError("the client was closed"))
        elif retirements != self._retirements:  # it may be open to a server that is to be left
            connection.retire()
        else:
            self.connection = connection
        return connection

    def retire(self) -> None:
        """Close the connection, and that for scripts, when all requests are answered; at once if it is being opened."""
        self._retirements += 1
        if self.connection is not None:
            self.connection.retire()
            self.connection = None
        if self._scripts is not None:
            self._scripts.retire()

    def close(self) -> None:
        """Close the connection at once, even if it is still being opened."""
        self._is_closed = True
        if self.connection is not None:
            self.connection.lose(errors.ConnectionError("the client was closed"))
        if self._scripts is not None:
            self._scripts.close()

    def _forget(self, connection: ReadConnection) -> None:
        if self.connection is connection:
            self.connection = None


def _shown(endpoint: HostPort | None, address: Address) -> str:
    return str(address.path) if endpoint is None else f"{endpoint[0]}:{endpoint[1]}"


def reads_by(address: Address, credentials: Credentials, timeout_seconds: float, find: FindServers | None) -> ReadPool:
    """Return the read connection to the servers of ``find``, or to the socket of ``address``."""
    return ReadPool(Dialer(address, credentials, timeout_seconds, find))


def reads_of(address: Address, credentials: Credentials, timeout_seconds: float, endpoint: HostPort) -> ReadPool:
    """Return the read connection to one server."""

    async def find() -> Sequence[HostPort]:
        return [endpoint]

    return reads_by(address, credentials, timeout_seconds, find)


def reads_of_one(address: Address, credentials: Credentials, timeout_seconds: float) -> ReadPool | None:
    """Return the read connection to the only server of ``address``, or None if redis-py has to find the servers."""
    match address.kind:
        case "server":
            return reads_of(address, credentials, timeout_seconds, address.endpoints[0])
        case "socket":
            return reads_by(address, credentials, timeout_seconds, None)
        case _:
            return None
