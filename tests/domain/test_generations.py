"""Bounds by generations: blocks go with the holder of the stretch of time in which they were stored."""

from __future__ import annotations

import random

import pytest

from tests.domain.index import Index
from tests.factories import batch, cleared, envelope, keys, registration, removed, stored
from tests.unit import seeds
from waymark.domain.engines import EngineKind
from waymark.domain.events import Event
from waymark.domain.generations import GENERATIONS_MAX, BlockBounds
from waymark.domain.names import HolderName

#: A generation is a second.
ON_DISK = BlockBounds.of(0, 0, {"disk": 10})
MOST = BlockBounds.of(1000, 0, {})


def at(index: Index, seconds: float) -> list[str]:
    """The time; what is over ends. Returns why."""
    index.resolver.generations.now = int(1000 * seconds)
    reasons = []
    for name, reason in index.resolver.over():
        reasons.append(str(reason))
        index.end(name)
    return reasons


def on_disk(index: Index, hashes: list[int]) -> None:
    """An offload says so with a placeholder."""
    index.events(stored(hashes, medium="DISK"))


def words(first: int, count: int) -> str:
    """So many blocks that nothing else here has."""
    return "".join(chr(0x4E00 + first + i) for i in range(count))


def fill(index: Index, first: int, count: int) -> None:
    index.events(stored(list(range(first, first + count)), words(first, count)))


def generations(index: Index, name: str = "0 DISK") -> list[int]:
    """How many blocks each has, oldest first."""
    unit = HolderName.parse(name)
    held = [
        (holder, len(index.copies[holder])) for other, holder in index.resolver.holders.items() if other.is_of(unit)
    ]
    return [blocks for _, blocks in sorted(held)]


# ---- by time ---------------------------------------------------------------------------------------


def test_a_block_goes_between_its_time_and_a_tenth_more() -> None:
    index = Index(bounds=ON_DISK)
    at(index, 100)
    index.events(stored([1, 2], "AB"))
    on_disk(index, [1, 2])
    at(index, 105)
    on_disk(index, [2])
    assert at(index, 110.9) == []
    assert index.has(*keys("AB"), on="0 DISK")
    assert at(index, 111) == ["ttl"]
    assert index.has(keys("AB")[1], on="0 DISK"), "what was stored again stays"
    assert at(index, 115.9) == []
    assert at(index, 116) == ["ttl"]
    assert index.has(on="0 DISK")
    assert index.has(*keys("AB")), "other media do not go by time"


def test_a_generation_is_a_holder_of_its_own_that_begins_with_its_first_block() -> None:
    index = Index(bounds=ON_DISK)
    at(index, 100)
    index.events(stored([1, 2], "AB"))
    on_disk(index, [1])
    at(index, 100.9)
    assert index.begun == ["0 DISK #100000"]
    on_disk(index, [2])
    assert index.begun == []
    at(index, 101)
    on_disk(index, [1])
    assert index.begun == ["0 DISK #101000"]
    assert list(index.holders) == ["0 GPU", "0 DISK #100000", "0 DISK #101000"]


def test_what_was_stored_before_there_was_a_bound_is_over() -> None:
    index = Index()
    index.events(stored([1], "A"))
    on_disk(index, [1])
    index.options["bounds"] = ON_DISK
    index.take_over()
    assert at(index, 100) == ["ttl"]
    assert list(index.holders) == ["0 GPU"]


def test_what_is_no_longer_bounded_still_goes_with_a_removal() -> None:
    index = Index(bounds=ON_DISK)
    at(index, 100)
    index.events(stored([1, 2], "AB"))
    on_disk(index, [1, 2])
    index.options["bounds"] = BlockBounds()
    index.take_over()
    on_disk(index, [2])
    assert index.held("0 DISK") == {keys("AB")[0]: 1, keys("AB")[1]: 2}
    index.events(removed(1, 2, 2, medium="DISK"))
    assert index.has(on="0 DISK")


@pytest.mark.parametrize("off", [-3600, 3600])
def test_a_clock_that_is_an_hour_off_keeps_nothing_for_ever(off: int) -> None:
    """A worker that takes the stream over may have another clock."""
    index = Index(bounds=ON_DISK)
    at(index, 10_000 + off)
    index.events(stored([1], "A"))
    on_disk(index, [1])
    assert at(index, 10_000) == ["ttl"]


def test_a_time_for_all_media_gives_way_to_the_time_of_one() -> None:
    bounds = BlockBounds.of(0, 60, {"disk": 10})
    assert (bounds.seconds("GPU"), bounds.seconds("DISK")) == (60, 10)


# ---- by number -------------------------------------------------------------------------------------


def test_a_generation_has_a_tenth_of_the_most_blocks() -> None:
    index = Index(bounds=MOST)
    at(index, 100)
    for i in range(30):
        fill(index, 10 * i, 10)
    assert generations(index, "0 GPU") == [100, 100, 100]


def test_batches_of_one_fold_go_to_several_generations_and_no_batch_is_split() -> None:
    index = Index(bounds=MOST)
    at(index, 100)
    index.fold(*(batch(stored(list(range(100 * i, 100 * i + 60)), words(100 * i, 60))) for i in range(5)))
    assert generations(index, "0 GPU") == [120, 120, 60]
    assert index.begun == ["0 GPU #100000", "0 GPU #100001", "0 GPU #100002"]


def test_publishers_of_a_group_share_the_number() -> None:
    index = Index(bounds=MOST)
    at(index, 100)
    index.resolver.generations.publishers = 5
    for i in range(6):
        fill(index, 10 * i, 10)
    assert generations(index, "0 GPU") == [20, 20, 20]


def test_holders_up_to_the_cut_end() -> None:
    index = Index(bounds=MOST)
    at(index, 100)
    for i in range(3):
        fill(index, 100 * i, 100)
    index.resolver.generations.cut = sorted(index.holders.values())[1]
    assert at(index, 101) == ["max_entries", "max_entries"]
    assert generations(index, "0 GPU") == [100]


def test_a_generation_without_blocks_ends_when_it_is_closed() -> None:
    index = Index(bounds=MOST)
    at(index, 100)
    fill(index, 0, 100)
    fill(index, 500, 1)
    index.events(removed(*range(100)))
    assert at(index, 101) == ["None"]
    assert generations(index, "0 GPU") == [1]
    index.events(removed(500))
    assert at(index, 102) == [], "the newest one is open"


def test_generations_that_removals_have_thinned_are_bounded_too() -> None:
    index = Index(bounds=MOST)
    at(index, 100)
    for i in range(2 * GENERATIONS_MAX):
        fill(index, 100 * i, 100)
        fill(index, 100 * i + 10_000, 1)
        index.events(removed(*range(100 * i + 1, 100 * i + 100)))
        at(index, 101 + i)
    assert len(generations(index, "0 GPU")) <= GENERATIONS_MAX


# ---- a block is in one generation ------------------------------------------------------------------


def test_a_block_that_is_stored_again_moves_to_the_newest_generation() -> None:
    index = Index(bounds=ON_DISK)
    at(index, 100)
    index.events(stored([1, 2], "AB"))
    on_disk(index, [1, 2])
    at(index, 102)
    on_disk(index, [1])
    assert generations(index) == [1, 1]


def test_copies_move_with_their_block() -> None:
    index = Index(bounds=ON_DISK)
    at(index, 100)
    index.events(stored([1], "A"))
    on_disk(index, [1])
    on_disk(index, [1])
    at(index, 102)
    on_disk(index, [1])
    assert index.held("0 DISK") == {keys("A")[0]: 3}
    for left in (2, 1):
        index.events(removed(1, medium="DISK"))
        assert index.held("0 DISK") == {keys("A")[0]: left}
    index.events(removed(1, medium="DISK"))
    assert index.has(on="0 DISK")


def test_a_removal_takes_the_block_whatever_its_generation() -> None:
    index = Index(bounds=ON_DISK)
    at(index, 100)
    index.events(stored([1, 2, 3], "ABC"))
    for i in (1, 2, 3):
        at(index, 100 + 2 * i)
        on_disk(index, [i])
    index.events(removed(2, 9, 1, medium="DISK"))
    assert index.has(keys("ABC")[2], on="0 DISK")
    assert index.resolver.unresolved == 1


def test_a_hash_that_comes_to_mean_another_block_leaves_the_old_one_in_its_generation() -> None:
    index = Index(bounds=BlockBounds.of(0, 10, {}))
    at(index, 100)
    index.events(stored([1], "A"))
    at(index, 102)
    index.events(stored([1], "B"))
    assert index.has(*keys("B"))


def test_a_chain_goes_on_over_generations() -> None:
    index = Index(bounds=BlockBounds.of(0, 10, {}))
    for i, word in enumerate("ABCD"):
        at(index, 100 + 2 * i)
        index.events(stored([i], word, parent=i - 1 if i else None))
    assert index.has(*keys("ABCD"))
    assert generations(index, "0 GPU") == [1, 1, 1, 1]


def test_a_hash_that_goes_to_another_block_of_an_older_generation_is_two_changes_of_it() -> None:
    index = Index(bounds=BlockBounds.of(0, 10, {}))
    at(index, 100)
    index.events(stored([1], "A"), stored([2], "B"))
    at(index, 102)
    index.events(stored([1], "B"))
    assert [(part.kind, part.first) for part in index.parts] == [("-", 2), ("-", 3), ("+", 3)]
    assert index.has(*keys("B"))
    assert generations(index, "0 GPU") == [0, 1]


def test_what_waited_goes_to_the_newest_generation() -> None:
    index = Index(bounds=BlockBounds.of(0, 10, {}))
    at(index, 100)
    index.events(stored([5], "X"))
    index.events(stored([2], "B", parent=1))
    at(index, 102)
    index.events(stored([1], "A"))
    assert index.has(*keys("AB"), *keys("X"))
    assert generations(index, "0 GPU") == [1, 2]


def test_a_clear_ends_every_generation() -> None:
    index = Index(bounds=ON_DISK)
    at(index, 100)
    index.events(stored([1], "A"))
    on_disk(index, [1])
    at(index, 102)
    on_disk(index, [1])
    index.events(cleared())
    assert index.resolver.holders == {}


def test_the_order_of_a_standard_stream_outlives_a_generation_and_a_clear() -> None:
    index = Index(registration(EngineKind.STANDARD), bounds=ON_DISK)
    at(index, 100)

    def store(event_id: int) -> None:
        index.events(stored(keys("A"), medium="DISK", envelope=envelope(event_id)))

    store(5)
    at(index, 102)
    store(6)
    store(5)
    assert index.ignored == {"seen": 1}
    index.events(cleared(medium="DISK", envelope=envelope(7)))
    store(6)
    assert index.ignored == {"seen": 2}
    assert index.has(on="0 DISK")


def test_a_new_generation_goes_on_behind_the_newest_event_of_all() -> None:
    index = Index(registration(EngineKind.STANDARD), bounds=ON_DISK)
    for seconds, event_id, word in ((100, 5, "A"), (102, 9, "B"), (104, 7, "C")):
        at(index, seconds)
        index.events(stored(keys(word), medium="DISK", envelope=envelope(event_id)))
    assert index.ignored == {"seen": 1}


@pytest.mark.parametrize("seed", seeds(20))
def test_bounded_and_unbounded_know_the_same_blocks_as_long_as_nothing_ends(seed: int) -> None:
    """Stores, copies, removals and takeovers in any order: generations change only which holder has a block."""
    chance = random.Random(seed)
    plain, bounded = Index(), Index(bounds=BlockBounds.of(100, 86_400, {}))
    parents: dict[int, int | None] = {}
    for step in range(300):
        bounded.resolver.generations.now = step * 400_000
        parent = chance.choice([None, *parents]) if parents else None
        roll = chance.random()
        if roll < 0.5:
            h = chance.choice([*parents, 1000 + step]) if parents else 1000
            event: Event = stored([h], words(h, 1), parent=parents.setdefault(h, parent))
        elif roll < 0.9 and parents:
            event = removed(*chance.sample(sorted(parents), min(len(parents), chance.randrange(1, 4))))
        else:
            event = stored([chance.choice([*parents, 7])], medium="CPU")
        for index in (plain, bounded):
            index.events(event)
            if roll > 0.97:
                index.take_over()
        for name in ("0 GPU", "0 CPU"):
            assert bounded.held(name) == plain.held(name), (seed, step, event)
    assert len(generations(bounded, "0 GPU")) > 2
