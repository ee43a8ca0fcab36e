"""Connections to a primary behind Sentinels, or to its replicas; the Sentinels are asked before each connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from waymark.base.shown import shown
from waymark.store.redis.address import Address, HostPort
from waymark.store.redis.connect import Packing, WaitingPool, common_options, first
from waymark.store.redis.credentials import Credentials
from waymark.store.redis.read_pool import FindServers


class _BoundedConnect:
    """A connection that bounds the time to find and reach a server, however many Sentinels are silent."""

    async def connect(self) -> None:
        bound = 2 * float(getattr(self, "socket_connect_timeout", 1))
        try:
            async with asyncio.timeout(bound):
                await super().connect()  # type: ignore[misc]
        except TimeoutError:
            raise MasterNotFoundError(f"the Sentinels named no server that answers within {bound:g} s") from None


class _SentinelTcp(_BoundedConnect, Packing, SentinelManagedConnection):
    pass


class _SentinelTls(_BoundedConnect, Packing, SentinelManagedSSLConnection):
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
    sentinels = _Sentinels(  # type: ignore[no-untyped-call]
        address.endpoints,
        sentinel_kwargs=common_options(timeout_seconds, retries=0)
        | {"ssl": address.is_tls}
        | credentials.sentinel_options(address),
    )
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
        **credentials.options(address),
    )
    return _BehindSentinels(connection_pool=pool)
