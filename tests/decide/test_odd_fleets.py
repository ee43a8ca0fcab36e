"""Decisions over odd fleets: empty, alone, out of reach, drained, mute, very large, or with numbers of any kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import examples
from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.matches import PromptMatches
from waymark.decide.order import Offers, order, order_all
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import RoutingRequest
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import POINTS
from waymark.decide.question import GivenValues, HashedPrompt, PolicyChoice, Question, SelectParameters
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Gauges, Role, Target
from waymark.store.directory import GroupEntry
from waymark.store.reservations import CANDIDATES_MAX, Load

GROUP = GroupName("t", "m")
SIZE, BLOCKS = 16, 20
KEY = b"k" * 32
_FILE = """
kind: EndpointPickerConfig
plugins:
- {name: gold, type: by-label, parameters: {label: tier, validValues: [gold]}}
- type: precise-prefix-cache-scorer
- type: queue-scorer
- type: active-request-scorer
schedulingProfiles:
- name: default
  plugins: [{pluginRef: gold}, {pluginRef: precise-prefix-cache-scorer}, {pluginRef: queue-scorer},
            {pluginRef: active-request-scorer}]
"""
GOLD = PolicyChoice.of(read_picker_config(_FILE))
_STAGES = """
kind: EndpointPickerConfig
plugins:
- type: disagg-headers-handler
- type: always-disagg-pd-decider
- type: prefill-filter
- type: decode-filter
- type: active-request-scorer
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: active-request-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: active-request-scorer}]}
"""
STAGED = PolicyChoice.of(read_picker_config(_STAGES))
EVERY = [*(PolicyChoice.of(preset) for preset in PRESETS.values()), GOLD]
EVERY_POLICY = pytest.mark.parametrize("policy", EVERY, ids=lambda policy: policy.name)
GOLDEN = {"tier": "gold"}


def fleet_of(targets: Sequence[Target], *, lost: Sequence[int] = ()) -> Fleet:
    rows = {
        number: PublisherRow(f"pod-{number}", 0, SIZE, "instance", is_lost=number in lost)
        for number in range(1, len(targets) + 1)
    }
    return Fleet(HolderTable(b"v", GROUP, rows, {}, b"", dict(enumerate(targets, 1))))


def decide(
    fleet: Fleet,
    policy: PolicyChoice,
    *,
    rows: Mapping[int, TargetRow] | None = None,
    loads: Mapping[int, Load] | None = None,
    gauges: Mapping[int, Gauges] | None = None,
    left_out: frozenset[int] = frozenset(),
    has_tokens: bool = True,
    key: bytes | None = KEY,
    seed: int = 1,
    **asked: Any,
) -> Offers | None:
    """The decision of a policy; rows, loads and gauges are by publisher."""
    snapshot, matches, question = facts(fleet, policy, rows, loads, gauges, left_out, has_tokens, key, asked)
    return order(snapshot, matches, question, Random(seed))


def facts(
    fleet: Fleet,
    policy: PolicyChoice,
    rows: Mapping[int, TargetRow] | None,
    loads: Mapping[int, Load] | None,
    gauges: Mapping[int, Gauges] | None,
    left_out: frozenset[int],
    has_tokens: bool,
    key: bytes | None,
    asked: Mapping[str, Any],
) -> tuple[GroupSnapshot, PromptMatches, Question]:
    named = {(f"pod-{publisher}", 0): row for publisher, row in (rows or {}).items()}
    seen = PromptState(named, loads or {}, {}, gauges or {})
    ring = None if has_tokens or key is None else fleet.ring(POINTS)
    request = RoutingRequest(SIZE * BLOCKS, SIZE, 0, None, asked.get("session"), key, has_tokens=has_tokens, ring=ring)
    terms = {name: value for name, value in asked.items() if name in SelectParameters.__dataclass_fields__}
    others = {name: value for name, value in asked.items() if name not in terms}
    question = Question(
        GROUP,
        lambda size: HashedPrompt(SIZE * BLOCKS, b""),
        policy,
        prefix_key=key,
        parameters=SelectParameters(**terms),
        **others,
    )
    snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, loads or {}, gauges or {}, left_out=left_out)
    keys = pack(range(1, BLOCKS + 1)) if has_tokens else b""
    return snapshot, PromptMatches(request, seen, keys), question


def chosen(offers: Offers | None) -> int | None:
    return None if offers is None else offers.decode.scored(0).candidate.publisher


def offered(offers: Offers | None) -> list[int]:
    return [] if offers is None else [offer.publisher for offer in offers.decode.offers()]


# ---- nobody, or nobody in reach ------------------------------------------------------------------------


@EVERY_POLICY
@pytest.mark.parametrize("has_tokens", [True, False])
def test_an_empty_fleet_has_no_target(policy: PolicyChoice, has_tokens: bool) -> None:
    assert decide(fleet_of([]), policy, has_tokens=has_tokens) is None


@EVERY_POLICY
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("key", [KEY, None])
def test_the_only_target_is_taken_whatever_it_has(policy: PolicyChoice, has_tokens: bool, key: bytes | None) -> None:
    fleet = fleet_of([Target(labels=GOLDEN)])
    for load in (Load(), Load(tokens=10**14, requests=10**9, context=10**14, ok=0, failed=10**6)):
        found = decide(fleet, policy, loads={1: load}, has_tokens=has_tokens, key=key)
        assert (chosen(found), offered(found)) == (1, [1])
        assert found is not None
        assert not found.is_degraded
        assert found.decode.others(0, 3) == []


@EVERY_POLICY
def test_lost_and_drained_targets_get_nothing(policy: PolicyChoice) -> None:
    drained = Target(weight=0.0, labels=GOLDEN)
    assert decide(fleet_of([drained, Target(labels=GOLDEN), drained], lost=[2]), policy) is None
    fleet = fleet_of([drained, Target(labels=GOLDEN), Target(labels=GOLDEN)], lost=[2])
    found = decide(fleet, policy, rows={1: TargetRow(device=BLOCKS), 2: TargetRow(device=BLOCKS)})
    assert offered(found) == [3], "what they have does not bring them back"


@EVERY_POLICY
@pytest.mark.parametrize("has_tokens", [True, False])
def test_of_targets_that_cannot_be_reached_the_best_is_named_all_the_same(
    policy: PolicyChoice, has_tokens: bool
) -> None:
    fleet = fleet_of([Target(labels=GOLDEN)] * 3)
    everyone = frozenset({1, 2, 3})
    found = decide(fleet, policy, left_out=everyone, has_tokens=has_tokens)
    assert found is not None
    assert found.is_degraded
    assert sorted(offered(found)) == [1, 2, 3]
    alive = decide(fleet, policy, left_out=frozenset({1, 3}), has_tokens=has_tokens)
    assert alive is not None
    assert (offered(alive), alive.is_degraded) == ([2], False)


@EVERY_POLICY
def test_who_cannot_be_reached_comes_back_only_for_a_request_that_has_nobody_else(policy: PolicyChoice) -> None:
    fleet = fleet_of([Target("http://10.0.0.1:8000", labels=GOLDEN), Target(labels=GOLDEN)])
    # The other one has no address, and this request needs one.
    found = decide(fleet, policy, left_out=frozenset({1}), needs_address=True)
    assert found is not None
    assert (chosen(found), found.is_degraded) == (1, True)
    assert decide(fleet, policy, left_out=frozenset({1}), needs_address=True, exclude=frozenset({"pod-1"})) is None


@EVERY_POLICY
@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ({"only": frozenset()}, []),
        ({"only": frozenset({"nobody"})}, []),
        ({"only": frozenset({"pod-2"})}, [2]),
        ({"only": frozenset({"pod-2", "nobody"})}, [2]),
        ({"exclude": frozenset({"pod-1", "pod-3"})}, [2]),
        ({"exclude": frozenset({"pod-1", "pod-2", "pod-3"})}, []),
        ({"only": frozenset({"pod-1", "pod-2"}), "exclude": frozenset({"pod-1"})}, [2]),
        ({"only": frozenset({"pod-1"}), "exclude": frozenset({"pod-1"})}, []),
    ],
)
def test_only_who_is_allowed_is_offered(policy: PolicyChoice, terms: dict[str, Any], expected: list[int]) -> None:
    fleet = fleet_of([Target(labels=GOLDEN)] * 3)
    for has_tokens in (True, False):
        assert offered(decide(fleet, policy, has_tokens=has_tokens, **terms)) == expected


# ---- labels and roles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [([{}, {}], []), ([{"tier": "iron"}, {"tier": "Gold"}], []), ([{"tier": "iron"}, GOLDEN], [2])],
)
def test_labels_that_nobody_has_leave_nobody(
    labels: list[dict[str, str]], expected: list[int], has_tokens: bool
) -> None:
    fleet = fleet_of([Target(labels=each) for each in labels])
    rows = {1: TargetRow(device=BLOCKS)} if has_tokens else {}
    assert offered(decide(fleet, GOLD, rows=rows, has_tokens=has_tokens)) == expected


def roles(*names: Role) -> Fleet:
    return fleet_of([Target(role=name) for name in names])


DECODE, PREFILL, BOTH, ENCODE = Role.DECODE, Role.PREFILL, Role.BOTH, Role.ENCODE


@pytest.mark.parametrize(
    ("fleet", "profile", "expected"),
    [
        (roles(DECODE, PREFILL), "disagg", ([1], [2])),
        # Nobody is for prefill alone, so decode computes the prompt, too.
        (roles(DECODE, BOTH), "disagg", ([1, 2], None)),
        (roles(BOTH, PREFILL), "disagg", ([1], [2])),
        # Nobody is for decode.
        (roles(PREFILL, PREFILL), "disagg", ([], None)),
        (roles(ENCODE), "disagg", ([], None)),
        (roles(DECODE, PREFILL, BOTH, ENCODE), None, ([1, 3], None)),
        (roles(PREFILL, ENCODE), None, ([], None)),
        (roles(DECODE, PREFILL), "single", ([1], None)),
    ],
)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_missing_role_is_that_of_nobody(
    fleet: Fleet, profile: str | None, expected: tuple[list[int], list[int] | None], has_tokens: bool
) -> None:
    for policy in EVERY[:-1]:
        found = decide(fleet, policy, profile=profile, has_tokens=has_tokens)
        prefill = None if found is None or found.prefill is None else found.prefill.offers()
        before = None if prefill is None else sorted(offer.publisher for offer in prefill)
        assert (sorted(offered(found)), before) == expected, policy.name


def test_the_stage_before_costs_where_it_is_and_decode_nothing() -> None:
    found = decide(roles(DECODE, PREFILL), PolicyChoice.of(PRESETS["least-work"]), profile="disagg")
    assert found is not None
    assert found.prefill is not None
    assert [offer.new for offer in found.decode.offers()] == [0]
    assert [offer.new for offer in found.prefill.offers()] == [SIZE * BLOCKS]


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        (roles(DECODE, PREFILL), ([1], [2])),
        (roles(DECODE, DECODE), ([1, 2], None)),
        (roles(PREFILL, PREFILL), ([], None)),
    ],
)
def test_a_file_with_stages_does_without_a_role_that_is_missing(
    fleet: Fleet, expected: tuple[list[int], list[int] | None]
) -> None:
    found = decide(fleet, STAGED)
    before = None if found is None or found.prefill is None else [each.publisher for each in found.prefill.offers()]
    assert (sorted(offered(found)), before) == expected


@pytest.mark.parametrize(
    ("served_as", "expected"), [("x", [2]), ("y", [1, 2]), (None, [1, 2])], ids=["declared", "by nobody", "its own"]
)
def test_a_further_name_is_served_by_who_declares_it(served_as: str | None, expected: list[int]) -> None:
    fleet = fleet_of([Target(), Target(aliases=("x",))])
    for policy in EVERY[:-1]:
        assert sorted(offered(decide(fleet, policy, served_as=served_as))) == expected


# ---- numbers of any kind -------------------------------------------------------------------------------

#: What engines have said of themselves, and what no engine should.
ODD_NUMBERS = (0, -1, -(10**12), 10**18)
ODD_SHARES = (0.0, 1.0, -1.0, 5.0, math.nan, math.inf, -math.inf)


@EVERY_POLICY
@settings(max_examples=examples(20))
@given(data=st.data())
def test_any_gauges_and_loads_leave_each_target_offered_once(policy: PolicyChoice, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    fleet = fleet_of([Target(labels=GOLDEN)] * count)
    number = st.sampled_from(ODD_NUMBERS)
    gauge = st.builds(Gauges, number, number, st.sampled_from(ODD_SHARES), adapters_max=number)
    load = st.builds(Load, *[st.sampled_from((0, 1, 10**15))] * len(Load._fields))
    gauges = data.draw(st.dictionaries(st.integers(1, count), gauge))
    loads = data.draw(st.dictionaries(st.integers(1, count), load))
    found = decide(fleet, policy, gauges=gauges, loads=loads, has_tokens=data.draw(st.booleans()))
    assert sorted(offered(found)) == list(range(1, count + 1))


@pytest.mark.parametrize("policy", [PolicyChoice.of(PRESETS["least-work"]), PolicyChoice.of(PRESETS["longest"])])
def test_the_idle_one_is_taken_beside_huge_queues(policy: PolicyChoice) -> None:
    huge = Load(tokens=10**15 - 1, requests=10**6, context=10**15 - 1)
    fleet = fleet_of([Target()] * 20)
    loads = dict.fromkeys(range(1, 21), huge) | {7: Load()}
    for rows in ({}, {3: TargetRow(device=BLOCKS)}):
        assert chosen(decide(fleet, policy, loads=loads, rows=rows)) == 7


@pytest.mark.parametrize("weights", [(1.0, 1e6), (1e-6, 1.0)])
def test_a_far_greater_target_takes_far_more(weights: tuple[float, float]) -> None:
    fleet = fleet_of([Target(weight=each) for each in weights])
    loads = {1: Load(tokens=1000, requests=4), 2: Load(tokens=50_000, requests=100)}
    assert chosen(decide(fleet, PolicyChoice.of(PRESETS["least-work"]), loads=loads)) == 2


# ---- many targets --------------------------------------------------------------------------------------

MANY = 5_000
#: Each policy whose cost is by load looks at a few of them.
SHORT = [name for name, preset in PRESETS.items() if preset.by_load is not None]


@pytest.fixture(scope="module")
def many() -> Fleet:
    return fleet_of([Target(labels=GOLDEN)] * MANY)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_of_5000_targets_the_best_few_are_offered(many: Fleet, name: str, has_tokens: bool) -> None:
    policy = PolicyChoice.of(PRESETS[name])
    loads = {publisher: Load(5_000 + publisher, 2, 9_000) for publisher in range(1, MANY + 1)} | {4_321: Load()}
    rows = {17: TargetRow(device=BLOCKS)} if has_tokens else {}
    found = decide(many, policy, rows=rows, loads=loads, has_tokens=has_tokens, key=None)
    places = offered(found)
    assert len(places) == len(set(places)) == CANDIDATES_MAX
    # The one that has the prompt, and the idle one.
    assert set(places) >= ({17, 4_321} if has_tokens else {4_321})


@pytest.mark.parametrize("name", SHORT)
def test_most_of_5000_targets_cannot_be_reached(many: Fleet, name: str) -> None:
    policy = PolicyChoice.of(PRESETS[name])
    alive = {5, 2_500, 4_999}
    found = decide(many, policy, left_out=frozenset(range(1, MANY + 1)) - alive, key=None)
    assert found is not None
    assert (set(offered(found)), found.is_degraded) == (alive, False)
    assert set(offered(decide(many, policy, only=frozenset(f"pod-{each}" for each in alive), key=None))) == alive


def test_the_ring_has_an_idle_target_among_many_busy_ones() -> None:
    fleet = fleet_of([Target()] * 300)
    loads = dict.fromkeys(range(1, 301), Load(requests=50)) | {123: Load()}
    found = decide(fleet, PolicyChoice.of(PRESETS["sticky"]), loads=loads)
    assert found is not None
    # All are below the bound, so the key alone decides.
    assert found.decision is Decision.PREFIX_HASH
    home = chosen(found)
    assert home is not None
    loads[home] = Load(requests=5_000)
    moved = decide(fleet, PolicyChoice.of(PRESETS["sticky"]), loads=loads)
    assert moved is not None
    assert (chosen(moved) != home, moved.decision) == (True, Decision.OVERFLOW)


# ---- all in their order --------------------------------------------------------------------------------


def ranked(fleet: Fleet, policy: PolicyChoice, **asked: Any) -> tuple[list[int], bool]:
    given_facts: dict[str, Any] = {
        name: asked.pop(name, default)
        for name, default in (
            ("rows", None),
            ("loads", None),
            ("gauges", None),
            ("left_out", frozenset()),
            ("has_tokens", True),
            ("key", KEY),
        )
    }
    snapshot, matches, question = facts(fleet, policy, **given_facts, asked=asked)
    found = order_all(snapshot, matches, question, Random(1))
    return [each.candidate.publisher for each in found.scored], found.is_degraded


@EVERY_POLICY
def test_scores_name_who_can_be_reached_and_else_all(policy: PolicyChoice) -> None:
    fleet = fleet_of([Target(labels=GOLDEN)] * 3)
    assert sorted(ranked(fleet, policy)[0]) == [1, 2, 3]
    assert ranked(fleet, policy, left_out=frozenset({1, 2})) == ([3], False)
    everyone, is_degraded = ranked(fleet, policy, left_out=frozenset({1, 2, 3}))
    assert (sorted(everyone), is_degraded) == ([1, 2, 3], True)
    assert ranked(fleet_of([]), policy) == ([], False)


@EVERY_POLICY
def test_scores_of_named_targets_are_given_though_nobody_reaches_them(policy: PolicyChoice) -> None:
    fleet = fleet_of([Target(labels=GOLDEN)] * 3)
    named = {("pod-3", 0): GivenValues(), ("pod-1", 0): GivenValues(), ("nobody", 0): GivenValues()}
    found, is_degraded = ranked(fleet, policy, given=named, left_out=frozenset({1}))
    assert (sorted(found), is_degraded) == ([1, 3], False)


GIVEN_CASES: list[tuple[GivenValues, GivenValues, str]] = [
    (GivenValues(tokens=0, requests=0), GivenValues(tokens=9_000, requests=9), "least-work"),
    (GivenValues(health=1.0), GivenValues(health=0.0), "composite"),
    (GivenValues(gauges=Gauges(0, 0, 0.0)), GivenValues(gauges=Gauges(90, 9, 1.0)), "llm-d"),
]


@pytest.mark.parametrize(("better", "worse", "name"), GIVEN_CASES)
def test_given_values_win_over_what_is_stored(better: GivenValues, worse: GivenValues, name: str) -> None:
    fleet, policy = fleet_of([Target()] * 2), PolicyChoice.of(PRESETS[name])
    # What is stored says the contrary.
    loads = {1: Load(9_000, 9, 0, 0, 9), 2: Load(0, 0, 0, 9, 0)}
    gauges = {1: Gauges(90, 9, 1.0), 2: Gauges(0, 0, 0.0)}
    rows = dict.fromkeys((1, 2), TargetRow(device=BLOCKS))
    if better.tokens is None:  # so that the value in question decides
        loads = {publisher: load._replace(tokens=0, requests=0) for publisher, load in loads.items()}
    for first, second, expected in ((better, worse, [1, 2]), (worse, better, [2, 1])):
        named = {("pod-1", 0): first, ("pod-2", 0): second}
        assert ranked(fleet, policy, given=named, loads=loads, gauges=gauges, rows=rows)[0] == expected


@EVERY_POLICY
def test_a_session_whose_instance_is_gone_starts_anew(policy: PolicyChoice) -> None:
    fleet = fleet_of([Target(labels=GOLDEN)] * 3)
    assert sorted(offered(decide(fleet, policy, session="pod-9"))) == [1, 2, 3]
    stays = decide(fleet, policy, session="pod-2", loads={2: Load(90_000, 5)})
    assert stays is not None
    if policy.preset is not None:
        assert (chosen(stays), stays.decision) == (2, Decision.SESSION)
        away = decide(fleet, policy, session="pod-2", left_out=frozenset({2}))
        assert away is not None
        assert (sorted(offered(away)), away.is_degraded) == ([1, 3], False)


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from((0.0, 0.5, 1.0, 2.0)), max_size=12),
    st.sets(st.integers(1, 12)),
    st.sets(st.integers(1, 12)),
    st.sampled_from(range(len(EVERY))),
)
def test_exactly_who_is_left_is_offered(
    weights: list[float], left_out: set[int], excluded: set[int], which: int
) -> None:
    fleet = fleet_of([Target(weight=weight, labels=GOLDEN) for weight in weights])
    there = {number for number, weight in enumerate(weights, 1) if weight > 0} - excluded
    found = decide(
        fleet,
        EVERY[which],
        left_out=frozenset(left_out),
        exclude=frozenset(f"pod-{number}" for number in excluded),
        count=len(weights) + 1,
    )
    expected = there - left_out or there
    if not expected:
        assert found is None
        return
    assert found is not None
    assert found.is_degraded == (not there - left_out)
    places = offered(found)
    assert set(places) <= expected
    assert len(places) == min(CANDIDATES_MAX, len(expected))
