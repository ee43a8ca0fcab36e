"""From an event to blocks: each rule of the event contract, by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.domain.index import Index
from tests.factories import keys, registration, removed, stored
from waymark.domain.copies import HASHES_MAX
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import extra_digest, namespace
from waymark.domain.held import RESTORED_MAX
from waymark.domain.life_facts import COPIES_EACH, COPIES_LAST, COPIES_LEFT, COPIES_REUSED, copies_rule
from waymark.domain.names import Adapter
from waymark.domain.resolver import EXTRA_KEYS, UNTRUSTED
from waymark.domain.targets import Target

SALTED = namespace(None, ["s"])


@pytest.fixture
def index() -> Index:
    """pod-1, a vLLM."""
    return Index()


# ---- dense, fewer, sparse, placeholders ------------------------------------------------------------


def test_a_dense_store_at_the_root(index: Index) -> None:
    index.events(stored([1, 2, 3], "ABC"))
    assert index.held() == dict.fromkeys(keys("ABC"), 1)
    assert index.holders == {"0 GPU": 1}


def test_a_store_goes_on_from_its_parent(index: Index) -> None:
    index.events(stored([1, 2], "AB"), stored([3], "C", parent=2), stored([4], "D", parent=1))
    assert index.has(*keys("ABC"), keys("AD")[1])


@pytest.mark.parametrize("has_block_0", [False, True])
def test_a_parent_of_zero_is_the_root_where_no_block_has_that_hash(index: Index, has_block_0: bool) -> None:
    if has_block_0:
        index.events(stored([0], "Z"))
    index.events(stored([1, 2], "AB", parent=0, may_begin=True), stored([3], "C", parent=0))
    assert index.has(*(keys("ZAB") + keys("ZC") if has_block_0 else keys("AB")))
    assert index.resolver.waiting.blocks == (not has_block_0)


@pytest.mark.parametrize(
    ("blocks", "complete"), [("AB", 2), ("AB2", 1), ("ABC1", 2), ("A3", 0)], ids=["two", "and-a-half", "most", "none"]
)
def test_of_fewer_tokens_the_complete_leading_blocks_count(index: Index, blocks: str, complete: int) -> None:
    index.events(stored([1, 2, 3], blocks))
    assert index.has(*keys("ABC")[:complete])
    assert index.ignored == {}


def test_a_child_of_a_block_without_tokens_waits(index: Index) -> None:
    index.events(stored([1, 2, 3], "AB"), stored([4], "D", parent=3))
    assert index.has(*keys("AB"))
    assert index.resolver.waiting.blocks == 1


def test_a_sparse_store_is_skipped_and_counted(index: Index) -> None:
    index.events(stored([1, 2], "ABC"), stored([3], "C", parent=2))
    assert index.has()
    assert index.ignored == {"sparse": 1}


def test_a_placeholder_says_where_known_blocks_are(index: Index) -> None:
    index.events(stored([1, 2, 3], "ABC"))
    index.events(stored([2, 9, 3], medium="CPU"))
    index.events(stored([3], medium="DISK"))
    assert index.has(*keys("ABC")[1:], on="0 CPU")
    assert index.has(keys("ABC")[2], on="0 DISK")
    assert index.resolver.unresolved == 1


def test_hashes_that_come_to_nothing_have_their_positions_too(index: Index) -> None:
    index.events(stored([1, 2, 3], "ABC"))
    index.events(removed(9), stored([1, 8, 2, 3], medium="CPU"), removed(3, 7, 1))
    assert index.positions == [("+", 2, [1]), ("+", 4, [2, 3]), ("-", 6, [3]), ("-", 8, [1])]


def test_a_placeholder_may_name_what_has_just_left_the_gpu(index: Index) -> None:
    index.events(stored([1, 2], "AB"), removed(2, 1), stored([1, 2], medium="CPU"))
    assert index.has()
    assert index.has(*keys("AB"), on="0 CPU")


def test_a_placeholder_of_another_rank_names_other_blocks(index: Index) -> None:
    index.events(stored([1], "A"))
    index.events(stored([1], medium="CPU"), rank=1)
    assert index.has(on="1 CPU")
    assert index.resolver.unresolved == 1


def test_two_hashes_of_one_event_may_be_one_block(index: Index) -> None:
    index.events(stored([1], "A"), stored([2], "A"))
    index.events(stored([1, 2], medium="CPU"))
    assert index.held("0 CPU") == {keys("A")[0]: 2}


# ---- block size ------------------------------------------------------------------------------------


def test_another_block_size_is_skipped_and_counted(index: Index) -> None:
    index.events(stored([1], "A"), stored([2], "BC", parent=1, block_size=8), stored([1], medium="CPU", block_size=8))
    assert index.has(*keys("A"))
    assert index.has(on="0 CPU")
    assert index.ignored == {"block_size_mismatch": 2}


def test_a_placeholder_may_tell_no_block_size_or_ours(index: Index) -> None:
    index.events(stored([1, 2], "AB"), stored([1], medium="CPU", block_size=0), stored([2], medium="CPU", block_size=4))
    assert index.has(*keys("AB"), on="0 CPU")


# ---- off the GPU, without a salt -------------------------------------------------------------------


def test_off_the_gpu_a_hash_is_looked_up_before_its_tokens_are_believed(index: Index) -> None:
    index.events(stored([1, 2], "AB", salts=("s",)))
    index.events(stored([1, 2], "AB", medium="CPU"))
    assert index.has(*keys("AB", ns=SALTED), on="0 CPU")


def test_off_the_gpu_tokens_are_hashed_while_no_extra_key_was_reported(index: Index) -> None:
    index.events(stored([1], "A"))
    index.events(stored([1, 2], "AB", medium="CPU"), stored([3], "C", parent=2, medium="DISK"))
    assert index.has(*keys("AB"), on="0 CPU")
    assert index.has(keys("ABC")[2], on="0 DISK")


@pytest.mark.parametrize("extra", [{"salts": ("s",)}, {"extras": (extra_digest(["image"]),)}], ids=["salt", "image"])
def test_off_the_gpu_nothing_unknown_is_hashed_after_an_extra_key(index: Index, extra: dict[str, Any]) -> None:
    index.events(stored([1], "A"))
    index.events(stored([9], "Z", **extra))
    assert index.plan.facts_changed
    index.events(stored([1, 2, 3], "ABC", medium="CPU"))
    assert index.has(*keys("A"), on="0 CPU")
    assert index.resolver.unresolved == 2


def test_a_new_life_believes_tokens_off_the_gpu_again(index: Index) -> None:
    index.events(stored([9], "Z", salts=("s",)))
    index.end("*")
    index.events(stored([1], "A", medium="CPU"))
    assert index.has(*keys("A"), on="0 CPU")


def test_the_extra_keys_of_a_life_outlive_a_takeover(index: Index) -> None:
    index.events(stored([9], "Z", salts=("s",)))
    index.take_over()
    assert index.resolver.flags == {EXTRA_KEYS}
    index.events(stored([1], "A", medium="CPU"))
    assert index.has(on="0 CPU")


def test_sglang_names_its_salt_in_every_store_so_its_tokens_are_hashed_anywhere() -> None:
    index = Index(registration(EngineKind.SGLANG))
    index.events(stored([9], "Z", salts=("s",)))
    index.events(stored([1, 2], "AB", medium="CPU"))
    assert index.has(*keys("AB"), on="0 CPU")


def test_off_the_gpu_a_store_that_tells_its_salt_is_hashed(index: Index) -> None:
    index.events(stored([1], "A", medium="CPU", salts=("s",)))
    assert index.has(*keys("A", ns=SALTED), on="0 CPU")


def test_off_the_gpu_known_hashes_need_no_known_parent(index: Index) -> None:
    index.events(stored([9], "Z", salts=("s",)), stored([1, 2, 3], "ABC"))
    index.events(stored([7, 2, 8, 3], "XBYC", parent=6, medium="CPU"))
    assert index.has(*keys("ABC")[1:], on="0 CPU")
    assert (index.resolver.waiting.blocks, index.resolver.unresolved) == (0, 2)


def test_off_the_gpu_nothing_is_hashed_that_has_no_known_block_before_it(index: Index) -> None:
    index.events(stored([1, 2], "AB"))
    index.events(stored([7, 2, 3], "XBC", parent=6, medium="CPU"))
    assert index.has(*keys("ABC")[1:], on="0 CPU")
    assert index.resolver.unresolved == 1


def test_off_the_gpu_each_hash_keeps_the_namespace_it_is_known_in(index: Index) -> None:
    index.events(stored([1], "A"), stored([2], "B", salts=("s",)))
    index.events(stored([1, 2], "AB", medium="CPU"))
    assert index.has(*keys("A"), *keys("B", ns=SALTED), on="0 CPU")
    entries = index.entries[index.holders["0 CPU"]].values()
    assert [(entry.hashes, entry.namespace) for entry in entries] == [([1], 0), ([2], SALTED)]


# ---- extra keys ------------------------------------------------------------------------------------


def test_the_same_tokens_with_other_images_are_other_blocks(index: Index) -> None:
    cat, dog = extra_digest(["cat"]), extra_digest(["dog"])
    index.events(stored([1, 2], "AB", extras=(None, cat)), stored([3, 4], "AB", extras=(None, dog)))
    index.events(stored([5, 6], "AB"))
    (a, b), (_, with_cat), (_, with_dog) = keys("AB"), keys("AB", extras=(None, cat)), keys("AB", extras=(None, dog))
    assert len({b, with_cat, with_dog}) == 3
    assert index.held() == {a: 3, b: 1, with_cat: 1, with_dog: 1}


def test_what_follows_an_image_is_another_prompt(index: Index) -> None:
    cat = extra_digest(["cat"])
    index.events(stored([1], "A", extras=(cat,)), stored([2], "B", parent=1))
    assert index.has(*keys("AB", extras=(cat, None)))


# ---- adapters and salts ----------------------------------------------------------------------------


def test_a_child_inherits_its_parents_salts(index: Index) -> None:
    index.events(stored([1], "A", salts=("s",)), stored([2], "B", parent=1))
    assert index.has(*keys("AB", ns=SALTED))


def test_the_registrations_salt_comes_before_the_requests() -> None:
    index = Index(registration(additional_salt="w8a8"))
    index.events(stored([1], "A"), stored([2], "A", salts=("s",)))
    assert index.has(*keys("A", ns=namespace(None, ["w8a8"])), *keys("A", ns=namespace(None, ["w8a8", "s"])))


@pytest.mark.parametrize(
    ("registered", "told", "expected"),
    [(None, "sql", "sql"), ("sql", None, "sql"), ("sql", "art", "art"), ("sql", 7, 7), (None, None, None)],
)
def test_an_adapter_is_the_events_else_the_registrations(
    registered: str | None, told: Adapter, expected: Adapter
) -> None:
    index = Index(registration(lora_name=registered))
    index.events(stored([1], "A", adapter=told), stored([2], "B", parent=1, adapter=told))
    assert index.has(*keys("AB", ns=namespace(expected, [])))
    assert index.ignored == {}


@pytest.mark.parametrize(("parents", "childs"), [("sql", "art"), ("sql", None), (None, "sql"), (7, "7")])
def test_a_child_of_another_adapter_is_dropped_and_counted(index: Index, parents: Adapter, childs: Adapter) -> None:
    index.events(stored([1], "A", adapter=parents), stored([2], "B", parent=1, adapter=childs))
    assert index.has(*keys("A", ns=namespace(parents, [])))
    assert index.ignored == {"adapter_mismatch": 1}


# ---- removals and copies ---------------------------------------------------------------------------


def test_a_removal_is_of_its_medium_only(index: Index) -> None:
    index.events(stored([1, 2], "AB"), stored([1, 2], medium="CPU"))
    index.events(removed(1), removed(2, medium="CPU"))
    assert index.has(keys("AB")[1])
    assert index.has(keys("AB")[0], on="0 CPU")


def test_what_nobody_knows_is_counted_when_it_is_removed(index: Index) -> None:
    index.events(removed(1, 2))
    index.events(stored([1], "A"), removed(3))
    assert index.resolver.unresolved == 3


def test_a_block_is_there_until_its_last_copy_is_removed(index: Index) -> None:
    index.events(stored([1], "A"), stored([1], "A"))
    index.events(removed(1))
    assert index.held() == {keys("A")[0]: 1}
    index.events(removed(1))
    assert index.has()
    assert index.resolver.unresolved == 0


def test_copies_are_of_the_block_whatever_its_hash(index: Index) -> None:
    index.events(stored([1], "A"), stored([2], "A"))
    index.events(removed(2))
    assert index.has(*keys("A"))


@pytest.mark.parametrize(("kind", "mode"), [(EngineKind.VLLM, "set"), (EngineKind.SGLANG, "count")])
def test_how_copies_count_is_the_registrations_word(kind: EngineKind, mode: str) -> None:
    index = Index(registration(kind, copies=mode))
    index.events(stored([1], "A"), stored([1], "A"), removed(1))
    assert index.resolver.mode() == mode
    assert index.has(*(keys("A") if mode == "count" else []))


def test_after_a_lost_gap_a_removal_takes_the_block_whatever_its_count(index: Index) -> None:
    index.events(stored([1], "A"), stored([1], "A"))
    index.resolver.flags.add(UNTRUSTED)
    assert index.resolver.mode() == "all"
    index.events(removed(1))
    assert index.has()
    index.end("*")
    assert index.resolver.mode() == "count"


def test_after_a_lost_gap_a_block_that_is_told_again_has_one_copy(index: Index) -> None:
    index.events(stored([1], "A"), stored([1], "A"), stored([1], "A"))
    assert set(index.copies[1].values()) == {3}
    index.resolver.flags.add(UNTRUSTED)
    for _ in range(2):
        index.events(stored([1, 2], "AB"))
    assert set(index.copies[1].values()) == {1}


@pytest.mark.parametrize("is_reused", [None, True])
def test_a_report_finds_what_was_missing(index: Index, is_reused: bool | None) -> None:
    index.events(stored([1, 2], "AB"))
    index.resolver.flags.add(UNTRUSTED)
    index.resolver.missing = 3
    index.events(stored([3], "C", parent=2))
    assert index.resolver.unknown == 3, "a new block"
    index.events(stored([4], "D", parent=3, is_reused=is_reused), stored([1], "A", is_reused=is_reused))
    assert index.resolver.unknown == 2, "announced beside a known one, or as one that was there before"
    index.events(stored([5], "E", parent=4, is_reused=is_reused))
    assert index.resolver.unknown == (1 if is_reused else 2)


@pytest.mark.parametrize(("missing", "first", "left"), [(6, 1, 0), (6, 3, 0), (6, 4, 4), (9, 1, 7)])
def test_a_report_of_nearly_all_blocks_leaves_none_missing(index: Index, missing: int, first: int, left: int) -> None:
    """Six are known, and the report has two new ones, so it may name up to eight. The number of missing ones is an
    estimate; it is not given up for a report of fewer blocks.
    """
    index.events(stored([1, 2, 3, 4, 5, 6], "ABCDEF"))
    index.resolver.flags.add(UNTRUSTED)
    index.resolver.missing = missing
    names = "ABCDEFGH"[first - 1 :]
    index.events(stored([*range(first, 9)], names, parent=first - 1 if first > 1 else None))
    assert index.resolver.unknown == left


def test_sets_stay_sets_after_a_lost_gap() -> None:
    index = Index(registration(copies="set"))
    index.resolver.flags.add(UNTRUSTED)
    assert index.resolver.mode() == "set"


# ---- copies, as the engine says them ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["count", "set"])
@pytest.mark.parametrize("stores", [1, 2, 3])
def test_a_removal_that_says_how_many_copies_are_left_sets_the_count(mode: str, stores: int) -> None:
    index = Index(registration(copies=mode))
    index.events(*[stored([1, 2], "AB")] * stores)
    index.events(removed(2, 1, copies_left=(2, 1)))
    assert index.held() == {keys("A")[0]: 1, keys("AB")[1]: 2}
    index.events(removed(2, 1, copies_left=(1, 0)))
    assert index.held() == {keys("AB")[1]: 1}
    index.take_over()
    index.events(removed(2, copies_left=(0,)))
    assert index.has()
    assert index.resolver.unresolved == 0


@pytest.mark.parametrize("mode", ["count", "set"])
def test_a_removal_that_does_not_say_it_takes_what_the_registration_says(mode: str) -> None:
    index = Index(registration(copies=mode))
    index.events(stored([1, 2], "AB"), stored([1, 2], "AB"))
    index.events(removed(1, 2, copies_left=(None, 0)))
    assert index.has(*(keys("A") if mode == "count" else []))


def test_after_a_loss_the_copies_that_a_removal_says_still_count(index: Index) -> None:
    index.events(stored([1], "A"), stored([1], "A"))
    index.resolver.flags.add(UNTRUSTED)
    index.events(removed(1, copies_left=(1,)))
    assert index.has(*keys("A"))


def test_copies_left_of_a_block_that_nobody_knows_change_nothing(index: Index) -> None:
    index.events(stored([1], "A"))
    index.events(stored([5], "C", parent=4), removed(5, 9, copies_left=(1, 3)))
    index.events(stored([4], "B", parent=1))
    assert index.has(*keys("ABC"))


def test_a_block_with_further_hashes_stays_while_another_hash_names_it(index: Index) -> None:
    index.events(stored([1], "A"), stored([2], "A"))
    index.events(removed(1, copies_left=(0,)))
    assert index.held() == {keys("A")[0]: 1}
    index.events(removed(2, copies_left=(0,)))
    index.events(removed(2, copies_left=(0,)))
    assert index.has()


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_store_that_only_announces_again_adds_no_copy(index: Index, medium: str) -> None:
    index.events(stored([1, 2], "AB", medium=medium, is_reused=False, salts=("s",)))
    for _ in range(3):
        index.events(stored([1, 2, 3], "ABC", medium=medium, is_reused=True, salts=("s",)))
    index.events(stored([1], "A", medium=medium, is_reused=False, salts=("s",)))
    blocks = keys("ABC", ns=SALTED)
    assert index.held(f"0 {medium}") == dict(zip(blocks, [2, 1, 1], strict=True))
    index.events(removed(3, 2, 1, medium=medium))
    assert index.has(blocks[0], on=f"0 {medium}")


def test_the_rule_of_copies_follows_from_what_the_events_show(index: Index) -> None:
    def rule() -> str:
        found = copies_rule(index.registration, index.resolver.flags)
        assert found.why
        return found.rule

    index.events(stored([1], "A"))
    assert rule() == "count"
    index.events(stored([1], "A", is_reused=False))
    assert (rule(), index.resolver.flags) == ("count", {COPIES_REUSED})
    index.events(removed(1, copies_left=(1,)))
    assert (rule(), index.resolver.flags) == ("set", {COPIES_REUSED, COPIES_LEFT})
    index.take_over()
    assert rule() == "set"
    index.end("*")
    assert rule() == "count"
    index.resolver.flags.add(UNTRUSTED)
    assert rule() == "set"
    assert copies_rule(registration(copies="set"), ()).rule == "set"


def test_another_number_of_copies_than_was_counted_is_a_contradiction(index: Index) -> None:
    index.events(stored([1, 2], "AB"), stored([1, 2], "AB"))
    index.events(removed(1, 2, copies_left=(1, 0)))
    assert index.resolver.contradictions == 1
    index.events(removed(1, copies_left=(0,)))
    assert index.resolver.contradictions == 1


def test_an_engine_that_removes_a_block_once_for_all_copies_contradicts_the_count(index: Index) -> None:
    for _ in range(3):  # two copies, and one removal after the last of them
        index.events(stored([1], "A"), stored([1], "A"), removed(1))
    assert index.resolver.contradictions == 2


def test_an_engine_that_never_removes_a_block_twice_counts_no_copies(index: Index) -> None:
    index.events(stored([5], "E"), stored([5], "E"), removed(5))
    for _ in range(RESTORED_MAX + 1):
        assert not index.resolver.doubts
        index.events(stored([1], "A"), stored([1], "A"), removed(1))
    assert index.resolver.doubts == {COPIES_LAST}
    index.resolver.flags.update(index.resolver.doubts)
    assert copies_rule(index.registration, index.resolver.flags).rule == "set"
    index.events(stored([2], "B"))
    assert index.held() == {keys("B")[0]: 1}, "nothing is left of the blocks that were removed once"
    index.events(stored([2], "B"), stored([3], "C"), removed(2))
    assert index.held() == {keys("C")[0]: 1}


def test_an_engine_that_has_removed_a_block_twice_counts_copies_whatever_comes(index: Index) -> None:
    index.events(stored([5], "E"), stored([5], "E"), removed(5), removed(5))
    for _ in range(2 * RESTORED_MAX):
        index.events(stored([1], "A"), stored([1], "A"), removed(1))
    assert not index.resolver.doubts


@pytest.mark.parametrize(
    ("release", "rule"),
    [("0.33.2", "count"), ("0.34.0rc1.dev7+gabc", "set"), ("v1.0", "set"), ("main", "count"), (None, "count")],
)
def test_the_release_of_the_engine_says_how_copies_are_removed(release: str | None, rule: str) -> None:
    index = Index(registration(target=Target(release=release)))
    found = copies_rule(index.registration, index.resolver.flags)
    assert (found.rule, (release or "its type") in found.why or rule == "count") == (rule, True)
    index.events(stored([1], "A"), stored([1], "A"), removed(1))
    assert index.has() == (rule == "set") == (not index.has(*keys("A")))


def test_a_release_that_removes_each_copy_all_the_same_is_believed(index: Index) -> None:
    index = Index(registration(target=Target(release="0.34.0")))
    index.events(stored([1], "A"), stored([1], "A"), removed(1), stored([1], "A"), removed(1))
    assert (index.resolver.contradictions, index.resolver.doubts) == (0, set())
    index.events(removed(1))
    assert (index.resolver.contradictions, index.resolver.doubts) == (1, {COPIES_EACH})
    index.resolver.flags.update(index.resolver.doubts)
    assert copies_rule(index.registration, index.resolver.flags).rule == "count"
    index.events(stored([1], "A"), stored([1], "A"), removed(1))
    assert index.has(*keys("A"))


def test_fewer_copies_than_none_are_a_contradiction(index: Index) -> None:
    index.events(stored([1], "A"), removed(1), removed(1), removed(2))
    assert (index.resolver.contradictions, index.resolver.unresolved) == (1, 1)


def test_an_engine_that_removes_each_copy_contradicts_nothing(index: Index) -> None:
    index.events(stored([1], "A"), stored([1], "A"), removed(1), removed(1))
    index.events(stored([2], "B"), stored([2], "B"), removed(2), stored([2], "B"), removed(2), removed(2))
    assert index.has()
    assert index.resolver.contradictions == 0


# ---- a hash stored again as another block ----------------------------------------------------------


@pytest.mark.parametrize("kind", [EngineKind.SGLANG, EngineKind.MOONCAKE])
def test_a_hash_stored_as_another_block_first_leaves_the_old_one(kind: EngineKind) -> None:
    index = Index(registration(kind))
    index.events(stored([1, 2], "AB"))
    index.events(stored([1, 2, 3], "AXC"))
    assert index.has(*keys("AXC"))
    assert index.ignored == {"hash_stored_as_another_block": 1}
    index.events(removed(1, 2, 3))
    assert sum(index.held().values()) == (kind is EngineKind.SGLANG)  # A has a second copy


def test_a_block_has_at_most_so_many_hashes_and_further_ones_count_as_removed(index: Index) -> None:
    several = range(1, HASHES_MAX + 1)
    index.events(*(stored([each], "A") for each in several))
    assert index.ignored == {}
    index.events(stored([101], "A"), stored([102], "A"), stored([1], "A"))
    assert index.ignored == {"too_many_hashes_of_a_block": 2}
    index.events(stored([103], "B", parent=102))
    assert index.has(*keys("AB"))
    index.events(removed(101), removed(102))
    assert index.resolver.unresolved == 0
    index.events(removed(1), *(removed(each) for each in several[:-1]))
    assert index.has(*keys("AB"))
    index.events(removed(several[-1]))
    assert index.has(keys("AB")[1])


def test_off_the_gpu_a_hash_leaves_its_old_block_too(index: Index) -> None:
    index.events(stored([1], "A", medium="CPU", salts=("s",)))
    index.events(stored([1], "B", medium="CPU", salts=("s",)))
    assert index.has(*keys("B", ns=SALTED), on="0 CPU")
    assert index.ignored == {"hash_stored_as_another_block": 1}


def test_hashes_that_change_places_all_leave_before_any_is_stored() -> None:
    index = Index(registration(EngineKind.SGLANG))
    index.events(stored([1, 2], "AB"))
    index.events(stored([3], "A"), removed(3))
    index.events(stored([2, 1], "AB"))
    assert index.has(*keys("AB"))
    assert index.ignored == {"hash_stored_as_another_block": 2}


def test_a_placeholder_follows_a_hash_to_its_new_block() -> None:
    index = Index(registration(EngineKind.SGLANG))
    index.events(stored([1, 2], "AB"), stored([1, 2], medium="CPU"), removed(1, 2, medium="CPU"))
    index.events(stored([1, 2], "XY"))
    index.events(stored([9, 1, 8, 2], medium="CPU"))
    assert index.has(*keys("XY"), on="0 CPU")
    assert index.resolver.unresolved == 2


def test_another_blocks_hash_is_left_after_a_takeover_too() -> None:
    index = Index(registration(EngineKind.SGLANG))
    index.events(stored([1, 2], "AB"))
    index.take_over()
    index.events(stored([1, 2], "AX"))
    assert index.has(*keys("AX"))


# ---- a worker that takes over ----------------------------------------------------------------------


def test_after_a_takeover_parents_removals_and_placeholders_are_known(index: Index) -> None:
    index.events(stored([1, 2, 3], "ABC", salts=("s",)))
    index.take_over()
    index.events(stored([4], "D", parent=3), stored([2], medium="CPU"), removed(1))
    assert index.has(*keys("ABCD", ns=SALTED)[1:])
    assert index.has(keys("ABC", ns=SALTED)[1], on="0 CPU")


def test_a_removal_concerns_its_medium_though_another_one_knows_the_hash(index: Index) -> None:
    index.events(stored([1], "A"), stored([1], medium="CPU"))
    index.take_over()
    index.events(stored([1], "A"))
    index.events(removed(1, medium="CPU"))
    assert index.has(on="0 CPU")
    assert index.resolver.unresolved == 0


def test_blocks_beyond_the_ceiling_are_counted_and_not_indexed() -> None:
    index = Index(blocks_max=4)
    index.events(stored([1, 2, 3], "ABC"))
    index.events(stored([4, 5], "XY"), stored([6], "Z"), removed(1))
    assert index.has(*keys("ABC")[1:], *keys("Z"))
    assert index.ignored == {"too_many_blocks": 1}


def test_stores_that_could_not_have_told_a_salt_are_counted() -> None:
    index = Index()
    index.events(stored([1], "A"), stored([2], "B", tells_salts=False))
    assert index.resolver.unsalted == 1
