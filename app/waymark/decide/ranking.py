"""From candidates to an order: by a preset, or by the profiles of a file, in one stage or in several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from waymark.decide.decision import PolicyChoice, ProfileName
from waymark.decide.fleet import Fleet
from waymark.decide.policies.policy import Decision, Inputs, Ranking, Scored
from waymark.decide.policies.profile import PickerConfig
from waymark.decide.policies.ring import POINTS
from waymark.decide.policies.target import Candidate, RoutingRequest
from waymark.decide.policies.without_tokens import by_prefix_key, home_of


@dataclass(frozen=True, slots=True)
class RankedStages:
    """The candidates of each stage, best first."""

    decode: Sequence[Scored]
    prefill: Sequence[Scored] = ()
    encode: Sequence[Scored] = ()
    decision: Decision = Decision.KV_AWARE
    home: int | None = None
    """The publisher of the target that the prefix key names, if the prompt has no tokens."""


def rank(
    policy: PolicyChoice,
    picker: PickerConfig | None,
    request: RoutingRequest,
    candidates: Sequence[Candidate],
    fleet: Fleet,
    random: Random,
    most: int | None = None,
    active_bound: int | None = None,
) -> Ranking:
    """All candidates in the order of a policy; of a file, those that its decode profile lets through.

    ``most`` is how many places the caller looks at; None: all. ``active_bound`` is for ``sticky``, if some are missing.
    """
    if not candidates:
        return Ranking(())
    if policy.preset is None:
        assert picker is not None
        scored = picker.profiles[picker.decode].run(request, candidates, random)
        return Ranking(scored, *_by_key(request, scored))
    assert policy.values is not None
    ring = None
    if policy.preset.name == "sticky":
        ring = fleet.ring(int(policy.values.number("virtual_nodes")))
    elif policy.preset.name == "composite" and policy.values.word("fallback") == "sticky":
        ring = fleet.ring(POINTS)
    if request.session is not None:
        most = None  # the ranks of the session's instance come first, wherever the policy has them
    inputs = Inputs(request, candidates, policy.values, random, ring, most, active_bound)
    by_policy = policy.preset.rank
    if request.has_tokens or policy.preset.name == "sticky":
        found = by_policy(inputs)
    else:
        found = by_prefix_key(request, candidates, lambda some: by_policy(inputs._replace(candidates=some)))
    return _session_first(found, request.session)


def _by_key(request: RoutingRequest, scored: Sequence[Scored]) -> tuple[Decision, int | None]:
    """Return the decision of a file, and the target of the prefix key among those that its filters let through."""
    if request.has_tokens:
        return Decision.KV_AWARE, None
    home = home_of(request, [candidate.candidate for candidate in scored])
    return (Decision.LOAD, None) if home is None else (Decision.PREFIX, home.publisher)


def _session_first(ranking: Ranking, session: str | None) -> Ranking:
    """Put the ranks of the session's instance before all others; a session whose instance is not a candidate starts
    anew.
    """
    own = [candidate for candidate in ranking.scored if candidate.candidate.instance_id == session]
    if not own:
        return ranking
    other_ranks = [candidate for candidate in ranking.scored if candidate.candidate.instance_id != session]
    return Ranking([*own, *other_ranks], Decision.SESSION)


def stages(
    policy: PolicyChoice,
    picker: PickerConfig | None,
    profile: ProfileName | None,
    request: RoutingRequest,
    candidates: Sequence[Candidate],
    before: Sequence[Candidate],
    fleet: Fleet,
    random: Random,
    most: int | None = None,
    active_bound: int | None = None,
) -> RankedStages | None:
    """Who could take the request, and its stages before decode; None where nobody could.

    The candidates are for a stage, and those ``before`` for a stage of prefill by a preset; a file picks from all.
    ``most`` is how many of a stage the caller looks at.
    """
    if policy.preset is None and profile != "single":
        assert picker is not None
        of = picker.run(request, candidates, random)
        prefill = of.prefill[: picker.profiles[picker.prefill].endpoints_max] if picker.prefill else ()
        encode = of.encode[: picker.profiles[picker.encode].endpoints_max] if picker.encode else ()
        return RankedStages(of.decode, prefill, encode, *_by_key(request, of.decode)) if of.decode else None
    decode = rank(policy, picker, request, candidates, fleet, random, most, active_bound)
    if not decode.scored:
        return None
    first = rank(policy, picker, request._replace(session=None), before, fleet, random, most)
    return RankedStages(decode.scored, first.scored, decision=decode.decision, home=decode.home)
