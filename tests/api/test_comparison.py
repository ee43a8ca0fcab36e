"""Other policies over kept decisions: the sums of each, which of them are apart, and one decision again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from waymark.api.policies import FirstTokenLines, PolicySums, are_apart, compare, decide_again, outcomes, replay
from waymark.decide.options import Shadow
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import PolicyChoice
from waymark.decide.simulated_fleet import SimulatedRequest
from waymark.domain.answer_times import AskedTimes, TimeSums
from waymark.domain.packing import pack
from waymark.domain.targets import Gauges
from waymark.store.kept_decisions import KeptDecision, KeptTarget, ShadowChoice

SIZE = 16
TARGETS = [KeptTarget(1, "pod-1", device=64), KeptTarget(2, "pod-2")]


def decision(
    number: int = 0,
    *,
    chosen: int = 1,
    expected: int = 64,
    work: int = 100,
    targets: Sequence[KeptTarget] = TARGETS,
    shadows: Mapping[str, ShadowChoice] | None = None,
    **fields: Any,
) -> KeptDecision:
    return KeptDecision(
        100 * number, f"{number:016x}", "t", "p", "kv_aware", 160, SIZE, chosen, expected, work, targets,
        shadows or {}, **fields,
    )  # fmt: skip


def timed(publisher: int, work: int, ms: float) -> KeptDecision:
    return decision(chosen=publisher, work=work, ttft_ms=ms)


# ---- the time to the first token ----------------------------------------------------------------------


def test_a_target_has_a_line_of_its_own_once_it_has_enough_times() -> None:
    one = [timed(1, 100 * number, 10.0 + 100 * number) for number in range(1, 6)]
    two = [timed(2, 100 * number, 10.0 + 300 * number) for number in range(1, 6)]
    lines = FirstTokenLines([*one, *two, decision(chosen=2)])
    assert lines.predict(1, 1000) == pytest.approx(1010)
    assert lines.predict(2, 1000) == pytest.approx(3010)
    assert lines.predict(3, 1000) == pytest.approx(2010), "the line of all for a target without one"
    few = FirstTokenLines([*one, *two[:4]])
    of_two = few.predict(2, 1000)
    assert of_two is not None
    assert 1010 < of_two < 3010
    assert FirstTokenLines(one[:4]).predict(1, 1000) is None
    assert FirstTokenLines([]).predict(1, 1000) is None


# ---- the sums of a policy -----------------------------------------------------------------------------

LINES = FirstTokenLines([timed(publisher, 100 * n, 100.0 * n) for n in range(1, 6) for publisher in (1, 2)])


def test_a_policy_differs_where_it_prefers_another_target_than_the_policy_that_decided() -> None:
    sums = PolicySums("other")
    # Redis has taken the second one, by loads of that instant: the policy preferred the first.
    moved = decision(chosen=2)
    for of, choice in (
        (moved, ShadowChoice(1, 64, 96)),
        (moved, ShadowChoice(2, 0, 160)),
        (decision(), ShadowChoice(1, 64, 96)),
        (decision(targets=()), ShadowChoice(9, 0, 160)),
        (decision(), None),
    ):
        sums.add(of, choice, LINES)
    assert (sums.decisions, sums.differs, sums.none) == (4, 1, 1)
    assert (sums.expected, sums.expected_of_chosen) == (128, 256)
    assert sums.times == pytest.approx([96, 160, 96, 160])
    assert sums.times_of_chosen == pytest.approx([100] * 4)


def test_without_times_there_are_no_predictions() -> None:
    sums = PolicySums("other")
    sums.add(decision(), ShadowChoice(1, 64, 96), FirstTokenLines([]))
    assert (sums.times, sums.times_of_chosen) == ([], [])
    row = sums.row()
    assert (row.predicted_ttft_ms, row.predicted_ttft_ms_of_chosen, row.is_simulated) == (None, None, False)


def test_a_simulation_takes_the_place_of_single_decisions() -> None:
    sums = PolicySums("other")
    for _ in range(3):
        sums.add(decision(), ShadowChoice(2, 0, 160), LINES)
    own = [SimulatedRequest(10, 5.0), None, SimulatedRequest(20, 7.0)]
    actual = [SimulatedRequest(1, 8.0), SimulatedRequest(2, 9.0), SimulatedRequest(4, 10.0)]
    sums.simulate(own, actual)
    row = sums.row()
    assert (row.expected, row.expected_of_chosen) == (30, 5), "only where both have a target"
    assert (row.predicted_ttft_ms, row.predicted_ttft_ms_of_chosen) == (6.0, 9.0)
    assert (row.is_simulated, row.decisions, row.differs) == (True, 3, 3)
    assert sums.costs == [5.0, None, 7.0]
    assert sums.costs_of_chosen == [8.0, 9.0, 10.0]


def test_the_cost_is_in_tokens_where_no_time_is_known() -> None:
    sums = PolicySums("other")
    sums.add(decision(), ShadowChoice(2, 0, 160), FirstTokenLines([]))
    sums.simulate([SimulatedRequest(10, 5.0)], [SimulatedRequest(1, 8.0)])
    assert (sums.costs, sums.costs_of_chosen) == ([-10.0], [-1.0]), "more tokens are less cost"
    assert sums.row().predicted_ttft_ms is None


# ---- apart --------------------------------------------------------------------------------------------


def noise(seed: int, mean: float, count: int = 200) -> list[float | None]:
    random = Random(seed)
    return [mean + random.gauss(0.0, 1.0) for _ in range(count)]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (noise(1, 0.0), noise(2, 5.0), True),
        (noise(1, 5.0), noise(2, 0.0), True),
        (noise(1, 0.0), noise(2, 0.0), False),
        (noise(1, 0.0), noise(1, 0.0), False),
        # Ten parts of five decisions are the least.
        (noise(1, 0.0, 49), noise(2, 5.0, 49), False),
        (noise(1, 0.0, 50), noise(2, 5.0, 50), True),
        (noise(1, 0.0, 60), noise(2, 5.0, 61), False),
        ([None] * 160 + noise(1, 0.0, 40), noise(2, 5.0), False),
        ([None] * 100 + noise(1, 0.0, 100), noise(2, 5.0), True),
        ([], [], False),
        # A difference of one moment is not one of all the time.
        ([0.0] * 200, [1000.0] * 20 + [0.0] * 180, False),
        ([0.0] * 200, [1.0] * 200, True),
    ],
)
def test_policies_are_apart_if_their_difference_holds_all_the_time(
    first: list[float | None], second: list[float | None], expected: bool
) -> None:
    assert are_apart(first, second) is expected
    assert are_apart(second, first) is expected


# ---- the outcomes of what was chosen ------------------------------------------------------------------


def test_outcomes_count_what_engines_have_said() -> None:
    made = outcomes(
        [
            decision(expected=10, delivered=8, ttft_ms=20.0),
            decision(chosen=2, expected=30, delivered=0),
            decision(chosen=2, expected=5, ttft_ms=25.5, targets=()),
            decision(expected=7),
        ]
    )
    assert (made.decisions, made.moved) == (4, 1)
    assert (made.expected, made.reported, made.expected_of_reported, made.delivered) == (52, 2, 40, 8)
    assert (made.timed, made.ttft_ms) == (2, 22.75)
    nothing = outcomes([])
    assert (nothing.decisions, nothing.ttft_ms, nothing.delivered) == (0, None, 0)


# ---- rows ---------------------------------------------------------------------------------------------


async def test_each_shadow_has_a_row_and_the_best_one_is_first() -> None:
    decisions = [
        decision(number, shadows={"more": ShadowChoice(2, 90, 70), "less": ShadowChoice(1, 10, 150)})
        for number in range(5)
    ]
    decisions.append(decision(9, shadows={"more": ShadowChoice(1, 64, 96)}))
    found = await compare(decisions, unreadable=3)
    assert [row.policy for row in found.policies] == ["more", "less"]
    more, less = found.policies
    assert (more.decisions, more.differs, more.none, more.expected, more.expected_of_chosen) == (6, 5, 0, 514, 384)
    assert (less.decisions, less.differs, less.none, less.expected, less.expected_of_chosen) == (5, 0, 1, 50, 320)
    assert found.unreadable == 3
    assert found.chosen.decisions == 6
    # Without a simulation nothing is told apart.
    assert (more.alike, less.alike) == (["less"], ["more"])
    assert not any(row.is_simulated or row.is_apart_from_chosen for row in found.policies)


async def test_of_times_and_tokens_the_times_say_which_is_best() -> None:
    times = [timed(1, 100 * number, 100.0 * number) for number in range(1, 6)]
    shadows = {"fast": ShadowChoice(1, 10, 50), "full": ShadowChoice(1, 90, 900)}
    found = await compare([*times, *(decision(number, shadows=shadows) for number in range(5))])
    assert [row.policy for row in found.policies] == ["fast", "full"]
    assert found.policies[0].predicted_ttft_ms == pytest.approx(50)


def simulated(count: int = 60) -> list[KeptDecision]:
    """Decisions that a cache explains: prompts that come again, at the target that has them."""
    found = []
    for number in range(count):
        conversation = number % 2
        blocks = pack(range(1000 * conversation, 1000 * conversation + 5))
        chosen, expected = 1 + conversation, 0 if number < 2 else 80
        targets = [
            KeptTarget(each, f"pod-{each}", device=expected if each == chosen else 0) for each in (chosen, 3 - chosen)
        ]
        found.append(
            KeptDecision(
                10_000 * number,
                f"{number:016x}",
                "t",
                "p",
                "kv_aware",
                85,
                SIZE,
                chosen,
                expected,
                85 - expected,
                targets,
                {"least-work": ShadowChoice(chosen, expected, 85 - expected)},
                blocks=blocks,
            )
        )
    return found


async def test_a_shadow_whose_policy_is_known_is_simulated() -> None:
    shadow = Shadow("least-work", PolicyChoice.of(PRESETS["least-work"]))
    (row,) = (await compare(simulated(), [shadow])).policies
    assert (row.is_simulated, row.expected, row.expected_of_chosen) == (True, 58 * 80, 58 * 80)
    assert not row.is_apart_from_chosen
    # Of several groups, or of a policy that nobody knows any more, there is no fleet.
    cases: list[dict[str, Any]] = [{"is_one_group": False, "policies": [shadow]}, {"policies": []}]
    for given in cases:
        (row,) = (await compare(simulated(), **given)).policies
        assert not row.is_simulated


async def test_a_policy_over_the_records_sends_conversations_apart_or_together() -> None:
    shadows = [Shadow(name, PolicyChoice.of(PRESETS[name])) for name in ("least-work", "hicache")]
    found = await replay(simulated(), shadows, unreadable=1)
    assert {row.policy for row in found.policies} == {"least-work", "hicache"}
    assert {row.is_simulated for row in found.policies} == {True}
    assert found.unreadable == 1
    (alone,) = (await replay(simulated(), shadows[:1], is_one_group=False)).policies
    assert (alone.is_simulated, alone.decisions) == (False, 60)
    assert alone.differs <= 2, "only where nobody has anything"


# ---- one decision again -------------------------------------------------------------------------------


def again(policy: str, *targets: KeptTarget, **fields: Any) -> ShadowChoice | None:
    given = {"targets": targets, "blocks": pack(range(10))} | fields
    return decide_again(decision(**given), PolicyChoice.of(PRESETS[policy]))


def publisher(choice: ShadowChoice | None) -> int | None:
    return None if choice is None else choice.publisher


@pytest.mark.parametrize("policy", [name for name in PRESETS if name != "sticky"])
def test_the_one_that_has_the_prompt_is_chosen_with_what_it_would_reuse(policy: str) -> None:
    targets = [KeptTarget(1, "pod-1"), KeptTarget(2, "pod-2", device=128)]
    assert again(policy, *targets) == ShadowChoice(2, 128, 32)


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("least-work", {"wait": 9_000}, {}),
        ("least-work", {"active": 50}, {"active": 1}),
        ("least-work", {"wait": 1_000}, {"wait": 1_500, "weight": 2.0}),
        ("least-work", {"host": 16}, {"device": 32}),
        ("least-work", {}, {"shared": 64}),
        ("least-work", {}, {"disk": 64}),
        ("least-work", {}, {"expected": 64}),
        ("dynamo", {"context": 90_000}, {"context": 10}),
        ("llm-d", {"gauges": Gauges(50, 1, 0.9)}, {"gauges": Gauges(0, 1, 0.1)}),
        ("composite", {"device": 160, "health": 0.1, "active": 5}, {"device": 160, "health": 1.0, "active": 5}),
    ],
)
def test_each_kept_value_of_a_target_counts(policy: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    for values, expected in (((first, second), 2), ((second, first), 1)):
        targets = [KeptTarget(number, f"pod-{number}", **each) for number, each in enumerate(values, 1)]
        assert publisher(again(policy, *targets)) == expected


def test_a_session_stays_and_a_key_finds_its_target_again() -> None:
    targets = [KeptTarget(1, "pod-1"), KeptTarget(2, "pod-2", device=160), KeptTarget(3, "pod-3", active=1)]
    assert publisher(again("least-work", *targets, session="pod-3")) == 3
    targets[2] = KeptTarget(3, "pod-3")
    keys = [Random(number).randbytes(32) for number in range(40)]
    found = [publisher(again("sticky", *targets, prefix_key=key)) for key in keys]
    assert found == [publisher(again("sticky", *targets, prefix_key=key)) for key in keys]
    assert set(found) == {1, 2, 3}
    unread = [publisher(again("least-work", *targets, prefix_key=key, has_tokens=False, blocks=b"")) for key in keys]
    assert len(set(unread)) > 1, "its key names a target where its tokens are not known"


def test_a_bound_of_sticky_is_that_of_the_decision() -> None:
    targets = [KeptTarget(1, "pod-1", active=5), KeptTarget(2, "pod-2", active=5)]
    key = b"k" * 32
    home = publisher(again("sticky", *targets, prefix_key=key, active_bound=100))
    busy = [each._replace(active=100 if each.publisher == home else 5) for each in targets]
    assert publisher(again("sticky", *busy, prefix_key=key, active_bound=100)) != home
    assert publisher(again("sticky", *busy, prefix_key=key, active_bound=101)) == home


_BY_ROLE = """
kind: EndpointPickerConfig
plugins: [{type: decode-filter}, {type: active-request-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: decode-filter}, {pluginRef: active-request-scorer}]}]
"""


@pytest.mark.parametrize(
    ("roles", "expected"), [(["prefill", "decode"], 2), (["prefill", "prefill"], None), (["no role", "prefill"], 1)]
)
def test_a_file_sees_roles_and_leaves_out_who_does_not_fit(roles: list[str], expected: int | None) -> None:
    targets = [KeptTarget(number, f"pod-{number}", role=role) for number, role in enumerate(roles, 1)]
    policy = PolicyChoice.of(read_picker_config(_BY_ROLE))
    assert publisher(decide_again(decision(targets=targets), policy)) == expected


_BY_TIME = """
kind: EndpointPickerConfig
plugins: [{type: predicted-latency-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: predicted-latency-scorer}]}]
"""


def test_a_file_sees_times_and_what_the_client_asked_for() -> None:
    def of(ms: float) -> tuple[float, ...]:
        sums = TimeSums(10, 10, 10 * ms, 10, 10 * ms)
        return (*sums, *TimeSums())

    targets = [KeptTarget(1, "pod-1", answer_times=of(90.0)), KeptTarget(2, "pod-2", answer_times=of(30.0))]
    policy = PolicyChoice.of(read_picker_config(_BY_TIME))
    assert publisher(decide_again(decision(targets=targets), policy)) == 2
    asked = AskedTimes(100.0, None)
    assert publisher(decide_again(decision(targets=targets, asked=asked), policy)) == 1, "the least headroom"
