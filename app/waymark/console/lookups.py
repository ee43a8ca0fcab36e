"""The small inspections: one block, one holder, one namespace."""

from __future__ import annotations

from collections.abc import Sequence

from waymark.console.holdings import holdings
from waymark.console.screen import Grid, Part, joined, text
from waymark.console.search import ROWS_MAX, Found, Search
from waymark.console.status_view import STATUS_STYLE, seconds_text
from waymark.domain.hashing import namespace
from waymark.domain.names import Adapter
from waymark.domain.table import HolderTable
from waymark.errors import NotFound
from waymark.inspection.holding import not_counted
from waymark.inspection.look import Group, Look, shown
from waymark.store import keys


async def block(look: Look, groups: Sequence[Group], key: int) -> list[Part]:
    """Who has the block with this key, in each of ``groups``; ``NotFound`` where none knows it."""
    drawn: list[Part] = []
    is_complete = True
    for group in groups:
        table = await look.table(group)
        if table is None:
            continue
        search = Search(look, group, table, key)
        for found in await search.run():
            drawn += await _found(look, group, table, key, found)
        is_complete = is_complete and search.is_complete
    if not drawn:
        names = ", ".join(shown(group.name) for group in groups[:5])
        bound = "" if is_complete else f" among the first {ROWS_MAX} rows; give the first block of its prompt instead"
        raise NotFound(f"no holder has a block {key:016x} (key seq_hash XOR namespace) in {names}{bound}")
    return drawn


async def _found(look: Look, group: Group, table: HolderTable, key: int, found: Found) -> list[Part]:
    """One value that lists the block, and its holders."""
    slot = found.row.keys.index(key)
    name = group.key_of(found.place)
    where = f"slot {slot}, depth {found.row.depths[slot]} in its piece"
    drawn: list[Part] = [joined(text(name, "bold"), f" has the block in {where}, a block of {shown(group.name)}")]
    rows = []
    holders = [holder for holder, bitmap in sorted(found.row.holders.items()) if bitmap >> slot & 1]
    entries = await look.entries(group, found.place, holders)
    for holder_id, entry in zip(holders, entries, strict=True):
        hashed = "" if entry is None else f"{entry.hash_of(slot, key):016x}"
        holder = table.holders.get(holder_id)
        if holder is None:
            state = text("ended, to be swept", "yellow")
            rows.append((text(holder_id), text(""), text(""), text(""), text(""), text(hashed), state))
            continue
        note = not_counted(table, holder)
        rows.append(
            (
                text(holder_id),
                text(holder.instance_id + (" (pool)" if holder.scope == "shared" else "")),
                text(holder.dp_rank),
                text(holder.medium),
                text(holder.block_size),
                text(hashed),
                text(note or "live", "bold red" if note else "green"),
            )
        )
    head = ("HOLDER", "INSTANCE", "RANK", "MEDIUM", "BLOCK SIZE", "ENGINE HASH", "STATE")
    drawn.append(Grid(head, rows, frozenset({"HOLDER", "RANK", "BLOCK SIZE"})))
    return drawn


async def holder(look: Look, groups: Sequence[Group], holder_id: int) -> list[Part]:
    """A holder's record, its publisher, and what it has, in each of ``groups`` that knows the id."""
    drawn: list[Part] = []
    for group in groups:
        table = await look.table(group)
        (is_dead,) = await look.several([("SISMEMBER", keys.dead(group.id), holder_id)])
        record = None if table is None else table.holders.get(holder_id)
        if table is None or (record is None and not is_dead):
            continue
        drawn.append(joined(text(f"holder {holder_id}", "bold"), f" of {shown(group.name)}, group {group.id}"))
        if record is None:
            drawn.append(text("its life has ended; its entries are being swept", "yellow"))
        else:
            note = not_counted(table, record)
            drawn.append(
                joined(
                    f"{record.instance_id}, rank {record.dp_rank}, {record.medium}, blocks of {record.block_size} "
                    f"tokens, backend {record.backend_id}, scope {record.scope}: ",
                    text(note or "live", "bold red" if note else "green"),
                )
            )
            drawn += await _publisher(look, group, record.publisher)
        drawn += await holdings(look, group, holder_id)
    if not drawn:
        names = ", ".join(shown(group.name) for group in groups[:5])
        raise NotFound(
            f"holder {holder_id} is unknown in {names}: its life has ended and was swept, or it never existed"
        )
    return drawn


async def _publisher(look: Look, group: Group, publisher: int) -> list[Part]:
    states = await look.states([claim for claim in await look.claims(group.name) if claim.publisher == publisher])
    return [
        joined(
            f"publisher {publisher}: {state.registration.kind} at {state.registration.endpoint or 'HTTP'}, ",
            text(state.status, STATUS_STYLE.get(state.status, "")),
            f", watermark {'none' if state.watermark is None else state.watermark}"
            + ("" if state.lag_seconds is None else f", lag {seconds_text(state.lag_seconds)}")
            + (f", worker {state.worker}" if state.worker else "")
            + (f": {state.last_error}" if state.last_error else ""),
        )
        for state in states
    ]


def of_namespace(adapter: Adapter, salts: Sequence[str], key: int | None) -> list[Part]:
    """The number, and what becomes of a block's key by it; ``key``: a seq_hash."""
    ns = namespace(adapter, salts)
    drawn: list[Part] = [joined("namespace ", text(f"{ns:016x}", "bold"), f", {ns} in decimal")]
    if not ns:
        drawn.append(text("the base model without salts: a block's key is its seq_hash itself"))
    elif key is None:
        drawn.append(text(f"a block's key is its seq_hash XOR {ns:016x} (--seq-hash shows it for one)"))
    if key is not None:
        drawn.append(text(f"seq_hash {key:016x} XOR namespace {ns:016x} = key {key ^ ns:016x}"))
    return drawn
