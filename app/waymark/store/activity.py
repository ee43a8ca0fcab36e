"""The activity list: restarts, losses, takeovers, sweeps, drains and registrations of all processes.

It is one Redis stream, which people read. ``note`` never waits and never fails: entries wait in a bounded queue until
Redis accepts them, and an entry that does not fit is counted and dropped. If a reply of Redis is lost, an entry may be
in the list twice.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.names import Registration
from waymark.store import keys
from waymark.store.parsing import pairs
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts
from waymark.store.steps import StartTask

log = logging.getLogger(__name__)

#: The approximate number of entries that Redis keeps.
LENGTH = 10_000
#: The most entries that wait while Redis is unavailable.
_WAITING_MAX = 1_000
_PER_CALL = 100
_AGAIN_SECONDS = 1.0
_ID = re.compile(r"\d{1,15}-\d{1,10}")


class ActivityKind(StrEnum):
    """The kinds of entries."""

    REGISTERED = "registered"
    UNREGISTERED = "unregistered"
    DRAIN = "drain"
    RESUME = "resume"
    WEIGHT = "weight"
    TAKEOVER = "takeover"
    RESTART = "restart"
    UNREACHABLE = "unreachable"
    REACHABLE = "reachable"
    LOST = "lost"
    FOUND = "found"
    SWEEP = "sweep"
    SNAPSHOT = "snapshot"
    DRIFT = "drift"


class ActivityEntry(NamedTuple):
    """One event in the life of the installation."""

    id: str
    """``<milliseconds since 1970>-<number>``, by the clock of Redis; ids grow."""
    content: dict[str, Any]
    """``kind``, ``tenant_id``, ``model``, ``instance_id``, ``dp_rank`` and ``detail``, as far as they apply."""


class Activity:
    """The activity list: ``note`` adds to it, ``after`` and ``newest`` read it. ``begin`` runs the writes."""

    def __init__(self, client: RedisClient, scripts: Scripts, metrics: Metrics, begin: StartTask) -> None:
        self._client = client
        self._scripts = scripts
        self._metrics = metrics
        self._begin = begin
        self._waiting: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None

    def note(self, kind: ActivityKind, **content: Any) -> None:
        """Queue an entry and return at once. A background task writes it when Redis accepts it."""
        if len(self._waiting) >= _WAITING_MAX:
            self._metrics.activity_dropped.inc()
            return
        self._waiting.append(orjson.dumps({"kind": kind} | content))
        if self._task is None or self._task.done():
            self._task = self._begin(self._write())

    async def _write(self) -> None:
        while self._waiting:
            entries = [self._waiting[index] for index in range(min(_PER_CALL, len(self._waiting)))]
            try:
                await self._scripts.run("note_activity", activity=keys.ACTIVITY, length=LENGTH, entry=entries)
            except StoreUnavailable as exc:
                log.debug("activity not noted yet", extra=fields(error=exc.sentence))
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                for _ in entries:
                    self._waiting.popleft()

    async def after(self, entry_id: str, count: int) -> list[ActivityEntry]:
        """Return at most ``count`` entries after ``entry_id``, oldest first.

        If the entry with this id was trimmed, these are the oldest entries. Unreadable entries are skipped.
        """
        while True:
            entries, last = await self._read("XRANGE", f"({entry_id}", "+", count)
            if entries or last is None:
                return entries
            entry_id = last

    async def newest(self, count: int) -> list[ActivityEntry]:
        """Return the newest entries, at most ``count``, oldest first."""
        entries, _ = await self._read("XREVRANGE", "+", "-", count)
        return entries[::-1]

    async def _read(self, command: str, start: str, end: str, count: int) -> tuple[list[ActivityEntry], str | None]:
        """Return the readable entries, and the id of the last entry if there may be more after it."""
        (reply,) = await self._client.several([(command, keys.ACTIVITY, start, end, "COUNT", count)])
        entries = [entry for item in reply if (entry := _entry(item)) is not None]
        return entries, reply[-1][0].decode() if len(reply) == count else None


def about(registration: Registration) -> dict[str, Any]:
    """Return the fields of an entry about a publisher."""
    return {
        "tenant_id": registration.tenant_id,
        "model": registration.model_name,
        "instance_id": registration.instance_id,
        "dp_rank": registration.dp_rank,
    }


def is_entry_id(text: str) -> bool:
    """Return whether a text is the id of an entry."""
    return _ID.fullmatch(text) is not None


def _entry(item: Any) -> ActivityEntry | None:
    """Return an entry of a reply, or None if another release wrote an entry that this release cannot read."""
    entry_id, parts = item
    try:
        content = orjson.loads(dict(pairs(parts))[b"entry"])
    except (KeyError, ValueError):
        return None
    return ActivityEntry(entry_id.decode(), content) if isinstance(content, dict) and "kind" in content else None
