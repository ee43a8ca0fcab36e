"""The holder table as a query sees it: whose ids count, which rows an answer has."""

from __future__ import annotations

from tests.domain.prompts import BLOCK_SIZE, holder, publisher, table
from waymark.domain.table import POOL, HolderTable, holder_ids


def seen(of: HolderTable, value: bytes, block_size: int = BLOCK_SIZE) -> dict[tuple[str, int], set[str]]:
    """Media by instance and rank, for the blocks with this value."""
    view = of.view(block_size)
    found: dict[tuple[str, int], set[str]] = {}
    for id in view.presence(value).ids:
        instance, rank, medium = view.places[id]
        if instance != POOL:
            found.setdefault((view.instances[instance], rank), set()).add(medium)
    return found


def test_media_are_told_by_rank_and_by_instance() -> None:
    of = table(
        {1: publisher("a"), 2: publisher("a", 1), 3: publisher("b")},
        holder(4, 1),
        holder(5, 1, medium="CPU"),
        holder(6, 2, rank=1, medium="DISK"),
        holder(7, 3, "b"),
    )
    assert seen(of, b"4 5 6 7") == {("a", 0): {"GPU", "CPU"}, ("a", 1): {"DISK"}, ("b", 0): {"GPU"}}
    presence = of.view(BLOCK_SIZE).presence(b"4 5 6 7")
    assert presence.instances == {0, 1}
    assert not presence.has_pool


def test_ids_that_are_not_in_the_table_count_for_nobody() -> None:
    of = table({1: publisher("a")}, holder(4, 1))
    assert seen(of, b"3 5") == {}
    assert seen(of, b"3 4 5") == {("a", 0): {"GPU"}}


def test_a_pool_is_no_row_and_has_no_rank() -> None:
    of = table(
        {1: publisher("a"), 2: publisher("pool", scope="shared")},
        holder(4, 1),
        holder(5, 2, "pool", medium="DISK", scope="shared"),
    )
    view = of.view(BLOCK_SIZE)
    assert view.instances == ("a",)
    assert view.presence(b"5").has_pool
    assert view.presence(b"5").instances == frozenset()
    assert not view.presence(b"4").has_pool


def test_a_lost_publisher_keeps_its_row_and_counts_for_nothing() -> None:
    of = table(
        {1: publisher("a", is_lost=True), 2: publisher("pool", scope="shared", is_lost=True)},
        holder(4, 1),
        holder(5, 2, "pool", scope="shared"),
    )
    view = of.view(BLOCK_SIZE)
    assert (view.instances, view.registered_ranks) == (("a",), ((0,),))
    assert seen(of, b"4 5") == {}
    assert not view.presence(b"4 5").has_pool


def test_a_holder_whose_publisher_is_gone_counts_for_nothing() -> None:
    assert seen(table({1: publisher("a")}, holder(4, 9)), b"4") == {}


def test_holders_of_another_block_size_count_only_in_queries_of_that_size() -> None:
    of = table({1: publisher("a"), 2: publisher("b")}, holder(4, 1), holder(5, 2, "b", block_size=16))
    assert seen(of, b"4 5") == {("a", 0): {"GPU"}}
    assert seen(of, b"4 5", 16) == {("b", 0): {"GPU"}}
    assert of.view(16).instances == of.view(BLOCK_SIZE).instances == ("a", "b")


def test_rows_are_in_the_order_of_registration_with_all_their_ranks() -> None:
    of = table({3: publisher("a", 1), 1: publisher("b"), 2: publisher("a", 4), 7: publisher("a")})
    view = of.view(BLOCK_SIZE)
    assert view.instances == ("b", "a")
    assert view.registered_ranks == ((0,), (0, 1, 4))


def test_a_view_is_made_once_per_block_size_but_never_very_many() -> None:
    of = table({1: publisher("a")}, holder(4, 1))
    view = of.view(2)
    assert of.view(2) is view
    assert view.presence(b"4") is view.presence(b"4")
    for block_size in range(3, 100):
        of.view(block_size)
    assert len(of._views) <= 16
    assert seen(of, b"4") == {("a", 0): {"GPU"}}


def test_the_newest_holder_of_a_table_and_of_a_value() -> None:
    assert table({}).newest == 0
    assert table({1: publisher("a")}, holder(40, 1), holder(9, 1, medium="CPU")).newest == 40
    assert (holder_ids(b"17"), holder_ids(b"17 21 140")) == ([17], [17, 21, 140])


def test_a_presence_is_the_same_after_any_other_one() -> None:
    """It is computed from that of the blocks before; pools and ids that do not count change nothing."""
    publishers = {1: publisher("a"), 2: publisher("a", 1), 3: publisher("b"), 4: publisher("pool", scope="shared")}
    holders = [holder(4, 1), holder(5, 2, rank=1), holder(6, 3, "b"), holder(7, 4, "pool", scope="shared")]
    values = [b" ".join(b"%d" % id for id in range(3, 9) if bits >> id - 3 & 1) for bits in range(1, 64)]
    for value in values:
        alone = table(publishers, *holders).view(BLOCK_SIZE).presence(value)
        for other in values:
            view = table(publishers, *holders).view(BLOCK_SIZE)
            assert view.presence(value, view.presence(other)) == alone
    assert alone.newest == 8


def test_a_value_that_is_damaged_at_its_end_still_has_a_newest_id() -> None:
    view = table({1: publisher("a")}, holder(4, 1)).view(BLOCK_SIZE)
    assert view.presence(b"4 9 x").newest == 9
    assert view.presence(b"").newest == 0
    assert view.presence(b"4 " + b"9" * 17).newest == 4
