"""Polls Redis about every two seconds: reads registrations and live workers, and runs the streams in this worker's
share.

The share only says which streams a worker tries to take; the lease gives the right. So two workers that read different
lists for a moment never apply the same stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from xxhash import xxh3_64_intdigest

from waymark.base.errors import Conflict, InvalidValue, RecordDamaged, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.names import PublisherName, Registration
from waymark.domain.status import StreamStatus
from waymark.ingest.counters import ServedPair, WorkerGauges
from waymark.ingest.options import WorkerOptions
from waymark.ingest.running import Running, StreamRunner
from waymark.ingest.scraping import Scraper
from waymark.ingest.sweeping import LostGroups, Overdue, UnclaimedWatch
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.store import Store

log = logging.getLogger(__name__)


# The share of a worker, which it computes from its own reading.
#
# Every worker reads the same publishers and live workers, and computes its share by rendezvous hashing. When a worker
# starts or stops, only its own streams move.


class Shares:
    """The share of ``worker_id``. It caches the order of workers for each publisher while the live workers stay the
    same, and the share while the list of claims is the same, too.
    """

    def __init__(self, worker_id: str) -> None:
        self.left = 0
        """The number of streams for which no worker had room."""
        self._worker_id = worker_id
        self._workers: tuple[str, ...] = ()
        self._orders: dict[int, list[str]] = {}
        self._last: tuple[Sequence[Claim], Mapping[str, int | None]] = ((), {})
        """The arguments of the last call of ``of``."""
        self._mine: list[Claim] = []

    def of(self, claims: Sequence[Claim], workers: Mapping[str, int | None]) -> list[Claim]:
        """Return the claims that this worker takes. ``workers`` maps each live worker to the number of streams that it
        can take.

        For each worker, its name and the publisher's id are hashed. Of the workers with room, the one with the largest
        hash takes the stream. A claim without a stream takes no room.
        """
        if self._last[0] is claims and self._last[1] == workers:
            return self._mine
        self._last = claims, dict(workers)
        names = tuple(workers) or (self._worker_id,)
        orders = self._orders if self._workers == names else {}
        self._workers, self._orders = names, {}
        rooms = {worker: room for worker, room in workers.items() if room is not None}
        mine: list[Claim] = []
        self.left = 0
        # Every worker goes through the claims in the same order, whatever their order in Redis.
        for claim in sorted(claims, key=lambda claim: claim.publisher) if rooms else claims:
            publisher = claim.publisher
            order = self._orders[publisher] = orders.get(publisher) or self._order(publisher)
            if claim.registration.endpoint is None:
                worker: str | None = order[0]
            else:
                worker = next((name for name in order if rooms.get(name, 1)), None)
                self.left += worker is None
                if worker in rooms:
                    rooms[worker] -= 1
            if worker == self._worker_id:
                mine.append(claim)
        self._mine = mine
        return mine

    def groups_of(self, groups: Iterable[int]) -> list[int]:
        """Return the groups of this worker, whichever publishers they have.

        Of the workers in the last call of ``of``, the one with the largest hash of worker name and group id takes the
        group.
        """
        workers = self._workers or (self._worker_id,)

        def rank(worker: str, group_id: int) -> tuple[int, str]:
            return xxh3_64_intdigest(f"{worker} group {group_id}".encode()), worker

        return [group for group in groups if max(workers, key=lambda name: rank(name, group)) == self._worker_id]

    def _order(self, publisher: int) -> list[str]:
        """Return all workers, the first choice first."""
        return sorted(
            self._workers,
            key=lambda worker: (xxh3_64_intdigest(f"{worker} {publisher}".encode()), worker),
            reverse=True,
        )


class RegisteredRanks:
    """The registered ranks of every instance."""

    def __init__(self, claims: Iterable[Claim]) -> None:
        ranks: dict[tuple[str, str], set[int]] = {}
        for claim in claims:
            name = claim.registration.name
            ranks.setdefault((name.instance_id, name.tenant_id), set()).add(name.dp_rank)
        # All streams of an instance share one set. A set for each would have a million entries if there are a thousand
        # ranks.
        self._ranks = {instance: frozenset(rank_set) for instance, rank_set in ranks.items() if len(rank_set) > 1}

    def of(self, name: PublisherName) -> frozenset[int]:
        """Return the ranks of the publisher's instance, if there are several; each has a stream of its own."""
        return self._ranks.get((name.instance_id, name.tenant_id), frozenset())


class ListedClaims:
    """The facts about a list of claims that a poll needs. It is computed once for the list, because for ten thousand
    claims it holds up the streams of a worker for tens of milliseconds.
    """

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims
        self.leaving = [claim for claim in claims if claim.is_leaving]
        self.staying = [claim for claim in claims if not claim.is_leaving]
        self.registrations = [claim.registration for claim in self.staying]
        self.ranks = RegisteredRanks(claims)
        self.with_pool = _with_pool(self.staying)
        self.groups = {(claim.group_id, claim.registration.group): claim for claim in self.staying}
        """A claim of each group, by the id and the name of the group."""


# Registers the publishers of the file at the start, and restores registrations that Redis lost.
#
# When Redis has come back empty, each worker registers the publishers of the file again, and those that it knew before
# Redis lost its data. Several workers may do this; a repetition has no effect. A publisher that has been registered
# since then stays unchanged, and one that has been unregistered is not restored. Publishers that the file no longer
# names stay registered.


class RegistrationKeeper:
    def __init__(self, store: Store, metrics: Metrics, publishers: Sequence[Registration]) -> None:
        self._store = store
        self._metrics = metrics
        self._publishers = publishers
        self._incarnation = ""
        self._refused: set[PublisherName] = set()

    async def restore(self, seen: Iterable[Registration]) -> bool:
        """Register missing publishers. Return whether Redis has come back empty since the last call; the first call
        returns True.

        ``seen`` has the registrations of this worker's streams, and those of the last list of claims that it trusted.
        If the caller read a list of claims before this call, and this call returns False, the caller may trust the
        list. Redis did not come back empty in between, so the list lacks no publisher that Redis lost.
        """
        incarnation = await self._store.read_incarnation()
        if incarnation == self._incarnation:
            return False
        is_start = not self._incarnation
        there = {registration.name: registration for registration in await self._store.directory.registrations()}
        wanted = {publisher.name: publisher for publisher in self._publishers}
        if not is_start:
            wanted = {each.name: each for each in seen} | wanted
            log.warning(
                "redis has lost its data; registering its publishers again", extra=fields(publishers=len(wanted))
            )
        for name, registration in wanted.items():
            # Only at the start may the file move a publisher. Later, the address in Redis may be newer than the file.
            if there.get(name) != registration and (is_start or name not in there):
                await self._register(registration, is_restored=not is_start)
        self._metrics.publishers_refused.set(len(self._refused))
        self._incarnation = incarnation
        return True

    async def _register(self, registration: Registration, *, is_restored: bool) -> None:
        try:
            if is_restored:
                await self._store.registry.restore(registration)
            else:
                await self._store.registry.register(registration)
        except (Conflict, InvalidValue, RecordDamaged) as exc:  # the sentence names the publisher
            if registration.name not in self._refused:
                self._refused.add(registration.name)
                log.error("publisher cannot be registered", extra=fields(error=exc.sentence))
        else:
            self._refused.discard(registration.name)


#: The most times that one poll restores registrations, each time because Redis has come back empty.
_RESTORES_MAX = 20
#: The least pause before the next poll, as a multiple of the time that the last one took.
_REST = 3
#: The most seconds that a poll waits for streams that it has stopped.
_STOP_SECONDS = 2.0


class Poller:
    """Polls until cancelled. Setting ``hint`` from outside makes the next poll immediate."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        options: WorkerOptions,
        runner: StreamRunner,
        scraper: Scraper,
        overdue: Overdue,
    ) -> None:
        self._store = store
        self._scraper = scraper
        self._overdue = overdue
        self._metrics = metrics
        self._options = options
        self._runner = runner
        self._keeper = RegistrationKeeper(store, metrics, options.publishers)
        self._shares = Shares(options.worker_id)
        self._lost_groups = LostGroups(store)
        self._unclaimed = UnclaimedWatch(store, metrics, options.stream.lease_seconds)
        self._gauges = WorkerGauges(
            metrics,
            self._served,
            runner.places,
            store.pacer,
            streams_max=options.streams_max,
            statuses=tuple(StreamStatus),
        )
        self.hint = asyncio.Event()
        self.is_away = False
        """Whether Redis did not answer the last poll."""
        self.running: dict[PublisherName, Running] = {}
        self._are_some_left = False
        self._leaving: set[bytes] = store.incarnation.cache(set())
        self._others: set[str] = set()
        self._error: str | None = None
        """Why the last poll failed."""
        self._faults: dict[tuple[str, int], str] = {}
        """The last error of each step that failed for a claim, by name of the step and publisher."""
        self._listed = ListedClaims(())
        """The last list of claims that was trusted."""
        self._wanted: dict[PublisherName, Claim] = {}
        """The streams in this worker's share."""
        self._mine: Sequence[Claim] = ()
        """The share that ``_wanted`` was made of."""

    async def keep_polling(self, tasks: asyncio.TaskGroup) -> None:
        """Poll until cancelled. The streams run as tasks of ``tasks``."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            # A hint that comes during a poll causes another one: it may concern something that the poll has already
            # read.
            self.hint.clear()
            try:
                await self._poll(tasks)
                self._failed(None)
            except StoreUnavailable as exc:
                self._failed(exc.sentence)
            except Exception as exc:
                # A defect of one round must not end the worker and its streams: the next round may be better.
                self._failed(repr(exc), is_defect=True)
            self._metrics.redis_up.set(not self.is_away)
            pause = self._options.poll_seconds
            # Each of thousands of registrations comes with a hint, and one poll is enough for all.
            await asyncio.sleep(min(_REST * (loop.time() - began), pause / 2))
            try:
                async with asyncio.timeout(pause / 4 if self.is_away else pause):
                    await self.hint.wait()
            except TimeoutError:
                continue

    def _failed(self, error: str | None, *, is_defect: bool = False) -> None:
        """Remember the error of a round, or None if it succeeded. Log only a change since the previous round."""
        if error is None and self._error is not None:
            log.info("polling for streams resumed")
        elif error is not None and self._error is None:
            log.warning("polling for streams failed", extra=fields(error=error), exc_info=is_defect)
        self._error = error
        self.is_away = error is not None and not is_defect

    async def _for_each(
        self, action: str, claims: Iterable[Claim], step: Callable[[Claim], Awaitable[Any]], *, may_wait: bool = True
    ) -> list[Any]:
        """Run ``step`` for each claim, and return the results. A step that fails is logged once, and delays no other.

        If a server does not answer, the steps of its claims wait for the next poll, or without ``may_wait`` raise
        StoreUnavailable.
        """
        outcomes: list[Any] = []
        away = set[object]()
        for claim in claims:
            name, server = (action, claim.publisher), self._store.server_of(claim.group_id)
            if server in away:
                continue
            try:
                outcomes.append(await step(claim))
            except Exception as exc:
                if isinstance(exc, StoreUnavailable) and not isinstance(exc, RecordDamaged):
                    if not may_wait:
                        raise
                    away.add(server)
                elif self._faults.get(name) != repr(exc):
                    about = fields(publisher=str(claim.registration.name), step=action, error=repr(exc))
                    log.error("registration cannot be processed", extra=about)
                    self._faults[name] = repr(exc)
            else:
                self._faults.pop(name, None)
        return outcomes

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        workers = await self._store.heartbeats.report(
            self._options.worker_id,
            keep_seconds=max(2, int(self._options.stream.lease_seconds)),
            streams_max=self._options.streams_max,
        )
        listed, is_another = await self._trusted_claims()
        self._store.pacer.workers = len(workers)
        old_workers, self._others = self._others, set(workers)
        if (is_another or self.is_away) and not old_workers <= self._others:
            # Redis may lack the heartbeats of live workers, because it was unavailable or came back empty. So this poll
            # does not take the streams of missing workers.
            return
        await self._finish(listed.leaving)
        mine = self._shares.of(listed.staying, workers)
        self._scraper.see(listed.staying, mine)
        await self._end_over(mine)
        groups = await self._keep_groups(listed)
        share = self._shares.groups_of(groups)
        self._overdue.see(share)
        await self._unclaimed.check_next([groups[group_id] for group_id in share], listed.claims)
        if mine is not self._mine:
            self._mine = mine
            self._wanted = {claim.registration.name: claim for claim in mine if claim.registration.endpoint is not None}
        wanted = self._wanted
        await self._stop_others(wanted)
        self._note_left(self._shares.left)
        asked = await self._store.hashes.asked.read()
        self._start(wanted, listed.ranks, listed.with_pool, asked, tasks)
        self._runner.forget_errors(name for name in wanted if name not in self.running or self.running[name].is_idle)
        self._gauges.saw(list(workers), listed.registrations)

    async def _trusted_claims(self) -> tuple[ListedClaims, bool]:
        """Return all claims, and whether Redis has come back empty since the last poll. The claims were read after
        that.

        The worker keeps the claims that it has seen until it trusts a new list, because Redis may come back empty
        again while registrations are restored.
        """
        for attempt in range(_RESTORES_MAX):
            claims = await self._claims_and_lost()
            known_claims = chain([running.claim for running in self.running.values()], self._listed.claims)
            if not await self._keeper.restore(filter(None, (claim.wanted for claim in known_claims))):
                if claims is not self._listed.claims:
                    self._listed = ListedClaims(claims)
                    there = {claim.publisher for claim in claims}
                    self._faults = {name: fault for name, fault in self._faults.items() if name[1] in there}
                return self._listed, attempt > 0
        raise StoreUnavailable("Redis has lost its data several times in a row; find out why it comes back empty")

    async def _claims_and_lost(self) -> list[Claim]:
        """Restore the claims that Redis has lost since the last poll, and return all claims."""
        claims = await self._store.polled_claims.poll()
        if claims is self._listed.claims:
            return claims
        there = {claim.publisher for claim in claims}
        lost_claims = [claim for claim in self._listed.claims if claim.publisher not in there]
        put_back = self._store.claim_writer.put_back
        if any(await self._for_each("put_back", lost_claims, put_back, may_wait=False)):
            log.warning(
                "redis has lost registrations; they are written again", extra=fields(publishers=len(lost_claims))
            )
            claims = await self._store.directory.claims()
        return claims

    async def _finish(self, claims: Sequence[Claim]) -> None:
        """Finish interrupted unregistrations: claims still marked as leaving one poll later."""
        unfinished = [claim for claim in claims if claim.raw in self._leaving]
        self._leaving.clear()
        self._leaving.update(claim.raw for claim in claims)
        await self._for_each("finish", unfinished, self._store.claim_writer.finish)

    async def _end_over(self, mine: Sequence[Claim]) -> None:
        """End the old generations of publishers whose events come by HTTP, because these have no stream."""
        bounds = self._options.apply.bounds
        by_http = [claim for claim in mine if claim.registration.endpoint is None] if bounds else []
        if not by_http:
            return
        try:
            cuts = await self._store.entries.cuts(by_http) if bounds.max_entries else {}
            held = await self._store.publisher_states.holders(by_http)
        except StoreUnavailable as exc:
            log.debug("old generations wait for redis", extra=fields(error=exc.sentence))
            return
        now = int(1000 * time.time())
        overdue = [
            claim
            for claim, holders in zip(by_http, held, strict=True)
            if any(bounds.reason_to_end(name, holder, now, cuts.get(claim.group_id, 0)) for name, holder in holders)
        ]
        await self._for_each("end_over", overdue, self._runner.end_over)

    async def _keep_groups(self, listed: ListedClaims) -> dict[int, GroupEntry]:
        """Restore groups whose ids Redis has lost, because queries do not find them, and because nobody would sweep
        those without publishers. Return the other groups by id.
        """
        groups = await self._store.directory.groups()
        lost_groups = [claim for (_, group), claim in listed.groups.items() if group not in groups]
        await self._for_each("keep_group", lost_groups, self._store.claim_writer.begin)
        await self._lost_groups.keep(await self._store.directory.groups() if lost_groups else groups)
        return {entry.group_id: entry for entry in groups.values()}

    async def _stop_others(self, wanted: Mapping[PublisherName, Claim]) -> None:
        """Stop streams that now belong to other workers, or whose registration changed. Forget those that ended."""
        stopping: list[asyncio.Task[None]] = []
        for name, running in self.running.items():
            claim = wanted.get(name)
            if claim is running.claim or running.task is None:
                continue
            if claim is None or not running.may_go_on(claim):
                running.task.cancel()
                stopping.append(running.task)
        if stopping:
            await asyncio.wait(stopping, timeout=_STOP_SECONDS)
            await self._store.announce_free()
        self.running = {name: running for name, running in self.running.items() if not running.is_done}

    def _start(
        self,
        wanted: Mapping[PublisherName, Claim],
        ranks: RegisteredRanks,
        with_pool: Container[int],
        asked: Container[int],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Start the wanted streams that do not run yet, up to the limit of streams.

        Running streams learn which ranks are registered.
        """
        for name, claim in wanted.items():
            running = self.running.get(name)
            keeps_hashes = _keeps_hashes(claim, with_pool, asked)
            if running is not None:
                running.see(ranks.of(name), keeps_hashes=keeps_hashes)
            elif len(self.running) < self._options.streams_max:
                running = self.running[name] = Running(claim, ranks.of(name), keeps_hashes=keeps_hashes)
                running.task = tasks.create_task(self._runner.run(running))

    def _note_left(self, count: int) -> None:
        """Log when streams first have no worker, and when all have one again."""
        self._metrics.streams_left.set(count)
        if bool(count) != self._are_some_left:
            self._are_some_left = bool(count)
            if count:
                log.warning(
                    "no ingest worker has room for some streams; add ingest workers", extra=fields(streams=count)
                )
            else:
                log.info("every stream has an ingest worker again")

    def _served(self) -> list[ServedPair]:
        """Return the running streams, each with its resolver."""
        running = [runner for runner in self.running.values() if not runner.is_done]
        return [(runner.stream, runner.resolver) for runner in running if runner.stream and runner.resolver]


def _keeps_hashes(claim: Claim, with_pool: Container[int], asked: Container[int]) -> bool:
    """Return whether a stream keeps its hashes in Redis, because a pool or a client names blocks by them."""
    registration = claim.registration
    return registration.scope == "instance" and (
        claim.group_id in with_pool or (registration.kind.traits.is_asked_by_hash and claim.group_id in asked)
    )


def _with_pool(claims: Iterable[Claim]) -> set[int]:
    """Return the groups with a pool that may name blocks by the hashes of the engines in front of it."""
    return {
        claim.group_id
        for claim in claims
        if claim.registration.scope == "shared" and claim.registration.endpoint is not None
    }
