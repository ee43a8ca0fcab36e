"""What a shadow prefers is what its policy would choose of all targets, or the chosen target if that is as good."""

from __future__ import annotations

from random import Random

import pytest

from tests.decide.test_fleet import fleet_of
from tests.decide.test_shortlist import BLOCKS, GROUP, SIZE, parameters_of, plain, state_of
from tests.unit import seeds
from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.group_loads import GroupLoads
from waymark.decide.matches import PromptMatches
from waymark.decide.order import order
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import RoutingRequest
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import POINTS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question
from waymark.decide.shadows import Preferences
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.match import TargetRow
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.store.directory import GroupEntry
from waymark.store.reservations import Load

_SAME = 1 + 1e-12


@pytest.mark.parametrize("seed", seeds(30))
@pytest.mark.parametrize("name", PRESETS)
def test_a_policy_prefers_what_it_would_choose_of_all_targets(name: str, seed: int) -> None:
    random = Random(f"preferred {name} {seed}")
    fleet = fleet_of(random, random.choice((3, 9, 30, 120, 300)))
    policy = PolicyChoice.of(PRESETS[name])
    has_tokens = random.random() < 0.8
    key = random.randbytes(32) if random.random() < 0.8 else None
    names = [each.name[0] for each in fleet.members] or ["nobody"]
    session = random.choice(names) if random.random() < 0.1 else None
    ring = None if has_tokens or key is None else fleet.ring(POINTS)
    request = RoutingRequest(SIZE * BLOCKS + 3, SIZE, 0, None, session, key, False, has_tokens, ring)
    seen = state_of(random, fleet, has_tokens=has_tokens)
    matches = PromptMatches(request, seen, b"")
    left_out = frozenset(each.publisher for each in fleet.members if random.random() < random.choice((0.0, 0.2)))
    snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, seen.loads, left_out=left_out)
    least_work = PolicyChoice.of(PRESETS["least-work"])
    for _ in range(3):
        question = Question(
            GROUP,
            lambda size: HashedPrompt(1000, b""),
            least_work,
            prefix_key=key,
            session=session,
            parameters=parameters_of(random, fleet),
        )
        offers = order(snapshot, matches, question, random)
        if offers is None or offers.is_degraded:
            continue
        chosen = offers.decode.scored(0).candidate.publisher
        preferences = Preferences(snapshot, matches, question, chosen, random)
        found = [preferences.of(policy, seen) for _ in range(2)]  # the second time from what the first one has made
        whole = plain(random, snapshot, matches, question._replace(policy=policy))
        assert whole is not None
        values = {each.candidate.publisher: each.value for each in whole.decode}
        best = whole.decode[0].value
        for candidate in found:
            assert candidate is not None
            by_place = (name == "sticky" and key is not None) or whole.decision is Decision.SESSION
            if by_place:  # the value of a target is its place, and the first one is the key's or the session's
                assert candidate.publisher in (whole.decode[0].candidate.publisher, chosen)
            else:
                assert values[candidate.publisher] == pytest.approx(best, rel=1e-12)
                assert candidate.publisher == chosen or values[chosen] != pytest.approx(best, rel=1e-13)
            assert candidate == next(each.candidate for each in whole.decode if each.candidate == candidate)
        if isinstance(seen.loads, GroupLoads) and fleet.members:
            seen.loads.put(random.choice(fleet.members).publisher, Load(random.choice((0, 5_000)), random.randrange(9)))


def equal_targets(count: int) -> Fleet:
    rows = {number: PublisherRow(f"pod-{number}", 0, SIZE, "instance") for number in range(1, count + 1)}
    return Fleet(HolderTable(b"v", GROUP, rows, {}))


@pytest.mark.parametrize("name", ["dynamo", "lmetric", "longest", "least-work"])
def test_a_target_that_is_left_out_or_not_allowed_is_never_preferred(name: str) -> None:
    """The idle ones are left out, and the least busy of the others has to be found behind them."""
    fleet, random = equal_targets(60), Random(name)
    loads = GroupLoads({n: Load(100 * n, n, 100 * n) for n in range(21, 61)})
    matches = PromptMatches(
        RoutingRequest(SIZE * BLOCKS, SIZE), PromptState({("pod-3", 0): TargetRow(9, 0, 0, 0)}, loads, {}, {}), b""
    )
    question = Question(GROUP, lambda size: HashedPrompt(0, b""), PolicyChoice.of(PRESETS["least-work"]))
    snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, loads, left_out=frozenset(range(1, 21)))
    found = Preferences(snapshot, matches, question, 60, random).of(PolicyChoice.of(PRESETS[name]), matches.seen)
    assert found is not None
    assert found.publisher == 21
    nobody = snapshot._replace(left_out=frozenset(range(1, 61)))
    found = Preferences(nobody, matches, question, 60, random).of(PolicyChoice.of(PRESETS[name]), matches.seen)
    assert found is not None, "as in a decision, the best of those that cannot be reached"


def test_a_file_is_asked_with_the_readings_that_only_it_needs() -> None:
    file = read_picker_config(
        "plugins: [{type: active-request-scorer}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: active-request-scorer}]}]\n"
    )
    fleet, random = equal_targets(20), Random(3)
    loads = {n: Load(0, n % 7 + (n == 7), 0) for n in range(1, 21)}
    matches = PromptMatches(RoutingRequest(SIZE * BLOCKS, SIZE), PromptState({}, loads, {}, {}), b"")
    question = Question(GROUP, lambda size: HashedPrompt(0, b""), PolicyChoice.of(PRESETS["least-work"]))
    preferences = Preferences(GroupSnapshot(GroupEntry(1, 1), fleet, loads), matches, question, 14, random)
    found = preferences.of(PolicyChoice.of(file), matches.seen)
    assert found is not None
    assert found.publisher == 14, "the only idle one"


@pytest.mark.parametrize("name", ["dynamo", "lmetric", "longest", "least-work"])
def test_the_cheapest_target_is_found_in_two_orders_as_in_one(name: str) -> None:
    fleet, random, policy = equal_targets(40), Random(name), PRESETS[name]
    request = RoutingRequest(16, SIZE)
    for _ in range(200):
        scale = random.choice((3, 300, 30_000))
        loads = {n: Load(random.randrange(scale), random.randrange(30), random.randrange(scale)) for n in range(1, 41)}
        matches = PromptMatches(request, PromptState({}, GroupLoads(loads), {}, {}), b"")
        question = Question(GROUP, lambda size: HashedPrompt(0, b""), PolicyChoice.of(policy))
        snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, left_out=frozenset(random.sample(range(1, 41), 9)))
        whole = plain(random, snapshot, matches, question)
        assert whole is not None
        found = Preferences(snapshot, matches, question, 0, random).of(PolicyChoice.of(policy), matches.seen)
        assert found in [each.candidate for each in whole.decode if each.value <= whole.decode[0].value * _SAME]
