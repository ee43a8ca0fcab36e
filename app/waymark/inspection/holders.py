"""``waymark inspect holder`` and ``waymark inspect block``: what a holder id in a row means, and who has a block.

The contents of a holder are the number of its rows of each kind, and the slots of the first ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from waymark.base.errors import NotFound
from waymark.contract.inspections import (
    FIELDS_MAX,
    BlockHolderRow,
    BlockRow,
    HolderRow,
    HoldingsAnswer,
    HoldingsOfShard,
    LiveBlockHolder,
    PublisherOfHolder,
    RecordOfHolder,
    RowOfHolder,
)
from waymark.domain.names import Holder
from waymark.domain.rows import Place, Row, find_field_place, parse_field
from waymark.domain.table import HolderTable
from waymark.inspection.holding import not_counted
from waymark.inspection.inspector import InspectedGroup, Inspector, places_that_begin_with
from waymark.store import keys
from waymark.store.parsing import lenient_text
from waymark.store.places import read_row

#: The fields of an engine hash that one step reads.
_STEP_FIELDS = 256
#: The bound on rows to show.
SHOWN_MAX = 20

_KINDS = ("rows", "branch rows", "singles", "copies")


async def holdings(inspector: Inspector, group: InspectedGroup, holder_id: int) -> HoldingsAnswer:
    """Count a holder's contents, and look at its first rows."""
    engines = [keys.engine(group.id, shard, holder_id) for shard in range(group.entry.shards)]
    marks = await inspector.several(("HGET", engine, "applied") for engine in engines)
    shards = []
    places: list[Place] = []
    is_whole = True
    for engine, applied in zip(engines, marks, strict=True):
        fields = await _fields(inspector, engine)
        is_whole = is_whole and len(fields) < FIELDS_MAX
        counts = Counter(map(kind_of, fields))
        seq, _, ops = ("" if applied is None else lenient_text(applied)).partition(" ")
        rows, branch_rows, singles, copies = (counts[kind] for kind in _KINDS)
        shards.append(
            HoldingsOfShard(
                key=engine,
                rows=rows,
                branch_rows=branch_rows,
                singles=singles,
                copies=copies,
                applied_seq=seq or None,
                ops=ops,
            )
        )
        places += [parse_field(field) for field in fields if kind_of(field) in _KINDS[:3]]
    first_places = sorted(places, key=lambda place: place.field)[:SHOWN_MAX]
    held_rows = await _rows(inspector, group, holder_id, first_places)
    return HoldingsAnswer(shards=shards, is_whole=is_whole, rows=held_rows, more_rows=len(places) - len(first_places))


def kind_of(field: bytes) -> str:
    """Return the kind of a field of an engine hash: one of four, or ``""`` if it is neither a place nor a copy."""
    if field.startswith(b"*"):
        return "copies"
    place = find_field_place(field)
    if place is None:
        return ""
    return "singles" if place.is_single else "rows" if place.branch is None else "branch rows"


async def _fields(inspector: Inspector, engine: str) -> list[bytes]:
    """Read the fields of an engine hash, in steps and up to a bound; HSCAN may return one twice."""
    fields: dict[bytes, None] = {}
    cursor = None
    while cursor != 0 and len(fields) < FIELDS_MAX:
        cursor, portion = await inspector.client.hscan(engine, cursor or 0, _STEP_FIELDS)
        fields |= dict.fromkeys(portion)
    return list(fields)


async def _rows(
    inspector: Inspector, group: InspectedGroup, holder_id: int, places: Sequence[Place]
) -> list[RowOfHolder]:
    rows = []
    for place, value in zip(places, await inspector.values(group, places), strict=True):
        name, row = group.key_of(place), read_row(value)
        if row is None:
            note = "there is no such value" if value is None else "the value cannot be read"
            rows.append(RowOfHolder(row=name, blocks=None, slots="", note=note, is_bad=True))
            continue
        bitmap = row.holders.get(holder_id, 0)
        note = "marked: further blocks are in branch rows" if row.is_marked else ""
        if not bitmap:
            note = "the value does not name the holder"
        rows.append(RowOfHolder(row=name, blocks=bitmap.bit_count(), slots=slots_of(bitmap), note=note, is_bad=False))
    return rows


def slots_of(bitmap: int) -> str:
    """Return the slots of a bitmap, such as ``0-3 7``."""
    ranges = []
    slot = 0
    while bitmap >> slot:
        if not bitmap >> slot & 1:
            slot += 1
            continue
        first, rest = slot, ~(bitmap >> slot)
        slot += (rest & -rest).bit_length() - 1
        ranges.append(str(first) if slot == first + 1 else f"{first}-{slot - 1}")
    return " ".join(ranges)


async def find_holder(inspector: Inspector, groups: Sequence[InspectedGroup], holder_id: int) -> list[HolderRow]:
    """Return the holder in each of ``groups`` that knows the id. Raise ``NotFound`` if no group does."""
    result = []
    for group in groups:
        table = await inspector.table(group)
        (is_dead,) = await inspector.several([("SISMEMBER", keys.dead(group.id), holder_id)])
        holder = None if table is None else table.holders.get(holder_id)
        if table is None or (holder is None and not is_dead):
            continue
        record = None if holder is None else await _record(inspector, group, table, holder)
        contents = await holdings(inspector, group, holder_id)
        result.append(
            HolderRow(
                id=holder_id,
                tenant_id=group.name.tenant_id,
                model_name=group.name.model_name,
                group=group.id,
                record=record,
                holdings=contents,
            )
        )
    if result:
        return result
    names = ", ".join(group.name.text for group in groups[:5])
    raise NotFound(f"holder {holder_id} is unknown in {names}: its life has ended and was swept, or it never existed")


async def _record(inspector: Inspector, group: InspectedGroup, table: HolderTable, holder: Holder) -> RecordOfHolder:
    claims = [claim for claim in await inspector.claims(group.name) if claim.publisher == holder.publisher]
    return RecordOfHolder(
        **_facts(table, holder),
        backend_id=holder.backend_id,
        publishers=tuple(
            PublisherOfHolder(
                id=state.id,
                type=state.registration.kind,
                endpoint=state.registration.endpoint,
                status=state.status,
                watermark=state.watermark,
                lag_seconds=state.lag_seconds,
                worker=state.worker,
                last_error=state.last_error or None,
            )
            for state in await inspector.states(claims)
        ),
    )


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
    names = ", ".join(group.name.text for group in groups[:5])
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
    return LiveBlockHolder(**_facts(table, holder))


def _facts(table: HolderTable, holder: Holder) -> dict[str, Any]:
    """Return the fields that every view of a holder has."""
    names = ("instance_id", "dp_rank", "medium", "block_size", "scope")
    return {name: getattr(holder, name) for name in names} | {"not_counted": not_counted(table, holder) or None}


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
        """Return the values that list the block. If none begins with it, return the first one found among live
        holders.
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
            values = await self._listing(group, [place for place in map(find_field_place, fields) if place is not None])
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
