"""Decisions by the columns that a set of targets keeps are those by a candidate of each target, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

from tests.decide.test_fleet import fleet_of
from tests.decide.test_shortlist import BLOCKS, GROUP, SIZE, parameters_of, scored_of
from tests.unit import seeds
from waymark.base import native
from waymark.decide import fleet_columns as module
from waymark.decide.fleet import Allowed, Fleet, FleetMember, OpaquePrefix, PromptState
from waymark.decide.fleet_columns import FleetColumns
from waymark.decide.group_loads import GroupLoads
from waymark.decide.matches import PromptMatches
from waymark.decide.order import Offers, order
from waymark.decide.policies import filters
from waymark.decide.policies.columns import CandidateColumns, columns_of
from waymark.decide.policies.policy import Candidate, Filter, Preset, RoutingRequest, read_constants
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.profile import PICKERS, PickerConfig, Profile, WeightedScorer, max_score
from waymark.decide.policies.ring import POINTS, Ring
from waymark.decide.policies.scorers import SCORERS, Scores
from waymark.decide.question import GivenValues, HashedPrompt, PolicyChoice, Question
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.match import TargetRow
from waymark.domain.status import Decision
from waymark.domain.targets import Gauges, Role
from waymark.store.directory import GroupEntry
from waymark.store.reservations import Load

pytestmark = pytest.mark.usefixtures("implementation_kept")


def is_small(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    return [each for each in candidates if each.weight < 2.0]


def weighted(name: str, weight: float) -> WeightedScorer:
    row = SCORERS[name]
    values = read_constants(row.parameters, {}, "parameters")

    def score(request: RoutingRequest, candidates: Sequence[Candidate]) -> Scores:
        return row.score(request, candidates, values)

    return WeightedScorer(name, weight, score, row.needs_gauges, False, row.is_prefix)


def file_of(random: Random) -> PickerConfig:
    scorers = []
    for name in random.sample(sorted(SCORERS), random.randint(1, 6)):
        scorers.append(weighted(name, random.choice((0.5, 1.0, 3.0))))
    choices: list[tuple[Filter, ...]] = [(), (is_small,), (filters.decode_filter, is_small)]
    picker = random.choice([max_score, *PICKERS.values()])
    profiles = {"decode": Profile("decode", random.choice(choices), tuple(scorers), picker)}
    if random.random() < 0.5:
        return PickerConfig(profiles, "decode")
    profiles["prefill"] = Profile("prefill", (is_small,), tuple(scorers[:1]))
    return PickerConfig(profiles, "decode", "prefill", prefill_decider=lambda request, candidate: True)


def choice_of(name: str, random: Random) -> PolicyChoice:
    if name == "file":
        return PolicyChoice.of(file_of(random))
    preset: Preset = PRESETS[name]
    overrides: dict[str, Any] = {"composite": {"min_overlap_threshold": 0.0}, "dynamo": {"router_temperature": 0.5}}
    return PolicyChoice(preset, preset.values(overrides.get(name, {})))


def state_of(random: Random, fleet: Fleet, loads: GroupLoads, *, has_tokens: bool, has_history: bool) -> PromptState:
    holders = random.choice((0.0, 0.05, 0.9)) if has_tokens else 0.0
    some = [each for each in fleet.members if random.random() < holders]
    gauges = {
        each.publisher: Gauges(random.randrange(9), random.randrange(9), random.random())
        for each in fleet.members
        if random.random() < 0.9
    }
    return PromptState(
        {each.name: TargetRow(*(random.randint(0, BLOCKS // 4) for _ in range(4))) for each in some},
        loads,
        {each.publisher: random.randint(1, BLOCKS) for each in some[::3]},
        gauges,
        {each.name: OpaquePrefix(random.randint(0, 900), 500) for each in some[1::4]} if random.random() < 0.3 else {},
        {},
        {each.publisher: random.randint(0, BLOCKS) for each in fleet.members[::2]} if has_history else None,
    )


def random_load(random: Random) -> Load:
    return Load(random.randrange(9000), random.randrange(5), random.randrange(9000), 3, random.randrange(3), 0, 7)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("name", ["composite", "llm-d", "dynamo", "file"])
def test_columns_have_the_order_of_candidates(
    name: str, seed: int, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.select(is_native)
    random = Random(f"{name} {seed}")
    fleet, policy = fleet_of(random, random.choice((50, 120))), choice_of(name, random)
    has_tokens, key = random.random() < 0.7, random.randbytes(32)
    ring = None if has_tokens else fleet.ring(POINTS)
    request = RoutingRequest(SIZE * BLOCKS + 3, SIZE, 0, None, "pod-3", key, False, has_tokens, ring)
    loads = GroupLoads({each.publisher: random_load(random) for each in fleet.members[::2]})
    seen = state_of(random, fleet, loads, has_tokens=has_tokens, has_history=name == "file")
    left_out = frozenset(each.publisher for each in fleet.members[:: random.choice((7, 1000))])
    snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, loads, left_out=left_out)
    for draw in range(3):
        parameters = parameters_of(random, fleet)
        question = Question(GROUP, lambda size: HashedPrompt(1000, b""), policy, prefix_key=key, parameters=parameters)
        found = []
        for many in (1, 10**6):  # a column of each number, and a candidate of each target
            monkeypatch.setattr(module, "_MANY", many)
            found.append(order(snapshot, PromptMatches(request, seen, b""), question, Random(draw)))
        by_columns, plain = found
        assert (by_columns is None) == (plain is None)
        if by_columns is None or plain is None:
            continue
        for one, other in ((by_columns.decode, plain.decode), (by_columns.prefill, plain.prefill)):
            assert scored_of(one) == scored_of(other)
            assert one is None or other is None or one.best(1000) == other.best(1000)
            assert one is None or other is None or one.offers() == other.offers()
        assert (by_columns.decision, by_columns.home) == (plain.decision, plain.home)
        names = sorted(fleet.names)
        assert by_columns.choices.among(names) == plain.choices.among(names)
        assert by_columns.choices.number == plain.choices.number
        for member in random.sample(fleet.members, random.choice((1, 3, len(fleet.members)))):
            loads.put(member.publisher, random_load(random))


@pytest.mark.parametrize("seed", seeds(6))
def test_a_column_is_the_number_of_each_candidate(seed: int) -> None:
    random = Random(seed)
    fleet = fleet_of(random, 60)
    loads, targets = GroupLoads(), fleet.targets(None, "any")
    for _ in range(4):
        for member in random.sample(fleet.members, random.choice((1, 2, len(fleet.members)))):
            loads.put(member.publisher, random_load(random))
        seen = state_of(random, fleet, loads, has_tokens=True, has_history=True)
        allowed = Allowed(without=frozenset(each.publisher for each in fleet.members[:: random.choice((3, 1000))]))
        found = FleetColumns(fleet, targets, allowed, seen, SIZE)
        plain = CandidateColumns(fleet.candidates(seen, SIZE, members=targets.all(allowed)))
        for name in ("active", "requests", "queue", "context", "health", "last_cold", "gauges", "instances", "labels"):
            assert list(getattr(found, name)) == list(getattr(plain, name)), name
        assert found.by_match(lambda each: each.matched + 1000 * each.expected) == plain.by_match(
            lambda each: each.matched + 1000 * each.expected
        )
        assert found[0] == plain[0]
        assert (list(found), len(found), found[1:3]) == (list(plain), len(plain), plain[1:3])


# ---- what is kept ---------------------------------------------------------------------------------------


def busy_fleet(count: int) -> tuple[Fleet, GroupLoads]:
    random = Random(count)
    fleet = fleet_of(random, count)
    return fleet, GroupLoads({each.publisher: random_load(random) for each in fleet.members})


@cache
def rings_of(count: int) -> dict[int, Ring]:
    """The rings of a busy fleet: each depends on the names alone, and takes a tenth of a second to make."""
    fleet, _ = busy_fleet(count)
    fleet.ring(POINTS)
    return fleet.rings


def asked(
    policy: PolicyChoice,
    fleet: Fleet,
    loads: GroupLoads,
    gauges: dict[int, Gauges],
    *,
    has_tokens: bool = True,
    session: str | None = None,
) -> Offers:
    holders = [each for each in fleet.members if each.is_whole and each.tells_events][: 3 * has_tokens]
    seen = PromptState({each.name: TargetRow(device=BLOCKS) for each in holders}, loads, {}, gauges)
    ring = None if has_tokens else fleet.ring(POINTS)
    key = bytes(32)
    request = RoutingRequest(SIZE * BLOCKS, SIZE, 0, None, session, key, has_tokens=has_tokens, ring=ring)
    question = Question(GROUP, lambda size: HashedPrompt(1000, b""), policy, prefix_key=key, session=session)
    found = order(GroupSnapshot(GroupEntry(1, 1), fleet), PromptMatches(request, seen, b""), question, Random(1))
    assert found is not None
    found.decode.offers()
    return found


def usual_file(*kept: Filter, picker: str = "max-score-picker") -> PolicyChoice:
    names = ("precise-prefix-cache-scorer", "kv-cache-utilization-scorer", "queue-scorer", "active-request-scorer")
    scorers = tuple(weighted(name, 1.0) for name in names)
    return PolicyChoice.of(PickerConfig({"p": Profile("p", kept, scorers, PICKERS[picker])}, "p"))


@pytest.mark.parametrize(
    ("name", "has_tokens"),
    [("dynamo", True), ("hicache", True), *itertools.product(("composite", "llm-d", *PICKERS), (True, False))],
)
def test_few_candidates_are_made_however_many_targets_there_are(
    name: str, has_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = usual_file(is_small, picker=name) if name in PICKERS else choice_of(name, Random(1))
    made: list[int] = []
    candidates = Fleet.candidates

    def counted(
        self: Fleet, seen: Any, size: Any, given: Any = None, members: Sequence[FleetMember] | None = None
    ) -> Any:
        made.append(len(self.members if members is None else members))
        return candidates(self, seen, size, given, members)

    monkeypatch.setattr(Fleet, "candidates", counted)
    for count in (300, 1500):
        made.clear()
        fleet, loads = busy_fleet(count)
        fleet.rings.update(rings_of(count))
        gauges = {each.publisher: Gauges(1, 1, 0.5) for each in fleet.members}
        asked(policy, fleet, loads, gauges, has_tokens=has_tokens)
        assert sum(made) <= 30, made


@pytest.mark.parametrize("name", ["composite", "llm-d", "dynamo"])
def test_a_session_makes_few_candidates_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, loads = busy_fleet(600)
    made: list[FleetMember] = []
    candidates = Fleet.candidates

    def noted(
        self: Fleet,
        seen: PromptState,
        block_size: int,
        given: Mapping[tuple[str, int], GivenValues] | None = None,
        members: Sequence[FleetMember] | None = None,
    ) -> list[Candidate]:
        made.extend(members or ())
        return candidates(self, seen, block_size, given, members)

    monkeypatch.setattr(Fleet, "candidates", noted)
    own = [each for each in fleet.members if each.is_whole][-1]
    found = asked(choice_of(name, Random(1)), fleet, loads, {}, session=own.name[0])
    assert found.decision is Decision.SESSION
    assert found.decode.scored(0).candidate.publisher == own.publisher
    assert len(made) <= 30
    places = [each.candidate.publisher for each in found.decode.best(600)]
    assert len(set(places)) == len(places) > 100, "each once"
    elsewhere = asked(choice_of(name, Random(1)), fleet, loads, {}, session="gone")
    assert elsewhere.decision is Decision.KV_AWARE


def test_a_filter_by_registrations_is_asked_once() -> None:
    counts: list[int] = []

    def keep(request: RoutingRequest, some: Sequence[Candidate]) -> list[Candidate]:
        counts.append(len(some))
        return [each for each in some if each.role is Role.BOTH]

    fleet, loads = busy_fleet(200)
    policy = usual_file(keep)
    first, second = (asked(policy, fleet, loads, {}) for _ in range(2))
    assert counts == [len(fleet.members)]
    assert first.decode.best(200) == second.decode.best(200)
    assert {each.candidate.role for each in first.decode.best(200)} == {Role.BOTH}
    assert first.choices.number == sum(each.target.role is Role.BOTH for each in fleet.members)
    other = Fleet(fleet.table)
    asked(policy, other, loads, {})
    assert len(counts) == 2, "another table has other targets"


def test_composite_makes_a_ring_only_where_it_falls_back() -> None:
    fleet, loads = busy_fleet(60)
    assert asked(PolicyChoice.of(PRESETS["composite"]), fleet, loads, {}).decision is Decision.KV_AWARE
    assert fleet.rings == {}
    cold = fleet_of(Random(1), 60)
    request = RoutingRequest(SIZE * BLOCKS, SIZE, prefix_key=bytes(32))
    question = Question(GROUP, lambda size: HashedPrompt(1000, b""), PolicyChoice.of(PRESETS["composite"]))
    matches = PromptMatches(request, PromptState({}, loads, {}, {}), b"")
    found = order(GroupSnapshot(GroupEntry(1, 1), cold), matches, question, Random(1))
    assert found is not None
    assert found.decision is Decision.FALLBACK
    assert list(cold.rings) == [POINTS]


def test_filters_of_files_that_were_read_again_are_forgotten() -> None:
    fleet, loads = busy_fleet(60)
    targets = fleet.targets(None, "any")
    for _ in range(40):
        asked(usual_file(lambda request, some: list(some)), fleet, loads, {})
    assert len(targets._passing) <= 16


def test_a_column_of_gauges_is_made_once_for_each_reading() -> None:
    fleet, loads = busy_fleet(60)
    made: list[int] = []

    def make(gauges: Sequence[Gauges | None]) -> list[float | None]:
        made.append(len(gauges))
        return [None if each is None else float(each.waiting) for each in gauges]

    targets, everybody = fleet.targets(None, "any"), Allowed()
    for waiting in (1, 2):
        gauges = {each.publisher: Gauges(waiting=waiting) for each in fleet.members[1:]}
        for _ in range(3):
            columns = FleetColumns(fleet, targets, everybody, PromptState({}, loads, {}, gauges), SIZE)
            assert columns.by_gauges("waiting", make) == [None, *[float(waiting)] * (len(fleet.members) - 1)]
    assert made == [len(fleet.members)] * 2
    without = Allowed(without=frozenset({fleet.members[0].publisher}))
    columns = FleetColumns(fleet, targets, without, PromptState({}, loads, {}, gauges), SIZE)
    assert columns.by_gauges("waiting", make) == [2.0] * (len(fleet.members) - 1), "a part has a column of its own"


def test_candidates_that_have_columns_keep_them() -> None:
    fleet, loads = busy_fleet(40)
    columns = FleetColumns(fleet, fleet.targets(None, "any"), Allowed(), PromptState({}, loads, {}, {}), SIZE)
    assert columns_of(columns) is columns
    assert columns.passing(RoutingRequest(10, SIZE), ()) is columns
