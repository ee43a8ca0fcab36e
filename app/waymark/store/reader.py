"""Queries: walk a prompt's chain through Redis, in few round trips.

A replica caches two things between queries, the id of each group and the group's holder table with its version nonce.
Every query checks both against Redis, and what Redis returns replaces what was cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from waymark.domain.keys import KEY_BYTES
from waymark.domain.match import Walk
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.errors import StoreUnavailable
from waymark.metrics import Metrics
from waymark.store import keys
from waymark.store.claims import decode_table
from waymark.store.client import RedisClient
from waymark.store.directory import Directory, GroupEntry
from waymark.store.fetch import Fetcher
from waymark.store.hot import HotBlocks
from waymark.store.incarnation import Incarnation
from waymark.store.parsing import RecordKind, RecordParser

KeySource = Callable[[int], bytes]
"""Gives the next n block keys of a prompt (seq_hash XOR namespace), packed; fewer at its end."""

#: A miss in the first chunk is the common answer to a new prompt, so it is small. Where prompts lately had more of
#: their blocks (one system prompt for all is the usual case) it is larger: a round trip costs more than keys that turn
#: out to be missing. (Below how many blocks found on average, how many are asked for.)
_FIRST_CHUNKS = ((24, 32), (96, 128))
#: A match that passes the first chunk is mostly long; 512 keys are some 0.15 ms of Redis.
_CHUNK = 512
#: The weight of one query in the average.
_WEIGHT = 1 / 8

#: How often a query starts, at most: it starts again when Redis has come back empty.
_STARTS_MAX = 3

_JUNK = "the value of a block, or of several, has words that are no holder ids"
#: The most groups and tables cached; one more drops the oldest.
_GROUPS_MAX = 1024


class Reading(NamedTuple):
    """What a query found."""

    walk: Walk
    is_partial: bool
    """The deadline passed before the end of the chain."""
    round_trips: int
    blocks: int
    """How many blocks were looked up."""


class _Query:
    """The progress of one query; after the deadline, or with a newer table, the blocks read so far still count."""

    def __init__(self, block_size: int, source: KeySource) -> None:
        self.block_size = block_size
        self.walk: Walk | None = None
        self.round_trips = 0
        self.runs: list[tuple[bytes, int]] = []
        self.blocks = 0
        """How many keys have been looked up."""
        self.found = 0
        """How many of them have a holder, up to the first without one."""
        self._source = source
        self._keys = b""

    def keys(self, count: int) -> bytes:
        """The next ``count`` keys that have not been looked up."""
        if not self._keys:
            self._keys = self._source(count)
            return self._keys
        start = KEY_BYTES * self.blocks
        missing = self.blocks + count - len(self._keys) // KEY_BYTES
        if missing > 0:
            self._keys += self._source(missing)
        return self._keys[start : start + KEY_BYTES * count]

    def restart(self) -> None:
        self.walk = None
        self.runs = []
        self.blocks = self.found = 0

    def begin(self, table: HolderTable) -> Walk:
        self.walk = Walk(table.view(self.block_size))
        return self.walk

    def reading(self, *, is_partial: bool) -> Reading | None:
        if self.walk is None:
            return None
        return Reading(self.walk, is_partial, self.round_trips, self.blocks)


class Reader:
    def __init__(
        self,
        client: RedisClient,
        directory: Directory,
        incarnation: Incarnation,
        hot: HotBlocks,
        parser: RecordParser,
        metrics: Metrics | None = None,
    ) -> None:
        self._client = client
        self._parser = parser
        self._fetcher = Fetcher(client, incarnation, hot, metrics or Metrics())
        self._directory = directory
        self._incarnation = incarnation
        self._groups: dict[GroupName, GroupEntry] = incarnation.cache({})
        self._tables: dict[int, HolderTable] = incarnation.cache({})
        # By group id: how many blocks queries found lately, on average, of up to 128.
        self._usual: dict[int, float] = incarnation.cache({})

    async def read(
        self, group: GroupName, block_size: int, source: KeySource, *, deadline_seconds: float
    ) -> Reading | None:
        """Walk the chain to the last block that has a holder; None if the group never had a registration.

        Raises StoreUnavailable if Redis is unavailable, or sends no reply within the deadline.
        """
        query = _Query(block_size, source)
        until = asyncio.get_running_loop().time() + deadline_seconds
        try:
            for _ in range(_STARTS_MAX):
                changes = self._incarnation.changes
                known = self._groups.get(group)
                entry = known or await self._find(group, until)
                if entry is None:
                    return None
                if await self._walk(group, entry, query, until, changes):
                    self._remember(entry, query)
                    if query.walk is not None and query.walk.view.has_junk:
                        self._parser.reject(RecordKind.BLOCK, keys.blocks(entry.group_id), "", _JUNK)
                    return query.reading(is_partial=False)
                if changes == self._incarnation.changes:
                    if known is None:
                        return None
                    await self._doubt(group, known, until)
                query.restart()
            return None
        except TimeoutError:
            partial = query.reading(is_partial=True)
            if partial is None:
                raise self._silent(deadline_seconds) from None
            return partial

    def _silent(self, seconds: float | None) -> StoreUnavailable:
        return StoreUnavailable(
            f"Redis at {self._client.url} did not answer within {seconds or 0:g} s; try again in a moment"
        )

    async def table(self, group: GroupName, *, deadline_seconds: float | None = None) -> HolderTable | None:
        """The group's table as it is now; None if the group never had a registration."""
        try:
            async with asyncio.timeout(deadline_seconds):
                entry = await self._directory.group(group)
                table = None if entry is None else await self._read_table(entry.group_id, None)
        except TimeoutError:
            raise self._silent(deadline_seconds) from None
        return table if table is not None and table.group == group else None

    def table_at_hand(self, group: GroupName) -> HolderTable | None:
        """The group's table in the cache, as the last query used it."""
        entry = self._groups.get(group)
        table = None if entry is None else self._tables.get(entry.group_id)
        return table if table is not None and table.group == group else None

    def entry_at_hand(self, group: GroupName) -> GroupEntry | None:
        """The group's id and shards in the cache, as the last query used them."""
        return self._groups.get(group)

    async def values(self, entry: GroupEntry, block_keys: Sequence[int]) -> list[bytes | None]:
        """The values of single blocks, which need not follow each other, in one round trip."""
        of_shards: dict[int, list[int]] = {}
        for at, key in enumerate(block_keys):
            of_shards.setdefault(key % entry.shards, []).append(at)
        replies = await self._client.several(
            ("MGET", *(b"%b%016x" % (keys.block_prefix(entry.group_id, shard), block_keys[at]) for at in places))
            for shard, places in of_shards.items()
        )
        values: list[bytes | None] = [None] * len(block_keys)
        for places, reply in zip(of_shards.values(), replies, strict=True):
            for at, value in zip(places, reply, strict=True):
                values[at] = value
        return values

    async def is_tenant_known(self, tenant_id: str, *, deadline_seconds: float | None = None) -> bool:
        """Whether the tenant has a registration, of any model."""
        try:
            async with asyncio.timeout(deadline_seconds):
                return await self._directory.is_tenant_known(tenant_id)
        except TimeoutError:
            raise self._silent(deadline_seconds) from None

    async def _find(self, group: GroupName, until: float) -> GroupEntry | None:
        changes = self._incarnation.changes
        async with asyncio.timeout_at(until):
            entry = await self._directory.group(group)
        if entry is not None and changes == self._incarnation.changes:
            if len(self._groups) >= _GROUPS_MAX:
                oldest = next(iter(self._groups))
                group_id = self._groups.pop(oldest).group_id
                self._tables.pop(group_id, None)
                self._usual.pop(group_id, None)
            self._groups[group] = entry
        return entry

    async def _doubt(self, group: GroupName, known: GroupEntry, until: float) -> None:
        """Read the id of a group again, because its table does not fit. Another id: Redis has come back empty.

        If the id is the same, the table is missing or cannot be read. Only this group is affected then.
        """
        self._groups.pop(group, None)
        async with asyncio.timeout_at(until):
            entry = await self._directory.group(group)
        if entry != known:
            self._incarnation.forget()

    async def _walk(self, group: GroupName, entry: GroupEntry, query: _Query, until: float, changes: int) -> bool:
        """Walk to the end; False if the cached data of the group are out of date. Raises TimeoutError at ``until``."""
        usual = self._usual.get(entry.group_id, 0.0)
        chunk = next((blocks for bound, blocks in _FIRST_CHUNKS if usual < bound), _CHUNK)
        is_fresh = False
        while True:
            wanted = query.keys(chunk)
            walk = query.walk
            if walk is not None and not wanted:
                return True
            fetched, round_trips = await self._fetcher.fetch(entry, wanted, with_version=walk is None, until=until)
            query.round_trips += round_trips
            if walk is None:
                table = self._tables.get(entry.group_id)
                if table is None or table.version != fetched.version:
                    table, is_fresh = await self._read_table(entry.group_id, until), True
                    query.round_trips += 1
                if table is None or table.group != group or changes != self._incarnation.changes:
                    return False
                walk = query.begin(table)
            query.runs += fetched.runs
            query.blocks += len(wanted) // KEY_BYTES
            query.found += fetched.found
            is_whole = fetched.found == chunk
            goes_on = walk.feed_runs(fetched.runs) and is_whole
            if not goes_on:
                if is_fresh or walk.newest_seen <= walk.view.newest:
                    return True
                # A block names a holder that began after the table was read: read it again, once, and walk anew.
                table, is_fresh = await self._read_table(entry.group_id, until), True
                query.round_trips += 1
                if table is None or table.group != group or changes != self._incarnation.changes:
                    return False
                if not query.begin(table).feed_runs(query.runs) or not is_whole:
                    return True
            chunk = _CHUNK

    def _remember(self, entry: GroupEntry, query: _Query) -> None:
        """Adapt the size of the first chunk to what a query found; a query of a few blocks does not count."""
        if query.blocks >= _FIRST_CHUNKS[0][1]:
            # Long matches count as 128 blocks: a few of them should not make every other query ask for 512.
            found = min(_FIRST_CHUNKS[-1][1], query.found)
            usual = self._usual.get(entry.group_id, 0.0)
            self._usual[entry.group_id] = usual + _WEIGHT * (found - usual)

    async def _read_table(self, group_id: int, until: float | None) -> HolderTable | None:
        changes = self._incarnation.changes
        async with asyncio.timeout_at(until):
            key = keys.holders(group_id)
            table = decode_table(await self._client.hgetall(key), self._parser, key)
        if table is None:
            self._tables.pop(group_id, None)
            return None
        if changes == self._incarnation.changes:
            self._incarnation.saw(group_id, table.incarnation)
            self._tables[group_id] = table
        return table
