"""Gauges of engines, a moment old: read for the groups whose decisions need them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from waymark.domain.gauges import Gauges
from waymark.errors import StoreUnavailable
from waymark.store.gauges import EngineGauges
from waymark.store.reservations import Begin

#: Readings that are older are read again, behind the decision; beyond the second the decision waits for it.
_FRESH_SECONDS = 0.25
_OLD_SECONDS = 1.0
_GROUPS_MAX = 1024


@dataclass(slots=True)
class _Group:
    gauges: Mapping[int, Gauges] = field(default_factory=dict)
    read_at: float = float("-inf")
    reading: asyncio.Task[None] | None = None


class GaugeReadings:
    """What engines report, by group and publisher. A reading that Redis does not have any more does not count."""

    def __init__(self, gauges: EngineGauges, begin: Begin) -> None:
        self._gauges = gauges
        self._begin = begin
        self._groups: dict[int, _Group] = {}

    async def of(self, group_id: int, publishers: Sequence[int]) -> Mapping[int, Gauges]:
        """The readings of these publishers; none where Redis does not tell."""
        now = asyncio.get_running_loop().time()
        group = self._groups.get(group_id)
        if group is None:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.pop(next(iter(self._groups)))
            group = self._groups[group_id] = _Group()
        if now - group.read_at > _FRESH_SECONDS and (group.reading is None or group.reading.done()):
            group.reading = self._begin(self._read(group, group_id, publishers))
        if now - group.read_at > _OLD_SECONDS and group.reading is not None:
            await asyncio.shield(group.reading)
        return group.gauges

    def clear(self) -> None:
        """Redis came back empty: ids stand for something else."""
        self._groups.clear()

    async def _read(self, group: _Group, group_id: int, publishers: Sequence[int]) -> None:
        now = asyncio.get_running_loop().time()
        try:
            group.gauges = await self._gauges.read(group_id, publishers)
        except StoreUnavailable:
            group.gauges = {}  # the decision itself says that Redis is away
        group.read_at = now
