"""Registers the engines that a source names, and unregisters those that it names no longer; other registrations stay.

An engine that does not answer is tried again, at growing intervals, and stays registered. A slow or wrong one does
not delay others: a few are asked at a time, each within its own bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from waymark.base.errors import Conflict, InvalidValue, RecordDamaged, RemoteUnavailable, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.discovery.drafts import WantedEngine, WantedKey
from waymark.discovery.engines import EngineRegistrations
from waymark.discovery.pods import in_turns
from waymark.domain.names import Origin, OriginKind, PublisherName, Registration
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: The most engines asked at the same time. A round asks further engines for this many seconds, or for this
#: many times the duration of its first pass over all engines, because a busy machine needs most of its time for that
#: pass.
_ASKED_MAX = 32
_ROUND_SECONDS, _ROUND_TIMES = 5.0, 4
#: Ranks of one write, exceeded by at most one engine.
_WRITTEN_MAX = 256
_RETRY_SECONDS, _RETRY_SECONDS_MAX = 1.0, 60.0
#: How long the absence of most engines has to last before they are unregistered.
CONFIRM_SECONDS = 10.0


@record(slots=True)
class _KnownEngine:
    """The result of the last attempt to register an engine."""

    wanted: WantedEngine
    registrations: tuple[Registration, ...] = ()
    again_at: float = 0.0
    """The time of the next attempt, by the monotonic clock."""
    failures: int = 0
    problem: str = ""


class _Ready(NamedTuple):
    """An engine that can be registered now: it needed no question, or has answered it."""

    known: _KnownEngine
    registrations: Sequence[Registration]


class Reconciler:
    """Registers the engines of one source. Its registrations have an origin of ``kind``."""

    def __init__(
        self,
        kind: OriginKind,
        store: Store,
        engines: EngineRegistrations,
        metrics: Metrics,
        *,
        again_seconds: float,
        confirm_seconds: float = CONFIRM_SECONDS,
        is_mine: Callable[[Origin], bool] = lambda _: True,
    ) -> None:
        """``is_mine`` distinguishes origins of the same kind: those of another file or namespace are left alone."""
        self._kind = kind
        self._store = store
        self._engines = engines
        self._metrics = metrics
        self._again_seconds = again_seconds
        self._confirm_seconds = confirm_seconds
        self._is_mine = is_mine
        self._known: dict[WantedKey, _KnownEngine] = {}
        self._missing: tuple[float, int] | None = None
        """The time, and the reading of the source, since which most registered engines are missing there."""

    @property
    def problems(self) -> list[str]:
        """Why engines are not registered as their source wants, a sentence each."""
        return [f"{engine.wanted}: {engine.problem}" for engine in self._known.values() if engine.problem]

    @property
    def registered(self) -> int:
        return sum(bool(known_engine.registrations) for known_engine in self._known.values())

    def ask_again(self, origins: Iterable[Origin]) -> None:
        """Ask these engines at the next chance, after those that were never asked: they have restarted."""
        restarted, now = set(origins), monotonic()
        for known_engine in self._known.values():
            if known_engine.wanted.origin in restarted and not known_engine.failures:
                known_engine.again_at = min(known_engine.again_at, now)

    @property
    def wants_another_reading(self) -> bool:
        """Whether most engines are missing, and only another reading of the source can confirm that now."""
        return self._missing is not None and monotonic() - self._missing[0] >= self._confirm_seconds

    async def reconcile(self, wanted: Sequence[WantedEngine], *, reading: int, gone: Iterable[Origin] = ()) -> bool:
        """Make the registrations those of ``wanted``, the complete list of the source.

        Return False if the time of a round was over before every engine had its turn.

        ``reading`` is the number of times that the source was read completely. Engines that the source itself calls
        gone are unregistered at once. If more than half are merely absent, they must be absent in a reading
        ``confirm_seconds`` later, too. Raises StoreUnavailable.
        """
        began = monotonic()
        there = _EarlierRegistrations(await self._store.directory.registrations(), self._kind)
        named = {engine.key: engine async for engine in in_turns(wanted)}
        self._known = {key: known_engine for key, known_engine in self._known.items() if key in named}
        older = _older(wanted)
        origins = {engine.origin for key, engine in named.items() if key not in older}
        lost_origins = {key[0] for key in older} - origins
        await self._unregister(there.all, origins, lost_origins.union(gone), reading)
        now = monotonic()
        due = []
        async for key, each in in_turns(named.items()):
            known_engine = self._known.get(key)
            if known_engine is None or known_engine.wanted != each:
                known_engine = self._known[key] = _KnownEngine(each)
            if key in older:
                self._failed(known_engine, f"{older[key].source} has the same address, {each.address}, and is newer")
            elif now >= known_engine.again_at or any(
                registration.name not in there.names for registration in known_engine.registrations
            ):
                due.append(known_engine)
        due.sort(key=lambda known_engine: known_engine.again_at)
        seconds = max(_ROUND_SECONDS, _ROUND_TIMES * (monotonic() - began))
        return not await self._ask_and_register(due, there, seconds)

    # ---- registering -------------------------------------------------------------------------------

    async def _ask_and_register(self, due: Sequence[_KnownEngine], there: _EarlierRegistrations, seconds: float) -> int:
        """Return how many engines had no turn within the time of a round, ``seconds``."""
        deadline = monotonic() + seconds
        turns, ready, has_come, unasked = iter(due), deque[_Ready](), asyncio.Event(), 0

        async def ask() -> None:
            nonlocal unasked
            for known_engine in turns:
                if known_engine.wanted.url is not None and monotonic() >= deadline:
                    unasked += 1  # the others come first in the next round
                    continue
                await self._ask(known_engine, there, ready)
                has_come.set()
                await asyncio.sleep(0)  # an engine that is not asked takes a turn of the loop, too

        # An error of Redis ends the round; all other errors are an engine's own.
        asking = asyncio.gather(*(ask() for _ in range(min(_ASKED_MAX, len(due)))))
        asking.add_done_callback(lambda _: has_come.set())
        try:
            while ready or not asking.done():
                await has_come.wait()
                has_come.clear()
                while ready:  # including the engines that have answered meanwhile
                    await self._register(_some_of(ready), there)
            await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return unasked

    async def _ask(self, known_engine: _KnownEngine, there: _EarlierRegistrations, ready: deque[_Ready]) -> None:
        """Append the registrations of an engine to ``ready``, if it has any now."""
        with self._noting_failure(known_engine):
            registrations = await self._engines.of(known_engine.wanted)
            there.check(registrations)
            ready.append(_Ready(known_engine, registrations))

    async def _register(self, several: Sequence[_Ready], there: _EarlierRegistrations) -> None:
        # The source of engines by URL is the registrations themselves: one that a client removes while its engine is
        # asked must not come back.
        follows_clients = self._kind == "url"
        known_names = there.names if follows_clients else frozenset[PublisherName]()
        try:
            results = await self._store.registry.register_several(
                [own_registration for ready_engine in several for own_registration in ready_engine.registrations],
                known=known_names,
            )
        except RecordDamaged:  # a damaged record of one engine; each is then tried by itself
            results = {}
        for known_engine, registrations in several:
            with self._noting_failure(known_engine):
                new_names = []
                for registration in registrations:
                    is_new = results.get(registration.name)
                    if is_new is None:
                        is_new = await self._put(registration, is_known=registration.name in known_names)
                    if is_new:
                        new_names.append(registration.name)
                        log.info(
                            "engine is registered", extra=fields(publisher=str(registration.name), source=self._kind)
                        )
                names = {own_registration.name for own_registration in registrations}
                wanted = known_engine.wanted
                own_names = [former.name for former in there.of(wanted.origin) if self._is_of(former, wanted)]
                if follows_clients and new_names and not await self._are_any_registered(own_names):
                    await self._take(new_names)  # a further rank of an engine that was unregistered meanwhile
                await self._take(name for name in own_names if name not in names)
                if known_engine.problem:
                    log.info("engine is registered now", extra=fields(engine=str(known_engine.wanted)))
                known_engine.registrations, known_engine.problem, known_engine.failures = tuple(registrations), "", 0
                known_engine.again_at = monotonic() + self._again_seconds

    @contextmanager
    def _noting_failure(self, known_engine: _KnownEngine) -> Iterator[None]:
        """Note an error of the engine itself. Raises StoreUnavailable."""
        try:
            yield
        except (InvalidValue, RemoteUnavailable, Conflict, RecordDamaged) as error:
            self._failed(known_engine, error.sentence)
        except StoreUnavailable:
            raise
        except Exception as error:
            # A defect in the handling of one engine must not stop the others.
            log.exception("engine cannot be registered", extra=fields(engine=str(known_engine.wanted)))
            self._failed(known_engine, repr(error)[:200])

    def _is_of(self, registration: Registration, wanted: WantedEngine) -> bool:
        """Return whether it is a registration of this engine; a URL may be registered under several names."""
        is_name = self._kind != "url" or wanted.key[1:] == (registration.instance_id, registration.tenant_id)
        return is_name and registration.origin == wanted.origin

    async def _are_any_registered(self, names: Sequence[PublisherName]) -> bool:
        claims = [await self._store.directory.claim(name) for name in names]
        return any(claim is not None and not claim.is_leaving for claim in claims)

    async def _put(self, registration: Registration, *, is_known: bool) -> bool:
        """Register one by itself. Return whether it is new or has changed. ``is_known``: only if it is registered."""
        try:
            return await self._store.registry.register(registration, is_known=is_known)
        except Conflict:
            claim = await self._store.directory.claim(registration.name)
            if claim is None or claim.registration.origin != registration.origin:
                raise
            # It is the same pod or URL with another model or block size: its blocks are others, too.
            log.warning(
                "engine came back with another model or block size", extra=fields(engine=str(registration.name))
            )
            was_there = await self._store.registry.unregister([registration.name])
            return bool(was_there) and await self._store.registry.register(registration)

    def _failed(self, known_engine: _KnownEngine, problem: str) -> None:
        if problem != known_engine.problem:
            log.warning("engine cannot be registered", extra=fields(engine=str(known_engine.wanted), error=problem))
        known_engine.problem = problem
        wait = min(_RETRY_SECONDS * 2 ** min(known_engine.failures, 10), _RETRY_SECONDS_MAX)
        known_engine.failures += 1
        known_engine.again_at = monotonic() + wait

    # ---- unregistering -----------------------------------------------------------------------------

    async def _unregister(
        self, there: Sequence[Registration], named: Iterable[Origin], lost_origins: Set[Origin], reading: int
    ) -> None:
        own = [
            registration
            for registration in there
            if registration.origin.kind == self._kind and self._is_mine(registration.origin)
        ]
        named_origins = set(named)
        absent = [registration for registration in own if registration.origin not in named_origins]
        await self._take(registration.name for registration in absent if registration.origin in lost_origins)
        missing = [registration for registration in absent if registration.origin not in lost_origins]
        if 2 * len(missing) <= len(own):
            self._missing = None
        elif self._missing is None:
            self._missing = monotonic(), reading
            log.warning(
                "most engines are missing in a source; the source is read again before they are unregistered",
                extra=fields(source=self._kind, missing=len(missing), registered=len(own)),
            )
            return
        elif monotonic() - self._missing[0] < self._confirm_seconds or reading <= self._missing[1]:
            return
        await self._take(registration.name for registration in missing)
        self._missing = None

    async def _take(self, names: Iterable[PublisherName]) -> None:
        for name in names:
            claim = await self._store.directory.claim(name)
            if claim is None or claim.registration.origin.kind != self._kind:
                continue  # a client has registered it meanwhile
            await self._store.registry.unregister([name])
            self._metrics.discovery_unregistered.inc()
            log.info("engine is unregistered", extra=fields(publisher=str(name), source=self._kind))


def _some_of(ready: deque[_Ready]) -> list[_Ready]:
    """Remove as many engines as are registered together, at least one, and return them."""
    batch: list[_Ready] = []
    ranks = 0
    while ready and ranks < _WRITTEN_MAX:
        batch.append(ready.popleft())
        ranks += len(batch[-1].registrations)
    return batch


def _older(wanted: Sequence[WantedEngine]) -> Mapping[WantedKey, Origin]:
    """Return each engine whose address a newer one has, with the origin of the newer one: the API server may list a pod
    long after its end. An engine without a start is not a pod, and a file may name such an engine several times.
    """
    newest: dict[str, WantedEngine] = {}
    pods = [(engine.address, engine) for engine in wanted if engine.address is not None and engine.since]
    for address, engine in pods:
        newer = newest.get(address)
        if newer is None or (newer.since, newer.origin) < (engine.since, engine.origin):
            newest[address] = engine
    return {engine.key: newest[address].origin for address, engine in pods if newest[address].origin != engine.origin}


class _EarlierRegistrations:
    """The registrations at the beginning of a round."""

    def __init__(self, registrations: Sequence[Registration], kind: OriginKind) -> None:
        self.all = registrations
        self.names = {registration.name for registration in registrations}
        self._by_origin: dict[Origin, list[Registration]] = {}
        for registration in registrations:
            self._by_origin.setdefault(registration.origin, []).append(registration)
        foreign = [registration for registration in registrations if registration.origin.kind != kind]
        self._foreign_names = {registration.name for registration in foreign}
        self._foreign_sockets = {
            (registration.endpoint, registration.group): registration.name
            for registration in foreign
            if registration.endpoint is not None
        }

    def of(self, origin: Origin) -> Sequence[Registration]:
        """Return the registrations with this origin."""
        return self._by_origin.get(origin, ())

    def check(self, registrations: Sequence[Registration]) -> None:
        """Raise Conflict for a change of another source's registration, or a second subscription to a socket."""
        for registration in registrations:
            name = registration.name if registration.name in self._foreign_names else None
            name = name or self._foreign_sockets.get((registration.endpoint or "", registration.group))
            if name is not None:
                raise Conflict(f"{name} is registered by another source, and only that one changes it")
