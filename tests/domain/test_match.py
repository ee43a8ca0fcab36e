"""The walk and the numbers of both APIs, against the contract's example and against counting block by block."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.domain.prompts import BLOCK_SIZE, holder, publisher, runs, table, value, walk
from waymark.domain.match import (
    ConductorRow,
    DynamoRank,
    TargetRow,
    Walk,
    conductor_rows,
    dynamo_rows,
    matched_dynamo_rows,
    pool_bitmap,
    target_rows,
)
from waymark.domain.names import Holder
from waymark.domain.table import HolderTable, PublisherRow


def tokens_of(row: ConductorRow) -> dict[str, object]:
    """A row as the contract writes it, in tokens."""
    media = {medium: blocks * BLOCK_SIZE for medium, blocks in row.media.items()}
    ranks = {str(rank): blocks * BLOCK_SIZE for rank, blocks in row.ranks.items()}
    return {"longest_matched": row.longest * BLOCK_SIZE, "GPU": 0, "CPU": 0, "DISK": 0, "DP": ranks} | media


def test_the_worked_example_of_the_contract() -> None:
    # 1: rank 0's GPU, 2: rank 1's GPU, 3 and 4: the pool's CPU and DISK.
    of = table(
        {1: publisher("a"), 2: publisher("a", 1), 3: publisher("pool", scope="shared")},
        holder(1, 1),
        holder(2, 2, rank=1),
        holder(3, 3, "pool", medium="CPU", scope="shared"),
        holder(4, 3, "pool", medium="DISK", scope="shared"),
    )
    rows = conductor_rows(walk(of, [value(1, 2, 3, 4), value(1, 3), value(4)]))
    assert {name: tokens_of(row) for name, row in rows.items()} == {
        "a": {"longest_matched": 6, "GPU": 4, "DP": {"0": 4, "1": 2}, "CPU": 4, "DISK": 4}
    }
    # The same blocks in the other API: rank 1 goes on from its one GPU block through the pool's.
    ranks = dynamo_rows(walk(of, [value(1, 2, 3, 4), value(1, 3), value(4)]))
    assert ranks == {"a": {0: DynamoRank(2, 2, 3), 1: DynamoRank(1, 2, 3)}}


@pytest.fixture
def two() -> HolderTable:
    """Instances a (1 GPU, 2 CPU) and b (3 GPU)."""
    return table({1: publisher("a"), 2: publisher("b")}, holder(1, 1), holder(2, 1, medium="CPU"), holder(3, 2, "b"))


def test_a_walk_ends_at_the_first_block_that_nobody_has(two: HolderTable) -> None:
    followed = Walk(two.view(BLOCK_SIZE))
    assert followed.feed(runs([value(1), None, value(1)])), "the walk does not know what comes behind the runs"
    assert followed.blocks == 1
    assert conductor_rows(followed)["a"].longest == 1


def test_a_walk_ends_where_no_single_instance_goes_on(two: HolderTable) -> None:
    followed = Walk(two.view(BLOCK_SIZE))
    assert not followed.feed(runs([value(1), value(3), value(1)]))
    assert followed.blocks == 1
    rows = conductor_rows(followed)
    assert (rows["a"].longest, rows["b"].longest) == (1, 0)


def test_a_prefix_begins_at_the_first_block(two: HolderTable) -> None:
    rows = conductor_rows(walk(two, [value(1), value(1, 3), value(1, 3)]))
    assert (rows["a"].longest, rows["b"].longest) == (3, 0)
    assert rows["b"].media == {}


def test_a_medium_need_not_be_contiguous(two: HolderTable) -> None:
    row = conductor_rows(walk(two, [value(1), value(2), value(1, 2)]))["a"]
    assert (row.longest, row.media, row.ranks) == (3, {"GPU": 2, "CPU": 2}, {0: 3})


def test_nothing_found_still_has_all_rows_and_ranks(two: HolderTable) -> None:
    followed = walk(two, [None])
    assert conductor_rows(followed) == {"a": ConductorRow(ranks={0: 0}), "b": ConductorRow(ranks={0: 0})}
    assert dynamo_rows(followed) == {"a": {0: DynamoRank()}, "b": {0: DynamoRank()}}


def test_a_rank_known_only_from_batches_is_a_row_while_it_matches(two: HolderTable) -> None:
    of = table(dict(two.publishers), *two.holders.values(), holder(4, 1, rank=5))
    followed = walk(of, [value(4), value(1)])
    assert conductor_rows(followed)["a"].ranks == {0: 1, 5: 1}
    assert dynamo_rows(followed)["a"] == {0: DynamoRank(), 5: DynamoRank(1, 1, 1)}
    assert conductor_rows(walk(of, [value(1)]))["a"].ranks == {0: 1}


def test_a_pool_goes_on_for_every_instance(two: HolderTable) -> None:
    of = table(
        {**two.publishers, 3: publisher("pool", scope="shared")},
        *two.holders.values(),
        holder(4, 3, "pool", medium="DISK", scope="shared"),
    )
    rows = conductor_rows(walk(of, [value(4), value(1), value(4), value(3)]))
    assert rows["a"] == ConductorRow(3, {"DISK": 2, "GPU": 1}, {0: 1})
    assert rows["b"] == ConductorRow(1, {"DISK": 1}, {0: 0})


def test_a_slower_mediums_chain_goes_on_through_a_faster_one(two: HolderTable) -> None:
    ranks = dynamo_rows(walk(two, [value(1), value(2), value(1)]))
    assert ranks["a"] == {0: DynamoRank(gpu=1, cpu=3, disk=3)}


def test_a_walk_tells_when_the_table_is_behind(two: HolderTable) -> None:
    followed = walk(two, [value(1), value(1, 9)])
    assert (followed.newest_seen, followed.view.newest) == (9, 3)
    assert followed.blocks == 2


# ---- against counting block by block ---------------------------------------------------------------

ENGINES = ["a", "b", "c"]
#: The last one has no row, and never gets one.
MEDIA = ["GPU", "CPU", "DISK", "ZNS"]


@dataclass
class Case:
    publishers: dict[int, PublisherRow]
    holders: dict[int, Holder]
    blocks: list[list[int]]
    """The holder ids of each block."""

    @property
    def table(self) -> HolderTable:
        return table(self.publishers, *self.holders.values())

    @property
    def values(self) -> list[bytes | None]:
        return [value(*ids) for ids in self.blocks]

    def counts(self, number: int) -> bool:
        """Whether a holder id counts in a query with our block size."""
        of = self.holders.get(number)
        return of is not None and of.block_size == BLOCK_SIZE and not self.publishers[of.publisher].is_lost

    def media_of(self, block: list[int], instance: str, rank: int | None = None, *, with_pool: bool = True) -> set[str]:
        media = set()
        for of in (self.holders[number] for number in block if self.counts(number)):
            is_own = of.scope == "instance" and of.instance_id == instance and rank in (None, of.dp_rank)
            if is_own or (with_pool and of.scope == "shared"):
                media.add(of.medium)
        return media


@st.composite
def cases(draw: st.DrawFn) -> Case:
    publishers: dict[int, PublisherRow] = {}
    for instance in draw(st.lists(st.sampled_from(ENGINES), unique=True, min_size=1)):
        for rank in draw(st.sets(st.integers(0, 2), min_size=1)):
            publishers[len(publishers) + 1] = publisher(instance, rank, is_lost=draw(st.integers(0, 9)) == 0)
    if draw(st.booleans()):
        publishers[len(publishers) + 1] = publisher("pool", scope="shared", is_lost=draw(st.integers(0, 9)) == 0)
    holders: dict[int, Holder] = {}
    for number in range(1, draw(st.integers(1, 10)) + 1):
        of = draw(st.sampled_from(sorted(publishers)))
        row = publishers[of]
        rank = row.dp_rank if draw(st.integers(0, 3)) else 7
        size = BLOCK_SIZE if draw(st.integers(0, 9)) else 16
        medium = draw(st.sampled_from(MEDIA))
        holders[number] = holder(number, of, row.instance_id, rank, medium, scope=row.scope, block_size=size)
    ids = st.lists(st.integers(1, len(holders) + 1), unique=True, max_size=len(holders) + 1)
    several = draw(st.lists(st.tuples(ids, st.integers(1, 3)), max_size=6))  # neighbours are mostly equal
    return Case(publishers, holders, [list(block) for block, n in several for _ in range(n)])


def counted(case: Case) -> dict[str, ConductorRow]:
    """The root API's numbers, from its words."""
    rows: dict[str, ConductorRow] = {}
    for of in case.publishers.values():
        if of.scope == "instance":
            rows.setdefault(of.instance_id, ConductorRow()).ranks[of.dp_rank] = 0
    for instance, row in rows.items():
        for block in case.blocks:
            media = case.media_of(block, instance)
            if not media:
                break
            row.longest += 1
            for medium in media:
                row.media[medium] = row.media.get(medium, 0) + 1
            for rank in (0, 1, 2, 7):
                if case.media_of(block, instance, rank, with_pool=False):
                    row.ranks[rank] = row.ranks.get(rank, 0) + 1
    return rows


def counted_by_rank(case: Case, instance: str, rank: int) -> DynamoRank:
    """The Dynamo API's numbers of a rank, from its words."""

    def prefix(*wanted: str) -> int:
        n = 0
        while n < len(case.blocks) and case.media_of(case.blocks[n], instance, rank) & set(wanted):
            n += 1
        return n

    return DynamoRank(gpu=prefix("GPU"), cpu=prefix("GPU", "CPU"), disk=prefix(*MEDIA))


@pytest.mark.slow
@settings(deadline=None)
@given(cases())
def test_the_root_api_counts_what_each_block_says(case: Case) -> None:
    assert conductor_rows(walk(case.table, case.values)) == counted(case)


@pytest.mark.slow
@settings(deadline=None)
@given(cases())
def test_the_dynamo_api_counts_what_each_block_says(case: Case) -> None:
    answer = dynamo_rows(walk(case.table, case.values))
    assert set(answer) == set(counted(case))
    matched = matched_dynamo_rows(walk(case.table, case.values))
    assert list(matched.items()) == [(name, ranks) for name, ranks in answer.items() if name in matched]
    assert {name for name, ranks in answer.items() if any(rank.disk for rank in ranks.values())} <= matched.keys()
    for instance, ranks in answer.items():
        assert ranks == {rank: counted_by_rank(case, instance, rank) for rank in ranks}
        for rank in set(range(8)) - set(ranks):
            assert rank not in counted(case)[instance].ranks
            assert case.media_of(case.blocks[0] if case.blocks else [], instance, rank, with_pool=False) == set()


@pytest.mark.slow
@settings(deadline=None)
@given(cases())
def test_numbers_of_a_rank_never_fall(case: Case) -> None:
    rows = conductor_rows(walk(case.table, case.values))
    for instance, ranks in dynamo_rows(walk(case.table, case.values)).items():
        for rank in ranks.values():
            assert rank.gpu <= rank.cpu <= rank.disk <= rows[instance].longest


@settings(deadline=None)
@given(cases(), st.lists(st.integers(1, 4)))
def test_a_prompt_fed_in_pieces_is_the_prompt_fed_at_once(case: Case, sizes: list[int]) -> None:
    values, view = case.values, case.table.view(BLOCK_SIZE)
    whole, pieces = Walk(view), Walk(view)
    goes_on = whole.feed(runs(values))
    at, still = 0, True
    for size in [*sizes, len(values)]:
        piece = values[at : at + size]
        still = still and pieces.feed(runs(piece)) and None not in piece
        at += size
    assert still == (goes_on and None not in values)
    assert pieces.blocks == whole.blocks
    assert conductor_rows(pieces) == conductor_rows(whole)
    assert dynamo_rows(pieces) == dynamo_rows(whole)


def counted_by_target(case: Case, instance: str, rank: int) -> TargetRow:
    """What a target has, from its words: each block once, at its best place."""
    registered = sorted(
        of.dp_rank for of in case.publishers.values() if of.scope == "instance" and of.instance_id == instance
    )
    ranks = [rank] if rank != registered[0] else [rank, *(other for other in range(8) if other not in registered)]
    row = dict.fromkeys(("device", "host", "shared", "disk"), 0)
    for block in case.blocks:
        own = {medium for each in ranks for medium in case.media_of(block, instance, each, with_pool=False)}
        pool = case.media_of(block, "nobody")
        if not own | pool:
            break
        place = "device" if "GPU" in own else "host" if "CPU" in own else "shared" if pool else "disk"
        row[place] += 1
    return TargetRow(**row)


@pytest.mark.slow
@settings(deadline=None)
@given(cases())
def test_a_target_has_each_block_of_its_prefix_once_at_its_best_place(case: Case) -> None:
    rows = target_rows(walk(case.table, case.values))
    targets = {(of.instance_id, of.dp_rank) for of in case.publishers.values() if of.scope == "instance"}
    assert rows.keys() <= targets
    for target in targets:
        assert rows.get(target, TargetRow()) == counted_by_target(case, *target)


def test_the_bitmap_of_a_pool_has_its_blocks_contiguous_or_not() -> None:
    of = table(
        {1: publisher("a"), 2: publisher("pool", scope="shared")},
        holder(1, 1),
        holder(2, 2, "pool", medium="CPU", scope="shared"),
    )
    assert pool_bitmap(walk(of, [value(1, 2), value(1), value(1), value(2), None])) == 0b1001
    assert target_rows(walk(of, [value(1, 2), value(1), value(2), value(1)])) == {("a", 0): TargetRow(3, 0, 1, 0)}


@pytest.mark.parametrize(
    ("asked", "row"),
    [
        (0b0000, TargetRow(2)),
        (0b1111, TargetRow(2, 0, 2)),
        (0b1100, TargetRow(2, 0, 2)),
        (0b0110, TargetRow(2, 0, 1)),
        (0b1000, TargetRow(2)),
        (0b11_0100, TargetRow(2, 0, 1)),
    ],
)
def test_a_target_goes_on_with_what_a_pool_says_that_it_has(asked: int, row: TargetRow) -> None:
    """As with the same blocks by events."""
    alone = table({1: publisher("a"), 3: publisher("b")}, holder(1, 1))
    both = table(
        {1: publisher("a"), 2: publisher("pool", scope="shared"), 3: publisher("b")},
        holder(1, 1),
        holder(2, 2, "pool", medium="DISK", scope="shared"),
    )
    own = [{1} if i < 2 else set() for i in range(6)]
    told = [value(*sorted(ids | ({2} if asked >> i & 1 else set()))) for i, ids in enumerate(own)]
    by_events = target_rows(walk(both, [each or None for each in told]))
    found = target_rows(walk(alone, [value(*ids) or None for ids in own]), asked)
    assert found == by_events
    assert pool_bitmap(walk(alone, [value(*ids) or None for ids in own]), asked) == asked & 0b1111 * bool(row.shared)
    assert found["a", 0] == row
    assert ("b", 0) in found or not asked & 1
