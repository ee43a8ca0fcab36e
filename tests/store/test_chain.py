"""A chain on its way through the index: exact for any placement of its blocks, and in few requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.domain.rows import format_row
from tests.domain.test_row_runs import runs
from tests.factories import slots_of
from waymark.domain.packing import KEY_BYTES, pack, unpack
from waymark.domain.row_runs import Runs
from waymark.domain.rows import PIECE_BLOCKS, Row
from waymark.store.chain import Chain, KeySource, ValueName, WantedValues
from waymark.store.directory import GroupEntry
from waymark.store.hot import HOLDERS_MIN, HotRows

Values = dict[bytes, bytes]
Held = Mapping[int, Iterable[int]]
"""The blocks of each holder."""


def value(blocks: list[int], depth: int, held: Held, *, is_marked: bool = False) -> bytes:
    """A row of blocks that follow each other, the first of them at ``depth``."""
    holders = {holder: sum(1 << blocks.index(block) for block in own) for holder, own in held.items()}
    return format_row(Row(slots_of(blocks, depth), is_marked, {each: bits for each, bits in holders.items() if bits}))


def name(block: int, kind: str = "") -> bytes:
    return f"{block:016x}{kind}".encode()


def whole(blocks: list[int], *holders: int) -> Values:
    """A chain in rows of its own; each holder has all of it."""
    found: Values = {}
    for start in range(0, len(blocks), PIECE_BLOCKS):
        piece = blocks[start : start + PIECE_BLOCKS]
        found[name(piece[0])] = value(piece, 0, dict.fromkeys(holders, piece))
    return found


def source_of(blocks: list[int]) -> KeySource:
    keys = pack(blocks)
    at = 0

    def source(count: int) -> bytes:
        nonlocal at
        at += KEY_BYTES * count
        return keys[at - KEY_BYTES * count : at]

    return source


def names_of(asked: WantedValues, shards: int = 1) -> list[ValueName]:
    """All that was asked for."""
    return [(head % shards, name(head)) for head in unpack(asked.heads)] + asked.beside


class Followed:
    """A chain that was followed to its end, and what was asked for on the way."""

    def __init__(
        self,
        blocks: list[int],
        values: Values,
        portions: Iterable[int] = (4,),
        *,
        hot: HotRows | None = None,
        entry: GroupEntry | None = None,
        has_singles: bool = False,
        now: float = 0.0,
    ) -> None:
        self.runs: Runs = []
        self.requests: list[list[bytes]] = []
        self.names: list[ValueName] = []
        entry = entry or GroupEntry(1, 1)
        self.shards = entry.shards
        self.chain = Chain(source_of(blocks), HotRows(0, 0) if hot is None else hot)
        self.chain.begin(entry)
        self.chain.has_singles = has_singles
        sizes = iter(portions)
        size = 4
        is_over = False
        while not is_over:
            size = next(sizes, size)
            asked = names_of(self.chain.ask(size, now), self.shards)
            self.names += asked
            if asked:
                self.requests.append([each for _, each in asked])
                self.chain.take([values.get(each) for _, each in asked])
            more, is_over = self.chain.settle()
            self.chain.keep_hot(now)
            self.runs += more

    @property
    def holders(self) -> list[bytes]:
        """The holders of each block."""
        return [ids for ids, length in self.runs for _ in range(length)]


def per_block(of: Runs) -> list[bytes]:
    return [ids for ids, length in of for _ in range(length)]


CHAIN = list(range(1, 301))
SHARED, TAIL = CHAIN[:100], list(range(1000, 1100))


def branching(tail: int) -> Values:
    """Holder 1 has the shared blocks and a tail, which begins inside a piece and has a branch row there."""
    values = whole(SHARED[:96], 1, 2)
    values[name(SHARED[96])] = value(SHARED[96:], 0, {1: SHARED[96:], 2: SHARED[96:]}, is_marked=True)
    inside = TAIL[: min(tail, 28)]
    values[name(inside[0], ":b")] = value(inside, 4, {1: inside})
    return values | whole(TAIL[28:tail], 1)


def wide(number: int) -> int:
    """A block with different leading digits than the small numbers here."""
    return 0xAB << 56 | number


def shared_row(digits: int) -> bytes:
    """The name of a shared branch row of the last shared piece."""
    return name(digits << 56 | SHARED[96], ":b")


def test_a_chain_is_asked_for_in_portions_of_rows() -> None:
    followed = Followed(CHAIN, whole(CHAIN, 7), [4, 64])
    assert [len(names) for names in followed.requests] == [4, 6]
    assert (followed.holders, followed.chain.found, followed.chain.blocks) == ([b"7"] * 300, 300, 300)
    assert followed.requests[0] == [name(block) for block in (1, 33, 65, 97)]


def test_a_chain_that_nobody_has_is_one_small_request() -> None:
    followed = Followed(CHAIN, {}, [4, 64])
    assert (followed.requests, followed.runs) == ([[name(block) for block in (1, 33, 65, 97)]], [])


def test_a_chain_ends_with_its_last_row_also_where_a_portion_does() -> None:
    for count in (0, 1, 31, 32, 33, 127, 128, 129, 256):
        followed = Followed(CHAIN[:count], whole(CHAIN[:count], 7), [4, 4, 64])
        assert followed.holders == [b"7"] * count
        assert len(followed.requests) == -(-count // 128)


def test_a_marked_row_costs_a_request_only_in_the_last_portion() -> None:
    prompt = SHARED + TAIL[:50]
    for portion, requests in ((16, 2), (4, 2), (3, 3)):
        followed = Followed(prompt, branching(50), [portion, 64])
        assert followed.holders == [b"1 2"] * 100 + [b"1"] * 50
        assert len(followed.requests) == requests
    # Together with the next portion: the branch rows that may begin with the 28 blocks.
    followed = Followed(prompt, branching(50), [4, 64])
    # And the shared one that may have the first of them.
    first, *rest = (name(block, ":b") for block in TAIL[:28])
    assert followed.requests[1] == [name(TAIL[28]), first, shared_row(0), *rest]


def test_a_shared_branch_row_is_asked_for_by_the_first_block_that_the_row_does_not_list() -> None:
    values = branching(50)
    tail = [wide(1), 5001, 5002]
    slots = name(0xA0 << 56 | SHARED[96]) + b"0" + name(wide(7)) + b"4" + slots_of(tail, 4) + name(6000) + b"5"
    values[shared_row(0xA0)] = format_row(Row(slots, False, {1: 0b1110, 2: 0b10100, 3: 0b100000}))
    followed = Followed(SHARED + tail, values, [16])
    assert followed.holders == [b"1 2"] * 101 + [b"1", b"2"]
    assert followed.requests[1] == [
        name(wide(1), ":b"), shared_row(0xA0), shared_row(0xAB), name(5001, ":b"), name(5002, ":b")
    ]  # fmt: skip
    del values[shared_row(0xA0)]
    values[shared_row(0xAB)] = name(0xAB << 56 | SHARED[96]) + b"0" + slots_of(tail, 4) + b" 1:e"
    assert Followed(SHARED + tail, values, [16]).holders == [b"1 2"] * 100 + [b"1"] * 3
    hot = HotRows(60.0, 1 << 20)
    for requests in (2, 1):
        followed = Followed(SHARED + tail, values, [16], hot=hot)
        assert (followed.holders, len(followed.requests)) == ([b"1 2"] * 100 + [b"1"] * 3, requests)


def test_behind_each_block_that_a_marked_row_lists_a_shared_branch_row_may_go_on() -> None:
    values = whole(SHARED[:96], 1)
    piece = [*SHARED[96:98], wide(1), SHARED[98], 0xCD << 56]
    listed = [piece[0], piece[1], piece[3]]
    slots = b"".join(slots_of([block], piece.index(block)) for block in listed)
    values[name(piece[0])] = format_row(Row(slots, True, {1: 0b111}))
    values[name(piece[2], ":b")] = value([piece[2]], 2, {1: [piece[2]]})
    values[shared_row(0xC0)] = name(0xC0 << 56 | SHARED[96]) + b"0" + slots_of([piece[4]], 4) + b" 1:2"
    followed = Followed(SHARED[:96] + piece, values, [16])
    assert followed.holders == [b"1"] * 101
    assert {shared_row(digits) for digits in (0xA0, 0xAB, 0xC0, 0xCD)} < set(followed.requests[1])


def test_a_row_in_the_cache_names_the_branch_rows_in_the_first_request() -> None:
    hot = HotRows(60.0, 1 << 20)
    values = branching(50)
    assert len(Followed(SHARED + TAIL[:50], values, [16], hot=hot).requests) == 2
    followed = Followed(SHARED + TAIL[:50], values, [16], hot=hot)
    assert followed.holders == [b"1 2"] * 100 + [b"1"] * 50
    (names,) = followed.requests
    first, *rest = (name(block, ":b") for block in TAIL[:28])
    assert names[3:] == [name(SHARED[96]), name(TAIL[28]), first, shared_row(0), *rest], "asked again"
    # What the row says now decides: another block is not in it any more, and it has been unmarked.
    values[name(SHARED[96])] = value(SHARED[96:], 0, {1: SHARED[96:], 2: SHARED[96:99]})
    assert Followed(SHARED + TAIL[:50], values, [16], hot=hot).holders[:100] == [b"1 2"] * 99 + [b"1"]
    # Another tail that begins with the shared blocks is not asked for twice either.
    assert len(Followed(SHARED + [5000, 5001], values, [16], hot=hot).requests) == 1


def test_a_row_in_the_cache_that_is_another_by_now_costs_a_request() -> None:
    hot = HotRows(60.0, 1 << 20)
    values = branching(50)
    Followed(SHARED + TAIL[:50], values, [16], hot=hot)
    values[name(SHARED[96])] = value(SHARED[96:98], 0, {1: SHARED[96:98]}, is_marked=True)
    values[name(SHARED[98], ":b")] = value([*SHARED[98:], *TAIL[:28]], 2, {3: [*SHARED[98:], *TAIL[:28]]})
    followed = Followed(SHARED + TAIL[:50], values, [16], hot=hot)
    assert followed.holders == [b"1 2"] * 96 + [b"1"] * 2 + [b"3"] * 2 + [b"1 3"] * 28 + [b"1"] * 22
    assert len(followed.requests) == 2


def test_rows_with_many_holders_are_not_asked_for_again() -> None:
    hot = HotRows(60.0, 1 << 20)
    values = whole(CHAIN[:64], *range(1, HOLDERS_MIN + 1)) | whole(CHAIN[64:128], 1)
    ids = b" ".join(b"%d" % each for each in range(1, HOLDERS_MIN + 1))
    for requests in ([4], [2], [2]):
        followed = Followed(CHAIN[:128], values, hot=hot)
        assert followed.holders == [ids] * 64 + [b"1"] * 64
        assert [len(names) for names in followed.requests] == requests
    assert Followed(CHAIN[:64], values, hot=hot).requests == []
    assert [len(names) for names in Followed(CHAIN[:128], values, hot=hot, now=61.0).requests] == [4]


@pytest.mark.parametrize("has_singles", [False, True])
def test_no_row_is_used_longer_than_it_may_be_kept(has_singles: bool) -> None:
    hot = HotRows(60.0, 1 << 20)
    many, none = whole(CHAIN[:64], *range(1, HOLDERS_MIN + 1)), whole(CHAIN[:64], 1)
    Followed(CHAIN[:64], many, hot=hot, has_singles=has_singles)
    assert Followed(CHAIN[:64], none, hot=hot, has_singles=has_singles, now=59.0).holders[0].startswith(b"1 2 ")
    assert Followed(CHAIN[:64], none, hot=hot, has_singles=has_singles, now=61.0).holders == [b"1"] * 64


def test_a_row_that_was_asked_for_before_a_write_was_acknowledged_is_not_kept() -> None:
    hot = HotRows(60.0, 1 << 20)
    values = {name(CHAIN[0]): value(CHAIN[:1], 0, {each: [CHAIN[0]] for each in range(1, HOLDERS_MIN + 1)})}
    chain = Chain(source_of(CHAIN[:1]), hot)
    for is_written in (True, False):
        chain.begin(GroupEntry(1, 1))
        asked = names_of(chain.ask(4, 0.0))
        if is_written:
            hot.clear()
        chain.take([values.get(each) for _, each in asked])
        chain.settle()
        chain.keep_hot(0.0)
        assert len(hot) == (0 if is_written else 1)


def test_what_comes_before_an_open_block_is_certain() -> None:
    """A query that ends at its deadline, or whose holders have ended, does not wait for branch rows."""
    chain = Chain(source_of(SHARED + TAIL[:50]), HotRows(0, 0))
    chain.begin(GroupEntry(1, 1))
    values = branching(50)
    asked = names_of(chain.ask(16, 0.0))
    chain.take([values.get(each) for _, each in asked])
    certain, is_over = chain.settle()
    assert (per_block(certain), is_over) == ([b"1 2"] * 100, False)
    chain.begin(GroupEntry(1, 1))
    assert names_of(chain.ask(16, 0.0)) == asked, "the keys are kept"


def test_a_value_that_cannot_be_read_ends_the_chain_and_is_named() -> None:
    values = whole(CHAIN, 7)
    for broken in (b"17", b"", values[name(33)][:30], values[name(1)]):
        followed = Followed(CHAIN, values | {name(33): broken})
        assert followed.holders == [b"7"] * 32
        assert followed.chain.unreadable == {(0, name(33))}
    values = branching(50) | {name(TAIL[3], ":b"): b"half a value"}
    followed = Followed(SHARED + TAIL[:50], values)
    assert followed.holders == [b"1 2"] * 100 + [b"1"] * 50, "the others count"
    assert followed.chain.unreadable == {(0, name(TAIL[3], ":b"))}
    values[name(TAIL[0], ":b")] = b"\xff" * 100
    followed = Followed(SHARED + TAIL[:50], values)
    assert followed.holders == [b"1 2"] * 100
    assert followed.chain.unreadable == {(0, name(TAIL[at], ":b")) for at in (0, 3)}


def test_each_row_is_asked_for_in_the_shard_of_its_head_and_a_single_in_its_own() -> None:
    followed = Followed(SHARED + TAIL[:50], branching(50), entry=GroupEntry(1, 3))
    assert followed.holders == [b"1 2"] * 100 + [b"1"] * 50
    for shard, each in followed.names:
        head = SHARED[96] if each.endswith(b":b") else int(each, 16)
        assert shard == head % 3
    followed = Followed(CHAIN[:40], {}, entry=GroupEntry(1, 3), has_singles=True)
    singles = [(shard, int(each[:16], 16)) for shard, each in followed.names if each.endswith(b":s")]
    assert singles == [(block % 3, block) for block in CHAIN[:40]]


def test_singles_count_beside_rows() -> None:
    values = whole(CHAIN[:32], 1)
    values |= {name(block, ":s"): value([block], 0, {9: [block], 2: [block]}) for block in CHAIN[20:60]}
    assert Followed(CHAIN[:100], values).holders == [b"1"] * 32
    followed = Followed(CHAIN[:100], values, has_singles=True)
    assert followed.holders == [b"1"] * 20 + [b"1 2 9"] * 12 + [b"2 9"] * 28
    assert len(followed.requests) == 1
    values[name(CHAIN[25], ":s")] = value([CHAIN[26]], 0, {9: [CHAIN[26]]})
    followed = Followed(CHAIN[:100], values, has_singles=True)
    assert followed.holders[25] == b"1"
    assert followed.chain.unreadable == {(0, name(CHAIN[25], ":s"))}


def test_singles_that_are_known_late_are_asked_for_then() -> None:
    values = {name(block, ":s"): value([block], 0, {9: [block]}) for block in CHAIN[:60]}
    chain = Chain(source_of(CHAIN[:100]), HotRows(0, 0))
    chain.begin(GroupEntry(1, 1))
    chain.take([None] * len(names_of(chain.ask(4, 0.0))))
    chain.has_singles = True  # as the table says that came with the rows
    assert chain.settle() == ([], False)
    asked = names_of(chain.ask(4, 0.0))
    assert len(asked) == 100
    chain.take([values.get(each) for _, each in asked])
    certain, is_over = chain.settle()
    assert (per_block(certain), is_over) == ([b"9"] * 60, True)


# ---- any placement ---------------------------------------------------------------------------------

Chains = list[list[int]]


@st.composite
def indexes(draw: st.DrawFn) -> tuple[Chains, dict[int, set[int]], Values, bool]:
    """Chains that branch, the blocks of each holder, and values that place them as the contract allows."""
    chains: Chains = []
    depth_of: dict[int, tuple[int, ...]] = {}  # of each block, its chain up to it
    for number in range(draw(st.integers(1, 4))):
        shared = draw(st.sampled_from(chains))[: draw(st.integers(0, 140))] if chains else []
        more = draw(st.sampled_from([1, 5, 31, 32, 40, 100]))
        chain = [*shared, *range(1 + 1000 * (number + 1), 1 + 1000 * (number + 1) + more)]
        chains.append(chain)
        for depth, block in enumerate(chain):
            depth_of[block] = tuple(chain[: depth + 1])
    capacity = draw(st.sampled_from([2, 8, 40, 64]))
    blocks = sorted(depth_of)
    held: dict[int, set[int]] = {}
    for holder in draw(st.lists(st.sampled_from([1, 2, 30, 400]), unique=True, max_size=4)):
        chain = draw(st.sampled_from(chains))
        length = draw(st.integers(0, len(chain)))
        held[holder] = set(chain[:length]) - set(draw(st.lists(st.sampled_from(blocks), max_size=2)))
    singles = set(draw(st.lists(st.sampled_from(blocks), max_size=6)))
    rows: dict[bytes, list[int]] = {}
    marked: set[bytes] = set()
    placed: dict[int, list[tuple[bytes, int]]] = {}  # the values that list a block, and its slot
    for chain in draw(st.permutations(chains)):
        for depth, block in enumerate(chain):
            head = name(chain[depth - depth % PIECE_BLOCKS])
            if block in placed or block in singles or not any(block in own for own in held.values()):
                continue
            row = rows.setdefault(head, [chain[depth - depth % PIECE_BLOCKS]])
            if block in row:
                placed[block] = [(head, row.index(block))]
                continue
            if head not in marked and len(row) < capacity:
                row.append(block)
                placed[block] = [(head, len(row) - 1)]
                continue
            marked.add(head)
            # A branch row of any ancestor in the piece, or one of its own, or both.
            above = [name(each, ":b") for each in chain[depth - depth % PIECE_BLOCKS : depth]]
            choices = [each for each in above if each in rows and len(rows[each]) < capacity] + [name(block, ":b")]
            picked = draw(st.lists(st.sampled_from(choices), unique=True, min_size=1, max_size=2))
            placed[block] = []
            for each in picked:
                branch = rows.setdefault(each, [])
                branch.append(block)
                placed[block].append((each, len(branch) - 1))
    bitmaps: dict[bytes, dict[int, int]] = {each: {} for each in rows}
    values: Values = {}
    for holder, own in held.items():
        for block in own - singles:
            where, slot = draw(st.sampled_from(placed[block])) if len(placed[block]) > 1 else placed[block][0]
            bitmaps[where][holder] = bitmaps[where].get(holder, 0) | 1 << slot
    for each, listed in rows.items():
        text = b"".join(slots_of([block], len(depth_of[block]) - 1) if block in depth_of else b"" for block in listed)
        values[each] = format_row(Row(text, each in marked, bitmaps[each]))
    for block in singles:
        owners = {holder: 1 for holder, own in held.items() if block in own}
        if owners:
            values[name(block, ":s")] = format_row(Row(slots_of([block], 0), False, owners))
    return chains, held, values, bool(singles)


@settings(deadline=None)
@given(indexes(), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_holders_of_each_block_are_those_that_have_it(
    index: tuple[Chains, dict[int, set[int]], Values, bool], portions: list[int]
) -> None:
    chains, held, values, has_singles = index
    hot = HotRows(60.0, 1 << 20)
    for chain in chains * 2:  # the second time with the cache
        for prompt in (chain, [*chain[:50], 7], [*chain, 7, 8]):
            expected = runs([{holder for holder, own in held.items() if block in own} for block in prompt])
            for cache in (None, hot):
                followed = Followed(prompt, values, portions, hot=cache, has_singles=has_singles)
                assert followed.holders == per_block(expected)
                assert followed.chain.found == len(followed.holders)
                assert followed.chain.unreadable == set()
                assert len(followed.requests) <= -(-len(prompt) // PIECE_BLOCKS) + 1, "one request more at most"


@pytest.mark.parametrize(("seconds", "size"), [(0.0, 1000), (1.0, 0)])
def test_nothing_is_kept_where_it_is_off(seconds: float, size: int) -> None:
    hot = HotRows(seconds, size)
    hot.keep(1, b"the head", [value([1], 0, {each: [1] for each in range(1, HOLDERS_MIN + 1)})], now=0.0)
    assert len(hot) == 0


def test_what_is_kept_is_bounded_in_time_and_in_bytes() -> None:
    hot = HotRows(10.0, 4000)
    crowd = value([1], 0, {each: [1] for each in range(1, HOLDERS_MIN + 1)})
    marked = value([1], 0, {1: [1]}, is_marked=True)
    heads = b"".join(b"%08d" % number for number in range(4))
    hot.keep(1, heads, [crowd, value([1], 0, {1: [1]}), marked, None], now=0.0)
    assert hot.expire(9.9)
    assert hot.find(1, heads) == {0: (crowd, True, False), 2: (marked, False, True)}
    assert hot.find(2, heads) == {}
    assert not hot.expire(10.0)
    assert (len(hot), hot.bytes) == (0, 0)
    for number in range(100):
        hot.keep(1, b"%08d" % number, [crowd], now=20.0)
        assert hot.bytes <= 4000
    assert hot.find(1, b"%08d" % 99 + b"%08d" % 1) == {0: (crowd, True, False)}
    hot.keep(1, b"too long", [crowd * 100], now=20.0)
    assert (len(hot), hot.bytes) == (0, 0), "what is larger than everything is not kept"
    hot.clear()
    assert len(hot) == 0
