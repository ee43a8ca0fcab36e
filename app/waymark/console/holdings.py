"""What a holder has: how many rows of each kind, and of the first of them which slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from waymark.console.screen import Grid, Part, text
from waymark.domain.rows import Place, parse_field
from waymark.inspection.look import Group, Look
from waymark.store import keys
from waymark.store.parsing import lenient_text
from waymark.store.places import read_row

#: Fields of an engine hash that are read, and how many at once.
FIELDS_MAX = 65_536
_STEP_FIELDS = 256
#: Rows that are shown.
SHOWN_MAX = 20

_KINDS = ("rows", "branch rows", "singles", "copies")


async def holdings(look: Look, group: Group, holder_id: int) -> list[Part]:
    """A line for each shard, and one for each of the first rows, by name."""
    engines = [keys.engine(group.id, shard, holder_id) for shard in range(group.entry.shards)]
    marks = await look.several(("HGET", engine, "applied") for engine in engines)
    lines = []
    places: list[Place] = []
    is_whole = True
    for engine, applied in zip(engines, marks, strict=True):
        fields = await _fields(look, engine)
        is_whole = is_whole and len(fields) < FIELDS_MAX
        found = Counter(map(kind_of, fields))
        seq, _, ops = ("" if applied is None else lenient_text(applied)).partition(" ")
        counts = [text(found[kind]) for kind in _KINDS]
        lines.append((text(engine), *counts, text(seq or "none"), text(ops)))
        places += [parse_field(field) for field in fields if kind_of(field) in _KINDS[:3]]
    head = ("KEY", *(kind.upper() for kind in _KINDS), "APPLIED SEQ", "OPS OF IT")
    drawn: list[Part] = [Grid(head, lines, frozenset(head[1:]))]
    if not is_whole:
        drawn.append(text(f"only the first {FIELDS_MAX:,} fields of a key are counted", "yellow"))
    return drawn + await _places(look, group, holder_id, sorted(places, key=lambda place: place.field))


def kind_of(field: bytes) -> str:
    """What a field of an engine hash is for: one of four kinds, or ``""`` for what is neither a place nor a copy."""
    if field.startswith(b"*"):
        return "copies"
    try:
        place = parse_field(field)
    except ValueError:
        return ""
    return "singles" if place.is_single else "rows" if place.branch is None else "branch rows"


async def _fields(look: Look, engine: str) -> list[bytes]:
    """The fields of an engine hash, in steps and up to a bound; HSCAN may name one twice."""
    fields: dict[bytes, None] = {}
    cursor = None
    while cursor != 0 and len(fields) < FIELDS_MAX:
        cursor, found = await look.client.hscan(engine, cursor or 0, _STEP_FIELDS)
        fields |= dict.fromkeys(found)
    return list(fields)


async def _places(look: Look, group: Group, holder_id: int, places: Sequence[Place]) -> list[Part]:
    some = places[:SHOWN_MAX]
    lines = []
    for place, value in zip(some, await look.values(group, some), strict=True):
        row = read_row(value)
        if row is None:
            state = "there is no such value" if value is None else "the value cannot be read"
            lines.append((text(group.key_of(place)), text(""), text(""), text(state, "bold red")))
            continue
        bitmap = row.holders.get(holder_id, 0)
        state = "marked: further blocks are in branch rows" if row.is_marked else ""
        if not bitmap:
            state = "the value does not name the holder"
        lines.append((text(group.key_of(place)), text(bitmap.bit_count()), text(slots_of(bitmap)), text(state)))
    drawn: list[Part] = [Grid(("ROW", "BLOCKS", "SLOTS", "STATE"), lines, frozenset({"BLOCKS"}))] if lines else []
    if len(places) > len(some):
        drawn.append(text(f"and {len(places) - len(some):,} more"))
    return drawn


def slots_of(bitmap: int) -> str:
    """The slots of a bitmap, such as ``0-3 7``."""
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
