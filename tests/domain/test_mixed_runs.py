"""Plain events of several forms are resolved together by the C module: it comes to what one by one comes to.

Random histories of hybrid models, with offloading, go through the three streams of ``test_runs``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.domain.test_runs import HASHES, Engine, Stream, calls_of_placer, is_compared, packed_batch, removed, stored
from tests.factories import BLOCK_SIZE, registration
from tests.unit import seeds
from waymark.base import native
from waymark.domain import stream_blocks
from waymark.domain.engines import EngineKind
from waymark.domain.life_facts import COPIES_LAST, UNTRUSTED
from waymark.domain.placing import Placer
from waymark.domain.rows import SAME_HASH

pytestmark = [
    pytest.mark.usefixtures("implementation_kept"),
    pytest.mark.skipif(not native.is_built, reason="built without the C part"),
]

MAIN = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def window(*hashes: int, group: int = 1, **fields: Any) -> dict[str, Any]:
    """A store of a group with a window of two blocks; with ``mamba`` of states."""
    told = {"group_idx": group, "kv_cache_spec_kind": "sliding_window"}
    return stored(*hashes) | told | {"kv_cache_spec_sliding_window": 2 * BLOCK_SIZE} | fields


def reference(*hashes: int, **fields: Any) -> dict[str, Any]:
    return stored(*hashes) | {"token_ids": [], "block_size": 0, "medium": "CPU"} | fields


class HybridEngine(Engine):
    """Events of the groups of a hybrid model, and of what is offloaded, mostly of blocks that were told before."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.groups = chance.choice([[1], [1], [1, 2], []])
        self.origins = chance.choice([[], [], ["NEW", "REUSED"]])
        self.has_main_first = chance.random() < 0.5

    def payload(self, medium: str | None, group: list[int], adapter: str | None, process: list[Any]) -> bytes:
        chance = self.chance
        events: list[Any] = []
        for _ in range(chance.choice([1, 2, 5, 16])):
            kind = chance.choices(["prompt", "removal", "offload", "again"], [50, 30, 15, 5])[0]
            if kind == "prompt":
                events += self.prompt(adapter if chance.random() < 0.9 else None)
            elif kind == "removal":
                events += self.removals()
            elif kind == "offload":
                events.append(self.named(reference))
            else:
                events.append(self.named(partial(window, group=chance.choice([1, 2, 3]))))
        if chance.random() < 0.05:
            events.insert(chance.randrange(len(events) + 1), self.unusual())
        return packed_batch(*events[:40], rank=process[0])

    def prompt(self, adapter: str | None) -> list[Any]:
        """The events of one store of the main group, and of some blocks of the others."""
        chance, events = self.chance, []
        self.has_maps = True
        main = self.store("GPU", [0], adapter) | MAIN
        main |= {"origin": chance.choice(self.origins)} if self.origins else {}
        for group in self.groups:
            hashes = main["block_hashes"]
            some = hashes if chance.random() < 0.6 else chance.sample(hashes, chance.randint(1, len(hashes)))
            fields: dict[str, Any] = {"lora_name": adapter}
            fields |= {"kv_cache_spec_kind": "mamba"} if group == 2 else {}
            fields |= {"origin": chance.choice(self.origins)} if self.origins and chance.random() < 0.9 else {}
            fields |= {"block_size": 2 * BLOCK_SIZE} if chance.random() < 0.02 else {}
            fields |= {"kv_cache_spec_sliding_window": None} if chance.random() < 0.02 else {}
            events.append(window(*some, group=group, **fields))
        return [main, *events] if self.has_main_first else [*events, main]

    def removals(self) -> list[Any]:
        """One event for each block, or for several, of some groups."""
        chance = self.chance
        hashes = chance.choice(self.chains)[:] if self.chains else [chance.randrange(1, HASHES)]
        hashes = hashes[: chance.randint(1, min(8, len(hashes)))]
        each = [hashes] if chance.random() < 0.3 else [[engine_hash] for engine_hash in hashes]
        medium = chance.choice(["GPU", "GPU", "GPU", "CPU"])
        groups = chance.choice([[0], [0, 1], [1, 2], [0, 1, 2], [3]])
        events = [removed(*some, group_idx=group, medium=medium) for some in each for group in groups]
        if chance.random() < 0.05:
            del events[-1]["group_idx"]
        if chance.random() < 0.1:
            events[0]["remaining_copy_counts"] = [0] * len(events[0]["block_hashes"])
        return events

    def named(self, make: Any) -> Any:
        chance = self.chance
        hashes = chance.choice(self.chains)[:] if self.chains else [1]
        hashes = chance.sample(hashes, chance.randint(1, len(hashes))) if chance.random() < 0.3 else hashes
        return make(*[SAME_HASH if chance.random() < 0.005 else engine_hash for engine_hash in hashes])


def history(chance: random.Random, steps: int, shards: int | None = None, **options: Any) -> tuple[int, int]:
    """A random history in all three ways; how many batches had several forms, and how many parts waited."""
    options = {
        "of": registration(EngineKind.VLLM),
        "blocks_max": chance.choice([60, 100_000, 100_000]),
        "waiting_blocks": 20,
        "shards": shards or chance.choice([1, 1, 2, 3]),
        "reads_windows": chance.random() < 0.8,
    } | options
    ways = ((True, True), (True, False), (False, False))
    streams = [Stream(is_native=is_native, is_whole=is_whole, **options) for is_native, is_whole in ways]
    engine = HybridEngine(chance)
    flag = chance.choice([None, None, UNTRUSTED, COPIES_LAST])
    waited = 0
    for step in range(steps):
        payloads = engine.payloads(chance.choice([1, 1, 3]))
        for stream in streams:
            if step == 5 and flag is not None:
                stream.index.resolver.flags.add(flag)
            stream.fold(payloads)
        whole, single, pure = (list(stream.index.parts) for stream in streams)
        assert whole == single == pure
        waited += sum(part.waits for part in whole)
        sent = [stream.sent() for stream in streams]
        assert sent[0] == sent[1] == sent[2]
        if is_compared(step, steps):
            state = [stream.state for stream in streams]
            assert state[0] == state[1] == state[2]
        if whole and chance.random() < 0.1:
            place = chance.choice(whole).place
            for stream in streams:
                stream.index.resolver.memory.full.add(place)
        if chance.random() < 0.03:
            for stream in streams:
                native.select(stream.is_native)
                stream.index.take_over()
    return streams[0].mixed, waited


@pytest.mark.parametrize("seed", seeds(40))
def test_random_histories_come_to_the_same_in_all_ways(seed: int) -> None:
    assert history(random.Random(f"mixed {seed}"), 40)[0] > 5


@pytest.mark.parametrize("seed", seeds(20))
def test_random_histories_of_short_pieces_wait_for_other_shards_in_all_ways(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_blocks, "Placer", partial(Placer, piece_blocks=2))
    chance = random.Random(f"mixed pieces {seed}")
    assert history(chance, 40, shards=chance.choice([2, 3, 256]))[1] > 0


# ---- what does not come to Python ------------------------------------------------------------------------


def sent_by_hybrid(*, has_main_first: bool) -> list[bytes]:
    """Frames of a model with a window and states, whose blocks are offloaded, evicted one by one, and stored again."""
    hashes = list(range(1, 41))
    groups = [window(*hashes), window(40, group=2, kv_cache_spec_kind="mamba")]
    main = stored(*hashes) | MAIN
    prompt = [main, *groups] if has_main_first else [*groups, main]
    gone = [removed(each, group_idx=group) for each in hashes[:0:-1] for group in (0, 1)]
    return [
        packed_batch(*prompt),
        packed_batch(reference(*hashes), window(50, 51), stored(50, 51, parent=40) | MAIN),
        packed_batch(*gone, removed(40, group_idx=2), removed(7, 9, group_idx=2)),
        packed_batch(*prompt),
        packed_batch(*prompt),
        packed_batch(reference(*hashes, origin="REUSED"), removed(*hashes, medium="CPU")),
        packed_batch(removed(1, group_idx=1, remaining_copy_counts=[0]), *gone, *gone),
    ]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("has_main_first", [True, False])
@pytest.mark.parametrize("copies", ["count", "set"])
def test_events_of_groups_and_of_an_offload_are_resolved_in_c(
    monkeypatch: pytest.MonkeyPatch, shards: int, copies: Any, has_main_first: bool
) -> None:
    of = replace(registration(EngineKind.VLLM), copies=copies)
    whole, pure = (
        Stream(is_native=is_native, is_whole=is_native, of=of, shards=shards, reads_windows=True)
        for is_native in (True, False)
    )
    for number, frame in enumerate(sent_by_hybrid(has_main_first=has_main_first)):
        pure.fold([frame])
        with monkeypatch.context() as patched:
            calls = calls_of_placer(patched)
            whole.fold([frame])
        # The first frame shows which groups there are, and the last one removes more copies than there are.
        assert calls == [] or number == 6
        assert list(whole.index.parts) == list(pure.index.parts)
        assert whole.state == pure.state
        assert whole.sent() == pure.sent()
    assert whole.mixed == 7


def test_an_event_that_is_left_to_its_rule_interrupts_a_run() -> None:
    """Its positions, and those behind it, are the same whoever resolves the batch."""
    streams = [Stream(is_native=is_native, is_whole=is_native, reads_windows=True) for is_native in (True, False)]
    first = [stored(1, 2, 3) | MAIN, window(1, 2, 3), stored(4, parent=3) | MAIN]
    # Two hashes of one block: the second one is another name.
    twice = stored(9) | MAIN | {"token_ids": [1] * BLOCK_SIZE}
    again = [
        twice,
        window(9),
        window(1),
        window(77, 2),
        removed(77, group_idx=0),
        reference(2, 77),
        reference(1, 9),
        window(4),
    ]
    for stream in streams:
        stream.fold([packed_batch(*first)])
        stream.fold([packed_batch(*again)])
    whole, pure = streams
    assert list(whole.index.parts) == list(pure.index.parts)
    assert whole.state == pure.state
    main = [("+", 3, [1]), ("+", 7, [2]), ("+", 11, [1]), ("+", 13, [1])]
    late = [("+", 15, [1]), ("+", 17, [1]), ("+", 21, [2]), ("+", 23, [4])]
    assert [(part.kind, part.first, part.hashes) for part in whole.index.parts] == main + late


def test_an_offload_without_windows_and_a_model_whose_groups_are_not_read() -> None:
    """Ignored events are counted, and have positions, as the rules have it."""
    streams = [Stream(is_native=is_native, is_whole=is_native, reads_windows=False) for is_native in (True, False)]
    for stream in streams:
        for frame in sent_by_hybrid(has_main_first=True):
            stream.fold([frame])
    whole, pure = streams
    assert list(whole.index.parts) == list(pure.index.parts)
    assert whole.state == pure.state
    assert whole.index.resolver.ignored == {"other_attention": 7, "other_group": 120}


def folded_in_both_ways(*frames: bytes) -> Stream:
    streams = [Stream(is_native=is_native, is_whole=is_native, reads_windows=True) for is_native in (True, False)]
    for frame in frames:
        for stream in streams:
            stream.fold([frame])
        whole, pure = streams
        assert list(whole.index.parts) == list(pure.index.parts)
        assert whole.state == pure.state
    return streams[0]


def test_a_block_behind_an_unknown_one_does_not_continue_the_block_before() -> None:
    first = packed_batch(stored(1, 2, 3, 4) | MAIN, window(1))
    whole = folded_in_both_ways(first, packed_batch(window(1, 77, 2, 3)))
    assert [(part.hashes, part.parent is None) for part in whole.index.parts] == [([1], True), ([2, 3], True)]


def test_a_store_that_waits_for_a_block_of_a_mixed_batch_is_placed() -> None:
    first, waiting = packed_batch(stored(1) | MAIN, window(1)), packed_batch(stored(5, parent=4) | MAIN, window(1))
    whole = folded_in_both_ways(first, waiting, packed_batch(stored(4) | MAIN, window(4)))
    assert whole.index.resolver.waiting.blocks == 0
    assert [part.hashes for part in whole.index.parts] == [[4], [4], [5]]


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_removal_that_names_no_group_is_of_all_groups(medium: str) -> None:
    first = packed_batch(stored(1, 2) | MAIN, window(1, 2), reference(1, 2))
    gone = {"type": "BlockRemoved", "block_hashes": [2], "medium": medium}
    whole = folded_in_both_ways(first, packed_batch(gone, window(1), removed(1, group_idx=1)))
    kinds = [(part.kind, part.first) for part in whole.index.parts]
    of_windows = [("-", 5), ("+", 7), ("*", 9)] if medium == "GPU" else [("+", 261), ("*", 263)]
    assert kinds == [("-", 3), *of_windows]
