"""One stream: a publisher's frames, in order, into the index, whatever goes wrong on the way.

Subscribe first, then replay, then drain what was queued meanwhile; ask again when a frame is missing, and when
there has been none for long. The rules are the event contract's, "Order, gaps, restarts".
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal

from app.ingest.applier import Fenced, Incoming
from app.ingest.catch_up import CatchUp, Outcome
from app.ingest.frames import Frame
from app.ingest.life import BATCHES_LOST, JOINED_LATE, NO_REPLAY, REPLAY_INCOMPLETE, REPLAY_SILENT, Life
from app.ingest.order import Judgement, Order
from app.ingest.subscriber import Context, Subscriber
from app.logs import fields

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_REPORT_SECONDS = 1.0

_MIXED = (
    "frames of several topics or ranks come with counters of their own; "
    'register this publisher with "sequence": "rank", or register each publisher behind it'
)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream goes by; the names are those of the settings."""

    on_gap: Literal["keep", "reset"] = "keep"
    probe_seconds: float = 30.0
    replay_idle_seconds: float = 2.0
    replay_seconds: float = 120.0
    publisher_timeout: float = 60.0
    lease_seconds: float = 8.0
    stream_buffer_bytes: int = 64 * 2**20
    stream_buffer_frames: int = 20_000
    fold_batches: int = 64


class Stream:
    """Applies one publisher's stream until it is cancelled or fenced."""

    def __init__(self, life: Life, context: Context, replays: asyncio.Semaphore, options: StreamOptions) -> None:
        registration = life.applier.grant.claim.registration
        assert registration.endpoint is not None
        self.status = "pending"
        self._life = life
        self._context = context
        self._replays = replays
        self._options = options
        self._registration = registration
        self._subscriber = Subscriber(
            context,
            registration.endpoint,
            buffer_bytes=options.stream_buffer_bytes,
            buffer_frames=options.stream_buffer_frames,
        )
        self._connection = 0
        self._lanes: dict[int, Order] = {}
        self._is_failed = False
        self._is_replaying = False
        self._silent_until = 0.0
        now = time.monotonic()
        self._heard = now
        self._down_since: float | None = now
        self._renewed = now
        self._reported = 0.0
        self._told: dict[str, object] = {}
        self._dropped = self._malformed = 0

    # ---- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled; returns when somebody else has the stream."""
        try:
            async with self._subscriber:
                while True:
                    await self._subscriber.wait(_TICK_SECONDS)
                    frames = self._subscriber.take(self._options.fold_batches)
                    if frames:
                        await self._live(frames)
                    elif self._subscriber.is_connected and self._subscriber.connection != self._connection:
                        await self._connected(self._subscriber.connection)
                    elif self._is_probe_due():
                        await self._catch_up()
                    await self._tick()
        except Fenced:
            log.info("stream is somebody else's now", extra=fields(stream=self._life.name))

    def _is_probe_due(self) -> bool:
        return (
            self._subscriber.is_connected
            and time.monotonic() - self._heard > self._options.probe_seconds
            and self._registration.sequence == "publisher"
            and not self._is_failed
        )

    async def _tick(self) -> None:
        """What must happen now and then, also in the middle of a long replay: renew the lease, tell how we are."""
        now = time.monotonic()
        life, options = self._life, self._options
        if now - self._renewed > options.lease_seconds / 4:
            self._renewed = now
            await life.applier.renew(options.lease_seconds)
        if self._subscriber.is_connected:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        is_away = self._down_since is not None and now - self._down_since > options.publisher_timeout
        if is_away and options.publisher_timeout and not life.is_lost and life.applier.resolver.holders:
            await life.lost()
        status = self._current_status()
        if status != self.status or now - self._reported > _REPORT_SECONDS:
            await self._report(status, now)

    def _current_status(self) -> str:
        if self._is_failed:
            return "failed"
        if self._life.is_lost:
            return "lost"
        if not self._subscriber.is_connected:
            return "pending"
        if self._is_replaying:
            return "replaying"
        return "degraded" if self._life.reasons else "active"

    async def _report(self, status: str, now: float) -> None:
        """Write what has changed of status and counters into the record."""
        self._reported = now
        life, resolver = self._life, self._life.applier.resolver
        dropped, malformed = self._subscriber.dropped, self._subscriber.malformed
        life.count("buffer_dropped", dropped - self._dropped)
        life.count("frames_malformed", malformed - self._malformed)
        self._dropped, self._malformed = dropped, malformed
        if status != self.status:
            log.info("stream status", extra=fields(stream=life.name, status=status, reasons=sorted(life.reasons)))
            self.status = status
        facts: dict[str, str | int | float] = {
            "status": status,
            "reasons": " ".join(sorted(life.reasons)),
            "last_error": _MIXED if self._is_failed else life.applier.last_error or "",
            "waiting": resolver.waiting.blocks,
        }
        facts |= {f"event:{holder}": event_id for holder, event_id in resolver.event_ids.items()}
        news = {name: value for name, value in facts.items() if self._told.get(name) != value}
        counts = {name: n for name, n in life.counters.items() if self._told.get(f"count:{name}") != n}
        if news or counts:
            self._told |= news
            self._told |= {f"count:{name}": n for name, n in counts.items()}
            await life.applier.write(news, counts)

    # ---- live frames -------------------------------------------------------------------------------

    async def _live(self, frames: list[Frame]) -> None:
        self._heard = time.monotonic()
        life = self._life
        for frame in frames:
            if frame.connection != self._connection:
                await life.flush()
                await self._connected(frame.connection)
            incoming = life.incoming(frame.seq, frame.payload)
            if incoming is None or self._is_failed:
                continue
            if self._registration.sequence == "rank":
                await self._live_of_rank(frame, incoming)
                continue
            judgement = life.order.judge(frame, incoming.digest, incoming.batch.ts, incoming.batch.dp_rank)
            if judgement is not Judgement.IN_ORDER:
                await life.flush()
                judgement = await self._settle(judgement, incoming)
            if judgement is Judgement.MIXED:
                self._is_failed = True
                log.error("stream failed", extra=fields(stream=life.name, error=_MIXED))
            elif judgement is Judgement.STALE:
                life.count("stale_batches")
            else:
                life.append(incoming)
        await life.flush()

    async def _settle(self, judgement: Judgement, incoming: Incoming) -> Judgement:
        """Deal with a frame that is not simply next. Afterwards it is IN_ORDER, the BEGINNING, STALE or MIXED."""
        life = self._life
        if judgement in (Judgement.STALE, Judgement.MIXED):
            return judgement
        if judgement is Judgement.RESTART:
            await life.begin_anew("a lower seq")
            self._silent_until = 0.0
        elif judgement is Judgement.GAP:
            life.count("gaps")
        if judgement is not Judgement.BEGINNING:
            # At a beginning the replay that comes with every connection has been tried already.
            await self._catch_up()
        judgement = self._place(incoming)
        if judgement is Judgement.RESTART:
            # The replay ran past this number, and this frame is newer all the same: that was the life before.
            await life.begin_anew("a lower seq")
            judgement = Judgement.BEGINNING
        if judgement is Judgement.GAP:
            await life.lose(incoming.seq)
            judgement = self._place(incoming)
        if judgement is Judgement.BEGINNING and incoming.seq > life.first_seq:
            life.reasons.add(JOINED_LATE)
        return judgement

    def _place(self, incoming: Incoming) -> Judgement:
        return self._life.order.place(incoming.seq, incoming.digest, incoming.batch.ts)

    async def _live_of_rank(self, frame: Frame, incoming: Incoming) -> None:
        """A frame of a proxy with a counter per rank: no replay, and a lower seq ends the life of its rank only."""
        life = self._life
        dp_rank = self._registration.dp_rank if incoming.batch.dp_rank is None else incoming.batch.dp_rank
        order = self._lanes.setdefault(dp_rank, Order(None, "", None))
        judgement = order.judge(frame, incoming.digest, incoming.batch.ts, dp_rank)
        if judgement in (Judgement.RESTART, Judgement.MIXED):
            life.count("restarts")
            await life.applier.new_life(str(dp_rank))
            order.restart()
        elif judgement is Judgement.STALE:
            life.count("stale_batches")
            return
        elif judgement is Judgement.GAP:
            assert order.watermark is not None
            life.count("gaps")
            life.count("batches_lost", incoming.seq - order.watermark - 1)
            life.reasons.add(BATCHES_LOST)
            await life.distrust_counts()
        elif judgement is Judgement.BEGINNING and incoming.seq > life.first_seq:
            life.reasons.add(JOINED_LATE)
        order.advance(incoming.seq, incoming.digest, incoming.batch.ts)
        await life.applier.apply([incoming], None)
        await life.found()

    # ---- connections and replays -------------------------------------------------------------------

    async def _connected(self, connection: int) -> None:
        self._connection = connection
        self._silent_until = 0.0
        self._life.is_proven = False
        self._life.order.connected()
        for order in self._lanes.values():
            order.connected()
        await self._catch_up()

    async def _catch_up(self) -> None:
        """Ask for everything from the watermark on, and apply it; never for longer than the stated times."""
        endpoint, life, options = self._registration.replay_endpoint, self._life, self._options
        if endpoint is None or self._registration.sequence == "rank":
            life.reasons.add(NO_REPLAY)
            return
        if time.monotonic() < self._silent_until:
            return
        async with self._replays:
            self._is_replaying = True
            try:
                await self._tick()
                outcome = await CatchUp(
                    life,
                    self._context,
                    endpoint,
                    idle_seconds=options.replay_idle_seconds,
                    seconds=options.replay_seconds,
                    fold_batches=options.fold_batches,
                    beat=self._tick,
                ).run()
            finally:
                self._is_replaying = False
        life.count_replay(outcome)
        self._heard = time.monotonic()
        if outcome is Outcome.COMPLETE:
            life.reasons -= {REPLAY_SILENT, REPLAY_INCOMPLETE}
            await life.found()
        else:
            life.reasons.add(REPLAY_SILENT if outcome is Outcome.SILENT else REPLAY_INCOMPLETE)
            # An endpoint that does not answer holds live frames up once, not at every gap.
            self._silent_until = self._heard + options.probe_seconds
