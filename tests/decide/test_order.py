"""What Redis is offered: by sums alone it is the same as by candidates that a policy has ranked."""

from __future__ import annotations

from random import Random

import pytest

from tests.decide.test_fleet import fleet_of
from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.order import BY_PLACE, ScoredOffers, SumOffers
from waymark.decide.policies.policy import Inputs, RoutingRequest
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import PolicyChoice
from waymark.domain.match import TargetRow
from waymark.domain.targets import Target
from waymark.store.reservations import CANDIDATES_MAX, Load, Offer

SIZE, BLOCKS = 16, 40


def prompt(random: Random) -> RoutingRequest:
    return RoutingRequest(SIZE * BLOCKS + random.randrange(SIZE), SIZE)


def seen_of(random: Random, fleet: Fleet) -> PromptState:
    rows = {}
    for member in fleet.members:
        if random.random() < 0.4:
            row = [0, 0, 0, 0]
            row[random.randrange(4)] = random.choice((1, 13, BLOCKS))
            rows[member.name] = TargetRow(*row)
    is_each_different = random.random() < 0.5  # equal ones are ordered by chance, and not compared
    loads = {
        member.publisher: Load(random.choice((0, 500, 90_000)) + 7 * place, random.randint(0, 5), 100)
        for place, member in enumerate(fleet.members)
        if is_each_different or random.random() < 0.5
    }
    expected = {member.publisher: random.randint(1, BLOCKS) for member in fleet.members if random.random() < 0.2}
    return PromptState(rows, loads, expected if random.random() < 0.5 else {}, {})


def rounded(offer: Offer) -> tuple[float, ...]:
    return tuple(round(each, 6) for each in offer)


@pytest.mark.parametrize("seed", range(40))
def test_sums_offer_what_ranked_candidates_offer(seed: int) -> None:
    random = Random(seed)
    fleet, request = fleet_of(random, random.choice((1, 5, 30))), prompt(random)
    seen, members = seen_of(random, fleet), [each for each in fleet.members if each.is_whole]
    overrides = {"host_credit": random.choice((0, 0.75)), "active_weight": random.choice((0, 512))}
    policy = PolicyChoice(PRESETS["least-work"], PRESETS["least-work"].values(overrides))
    if not members:
        return
    assert policy.preset is not None
    assert policy.values is not None
    ranked = policy.preset.rank(Inputs(request, fleet.candidates(seen, SIZE, members=members), policy.values, random))
    scored = ScoredOffers(ranked.scored, policy, request, BLOCKS, is_cold=seen.is_cold)
    sums = SumOffers(members, seen, policy, request, BLOCKS, random)
    assert sums.linear == scored.linear
    assert sums.is_cold == scored.is_cold
    values = [each.value for each in ranked.scored]
    assert [sums.scored(at).value for at in range(len(members))] == pytest.approx(values)
    place = {sums.scored(at).candidate.publisher: at for at in range(len(members))}
    assert [sums.find(publisher) for publisher in place] == list(place.values())
    assert {each.candidate.publisher: each for each in ranked.scored} == {
        publisher: sums.scored(at) for publisher, at in place.items()
    }
    if len(set(values)) == len(values):  # else equal ones are in another order by chance
        assert list(map(rounded, sums.offers())) == list(map(rounded, scored.offers()))
        assert sums.matched_blocks() == scored.matched_blocks()
        for at, count in ((0, 0), (0, 3), (len(members) - 1, 2)):
            assert sums.others(at, count) == scored.others(at, count)
    assert len(sums.offers()) == min(len(members), CANDIDATES_MAX)


def test_the_answer_tells_the_load_of_before() -> None:
    random, request, policy = Random(1), prompt(Random(1)), PolicyChoice.of(PRESETS["least-work"])
    members, loads = fleet_of(Random(3), 30).members[:1], dict[int, Load]()
    sums = SumOffers(members, PromptState({}, loads, {}, {}), policy, request, BLOCKS, random)
    loads[members[0].publisher] = Load(500, 1, 500)
    told = sums.scored(0).candidate
    assert (told.wait, told.active, told.context) == (0, 0, 0)


def test_equal_targets_are_offered_in_an_order_by_chance() -> None:
    random, request = Random(1), prompt(Random(1))
    fleet = fleet_of(Random(3), 30)
    members = [each._replace(target=Target()) for each in fleet.members][:4]
    policy = PolicyChoice.of(PRESETS["least-work"])
    first = set()
    for _ in range(100):
        sums = SumOffers(members, PromptState({}, {}, {}, {}), policy, request, BLOCKS, random)
        first.add(sums.offers()[0].publisher)
    assert first == {each.publisher for each in members}


@pytest.mark.parametrize("policy", ["least-work", "longest", "lmetric"])
def test_what_is_computed_elsewhere_counts_in_the_cost_alone(policy: str) -> None:
    random = Random(5)
    fleet, request, chosen = fleet_of(random, 5), prompt(random), PolicyChoice.of(PRESETS[policy])
    assert chosen.preset is not None
    assert chosen.values is not None
    candidates = fleet.candidates(PromptState({}, {}, {}, {}), SIZE)
    ranked = chosen.preset.rank(Inputs(request, candidates, chosen.values, random)).scored
    here, elsewhere = (
        ScoredOffers(ranked, chosen, request, BLOCKS, is_cold=False, is_prefill_elsewhere=is_elsewhere)
        for is_elsewhere in (False, True)
    )

    def costs(of: ScoredOffers) -> list[float]:
        return [offer.handicap + of.linear.new * offer.new for offer in of.offers()]

    assert {offer.new for offer in here.offers()} == {request.tokens}
    assert {offer.new for offer in elsewhere.offers()} == {0}
    assert costs(elsewhere) == pytest.approx(costs(here))
    assert (here.linear is BY_PLACE) == (policy == "lmetric")


@pytest.mark.parametrize(
    ("row", "tokens", "reserved"),
    [
        (TargetRow(device=BLOCKS), SIZE * BLOCKS + 1, 0),
        (TargetRow(device=BLOCKS), SIZE * BLOCKS, 0),
        (TargetRow(device=BLOCKS - 1), SIZE * BLOCKS, SIZE),
        # A block of a pool has to be fetched first.
        (TargetRow(shared=BLOCKS), SIZE * BLOCKS, SIZE),
        # 13 blocks at 0.7 of their tokens: a part of a token is reserved as one.
        (TargetRow(host=13), SIZE * BLOCKS, SIZE * BLOCKS - 145),
    ],
)
def test_tokens_are_reserved_unless_the_target_has_every_block(row: TargetRow, tokens: int, reserved: int) -> None:
    preset, request = PRESETS["least-work"], RoutingRequest(tokens, SIZE)
    policy = PolicyChoice(preset, preset.values({"shared_cache_multiplier": 1.0, "host_credit": 0.7}))
    assert policy.values is not None
    fleet = fleet_of(Random(3), 5)
    members = fleet.members[:1]
    seen = PromptState({members[0].name: row}, {}, {}, {})
    candidates = fleet.candidates(seen, SIZE, members=members)
    ranked = preset.rank(Inputs(request, candidates, policy.values, Random(1))).scored
    sums = SumOffers(members, seen, policy, request, BLOCKS, Random(1))
    scored = ScoredOffers(ranked, policy, request, BLOCKS, is_cold=False)
    assert [offer.new for offer in (*sums.offers(), *scored.offers())] == [reserved, reserved]
