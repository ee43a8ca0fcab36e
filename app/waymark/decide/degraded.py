"""The reservations that a process has made without Redis, and the loads that follow from them.

A reservation made here is released here; without a release it expires as any other does.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from waymark.domain.names import GroupName
from waymark.store.reservations import Load, Reservation, ReservationPart

#: The bound on remembered reservations; beyond it the oldest is forgotten.
_RESERVATIONS_MAX = 100_000
#: The number of ends to keep beyond two for each reservation.
_ENDS_SPARE = 1_000


@dataclass(slots=True)
class _OwnReservation:
    reservation: Reservation
    group: GroupName
    ends_at: float


class OwnReservations:
    """The reservations of one process."""

    def __init__(self) -> None:
        self._own: dict[str, _OwnReservation] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of when they may be over; who was renewed has two entries, and who has ended may have one still."""
        self._requests: dict[GroupName, Counter[int]] = {}

    def loads(self, group: GroupName) -> Mapping[int, Load]:
        """Return the requests that this process has sent to each target of a group meanwhile."""
        self._end_overdue()
        return {publisher: Load(requests=count) for publisher, count in self._requests.get(group, {}).items()}

    def reserve(self, group: GroupName, group_id: int, publisher: int, context: int, milliseconds: int) -> Reservation:
        if len(self._own) >= _RESERVATIONS_MAX:
            self._end(next(iter(self._own)))
        reservation = Reservation(group_id, publisher, 0, context, secrets.token_hex(8))
        self._own[reservation.nonce] = own = _OwnReservation(reservation, group, _in(milliseconds))
        self._ends_at(own)
        self._requests.setdefault(group, Counter())[publisher] += 1
        return reservation

    def release(
        self, reservations: Sequence[Reservation], part: ReservationPart, milliseconds: int
    ) -> list[Reservation]:
        """End those that were made here; the others."""
        in_redis = []
        for reservation in reservations:
            own = self._own.get(reservation.nonce)
            if own is None:
                in_redis.append(reservation)
            elif part is ReservationPart.RENEW:
                own.ends_at = _in(milliseconds)
                self._ends_at(own)
            elif part is not ReservationPart.PREFILL:
                self._end(reservation.nonce)
        return in_redis

    def _ends_at(self, own: _OwnReservation) -> None:
        if len(self._ends) > 2 * len(self._own) + _ENDS_SPARE:
            # Most are of reservations that were released or renewed since.
            self._ends = [(own_request.ends_at, nonce) for nonce, own_request in self._own.items()]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (own.ends_at, own.reservation.nonce))

    def _end(self, nonce: str) -> None:
        own = self._own.pop(nonce)
        requests = self._requests[own.group]
        requests[own.reservation.publisher] -= 1
        if requests[own.reservation.publisher] == 0:
            del requests[own.reservation.publisher]
        if not requests:
            del self._requests[own.group]

    def _end_overdue(self) -> None:
        now = _in(0)
        while self._ends and self._ends[0][0] <= now:
            nonce = heapq.heappop(self._ends)[1]
            own = self._own.get(nonce)
            if own is not None and own.ends_at <= now:
                self._end(nonce)


def _in(milliseconds: int) -> float:
    """So long from now, by the loop's clock."""
    return asyncio.get_running_loop().time() + milliseconds / 1000
