"""``waymark inspect block`` and ``POST /inspect/block``: which holders have the block with a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waymark.base.errors import NotFound
from waymark.domain.engines import Scope
from waymark.domain.table import HolderTable
from waymark.inspection.holding import not_counted
from waymark.inspection.inspector import InspectedGroup, Inspector, group_text
from waymark.inspection.search import ROWS_MAX, FoundValue, Search


@dataclass(frozen=True, slots=True)
class LiveHolder:
    """The meaning of a holder id whose life goes on."""

    instance_id: str
    dp_rank: int
    medium: str
    block_size: int
    scope: Scope
    not_counted: str | None
    """The reason why queries do not count it; None if they do."""


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """A holder that the block's row names."""

    id: int
    engine_hash: str | None
    """The engine's own hash of the block, in 16 hex digits."""
    live: LiveHolder | None
    """The live holder; None where its life has ended and it is not swept yet."""


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A row that lists the block."""

    tenant_id: str
    model_name: str
    row: str
    """The name of its key in Redis."""
    slot: int
    depth: int
    """The block's position within the piece of the prompt that the row is for."""
    holders: tuple[BlockHolder, ...]


async def find_block(inspector: Inspector, groups: Sequence[InspectedGroup], key: int) -> list[ListedBlock]:
    """The rows of ``groups`` that list the block with this key; ``NotFound`` where none does."""
    search = Search(inspector, key)
    listed: list[ListedBlock] = []
    for group in groups:
        table = await inspector.table(group)
        if table is not None:
            listed += [await _listed(inspector, group, table, key, found) for found in await search.run(group, table)]
    if listed:
        return listed
    names = ", ".join(group_text(group.name) for group in groups[:5])
    bound = "" if search.is_complete else f" among the first {ROWS_MAX} rows; give the first block of its prompt"
    raise NotFound(f"no holder has a block {key:016x} (key seq_hash XOR namespace) in {names}{bound}")


async def _listed(
    inspector: Inspector, group: InspectedGroup, table: HolderTable, key: int, found: FoundValue
) -> ListedBlock:
    slot = found.row.keys.index(key)
    ids = [holder for holder, bitmap in sorted(found.row.holders.items()) if bitmap >> slot & 1]
    entries = await inspector.entries(group, found.place, ids)
    return ListedBlock(
        tenant_id=group.name.tenant_id,
        model_name=group.name.model_name,
        row=group.key_of(found.place),
        slot=slot,
        depth=found.row.depths[slot],
        holders=tuple(
            BlockHolder(id_, None if entry is None else f"{entry.hash_of(slot, key):016x}", _live(table, id_))
            for id_, entry in zip(ids, entries, strict=True)
        ),
    )


def _live(table: HolderTable, id_: int) -> LiveHolder | None:
    holder = table.holders.get(id_)
    if holder is None:
        return None
    return LiveHolder(
        instance_id=holder.instance_id,
        dp_rank=holder.dp_rank,
        medium=holder.medium,
        block_size=holder.block_size,
        scope=holder.scope,
        not_counted=not_counted(table, holder) or None,
    )


def of_json(rows: Sequence[Mapping[str, Any]]) -> list[ListedBlock]:
    """What ``asdict`` made of each."""
    return [ListedBlock(**{**row, "holders": tuple(map(_holder, row["holders"]))}) for row in rows]


def _holder(each: Mapping[str, Any]) -> BlockHolder:
    return BlockHolder(**{**each, "live": None if each["live"] is None else LiveHolder(**each["live"])})
