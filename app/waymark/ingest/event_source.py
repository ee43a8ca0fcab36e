"""Reads one event stream over HTTP: connects, connects again, and buffers the events.

The source is never slowed: an event that finds no room is dropped and counted. After a lost connection the next one
names the last event received (``Last-Event-ID``); a source that keeps its events can then send the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from waymark.base.asker import Asker
from waymark.base.errors import InvalidValue, Unanswered
from waymark.base.event_streams import EventStreamParser, EventTooLong, ServerSentEvent
from waymark.base.shown import shown

QUEUE_EVENTS = 10_000
PAUSE_SECONDS = 1.0
PAUSE_SECONDS_MAX = 60.0
ANSWER_SECONDS = 10.0
"""The time from a request to the head of its answer."""
_PIECES_AT_ONCE = 16
_ID_BYTES_MAX = 1024


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
        """Connections that were made so far."""
        self.is_connected = False
        self.error: str | None = None
        """Why there is no connection; None while there is one, and before the first attempt."""
        self.received = 0
        self.dropped = 0
        """Events for which there was no room."""
        self.too_long = 0
        """Connections that were left because an event was too long."""
        self._asker = asker
        self._url = url
        self._last_event_id = last_event_id
        self._first_pause = pause_seconds
        self._pause = pause_seconds
        self._events: deque[ServerSentEvent] = deque()
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
        parser = EventStreamParser(last_event_id=self._last_event_id)
        count = 0
        async for piece in pieces:
            try:
                for event in parser.feed(piece):
                    self._append(event)
            except EventTooLong as exc:
                self.too_long += 1
                raise Unanswered(str(exc)) from None
            finally:
                if len(parser.last_event_id) <= _ID_BYTES_MAX and parser.last_event_id.isprintable():
                    self._last_event_id = parser.last_event_id
                if parser.retry_milliseconds is not None:
                    self._first_pause = min(max(parser.retry_milliseconds / 1000, 0.1), PAUSE_SECONDS_MAX)
            count += 1
            if count % _PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _append(self, event: ServerSentEvent) -> None:
        self._pause = self._first_pause
        self.received += 1
        if len(self._events) >= self._queue_events:
            self.dropped += 1
            return
        self._events.append(event)
        self._news.set()
