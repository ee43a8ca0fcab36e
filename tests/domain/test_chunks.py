"""Chunks of several blocks under one hash, as LMCache stores them, and vLLM if it finds prefixes inside a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.domain.index import Index
from tests.factories import cleared, keys, registration, removed, stored
from waymark.domain.chunks import CHUNK_BLOCKS_MAX, hashes_of, split
from waymark.domain.engines import EngineKind
from waymark.domain.events import Stored
from waymark.domain.hashing import namespace
from waymark.domain.resolver import UNTRUSTED

CPU = "0 CPU"


def chunks(hashes: list[int], blocks: str, size: int = 8, **fields: Any) -> Stored:
    """Chunks of ``size`` tokens in host memory; a block has 4."""
    return stored(hashes, blocks, block_size=size, **({"medium": "CPU"} | fields))


@pytest.fixture(params=[EngineKind.VLLM, EngineKind.SGLANG])
def index(request: pytest.FixtureRequest) -> Index:
    return Index(registration(request.param))


def test_a_chunk_is_all_of_its_blocks(index: Index) -> None:
    index.events(chunks([1], "ABCD", 16), chunks([2], "EFGH", 16, parent=1))
    assert index.has(*keys("ABCDEFGH"), on=CPU)
    assert index.ignored == {}
    index.events(removed(2, medium="CPU"))
    assert index.has(*keys("ABCD"), on=CPU)
    index.events(removed(1, medium="CPU"))
    assert index.has(on=CPU)
    assert index.resolver.unresolved == 0


def test_several_chunks_may_be_one_event(index: Index) -> None:
    index.events(chunks([1, 2, 3], "ABCDEF"))
    assert index.has(*keys("ABCDEF"), on=CPU)
    index.events(removed(3, 2, medium="CPU"))
    assert index.has(*keys("AB"), on=CPU)


def test_a_chunk_goes_on_from_a_block_and_a_block_from_a_chunk(index: Index) -> None:
    index.events(stored([1, 2], "AB"), chunks([7], "CD", parent=2), stored([8], "E", parent=7, medium="CPU"))
    assert index.has(*keys("ABCDE")[2:], on=CPU)


def test_a_chunk_waits_for_its_parent_and_may_be_removed_meanwhile(index: Index) -> None:
    index.events(chunks([2], "CD", parent=1), chunks([3], "EF", parent=2))
    assert index.resolver.waiting.blocks == 4
    index.events(removed(2, medium="CPU"))
    index.events(chunks([1], "AB"))
    assert index.has(*keys("ABCDEF")[:2], *keys("ABCDEF")[4:], on=CPU)


def test_a_chunk_without_its_tokens_says_where_its_last_block_is_only(index: Index) -> None:
    """A placeholder tells no size, so nothing says that it is a chunk."""
    index.events(chunks([1], "AB"), stored([1], medium="DISK"))
    assert index.has(keys("AB")[1], on="0 DISK")


def test_chunks_of_several_sizes_are_removed_whole(index: Index) -> None:
    index.events(chunks([1], "AB"), chunks([2], "ABCD", 16), chunks([3], "X", 4))
    index.events(removed(1, medium="CPU"))
    assert index.held(CPU) == dict.fromkeys([*keys("ABCD"), *keys("X")], 1)
    index.events(removed(2, 3, medium="CPU"))
    assert index.has(on=CPU)
    assert index.resolver.unresolved == 0


def test_copies_of_a_chunk_are_counted_as_those_of_a_block() -> None:
    index = Index()
    index.events(chunks([1], "AB"), chunks([1], "AB"), removed(1, medium="CPU"))
    assert index.held(CPU) == dict.fromkeys(keys("AB"), 1)
    index.events(removed(1, medium="CPU"))
    assert index.has(on=CPU)


def test_another_worker_removes_whole_chunks_too(index: Index) -> None:
    index.events(chunks([1, 2], "ABCD"))
    index.take_over()
    index.events(removed(1, medium="CPU"))
    assert index.has(*keys("ABCD")[2:], on=CPU)
    index.events(cleared())
    index.events(removed(2, medium="CPU"))
    assert index.resolver.unresolved == 1


def test_a_batch_that_was_applied_in_part_means_the_same_to_another_worker(index: Index) -> None:
    """Every hash has its position, whatever is known of chunks when it is resolved."""
    index.events(stored([1, 2], "AB", medium="CPU"))
    index.events(removed(1, medium="CPU"), stored([3], "X"))
    before = index.positions
    other = Index(index.registration)
    other.events(stored([1, 2], "AB", medium="CPU"), chunks([9], "YZ"))
    other.events(removed(1, medium="CPU"), stored([3], "X"))
    assert [each[1] for each in other.positions] == [each[1] for each in before]


@pytest.mark.parametrize(
    "event",
    [
        chunks([1], "AB", medium="GPU"),
        chunks([1], "AB", size=6),
        chunks([1], "AB1", size=9),
        chunks([1, 2], "ABC"),
        chunks([1], "AB", extras=(7,)),
        chunks([1], "A" * (CHUNK_BLOCKS_MAX + 1), size=4 * (CHUNK_BLOCKS_MAX + 1)),
    ],
    ids=["no-group", "no-multiple", "tokens-over", "tokens-missing", "an-image", "too-large"],
)
def test_what_cannot_be_split_is_counted_as_another_block_size(index: Index, event: Stored) -> None:
    index.events(event)
    assert not index.copies
    assert index.ignored == {"block_size_mismatch": 1}


def test_a_salt_that_is_told_counts_for_all_blocks_of_a_chunk(index: Index) -> None:
    index.events(chunks([1, 2], "ABCD", salts=("s",)))
    assert index.has(*keys("ABCD", ns=namespace(None, ["s"])), on=CPU)


def test_a_bound_counts_the_blocks_of_chunks() -> None:
    index = Index(blocks_max=3)
    index.events(chunks([1, 2], "ABCD"))
    assert index.ignored == {"too_many_blocks": 1}


def test_a_long_event_is_split_into_pieces_that_go_on_from_each_other() -> None:
    event = chunks(list(range(1, 2001)), "AB" * 2000)
    pieces = list(split(event, 4))
    assert [len(piece.engine_hashes) for piece in pieces] == [1024, 1024, 1024, 928]
    assert [piece.parent for piece in pieces] == [None, 512, 1024, 1536]
    assert b"".join(piece.tokens for piece in pieces) == event.tokens
    assert hashes_of(7, 4)[1:] == hashes_of(7, 3)


# ---- an engine registered with a unit of its physical blocks ----------------------------------------

MAIN: dict[str, Any] = {"medium": "GPU", "group": 0}


def test_a_physical_block_is_a_run_of_units(index: Index) -> None:
    index.events(chunks([1, 2], "ABCD", **MAIN), stored([3], "E", parent=2, group=0))
    assert index.has(*keys("ABCDE"))
    index.events(removed(2, 3, group=0))
    assert index.has(*keys("AB"))
    index.take_over()
    index.events(removed(1, group=0))
    assert index.has()
    assert index.resolver.unresolved == 0


def test_a_unit_that_names_its_skipped_ancestors_has_a_place(index: Index) -> None:
    """The decoder has put the skipped tokens in front, so that the unit ends a chunk."""
    index.events(chunks([1], "AB", **MAIN), chunks([9], "CDE", 12, parent=1, **MAIN))
    index.events(chunks([2], "CDEF", 16, parent=1, **MAIN))
    assert index.held() == dict(zip(keys("ABCDEF"), [1, 1, 2, 2, 2, 1], strict=True))
    index.events(removed(2, group=0))
    assert index.held() == dict.fromkeys(keys("ABCDE"), 1)
    index.events(removed(9, group=0))
    assert index.has(*keys("AB"))


def test_a_unit_whose_parent_is_never_announced_does_not_wait(index: Index) -> None:
    index.events(chunks([1], "AB", **MAIN), stored([9], "D", parent=8, group=0))
    assert (index.ignored, index.resolver.waiting.blocks, index.resolver.missing) == ({"parent_not_announced": 1}, 0, 1)


def test_a_unit_of_a_registered_physical_block_has_a_reason_of_its_own(index: Index) -> None:
    unit = stored([2], "A", parent=1, block_size=2)
    index.events(stored([1], "A"), replace(unit, tokens=unit.tokens[:8]))
    assert (index.ignored, index.resolver.missing) == ({"inside_block": 1}, 1)


def test_units_removed_and_stored_in_one_batch_stay(index: Index) -> None:
    index.events(chunks([1], "ABCD", 16, **MAIN))
    index.events(removed(1, group=0), chunks([1], "ABCD", 16, **MAIN))
    assert index.held() == dict.fromkeys(keys("ABCD"), 1)
    index.resolver.flags.add(UNTRUSTED)
    index.events(removed(1, group=0), chunks([1], "ABCD", 16, **MAIN))
    assert index.held() == dict.fromkeys(keys("ABCD"), 1)


def test_positions_on_a_device_do_not_depend_on_chunks(index: Index) -> None:
    index.events(stored([1, 2], "AB"))
    index.events(removed(1), stored([3], "X"))
    before = [each[1] for each in index.positions]
    other = Index(index.registration)
    other.events(stored([1, 2], "AB"), chunks([9], "YZ", **MAIN))
    other.events(removed(1), stored([3], "X"))
    assert [each[1] for each in other.positions] == before
