"""The usual decision, in few calls: the target, the reservation and the counters are those of the general way.

A decision is usual if its policy is a sum or ``sticky``, its prompt has tokens, its request has no constraint, every
target reports its blocks and is healthy, and the loads at hand are young enough. What stays the same is prepared once
for each version of the holder table. If anything else turns out to count, this way ends without an effect, and the
general way begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from waymark.base import native
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
from waymark.decide.policies.policy import Scored, tokens_behind
from waymark.decide.question import (
    HashedPrompt,
    PolicyChoice,
    PromptOf,
    Question,
    SelectedTarget,
    SelectParameters,
)
from waymark.decide.reserve import TargetReserver
from waymark.decide.shadows import ShadowedDecision, Shadows
from waymark.decide.snapshot import GroupSnapshot, SnapshotKeeper
from waymark.domain.keys import KEY_BYTES
from waymark.domain.match import TargetRow, Walk, target_rows
from waymark.domain.names import GroupName
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable
from waymark.store.chain import PackedKeys
from waymark.store.directory import GroupEntry
from waymark.store.quick import KnownRuns, QuickPlan, Start
from waymark.store.reservations import (
    CANDIDATES_MAX,
    NO_LOAD,
    Load,
    Offer,
    Reservation,
    ReservationTerms,
    Reserved,
)
from waymark.store.steps import Steps
from waymark.store.store import Store

_NOTHING = TargetRow()
_COUNTED = f"kv_index.{Decision.KV_AWARE}"
#: Holder tables to prepare decisions for; one more drops all.
_PREPARED_MAX = 1024
#: The size of the cache of matches, and the approximate ones of a match and of its row of a target.
_MATCHES_BYTES_MAX = 4 * 2**20
_MATCH_BYTES, _ROW_BYTES = 1000, 300


def is_usual(question: Question) -> bool:
    """Return whether a question with a prompt of tokens or hashes has nothing that only some have.

    Many name the block size; ``UsualDecisions`` knows whether it is that of the group.
    """
    policy, parameters = question.policy, question.parameters
    plain = Question(
        question.group,
        question.prompt,
        policy,
        question.block_size,
        lora_name=question.lora_name,
        cache_salt=question.cache_salt,
        parameters=SelectParameters(milliseconds=parameters.milliseconds),
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


class _Ordered(NamedTuple):
    """The targets that could take a prompt, and what Redis is told of the first few."""

    members: Sequence[FleetMember]
    sums: list[Any]
    """As of ``SumOffers``, the best first; in an order by place, the cost of each is its place."""
    offers: Sequence[Offer]
    terms: ReservationTerms
    decision: Decision
    active_bound: int | None


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
    """The usual decisions of one replica."""

    def __init__(
        self,
        store: Store,
        options: SelectionOptions,
        metrics: Metrics,
        random: Random,
        snapshots: SnapshotKeeper,
        reserver: TargetReserver,
        shadows: Shadows,
    ) -> None:
        self._reader = store.reader
        self._reservations = store.reservations
        self._counts = store.counts
        self._options = options
        self._metrics = metrics
        self._random = random
        self._snapshots = snapshots
        self._reserver = reserver
        self._shadows = shadows
        self._is_on = not (options.shadows or options.is_speculative)
        self._prepared: dict[GroupName, _Prepared] = store.incarnation.cache({})
        self._matched = store.incarnation.cache(
            KnownRuns(_Matched.by, lambda matched: matched.size, _MATCHES_BYTES_MAX)
        )
        durations = metrics.decision_duration_seconds
        self._observe_walk = durations.labels(part="walk").observe
        self._observe_policy = durations.labels(part="policy").observe
        self._observe_reserve = durations.labels(part="reserve").observe

    def at_hand(self, question: Question) -> AtHand | None:
        """Return what a usual decision needs besides its prompt; None if it has to be read first, or is not usual."""
        if not self._is_on:
            return None
        group, size = question.group, question.block_size
        entry, table = self._reader.at_hand(group)
        prepared = self._prepared.get(group)
        if prepared is None or prepared.entry is not entry or prepared.fleet.table is not table:
            if entry is None or table is None:
                return None
            if len(self._prepared) >= _PREPARED_MAX:
                self._prepared.clear()
            prepared = self._prepared[group] = self._prepare(group, entry, table)
        if not prepared.block_size or (size is not None and size != prepared.block_size):
            return None
        loads = self._snapshots.loads_at_hand(prepared.entry.group_id)
        return None if loads is None else (prepared, loads)

    def deciding(self, at_hand: AtHand, question: Question, prompt_of: PromptOf) -> Steps[UsualTarget | None]:
        """Take a target; None if the decision is not usual, or no target can be had. Nothing is reserved then.

        Raise StoreUnavailable.
        """
        prepared, loads = at_hand
        entry, began = prepared.entry, perf_counter()
        prompt = prompt_of(prepared.block_size)
        if question.policy.linear is None and sticky_key(prompt.keys, prepared.block_size) is None:
            return None
        matched = yield from self._matching(prepared, prompt.keys)
        if matched is None:
            return None
        self._snapshots.used(question.group, entry)
        read_at = ordered_at = perf_counter()
        try:
            ordered = self._ordered(prepared, loads, question, prompt, matched.rows)
            ordered_at = perf_counter()
            found = yield from self._reservations.reserving(entry.group_id, ordered.offers, ordered.terms)
            reserved_at = perf_counter()
        finally:
            self._observe_walk(read_at - began)
            self._observe_policy(ordered_at - read_at)
        if found.overdue:
            self._metrics.reservations_expired.inc(found.overdue)
        if found.reservation is None:
            return None
        usual = self._follow(found, found.reservation, ordered, at_hand, question, prompt)
        self._count(usual, question.policy, matched.walk)
        self._observe_reserve(reserved_at - ordered_at)
        if self._shadows.is_kept(usual.reservation):
            self._keep(usual, ordered, at_hand, question, prompt, matched)
        return usual

    def _ordered(
        self,
        prepared: _Prepared,
        loads: GroupLoads,
        question: Question,
        prompt: HashedPrompt,
        rows: Mapping[tuple[str, int], TargetRow],
    ) -> _Ordered:
        targets, size, policy, tokens = prepared.targets, prepared.block_size, question.policy, prompt.tokens
        least = tokens_behind(tokens, size)
        of_all: tuple[float, float | None] = 0.0, None
        linear, decision, active_bound = policy.linear, Decision.KV_AWARE, None
        if linear is not None:
            members, sums = self._by_sum(prepared, loads, question, prompt, rows)
        else:
            linear, of_all = BY_PLACE, (PLACE_HANDICAP, PLACE_WEIGHT)
            members, decision, active_bound = self._by_ring(prepared, loads, policy, prompt.keys)
            sums = list(_places(members, rows, loads, tokens, least, size))
        available = together = 0
        for name, row in rows.items():
            if name in targets.by_name:
                amount = size * sum(row)
                together += amount
                available = max(available, amount)
        offers, promises, words = (native.selected or pure_sums).offer_sums(
            Offer,
            sums,
            CANDIDATES_MAX,
            len(prompt.keys) // KEY_BYTES,
            size,
            linear.new,
            available,
            tokens - least,
            round(together / len(targets.members)),
            *of_all,
        )
        terms = ReservationTerms(
            tokens,
            linear.new,
            linear.active,
            question.parameters.milliseconds,
            self._options.target_requests_max,
            self._options.reservations_max,
            not rows,
            promises=promises,
            words=words,
        )
        return _Ordered(members, sums, offers, terms, decision, active_bound)

    def _by_sum(
        self,
        prepared: _Prepared,
        loads: GroupLoads,
        question: Question,
        prompt: HashedPrompt,
        rows: Mapping[tuple[str, int], TargetRow],
    ) -> tuple[Sequence[FleetMember], list[Any]]:
        """Return the targets that a policy has to rank, and their sums, the least first."""
        _, fleet, targets, size, _ = prepared
        values, linear, members = question.policy.values, question.policy.linear, targets.members
        if len(members) > CANDIDATES_MAX:
            matches = _matches(question, prompt, size, fleet, rows, loads)
            members = shortlist(fleet, matches, question, targets, EVERYBODY, self._random).members
        assert values is not None
        assert values.credits is not None
        assert linear is not None
        return members, (native.selected or pure_sums).rank_sums(
            members,
            rows.get,
            loads.get,
            None,
            self._random.random,
            prompt.tokens,
            tokens_behind(prompt.tokens, size),
            size,
            *values.credits,
            *linear,
        )

    def _by_ring(
        self, prepared: _Prepared, loads: GroupLoads, policy: PolicyChoice, block_keys: bytes
    ) -> tuple[Sequence[FleetMember], Decision, int | None]:
        """Return the first targets that the prefix key meets, and first those below the bound; see ``presets``."""
        key, values = sticky_key(block_keys, prepared.block_size), policy.values
        assert key is not None
        assert values is not None
        clockwise = prepared.fleet.ring(int(values.number("virtual_nodes"))).clockwise(key)
        epsilon = values.number("load_factor_epsilon")
        met, limit, _ = prepared.targets.below_bound(loads, clockwise, epsilon, CANDIDATES_MAX)
        assert limit is not None
        members = sorted(met, key=lambda member: loads.get(member.publisher, NO_LOAD).requests >= limit)
        decision = Decision.PREFIX_HASH if members[0] is met[0] else Decision.OVERFLOW
        return members[:CANDIDATES_MAX], decision, limit

    def _follow(
        self,
        found: Reserved,
        reservation: Reservation,
        ordered: _Ordered,
        at_hand: AtHand,
        question: Question,
        prompt: HashedPrompt,
    ) -> UsualTarget:
        """Return the target that Redis has chosen; note its load, and watch for the end of its prefill."""
        (entry, _, _, size, _), loads = at_hand
        (tokens, keys, *_), publisher = prompt, reservation.publisher
        for chosen in ordered.sums:
            if chosen[2] == publisher:
                break
        place, _, _, member, _, row, load, _ = chosen
        before = loads.get(publisher, NO_LOAD)
        waits = found.tokens + reservation.tokens
        loads.put(publisher, Load(waits, found.requests + 1, before.context + tokens, *before[3:]))
        if reservation.tokens:
            self._reserver.watch(reservation, waits, question, entry, member, row, keys)
        row, load = row or _NOTHING, load or NO_LOAD
        cost = place if question.policy.linear is None else _sum(question.policy, member, row, load, tokens, size)
        key = sticky_key(keys, size)
        return UsualTarget(member, row, load, cost, tokens, size, key, reservation, ordered.decision)

    def _count(self, usual: UsualTarget, policy: PolicyChoice, walk: Walk) -> None:
        """Count the decision, the target's match, and the longer matches of others."""
        metrics, decision, tokens, size = self._metrics, usual.decision, usual.tokens, usual.block_size
        metrics.decisions.of(policy.name, decision).value += 1
        if decision is Decision.KV_AWARE:
            metrics.kv_index_routing_decisions.of(decision).value += 1
            self._counts.add(_COUNTED)
        else:
            metrics.prefix_routing_requests.of(decision).value += 1
            self._counts.add(f"prefix_routing.{decision}")
        if tokens >= size:
            matched = size * sum(usual.row)
            metrics.kv_index_overlap_score.observe(matched / (tokens // size * size))
            if walk.blocks * size > matched and not walk.view.windows:
                metrics.avoidable_prefill_tokens.inc(walk.blocks * size - matched)

    def _keep(
        self,
        usual: UsualTarget,
        ordered: _Ordered,
        at_hand: AtHand,
        question: Question,
        prompt: HashedPrompt,
        matched: _Matched,
    ) -> None:
        """Keep the decision, as the general way does."""
        (entry, fleet, targets, size, _), loads = at_hand
        policy, blocks = question.policy, len(prompt.keys) // KEY_BYTES
        matches = _matches(question, prompt, size, fleet, matched.rows, loads)._replace(walk=matched.walk)
        request, snapshot = matches.request, GroupSnapshot(entry, fleet, loads)
        ranked: SumOffers | ScoredOffers
        if policy.linear is not None:
            ranked = SumOffers(ordered.members, matches.seen, policy, request, blocks, self._random, ordered.sums)
        else:
            scored = [
                Scored(candidate_of(member, row, load, soon, size), place, {"place": place})
                for place, _, _, member, _, row, load, soon in ordered.sums
            ]
            ranked = ScoredOffers(scored, policy, request, blocks, is_cold=not matched.rows)
        offered = Offers(ranked, None, (), usual.decision, None, Choices(targets), False, ordered.active_bound)
        place = ranked.find(usual.reservation.publisher)
        assert place is not None
        selected = SelectedTarget(
            ranked.scored(place),
            (),
            policy,
            usual.decision,
            prompt.tokens,
            reservations=[usual.reservation],
            group_id=entry.group_id,
        )
        self._shadows.keep(ShadowedDecision(self._shadows, offered, snapshot, matches, question), selected)

    def _prepare(self, group: GroupName, entry: GroupEntry, table: HolderTable) -> _Prepared:
        fleet = self._snapshots.fleet(group, table)
        targets, sizes = fleet.targets(None, "whole"), fleet.block_sizes
        has_more = fleet.has_silent or fleet.has_pools or fleet.kv_sources
        size = next(iter(sizes)) if targets.members and len(sizes) == 1 and not has_more else 0
        return _Prepared(entry, fleet, targets, size, self._reader.quick.plan(group, size) if size else None)

    def _matching(self, prepared: _Prepared, keys: bytes) -> Steps[_Matched | None]:
        """Return what the targets have of a prompt; None if the group is not as it was when it was prepared.

        Raise StoreUnavailable.
        """
        entry, fleet, _, size, plan = prepared
        seconds, quick = self._options.deadline_seconds, self._reader.quick
        start: Start | None = None
        if plan is not None and keys:
            pieces = quick.portions.pieces(entry.group_id)
            portion = keys[: KEY_BYTES * PIECE_BLOCKS * pieces]
            read = quick.read(plan, portion, pieces, is_whole=len(portion) == len(keys), seconds=seconds)
            if read is not None:
                yield read
                matched = self._matched.of(read)
                if matched is not None:
                    return matched
                start = read.start
        group = fleet.table.group
        reading = yield from self._reader.reading(group, size, PackedKeys(keys), deadline_seconds=seconds, start=start)
        now, table = self._reader.at_hand(group)
        if reading is None or now is not entry or table is not fleet.table:
            return None
        return _Matched.by(reading.walk)


def _places(
    members: Sequence[FleetMember],
    rows: Mapping[tuple[str, int], TargetRow],
    loads: GroupLoads,
    tokens: int,
    least: int,
    size: int,
) -> Iterator[tuple[Any, ...]]:
    """Yield the targets in an order by place, as ``rank_sums`` returns them."""
    assert DEFAULT_CREDITS.credits is not None
    of_device, of_host, of_disk, of_shared = DEFAULT_CREDITS.credits
    for place, member in enumerate(members):
        publisher, name, *_ = member
        row, new = rows.get(name), float(tokens)
        if row is not None:
            device, host, shared, disk = row
            has = of_device * device + of_host * host + of_disk * disk + of_shared * shared
            new = max(tokens - size * has, least)
        yield float(place), 0.0, publisher, member, new, row, loads.get(publisher), 0


def _sum(policy: PolicyChoice, member: FleetMember, row: TargetRow, load: Load, tokens: int, size: int) -> float:
    """Return the cost of a target, added up in the order of the general way."""
    values, linear, weight = policy.values, policy.linear, member.target.weight
    assert values is not None
    assert values.credits is not None
    assert linear is not None
    device, host, shared, disk = row
    of_device, of_host, of_disk, of_shared = values.credits
    credits = of_device * (size * device) + of_host * (size * host)
    credits += of_disk * (size * disk) + of_shared * (size * shared)
    cost = load.tokens / weight + linear.new * max(tokens - max(credits, 0), tokens_behind(tokens, size))
    return cost + linear.active * (load.requests / weight)


def _matches(
    question: Question,
    prompt: HashedPrompt,
    size: int,
    fleet: Fleet,
    rows: Mapping[tuple[str, int], TargetRow],
    loads: GroupLoads,
) -> PromptMatches:
    request = request_of(question, prompt, size, 0, fleet)
    return PromptMatches(request, PromptState(rows, loads, {}, {}), prompt.keys)
