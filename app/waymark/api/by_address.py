"""Rows by address: the table of a group as if each engine were named by the address that requests are sent to."""

from __future__ import annotations

from dataclasses import replace

from waymark.domain.match import Walk
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable

#: Groups whose table is kept.
_GROUPS_MAX = 256


class AddressTables:
    """Tables by address, each made once of a group's current table."""

    def __init__(self) -> None:
        self._made: dict[GroupName, tuple[HolderTable, HolderTable]] = {}

    def walk(self, table: HolderTable, walk: Walk) -> Walk:
        """A walk over the same values with addresses in place of instances. Engines without an address have no row."""
        made = self._made.get(table.group)
        if made is None or made[0] is not table:
            if len(self._made) >= _GROUPS_MAX:
                self._made.clear()
            made = self._made[table.group] = table, _by_address(table)
        again = Walk(made[1].view(walk.view.block_size))
        again.feed(walk.values)
        return again

    def clear(self) -> None:
        self._made.clear()


def _by_address(table: HolderTable) -> HolderTable:
    addresses = {publisher: target.address for publisher, target in table.targets.items()}
    publishers = {
        number: row if row.scope == "shared" else replace(row, instance_id=address)
        for number, row in table.publishers.items()
        if (address := addresses.get(number) or (row.scope == "shared" and row.instance_id))
    }
    holders = {
        number: holder if holder.scope == "shared" else replace(holder, instance_id=row.instance_id)
        for number, holder in table.holders.items()
        if (row := publishers.get(holder.publisher)) is not None
    }
    return HolderTable(table.version, table.group, publishers, holders, table.incarnation)
