"""Finds a block by its key alone: a row is found by its first block, and any other block only by looking."""

from __future__ import annotations

from typing import NamedTuple

from waymark.domain.rows import Place, Row, parse_field
from waymark.domain.table import HolderTable
from waymark.inspection.look import Group, Look, places_that_begin_with
from waymark.store import keys
from waymark.store.places import read_row

#: Rows that are looked at, and how many at once.
ROWS_MAX = 65_536
_STEP_ROWS = 256


class Found(NamedTuple):
    """A value that lists the block."""

    place: Place
    row: Row


class Search:
    """A search in one group."""

    def __init__(self, look: Look, group: Group, table: HolderTable, key: int) -> None:
        self._look = look
        self._group = group
        self._table = table
        self._key = key
        self._left = ROWS_MAX
        self.is_complete = True
        """No row was left out."""

    async def run(self) -> list[Found]:
        """The values that list the block: those that begin with it, or else the first one that a live holder has."""
        found = await self._listing(places_that_begin_with(self._key))
        if found:
            return found
        for holder in self._table.holders:
            for shard in range(self._group.entry.shards):
                found = await self._of_holder(keys.engine(self._group.id, shard, holder))
                if found or not self.is_complete:
                    return found
        return []

    async def _of_holder(self, engine: str) -> list[Found]:
        cursor = None
        while cursor != 0:
            if self._left <= 0:
                self.is_complete = False
                return []
            cursor, fields = await self._look.client.hscan(engine, cursor or 0, _STEP_ROWS)
            self._left -= len(fields)
            found = await self._listing([place for place in map(_place, fields) if place is not None])
            if found:
                return found
        return []

    async def _listing(self, places: list[Place]) -> list[Found]:
        """Those of ``places`` whose value lists the block."""
        rows = map(read_row, await self._look.values(self._group, places))
        return [
            Found(place, row)
            for place, row in zip(places, rows, strict=True)
            if row is not None and self._key in row.keys and row.holders
        ]


def _place(field: bytes) -> Place | None:
    """The place that a field of an engine hash names; None for a mark or a count."""
    try:
        return parse_field(field)
    except ValueError:
        return None
