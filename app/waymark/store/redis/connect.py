"""Connections of redis-py to one server, or to those that Sentinels name: timeouts, retries and the protocol.

These are set here and nowhere else, because the defaults of redis-py have changed between releases. A command whose
connection broke is sent once more over a new connection: every write is a script that may run twice.

The Sentinels are asked before each connection to a primary or to a replica.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import hiredis
from redis.asyncio import (
    BlockingConnectionPool,
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from waymark.base.endpoints import connected
from waymark.base.shown import shown
from waymark.store.redis.address import Address, HostPort
from waymark.store.redis.credentials import Credentials, SecretUnreadable, read_secret
from waymark.store.redis.read_connection import FindServers, reply_error

A = TypeVar("A")
T = TypeVar("T")


class Packing(AbstractConnection):
    """A connection that packs commands in C. Packing in redis-py takes half the time of a batch.

    If its server was demoted, it reconnects, because the address may lead to another server by now.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        if " " in args[0]:  # on the wire, SCRIPT LOAD and others are two words
            args = (*args[0].split(), *args[1:])
        return [hiredis.pack_command(args)]

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as exc:  # uvloop raises it for a connection that the other end has closed
            raise RedisConnectionError(str(exc)) from exc

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as exc:
            error = reply_error(str(exc)) if type(exc) is ResponseError else exc
            if isinstance(error, ReadOnlyError):
                await self.disconnect()
                raise RedisConnectionError(f"READONLY {error}") from exc
            raise error from None


class _ByAddress(Packing):
    """A connection to an address of its host, which is looked up as those of engines are."""

    host: str
    socket_connect_timeout: float

    async def _connect(self) -> None:
        self._name = self.host
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                await connected(self._name, self._connect_to)
        finally:
            self.host = self._name

    async def _connect_to(self, address: str) -> None:
        self.host = address
        await super()._connect()  # type: ignore[no-untyped-call,safe-super]

    def _connection_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = dict(super()._connection_arguments())  # type: ignore[misc]
        if "ssl" in arguments:  # a certificate has the name
            arguments["server_hostname"] = self._name
        return arguments


class _Tcp(_ByAddress, Connection):
    pass


class _Tls(_ByAddress, SSLConnection):
    pass


class _Socket(Packing, UnixDomainSocketConnection):
    pass


class WaitingPool(BlockingConnectionPool):
    """A pool in which a caller waits for a free connection, and a cancelled caller still returns its connection."""

    def counts(self) -> tuple[int, int]:
        """Return the number of used and of idle connections."""
        counts = self.get_connection_count()
        used, idle = (sum(n for n, about in counts if state in about.values()) for state in ("used", "idle"))
        return used, idle

    async def release(self, connection: AbstractConnection) -> None:
        try:
            await super().release(connection)
        except asyncio.CancelledError:
            # A caller cancelled during its wait for the pool's lock would never return the connection.
            if connection in self._in_use_connections:
                await asyncio.shield(super().release(connection))
            raise


def common_options(timeout_seconds: float, *, retries: int = 1) -> dict[str, Any]:
    """Return the arguments of redis-py for every connection."""
    return {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "health_check_interval": 0,
        # Otherwise redis-py sends its name with CLIENT SETINFO, which older servers lack and an ACL must permit.
        "driver_info": None,
        "retry": Retry(NoBackoff(), retries, supported_errors=(RedisConnectionError,)),
    }


class _FileCredentials(CredentialProvider):
    """Reads the password file for each new connection of redis-py."""

    def __init__(self, username: str | None, path: Path, variable: str) -> None:
        self._username, self._path, self._variable = username, path, variable

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            secret = read_secret(self._path, self._variable)
        except SecretUnreadable as exc:
            raise AuthenticationError(str(exc)) from exc  # for another error redis-py leaves the connection open
        return (secret,) if self._username is None else (self._username, secret)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _login(username: str | None, password: str | None, path: Path | None, variable: str) -> dict[str, Any]:
    if path is not None:
        return {"credential_provider": _FileCredentials(username, path, variable)}
    return {"username": username, "password": password}


def _tls(credentials: Credentials, address: Address) -> dict[str, Any]:
    if not address.is_tls:
        return {}

    def text(path: Path | None) -> str | None:
        return None if path is None else str(path)

    return {
        "ssl_ca_certs": text(credentials.tls_ca_file),
        "ssl_certfile": text(credentials.tls_cert_file),
        "ssl_keyfile": text(credentials.tls_key_file),
        "ssl_cert_reqs": "none" if credentials.tls_verify == "none" else "required",
        "ssl_check_hostname": credentials.tls_verify == "full",
    }


def options_of(credentials: Credentials, address: Address) -> dict[str, Any]:
    """Return the arguments of redis-py for a connection to Redis itself."""
    username, file = address.username or credentials.username, credentials.password_file
    return _tls(credentials, address) | _login(username, address.password, file, "WAYMARK_REDIS_PASSWORD_FILE")


def sentinel_options_of(credentials: Credentials, address: Address) -> dict[str, Any]:
    """Return the arguments of redis-py for a connection to a Sentinel."""
    username, file = credentials.sentinel_username, credentials.sentinel_password_file
    return _tls(credentials, address) | _login(username, None, file, "WAYMARK_REDIS_SENTINEL password_file")


def server(
    address: Address,
    credentials: Credentials,
    endpoint: HostPort | None = None,
    *,
    timeout_seconds: float,
    connections: int,
) -> Redis:
    """Return a client of the server at ``endpoint``, or at the socket of ``address``. It connects on the first
    command.
    """
    options = common_options(timeout_seconds) | options_of(credentials, address)
    if endpoint is None:
        options |= {"connection_class": _Socket, "path": address.path}
    else:
        host, port = endpoint
        kind = _Tls if address.is_tls else _Tcp
        options |= {"connection_class": kind, "host": host, "port": port, "socket_keepalive": True}
    if address.kind == "cluster" and address.is_replica:
        options["redis_connect_func"] = _read_only
    pool = WaitingPool(max_connections=connections, timeout=timeout_seconds, db=address.db, **options)
    return Redis.from_pool(pool)


async def _read_only(connection: AbstractConnection) -> None:
    """Send READONLY, without which a replica of a Cluster redirects every read to its primary."""
    await connection.on_connect()
    await connection.send_command("READONLY")
    await connection.read_response()


async def first(ask: Callable[[A], Awaitable[T]], asked: Iterable[A]) -> T | RedisError:
    """Call ``ask`` for all at once, and return the first reply, or the last error if all fail.

    The calls unfinished by then are cancelled.
    """
    waiting = {asyncio.ensure_future(ask(task)) for task in asked}
    failure = RedisError("there is no server to ask")
    try:
        while waiting:
            finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            outcomes = await asyncio.gather(*finished, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, RedisError):
                    failure = outcome
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    return outcome
        return failure
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class _BoundedConnect:
    """A connection that bounds the time to find and reach a server, however many Sentinels do not answer."""

    async def connect(self) -> None:
        bound = 2 * float(getattr(self, "socket_connect_timeout", 1))
        try:
            async with asyncio.timeout(bound):
                await super().connect()  # type: ignore[misc]
        except TimeoutError:
            raise MasterNotFoundError(f"the Sentinels named no server that answers within {bound:g} s") from None


class _SentinelTcp(_BoundedConnect, _ByAddress, SentinelManagedConnection):
    pass


class _SentinelTls(_BoundedConnect, _ByAddress, SentinelManagedSSLConnection):
    pass


class _SentinelPool(SentinelConnectionPool, WaitingPool):
    """Connections to the server that Sentinels name. A caller without a free connection waits."""


class _Sentinels(Sentinel):
    """All Sentinels, asked at once, so that a silent one does not delay the answer."""

    async def discover_master(self, service_name: str) -> HostPort:
        async def ask(sentinel: Redis) -> HostPort:
            state = cast("dict[str, Any]", await sentinel.sentinel_master(service_name))
            if not self.check_master_state(state, service_name):
                raise MasterNotFoundError("it is down")
            return state["ip"], state["port"]

        endpoint = await first(ask, self.sentinels)
        if isinstance(endpoint, Exception):
            raise MasterNotFoundError(
                f"no Sentinel names a primary {shown(service_name)} that is up: {endpoint}"
            ) from endpoint
        return endpoint

    async def discover_slaves(self, service_name: str) -> list[HostPort]:
        async def ask(sentinel: Redis) -> list[HostPort]:
            return cast("list[HostPort]", self.filter_slaves(await sentinel.sentinel_slaves(service_name)))

        endpoints = await first(ask, self.sentinels)
        # Without a replica the library goes on to the primary.
        return [] if isinstance(endpoints, Exception) else endpoints


class _BehindSentinels(Redis):
    """Closes the connections to the Sentinels, too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool=True)
        await cast("_SentinelPool", self.connection_pool).sentinel_manager.aclose()


def found_by(redis: Redis, address: Address) -> FindServers:
    """Return a function that asks the Sentinels of ``redis`` for the servers; ``behind_sentinels`` made ``redis``."""
    sentinels = cast("_Sentinels", cast("_SentinelPool", redis.connection_pool).sentinel_manager)

    async def find() -> Sequence[HostPort]:
        replicas = await sentinels.discover_slaves(address.name) if address.is_replica else []
        random.shuffle(replicas)
        try:
            return [*replicas, await sentinels.discover_master(address.name)]
        except MasterNotFoundError:
            if not replicas:
                raise
            return replicas

    return find


def behind_sentinels(address: Address, credentials: Credentials, *, timeout_seconds: float, connections: int) -> Redis:
    """Return a client of the primary, or of its replicas. It connects on the first command."""
    kind, common = _Tls if address.is_tls else _Tcp, common_options(timeout_seconds, retries=0)
    options = {"connection_class": kind, **common, **sentinel_options_of(credentials, address)}
    sentinels = _Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [
        Redis.from_pool(ConnectionPool(host=host, port=port, **options)) for host, port in address.endpoints
    ]
    pool = _SentinelPool(  # type: ignore[no-untyped-call]
        address.name,
        sentinels,
        is_master=not address.is_replica,
        connection_class=_SentinelTls if address.is_tls else _SentinelTcp,
        max_connections=connections,
        timeout=timeout_seconds,
        db=address.db,
        socket_keepalive=True,
        **common_options(timeout_seconds),
        **options_of(credentials, address),
    )
    return _BehindSentinels(connection_pool=pool)
