"""``waymark inspect block`` and ``POST /inspect/block``: which holders have the block with a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from waymark.base.errors import NotFound
from waymark.contract.inspections import BlockHolderRow, BlockRow, LiveBlockHolder
from waymark.domain.rows import Place, Row, parse_field
from waymark.domain.table import HolderTable
from waymark.inspection.holding import not_counted
from waymark.inspection.inspector import InspectedGroup, Inspector, group_text, places_that_begin_with
from waymark.store import keys
from waymark.store.places import read_row


async def find_block(inspector: Inspector, groups: Sequence[InspectedGroup], key: int) -> list[BlockRow]:
    """Return the rows of ``groups`` that list the block with this key. Raise ``NotFound`` if there is no such row."""
    search = Search(inspector, key)
    listed: list[BlockRow] = []
    for group in groups:
        table = await inspector.table(group)
        if table is not None:
            listed += [await _listed(inspector, group, table, key, value) for value in await search.run(group, table)]
    if listed:
        return listed
    names = ", ".join(group_text(group.name) for group in groups[:5])
    bound = "" if search.is_complete else f" among the first {ROWS_MAX} rows; give the first block of its prompt"
    raise NotFound(f"no holder has a block {key:016x} (key seq_hash XOR namespace) in {names}{bound}")


async def _listed(
    inspector: Inspector, group: InspectedGroup, table: HolderTable, key: int, value: FoundValue
) -> BlockRow:
    slot = value.row.keys.index(key)
    ids = [holder for holder, bitmap in sorted(value.row.holders.items()) if bitmap >> slot & 1]
    entries = await inspector.entries(group, value.place, ids)
    return BlockRow(
        tenant_id=group.name.tenant_id,
        model_name=group.name.model_name,
        row=group.key_of(value.place),
        slot=slot,
        depth=value.row.depths[slot],
        holders=tuple(
            BlockHolderRow(
                id=id_,
                engine_hash=None if entry is None else f"{entry.hash_of(slot, key):016x}",
                live=_live(table, id_),
            )
            for id_, entry in zip(ids, entries, strict=True)
        ),
    )


def _live(table: HolderTable, id_: int) -> LiveBlockHolder | None:
    holder = table.holders.get(id_)
    if holder is None:
        return None
    return LiveBlockHolder(
        instance_id=holder.instance_id,
        dp_rank=holder.dp_rank,
        medium=holder.medium,
        block_size=holder.block_size,
        scope=holder.scope,
        not_counted=not_counted(table, holder) or None,
    )


# Finds a block by its key alone: a row is found by its first block, and any other block only by looking.


#: The bound on rows to search, and the rows of one step.
ROWS_MAX = 65_536
_STEP_ROWS = 256


class FoundValue(NamedTuple):
    """A value that lists the block."""

    place: Place
    row: Row


class Search:
    """A search through the groups in turn, with one bound for all."""

    def __init__(self, inspector: Inspector, key: int) -> None:
        self._inspector = inspector
        self._key = key
        self._left = ROWS_MAX
        self.is_complete = True
        """Whether every row was searched."""

    async def run(self, group: InspectedGroup, table: HolderTable) -> list[FoundValue]:
        """Return the values that list the block: those that begin with it, or else the first one that a live holder
        has.
        """
        values = await self._listing(group, places_that_begin_with(self._key))
        if values:
            return values
        for holder in table.holders:
            for shard in range(group.entry.shards):
                values = await self._of_holder(group, keys.engine(group.id, shard, holder))
                if values or not self.is_complete:
                    return values
        return []

    async def _of_holder(self, group: InspectedGroup, engine: str) -> list[FoundValue]:
        cursor = None
        while cursor != 0:
            if self._left <= 0:
                self.is_complete = False
                return []
            cursor, fields = await self._inspector.client.hscan(engine, cursor or 0, _STEP_ROWS)
            self._left -= len(fields)
            values = await self._listing(group, [place for place in map(_place, fields) if place is not None])
            if values:
                return values
        return []

    async def _listing(self, group: InspectedGroup, places: list[Place]) -> list[FoundValue]:
        """Return the places whose row lists the block, each with its row."""
        rows = map(read_row, await self._inspector.values(group, places))
        return [
            FoundValue(place, row)
            for place, row in zip(places, rows, strict=True)
            if row is not None and self._key in row.keys and row.holders
        ]


def _place(field: bytes) -> Place | None:
    """Return the place that a field of an engine hash names; None for a mark or a count."""
    try:
        return parse_field(field)
    except ValueError:
        return None
