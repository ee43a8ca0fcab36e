"""One stream: applies a publisher's frames to the index, in order, through losses and restarts.

The stream subscribes first, then requests a replay, and then applies the frames received meanwhile. It requests a
replay again when a frame is missing, and after a long silence. It follows the rules in ``docs/protocol.md`` under
"Order, gaps, restarts".
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from waymark.apply.applier import Applier, Incoming
from waymark.apply.redis_calls import Fenced
from waymark.base.errors import InvalidValue
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.status import StreamStatus
from waymark.ingest.counters import REPLAY_INCOMPLETE, REPLAY_SILENT, REPLAY_WAITING
from waymark.ingest.frames import FrameRoom
from waymark.ingest.life import Life
from waymark.ingest.options import StreamOptions
from waymark.ingest.order import FramePosition
from waymark.ingest.rank_streams import RankStreams
from waymark.ingest.received import ReceivedFrames, Settling
from waymark.ingest.replay import AttemptResult
from waymark.ingest.replay_places import ReplayPauses, ReplayPlaces
from waymark.ingest.replaying import Replaying
from waymark.ingest.snapshots import PAUSE_SECONDS_MAX, Snapshots, SnapshotSource
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.status_reporter import StatusReporter
from waymark.ingest.straight import StraightWay
from waymark.ingest.subscriber import Subscriber
from waymark.ingest.subscribers import Subscribers
from waymark.store.activity import ActivityKind

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
#: For ``_BUSY_SECONDS`` after its last news, a stream ticks every ``_TICK_SECONDS``; a silent stream waits for up to
#: ``_SILENT_SECONDS``.
_BUSY_SECONDS, _SILENT_SECONDS = 2.5, 5.0
_SETTLE_TRIES = 2


class Stream:
    """Applies one publisher's stream until it is cancelled or fenced."""

    def __init__(
        self,
        life: Life,
        context: ZmqContext,
        places: ReplayPlaces,
        metrics: Metrics,
        options: StreamOptions,
        room: FrameRoom,
        subscribers: Subscribers | None = None,
        snapshots: SnapshotSource | None = None,
    ) -> None:
        """Create a stream. ``room`` and ``subscribers`` are those of the worker. ``snapshots`` is the source of
        snapshots of the engine's cache, if it has one.
        """
        registration = life.applier.grant.claim.registration
        assert registration.endpoint is not None
        self._life = life
        self._options = options
        self._registration = registration
        self._subscriber = Subscriber(
            context,
            registration.endpoint,
            buffer_bytes=options.stream_buffer_bytes,
            buffer_frames=options.stream_buffer_frames,
            room=room,
            subscribers=subscribers,
            message_bytes_max=options.message_bytes_max,
            payload_bytes_max=life.decoder.payload_bytes_max,
        )
        self._over = 0
        """The number of a connection whose life has ended: its remaining frames are dropped."""
        self._received = ReceivedFrames(self._subscriber)
        self._straight = StraightWay(life, self._subscriber, self._received, metrics)
        self._rank_streams = RankStreams(life, on_gap=options.on_gap)
        self._replaying = Replaying(
            life, context, places, metrics, self._received, options, tick=self._tick, wake=self._subscriber.wake
        )
        self._snapshots = snapshots and Snapshots(life, snapshots, context, self._received, options, tick=self._tick)
        self._pauses = ReplayPauses(options.probe_seconds)
        self._repaired: int | None = None
        """The number of the last life that was to be replayed from its first batch, because of a repair."""
        self._repair_at = 0.0
        self._repair_pause = options.snapshot_pause_seconds
        self._answered: int | None = None
        """The number of the life whose replay the publisher has answered to the end; None after any other outcome."""
        now = time.monotonic()
        self._heard = now
        self._down_since: float | None = now
        self._news = now
        """When frames last arrived, or the state of the connection last changed."""
        self._noted = float("-inf")
        """When it was last noted that the engine cannot be reached."""
        self._reached = 0
        """The number of the connection for which it was last noted that the engine is reachable."""
        self._dropped_asked = 0
        self._reporter = StatusReporter(
            life, self._subscriber, self._replaying, message_bytes_max=options.message_bytes_max
        )

    # ---- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled; return when another worker has the stream."""
        try:
            async with self._subscriber:
                while True:
                    seconds = self._wait_seconds()
                    self._straight.open(wakes=seconds > _TICK_SECONDS)
                    if await self._subscriber.wait(seconds):
                        self._news = time.monotonic()
                    await self._straight.close()
                    heard = self._straight.heard
                    self._news, self._heard = max(self._news, heard), max(self._heard, heard)
                    if self._replaying.is_due or self._is_beginning_due:
                        await self._run_replay()
                    if self._subscriber.buffered_frames:
                        async with self._life.applier.turn():
                            if not await self._straight.in_turn(self._options.fold_batches):
                                self._received.take(self._options.fold_batches)
                                await self._live()
                    elif self._subscriber.is_connected and self._subscriber.connection != self._received.connection:
                        await self._connected(self._subscriber.connection)
                    elif self._is_probe_due():
                        await self._run_replay()
                    await self._tick()
                    if self._snapshots and self._snapshots.is_due and not self._is_replay_open:
                        await self._take_snapshot(self._snapshots)
                    elif self._is_repair_due:
                        await self._repair()
        except Fenced:
            log.info(
                "the stream stops here: another worker took the stream, or its registration changed",
                extra=fields(stream=self._life.name),
            )
        except asyncio.CancelledError:
            await self._reporter.report_last()
            raise
        finally:
            self._straight.leave()
            self._replaying.drop()

    def wake(self) -> None:
        """End the present wait for frames."""
        self._subscriber.wake()

    @property
    def applier(self) -> Applier:
        return self._life.applier

    @property
    def status(self) -> StreamStatus:
        """The status in the last report."""
        return self._reporter.status

    @property
    def buffered(self) -> tuple[int, int]:
        """(bytes, frames) that were received and are not applied yet."""
        return self._subscriber.buffered_bytes, self._subscriber.buffered_frames

    def _wait_seconds(self) -> float:
        """Return how long to wait for news. A stream that waits only for a silent or absent engine costs a worker
        almost nothing.
        """
        now, life, applier = time.monotonic(), self._life, self._life.applier
        is_busy = (
            now - self._news < _BUSY_SECONDS
            or (self._was_there and not (self._subscriber.is_connected or life.is_lost))
            or self._replaying.is_waiting
            or life.is_open
            or (self._snapshots is not None and life.wants_snapshot)
            or applier.resolver.generations.are_bounded
            or applier.pool_hashes.is_at_work
        )
        if is_busy:
            return _TICK_SECONDS
        can_probe = self._subscriber.is_connected and self._registration.can_replay
        probe_at = self._heard + self._options.probe_seconds if can_probe else math.inf
        return min(max(_TICK_SECONDS, probe_at - now), _SILENT_SECONDS)

    def _is_probe_due(self) -> bool:
        """Return whether no frame has come for long, or frames were dropped: without a later frame, no gap shows the
        loss.
        """
        if self._replaying.is_waiting:
            return False
        is_due = time.monotonic() - self._heard > self._options.probe_seconds
        return self._subscriber.is_connected and (is_due or self._subscriber.dropped > self._dropped_asked)

    @property
    def _is_beginning_due(self) -> bool:
        """Whether to request a life from its beginning again, because a replay of a part was not answered."""
        is_open = self._life.is_open and self._registration.can_replay and not self._replaying.is_waiting
        return is_open and self._received.is_unbroken and self._pauses.is_beginning_due

    async def _tick(self) -> None:
        """Check the lease and report the status; called several times a second unless the stream is silent, also during
        a long replay.
        """
        now = time.monotonic()
        life, options = self._life, self._options
        await life.applier.check_lease()
        await life.yield_ranks()
        await life.applier.bounding.check()
        await life.applier.pool_hashes.tick(life.acknowledged)
        if self._subscriber.is_connected:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        is_away = self._down_since is not None and now - self._down_since > options.publisher_timeout
        if is_away and options.publisher_timeout and not life.is_lost and self._was_there:
            self._straight.drop()
            await life.lost()
        await self._note_health(now)
        await self._reporter.report(now)

    @property
    def _was_there(self) -> bool:
        """Whether the engine has been connected or has blocks, so that it can be lost."""
        return self._received.connection > 0 or bool(self._life.applier.resolver.holders)

    async def _note_health(self, now: float) -> None:
        """Note for all decisions whether the engine can be reached, even if it was never connected."""
        subscriber, life = self._subscriber, self._life
        is_away = subscriber.is_unreachable and not life.is_lost
        if subscriber.is_connected and subscriber.connection != self._reached:
            self._reached, self._noted = subscriber.connection, float("-inf")
            await life.applier.note_health(0)
        elif is_away and now - self._noted > subscriber.note_seconds / 3:
            self._noted = now
            await life.applier.note_health(int(1000 * subscriber.note_seconds))

    # ---- live frames -------------------------------------------------------------------------------

    async def _live(self) -> None:
        self._heard = time.monotonic()
        life, received = self._life, self._received
        life.applier.slices.begin()
        self._straight.pause()
        while (frame := received.next()) is not None:
            if frame.connection != received.connection:
                await life.flush()
                received.put_back(frame)  # the replay of the connection may lack it
                await self._connected(frame.connection)
                continue
            if frame.connection == self._over:
                life.count("stale_batches")
                continue
            if received.is_applied(frame.seq):
                life.order.passed(frame)
                continue
            # After a replay the buffer may be full of batches that the replay has brought. They are not decoded again,
            # because large ones take long.
            is_known = not life.is_open and life.order.is_behind(frame.seq)
            incoming = await life.decoder.decode(frame.seq, frame.payload, frame.topic, is_known=is_known)
            if incoming is None or self._reporter.is_mixed:
                continue
            if self._registration.sequence == "rank":
                await self._rank_streams.live(frame, incoming)
                continue
            dp_rank = life.rank_of(incoming.batch)
            position = life.order.judge(frame, incoming.digest, incoming.batch.ts, dp_rank)
            judgement = life.judge(position, incoming.batch)
            if judgement is not FramePosition.IN_ORDER:
                await life.flush()
                received.settling = settling = Settling.of(frame, incoming)
                incoming = settling.incoming
                judgement = await self._settle(judgement, incoming)
                received.settling = None
                life.order.last_live = frame.seq
                if judgement in (FramePosition.IN_ORDER, FramePosition.BEGINNING):
                    incoming = await settling.whole(life.decoder)
            if judgement is FramePosition.APPLIED:
                continue
            if judgement is FramePosition.MIXED:
                self._reporter.fail()
                self._straight.drop()
            elif judgement is FramePosition.STALE:
                life.count("stale_batches")
            else:
                self._straight.note(incoming.batch)
                count = await life.take(incoming, received.behind(frame))
                received.skip(count)
                life.order.went_on(count)
        await life.flush()

    async def _settle(self, judgement: FramePosition, incoming: Incoming) -> FramePosition:
        """Settle a frame other than the next one. The result is IN_ORDER, BEGINNING, STALE, APPLIED or MIXED."""
        life = self._life
        if judgement in (FramePosition.STALE, FramePosition.MIXED):
            return judgement
        if judgement is FramePosition.GAP:
            life.count("gaps")
        for _ in range(_SETTLE_TRIES):
            if judgement is FramePosition.RESTART:
                is_other = life.is_of_another_process(incoming.batch)
                await life.begin_anew("another publisher_id" if is_other else "a lower seq")
                self._pauses.reset()
            if judgement is not FramePosition.BEGINNING or incoming.seq > life.first_seq:
                await self._run_replay(needed_by=incoming.seq)
                if self._received.is_applied(incoming.seq):
                    return FramePosition.APPLIED
            if life.is_of_another_process(incoming.batch):
                return FramePosition.STALE  # the replay came from a later process than the frame
            judgement = self._position_of(incoming)
            if judgement is not FramePosition.RESTART:
                break
        if judgement is FramePosition.RESTART or self._over == self._received.connection:
            # The replay was requested after this frame had arrived, and shows that the frame's life has ended.
            return FramePosition.STALE
        if judgement is FramePosition.GAP:
            last_seq = await life.lose(incoming.seq)
            judgement = self._position_of(incoming)
            if judgement is FramePosition.IN_ORDER and self._registration.can_replay and self._answered is None:
                await life.open_gap(incoming.seq, last_seq)
        if judgement is FramePosition.BEGINNING and incoming.seq > life.first_seq:
            # Only an answer shows that the publisher does not have the beginning.
            is_open = self._registration.can_replay and self._answered != life.begun
            await (life.open_at(incoming.seq) if is_open else life.join_late())
            if is_open and self._answered is not None:
                # The answered replay lacked batches before this frame, so the life was ended. An immediate second
                # replay would bring no more.
                self._pauses.put_off_beginning()
            if self._replaying.is_waiting:
                life.reasons.add(REPLAY_WAITING)
        return judgement

    def _position_of(self, incoming: Incoming) -> FramePosition:
        position = self._life.order.position_of(incoming.seq, incoming.digest, incoming.batch.ts)
        return self._life.judge(position, incoming.batch)

    @property
    def _is_replay_open(self) -> bool:
        """Whether a snapshot or a repair must wait, because a replay is due first, or the stream is mixed."""
        return self._replaying.is_waiting or self._reporter.is_mixed

    async def _take_snapshot(self, snapshots: Snapshots) -> None:
        """Ask for a snapshot. Live frames wait meanwhile, and are applied after it."""
        life, life_begun = self._life, self._life.begun
        self._straight.drop()
        await snapshots.run()
        self._heard = time.monotonic()
        if life.begun != life_begun:
            # A replay would add no batch to the snapshot.
            self._answered = life.begun
            self._dropped_asked = self._subscriber.dropped
            self._pauses.reset()

    @property
    def _is_repair_due(self) -> bool:
        """Whether a repair was requested, and only a replay of the whole life can do it.

        This is tried once in a life, because once a publisher has forgotten the first batches, it never has them again.
        """
        life = self._life
        return (
            life.applier.grant.change.wants_repair
            and self._snapshots is None
            and self._registration.can_replay
            and self._repaired != life.begun
            and time.monotonic() >= self._repair_at
            and life.order.watermark is not None
            and self._received.is_unbroken
            and not (life.is_open or self._is_replay_open)
        )

    async def _repair(self) -> None:
        """Request all batches of this life again. If the publisher has the first one, the life begins again with it."""
        life, self._repaired = self._life, self._life.begun
        self._straight.drop()
        assert life.order.watermark is not None
        # An engine that drops blocks without an event shows the same drift after each replay.
        self._repair_at = time.monotonic() + self._repair_pause
        self._repair_pause = min(2 * self._repair_pause, PAUSE_SECONDS_MAX)
        await life.open_gap(life.order.watermark + 1)
        await self._run_replay()
        if life.begun != self._repaired:
            life.applier.happened(ActivityKind.RESTART, "a repair was asked for; all its batches are applied again")
        elif not life.is_open:
            log.warning(
                "a repair was asked for, but no replay has the first batch; restart the engine",
                extra=fields(stream=life.name),
            )

    # ---- connections and replays -------------------------------------------------------------------

    async def _connected(self, connection: int) -> None:
        self._received.connected(connection)
        self._straight.drop()
        self._pauses.reset()
        self._life.is_proven = False
        self._life.order.connected()
        self._life.former_ids.clear()
        self._rank_streams.connected()
        await self._run_replay()

    async def _run_replay(self, *, needed_by: int | None = None) -> None:
        """Request everything from the watermark on and apply it, within the time limits of the options.

        ``needed_by`` is the seq of a live frame that waits for it.
        """
        endpoint, life = self._registration.replay_endpoint, self._life
        self._straight.drop()
        dropped, self._dropped_asked = self._subscriber.dropped - self._dropped_asked, self._subscriber.dropped
        if self._reporter.is_mixed:
            self._replaying.drop()
            return
        if endpoint is None or not self._registration.can_replay:
            if dropped:
                await life.overflowed()
            return
        if self._pauses.is_silent:
            return
        life.applier.pass_turn()
        old_watermark, life_begun = life.order.watermark, life.begun
        try:
            outcome = await self._replaying.run(endpoint, needed_by=needed_by)
        except (InvalidValue, OSError) as exc:
            log.warning(
                "a replay is impossible now; missing batches stay missing",
                extra=fields(stream=life.name, error=str(exc)),
            )
            outcome = AttemptResult.SILENT
        self._answered = life.begun if outcome is AttemptResult.COMPLETE else None
        is_other_life = life.begun != life_begun
        if is_other_life and not self._received.is_unbroken:
            self._over = self._received.connection
        if outcome is AttemptResult.WAITING:
            return
        life.count_replay(outcome)
        self._heard = time.monotonic()
        life.reasons -= {REPLAY_SILENT, REPLAY_INCOMPLETE, REPLAY_WAITING}
        if outcome is AttemptResult.COMPLETE:
            self._pauses.reset()
            await life.found()
            return
        self._pauses.put_off_beginning()
        life.reasons.add(REPLAY_SILENT if outcome is AttemptResult.SILENT else REPLAY_INCOMPLETE)
        if life.order.watermark == old_watermark and not is_other_life:
            self._pauses.nothing_came()
