"""A worker's housekeeping: dead holders, the worth of caches, unclaimed publishers and overdue reservations.

Dead holders are swept out of blocks in steps, and caches are valued in steps, both at the pace of
``WAYMARK_SWEEP_BLOCKS_PER_SECOND``. Any worker may sweep any group. If two workers sweep the same holder, they do the
same work twice, which is harmless; only one worker at a time values a group. A worker runs one step of each at a time,
so a reader waits for at most two steps of each worker.

Publishers in a group's holder table without a claim are ended, too, and so are holders and fences that the table does
not know. Each poll reads the table and a part of a fence of one group, in turn. The workers share the groups, so a poll
costs each worker three commands, however many groups there are.

Overdue reservations end here in groups that get no requests, for example because their only replica was killed. Each
group has one worker that looks after it. Two workers that end the same reservation change the load once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.names import GroupName
from waymark.store.activity import ActivityKind
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.reservations import OVERDUE_MAX
from waymark.store.store import Store
from waymark.store.sweep import FencePlace, TableState, UnclaimedPublisher
from waymark.store.worth import LEASE_SECONDS, STEP_BLOCKS

log = logging.getLogger(__name__)

#: A sweep behind its pace catches up with at most this many seconds.
_BEHIND_SECONDS = 1.0
#: The pause after a step is at least as long as the shortest of the last ``_STEPS`` steps. The shortest one shows how
#: long Redis takes; in the others, this process may have waited for a core.
_STEPS = 4


class SweepPace:
    """Pauses between steps, so that ``blocks_per_second`` are swept. Times are monotonic seconds.

    A sweep keeps the pace on average: after a step or a pause that was too long, the next pauses are shorter. At least
    half of the time is a pause, so the pace is not reached if Redis takes long for a step.
    """

    def __init__(self, blocks_per_second: int) -> None:
        self._seconds_per_block = 1 / blocks_per_second
        self._due = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def start(self, now: float) -> None:
        """Begin a sweep, without catching up with the time since the last one."""
        self._due = max(self._due, now)

    def pause(self, blocks: int, began: float, now: float) -> float:
        """Return how many seconds to wait after a step of ``blocks`` blocks."""
        self._steps.append(now - began)
        self._due = max(self._due, now - _BEHIND_SECONDS) + blocks * self._seconds_per_block
        return max(self._due - now, min(self._steps))


async def keep_sweeping(store: Store, metrics: Metrics, *, blocks_per_second: int, pause_seconds: float) -> None:
    """Sweep until cancelled."""
    pace = SweepPace(blocks_per_second)
    while True:
        remaining = swept = 0
        try:
            groups = await store.directory.groups()
            entries = list(groups.values())
            for entry in entries:
                remaining += await _if_reached(store.sweeper.left(entry))
            metrics.dead_holders.set(remaining)
            for group, entry in groups.items():
                swept += await _sweep_one(store, group, entry, pace)
            metrics.dead_holders.set(remaining - swept)
        except StoreUnavailable as exc:
            log.debug("sweep waits for redis", extra=fields(error=exc.sentence))
        if remaining <= swept or not swept:
            await asyncio.sleep(pause_seconds)


async def _sweep_one(store: Store, group: GroupName, entry: GroupEntry, pace: SweepPace) -> bool:
    """Sweep one dead holder of a group, if there is one. A group that cannot be swept does not delay the others."""
    try:
        holder = await store.sweeper.pick(entry)
        if holder is None:
            return False
        began = time.perf_counter()
        pace.start(began)
        count = 0
        async for blocks in store.sweeper.steps(entry, holder):
            count += blocks
            await asyncio.sleep(pace.pause(blocks, began, time.perf_counter()))
            began = time.perf_counter()
        store.activity.note(
            ActivityKind.SWEEP,
            tenant_id=group.tenant_id,
            model=group.model_name,
            detail=f"holder {holder}: {count} blocks",
        )
    except StoreUnavailable as exc:
        log.debug("sweep waits for redis", extra=fields(group=entry.group_id, error=exc.sentence))
        return False
    except Exception:
        # Any release may have written the data of a dead holder. If this code fails on it, the worker must go on.
        log.exception("sweep failed, will be tried again", extra=fields(group=entry.group_id))
        return False
    return True


async def keep_valuing(store: Store, *, blocks_per_second: int, pause_seconds: float) -> None:
    """Value the caches of the groups whose worth was requested, until cancelled."""
    pace = SweepPace(blocks_per_second)
    lease_seconds = max(LEASE_SECONDS, 4 * STEP_BLOCKS / blocks_per_second)
    while True:
        try:
            asked = await store.valuations.asked.read()
            groups = await store.directory.groups() if asked else {}
            for entry in groups.values():
                if entry.group_id in asked:
                    await _value(store, entry, pace, lease_seconds)
        except StoreUnavailable as exc:
            log.debug("valuation waits for redis", extra=fields(error=exc.sentence))
        await asyncio.sleep(pause_seconds)


async def _value(store: Store, entry: GroupEntry, pace: SweepPace, lease_seconds: float) -> None:
    """Walk over the rows of a group. A group that cannot be valued does not delay the others."""
    began = time.perf_counter()
    pace.start(began)
    try:
        async for blocks in store.valuations.walk(entry, lease_seconds=lease_seconds):
            await asyncio.sleep(pace.pause(blocks, began, time.perf_counter()))
            began = time.perf_counter()
    except StoreUnavailable as exc:
        log.debug("valuation waits for redis", extra=fields(group=entry.group_id, error=exc.sentence))
    except Exception:
        # Any release may have written these rows. If this code fails on one, the worker must go on.
        log.exception("valuation failed, will be tried again", extra=fields(group=entry.group_id))


async def _if_reached(step: Coroutine[None, None, int]) -> int:
    """Return the result of a step for one group; 0 if the group cannot be reached, or its data cannot be used."""
    try:
        return await step
    except StoreUnavailable as exc:
        log.debug("group cannot be swept", extra=fields(error=exc.sentence))
        return 0


class LostGroups:
    """Writes the entries of groups again that Redis has lost, because nobody would sweep a group without publishers.

    Before its first poll a worker knows no group, and looks for their tables, until all primaries have answered.
    """

    def __init__(self, store: Store) -> None:
        self._writer = store.claim_writer
        self._groups: Mapping[GroupName, GroupEntry] = {}
        """The groups of the last poll, and those that could not be written."""
        self._are_tables_read = False

    async def keep(self, groups: Mapping[GroupName, GroupEntry]) -> None:
        """Keep the groups besides ``groups``, which Redis has."""
        failed: dict[GroupName, GroupEntry] = {}
        last = self._groups
        if not self._are_tables_read:
            try:
                last = {**await self._writer.groups_by_table(groups.values()), **last}
                self._are_tables_read = True
            except StoreUnavailable as exc:
                log.debug("no lost group can be found", extra=fields(error=exc.sentence))
        for group in last.keys() - groups.keys():
            try:
                await self._writer.keep_group(group, last[group])
            except StoreUnavailable as exc:
                log.debug("group cannot be kept", extra=fields(group=last[group].group_id, error=exc.sentence))
                failed[group] = last[group]
        self._groups = {**groups, **failed}


class UnclaimedWatch:
    """Ends a publisher after it had no claim for two polls and for ``patience_seconds``. Also ends holders and fences
    that the table of their group does not know.

    In this time every live worker polls, and restores a claim that it knows and Redis has lost.
    """

    def __init__(self, store: Store, metrics: Metrics, patience_seconds: float) -> None:
        self._store = store
        self._metrics = metrics
        self._patience_seconds = patience_seconds
        self._last = 0
        """The group that was checked last."""
        self._since: dict[UnclaimedPublisher, float] = store.incarnation.cache({})
        """Publishers without a claim, with the monotonic time at which each was found."""
        self._claims: Sequence[Claim] = ()
        self._claimed: set[int] = set()
        """The publishers of ``_claims``."""
        self._places: dict[int, FencePlace] = store.incarnation.cache({})
        """How far the fences of each group are searched."""
        self._whole: dict[int, TableState] = store.incarnation.cache({})
        """The groups whose table had only publishers of ``_claims``, with the state of the table."""

    async def check_next(self, share: Sequence[GroupEntry], claims: Sequence[Claim]) -> None:
        """Check the next group in this worker's share."""
        entry = self._next(share)
        if entry is None:
            self._since.clear()
            return
        try:
            await self._check(entry, claims, {group_entry.group_id for group_entry in share})
            place = self._places.get(entry.group_id, (0, 0))
            self._places[entry.group_id] = (place[0] + 1) % entry.shards, 0  # if this one cannot be searched
            self._places[entry.group_id] = await self._store.leftovers.look(entry, place)
        except StoreUnavailable as exc:
            # Readers of the table log this, too. A group that cannot be searched does not delay the others.
            log.debug("group cannot be searched", extra=fields(group=entry.group_id, error=exc.sentence))

    async def _check(self, entry: GroupEntry, claims: Sequence[Claim], mine: set[int]) -> None:
        if claims is not self._claims:
            self._claims, self._claimed = claims, {claim.publisher for claim in claims}
            self._whole.clear()
        for ids in [ids for ids in self._since if ids.group_id not in mine]:
            del self._since[ids]
        state = await self._store.unclaimed.state(entry.group_id)
        if self._whole.get(entry.group_id) == state and state[0] is not None:
            return
        rows = await self._store.unclaimed.publishers(entry.group_id) - self._claimed
        unclaimed = {UnclaimedPublisher(publisher, entry.group_id, entry.shards) for publisher in rows}
        if not unclaimed:
            self._whole[entry.group_id] = state
        now = time.monotonic()
        for ids in [ids for ids in self._since if ids.group_id == entry.group_id and ids not in unclaimed]:
            del self._since[ids]
        for ids in unclaimed:
            first_seen = self._since.setdefault(ids, now)
            if first_seen < now and now - first_seen >= self._patience_seconds:
                del self._since[ids]
                if await self._store.unclaimed.end(ids):
                    self._metrics.publishers_unclaimed.inc()
                    about = fields(group=entry.group_id, publisher=ids.publisher)
                    log.warning("removed a publisher that has no registration", extra=about)

    def _next(self, share: Sequence[GroupEntry]) -> GroupEntry | None:
        """Return the group after the last one, or None if there is none."""
        ordered = sorted(share, key=lambda group_entry: group_entry.group_id)
        if not ordered:
            return None
        entry = next((group_entry for group_entry in ordered if group_entry.group_id > self._last), ordered[0])
        self._last = entry.group_id
        return entry


#: The seconds between two checks of each group.
_SECONDS = 1.0
#: Calls under way at once, so that a group whose server is slow delays no other.
_AT_ONCE = 8


class Overdue:
    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._reservations = store.reservations
        self._metrics = metrics
        self._groups: list[int] = store.incarnation.cache([])
        self._calls = asyncio.Semaphore(_AT_ONCE)

    def see(self, groups: Iterable[int]) -> None:
        """Replace the groups that this worker looks after."""
        self._groups[:] = groups

    async def keep_ending(self) -> None:
        """End overdue reservations until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            deadline = loop.time() + _SECONDS
            group_ids = await self._under_way()
            # A group with more overdue reservations gets its next call after the others; a new round sees all groups
            # again.
            while group_ids and loop.time() < deadline:
                ended = await asyncio.gather(*map(self._end, group_ids))
                group_ids = [group_id for group_id, count in zip(group_ids, ended, strict=True) if count == OVERDUE_MAX]
            await asyncio.sleep(max(0.0, deadline - loop.time()))

    async def _under_way(self) -> Sequence[int]:
        """Return the groups with reservations; all groups if Redis does not answer."""
        groups = list(self._groups)
        try:
            return await self._reservations.under_way(groups) if groups else ()
        except StoreUnavailable as exc:
            log.debug("reservations cannot be counted", extra=fields(error=exc.sentence))
            return groups

    async def _end(self, group_id: int) -> int:
        """Make one call for a group. Return how many reservations it ended; 0 if it fails."""
        async with self._calls:
            try:
                ended = await self._reservations.end_overdue(group_id)
            except StoreUnavailable as exc:
                log.debug("overdue reservations could not be ended", extra=fields(group=group_id, error=exc.sentence))
                return 0
            except Exception:
                # Any release may have written the data of a group. If this code fails on them, the worker must go on.
                log.exception(
                    "overdue reservations could not be ended; the worker tries again", extra=fields(group=group_id)
                )
                return 0
        self._metrics.reservations_expired.inc(ended)
        return ended
