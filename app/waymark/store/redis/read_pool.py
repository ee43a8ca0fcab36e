"""Opens read connections, and keeps one to each server."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from waymark.store.redis.address import Address, HostPort
from waymark.store.redis.credentials import Credentials
from waymark.store.redis.read_connection import ReadConnection, Replies, ReplyReader

T = TypeVar("T")

OnLost = Callable[[ReadConnection], None]
FindServers = Callable[[], Awaitable[Sequence[HostPort]]]
"""Returns the servers that may be asked, the best first."""


@dataclass(frozen=True, slots=True)
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
        failure: RedisError = RedisConnectionError("there is no server")
        for endpoint in await self.find():
            try:
                return await self._dial(endpoint, on_lost)
            except RedisError as exc:
                failure = exc
        raise failure

    async def _dial(self, endpoint: HostPort | None, on_lost: OnLost) -> ReadConnection:
        connection: ReadConnection | None = None
        try:
            async with asyncio.timeout(self.timeout_seconds):
                connection = await self._connect(endpoint, on_lost)
                await self._greet(connection)
        except TimeoutError as exc:
            self._give_up(connection)
            raise RedisTimeoutError("Timeout connecting to server") from exc
        except OSError as exc:
            raise RedisConnectionError(f"{exc.strerror or exc} connecting to {_shown(endpoint, self.address)}") from exc
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
        transport, connection = await loop.create_connection(make, *endpoint, ssl=self._context())
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
            connection.lose(RedisConnectionError("the connection was abandoned"))


class ReadPool:
    """The connection to one server, opened when it is needed, and again when it was lost."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._scripts: ReadPool | None = None
        self._opening = asyncio.Lock()
        self._failures = 0
        self._failure: RedisError | None = None
        self.connection: ReadConnection | None = None
        """The open connection; None before the first one is opened, and after it was lost."""

    @property
    def seconds(self) -> float:
        """How long a command may take."""
        return self._dialer.timeout_seconds

    @property
    def scripts(self) -> ReadPool:
        """The connection to the same server for scripts, which take longer than a read may wait."""
        if self._scripts is None:
            self._scripts = ReadPool(self._dialer)
        return self._scripts

    def ask(self, packed: bytes, reader: ReplyReader[T], until: float | None) -> Awaitable[T]:
        """Send a question like ``ReadConnection.ask``, after opening a connection if necessary."""
        if self.connection is not None:
            return self.connection.ask(packed, reader, until)
        return self._ask_opened(packed, reader, until)

    async def _ask_opened(self, packed: bytes, reader: ReplyReader[T], deadline: float | None) -> T:
        connection = await self.opened(deadline)
        return await connection.ask(packed, reader, deadline)

    async def opened(self, deadline: float | None) -> ReadConnection:
        """Return the open connection, or open one.

        Raises TimeoutError at ``deadline``, by the loop's clock, and RedisError if no connection can be opened.
        """
        failures = self._failures
        async with asyncio.timeout_at(deadline), self._opening:
            if self.connection is None:
                if self._failures != failures and self._failure is not None:
                    # The attempt of another caller has just failed. One more for each caller would multiply the delay.
                    raise RedisConnectionError(*self._failure.args) from self._failure
                try:
                    self.connection = await self._dialer.dial(self._forget)
                except RedisError as exc:
                    self._failures += 1
                    self._failure = exc
                    raise
                self._failure = None
            return self.connection

    def retire(self) -> None:
        """Close the connection, and that for scripts, when all questions are answered."""
        if self.connection is not None:
            self.connection.retire()
            self.connection = None
        if self._scripts is not None:
            self._scripts.retire()

    def close(self) -> None:
        """Close the connection at once."""
        if self.connection is not None:
            self.connection.lose(RedisConnectionError("the client was closed"))
        if self._scripts is not None:
            self._scripts.close()

    def _forget(self, connection: ReadConnection) -> None:
        if self.connection is connection:
            self.connection = None


def _shown(endpoint: HostPort | None, address: Address) -> str:
    return str(address.path) if endpoint is None else f"{endpoint[0]}:{endpoint[1]}"
