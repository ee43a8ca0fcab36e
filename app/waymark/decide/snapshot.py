"""The state of each group as a process knows it: one snapshot, with the targets, their loads and other readings.

The targets follow from the holder table, whose version every walk checks. Everything else is a reading of Redis, and
one rule says how old it may be: an older one is read again before it is used, and while decisions are made, each is
read again in the background before it is that old. A group without new requests is read every second while old ones are
under way in it, so that overdue reservations end in time, and then not at all. Without Redis, the last snapshot counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.decide.fleet import Fleet
from waymark.decide.group_loads import GroupLoads
from waymark.domain.answer_times import AnswerTimes
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.domain.targets import Gauges
from waymark.store.directory import GroupEntry
from waymark.store.reservations import OVERDUE_MAX, Load
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: How old gauges and times to a first token may be. Loads may be as old as the settings say.
_SIDE_SECONDS = 0.25
#: How long after the last decision a reading is repeated each time that it is too old.
_ASKED_SECONDS = 2.0
#: How often overdue reservations are looked for, and idle groups read.
_OVERDUE_SECONDS = 1.0
#: How long a decision waits until overdue reservations have ended: after a pause of all replicas there may be hundreds
#: of thousands. The next reading ends the others.
_SWEEP_SECONDS = 0.1
#: How often all loads are read, and not only those that have changed: a Redis that has taken over may lack the last
#: changes of the one before, and nothing says so.
_WHOLE_SECONDS = 10.0
#: A reading is repeated at this share of the age that it may have, so that no decision waits for it.
_EARLY = 0.8
#: How long workers need at most to register their engines again in a Redis that came back empty.
_FORGOTTEN_SECONDS = 30.0
#: The bound on groups to keep; beyond it the one not used for longest is forgotten.
_GROUPS_MAX = 1024
_NEVER = float("-inf")
_NO_LOADS: Mapping[int, Load] = MappingProxyType({})
_NO_GAUGES: Mapping[int, Gauges] = MappingProxyType({})
_NO_ANSWER_TIMES: Mapping[int, AnswerTimes] = MappingProxyType({})
_NOBODY = frozenset[int]()
_NO_DRIFTS: Mapping[int, float] = MappingProxyType({})


T = TypeVar("T")
ReadGroup = Callable[[int, Sequence[int]], Awaitable[Mapping[int, T]]]
"""Reads the values of a group's publishers from Redis."""


class ReadingKind(StrEnum):
    """The values of the targets of a group."""

    LOADS = "loads"
    GAUGES = "gauges"
    ANSWER_TIMES = "answer_times"


class GroupSnapshot(NamedTuple):
    """One group at a moment.

    A snapshot never changes, except for ``loads``, which follow the decisions of this process. A copy of the loads for
    each decision would cost more in a larger fleet.
    """

    entry: GroupEntry
    fleet: Fleet
    """The targets with their roles, labels, names and rings, by one version of the holder table."""
    loads: Mapping[int, Load] = _NO_LOADS
    gauges: Mapping[int, Gauges] = _NO_GAUGES
    answer_times: Mapping[int, AnswerTimes] = _NO_ANSWER_TIMES
    left_out: frozenset[int] = _NOBODY
    """The publishers whose engines cannot be reached."""
    drifts: Mapping[int, float] = _NO_DRIFTS
    """The publishers that deliver less than expected, and the share that is missing."""


@record(slots=True)
class _ReadingTimes:
    """When one kind of values was read, and when it was needed last, by the loop's clock."""

    read_at: float = _NEVER
    asked_at: float = _NEVER
    task: asyncio.Task[None] | None = None


@record(slots=True)
class _Readings:
    """The latest values of a group under one id."""

    group_id: int
    loads: GroupLoads = field(default_factory=GroupLoads)
    gauges: Mapping[int, Gauges] = field(default_factory=dict)
    answer_times: Mapping[int, AnswerTimes] = field(default_factory=dict)
    by_kind: dict[ReadingKind, _ReadingTimes] = field(
        default_factory=lambda: {kind: _ReadingTimes() for kind in ReadingKind}
    )
    swept_at: float = _NEVER
    whole_at: float = _NEVER
    """When all loads were read."""
    keeping: asyncio.Task[None] | None = None

    @property
    def asked_at(self) -> float:
        return max(reading.asked_at for reading in self.by_kind.values())

    def stop(self) -> None:
        if self.keeping is not None:
            self.keeping.cancel()


@record(slots=True)
class _LastTable:
    """The targets of a group as they were known last, even after Redis came back empty."""

    fleet: Fleet
    entry: GroupEntry | None = None
    used_at: float = _NEVER
    """When a decision used it last, by the monotonic clock."""


class SnapshotKeeper:
    """The keeper of a process."""

    def __init__(self, store: Store, loads_seconds: float, deadline_seconds: float, metrics: Metrics) -> None:
        """``loads_seconds`` is how old loads may be; 0: they are read for each decision."""
        self._store = store
        self._deadline_seconds = deadline_seconds
        self._expired = metrics.reservations_expired
        self._ages = {
            ReadingKind.LOADS: loads_seconds,
            ReadingKind.GAUGES: _SIDE_SECONDS,
            ReadingKind.ANSWER_TIMES: _SIDE_SECONDS,
        }
        self._last: dict[GroupName, _LastTable] = {}
        self._readings: dict[int, _Readings] = {}
        store.incarnation.cache(self)
        metrics.reservations.set_function(
            lambda: sum(load.requests for each in self._readings.values() for load in each.loads.values())
        )
        metrics.unreachable_targets.set_function(
            lambda: sum(len(each.loads.left_out(store.reservations.now_ms())) for each in self._readings.values())
        )

    def clear(self) -> None:
        """Forget all readings, because Redis came back empty and uses ids for other objects.

        The targets are still known, and decisions use them until Redis knows them again.
        """
        for readings in self._readings.values():
            readings.stop()
        self._readings.clear()

    # ---- targets -----------------------------------------------------------------------------------

    def fleet(self, group: GroupName, table: HolderTable) -> Fleet:
        """Return the targets by a table, made once for each version."""
        last = self._last.get(group)
        if last is not None and last.fleet.table is table:
            return last.fleet
        fleet = Fleet(table)
        if last is None:
            if len(self._last) >= _GROUPS_MAX:
                del self._last[min(self._last, key=lambda name: self._last[name].used_at)]
            self._last[group] = _LastTable(fleet)
            return fleet
        if last.fleet.names == fleet.names:
            fleet.rings = last.fleet.rings  # they depend on the names alone, and take long to build
        last.fleet = fleet
        return fleet

    def fleet_at_hand(self, group: GroupName) -> Fleet | None:
        """Return the targets by the table that the last walk in the group has used, or None without such a table."""
        table = self._store.reader.table_at_hand(group)
        return None if table is None else self.fleet(group, table)

    async def newest_fleet(self, group: GroupName) -> Fleet | None:
        """Return the targets by the present table, or None if the group has no registration."""
        table = await self._store.reader.table(group, deadline_seconds=self._deadline_seconds)
        return None if table is None else self.fleet(group, table)

    # ---- snapshots ---------------------------------------------------------------------------------

    def at_hand(self, entry: GroupEntry, fleet: Fleet, needs: Collection[ReadingKind]) -> GroupSnapshot | None:
        """Return the snapshot if its readings are young enough; else ``of`` reads them."""
        readings = self._readings.get(entry.group_id)
        if readings is None or readings.keeping is None or readings.keeping.done():
            return None
        now = asyncio.get_running_loop().time()
        for kind in needs:
            reading = readings.by_kind[kind]
            if self._is_due(kind, reading, now):
                return None
            reading.asked_at = now
        return self._snapshot(entry, fleet, readings, needs)

    def loads_at_hand(self, group_id: int) -> GroupLoads | None:
        """Return the loads if they are young enough and no target is left out or drifts; else a decision needs more."""
        readings = self._readings.get(group_id)
        if readings is None or readings.keeping is None or readings.keeping.done():
            return None
        now, reading, loads = asyncio.get_running_loop().time(), readings.by_kind[ReadingKind.LOADS], readings.loads
        if self._is_due(ReadingKind.LOADS, reading, now):
            return None
        if loads.has_marks:
            now_ms = self._store.reservations.now_ms()
            if loads.left_out(now_ms) or loads.drifts(now_ms):
                return None
        reading.asked_at = now
        return loads

    async def of(self, entry: GroupEntry, fleet: Fleet, needs: Collection[ReadingKind]) -> GroupSnapshot:
        """Return the snapshot, after repeating readings that are too old. Raise StoreUnavailable without Redis."""
        group_id, loop = entry.group_id, asyncio.get_running_loop()
        readings = self._readings.get(group_id) or self._begin(group_id)
        now = loop.time()
        waits = []
        for kind in needs:
            reading = readings.by_kind[kind]
            reading.asked_at = now
            if self._is_due(kind, reading, now):
                if reading.task is None or reading.task.done() or self._ages[kind] == 0:
                    reading.task = self._store.begin(self._read(kind, readings, fleet))
                waits.append(reading.task)
        for task in waits:
            await asyncio.shield(task)  # others may wait for it, too
        if needs and (readings.keeping is None or readings.keeping.done()):
            readings.keeping = self._store.begin(self._keep(readings, fleet.table.group))
        return self._snapshot(entry, fleet, readings, needs)

    def used(self, group: GroupName, entry: GroupEntry) -> None:
        """Note that a decision has found the group in Redis."""
        last = self._last.get(group)
        if last is not None:
            last.entry, last.used_at = entry, monotonic()

    def last(self, group: GroupName) -> GroupSnapshot | None:
        """Return the last snapshot, however old; None for a group that no decision has found."""
        last = self._last.get(group)
        if last is None or last.entry is None:
            return None
        readings = self._readings.get(last.entry.group_id)
        left_out = frozenset[int]() if readings is None else readings.loads.left_out(self._store.reservations.now_ms())
        return GroupSnapshot(last.entry, last.fleet, left_out=left_out)

    def was_there(self, group: GroupName) -> bool:
        """Return whether a decision found the group a moment ago: the workers register it again in a Redis that came
        back empty.
        """
        last = self._last.get(group)
        return last is not None and monotonic() - last.used_at < _FORGOTTEN_SECONDS

    # ---- changes by this process -------------------------------------------------------------------

    def saw(self, group_id: int, publisher: int, load: Load) -> None:
        """Note a load as a decision has left it: the next decision may come before the next reading."""
        readings = self._readings.get(group_id)
        if readings is not None:
            readings.loads.put(publisher, load)

    def released(self, group_id: int, publisher: int, tokens: int, requests: int, context: int) -> None:
        """Note the rest of a target's load after the end of a request."""
        readings = self._readings.get(group_id)
        load = None if readings is None else readings.loads.get(publisher)
        if load is not None:
            self.saw(group_id, publisher, load._replace(tokens=tokens, requests=requests, context=context))

    def requests_under_way(self) -> Iterator[tuple[str, float]]:
        """Yield requests under way, by instance, in the groups that this process decides in."""
        for last in self._last.values():
            readings = None if last.entry is None else self._readings.get(last.entry.group_id)
            for member in last.fleet.members:
                load = None if readings is None else readings.loads.get(member.publisher)
                yield member.name[0], 0.0 if load is None else load.requests

    # ---- readings ----------------------------------------------------------------------------------

    def _is_due(self, kind: ReadingKind, reading: _ReadingTimes, now: float) -> bool:
        return self._ages[kind] == 0 or now - reading.read_at > self._ages[kind]

    def _snapshot(
        self, entry: GroupEntry, fleet: Fleet, readings: _Readings, needs: Collection[ReadingKind]
    ) -> GroupSnapshot:
        loads = readings.loads
        now_ms = self._store.reservations.now_ms() if loads.has_marks else 0
        return GroupSnapshot(
            entry,
            fleet,
            loads if ReadingKind.LOADS in needs else _NO_LOADS,
            readings.gauges if ReadingKind.GAUGES in needs else _NO_GAUGES,
            readings.answer_times if ReadingKind.ANSWER_TIMES in needs else _NO_ANSWER_TIMES,
            loads.left_out(now_ms) if now_ms else _NOBODY,
            loads.drifts(now_ms) if now_ms else _NO_DRIFTS,
        )

    def _begin(self, group_id: int) -> _Readings:
        if len(self._readings) >= _GROUPS_MAX:
            oldest = min(self._readings, key=lambda each: self._readings[each].asked_at)
            self._readings.pop(oldest).stop()
        readings = self._readings[group_id] = _Readings(group_id)
        return readings

    async def _read(self, kind: ReadingKind, readings: _Readings, fleet: Fleet) -> None:
        # The age of a reading counts from its request, not from its reply.
        now = asyncio.get_running_loop().time()
        if kind is ReadingKind.LOADS:
            now = await self._read_loads(readings)
        elif kind is ReadingKind.GAUGES:
            readings.gauges = await self._read_side(self._store.gauges.read, readings, fleet.scraped)
        else:
            publishers = list(fleet.by_publisher)
            readings.answer_times = await self._read_side(self._store.answer_times.read, readings, publishers)
        readings.by_kind[kind].read_at = now

    async def _read_side(self, read: ReadGroup[T], readings: _Readings, publishers: Sequence[int]) -> Mapping[int, T]:
        """Read values that decisions do without if Redis is unavailable; the decision itself says that it is."""
        try:
            return await read(readings.group_id, publishers)
        except StoreUnavailable as exc:
            log.debug("values of targets not read", extra=fields(error=exc.sentence))
            return {}

    async def _read_loads(self, readings: _Readings) -> float:
        """Read the loads that have changed, and end overdue reservations if it is time for that. Return when the loads
        were requested."""
        loop, reservations, group_id = asyncio.get_running_loop(), self._store.reservations, readings.group_id
        now = loop.time()
        if now - readings.swept_at >= _OVERDUE_SECONDS:
            ended, until = OVERDUE_MAX, now + _SWEEP_SECONDS
            while ended == OVERDUE_MAX and now < until:
                ended = await reservations.end_overdue(group_id)
                self._expired.inc(ended)
                now = loop.time()
            if ended < OVERDUE_MAX:
                readings.swept_at = now
        loads = readings.loads
        is_whole = now - readings.whole_at >= _WHOLE_SECONDS
        put = loads.take_put()
        try:
            changes = await reservations.changes(group_id, -1 if is_whole else loads.last_change, put)
        except StoreUnavailable:
            readings.whole_at = _NEVER
            raise
        loads.apply(changes)
        if changes.is_all:
            readings.whole_at = now
        return now

    async def _keep(self, readings: _Readings, group: GroupName) -> None:
        """Read again and again, until the group is idle."""
        loop = asyncio.get_running_loop()
        while True:
            asked = [kind for kind, each in readings.by_kind.items() if loop.time() - each.asked_at < _ASKED_SECONDS]
            if not asked and not any(load.requests for load in readings.loads.values()):
                return
            ages = [age for kind in asked if (age := self._ages[kind])]
            await asyncio.sleep(_EARLY * min(ages, default=_OVERDUE_SECONDS / _EARLY))
            last = self._last.get(group)
            if last is None:
                return
            now = loop.time()
            due = [kind for kind in asked if now - readings.by_kind[kind].read_at >= _EARLY * self._ages[kind]]
            try:
                for kind in due if asked else [ReadingKind.LOADS]:
                    await self._read(kind, readings, last.fleet)
            except StoreUnavailable as exc:
                log.debug("loads not read", extra=fields(error=exc.sentence))
                await asyncio.sleep(_OVERDUE_SECONDS)
