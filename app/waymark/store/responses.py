"""Stored responses of gateways, in one slot of Redis, and the queue of those that are to be copied to MongoDB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from waymark.store import keys
from waymark.store.client import RedisClient
from waymark.store.scripts import Scripts

_GROUP = "mongo-sync"


class Entry(NamedTuple):
    """A response to be copied: its place in the queue, and its name."""

    id: str
    name: str


class Responses:
    """Names are 32 hex digits. All methods raise StoreUnavailable. ``queue_max`` 0: there is no MongoDB."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def find(self, names: Sequence[str]) -> list[bytes | None]:
        """Responses; empty is one that was deleted, None one that is unknown here."""
        return await self._client.several([("GET", keys.response(name)) for name in names])

    async def keep(self, name: str, value: bytes, *, milliseconds: int, queue_max: int) -> None:
        await self._change(name, value, milliseconds, queue_max)

    async def delete(self, name: str, *, milliseconds: int, queue_max: int) -> None:
        """Delete a response. With MongoDB, that is remembered for a time."""
        await self._change(name, b"", milliseconds, queue_max)

    async def _change(self, name: str, value: bytes, milliseconds: int, queue_max: int) -> None:
        group = _GROUP if queue_max else ""
        await self._scripts.keep_response(
            keys.response(name), keys.RESPONSES_QUEUE, name, milliseconds, value, group, queue_max
        )

    async def take(self, consumer: str, count: int, *, idle_ms: int) -> list[Entry]:
        """Entries for a consumer: those that another one has not ended for ``idle_ms``, or else new ones."""
        taken = await self._scripts.take_responses(keys.RESPONSES_QUEUE, _GROUP, consumer, count, idle_ms)
        return [Entry(*each) for each in taken]

    async def end(self, ids: Sequence[str]) -> None:
        """Take entries out of the queue."""
        await self._scripts.end_responses(keys.RESPONSES_QUEUE, _GROUP, ids)
