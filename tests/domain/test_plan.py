"""What a fold asks for before it is resolved: main attention, clears, ranks, media, and what must be kept first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.domain.index import Index
from tests.factories import batch, cleared, envelope, keys, registration, removed, stored, window_of
from waymark.domain.engines import EngineKind
from waymark.domain.life_facts import EXTRA_KEYS
from waymark.domain.names import Holder, HolderName
from waymark.domain.plan import MEDIA_MAX
from waymark.domain.resolver import Plan


@pytest.fixture
def index() -> Index:
    return Index()


def test_a_plan_begins_the_holders_that_are_missing() -> None:
    index = Index(registration(EngineKind.MOONCAKE))
    index.events(stored([1], "A"))
    index.fold(batch(stored([2], "B", parent=1)), batch(stored([1], "A", medium="CPU"), rank=3))
    assert index.plan.begun == {HolderName(3, "CPU"): Holder(0, 1, "pod-1", 3, "CPU", 4, "pod-1", "shared")}
    assert (index.plan.ended, index.plan.facts_changed) == ([], False)


def test_a_holder_that_was_begun_is_not_begun_again(index: Index) -> None:
    index.events(stored([1], "A"))
    index.events(stored([2], "B"), stored([3], "C"))
    assert index.plan == Plan()


# ---- main attention --------------------------------------------------------------------------------


def test_of_several_main_groups_the_first_one_seen_counts(index: Index) -> None:
    index.events(stored([1], "A", group=1), stored([2], "B", group=0))
    index.events(stored([3], "C", group=0), removed(1, group=0), stored([1], medium="CPU", group=0))
    assert index.has(*keys("A"))
    assert index.has(on="0 CPU")
    assert index.resolver.main_group == 1
    assert index.ignored == {"other_group": 4}
    index.events(removed(1, group=1))
    assert index.has()


def test_groups_that_are_not_main_attention_are_ignored_and_their_removals_too(index: Index) -> None:
    index.events(window_of(0, [1], "A"), stored([1], "B", group=2))
    index.events(removed(1, group=0), window_of(None, [5], "C"))
    assert index.has(*keys("B"))
    assert index.ignored == {"other_attention": 2, "other_group": 1}


def test_the_main_group_is_kept_before_a_store_is_applied(index: Index) -> None:
    news = []
    for h, blocks in ((1, "A"), (2, "B")):
        index.events(stored([h], blocks, group=2))
        news.append(index.plan.facts_changed)
    assert news == [True, False]
    index.take_over()
    index.events(stored([3], "C", group=0), removed(1, group=2))
    assert index.has(*keys("B"))


def test_a_removal_of_a_group_not_yet_known_is_ignored_unless_it_is_0_or_none(index: Index) -> None:
    index.events(stored([1, 2, 3], "ABC"))
    index.events(removed(1, group=1), removed(2, group=0), removed(3))
    assert index.has(*keys("A"))
    assert index.ignored == {"other_group": 1}


def test_a_placeholder_teaches_no_main_group(index: Index) -> None:
    index.events(stored([1], "A"))
    index.events(stored([1], medium="CPU", group=3), stored([1], medium="DISK", group=0))
    assert index.resolver.main_group is None
    assert index.has(on="0 CPU")
    assert index.has(*keys("A"), on="0 DISK")


def test_events_without_a_group_count_beside_a_main_group(index: Index) -> None:
    index.events(stored([1], "A", group=1), stored([2], "B"), removed(1))
    assert index.has(*keys("B"))
    assert index.resolver.main_group == 1


def test_a_new_life_may_have_another_main_group(index: Index) -> None:
    index.events(stored([1], "A", group=1))
    index.end("*")
    index.events(stored([1], "A", group=0))
    assert index.plan.facts_changed
    assert index.has(*keys("A"))


# ---- clears ----------------------------------------------------------------------------------------


def test_a_clear_ends_all_media_of_its_rank_and_no_other_rank(index: Index) -> None:
    for rank in (0, 1, 10):
        index.events(stored([1], "A"), stored([1], medium="CPU"), rank=rank)
    index.events(cleared(), rank=1)
    assert index.plan.ended == [1]
    assert set(index.holders) == {"0 GPU", "0 CPU", "10 GPU", "10 CPU"}
    assert index.has(*keys("A"), on="10 CPU")


def test_what_stands_before_the_last_clear_of_its_rank_is_not_written(index: Index) -> None:
    index.events(stored([1], "A"))
    index.fold(
        batch(stored([2], "B", parent=1), cleared(), stored([3], "C")),
        batch(stored([4], "D"), rank=1),
        batch(removed(3), cleared(), stored([5], "E"), stored([6], "F", parent=5)),
    )
    assert index.has(*keys("EF"))
    assert index.has(*keys("D"), on="1 GPU")
    assert {h for part in index.parts for h in part.hashes} == {4, 5, 6}
    assert set(index.begun) == {"0 GPU", "1 GPU"}


def test_after_a_clear_the_old_blocks_are_nobodys_parent(index: Index) -> None:
    index.events(stored([1], "A"))
    index.events(cleared(), stored([2], "B", parent=1))
    assert index.has()
    assert index.resolver.waiting.blocks == 1


def test_an_event_before_a_clear_keeps_its_positions(index: Index) -> None:
    index.events(stored([1, 2], "AB"), cleared(), stored([3], "C"))
    assert index.positions == [("+", 4, [3])]


def test_facts_are_learned_from_what_a_clear_undoes_however_it_is_folded() -> None:
    events = stored([1], "A", group=1, salts=("s",)), cleared()
    folded, single = Index(), Index()
    folded.fold(*(batch(event) for event in events))
    for event in events:
        single.events(event)
    for index in (folded, single):
        assert (index.resolver.flags, index.resolver.main_group) == ({EXTRA_KEYS}, 1)
    assert folded.plan.facts_changed
    assert folded.plan.begun == {}


# ---- clears of standard streams --------------------------------------------------------------------


def standard() -> Index:
    """A standard publisher with block A on its GPU, event 5, and on its CPU."""
    index = Index(registration(EngineKind.STANDARD))
    for medium in ("GPU", "CPU"):
        index.events(stored(keys("A"), medium=medium, envelope=envelope(5)))
    return index


def test_a_standard_clear_ends_only_its_own_dimensions() -> None:
    index = standard()
    index.events(stored(keys("B"), envelope=envelope(5, adapter="x")))
    index.events(cleared(envelope=envelope(6, adapter="x")))
    assert index.has(*keys("A"))
    assert index.has(*keys("A"), on="0 CPU")
    assert len(index.resolver.holders) == 3, "the cleared one begins anew, to keep the event_id"
    index.events(cleared(medium="CPU", envelope=envelope(6)))
    assert index.has(on="0 CPU")
    assert index.has(*keys("A"))
    index.events(cleared(envelope=envelope(6, backend_id="other")))
    assert index.has(*keys("A"))


@pytest.mark.parametrize(
    ("strange", "reason"),
    [
        ({"tenant_id": "t"}, "other_tenant"),
        ({"model_name": "n"}, "other_model"),
        ({"block_size": 8}, "block_size_mismatch"),
    ],
)
def test_a_clear_of_another_tenant_or_model_is_not_ours(strange: dict[str, Any], reason: str) -> None:
    index = standard()
    index.events(cleared(envelope=envelope(6, **strange)))
    assert index.has(*keys("A"))
    assert index.ignored == {reason: 1}


def test_a_clear_that_came_before_is_dropped() -> None:
    index = standard()
    index.fold(
        batch(cleared(envelope=envelope(4))),
        batch(stored(keys("B"), envelope=envelope(8))),
        batch(cleared(envelope=envelope(7))),
    )
    assert index.has(*keys("A"), *keys("B"))
    assert index.ignored == {"seen": 2}
    assert index.plan.ended == []


def test_what_came_before_a_clear_is_dropped_behind_it_too() -> None:
    index = standard()
    first, again = (stored(keys(blocks), envelope=envelope(n)) for blocks, n in (("C", 7), ("B", 5)))
    index.events(cleared(envelope=envelope(6)), again, first)
    assert index.has(*keys("C"))
    assert index.ignored == {"seen": 1}


def test_an_engines_clear_ends_the_standard_streams_of_its_rank_too() -> None:
    index = Index(registration(EngineKind.MOONCAKE))
    index.events(stored(keys("A"), envelope=envelope(1)), cleared(), stored([2], "B"))
    assert index.has(*keys("B"))


# ---- ranks and media -------------------------------------------------------------------------------


def test_the_rank_of_a_batch_wins_over_the_registered_one() -> None:
    index = Index(registration(dp_rank=2))
    index.fold(batch(stored([1], "A")), batch(stored([1], "B"), rank=3))
    assert index.has(*keys("A"), on="2 GPU")
    assert index.has(*keys("B"), on="3 GPU")


def test_a_rank_with_a_registration_of_its_own_is_not_ours_to_apply() -> None:
    index = Index(registered_ranks=frozenset({0, 1}))
    index.events(stored([1], "A"))
    index.events(stored([2], "B"), removed(1), cleared(), rank=1)
    assert index.has(*keys("A"))
    assert index.holders == {"0 GPU": 1}
    assert index.ignored == {"other_registration": 3}
    index.resolver.registered_ranks = frozenset()
    index.events(stored([2], "B"), rank=1)
    assert index.has(*keys("B"), on="1 GPU")


def test_a_publisher_has_so_many_media_and_no_more(index: Index) -> None:
    for i in range(MEDIA_MAX + 2):
        index.events(stored([i], "A", medium=f"M{i}"))
        index.events(stored([i], "A", medium=f"M{i}"), rank=1)
    assert len(index.resolver.holders) == 2 * MEDIA_MAX
    assert index.ignored == {"too_many_media": 4}
    assert index.has(*keys("A"), on=f"1 M{MEDIA_MAX - 1}")
    index.events(stored([1], medium="M3"), rank=2)
    assert "2 M3" in index.holders


def test_holders_of_all_ranks_together_are_bounded_too(index: Index) -> None:
    index.fold(*(batch(stored([1], "A"), rank=rank) for rank in range(64 * MEDIA_MAX + 1)))
    assert len(index.resolver.holders) == 64 * MEDIA_MAX
    assert index.ignored == {"too_many_media": 1}
