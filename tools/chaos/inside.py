"""The places of single blocks by the rows in Redis, also of blocks that no query reaches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

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


class Inside:
    """One group. Holders that are not live are left out."""

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
        """Return how many blocks are at each place, in all rows of the group, whatever their keys."""
        client = RedisClient.open(self._backend.url, timeout_seconds=_REDIS_SECONDS)
        try:
            group, table = await self._read(Inspector(Store(client)))
        finally:
            await client.close()
        counts: Counter[Place] = Counter()
        for shard in range(group.entry.shards):
            prefix = keys.block_prefix(group.id, shard).decode()
            with self._backend.of(prefix).admin() as admin:
                found = admin.scan_iter(f"{prefix}*", count=1000, _type="string")
                names = sorted({name for name in found if _ROW_NAME.fullmatch(name)})
                for start in range(0, len(names), _VALUES):
                    for value in admin.mget(names[start : start + _VALUES]):
                        row = parse(value or b"")  # a row that has just been swept is None
                        for each in row.holders.keys() & table.holders.keys():
                            counts[_place(table, table.holders[each])] += row.holders[each].bit_count()
        return counts

    async def _read(self, inspector: Inspector) -> tuple[InspectedGroup, HolderTable]:
        name = GroupName(self._tenant, MODEL_NAME)
        group = next(group for group in await inspector.groups() if group.name == name)
        table = await inspector.table(group)
        assert table is not None, f"{self._tenant} has no table"
        return group, table


def _place(table: HolderTable, holder: Holder) -> Place:
    return Place(holder.instance_id, table.publishers[holder.publisher].dp_rank, holder.dp_rank, holder.medium)


def _keys(space: Space, prefix: Tokens, block_size: int) -> list[int]:
    ns = namespace(space.lora_name or space.lora_id, space.salts)
    return [seq_hash ^ ns for seq_hash in extend(None, token_bytes(prefix), block_size)]


def _head(prefix: Tokens, block_size: int) -> int:
    """Return the depth of the head of the last block's piece."""
    last = len(prefix) // block_size - 1
    return last - last % PIECE_BLOCKS
