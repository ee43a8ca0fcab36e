"""With several shards a part waits where a worker that takes over could not resolve the fold again."""

from __future__ import annotations

import pytest

from waymark.domain.held import HeldBlocks
from waymark.domain.parts import PartList, new_waves, shares_of, waves_of
from waymark.domain.placing import Placer
from waymark.domain.rows import Place

pytestmark = pytest.mark.usefixtures("implementation", "implementation_kept")

GPU = 1
EVEN, ODD = list(range(100, 164)), list(range(201, 265))
"""Chains. With two shards the heads of the first are on shard 0, those of the second on shard 1."""


class Fold:
    """A placer over two shards, with both chains stored and acknowledged, and the parts of the next batch."""

    def __init__(self, shards: int = 2) -> None:
        memory = HeldBlocks()
        memory.begin(GPU, 0)
        self.placer = Placer(memory, shards)
        self.parts = PartList(1)
        self.position = 1
        self.store(EVEN, None)
        self.store(ODD, None)
        self.placer.begin_fold()
        self.parts = self.placer.begin_batch(2)
        self.position = 1

    def store(
        self, keys: list[int], parent: int | None, hashes: list[int] | None = None, *, deep: bool = False
    ) -> None:
        above = None if parent is None else self.placer.memory.find(GPU, parent)
        self.placer.chain(self.parts, GPU, self.position, 0, above, keys, hashes or keys, mode="count", is_deep=deep)
        self.position += len(keys)

    def remove(self, engine_hash: int) -> None:
        assert self.placer.remove(self.parts, GPU, self.position, engine_hash, mode="set")
        self.position += 1

    @property
    def waits(self) -> list[tuple[str, list[int]]]:
        return [(part.kind, part.keys) for part in self.parts.parts if part.waits]


def test_a_hash_leaves_its_block_before_it_comes_to_one_on_another_shard() -> None:
    fold = Fold()
    fold.store([301], None, [EVEN[0]])
    assert fold.waits == [("+", [301])]
    left, stored = waves_of(fold.parts.parts)
    assert ([part.kind for part in left], [part.kind for part in stored]) == (["-"], ["+"])


def test_a_hash_whose_block_was_removed_comes_to_another_shard_later() -> None:
    fold = Fold()
    fold.remove(EVEN[0])
    fold.store([301], None, [EVEN[0]])
    assert fold.waits == [("+", [301])]


def test_a_parent_leaves_after_its_children_on_other_shards_are_there() -> None:
    fold = Fold()
    fold.store([301], EVEN[31])
    fold.remove(EVEN[31])
    assert fold.waits == [("-", [EVEN[31]])]


def test_every_piece_of_a_chain_needs_the_parent_of_the_first() -> None:
    fold = Fold()
    fold.store([*range(300, 332), 333], EVEN[31])
    fold.remove(EVEN[31])
    assert fold.waits == [("-", [EVEN[31]])]


def test_a_single_comes_after_the_block_has_left_its_row() -> None:
    fold = Fold()
    fold.remove(EVEN[1])
    fold.store([EVEN[1]], None, deep=True)
    assert fold.waits == [("+", [EVEN[1]])]


def test_a_block_that_was_told_without_its_depth_is_counted_where_a_single_would_be() -> None:
    fold = Fold()
    fold.store([EVEN[1]], None, deep=True)
    stored, counted = fold.parts.parts
    assert (stored.kind, stored.place, counted.kind, counted.place) == (
        "+", Place(EVEN[0]), "*", Place(EVEN[1], is_single=True)
    )  # fmt: skip
    fold.remove(EVEN[1])
    assert fold.waits == [("-", [EVEN[1]])]


def test_nothing_waits_that_needs_nothing_of_another_shard() -> None:
    fold = Fold()
    fold.store([301, 302], EVEN[31])
    fold.store([300, 303], ODD[31])
    fold.remove(EVEN[5])
    fold.remove(ODD[5])
    fold.remove(301)
    fold.store([304], None, [EVEN[5]])
    assert fold.waits == []


def test_a_fold_that_is_acknowledged_holds_up_nothing() -> None:
    fold = Fold()
    fold.store([301], EVEN[31])
    fold.placer.begin_fold()
    fold.remove(EVEN[31])
    assert fold.waits == []


def test_with_one_shard_nothing_waits() -> None:
    fold = Fold(shards=1)
    fold.store([301], EVEN[31], [EVEN[0]])
    fold.remove(EVEN[31])
    assert fold.waits == []
    assert len(waves_of(fold.parts.parts)) == 1
    assert waves_of([]) == [[]]


def test_the_parts_of_a_wave_are_shared_out_in_order() -> None:
    fold = Fold()
    fold.store([301, 302], EVEN[31])
    fold.remove(EVEN[5])
    fold.remove(ODD[5])
    fold.remove(EVEN[6])
    fold.remove(EVEN[31])
    shares = [
        {shard: [(part.kind, part.keys, part.seq, part.waits) for part in share] for shard, share in each.items()}
        for each in shares_of(fold.parts.parts, 2)
    ]
    assert shares == [
        {
            1: [("+", [301, 302], 2, False), ("-", [ODD[5]], 2, False)],
            0: [("-", [EVEN[5]], 2, False), ("-", [EVEN[6]], 2, False)],
        },
        {0: [("-", [EVEN[31]], 2, True)]},
    ]
    assert [list(each) for each in shares] == [[1, 0], [0]]
    assert [dict(each) for each in shares_of(fold.placer.begin_batch(3).parts, 2)] == [{}]


def test_blocks_of_many_folds_and_shards_are_remembered_for_their_wave_only() -> None:
    """The table grows, is used again, and is freed."""
    waves = new_waves(256)
    for fold in range(3):
        blocks = range(fold, 20_000 + fold)
        for block in blocks:
            waves.use(block, Place(block))
        assert [waves.first_that_waits([block, block], Place(block + 256)) for block in blocks] == [0] * len(blocks)
        assert waves.first_that_waits([5, 7, 6], Place(5)) == 1
        assert waves.leave([2**64 - 1], Place(3)) is False
        assert waves.store([None, 2**64 - 1], Place(3)) is False
        assert waves.store([None, 2**64 - 1], Place(4)) is True
        assert waves.has_left is False
        waves.use(7, Place(7))
        waves.begin()
        assert waves.leave([7], Place(8)) is False
        waves.begin()
