"""``waymark inspect holder`` and ``POST /inspect/holder``: the meaning of a holder id in a row, and its contents.

The contents are the number of rows of each kind, and the slots of the first ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from waymark.base.errors import NotFound
from waymark.contract.inspections import (
    HolderRow,
    HoldingsAnswer,
    HoldingsOfShard,
    PublisherOfHolder,
    RecordOfHolder,
    RowOfHolder,
)
from waymark.domain.names import Holder
from waymark.domain.rows import Place, parse_field
from waymark.domain.table import HolderTable
from waymark.inspection.holding import not_counted
from waymark.inspection.inspector import InspectedGroup, Inspector, group_text
from waymark.store import keys
from waymark.store.parsing import lenient_text
from waymark.store.places import read_row

#: The bound on fields of an engine hash to read, and the fields of one step.
FIELDS_MAX = 65_536
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
    try:
        place = parse_field(field)
    except ValueError:
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
    names = ", ".join(group_text(group.name) for group in groups[:5])
    raise NotFound(f"holder {holder_id} is unknown in {names}: its life has ended and was swept, or it never existed")


async def _record(inspector: Inspector, group: InspectedGroup, table: HolderTable, holder: Holder) -> RecordOfHolder:
    claims = [claim for claim in await inspector.claims(group.name) if claim.publisher == holder.publisher]
    return RecordOfHolder(
        instance_id=holder.instance_id,
        dp_rank=holder.dp_rank,
        medium=holder.medium,
        block_size=holder.block_size,
        backend_id=holder.backend_id,
        scope=holder.scope,
        not_counted=not_counted(table, holder) or None,
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
