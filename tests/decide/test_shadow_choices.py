"""What a shadow prefers, what is counted of it, and which decisions and targets are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.decide.played import Kept, reservation, shadows_of
from tests.decide.policies.conftest import prompt, target
from tests.decide.test_preferences import equal_targets
from tests.decide.test_selector import selector_of
from tests.decide.test_shadows import GROUP, SIZE, question_of, select
from tests.store.factories import registration
from waymark.base.metrics import Metrics
from waymark.decide import snapshot as snapshot_module
from waymark.decide.fleet import PromptState
from waymark.decide.matches import PromptMatches
from waymark.decide.options import SelectionOptions, Shadow, read_shadows
from waymark.decide.order import order
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import RoutingRequest, Scored
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import PolicyChoice, SelectedTarget
from waymark.decide.shadows import Shadows, preferred, reused, work
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.books import NO_USAGE, Usage
from waymark.domain.match import TargetRow
from waymark.domain.packing import pack
from waymark.domain.status import Decision
from waymark.domain.targets import Gauges, Target
from waymark.store.directory import GroupEntry
from waymark.store.kept_decisions import BLOCKS_MAX, TARGETS_MAX
from waymark.store.reservations import Load, Reservation
from waymark.store.store import Store

LEAST_WORK = PolicyChoice.of(PRESETS["least-work"])


def picker(kind: str) -> PolicyChoice:
    return PolicyChoice.of(
        read_picker_config(
            f"plugins: [{{type: {kind}}}]\nschedulingProfiles: [{{name: a, plugins: [{{pluginRef: {kind}}}]}}]"
        )
    )


def tempered(temperature: float) -> PolicyChoice:
    return PolicyChoice.named("dynamo", {"router_temperature": temperature})


# ---- the target that is preferred ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "best", "chosen", "expected"),
    [
        (LEAST_WORK, 100.0, 100.0, "chosen"),
        # As equal as two sums of the same parts are.
        (LEAST_WORK, 100.0, 100.0 * (1 + 1e-13), "chosen"),
        (LEAST_WORK, 100.0, 100.0 * (1 + 1e-11), "best"),
        (LEAST_WORK, 0.0, 0.0, "chosen"),
        (LEAST_WORK, 0.0, 1e-300, "best"),
        (LEAST_WORK, 100.0, None, "best"),
        (tempered(0.0), 5.0, 5.0, "chosen"),
        # Chance decides between unequal ones, too, so what it has drawn is preferred.
        (tempered(0.5), 5.0, 5.0, "best"),
        (picker("max-score-picker"), 1.0, 1.0, "chosen"),
        (picker("random-picker"), 1.0, 1.0, "best"),
        (picker("weighted-random-picker"), 1.0, 1.0, "best"),
        (PolicyChoice(None), 1.0, 1.0, "chosen"),
    ],
)
def test_the_chosen_target_is_preferred_if_it_is_as_good_as_the_best(
    policy: PolicyChoice, best: float, chosen: float | None, expected: str
) -> None:
    other = None if chosen is None else Scored(target("chosen"), chosen, {})
    assert preferred(Scored(target("best"), best, {}), other, policy).instance_id == expected


@pytest.mark.parametrize(
    ("fields", "tokens", "is_reused"),
    [
        ({}, 64, 0),
        ({"device": 32, "host": 16}, 64, 48),
        ({"device": 16, "expected": 32}, 64, 32),
        ({"device": 32, "expected": 16}, 64, 32),
        # The last block is computed in any case.
        ({"device": 64}, 64, 48),
        ({"device": 64}, 65, 64),
        ({"device": 64}, 0, 0),
    ],
)
def test_a_target_computes_what_waits_there_and_what_it_does_not_reuse(
    fields: dict[str, Any], tokens: int, is_reused: int
) -> None:
    some = target("a", wait=500, active=9, context=7_000, **fields)
    assert reused(some, prompt(tokens)) == is_reused
    assert work(some, prompt(tokens)) == 500 + tokens - is_reused


# ---- what is counted ----------------------------------------------------------------------------------


def scene(
    rows: Mapping[int, int], loads: Mapping[int, Load], count: int = 3, blocks: int = 10
) -> tuple[GroupSnapshot, PromptMatches]:
    """Targets of which each has so many blocks of a prompt of ten, by publisher."""
    fleet = equal_targets(count)
    named = {(f"pod-{publisher}", 0): TargetRow(device=has) for publisher, has in rows.items()}
    request = RoutingRequest(SIZE * blocks + 5, SIZE)
    matches = PromptMatches(request, PromptState(named, loads, {}, {}), pack(range(blocks)))
    return GroupSnapshot(GroupEntry(1, 1), fleet, loads), matches


async def decide(
    shadows: Shadows,
    of: tuple[GroupSnapshot, PromptMatches],
    *,
    place: int = 0,
    reserved: Reservation | None = None,
    random: Random | None = None,
    **parameters: Any,
) -> SelectedTarget:
    """Decide by least-work; ``place`` is the one that Redis takes of the order."""
    snapshot, matches = of
    question = question_of(**parameters)
    offers = order(snapshot, matches, question, random or Random(1))
    assert offers is not None
    shadowed = shadows.begin(offers, snapshot, matches, question)
    await asyncio.sleep(0)
    taken = SelectedTarget(
        offers.decode.scored(place),
        (),
        question.policy,
        Decision.KV_AWARE,
        matches.request.tokens,
        reservations=[] if reserved is None else [reserved],
        group_id=7,
    )
    if shadowed is not None:
        shadowed.end(taken)
    return taken


def counted(metrics: Metrics, shadow: str) -> tuple[dict[str, float], dict[str, float]]:
    """The decisions and the tokens of a shadow."""
    choices = {
        choice: metrics.shadow_decisions.labels(shadow=shadow, choice=choice).value for choice in ("same", "other")
    }
    tokens = {by: metrics.shadow_tokens.labels(shadow=shadow, by=by).value for by in ("shadow", "policy")}
    return choices, tokens


#: The first one has the whole prompt, and so much to do that least-work leaves it alone.
CROWDED = ({1: 10, 2: 2}, {1: Load(100_000, 50, 0)})


async def test_a_shadow_is_compared_with_what_the_policy_reuses() -> None:
    metrics = Metrics()
    shadows = shadows_of(Kept(), "lmetric", metrics=metrics)
    taken = await decide(shadows, scene({1: 10, 2: 2}, {}), reserved=reservation())
    assert taken.target.candidate.publisher == 1
    assert counted(metrics, "lmetric") == ({"same": 1, "other": 0}, {"shadow": 160, "policy": 160})


async def test_a_shadow_that_prefers_another_target_counts_what_that_one_reuses() -> None:
    metrics = Metrics()
    patient = PolicyChoice.named("longest", {"wait_max": 1e6})
    shadows = shadows_of(Kept(), metrics=metrics, more=[Shadow("longest", patient)])
    taken = await decide(shadows, scene(*CROWDED), reserved=reservation())
    assert taken.target.candidate.publisher == 2
    assert counted(metrics, "longest") == ({"same": 0, "other": 1}, {"shadow": 160, "policy": 32})


async def test_shadows_compare_with_the_first_of_the_order_and_not_with_what_redis_takes() -> None:
    """They run while the decision waits for Redis."""
    metrics, kept = Metrics(), Kept()
    shadows = shadows_of(kept, "least-work", metrics=metrics)
    taken = await decide(shadows, scene({1: 10, 2: 2}, {}), place=1, reserved=reservation())
    assert taken.target.candidate.publisher == 2
    assert counted(metrics, "least-work") == ({"same": 1, "other": 0}, {"shadow": 160, "policy": 160})
    (record,) = kept.decisions
    assert (record.chosen, record.expected, record.shadows["least-work"].publisher) == (2, 32, 1)


# ---- which decisions are kept -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "nonce", "is_kept"),
    [
        (1.0, "f" * 16, True),
        (1.0, "0" * 16, True),
        (0.5, "7" + "f" * 15, True),
        (0.5, "8" + "0" * 15, False),
        (2.0**-64, "0" * 16, True),
        (2.0**-64, "0" * 15 + "1", False),
        (0.0, "0" * 16, False),
    ],
)
async def test_the_share_of_decisions_that_are_kept_is_that_of_all_nonces(
    share: float, nonce: str, is_kept: bool
) -> None:
    kept = Kept()
    shadows = shadows_of(kept, "lmetric", share=share)
    await decide(shadows, scene({1: 10}, {}), reserved=reservation(nonce))
    shadows.ended([reservation(nonce)], 5.0, NO_USAGE)
    assert [each.nonce for each in kept.decisions] == [nonce] * is_kept
    assert kept.outcomes == [(nonce, None, 5.0)] * is_kept, "each replica knows it by the nonce alone"


class Drawn(Random):
    """Draws the same number again and again."""

    def __init__(self, number: float) -> None:
        super().__init__(1)
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize(("drawn", "is_kept"), [(0.0, True), (0.2499, True), (0.25, False), (0.9, False)])
async def test_chance_keeps_a_share_of_the_decisions_without_a_reservation(drawn: float, is_kept: bool) -> None:
    kept, options = Kept(), SelectionOptions(decisions_kept=0.25)
    shadows = Shadows(kept, None, options, Metrics(), asyncio.ensure_future, Drawn(drawn))  # type: ignore[arg-type]
    await decide(shadows, scene({1: 10}, {}))
    assert [each.nonce for each in kept.decisions] == [""] * is_kept


@pytest.mark.parametrize(
    ("ttft_ms", "usage", "is_noted"),
    [
        (5.0, NO_USAGE, True),
        (0.0, NO_USAGE, True),
        (None, Usage(0), True),
        (None, NO_USAGE, False),
        (None, Usage(None, 64, 9), False),
    ],
)
async def test_an_end_that_says_nothing_of_the_prompt_is_not_noted(
    ttft_ms: float | None, usage: Usage, is_noted: bool
) -> None:
    kept = Kept()
    shadows_of(kept).ended([reservation("0" * 16)], ttft_ms, usage)
    assert kept.outcomes == [("0" * 16, usage.cached_tokens, ttft_ms)] * is_noted
    shadows_of(kept).ended([], 5.0, Usage(1))
    assert len(kept.outcomes) == is_noted


# ---- what is kept of them -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, TARGETS_MAX - 1, TARGETS_MAX, 39])
async def test_the_chosen_target_and_those_of_shadows_are_in_the_record(place: int) -> None:
    kept = Kept()
    loads = {publisher: Load(100 * publisher, publisher, 0) for publisher in range(1, 41)}
    shadows = shadows_of(kept, "sticky", "lmetric")
    taken = await decide(shadows, scene(dict.fromkeys(loads, 1), loads, count=40), place=place, reserved=reservation())
    (record,) = kept.decisions
    publishers = [each.publisher for each in record.targets]
    assert len(publishers) == len(set(publishers)) == TARGETS_MAX
    assert record.chosen == taken.target.candidate.publisher
    assert {record.chosen, *(each.publisher for each in record.shadows.values())} <= set(publishers)
    assert publishers[: TARGETS_MAX - 3] == list(range(1, TARGETS_MAX - 2)), "the best come first"


@pytest.mark.parametrize("blocks", [1, BLOCKS_MAX, BLOCKS_MAX + 1])
async def test_the_beginning_of_a_prompt_is_kept(blocks: int) -> None:
    kept = Kept()
    await decide(shadows_of(kept), scene({}, {}, blocks=blocks), reserved=reservation())
    (record,) = kept.decisions
    assert record.blocks == pack(range(min(blocks, BLOCKS_MAX)))
    assert (record.tenant_id, record.policy, record.decision) == (GROUP.tenant_id, "least-work", "kv_aware")
    assert (record.tokens, record.block_size, record.pool) == (SIZE * blocks + 5, SIZE, 0)


# ---- readings that only a shadow needs ----------------------------------------------------------------


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


async def test_gauges_that_only_a_shadow_needs_are_read_behind_the_decision(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_SIDE_SECONDS", 3600.0)
    for number in (1, 2):
        address = Target(f"http://10.0.0.{number}:8000")
        await store.registry.register(registration(f"pod-{number}", model_name="m", target=address))
    reads, read = list[list[int]](), store.gauges.read

    async def noted(group_id: int, publishers: list[int]) -> dict[int, Gauges]:
        reads.append(list(publishers))
        return await read(group_id, publishers)

    monkeypatch.setattr(store.gauges, "read", noted)
    shadows = read_shadows("llm-d,composite")
    selector = selector_of(store, metrics, shadows=shadows, decisions_kept=1.0, loads_seconds=3600.0)
    gauges = Gauges(waiting=3, running=2, kv_usage=0.25)
    fleet = await selector.snapshots.newest_fleet((await store.directory.claims())[0].registration.group)
    assert fleet is not None
    entry = await store.directory.group(fleet.table.group)
    assert entry is not None
    for publisher in fleet.by_publisher:
        assert await store.gauges.note(entry.group_id, publisher, gauges, 3_600_000)

    first = await select(store, selector)
    await wait_until(lambda: len(reads) == 1, "they are read")
    reading = selector._shadows._reading
    assert reading is not None
    await reading
    second = await select(store, selector)
    assert reads == [sorted(fleet.by_publisher)], "once for both shadows, and not again while they are young"

    async def both() -> bool:
        found = await store.kept_decisions.read(entry.group_id, since_ms=0, decisions_max=9)
        return len(found.decisions) == 2

    await wait_until(both, "both decisions are written")
    found = await store.kept_decisions.read(entry.group_id, since_ms=0, decisions_max=9)
    by_nonce = {record.nonce: {each.gauges for each in record.targets} for record in found.decisions}
    assert by_nonce == {first.reservations[0].nonce: {None}, second.reservations[0].nonce: {gauges}}
