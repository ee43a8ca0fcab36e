"""The order of targets for a question, and what Redis is offered of it: by sums the same as by ranked candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from tests.decide.test_fleet import fleet_of
from waymark.decide.fleet import Fleet, OpaquePrefix, PromptState
from waymark.decide.matches import PromptMatches
from waymark.decide.order import BY_PLACE, ScoredOffers, StageOffers, SumOffers, order, order_all, rank
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import Inputs, RoutingRequest, Scored
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import Ring
from waymark.decide.question import GivenValues, HashedPrompt, PolicyChoice, ProfileName, Question, SelectParameters
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Gauges, Role, Target
from waymark.store.directory import GroupEntry
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


# ---- which targets take part ----------------------------------------------------------------------------

GROUP = GroupName("t", "m")
LEAST_WORK = PolicyChoice.of(PRESETS["least-work"])


def fleet_with(*targets: Target) -> Fleet:
    """Targets 1, 2 and so on, of the instances pod-1, pod-2."""
    rows = {number: PublisherRow(f"pod-{number}", 0, SIZE, "instance") for number in range(1, len(targets) + 1)}
    return Fleet(HolderTable(b"v", GROUP, rows, {}, b"", dict(enumerate(targets, 1))))


def asked(policy: PolicyChoice = LEAST_WORK, **more: Any) -> Question:
    return Question(GROUP, lambda size: HashedPrompt(0, b""), policy, **more)


def matches_of(request: RoutingRequest | None = None, **more: Any) -> PromptMatches:
    state: dict[str, Any] = {"rows": {}, "loads": {}, "expected": {}, "gauges": {}} | more
    return PromptMatches(request or RoutingRequest(SIZE * BLOCKS, SIZE), PromptState(**state), bytes(32 * BLOCKS))


def snapshot_of(fleet: Fleet, *left_out: int) -> GroupSnapshot:
    return GroupSnapshot(GroupEntry(1, 1), fleet, left_out=frozenset(left_out))


def publishers(scored: Sequence[Scored]) -> list[int]:
    return [each.candidate.publisher for each in scored]


SERVING = Target(aliases=("other",)), Target(adapters=("other",)), Target()


@pytest.mark.parametrize(
    ("fields", "left_out", "expected", "is_degraded"),
    [
        ({}, (), {1, 2, 3}, False),
        ({}, (2,), {1, 3}, False),
        ({}, (1, 2, 3), {1, 2, 3}, True),
        ({"served_as": "other"}, (), {1, 2}, False),
        ({"served_as": "other"}, (1,), {2}, False),
        # Nobody is left of those that serve the name, and another model is no substitute.
        ({"served_as": "other"}, (1, 2), {1, 2}, True),
        ({"served_as": "unknown"}, (), {1, 2, 3}, False),
        # A caller that names targets knows what they serve, and whether they are there.
        ({"given": {("pod-3", 0): GivenValues()}}, (), {3}, False),
        ({"given": {("pod-3", 0): GivenValues()}, "served_as": "other"}, (3,), {3}, False),
        ({"given": {("pod-9", 0): GivenValues()}}, (), set(), False),
    ],
)
def test_all_targets_that_serve_a_model_are_ranked(
    fields: dict[str, Any], left_out: tuple[int, ...], expected: set[int], is_degraded: bool
) -> None:
    found = order_all(snapshot_of(fleet_with(*SERVING), *left_out), matches_of(), asked(**fields), Random(1))
    assert set(publishers(found.scored)) == expected
    assert found.is_degraded is is_degraded


def test_nobody_is_ranked_of_a_group_without_targets() -> None:
    found = order_all(snapshot_of(fleet_with(), 7), matches_of(), asked(), Random(1))
    assert (found.scored, found.is_degraded) == ((), False)
    assert order(snapshot_of(fleet_with(), 7), matches_of(), asked(), Random(1)) is None


PLACED = Target("http://10.0.0.1:8000"), Target("http://10.0.0.2:8000", aliases=("other",)), Target()


@pytest.mark.parametrize(
    ("fields", "left_out", "expected"),
    [
        ({}, (), {1, 2, 3}),
        ({"only": frozenset({"pod-1", "10.0.0.2:8000"})}, (), {1, 2}),
        ({"only": frozenset({"pod-1", "pod-2"})}, (2,), {1}),
        ({"only": frozenset({"pod-1", "pod-2"}), "exclude": frozenset({"http://10.0.0.1:8000"})}, (), {2}),
        ({"only": frozenset()}, (), None),
        ({"only": frozenset({"pod-9"})}, (), None),
        ({"exclude": frozenset({"pod-3"})}, (), {1, 2}),
        ({"exclude": frozenset({"pod-3"})}, (1,), {2}),
        ({"exclude": frozenset({"pod-1", "pod-2", "pod-3"})}, (), None),
        ({"needs_address": True}, (), {1, 2}),
        ({"needs_address": True, "exclude": frozenset({"pod-1"})}, (), {2}),
        ({"needs_address": True, "only": frozenset({"pod-3"})}, (), None),
        ({}, (1, 3), {2}),
    ],
)
@pytest.mark.parametrize("name", ["least-work", "lmetric", "sticky", "composite"])
def test_a_decision_is_between_allowed_targets(
    name: str, fields: dict[str, Any], left_out: tuple[int, ...], expected: set[int] | None
) -> None:
    question = asked(PolicyChoice.of(PRESETS[name]), parameters=SelectParameters(**fields), prefix_key=bytes(32))
    request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=bytes(32))
    found = order(snapshot_of(fleet_with(*PLACED), *left_out), matches_of(request), question, Random(1))
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert {offer.publisher for offer in found.decode.offers()} == expected
    assert (found.is_degraded, found.choices.number) == (False, len(expected))
    names = [(f"pod-{number}", 0) for number in range(1, 5)]
    assert found.choices.among(names) == [(f"pod-{number}", 0) for number in sorted(expected)]


@pytest.mark.parametrize(
    ("fields", "left_out", "expected"),
    [
        ({}, (1, 2, 3), {1, 2, 3}),
        ({"only": frozenset({"pod-2"})}, (2,), {2}),
        ({"exclude": frozenset({"pod-1"})}, (2, 3), {2, 3}),
        ({"needs_address": True}, (1, 2), {1, 2}),
    ],
)
def test_targets_that_cannot_be_reached_are_better_than_none(
    fields: dict[str, Any], left_out: tuple[int, ...], expected: set[int]
) -> None:
    question = asked(parameters=SelectParameters(**fields))
    found = order(snapshot_of(fleet_with(*PLACED), *left_out), matches_of(), question, Random(1))
    assert found is not None
    assert found.is_degraded
    assert {offer.publisher for offer in found.decode.offers()} == expected


# ---- stages ---------------------------------------------------------------------------------------------

ROLES = (
    Target(role=Role.PREFILL),
    Target(role=Role.DECODE),
    Target(),
    Target(role=Role.PREFILL),
    Target(role=Role.ENCODE),
)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "composite"])
@pytest.mark.parametrize(
    ("profile", "decode", "prefill"),
    [(None, {2, 3}, set()), ("single", {2, 3}, set()), ("disagg", {2, 3}, {1, 4})],
)
def test_a_preset_has_the_targets_of_each_stage(
    name: str, profile: ProfileName | None, decode: set[int], prefill: set[int]
) -> None:
    request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=bytes(32), session="pod-3")
    question = asked(
        PolicyChoice.of(PRESETS[name]),
        parameters=SelectParameters(profile=profile),
        session="pod-3",
        prefix_key=bytes(32),
    )
    found = order(snapshot_of(fleet_with(*ROLES)), matches_of(request), question, Random(1))
    assert found is not None
    assert {offer.publisher for offer in found.decode.offers()} == decode
    assert found.decode.scored(0).candidate.publisher == 3, "the session's comes first"
    assert found.decision is Decision.SESSION
    assert found.decode.linear is BY_PLACE
    if not prefill:
        assert found.prefill is None
        assert {offer.new for offer in found.decode.offers()} == {request.tokens}
        return
    assert found.prefill is not None
    assert {offer.publisher for offer in found.prefill.offers()} == prefill
    assert {offer.new for offer in found.prefill.offers()} == {request.tokens}
    assert {offer.new for offer in found.decode.offers()} == {0}, "what is computed elsewhere is reserved there"


def test_without_a_target_of_prefill_the_other_one_computes_the_prompt() -> None:
    question = asked(parameters=SelectParameters(profile="disagg"))
    found = order(snapshot_of(fleet_with(Target(), Target(role=Role.DECODE))), matches_of(), question, Random(1))
    assert found is not None
    assert found.prefill is None
    assert {offer.new for offer in found.decode.offers()} == {SIZE * BLOCKS}


FILE = """
plugins: [{type: active-request-scorer}, {type: decode-filter}, {type: prefill-filter}, {type: encode-filter},
          {type: always-disagg-pd-decider}, {type: always-disagg-multimodal-decider}, {type: disagg-headers-handler},
          {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider,
           encode: always-disagg-multimodal-decider}}}]
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: active-request-scorer}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: active-request-scorer}]}
- {name: encode, plugins: [{pluginRef: encode-filter}]}
"""
BY_FILE = PolicyChoice.of(read_picker_config(FILE))
LOADS = {1: Load(0, 3), 2: Load(0, 2), 3: Load(0, 1)}


@pytest.mark.parametrize(
    ("profile", "is_multimodal", "decode", "prefill", "encode"),
    [
        (None, False, [3, 2], [4], []),
        ("disagg", False, [3, 2], [4], []),
        (None, True, [3, 2], [4], [5]),
        # A caller that wants one target gets the decode profile of the file, among those that can do it all.
        ("single", True, [3, 2], [], []),
    ],
)
def test_a_file_has_the_targets_of_each_stage(
    profile: ProfileName | None, is_multimodal: bool, decode: list[int], prefill: list[int], encode: list[int]
) -> None:
    request = RoutingRequest(SIZE * BLOCKS, SIZE, is_multimodal=is_multimodal)
    question = asked(BY_FILE, parameters=SelectParameters(profile=profile))
    found = order(snapshot_of(fleet_with(*ROLES)), matches_of(request, loads=LOADS), question, Random(1))
    assert found is not None
    assert [offer.publisher for offer in found.decode.offers()] == decode
    assert publishers(found.prefill.best(9) if found.prefill is not None else ()) == prefill
    assert publishers(found.encode) == encode
    assert (found.decision, found.home, found.active_bound) == (Decision.KV_AWARE, None, None)
    assert found.choices.number == len(decode)
    assert found.decode.linear is BY_PLACE


@pytest.mark.parametrize("profile", [None, "single", "disagg"])
def test_a_file_that_lets_nobody_through_has_no_target(profile: ProfileName | None) -> None:
    question = asked(BY_FILE, parameters=SelectParameters(profile=profile))
    for role in (Role.PREFILL, Role.ENCODE_PREFILL_DECODE):
        assert order(snapshot_of(fleet_with(Target(role=role))), matches_of(), question, Random(1)) is None


@pytest.mark.parametrize(("profile", "is_apart"), [(None, True), ("single", False)])
def test_a_caller_that_wants_one_target_gets_no_stages_of_a_file_either(
    profile: ProfileName | None, is_apart: bool
) -> None:
    anybody = PolicyChoice.of(read_picker_config(FILE.replace("{pluginRef: prefill-filter}, ", "")))
    question = asked(anybody, parameters=SelectParameters(profile=profile))
    found = order(snapshot_of(fleet_with(*ROLES)), matches_of(loads=LOADS), question, Random(1))
    assert found is not None
    assert (found.prefill is not None) is is_apart
    assert {offer.new for offer in found.decode.offers()} == {0 if is_apart else SIZE * BLOCKS}


@pytest.mark.parametrize(("profile", "decode"), [("disagg", {2, 3}), ("single", {2, 3, 6})])
def test_the_choices_of_a_split_request_are_those_that_can_do_it_all(profile: ProfileName, decode: set[int]) -> None:
    """What a decision has saved is compared with what any of them could have."""
    fleet = fleet_with(*ROLES, Target(role=Role.ENCODE_PREFILL_DECODE))
    question = asked(parameters=SelectParameters(profile=profile))
    found = order(snapshot_of(fleet), matches_of(), question, Random(1))
    assert found is not None
    assert {offer.publisher for offer in found.decode.offers()} == decode
    assert found.choices.number == 3
    assert found.choices.among([("pod-1", 0), ("pod-2", 0), ("pod-6", 0)]) == [("pod-2", 0), ("pod-6", 0)]


class Clockwise:
    """A ring on which every key meets the targets in one order."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        return iter([(name, 0) for name in self._names])


@pytest.mark.parametrize(
    ("ring", "has_tokens", "expected"),
    [
        (Clockwise("pod-2", "pod-3"), False, (Decision.PREFIX, 2)),
        # The file's filters leave it out.
        (Clockwise("pod-1", "pod-3"), False, (Decision.PREFIX, 3)),
        (Clockwise("gone"), False, (Decision.LOAD, None)),
        (None, False, (Decision.LOAD, None)),
        (Clockwise("pod-2"), True, (Decision.KV_AWARE, None)),
    ],
)
@pytest.mark.parametrize("profile", [None, "single"])
def test_a_file_without_tokens_says_whom_the_key_names(
    profile: ProfileName | None, ring: Clockwise | None, has_tokens: bool, expected: tuple[Decision, int | None]
) -> None:
    request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=bytes(32), has_tokens=has_tokens, ring=ring)
    question = asked(BY_FILE, parameters=SelectParameters(profile=profile))
    found = order(snapshot_of(fleet_with(*ROLES)), matches_of(request), question, Random(1))
    assert found is not None
    assert (found.decision, found.home) == expected


# ---- sessions and rings ---------------------------------------------------------------------------------


def ranks(count: int) -> Fleet:
    """Two ranks of each instance."""
    rows = {number: PublisherRow(f"pod-{number // 2}", number % 2, SIZE, "instance") for number in range(2, count + 2)}
    return Fleet(HolderTable(b"v", GROUP, rows, {}))


@pytest.mark.parametrize("name", PRESETS)
def test_all_ranks_of_a_session_come_first_in_the_order_of_the_policy(name: str) -> None:
    fleet, policy = ranks(6), PolicyChoice.of(PRESETS[name])
    loads = {6: Load(900, 9, 900), 7: Load(100, 1, 100)}
    request = RoutingRequest(SIZE * BLOCKS, SIZE, session="pod-3", prefix_key=bytes(32))
    some = fleet.candidates(PromptState({}, loads, {}, {}), SIZE)
    found = rank(policy, request, some, fleet, Random(1), most=1)
    without = rank(policy, request._replace(session=None), some, fleet, Random(1))
    assert found.decision is Decision.SESSION
    assert set(publishers(found.scored)) == {2, 3, 4, 5, 6, 7}
    order_of_policy = publishers(without.scored)
    assert publishers(found.scored)[:2] == sorted((6, 7), key=order_of_policy.index)
    gone = rank(policy, request._replace(session="pod-9"), some, fleet, Random(1))
    assert gone.decision is without.decision, "a session whose instance is gone starts anew"


class RingsAsked:
    """Rings of a fleet, and how many points they were asked for with."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.points: list[int] = []

    def ring(self, points: int) -> Ring:
        self.points.append(points)
        return self._fleet.ring(points)


@pytest.mark.parametrize(
    ("name", "overrides", "points"),
    [
        ("sticky", {}, [150]),
        ("sticky", {"virtual_nodes": 7}, [7]),
        ("composite", {}, [150]),
        ("composite", {"fallback": "lmetric"}, []),
        ("least-work", {}, []),
        ("longest", {}, []),
    ],
)
def test_a_ring_is_asked_for_by_those_that_need_it(name: str, overrides: dict[str, Any], points: list[int]) -> None:
    fleet, preset = ranks(4), PRESETS[name]
    rings, request = RingsAsked(fleet), RoutingRequest(64, SIZE, prefix_key=bytes(32))
    some = fleet.candidates(PromptState({}, {}, {}, {}), SIZE)
    rank(PolicyChoice(preset, preset.values(overrides)), request, some, rings, Random(1))
    assert rings.points == points
    assert rank(LEAST_WORK, request, [], rings, Random(1)).scored == ()


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("least-work", bytes(32), (Decision.PREFIX, True)),
        ("lmetric", bytes(32), (Decision.PREFIX, True)),
        ("least-work", None, (Decision.LOAD, False)),
        # It goes by the key anyway, and by the bound.
        ("sticky", bytes(32), (Decision.PREFIX_HASH, False)),
        ("sticky", None, (Decision.FALLBACK, False)),
    ],
)
def test_without_tokens_the_key_decides_by_the_policy(
    name: str, key: bytes | None, expected: tuple[Decision, bool]
) -> None:
    fleet = ranks(6)
    ring = None if key is None else fleet.ring(150)
    request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=key, has_tokens=False, ring=ring)
    question = asked(PolicyChoice.of(PRESETS[name]), prefix_key=key)
    found = order(snapshot_of(fleet), matches_of(request), question, Random(1))
    assert found is not None
    assert (found.decision, found.home is not None) == expected
    if ring is not None and key is not None:
        assert found.decode.scored(0).candidate.instance_id == next(ring.clockwise(key))[0]
    if found.home is not None:
        assert found.home == found.decode.scored(0).candidate.publisher


def test_a_policy_that_draws_lots_ranks_all_targets() -> None:
    preset, fleet = PRESETS["dynamo"], fleet_with(*[Target()] * 30)
    lengths = []
    for temperature in (0.0, 0.7):
        policy = PolicyChoice(preset, preset.values({"router_temperature": temperature}))
        found = order(snapshot_of(fleet), matches_of(), asked(policy), Random(1))
        assert found is not None
        lengths.append(len(found.decode.best(99)))
    assert lengths == [CANDIDATES_MAX, 30]


# ---- sums -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state", "fields", "is_sum"),
    [
        ("least-work", {}, {}, True),
        ("least-work", {"rows": {("pod-1", 0): TargetRow(device=2)}}, {}, True),
        ("least-work", {"expected": {1: 2}}, {}, True),
        ("least-work", {"prefixes": {("pod-1", 0): OpaquePrefix(hot=32)}}, {}, False),
        ("least-work", {"gauges": {1: Gauges()}}, {}, False),
        ("least-work", {}, {"session": "pod-1"}, False),
        ("least-work", {}, {"parameters": SelectParameters(profile="disagg")}, False),
        ("least-work", {}, {"parameters": SelectParameters(profile="single")}, True),
        ("longest", {}, {}, False),
        ("sticky", {}, {}, False),
    ],
)
def test_costs_are_sums_if_nothing_else_decides(
    name: str, state: dict[str, Any], fields: dict[str, Any], is_sum: bool
) -> None:
    question = asked(PolicyChoice.of(PRESETS[name]), **fields)
    for has_tokens in (True, False):
        request = RoutingRequest(SIZE * BLOCKS, SIZE, has_tokens=has_tokens)
        found = order(snapshot_of(fleet_with(Target(), Target())), matches_of(request, **state), question, Random(1))
        assert found is not None
        assert isinstance(found.decode, SumOffers) == (is_sum and has_tokens)
        assert found.decode.is_cold is not bool({*state} & {"rows", "expected", "prefixes"})


# ---- what Redis ranks again -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_handicap_is_the_cost_besides_load_and_new_tokens(name: str) -> None:
    fleet = fleet_with(Target(weight=2.0), Target(), Target(weight=0.5), Target())
    loads = {1: Load(400, 4, 900), 2: Load(50, 1, 90), 3: Load(10, 3, 10)}
    seen = PromptState({("pod-2", 0): TargetRow(device=3, host=2)}, loads, {3: 5}, {})
    policy, request = PolicyChoice.of(PRESETS[name]), RoutingRequest(SIZE * BLOCKS + 1, SIZE, prefix_key=bytes(32))
    scored = rank(policy, request, fleet.candidates(seen, SIZE), fleet, Random(1)).scored
    offers = ScoredOffers(scored, policy, request, BLOCKS, is_cold=False)
    assert (policy.linear or BY_PLACE) == offers.linear
    for offer, each in zip(offers.offers(), scored, strict=True):
        candidate = each.candidate
        assert offer.publisher == candidate.publisher
        if offers.linear is BY_PLACE:
            assert (offer.handicap, offer.weight) == (1.0, 1e300)
            continue
        assert offer.weight == candidate.weight
        work = (candidate.wait + offers.linear.active * candidate.active) / candidate.weight
        assert offer.handicap + work + offers.linear.new * offer.new == pytest.approx(each.value)


def test_an_order_by_place_is_asked_for_by_the_question() -> None:
    fleet, request = fleet_with(Target(), Target(weight=4.0)), RoutingRequest(SIZE, SIZE)
    scored = rank(LEAST_WORK, request, fleet.candidates(PromptState({}, {}, {}, {}), SIZE), fleet, Random(1)).scored
    offers = ScoredOffers(scored, LEAST_WORK, request, 1, is_cold=True, is_by_place=True)
    assert [(offer.handicap, offer.weight) for offer in offers.offers()] == [(1.0, 1e300)] * 2
    assert offers.is_cold


def both_kinds(count: int) -> Iterator[StageOffers]:
    """The offers of idle targets in the order of their matches, by sums and by candidates."""
    fleet, request = fleet_with(*[Target()] * count), RoutingRequest(SIZE * BLOCKS + 1, SIZE)
    rows = {(f"pod-{number}", 0): TargetRow(device=BLOCKS - number) for number in range(1, count + 1)}
    seen = PromptState(rows, {}, {}, {})
    yield SumOffers(fleet.members, seen, LEAST_WORK, request, BLOCKS, Random(1))
    scored = rank(LEAST_WORK, request, fleet.candidates(seen, SIZE), fleet, Random(1)).scored
    yield ScoredOffers(scored, LEAST_WORK, request, BLOCKS, is_cold=False)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 20])
def test_offers_are_the_first_few_and_the_others_can_be_found(count: int) -> None:
    for offers in both_kinds(count):
        numbers = list(range(1, count + 1))
        assert [offer.publisher for offer in offers.offers()] == numbers[:CANDIDATES_MAX]
        assert offers.matched_blocks() == [BLOCKS - number for number in numbers[:CANDIDATES_MAX]]
        assert publishers(offers.best(99)) == numbers
        assert publishers(offers.best(3)) == numbers[:3]
        assert publishers([offers.scored(at) for at in range(count)]) == numbers
        assert [offers.find(number) for number in (0, *numbers, count + 1)] == [None, *range(count), None]
        for at in (0, count - 1):
            others = [number for number in numbers if number != at + 1]
            for wanted in (0, 1, 4, 99):
                assert [each.publisher for each in offers.others(at, wanted)] == others[:wanted]


def test_an_order_names_as_many_targets_as_its_caller_looks_at() -> None:
    for name in PRESETS:
        question = asked(PolicyChoice.of(PRESETS[name]), prefix_key=bytes(32), parameters=SelectParameters(count=15))
        request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=bytes(32))
        found = order(snapshot_of(fleet_with(*[Target()] * 30)), matches_of(request), question, Random(1))
        assert found is not None
        assert len(found.decode.offers()) == CANDIDATES_MAX
        assert len(set(publishers(found.decode.best(15)))) == 15, name
