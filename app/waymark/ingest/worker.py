"""An ingest worker: which streams are mine, and keeping them running.

Every worker looks at the same list of publishers and the same list of live workers, and knows without asking anybody
which streams are its share (rendezvous hashing: adding or losing a worker moves only that worker's streams). What the
lease says goes: a share is a wish, a lease is the right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import zmq
from xxhash import xxh3_64_intdigest

from waymark.domain.names import PublisherName, Registration
from waymark.domain.plan import epochs
from waymark.domain.resolver import Resolver
from waymark.engines import decoder
from waymark.errors import InvalidValue, StoreUnavailable
from waymark.ingest.gauges import Gauges, Served
from waymark.ingest.life import Life
from waymark.ingest.standing import Standing
from waymark.ingest.stream import Stream, StreamOptions
from waymark.ingest.subscriber import Context
from waymark.ingest.sweeping import keep_sweeping
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.store.applier import Applier, Fenced, resumed
from waymark.store.claims import Claim
from waymark.store.leases import Grant
from waymark.store.records import StreamState
from waymark.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

STATUSES = ("pending", "active", "replaying", "degraded", "lost", "failed")

#: How often to look, at the least; several times in a lease, so that no live worker seems dead.
_LOOK_SECONDS = 2.0
_SOCKETS_PER_STREAM = 4


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker goes by; the names are those of the settings."""

    worker_id: str
    stream: StreamOptions
    hash_seed: int = 1337
    hash_cache_entries: int = 200_000
    waiting_blocks: int = 10_000
    replays_max: int = 8
    sweep_blocks_per_second: int = 20_000
    streams_max: int = 4096
    publishers: Sequence[Registration] = ()
    """Of the file."""


@dataclass(slots=True)
class _Running:
    claim: Claim
    task: asyncio.Task[None]
    stream: Stream | None = None
    resolver: Resolver | None = None


class Worker:
    def __init__(self, store: Store, metrics: Metrics, options: WorkerOptions) -> None:
        self._store = store
        self._metrics = metrics
        self._gauges = Gauges(metrics, self._served, statuses=STATUSES)
        self._options = options
        self._running: dict[PublisherName, _Running] = {}
        self._replays = asyncio.Semaphore(options.replays_max)
        self._context: Context
        self._look = asyncio.Event()
        self._leaving: set[bytes] = set()
        self._standing = Standing(store, metrics, options.publishers)
        self._is_away = False
        self._others: set[str] = set()
        self._stopped: dict[PublisherName, str] = {}
        self._claims: list[Claim] = []
        """As they were at the last look."""
        self._epochs: dict[str, int] = {}
        self._look_seconds = min(_LOOK_SECONDS, options.stream.lease_seconds / 8)

    async def run(self) -> None:
        """Until cancelled; then leases are given back at once."""
        self._context = zmq.Context(io_threads=2)
        # One subscriber is a socket and both ends of its monitor; a replay is one more.
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_STREAM * self._options.streams_max)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                tasks.create_task(
                    keep_sweeping(
                        self._store,
                        self._metrics,
                        blocks_per_second=self._options.sweep_blocks_per_second,
                        pause_seconds=self._look_seconds,
                    )
                )
                tasks.create_task(self._keep_looking(tasks))
        finally:
            await self._leave()
            self._context.term()

    # ---- which streams are mine --------------------------------------------------------------------

    async def _keep_looking(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                await self._reconcile(tasks)
            except StoreUnavailable as exc:
                if not self._is_away:
                    log.warning("cannot look for streams", extra=fields(error=exc.sentence))
                self._is_away = True
            else:
                if self._is_away:
                    log.info("streams are looked for again")
                self._is_away = False
            self._metrics.redis_up.set(not self._is_away)
            self._look.clear()
            try:
                async with asyncio.timeout(self._look_seconds / 4 if self._is_away else self._look_seconds):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        workers = await self._store.records.alive(
            self._options.worker_id, keep_seconds=max(2, int(self._options.stream.lease_seconds))
        )
        claims = await self._claims_and_lost()
        is_another = await self._standing.restore(running.claim.registration for running in self._running.values())
        if is_another:
            claims = await self._store.registry.claims()
        others, self._others = self._others, set(workers)
        if (is_another or self._is_away) and not others <= self._others:
            # Who lives, Redis did not hear meanwhile, and will within a look: till then nobody's streams are taken.
            return
        mine: dict[PublisherName, Claim] = {}
        leaving = {claim.raw for claim in claims if claim.is_leaving}
        for claim in claims:
            if claim.is_leaving:
                # Whoever marked it is at work on it; one that is still there a look later was left behind.
                if claim.raw in self._leaving:
                    await self._store.registry.finish(claim)
            elif claim.registration.endpoint is not None and self._is_mine(claim, workers):
                mine[claim.registration.name] = claim
        await self._turn_epochs(
            [
                claim
                for claim in claims
                if not claim.is_leaving and claim.registration.endpoint is None and self._is_mine(claim, workers)
            ]
        )
        await self._keep_groups(claim for claim in claims if not claim.is_leaving)
        await self._stop_others(mine)
        for name, running in self._running.items():
            if running.resolver is not None and name in mine:
                running.resolver.foreign_ranks = _foreign_ranks(mine[name], claims)
        for name, claim in mine.items():
            if name not in self._running and len(self._running) < self._options.streams_max:
                foreign = _foreign_ranks(claim, claims)
                task = tasks.create_task(self._run_stream(claim, foreign))
                self._running[name] = _Running(claim, task)
        self._leaving = leaving
        self._stopped = {name: error for name, error in self._stopped.items() if name in mine and self._is_idle(name)}
        self._gauges.saw(workers, [claim.registration for claim in claims if not claim.is_leaving])

    async def _claims_and_lost(self) -> list[Claim]:
        """All claims; one that was there at the last look and that Redis has lost since is put back first."""
        claims = await self._store.registry.claims()
        there = {claim.publisher for claim in claims}
        lost = [claim for claim in self._claims if claim.publisher not in there]
        if any([await self._store.registry.put_back(claim) for claim in lost]):
            log.warning("redis has lost registrations", extra=fields(publishers=len(lost)))
            claims = await self._store.registry.claims()
        self._claims = claims
        return claims

    async def _keep_groups(self, claims: Iterable[Claim]) -> None:
        """A group whose id Redis has lost is not found by queries, while its streams go on."""
        groups = await self._store.registry.groups()
        for claim in {claim.group_id: claim for claim in claims if claim.registration.group not in groups}.values():
            await self._store.registry.begin(claim)

    def _served(self) -> list[Served]:
        """The streams that run, each with what it resolves by."""
        running = [each for each in self._running.values() if not each.task.done()]
        return [(each.stream, each.resolver) for each in running if each.stream and each.resolver]

    async def _stop_others(self, mine: Mapping[PublisherName, Claim]) -> None:
        """Stop what is not this worker's any more, or is registered anew; forget what has stopped."""
        stopping: list[asyncio.Task[None]] = []
        for name, running in self._running.items():
            if name not in mine or mine[name].raw != running.claim.raw:
                running.task.cancel()
                stopping.append(running.task)
        if stopping:
            await asyncio.wait(stopping, timeout=_LOOK_SECONDS)
        self._running = {name: running for name, running in self._running.items() if not running.task.done()}

    def _is_mine(self, claim: Claim, workers: Sequence[str]) -> bool:
        """Rendezvous: the stream goes to the live worker with the largest hash of the two names."""
        return self._options.worker_id == max(
            workers,
            key=lambda worker: (xxh3_64_intdigest(f"{worker} {claim.publisher}".encode()), worker),
            default=self._options.worker_id,
        )

    async def _run_stream(self, claim: Claim, foreign_ranks: frozenset[int]) -> None:
        """One stream, from its lease to its end; whatever happens to it happens to no other."""
        name = claim.registration.name
        grant: Grant | None = None
        try:
            # What it begins for a claim that is not there any more, nobody else would take back.
            await _whole(asyncio.ensure_future(self._store.registry.begin(claim)))
            grant = await self._take(claim)
            if grant is not None:
                self._metrics.leases_taken.inc()
                stream = await self._build(claim, grant, foreign_ranks)
                await stream.run()
                self._metrics.leases_lost.inc()
        except Fenced:
            self._metrics.leases_lost.inc()
            log.info("stream was somebody else's at once", extra=fields(stream=str(name)))
        except (StoreUnavailable, InvalidValue, OSError) as exc:
            if self._is_news(name, str(exc)):
                log.warning("stream stopped, will be taken up again", extra=fields(stream=str(name), error=str(exc)))
        except Exception as exc:
            # A defect met by one publisher's bytes must not stop the others' streams; it is taken up again, too.
            if self._is_news(name, repr(exc)):
                log.exception("stream failed, will be taken up again", extra=fields(stream=str(name)))
        finally:
            if grant is not None:
                await self._give_back(grant)

    def _is_idle(self, name: PublisherName) -> bool:
        """Whether a stream does not run, or has not reached its publisher yet."""
        running = self._running.get(name)
        return running is None or running.stream is None or running.stream.status == "pending"

    def _is_news(self, name: PublisherName, error: str) -> bool:
        """Whether a stream stopped otherwise than the last time; it is taken up at every look."""
        before, self._stopped[name] = self._stopped.get(name), error
        return error != before

    async def _build(self, claim: Claim, grant: Grant, foreign_ranks: frozenset[int]) -> Stream:
        applier, state = await self._resumed(grant, foreign_ranks)
        if grant.is_forgotten and state.watermark is not None:
            log.warning("redis has lost writes", extra=fields(stream=str(claim.registration.name)))
            await applier.new_life()
            applier, state = await self._resumed(grant, foreign_ranks)
        # What waited for its parent was nowhere but in the worker before.
        applier.counters["waiting_lost"] += applier.counters.pop("waiting", 0)
        options = self._options
        decode = decoder(claim.registration.kind, seed=options.hash_seed)
        life = Life(applier, decode, self._metrics, state, on_gap=options.stream.on_gap)
        stream = Stream(life, self._context, self._replays, options.stream)
        running = self._running[claim.registration.name]
        running.stream, running.resolver = stream, applier.resolver
        return stream

    async def _resumed(
        self, grant: Grant, foreign_ranks: frozenset[int], *, is_patient: bool = True
    ) -> tuple[Applier, StreamState]:
        options = self._options
        return await resumed(
            grant,
            self._store,
            self._metrics,
            seed=options.hash_seed,
            memory_entries=options.hash_cache_entries,
            waiting_blocks=options.waiting_blocks,
            medium_ttl=options.stream.medium_ttl,
            foreign_ranks=foreign_ranks,
            is_patient=is_patient,
        )

    async def _turn_epochs(self, claims: Sequence[Claim]) -> None:
        """End what is over at publishers that have no stream here, because their events come by HTTP."""
        now = epochs(self._options.stream.medium_ttl, time.time())
        if now == self._epochs:
            return
        for claim in claims:
            grant = await self._take(claim)
            if grant is not None:
                try:
                    await self._resumed(grant, frozenset(), is_patient=False)
                except Fenced:
                    continue  # unregistered just now
                finally:
                    await self._give_back(grant)
        self._epochs = now

    async def _take(self, claim: Claim) -> Grant | None:
        """Take the lease. One that arrives just as the stream is stopped is given back, not left to run out."""
        seconds = self._options.stream.lease_seconds
        taking = asyncio.ensure_future(self._store.leases.take(claim, self._options.worker_id, seconds))
        try:
            return await _whole(taking)
        except asyncio.CancelledError:
            grant = None if taking.exception() else taking.result()
            if grant is not None:
                await self._give_back(grant)
            raise

    async def _give_back(self, grant: Grant) -> None:
        try:
            await asyncio.shield(self._store.leases.drop(grant))
        except StoreUnavailable as exc:
            # It runs out by itself.
            log.debug("lease not given back", extra=fields(error=exc.sentence))

    async def _leave(self) -> None:
        try:
            await self._store.records.alive(self._options.worker_id, keep_seconds=60, is_leaving=True)
        except StoreUnavailable as exc:
            log.debug("not signed off", extra=fields(error=exc.sentence))

    # ---- hints and sweeping ------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Look again as soon as somebody says so; a hint, so that losing it costs two seconds."""
        while True:
            try:
                async with self._store.hints() as hints:
                    while True:
                        if await hints.get_message(seconds=_LOOK_SECONDS) is not None:
                            self._look.set()
            except StoreUnavailable:
                await asyncio.sleep(_LOOK_SECONDS)


async def _whole(step: asyncio.Future[T]) -> T:
    """The outcome of a step that is not left half done: who is stopped meanwhile, and be it twice, stops after it."""
    stopped: asyncio.CancelledError | None = None
    while not step.done():
        try:
            await asyncio.wait([step])
        except asyncio.CancelledError as exc:
            stopped = exc
    if stopped is not None:
        step.exception()  # seen, so that nobody complains of it
        raise stopped
    return step.result()


def _foreign_ranks(claim: Claim, claims: Sequence[Claim]) -> frozenset[int]:
    """Ranks of the same instance and tenant that have a registration, and so a stream, of their own."""
    own = claim.registration
    return frozenset(
        other.registration.dp_rank
        for other in claims
        if other.publisher != claim.publisher
        and other.registration.instance_id == own.instance_id
        and other.registration.tenant_id == own.tenant_id
    )
