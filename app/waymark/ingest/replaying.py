"""Runs the replays of one stream: waits for a place, requests batches, and lets the stream continue meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.ingest.life import Life
from waymark.ingest.options import StreamOptions
from waymark.ingest.received import ReceivedFrames
from waymark.ingest.replay import AttemptResult, ReplayAttempt
from waymark.ingest.replay_places import ReplayPlace, ReplayPlaces
from waymark.ingest.sockets import ZmqContext

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25


class Replaying:
    """Runs the replays of a stream, one at a time.

    ``tick`` is called several times a second, also during a wait. ``wake`` is called when a waiting replay gets its
    place.
    """

    def __init__(
        self,
        life: Life,
        context: ZmqContext,
        places: ReplayPlaces,
        metrics: Metrics,
        received: ReceivedFrames,
        options: StreamOptions,
        *,
        tick: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self.is_running = False
        """Whether a replay runs, or live frames wait for one."""
        self._life = life
        self._context = context
        self._places = places
        self._received = received
        self._metrics = metrics
        self._options = options
        self._idle_seconds = options.replay_idle_seconds
        self._tick = tick
        self._wake = wake
        registration = life.applier.grant.claim.registration
        self._instance = (registration.tenant_id, registration.instance_id)
        self._place: ReplayPlace | None = None
        self._seconds_left = options.replay_seconds
        self._is_slow = False

    @property
    def is_waiting(self) -> bool:
        """Whether a replay waits for its place while live frames are applied."""
        return self._place is not None

    @property
    def is_due(self) -> bool:
        """Whether a replay has waited for its place, and holds it now."""
        return self._place is not None and self._place.is_held

    def drop(self) -> None:
        """Give up the rest of a replay, and release its place."""
        if self._place is not None:
            self._place.release()
            self._place = None
        self._seconds_left = self._options.replay_seconds

    async def run(self, endpoint: str, *, needed_by: int | None) -> AttemptResult:
        """Replay missing batches. Return WAITING if live frames can be applied before there is a place.

        ``needed_by`` is the seq of a live frame that waits. If batches are missing before it, the frame waits until
        there is a place; otherwise it waits at most ``replay_idle_seconds``.
        """
        self.is_running = True
        try:
            await self._tick()
            while True:
                if not await self._has_place(needed_by):
                    self._life.go_on_unproven()
                    return AttemptResult.WAITING
                if not self._received.is_unbroken:
                    # The connection may have ended while this stream waited for its place.
                    self._life.is_proven = False
                outcome = await self._use_place(endpoint)
                if outcome is not AttemptResult.YIELDED:
                    return outcome
        except BaseException:
            self.drop()
            raise
        finally:
            self.is_running = False

    async def _has_place(self, needed_by: int | None) -> bool:
        if self._place is None:
            server = self._life.applier.server
            self._place = self._places.request(self._instance, is_slow=self._is_slow, on_held=self._wake, server=server)
        place = self._place
        while not await place.wait(min(_TICK_SECONDS, self._idle_seconds)):
            await self._tick()
            watermark = self._life.order.watermark
            is_needed = needed_by is not None and watermark is not None and watermark + 1 < needed_by
            if place.seconds >= self._idle_seconds and not is_needed:
                return False
        return True

    async def _use_place(self, endpoint: str) -> AttemptResult:
        """Replay to the end, or until another stream needs the place."""
        place, self._place = self._place, None
        assert place is not None
        began = time.monotonic()
        attempt = ReplayAttempt(
            self._life,
            self._context,
            endpoint,
            place,
            self._received,
            self._options,
            seconds=self._seconds_left,
            between_portions=self._tick,
        )
        calls = self._life.applier.calls
        calls.on_silence = place.set_silent
        try:
            outcome = await attempt.run()
        finally:
            calls.on_silence = None
            place.release()
        self._seconds_left -= time.monotonic() - began
        self._is_slow = attempt.is_slow
        if attempt.yielded is not None:
            self._metrics.replay_places_yielded.labels(reason=attempt.yielded).inc()
            about = fields(stream=self._life.name, reason=attempt.yielded, watermark=self._life.order.watermark)
            log.debug("replay gave up its place", extra=about)
            if self._seconds_left > 0:
                return AttemptResult.YIELDED
            outcome = AttemptResult.INCOMPLETE
        self._seconds_left = self._options.replay_seconds
        return outcome
