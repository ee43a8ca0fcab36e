"""A decision over the short list is the decision over all targets, for every policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest

from tests.decide.test_fleet import fleet_of
from tests.unit import seeds
from waymark.decide.fleet import Fleet, FleetMember, PromptState
from waymark.decide.group_loads import GroupLoads
from waymark.decide.matches import PromptMatches
from waymark.decide.order import (
    BY_PLACE,
    PLACE_HANDICAP,
    PLACE_WEIGHT,
    Offers,
    RankedStages,
    StageOffers,
    order,
    shortlist,
    stages,
    targets_of,
)
from waymark.decide.policies.filters import is_for_decode, is_for_prefill
from waymark.decide.policies.policy import RoutingRequest, Scored
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import POINTS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question, SelectParameters
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.store.directory import GroupEntry
from waymark.store.reservations import CANDIDATES_MAX, Load

SIZE, BLOCKS = 16, 60
GROUP = GroupName("t", "m")


def state_of(random: Random, fleet: Fleet, *, has_tokens: bool) -> PromptState:
    """Loads with many equal ones, as they are after a while of few requests, or with hardly any."""
    amounts = random.choice(((0,), (0, 700), (0, 16_384, 16_385, 90_000), range(9_000)))
    loads = {
        each.publisher: Load(random.choice(amounts), random.randint(0, random.choice((1, 6))), random.choice(amounts))
        for each in fleet.members
        if random.random() < 0.9
    }
    rows, expected = {}, {}
    if has_tokens:
        for each in fleet.members:
            if random.random() < random.choice((0.02, 0.2)):
                rows[each.name] = TargetRow(*(random.randint(0, BLOCKS // 4) for _ in range(4)))
            if random.random() < 0.05:
                expected[each.publisher] = random.randint(1, BLOCKS)
    return PromptState(rows, GroupLoads(loads) if random.random() < 0.8 else loads, expected, {})


def parameters_of(random: Random, fleet: Fleet) -> SelectParameters:
    names = [each.name[0] for each in fleet.members]
    some = frozenset(random.sample(names, len(names) * random.choice((1, 2, 7)) // 8))
    return SelectParameters(
        only=some if random.random() < 0.3 else None,
        exclude=frozenset(random.sample(names, len(names) // 9)) if random.random() < 0.3 else frozenset(),
        profile=random.choice((None, None, "single", "disagg")),
        count=random.choice((1, 1, 12)),
        needs_address=random.random() < 0.2,
    )


def plain(random: Random, snapshot: GroupSnapshot, matches: PromptMatches, question: Question) -> RankedStages | None:
    """Rank all targets that are allowed."""
    parameters, fleet = question.parameters, snapshot.fleet

    def able(each: FleetMember) -> bool:
        return (
            parameters.allows(each.name[0], each.target.address)
            and each.publisher not in snapshot.left_out
            and (each.target.address is not None or not parameters.needs_address)
        )

    members, is_split = [each for each in fleet.members if able(each)], parameters.profile == "disagg"
    decode = [each for each in members if (is_for_decode(each.idle) if is_split else each.is_whole)]
    prefill = [each for each in members if is_split and is_for_prefill(each.idle)]
    candidates, before = (fleet.candidates(matches.seen, SIZE, members=some) for some in (decode, prefill))
    everyone = question._replace(parameters=replace(parameters, count=len(members)))
    return stages(fleet, matches.request, everyone, candidates, before, random)


def scored_of(offers: StageOffers | None) -> list[Scored]:
    return [] if offers is None else [offers.scored(place) for place in range(len(offers.offers()))]


def values_of(scored: Sequence[Scored]) -> list[float]:
    return [each.value for each in scored[:CANDIDATES_MAX]]


@pytest.mark.parametrize("seed", seeds(30))
@pytest.mark.parametrize("name", PRESETS)
def test_the_short_list_has_the_choice_of_all(name: str, seed: int) -> None:
    random = Random(f"{name} {seed}")
    fleet = fleet_of(random, random.choice((3, 9, 30, 120, 300)))
    preset = PRESETS[name]
    values = preset.values({"router_temperature": 0.0} if name == "dynamo" else {})
    session = random.choice([each.name[0] for each in fleet.members]) if random.random() < 0.2 else None
    has_tokens = random.random() < 0.6
    key = random.randbytes(32) if random.random() < 0.8 else None
    asked = Question(
        GROUP, lambda size: HashedPrompt(1000, b""), PolicyChoice(preset, values), prefix_key=key, session=session
    )
    ring = None if has_tokens or key is None else fleet.ring(POINTS)
    request = RoutingRequest(SIZE * BLOCKS + 3, SIZE, 0, None, session, key, False, has_tokens, ring)
    seen = state_of(random, fleet, has_tokens=has_tokens)
    matches = PromptMatches(request, seen, b"")
    left_out = frozenset(each.publisher for each in fleet.members if random.random() < random.choice((0.0, 0.2)))
    snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, left_out=left_out)
    for _ in range(3):
        question = asked._replace(parameters=parameters_of(random, fleet))
        whole = plain(random, snapshot, matches, question)
        found = order(snapshot, matches, question, random)
        if whole is None:
            unreachable = plain(random, snapshot._replace(left_out=frozenset()), matches, question)
            assert (found is None) == (unreachable is None or not left_out)
            assert found is None or found.is_degraded
            continue
        assert isinstance(found, Offers)
        assert not found.is_degraded
        decode = scored_of(found.decode)
        if name != "sticky" or session is None:  # the value of a target is its place among those that were looked at
            assert values_of(decode) == pytest.approx(values_of(whole.decode)[: len(decode)], rel=1e-12)
        assert len(decode) >= min(CANDIDATES_MAX, len(whole.decode))
        assert values_of(scored_of(found.prefill)) == pytest.approx(values_of(whole.prefill), rel=1e-12)
        assert (found.decision, found.home) == (whole.decision, whole.home)
        best = {each.candidate.publisher for each in whole.decode if each.value <= whole.decode[0].value * (1 + 1e-12)}
        assert decode[0].candidate.publisher in best
        if key is not None and (name == "sticky" or (ring is not None and session is None)):
            # The key decides between equal ones: the same one in every replica.
            assert decode[0].candidate == whole.decode[0].candidate
        if isinstance(seen.loads, GroupLoads) and fleet.members:
            seen.loads.put(random.choice(fleet.members).publisher, Load(random.choice((0, 5_000)), random.randrange(9)))


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("name", PRESETS)
def test_equal_arguments_have_equal_answers_and_stay_as_they_were(name: str, seed: int) -> None:
    """In whichever process: replicas share nothing but what they have read."""
    policy, key = PolicyChoice.of(PRESETS[name]), Random(seed).randbytes(32)
    question = Question(GROUP, lambda size: HashedPrompt(1000, b""), policy, prefix_key=key)
    found = []
    for draw in (5, 5, 6):
        random = Random(f"{name} {seed}")
        fleet = fleet_of(random, 60)
        seen = state_of(random, fleet, has_tokens=True)
        before = dict(seen.loads), dict(seen.rows), dict(seen.expected)
        request = RoutingRequest(SIZE * BLOCKS + 3, SIZE, prefix_key=key)
        snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, left_out=frozenset({1, 7}))
        answer = order(snapshot, PromptMatches(request, seen, b""), question, Random(draw))
        assert answer is not None
        assert (dict(seen.loads), dict(seen.rows), dict(seen.expected)) == before
        found.append([(each.candidate, each.value, each.parts) for each in scored_of(answer.decode)])
    assert found[0] == found[1]
    if name != "dynamo":
        assert [value for _, value, _ in found[0]] == [value for _, value, _ in found[2]], "draws decide between equals"


@pytest.mark.parametrize("name", ["least-work", "composite", "dynamo", "hicache", "lmetric", "longest", "sticky"])
def test_the_list_stays_short_however_many_targets_there_are(name: str) -> None:
    random = Random(name)
    policy = PolicyChoice.of(PRESETS[name])
    question = Question(GROUP, lambda size: HashedPrompt(1000, b""), policy, prefix_key=random.randbytes(32))
    lengths = []
    for count in (300, 3000):
        fleet = fleet_of(random, count)
        loads = GroupLoads({each.publisher: Load(*random.choices(range(9000), k=3)) for each in fleet.members})
        request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=question.prefix_key)
        matches = PromptMatches(request, PromptState({}, loads, {}, {}), b"")
        targets = targets_of(fleet, question, frozenset(), "whole")
        lengths.append(len(shortlist(fleet, matches, question, *targets, random).members))
    assert max(lengths) <= 5 * CANDIDATES_MAX


def equal_targets(count: int) -> Fleet:
    rows = {n: PublisherRow(f"pod-{n}", 0, SIZE, "instance") for n in range(1, count + 1)}
    return Fleet(HolderTable(b"v", GROUP, rows, {}))


def ordered(fleet: Fleet, question: Question, request: RoutingRequest, loads: Mapping[int, Load]) -> Offers:
    matches = PromptMatches(request, PromptState({}, loads, {}, {}), b"")
    found = order(GroupSnapshot(GroupEntry(1, 1), fleet), matches, question, Random(1))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["least-work", "dynamo", "lmetric", "sticky"])
def test_the_list_is_as_long_as_the_caller_asks(name: str) -> None:
    policy, key = PolicyChoice.of(PRESETS[name]), bytes(32)
    asked = Question(GROUP, lambda size: HashedPrompt(1000, b""), policy, prefix_key=key)
    question = asked._replace(parameters=SelectParameters(count=20))
    request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=key)
    found = ordered(equal_targets(40), question, request, GroupLoads())
    assert len({each.publisher for each in found.decode.others(0, 19)}) == 19


def test_redis_keeps_the_target_of_a_session() -> None:
    policy = PolicyChoice.of(PRESETS["least-work"])
    question = Question(GROUP, lambda size: HashedPrompt(1000, b""), policy, session="pod-3")
    request, loads = RoutingRequest(SIZE * BLOCKS, SIZE, session="pod-3"), GroupLoads({3: Load(5_000, 2, 5_000)})
    found = ordered(equal_targets(4), question, request, loads)
    assert (found.decision, found.decode.linear) == (Decision.SESSION, BY_PLACE)
    offers = found.decode.offers()
    assert offers[0].publisher == 3
    assert {(offer.handicap, offer.weight) for offer in offers} == {(PLACE_HANDICAP, PLACE_WEIGHT)}, (
        "the first is taken"
    )
    elsewhere = ordered(equal_targets(2), question, request, {})
    assert elsewhere.decision is Decision.KV_AWARE, "a session whose target is gone starts anew"
