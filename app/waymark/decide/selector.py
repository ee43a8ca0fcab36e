"""The use case: a question, the facts about the targets, their order, a reservation.

A decision reads the index like a query, ranks all targets by loads from a moment ago, and lets Redis choose the best of
the first few by their loads of that instant. So it costs one round trip more than a query, and any number of replicas
decide as one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from time import perf_counter
from typing import Any, TypeVar

from waymark.base.errors import NoTarget, Saturated, Starting, StoreUnavailable, UnknownModel, nothing_registered
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.decide.asked_pools import AskedPools
from waymark.decide.books import Bookkeeper
from waymark.decide.fail_open import FAIL_OPEN, Cause, Deed, OwnReservations, StartupGate, cause_of
from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.matches import MatchReader, PromptMatches, request_of
from waymark.decide.options import SelectionOptions
from waymark.decide.order import order, order_all
from waymark.decide.policies.policy import Candidate
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import PolicyChoice, ProfileName, Question, RankedTargets, SelectedTarget, SelectParameters
from waymark.decide.request_prompts import SequenceLoad
from waymark.decide.reserve import PrefillProgress, TargetReserver, headers_of
from waymark.decide.shadows import Shadows
from waymark.decide.snapshot import SnapshotKeeper
from waymark.decide.usual import UsualDecisions
from waymark.domain.books import NO_USAGE, Usage
from waymark.domain.names import GroupName
from waymark.domain.status import Decision
from waymark.domain.table import PublisherRow
from waymark.store.reservations import Offer, Reservation, ReservationPart, ReservationTerms
from waymark.store.steps import RedisLimit, Steps, Waiting, Within, finished, in_task
from waymark.store.store import Store

T = TypeVar("T")

#: How often a decision starts over because its group's table has changed meanwhile.
_LOOKUPS_MAX = 3
_DRAINED = "drained"
#: How long a reservation lasts after it was given back, if Redis is unavailable meanwhile.
_RESERVED_MS = 120_000
#: Names of ``only`` that are looked up for the sentence of a refusal.
_SAID_MAX = 8
_STICKY = PolicyChoice.of(PRESETS["sticky"])
#: Decisions by the prefix key, as Continuum Router's counters name them.
_BY_KEY = {Decision.PREFIX: Decision.PREFIX_HASH, Decision.LOAD: Decision.OVERFLOW}


class Selector:
    """Decisions of one replica."""

    def __init__(
        self,
        store: Store,
        options: SelectionOptions,
        metrics: Metrics,
        random: Random | None = None,
        *,
        pools: AskedPools | None = None,
    ) -> None:
        """``pools`` asks pools without events; None: they count for nothing."""
        self._store = store
        self._options = options
        self.shadow_policies = options.shadows
        self._metrics = metrics
        self._random = random or Random()
        self.snapshots = SnapshotKeeper(store, options.loads_seconds, options.deadline_seconds, metrics)
        self._progress = store.incarnation.cache(
            PrefillProgress(store.reader, store.reservations, store.begin, metrics)
        )
        self._reserver = TargetReserver(
            store.reservations, self.snapshots, self._progress, options, metrics, store.held_hashes, store.histories
        )
        self._bookkeeper = Bookkeeper(store, metrics)
        self._shadows = Shadows(store.kept_decisions, self.snapshots, options, metrics, store.begin)
        self._limit = RedisLimit(2 * options.deadline_seconds)
        self.usual = UsualDecisions(
            store, options, metrics, self._random, self.snapshots, self._reserver, self._shadows, self._limit
        )
        self._own = OwnReservations()
        self._matches = MatchReader(store, options, self.snapshots, pools)
        self._observe_walk = metrics.decision_duration_seconds.labels(part="walk").observe
        self._observe_policy = metrics.decision_duration_seconds.labels(part="policy").observe
        metrics.prefix_routing_prefix_cardinality.set_function(lambda: store.counts.prefixes_seen)
        metrics.prefix_routing_backend_distribution.set_function(
            lambda: metrics.backends(self.snapshots.requests_under_way())
        )

    @property
    def default_policy(self) -> PolicyChoice:
        """The policy of a request that does not name one."""
        return self._options.default_policy()

    @property
    def default_profile(self) -> ProfileName | None:
        """The profile of a request that does not name one; None: the policy decides."""
        return self._options.profile

    # ---- without a reservation ---------------------------------------------------------------------

    def scoring(self, question: Question) -> Steps[RankedTargets | None]:
        """Return the steps that find all candidates, best first, or None if the group has no registration. They raise
        StoreUnavailable if Redis is unavailable.
        """
        began = perf_counter()
        read = yield from self._matches.reading(question)
        if read is None:
            return None
        self._observe_walk(perf_counter() - began)
        snapshot, matches = read
        found = order_all(snapshot, matches, question, self._random)
        self._metrics.decisions.labels(policy=question.policy.name, decision=found.decision).inc()
        return RankedTargets(
            found.scored,
            found.decision,
            matches.request.tokens,
            matches.request.block_size,
            matches.is_partial,
            matches.walk,
            frozenset() if question.given is None else snapshot.fleet.names & question.given.keys(),
            found.is_degraded,
        )

    score = in_task(scoring)

    # ---- with one ----------------------------------------------------------------------------------

    async def select_open(self, question: Question, gate: StartupGate) -> SelectedTarget:
        """Take a target, or do whatever ``FAIL_OPEN`` says. Raise NoTarget (UnknownModel if the model has no engine),
        Saturated, Starting, or StoreUnavailable if no target of the model is known; then there is no reservation.
        """
        return await finished(self.selecting(question, gate), unwanted=self._drop)

    def selecting(
        self, question: Question, gate: StartupGate, *, without: Cause | None = None, passed_on: Cause | None = None
    ) -> Steps[SelectedTarget]:
        """Return the steps of ``select_open``.

        ``without`` is a cause that the caller knows already; the error of the cause ``passed_on`` is raised in any
        case, for a caller that asks again.
        """
        if gate.watch is not None and gate.watch.finds_none and FAIL_OPEN[Cause.NO_INDEX] is Deed.BY_PREFIX:
            question = question._replace(has_index=False)
        if without is None:
            try:
                if not gate.is_open:
                    yield Waiting(gate.check())
                return (yield from self._selecting_in_time(question))
            except (NoTarget, Saturated, Starting, StoreUnavailable) as error:
                is_forgotten = isinstance(error, NoTarget) and (yield Waiting(self._is_forgotten(question.group)))
                without = cause_of(error, is_forgotten=is_forgotten)
                if without is None or without is passed_on or FAIL_OPEN[without] is not Deed.LAST_SNAPSHOT:
                    raise
        gate.check_latched()
        return self.select_by_last_known(question)

    async def _is_forgotten(self, group: GroupName) -> bool:
        """Return whether Redis has forgotten a model that was served a moment ago, because it came back empty."""
        if not self.snapshots.was_there(group):
            return False
        try:
            return await self.snapshots.newest_fleet(group) is None
        except StoreUnavailable:
            return True

    def _drop(self, selected: SelectedTarget) -> None:
        self.give_back(selected.reservations)

    def give_back(self, reservations: Sequence[Reservation]) -> None:
        """End reservations that no caller waits for any more, as soon as Redis answers. No engine got their
        requests."""
        others = self._own.release(reservations, ReservationPart.UNANSWERED, 0)
        if others:
            self._progress.told(others, ReservationPart.UNANSWERED, 0)
            self._store.reservations.take_back(others, _RESERVED_MS)

    async def select(self, question: Question) -> SelectedTarget:
        """Take a target. Raise NoTarget, Saturated or StoreUnavailable; then there is no reservation."""
        return await finished(self._selecting_in_time(question), unwanted=self._drop)

    def _selecting_in_time(self, question: Question) -> Steps[SelectedTarget]:
        """Return the steps of ``select``."""
        selected = yield from self._in_time(self._select, question)
        by_key = _BY_KEY.get(selected.decision) if question.prefix_key is not None else None
        if by_key is not None or selected.policy.name == "sticky":
            strategy = by_key or selected.decision
            self._store.counts.add(f"prefix_routing.{strategy}", question.prefix_key)
            self._metrics.prefix_routing_requests.labels(strategy=strategy).inc()
        else:
            self._store.counts.add(f"kv_index.{selected.decision}", question.prefix_key)
            self._metrics.kv_index_routing_decisions.of(selected.decision).inc()
        return selected

    def _in_time(self, begin: Callable[..., Steps[T]], *arguments: Any) -> Steps[T]:
        """Take the steps of a call within the limit. Raise StoreUnavailable if Redis does not answer in time, or did
        not a moment ago; then the call is not made.
        """
        if self._limit.is_away:
            raise StoreUnavailable("Redis did not answer a moment ago; try again in a moment")
        try:
            result: T = yield Within(self._limit, begin(*arguments))
        except StoreUnavailable as exc:
            if exc.concerns_all:
                self._limit.note_away()
            raise
        except TimeoutError:
            raise self._limit.late() from None
        return result

    def _select(self, question: Question) -> Steps[SelectedTarget]:
        group = question.group
        for _ in range(_LOOKUPS_MAX):
            began = perf_counter()
            read = yield from self._matches.reading(question)
            if read is None:
                raise UnknownModel(group.model_name, group.tenant_id)
            snapshot, matches = read
            read_at = perf_counter()
            offers = order(snapshot, matches, question, self._random)
            ordered_at = perf_counter()
            try:
                if offers is None:
                    raise NoTarget(_none_allowed(snapshot.fleet, question))
                shadowed = self._shadows.begin(offers, snapshot, matches, question)
                taken = yield from self._reserver.taking(offers, snapshot, matches, question)
            finally:
                self._observe_walk(read_at - began)
                self._observe_policy(ordered_at - read_at)
            if taken is not None:
                if shadowed is not None:
                    shadowed.end(taken)
                return taken
            # Every target that was offered is gone: the cached table is older than that.
            yield Waiting(self._store.reader.table(group, deadline_seconds=self._options.deadline_seconds))
        raise NoTarget(nothing_registered(group.model_name, group.tenant_id))

    def select_by_last_known(self, question: Question) -> SelectedTarget:
        """Take a target by the last snapshot, without Redis. Raise StoreUnavailable if the group is unknown."""
        snapshot = self.snapshots.last(question.group)
        if snapshot is None:
            raise StoreUnavailable(
                "Redis is unavailable, and this process knows no target of this model yet; try again in a moment"
            )
        block_size = question.block_size or max(snapshot.fleet.block_sizes, default=1)
        prompt = question.prompt(block_size)._replace(has_tokens=False)
        request = request_of(question, prompt, block_size, 0, snapshot.fleet)
        matches = PromptMatches(request, PromptState({}, self._own.loads(question.group), {}, {}), prompt.keys)
        # The filters and stages of a file hold, with the prefix key in place of a match, which cannot be looked up.
        if question.policy.preset is not None:
            question = question._replace(policy=_STICKY)
        offers = order(snapshot, matches, question, self._random)
        if offers is None:
            raise NoTarget(_none_allowed(snapshot.fleet, question))
        parameters, group_id = question.parameters, snapshot.entry.group_id
        best, prefill = offers.decode.scored(0), None if offers.prefill is None else offers.prefill.scored(0)
        stages = [best.candidate] if prefill is None else [best.candidate, prefill.candidate]
        reservations = []
        if parameters.is_reserved:
            reservations = [
                self._own.reserve(question.group, group_id, each.publisher, request.tokens, parameters.milliseconds)
                for each in stages
            ]
        self._metrics.decisions.labels(policy=question.policy.name, decision="degraded").inc()
        return SelectedTarget(
            best,
            offers.decode.others(0, parameters.count - 1),
            question.policy,
            offers.decision,
            request.tokens,
            request.prefix_key,
            prefill,
            offers.encode,
            reservations,
            is_degraded=True,
            group_id=group_id,
            block_size=request.block_size,
            headers=headers_of(best, prefill, offers.encode),
        )

    async def target(self, group: GroupName, publisher: int) -> Candidate | None:
        """Return a registered target by its id, without its loads."""
        fleet = await self.snapshots.newest_fleet(group)
        member = None if fleet is None else fleet.by_publisher.get(publisher)
        return None if member is None else Candidate(member.publisher, *member.name, address=member.target.address)

    async def reserve(
        self, group: GroupName, candidate: Candidate, tokens: int, context: int, milliseconds: int
    ) -> Reservation:
        """Reserve a target that the caller has chosen. Raises NoTarget, Saturated."""
        entry = self._store.reader.entry_at_hand(group) or await self._store.directory.group(group)
        if entry is None:
            raise NoTarget(nothing_registered(group.model_name, group.tenant_id))
        terms = ReservationTerms(
            context=context,
            milliseconds=milliseconds,
            limit=self._options.target_requests_max,
            reservations_max=self._options.reservations_max,
        )
        found = await self._store.reservations.reserve(entry.group_id, [Offer(candidate.publisher, tokens)], terms)
        self._metrics.reservations_expired.inc(found.overdue)
        if found.reservation is None:
            raise Saturated(f"target {shown(candidate.instance_id)} cannot take a request now; try again in a moment")
        return found.reservation

    async def reserve_several(
        self, group: GroupName, candidate: Candidate, loads: Sequence[SequenceLoad], milliseconds: int
    ) -> tuple[Reservation, ...]:
        """Reserve a target for each sequence; fewer if it has as many requests as it may have, or Redis is
        unavailable. If the caller is cancelled, the reservations end as soon as they are made.
        """
        work = self._store.begin(self._reserve_each(group, candidate, loads, milliseconds))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(self._give_back_result)
            raise

    def _give_back_result(self, work: asyncio.Task[tuple[Reservation, ...]]) -> None:
        if not work.cancelled() and work.exception() is None:
            self.give_back(work.result())

    async def _reserve_each(
        self, group: GroupName, candidate: Candidate, loads: Sequence[SequenceLoad], milliseconds: int
    ) -> tuple[Reservation, ...]:
        results = await asyncio.gather(
            *(self.reserve(group, candidate, load.new, load.context, milliseconds) for load in loads),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, NoTarget | Saturated | StoreUnavailable):
                raise result
        return tuple(result for result in results if isinstance(result, Reservation))

    def release_steps(
        self,
        reservations: Sequence[Reservation],
        part: ReservationPart,
        *,
        milliseconds: int = 120_000,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        usage: Usage = NO_USAGE,
    ) -> Steps[tuple[int, int]]:
        """Return the steps that end reservations, or a part of them. Their result is how many existed, and how many did
        not.

        ``ttft_ms`` and ``tpot_ms`` are the times of the answer, and ``usage`` is what the engine says of the request.
        """
        others = self._own.release(reservations, part, milliseconds)
        own = len(reservations) - len(others)
        if not others:
            return own, 0
        self._progress.told(others, part, milliseconds)
        released, gone = yield from self._store.reservations.release_steps(
            others,
            part,
            milliseconds=milliseconds,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            usage=usage,
            drift_max=self._options.drift_max,
            saw=self.snapshots.released,
            booked=lambda reservation, drift: self._bookkeeper.booked(reservation, usage, drift),
        )
        if released:
            self._shadows.ended(others, ttft_ms, usage)
        return own + released, gone

    release = in_task(release_steps)


def _none_allowed(fleet: Fleet, question: Question) -> str:
    """Return the sentence about a question whose constraints leave no target: how many each constraint leaves out."""
    parameters = question.parameters
    rows = [row for row in fleet.table.publishers.values() if row.scope == "instance"]
    lost = sum(row.is_lost for row in rows)
    removed = Counter({"lost": lost, _DRAINED: len(rows) - lost - len(fleet.members)})
    serving = {member.publisher for member in fleet.serving(question.served_as)}
    not_excluded = replace(parameters, only=None)
    for member in fleet.members:
        instance_id, address = member.name[0], member.target.address
        if member.publisher not in serving:
            removed["not serving this name"] += 1
        elif not not_excluded.allows(instance_id, address):
            removed["in exclude"] += 1
        elif not parameters.allows(instance_id, address):
            removed["not in only"] += 1
        elif parameters.needs_address and address is None:
            removed["without an address"] += 1
        else:
            removed["left out by roles or by the filters of the policy"] += 1
    model = shown(question.group.model_name)
    if not rows:
        return f"no target is left for model {model}: no engine of it is registered"
    counts = ", ".join(f"{count} {why}" for why, count in removed.items() if count)
    unknown = [name for name in sorted(parameters.only or ())[:_SAID_MAX] if not _is_known(fleet, rows, name)]
    remedy = "; 'waymark drain NAME --resume' sends a drained one requests again" if removed[_DRAINED] else ""
    remedy += f"; nobody has registered {', '.join(map(shown, unknown))} of only" if unknown else ""
    return f"no target is left for model {model}: of {len(rows)} registered ones {counts}{remedy}"


def _is_known(fleet: Fleet, rows: Sequence[PublisherRow], name: str) -> bool:
    named = SelectParameters(only=frozenset({name}))
    return any(row.instance_id == name for row in rows) or any(
        named.allows(member.name[0], member.target.address) for member in fleet.members
    )
