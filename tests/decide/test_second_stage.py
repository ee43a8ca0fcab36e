"""Requests of two stages, decisions without an index, and prefills at the bound of their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, cast

import pytest

from tests.decide.test_reserve import (
    BLOCKS,
    SIZE,
    SPLIT,
    TABLE,
    Case,
    Index,
    Redis,
    Watching,
    case,
    fails,
    gives,
    takes,
)
from waymark.base.errors import Saturated, StoreUnavailable
from waymark.decide import reserve
from waymark.decide.order import order
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.question import PolicyChoice
from waymark.domain.match import TargetRow
from waymark.domain.status import Decision
from waymark.domain.targets import Role, Target
from waymark.store.reservations import ReservationPart
from waymark.store.scripts import Verdict

A, B = "00000000000000aa", "00000000000000bb"

HISTORIES = PolicyChoice.of(
    read_picker_config(
        """
plugins:
- {type: disagg-headers-handler}
- {type: always-disagg-pd-decider}
- {type: decode-filter}
- {type: prefill-filter}
- {type: prefix-cache-scorer, parameters: {lruCapacityPerServer: 500, maxPrefixBlocksToMatch: 40}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: prefix-cache-scorer}]}
"""
    )
)


def seeing(of: Case, **fields: Any) -> Case:
    """Order the targets again, with more that is known of them."""
    of.matches = of.matches._replace(seen=of.matches.seen._replace(**fields))
    offers = order(of.snapshot, of.matches, of.question, Random(1))
    assert offers is not None
    of.offers = offers
    return of


def times(of: Case) -> int:
    """How often a reservation was timed."""
    return sum(of.metrics.decision_duration_seconds.labels(part="reserve").seen)


# ---- two stages ---------------------------------------------------------------------------------------


async def ids(request_id: str | None) -> list[str | None]:
    redis = Redis()
    await case(redis, SPLIT, profile="disagg", request_id=request_id).taken()
    return [terms.request_id for _, terms in redis.asked]


async def test_both_stages_of_a_request_have_ids_that_any_replica_makes_again() -> None:
    first, again, other = await ids(A), await ids(A), await ids(B)
    assert first == again
    assert len({*first, *other}) == 4
    for request_id in (*first, *other):
        assert request_id is not None
        assert (len(request_id), int(request_id, 16) >= 0) == (16, True)
    assert await ids(None) == [None, None]


async def test_two_reservations_are_one_decision_in_time_and_count() -> None:
    of = case(Redis([takes(overdue=2), takes(overdue=3)]), SPLIT, profile="disagg")
    found = await of.taken()
    assert (len(found.reservations), times(of), of.metrics.reservations_expired.value) == (2, 1, 5)
    assert of.metrics.decisions.labels(policy="least-work", decision="kv_aware").value == 1


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (gives(None, Verdict.FULL), Saturated),
        (fails(StoreUnavailable("Redis is away")), StoreUnavailable),
        (gives(None, Verdict.SATURATED), None),
    ],
    ids=["full", "away", "gone"],
)
async def test_a_request_without_its_second_stage_is_no_decision(second: Any, error: type[Exception] | None) -> None:
    redis = Redis([takes(), second])
    of = case(redis, SPLIT, profile="disagg")
    if error is None:
        assert await of.take() is None
    else:
        with pytest.raises(error):
            await of.take()
    assert redis.released == [([f"{0:016x}"], ReservationPart.UNANSWERED)]
    assert times(of) == 0
    assert of.metrics.decisions.labels(policy="least-work", decision="kv_aware").value == 0


@pytest.mark.parametrize("verdict", [Verdict.APPLIED, Verdict.REPEATED])
async def test_a_repeated_second_stage_changes_nothing(verdict: Verdict) -> None:
    redis = Redis([takes(), takes(verdict=verdict)])
    found = await case(redis, SPLIT, profile="disagg", request_id=A).taken()
    assert [each.publisher for each in found.reservations] == [1, 2]
    # The stage of decode has no tokens to compute, so only its request is noted.
    assert [publisher for _, publisher, _ in redis.saw_loads] == ([1, 2] if verdict is Verdict.APPLIED else [1])
    assert len(redis.watched) == (1 if verdict is Verdict.APPLIED else 0)


async def test_a_prompt_of_two_stages_is_noted_for_both_targets() -> None:
    redis = Redis()
    found = await case(redis, SPLIT, policy=HISTORIES).taken()
    assert found.prefill is not None
    assert redis.noted == [(1, 40, 500), (2, 40, 500)]


async def test_a_redis_that_forgets_the_first_target_is_not_asked_for_the_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = await case(Redis(is_forgetful=True), SPLIT, policy=HISTORIES).taken()
    assert [each.publisher for each in found.reservations] == [1, 2], "the decision stands"
    assert caplog.messages.count("Redis does not remember where a prompt has gone") == 1


@pytest.mark.parametrize("is_reserved", [True, False])
async def test_headers_name_both_stages_also_of_a_question_alone(is_reserved: bool) -> None:
    of = case(Redis(), SPLIT, profile="disagg", is_reserved=is_reserved)
    found = await of.taken()
    assert dict(found.headers) == {
        "x-gateway-destination-endpoint": "10.0.0.1:8000",
        "mif-prefill-endpoint": "10.0.0.2:8000",
        "x-prefiller-host-port": "10.0.0.2:8000",
    }
    assert (len(found.reservations), times(of)) == ((2, 1) if is_reserved else (0, 0))


# ---- what a decision goes by --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, Decision.LOAD), ({"expected": {1: 4}}, Decision.PREFIX), ({"expected": {2: 4}}, Decision.PREFIX)],
)
async def test_without_an_index_a_decision_goes_by_what_is_expected(fields: dict[str, Any], expected: Decision) -> None:
    found = await seeing(case(Redis(), has_index=False), **fields).taken()
    assert found.decision is expected
    assert found.target.candidate.expected == (4 * SIZE if fields else 0)
    with_index = await seeing(case(Redis()), **fields).taken()
    assert with_index.decision is Decision.KV_AWARE


@pytest.mark.parametrize(
    ("history", "expected"), [({1: 3}, Decision.PREFIX), ({1: 0, 2: 0}, Decision.LOAD), ({}, Decision.LOAD)]
)
async def test_without_an_index_a_decision_goes_by_where_the_prompt_went_before(
    history: dict[int, int], expected: Decision
) -> None:
    of = case(Redis(), {1: Target(), 3: Target(role=Role.PREFILL)}, policy=HISTORIES, has_index=False)
    found = await seeing(of, history=history).taken()
    assert found.target.candidate.history == SIZE * history.get(1, 0)
    assert found.decision is expected


@pytest.mark.parametrize(
    ("row", "soon", "counted"),
    [(TargetRow(device=2), 6, 4), (TargetRow(device=6), 6, 0), (TargetRow(device=9), 6, 0), (TargetRow(), 6, 6)],
)
async def test_tokens_that_only_speculation_knows_are_counted(row: TargetRow, soon: int, counted: int) -> None:
    of = seeing(case(Redis(), {1: Target()}, rows={1: row}), expected={1: soon})
    await of.taken()
    assert of.metrics.speculative_tokens.value == counted * SIZE


@pytest.mark.parametrize(("windows", "walked", "counted"), [([], 9, 7), ([], 2, 0), (["window"], 9, 0)])
async def test_blocks_that_another_target_has_more_are_counted_without_windows(
    windows: list[str], walked: int, counted: int
) -> None:
    of = case(Redis(), {1: Target()}, rows={1: TargetRow(device=2)})
    walk = cast(Any, of.matches.walk)
    walk.blocks, walk.view.windows = walked, windows
    await of.taken()
    assert of.metrics.avoidable_prefill_tokens.value == counted * SIZE


@pytest.mark.parametrize(("count", "others"), [(1, 0), (2, 1), (3, 2), (9, 2)])
async def test_a_decision_names_as_many_targets_as_there_are_and_its_caller_wants(count: int, others: int) -> None:
    found = await case(Redis([takes(1)]), dict.fromkeys((1, 2, 3), Target()), count=count).taken()
    names = [each.publisher for each in found.others]
    assert len(names) == others
    assert found.target.candidate.publisher not in names


# ---- the end of a prefill -----------------------------------------------------------------------------


@pytest.fixture
async def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time of the loop, which stands still."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 1000.0)
    return 1000.0


@pytest.mark.parametrize(
    ("done_at", "ends_at", "given_back", "left"),
    [
        (0.0, 10.0, ["a"], 0),
        (0.001, 10.0, [], 1),
        # The reservation itself is over, with all that it has.
        (0.0, 0.0, [], 0),
        (0.001, 0.001, [], 1),
    ],
)
async def test_a_prefill_is_over_at_its_time(
    now: float, done_at: float, ends_at: float, given_back: list[str], left: int
) -> None:
    watching = Watching(Index(TABLE))
    watching.add("a", done_at=now + done_at, ends_at=now + ends_at)
    assert await watching.look() == given_back
    assert (len(watching.progress), watching.counted("estimate")) == (left, len(given_back))


async def test_a_new_prefill_is_looked_at_once_at_one_moment(now: float) -> None:
    index = Index(TABLE)
    watching = Watching(index)
    watching.add("a", piece=b"x")
    await watching.look()
    assert index.asked == [[b"x"]]
    watch = watching.progress._watched["a"]
    assert watch.next_at == now, "it has begun just now"
    watch.began_at, watch.next_at = now - 10.0, now + 0.001
    await watching.look()
    assert len(index.asked) == 1
    watch.next_at = now
    await watching.look()
    assert (len(index.asked), watch.next_at) == (2, now + 2.0), "a fifth of its time so far"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (ReservationPart.PREFILL, "caller"),
        (ReservationPart.OK, "end"),
        (ReservationPart.FAILED, "end"),
        (ReservationPart.UNANSWERED, "end"),
    ],
)
async def test_what_a_caller_reports_is_counted_once_by_what_it_was(part: ReservationPart, reason: str) -> None:
    watching = Watching(Index(TABLE))
    made = [watching.add(nonce, piece=b"x") for nonce in "ab"]
    for reservations in (made[:1], made[:1], made):
        watching.progress.told(reservations, part, 0)
    assert len(watching.progress) == 0
    assert {by: watching.counted(by) for by in ("caller", "end", "index", "estimate")} == {
        "caller": 0,
        "end": 0,
        "index": 0,
        "estimate": 0,
        reason: 2,
    }


async def test_a_renewal_gives_nothing_back_and_lasts_from_now_on(now: float) -> None:
    watching = Watching(Index(TABLE))
    made = watching.add("a", piece=b"x", ends_at=now + 1.0)
    stranger = made._replace(nonce="b")
    watching.progress.told([made, stranger], ReservationPart.RENEW, 30_000)
    assert len(watching.progress) == 1
    assert watching.progress._watched["a"].of.ends_at == now + 30.0
    assert watching.counted("end") == watching.counted("caller") == 0


async def test_prefills_of_several_groups_are_looked_up_by_group(now: float) -> None:
    index = Index(TABLE)
    watching = Watching(index)
    for nonce, group in (("a", "m"), ("b", "n"), ("c", "m")):
        watching.add(nonce, piece=nonce.encode())
        watch = watching.progress._watched[nonce]
        watch.of = watch.of._replace(group=watch.of.group._replace(model_name=group))
    index.holders = {b"b": [41], b"c": [41]}
    assert await watching.look() == ["b", "c"]
    assert index.asked == [[b"a", b"c"], [b"b"]]


async def test_the_oldest_of_too_many_is_left_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_WATCHED_MAX", 2)
    watching = Watching(Index(TABLE))
    for nonce in "abc":
        watching.add(nonce, piece=b"x")
    assert list(watching.progress._watched) == ["b", "c"]
    assert watching.counted("end") == 0


@pytest.mark.parametrize(
    ("row", "is_watched"), [(TargetRow(device=BLOCKS), False), (TargetRow(device=BLOCKS - 1), True)]
)
async def test_a_prompt_that_the_device_has_whole_is_not_watched(row: TargetRow, is_watched: bool) -> None:
    redis = Redis()
    await case(redis, {1: Target()}, rows={1: row}).taken()
    assert (len(redis.watched), redis.asked[0][0][0].new) == ((1, SIZE + 5) if is_watched else (0, 0))


def nonces(released: Sequence[tuple[list[str], ReservationPart]]) -> list[str]:
    return [nonce for each, _ in released for nonce in each]


async def test_prefills_that_end_by_the_same_means_are_given_back_in_one_call(now: float) -> None:
    watching = Watching(Index(TABLE))
    for nonce, by in (("a", "estimate"), ("b", "index"), ("c", "estimate")):
        watching.add(nonce, done_at=now, by=by)
    await watching.progress._poll()
    assert [sorted(each) for each, _ in watching.redis.released] == [["a", "c"], ["b"]]
    assert sorted(nonces(watching.redis.released)) == ["a", "b", "c"]
