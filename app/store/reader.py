"""Queries: walk a prompt's chain through Redis, in few round trips.

A replica keeps two things between queries, and both are checked by every query: which id a group has, and the
group's holder table with its random version word. Whatever Redis answers now wins; nothing here is a source of
truth.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.domain.match import Walk
from app.domain.names import GroupName
from app.domain.table import HolderTable
from app.errors import StoreUnavailable
from app.store import keys
from app.store.claims import decode_table
from app.store.client import Client
from app.store.hot import HotBlocks
from app.store.registry import GroupEntry, Registry

KeySource = Callable[[int], list[int]]
"""Gives the next n block keys of a prompt (seq_hash XOR namespace), fewer at its end."""

#: A miss in the first chunk is the common answer to a new prompt, so it is small; 512 keys are some 0.3 ms of Redis.
_FIRST_CHUNK = 32
_LARGEST_CHUNK = 512

#: Groups and tables remembered; beyond it the oldest is forgotten.
_GROUPS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Reading:
    """What a query found."""

    walk: Walk
    is_partial: bool
    """The deadline came before the end of the chain."""
    round_trips: int
    blocks: int
    """How many blocks were looked up."""


class _Query:
    """One query's progress, kept so that the deadline or a newer table finds what was read already."""

    def __init__(self, block_size: int, source: KeySource) -> None:
        self.block_size = block_size
        self.walk: Walk | None = None
        self.round_trips = 0
        self.values: list[bytes | None] = []
        self._source = source
        self._keys: list[int] = []

    def keys(self, count: int) -> list[int]:
        """The next ``count`` keys that have no value yet."""
        start = len(self.values)
        missing = start + count - len(self._keys)
        if missing > 0:
            self._keys += self._source(missing)
        return self._keys[start : start + count]

    def restart(self) -> None:
        self.walk = None
        self.values = []

    def begin(self, table: HolderTable) -> Walk:
        self.walk = Walk(table.view(self.block_size))
        return self.walk

    def reading(self, *, is_partial: bool) -> Reading | None:
        if self.walk is None:
            return None
        return Reading(self.walk, is_partial, self.round_trips, len(self.values))


class Reader:
    def __init__(self, client: Client, registry: Registry, hot: HotBlocks) -> None:
        self._hot = hot
        self._client = client
        self._registry = registry
        self._groups: dict[GroupName, GroupEntry] = {}
        self._tables: dict[int, HolderTable] = {}

    async def read(
        self, group: GroupName, block_size: int, source: KeySource, *, deadline_seconds: float
    ) -> Reading | None:
        """Walk the chain as far as anybody has it; None where nothing was ever registered for the group.

        Raises StoreUnavailable where Redis is away, or has not answered once within the deadline.
        """
        query = _Query(block_size, source)
        try:
            async with asyncio.timeout(deadline_seconds):
                for _ in range(2):
                    entry = await self._entry(group)
                    if entry is None:
                        return None
                    if await self._walk(group, entry, query):
                        return query.reading(is_partial=False)
                    # The id is another group's: this Redis has come back empty, so nothing known of it holds.
                    self._hot.clear()
                    self._groups.clear()
                    self._tables.clear()
                    query.restart()
                return None
        except TimeoutError:
            partial = query.reading(is_partial=True)
            if partial is None:
                raise StoreUnavailable(
                    f"Redis at {self._client.url} did not answer within {deadline_seconds:g} s; try again in a moment"
                ) from None
            return partial

    async def table(self, group: GroupName) -> HolderTable | None:
        """The group's table as it is now; None where nothing was ever registered for it."""
        entry = await self._registry.group(group)
        table = None if entry is None else await self._read_table(entry.group_id)
        return table if table is not None and table.group == group else None

    async def is_tenant_known(self, tenant_id: str) -> bool:
        """Whether the tenant has a registration, of any model."""
        return await self._registry.is_tenant_known(tenant_id)

    async def _entry(self, group: GroupName) -> GroupEntry | None:
        entry = self._groups.get(group)
        if entry is None:
            entry = await self._registry.group(group)
            if entry is not None:
                if len(self._groups) >= _GROUPS_MAX:
                    oldest = next(iter(self._groups))
                    self._tables.pop(self._groups.pop(oldest).group_id, None)
                self._groups[group] = entry
        return entry

    async def _walk(self, group: GroupName, entry: GroupEntry, query: _Query) -> bool:
        """Walk to the end; False where ``entry`` is not this group's id (any more)."""
        chunk = _FIRST_CHUNK
        is_fresh = False
        while True:
            wanted = query.keys(chunk)
            walk = query.walk
            if walk is not None and not wanted:
                return True
            version, values = await self._fetch(entry, wanted, query, with_version=walk is None)
            if walk is None:
                table = self._tables.get(entry.group_id)
                if table is None or table.version != version:
                    table, is_fresh = await self._read_table(entry.group_id), True
                    query.round_trips += 1
                if table is None or table.group != group:
                    return False
                walk = query.begin(table)
            query.values += values
            goes_on = walk.feed(values) and len(wanted) == chunk
            if not goes_on:
                if is_fresh or walk.newest_seen <= walk.view.newest:
                    return True
                # A block names a holder that began after the table was read: read it again, once, and walk anew.
                table, is_fresh = await self._read_table(entry.group_id), True
                query.round_trips += 1
                if table is None or table.group != group:
                    return False
                if not query.begin(table).feed(query.values):
                    return True
            chunk = min(2 * chunk, _LARGEST_CHUNK)

    async def _fetch(
        self, entry: GroupEntry, wanted: list[int], query: _Query, *, with_version: bool
    ) -> tuple[bytes | None, list[bytes | None]]:
        """The values of ``wanted``, in order, each shard asked once; and the table's version, if asked for."""
        kept = self._hot.find(entry.group_id, wanted, time.monotonic())
        picked: dict[int, list[int]] = {}
        for i, key in enumerate(wanted):
            if i not in kept:
                picked.setdefault(key % entry.shards, []).append(i)
        commands: list[tuple[str | bytes, ...]] = []
        for shard, indexes in picked.items():
            prefix = keys.block_prefix(entry.group_id, shard)
            commands.append(("MGET", *(b"%b%016x" % (prefix, wanted[i]) for i in indexes)))
        if with_version:
            commands.append(("HGET", keys.holders(entry.group_id), "version"))
        replies: list[Any] = []
        if commands:
            replies = await self._client.several(commands)
            query.round_trips += 1
        version = replies.pop() if with_version else None
        values: list[bytes | None] = [None] * len(wanted)
        for i, value in kept.items():
            values[i] = value
        for indexes, reply in zip(picked.values(), replies, strict=True):
            for i, value in zip(indexes, reply, strict=True):
                values[i] = value
        self._hot.keep(entry.group_id, wanted, values, time.monotonic())
        return version, values

    async def _read_table(self, group_id: int) -> HolderTable | None:
        table = decode_table(await self._client.hgetall(keys.holders(group_id)))
        if table is None:
            self._tables.pop(group_id, None)
        else:
            self._tables[group_id] = table
        return table
