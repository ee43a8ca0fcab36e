"""Makes what a URL names: the driver of a server, of a primary behind Sentinels, of a Cluster, or the emulation."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from waymark.store.redis.address import Address, HostPort
from waymark.store.redis.cluster import Cluster
from waymark.store.redis.connect import server
from waymark.store.redis.credentials import Credentials
from waymark.store.redis.read_pool import Dialer, FindServers, ReadPool
from waymark.store.redis.sentinels import behind_sentinels, found_by


def connected(
    address: Address, credentials: Credentials, timeout_seconds: float, connections: int
) -> tuple[Redis | Cluster, ReadPool | None]:
    """The driver, and the read connections to a server; a Cluster has its own."""

    def node(endpoint: HostPort | None) -> Redis:
        return server(address, credentials, endpoint, timeout_seconds=timeout_seconds, connections=connections)

    def reads(find: FindServers | None) -> ReadPool:
        return ReadPool(Dialer(address, credentials, timeout_seconds, find))

    def reads_of(endpoint: HostPort) -> ReadPool:
        async def find() -> Sequence[HostPort]:
            return [endpoint]

        return reads(find)

    match address.kind:
        case "cluster":
            is_replica = address.is_replica
            return Cluster(
                address.endpoints, node, reads_of, timeout_seconds=timeout_seconds, is_replica=is_replica
            ), None
        case "sentinel":
            redis = behind_sentinels(address, credentials, timeout_seconds=timeout_seconds, connections=connections)
            return redis, reads(found_by(redis, address))
        case "server":
            return node(address.endpoints[0]), reads_of(address.endpoints[0])
        case "socket":
            return node(None), reads(None)


def embedded() -> Redis:
    """A new, empty Redis of this process alone."""
    from fakeredis import FakeAsyncRedis, FakeServer  # only a process with an embedded Redis loads the emulation

    return FakeAsyncRedis(server=FakeServer(), decode_responses=False, protocol=2)
