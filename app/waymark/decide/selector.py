"""The use case: a prompt's blocks, the targets' loads, a policy, a reservation.

A decision reads the index like a query, ranks all targets by loads from a moment ago, and lets Redis choose the best of
the first few by their loads of that instant. So it costs one round trip more than a query, and any number of replicas
decide as one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from random import Random
from time import perf_counter

from waymark.base.errors import NoTarget, Saturated, StoreUnavailable, UnknownModel, nothing_registered
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.decide.asked_pools import AskedPools
from waymark.decide.books import Bookkeeper, Choices
from waymark.decide.decision import PolicyChoice, RankedTargets, RankingRequest, SelectedTarget, SelectParameters
from waymark.decide.degraded import Degraded
from waymark.decide.fleet import Allowed, Fleet, FleetMember, Shortlist, StagePart, TargetSet
from waymark.decide.fleets import Fleets
from waymark.decide.loads import Loads
from waymark.decide.offers import SumOffers
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.policy import Decision
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.target import Candidate
from waymark.decide.prefill_progress import PrefillProgress
from waymark.decide.ranking import RankedStages, rank, stages
from waymark.decide.taking import TargetReserver, headers_of
from waymark.decide.target_reader import TargetLookup, TargetReader, request_of
from waymark.domain.books import NO_USAGE, Usage
from waymark.domain.keys import KEY_BYTES
from waymark.domain.names import GroupName
from waymark.store.reservations import (
    CANDIDATES_MAX,
    Offer,
    Reservation,
    ReservationPart,
    ReservationTerms,
)
from waymark.store.store import Store

#: How often a decision starts over because its group's table has changed meanwhile.
_LOOKUPS_MAX = 3
#: After Redis did not answer, decisions are made without it for so long before it is asked again.
_AWAY_SECONDS = 1.0
_STICKY = PRESETS["sticky"]
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
        self._metrics = metrics
        self._random = random or Random()
        self.fleets = store.incarnation.cache(Fleets(store.reader, options.deadline_seconds))
        self._loads = store.incarnation.cache(Loads(store.reservations, store.begin, options.loads_seconds, metrics))
        self._progress = store.incarnation.cache(
            PrefillProgress(store.reader, store.reservations, store.begin, metrics)
        )
        self._reserver = TargetReserver(
            store.reservations, self._loads, self._progress, options, metrics, store.held_hashes
        )
        self._bookkeeper = Bookkeeper(store, metrics)
        self._degraded = Degraded()
        remember = self._degraded.remember
        self._targets = TargetReader(store, options, metrics, self._loads, self.fleets, remember, pools)
        self._away_until = float("-inf")
        self._default_policy = PolicyChoice(None) if options.picker is not None else PolicyChoice.of(options.policy)
        self._observe_policy = metrics.decision_duration_seconds.labels(part="policy").observe
        metrics.prefix_routing_prefix_cardinality.set_function(lambda: store.counts.prefixes_seen)
        metrics.prefix_routing_backend_distribution.set_function(lambda: metrics.backends(self._under_way()))

    @property
    def default_policy(self) -> PolicyChoice:
        """The policy of a request that does not name one."""
        return self._default_policy

    # ---- without a reservation ---------------------------------------------------------------------

    async def score(self, ranking: RankingRequest) -> RankedTargets | None:
        """Return all candidates, best first, or None if the group has no registration.

        Raise StoreUnavailable if Redis is unavailable.
        """
        lookup = await self._targets.read(ranking, expects=None)
        if lookup is None:
            return None
        # A caller that names candidates knows their models.
        members = None if ranking.given is not None else self._reached(lookup, ranking.served_as)
        candidates = lookup.fleet.candidates(lookup.seen, lookup.request.block_size, ranking.given, members)
        found = rank(ranking.policy, self._options.picker, lookup.request, candidates, lookup.fleet, self._random)
        decision = found.decision if candidates else Decision.KV_AWARE
        self._metrics.decisions.labels(policy=ranking.policy.name, decision=decision).inc()
        return RankedTargets(
            found.scored,
            ranking.policy,
            decision,
            lookup.request.tokens,
            lookup.request.block_size,
            lookup.request.prefix_key,
            lookup.is_partial,
            lookup.walk,
            frozenset()
            if ranking.given is None
            else {(candidate.instance_id, candidate.dp_rank) for candidate in candidates},
        )

    def _reached(self, lookup: TargetLookup, served_as: str | None) -> Sequence[FleetMember]:
        """Return the members that serve the model, without those to leave out unless there are no others."""
        members, left_out = lookup.fleet.serving(served_as), self._loads.left_out(lookup.entry.group_id)
        if not left_out:
            return members
        return [member for member in members if member.publisher not in left_out] or members

    # ---- with one ----------------------------------------------------------------------------------

    async def select(self, ranking: RankingRequest, parameters: SelectParameters) -> SelectedTarget:
        """Take a target. Raise NoTarget, Saturated or StoreUnavailable; then there is no reservation."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            raise StoreUnavailable("Redis did not answer a moment ago; try again in a moment")
        try:
            async with asyncio.timeout(2 * self._options.deadline_seconds):
                selected = await self._select(ranking, parameters)
        except (StoreUnavailable, TimeoutError) as exc:
            self._away_until = loop.time() + _AWAY_SECONDS
            if isinstance(exc, TimeoutError):
                seconds = 2 * self._options.deadline_seconds
                raise StoreUnavailable(f"Redis did not answer within {seconds:g} s; try again in a moment") from None
            raise
        by_key = _BY_KEY.get(selected.decision) if ranking.prefix_key is not None else None
        if by_key is not None or selected.policy.name == "sticky":
            strategy = by_key or selected.decision
            self._store.counts.add(f"prefix_routing.{strategy}", ranking.prefix_key)
            self._metrics.prefix_routing_requests.labels(strategy=strategy).inc()
        else:
            self._store.counts.add(f"kv_index.{selected.decision}", ranking.prefix_key)
            self._metrics.kv_index_routing_decisions.labels(decision=selected.decision).inc()
        return selected

    async def _select(self, ranking: RankingRequest, parameters: SelectParameters) -> SelectedTarget:
        for _ in range(_LOOKUPS_MAX):
            lookup = await self._targets.read(ranking, expects=parameters.expects)
            if lookup is None:
                if self._degraded.was_there(ranking.group):
                    break
                raise UnknownModel(ranking.group.model_name, ranking.group.tenant_id)
            began = perf_counter()
            left_out = self._loads.left_out(lookup.entry.group_id)
            of = self._ordered(ranking, parameters, lookup, left_out)
            # An unreachable target is better than no target.
            is_degraded = of is None and bool(left_out)
            if is_degraded:
                left_out = frozenset()
                of = self._ordered(ranking, parameters, lookup, left_out)
            self._observe_policy(perf_counter() - began)
            if of is None:
                raise NoTarget(_none_allowed(ranking, parameters, lookup.fleet))
            choices = _choices(of, ranking, parameters, lookup, left_out)
            taken = await self._reserver.take(of, lookup, ranking, parameters, choices)
            if taken is not None:
                return taken._replace(is_degraded=True) if is_degraded else taken
            # Every target that was offered is gone: the cached table is older than that.
            await self._store.reader.table(ranking.group, deadline_seconds=self._options.deadline_seconds)
        raise NoTarget(nothing_registered(ranking.group.model_name, ranking.group.tenant_id))

    def _ordered(
        self,
        ranking: RankingRequest,
        parameters: SelectParameters,
        lookup: TargetLookup,
        left_out: Set[int],
    ) -> SumOffers | RankedStages | None:
        """Return the targets that could take the request, without the publishers ``left_out``, or None without such a
        target.
        """
        is_split = parameters.profile == "disagg" and ranking.policy.preset is not None
        is_whole = not is_split and (ranking.policy.preset is not None or parameters.profile == "single")
        short = self._shortlist(
            ranking, parameters, lookup, left_out, "decode" if is_split else "whole" if is_whole else "any"
        )
        sums = self._sums(ranking, parameters, lookup, short.members)
        if sums is not None:
            return sums
        before: Sequence[FleetMember] = ()
        if is_split:
            before = self._shortlist(ranking._replace(session=None), parameters, lookup, left_out, "prefill").members
        size = lookup.request.block_size
        return stages(
            ranking.policy,
            self._options.picker,
            parameters.profile,
            lookup.request,
            lookup.fleet.candidates(lookup.seen, size, members=short.members),
            lookup.fleet.candidates(lookup.seen, size, members=before),
            lookup.fleet,
            self._random,
            max(CANDIDATES_MAX, parameters.count),
            short.active_bound,
        )

    def _sums(
        self,
        ranking: RankingRequest,
        parameters: SelectParameters,
        lookup: TargetLookup,
        members: Sequence[FleetMember],
    ) -> SumOffers | None:
        """The targets by sums alone, where the policy is one and nothing else decides."""
        preset, seen = ranking.policy.preset, lookup.seen
        if preset is None or preset.sum_of is None or ranking.session is not None or parameters.profile == "disagg":
            return None
        if seen.prefixes or seen.gauges or seen.first_tokens or not lookup.request.has_tokens:
            return None
        if not members:
            return None
        blocks = len(lookup.keys) // KEY_BYTES
        return SumOffers(members, seen, ranking.policy, lookup.request, blocks, self._random)

    def _shortlist(
        self,
        ranking: RankingRequest,
        parameters: SelectParameters,
        lookup: TargetLookup,
        left_out: Set[int],
        part: StagePart,
    ) -> Shortlist:
        """The targets that a decision has to rank for a part of the request."""
        policy, fleet, request = ranking.policy, lookup.fleet, lookup.request
        targets, allowed = _targets(ranking, parameters, fleet, left_out, part)
        if policy.preset is None or policy.values is None:
            return Shortlist(targets.all(allowed))
        most = max(CANDIDATES_MAX, parameters.count)
        if policy.preset.name == "sticky" and request.prefix_key is not None:
            ring = fleet.ring(int(policy.values.number("virtual_nodes")))
            return targets.below_bound(
                lookup.seen,
                ring.clockwise(request.prefix_key),
                policy.values.number("load_factor_epsilon"),
                most,
                allowed=allowed,
                session=ranking.session,
            )
        cost = None if policy.preset.by_load is None else policy.preset.by_load(request, policy.values)
        if cost is None:
            return Shortlist(targets.all(allowed))
        nearest: Iterable[tuple[str, int]] = ()
        if request.ring is not None and request.prefix_key is not None:
            nearest = request.ring.clockwise(request.prefix_key)
        return Shortlist(
            targets.shortlist(
                lookup.seen,
                cost,
                most,
                self._random,
                allowed=allowed,
                session=ranking.session,
                nearest=nearest,
            )
        )

    def select_without_redis(self, ranking: RankingRequest, parameters: SelectParameters) -> SelectedTarget:
        """Take a target by the facts at hand. Raise StoreUnavailable if the group is unknown."""
        known = self._degraded.groups.get(ranking.group)
        if known is None:
            raise StoreUnavailable(
                "Redis is unavailable, and this process knows no target of this model yet; try again in a moment"
            )
        sizes = known.fleet.block_sizes
        prompt = ranking.prompt(ranking.block_size or max(sizes, default=1))
        prompt = prompt._replace(has_tokens=False)
        request = request_of(ranking, prompt, ranking.block_size or max(sizes, default=1), 0, known.fleet)
        seen = self._degraded.seen(ranking.group)
        lookup = TargetLookup(known.entry, request, known.fleet, seen, prompt.keys)
        # The filters and stages of a file hold, with the prefix key in place of a match, which cannot be looked up.
        degraded = ranking if ranking.policy.preset is None else ranking._replace(policy=PolicyChoice.of(_STICKY))
        of = self._ordered(degraded, parameters, lookup, self._loads.left_out(known.entry.group_id))
        of = of or self._ordered(degraded, parameters, lookup, frozenset())
        if of is None:
            raise NoTarget(_none_allowed(ranking, parameters, known.fleet))
        assert isinstance(of, RankedStages)  # sums need tokens
        best, *others = of.decode
        prefill = of.prefill[0] if of.prefill else None
        reservations = []
        if parameters.is_reserved:
            reservations = [
                self._degraded.reserve(
                    ranking.group, stage.candidate.publisher, request.tokens, parameters.milliseconds
                )
                for stage in (best, prefill)
                if stage is not None
            ]
        self._metrics.decisions.labels(policy=degraded.policy.name, decision="degraded").inc()
        return SelectedTarget(
            best,
            [each.candidate for each in others[: parameters.count - 1]],
            degraded.policy,
            of.decision,
            request.tokens,
            request.prefix_key,
            prefill,
            of.encode,
            reservations,
            is_degraded=True,
            group_id=known.entry.group_id,
            block_size=request.block_size,
            headers=headers_of(best.candidate, prefill and prefill.candidate, [each.candidate for each in of.encode]),
        )

    async def reserve(
        self, group: GroupName, candidate: Candidate, tokens: int, context: int, milliseconds: int
    ) -> Reservation:
        """Reserve a target that the caller has chosen. Raises NoTarget, Saturated."""
        entry = self._store.reader.entry_at_hand(group)
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

    async def release(
        self,
        reservations: Sequence[Reservation],
        part: ReservationPart,
        *,
        milliseconds: int = 120_000,
        ttft_ms: float | None = None,
        usage: Usage = NO_USAGE,
    ) -> tuple[int, int]:
        """End reservations, or a part of them; how many were there, and how many were gone.

        ``usage`` is what the engine says of the request.
        """
        others = self._degraded.release(reservations, part, milliseconds)
        own = len(reservations) - len(others)
        if not others:
            return own, 0
        self._progress.told(others, part)
        released, gone = await self._store.reservations.release(
            others,
            part,
            milliseconds=milliseconds,
            ttft_ms=ttft_ms,
            usage=usage,
            drift_max=self._options.drift_max,
            saw=self._loads.released,
            booked=lambda reservation, drift: self._bookkeeper.booked(reservation, usage, drift),
        )
        return own + released, gone

    def _under_way(self) -> Iterator[tuple[str, float]]:
        """Yield requests under way, by instance, in the groups that this replica decides in."""
        for group, fleet in self.fleets:
            entry = self._store.reader.entry_at_hand(group)
            loads = {} if entry is None else self._loads.known(entry.group_id)
            for member in fleet.members:
                load = loads.get(member.publisher)
                yield member.name[0], 0.0 if load is None else load.requests


def _targets(
    ranking: RankingRequest, parameters: SelectParameters, fleet: Fleet, left_out: Set[int], part: StagePart
) -> tuple[TargetSet, Allowed]:
    """The targets for a part of the request, and those of them that it may go to."""
    targets = fleet.targets(ranking.served_as, part, have_addresses=parameters.needs_address)
    allowed = Allowed(
        None if parameters.only is None else fleet.publishers(parameters.only),
        left_out | fleet.publishers(parameters.exclude) if parameters.exclude else left_out,
    )
    return targets, allowed


def _choices(
    of: SumOffers | RankedStages,
    ranking: RankingRequest,
    parameters: SelectParameters,
    lookup: TargetLookup,
    left_out: Set[int],
) -> Choices:
    """The targets that the request could have gone to: those that a file's filters let through, or all allowed ones."""
    if ranking.policy.preset is None and isinstance(of, RankedStages):
        return Choices.of(of.decode)
    return Choices(*_targets(ranking, parameters, lookup.fleet, left_out, "whole"))


def _none_allowed(ranking: RankingRequest, parameters: SelectParameters, fleet: Fleet) -> str:
    """Return the sentence of NoTarget if targets are registered: how many each constraint leaves out."""
    rows = [row for row in fleet.table.publishers.values() if row.scope == "instance"]
    lost = sum(row.is_lost for row in rows)
    removed = Counter({"lost": lost, "of weight 0": len(rows) - lost - len(fleet.members)})
    serving = {each.publisher for each in fleet.serving(ranking.served_as)}
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
    counts = ", ".join(f"{count} {why}" for why, count in removed.items() if count)
    return f"no target is left for model {shown(ranking.group.model_name)}: of {len(rows)} registered ones {counts}"
