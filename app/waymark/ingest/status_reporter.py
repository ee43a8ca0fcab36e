"""What a stream reports of itself into its record: status, why it is not all it could be, counters.

Only what has changed since the last report is written, so an idle stream costs Redis nothing. A report may be
written while a fold is being applied, and may be the last one of its worker. So it contains nothing that only holds
once the fold is applied: the watermark and event_ids move in the script that applies, counters of batches after it.
"""

from __future__ import annotations

from waymark.ingest.life import REASONS, Life
from waymark.ingest.subscriber import Subscriber
from waymark.store.records import Facts


class StatusReporter:
    def __init__(self, life: Life, subscriber: Subscriber) -> None:
        self._life = life
        self._subscriber = subscriber
        self._dropped = self._malformed = 0
        self._facts: Facts = {}
        self._counts: dict[str, int] = {}

    async def report(self, status: str, error: str | None) -> None:
        """Write what is new; ``error`` is said instead of the reasons of a degraded stream."""
        life = self._life
        dropped, malformed = self._subscriber.dropped, self._subscriber.malformed
        life.count("buffer_dropped", dropped - self._dropped)
        life.count("frames_malformed", malformed - self._malformed)
        self._dropped, self._malformed = dropped, malformed
        reasons = "; ".join(f"{reason}: {life.details.get(reason, REASONS[reason])}" for reason in sorted(life.reasons))
        facts: Facts = {"status": status, "last_error": error or reasons}
        has_news = self._facts != facts
        counts = {name: n for name, n in life.counters.items() if self._counts.get(name) != n}
        if has_news or counts:
            await life.applier.write(facts if has_news else {}, counts)
            self._facts = facts
            self._counts |= counts
