"""The rule for decisions that lack something: one table, from the cause to the deed, the same at each door.

A decision fails open: it is refused only if no target can take the request. The causes are of three kinds. Something
else is away: the tokens of the prompt, Redis, or the ingest workers that keep the index. Engines are missing: so few
are registered that there would be no choice, none is left by the constraints, or those that are left cannot be reached
or have enough requests. Or nobody knows the model.

Scores take no target, so they are given at any load and from the first engine on; without Redis there are none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from time import monotonic

from waymark.base.errors import (
    InvalidValue,
    NoTarget,
    RemoteUnavailable,
    Saturated,
    Starting,
    StoreUnavailable,
    UnknownModel,
    WaymarkError,
)
from waymark.base.logs import fields
from waymark.store.directory import Directory
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
    """The policy decides among them all the same; the answer is ``degraded``."""
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


def cause_of(error: WaymarkError, *, is_forgotten: bool = False) -> Cause | None:
    """Return the cause that an error of a decision stands for; None for an error of its caller.

    ``is_forgotten``: the model was served a moment ago.
    """
    match error:
        case StoreUnavailable():
            return Cause.NO_REDIS
        case RemoteUnavailable() | InvalidValue(reason="no_tokenizer"):
            return Cause.NO_TOKENS
        case Starting():
            return Cause.STARTING
        case Saturated():
            return Cause.SATURATED
        case NoTarget() if is_forgotten:
            return Cause.FORGOTTEN
        case UnknownModel():
            return Cause.UNKNOWN
        case NoTarget():
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
        """Look once, and write it into the log if it is due."""
        now = monotonic()
        try:
            is_there = bool(await self._heartbeats.report("", keep_seconds=WORKER_SECONDS))
        except StoreUnavailable as exc:
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

    def __init__(self, directory: Directory, minimum: int, watch: IngestWatch | None = None) -> None:
        """``watch`` is of a process whose decisions have to know whether the index is kept."""
        self.watch = watch
        self._directory = directory
        self._minimum = minimum
        self.is_open = minimum == 0
        """Whether it has been seen open."""
        self._count = 0
        self._count_until = 0.0

    async def waiting(self) -> str | None:
        """Return the condition that the gate waits for, as a sentence, or None once it is open."""
        if self.is_open:
            return None
        if monotonic() >= self._count_until:
            registrations = await self._directory.registrations()
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
            raise Starting(f"{sentence}; register more engines, or lower WAYMARK_MIN_INITIAL_WORKERS")

    def check_latched(self) -> None:
        """Check like ``check``, without Redis: a gate that was never seen open is closed."""
        if not self.is_open:
            raise Starting(f"waiting for {self._minimum} workers, and Redis is unavailable")
