"""What a decision promises of each target, and how much is believed of targets that have promised too much."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from waymark.base.metrics import Metrics
from waymark.decide.books import Bookkeeper, Choices, believed, promises_of
from waymark.decide.fleet import Allowed, Fleet, OpaquePrefix, PromptState
from waymark.decide.policies.policy import Candidate, RoutingRequest, Scored
from waymark.domain.books import Promise, Usage
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable, PublisherRow
from waymark.store.reservations import Reservation
from waymark.store.store import Store

SIZE = 16
#: Ten blocks, and 5 tokens behind them.
REQUEST = RoutingRequest(10 * SIZE + 5, SIZE)
FLEET = Fleet(
    HolderTable(
        b"v",
        GroupName("t", "m"),
        {number: PublisherRow(f"pod-{number}", 0, SIZE, "instance") for number in (1, 2, 3, 4)},
        {},
    )
)
ALL = Choices(FLEET.targets(None, "whole"))


def row(device: int = 0, host: int = 0, shared: int = 0, disk: int = 0) -> TargetRow:
    return TargetRow(device, host, shared, disk)


def state(rows: dict[str, TargetRow], **more: Any) -> PromptState:
    named = {(name, 0): each for name, each in rows.items()}
    return PromptState(named, {}, more.pop("expected", {}), {}, more.pop("prefixes", {}))


def promised(
    seen: PromptState, *publishers: int, choices: Choices = ALL, request: RoutingRequest = REQUEST
) -> list[Promise]:
    return [Promise.of(text) for text in promises_of(publishers, seen, request, FLEET, choices)]


def test_a_promise_has_each_medium_and_what_the_best_and_the_average_have() -> None:
    seen = state({"pod-1": row(4, 2, 1, 1), "pod-2": row(2)})

    # (8 + 2) blocks among four targets.
    assert promised(seen, 1, 2, 3) == [
        Promise(128, 64, 32, 16, 16, 128, 40),
        Promise(128, 32, 0, 0, 0, 32, 40),
        Promise(128, 0, 0, 0, 0, 0, 40),
    ]


def test_an_engine_computes_the_last_tokens_itself() -> None:
    whole = RoutingRequest(10 * SIZE, SIZE)
    (found,) = promised(state({"pod-1": row(10)}), 1, request=whole)

    assert (found.chosen, found.expected) == (160, 144), "the last block is computed in any case"


def test_what_a_target_will_have_soon_is_expected_of_it() -> None:
    seen = state({"pod-1": row(2)}, expected={1: 6, 2: 3})

    assert [each.expected for each in promised(seen, 1, 2)] == [96, 48]
    assert [each.chosen for each in promised(seen, 1, 2)] == [32, 0]


def test_an_opaque_prefix_counts_where_it_is_longer() -> None:
    prefixes = {("pod-1", 0): OpaquePrefix(hot=80, warm=100), ("pod-2", 0): OpaquePrefix(hot=10, warm=0)}
    seen = state({"pod-1": row(2, 1), "pod-2": row(2)}, prefixes=prefixes)

    found = promised(seen, 1, 2)
    assert [(each.device, each.host, each.disk, each.shared) for each in found] == [(80, 16, 20, 0), (32, 0, 0, 0)]


def test_only_targets_that_could_have_been_taken_count() -> None:
    seen = state({"pod-1": row(8), "pod-2": row(2)})
    without_the_best = Choices(FLEET.targets(None, "whole"), Allowed(without=frozenset({1})))
    ranked = Choices.of([Scored(Candidate(2, "pod-2"), 1.0, {}), Scored(Candidate(3, "pod-3"), 0.0, {})])

    assert [each[:1] + each[-1:] for each in promised(seen, 2, choices=without_the_best)] == [(32, 11)]
    assert [each[:1] + each[-1:] for each in promised(seen, 2, choices=ranked)] == [(32, 16)]
    assert (ALL.number, without_the_best.number, ranked.number) == (4, 3, 2)


def test_nothing_is_promised_of_an_empty_index() -> None:
    assert promised(state({}), 1, 2) == [Promise(0, 0, 0, 0, 0, 0, 0)] * 2


# ---- how much is believed --------------------------------------------------------------------------


def test_a_target_that_delivers_too_little_is_believed_so_much_less() -> None:
    prefixes = {("pod-1", 0): OpaquePrefix(hot=80, warm=100), ("pod-2", 0): OpaquePrefix(hot=40)}
    seen = state({"pod-1": row(8, 4, 2, 1), "pod-2": row(8)}, expected={1: 6, 2: 6}, prefixes=prefixes)
    found = believed(seen, {1: 0.25, 99: 0.9}, FLEET.by_publisher)

    assert found.rows == {("pod-1", 0): row(6, 3, 1, 0), ("pod-2", 0): row(8)}
    assert found.prefixes == {("pod-1", 0): OpaquePrefix(60, 75), ("pod-2", 0): OpaquePrefix(40)}
    assert found.expected == {1: 4, 2: 6}
    assert seen.rows[("pod-1", 0)] == row(8, 4, 2, 1), "the books go by what the index says"


def test_a_target_that_delivers_nothing_has_nothing() -> None:
    seen = state({"pod-1": row(8)}, expected={1: 6}, prefixes={("pod-1", 0): OpaquePrefix(80)})
    found = believed(seen, {1: 1.0}, FLEET.by_publisher)

    assert (dict(found.rows), dict(found.prefixes), dict(found.expected)) == ({}, {}, {1: 0})


# ---- requests that have ended ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promise", "usage", "counted"),
    [
        pytest.param("100-40-20-10-5-70-30", Usage(60), [100, 75, 70, 60], id="all-four"),
        pytest.param("100-40-20-10-5-70-30", Usage(None, 200, 5), [0, 0, 0, 0], id="nothing-said"),
        pytest.param("", Usage(60), [0, 0, 0, 0], id="nothing-promised"),
    ],
)
def test_a_request_counts_once_its_engine_has_said_something(promise: str, usage: Usage, counted: list[int]) -> None:
    metrics, told = Metrics(), list[object]()

    def begin(work: Any) -> None:
        work.close()
        told.append(work)

    keeper = Bookkeeper(cast(Store, SimpleNamespace(begin=begin)), metrics)
    reservation = Reservation(1, 2, 3, 4, "0" * 16, promise=promise)
    keeper.booked(reservation, usage, None)

    names = ("available", "chosen", "expected", "delivered")
    values = [metrics.registry.get_sample_value(f"waymark_tokens_{name}_total") for name in names]
    assert values == counted
    assert told == [], "it has shown nothing about its target"
    for drift in (0.0, 0.4):
        keeper.booked(reservation, usage, drift)
    is_counted = any(counted)
    assert len(told) == (2 if is_counted else 0)
    assert metrics.registry.get_sample_value("waymark_drifts_total") == (1 if is_counted else 0), "a healed one is none"
