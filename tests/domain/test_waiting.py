"""Waiting stores: they wait until their parent comes, removals and clears find them, and their number has a bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.factories import stored
from waymark.domain.waiting import WaitingStore, WaitingStores

HOLDER, OTHER = 1, 2


def waiting(hashes: Sequence[int], parent: int, *, rank: int = 0, holder: int = HOLDER) -> WaitingStore:
    return WaitingStore(stored(hashes, "A" * len(hashes), parent=parent), rank, holder)


@pytest.fixture
def room() -> WaitingStores:
    return WaitingStores(6)


def test_children_are_taken_in_the_order_they_came(room: WaitingStores) -> None:
    first, second, third = waiting([11], 1), waiting([12, 13], 1), waiting([21], 2)
    for each in (first, second, third):
        room.add(each)
    assert room.blocks == 4
    assert room.take_children(0, [9, 2, 1]) == [third, first, second]
    assert room.blocks == 0
    assert room.take_children(0, [1, 2]) == []


def test_a_parent_of_another_rank_is_another_parent(room: WaitingStores) -> None:
    room.add(waiting([11], 1))
    assert room.take_children(1, [1]) == []


def test_a_removal_finds_each_waiting_copy_once(room: WaitingStores) -> None:
    first, second = waiting([11, 12], 1), waiting([11], 1)
    room.add(first)
    room.add(second)
    assert [room.remove(HOLDER, 11) for _ in range(3)] == [True, True, False]
    assert (first.removed, second.removed) == ({11}, {11})
    assert not room.remove(OTHER, 12)
    assert not room.remove(HOLDER, 1)


def test_what_left_the_room_cannot_be_removed_from_it(room: WaitingStores) -> None:
    room.add(waiting([11], 1))
    room.take_children(0, [1])
    assert not room.remove(HOLDER, 11)


def test_a_clear_takes_what_waits_for_its_holders(room: WaitingStores) -> None:
    kept = waiting([12, 13], 1, holder=OTHER)
    for each in (waiting([11], 1), kept, waiting([14], 2)):
        room.add(each)
    assert room.clear([HOLDER]) == 2
    assert room.blocks == 2
    assert not room.remove(HOLDER, 11)
    assert room.take_children(0, [1, 2]) == [kept]


def test_without_room_those_that_waited_longest_are_dropped_and_counted(room: WaitingStores) -> None:
    for parent in (1, 2, 3):
        room.add(waiting([10 * parent, 10 * parent + 1], parent))
    assert (room.blocks, room.dropped) == (6, 0)
    room.add(waiting([40], 4))
    assert (room.blocks, room.dropped) == (5, 2)
    assert not room.remove(HOLDER, 10)
    assert room.take_children(0, [1]) == []
    assert len(room.take_children(0, [2, 3, 4])) == 3


def test_what_is_larger_than_the_room_drops_nobody_else(room: WaitingStores) -> None:
    kept = waiting([11], 1)
    room.add(kept)
    room.add(waiting(range(20, 27), 2))
    assert (room.blocks, room.dropped) == (1, 7)
    assert room.take_children(0, [1, 2]) == [kept]
