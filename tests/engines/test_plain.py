"""Events by the C module: the same batches, rejections and words as in Python, whatever bytes come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from time import thread_time
from typing import Any

import msgpack
import pytest

from tests.conftest import IMPLEMENTATIONS
from tests.engines.test_fuzz import captured, mutated
from waymark.base import native
from waymark.base.errors import Undecodable
from waymark.domain.engines import EngineKind
from waymark.domain.events import MixedEvents, Removed, Stored
from waymark.engines import Ceilings, OverCeiling, decoder, plain
from waymark.engines.batches import PART_HASHES
from waymark.engines.long import WINDOW_BYTES

pytestmark = [
    pytest.mark.usefixtures("implementation_kept"),
    pytest.mark.skipif(not native.is_built, reason="built without the C part"),
]

KINDS = [EngineKind.VLLM, EngineKind.SGLANG]
BIG = 2**63


def outcome(kind: EngineKind, payload: bytes, ceilings: Ceilings | None = None) -> object:
    """All that a decoder says of a payload, with the fields that equality leaves out."""
    decode = decoder(kind, seed=1337, ceilings=ceilings)
    try:
        batch = decode(payload)
    except Undecodable as bad:
        return bad.kind, str(bad)
    events = [said(event) for event in batch.events]
    return batch.ts, events, batch.dp_rank, batch.publisher_id, batch.rejected, batch.ignored, batch.samples


def said(value: Any) -> object:
    """A record as its name and its fields, in their order; ``astuple`` copies every value, which takes longer."""
    if not is_dataclass(value):
        return value
    return type(value).__name__, [said(getattr(value, field.name)) for field in fields(value)]


def outcomes(kind: EngineKind, payload: bytes, ceilings: Ceilings | None = None) -> Iterator[object]:
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        yield outcome(kind, payload, ceilings)


def stored(**fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [BIG, 2], "parent_block_hash": 3, "token_ids": [1, 2, 3, 4]}
    return event | {"block_size": 2, "medium": "GPU"} | fields


def listed(*values: Any) -> list[Any]:
    return ["BlockStored", *values]


WINDOW = stored(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64)

PLAIN: dict[str, Any] = {
    "map": stored(),
    "all fields": stored(lora_id=None, lora_name=None, extra_keys=[None, None], group_idx=0)
    | {"kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None, "locality": None},
    "signed hashes": stored(block_hashes=[-1, -BIG, 5], parent_block_hash=-7),
    "byte hashes": stored(block_hashes=[b"\1", b"\2" * 32], parent_block_hash=b"\3" * 9),
    "the root": stored(parent_block_hash=None),
    "a placeholder": stored(token_ids=[], block_size=0, medium="cpu"),
    "no tokens told": stored(token_ids=None),
    "wide tokens": stored(token_ids=[0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1]),
    "no medium": stored(medium=None),
    "a new medium": stored(medium="cxl"),
    "an adapter's id": stored(lora_id=7),
    "an adapter's name": stored(lora_name="a", lora_id=7, extra_keys=[["a"], ["a"]]),
    "an adapter and nothing told": stored(lora_name="a", extra_keys=[None, ["a"]]),
    "no adapter's name": stored(lora_name="", lora_id=8),
    "a list of six": listed([1, 2], None, [1, 2], 1, None, "GPU"),
    "a list of eight": listed([1], 2, [1], 1, None, "GPU", "a"),
    "a list of nine": listed([1], 2, [1], 1, None, "GPU", None, [None]),
    "a list of twelve": listed([1], 2, [1], 1, None, "GPU", None, None, 1, "mla_attention", 128),
    "many hashes": stored(block_hashes=list(range(5, 5 + PART_HASHES)), token_ids=None),
    "local": stored(locality="LOCAL"),
    "new": stored(origin="NEW", session_id="s", ownership="o"),
    "told again": stored(origin="REUSED"),
    "nothing told": stored(origin=None, remaining_copy_counts=None),
    "no copy left": {"type": "BlockRemoved", "block_hashes": [1, 2], "remaining_copy_counts": [0, 0]},
    "removed and local": {"type": "BlockRemoved", "block_hashes": [1, 2], "locality": "LOCAL"}
    | {"remaining_copy_counts": None},
    "removed": {"type": "BlockRemoved", "block_hashes": [1, -2, b"\3"], "medium": "CPU", "group_idx": 1},
    "a list of removed": ["BlockRemoved", [1, 2]],
    "a longer list of removed": ["BlockRemoved", [1, 2], "DISK", 3],
    "a list of removed with more": ["BlockRemoved", [1, 2], "DISK", 3, 4, "x", 6, 7, 8, b"y", 10, 11],
    "a window": WINDOW,
    "a window of one token": WINDOW | {"kv_cache_spec_kind": "sliding_window_mla", "kv_cache_spec_sliding_window": 1},
    "a window of the most tokens": WINDOW | {"kv_cache_spec_sliding_window": 2**32 - 1},
    "a window that is too long": WINDOW | {"kv_cache_spec_sliding_window": 2**32},
    "an empty window": WINDOW | {"kv_cache_spec_sliding_window": 0},
    "a window without a length": WINDOW | {"kv_cache_spec_sliding_window": None},
    "a window whose length is true": WINDOW | {"kv_cache_spec_sliding_window": True},
    "a window without its tokens": WINDOW | {"token_ids": [], "block_size": 0, "origin": "REUSED"},
    "a window with some tokens": WINDOW | {"token_ids": [1, 2, 3], "lora_name": "a", "extra_keys": [["a"], None]},
    "states": stored(kv_cache_spec_kind="mamba"),
    "states with a length": WINDOW | {"kv_cache_spec_kind": "mamba", "group_idx": None},
    "another attention": WINDOW | {"kv_cache_spec_kind": "chunked_local"},
    "a removal with the length of a window": {"type": "BlockRemoved", "block_hashes": [1]}
    | {"kv_cache_spec_sliding_window": 64},
    "cleared": {"type": "AllBlocksCleared"},
    "a list of cleared": ["AllBlocksCleared"],
}

OTHERS: dict[str, Any] = {
    "a list of a window": listed([1, 2], 2, [1, 2], 1, None, "GPU", None, None, 1, "sliding_window", 128),
    "a window with a bad adapter": WINDOW | {"lora_name": 7},
    "a window with a token too large": WINDOW | {"token_ids": [2**32]},
    "a window with an image": WINDOW | {"extra_keys": [None, [["image", 3]]]},
    "a window that is its own parent": WINDOW | {"parent_block_hash": 2},
    "a length of a window that is none": WINDOW | {"kv_cache_spec_sliding_window": [64]},
    "a length of a window in another script": WINDOW | {"kv_cache_spec_sliding_window": "ü"},
    "no length of a window": stored(kv_cache_spec_sliding_window={}),
    "the length of a window of a removal": {"type": "BlockRemoved", "block_hashes": [1], "kv_cache_spec_kind": "x"},
    "a salt": stored(cache_salt="s"),
    "a salt in the keys": stored(extra_keys=[["salt"], None], parent_block_hash=None),
    "images": stored(block_mm_infos=[None, {"mm": 1}]),
    "an image in the keys": stored(extra_keys=[None, [["image", 3]]]),
    "too few keys": stored(extra_keys=[None]),
    "remote": stored(locality="REMOTE"),
    "local in small letters": stored(locality="local"),
    "a locality that is none": stored(locality=1),
    "an origin that nobody knows": stored(origin="MOVED"),
    "an origin that is none": stored(origin=[1]),
    "copies of a store": stored(remaining_copy_counts=[0, 0]),
    "the origin of a removal": {"type": "BlockRemoved", "block_hashes": [1], "origin": "NEW"},
    "copies left": {"type": "BlockRemoved", "block_hashes": [1, 2], "remaining_copy_counts": [0, 1]},
    "less than no copy": {"type": "BlockRemoved", "block_hashes": [1, 2], "remaining_copy_counts": [0, -1]},
    "too few counts": {"type": "BlockRemoved", "block_hashes": [1, 2], "remaining_copy_counts": [0]},
    "a count that is none": {"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": 0},
    "pairs": stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]),
    "a token too large": stored(token_ids=[2**32]),
    "a negative token": stored(token_ids=[-1]),
    "a boolean token": stored(token_ids=[True]),
    "no hashes": stored(block_hashes=[]),
    "hashes that are none": stored(block_hashes=["x"]),
    "empty bytes": stored(block_hashes=[b""]),
    "a repeated hash": stored(block_hashes=[1, 2, 1]),
    "a hash repeated in another form": stored(block_hashes=[-1, 2**64 - 1]),
    "its own parent": stored(parent_block_hash=2),
    "its own parent in another form": stored(parent_block_hash=-BIG),
    "a bad medium": stored(medium="no name"),
    "a medium that clashes": stored(medium="DP"),
    "a medium in another script": stored(medium="gpü"),
    "a bad block_size": stored(block_size=65537),
    "no block_size": stored(block_size=None),
    "a bad adapter": stored(lora_name=7),
    "a bad adapter's id": stored(lora_id="x"),
    "a negative adapter's id": stored(lora_id=-1),
    "an adapter in another script": stored(lora_name="ä"),
    "a bad group": stored(group_idx=-1),
    "a bad attention": stored(kv_cache_spec_kind=1),
    "too many hashes for one part": stored(block_hashes=list(range(9, 10 + PART_HASHES)), token_ids=None),
    "an unknown type": {"type": "Other"},
    "no type": {"block_hashes": [1]},
    "a tag that is none": [7, [1]],
    "an empty list": [],
    "no event": 5,
    "a list too short": ["BlockStored"],
    "a removal of nothing": ["BlockRemoved", []],
    "a removal with a list behind": ["BlockRemoved", [1, 2], "DISK", None, None, None, ["x"]],
    "a removal with a list far behind": ["BlockRemoved", [1, 2], "DISK", None, None, None, None, None, None, ["x"]],
    "a field with a value in it": stored(other=[1]),
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
@pytest.mark.parametrize("kind", KINDS)
def test_an_event_is_the_same_in_c_and_in_python(kind: EngineKind, name: str) -> None:
    event = (PLAIN | OTHERS)[name]
    for root in ([1.5, [event], 0], [1, [stored(), event, stored(medium="CPU")], None], [None, [event, event]]):
        in_python, in_c = outcomes(kind, msgpack.packb(root))
        assert in_c == in_python


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_what_is_plain_does_not_come_to_python(name: str) -> None:
    """Else the C module would be there for nothing."""
    native.select(True)
    found = plain.read(msgpack.packb([1.5, [(PLAIN | OTHERS)[name]], 0]), 1)
    assert found is not None
    assert found.others == (name in OTHERS)


@pytest.mark.parametrize("event", [stored(parent_block_hash=0), listed([1], 0, [1, 2], 2)], ids=["map", "list"])
def test_a_parent_of_zero_is_not_plain(event: Any) -> None:
    """What it says depends on the dialect."""
    native.select(True)
    payload = msgpack.packb([1.5, [event], 0])
    found = plain.read(payload, 1)
    assert found is not None
    assert found.others == 1
    for kind in KINDS:
        in_python, in_c = outcomes(kind, payload)
        assert in_c == in_python


SHAPES: dict[str, Any] = {
    "no batch": 7,
    "a map": {"type": "BlockStored"},
    "a short batch": [1.5],
    "events that are none": [1.5, 7, 0],
    "four elements": [1.5, [stored()], 0, "more"],
    "an id of a process": [1.5, [stored()], 0, bytes(range(16))],
    "an id that is too short": [1.5, [stored()], 0, bytes(15)],
    "an id that is text": [1.5, [stored()], 0, "0123456789abcdef"],
    "an id that is nil": [1.5, [stored()], 0, None],
    "an id that is a list": [1.5, [stored()], 0, [1]],
    "more behind the id": [1.5, [stored()], 0, bytes(16), 7, None, "x", 1.5],
    "too much behind the id": [1.5, [stored()], 0, bytes(16), 7, None, "x", 1.5, 9],
    "a list behind the id": [1.5, [stored()], None, bytes(16), [1]],
    "a ts that is text": ["x", [stored()], 0],
    "a negative ts": [-1, [stored()], 0],
    "a rank that is none": [1.5, [stored()], "x"],
    "a negative rank": [1.5, [stored()], -1],
    "a rank that is a float": [1.5, [stored()], 0.5],
    "a rank too large": [1.5, [stored()], 2**32],
    "milliseconds": [1739145600000, [stored()], 0],
    "a clock that is none": [float("nan"), [stored()], 0],
    "an extension": [1.5, [stored(other=msgpack.ExtType(4, b"x"))], 0],
    "a timestamp": [1.5, [stored(other=msgpack.Timestamp(7))], 0],
    "a key that is no text": [1.5, [stored() | {7: 1}], 0],
    "deep": [1.5, [stored(), [[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]], stored()], 0],
}


def test_the_id_of_a_process_comes_with_its_batch() -> None:
    payload = msgpack.packb([1.5, [stored(locality="LOCAL")], 0, bytes(range(16))])
    native.select(True)
    found = plain.read(payload, 1)
    assert found is not None
    assert not found.others
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        for each in (payload, msgpack.packb([1.5, [stored()] * 2000, 0, bytes(range(16))])):
            assert decoder(EngineKind.VLLM, seed=1337)(each).publisher_id == bytes(range(16))


LONGER_LISTS: dict[str, Any] = {
    "groups by number": ["BlockStored", [1, 2], 3, [1, 2, 3, 4], 2, None, "GPU", None, [1, 2]],
    "nil": ["BlockStored", [1, 2], 3, [1, 2, 3, 4], 2, None, "GPU", None, None, None],
    "a number": ["BlockStored", [1, 2], 3, [1, 2, 3, 4], 2, None, "GPU", None, 5, -1, "x"],
    "text that is none": ["BlockStored", [1, 2], 3, [1, 2, 3, 4], 2, None, "GPU", None, b"\xff", "\xe4"],
    "a reason": ["BlockRemoved", [1, 2], "GPU", "evict"],
    "a reason and more": ["BlockRemoved", [1, 2], "GPU", -1, {"a": 1}],
}


@pytest.mark.parametrize("name", LONGER_LISTS)
def test_what_is_behind_the_fields_of_sglangs_lists_is_not_read(name: str) -> None:
    event = LONGER_LISTS[name]
    whole = event[:8] if event[0] == "BlockStored" else event[:3]
    for events in ([event], [event, stored(), event], [event] * 500):
        in_python, in_c = outcomes(EngineKind.SGLANG, msgpack.packb([1.5, events, 0]))
        as_it_should = [whole if each is event else each for each in events]
        expected, _ = outcomes(EngineKind.SGLANG, msgpack.packb([1.5, as_it_should, 0]))
        assert in_c == in_python == expected


def test_long_lists_of_sglang_keep_their_fields() -> None:
    hashes = list(range(5, 6000))
    event = ["BlockStored", hashes, None, [*range(2 * len(hashes))], 2, None, "GPU", None, [70_000] * 7000]
    for each, count in ((event, 8), (["BlockRemoved", hashes, "CPU", "evict"], 3)):
        payload, whole = (msgpack.packb([1.5, [some], 0]) for some in (each, each[:count]))
        found = outcome(EngineKind.SGLANG, payload)
        assert found == outcome(EngineKind.SGLANG, whole)
        assert isinstance(found[1], list)  # type: ignore[index]
        assert len(found[1]) > 1  # type: ignore[index]


def test_the_counts_of_a_long_removal_stay_with_their_hashes() -> None:
    hashes = list(range(1, 30_000))
    event = {"type": "BlockRemoved", "block_hashes": hashes, "remaining_copy_counts": [each % 3 for each in hashes]}
    batch = decoder(EngineKind.VLLM, seed=1)(msgpack.packb([1.5, [event], 0]))
    told = [pair for each in batch.events for pair in zip(each.engine_hashes, each.copies_left, strict=True)]  # type: ignore[union-attr,arg-type]
    assert told == [(each, each % 3) for each in hashes]


@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_of_any_form_is_the_same_in_c_and_in_python(name: str) -> None:
    for kind in KINDS:
        in_python, in_c = outcomes(kind, msgpack.packb(SHAPES[name]))
        assert in_c == in_python


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload[:-1],
        lambda payload: payload + b"\0",
        lambda payload: payload.replace(b"\xa3GPU", b"\xa3G\xffU"),
        lambda payload: payload.replace(b"\xa3GPU", b"\xc1\xc1\xc1\xc1"),
        lambda payload: payload.replace(b"\xa6medium", b"\xa5other\xa0"),
        lambda payload: payload.replace(b"\xa6medium", b"\xa7lora_id"),
        lambda payload: payload.replace(b"\xaablock_size", b"\xa9token_ids\x00"),
    ],
    ids=["cut", "too long", "no UTF-8", "no msgpack", "a key more", "another field", "a field twice"],
)
def test_bytes_that_are_not_well_formed_cost_the_same(change: Callable[[bytes], bytes]) -> None:
    payload = change(msgpack.packb([1.5, [stored(), stored(medium="CPU")], 0]))
    for kind in KINDS:
        in_python, in_c = outcomes(kind, payload)
        assert in_c == in_python


def test_no_hashes_take_longer_than_others() -> None:
    """These are chosen for one place of a table that spreads them by a factor which everybody knows."""
    factor = pow(0x9E3779B97F4A7C15, -1, 2**64)

    def seconds(chosen: list[int]) -> float:
        payload, took = msgpack.packb([1.5, [["BlockRemoved", chosen, "GPU"]] * 3]), []
        for _ in range(5):
            began = thread_time()
            for _ in range(20):
                found = plain.read(payload, 3)
            took.append(thread_time() - began)
            assert found is not None
            assert not found.others
        return min(took)

    native.select(True)
    others = [BIG + i for i in range(PART_HASHES)]
    assert seconds([i * factor % 2**64 for i in range(1, 1 + PART_HASHES)]) <= 10 * (seconds(others) + 0.001)


def test_ceilings_hold_in_c_too() -> None:
    events = [stored(block_hashes=[i, i + 100]) for i in range(20)]
    for ceilings in (
        Ceilings(batch_events=19),
        Ceilings(batch_events=20),
        Ceilings(event_hashes=1),
        Ceilings(event_hashes=2),
        Ceilings(frame_bytes=100),
        Ceilings(rejected_events=2),
    ):
        in_python, in_c = outcomes(EngineKind.VLLM, msgpack.packb([1.5, [*events[:-3], 7, 7, 7], 0]), ceilings)
        assert in_c == in_python
    native.select(True)
    with pytest.raises(OverCeiling, match="WAYMARK_FRAME_BYTES_MAX allows 19"):
        decoder(EngineKind.VLLM, seed=1, ceilings=Ceilings(batch_events=19))(msgpack.packb([1.5, events, 0]))


def test_what_engines_really_publish_is_plain() -> None:
    native.select(True)
    batches = [found for payload in captured() if (found := plain.read(payload, 1000)) is not None]
    events = [event for found in batches for event in found.events]
    plain_events = [event for event in events if isinstance(event, Stored | Removed)]
    assert len(plain_events) > len(events) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_changed_frames_are_the_same_in_c_and_in_python(seed: int) -> None:
    chance = random.Random(seed)
    frames = [*captured(), *(msgpack.packb([1.5, [event, stored()], 0]) for event in (PLAIN | OTHERS).values())]
    frames = [frame for frame in frames if len(frame) < 8192]
    plain_ones = 0
    for _ in range(2_000):
        payload = mutated(chance, frames)
        kind = chance.choice(KINDS)
        in_python, in_c = outcomes(kind, payload)
        assert in_c == in_python, payload
        plain_ones += plain.read(payload, 1000) is not None
    assert plain_ones > 500


@pytest.mark.parametrize("blocks", [100, 1500])
def test_a_long_payload_is_read_at_once_if_all_its_events_are_plain(blocks: int) -> None:
    native.select(True)
    hashes, token_ids = [*range(BIG, BIG + blocks)], [*range(100_000, 100_000 + 8 * blocks)]
    main = stored(block_hashes=hashes, token_ids=token_ids, block_size=8)
    decode = decoder(EngineKind.VLLM, seed=1337)
    payload = msgpack.packb([1.5, [main, WINDOW | {"block_hashes": hashes, "token_ids": token_ids}]])
    assert (len(payload) > WINDOW_BYTES) == (blocks == 1500)
    assert isinstance(decode(payload).events, MixedEvents)
    read = decode.plain(msgpack.packb([1.5, [main, main, OTHERS["a salt"]]]))
    assert (read is None) == (blocks == 1500), "the others of a long payload are read in slices"
