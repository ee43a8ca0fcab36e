"""Finds a block by its key alone: a row is found by its first block, and any other block only by looking."""

from __future__ import annotations

from typing import NamedTuple

from waymark.domain.rows import Place, Row, parse_field
from waymark.domain.table import HolderTable
from waymark.inspection.inspector import InspectedGroup, Inspector, places_that_begin_with
from waymark.store import keys
from waymark.store.places import read_row

#: Rows that are looked at, and how many at once.
ROWS_MAX = 65_536
_STEP_ROWS = 256


class FoundValue(NamedTuple):
    """A value that lists the block."""

    place: Place
    row: Row


class Search:
    """A search in one group after the other, with one bound for all of them."""

    def __init__(self, inspector: Inspector, key: int) -> None:
        self._inspector = inspector
        self._key = key
        self._left = ROWS_MAX
        self.is_complete = True
        """Whether every row was searched."""

    async def run(self, group: InspectedGroup, table: HolderTable) -> list[FoundValue]:
        """The values that list the block: those that begin with it, or else the first one that a live holder has."""
        found = await self._listing(group, places_that_begin_with(self._key))
        if found:
            return found
        for holder in table.holders:
            for shard in range(group.entry.shards):
                found = await self._of_holder(group, keys.engine(group.id, shard, holder))
                if found or not self.is_complete:
                    return found
        return []

    async def _of_holder(self, group: InspectedGroup, engine: str) -> list[FoundValue]:
        cursor = None
        while cursor != 0:
            if self._left <= 0:
                self.is_complete = False
                return []
            cursor, fields = await self._inspector.client.hscan(engine, cursor or 0, _STEP_ROWS)
            self._left -= len(fields)
            found = await self._listing(group, [place for place in map(_place, fields) if place is not None])
            if found:
                return found
        return []

    async def _listing(self, group: InspectedGroup, places: list[Place]) -> list[FoundValue]:
        """The places whose row lists the block, each with its row."""
        rows = map(read_row, await self._inspector.values(group, places))
        return [
            FoundValue(place, row)
            for place, row in zip(places, rows, strict=True)
            if row is not None and self._key in row.keys and row.holders
        ]


def _place(field: bytes) -> Place | None:
    """The place that a field of an engine hash names; None for a mark or a count."""
    try:
        return parse_field(field)
    except ValueError:
        return None
