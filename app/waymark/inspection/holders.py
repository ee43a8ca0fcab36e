"""``waymark inspect holder`` and ``POST /inspect/holder``: the meaning of a holder id in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waymark.base.errors import NotFound
from waymark.domain.engines import EngineKind, Scope
from waymark.domain.names import Holder
from waymark.domain.status import StreamStatus
from waymark.domain.table import HolderTable
from waymark.inspection.holding import not_counted
from waymark.inspection.holdings import HeldRow, HolderContents, ShardHoldings, holdings
from waymark.inspection.inspector import InspectedGroup, Inspector, group_text
from waymark.store import keys


@dataclass(frozen=True, slots=True)
class HolderPublisher:
    """The registered publisher of a holder, and how far its stream is."""

    id: int
    type: EngineKind
    endpoint: str | None
    status: StreamStatus
    watermark: int | None
    lag_seconds: float | None
    worker: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class HolderRecord:
    """A life that goes on."""

    instance_id: str
    dp_rank: int
    medium: str
    block_size: int
    backend_id: str
    scope: Scope
    not_counted: str | None
    """The reason why queries do not count it; None if they do."""
    publishers: tuple[HolderPublisher, ...]
    """The publisher of the holder; empty if it is not registered any more."""


@dataclass(frozen=True, slots=True)
class KnownHolder:
    """A holder, and the group that it belongs to."""

    id: int
    tenant_id: str
    model_name: str
    group: int
    record: HolderRecord | None
    """The holder's record; None if its life has ended, and its entries are being swept."""
    holdings: HolderContents


async def find_holder(inspector: Inspector, groups: Sequence[InspectedGroup], holder_id: int) -> list[KnownHolder]:
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
        result.append(KnownHolder(holder_id, group.name.tenant_id, group.name.model_name, group.id, record, contents))
    if result:
        return result
    names = ", ".join(group_text(group.name) for group in groups[:5])
    raise NotFound(f"holder {holder_id} is unknown in {names}: its life has ended and was swept, or it never existed")


async def _record(inspector: Inspector, group: InspectedGroup, table: HolderTable, holder: Holder) -> HolderRecord:
    claims = [claim for claim in await inspector.claims(group.name) if claim.publisher == holder.publisher]
    return HolderRecord(
        instance_id=holder.instance_id,
        dp_rank=holder.dp_rank,
        medium=holder.medium,
        block_size=holder.block_size,
        backend_id=holder.backend_id,
        scope=holder.scope,
        not_counted=not_counted(table, holder) or None,
        publishers=tuple(
            HolderPublisher(
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


def of_json(holders: Sequence[Mapping[str, Any]]) -> list[KnownHolder]:
    """Read holders that ``asdict`` has written."""
    return [
        KnownHolder(**{**holder, "record": _record_of(holder["record"]), "holdings": _holdings_of(holder["holdings"])})
        for holder in holders
    ]


def _record_of(record: Mapping[str, Any] | None) -> HolderRecord | None:
    if record is None:
        return None
    publishers = tuple(
        HolderPublisher(
            **{**publisher, "type": EngineKind(publisher["type"]), "status": StreamStatus(publisher["status"])}
        )
        for publisher in record["publishers"]
    )
    return HolderRecord(**{**record, "publishers": publishers})


def _holdings_of(contents: Mapping[str, Any]) -> HolderContents:
    shards = tuple(ShardHoldings(**shard) for shard in contents["shards"])
    return HolderContents(**{**contents, "shards": shards, "rows": tuple(HeldRow(**row) for row in contents["rows"])})
