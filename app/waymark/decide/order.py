"""The order of targets for a question, by the facts alone: no I/O, no clock, and no randomness except by arguments.

A policy ranks candidates, which are objects with every fact that any policy uses. If the cost of a target is a sum
independent of other targets, only these sums are computed, and a candidate is made only for a target in the answer.
A reservation follows from an order; there, Redis ranks the best few again by their loads of that instant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, Protocol

from waymark.base import native
from waymark.decide import pure_sums
from waymark.decide.books import Choices
from waymark.decide.fail_open import FAIL_OPEN, Cause, Deed
from waymark.decide.fleet import Allowed, Fleet, FleetMember, PromptState, Shortlist, StagePart, TargetSet, candidate_of
from waymark.decide.fleet_columns import FleetColumns, candidates_of
from waymark.decide.matches import PromptMatches
from waymark.decide.policies.columns import RankedColumns
from waymark.decide.policies.policy import (
    CREDITS,
    Candidate,
    Inputs,
    Linear,
    Ranking,
    RoutingRequest,
    Scored,
    count_new,
    least_new,
    read_constants,
)
from waymark.decide.policies.ring import POINTS, LazyRing, Ring, by_prefix_key, home_of
from waymark.decide.question import PolicyChoice, Question
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.match import TargetRow
from waymark.domain.packing import KEY_BYTES
from waymark.domain.status import Decision
from waymark.store.reservations import CANDIDATES_MAX, Load, Offer

BY_PLACE = Linear(0.0, 0.0)
#: The handicap and the weight of a target if Redis cannot compute the order again. A load divided by this weight is
#: lost in the sum, so all targets cost the same, and Redis takes the first one.
PLACE_HANDICAP, PLACE_WEIGHT = 1.0, 1e300
DEFAULT_CREDITS = read_constants(CREDITS, {}, "overrides")
EVERYBODY = Allowed()


class StageOffers(Protocol):
    """The targets that could take a stage, best first. Only the first ``CANDIDATES_MAX`` are offered."""

    linear: Linear
    is_cold: bool
    """Whether no target has any block of the prompt."""

    def offers(self) -> list[Offer]: ...

    def matched_blocks(self) -> list[int]:
        """Return the match of each offered target."""

    def scored(self, place: int) -> Scored: ...

    def best(self, count: int) -> Sequence[Scored]:
        """Return the first targets, at most so many."""

    def find(self, publisher: int) -> int | None:
        """Return the place of a target."""

    def others(self, excluded: int, count: int) -> list[Candidate]:
        """Return the best ``count`` besides the one at this place."""


class Offers(NamedTuple):
    """The targets that could take each stage of a request."""

    decode: StageOffers
    prefill: StageOffers | None = None
    """None if the target of ``decode`` computes the prompt, too."""
    encode: Sequence[Scored] = ()
    decision: Decision = Decision.KV_AWARE
    home: int | None = None
    """The publisher of the target that the prefix key names, if the prompt has no tokens."""
    choices: Choices = Choices(None)
    """The targets that the request could have gone to."""
    is_degraded: bool = False
    """Whether the only targets left are ones whose engines cannot be reached."""
    active_bound: int | None = None
    """The bound of ``sticky``: the number of requests that a target may have."""


def order(snapshot: GroupSnapshot, matches: PromptMatches, question: Question, random: Random) -> Offers | None:
    """Return the targets that could take the request, each stage best first; None without such a target.

    Targets that cannot be reached are left out unless there are no others.
    """
    offers = _order(snapshot, matches, question, snapshot.left_out, random)
    if offers is None and snapshot.left_out and FAIL_OPEN[Cause.UNREACHABLE] is Deed.ALL_THE_SAME:
        offers = _order(snapshot, matches, question, frozenset(), random)
        return None if offers is None else offers._replace(is_degraded=True)
    return offers


def order_all(snapshot: GroupSnapshot, matches: PromptMatches, question: Question, random: Random) -> Ranking:
    """Return all targets that serve the model, best first; or those that the question names.

    Targets that cannot be reached are left out unless there are no others.
    """
    members: Sequence[FleetMember] | None = None
    is_degraded = False
    if question.given is None:  # a caller that names candidates knows their models
        members, left_out = snapshot.fleet.serving(question.served_as), snapshot.left_out
        reached = [member for member in members if member.publisher not in left_out] if left_out else members
        is_degraded = not reached and bool(members)
        members = reached or members
    candidates = snapshot.fleet.candidates(matches.seen, matches.request.block_size, question.given, members)
    ranking = rank(question.policy, matches.request, candidates, snapshot.fleet, random)
    return replace(ranking, is_degraded=is_degraded)


def _order(
    snapshot: GroupSnapshot, matches: PromptMatches, question: Question, left_out: Set[int], random: Random
) -> Offers | None:
    fleet, policy, profile = snapshot.fleet, question.policy, question.parameters.profile
    is_split = profile == "disagg" and policy.preset is not None
    is_whole = not is_split and (policy.preset is not None or profile == "single")
    part: StagePart = "decode" if is_split else "whole" if is_whole else "any"
    targets = targets_of(fleet, question, left_out, part)
    short = shortlist(fleet, matches, question, *targets, random)
    if not short.members:
        return None
    choices = Choices(*(targets if part == "whole" else targets_of(fleet, question, left_out, "whole")))
    blocks = len(matches.keys) // KEY_BYTES
    if _is_sum(matches, question):
        return Offers(SumOffers(short.members, matches.seen, policy, matches.request, blocks, random), choices=choices)
    size = matches.request.block_size
    candidates = candidates_of(fleet, *targets, short, matches.seen, size)
    prefill_candidates: Sequence[Candidate] = ()
    if is_split:
        prefill_targets = targets_of(fleet, question, left_out, "prefill")
        prefill_short = shortlist(fleet, matches, question._replace(session=None), *prefill_targets, random)
        prefill_candidates = candidates_of(fleet, *prefill_targets, prefill_short, matches.seen, size)
    best = stages(fleet, matches.request, question, candidates, prefill_candidates, random, short.active_bound)
    if best is None:
        return None
    is_cold = matches.seen.is_cold
    prefill = None
    if best.prefill:
        prefill = ScoredOffers(best.prefill, policy, matches.request, blocks, is_cold=is_cold)
    decode = ScoredOffers(
        best.decode,
        policy,
        matches.request,
        blocks,
        is_cold=is_cold,
        # Redis could find another target cheaper than the session's.
        is_by_place=best.decision is Decision.SESSION,
        is_prefill_elsewhere=prefill is not None,
    )
    if policy.file is not None:
        choices = Choices.of_file(policy.file, best.decode, matches.request, *targets)
    return Offers(decode, prefill, best.encode, best.decision, best.home, choices, active_bound=short.active_bound)


def _is_sum(matches: PromptMatches, question: Question) -> bool:
    """Return whether the policy is a sum, and nothing else decides."""
    preset, seen = question.policy.preset, matches.seen
    if preset is None or preset.sum_of is None or question.session is not None:
        return False
    if question.parameters.profile == "disagg" or not matches.request.has_tokens:
        return False
    return not (seen.prefixes or seen.gauges or seen.answer_times)


# ---- which targets are ranked -------------------------------------------------------------------


def shortlist(
    fleet: Fleet, matches: PromptMatches, question: Question, targets: TargetSet, allowed: Allowed, random: Random
) -> Shortlist:
    """Return those of the allowed targets that a decision has to rank."""
    preset, values, request = question.policy.preset, question.policy.values, matches.request
    if preset is None or values is None:
        return Shortlist(targets.all(allowed), are_all=True)
    if preset.falls_back is not None and request.has_tokens:
        having = [*targets.having(matches.seen, allowed).values()]
        fallback = preset.falls_back(fleet.candidates(matches.seen, request.block_size, members=having), values)
        if fallback is not None:
            preset, values = fallback, fallback.values({})
    most = _places(question)
    if preset.name == "sticky" and request.prefix_key is not None:
        clockwise = fleet.ring(int(values.number("virtual_nodes"))).clockwise(request.prefix_key)
        epsilon, session = values.number("load_factor_epsilon"), question.session
        return targets.below_bound(matches.seen.loads, clockwise, epsilon, most, allowed=allowed, session=session)
    cost = None if preset.by_load is None else preset.by_load(request, values)
    if cost is None or len(targets.members) <= most:
        return Shortlist(targets.all(allowed), are_all=True)
    nearest: Iterable[tuple[str, int]] = ()
    if request.ring is not None and request.prefix_key is not None:
        nearest = request.ring.clockwise(request.prefix_key)
    rival, session, seen = question.rival, question.session, matches.seen
    return Shortlist(
        targets.shortlist(seen, cost, most, random, allowed=allowed, session=session, rival=rival, nearest=nearest)
    )


def _places(question: Question) -> int:
    """Return how many of the best targets the caller looks at."""
    return max(CANDIDATES_MAX, question.parameters.count)


def targets_of(fleet: Fleet, question: Question, left_out: Set[int], part: StagePart) -> tuple[TargetSet, Allowed]:
    """Return the targets for a part of the request, and the allowed ones."""
    parameters = question.parameters
    targets = fleet.targets(question.served_as, part, have_addresses=parameters.needs_address)
    if parameters.only is None and not (parameters.exclude or left_out):
        return targets, EVERYBODY
    allowed = Allowed(
        None if parameters.only is None else fleet.publishers(parameters.only),
        left_out | fleet.publishers(parameters.exclude) if parameters.exclude else left_out,
    )
    return targets, allowed


# ---- in which order -----------------------------------------------------------------------------


class RankedStages(NamedTuple):
    """The candidates of each stage, best first."""

    decode: Sequence[Scored]
    prefill: Sequence[Scored] = ()
    encode: Sequence[Scored] = ()
    decision: Decision = Decision.KV_AWARE
    home: int | None = None


class HasRings(Protocol):
    """Targets with rings of their names."""

    def ring(self, points: int) -> Ring: ...


def stages(
    fleet: HasRings,
    request: RoutingRequest,
    question: Question,
    candidates: Sequence[Candidate],
    before: Sequence[Candidate],
    random: Random,
    active_bound: int | None = None,
) -> RankedStages | None:
    """Return the targets that could take the request, by stage; None if no target could decode it.

    A preset ranks ``candidates`` for decode and ``before`` for prefill; a picker file ranks ``candidates`` for all.
    """
    policy, parameters = question.policy, question.parameters
    if policy.file is not None and parameters.profile != "single":
        ranked = policy.file.run(request, candidates, random, _places(question))
        return RankedStages(*ranked, *_by_key(request, ranked.decode)) if ranked.decode else None
    most = _places(question)
    decode = rank(policy, request, candidates, fleet, random, most, active_bound)
    if not decode.scored:
        return None
    prefill: Sequence[Scored] = ()
    if before:
        prefill = rank(policy, request._replace(session=None), before, fleet, random, most).scored
    return RankedStages(decode.scored, prefill, decision=decode.decision, home=decode.home)


def rank(
    policy: PolicyChoice,
    request: RoutingRequest,
    candidates: Sequence[Candidate],
    fleet: HasRings,
    random: Random,
    most: int | None = None,
    active_bound: int | None = None,
) -> Ranking:
    """Return all candidates in the order of a policy; of a file, those that its decode profile lets through.

    ``most``: how many places the caller looks at; None: all. ``active_bound``: for ``sticky``, if targets are missing.
    """
    if not candidates:
        return Ranking(())
    if policy.preset is None:
        assert policy.file is not None
        scored = policy.file.profiles[policy.file.decode].run(request, candidates, random, most)
        return Ranking(scored, *_by_key(request, scored))
    assert policy.values is not None
    points = int(policy.values.number("virtual_nodes")) if policy.preset.name == "sticky" else POINTS
    ring = LazyRing(lambda: fleet.ring(points))
    if request.session is not None and not (request.has_tokens and isinstance(candidates, FleetColumns)):
        most = None  # the ranks of the session's instance come first, wherever the policy has them
    inputs = Inputs(request, candidates, policy.values, random, ring, most, active_bound)
    by_policy = policy.preset.rank
    if request.has_tokens or policy.preset.name == "sticky":
        ranking = by_policy(inputs)
    else:
        ranking = by_prefix_key(request, candidates, lambda members: by_policy(inputs._replace(candidates=members)))
    return ranking if request.session is None else _session_first(ranking, request.session)


def _by_key(request: RoutingRequest, scored: Sequence[Scored]) -> tuple[Decision, int | None]:
    """Return the decision of a file, and the target of the prefix key among those that its filters let through."""
    if request.has_tokens:
        return Decision.KV_AWARE, None
    home = home_of(request, scored)
    return (Decision.LOAD, None) if home is None else (Decision.PREFIX, home.publisher)


def _session_first(ranking: Ranking, session: str) -> Ranking:
    """Put the ranks of the session's instance before all others; if it is not a candidate, the order stays the
    same.
    """
    if isinstance(ranking.scored, RankedColumns):
        is_there = ranking.scored.put_first(session)
        return replace(ranking, decision=Decision.SESSION, home=None) if is_there else ranking
    own = [candidate for candidate in ranking.scored if candidate.candidate.instance_id == session]
    if not own:
        return ranking
    other_ranks = [candidate for candidate in ranking.scored if candidate.candidate.instance_id != session]
    return Ranking([*own, *other_ranks], Decision.SESSION)


# ---- offers to Redis ------------------------------------------------------------------------------


class ScoredOffers:
    """The offers of candidates that a policy has ranked."""

    def __init__(
        self,
        scored: Sequence[Scored],
        policy: PolicyChoice,
        request: RoutingRequest,
        blocks: int,
        *,
        is_cold: bool,
        is_by_place: bool = False,
        is_prefill_elsewhere: bool = False,
    ) -> None:
        """``blocks`` are the complete blocks of the prompt."""
        self._all = scored
        self._first = scored[:CANDIDATES_MAX]
        self._policy = policy
        self._request = request
        self._whole = blocks * request.block_size or None
        self._is_prefill_elsewhere = is_prefill_elsewhere
        self.linear = BY_PLACE if is_by_place else policy.linear or BY_PLACE
        self.is_cold = is_cold

    def offers(self) -> list[Offer]:
        values, linear = self._policy.values, self.linear
        if values is None or values.credits is None:
            values = DEFAULT_CREDITS
        new_of, offers = count_new(self._request, values), []
        for candidate, value, _ in self._first:
            new, weight = new_of(candidate), candidate.weight
            # The cost besides load and new tokens.
            rest_cost = value - candidate.queue - linear.active * candidate.requests - linear.new * new
            if linear is BY_PLACE:
                rest_cost, weight = PLACE_HANDICAP, PLACE_WEIGHT
            is_whole = not candidate.shared and candidate.matched == self._whole and new <= self._request.block_size
            is_reserved = not (is_whole or self._is_prefill_elsewhere)
            offers.append(_offer(candidate.publisher, new, rest_cost, weight, linear, is_reserved=is_reserved))
        return offers

    def matched_blocks(self) -> list[int]:
        return [scored.candidate.matched // self._request.block_size for scored in self._first]

    def scored(self, place: int) -> Scored:
        return self._all[place]

    def best(self, count: int) -> Sequence[Scored]:
        return self._all[:count]

    def find(self, publisher: int) -> int | None:
        return next((place for place, scored in enumerate(self._all) if scored.candidate.publisher == publisher), None)

    def others(self, excluded: int, count: int) -> list[Candidate]:
        return [scored.candidate for place, scored in enumerate(self._all[: count + 1]) if place != excluded][:count]


_Sum = tuple[float, float, int, FleetMember, float, TargetRow | None, Load | None, int]
"""The cost of a target; a random number, by which many callers choose different ones of equal targets; its publisher;
the target itself; its new tokens; and its row, load and expected blocks as they were observed. Loads change while Redis
decides, and the answer shows the observed ones.
"""


class SumOffers:
    """The offers of targets whose costs are sums that need no other target."""

    def __init__(
        self,
        members: Sequence[FleetMember],
        seen: PromptState,
        policy: PolicyChoice,
        request: RoutingRequest,
        blocks: int,
        random: Random,
        sums: list[Any] | None = None,
    ) -> None:
        """Rank the members, unless their ``sums`` are known. ``policy`` is a preset with ``sum_of``; ``seen`` must not
        have gauges, opaque prefixes or first tokens.
        """
        assert policy.preset is not None
        assert policy.linear is not None
        assert policy.preset.sum_of is not None
        assert policy.values is not None
        assert policy.values.credits is not None
        self.linear = linear = policy.linear
        self.is_cold = seen.is_cold
        self._sum_of, self._values, self._request = policy.preset.sum_of, policy.values, request
        self._blocks = blocks
        self._least = least_new(request)
        self._sums: list[_Sum] = sums or (native.selected or pure_sums).rank_sums(
            members,
            seen.rows.get,
            seen.loads.get,
            seen.expected.get if seen.expected else None,
            random.random,
            request.tokens,
            self._least,
            request.block_size,
            *policy.values.credits,
            *linear,
        )

    def offers(self) -> list[Offer]:
        return self.promised(0, 0)[0]

    def promised(self, available: int, random: int) -> tuple[list[Offer], list[str], list[str]]:
        """Return the offers, what is promised of each, and their terms as ``reserve`` reads them.

        ``available`` and ``random`` are those of ``Promise``.
        """
        request = self._request
        return (native.selected or pure_sums).offer_sums(
            Offer,
            self._sums,
            CANDIDATES_MAX,
            self._blocks,
            request.block_size,
            self.linear.new,
            available,
            request.tokens - self._least,
            random,
            0.0,
            None,
        )

    def matched_blocks(self) -> list[int]:
        return [0 if row is None else sum(row) for _, _, _, _, _, row, _, _ in self._sums[:CANDIDATES_MAX]]

    def scored(self, place: int) -> Scored:
        return self._sum_of(self._request, self._values)(self._candidate(self._sums[place]))

    def best(self, count: int) -> Sequence[Scored]:
        scored = self._sum_of(self._request, self._values)
        return [scored(self._candidate(entry)) for entry in self._sums[:count]]

    def find(self, publisher: int) -> int | None:
        for place, entry in enumerate(self._sums):
            if entry[2] == publisher:
                return place
        return None

    def others(self, excluded: int, count: int) -> list[Candidate]:
        if not count:
            return []
        return [self._candidate(entry) for place, entry in enumerate(self._sums) if place != excluded][:count]

    def _candidate(self, entry: _Sum) -> Candidate:
        _, _, _, member, _, row, load, expected = entry
        return candidate_of(member, row, load, expected, self._request.block_size)


def _offer(publisher: int, new: float, rest_cost: float, weight: float, linear: Linear, *, is_reserved: bool) -> Offer:
    """Return an offer. ``rest_cost`` is the cost besides load and new tokens.

    Without ``is_reserved`` the new tokens count in the cost alone. This is the case if a target has every complete
    block: giving the rest of a block back would take a call of its own.
    """
    tokens = math.ceil(new) if is_reserved else 0
    # Each decision makes eight offers, and the constructor takes twice as long.
    return tuple.__new__(Offer, (publisher, tokens, rest_cost + linear.new * (new - tokens), weight, 0, 0))
