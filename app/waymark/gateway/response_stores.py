"""The stores of responses: the memory of a gateway, or Redis for all gateways, with or without MongoDB behind it."""

from __future__ import annotations

from typing import Protocol

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.gateway.bounded import BoundedCache, CacheSize
from waymark.store.responses import ResponseBounds, ResponseChange, StoredResponses


class ResponseStore(Protocol):
    """Values by names of 32 hex digits. All methods raise StoreUnavailable or RemoteUnavailable."""

    @property
    def held(self) -> CacheSize:
        """How much is stored, as far as this process knows."""
        ...

    async def find(self, name: str) -> bytes | None: ...

    async def keep(self, name: str, value: bytes) -> bool:
        """Keep a response. Return False if it does not fit."""
        ...

    async def delete(self, name: str) -> None: ...


class Archive(Protocol):
    """A lasting copy of responses behind Redis. Raises RemoteUnavailable."""

    async def find(self, name: str) -> bytes | None: ...


class MemoryResponses:
    """Responses in the memory of one gateway."""

    def __init__(self, entries_max: int, bytes_max: int, ttl_seconds: int, metrics: Metrics) -> None:
        evicted = metrics.responses_evicted.inc
        self._held: BoundedCache[bytes] = BoundedCache(entries_max, bytes_max, ttl_seconds, len, evicted=evicted)

    @property
    def held(self) -> CacheSize:
        return self._held.held

    async def find(self, name: str) -> bytes | None:
        return self._held.find(name.encode())

    async def keep(self, name: str, value: bytes) -> bool:
        return self._held.keep(name.encode(), value)

    async def delete(self, name: str) -> None:
        self._held.remove(name.encode())


class RedisResponses:
    """Responses in Redis. With an archive, each change is queued for it, and a response that Redis lacks is read there.

    ``bounds.queue_max`` counts only with an archive.
    """

    def __init__(
        self, stored: StoredResponses, bounds: ResponseBounds, metrics: Metrics, archive: Archive | None = None
    ) -> None:
        self._stored = stored
        self._bounds = bounds if archive else bounds._replace(queue_max=0)
        self._metrics = metrics
        self._archive = archive
        self.held = CacheSize(0, 0)

    async def find(self, name: str) -> bytes | None:
        (value,) = await self._stored.find([name])
        if value is None and self._archive is not None:
            value = await self._archive.find(name)
            if value is not None:
                self._noted(await self._stored.put_back(name, value, self._bounds))
        return value or None

    async def keep(self, name: str, value: bytes) -> bool:
        return self._noted(await self._stored.keep(name, value, self._bounds))

    async def delete(self, name: str) -> None:
        if not self._noted(await self._stored.delete(name, self._bounds)):
            raise StoreUnavailable(
                "there is no room for the deletion until MongoDB has the responses that wait; check MongoDB, or raise "
                "WAYMARK_RESPONSES_ENTRIES and WAYMARK_RESPONSES_BYTES"
            )

    def _noted(self, changed: ResponseChange) -> bool:
        """Return whether the change was done."""
        self.held = CacheSize(changed.room.entries, changed.room.bytes)
        self._metrics.responses_evicted.inc(changed.room.evicted)
        return changed.is_done
