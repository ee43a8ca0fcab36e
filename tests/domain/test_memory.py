"""The memory of engine hashes: what is known, what is gone, and what only Redis can say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waymark.domain.memory import HashMemory, block_key, namespace_of, place_of, seq_hash_of
from waymark.domain.names import U64_MASK
from waymark.domain.slices import finish

U64 = st.integers(0, U64_MASK)
GPU, CPU, OTHER_RANK = 1, 2, 3


@pytest.fixture
def memory() -> HashMemory:
    """GPU and CPU of rank 0, GPU of rank 1, all begun under our eyes."""
    memory = HashMemory(10)
    for holder, rank in ((GPU, 0), (CPU, 0), (OTHER_RANK, 1)):
        memory.begin(holder, rank, is_new=True)
    return memory


@pytest.fixture
def taken_over() -> HashMemory:
    """The same, taken over from somebody else."""
    memory = HashMemory(10)
    for holder, rank in ((GPU, 0), (CPU, 0), (OTHER_RANK, 1)):
        memory.begin(holder, rank, is_new=False)
    return memory


@settings(deadline=None)
@given(U64, U64)
def test_a_place_is_a_namespace_and_a_seq_hash(namespace: int, seq_hash: int) -> None:
    place = place_of(namespace, seq_hash)
    assert (namespace_of(place), seq_hash_of(place)) == (namespace, seq_hash)
    assert block_key(place) == namespace ^ seq_hash


def test_media_of_a_rank_share_hashes_and_ranks_do_not(memory: HashMemory) -> None:
    memory.store(GPU, [7], [70])
    assert memory.find(CPU, 7) == 70
    assert memory.own(CPU, 7) is None
    assert memory.find(OTHER_RANK, 7) is None


def test_a_holders_own_word_comes_first(memory: HashMemory) -> None:
    memory.store(GPU, [7], [70])
    memory.store(CPU, [7], [71])
    assert (memory.find(GPU, 7), memory.find(CPU, 7)) == (70, 71)


def test_a_removed_hash_is_gone_and_still_found(memory: HashMemory) -> None:
    memory.store(GPU, [7], [70])
    assert memory.remove(GPU, 7) == 70
    assert (memory.find(GPU, 7), memory.find(CPU, 7), memory.own(GPU, 7)) == (70, 70, 70)


def test_a_hash_can_be_removed_as_often_as_it_was_stored(memory: HashMemory) -> None:
    memory.store(GPU, [7], [70])
    memory.store(GPU, [7], [70])
    assert [memory.remove(GPU, 7) for _ in range(2)] == [70, 70]
    assert memory.remove(GPU, 8) is None


def test_what_is_gone_gives_way_to_what_is_there(memory: HashMemory) -> None:
    memory.store(GPU, [7], [70])
    memory.remove(GPU, 7)
    memory.store(GPU, [7], [71])
    assert memory.find(GPU, 7) == 71


def test_of_holders_begun_here_nothing_has_to_be_asked(memory: HashMemory) -> None:
    assert memory.unknown(0, [7]) == {}
    assert memory.unknown_own(GPU, [7]) == []
    assert memory.unknown(5, [7]) == {}


def test_of_holders_taken_over_what_is_unknown_is_asked(taken_over: HashMemory) -> None:
    taken_over.store(GPU, [7, 8], [70, 80])
    taken_over.remove(GPU, 8)
    assert taken_over.unknown(0, [7, 8, 9]) == {GPU: [9], CPU: [9]}
    assert taken_over.unknown(0, [7, 8]) == {}
    assert taken_over.unknown_own(CPU, [7, 8, 9]) == [7, 9]
    assert taken_over.unknown_own(GPU, [7, 8, 9]) == [9]


def test_only_holders_that_may_know_more_are_asked(taken_over: HashMemory) -> None:
    taken_over.begin(4, 0, is_new=True)
    assert taken_over.unknown(0, [9]) == {GPU: [9], CPU: [9]}


def test_what_redis_says_does_not_overrule_what_was_seen(taken_over: HashMemory) -> None:
    taken_over.store(GPU, [7], [71])
    taken_over.learn(GPU, {7: 70, 8: 80})
    assert (taken_over.find(GPU, 7), taken_over.find(GPU, 8)) == (71, 80)


def test_beginning_a_holder_twice_forgets_nothing(memory: HashMemory) -> None:
    memory.store(GPU, [7], [70])
    memory.begin(GPU, 0, is_new=False)
    assert memory.find(CPU, 7) == 70
    assert memory.unknown(0, [9]) == {}


def test_the_oldest_are_forgotten_and_asked_again(memory: HashMemory) -> None:
    memory.store(GPU, range(11), range(100, 111))
    assert len(memory) == 11
    finish(memory.trim())
    assert len(memory) == 9
    assert memory.find(GPU, 10) == 110
    assert memory.find(GPU, 0) is None
    assert memory.unknown(0, [0, 10]) == {GPU: [0]}


def test_what_is_gone_is_bounded_and_a_forgotten_copy_is_asked_again(memory: HashMemory) -> None:
    for h in range(11):
        memory.store(GPU, [h], [100 + h])
        memory.remove(GPU, h)
    finish(memory.trim())
    assert len(memory) == 9
    assert memory.remove(GPU, 0) is None
    assert memory.unknown_own(GPU, [0]) == [0]


def test_an_ended_holder_takes_only_its_own_with_it(memory: HashMemory) -> None:
    memory.store(GPU, [7, 8], [70, 80])
    memory.remove(GPU, 8)
    memory.store(CPU, [9], [90])
    memory.end(GPU)
    memory.end(GPU)
    assert memory.find(CPU, 7) is None
    assert (memory.find(CPU, 8), memory.find(CPU, 9)) == (80, 90)


def test_with_its_last_holder_a_rank_forgets_what_is_gone(memory: HashMemory) -> None:
    memory.store(GPU, [7], [70])
    memory.remove(GPU, 7)
    memory.store(OTHER_RANK, [7], [71])
    memory.end(GPU)
    memory.end(CPU)
    memory.begin(4, 0, is_new=True)
    assert memory.find(4, 7) is None
    assert memory.find(OTHER_RANK, 7) == 71
