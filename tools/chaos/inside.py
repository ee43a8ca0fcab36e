"""Reads the index in Redis directly: the places of each block, even if no query reaches it, and leftovers of ended
holders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from redis import Redis

from tests.model import Place, Space, Tokens
from tools.chaos.backend import Backend
from tools.chaos.publishers import MODEL_NAME
from waymark.domain.hashing import extend, namespace, token_bytes
from waymark.domain.names import GroupName, Holder
from waymark.domain.packing import pack
from waymark.domain.rows import PIECE_BLOCKS, parse
from waymark.domain.table import HolderTable
from waymark.inspection.inspector import InspectedGroup, Inspector
from waymark.store import keys
from waymark.store.places import holders_of
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

_REDIS_SECONDS = 20.0
_VALUES = 512
_ROW_NAME = re.compile(rb".*:[0-9a-f]{16}(:[bs])?")
#: Keys and fields that name a holder, or a publisher.
_HOLDER = re.compile(rb"(?:.*:engine|blocks):([0-9]+)")
_PUBLISHER = re.compile(rb"(?:(?:.*:(?:publisher|history)|calls|first|health|drift):)?([0-9]+)")


class Inside:
    """The index of one group. Holders that are not live are left out."""

    def __init__(self, backend: Backend, tenant: str, block_size: int) -> None:
        self._backend = backend
        self._tenant = tenant
        self._block_size = block_size

    async def places(self, blocks: Sequence[tuple[Space, Tokens]]) -> list[set[Place]]:
        """Return the places of each block, which is named by its whole prefix."""
        client = RedisClient.open(self._backend.url, timeout_seconds=_REDIS_SECONDS)
        try:
            group, table = await self._read(Inspector(Store(client)))
            size = self._block_size
            pieces = [pack(_keys(space, prefix, size)[_head(prefix, size) :]) for space, prefix in blocks]
            found = await holders_of(client, group.entry, pieces, has_singles=table.has_singles)
        finally:
            await client.close()
        return [{_place(table, table.holders[each]) for each in ids[-1] if each in table.holders} for ids in found]

    async def counts(self) -> Counter[Place]:
        """Return how many blocks are at each place, in all rows of the group."""
        client = RedisClient.open(self._backend.url, timeout_seconds=_REDIS_SECONDS)
        try:
            group, table = await self._read(Inspector(Store(client)))
        finally:
            await client.close()
        counts: Counter[Place] = Counter()
        for shard in range(group.entry.shards):
            with self._admin(group, shard) as admin:
                for holder, blocks in _blocks(admin, keys.block_prefix(group.id, shard)).items():
                    if holder in table.holders:
                        counts[_place(table, table.holders[holder])] += blocks
        return counts

    async def leftovers(self) -> list[str]:
        """Return a line for each leftover of a holder that is neither live nor to be swept, and of a publisher that is
        gone."""
        client = RedisClient.open(self._backend.url, timeout_seconds=_REDIS_SECONDS)
        try:
            group, _ = await self._read(Inspector(Store(client)))
        finally:
            await client.close()
        holders, publishers = set[tuple[int, str]](), set[tuple[int, str]]()
        for shard in range(group.entry.shards):
            prefix = keys.block_prefix(group.id, shard)
            with self._admin(group, shard) as admin:
                blocks = _blocks(admin, prefix)
                holders |= {(holder, f"{count} blocks on shard {shard}") for holder, count in blocks.items()}
                for place, name in _names(admin, prefix):
                    for pattern, found in ((_HOLDER, holders), (_PUBLISHER, publishers)):
                        if match := pattern.fullmatch(name):
                            found.add((int(match[1]), f"{place} {name.decode()} on shard {shard}"))
        # Read shard 0 last: it gets each holder before any shard gets a block or a fence of that holder.
        with self._admin(group, 0) as admin:
            table = admin.hkeys(keys.holders(group.id))
            there = {int(name[10:]) for name in table if name.startswith(b"publisher:")}
            records = [admin.hgetall(keys.record(group.id, publisher)) for publisher in there]
            staged = [value for each in records for name, value in each.items() if name.startswith(b"staged:")]
            dead = admin.smembers(keys.dead(group.id))
        known = {int(each) for each in (*filter(bytes.isdigit, table), *staged, *dead)}
        lines = [f"holder {each}: {where}" for each, where in sorted(holders) if each not in known]
        return lines + [f"publisher {each}: {where}" for each, where in sorted(publishers) if each not in there]

    def _admin(self, group: InspectedGroup, shard: int) -> Redis:
        return self._backend.of(keys.fence(group.id, shard)).admin()

    async def _read(self, inspector: Inspector) -> tuple[InspectedGroup, HolderTable]:
        name = GroupName(self._tenant, MODEL_NAME)
        group = next(group for group in await inspector.groups() if group.name == name)
        table = await inspector.table(group)
        assert table is not None, f"{self._tenant} has no table"
        return group, table


def _blocks(admin: Redis, prefix: bytes) -> Counter[int]:
    """Return the number of blocks of each holder in all rows of a shard."""
    counts = Counter[int]()
    found = admin.scan_iter(prefix + b"*", count=1000, _type="string")
    names = sorted({name for name in found if _ROW_NAME.fullmatch(name)})
    for start in range(0, len(names), _VALUES):
        values: Any = admin.mget(names[start : start + _VALUES])
        for value in values:
            for holder, bitmap in parse(value or b"").holders.items():  # a row that has just been swept is None
                counts[holder] += bitmap.bit_count()
    return counts


def _names(admin: Redis, prefix: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the keys, except rows, that do not expire, and the fields that name holders or publishers, each with a
    description."""
    for name in {*admin.scan_iter(prefix + b"*", count=1000)}:
        if not _ROW_NAME.fullmatch(name) and admin.ttl(name) == -1:
            yield "key", name
    for key in (b"fence", b"entries", b"load"):
        fields: Any = admin.hkeys(prefix + key)
        yield from ((f"field of {key.decode()}", name) for name in fields)


def _place(table: HolderTable, holder: Holder) -> Place:
    return Place(holder.instance_id, table.publishers[holder.publisher].dp_rank, holder.dp_rank, holder.medium)


def _keys(space: Space, prefix: Tokens, block_size: int) -> list[int]:
    ns = namespace(space.lora_name or space.lora_id, space.salts)
    return [seq_hash ^ ns for seq_hash in extend(None, token_bytes(prefix), block_size)]


def _head(prefix: Tokens, block_size: int) -> int:
    """Return the depth of the head of the last block's piece."""
    last = len(prefix) // block_size - 1
    return last - last % PIECE_BLOCKS
