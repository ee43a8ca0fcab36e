"""A decision over the short list is the decision over all targets, for every policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from random import Random

import pytest

from tests.decide.test_fleet import fleet_of
from tests.unit import seeds
from waymark.base.metrics import Metrics
from waymark.decide.decision import HashedPrompt, PolicyChoice, RankingRequest, SelectParameters
from waymark.decide.fleet import Fleet, FleetMember, PromptState
from waymark.decide.group_loads import GroupLoads
from waymark.decide.offers import SumOffers
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.filters import is_for_decode, is_for_prefill
from waymark.decide.policies.policy import Scored
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import POINTS
from waymark.decide.policies.target import RoutingRequest
from waymark.decide.ranking import RankedStages, stages
from waymark.decide.selector import Selector
from waymark.decide.target_reader import TargetLookup
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.store.directory import GroupEntry
from waymark.store.reservations import CANDIDATES_MAX, Load
from waymark.store.store import Store

SIZE, BLOCKS = 16, 60
GROUP = GroupName("t", "m")


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store.open("memory://", timeout_seconds=2.0)
    yield store
    await store.close()


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


def plain(
    random: Random,
    ranking: RankingRequest,
    parameters: SelectParameters,
    lookup: TargetLookup,
    left_out: frozenset[int],
) -> RankedStages | None:
    """Rank all targets that are allowed."""

    def able(each: FleetMember) -> bool:
        return (
            parameters.allows(each.name[0], each.target.address)
            and each.publisher not in left_out
            and (each.target.address is not None or not parameters.needs_address)
        )

    members, is_split = [each for each in lookup.fleet.members if able(each)], parameters.profile == "disagg"
    decode = [each for each in members if (is_for_decode(each.idle) if is_split else each.is_whole)]
    prefill = [each for each in members if is_split and is_for_prefill(each.idle)]
    candidates, before = (lookup.fleet.candidates(lookup.seen, SIZE, members=some) for some in (decode, prefill))
    return stages(ranking.policy, None, parameters.profile, lookup.request, candidates, before, lookup.fleet, random)


def values_of(scored: Sequence[Scored]) -> list[float]:
    return [each.value for each in scored[:CANDIDATES_MAX]]


@pytest.mark.parametrize("seed", seeds(30))
@pytest.mark.parametrize("name", PRESETS)
async def test_the_short_list_has_the_choice_of_all(name: str, seed: int, store: Store) -> None:
    random = Random(f"{name} {seed}")
    fleet = fleet_of(random, random.choice((3, 9, 30, 120, 300)))
    preset = PRESETS[name]
    values = preset.values({"router_temperature": 0.0} if name == "dynamo" else {})
    session = random.choice([each.name[0] for each in fleet.members]) if random.random() < 0.2 else None
    has_tokens = random.random() < 0.6
    key = random.randbytes(32) if random.random() < 0.8 else None
    ranking = RankingRequest(
        GROUP, lambda size: HashedPrompt(1000, b""), PolicyChoice(preset, values), prefix_key=key, session=session
    )
    ring = None if has_tokens or key is None else fleet.ring(POINTS)
    request = RoutingRequest(SIZE * BLOCKS + 3, SIZE, 0, None, session, key, False, has_tokens, ring)
    seen = state_of(random, fleet, has_tokens=has_tokens)
    lookup = TargetLookup(GroupEntry(1, 1), request, fleet, seen, b"")
    selector = Selector(store, SelectionOptions(), Metrics(), random)
    left_out = frozenset(each.publisher for each in fleet.members if random.random() < random.choice((0.0, 0.2)))
    for _ in range(3):
        parameters = parameters_of(random, fleet)
        whole = plain(random, ranking, parameters, lookup, left_out)
        found = selector._ordered(ranking, parameters, lookup, left_out)
        assert (whole is None) == (found is None)
        if whole is None or found is None:
            continue
        if isinstance(found, SumOffers):
            found = RankedStages([found.scored(place) for place in range(len(found.offers()))])
        if name != "sticky" or session is None:  # the value of a target is its place among those that were looked at
            assert values_of(found.decode) == pytest.approx(values_of(whole.decode)[: len(found.decode)], rel=1e-12)
        assert len(found.decode) >= min(CANDIDATES_MAX, len(whole.decode))
        assert values_of(found.prefill) == pytest.approx(values_of(whole.prefill), rel=1e-12)
        assert (found.decision, found.home) == (whole.decision, whole.home)
        best = {each.candidate.publisher for each in whole.decode if each.value <= whole.decode[0].value * (1 + 1e-12)}
        assert found.decode[0].candidate.publisher in best
        if key is not None and (name == "sticky" or (ring is not None and session is None)):
            # The key decides between equal ones: the same one in every replica.
            assert found.decode[0].candidate == whole.decode[0].candidate
        if isinstance(seen.loads, GroupLoads) and fleet.members:
            seen.loads.put(random.choice(fleet.members).publisher, Load(random.choice((0, 5_000)), random.randrange(9)))


@pytest.mark.parametrize("name", ["least-work", "dynamo", "lmetric", "longest", "sticky"])
async def test_the_list_stays_short_however_many_targets_there_are(name: str, store: Store) -> None:
    random = Random(name)
    policy = PolicyChoice.of(PRESETS[name])
    ranking = RankingRequest(GROUP, lambda size: HashedPrompt(1000, b""), policy, prefix_key=random.randbytes(32))
    selector = Selector(store, SelectionOptions(), Metrics(), random)
    lengths = []
    for count in (300, 3000):
        fleet = fleet_of(random, count)
        loads = GroupLoads({each.publisher: Load(*random.choices(range(9000), k=3)) for each in fleet.members})
        request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=ranking.prefix_key)
        lookup = TargetLookup(GroupEntry(1, 1), request, fleet, PromptState({}, loads, {}, {}), b"")
        short = selector._shortlist(ranking, SelectParameters(), lookup, frozenset(), "whole")
        lengths.append(len(short.members))
    assert max(lengths) <= 5 * CANDIDATES_MAX
