"""The usual decision, in few calls: the target, the reservation and the counters are those of the general way.

A decision is usual if its policy is a sum or ``sticky``, its prompt has tokens, its request has no constraint, every
target reports its blocks and is healthy, and the loads at hand are young enough. What stays the same is prepared once
for each version of the holder table. If anything else turns out to count, this way ends without an effect, and the
general way begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from waymark.base import native
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide import pure_sums
from waymark.decide.books import Choices
from waymark.decide.fleet import Fleet, FleetMember, PromptState, TargetSet, candidate_of
from waymark.decide.group_loads import GroupLoads
from waymark.decide.matches import PromptMatches, request_of, sticky_key
from waymark.decide.options import SelectionOptions
from waymark.decide.order import (
    BY_PLACE,
    DEFAULT_CREDITS,
    EVERYBODY,
    PLACE_HANDICAP,
    PLACE_WEIGHT,
    Offers,
    ScoredOffers,
    SumOffers,
    shortlist,
)
from waymark.decide.policies.policy import Linear, Scored, tokens_behind
from waymark.decide.question import HashedPrompt, PolicyChoice, ProfileName, Question, SelectedTarget, SelectParameters
from waymark.decide.reserve import TargetReserver
from waymark.decide.shadows import ShadowedDecision, Shadows
from waymark.decide.snapshot import GroupSnapshot, SnapshotKeeper
from waymark.domain.match import TargetRow, Walk, target_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable
from waymark.store.chain import PackedKeys
from waymark.store.directory import GroupEntry
from waymark.store.quick import KnownRuns, QuickPlan, QuickRead, Start
from waymark.store.reader import Reading
from waymark.store.reservations import CANDIDATES_MAX, NO_LOAD, Load, Offer, Reservation, ReservationTerms, ReserveCall
from waymark.store.scripts import PackedReserve
from waymark.store.steps import LimitedStep, RedisLimit, StepsReceiver, StepsRun, run
from waymark.store.store import Store

_NOTHING = TargetRow()
_COUNTED = f"kv_index.{Decision.KV_AWARE}"
#: Holder tables to prepare decisions for; one more drops all.
_PREPARED_MAX = 1024
#: The size of the cache of matches, and the approximate sizes of a match and of a target's row in it.
_MATCHES_BYTES_MAX = 4 * 2**20
_MATCH_BYTES, _ROW_BYTES = 1000, 300


def is_usual(question: Question) -> bool:
    """Return whether a question about tokens or hashes has no unusual field.

    The block size is not unusual; ``UsualDecisions`` compares it with that of the group.
    """
    policy, parameters = question.policy, question.parameters
    single: ProfileName | None = "single" if parameters.profile == "single" else None
    plain = Question(
        question.group,
        question.prompt,
        policy,
        question.block_size,
        lora_name=question.lora_name,
        cache_salt=question.cache_salt,
        parameters=SelectParameters(milliseconds=parameters.milliseconds, profile=single),
        asked=question.asked,
    )
    preset = policy.preset
    return preset is not None and (preset.sum_of is not None or preset.name == "sticky") and question == plain


class UsualTarget(NamedTuple):
    """The target of a usual decision, as it was when the targets were ranked."""

    member: FleetMember
    row: TargetRow
    """The blocks of the prompt that it has."""
    load: Load
    cost: float
    tokens: int
    """The tokens of the prompt."""
    block_size: int
    prefix_key: bytes | None
    reservation: Reservation
    decision: Decision


class _Prepared(NamedTuple):
    """The parts of the decisions in a group that stay the same while its holder table does."""

    entry: GroupEntry
    fleet: Fleet
    targets: TargetSet
    block_size: int
    """0: no decision is usual."""
    plan: QuickPlan | None
    """How the first rows of a prompt are read."""


class _Matched(NamedTuple):
    """How much of a prompt its targets have; not to be changed."""

    walk: Walk
    rows: Mapping[tuple[str, int], TargetRow]

    @classmethod
    def by(cls, walk: Walk) -> _Matched:
        return cls(walk, target_rows(walk))

    @property
    def size(self) -> int:
        return _MATCH_BYTES + _ROW_BYTES * len(self.rows)


AtHand: TypeAlias = tuple[_Prepared, GroupLoads]


class UsualDecisions:
    """The usual decisions of one replica, and what they have in common."""

    def __init__(
        self,
        store: Store,
        options: SelectionOptions,
        metrics: Metrics,
        random: Random,
        snapshots: SnapshotKeeper,
        reserver: TargetReserver,
        shadows: Shadows,
        limit: RedisLimit,
    ) -> None:
        self.reader = store.reader
        self.reservations = store.reservations
        self.counts = store.counts
        self.options = options
        self.metrics = metrics
        self.random = random
        self.snapshots = snapshots
        self.reserver = reserver
        self.shadows = shadows
        self.limit = limit
        self.bounds = options.target_requests_max, options.reservations_max
        self._is_on = not (options.shadows or options.is_speculative)
        self._prepared: dict[GroupName, _Prepared] = store.incarnation.cache({})
        self.matched = store.incarnation.cache(KnownRuns(_Matched.by, lambda matched: matched.size, _MATCHES_BYTES_MAX))
        durations = metrics.decision_duration_seconds
        self.observe_walk = durations.labels(part="walk").observe
        self.observe_policy = durations.labels(part="policy").observe
        self.observe_reserve = durations.labels(part="reserve").observe

    def at_hand(self, question: Question) -> AtHand | None:
        """Return what a usual decision needs besides its prompt; None if it has to be read first, or is not usual."""
        if not self._is_on or self.limit.is_away:
            return None
        group, size = question.group, question.block_size
        entry, table = self.reader.at_hand(group)
        prepared = self._prepared.get(group)
        if prepared is None or prepared.entry is not entry or prepared.fleet.table is not table:
            if entry is None or table is None:
                return None
            if len(self._prepared) >= _PREPARED_MAX:
                self._prepared.clear()
            prepared = self._prepared[group] = self._prepare(group, entry, table)
        if not prepared.block_size or (size is not None and size != prepared.block_size):
            return None
        loads = self.snapshots.loads_at_hand(prepared.entry.group_id)
        return None if loads is None else (prepared, loads)

    def _prepare(self, group: GroupName, entry: GroupEntry, table: HolderTable) -> _Prepared:
        fleet = self.snapshots.fleet(group, table)
        targets, sizes = fleet.targets(None, "whole"), fleet.block_sizes
        has_more = fleet.has_silent or fleet.has_pools or fleet.kv_sources
        size = next(iter(sizes)) if targets.members and len(sizes) == 1 and not has_more else 0
        return _Prepared(entry, fleet, targets, size, self.reader.quick.plan(group, size) if size else None)


class UsualDecision(LimitedStep):
    """One usual decision: a step whose result is itself, and the receiver of what it reads.

    Its ``target`` is None if it is not usual after all, or if no target can be had; then nothing is reserved. Its error
    is StoreUnavailable.
    """

    _matched: _Matched
    _members: Sequence[FleetMember]
    _sums: list[Any]
    """As in ``SumOffers``, the best first; in an order by place, the cost of each is its place."""

    def __init__(self, of: UsualDecisions, at_hand: AtHand, question: Question, prompt: HashedPrompt) -> None:
        super().__init__(of.limit)
        self._of, self.question, self._prompt = of, question, prompt
        (self._prepared, self._loads), self._began = at_hand, perf_counter()
        self._key = sticky_key(prompt.keys, self._prepared.block_size)
        self._least = tokens_behind(prompt.tokens, self._prepared.block_size)
        self._decision = Decision.KV_AWARE
        self._active_bound: int | None = None
        self._reading: StepsRun[Reading | None] | None = None
        self._call: PackedReserve | None = None
        self.target: UsualTarget | None = None

    # ---- the step ----------------------------------------------------------------------------------

    def begin(self, receiver: StepsReceiver[UsualDecision]) -> None:
        super().begin(receiver)
        prepared, keys = self._prepared, self._prompt.keys
        if self._key is None and self.question.policy.linear is None:
            self._end().set_result(self)
            return
        read, plan, quick = None, prepared.plan, self._of.reader.quick
        if plan is not None and keys:
            pieces = quick.portions.pieces(prepared.entry.group_id)
            portion = keys[: KEY_BYTES * PIECE_BLOCKS * pieces]
            seconds = self._of.options.deadline_seconds
            read = quick.read(plan, portion, pieces, is_whole=len(portion) == len(keys), seconds=seconds)
        if read is None:
            self._read_on(None)
        else:
            # The plain function, because a bound method would make a reference cycle.
            self._next: Callable[[UsualDecision, Any], bool] = UsualDecision._take_read
            read.begin(self)

    def done(self) -> bool:
        return self.is_ended

    def set_result(self, result: Any) -> None:
        try:
            is_over = self._next(self, result)
        except Exception as exc:
            self.set_exception(exc)
            return
        if is_over:
            self._call = None
            self._end().set_result(self)

    def set_exception(self, exception: BaseException) -> None:
        call, self._call, self._reading = self._call, None, None  # both have this decision as their receiver
        if call is not None:
            self._as_call(call).take_back()
        if isinstance(exception, StoreUnavailable) and exception.concerns_all:
            self._of.limit.note_away()
        self._end().set_exception(exception)

    def cancel(self) -> None:
        self._end()
        reading, call, self._reading, self._call = self._reading, self._call, None, None
        if reading is not None:
            reading.cancel()
        if call is not None:
            self._as_call(call).lost()

    # ---- what it waits for. Each returns whether it is over ----------------------------------------

    def _take_read(self, read: QuickRead) -> bool:
        matched = self._of.matched.of(read)
        if matched is None:
            self._read_on(read.start)
        else:
            self._reserve(matched)
        return False

    def _read_on(self, start: Start | None) -> None:
        """Read the prompt as any other is read."""
        reader, prepared = self._of.reader, self._prepared
        group, keys = prepared.fleet.table.group, PackedKeys(self._prompt.keys)
        self._next = UsualDecision._take_reading
        seconds = self._of.options.deadline_seconds
        self._reading = run(
            reader.reading(group, prepared.block_size, keys, deadline_seconds=seconds, start=start), self
        )

    def _take_reading(self, reading: Reading | None) -> bool:
        self._reading = None
        table = self._prepared.fleet.table
        entry, present_table = self._of.reader.at_hand(table.group)
        if reading is None or entry is not self._prepared.entry or present_table is not table:
            return True  # the group is not as it was when it was prepared
        self._reserve(_Matched.by(reading.walk))
        return False

    def _take_reply(self, reply: list[Any]) -> bool:
        of, call = self._of, self._call
        assert call is not None
        which, waited, requests, overdue = reply[1:5]
        if overdue:
            of.metrics.reservations_expired.inc(overdue)
        if which:
            reserved_at, sums = perf_counter(), self._sums[which - 1 : which]
            (offer,), (promise,), _ = (native.selected or pure_sums).offer_sums(Offer, sums, *self._terms)
            group_id, context = self._prepared.entry.group_id, self._prompt.tokens
            reservation = Reservation(group_id, offer.publisher, offer.new, context, call.nonce, waited, promise)
            self.target = self._follow(sums[0], reservation, waited, requests)
            self._count(self.target)
            of.observe_reserve(reserved_at - self._ordered_at)
            if of.shadows.is_kept(reservation):
                self._keep(self.target)
        return True

    # ---- the order ---------------------------------------------------------------------------------

    def _reserve(self, matched: _Matched) -> None:
        """Order the targets, and have Redis take one of the first few."""
        of, entry, policy, self._matched = self._of, self._prepared.entry, self.question.policy, matched
        of.snapshots.used(self.question.group, entry)
        read_at, linear = perf_counter(), policy.linear
        if linear is not None:
            self._members, self._sums = self._by_sum(policy, linear)
            of_all: tuple[float, float | None] = 0.0, None
        else:
            self._members, self._sums = self._by_ring(policy)
            linear, of_all = BY_PLACE, (PLACE_HANDICAP, PLACE_WEIGHT)
        self._terms = CANDIDATES_MAX, *self._facts(linear), *of_all
        self._ordered_at = perf_counter()
        of.observe_walk(read_at - self._began)
        of.observe_policy(self._ordered_at - read_at)
        self._next = UsualDecision._take_reply
        self._call = of.reservations.packed(
            entry.group_id,
            (*linear, self.question.parameters.milliseconds, *of.bounds),
            (self._prompt.tokens, "0" if matched.rows else "1"),
            (native.selected or pure_sums).pack_sums,
            (self._sums, *self._terms),
            self._words,
        )
        self._call.begin(self)

    def _facts(self, linear: Linear) -> tuple[int, int, float, int, int, int]:
        """Return the arguments of ``offer_sums`` that follow from the prompt and its matches."""
        (_, _, targets, size, _), rows = self._prepared, self._matched.rows
        available = together = 0
        for name, row in rows.items():
            if name in targets.by_name:
                amount = size * sum(row)
                together += amount
                available = max(available, amount)
        blocks, reusable = len(self._prompt.keys) // KEY_BYTES, self._prompt.tokens - self._least
        return blocks, size, linear.new, available, reusable, round(together / len(targets.members))

    def _words(self) -> tuple[Sequence[int], Sequence[str]]:
        """Return the first targets, and the terms of a reservation there."""
        offers, _, words = (native.selected or pure_sums).offer_sums(Offer, self._sums, *self._terms)
        return [offer.publisher for offer in offers], words

    def _as_call(self, step: PackedReserve) -> ReserveCall:
        """Return the call for which there is no reply."""
        offers, promises, _ = (native.selected or pure_sums).offer_sums(Offer, self._sums, *self._terms)
        milliseconds = self.question.parameters.milliseconds
        terms = ReservationTerms(self._prompt.tokens, milliseconds=milliseconds, promises=promises)
        return ReserveCall(self._of.reservations, step, self._prepared.entry.group_id, offers, terms, step.nonce)

    def _by_sum(self, policy: PolicyChoice, linear: Linear) -> tuple[Sequence[FleetMember], list[Any]]:
        """Return the targets that a policy has to rank, and their sums, the least first."""
        (_, fleet, targets, size, _), values, random = self._prepared, policy.values, self._of.random
        members = targets.members
        if len(members) > CANDIDATES_MAX:
            members = shortlist(fleet, self._matches(), self.question, targets, EVERYBODY, random).members
        assert values is not None
        assert values.credits is not None
        return members, (native.selected or pure_sums).rank_sums(
            members,
            self._matched.rows.get,
            self._loads.get,
            None,
            random.random,
            self._prompt.tokens,
            self._least,
            size,
            *values.credits,
            *linear,
        )

    def _by_ring(self, policy: PolicyChoice) -> tuple[Sequence[FleetMember], list[Any]]:
        """Return the first targets that the prefix key meets, those below the bound before others; see ``presets``."""
        prepared, loads, values, credits = self._prepared, self._loads, policy.values, DEFAULT_CREDITS.credits
        assert self._key is not None
        assert values is not None
        assert credits is not None
        clockwise = prepared.fleet.ring(int(values.number("virtual_nodes"))).clockwise(self._key)
        epsilon = values.number("load_factor_epsilon")
        met, limit, _ = prepared.targets.below_bound(loads, clockwise, epsilon, CANDIDATES_MAX)
        assert limit is not None
        members = sorted(met, key=lambda member: loads.get(member.publisher, NO_LOAD).requests >= limit)
        self._decision = Decision.PREFIX_HASH if members[0] is met[0] else Decision.OVERFLOW
        self._active_bound = limit
        members, tokens, rows = members[:CANDIDATES_MAX], self._prompt.tokens, self._matched.rows
        sums = pure_sums.in_places(members, rows.get, loads.get, tokens, self._least, prepared.block_size, credits)
        return members, sums

    # ---- what follows ------------------------------------------------------------------------------

    def _follow(self, chosen: Any, reservation: Reservation, waited: int, requests: int) -> UsualTarget:
        """Return the target that Redis has chosen; note its load, and watch for the end of its prefill."""
        (tokens, keys, *_), loads, publisher = self._prompt, self._loads, reservation.publisher
        entry, size, question = self._prepared.entry, self._prepared.block_size, self.question
        place, _, _, member, _, row, load, _ = chosen
        before = loads.get(publisher, NO_LOAD)
        waits = waited + reservation.tokens
        loads.put(publisher, Load(waits, requests + 1, before.context + tokens, *before[3:]))
        if reservation.tokens:
            self._of.reserver.watch(reservation, waits, question, entry, member, row, keys)
        row, load = row or _NOTHING, load or NO_LOAD
        cost = place if question.policy.linear is None else self._sum(member, row, load)
        return UsualTarget(member, row, load, cost, tokens, size, self._key, reservation, self._decision)

    def _sum(self, member: FleetMember, row: TargetRow, load: Load) -> float:
        """Return the cost of a target, added up in the order of the general way."""
        values, linear, weight = self.question.policy.values, self.question.policy.linear, member.target.weight
        assert values is not None
        assert values.credits is not None
        assert linear is not None
        (device, host, shared, disk), size = row, self._prepared.block_size
        of_device, of_host, of_disk, of_shared = values.credits
        credits = of_device * (size * device) + of_host * (size * host)
        credits += of_disk * (size * disk) + of_shared * (size * shared)
        cost = load.tokens / weight + linear.new * max(self._prompt.tokens - max(credits, 0), self._least)
        return cost + linear.active * (load.requests / weight)

    def _count(self, target: UsualTarget) -> None:
        """Count the decision, the target's match, and the longer matches of others."""
        metrics, decision, tokens, size = self._of.metrics, self._decision, target.tokens, target.block_size
        metrics.decisions.of(self.question.policy.name, decision).value += 1
        if decision is Decision.KV_AWARE:
            metrics.kv_index_routing_decisions.of(decision).value += 1
            self._of.counts.add(_COUNTED)
        else:
            metrics.prefix_routing_requests.of(decision).value += 1
            self._of.counts.add(f"prefix_routing.{decision}")
        if tokens >= size:
            matched, walk = size * sum(target.row), self._matched.walk
            metrics.kv_index_overlap_score.observe(matched / (tokens // size * size))
            if walk.blocks * size > matched and not walk.view.windows:
                metrics.avoidable_prefill_tokens.inc(walk.blocks * size - matched)

    def _keep(self, target: UsualTarget) -> None:
        """Keep the decision, as the general way does."""
        shadows, (entry, fleet, targets, size, _) = self._of.shadows, self._prepared
        policy, blocks, reservation = self.question.policy, len(self._prompt.keys) // KEY_BYTES, target.reservation
        matches = self._matches()._replace(walk=self._matched.walk)
        request, snapshot = matches.request, GroupSnapshot(entry, fleet, self._loads)
        ranked: SumOffers | ScoredOffers
        if policy.linear is not None:
            ranked = SumOffers(self._members, matches.seen, policy, request, blocks, self._of.random, self._sums)
        else:
            scored = [
                Scored(candidate_of(member, row, load, soon, size), place, {"place": place})
                for place, _, _, member, _, row, load, soon in self._sums
            ]
            ranked = ScoredOffers(scored, policy, request, blocks, is_cold=not self._matched.rows)
        offered = Offers(ranked, None, (), self._decision, None, Choices(targets), False, self._active_bound)
        at = ranked.find(reservation.publisher)
        assert at is not None
        selected = SelectedTarget(
            ranked.scored(at),
            (),
            policy,
            self._decision,
            target.tokens,
            reservations=[reservation],
            group_id=entry.group_id,
        )
        shadows.keep(ShadowedDecision(shadows, offered, snapshot, matches, self.question), selected)

    def _matches(self) -> PromptMatches:
        prepared = self._prepared
        request = request_of(self.question, self._prompt, prepared.block_size, 0, prepared.fleet)
        return PromptMatches(request, PromptState(self._matched.rows, self._loads, {}, {}), self._prompt.keys)
