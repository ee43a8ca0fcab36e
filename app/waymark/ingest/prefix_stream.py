"""One stream of opaque prefixes: applies the events of a source to its two holders.

A source has no batches, no replay and no seqs, so events during a lost connection are unknown. After such a loss the
stream is ``degraded`` until every entry from before it has expired.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

from waymark.apply.applier import Applier
from waymark.apply.redis_calls import Fenced
from waymark.apply.slices import LoopTurns
from waymark.base.asker import Asker
from waymark.base.errors import InvalidValue, Unanswered, Undecodable
from waymark.base.event_streams import EventStreamParser, EventTooLong, ServerSentEvent
from waymark.base.logs import fields
from waymark.base.metrics import OTHER_MODELS, Metrics
from waymark.base.shown import shown
from waymark.domain.names import Holder, HolderName
from waymark.domain.prefixes import HOT, WARM, PrefixChange, PrefixEvent, change_of, prefix_key
from waymark.domain.status import StreamStatus
from waymark.engines.continuum import read_event
from waymark.ingest.counters import PrefixCounter, PrefixCounterByReason
from waymark.ingest.subscriber import UNREACHABLE_NOTE_SECONDS, UNREACHABLE_SECONDS
from waymark.store.activity import ActivityKind
from waymark.store.prefixes import CHANGES_MAX
from waymark.store.records import Facts, StreamRecord
from waymark.store.store import Store

log = logging.getLogger(__name__)


# Reads one event stream over HTTP: connects, reconnects, and buffers the events.
#
# The source is never slowed: an event that finds no room is dropped and counted. After a lost connection the next
# request names the last event received (``Last-Event-ID``), so a source that keeps its events can send the later ones.

QUEUE_EVENTS, QUEUE_BYTES = 10_000, 16 * 2**20
EVENT_BYTES_MAX = 2**16
"""The most bytes of an event, whose fields are few and short."""
PAUSE_SECONDS = 1.0
PAUSE_SECONDS_MAX = 60.0
ANSWER_SECONDS = 10.0
"""The time from a request to the head of its answer."""
#: The bytes that are parsed in one turn of the loop: 3 ms of empty lines.
_BYTES_AT_ONCE = 4096
_ID_BYTES_MAX = 1024


def _may_be_sent(event_id: str) -> bool:
    """Return whether an id may be kept, and sent as a header."""
    return len(event_id) <= _ID_BYTES_MAX and event_id.isprintable()


class EventSource:
    """The events of one URL, for one reader on one event loop. ``run`` reads them until it is cancelled."""

    def __init__(
        self,
        asker: Asker,
        url: str,
        *,
        last_event_id: str = "",
        pause_seconds: float = PAUSE_SECONDS,
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        self.connection = 0
        """The number of connections so far."""
        self.is_connected = False
        self.error: str | None = None
        """Why there is no connection; None while there is one, and before the first attempt."""
        self.received = 0
        self.dropped = 0
        """The number of events for which there was no room."""
        self.too_long = 0
        """The number of connections that were closed because an event was too long."""
        self._asker = asker
        self._url = url
        self._last_event_id = last_event_id if _may_be_sent(last_event_id) else ""
        self._first_pause = pause_seconds
        self._pause = pause_seconds
        self._events: deque[ServerSentEvent] = deque()
        self.waiting_bytes = 0
        self._queue_events = queue_events
        self._news = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Wait until there are events, the connection changes, or ``seconds`` have passed."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    def wake(self) -> None:
        """End the present wait, or the next one."""
        self._news.set()

    def take(self, limit: int) -> list[ServerSentEvent]:
        """Return at most ``limit`` of the events, oldest first."""
        events = [self._events.popleft() for _ in range(min(limit, len(self._events)))]
        self.waiting_bytes -= sum(map(_size, events))
        if self._events:
            self._news.set()
        return events

    @property
    def waiting(self) -> int:
        """The number of events in the buffer."""
        return len(self._events)

    async def run(self) -> None:
        """Connect, read, and connect again after a pause that doubles with every attempt without an event."""
        while True:
            try:
                await self._read()
                self._lose("the stream has ended")
            except (Unanswered, InvalidValue) as exc:
                self._lose(exc.sentence)
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    def _lose(self, error: str) -> None:
        self.is_connected, self.error = False, error
        self._news.set()

    async def _read(self) -> None:
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._last_event_id:
            headers["Last-Event-ID"] = self._last_event_id
        async with self._asker.follow(self._url, headers, seconds=ANSWER_SECONDS) as answer:
            if answer.status != 200:  # redirects are not followed, so a redirect fails, too
                raise Unanswered(f"it has answered with status {answer.status}")
            if answer.content_type.partition(";")[0].strip().lower() != "text/event-stream":
                raise Unanswered(f"its answer is {shown(answer.content_type[:80])}, not text/event-stream")
            self.connection += 1
            self.is_connected, self.error = True, None
            self._news.set()
            await self._keep(answer.pieces)

    async def _keep(self, pieces: AsyncIterator[bytes]) -> None:
        parser = EventStreamParser(last_event_id=self._last_event_id, bytes_max=EVENT_BYTES_MAX)
        async for piece in pieces:
            for start in range(0, len(piece), _BYTES_AT_ONCE):
                try:
                    for event in parser.feed(piece[start : start + _BYTES_AT_ONCE]):
                        self._append(event)
                except EventTooLong as exc:
                    self.too_long += 1
                    raise Unanswered(str(exc)) from None
                finally:
                    if _may_be_sent(parser.last_event_id):
                        self._last_event_id = parser.last_event_id
                    if parser.retry_milliseconds is not None:
                        self._first_pause = min(max(parser.retry_milliseconds / 1000, 0.1), PAUSE_SECONDS_MAX)
                await LoopTurns.of_loop().next()

    def _append(self, event: ServerSentEvent) -> None:
        self._pause = self._first_pause
        self.received += 1
        if len(self._events) >= self._queue_events or self.waiting_bytes + _size(event) > QUEUE_BYTES:
            self.dropped += 1
            return
        self._events.append(event)
        self.waiting_bytes += _size(event)
        self._news.set()


def _size(event: ServerSentEvent) -> int:
    return sum(map(len, event))


_TICK_SECONDS = 0.25
_REPORT_SECONDS = 1.0

RECONNECTED = "reconnected"
EVENTS_DROPPED = "events_dropped"
REASONS = {
    RECONNECTED: "the connection was lost, and events may be missing; older entries end after their time to live",
    EVENTS_DROPPED: "events arrived faster than they were applied, and some were dropped; entries end after their "
    "time to live",
}


class PrefixStream:
    """Applies the events of one source until it is cancelled or fenced."""

    def __init__(
        self,
        applier: Applier,
        store: Store,
        asker: Asker,
        metrics: Metrics,
        state: StreamRecord,
        *,
        publisher_timeout: float,
    ) -> None:
        registration = applier.grant.claim.registration
        assert registration.endpoint is not None
        interval = registration.prefixes.reconnect_interval_ms
        self.status = StreamStatus.STARTING
        self.applier = applier
        self._store = store
        self._metrics = metrics
        self._backend = metrics.backend(registration.instance_id)
        """The label of the publisher in metrics."""
        self._registration = registration
        self._options = registration.prefixes
        self._publisher_timeout = publisher_timeout
        self._last_event_id = state.last_event_id
        pause = PAUSE_SECONDS if interval is None else interval / 1000
        self._source = EventSource(asker, registration.endpoint, last_event_id=state.last_event_id, pause_seconds=pause)
        self._connection = 0
        self._away_seconds = max(UNREACHABLE_SECONDS, 2 * pause)
        """After this time without a connection, the source has failed twice, and decisions skip the engine."""
        self._noted = float("-inf")
        self._reasons: dict[str, float] = {}
        """The reasons why the stream is degraded, each with the monotonic time at which it ends."""
        self._had_holders = bool(state.holders)
        if state.holders:
            self._degrade(RECONNECTED)
        self._is_lost = state.status is StreamStatus.LOST
        self._down_since: float | None = None
        self._reported = float("-inf")
        self._facts: Facts = {}
        self._counts: dict[str, int] = {}
        self._seen = {"received": 0, "dropped": 0, "too_long": 0}
        self._logged: set[str] = set()

    @property
    def buffered(self) -> tuple[int, int]:
        """(bytes, events) that were received and are not applied yet."""
        return self._source.waiting_bytes, self._source.waiting

    async def run(self) -> None:
        """Run until cancelled; return when another worker has the stream."""
        reading = asyncio.create_task(self._source.run())
        try:
            await self._begin()
            while not reading.done():
                await self._source.wait(_TICK_SECONDS)
                if self._source.connection != self._connection:
                    self._connected()
                await self._apply(self._source.take(CHANGES_MAX))
                await self._tick()
            reading.result()
        except Fenced:
            log.info(
                "the stream stops here: another worker took the stream, or its registration changed",
                extra=fields(stream=self._name),
            )
        except asyncio.CancelledError:
            await self._last_report()
            raise
        finally:
            # This worker no longer knows whether there is a connection.
            self._metrics.kv_consumer_connected.remove(backend=self._backend)
            reading.cancel()
            await asyncio.wait([reading])

    def wake(self) -> None:
        """End the present wait for events."""
        self._source.wake()

    @property
    def _name(self) -> str:
        return str(self._registration.name)

    # ---- events ------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Begin the holders that do not exist yet."""
        registration, claim = self._registration, self.applier.grant.claim
        new_holders = {
            name: Holder(
                0,
                claim.publisher,
                registration.instance_id,
                registration.dp_rank,
                name.medium,
                registration.block_size,
                registration.instance_id,
                registration.scope,
            )
            for name in map(self._holder_name, (HOT, WARM))
            if name not in self.applier.resolver.holders
        }
        if new_holders:
            await self.applier.begin(new_holders)

    def _holder_name(self, medium: str) -> HolderName:
        return HolderName(self._registration.dp_rank, medium)

    def _connected(self) -> None:
        if self._connection or self._last_event_id:
            self._count("reconnects")
            self._metrics.kv_consumer_reconnects.labels(backend=self._backend).inc()
            self._degrade(RECONNECTED)
        self._connection = self._source.connection

    def _degrade(self, reason: str) -> None:
        self._reasons[reason] = time.monotonic() + self._options.entry_ttl_seconds

    async def _apply(self, events: list[ServerSentEvent]) -> None:
        """Apply at most ``CHANGES_MAX`` events."""
        if not events:
            return
        changes: list[PrefixChange] = []
        slices = self.applier.slices
        slices.begin()
        for event in events:
            change = self._change(event)
            if change is not None:
                changes.append(change)
            if slices.is_over:
                await slices.pause()
        if changes:
            await self._write(changes)
            self._metrics.kv_event_processed.labels(backend=self._backend).inc(len(changes))
        if _may_be_sent(events[-1].last_event_id):
            self._last_event_id = events[-1].last_event_id

    def _change(self, event: ServerSentEvent) -> PrefixChange | None:
        try:
            report = read_event(event.type, event.data)
        except Undecodable as exc:
            self._count_reason("decode_errors", exc.kind)
            self._metrics.decode_errors.labels(reason=exc.kind).inc()
            if exc.kind not in self._logged:
                self._logged.add(exc.kind)
                about = fields(stream=self._name, reason=exc.kind, sample=exc.sentence, bytes=len(event.data))
                log.warning("events rejected", extra=about)
            return None
        if report is None:
            self._ignore("unknown_type")
            return None
        if report.tenant_id not in (None, self._registration.tenant_id):
            self._ignore("other_tenant")
            return None
        self._metrics.events.labels(type=report.event).inc()
        self._count("created" if report.event in (PrefixEvent.CREATED, PrefixEvent.RELOADED) else "evicted")
        return PrefixChange(prefix_key(report.prefix_hash), change_of(report.event, self._options), report.tokens)

    def _ignore(self, reason: str) -> None:
        self._count_reason("events_ignored", reason)
        self._metrics.events_ignored.labels(reason=reason).inc()

    async def _write(self, changes: list[PrefixChange]) -> None:
        applier, options = self.applier, self._options
        hot, warm = (applier.resolver.holders[self._holder_name(medium)] for medium in (HOT, WARM))
        prefixes, grant = self._store.prefixes, applier.grant

        async def applied(portion: list[PrefixChange]) -> int:
            entries = await applier.calls.answered(
                lambda: prefixes.apply(grant, hot, warm, portion, ttl_seconds=options.entry_ttl_seconds)
            )
            if entries is None:
                raise Fenced
            return entries

        entries = await applied(changes)
        if entries <= options.max_entries:
            return
        # A tenth of the entries is removed, so that the next event does not reach the bound again.
        while entries > options.max_entries - options.max_entries // 10:
            oldest = await applier.calls.answered(lambda: prefixes.oldest(grant, hot, warm, options.max_entries))
            entries = await applied(oldest)
            self._count("evictions", len(oldest))
            self._metrics.index_evictions.labels(reason="max_entries").inc(len(oldest))
            await self._tick()

    # ---- several times a second --------------------------------------------------------------------

    async def _tick(self) -> None:
        now, source = time.monotonic(), self._source
        await self.applier.check_lease()
        self._count_source()
        self._reasons = {reason: end for reason, end in self._reasons.items() if end > now}
        await self._note_health(now)
        if source.is_connected:
            self._down_since = None
            if self._is_lost:
                self._is_lost = False
                await self.applier.set_lost(is_lost=False)
                log.info("publisher reconnected", extra=fields(stream=self._name))
        elif self._down_since is None:
            self._down_since = now
        elif self._publisher_timeout and not self._is_lost and now - self._down_since > self._publisher_timeout:
            self._is_lost = True
            await self.applier.write({"status": StreamStatus.LOST}, {})
            await self.applier.set_lost(is_lost=True)
            log.warning("publisher lost", extra=fields(stream=self._name))
        status = self._current_status()
        if status != self.status or now - self._reported > _REPORT_SECONDS:
            self._reported = now
            await self._report(status)

    async def _note_health(self, now: float) -> None:
        """Note for all decisions whether the engine can be reached."""
        if self._source.is_connected:
            if self._down_since is not None or self._noted != float("-inf"):
                self._noted = float("-inf")
                await self.applier.note_health(0)
        elif self._is_away(now) and not self._is_lost and now - self._noted > UNREACHABLE_NOTE_SECONDS / 3:
            self._noted = now
            await self.applier.note_health(int(1000 * UNREACHABLE_NOTE_SECONDS))

    def _is_away(self, now: float) -> bool:
        """Return whether the source has been disconnected, or has refused requests, for long enough to report it."""
        is_gone = bool(self._source.connection or self._had_holders or self._source.error)
        return is_gone and self._down_since is not None and now - self._down_since > self._away_seconds

    def _count_source(self) -> None:
        """Add what the source has counted since the last call."""
        source = self._source
        now = {"received": source.received, "dropped": source.dropped, "too_long": source.too_long}
        new = {name: n - self._seen[name] for name, n in now.items()}
        self._seen = now
        self._count("events_received", new["received"])
        self._count("events_dropped", new["dropped"])
        self._count("frames_malformed", new["too_long"])
        metrics, backend = self._metrics, self._backend
        metrics.kv_event_received.labels(backend=backend).inc(new["received"])
        metrics.kv_event_dropped.labels(backend=backend).inc(new["dropped"])
        if backend != OTHER_MODELS:  # many publishers share this label
            metrics.kv_consumer_connected.labels(backend=backend).set(source.is_connected)
        metrics.frames_malformed.inc(new["too_long"])
        metrics.buffer_dropped.inc(new["dropped"])
        if new["dropped"]:
            self._degrade(EVENTS_DROPPED)
        if new["received"]:
            self.applier.counters["last_event_at"] = int(time.time())

    def _current_status(self) -> StreamStatus:
        if self._is_lost:
            return StreamStatus.LOST
        if not self._source.is_connected:
            is_gone = self._source.connection or self._is_away(time.monotonic())
            return StreamStatus.UNREACHABLE if is_gone else StreamStatus.STARTING
        return StreamStatus.DEGRADED if self._reasons else StreamStatus.ACTIVE

    async def _report(self, status: StreamStatus) -> None:
        if status != self.status:
            about = fields(stream=self._name, status=status, reasons=sorted(self._reasons), error=self._source.error)
            log.info("stream status changed", extra=about)
            self._note_reachability(self.status, status)
            self.status = status
        error = self._source.error or "; ".join(f"{reason}: {REASONS[reason]}" for reason in sorted(self._reasons))
        facts: Facts = {"status": status, "last_error": error, "last_event_id": self._last_event_id}
        counts = {name: n for name, n in self.applier.counters.items() if self._counts.get(name) != n}
        if facts != self._facts or counts:
            await self.applier.write(facts if facts != self._facts else {}, counts)
            self._facts = facts
            self._counts |= counts

    def _note_reachability(self, before: StreamStatus, now: StreamStatus) -> None:
        """Note in the activity that the connection is lost, is lost for long, or is back."""
        happened, endpoint = self.applier.happened, self._registration.endpoint
        if now is StreamStatus.UNREACHABLE:
            happened(ActivityKind.UNREACHABLE, f"no connection to {endpoint}: {self._source.error or 'it has ended'}")
        elif now is StreamStatus.LOST:
            happened(ActivityKind.LOST, f"no connection to {endpoint} for longer than WAYMARK_PUBLISHER_TIMEOUT")
        elif before is StreamStatus.UNREACHABLE:
            happened(ActivityKind.REACHABLE)
        elif before is StreamStatus.LOST:
            happened(ActivityKind.FOUND)

    async def _last_report(self) -> None:
        """Write the counts since the last report, if Redis answers at once."""
        try:
            async with asyncio.timeout(_REPORT_SECONDS):
                await self._report(self.status)
        except (TimeoutError, Fenced):
            log.debug("last counters not written", extra=fields(stream=self._name))

    def _count(self, name: PrefixCounter, n: int = 1) -> None:
        if n:
            self.applier.counters[name] += n

    def _count_reason(self, name: PrefixCounterByReason, reason: str) -> None:
        self.applier.counters[f"{name}.{reason}"] += 1
