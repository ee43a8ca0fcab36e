"""What caches are worth, row by row, against sets of blocks; and the prefixes that are used most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest

from tests.factories import slots_of
from waymark.domain.names import GroupName, Holder, Window
from waymark.domain.rows import Row
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.worth import CacheWorth, PrefixUse, Prompts, Tally

SIZE = 16


def holder(id: int, instance: str, publisher: int, medium: str = "GPU", **more: object) -> Holder:
    fields: dict[str, object] = {"dp_rank": 0, "block_size": SIZE, "backend_id": instance, "scope": "instance"}
    return Holder(id=id, publisher=publisher, instance_id=instance, medium=medium, **(fields | more))  # type: ignore[arg-type]


def table(holders: Sequence[Holder], lost: Sequence[int] = ()) -> HolderTable:
    rows = {
        each.publisher: PublisherRow(each.instance_id, each.dp_rank, SIZE, each.scope, each.publisher in lost)
        for each in holders
    }
    return HolderTable(b"v", GroupName("default", "m"), rows, {each.id: each for each in holders})


def row(first: int, count: int, bitmaps: Mapping[int, int]) -> Row:
    return Row(slots_of(range(first, first + count), 0), False, bitmaps)


def test_ranks_and_media_of_an_engine_are_one_and_a_pool_is_another() -> None:
    tally = Tally(
        table(
            [
                holder(1, "a", 1),
                holder(2, "a", 1, "CPU"),
                holder(3, "a", 2, dp_rank=1),
                holder(4, "b", 3),
                holder(5, "pool", 4, "REMOTE", scope="shared"),
            ]
        ),
        {},
    )
    assert (
        tally.count(row(1, 8, {1: 0b00001111, 2: 0b00000011, 3: 0b00110000, 4: 0b01000001, 5: 0b00010001, 99: 255}))
        == 7
    )
    # a: slots 0-5; slot 0 has b and the pool beside it, slot 4 the pool.
    assert tally.worths(1.0) == {
        "a": CacheWorth(6 * SIZE, 4 * SIZE, 5 * SIZE, 4 * SIZE, 5 * SIZE),
        "b": CacheWorth(2 * SIZE, SIZE, SIZE, SIZE, SIZE),
    }
    assert tally.worths(0.5)["b"].tokens == 4 * SIZE, "half of the rows were read"


def test_holders_that_answer_no_query_do_not_count() -> None:
    window = holder(2, "a", 1, window=Window.parse("1:128:1"))
    tally = Tally(table([holder(1, "a", 1), window, holder(3, "lost", 2)], lost=[2]), {})
    assert tally.holders == [1]
    assert tally.count(row(1, 2, {1: 0b01, 2: 0b11, 3: 0b11})) == 1
    assert tally.worths(1.0) == {"a": CacheWorth(SIZE, SIZE, SIZE, SIZE, SIZE)}


def test_used_blocks_weigh_more() -> None:
    tally = Tally(table([holder(1, "a", 1), holder(2, "b", 2)]), {1: 5, 2: 3, 77: 9})
    tally.count(row(1, 3, {1: 0b111, 2: 0b001}))
    assert tally.worths(1.0)["a"] == CacheWorth(3 * SIZE, 2 * SIZE, 3 * SIZE, (2 + 3) * SIZE, (3 + 8) * SIZE)


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_of_sets(seed: int) -> None:
    random, names = Random(seed), "abcde"
    holders = [holder(id, names[id % 5], 1 + id % 5, dp_rank=id // 5) for id in range(1, 15)]
    uses = {key: random.randrange(4) for key in range(0, 6400, 3)}
    tally, held = Tally(table(holders), uses), dict[str, set[int]]((name, set()) for name in names)
    for at in range(100):
        count = random.randrange(1, 64)
        bitmaps = {each.id: random.getrandbits(count) for each in holders if random.random() < 0.3}
        for each in holders:
            held[each.instance_id] |= {64 * at + slot for slot in range(64) if bitmaps.get(each.id, 0) >> slot & 1}
        tally.count(row(64 * at, count, {id: bitmap for id, bitmap in bitmaps.items() if bitmap}))
    others = {key: sum(key in blocks for blocks in held.values()) for blocks in held.values() for key in blocks}
    for name, worth in tally.worths(1.0).items():
        only, few = ({key for key in held[name] if others[key] <= most} for most in (1, 2))
        used = [sum(1 + uses.get(key, 0) for key in keys) for keys in (only, few)]
        assert worth == CacheWorth(*(SIZE * blocks for blocks in (len(held[name]), len(only), len(few), *used)))


def test_prefixes_come_with_what_is_used_most_first() -> None:
    prompts = Prompts()
    for keys in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [50, 51]):
        prompts.add(SIZE, keys)
    assert prompts.uses[2] == 3
    found = prompts.most_used(100)
    assert found[:2] == [PrefixUse(None, SIZE, 3, (1, 2)), PrefixUse(0, SIZE, 2, (3,))]
    assert {(each.before, each.keys) for each in found[2:]} == {(1, (4,)), (1, (5,)), (0, (9,)), (None, (50, 51))}
    assert prompts.most_used(3) == found[:2]
    assert Prompts().most_used(10) == []


def test_a_prompt_that_contradicts_another_one_does_no_harm() -> None:
    prompts = Prompts()
    for keys in ([1, 2], [2], [2, 1], [1, 1]):
        prompts.add(SIZE, keys)
    assert sorted(key for each in prompts.most_used(10) for key in each.keys) == [1, 2]
