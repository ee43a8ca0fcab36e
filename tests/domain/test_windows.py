"""Hybrid models: a match ends where an engine has the window or the state, too."""

from __future__ import annotations

import gzip
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.domain.index import Index
from tests.factories import BLOCK_SIZE, SEED, batch, keys, registration, removed, stored, window_of
from waymark.domain.engines import EngineKind
from waymark.domain.events import Cleared
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.match import Walk, _complete, conductor_rows, dynamo_rows, target_rows
from waymark.domain.names import GroupName, Holder, Window
from waymark.domain.table import HolderTable, PublisherRow
from waymark.engines import decoder

_SESSIONS = Path(__file__).parents[1] / "fixtures" / "engines" / "vllm_0.33_hybrid.msgpack.gz"
SESSIONS: list[dict[str, Any]] = msgpack.unpackb(gzip.decompress(_SESSIONS.read_bytes()))


class Hybrid(Index):
    """A stream of an engine with a hybrid model, and what a reader sees of it."""

    def __init__(self, block_size: int = BLOCK_SIZE, **options: Any) -> None:
        self._records: dict[int, Holder] = {}
        super().__init__(replace(registration(), block_size=block_size), **{"reads_windows": True} | options)

    def _take(self) -> None:
        live = {id: name for name, id in self.resolver.holders.items()}
        begun = [(live[id], id) for id in live if live[id] in self.plan.begun]
        self._records |= {id: replace(self.plan.begun[name], id=id) for name, id in begun}

    def table(self) -> HolderTable:
        of = self.registration
        publishers = {1: PublisherRow(of.instance_id, 0, of.block_size, "instance")}
        live = {id: self._records[id] for id in self.resolver.holders.values()}
        return HolderTable(b"v", GroupName("default", "m"), publishers, live)

    def fold(self, *batches: Any) -> None:
        super().fold(*batches)
        self._take()

    def walk(self, seq_hashes: list[int]) -> Walk:
        held = [tuple(sorted(id for id, keys in self.copies.items() if key in keys)) for key in seq_hashes]
        walk = Walk(self.table().view(self.registration.block_size))
        walk.feed((b" ".join(b"%d" % id for id in ids), len(list(run))) for ids, run in groupby(held))
        return walk

    def longest(self, seq_hashes: list[int]) -> int:
        rows = conductor_rows(self.walk(seq_hashes))
        return rows[self.registration.instance_id].longest


@pytest.mark.parametrize("session", SESSIONS, ids=lambda each: each["name"])
def test_a_match_is_what_vllm_reuses(session: dict[str, Any]) -> None:
    """Prompts and events of vLLM 0.33's own block manager, which evicts: before each prompt, how much it will reuse."""
    size = session["block_size"]
    index = Hybrid(size)
    without = Hybrid(size, reads_windows=False)
    decode = decoder(EngineKind.VLLM, seed=SEED)
    reused = matched = promised = different = 0
    for number, step in enumerate(session["steps"]):
        prompt = step["prompt"]
        # vLLM computes the last token always.
        seq_hashes = extend(None, token_bytes(list(prompt[:-1])), size, seed=SEED)
        longest = size * index.longest(seq_hashes)
        reused += step["reused"]
        matched += longest
        promised += size * without.longest(seq_hashes)
        different += longest != step["reused"]
        for payload in step["batches"]:
            index.fold(decode(payload))
            without.fold(decode(payload))
        if number % 20 == 10:
            index.take_over()
    if session["name"] == "window with smaller blocks":
        # The blocks of the group that end inside of a block of full attention are not known.
        assert reused <= matched <= 1.05 * reused
    else:
        assert (matched, different) == (reused, 0)
    assert promised > matched, "there is something to find in this session"


# ---- rules -----------------------------------------------------------------------------------------

CHAIN = "ABCDEFGH"
HASHES = list(range(1, 9))


def chain() -> list[int]:
    return keys(CHAIN)


def main(first: int = 1, last: int = 8) -> Any:
    return stored(HASHES[first - 1 : last], CHAIN[first - 1 : last], parent=first - 1 or None, group=0)


def window(*hashes: int, blocks: int = 3, group: int = 1, medium: str = "GPU") -> Any:
    """Blocks of a group with a window of so many blocks; with one of them states."""
    tokens = 1 if blocks == 1 else BLOCK_SIZE * blocks
    return window_of(group, hashes, medium=medium, window=tokens, block_size=BLOCK_SIZE)


@pytest.fixture
def index() -> Hybrid:
    return Hybrid()


def test_a_prefix_goes_on_where_the_window_before_it_is_there(index: Hybrid) -> None:
    index.events(main(), window(3, 4, 5, 7, 8))
    assert index.longest(chain()) == 5
    index.events(window(6))
    assert index.longest(chain()) == 8
    index.events(removed(7, group=1))
    assert index.longest(chain()) == 6
    index.events(removed(4, group=1))
    assert index.longest(chain()) == 0
    index.events(window(1))
    assert index.longest(chain()) == 1, "from the root on, fewer blocks are enough"
    assert index.resolver.unknown == 0


def test_a_prefix_goes_on_where_a_state_is(index: Hybrid) -> None:
    index.events(main(), window(2, 6, blocks=1))
    assert index.longest(chain()) == 6
    index.events(removed(6, group=1))
    assert index.longest(chain()) == 2
    index.events(removed(1, group=0))
    assert index.longest(chain()) == 0, "a window is no prefix"


def test_every_group_must_agree(index: Hybrid) -> None:
    index.events(main(), window(*HASHES, group=1), window(3, 5, blocks=1, group=2))
    assert index.longest(chain()) == 5
    index.events(removed(4, group=1))
    assert index.longest(chain()) == 3
    rows = dynamo_rows(index.walk(chain()))["pod-1"]
    assert (rows[0].gpu, rows[0].disk) == (3, 3)
    assert target_rows(index.walk(chain()))["pod-1", 0].device == 3


def test_a_group_may_come_before_full_attention_in_its_batch(index: Hybrid) -> None:
    index.events(window(7, 8), removed(7, group=1), main(), window(6))
    assert index.longest(chain()) == 0
    index.events(window(7))
    assert index.longest(chain()) == 8


def test_consecutive_blocks_of_a_group_are_one_part(index: Hybrid) -> None:
    index.events(main(), window(1, 2, 3, 5, 6, 8))
    assert [part.hashes for part in index.parts] == [HASHES, [1, 2, 3], [5, 6], [8]]
    assert [part.parent for part in index.parts] == [None] * 4, "a part names a block before it only if it continues it"


def test_blocks_of_a_group_off_the_device_count_too(index: Hybrid) -> None:
    index.events(main(), window(6, 7), window(8, medium="CPU"))
    assert index.longest(chain()) == 8


def test_a_clear_ends_windows_and_a_takeover_keeps_them(index: Hybrid) -> None:
    index.events(main(), window(4, blocks=1))
    index.take_over()
    assert index.longest(chain()) == 4
    index.events(removed(4, group=1), window(2, blocks=1))
    assert index.longest(chain()) == 2
    index.events(Cleared(), main())
    assert index.longest(chain()) == 8, "of windows nothing is known now"
    index.end("*")
    assert not index.resolver.flags


def test_what_nobody_knows_is_counted_and_hurts_nothing(index: Hybrid) -> None:
    index.events(main(), window(8, blocks=1), window(99, blocks=1), removed(77, group=1), removed(5, group=9))
    assert index.longest(chain()) == 8
    assert index.resolver.unresolved == 1
    assert index.ignored == {"other_group": 1}
    # Neither what a boundary needs is known, nor where its blocks end.
    other = replace(window(8, group=2), window=None)
    crooked = replace(window(8, group=3), block_size=0)
    index.events(other, crooked)
    assert index.longest(chain()) == 8
    assert index.ignored == {"other_group": 1, "other_attention": 2}


def test_a_removal_of_all_groups_has_the_same_positions_after_a_takeover() -> None:
    """The order in which the groups became known is not in the record."""
    positions = []
    for is_taken_over in (False, True):
        index = Hybrid()
        index.events(main(), *(window(8, group=group) for group in (3, 1, 2)))
        if is_taken_over:
            index.take_over()
        index.events(removed(8))
        positions.append([(part.holder, part.first, part.hashes) for part in index.parts])
    assert positions[0] == positions[1]
    assert len(positions[0]) == 4


def test_groups_are_bounded(index: Hybrid) -> None:
    index.events(main())
    for group in range(1, 200):
        index.events(window(8, blocks=1, group=group))
    assert index.longest(chain()) == 8
    assert len(index.resolver.holders) <= 65


def test_off_means_full_attention_alone() -> None:
    index = Hybrid(reads_windows=False)
    index.events(main(), window(4, blocks=1))
    assert index.longest(chain()) == 8
    assert index.ignored == {"other_attention": 1}
    assert len(index.resolver.holders) == 1


def test_folds_may_be_cut_anywhere() -> None:
    batches = [
        batch(window(2), main(1, 4)),
        batch(window(3, 4), removed(2, group=1)),
        batch(main(5, 8), window(2, 5)),
        batch(removed(3, group=1), window(6, 7, 8)),
    ]
    found = set()
    for cut in range(5):
        index = Hybrid()
        for fold in (batches[:cut], batches[cut:]):
            if fold:
                index.fold(*fold)
        found.add(index.longest(chain()))
    assert found == {8}


@given(
    held=st.lists(st.booleans(), max_size=40),
    blocks=st.integers(1, 12),
    stride=st.integers(1, 4),
)
def test_bitmaps_say_what_a_loop_says(held: list[bool], blocks: int, stride: int) -> None:
    bitmap = sum(1 << at for at, has in enumerate(held) if has)
    found = _complete(bitmap, len(held), blocks, stride)
    for at in range(len(held)):
        ends = range(at, -1, -stride)[:blocks]
        expected = (at + 1) % stride == 0 and all(held[end] for end in ends)
        assert bool(found >> at & 1) == expected, at


@pytest.mark.parametrize(
    ("window", "block_size", "blocks", "stride"),
    [
        (Window(1, 63, 16), 16, 4, 1),
        (Window(1, 64, 16), 16, 4, 1),
        (Window(1, 65, 16), 16, 5, 1),
        (Window(1, 1, 16), 16, 1, 1),
        (Window(1, 99, 32), 16, 4, 2),
        (Window(1, 99, 16), 32, 4, 1),
    ],
)
def test_how_many_blocks_a_window_is(window: Window, block_size: int, blocks: int, stride: int) -> None:
    assert window.blocks(block_size) == (blocks, stride)
    assert Window.parse(str(window)) == window
