"""With several shards a part waits where a worker that takes over could not resolve the fold again."""

from __future__ import annotations

import pytest

from waymark.domain.held import HeldBlocks
from waymark.domain.parts import PartList, waves_of
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
