"""The fleet that explains kept decisions: its caches, its queues, and how both are found from the records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import within
from tests.unit import examples
from waymark.decide import simulated_fleet as module
from waymark.decide.simulated_fleet import SimulatedFleet, _Cache, _PrefillQueue, _prompt
from waymark.domain.answer_times import TimeSums
from waymark.domain.packing import pack
from waymark.store.kept_decisions import BLOCKS_MAX, TARGETS_MAX, KeptDecision, KeptTarget

SIZE = 10


def decision(
    time_ms: int = 0,
    blocks: Sequence[int] = (1, 2, 3),
    *,
    chosen: int = 1,
    tokens: int | None = None,
    expected: int = 0,
    work: int = 100,
    targets: Sequence[KeptTarget] | None = None,
    **fields: Any,
) -> KeptDecision:
    """A decision about a prompt with these blocks between two targets."""
    if targets is None:
        targets = [KeptTarget(1, "pod-1"), KeptTarget(2, "pod-2")]
    count = SIZE * len(blocks) + 5 if tokens is None else tokens
    return KeptDecision(
        time_ms, f"{time_ms:016x}", "t", "p", "kv_aware", count, SIZE, chosen, expected, work, targets,
        blocks=pack(blocks), **fields,
    )  # fmt: skip


def one_each(*keys: int) -> list[tuple[int, int]]:
    return [(key, 1) for key in keys]


# ---- caches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "capacity", "asked", "limit", "expected"),
    [
        ([[1, 2, 3]], 10, [1, 2, 3], 9, 3),
        ([[1, 2, 3]], 10, [1, 2, 9], 9, 2),
        ([[1, 2, 3]], 10, [9, 2, 3], 9, 0),
        ([[1, 2, 3]], 10, [1, 2, 3], 2, 2),
        ([], 10, [1], 9, 0),
        # The last block of a prompt is the first to leave.
        ([[1, 2, 3]], 2, [1, 2, 3], 9, 2),
        # The one that was used longest ago leaves.
        ([[1, 2], [3, 4]], 3, [1, 2], 9, 1),
        ([[1, 2], [3, 4]], 3, [3, 4], 9, 2),
        ([[1, 2], [3, 4], [1, 2]], 3, [3, 4], 9, 1),
        ([[1, 2]], 0, [1], 9, 0),
    ],
)
def test_a_cache_has_the_beginnings_that_were_used_last(
    prompts: list[list[int]], capacity: int, asked: list[int], limit: int, expected: int
) -> None:
    cache = _Cache()
    for prompt in prompts:
        cache.add(one_each(*prompt), capacity)
    assert cache.matched(one_each(*asked), limit) == expected


def test_the_last_kept_block_stands_for_all_behind_it() -> None:
    cache = _Cache()
    cache.add([(1, 1), (2, 7)], 100)
    assert cache.blocks == 8
    assert cache.matched([(1, 1), (2, 9)], 99) == 8, "the other prompt is longer"
    assert cache.matched([(1, 1), (2, 3)], 99) == 4
    cache.add([(1, 1), (2, 3)], 100)
    assert cache.blocks == 8, "a shorter prompt does not make it smaller"
    cache.add([(1, 1), (2, 9)], 100)
    assert cache.blocks == 10


@settings(max_examples=examples(50))
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6, unique=True), max_size=12), st.integers(0, 12))
def test_a_cache_never_has_more_than_its_room(prompts: list[list[int]], capacity: int) -> None:
    cache = _Cache()
    for prompt in prompts:
        cache.add(one_each(*prompt), capacity)
        assert cache.blocks == sum(cache.sizes.values()) <= capacity
        kept = min(len(prompt), capacity)
        assert cache.matched(one_each(*prompt), 99) == kept, "what was added last is there as far as it has room"


# ---- queues -------------------------------------------------------------------------------------------


def test_a_queue_has_what_has_not_ended() -> None:
    queue = _PrefillQueue()
    queue.prefills.extend([(10.0, 100), (20.0, 30)])
    queue.answers.extend([(15.0, 500), (40.0, 70)])
    assert [queue.at(ms) for ms in (0, 9.9, 10, 15, 20, 40)] == [
        (130, 2, 570),
        (130, 2, 570),
        (30, 2, 570),
        (30, 1, 70),
        (0, 1, 70),
        (0, 0, 0),
    ]


# ---- what the records say -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "tokens", "last"),
    [
        (3, 35, (3, 1)),
        (BLOCKS_MAX, SIZE * BLOCKS_MAX + 9, (BLOCKS_MAX, 1)),
        (BLOCKS_MAX, SIZE * BLOCKS_MAX + 10, (BLOCKS_MAX, 2)),
        (BLOCKS_MAX, SIZE * 100, (BLOCKS_MAX, 101 - BLOCKS_MAX)),
        (BLOCKS_MAX, SIZE * BLOCKS_MAX - 1, (BLOCKS_MAX, 1)),
        # A short record of a long prompt has no blocks behind it: they were never hashed.
        (3, SIZE * 100, (3, 1)),
    ],
)
def test_blocks_that_are_not_kept_are_those_of_the_last_one(count: int, tokens: int, last: tuple[int, int]) -> None:
    found = _prompt(decision(blocks=range(1, count + 1), tokens=tokens))
    assert len(found) == count
    assert found[-1] == last
    assert {size for _, size in found[:-1]} <= {1}


@pytest.mark.parametrize(("matches", "expected"), [([0, 0], 3), ([20, 30], 3), ([0, 59], 5), ([70, 0], 7)])
def test_a_prompt_is_found_again_as_far_as_a_target_had_it(matches: list[int], expected: int) -> None:
    targets = [KeptTarget(number, "pod", device=tokens) for number, tokens in enumerate(matches)]
    of = decision(targets=targets)
    assert module._limit(of, _prompt(of)) == expected
    assert module._limit(decision(targets=[]), _prompt(of)) == 3


def test_a_match_is_on_any_medium() -> None:
    assert module._matched(KeptTarget(1, "pod", device=1, host=20, disk=300, shared=4000, expected=9)) == 4321


@pytest.mark.parametrize(
    ("tokens", "blocks", "expected"), [(35, 3, 30), (30, 3, 20), (31, 3, 30), (35, 2, 20), (35, 0, 0), (1, 3, 0)]
)
def test_an_engine_computes_at_least_the_last_token(tokens: int, blocks: int, expected: int) -> None:
    assert module._reusable_tokens(decision(tokens=tokens), blocks) == expected


def test_the_pace_is_the_slope_of_the_times() -> None:
    timed = [decision(work=100 * count, ttft_ms=5.0 + 50.0 * count) for count in range(1, 7)]
    assert module._slope(timed) == pytest.approx(0.5)
    assert module._slope([*timed, decision(work=9)]) == pytest.approx(0.5), "a decision without a time says nothing"
    assert module._slope(timed[:3]) is None
    assert TimeSums().slope is None


@pytest.mark.parametrize(
    ("times", "active", "expected"),
    [
        # Four requests under way on average, over ten decisions in 900 ms.
        (range(0, 1000, 100), 2, 4 * 900 / 10),
        ([5] * 10, 2, 0.0),
        ([9, 3], 2, 0.0),
        ([0, 1], 2, 4 * 1 / 2),
        (range(0, 1000, 100), 0, 0.0),
        ([], 0, 0.0),
    ],
)
def test_a_request_lasts_as_long_as_those_under_way_say(times: Sequence[int], active: int, expected: float) -> None:
    targets = [KeptTarget(1, "pod-1", active=active), KeptTarget(2, "pod-2", active=active)]
    decisions = [decision(time_ms, targets=targets) for time_ms in times]
    assert module._ms_under_way(decisions) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        ([decision(expected=10)], True),
        ([decision(expected=1)], True),
        ([decision(expected=10, targets=[KeptTarget(1, "pod-1")])], True),
        ([decision(expected=0)], False),
        ([], False),
        ([decision(expected=10), decision(blocks=(), tokens=5)], False),
        ([decision(expected=10), decision(has_tokens=False)], False),
        ([decision(expected=10, chosen=9)], False),
        ([decision(expected=10, targets=[KeptTarget(n, "pod") for n in range(1, TARGETS_MAX + 1)])], True),
        ([decision(expected=10, targets=[KeptTarget(n, "pod") for n in range(1, TARGETS_MAX + 2)])], False),
        ([decision(expected=10, targets=[])], False),
    ],
)
def test_a_simulation_needs_blocks_and_few_targets(decisions: list[KeptDecision], expected: bool) -> None:
    assert SimulatedFleet(decisions).is_possible is expected


# ---- the fleet ----------------------------------------------------------------------------------------


def fleet_of(
    decisions: Sequence[KeptDecision], *, token_ms: float = 1.0, request_ms: float = 0.0, answer_ms: float = 0.0
) -> SimulatedFleet:
    """A fleet that is not fitted: its caches have room for all."""
    fleet = SimulatedFleet(decisions)
    fleet._ms_of_token, fleet._ms_of_request, fleet._answer_ms = token_ms, request_ms, answer_ms
    return fleet


async def test_the_decisions_that_were_made_fill_the_caches() -> None:
    fleet = fleet_of(
        [decision(0), decision(1000), decision(2000, chosen=2), decision(3000, blocks=(1, 2, 9)), decision(4000)],
    )
    served = await fleet.actual()
    assert [request and request.expected for request in served] == [0, 30, 0, 20, 30]


async def test_a_request_waits_for_those_before_it() -> None:
    fleet = fleet_of([decision(0), decision(10), decision(200, blocks=(7,))], token_ms=2.0, request_ms=3.0)
    served = await fleet.actual()
    # 35 tokens take 70 ms; then 5 are left of the second prompt, which waits 60 ms; the third waits for nobody.
    assert [request and request.ttft_ms for request in served] == [73.0, 73.0, 33.0]


async def test_a_policy_sees_what_its_own_choices_have_left_behind() -> None:
    decisions = [decision(0), decision(10), decision(20), decision(500)]
    fleet = fleet_of(decisions, token_ms=2.0, answer_ms=100.0)
    seen: list[dict[int, tuple[int, int, int, int]]] = []
    choices = iter([2, 2, 1, 2])

    def choose(of: KeptDecision) -> int | None:
        seen.append({each.publisher: (each.device, each.wait, each.active, each.context) for each in of.targets})
        return next(choices)

    served = await fleet.play(choose)
    assert [request and request.expected for request in served] == [0, 30, 0, 30]
    assert [each[1] for each in seen] == [(0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (30, 0, 0, 0)]
    assert [each[2] for each in seen] == [(0, 0, 0, 0), (30, 35, 1, 35), (30, 40, 2, 70), (30, 0, 0, 0)]


async def test_what_was_seen_of_a_target_stays_beside_its_cache_and_queue() -> None:
    targets = [
        KeptTarget(1, "pod-1", 3, 99, 99, 99, 99, 99, 99, 99, 99, 0.5, 7, 2.0, "decode", {"a": "b"}),
        KeptTarget(2, "pod-2", weight=4.0),
    ]
    fleet = fleet_of([decision(0, targets=targets), decision(10, targets=targets[:1])])
    seen: list[list[KeptTarget]] = []

    def choose(of: KeptDecision) -> int | None:
        seen.append(sorted(of.targets))
        return None

    assert await fleet.play(choose) == [None, None]
    for each in seen:
        assert [target.publisher for target in each] == [1, 2], "also a target that was not kept this time"
        assert each[0] == KeptTarget(
            1, "pod-1", 3, health=0.5, last_cold=7, weight=2.0, role="decode", labels={"a": "b"}
        )
        assert each[1].weight == 4.0


async def test_targets_are_in_an_order_by_chance_that_is_the_same_each_time() -> None:
    targets = [KeptTarget(number, f"pod-{number}") for number in range(1, 9)]
    fleet = fleet_of([decision(number, targets=targets) for number in range(30)])

    async def orders() -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []

        def choose(of: KeptDecision) -> int:
            found.append(tuple(each.publisher for each in of.targets))
            return of.targets[0].publisher

        await fleet.play(choose)
        return found

    first = await orders()
    assert first == await orders()
    assert len(set(first)) > 20
    assert {order[0] for order in first} == set(range(1, 9))


# ---- fitting ------------------------------------------------------------------------------------------


def truth(room: int, *, count: int = 200, ms_of_token: float = 0.4, ms_of_request: float = 20.0) -> list[KeptDecision]:
    """Decisions of two engines with so much room, and times that follow from their queues."""
    random = Random(5)
    caches, free_at = {1: _Cache(), 2: _Cache()}, {1: 0.0, 2: 0.0}
    found: list[KeptDecision] = []
    now = 0
    for number in range(count):
        now += random.randrange(20, 60)
        blocks = [1 + 100 * random.randrange(12), *(random.randrange(2, 10**6) for _ in range(2))]
        if number % 2 and found:
            blocks = [*(int.from_bytes(found[-1].blocks[at : at + 8], "little") for at in (0, 8, 16)), number + 10**7]
        prompt = one_each(*blocks)
        has = {each: caches[each].matched(prompt, 99) for each in (1, 2)}
        chosen = max((1, 2), key=lambda each: (has[each], -free_at[each]))
        tokens = SIZE * len(blocks) + 5
        expected = min(SIZE * has[chosen], (tokens - 1) // SIZE * SIZE)
        waits = max(0.0, free_at[chosen] - now) / ms_of_token
        free_at[chosen] = max(free_at[chosen], now) + ms_of_token * (tokens - expected)
        targets = [KeptTarget(each, f"pod-{each}", device=SIZE * has[each], active=1) for each in (1, 2)]
        found.append(
            decision(
                now,
                blocks,
                chosen=chosen,
                expected=expected,
                work=round(waits) + tokens - expected,
                targets=targets,
                ttft_ms=free_at[chosen] - now + ms_of_request,
            )
        )
        caches[chosen].add(prompt, room)
    return found


@pytest.mark.parametrize("room", [12, 40])
async def test_caches_and_pace_are_found_from_the_records(room: int) -> None:
    decisions = truth(room)
    fleet = SimulatedFleet(decisions)
    assert fleet.is_possible
    assert await fleet.fit()
    served = await fleet.actual()
    expected = sum(request.expected for request in served if request is not None)
    assert expected == pytest.approx(sum(each.expected for each in decisions), rel=0.02)
    assert fleet._ms_of_token == pytest.approx(0.4, rel=0.1)
    assert fleet._ms_of_request == pytest.approx(20.0, rel=0.1)
    times = [request.ttft_ms for request in served if request is not None]
    mean = sum(each.ttft_ms or 0.0 for each in decisions) / len(decisions)
    assert sum(times) / len(times) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_the_smallest_cache_is_found_and_the_largest(room: int) -> None:
    """One prompt of three blocks, of which a target has as many again as it has room for."""
    targets = [KeptTarget(1, "pod-1", device=SIZE * room), KeptTarget(2, "pod-2")]
    decisions = [decision(), *(decision(100 * number, expected=SIZE * room, targets=targets) for number in range(1, 9))]
    fleet = SimulatedFleet(decisions)
    assert await fleet.fit()
    assert room <= fleet._capacity < (room + 1 if room < 3 else 28)
    assert [request and request.expected for request in await fleet.actual()] == [0, *[SIZE * room] * 8]


async def test_records_that_no_cache_explains_are_not_fitted() -> None:
    # Each prompt is new, and yet all of it was expected.
    decisions = [decision(100 * number, (3 * number, 3 * number + 1), expected=20) for number in range(1, 60)]
    assert not await SimulatedFleet(decisions).fit()


async def test_without_times_nothing_takes_any_time() -> None:
    decisions = [each._replace(ttft_ms=None) for each in truth(12)]
    fleet = SimulatedFleet(decisions)
    assert await fleet.fit()
    assert {request and request.ttft_ms for request in await fleet.actual()} == {0.0}


async def test_answers_end_at_once_if_nobody_was_seen_under_way() -> None:
    idle = [
        each._replace(targets=[target._replace(active=0) for target in each.targets]) for each in truth(12, count=60)
    ]
    fleet = SimulatedFleet(idle)
    await fleet.fit()
    assert fleet._answer_ms == 0.0
    served = await fleet.actual()
    busy = SimulatedFleet(truth(12, count=60))
    await busy.fit()
    # Two requests under way, over the time between two, and from the first token on.
    times = [request.ttft_ms for request in served if request is not None]
    span = idle[-1].time_ms - idle[0].time_ms
    assert busy._answer_ms == pytest.approx(max(0.0, 2 * span / 60 - sum(times) / 60))
    assert busy._answer_ms > 0


async def test_other_work_of_the_process_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 10)
    turns = 0

    async def turn(seconds: float) -> None:
        nonlocal turns
        turns += seconds == 0

    monkeypatch.setattr(asyncio, "sleep", turn)
    decisions = [decision(number, targets=[KeptTarget(1, "pod-1", device=20)]) for number in range(41)]
    fleet = fleet_of(decisions)
    await fleet.actual()
    assert turns == 5, "at the first, and at each tenth"
    await fleet._found(1)
    assert turns == 10


@pytest.mark.parametrize(("count", "stride"), [(1, 1), (9, 1), (10, 2), (19, 2), (20, 3)])
async def test_of_many_decisions_some_are_compared(count: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPARED_MAX", 10)
    fleet, strides = SimulatedFleet([decision(0)] * count), set[int]()

    async def found(of: int) -> int:
        strides.add(of)
        return 0

    async def unpaced() -> None:
        return None

    monkeypatch.setattr(fleet, "_found", found)
    monkeypatch.setattr(fleet, "_fit_pace", unpaced)
    monkeypatch.setattr(fleet, "actual", fleet_of([decision(0)]).actual)
    assert await fleet.fit()
    assert strides == {stride}


async def test_each_target_of_a_compared_decision_counts() -> None:
    """The second prompt is found at one of two targets, and the third again."""
    both = [KeptTarget(1, "pod-1"), KeptTarget(2, "pod-2")]
    decisions = [decision(0, targets=both), decision(1, chosen=2, targets=both), decision(2, targets=both)]
    fleet = fleet_of(decisions)
    assert await fleet._found(1) == SIZE * (0 + 3 + 6)
    assert await fleet._found(2) == SIZE * (0 + 6), "only the first and the third"
    fleet._capacity = 2.0
    assert await fleet._found(1) == SIZE * (0 + 2 + 4), "the last block has left"
    # What is asked for is no more than a target had in truth.
    short = fleet_of([decision(0, targets=both, tokens=35), decision(1, (1, 2), targets=both)])
    assert await short._found(1) == SIZE * 2


def test_a_pace_leaves_the_rest_to_the_request() -> None:
    timed = [decision(100 * number, (number,), tokens=20, ttft_ms=40.0) for number in range(4)]
    fleet = SimulatedFleet(timed)
    # 20 tokens at 1 ms, and nobody waits: 20 ms are left of each request, and nothing unexplained.
    assert fleet._pace_error([20] * 4, 1.0) == (0.0, 20.0)
    # At 3 ms a token the times would be too long, and a request takes no less than nothing.
    assert fleet._pace_error([20] * 4, 3.0) == (400.0, 0.0)
    # Each waits for the one before: 200 ms of work in 100 ms.
    error, rest = fleet._pace_error([20] * 4, 10.0)
    assert rest == 0.0
    assert error == pytest.approx(sum((40 - wait) ** 2 for wait in (200, 300, 400, 500)) / 4)
    # A decision that was not served keeps nobody waiting.
    assert fleet._pace_error([20, None, None, 20], 10.0)[0] == pytest.approx(160.0**2)


@pytest.mark.parametrize("times", [[40.0] * 12, [80.0 - n for n in range(12)]], ids=["equal", "falling"])
async def test_times_that_do_not_grow_with_the_work_are_those_of_requests(times: list[float]) -> None:
    """Prompts of one length say nothing of the pace; a search for it from 0 would have no end."""
    targets = [KeptTarget(1, "pod-1", device=20), KeptTarget(2, "pod-2")]
    decisions = [
        decision(1000 * n, expected=20 if n else 0, work=100 + n, ttft_ms=ms, targets=targets if n else None)
        for n, ms in enumerate(times)
    ]
    fleet = SimulatedFleet(decisions)
    async with within(30.0):
        assert await fleet.fit()
    found = [request.ttft_ms for request in await fleet.actual() if request is not None]
    assert found == pytest.approx([sum(times) / len(times)] * len(times))
