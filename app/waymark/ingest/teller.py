"""What a stream writes of itself into its record: status, why it is not all it could be, counters.

Only what has changed since it was told last is written, so an idle stream costs Redis nothing.
"""

from __future__ import annotations

from waymark.ingest.life import REASONS, Life
from waymark.ingest.subscriber import Subscriber


class Teller:
    def __init__(self, life: Life, subscriber: Subscriber) -> None:
        self._life = life
        self._subscriber = subscriber
        self._dropped = self._malformed = 0
        self._told: dict[str, object] = {}

    async def tell(self, status: str, error: str | None) -> None:
        """Write what is new; ``error`` is said instead of the reasons of a degraded stream."""
        life, resolver = self._life, self._life.applier.resolver
        dropped, malformed = self._subscriber.dropped, self._subscriber.malformed
        life.count("buffer_dropped", dropped - self._dropped)
        life.count("frames_malformed", malformed - self._malformed)
        self._dropped, self._malformed = dropped, malformed
        # A counter, so that a takeover can tell what it has lost.
        life.counters["waiting"] = resolver.waiting.blocks
        reasons = "; ".join(f"{reason}: {REASONS[reason]}" for reason in sorted(life.reasons))
        facts: dict[str, str | int | float] = {"status": status, "last_error": error or reasons}
        facts |= {f"event:{holder}": event_id for holder, event_id in resolver.event_ids.items()}
        news = {name: value for name, value in facts.items() if self._told.get(name) != value}
        counts = {name: n for name, n in life.counters.items() if self._told.get(f"count:{name}") != n}
        if news or counts:
            self._told |= news
            self._told |= {f"count:{name}": n for name, n in counts.items()}
            await life.applier.write(news, counts)
