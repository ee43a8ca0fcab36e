"""Releases prefill: when the index shows that a prompt has been computed, else when an estimate says so.

A replica remembers its own reservations, each with the key of the last complete block of its prompt. When that block
appears under the reservation's target, the prompt's prefill is done there. If no event can show it (a prompt below one
block, a target that sends no events), the prefill is released after an estimate, or with the reservation's end. The
memory of a replica ends with it; its reservations then expire with their prefill.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.store.background import StartTask
from waymark.store.directory import GroupEntry
from waymark.store.reader import Reader
from waymark.store.reservations import Reservation, ReservationPart, Reservations

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.1
#: A reservation is looked at again after this share of the time for which it is watched: a long prefill is released a
#: little late, and one that never ends costs little.
_SHARE = 0.2
#: The bound on remembered reservations; beyond it the oldest is left to its end.
_WATCHED_MAX = 65_536
#: Blocks of one lookup; the others are looked up in the next turns.
_LOOKED_UP_MAX = 2_048


class WatchedReservation(NamedTuple):
    """A reservation whose prefill is not known to be done."""

    reservation: Reservation
    group: GroupName
    entry: GroupEntry
    piece: bytes | None
    """Packed keys of the last piece, up to the last complete block; None if no event will show it."""
    done_at: float | None
    """The end of the prefill, if known or estimated, by the loop's clock."""
    ends_at: float
    """The end of the reservation."""
    by: str = "estimate"
    """The source of ``done_at``."""


class _WatchedPrefill:
    __slots__ = ("began_at", "next_at", "of")

    def __init__(self, reservation: WatchedReservation, now: float) -> None:
        self.of = reservation
        self.began_at = now
        self.next_at = now


class PrefillProgress:
    """Watches reservations while there are any."""

    def __init__(self, reader: Reader, reservations: Reservations, begin: StartTask, metrics: Metrics) -> None:
        self._begin = begin
        self._reader = reader
        self._reservations = reservations
        self._released = metrics.prefill_released
        self._watched: dict[str, _WatchedPrefill] = {}
        """The watched reservations by nonce, in the order in which they are looked at."""
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, watched: WatchedReservation) -> None:
        if watched.piece is None and watched.done_at is None:
            return
        if len(self._watched) >= _WATCHED_MAX:
            self._watched.pop(next(iter(self._watched)))
        self._watched[watched.reservation.nonce] = _WatchedPrefill(watched, asyncio.get_running_loop().time())
        if self._task is None or self._task.done():
            self._task = self._begin(self._keep_polling())

    def told(self, reservations: Sequence[Reservation], part: ReservationPart) -> None:
        """Note a caller's report that the prefill of these, or all, is over."""
        if part is not ReservationPart.RENEW:
            reason = "caller" if part is ReservationPart.PREFILL else "end"
            for reservation in reservations:
                if self._watched.pop(reservation.nonce, None) is not None:
                    self._released.labels(by=reason).inc()

    def clear(self) -> None:
        """Forget everything, because Redis came back empty: the reservations are gone."""
        self._watched.clear()

    async def _keep_polling(self) -> None:
        while self._watched:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                await self._poll()
            except StoreUnavailable as exc:
                log.debug("the state of prefills was not read", extra=fields(error=exc.sentence))
                await asyncio.sleep(1.0)

    async def _poll(self) -> None:
        now = asyncio.get_running_loop().time()
        finished: dict[str, list[WatchedReservation]] = {}
        by_group: dict[GroupName, list[WatchedReservation]] = {}
        looked_up = 0
        for watch in list(self._watched.values()):
            watched = watch.of
            if watched.ends_at <= now:
                del self._watched[watched.reservation.nonce]
            elif watched.done_at is not None and watched.done_at <= now:
                finished.setdefault(watched.by, []).append(watched)
            elif watched.piece is not None and watch.next_at <= now and looked_up < _LOOKED_UP_MAX:
                looked_up += 1
                by_group.setdefault(watched.group, []).append(watched)
                watch.next_at = now + _SHARE * (now - watch.began_at)
                # To the back, so that every one has its turn.
                self._watched[watched.reservation.nonce] = self._watched.pop(watched.reservation.nonce)
        for reason, each in finished.items():
            await self._give_back(each, reason)
        for group, several in by_group.items():
            await self._give_back(await self._computed(group, several), "index")

    async def _computed(self, group: GroupName, several: list[WatchedReservation]) -> list[WatchedReservation]:
        """Return the reservations whose last block is held by their target."""
        entry = several[0].entry
        ids = await self._reader.last_holders(entry, [each.piece for each in several if each.piece is not None])
        table = self._reader.table_at_hand(group)
        if table is None or any(number > table.newest for holder_ids in ids for number in holder_ids):
            table = await self._reader.table(group)
        if table is None:
            return []
        publisher_of = _publisher_of(table)
        return [
            watched
            for watched, numbers in zip(several, ids, strict=True)
            if any(publisher_of(number) == watched.reservation.publisher for number in numbers)
        ]

    async def _give_back(self, several: list[WatchedReservation], reason: str) -> None:
        # A prefill that was reported meanwhile is counted by the reporter.
        remaining = [watched for watched in several if self._watched.pop(watched.reservation.nonce, None) is not None]
        if remaining:
            await self._reservations.release([watched.reservation for watched in remaining], ReservationPart.PREFILL)
            self._released.labels(by=reason).inc(len(remaining))


def _publisher_of(table: HolderTable) -> Callable[[int], int | None]:
    def of(number: int) -> int | None:
        holder = table.holders.get(number)
        return None if holder is None else holder.publisher

    return of
