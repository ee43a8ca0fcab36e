"""What other policies prefer in a decision that is made by one of them.

Each compares its best target with the chosen one and looks at no other. So policies that can name the targets that may
win share the work: who may take the request, who has a part of the prompt, and the candidates of these. Each policy
adds the least loaded target of the others. The rest of the policies, and requests with stages or sessions, are ordered
as a decision is.
"""

from __future__ import annotations

from math import isclose
from random import Random

from waymark.decide.fleet import PromptState
from waymark.decide.matches import PromptMatches
from waymark.decide.order import order, rank, targets_of
from waymark.decide.policies.policy import Candidate, Scored
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.profile import max_score
from waymark.decide.question import PolicyChoice, Question
from waymark.decide.snapshot import GroupSnapshot

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

    def of(self, policy: PolicyChoice, seen: PromptState) -> Candidate | None:
        """Return the target that a policy prefers, or None if it leaves all out.

        ``seen`` has the readings that only this policy needs.
        """
        best, chosen = (self._short(policy) if self._is_whole else None) or self._whole(policy, seen)
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
            short = self._targets.below_bound(matches.seen, clockwise, epsilon, 1, allowed=self._allowed)
            members, bound = short.members, short.active_bound
        else:
            cost = None if preset.by_load is None else preset.by_load(request, values)
            if cost is None:
                return None
            rest = self._targets.cheapest(matches.seen, cost, self._random, self._allowed, self._having)
            members = [*self._having.values(), *(() if rest is None else (rest,))]
        if not members:
            return None
        known = self._candidates
        missing = [each for each in members if each.publisher not in known]
        if missing:
            made = fleet.candidates(matches.seen, request.block_size, members=missing)
            known.update(zip([each.publisher for each in missing], made, strict=True))
        candidates = [known[each.publisher] for each in members]
        scored = rank(policy, request, candidates, fleet, self._random, 1, bound).scored
        return scored[0], next((each for each in scored if each.candidate.publisher == self._chosen), None)

    def _whole(self, policy: PolicyChoice, seen: PromptState) -> tuple[Scored | None, Scored | None]:
        question = self._question._replace(policy=policy, rival=self._chosen)
        offers = order(self._snapshot, self._matches._replace(seen=seen), question, self._random)
        if offers is None:
            return None, None
        at = offers.decode.find(self._chosen)
        return offers.decode.scored(0), None if at is None else offers.decode.scored(at)


def preferred(best: Scored, chosen: Scored | None, policy: PolicyChoice) -> Candidate:
    """Return the target that a policy prefers: the one that was chosen, if no other is better.

    Of equal targets one is taken by chance, and it is no difference between two policies which one.
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
