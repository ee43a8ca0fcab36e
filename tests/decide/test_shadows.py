"""Policies that decide nothing: what they would have chosen, live and over kept decisions, and what is kept of both."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.decide.conftest import MakeSelector
from tests.decide.played import Kept, decided, play, reservation, shadows_of
from tests.decide.test_fleet import fleet_of
from tests.decide.test_shortlist import state_of
from tests.store.factories import registration
from waymark.api.policies import are_apart, compare, decide_again, replay
from waymark.base import watched_file
from waymark.base.errors import SettingsError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.base.shape import plain
from waymark.decide import shadows as shadows_module
from waymark.decide.matches import PromptMatches
from waymark.decide.options import Shadow
from waymark.decide.order import order
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import RoutingRequest
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import POINTS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question, SelectedTarget, SelectParameters
from waymark.decide.selector import Selector
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.books import NO_USAGE, Usage
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.runtime import parts
from waymark.simulator.workload import conversations
from waymark.store.directory import GroupEntry
from waymark.store.kept_decisions import BLOCKS_MAX, TARGETS_MAX, KeptDecision
from waymark.store.reservations import ReservationPart
from waymark.store.store import Store

GROUP = GroupName("t", "m")
SIZE = 16
BY_LOAD = """
plugins: [{type: active-request-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: active-request-scorer}]}]
"""


def counted(metrics: Metrics, shadow: str) -> dict[str, float]:
    choices = ("same", "other", "none", "failed")
    found = {choice: metrics.shadow_decisions.labels(shadow=shadow, choice=choice).value for choice in choices}
    return {choice: count for choice, count in found.items() if count}


# ---- deciding again -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
async def test_the_policy_that_decided_chooses_the_same_again(name: str) -> None:
    """Over random fleets with equal targets, weights, roles, and prompts with tokens and without."""
    kept, policy, many = Kept(), PolicyChoice.of(PRESETS[name]), 0
    shadows = shadows_of(kept)
    for seed in range(30):
        random = Random(f"{name} {seed}")
        fleet = fleet_of(random, random.choice((3, 9, 40)))
        has_tokens, key = random.random() < 0.7, random.randbytes(32)
        ring = None if has_tokens else fleet.ring(POINTS)
        request = RoutingRequest(963, SIZE, 0b1011, None, None, key, False, has_tokens, ring)
        session = random.choice([each.name[0] for each in fleet.members]) if seed % 5 == 0 and fleet.members else None
        question = Question(GROUP, lambda size: HashedPrompt(963, b""), policy, prefix_key=key, session=session)
        request = request._replace(session=session)
        seen = state_of(random, fleet, has_tokens=has_tokens)
        matches = PromptMatches(request, seen, pack(range(60)))
        snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, seen.loads)
        many += await decided(shadows, snapshot, matches, question, random) is not None
    assert many > 20
    assert len(kept.decisions) == many
    found = plain(await replay(kept.decisions, [Shadow("again", policy)]))
    assert [(each["decisions"], each["differs"], each["none"]) for each in found["policies"]] == [(many, 0, 0)]
    for decision in kept.decisions:
        again = decide_again(decision, policy)
        assert again is not None
        assert (again.publisher, again.expected, again.work) == (decision.chosen, decision.expected, decision.work)
        assert len(decision.targets) <= TARGETS_MAX
        assert len(decision.blocks) <= 8 * BLOCKS_MAX


async def test_a_decision_without_targets_or_of_another_policy_is_decided_again_without_an_error() -> None:
    record = KeptDecision(1, "", "t", "least-work", "kv_aware", 100, SIZE, 7, 0, 100)
    assert decide_again(record, PolicyChoice.of(PRESETS["sticky"])) is None
    nowhere = plain(await replay([record], [Shadow("sticky", PolicyChoice.of(PRESETS["sticky"]))]))
    assert [(each["decisions"], each["none"]) for each in nowhere["policies"]] == [(0, 1)]
    assert plain(await compare([]))["policies"] == []


# ---- the simulated fleet --------------------------------------------------------------------------


@pytest.mark.slow
async def test_compare_ranks_policies_as_a_simulation_of_each_does() -> None:
    """What the run of one policy says of others that decided nothing is what their own runs show, whoever decides."""
    made_up = conversations(3, open_at_once=24, system_tokens=1024, turn_tokens=(64, 400))
    prompts = [next(made_up) for _ in range(150)]
    by_load = Shadow("by-load.yaml", PolicyChoice.of(read_picker_config(BY_LOAD)))
    shadows = [*(Shadow(name, PolicyChoice.of(PRESETS[name])) for name in ("lmetric", "dynamo")), by_load]
    runs = {shadow.name: await play(shadow.policy, prompts) for shadow in shadows}
    ranking = sorted(runs, key=lambda name: runs[name].ttft_ms)
    for shadow in shadows:
        decider = await play(shadow.policy, prompts, shadows)
        assert decider[:2] == runs[shadow.name][:2], "the shadows have changed nothing"

        found = plain(await compare(decider.decisions, shadows))
        rows = {row["policy"]: row for row in found["policies"]}
        assert list(rows) == ranking, f"decided by {shadow.name}"
        assert {row["is_simulated"] for row in found["policies"]} == {True}
        for name, row in rows.items():
            assert row["expected"] == pytest.approx(runs[name].reused, rel=0.2)
        assert found["chosen"]["delivered"] == decider.reused, "what the simulation knows, to the token"
        assert found["chosen"]["expected_of_reported"] == decider.reused
        assert found["chosen"]["ttft_ms"] == pytest.approx(decider.ttft_ms, abs=0.01)
        assert rows[shadow.name]["differs"] == 0
        assert [name for name, row in rows.items() if not row["differs"]] == [shadow.name]
        again = plain(await replay(decider.decisions, shadows))
        assert again["policies"] == found["policies"], "a policy over the records is what it was as a shadow"


@pytest.mark.slow
async def test_every_order_that_compare_claims_is_that_of_the_runs() -> None:
    """Some of these policies are too near to each other for the decisions of a short time."""
    made_up = conversations(3, open_at_once=24, system_tokens=1024, turn_tokens=(64, 400))
    prompts = [next(made_up) for _ in range(300)]
    by_load = Shadow("by-load.yaml", PolicyChoice.of(read_picker_config(BY_LOAD)))
    near = [Shadow(name, PolicyChoice.of(PRESETS[name])) for name in ("lmetric", "dynamo", "least-work")]
    shadows, chosen = [*near, by_load], by_load.name
    runs = {shadow.name: await play(shadow.policy, prompts) for shadow in near}
    runs[chosen] = await play(by_load.policy, prompts, shadows)
    found = plain(await compare(runs[chosen].decisions, shadows))
    rows = {row["policy"]: row for row in found["policies"]}
    claimed = [(one, other) for one, other in combinations(rows, 2) if other not in rows[one]["alike"]]
    assert 0 < len(claimed) < 6, "some orders are claimed, and others are not"
    for better, worse in claimed:
        assert runs[better].ttft_ms < runs[worse].ttft_ms
        assert better not in rows[worse]["alike"]
    assert not rows[chosen]["is_apart_from_chosen"], "the policy that decided does as it did"
    for name, row in rows.items():
        if row["is_apart_from_chosen"]:
            is_better = row["predicted_ttft_ms"] < row["predicted_ttft_ms_of_chosen"]
            assert is_better == (runs[name].ttft_ms < runs[chosen].ttft_ms)


def test_policies_are_told_apart_only_by_what_holds_all_the_time() -> None:
    random = Random(3)
    some = [float(random.randrange(100)) for _ in range(300)]
    assert are_apart(some, [each - 5 for each in some])
    assert not are_apart(some, some)
    assert not are_apart(some[:49], [each - 5 for each in some[:49]]), "too few decisions"
    assert not are_apart(some, [each + random.gauss(0, 50) for each in some]), "chance"
    begin = [each - (500 if at < 50 else 0) for at, each in enumerate(some)]
    assert not are_apart(some, begin), "only in the first tenth of the time"
    known = [None if at % 2 else each - 5 for at, each in enumerate(some)]
    assert are_apart(some, known), "by the decisions in which both preferred a target"
    assert not are_apart(some, [None for _ in some])
    assert not are_apart(some, [])


async def test_a_sample_that_no_cache_explains_is_compared_decision_by_decision() -> None:
    """Every twentieth request has few blocks of the one before."""
    made_up = conversations(3, open_at_once=24, system_tokens=64, turn_tokens=(64, 400))
    prompts = [next(made_up) for _ in range(300)]
    policies = [Shadow(name, PolicyChoice.of(PRESETS[name])) for name in ("lmetric", "least-work")]
    decisions = (await play(policies[0].policy, prompts, policies)).decisions
    whole = plain(await compare(decisions, policies))
    assert [row["is_simulated"] for row in whole["policies"]] == [True, True]
    for found in (
        plain(await compare(decisions[::20], policies)),
        plain(await compare(decisions, policies, is_one_group=False)),
        plain(await compare(decisions, policies[:1])),
        plain(await compare([each._replace(blocks=b"") for each in decisions], policies)),
    ):
        assert [row["is_simulated"] for row in found["policies"]] == [False, False]
        assert {(*row["alike"], row["is_apart_from_chosen"]) for row in found["policies"]} == {
            ("lmetric", False),
            ("least-work", False),
        }, "no order is claimed"


# ---- beside a decision ----------------------------------------------------------------------------


def scene(random: Random) -> tuple[GroupSnapshot, PromptMatches]:
    fleet = fleet_of(random, 20)
    seen = state_of(random, fleet, has_tokens=True)
    matches = PromptMatches(RoutingRequest(963, SIZE, prefix_key=b"\1" * 32), seen, pack(range(60)))
    return GroupSnapshot(GroupEntry(1, 1), fleet, seen.loads), matches


def question_of(name: str = "least-work", **parameters: Any) -> Question:
    policy = PolicyChoice.of(PRESETS[name])
    return Question(GROUP, lambda size: HashedPrompt(963, b""), policy, parameters=SelectParameters(**parameters))


async def test_decisions_are_the_same_with_shadows_and_without() -> None:
    chosen = []
    for names in ((), ("sticky", "composite"), ("dynamo", "lmetric", "llm-d")):
        random, found, metrics = Random(5), [], Metrics()
        shadows = shadows_of(Kept(), *names, metrics=metrics)
        for seed in range(30):
            snapshot, matches = scene(Random(seed))
            taken = await decided(shadows, snapshot, matches, question_of(), random)
            found.append(None if taken is None else taken.target.candidate.publisher)
        chosen.append(found)
        for name in names:
            assert sum(counted(metrics, name).values()) == 30 - found.count(None)
    assert chosen[0] == chosen[1] == chosen[2]
    exported = metrics.render()[0].decode()
    assert re.search(r'^waymark_shadow_decisions_total\{.*shadow="lmetric"', exported, re.MULTILINE)
    assert re.search(r'^waymark_shadow_tokens_total\{.*shadow="lmetric"', exported, re.MULTILINE)


async def test_a_shadow_that_fails_is_counted_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> Any:
        raise ZeroDivisionError("of a shadow")

    metrics, kept = Metrics(), Kept()
    broken = PolicyChoice.of(replace(PRESETS["llm-d"], name="broken", rank=fails, needs_gauges=False))
    shadows = shadows_of(kept, "lmetric", metrics=metrics, more=[Shadow("broken", broken)])
    for _ in range(3):
        taken = await decided(shadows, *scene(Random(2)), question_of(), Random(1))
        assert taken is not None
    assert counted(metrics, "broken") == {"failed": 3.0}
    assert sum(counted(metrics, "lmetric").values()) == 3
    assert [list(each.shadows) for each in kept.decisions] == [["lmetric"]] * 3
    assert len([record for record in caplog.records if record.message == "a shadow fails"]) == 1, "once a minute"


async def test_a_shadow_that_fails_for_an_hour_fills_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Any:
        raise ZeroDivisionError

    now = 1000.0
    monkeypatch.setattr(shadows_module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now))
    broken = PolicyChoice.of(replace(PRESETS["llm-d"], name="broken", rank=fails, needs_gauges=False))
    shadows = shadows_of(Kept(), more=[Shadow("broken", broken)])
    for _ in range(360):
        await decided(shadows, *scene(Random(2)), question_of(), Random(1))
        now += 10.0
    said = sum(record.message == "a shadow fails" for record in caplog.records)
    assert 20 <= said <= 120, "often enough for those who look at the last minutes"


@pytest.mark.parametrize(("blocks", "is_kept"), [(2000, True), (100_000, False)])
async def test_a_record_has_the_pool_of_a_usual_prompt_and_not_of_a_gigantic_one(blocks: int, is_kept: bool) -> None:
    kept, (snapshot, matches) = Kept(), scene(Random(2))
    pool = (1 << blocks) - 1
    request = matches.request._replace(tokens=SIZE * blocks, pool=pool)
    await decided(shadows_of(kept), snapshot, matches._replace(request=request), question_of(), Random(1))
    assert kept.decisions[0].pool == (pool if is_kept else 0)


async def test_a_shadow_without_a_target_is_counted() -> None:
    nobody = read_picker_config(
        "plugins: [{type: by-label, parameters: {label: zone, validValues: [mars]}}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: by-label}]}]\n"
    )
    metrics, kept = Metrics(), Kept()
    shadows = shadows_of(kept, metrics=metrics, more=[Shadow("mars.yaml", PolicyChoice.of(nobody))])
    await decided(shadows, *scene(Random(2)), question_of(), Random(1))
    assert counted(metrics, "mars.yaml") == {"none": 1.0}
    assert kept.decisions[0].shadows == {}


async def test_nothing_is_done_without_shadows_and_records() -> None:
    kept = Kept()
    shadows = shadows_of(kept, share=0.0)
    snapshot, matches = scene(Random(2))
    offers = order(snapshot, matches, question_of(), Random(1))
    assert offers is not None
    assert shadows.begin(offers, snapshot, matches, question_of()) is None
    shadows.ended([reservation("0" * 16)], 5.0, Usage(7))
    assert kept.outcomes == []


async def test_the_nonce_says_whether_a_decision_is_kept() -> None:
    kept = Kept()
    shadows = shadows_of(kept, share=0.25)
    nonces = ["0" * 16, "3" + "f" * 15, "4" + "0" * 15, "f" * 16]
    for nonce in nonces:
        shadows.ended([reservation(nonce), reservation("0" * 16)], 5.0, Usage(7))
    shadows.ended([reservation(nonces[0])], None, NO_USAGE)  # nothing is said of it
    assert kept.outcomes == [(nonce, 7, 5.0) for nonce in nonces[:2]]


# ---- the settings ---------------------------------------------------------------------------------


def test_shadows_are_presets_and_files(tmp_path: Path) -> None:
    file = tmp_path / "by-load.yaml"
    file.write_text(BY_LOAD, encoding="utf-8")
    options = parts.selection_options(Settings(shadow=f"lmetric, {file}", decisions_kept=0.5))
    assert [(each.name, each.policy.name) for each in options.shadows] == [
        ("lmetric", "lmetric"),
        (str(file), "endpoint-picker-config"),
    ]
    assert options.decisions_kept == 0.5
    assert parts.selection_options(Settings()).shadows == ()


def test_the_file_of_a_shadow_that_changes_counts_without_a_restart_and_a_wrong_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watched_file, "_POLL_SECONDS", 0.0)
    file = tmp_path / "by-load.yaml"
    file.write_text(BY_LOAD, encoding="utf-8")
    (shadow,) = parts.selection_options(Settings(shadow=str(file))).shadows

    def scorers() -> int:
        config = shadow.policy.file
        assert config is not None
        return len(config.profiles["default"].scorers)

    assert scorers() == 1
    before = shadow.policy
    file.write_text(BY_LOAD.replace("[{pluginRef: active-request-scorer}]", "[]"), encoding="utf-8")
    assert scorers() == 0
    after = shadow.policy
    file.write_text("plugins: [", encoding="utf-8")
    assert before is not after is shadow.policy
    assert "shadow file cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lmetrics", r'WAYMARK_SHADOW is "lmetrics".*did you mean lmetric'),
        ("lmetric,lmetric", "name at most 4 different policies"),
        ("sticky,dynamo,lmetric,llm-d,longest", "name at most 4 different policies"),
        ("./none.yaml", r"WAYMARK_SHADOW none.yaml cannot be used"),
    ],
)
def test_an_unknown_shadow_is_named_at_the_start(text: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        parts.selection_options(Settings(shadow=text))


# ---- in a replica ---------------------------------------------------------------------------------


async def select(store: Store, selector: Selector, tokens: int = 64) -> SelectedTarget:
    prompt = HashedPrompt(tokens, pack(range(1, 1 + tokens // SIZE)))
    policy = PolicyChoice.of(PRESETS["least-work"])
    return await selector.select(Question(GroupName("default", "m"), lambda size: prompt, policy))


async def test_a_decision_is_kept_with_its_shadows_and_with_what_became_of_it(
    store: Store, make_selector: MakeSelector, metrics: Metrics
) -> None:
    for number in range(3):
        await store.registry.register(registration(f"pod-{number}"))
    selector = make_selector(store, shadow="lmetric,llm-d", decisions_kept=1.0).selector
    taken = await select(store, selector)
    await selector.release(taken.reservations, ReservationPart.PREFILL, ttft_ms=12.5)
    await selector.release(taken.reservations, ReservationPart.OK, usage=Usage(48, 64, 9))
    assert await selector.release(taken.reservations, ReservationPart.OK, usage=Usage(1, 1, 1)) == (0, 1)
    unreserved = SelectParameters(is_reserved=False)
    policy = PolicyChoice.of(PRESETS["least-work"])
    prompt = HashedPrompt(10, b"")
    await selector.select(Question(GroupName("default", "m"), lambda size: prompt, policy, parameters=unreserved))

    async def are_there() -> bool:
        reading = await store.kept_decisions.read(taken.group_id, since_ms=0, decisions_max=9)
        return [each.delivered for each in reading.decisions] == [48, None]

    await wait_until(are_there, "both decisions and the report are written")
    first, second = (await store.kept_decisions.read(taken.group_id, since_ms=0, decisions_max=9)).decisions
    assert (first.tenant_id, first.policy, first.tokens, first.ttft_ms) == ("default", "least-work", 64, 12.5)
    assert (first.chosen, first.nonce) == (taken.target.candidate.publisher, taken.reservations[0].nonce)
    assert sorted(first.shadows) == ["llm-d", "lmetric"]
    assert sorted(target.instance_id for target in first.targets) == ["pod-0", "pod-1", "pod-2"]
    assert first.blocks == pack(range(1, 5))
    assert (second.nonce, second.ttft_ms) == ("", None)
    assert counted(metrics, "lmetric") == {"same": 2.0}, "all targets are equal"


async def test_redis_that_refuses_records_changes_no_decision(
    store: Store, make_selector: MakeSelector, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.registry.register(registration("pod-1"))
    selector = make_selector(store, shadow="lmetric", decisions_kept=1.0).selector
    taken = await select(store, selector)
    key = f"wm:{{{taken.group_id}}}:decisions"
    await store.client.several([("DEL", key), ("SET", key, "a person did this")])
    others = [await select(store, selector) for _ in range(3)]
    assert {each.target.candidate.instance_id for each in others} == {"pod-1"}

    async def are_counted() -> bool:
        return store.kept_decisions._metrics.decision_records_dropped.labels(reason="redis").value > 0

    await wait_until(are_counted, "the records that Redis refused are counted")
    reading = await store.kept_decisions.read(taken.group_id, since_ms=0, decisions_max=9)
    assert (reading.decisions, reading.unreadable) == ([], 0)
