"""An ingest worker: which streams are mine, and keeping them running.

Every worker looks at the same list of publishers and the same list of live workers, and knows without asking anybody
which streams are its share (rendezvous hashing: adding or losing a worker moves only that worker's streams). What the
lease says goes: a share is a wish, a lease is the right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq
from xxhash import xxh3_64_intdigest

from app.domain.names import PublisherName
from app.domain.plan import epochs
from app.domain.resolver import Resolver
from app.engines import decoder
from app.errors import InvalidValue, StoreUnavailable
from app.ingest.life import Life
from app.ingest.stream import Stream, StreamOptions
from app.ingest.subscriber import Context
from app.ingest.sweeping import keep_sweeping
from app.logs import fields
from app.metrics import Metrics
from app.store.applier import Applier, Fenced, resumed
from app.store.claims import Claim
from app.store.leases import Grant
from app.store.records import StreamState
from app.store.store import Store

log = logging.getLogger(__name__)

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
        self._options = options
        self._running: dict[PublisherName, _Running] = {}
        self._replays = asyncio.Semaphore(options.replays_max)
        self._context: Context
        self._look = asyncio.Event()
        self._leaving: set[bytes] = set()
        self._birth = ""
        self._epochs: dict[str, int] = {}
        self._look_seconds = min(_LOOK_SECONDS, options.stream.lease_seconds / 4)

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
                self._metrics.redis_up.set(1)
            except StoreUnavailable as exc:
                self._metrics.redis_up.set(0)
                log.warning("cannot look for streams", extra=fields(error=exc.sentence))
            self._look.clear()
            try:
                async with asyncio.timeout(self._look_seconds):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        workers = await self._store.records.alive(
            self._options.worker_id, keep_seconds=max(2, int(self._options.stream.lease_seconds))
        )
        await self._heal_empty_redis()
        claims = await self._store.registry.claims()
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
        counts = Counter(running.stream.status for running in self._running.values() if running.stream)
        for status in STATUSES:
            self._metrics.streams.labels(status=status).set(counts[status])
        waiting = sum(r.resolver.waiting.blocks for r in self._running.values() if r.resolver)
        self._metrics.waiting_blocks.set(waiting)

    async def _heal_empty_redis(self) -> None:
        """Register again what this worker had a stream of, where Redis has come back without its memory."""
        birth = await self._store.records.birth()
        if self._birth not in ("", birth):
            log.warning("redis has come back empty", extra=fields(streams=len(self._running)))
            for running in self._running.values():
                await self._store.registry.register(running.claim.registration)
        self._birth = birth

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
            await self._store.registry.begin(claim)
            grant = await self._take(claim)
            if grant is not None:
                stream = await self._build(claim, grant, foreign_ranks)
                await stream.run()
        except Fenced:
            log.info("stream was somebody else's at once", extra=fields(stream=str(name)))
        except (StoreUnavailable, InvalidValue, OSError) as exc:
            log.warning("stream stopped, will be taken up again", extra=fields(stream=str(name), error=str(exc)))
        except Exception:
            # A defect met by one publisher's bytes must not stop the others' streams; it is taken up again, too.
            log.exception("stream failed, will be taken up again", extra=fields(stream=str(name)))
        finally:
            if grant is not None:
                await self._give_back(grant)

    async def _build(self, claim: Claim, grant: Grant, foreign_ranks: frozenset[int]) -> Stream:
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
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            (grant,) = await asyncio.gather(taking, return_exceptions=True)
            if isinstance(grant, Grant):
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
                        if await hints.get_message(timeout=_LOOK_SECONDS) is not None:
                            self._look.set()
            except StoreUnavailable:
                await asyncio.sleep(_LOOK_SECONDS)


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
