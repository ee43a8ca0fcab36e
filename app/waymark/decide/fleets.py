"""The targets of each group, made once from the table of its holders."""

from __future__ import annotations

from collections.abc import Iterator

from waymark.decide.fleet import Fleet
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.store.reader import Reader

#: Groups whose targets are kept.
_FLEETS_MAX = 1024


class Fleets:
    def __init__(self, reader: Reader, deadline_seconds: float) -> None:
        self._reader = reader
        self._deadline_seconds = deadline_seconds
        self._fleets: dict[GroupName, Fleet] = {}

    async def newest(self, group: GroupName) -> Fleet | None:
        """Return the fleet by the current table, or None if the group has no registration."""
        table = await self._reader.table(group, deadline_seconds=self._deadline_seconds)
        return None if table is None else self.of(group, table)

    def at_hand(self, group: GroupName) -> Fleet | None:
        """Return the fleet by the table that the last lookup in the group has used, or None without such a table."""
        table = self._reader.table_at_hand(group)
        return None if table is None else self.of(group, table)

    def of(self, group: GroupName, table: HolderTable) -> Fleet:
        fleet = self._fleets.get(group)
        if fleet is None or fleet.table is not table:
            if fleet is None and len(self._fleets) >= _FLEETS_MAX:
                self._fleets.clear()
            old_fleet, fleet = fleet, Fleet(table)
            if old_fleet is not None and old_fleet.names == fleet.names:
                fleet.rings = old_fleet.rings  # they depend on the names alone, and take long to build
            self._fleets[group] = fleet
        return fleet

    def __iter__(self) -> Iterator[tuple[GroupName, Fleet]]:
        """Yield the cached fleets, each with its group."""
        return iter(self._fleets.items())

    def clear(self) -> None:
        self._fleets.clear()
