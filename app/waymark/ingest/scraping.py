"""Scrapes the gauges of engines. Each engine has one scraper, however many replicas use its gauges.

The worker with the stream of an engine's first rank scrapes the engine for all of its ranks. Each engine has its own
task, so a slow engine does not delay others. An engine that does not answer is asked less and less often.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from waymark.base.asker import Asker, in_pieces
from waymark.base.errors import InvalidValue, StoreUnavailable, Unanswered
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.names import Registration
from waymark.engines.gauges import GaugesParser, gauges_of
from waymark.store.claims import Claim
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: The most bytes of an engine's metrics; those of vLLM with 8 ranks have half a MiB.
BYTES_MAX = 8 * 2**20
_ANSWER_SECONDS_MAX = 5.0
#: The seconds between the starts of two requests, to the same engine or not: a request takes about two milliseconds of
#: the event loop, which the streams need, too. If there are many engines, or the loop is busy, each is asked less
#: often.
SPACE_SECONDS = 0.01
#: A reading is valid for this many intervals.
_INTERVALS = 3
#: The longest pause between two requests to an engine that does not answer. Otherwise thousands of engines whose pods
#: are not ready would be asked every few seconds.
_PAUSE_SECONDS_MAX = 60.0


class Scraper:
    """Scrapes the engines every ``seconds`` seconds; never, if ``seconds`` is 0."""

    def __init__(self, store: Store, metrics: Metrics, asker: Asker, seconds: float) -> None:
        self._store = store
        self._metrics = metrics
        self._asker = asker
        self._seconds = seconds
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._claims: dict[str, Sequence[Claim]] = {}
        """The publishers of each engine that this worker scrapes, by URL."""
        self._seen: tuple[Sequence[Claim], Sequence[Claim]] = ((), ())
        """The arguments of the last call of ``see``."""
        self._gate = asyncio.Lock()
        """Locked until the next request may begin."""

    def see(self, claims: Sequence[Claim], mine: Sequence[Claim]) -> None:
        """Update the engines. ``claims`` has all claims, ``mine`` those in this worker's share."""
        if self._seconds == 0:
            return
        if claims is not self._seen[0] or mine is not self._seen[1]:
            self._seen = claims, mine
            own = {claim.publisher for claim in mine}
            by_url: dict[str, list[Claim]] = {}
            for claim in sorted(claims, key=lambda claim: claim.publisher):
                url = metrics_url(claim.registration)
                if url is not None:
                    by_url.setdefault(url, []).append(claim)
            self._claims = {url: several for url, several in by_url.items() if several[0].publisher in own}
            for url in self._tasks.keys() - self._claims.keys():
                self._tasks.pop(url).cancel()
        for url in self._claims:
            if url not in self._tasks or self._tasks[url].done():
                self._tasks[url] = asyncio.get_running_loop().create_task(self._keep_scraping(url))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_scraping(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        pause, error = self._seconds, ""
        # A random delay, so that not all engines are scraped at the same moment.
        await asyncio.sleep(random.uniform(0, self._seconds))
        asked_at = loop.time() - len(self._claims) * SPACE_SECONDS
        while True:
            async with self._gate:
                await asyncio.sleep(SPACE_SECONDS)
            began = loop.time()
            interval, asked_at = max(self._seconds, began - asked_at), began
            try:
                outcome = "ok" if await self._scrape(url, interval) else "empty"
                pause, now = self._seconds, ""
            except (Unanswered, InvalidValue, ValueError) as exc:
                outcome, now = "failed", getattr(exc, "sentence", str(exc))
                pause = min(2 * pause, max(_PAUSE_SECONDS_MAX, self._seconds))
            except StoreUnavailable as exc:
                # The engine has answered, so its known gauges are kept.
                outcome, now = "failed", error
                log.debug("gauges of an engine are not written", extra=fields(url=url, error=exc.sentence))
            self._metrics.gauge_scrapes.labels(outcome=outcome).inc()
            if now and not error:
                log.warning("metrics of an engine cannot be read", extra=fields(url=url, error=now))
            error = now
            await asyncio.sleep(max(0.0, pause - (loop.time() - began) - SPACE_SECONDS))

    async def _scrape(self, url: str, interval: float) -> bool:
        """Read the gauges of an engine, which is asked every ``interval`` seconds, and write them. Return whether it
        has any.
        """
        reply = await self._asker.ask(url, seconds=min(interval, _ANSWER_SECONDS_MAX), bytes_max=BYTES_MAX)
        if reply.status != 200:
            raise Unanswered(f"it answered with status {reply.status}")
        parser = GaugesParser()
        async for piece in in_pieces(reply.body):
            parser.feed(piece)
        ranks = parser.end()
        milliseconds = int(1000 * _INTERVALS * interval)
        for claim in self._claims.get(url, ()):
            gauges = gauges_of(ranks, claim.registration.dp_rank)
            if gauges is not None:
                await self._store.gauges.note(claim.group_id, claim.publisher, gauges, milliseconds)
        return bool(ranks)


def metrics_url(registration: Registration) -> str | None:
    """Return the URL of the metrics of a target's engine, or None if its registration names none."""
    target = registration.target
    if registration.scope != "instance":
        return None
    if target.metrics_url is not None:
        return target.metrics_url
    return None if target.address is None else target.address.rstrip("/") + "/metrics"
