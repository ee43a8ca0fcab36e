"""The rule for decisions that lack something: one table, from the cause to the action, the same for every API.

A decision fails open: it is refused only if no target can take the request. The causes are of three kinds. Something
else is unavailable: the tokens of the prompt, Redis, or the ingest workers that keep the index. Or engines are missing:
so few are registered that there would be no choice, the constraints leave none, or those that are left cannot be
reached or have enough requests. Or the model is unknown.

A score takes no target. So scores are given at any load, and as soon as there is one engine; they need Redis.

A process remembers the reservations that it makes without Redis, and the loads that follow from them. Such a
reservation is released here; without a release it expires as any other does.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from time import monotonic

from waymark.base import errors
from waymark.base.logs import fields
from waymark.base.record import record
from waymark.domain.names import GroupName
from waymark.store.directory import PolledClaims
from waymark.store.reservations import Load, Reservation, ReservationPart
from waymark.store.workers import WORKER_SECONDS, Heartbeats

log = logging.getLogger(__name__)

#: How long a count of instances is used while the gate is closed: it bounds the load of refused requests on Redis.
_COUNT_SECONDS = 0.1
#: How often heartbeats are read, while there is a worker and while there is none.
_BEAT_SECONDS = 1.0
_NO_BEAT_SECONDS = 0.25
#: A worker that begins together with this process may be as late as this before the log says that there is none.
_LATE_SECONDS = 3.0
#: How often the log repeats it.
_WARNING_SECONDS = 60.0
_NO_WORKER = (
    "no ingest worker is alive, so nobody applies the events of engines: decisions go by prefix and load; "
    "start waymark ingest on this Redis"
)


class Cause(StrEnum):
    """A reason why a decision cannot be made as it is asked for."""

    NO_TOKENS = "no_tokens"
    """Nothing tokenizes the prompt now."""
    NO_INDEX = "no_index"
    """No ingest worker is alive, so the index has only the past."""
    NO_REDIS = "no_redis"
    FORGOTTEN = "forgotten"
    """A Redis that has come back empty does not know a model that was served a moment ago."""
    UNREACHABLE = "unreachable"
    """No remaining target has an engine in reach."""
    STARTING = "starting"
    SATURATED = "saturated"
    NOBODY = "nobody"
    """Constraints leave no target."""
    UNKNOWN = "unknown"
    """The model has no registration."""


class Deed(StrEnum):
    """The consequence of a cause."""

    BY_PREFIX = "by_prefix"
    """The policy decides, with the prefix key and an estimate of the length in place of a match."""
    LAST_SNAPSHOT = "last_snapshot"
    """The targets are those of the last snapshot, with the loads of this process; the answer is ``degraded``."""
    ALL_THE_SAME = "all_the_same"
    """The policy decides nevertheless among the unreachable targets; the answer is ``degraded``."""
    REFUSE = "refuse"
    """The request is refused, with a sentence that names the way out."""


FAIL_OPEN: Mapping[Cause, Deed] = {
    Cause.NO_TOKENS: Deed.BY_PREFIX,
    Cause.NO_INDEX: Deed.BY_PREFIX,
    Cause.NO_REDIS: Deed.LAST_SNAPSHOT,
    Cause.FORGOTTEN: Deed.LAST_SNAPSHOT,
    Cause.UNREACHABLE: Deed.ALL_THE_SAME,
    Cause.STARTING: Deed.REFUSE,
    Cause.SATURATED: Deed.REFUSE,
    Cause.NOBODY: Deed.REFUSE,
    Cause.UNKNOWN: Deed.REFUSE,
}


def cause_of(error: errors.WaymarkError, *, is_forgotten: bool = False) -> Cause | None:
    """Return the cause that an error of a decision stands for; None for an error of its caller.

    ``is_forgotten``: the model was served a moment ago.
    """
    match error:
        case errors.StoreUnavailable():
            return Cause.NO_REDIS
        case errors.RemoteUnavailable() | errors.InvalidValue(reason="no_tokenizer"):
            return Cause.NO_TOKENS
        case errors.Starting():
            return Cause.STARTING
        case errors.Saturated():
            return Cause.SATURATED
        case errors.NoTarget() if is_forgotten:
            return Cause.FORGOTTEN
        case errors.UnknownModel():
            return Cause.UNKNOWN
        case errors.NoTarget():
            return Cause.NOBODY
    return None


# ---- ingest workers, and the gate at the start ------------------------------------------------------


class IngestWatch:
    """Whether any ingest worker is alive, looked at again and again."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._none_since: float | None = None
        self._warned_at = float("-inf")

    @property
    def finds_none(self) -> bool:
        """Whether there was no worker a moment ago; False if Redis could not be asked."""
        return self._none_since is not None

    def warnings(self) -> Sequence[str]:
        """Return the sentence for people; nothing while a worker is alive."""
        return [_NO_WORKER] if self.finds_none else []

    async def run(self) -> None:
        """Look until the process ends."""
        while True:
            await self.look()
            await asyncio.sleep(_NO_BEAT_SECONDS if self.finds_none else _BEAT_SECONDS)

    async def look(self) -> None:
        """Look once, and log a missing worker if a line is due."""
        now = monotonic()
        try:
            is_there = bool(await self._heartbeats.report("", keep_seconds=WORKER_SECONDS))
        except errors.StoreUnavailable as exc:
            log.debug("heartbeats were not read", extra=fields(error=exc.sentence))
            self._none_since = None
            return
        if is_there:
            if self._warned_at > float("-inf"):
                log.info("an ingest worker is alive again: decisions go by the index")
            self._none_since, self._warned_at = None, float("-inf")
            return
        if self._none_since is None:
            self._none_since = now
        if now - self._none_since >= _LATE_SECONDS and now - self._warned_at >= _WARNING_SECONDS:
            self._warned_at = now
            log.warning(_NO_WORKER)


class StartupGate:
    """Closed until ``minimum`` different instances are registered; then open for as long as the process runs."""

    def __init__(self, polled_claims: PolledClaims, minimum: int, watch: IngestWatch | None = None) -> None:
        """``watch`` is for a process whose decisions depend on whether the index is kept up to date."""
        self.watch = watch
        self._polled_claims = polled_claims
        self._minimum = minimum
        self.is_open = minimum == 0
        """Whether it has been seen open."""
        self._count = 0
        self._count_until = 0.0

    @property
    def is_unneeded(self) -> bool:
        """Whether it is open, and the index is kept up to date."""
        return self.is_open and (self.watch is None or not self.watch.finds_none)

    async def waiting(self) -> str | None:
        """Return the condition that the gate waits for, as a sentence, or None once it is open."""
        if self.is_open:
            return None
        if monotonic() >= self._count_until:
            registrations = await self._polled_claims.registrations()
            self._count = len(
                {
                    (registration.tenant_id, registration.instance_id)
                    for registration in registrations
                    if registration.scope == "instance"
                }
            )
            self._count_until = monotonic() + _COUNT_SECONDS
        if self._count >= self._minimum:
            self.is_open = True
            return None
        return f"waiting for workers: {self._count} of {self._minimum}"

    async def check(self) -> None:
        """Raise Starting while the gate is closed."""
        sentence = await self.waiting()
        if sentence is not None:
            raise errors.Starting(f"{sentence}; register more engines, or lower WAYMARK_MIN_INITIAL_WORKERS")

    def check_latched(self) -> None:
        """Check like ``check``, without Redis: a gate that was never seen open is closed."""
        if not self.is_open:
            raise errors.Starting(f"waiting for {self._minimum} workers, and Redis is unavailable")


#: The bound on remembered reservations; beyond it the oldest is forgotten.
_RESERVATIONS_MAX = 100_000
#: The number of ends to keep beyond two for each reservation.
_ENDS_SPARE = 1_000


@record(slots=True)
class _OwnReservation:
    reservation: Reservation
    group: GroupName
    ends_at: float


class OwnReservations:
    """The reservations of one process."""

    def __init__(self) -> None:
        self._own: dict[str, _OwnReservation] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of the times when they may end; a renewed one has two entries, and an ended one may still have one."""
        self._requests: dict[GroupName, Counter[int]] = {}

    def loads(self, group: GroupName) -> Mapping[int, Load]:
        """Return the requests under way that this process has sent to each target of a group without Redis."""
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
        """End the reservations that were made here. Return the others."""
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
    """Return the time ``milliseconds`` from now, by the loop's clock."""
    return asyncio.get_running_loop().time() + milliseconds / 1000
