"""Loads of groups, a moment old: read in the background for the groups that decisions are made in.

A group with requests is read again as often as the settings say. A group without new requests is read every second
while old ones are under way in it, so that overdue reservations end in time, and then not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.decide.group_loads import GroupLoads
from waymark.store.background import StartTask
from waymark.store.reservations import OVERDUE_MAX, Load, Reservations

log = logging.getLogger(__name__)

#: How long after the last decision a group is read as often as loads may be old.
_ASKED_SECONDS = 2.0
#: How often overdue reservations are looked for, and idle groups read.
_OVERDUE_SECONDS = 1.0
#: How often all loads are read, and not only those that have changed: a Redis that has taken over may lack the last
#: changes of the one before, and nothing says so.
_WHOLE_SECONDS = 10.0
#: The bound on groups to read; beyond it the one not used for longest is forgotten.
_GROUPS_MAX = 1024


@dataclass(slots=True)
class _GroupState:
    loads: GroupLoads = field(default_factory=GroupLoads)
    read_at: float = float("-inf")
    asked_at: float = float("-inf")
    swept_at: float = float("-inf")
    whole_at: float = float("-inf")
    """When all loads were read."""
    reading: asyncio.Task[None] | None = None
    keeping: asyncio.Task[None] | None = None


class Loads:
    """The load of every target, by group. It is at most ``seconds`` old; 0: it is read for each decision."""

    def __init__(self, reservations: Reservations, begin: StartTask, seconds: float, metrics: Metrics) -> None:
        self._begin_work = begin
        self._reservations = reservations
        self._seconds = seconds
        self._metrics = metrics
        self._groups: dict[int, _GroupState] = {}
        metrics.reservations.set_function(self._under_way)

    def at_hand(self, group_id: int) -> Mapping[int, Load] | None:
        """Return the loads of a group if they are fresh, and keep them so; else ``of`` reads them."""
        group = self._groups.get(group_id)
        if group is None or group.keeping is None or group.keeping.done() or self._seconds == 0:
            return None
        now = asyncio.get_running_loop().time()
        if now - group.read_at > self._seconds:
            return None
        group.asked_at = now
        return group.loads

    async def of(self, group_id: int) -> Mapping[int, Load]:
        """Return the loads of a group, by publisher. Raise StoreUnavailable if they are too old and Redis is
        unavailable.
        """
        loop = asyncio.get_running_loop()
        group = self._groups.get(group_id) or self._begin(group_id)
        group.asked_at = loop.time()
        if self._seconds == 0 or loop.time() - group.read_at > self._seconds:
            if group.reading is None or group.reading.done() or self._seconds == 0:
                group.reading = self._begin_work(self._read(group_id, group))
            await asyncio.shield(group.reading)  # others may wait for it, too
        if group.keeping is None or group.keeping.done():
            group.keeping = self._begin_work(self._keep(group_id, group))
        return group.loads

    def known(self, group_id: int) -> Mapping[int, Load]:
        """Return the loads of a group as last read, however long ago."""
        group = self._groups.get(group_id)
        return {} if group is None else group.loads

    def left_out(self, group_id: int) -> frozenset[int]:
        """Return the publishers of a group that decisions leave out now, by the loads as last read."""
        group = self._groups.get(group_id)
        return frozenset() if group is None else group.loads.left_out(self._reservations.now_ms())

    def drifts(self, group_id: int) -> Mapping[int, float]:
        """The targets of a group that deliver less than is expected of them, and the share that is missing."""
        group = self._groups.get(group_id)
        return {} if group is None else group.loads.drifts(self._reservations.now_ms())

    def saw(self, group_id: int, publisher: int, load: Load) -> None:
        """Note a target's load after a decision of this replica."""
        group = self._groups.get(group_id)
        if group is not None:
            group.loads.put(publisher, load)

    def released(self, group_id: int, publisher: int, tokens: int, requests: int, context: int) -> None:
        """Note the rest of a target's load after the end of a request: the next decision may come before the next
        reading.
        """
        load = self.known(group_id).get(publisher)
        if load is not None:
            self.saw(group_id, publisher, load._replace(tokens=tokens, requests=requests, context=context))

    def clear(self) -> None:
        """Forget all ids, because Redis came back empty and uses them for other objects."""
        for group in self._groups.values():
            if group.keeping is not None:
                group.keeping.cancel()
        self._groups.clear()

    def _begin(self, group_id: int) -> _GroupState:
        if len(self._groups) >= _GROUPS_MAX:
            oldest = min(self._groups, key=lambda each: self._groups[each].asked_at)
            keeping = self._groups.pop(oldest).keeping
            if keeping is not None:
                keeping.cancel()
        group = self._groups[group_id] = _GroupState()
        return group

    def _under_way(self) -> float:
        return sum(load.requests for group in self._groups.values() for load in group.loads.values())

    async def _read(self, group_id: int, group: _GroupState) -> None:
        now = asyncio.get_running_loop().time()
        if now - group.swept_at >= _OVERDUE_SECONDS:
            ended = OVERDUE_MAX
            while ended == OVERDUE_MAX:
                ended = await self._reservations.end_overdue(group_id)
                self._metrics.reservations_expired.inc(ended)
            group.swept_at = now
        # Read when it was asked for, not when it came.
        now = asyncio.get_running_loop().time()
        loads = group.loads
        is_whole = now - group.whole_at >= _WHOLE_SECONDS
        put = loads.take_put()
        try:
            changes = await self._reservations.changes(group_id, -1 if is_whole else loads.last_change, put)
        except StoreUnavailable:
            group.whole_at = float("-inf")
            raise
        loads.apply(changes)
        group.read_at = now
        if changes.is_all:
            group.whole_at = now

    async def _keep(self, group_id: int, group: _GroupState) -> None:
        """Read again and again, until the group is idle."""
        loop = asyncio.get_running_loop()
        while True:
            is_asked = loop.time() - group.asked_at < _ASKED_SECONDS
            if not is_asked and not any(load.requests for load in group.loads.values()):
                return
            # Read before the loads are as old as they may be, so that no decision waits for it.
            await asyncio.sleep(0.8 * self._seconds if is_asked and self._seconds else _OVERDUE_SECONDS)
            try:
                await self._read(group_id, group)
            except StoreUnavailable as exc:
                log.debug("loads not read", extra=fields(error=exc.sentence))
                await asyncio.sleep(_OVERDUE_SECONDS)
