"""Discovery in an ingest worker: the one worker with the lease keeps registrations as their sources want them.

The sources: the pods of Kubernetes, the file of publishers, and the engines that clients have registered by their URL.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path

from waymark.base.errors import SettingsError, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.base.watched_file import FileVersion, version_of
from waymark.discovery.describe import Describer
from waymark.discovery.drafts import Draft, WantedEngine, WantedKey
from waymark.discovery.engines import EngineRegistrations
from waymark.discovery.kubernetes import ApiServer, PodWatch
from waymark.discovery.pods import PodPorts, WantedPods
from waymark.discovery.reconciler import CONFIRM_SECONDS, Reconciler
from waymark.domain.names import Origin, OriginKind
from waymark.domain.status import Discovery, StreamStatus
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: The lease of discovery, and how often it is renewed with the state that the commands show.
LEASE_SECONDS, _RENEW_SECONDS = 10.0, 10.0 / 3
AGAIN_SECONDS = 300
"""The time between two descriptions of one engine. A new model or socket mostly comes with a new pod or a lost stream,
which are noticed without this."""
#: The pause between two rounds of a source, the pause while its last list is doubted, and the least pause between two
#: rounds that changes ask for.
_ROUND_SECONDS, _DOUBTED_SECONDS, _PAUSE_SECONDS = 5.0, 1.0, 0.2
#: How often pods are annotated, the pause after each, and the most in one round.
_COSTS_SECONDS, _PATCH_PAUSE_SECONDS, _PATCHES_MAX = 15.0, 0.1, 50
#: Kubernetes reads the annotation as an int32.
_COST_MAX = 2**31 - 1
#: The bound on problems to show; the metric counts all waiting engines.
_PROBLEMS_MAX = 20
#: Statuses of a stream whose engine may publish elsewhere by now.
_OUT_OF_REACH = frozenset({StreamStatus.STARTING, StreamStatus.UNREACHABLE, StreamStatus.LOST, StreamStatus.FAILED})


@record(frozen=True, slots=True)
class DiscoveryOptions:
    worker_id: str
    again_seconds: float = AGAIN_SECONDS
    api_server: ApiServer | None = None
    ports: PodPorts = field(default_factory=PodPorts)
    file: str = ""
    """The path of the file of publishers."""
    read_file: Callable[[], Sequence[WantedEngine]] | None = None
    """Reads the file of publishers; raises SettingsError if it cannot be used. It blocks."""
    has_deletion_cost: bool = False
    """Whether pods are annotated with the worth of their caches."""
    costs_seconds: float = _COSTS_SECONDS
    round_seconds: float = _ROUND_SECONDS
    confirm_seconds: float = CONFIRM_SECONDS


class EngineDiscovery:
    def __init__(self, store: Store, metrics: Metrics, options: DiscoveryOptions, describer: Describer) -> None:
        self._store = store
        self._metrics = metrics
        self._options = options
        self._engines = EngineRegistrations(describer)
        self._reconcilers: list[Reconciler] = []
        self._problems: dict[OriginKind, list[str]] = {}

    async def run(self) -> None:
        """Wait for the lease, and discover while it holds, until cancelled."""
        working: asyncio.Task[None] | None = None
        try:
            while True:
                is_mine = await self._hold()
                if working is not None and (working.done() or not is_mine):
                    await _end(working)
                    working, self._reconcilers, self._problems = None, [], {}
                if is_mine and working is None:
                    working = asyncio.get_running_loop().create_task(self._work())
                self._metrics.discovery_leader.set(is_mine)
                await asyncio.sleep(_RENEW_SECONDS)
        finally:
            if working is not None:
                await _end(working)
                await asyncio.shield(self._give_up())

    async def _hold(self) -> bool:
        try:
            return await self._store.discovery.hold(self._state(), LEASE_SECONDS)
        except StoreUnavailable as error:
            log.debug("lease of discovery not renewed", extra=fields(error=error.sentence))
            return False

    async def _give_up(self) -> None:
        try:
            await self._store.discovery.hold(self._state(), 0)
        except StoreUnavailable as error:
            log.debug("lease of discovery not released", extra=fields(error=error.sentence))

    def _state(self) -> Discovery:
        registered = sum(source_reconciler.registered for source_reconciler in self._reconcilers)
        problems = [problem for several in self._problems.values() for problem in several]
        waiting = 0
        for reconciler in self._reconcilers:
            problems += reconciler.problems
            waiting += len(reconciler.problems)
        self._metrics.discovery_engines.labels(state="registered").set(registered)
        self._metrics.discovery_engines.labels(state="waiting").set(waiting)
        return Discovery(
            worker=self._options.worker_id,
            registered=registered,
            waiting=waiting,
            problems=tuple(problems[:_PROBLEMS_MAX]),
        )

    async def _work(self) -> None:
        """Run all sources; one that fails is restarted with the next lease."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_urls(self._new("url")))
                if self._options.read_file is not None:
                    tasks.create_task(
                        self._follow_file(self._new("file", f"{self._options.file} "), self._options.read_file)
                    )
                if self._options.api_server is not None:
                    watch = PodWatch(self._options.api_server, self._metrics)
                    tasks.create_task(watch.keep())
                    namespace = self._options.api_server.namespace
                    beginning = f"{namespace}/" if namespace else ""
                    tasks.create_task(self._follow_pods(self._new("discovery", beginning), watch))
                    if self._options.has_deletion_cost:
                        tasks.create_task(self._keep_costs(watch))
        except ExceptionGroup:
            log.exception("discovery failed, will be restarted")

    def _new(self, kind: OriginKind, beginning: str = "") -> Reconciler:
        """Return a reconciler, which may unregister origins of ``kind`` whose sources begin with ``beginning``."""
        reconciler = Reconciler(
            kind,
            self._store,
            self._engines,
            self._metrics,
            again_seconds=self._options.again_seconds,
            confirm_seconds=self._options.confirm_seconds,
            is_mine=lambda origin: origin.source.startswith(beginning),
        )
        self._reconcilers.append(reconciler)
        return reconciler

    # ---- sources -----------------------------------------------------------------------------------

    async def _follow_pods(self, reconciler: Reconciler, watch: PodWatch) -> None:
        restarts, pods = Restarts(self._store), WantedPods(self._options.ports)
        while True:
            seconds = self._options.round_seconds
            await _wait(watch.changed, min(seconds, _DOUBTED_SECONDS) if watch.is_doubted else seconds)
            if watch.lists == 0:
                self._problems["discovery"] = [watch.problem] if watch.problem else []
                continue
            if reconciler.wants_another_reading or watch.wants_another_list:
                await watch.list_again()
            gone_pods, watch.gone = watch.gone, set()
            wanted, problems = await pods.of(list(watch.pods.values()))
            self._log("discovery", [problem for problem in (watch.problem, watch.patch_problem) if problem] + problems)
            try:
                reconciler.ask_again(await restarts.since_last("discovery"))
                origins = [Origin("discovery", name) for name in gone_pods]
                if not await reconciler.reconcile(wanted, reading=watch.lists, gone=origins):
                    watch.changed.set()  # the next round begins at once
            except StoreUnavailable as error:
                log.debug("round of discovery not ended", extra=fields(error=error.sentence))
                watch.gone |= gone_pods

    async def _keep_costs(self, watch: PodWatch) -> None:
        """Annotate pods with the worth of their caches, if it has changed; few pods at a time."""
        while True:
            await asyncio.sleep(self._options.costs_seconds)
            try:
                costs = await self._costs()
            except StoreUnavailable as error:
                log.debug("pods not annotated", extra=fields(error=error.sentence))
                continue
            changed = [
                pod for name, pod in watch.pods.items() if pod.deletion_cost != costs.get(name, pod.deletion_cost)
            ]
            random.shuffle(changed)  # so that neither the bound nor a pod that is refused always meets the same ones
            for pod in changed[:_PATCHES_MAX]:
                if not await watch.set_deletion_cost(pod, int(costs[pod.name])):
                    break
                await asyncio.sleep(_PATCH_PAUSE_SECONDS)

    async def _costs(self) -> dict[str, str]:
        """Return the cost of each pod whose cache has been valued: tokens that only it has, weighted by their use.

        Two digits of a cost count, so that it does not change all the time.
        """
        engines = {
            (claim.group_id, claim.registration.origin.source, claim.registration.instance_id)
            for claim in await self._store.polled_claims.poll()
            if claim.registration.origin.kind == "discovery" and not claim.is_leaving
        }
        groups = {group_id for group_id, _, _ in engines}
        valuations = self._store.valuations
        not_asked = groups - await valuations.asked.read()
        if not_asked:
            await valuations.asked.add(not_asked)
        costs = await valuations.read(sorted(groups))
        tokens: dict[str, int] = {}
        for group_id, pod, instance_id in engines:
            worth = costs[group_id].worths.get(instance_id) if group_id in costs else None
            if worth is not None:
                tokens[pod] = tokens.get(pod, 0) + worth.only_used
        return {pod: f"{min(float(f'{count:.1e}'), _COST_MAX):.0f}" for pod, count in tokens.items()}

    async def _follow_file(self, reconciler: Reconciler, reader: Callable[[], Sequence[WantedEngine]]) -> None:
        restarts, path = Restarts(self._store), Path(self._options.file)
        reading = 0
        version: FileVersion | None = None
        wanted: Sequence[WantedEngine] = ()
        while True:
            try:
                # A file of thousands of publishers takes a second of a worker, which applies events meanwhile.
                found = await asyncio.to_thread(version_of, path)
                if found is None or found != version:
                    wanted, version = await asyncio.to_thread(reader), found
                reading += 1
                self._log("file", [])
                reconciler.ask_again(await restarts.since_last("file"))
                await reconciler.reconcile(wanted, reading=reading)
            except SettingsError as error:
                self._log("file", str(error).splitlines())
            except StoreUnavailable as error:
                log.debug("round of discovery not ended", extra=fields(error=error.sentence))
            await asyncio.sleep(self._options.round_seconds)

    async def _follow_urls(self, reconciler: Reconciler) -> None:
        restarts = Restarts(self._store)
        reading = 0
        while True:
            reading += 1
            try:
                wanted = await self._by_url()
                if wanted or reconciler.registered or reconciler.problems:
                    reconciler.ask_again(await restarts.since_last("url"))
                    await reconciler.reconcile(wanted, reading=reading)
            except StoreUnavailable as error:
                log.debug("round of discovery not ended", extra=fields(error=error.sentence))
            await asyncio.sleep(self._options.round_seconds)

    async def _by_url(self) -> list[WantedEngine]:
        """Return the engines that clients have registered by URL, with the fields that an engine does not report."""
        engines: dict[WantedKey, WantedEngine] = {}
        for registration in await self._store.polled_claims.registrations():
            if registration.origin.kind == "url":
                draft = Draft(
                    type=registration.kind, modelname=registration.model_name, block_size=registration.block_size
                )
                origin = registration.origin
                wanted = WantedEngine(origin, Draft.of(registration), origin.source, known=draft)
                engines.setdefault(wanted.key, wanted)
        return list(engines.values())

    def _log(self, kind: OriginKind, problems: list[str]) -> None:
        if problems != self._problems.get(kind, []):
            for problem in problems[:_PROBLEMS_MAX]:
                log.warning("a source of engines has a problem", extra=fields(source=kind, error=problem))
        self._problems[kind] = problems


class Restarts:
    """Finds the engines whose streams began a new life, or cannot be reached, since the last look."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine_lives: dict[int, str] = {}

    async def since_last(self, kind: OriginKind) -> set[Origin]:
        claims = [
            claim
            for claim in await self._store.polled_claims.poll()
            if not claim.is_leaving and claim.registration.origin.kind == kind and claim.registration.endpoint
        ]
        lives, origins = dict[int, str](), set[Origin]()
        for claim, (life, status) in zip(claims, await self._store.discovery.lives(claims), strict=True):
            lives[claim.publisher] = life
            has_restarted = self._engine_lives.get(claim.publisher, life) not in ("", life)
            if has_restarted or status in _OUT_OF_REACH:
                origins.add(claim.registration.origin)
        self._engine_lives = lives  # not before Redis has answered
        return origins


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most ``seconds``, and clear it; several changes at once count as one."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
        await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        pass
    event.clear()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
