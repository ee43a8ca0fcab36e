"""Queries: walk a prompt's chain through Redis, in few round trips.

A replica caches two things between queries, the id of each group and the group's holder table with its version nonce.
Every query checks both against Redis, and the replies replace outdated entries.

``QueryReader`` reads within the deadline, counts, and takes the group's block size by default.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from waymark.base.errors import StoreUnavailable
from waymark.base.instruments import Counter
from waymark.base.metrics import NO_MODEL, Metrics
from waymark.domain.match import Walk
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.pool_keys import PromptIds
from waymark.domain.row_runs import Runs
from waymark.domain.rows import may_have
from waymark.domain.status import RecordKind
from waymark.domain.table import HolderTable
from waymark.store import keys
from waymark.store.chain import Chain, KeySource, WantedValues
from waymark.store.directory import Directory, GroupEntry
from waymark.store.fetch import Fetcher
from waymark.store.holder_tables import decode_table
from waymark.store.hot import HotRows
from waymark.store.incarnation import Incarnation
from waymark.store.parsing import RecordParser
from waymark.store.places import holders_of
from waymark.store.quick import FirstPortions, QuickReads, Start
from waymark.store.redis.client import RedisClient
from waymark.store.steps import Steps, Waiting, finished, in_task

#: The rows in a later portion: a match beyond the first portion is mostly much longer.
_PORTION = 64

#: How many times a query may start: it starts again if Redis came back empty.
_STARTS_MAX = 3

_UNREADABLE = "the row cannot be read: slots of 17 characters, a plus where it is marked, <holder>:<bitmap> ..."
#: How long the rows of watched prompts are waited for.
_LAST_SECONDS = 2.0
#: The most groups and tables cached; one more drops the oldest.
_GROUPS_MAX = 1024


class Reading(NamedTuple):
    """The result of one query, and its cost."""

    walk: Walk
    is_partial: bool
    """Whether the deadline passed before the end of the chain."""
    round_trips: int
    blocks: int
    """How many blocks were looked up."""


class _Query:
    """The progress of one query. The blocks read so far stay valid if the deadline passes or the table changes."""

    def __init__(self, block_size: int, chain: Chain) -> None:
        self.block_size = block_size
        self.chain = chain
        self.walk: Walk | None = None
        self.round_trips = 0
        self.runs: Runs = []

    def walk_with(self, table: HolderTable) -> Walk:
        self.chain.has_singles = table.has_singles
        self.walk = Walk(table.view(self.block_size))
        return self.walk

    def reading(self, *, is_partial: bool) -> Reading | None:
        if self.walk is None:
            return None
        return Reading(self.walk, is_partial, self.round_trips, self.chain.blocks)


class Reader:
    def __init__(
        self,
        client: RedisClient,
        directory: Directory,
        incarnation: Incarnation,
        hot: HotRows,
        parser: RecordParser,
        metrics: Metrics | None = None,
    ) -> None:
        self._client = client
        self._parser = parser
        self._fetcher = Fetcher(client, metrics or Metrics())
        self._hot = hot
        self._directory = directory
        self._incarnation = incarnation
        self._groups: dict[GroupName, GroupEntry] = incarnation.cache({})
        self._tables: dict[int, HolderTable] = incarnation.cache({})
        self._portions = incarnation.cache(FirstPortions())
        self.quick = QuickReads(
            self._fetcher, incarnation, hot, self._groups, self._tables, self._portions, self.silent
        )

    def reading(
        self,
        group: GroupName,
        block_size: int,
        source: KeySource,
        *,
        deadline_seconds: float,
        start: Start | None = None,
    ) -> Steps[Reading | None]:
        """Return the steps that walk the chain to the last block with a holder. Their result is None if the group never
        had a registration. ``start`` is the beginning, from a quick read.

        They raise StoreUnavailable if Redis is unavailable, or sends no reply within the deadline.
        """
        query = _Query(block_size, Chain(source, self._hot))
        deadline = asyncio.get_running_loop().time() + deadline_seconds if start is None else start.deadline
        try:
            for _ in range(_STARTS_MAX):
                changes = self._incarnation.changes
                cached = self._groups.get(group)
                entry = cached or (yield Waiting(self._find(group, deadline)))
                if entry is None:
                    return None
                query.walk, query.runs = None, []
                query.chain.begin(entry)
                is_done = yield from self._walk(group, entry, query, deadline, changes, start)
                start = None
                if is_done:
                    self._portions.remember(entry.group_id, query.chain.blocks, query.chain.found)
                    for shard, name in query.chain.unreadable:
                        self._parser.reject(
                            RecordKind.BLOCK,
                            (keys.block_prefix(entry.group_id, shard) + name).decode(),
                            "",
                            _UNREADABLE,
                        )
                    return query.reading(is_partial=False)
                if changes == self._incarnation.changes:
                    if cached is None:
                        return None
                    yield Waiting(self._doubt(group, cached, deadline))
            return None
        except TimeoutError:
            partial = query.reading(is_partial=True)
            if partial is None:
                raise self.silent(deadline_seconds) from None
            return partial

    read = in_task(reading)

    def silent(self, seconds: float | None) -> StoreUnavailable:
        """Return the error of a query that Redis has not answered within its deadline."""
        return StoreUnavailable(
            f"Redis at {self._client.url} did not answer within {seconds or 0:g} s; try again in a moment"
        )

    def forget_rows(self) -> None:
        """Forget the hot rows, because a write was acknowledged, and the next answer must contain it."""
        self._hot.clear()

    async def table(self, group: GroupName, *, deadline_seconds: float | None = None) -> HolderTable | None:
        """Return the group's table as it is now, or None if the group never had a registration."""
        try:
            async with asyncio.timeout(deadline_seconds):
                entry = await self._directory.group(group)
                table = None if entry is None else await self._read_table(entry.group_id, None)
        except TimeoutError:
            raise self.silent(deadline_seconds) from None
        return table if table is not None and table.group == group else None

    def table_at_hand(self, group: GroupName) -> HolderTable | None:
        """Return the group's cached table, which the last query used."""
        return self.at_hand(group)[1]

    def has_targets(self, group: GroupName) -> bool:
        """Return whether the last query found registrations of the group."""
        table = self.table_at_hand(group)
        return table is not None and bool(table.publishers)

    def at_hand(self, group: GroupName) -> tuple[GroupEntry | None, HolderTable | None]:
        """Return the group's cached entry and table, which the last query used."""
        entry = self._groups.get(group)
        table = None if entry is None else self._tables.get(entry.group_id)
        return entry, table if table is not None and table.group == group else None

    def entry_at_hand(self, group: GroupName) -> GroupEntry | None:
        """Return the group's cached id and shards, which the last query used."""
        return self._groups.get(group)

    async def last_holders(self, entry: GroupEntry, pieces: Sequence[bytes]) -> list[set[int]]:
        """Return the holder ids of the last block of each of ``pieces``, which are packed keys from the piece's head
        on; there is at least one. Raise StoreUnavailable.

        Mostly nobody has the block yet, and then the bytes of its row say so: other rows are not parsed.
        """
        table = self._tables.get(entry.group_id)
        has_singles = table is not None and table.has_singles
        indexes: Sequence[int] = range(len(pieces))
        if not has_singles:
            heads = b"".join([piece[:KEY_BYTES] for piece in pieces])
            try:
                rows = await finished(self._rows(entry, heads))
            except TimeoutError:
                raise self.silent(_LAST_SECONDS) from None
            indexes = [i for i, row in enumerate(rows) if row is not None and may_have(row, pieces[i][-KEY_BYTES:])]
        result = [set[int]() for _ in pieces]
        holders = await holders_of(self._client, entry, [pieces[i] for i in indexes], has_singles=has_singles)
        for i, ids in zip(indexes, holders, strict=True):
            result[i] = ids[-1]
        return result

    def _rows(self, entry: GroupEntry, heads: bytes) -> Steps[Sequence[bytes | None]]:
        deadline = asyncio.get_running_loop().time() + _LAST_SECONDS
        fetched = yield self._fetcher.fetch(entry, WantedValues(heads, []), with_version=False, until=deadline)
        values: Sequence[bytes | None] = fetched.values
        return values

    async def is_tenant_known(self, tenant_id: str, *, deadline_seconds: float | None = None) -> bool:
        """Return whether the tenant has a registration, of any model."""
        try:
            async with asyncio.timeout(deadline_seconds):
                return await self._directory.is_tenant_known(tenant_id)
        except TimeoutError:
            raise self.silent(deadline_seconds) from None

    async def _find(self, group: GroupName, deadline: float) -> GroupEntry | None:
        changes = self._incarnation.changes
        async with asyncio.timeout_at(deadline):
            entry = await self._directory.group(group)
        if entry is not None and changes == self._incarnation.changes:
            if len(self._groups) >= _GROUPS_MAX:
                oldest = next(iter(self._groups))
                group_id = self._groups.pop(oldest).group_id
                self._tables.pop(group_id, None)
                self._portions.forget(group_id)
            self._groups[group] = entry
        return entry

    async def _doubt(self, group: GroupName, cached: GroupEntry, deadline: float) -> None:
        """Read the id of a group again, because its table does not fit. If the id has changed, Redis came back empty.

        If the id is the same, the table is missing or cannot be read. Then only this group is affected.
        """
        self._groups.pop(group, None)
        async with asyncio.timeout_at(deadline):
            entry = await self._directory.group(group)
        if entry != cached:
            self._incarnation.forget()

    def _walk(
        self, group: GroupName, entry: GroupEntry, query: _Query, deadline: float, changes: int, start: Start | None
    ) -> Steps[bool]:
        """Read to the end of the chain. Return False if the cached data of the group are outdated.

        Raises TimeoutError at ``deadline``.
        """
        chain = query.chain
        cached = self._tables.get(entry.group_id)
        chain.has_singles = cached is not None and cached.has_singles
        pieces = self._portions.pieces(entry.group_id)
        is_fresh = False
        while True:
            asked = chain.ask(pieces, time.monotonic())
            walk = query.walk
            if asked.heads or asked.beside or walk is None:
                fetched = start.fetched if start is not None and walk is None and start.asked == asked else None
                if fetched is None:
                    fetched = yield self._fetcher.fetch(entry, asked, with_version=walk is None, until=deadline)
                query.round_trips += 1
                chain.take(fetched.values)
                if walk is None:
                    table = self._tables.get(entry.group_id)
                    if table is None or table.version != fetched.version:
                        table, is_fresh = (yield Waiting(self._read_table(entry.group_id, deadline))), True
                        query.round_trips += 1
                    if table is None or table.group != group or changes != self._incarnation.changes:
                        return False
                    walk = query.walk_with(table)
            runs, is_over = chain.settle()
            if chain.may_be_hot and changes == self._incarnation.changes:
                chain.keep_hot(time.monotonic())
            query.runs += runs
            if not walk.feed(runs) or is_over:
                if is_fresh or walk.newest_seen <= walk.view.newest:
                    return True
                # A row names a holder that began after the table was read: read the table again, once, and walk again.
                table, is_fresh = (yield Waiting(self._read_table(entry.group_id, deadline))), True
                query.round_trips += 1
                if table is None or table.group != group or changes != self._incarnation.changes:
                    return False
                if not query.walk_with(table).feed(query.runs) or is_over:
                    return True
            pieces = _PORTION

    async def _read_table(self, group_id: int, deadline: float | None) -> HolderTable | None:
        changes = self._incarnation.changes
        async with asyncio.timeout_at(deadline):
            key = keys.holders(group_id)
            table = decode_table(await self._client.hgetall(key), self._parser, key)
        if table is None:
            self._tables.pop(group_id, None)
            return None
        if changes == self._incarnation.changes:
            self._incarnation.saw(group_id, table.incarnation)
            self._tables[group_id] = table
        return table


#: The most starts of a query whose group changes its block size meanwhile.
_ATTEMPTS = 3


class PromptKeys(NamedTuple):
    """The keys of the complete blocks of a prompt, how many there are, and how many tokens the prompt has."""

    keys: KeySource
    blocks: int
    tokens: int
    ids: PromptIds | None = None
    """The token ids, if these and the namespace identify the blocks, because there is no image."""


KeysOf = Callable[[int], PromptKeys]
"""Computes the keys of a prompt for a block size."""

SizeOf = Callable[[HolderTable | None], int | None]
"""Reads the block size of a group from its table; None without a size."""


class QueryReader:
    """A reader that keeps the query's deadline, and counts requested and found blocks."""

    def __init__(self, reader: Reader, metrics: Metrics, *, deadline_seconds: float) -> None:
        self._reader = reader
        self._deadline_seconds = deadline_seconds
        self.counts = QueryCounts(metrics)

    def read(
        self, group: GroupName, block_size: int, prompt: PromptKeys, start: Start | None = None
    ) -> Steps[tuple[int, Reading | None]]:
        """Do what ``Reader.reading`` does, and return the block size, too."""
        reading = yield from self._reader.reading(
            group, block_size, prompt.keys, deadline_seconds=self._deadline_seconds, start=start
        )
        self.counts.count(group, prompt.blocks, reading)
        return block_size, reading

    def read_in_size(
        self, group: GroupName, size_of: SizeOf, keys_of: KeysOf, start: Start | None = None
    ) -> Steps[tuple[int, Reading | None]]:
        """Do what ``read`` does, with the block size that ``size_of`` takes from the group's table. Return 0 and None
        if it has none.

        The first table is the cached one. Reading replaces it with the current one; if the block size differs, the
        query starts again.
        """
        table = self._reader.table_at_hand(group)
        block_size, reading = 0, None
        for _ in range(_ATTEMPTS):
            if table is None or not table.publishers:
                table = yield Waiting(self._reader.table(group, deadline_seconds=self._deadline_seconds))
            size = size_of(table)
            if size is None:
                return 0, None
            block_size = size
            _, reading = yield from self.read(group, block_size, keys_of(block_size), start)
            start = None
            now = self._reader.table_at_hand(group)
            if now is table or (now is not None and now.publishers and size_of(now) == block_size):
                break
            table = now
        return block_size, reading


# The metrics of one query: its blocks, its result, and its model.


class QueryCounts:
    """Counts queries of both APIs.

    ``result`` is ``hit`` or ``zero`` (no instance has even the first block), ``short`` if the prompt has no complete
    block, ``unknown_model`` if tenant and model never had a registration; such a model's name comes from a client, and
    is not used as a label.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._histograms = metrics.query_blocks, metrics.query_matched_blocks, metrics.query_round_trips
        # Looking up a series by its labels costs more than counting, and there are many queries.
        self._series: dict[tuple[str, str], Counter] = {}

    def count(self, group: GroupName, asked: int, reading: Reading | None) -> None:
        """Count a query. ``asked`` is the number of complete blocks of the prompt; ``reading`` is the result of
        ``Reader.read``.
        """
        if reading is None:
            self._one_more(NO_MODEL, "unknown_model")
            return
        self.found(group.model_name, asked, reading.walk.blocks, reading.blocks, reading.round_trips)
        if reading.is_partial:
            self._metrics.query_partial.inc()

    def found(self, model_name: str, asked: int, matched: int, looked_up: int, round_trips: int) -> None:
        """Count a query of a registered model, by its numbers of blocks."""
        result = "hit" if matched else "zero" if asked else "short"
        series = self._series.get((model_name, result))
        if series is None:
            self._one_more(self._metrics.model(model_name), result)
        else:
            series.value += 1
        self._metrics.query_looked_up_blocks.value += looked_up
        # The code of ``observe``, without three more calls.
        of_asked, of_matched, of_trips = self._histograms
        of_asked.sum += asked
        of_asked.seen[bisect_left(of_asked.bounds, asked)] += 1
        of_matched.sum += matched
        of_matched.seen[bisect_left(of_matched.bounds, matched)] += 1
        of_trips.sum += round_trips
        of_trips.seen[bisect_left(of_trips.bounds, round_trips)] += 1

    def _one_more(self, model: str, result: str) -> None:
        series = self._series.get((model, result))
        if series is None:
            series = self._series[model, result] = self._metrics.queries.labels(model=model, result=result)
        series.value += 1
