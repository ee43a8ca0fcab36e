"""Where stored responses are: in the memory of a gateway, or in Redis for all, with MongoDB behind it or not."""

from __future__ import annotations

from typing import Protocol

from waymark.gateway.bounded import Bounded
from waymark.store.responses import Responses as StoredResponses


class ResponsePlace(Protocol):
    """Values by names of 32 hex digits. All methods raise StoreUnavailable or RemoteUnavailable."""

    async def find(self, name: str) -> bytes | None: ...

    async def keep(self, name: str, value: bytes) -> None: ...

    async def delete(self, name: str) -> None: ...


class Archive(Protocol):
    """What is behind Redis. Raises RemoteUnavailable."""

    async def find(self, name: str) -> bytes | None: ...


class MemoryResponses:
    """In memory: for one gateway."""

    def __init__(self, entries_max: int, bytes_max: int, ttl_seconds: int) -> None:
        self._held: Bounded[bytes] = Bounded(entries_max, bytes_max, ttl_seconds, len)

    async def find(self, name: str) -> bytes | None:
        return self._held.find(name.encode())

    async def keep(self, name: str, value: bytes) -> None:
        self._held.keep(name.encode(), value)

    async def delete(self, name: str) -> None:
        self._held.remove(name.encode())


class RedisResponses:
    """In Redis. With an archive, each change is queued for it, and what Redis has lost is asked for there."""

    def __init__(
        self, stored: StoredResponses, ttl_seconds: int, archive: Archive | None = None, queue_max: int = 0
    ) -> None:
        self._stored = stored
        self._milliseconds = 1000 * ttl_seconds
        self._archive = archive
        self._queue_max = queue_max if archive else 0

    async def find(self, name: str) -> bytes | None:
        (value,) = await self._stored.find([name])
        if value is None and self._archive is not None:
            value = await self._archive.find(name)
            if value is not None:
                await self._stored.keep(name, value, milliseconds=self._milliseconds, queue_max=0)
        return value or None

    async def keep(self, name: str, value: bytes) -> None:
        await self._stored.keep(name, value, milliseconds=self._milliseconds, queue_max=self._queue_max)

    async def delete(self, name: str) -> None:
        await self._stored.delete(name, milliseconds=self._milliseconds, queue_max=self._queue_max)
