"""Where blocks go, what parts say of them, and what the memory keeps."""

from __future__ import annotations

import pytest

from waymark.domain.held import HeldBlocks
from waymark.domain.known import Spot
from waymark.domain.moves import Moves
from waymark.domain.parts import Mode, Part, PartList
from waymark.domain.placing import Placer
from waymark.domain.rows import SAME_HASH, SHARED_BLOCKS, Place, shared_places
from waymark.domain.slices import finish

pytestmark = pytest.mark.usefixtures("implementation", "implementation_kept")

GPU, CPU = 1, 2
CHAIN = list(range(100, 200))


def placer(*, shards: int = 1) -> Placer:
    memory = HeldBlocks()
    memory.begin(GPU, 0)
    memory.begin(CPU, 0)
    return Placer(memory, shards)


def store(
    to: Placer,
    blocks: list[int],
    *,
    parent: Spot | None = None,
    holder: int = GPU,
    hashes: list[int] | None = None,
    mode: Mode = "count",
    parts: PartList | None = None,
    position: int = 1,
) -> list[Part]:
    parts = parts or to.begin_batch(1)
    to.chain(parts, holder, position, 0, parent, blocks, hashes or blocks, mode=mode)
    return list(parts.parts)


def remove(to: Placer, *hashes: int, holder: int = GPU, mode: Mode = "count") -> list[Part]:
    parts = to.begin_batch(2)
    for position, engine_hash in enumerate(hashes, 1):
        assert to.remove(parts, holder, position, engine_hash, mode=mode)
    return list(parts.parts)


def test_a_chain_is_cut_at_multiples_of_32() -> None:
    parts = store(placer(), CHAIN)
    assert [part.place for part in parts] == [Place(100), Place(132), Place(164), Place(196)]
    assert [part.depths[0] for part in parts] == [0, 0, 0, 0]
    assert [(part.first, part.last) for part in parts] == [(3, 65), (67, 129), (131, 193), (195, 201)]


def test_what_goes_on_from_a_block_goes_where_that_is() -> None:
    to = placer()
    store(to, CHAIN[:40])
    above = to.memory.find(GPU, CHAIN[39])
    (part,) = store(to, [900, 901], parent=above)
    assert (part.place, part.depths, part.parent) == (Place(132), [8, 9], 139)


def test_a_new_branch_row_is_begun_where_the_row_is_known_to_be_full() -> None:
    to = placer()
    store(to, CHAIN[:10])
    to.memory.full.add(Place(100))
    blocks = list(range(900, 900 + SHARED_BLOCKS + 1))
    (part,) = store(to, blocks, parent=to.memory.find(GPU, CHAIN[9]))
    assert part.place == Place(100, 900)
    (part,) = store(to, [990], parent=to.memory.find(GPU, blocks[-1]))
    assert part.place == Place(100, 900)
    to.memory.full.add(Place(100, 900))
    (part,) = store(to, [991], parent=to.memory.find(GPU, 990))
    assert part.place == Place(100, 991)


def test_a_few_blocks_behind_a_full_row_go_to_a_branch_row_that_chains_share() -> None:
    to = placer()
    store(to, CHAIN[:10])
    to.memory.full.add(Place(100))
    first = 0xAB << 56 | 900
    one_digit, two_digits = Place(100, 0xA << 60 | 100), Place(100, 0xAB << 56 | 100)
    (part,) = store(to, [first, 901], parent=to.memory.find(GPU, CHAIN[9]))
    assert (part.place, part.parent, part.place.is_shared) == (one_digit, CHAIN[9], True)
    (part,) = store(to, [902], parent=to.memory.find(GPU, 901))
    assert (part.place, part.parent) == (one_digit, 901), "what follows stays with it"
    to.memory.full.add(one_digit)
    (part,) = store(to, [903], parent=to.memory.find(GPU, 902))
    assert part.place == Place(100, 903), "its own one, because readers do not look for it among those of two digits"
    (part,) = store(to, [first + 10], parent=to.memory.find(GPU, CHAIN[8]))
    assert part.place == two_digits
    to.memory.full.add(two_digits)
    (part,) = store(to, [first + 20], parent=to.memory.find(GPU, CHAIN[8]))
    assert (part.place, part.place.is_shared) == (Place(100, first + 20), False)


def test_a_block_that_the_holder_has_is_a_copy_at_its_place() -> None:
    to = placer()
    store(to, CHAIN[:10])
    first, copy, rest = store(to, [*CHAIN[:3], 900], parent=None)[0], *store(to, [CHAIN[2], 901], parent=None)
    assert (first.is_known, first.copies) == (True, [b"2", b"2", b"2"])
    assert (copy.is_known, copy.copies, rest.is_known) == (True, [b"3"], False)
    assert [(part.kind, part.copies) for part in remove(to, 102, 102, 102)] == [
        ("*", [b"2"]),
        ("*", [b"0"]),
        ("-", []),
    ]
    assert to.memory.held(GPU, 102) is None


def test_a_second_engine_hash_is_kept_beside_the_first() -> None:
    to = placer()
    store(to, [100], hashes=[7], mode="set")
    (part,) = store(to, [100], hashes=[8], mode="set")
    assert (part.hashes, part.copies) == ([7], [b"1 0000000000000008"])
    (part,) = remove(to, 8, mode="set")
    assert (part.kind, part.copies) == ("-", [b"0"])
    assert to.memory.find(GPU, 7) == Spot(Place(100), 0, 0, 100)  # gone, but it can be a parent
    assert to.memory.held(GPU, 7) is None


def test_a_hash_that_comes_to_mean_another_block_leaves_the_first() -> None:
    to = placer()
    store(to, [100, 101], hashes=[7, 8])
    left, stored = store(to, [300], hashes=[8])
    assert (left.kind, left.keys, left.last) == ("-", [101], 2)
    assert (stored.kind, stored.keys, stored.last, to.aliased) == ("+", [300], 3, 1)


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_an_engine_hash_that_an_entry_cannot_tell_is_told_beside_it(is_taken_over: bool) -> None:
    to = placer()
    (part,) = store(to, CHAIN[:2], hashes=[SAME_HASH, 7])
    assert (part.keys, part.copies) == (CHAIN[:2], [b"1 ffffffffffffffff", b""])
    if is_taken_over:
        to = placer()
        store(to, CHAIN[:2], hashes=[CHAIN[0], 7])  # as the entry is read
        to.memory.copies(GPU).restore(CHAIN[0], 1, [SAME_HASH])
    assert to.memory.held(GPU, CHAIN[0]) is None
    (part,) = remove(to, SAME_HASH)
    assert (part.kind, part.keys, part.copies) == ("-", [CHAIN[0]], [b"0"])
    assert to.memory.held_block(GPU, CHAIN[0]) is None
    assert to.memory.blocks_of(GPU) == 1


@pytest.mark.parametrize("hashes", [[CHAIN[0], SAME_HASH], [SAME_HASH, CHAIN[0]], [7, SAME_HASH], [SAME_HASH, 7]])
def test_a_seq_hash_beside_that_engine_hash_is_not_taken_for_it(hashes: list[int]) -> None:
    to = placer()
    store(to, [CHAIN[0]], hashes=hashes[:1])
    (part,) = store(to, [CHAIN[0]], hashes=hashes[1:])
    copies, *told = part.copies[0].split()
    to = placer()
    store(to, [CHAIN[0]], hashes=[CHAIN[0] if hashes[0] == SAME_HASH else hashes[0]])  # as the entry is read
    to.memory.copies(GPU).restore(CHAIN[0], int(copies), [int(each, 16) for each in told])
    held = [each for each in (7, CHAIN[0], SAME_HASH) if to.memory.held(GPU, each)]
    assert held == sorted(hashes)
    assert [to.memory.take(GPU, [each]) for each in hashes] == [None, None], "neither is the only hash of its block"
    (part,) = remove(to, hashes[1], mode="set")
    assert part.hashes == hashes[:1]


def test_parts_that_are_new_join_only_along_a_chain() -> None:
    to, parts = placer(), PartList(1)
    store(to, CHAIN[:5], parts=parts)
    store(to, CHAIN[5:8], parent=to.memory.find(GPU, 104), parts=parts, position=6)
    assert len(parts.parts) == 1
    store(to, [900], parent=to.memory.find(GPU, 102), parts=parts, position=9)
    assert [part.keys for part in parts.parts] == [CHAIN[:8], [900]]


def test_what_was_counted_before_a_takeover_changes_nothing() -> None:
    to = placer()
    store(to, CHAIN[:3])
    to.skip({(GPU, 0): (1, 5)})  # the first two blocks of batch 1
    (part,) = store(to, CHAIN[:3])
    assert (part.keys, part.is_known, part.copies) == ([102], True, [b"2"])
    to.skip({(GPU, 0): (1, 5)})
    assert [part.keys for part in store(to, [500, 501, 502])] == [[502]]
    assert to.memory.held(GPU, 501) is None
    assert to.memory.find(GPU, 501) is not None


def test_a_refusal_moves_the_rest_and_what_follows_it() -> None:
    to = placer()
    (part,) = store(to, CHAIN[:10])
    (later,) = store(to, [900], parent=to.memory.find(GPU, CHAIN[9]), position=11)
    (removal,) = remove(to, *CHAIN[3:7])
    moves = Moves(to.memory)
    (rest,) = moves.refused(False, part, 5)
    assert (rest.place, rest.keys) == (Place(100, 105), CHAIN[5:10])
    assert [each.place for each in moves.follow(later)] == [Place(100, 105)]
    assert [(each.place.branch, each.keys) for each in moves.follow(removal)] == [(None, [103, 104]), (105, [105, 106])]
    held = to.memory.held(GPU, 108)
    assert held is not None
    assert held.place == Place(100, 105)
    assert Place(100) in to.memory.full
    (back,) = moves.refused(True, rest, 0)
    assert back.place == Place(100)
    assert Place(100) not in to.memory.full


def test_a_refused_rest_of_a_few_blocks_goes_to_a_shared_branch_row_if_its_parent_is_in_the_row() -> None:
    to = placer()
    first = 0xAB << 56 | 900
    store(to, CHAIN[:10])
    (part,) = store(to, [first, 901, 902], parent=to.memory.find(GPU, CHAIN[9]))
    (later,) = store(to, [first + 10], parent=to.memory.find(GPU, CHAIN[9]), position=11)
    (known,) = store(to, CHAIN[3:4], parent=to.memory.find(GPU, CHAIN[2]), position=12)
    moves, shared = Moves(to.memory), Place(100, 0xA << 60 | 100)
    (rest,) = moves.refused(False, part, 0)
    assert (rest.place, rest.parent, rest.count) == (shared, CHAIN[9], 3)
    assert [(each.place, each.parent) for each in moves.follow(later)] == [(shared, CHAIN[9])]
    (own,) = moves.refused(False, rest, 1)
    assert (own.place, own.parent) == (Place(100, 901), first), "the shared row is full: its parent is not in the row"
    (alone,) = moves.refused(False, known, 0)
    assert alone.place == Place(100, CHAIN[3]), "another holder may have what was before it elsewhere"


def test_a_stream_whose_blocks_would_lie_far_apart_uses_no_shared_branch_row_of_that_head_any_more() -> None:
    to = placer()
    store(to, CHAIN[:40])
    to.memory.full.add(Place(100))
    to.memory.full.add(Place(132))
    above, elsewhere = to.memory.find(GPU, CHAIN[9]), to.memory.find(GPU, CHAIN[39])
    (part,) = store(to, [0xAB << 56 | 900], parent=above)
    (own,) = Moves(to.memory).refused(False, part, 0, is_apart=True)
    assert (part.place.is_shared, own.place) == (True, Place(100, part.keys[0]))
    assert part.place not in to.memory.full
    (later,) = store(to, [0xCD << 56 | 900], parent=above)
    assert later.place == Place(100, later.keys[0])
    (other,) = store(to, [0xEF << 56 | 900], parent=elsewhere)
    assert other.place.is_shared


def test_a_part_that_was_sent_stays_at_its_place_unless_redis_stopped_before_it() -> None:
    to = placer()
    store(to, CHAIN[:10])
    parts = [
        store(to, [block], parent=to.memory.find(GPU, CHAIN[9]), position=position)[0]
        for position, block in enumerate((900, 901, 902), 11)
    ]
    moves = Moves(to.memory)
    moves.send(parts, 0, 3)
    moves.refused(False, parts[0], 0)
    moves.stopped_before(parts[2:])
    assert [moves.follow(part)[0].place.branch for part in parts[1:]] == [None, shared_places(100, 902)[0].branch]


def test_of_blocks_that_the_holder_has_one_moves_at_a_time() -> None:
    to = placer()
    store(to, CHAIN[:4])
    (part,) = store(to, CHAIN[:4])
    moved, rest = Moves(to.memory).refused(False, part, 1)
    assert (moved.keys, moved.place, rest.keys, rest.place) == ([101], Place(100, 101), CHAIN[2:4], Place(100))


def test_blocks_of_unknown_depth_and_their_children_are_singles() -> None:
    to, parts = placer(), PartList(1)
    to.chain(parts, GPU, 1, 0, None, [5, 6], [5, 6], mode="set", is_deep=True)
    to.chain(parts, GPU, 3, 0, to.memory.find(GPU, 6), [7], [7], mode="set")
    assert [part.place for part in parts.parts] == [Place(block, is_single=True) for block in (5, 6, 7)]


def test_the_memory_forgets_only_what_is_gone_and_places_nobody_names() -> None:
    memory = HeldBlocks(gone_max=10)
    memory.begin(GPU, 0)
    memory.begin(CPU, 0)
    to = Placer(memory, 1)
    store(to, CHAIN)
    for at in range(0, 50, 5):
        remove(to, *CHAIN[at : at + 5])
        finish(memory.trim())
    assert not memory.is_over
    assert (len(memory), memory.blocks) == (10 + 50, 50)
    assert memory.find(GPU, CHAIN[49]) == memory.find(CPU, CHAIN[49])
    assert memory.find(GPU, CHAIN[40]) is not None
    assert memory.find(GPU, CHAIN[39]) is None
    store(to, [CHAIN[45], 1000], hashes=[CHAIN[45], CHAIN[45] + 1])
    assert len(memory) == 8 + 52
    memory.end(GPU)
    memory.end(CPU)
    finish(memory.release())
    assert (len(memory), memory.places) == (0, 0)


def test_a_memory_that_is_dropped_has_nothing_left() -> None:
    to = placer()
    store(to, CHAIN)
    remove(to, *CHAIN[:5])
    assert (to.memory.blocks, to.memory.places) != (0, 0)
    finish(to.memory.drop())
    assert (len(to.memory), to.memory.blocks, to.memory.places) == (0, 0, 0)


def test_media_of_a_rank_find_each_others_blocks() -> None:
    to = placer()
    store(to, CHAIN[:2])
    spot = to.memory.find(CPU, CHAIN[1])
    assert spot is not None
    parts = to.begin_batch(1)
    to.block(parts, CPU, 1, CHAIN[1], spot, mode="count")
    (part,) = parts.parts
    assert (part.holder, part.place, part.depths, part.is_known) == (CPU, Place(100), [1], False)
