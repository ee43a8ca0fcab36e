"""``waymark inspect holder`` and ``POST /inspect/holder``: the meaning of a holder id in a row."""

from __future__ import annotations

from collections.abc import Sequence

from waymark.base.errors import NotFound
from waymark.contract.inspections import HolderRow, PublisherOfHolder, RecordOfHolder
from waymark.domain.names import Holder
from waymark.domain.table import HolderTable
from waymark.inspection.holding import not_counted
from waymark.inspection.holdings import holdings
from waymark.inspection.inspector import InspectedGroup, Inspector, group_text
from waymark.store import keys


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
