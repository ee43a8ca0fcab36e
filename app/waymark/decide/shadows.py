"""Shadows: policies that order the targets of each decision, too, and decide nothing; and the kept records.

A shadow runs while the decision waits for Redis, with the facts of the decision, which does not depend on it.
A share of the decisions is kept with everything that another policy needs to decide again. The nonce of a reservation
says whether its decision is kept, so every replica that learns of the end of the request knows it.

``Preferences`` are what other policies prefer in a decision. Each compares its best target with the chosen one and
looks at no other. If a policy has a cost by load, only a target with a part of the prompt can win, or the least loaded
of the others. Such policies share the candidates that have a part of the prompt, and each adds its least loaded target.
``sticky`` looks at the first targets that its key meets. All other policies are ordered as in a decision, and so is
every policy if the request has stages, a session, or no tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from math import ceil, isclose
from operator import attrgetter
from random import Random

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.decide.fleet import PromptState
from waymark.decide.matches import PromptMatches, needs_of
from waymark.decide.options import SelectionOptions, Shadow
from waymark.decide.order import Offers, order, rank, targets_of
from waymark.decide.policies.policy import Candidate, RoutingRequest, Scored, least_new
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.profile import max_score
from waymark.decide.question import PolicyChoice, Question, SelectedTarget
from waymark.decide.snapshot import GroupSnapshot, ReadingKind, SnapshotKeeper
from waymark.domain.books import Usage
from waymark.domain.packing import KEY_BYTES
from waymark.store.kept_decisions import BLOCKS_MAX, TARGETS_MAX, KeptDecision, KeptDecisions, KeptTarget, ShadowChoice
from waymark.store.reservations import Reservation
from waymark.store.steps import StartTask

#: The facts about a target, up to its weight, which a record keeps as they are.
_facts = attrgetter(*KeptTarget._fields[: KeptTarget._fields.index("role")])
#: Two values of a policy are the same up to the order in which their parts were added.
_SAME = 1e-12


class Preferences:
    """The preferences of policies in one decision."""

    def __init__(
        self, snapshot: GroupSnapshot, matches: PromptMatches, question: Question, chosen: int, random: Random
    ) -> None:
        """``chosen`` is the publisher of the target that was chosen."""
        self._snapshot, self._matches, self._random = snapshot, matches, random
        self._question = question
        self._chosen = chosen
        self._is_whole = (
            matches.request.has_tokens and question.session is None and question.parameters.profile != "disagg"
        )
        self._targets, self._allowed = targets_of(snapshot.fleet, question, snapshot.left_out, "whole")
        self._having = self._targets.having(matches.seen, self._allowed, chosen)
        self._candidates: dict[int, Candidate] = {}

    def of(self, policy: PolicyChoice, state: PromptState) -> Candidate | None:
        """Return the target that a policy prefers, or None if it leaves all out.

        ``state`` has the readings that only this policy needs.
        """
        best, chosen = (self._short(policy) if self._is_whole else None) or self._whole(policy, state)
        return None if best is None else preferred(best, chosen, policy)

    def _short(self, policy: PolicyChoice) -> tuple[Scored, Scored | None] | None:
        """Return the best target and the chosen one; None if all targets have to be compared, or none is left."""
        preset, values, matches = policy.preset, policy.values, self._matches
        if preset is None or values is None:
            return None
        request, fleet, bound = matches.request, self._snapshot.fleet, None
        if preset.name == "sticky" and request.prefix_key is not None:
            clockwise = fleet.ring(int(values.number("virtual_nodes"))).clockwise(request.prefix_key)
            epsilon = values.number("load_factor_epsilon")
            short = self._targets.below_bound(matches.seen.loads, clockwise, epsilon, 1, allowed=self._allowed)
            members, bound = short.members, short.active_bound
        else:
            cost = None if preset.by_load is None else preset.by_load(request, values)
            if cost is None:
                return None
            rest = self._targets.cheapest(matches.seen, cost, self._random, self._allowed, self._having)
            members = [*self._having.values(), *(() if rest is None else (rest,))]
        if not members:
            return None
        by_publisher = self._candidates
        missing = [member for member in members if member.publisher not in by_publisher]
        if missing:
            missing_candidates = fleet.candidates(matches.seen, request.block_size, members=missing)
            by_publisher.update(zip([member.publisher for member in missing], missing_candidates, strict=True))
        candidates = [by_publisher[member.publisher] for member in members]
        scored = rank(policy, request, candidates, fleet, self._random, 1, bound).scored
        return scored[0], next((entry for entry in scored if entry.candidate.publisher == self._chosen), None)

    def _whole(self, policy: PolicyChoice, state: PromptState) -> tuple[Scored | None, Scored | None]:
        question = self._question._replace(policy=policy, rival=self._chosen)
        offers = order(self._snapshot, self._matches._replace(seen=state), question, self._random)
        if offers is None:
            return None, None
        place = offers.decode.find(self._chosen)
        return offers.decode.scored(0), None if place is None else offers.decode.scored(place)


def preferred(best: Scored, chosen: Scored | None, policy: PolicyChoice) -> Candidate:
    """Return the target that a policy prefers: the one that was chosen, if no other is better.

    A policy chooses among equal targets at random, so two policies do not differ if they choose different ones.
    """
    if chosen is None or _draws(policy) or not isclose(chosen.value, best.value, rel_tol=_SAME):
        return best.candidate
    return chosen.candidate


def _draws(policy: PolicyChoice) -> bool:
    """Return whether chance decides between unequal targets, too."""
    if policy.file is not None:
        return policy.file.profiles[policy.file.decode].picker is not max_score
    if policy.preset is not PRESETS["dynamo"] or policy.values is None:
        return False
    return policy.values.number("router_temperature") > 0


log = logging.getLogger(__name__)

#: The bitmap of a pool is kept of prompts up to this length, in blocks: a longer one is larger than all the rest.
_POOL_BLOCKS_MAX = 4096
#: How often the log says that a shadow fails.
_WARNING_SECONDS = 60.0


class Shadows:
    """The shadows of one replica, and its records."""

    def __init__(
        self,
        records: KeptDecisions,
        snapshots: SnapshotKeeper,
        options: SelectionOptions,
        metrics: Metrics,
        begin: StartTask,
        random: Random | None = None,
    ) -> None:
        """``begin`` starts the readings that only shadows need."""
        self._records = records
        self._snapshots = snapshots
        self._begin = begin
        self._reading: asyncio.Task[None] | None = None
        self._shadows = options.shadows
        self._share = options.decisions_kept
        self._kept_below = f"{ceil(self._share * 2.0**64):016x}" if self._share < 1 else "g"
        """A decision is kept if its nonce, as a text, is less than this. Every nonce is less than ``g``, which no hex
        digit reaches."""
        self._metrics = metrics
        # A separate source, so that decisions draw the same numbers with and without shadows.
        self._random = random or Random()
        self._warned_at: dict[str, float] = {}

    def begin(
        self, offers: Offers, snapshot: GroupSnapshot, matches: PromptMatches, question: Question
    ) -> ShadowedDecision | None:
        """Note a decision before its reservation; None if there is nothing to do. It must ``end`` if it is made."""
        if not self._shadows and not self._share:
            return None
        shadowed = ShadowedDecision(self, offers, snapshot, matches, question)
        if self._shadows:
            # Redis has the reservation by then, and the decision waits for it.
            asyncio.get_running_loop().call_soon(shadowed.run)
        return shadowed

    def choose(self, shadowed: ShadowedDecision) -> Mapping[str, Candidate]:
        """Return the target that each shadow prefers, by its name, and count them."""
        offers, snapshot, matches, question = shadowed.facts
        request, first = matches.request, offers.decode.scored(0).candidate
        chosen, reused_by_first = {}, reused(first, request)
        preferences: Preferences | None = None
        for shadow in self._shadows:
            count = self._metrics.shadow_decisions.labels
            try:
                policy = shadow.policy
                shadowed.seen = self._completed(shadowed.seen, snapshot, question, policy)
                preferences = preferences or Preferences(snapshot, matches, question, first.publisher, self._random)
                candidate = preferences.of(policy, shadowed.seen)
            except Exception as exc:  # a shadow never disturbs a decision, whatever is wrong with it
                count(shadow=shadow.name, choice="failed").inc()
                self._warn(shadow, exc)
                continue
            if candidate is None:
                count(shadow=shadow.name, choice="none").inc()
                continue
            chosen[shadow.name] = candidate
            is_same = candidate.publisher == first.publisher
            count(shadow=shadow.name, choice="same" if is_same else "other").inc()
            tokens = self._metrics.shadow_tokens.labels
            tokens(shadow=shadow.name, by="shadow").inc(reused_by_first if is_same else reused(candidate, request))
            tokens(shadow=shadow.name, by="policy").inc(reused_by_first)
        return chosen

    def _completed(
        self, state: PromptState, snapshot: GroupSnapshot, question: Question, policy: PolicyChoice
    ) -> PromptState:
        """Return the state with the readings that the shadow needs in addition, as far as they are at hand."""
        if policy.file is None and not policy.needs_gauges and not snapshot.fleet.kv_sources:
            return state  # loads, which every decision has
        needs = needs_of(question._replace(policy=policy), snapshot.fleet)
        missing = ReadingKind.GAUGES in needs and not state.gauges
        missing |= ReadingKind.ANSWER_TIMES in needs and not state.answer_times
        if not missing:
            return state
        at_hand = self._snapshots.at_hand(snapshot.entry, snapshot.fleet, needs)
        if at_hand is None:
            if self._reading is None or self._reading.done():
                self._reading = self._begin(self._read(snapshot, needs))
            return state
        return state._replace(
            gauges=state.gauges or at_hand.gauges, answer_times=state.answer_times or at_hand.answer_times
        )

    async def _read(self, snapshot: GroupSnapshot, needs: Collection[ReadingKind]) -> None:
        try:
            await self._snapshots.of(snapshot.entry, snapshot.fleet, needs)
        except StoreUnavailable as exc:
            log.debug("values for shadows not read", extra=fields(error=exc.sentence))

    def keep(self, shadowed: ShadowedDecision, selected: SelectedTarget) -> None:
        """Keep a decision after its reservation, if it belongs to the share."""
        reservation = next(iter(selected.reservations), None)
        if reservation is None:
            if self._random.random() >= self._share:
                return
        elif not self.is_kept(reservation):
            return
        self._records.note_decision(selected.group_id, shadowed.record(selected, reservation))

    def is_kept(self, reservation: Reservation) -> bool:
        """Return whether the decision that made a reservation is kept."""
        return reservation.nonce < self._kept_below

    def ended(self, reservations: Sequence[Reservation], ttft_ms: float | None, usage: Usage) -> None:
        """Note the outcome of a request; its first reservation is that of its decision."""
        if ttft_ms is None and usage.cached_tokens is None:
            return
        for reservation in reservations[:1]:
            if self.is_kept(reservation):
                self._records.note_outcome(
                    reservation.group_id, reservation.nonce, delivered=usage.cached_tokens, ttft_ms=ttft_ms
                )

    def _warn(self, shadow: Shadow, exc: Exception) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(shadow.name, -_WARNING_SECONDS) >= _WARNING_SECONDS:
            self._warned_at[shadow.name] = now
            log.warning(
                "a shadow fails", extra=fields(shadow=shadow.name, error=f"{type(exc).__name__}: {exc}"), exc_info=exc
            )


class ShadowedDecision:
    """One decision, between its order and its reservation."""

    def __init__(
        self, shadows: Shadows, offers: Offers, snapshot: GroupSnapshot, matches: PromptMatches, question: Question
    ) -> None:
        self.facts = offers, snapshot, matches, question
        self.seen = matches.seen
        """The state of the targets, with the readings that only shadows need."""
        self._shadows = shadows
        self._chosen: Mapping[str, Candidate] | None = None

    def run(self) -> Mapping[str, Candidate]:
        """Run the shadows once, and return the target that each prefers."""
        if self._chosen is None:
            self._chosen = self._shadows.choose(self)
        return self._chosen

    def end(self, selected: SelectedTarget) -> None:
        """Note that the decision is made."""
        self._shadows.keep(self, selected)

    def record(self, selected: SelectedTarget, reservation: Reservation | None) -> KeptDecision:
        """Return the record to keep."""
        offers, _, matches, question = self.facts
        request, chosen = matches.request, selected.target.candidate
        shadows = self.run()
        best = [candidate.candidate for candidate in offers.decode.best(TARGETS_MAX)]
        named = {candidate.publisher: candidate for candidate in (*shadows.values(), chosen)}
        missing = [named[publisher] for publisher in named.keys() - {candidate.publisher for candidate in best}]
        best = [*best[: TARGETS_MAX - len(missing)], *missing]
        return KeptDecision(
            int(1000 * time.time()),
            "" if reservation is None else reservation.nonce,
            question.group.tenant_id,
            question.policy.name,
            selected.decision.value,
            request.tokens,
            request.block_size,
            chosen.publisher,
            reused(chosen, request),
            work(chosen, request),
            targets=[_kept_target(candidate, self.seen) for candidate in best],
            shadows={
                name: ShadowChoice(candidate.publisher, reused(candidate, request), work(candidate, request))
                for name, candidate in shadows.items()
            },
            blocks=matches.keys[: BLOCKS_MAX * KEY_BYTES],
            has_tokens=request.has_tokens,
            prefix_key=request.prefix_key,
            lora_name=request.lora_name,
            session=request.session,
            is_multimodal=request.is_multimodal,
            pool=request.pool if request.blocks <= _POOL_BLOCKS_MAX else 0,
            active_bound=offers.active_bound,
            profile=question.parameters.profile,
            asked=question.asked,
        )


def reused(candidate: Candidate, request: RoutingRequest) -> int:
    """Return the tokens that a target should reuse."""
    return min(max(candidate.matched, candidate.expected), request.tokens - least_new(request))


def work(candidate: Candidate, request: RoutingRequest) -> int:
    """Return the prefill tokens that a target would compute until the first token of the answer."""
    return candidate.wait + request.tokens - reused(candidate, request)


def _kept_target(candidate: Candidate, state: PromptState) -> KeptTarget:
    times = candidate.answer_times or state.answer_times.get(candidate.publisher)
    gauges = candidate.gauges or state.gauges.get(candidate.publisher)
    numbers = None if times is None else times.numbers
    return KeptTarget._make((*_facts(candidate), candidate.role.value, candidate.labels, gauges, numbers))
