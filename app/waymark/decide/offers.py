"""The offers to Redis for one stage of a request: the best few targets, in the form in which it ranks them again.

A policy ranks candidates, which are objects with every fact that any policy uses. If the cost of a target is a sum
independent of other targets, only these sums are computed, and a candidate is made only for a target in the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Protocol

from waymark.decide.decision import PolicyChoice
from waymark.decide.fleet import FleetMember, PromptState, candidate_of
from waymark.decide.policies.constants import read_constants
from waymark.decide.policies.policy import CREDITS, Linear, Scored, count_new, least_new
from waymark.decide.policies.target import Candidate, RoutingRequest
from waymark.domain.match import TargetRow
from waymark.store.reservations import CANDIDATES_MAX, Load, Offer

#: Where Redis cannot compute an order again, a place in it outweighs any load.
_PLACE = 2.0**44
BY_PLACE = Linear(0.0, 0.0)
_CREDITS = read_constants(CREDITS, {}, "overrides")


class Offers(Protocol):
    """The targets that could take a stage, best first. Only the first ``CANDIDATES_MAX`` are offered."""

    linear: Linear
    is_cold: bool
    """Whether no target has any block of the prompt."""

    def offers(self) -> list[Offer]: ...

    def matched_blocks(self) -> list[int]:
        """Return the match of each offered target."""

    def scored(self, at: int) -> Scored: ...

    def find(self, publisher: int) -> int | None:
        """Return the place of a target."""

    def others(self, at: int, count: int) -> list[Candidate]:
        """Return the best ``count`` besides the one at this place."""


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
        self.linear = BY_PLACE if is_by_place else _linear(policy)
        self.is_cold = is_cold

    def offers(self) -> list[Offer]:
        values, linear = self._policy.values, self.linear
        if values is None or self._policy.preset is None or CREDITS[0] not in self._policy.preset.constants:
            values = _CREDITS
        new_of, offers = count_new(self._request, values), []
        for place, (candidate, value, _) in enumerate(self._first):
            new, weight = new_of(candidate), candidate.weight
            # The cost besides load and new tokens.
            beside = value - candidate.queue - linear.active * candidate.requests - linear.new * new
            if linear is BY_PLACE:
                beside, weight = place * _PLACE, 1.0
            is_whole = not candidate.shared and candidate.matched == self._whole and new <= self._request.block_size
            is_reserved = not (is_whole or self._is_prefill_elsewhere)
            offers.append(_offer(candidate.publisher, new, beside, weight, linear, is_reserved=is_reserved))
        return offers

    def matched_blocks(self) -> list[int]:
        return [each.candidate.matched // self._request.block_size for each in self._first]

    def scored(self, at: int) -> Scored:
        return self._all[at]

    def find(self, publisher: int) -> int | None:
        return next((at for at, each in enumerate(self._all) if each.candidate.publisher == publisher), None)

    def others(self, at: int, count: int) -> list[Candidate]:
        return [each.candidate for place, each in enumerate(self._all) if place != at][:count]


_Sum = tuple[float, float, int, FleetMember, float, TargetRow | None, Load | None, int]
"""The cost of a target; a number by chance, so that many callers do not all choose the same of equal targets; its
publisher; itself; its new tokens; and its observed row, load and expected blocks. Loads change while Redis decides; the
answer shows the earlier ones.
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
    ) -> None:
        """Rank the members. ``policy`` is a preset with ``sum_of``; ``seen`` must not have gauges, opaque prefixes or
        first tokens.
        """
        assert policy.preset is not None
        assert policy.preset.linear is not None
        assert policy.preset.sum_of is not None
        assert policy.values is not None
        self.linear = linear = policy.preset.linear(policy.values)
        self._sum_of, self._values, self._request = policy.preset.sum_of, policy.values, request
        self._blocks = blocks or None
        device_credit, host_credit, disk_credit, shared_credit = map(policy.values.number, _CREDIT_NAMES)
        rows, loads, expected, draw = seen.rows, seen.loads, seen.expected, random.random
        tokens, least, size = request.tokens, least_new(request), request.block_size
        sums: list[_Sum] = []
        self.is_cold = seen.is_cold
        for member in members:
            publisher, has, soon = member.publisher, 0.0, 0
            row, load = rows.get(member.name), loads.get(publisher)
            if row is not None:
                device, host, shared, disk = row
                has = device_credit * device + host_credit * host + disk_credit * disk + shared_credit * shared
            if expected and (soon := expected.get(publisher, 0)):
                has = max(has, soon)
            new = max(tokens - size * has, least)
            cost = linear.new * new
            if load is not None:
                cost += (load.tokens + linear.active * load.requests) / member.target.weight
            sums.append((cost, draw(), publisher, member, new, row, load, soon))
        sums.sort()
        self._sums = sums

    def offers(self) -> list[Offer]:
        linear, size, offers = self.linear, self._request.block_size, []
        for _, _, publisher, member, new, row, _, _ in self._sums[:CANDIDATES_MAX]:
            is_whole = row is not None and not row.shared and row.blocks == self._blocks and new <= size
            offers.append(_offer(publisher, new, 0.0, member.target.weight, linear, is_reserved=not is_whole))
        return offers

    def matched_blocks(self) -> list[int]:
        return [0 if row is None else row.blocks for _, _, _, _, _, row, _, _ in self._sums[:CANDIDATES_MAX]]

    def scored(self, at: int) -> Scored:
        return self._sum_of(self._request, self._values)(self._candidate(self._sums[at]))

    def find(self, publisher: int) -> int | None:
        return next((at for at, each in enumerate(self._sums) if each[2] == publisher), None)

    def others(self, at: int, count: int) -> list[Candidate]:
        if not count:
            return []
        return [self._candidate(each) for place, each in enumerate(self._sums) if place != at][:count]

    def _candidate(self, of: _Sum) -> Candidate:
        _, _, _, member, _, row, load, expected = of
        return candidate_of(member, row, load, expected, self._request.block_size)


_CREDIT_NAMES = tuple(constant.name for constant in CREDITS)


def _offer(publisher: int, new: float, beside: float, weight: float, linear: Linear, *, is_reserved: bool) -> Offer:
    """Return an offer. ``beside`` is the cost besides load and new tokens.

    Without ``is_reserved`` the new tokens count in the cost alone. This is the case if a target has every complete
    block: giving the rest of a block back would take a call of its own.
    """
    tokens = math.ceil(new) if is_reserved else 0
    return Offer(publisher, tokens, beside + linear.new * (new - tokens), weight, 0, 0)


def _linear(policy: PolicyChoice) -> Linear:
    if policy.preset is None or policy.preset.linear is None or policy.values is None:
        return BY_PLACE
    return policy.preset.linear(policy.values)
