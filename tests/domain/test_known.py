"""Tables of engine hashes: the same cases and the same random histories in C, in Python and in a plain model."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.conftest import IMPLEMENTATIONS
from tests.domain.known_model import STEPS, Model, play
from waymark.base import native
from waymark.domain.copies import BlockCopies
from waymark.domain.held import GoneHashes, HeldBlocks
from waymark.domain.known import COPIES_MAX, Spot
from waymark.domain.pure_known import KnownBlocks, Places, new_known, new_places
from waymark.domain.rows import Place
from waymark.domain.slices import SLICE_WORK

pytestmark = pytest.mark.usefixtures("implementation_kept")

ROW, BRANCH, SINGLE = Place(7), Place(7, 9), Place(8, None, True)
BIG = 2**64 - 1


@pytest.fixture
def places(implementation: str) -> Places:
    return new_places()


@pytest.fixture
def known(places: Places) -> KnownBlocks:
    return new_known(places, has_keys=True)


def test_the_selected_implementation_is_used(known: KnownBlocks, implementation: str) -> None:
    assert type(known).__module__ == ("waymark._native" if implementation == "native" else "waymark.domain.pure_known")


def test_nothing_is_known_at_first(known: KnownBlocks, places: Places) -> None:
    assert (len(known), len(places)) == (0, 0)
    assert (known.get(1), known.get_block(1), known.first(1), known.pop(1)) == (None, None, None, None)
    assert known.are_new([1], [1])


@pytest.mark.parametrize("place", [ROW, BRANCH, SINGLE, Place(BIG, BIG), Place(0, 0), Place(0)])
@pytest.mark.parametrize("namespace", [0, BIG])
def test_a_block_is_found_by_its_hash_and_by_its_key(known: KnownBlocks, place: Place, namespace: int) -> None:
    known.store(place, namespace, [5, BIG], [0, 31], [BIG, 0])
    assert known.get(BIG) == known.get_block(5) == Spot(place, namespace, 0, 5)
    assert known.get(0) == known.get_block(BIG) == Spot(place, namespace, 31, BIG)
    found = known.get(0)
    assert type(found) is Spot
    assert type(found.place) is Place
    assert found.seq_hash == BIG ^ namespace
    assert (known.first(5), known.first(BIG), len(known)) == (BIG, 0, 2)


def test_hashes_and_keys_may_come_as_tuples(known: KnownBlocks) -> None:
    known.store(ROW, 0, (5,), (1,), (6,))
    assert known.get(6) == Spot(ROW, 0, 1, 5)


def test_a_place_is_there_as_long_as_one_of_its_blocks(known: KnownBlocks, places: Places) -> None:
    known.store(ROW, 0, [1, 2], [0, 1], [11, 12])
    known.store(BRANCH, 0, [3], [1], [13])
    known.store(ROW, 5, [4], [0], [14])  # in a namespace it is another one
    assert len(places) == 3
    known.pop(11)
    assert len(places) == 3
    known.pop(12)
    known.pop(14)
    assert len(places) == 1
    known.store(SINGLE, 0, [5], [0], [15])
    assert (known.get(13), known.get(15)) == (Spot(BRANCH, 0, 1, 3), Spot(SINGLE, 0, 0, 5))
    assert len(places) == 2


def test_depths_may_be_a_range(known: KnownBlocks) -> None:
    known.store(ROW, 0, [5, 6], range(7, 9), [15, 16])
    assert (known.get(15), known.get(16)) == (Spot(ROW, 0, 7, 5), Spot(ROW, 0, 8, 6))


@pytest.mark.parametrize(
    ("keys", "depths", "hashes", "sentence"),
    [
        ([5, 6], [0, 32], [11, 12], r"depths\[1\] is 32; "),
        ([5, 6], [0, 2**64 - 1], [11, 12], r"depths\[1\] is 18446744073709551615; "),
        ([5, 6], [0], [11, 12], "2 keys have 1 depths and 2 engine hashes"),
        ([5, 6], [0, 1], [11], "2 keys have 2 depths and 1 engine hashes"),
    ],
)
def test_blocks_that_do_not_fit_change_nothing(
    known: KnownBlocks, places: Places, keys: list[int], depths: list[int], hashes: list[int], sentence: str
) -> None:
    known.store(ROW, 0, [1, 2], [0, 1], [11, 13])
    with pytest.raises(ValueError, match=sentence):
        known.store(BRANCH, 0, keys, depths, hashes)
    assert (known.get(11), known.get(12), len(known), known.blocks()) == (Spot(ROW, 0, 0, 1), None, 2, 2)
    assert len(places) == 1


@pytest.mark.skipif(not native.is_built, reason="built without the C part")
@pytest.mark.parametrize("bad", [-1, 2**64, "7", None, 1.5])
@pytest.mark.parametrize("of", range(3))
def test_what_is_no_number_of_64_bits_changes_nothing(bad: object, of: int) -> None:
    native.select(True)
    places = new_places()
    known = new_known(places, has_keys=True)
    known.store(ROW, 0, [1], [0], [11])
    columns: list[list[Any]] = [[5, 6, 7], [1, 2, 3], [11, 12, 13]]
    columns[of][2] = bad
    with pytest.raises((OverflowError, TypeError)):
        known.store(BRANCH, 0, *columns)
    assert (known.get(11), known.get(12), len(known), known.blocks()) == (Spot(ROW, 0, 0, 1), None, 1, 1)
    assert len(places) == 1


def test_what_is_popped_is_told_once(known: KnownBlocks) -> None:
    known.store(ROW, 0, [1], [3], [11])
    assert known.pop(11) == Spot(ROW, 0, 3, 1)
    assert (known.pop(11), known.get_block(1), known.first(1), len(known)) == (None, None, None, 0)


def test_a_hash_that_is_stored_again_is_its_new_block(known: KnownBlocks, places: Places) -> None:
    known.store(ROW, 0, [1], [0], [11])
    known.store(BRANCH, 0, [2], [1], [11])
    assert (known.get(11), known.get_block(1), known.first(2)) == (Spot(BRANCH, 0, 1, 2), None, 11)
    assert (len(known), len(places)) == (1, 1)


def test_a_block_may_have_further_hashes(known: KnownBlocks) -> None:
    known.store(ROW, 0, [1], [4], [11])
    known.name(12, 1)
    known.name(13, 1)
    assert known.get(12) == known.get(13) == Spot(ROW, 0, 4, 1)
    assert (known.first(1), len(known)) == (11, 3)
    known.pop(13)
    assert known.first(1) == 11
    known.lead(12)
    known.lead(12)
    assert known.first(1) == 12
    known.pop(11)
    assert known.get_block(1) == Spot(ROW, 0, 4, 1)
    known.pop(12)
    assert (known.first(1), len(known)) == (None, 0)


def test_without_its_first_hash_a_block_is_found_by_no_key_until_another_one_leads(known: KnownBlocks) -> None:
    known.store(ROW, 0, [1], [4], [11])
    known.name(12, 1)
    known.pop(11)
    assert known.get_block(1) is None
    known.lead(12)
    assert (known.first(1), known.get_block(1)) == (12, Spot(ROW, 0, 4, 1))


def test_copies_go_with_their_block(known: KnownBlocks) -> None:
    known.store(ROW, 0, [1, 2], [0, 1], [11, 12])
    assert (known.copies(1), known.left()) == ((1, False), [])
    known.set_copies(1, COPIES_MAX, True)
    known.set_copies(2, 3, False)
    known.move(11, BRANCH)
    assert (known.copies(1), known.copies(2), known.left()) == ((COPIES_MAX, True), (3, False), [11])
    with pytest.raises(ValueError, match=rf"copies is {COPIES_MAX + 1}; a table counts up to {COPIES_MAX}"):
        known.set_copies(2, COPIES_MAX + 1, False)
    known.pop(11)
    known.store(ROW, 0, [1], [0], [11])
    assert (known.copies(1), known.copies(2), known.left()) == ((1, False), (3, False), [])
    known.set_copies(1, 1, True)
    known.clear()
    known.store(ROW, 0, [1], [0], [11])
    assert (known.copies(1), known.left()) == ((1, False), [])


def test_further_hashes_are_counted_elsewhere(known: KnownBlocks) -> None:
    known.store(ROW, 0, [1], [0], [11])
    known.set_copies(1, 2, True)
    known.name(12, 1)
    known.lead(12)
    assert (known.copies(1), known.left()) == ((0, False), [11])
    known.pop(11)
    assert known.left() == []


def test_a_block_moves(known: KnownBlocks, places: Places) -> None:
    known.store(ROW, 6, [1, 2], [0, 1], [11, 12])
    known.move(12, BRANCH)
    assert (known.get(11), known.get(12)) == (Spot(ROW, 6, 0, 1), Spot(BRANCH, 6, 1, 2))
    known.move(11, BRANCH)
    known.move(11, BRANCH)
    assert (known.get(11), len(places)) == (Spot(BRANCH, 6, 0, 1), 1)


def test_what_is_new_is_neither_here_nor_given_twice(known: KnownBlocks) -> None:
    known.store(ROW, 0, [1], [0], [11])
    known.name(12, 1)
    assert known.are_new([13, 14], [3, 4])
    assert known.are_new([], [])
    for hashes, block_keys in (([13, 11], [3]), ([13, 12], [3]), ([13], [3, 1]), ([13, 13], [3]), ([13], [3, 3])):
        assert not known.are_new(hashes, block_keys)
    many = list(range(100, 1000))
    assert known.are_new(many, many)
    assert not known.are_new([*many, 500], many)
    assert not known.are_new(many, [*many, 1])


def test_without_keys_blocks_are_found_by_their_hash_alone(places: Places) -> None:
    known = new_known(places, has_keys=False)
    known.store(ROW, 0, [1], [0], [11])
    known.store(ROW, 0, [1], [0], [12])
    assert (known.get(12), known.get_block(1), known.first(1)) == (Spot(ROW, 0, 0, 1), None, None)
    assert known.are_new([13], [1])
    with pytest.raises(KeyError):
        known.lead(11)


def test_tables_share_places_and_leave_them(places: Places) -> None:
    one, other = new_known(places, has_keys=True), new_known(places, has_keys=False)
    one.store(ROW, 0, [1], [0], [11])
    other.store(ROW, 0, [2], [1], [11])
    assert len(places) == 1
    del one
    assert (len(places), other.get(11)) == (1, Spot(ROW, 0, 1, 2))
    del other
    assert len(places) == 0


def test_a_table_outlives_the_name_of_its_places(implementation: str) -> None:
    known = new_known(new_places(), has_keys=True)
    known.store(ROW, 0, [1], [0], [11])
    assert known.get(11) == Spot(ROW, 0, 0, 1)


REFUSED: list[Callable[[KnownBlocks], object]] = [
    lambda known: known.store(ROW, 0, [1], [0], [11, 12]),
    lambda known: known.store(ROW, 0, [1], [], [11]),
    lambda known: known.store(ROW, 0, [1], [32], [11]),
    lambda known: known.name(12, 1),
    lambda known: known.lead(12),
    lambda known: known.move(12, ROW),
    lambda known: known.copies(12),
    lambda known: known.set_copies(12, 1, False),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_refused_changes_nothing(known: KnownBlocks, places: Places, number: int) -> None:
    with pytest.raises((ValueError, KeyError)):
        REFUSED[number](known)
    assert (len(known), len(places)) == (0, 0)


def history(chance: random.Random, steps: int, hashes: int) -> None:
    """Random operations on all implementations at once, and on the model."""
    tables: list[tuple[Places, KnownBlocks]] = []
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        places = new_places()
        tables.append((places, new_known(places, has_keys=True)))
    model = Model()
    spread = chance.choice([1, 2**32, 0x9E3779B97F4A7C15])
    numbers = [i * spread % 2**64 for i in range(hashes)]
    for _ in range(steps):
        one, other = chance.choice(numbers), chance.choice(numbers)
        place = Place(chance.choice(numbers) % 8, chance.choice([None, None, 3]))
        step = chance.choice(STEPS), one, other, place, chance.choice([1, 1, 1, 5])
        expected = model.step(*step)
        for _, table in tables:
            assert play(table, *step) == expected
            assert table.blocks() == model.blocks
            assert (len(table), table.get(one), table.first(other)) == model.state(one, other)
    for places, table in tables:
        assert [(table.get(number), table.first(number)) for number in numbers] == [
            model.state(number, number)[1:] for number in numbers
        ]
        firsts = [number for number in numbers if number in model.firsts]
        assert [table.copies(number) for number in firsts] == [model.copies_of(number) for number in firsts]
        assert set(table.left()) == model.left
        assert len(places) == model.places


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_agree(seed: int) -> None:
    chance = random.Random(seed)
    history(chance, 400, chance.choice([4, 30, 200]))


@pytest.mark.slow
def test_a_long_random_history_agrees() -> None:
    history(random.Random(30), 30_000, 20_000)


def test_of_many_blocks_those_that_stay_are_found(known: KnownBlocks) -> None:
    chance = random.Random(1)
    numbers = [chance.getrandbits(64) for _ in range(40_000)]
    for at in range(0, len(numbers), 32):
        some = numbers[at : at + 32]
        known.store(Place(at), 0, some, range(len(some)), [number ^ 1 for number in some])
    gone, size = set(chance.sample(numbers, 20_000)), sys.getsizeof(known)
    known.discard([number ^ 1 for number in gone])

    assert (len(known), known.blocks()) == (20_000, 20_000)
    assert [number for number in numbers if known.get(number ^ 1) is not None] == [n for n in numbers if n not in gone]
    assert [number for number in numbers if known.first(number) is not None] == [n for n in numbers if n not in gone]
    known.discard([number ^ 1 for number in numbers])
    assert (len(known), known.blocks()) == (0, 0)
    if native.selected is not None:
        assert sys.getsizeof(known) == size  # a table that is filled again need not grow again


@pytest.mark.parametrize("engine_hash", [0, 1, 2])
def test_a_hash_that_is_discarded_twice_is_gone_once(known: KnownBlocks, places: Places, engine_hash: int) -> None:
    """A block of C that is free keeps a small number where a block in use keeps its hash."""
    known.store(Place(7), 0, [70, 71, 72], [0, 1, 2], [7, 8, engine_hash])
    known.discard([7, engine_hash, engine_hash])
    known.discard([engine_hash] * 3)
    assert (len(known), known.blocks(), len(places)) == (1, 1, 1)
    assert known.get(8) == Spot(Place(7), 0, 1, 71)


@pytest.mark.skipif(not native.is_built, reason="built without the C part")
def test_a_table_of_no_further_use_is_released_in_pieces(known: KnownBlocks, places: Places) -> None:
    """All at once, a million blocks would hold the loop for a hundredth of a second."""
    count, piece = 100_000, 32
    for first in range(0, count, piece):
        some = range(first + 1, first + 1 + piece)
        known.store(Place(first), 0, list(some), range(piece), list(some))
    known.discard(range(1, count, 3))
    sizes = [len(places)]
    while known.release():
        sizes.append(len(places))
    assert len(sizes) > 2
    assert max(before - after for before, after in pairwise(sizes)) <= 2 * 32_768 // piece
    assert (len(known), known.blocks(), known.get(2), known.first(2), len(places)) == (0, 0, None, None, 0)
    assert not known.release()
    known.store(Place(1), 0, [5], [0], [7])  # and yet it is a table
    assert known.get(7) == Spot(Place(1), 0, 0, 5)


def test_an_emptied_table_has_no_block_and_keeps_its_memory(known: KnownBlocks, places: Places) -> None:
    def fill(first: int) -> None:
        for head in range(first, first + 1000, 20):
            some = range(head, head + 20)
            known.store(Place(head), 0, list(some), range(20), [number ^ 1 for number in some])

    fill(10_000)
    known.discard(range(10_100, 10_200))
    size = sys.getsizeof(known)
    known.clear()
    if native.selected is not None:
        assert sys.getsizeof(known) == size
    assert (len(known), known.blocks(), len(places)) == (0, 0, 0)
    assert [known.get(number ^ 1) or known.first(number) for number in range(10_000, 11_000)] == [None] * 1000
    fill(50_000)
    assert (len(known), known.blocks(), len(places)) == (1000, 1000, 50)
    assert known.get(50_021) == Spot(Place(50_020), 0, 0, 50_020)


def test_trimmed_hashes_are_forgotten_and_a_table_of_unusual_size_is_not_used_again(
    places: Places, implementation: str
) -> None:
    gone, entries_max = GoneHashes(places), 64

    def add(first: int, count: int) -> None:
        for engine_hash in range(first, first + count):
            gone.add(engine_hash, Spot(Place(first), 0, 0, engine_hash))

    for first in (1000, 2000, 3000):
        add(first, 40)
        newer, older = gone.sets
        gone.trim(entries_max)
        assert gone.sets == (older, newer), "no table is new"
    assert [engine_hash for engine_hash in range(4000) if gone.get(engine_hash)] == [*range(3000, 3040)]
    del newer, older
    add(4000, 100 * entries_max)
    gone.trim(entries_max)
    bytes_before = gone.bytes
    gone.trim(entries_max)
    assert (len(gone), len(places)) == (0, 0)
    assert gone.bytes < bytes_before / 4


def test_the_table_of_a_holder_that_has_ended_is_freed_in_slices(implementation: str) -> None:
    memory, count, piece = HeldBlocks(), 100_000, 32
    empty = memory.bytes
    memory.begin(1, 0)
    memory.begin(2, 0)
    memory.store(2, Place(7), 0, [3], [0], [3])
    for first in range(0, count, piece):
        some = range(first + 10, first + 10 + piece)
        memory.store(1, Place(first + 10), 0, list(some), range(piece), list(some))
    memory.end(1)
    assert memory.bytes > 10 * empty, "it is there until it is freed, in a few pieces"
    assert len(list(memory.release())) > 2
    assert (memory.blocks, memory.places, len(memory)) == (1, 1, 1)
    assert memory.find(2, 3) == Spot(Place(7), 0, 0, 3)
    assert len(list(memory.release())) == 0


@pytest.mark.skipif(not native.is_built, reason="built without the C part")
def test_a_block_takes_some_thirty_five_bytes_in_c() -> None:
    native.select(True)
    chance = random.Random(1)
    places = new_places()
    known = new_known(places, has_keys=True)
    blocks = 50_000

    def store(at: int) -> None:
        numbers = [chance.getrandbits(64) for _ in range(32)]
        known.store(Place(at), 0, numbers, list(range(32)), [number ^ 1 for number in numbers])
        stored.append(numbers)

    stored: list[list[int]] = []
    for at in range(blocks // 32):
        store(at)
    for at in range(blocks // 32, 4 * blocks // 32):  # a full cache: the oldest go
        for number in stored.pop(0):
            known.pop(number ^ 1)
        store(at)
    taken = (sys.getsizeof(known) + sys.getsizeof(places)) / len(known)
    assert 30 < taken < 40
    oldest = known.get(stored[0][5] ^ 1)
    assert oldest is not None
    assert (oldest.depth, oldest.key) == (5, stored[0][5])


def test_the_copies_of_a_holder_that_has_ended_are_freed_in_slices() -> None:
    memory, count = HeldBlocks(), 100_000
    memory.begin(1, 0)
    several = memory.copies(1).several
    several.update(dict.fromkeys(range(count), BlockCopies(2, [1])))
    memory.end(1)
    sizes = [count, *(len(several) for _ in memory.release())]
    assert sizes[-1] == 0
    assert max(before - after for before, after in pairwise(sizes)) <= SLICE_WORK
