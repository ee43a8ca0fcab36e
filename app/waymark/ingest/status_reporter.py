"""Finds the status of a stream, and writes reports into its record: status, reasons why it is degraded, counters.

A report has only the changes since the last one, so an idle stream causes no writes. A report may be written while a
fold is being applied, and may be the last one of its worker. So it must not depend on the fold: the script that applies
the fold writes the watermark and event_ids, and batches are counted after that.
"""

from __future__ import annotations

import asyncio
import logging
import time

from waymark.apply.redis_calls import Fenced
from waymark.base.logs import fields
from waymark.domain.status import RecentBlocks, StreamStatus
from waymark.ingest.counters import EVENTS_MISSING, REASONS
from waymark.ingest.life import Life
from waymark.ingest.replaying import Replaying
from waymark.ingest.subscriber import Subscriber
from waymark.store.activity import ActivityKind
from waymark.store.records import BLOCKS, Facts

log = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0

#: The statuses between which a silent stream alternates when a replay is requested.
_ASKED = {StreamStatus.ACTIVE, StreamStatus.REPLAYING}
_MIXED = (
    "the socket sends frames of several topics or ranks, and each has its own counter, so that their order is unknown; "
    'register with "sequence": "rank", or register the engines behind this socket instead'
)
_REFUSED = (
    "the connection to the publisher was closed, because of a message of more than {} bytes, four times "
    "WAYMARK_FRAME_BYTES_MAX, of one without an end, or of bytes that are not ZMTP; the worker connects again later"
)


class StatusReporter:
    def __init__(self, life: Life, subscriber: Subscriber, replaying: Replaying, *, message_bytes_max: int) -> None:
        self.status = StreamStatus.STARTING
        """The status in the last report."""
        self.is_mixed = False
        """Whether the frames have several counters, so that the stream has failed."""
        self._life = life
        self._subscriber = subscriber
        self._replaying = replaying
        self._message_bytes_max = message_bytes_max
        self._reported = self._changed = 0.0
        self._is_loss_noted = False
        """Whether the activity says that the connection is lost."""
        self._dropped = self._malformed = 0
        self._facts: Facts = {}
        self._counts: dict[str, int] = {}
        self._recent = RecentBlocks()
        self._life_number = life.begun

    def fail(self) -> None:
        """Note that the frames have several counters. Only a new registration can repair this."""
        self.is_mixed = True
        log.error("stream failed", extra=fields(stream=self._life.name, error=_MIXED))

    async def report(self, now: float) -> None:
        """Write the changes if the status has changed, or the last report was long enough ago."""
        if EVENTS_MISSING in self._life.applier.resolver.flags:
            self._life.reasons.add(EVENTS_MISSING)
        status = self._current_status()
        self._note_reachability(status, now)
        if status == self.status and now - self._reported <= _REPORT_SECONDS:
            return
        self._reported = now
        if status != self.status:
            # A silent stream requests replays again and again, which is not news.
            level = logging.DEBUG if {status, self.status} == _ASKED else logging.INFO
            log.log(
                level,
                "stream status changed",
                extra=fields(stream=self._life.name, status=status, reasons=sorted(self._life.reasons)),
            )
            self.status, self._changed = status, now
        await self._write()

    def _note_reachability(self, status: StreamStatus, now: float) -> None:
        """Note in the activity that the connection is lost, or that it is back before the publisher counts as lost.

        Only the next attempt at a connection shows why it is lost, so the note waits for that, but not for long.
        """
        if status is not StreamStatus.UNREACHABLE:
            if self._is_loss_noted and status is not StreamStatus.LOST:
                self._life.applier.happened(ActivityKind.REACHABLE)
            self._is_loss_noted = False
        elif not self._is_loss_noted and status == self.status:
            is_late = now - self._changed > _REPORT_SECONDS
            if self._problem is not None or is_late:
                reason = self._problem or "it has ended"
                self._life.applier.happened(
                    ActivityKind.UNREACHABLE, f"no connection to {self._subscriber.endpoint}: {reason}"
                )
                self._is_loss_noted = True

    async def report_last(self) -> None:
        """Write what has changed since the last report, if Redis answers at once.

        The status stays that of the last report, because the life itself writes some later changes of the status.
        """
        if self._life.is_lost:
            self.status = StreamStatus.LOST
        elif self._life.reasons and self.status is StreamStatus.ACTIVE:
            self.status = StreamStatus.DEGRADED
        try:
            async with asyncio.timeout(_REPORT_SECONDS):
                await self._write()
        except (TimeoutError, Fenced):
            log.debug("last counters not written", extra=fields(stream=self._life.name))

    def _current_status(self) -> StreamStatus:
        if self._error is not None:
            return StreamStatus.FAILED
        if self._life.is_lost:
            return StreamStatus.LOST
        if not self._subscriber.is_connected:
            is_away = self._subscriber.connection or self._subscriber.is_unreachable
            return StreamStatus.UNREACHABLE if is_away else StreamStatus.STARTING
        if self._replaying.is_running:
            return StreamStatus.REPLAYING
        return StreamStatus.DEGRADED if self._life.reasons else StreamStatus.ACTIVE

    @property
    def _error(self) -> str | None:
        """Why the stream has failed; None if it has not."""
        if self.is_mixed:
            return _MIXED
        return _REFUSED.format(self._message_bytes_max) if self._subscriber.is_refused else None

    @property
    def _problem(self) -> str | None:
        """The most important fact for an operator: why the stream has failed, or why it has no connection."""
        if self._error is not None or self._subscriber.is_connected:
            return self._error
        return self._subscriber.failure

    async def _write(self) -> None:
        """Write the changes. An error replaces the reasons of a degraded stream."""
        life = self._life
        dropped, malformed = self._subscriber.dropped, self._subscriber.malformed
        life.count("buffer_dropped", dropped - self._dropped)
        life.count("frames_malformed", malformed - self._malformed)
        self._dropped, self._malformed = dropped, malformed
        reasons = "; ".join(f"{reason}: {life.details.get(reason, REASONS[reason])}" for reason in sorted(life.reasons))
        if life.begun != self._life_number:
            # The script that began the life has deleted counters of the previous life from the record.
            self._counts.clear()
            self._life_number = life.begun
        facts: Facts = {"status": self.status, "last_error": self._problem or reasons}
        has_news = self._facts != facts or life.has_written_status
        counts = {name: n for name, n in life.counters.items() if self._counts.get(name) != n}
        changes: Facts = facts.copy() if has_news else {}
        totals = (life.counters.get(name, 0) for name in ("blocks_stored", "blocks_removed"))
        recent = self._recent.note(time.time(), *totals)
        if recent is not None:
            changes["recent"] = recent
        if changes or counts:
            await life.applier.write(changes, counts)
            self._facts = facts
            life.has_written_status = False
            self._counts |= counts
            for name in [name for name, n in counts.items() if not n and name.startswith(BLOCKS)]:
                del life.counters[name], self._counts[name]
