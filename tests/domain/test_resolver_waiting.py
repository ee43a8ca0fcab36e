"""Stores whose parent is not known: never at the root, applied when it comes, taken out by removals and clears."""

from __future__ import annotations

import pytest

from tests.domain.index import Index
from tests.factories import batch, cleared, keys, registration, removed, stored
from waymark.domain.engines import Copies, EngineKind
from waymark.domain.events import Event
from waymark.domain.hashing import namespace


@pytest.fixture
def index() -> Index:
    return Index()


def test_a_store_without_its_parent_is_not_indexed(index: Index) -> None:
    index.events(stored([2, 3], "BC", parent=1))
    assert index.has()
    assert (index.parts, index.resolver.waiting.blocks, index.ignored) == ([], 2, {})


@pytest.mark.parametrize("together", [True, False], ids=["same-batch", "later-batch"])
def test_it_is_applied_when_its_parent_comes(index: Index, together: bool) -> None:
    child, parent = stored([2, 3], "BC", parent=1), stored([1], "A")
    if together:
        index.events(child, parent)
    else:
        index.fold(batch(child), batch(parent))
    assert index.has(*keys("ABC"))
    assert index.resolver.waiting.blocks == 0


def test_those_that_wait_for_each_other_come_one_after_the_other(index: Index) -> None:
    index.events(stored([4], "D", parent=3), stored([3], "C", parent=2), stored([5], "E", parent=3))
    index.events(stored([2], "B", parent=1))
    assert index.has()
    index.events(stored([1], "A"))
    assert index.has(*keys("ABCD"), keys("ABCE")[3])
    assert index.resolver.waiting.blocks == 0


def test_a_store_that_waited_has_its_parents_namespace(index: Index) -> None:
    index.events(stored([2], "B", parent=1), stored([1], "A", salts=("s",)))
    assert index.has(*keys("AB", ns=namespace(None, ["s"])))


def test_what_waited_is_held_against_its_parents_adapter(index: Index) -> None:
    index.events(stored([2], "B", parent=1, adapter="art"), stored([1], "A", adapter="sql"))
    assert index.has(*keys("A", ns=namespace("sql", [])))
    assert index.ignored == {"adapter_mismatch": 1}


def test_a_parent_of_another_rank_is_not_its_parent(index: Index) -> None:
    index.events(stored([2], "B", parent=1))
    index.events(stored([1], "A"), rank=1)
    assert index.has()
    assert index.has(*keys("A"), on="1 GPU")


def test_a_parent_on_another_medium_will_do(index: Index) -> None:
    index.events(stored([2], "B", parent=1))
    index.events(stored([1], "A", medium="CPU"))
    assert index.has(keys("AB")[1])


def test_what_waited_stands_behind_all_of_its_batch(index: Index) -> None:
    """Whoever resolves the batch again, with nothing waiting, must find the same positions for the same hashes."""
    index.events(stored([2, 3], "BC", parent=1))
    index.events(stored([1], "A"), stored([7, 8], "XY"))
    assert index.positions == [("+", 1, [1]), ("+", 2, [7, 8]), ("+", 4, [2, 3])]


def test_removed_while_it_waits_it_is_not_stored_when_its_parent_comes(index: Index) -> None:
    index.events(stored([2, 3, 4], "BCD", parent=1))
    index.events(removed(3))
    index.events(stored([1], "A"))
    assert index.has(keys("A")[0], keys("AB")[1], keys("ABCD")[3])
    assert index.resolver.unresolved == 0


def test_removed_in_the_batch_that_brings_the_parent_it_is_not_stored_either(index: Index) -> None:
    index.events(stored([2, 3], "BC", parent=1))
    index.events(stored([1], "A"), removed(3))
    assert index.has(*keys("AB"))
    assert index.resolver.unresolved == 0


def test_a_child_of_what_was_removed_while_it_waited_is_still_placed(index: Index) -> None:
    index.events(stored([2], "B", parent=1), stored([3], "C", parent=2), removed(2))
    index.events(stored([1], "A"))
    assert index.has(keys("A")[0], keys("ABC")[2])


def test_each_removal_takes_one_waiting_copy(index: Index) -> None:
    index.events(stored([2], "B", parent=1), stored([2], "B", parent=1), removed(2))
    index.events(stored([1], "A"))
    assert index.held() == dict.fromkeys(keys("AB"), 1)


@pytest.mark.parametrize("copies", ["set", "count"])
def test_what_is_stored_again_after_its_removal_stays_when_its_parent_comes(copies: Copies) -> None:
    index = Index(registration(copies=copies))
    index.events(stored([2], "B", parent=1), removed(2))
    index.events(stored([1, 2], "AB"))
    assert index.has(*keys("AB"))
    assert index.resolver.waiting.blocks == 0


def test_a_removal_takes_all_copies_that_wait_and_the_block_if_copies_do_not_count() -> None:
    index = Index(registration(copies="set"))
    index.events(stored([1, 2], "AB"), stored([2], "B", parent=9), stored([2], "B", parent=9), removed(2))
    assert index.has(*keys("A"))
    index.events(stored([9], "A"))
    assert index.has(*keys("A"))


def test_a_clear_takes_what_waits_on_its_rank(index: Index) -> None:
    index.events(stored([2], "B", parent=1))
    index.events(stored([2, 3], "BC", parent=1), rank=1)
    index.events(cleared())
    assert (index.resolver.waiting.blocks, index.waiting_lost) == (2, 1)
    index.events(stored([1], "A"))
    assert index.has(*keys("A"))


def test_a_new_life_takes_all_that_waits(index: Index) -> None:
    index.events(stored([2], "B", parent=1))
    index.events(stored([2], "B", parent=1), rank=1)
    index.end("*")
    assert (index.resolver.waiting.blocks, index.waiting_lost) == (0, 2)


def test_the_room_is_bounded_and_what_does_not_fit_is_counted() -> None:
    index = Index(waiting_blocks=3)
    index.events(stored([11, 12], "BC", parent=1), stored([21, 22], "BC", parent=2))
    assert (index.resolver.waiting.blocks, index.resolver.waiting.dropped) == (2, 2)
    index.events(stored([1], "A"), stored([2], "X"))
    assert index.has(*keys("A"), *keys("XBC"))


def test_off_the_gpu_what_waited_goes_on_from_its_parent(index: Index) -> None:
    index.events(stored([2, 3], "BC", parent=1, medium="CPU"))
    assert index.resolver.waiting.blocks == 2
    index.events(stored([1], "A"))
    assert index.has(*keys("ABC")[1:], on="0 CPU")


def test_a_hash_that_waited_leaves_its_old_block() -> None:
    index = Index(registration(EngineKind.SGLANG))
    index.events(stored([2], "Z"), stored([2, 3], "BC", parent=1))
    assert index.has(*keys("Z"))
    index.events(stored([1], "A"))
    assert index.has(*keys("ABC"))


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
def test_the_same_batch_resolved_from_redis_has_the_same_positions(kind: EngineKind) -> None:
    """A lease holder that lost its reply and one that took over must count alike: by hash and position."""
    before: list[Event] = [stored([1, 2, 3], "ABC"), stored([2, 3], medium="CPU"), removed(3, medium="CPU")]
    events: list[Event] = [
        removed(9, 3),
        stored([8], "Z", parent=77),
        stored([4, 5], "DE", parent=3),
        stored([6, 2], medium="CPU"),
        stored([7], "AB"),
        cleared(),
        stored([1, 9], "AX"),
        removed(2, 1),
    ]
    positions = []
    for take_over in (False, True):
        for beginning in (0, 6):
            index = Index(registration(kind))
            index.events(*before)
            if take_over:
                index.take_over()
            index.events(*events[beginning:])
            parts = index.positions
            positions.append({(kind, h, first + i) for kind, first, hashes in parts for i, h in enumerate(hashes)})
    assert positions[0] == positions[2]
    assert positions[1] == positions[3]
    assert ("+", 1, 1) in positions[1]
