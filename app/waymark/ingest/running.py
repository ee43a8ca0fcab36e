"""Runs one stream in a worker, from its lease to its end. A fault of one stream does not affect the others.

The leases of all streams of a worker are renewed together, and it is checked whether Redis has lost writes to them. A
stream does nothing by itself while its engine is silent, so a worker may have thousands of streams. ``renew`` makes a
few calls for each group, and wakes only the streams with news.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from waymark.apply.applier import Applier
from waymark.apply.redis_calls import Fenced
from waymark.apply.resuming import resumed, staged
from waymark.base.asker import Asker
from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.domain.life_facts import removes_once
from waymark.domain.names import PublisherName
from waymark.domain.resolver import Resolver
from waymark.domain.status import StreamStatus
from waymark.engines import Ceilings, decoder
from waymark.ingest.counters import JOINED_LATE, ServedStream
from waymark.ingest.frames import FrameRoom
from waymark.ingest.life import Life
from waymark.ingest.options import WorkerOptions
from waymark.ingest.prefix_stream import PrefixStream
from waymark.ingest.replay_places import ReplayPlaces
from waymark.ingest.snapshots import SnapshotSource
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.stream import Stream
from waymark.ingest.subscribers import Subscribers
from waymark.store.activity import ActivityKind, about
from waymark.store.claims import Claim
from waymark.store.leases import Grant
from waymark.store.records import StreamRecord
from waymark.store.store import Store

#: The number of shards of a group, besides shard 0, that each renewal checks for lost writes.
_SHARDS_ASKED = 16
#: The number of publishers that one command asks about.
_ASKED_AT_ONCE = 256


class LeaseKeeper:
    """Renews the leases of the streams inside ``keeping``."""

    def __init__(self, store: Store, seconds: float) -> None:
        """``seconds`` is how long a lease lasts. It is renewed four times in this period."""
        self._store = store
        self._seconds = seconds
        self._kept: dict[str, tuple[Grant, Callable[[], None]]] = {}
        """The grants and their ``wake`` functions, by token."""
        self._rounds = 0

    @contextmanager
    def keeping(self, grant: Grant, wake: Callable[[], None]) -> Iterator[None]:
        """Keep the lease inside the context. ``wake`` is called if ``grant.renewal`` or ``grant.change`` has news."""
        self._kept[grant.token] = grant, wake
        try:
            yield
        finally:
            del self._kept[grant.token]

    async def keep_renewing(self) -> None:
        """Renew until cancelled, and more often while Redis does not answer."""
        pause = self._seconds / 4
        loop, is_answered = asyncio.get_running_loop(), True
        while True:
            began = loop.time()
            try:
                await self.renew()
                is_answered = True
            except StoreUnavailable as exc:
                if is_answered:
                    log.warning("leases are not renewed", extra=fields(error=exc.sentence))
                is_answered = False
            await asyncio.sleep(max(pause / 4, (pause if is_answered else 0) - (loop.time() - began)))

    async def renew(self) -> None:
        """Renew all leases once, group by group. Raises StoreUnavailable if a group cannot be reached."""
        by_group: dict[int, list[Grant]] = {}
        for grant, _ in self._kept.values():
            by_group.setdefault(grant.group_id, []).append(grant)
        outcomes = await asyncio.gather(*map(self._renew_group, by_group.values()), return_exceptions=True)
        self._rounds += 1
        for grant, wake in list(self._kept.values()):
            if grant.has_news:
                wake()
        for failure in filter(None, outcomes):
            raise failure

    async def _renew_group(self, grants: list[Grant]) -> None:
        await self._store.leases.renew_all(grants, self._seconds)
        if renewed := [grant for grant in grants if not grant.renewal.is_fenced]:
            await self._look_for_losses(renewed)

    async def _look_for_losses(self, grants: list[Grant]) -> None:
        others = range(1, grants[0].shards)
        few = [others[(_SHARDS_ASKED * self._rounds + i) % len(others)] for i in range(min(_SHARDS_ASKED, len(others)))]
        for start in range(0, len(grants), _ASKED_AT_ONCE):
            portion = grants[start : start + _ASKED_AT_ONCE]
            for grant, shards in zip(portion, await self._store.index.has_lost(portion, [0, *few]), strict=True):
                grant.renewal.lost_shards |= shards


log = logging.getLogger(__name__)

T = TypeVar("T")

#: The streams that may start at the same time on one server. A start takes about thirty calls, and thousands of starts
#: at once would delay the calls of running streams.
_STARTS_MAX = 16
#: The streams of a worker share the room of this many full buffers, because only a few are behind at a time.
_ROOM_BUFFERS = 4


@record(slots=True)
class Running:
    """A stream of this worker; ``stream`` is None until it has its lease."""

    claim: Claim
    registered_ranks: frozenset[int]
    """The ranks of the stream's instance, if several have their own streams."""
    task: asyncio.Task[None] | None = None
    stream: ServedStream | None = None
    keeps_hashes: bool = False
    """Whether a pool or a client of the stream's group names blocks by the hashes of engines."""

    @property
    def applier(self) -> Applier | None:
        return None if self.stream is None else self.stream.applier

    @property
    def resolver(self) -> Resolver | None:
        return None if self.applier is None else self.applier.resolver

    @property
    def is_done(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def is_idle(self) -> bool:
        """Whether the stream has not reached its publisher yet."""
        return self.stream is None or self.stream.status is StreamStatus.STARTING

    def may_go_on(self, claim: Claim) -> bool:
        """Return whether the stream may continue under the present claim. Another release of the engine may report
        copies differently.
        """
        is_same = removes_once(claim.registration) == removes_once(self.claim.registration)
        return is_same and claim.has_stream_of(self.claim)

    def see(self, registered_ranks: frozenset[int], *, keeps_hashes: bool = False) -> None:
        """Pass on which ranks of the instance have their own streams now, and whether the stream's hashes are kept."""
        self.registered_ranks, self.keeps_hashes = registered_ranks, keeps_hashes
        applier = self.applier
        if applier is None:
            return
        if (applier.resolver.registered_ranks, applier.pool_hashes.is_wanted) != (registered_ranks, keeps_hashes):
            applier.resolver.registered_ranks = registered_ranks
            applier.pool_hashes.is_wanted = keeps_hashes
            self.wake()

    def wake(self) -> None:
        """Make the stream check at once for changes of its lease, its options and its ranks."""
        if self.stream is not None:
            self.stream.wake()


class StreamRunner:
    """Runs streams, one in each call of ``run``."""

    context: ZmqContext
    """Set before the first stream runs."""

    def __init__(
        self, store: Store, metrics: Metrics, options: WorkerOptions, places: ReplayPlaces, asker: Asker
    ) -> None:
        self._asker = asker
        self._store = store
        self._metrics = metrics
        self._options = options
        self.places = places
        self._room = FrameRoom(_ROOM_BUFFERS * options.stream.stream_buffer_bytes)
        self.subscribers = Subscribers(message_bytes_max=options.stream.message_bytes_max)
        self.leases = LeaseKeeper(store, options.stream.lease_seconds)
        self._starts: defaultdict[object, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_STARTS_MAX))
        """The limit of each server, so that one that does not answer does not delay starts on the others."""
        self._errors: dict[PublisherName, str] = {}
        """The errors with which streams last stopped."""

    async def run(self, running: Running) -> None:
        """Take the lease and apply the stream until it is cancelled or the lease is lost."""
        claim = running.claim
        name = claim.registration.name
        grant: Grant | None = None
        kept = ExitStack()
        try:
            async with self._starts[self._store.server_of(claim.group_id)]:
                # This step is not interrupted: it undoes its work if the claim is gone, and no other code would.
                if not await whole(asyncio.ensure_future(self._store.claim_writer.begin(claim))):
                    return  # the claim has changed, and the next poll reads the new one
                last_worker = await self._store.leases.last_worker(claim)
                grant = await self._take(claim)
                if grant is not None:
                    kept.enter_context(self.leases.keeping(grant, running.wake))
                    self._metrics.leases_taken.inc()
                    if last_worker not in (None, self._options.worker_id):
                        self._metrics.takeovers.inc()
                        self._store.activity.note(
                            ActivityKind.TAKEOVER, **about(claim.registration), detail=f"from {last_worker}"
                        )
                    await self._build(running, grant)
            if grant is not None:
                assert running.stream is not None
                await running.stream.run()
                self._metrics.leases_lost.inc()
        except Fenced:
            self._metrics.leases_lost.inc()
            log.info("another worker took the stream before it started here", extra=fields(stream=str(name)))
        except (StoreUnavailable, InvalidValue, OSError) as exc:
            if self._is_another(name, str(exc)):
                log.warning("stream stopped, will be restarted", extra=fields(stream=str(name), error=str(exc)))
        except Exception as exc:
            # A defect that the bytes of one publisher trigger must not stop the other streams. This stream is
            # restarted.
            if self._is_another(name, repr(exc)):
                log.exception("stream failed, will be restarted", extra=fields(stream=str(name)))
        finally:
            kept.close()
            if grant is not None:
                await self._give_back(grant)
            if running.applier is not None:
                await running.applier.forget()

    def forget_errors(self, still: Iterable[PublisherName]) -> None:
        """Forget the errors of streams, except those in ``still``. The others run again, or belong to other workers."""
        names = set(still)
        self._errors = {name: error for name, error in self._errors.items() if name in names}

    def _is_another(self, name: PublisherName, error: str) -> bool:
        """Return whether a stream stopped with another error than last time. Every poll restarts a stopped stream, so
        the same error would be logged again and again.
        """
        last_error, self._errors[name] = self._errors.get(name), error
        return error != last_error

    async def _build(self, running: Running, grant: Grant) -> None:
        claim = running.claim
        applier, state = await self._resumed(grant, running.registered_ranks)
        is_beginning = state.watermark is None and claim.registration.sequence == "publisher"
        if is_beginning and JOINED_LATE in state.flags:
            # The previous worker stopped before it applied the first frame, so the flags belong to no life.
            await applier.new_life()
            applier, state = await self._resumed(grant, running.registered_ranks)
        if state.status is StreamStatus.LOST:
            # The previous worker may have stopped between the writes of the status and of the row. Nothing else would
            # write the row while the engine is unreachable.
            await applier.set_lost(is_lost=True)
        options = self._options
        applier.pool_hashes.is_wanted = running.keeps_hashes
        if claim.registration.kind.traits.is_opaque:
            running.stream = PrefixStream(
                applier,
                self._store,
                self._asker,
                self._metrics,
                state,
                publisher_timeout=options.stream.publisher_timeout,
            )
            return
        apply = options.apply
        ceilings = Ceilings(
            apply.frame_bytes_max, apply.batch_events_max, apply.event_hashes_max, apply.rejected_events
        )
        decode = decoder(claim.registration.kind, seed=apply.hash_seed, ceilings=ceilings)
        stage = self._stage_of(grant)
        life = Life(applier, decode, self._metrics, state, on_gap=options.stream.on_gap, stage=stage)
        endpoint = claim.registration.snapshot_endpoint
        snapshots = None if endpoint is None else SnapshotSource(endpoint, self._store.snapshots, stage)
        running.stream = Stream(
            life, self.context, self.places, self._metrics, options.stream, self._room, self.subscribers, snapshots
        )

    def _stage_of(self, grant: Grant) -> Callable[[Life], Applier]:
        """Return a function that creates an applier whose life readers do not see."""

        def stage(life: Life) -> Applier:
            ranks = life.applier.resolver.registered_ranks
            fresh = staged(grant, self._store, self._metrics, self._options.apply, life.counters, ranks)
            fresh.pool_hashes.is_wanted = life.applier.pool_hashes.is_wanted
            return fresh

        return stage

    async def _resumed(
        self, grant: Grant, registered_ranks: frozenset[int], *, is_patient: bool = True
    ) -> tuple[Applier, StreamRecord]:
        return await resumed(
            grant,
            self._store,
            self._metrics,
            self._options.apply,
            registered_ranks=registered_ranks,
            is_patient=is_patient,
        )

    async def end_over(self, claim: Claim) -> None:
        """End the old generations of a publisher whose events come by HTTP, because it has no stream."""
        grant = await self._take(claim)
        if grant is None:
            return
        try:
            await self._resumed(grant, frozenset(), is_patient=False)
        except Fenced:
            log.debug("publisher is being unregistered", extra=fields(stream=str(claim.registration.name)))
        finally:
            await self._give_back(grant)

    async def _take(self, claim: Claim) -> Grant | None:
        """Take the lease. A lease that arrives just as the stream is stopped is released at once."""
        seconds = self._options.stream.lease_seconds
        taking = asyncio.ensure_future(self._store.leases.take(claim, self._options.worker_id, seconds))
        try:
            return await whole(taking)
        except asyncio.CancelledError:
            grant = None if taking.exception() else taking.result()
            if grant is not None:
                await self._give_back(grant)
            raise

    async def _give_back(self, grant: Grant) -> None:
        try:
            dropping = asyncio.ensure_future(self._store.leases.drop(grant))
            # The cancelled stream does not wait for this task, so its error is read here.
            dropping.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(dropping)
        except StoreUnavailable as exc:
            # The lease expires by itself.
            log.debug("lease not released", extra=fields(error=exc.sentence))


async def whole(step: asyncio.Future[T]) -> T:
    """Return the result of a step that must not be interrupted.

    A caller cancelled meanwhile, even twice, waits for the end of the step, and then ends.
    """
    cancelled: asyncio.CancelledError | None = None
    while not step.done():
        try:
            await asyncio.wait([step])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        step.exception()  # read it, so that asyncio does not report it
        raise cancelled
    return step.result()
