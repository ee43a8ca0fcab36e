"""Writes reports of a stream into its record: status, reasons why it is degraded, counters.

A report has only what has changed since the last one, so an idle stream causes no writes. A report may be written while
a fold is being applied, and may be the last one of its worker. So it has nothing that is true only once the fold is
applied: the script that applies the fold moves the watermark and event_ids, and counters of batches follow it.
"""

from __future__ import annotations

from waymark.ingest.life import Life
from waymark.ingest.reasons import REASONS
from waymark.ingest.subscriber import Subscriber
from waymark.store.records import Facts


class StatusReporter:
    def __init__(self, life: Life, subscriber: Subscriber) -> None:
        self._life = life
        self._subscriber = subscriber
        self._dropped = self._malformed = 0
        self._facts: Facts = {}
        self._counts: dict[str, int] = {}
        self._life_number = life.begun

    async def report(self, status: str, error: str | None) -> None:
        """Write what is new; ``error`` is said instead of the reasons of a degraded stream."""
        life = self._life
        dropped, malformed = self._subscriber.dropped, self._subscriber.malformed
        life.count("buffer_dropped", dropped - self._dropped)
        life.count("frames_malformed", malformed - self._malformed)
        self._dropped, self._malformed = dropped, malformed
        reasons = "; ".join(f"{reason}: {life.details.get(reason, REASONS[reason])}" for reason in sorted(life.reasons))
        if life.begun != self._life_number:
            # The script that began the life has taken counters of the last one out.
            self._counts.clear()
            self._life_number = life.begun
        facts: Facts = {"status": status, "last_error": error or reasons}
        has_news = self._facts != facts or life.has_written_status
        counts = {name: n for name, n in life.counters.items() if self._counts.get(name) != n}
        if has_news or counts:
            await life.applier.write(facts if has_news else {}, counts)
            self._facts = facts
            life.has_written_status = False
            self._counts |= counts
