"""Long payloads: what they come to, and how much is done for them at a time."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgpack
import pytest

from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Removed, Stored, StoredIdentity
from waymark.engines import Ceilings, OverCeiling, decoder
from waymark.engines.batches import MORE, PART_HASHES
from waymark.engines.long import WINDOW_BYTES, LongPayload, unpacker_of

VLLM, SGLANG, STANDARD, MOONCAKE = EngineKind.VLLM, EngineKind.SGLANG, EngineKind.STANDARD, EngineKind.MOONCAKE
BIG = 2**60

Raw = dict[str, Any]


def packed(*events: object, rank: int | None = 0) -> bytes:
    return msgpack.packb([1.5, list(events), rank])


def stored(blocks: int, width: int = 4, **fields: Any) -> Raw:
    event = {"type": "BlockStored", "block_hashes": [BIG + i for i in range(blocks)], "parent_block_hash": 7}
    tokens = [100_000 + i for i in range(blocks * width)]
    return event | {"token_ids": tokens, "block_size": width, "medium": "GPU", "lora_name": None} | fields


def listed(event: Raw) -> list[Any]:
    fields = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    return [event["type"], *(event.get(field) for field in (*fields, "extra_keys"))]


def whole(batch: Batch) -> Stored:
    """The event that the parts of a batch come to, put together again."""
    assert (batch.rejected, batch.ignored) == ({}, {}), batch.samples
    assert [event.part for event in batch.events] == list(range(len(batch.events)))
    parts = [event for event in batch.events if isinstance(event, Stored)]
    assert len(parts) == len(batch.events) > 1
    for before, after in pairwise(parts):
        assert after.parent == before.engine_hashes[-1]
        assert after.salts in ((), before.salts)
    extras: list[int | None] = []
    for part in parts:
        assert len(part.engine_hashes) <= PART_HASHES
        extras += part.extras or [None] * len(part.engine_hashes)
    first = parts[0]
    return Stored(
        engine_hashes=tuple(h for part in parts for h in part.engine_hashes),
        parent=first.parent,
        tokens=b"".join(part.tokens for part in parts),
        block_size=first.block_size,
        medium=first.medium,
        adapter=first.adapter,
        salts=first.salts,
        extras=tuple(extras) if any(extras) else None,
    )


def unbroken(event: Raw, monkeypatch: pytest.MonkeyPatch, kind: EngineKind = VLLM) -> Stored:
    """The event as it is read in one go."""
    with monkeypatch.context() as patch:
        patch.setattr("waymark.engines.batches.WINDOW_BYTES", 2**30)
        patch.setattr("waymark.engines.batches.PART_HASHES", 2**30)
        (event_read,) = decoder(kind, seed=1337)(packed(event)).events
    assert isinstance(event_read, Stored)
    return event_read


@pytest.mark.slow
@pytest.mark.parametrize("form", [dict, listed], ids=["map", "list"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block_hashes": [(BIG + i).to_bytes(32, "big") for i in range(5000)]},
        {"block_hashes": [-BIG - i for i in range(5000)]},
        {"extra_keys": [["salt", "lora"], *([["lora"]] * 4999)], "lora_name": "lora"},
        {"extra_keys": [[f"image {i}"] if i % 7 == 0 else None for i in range(5000)]},
        {"token_ids": [[100_000 + i, 1] for i in range(20_000)]},
        {"parent_block_hash": None},
    ],
    ids=["plain", "byte hashes", "signed", "lora and salt", "images", "pairs", "root"],
)
def test_a_long_event_is_what_it_is_in_one_go(
    fields: Raw, form: Callable[[Raw], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = stored(5000, **fields)
    expected = unbroken(form(event), monkeypatch)
    payload = packed(form(event))
    assert len(payload) > WINDOW_BYTES
    assert whole(decoder(VLLM, seed=1337)(payload)) == expected


@pytest.mark.parametrize("form", [dict, listed], ids=["map", "list"])
@pytest.mark.parametrize(
    "event",
    [stored(1000, 64), stored(2000, block_hashes=[(BIG + i).to_bytes(32, "big") for i in range(2000)])],
    ids=["tokens", "byte hashes"],
)
def test_an_event_of_few_blocks_may_have_lists_above_a_window(
    event: Raw, form: Callable[[Raw], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = decoder(VLLM, seed=1337)(packed(form(event)))
    assert (batch.rejected, list(batch.events)) == ({}, [unbroken(form(event), monkeypatch)])


def test_a_removal_of_few_blocks_may_have_a_list_above_a_window() -> None:
    hashes = [(BIG + i).to_bytes(32, "big") for i in range(2000)]
    (removed,) = decoder(VLLM, seed=1337)(
        packed({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})
    ).events
    assert isinstance(removed, Removed)
    assert removed.engine_hashes == tuple(BIG + i for i in range(2000))


def test_sglangs_salt_is_in_the_first_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    event = stored(5000, lora_name={"cache_salt": "s", "lora_name": "a"}, parent_block_hash=None)
    batch = decoder(SGLANG, seed=1337)(packed(listed(event)))
    assert [each.salts for each in batch.events if isinstance(each, Stored)] == [("s",), (), ()]
    assert {each.adapter for each in batch.events if isinstance(each, Stored)} == {"a"}


@pytest.mark.parametrize("tokens", [15_999, 12_002, 3])
def test_of_too_few_tokens_the_complete_leading_blocks_count(tokens: int) -> None:
    event = stored(4000) | {"token_ids": list(range(100_000, 100_000 + tokens))}
    batch = decoder(VLLM, seed=1337)(packed(event, stored(5000)))
    first = [each for each in batch.events if isinstance(each, Stored)][: -(-max(1, tokens // 4) // PART_HASHES)]
    assert sum(len(each.engine_hashes) for each in first) == max(1, tokens // 4)


def test_a_long_sparse_event_stays_sparse() -> None:
    event = stored(5000) | {"token_ids": list(range(100_000, 125_000))}
    (sparse,) = decoder(VLLM, seed=1337)(packed(event)).events
    assert isinstance(sparse, Stored)
    assert len(sparse.tokens) > 4 * 4 * len(sparse.engine_hashes)


@pytest.mark.parametrize("kind", [STANDARD, MOONCAKE])
@pytest.mark.parametrize("form", ["integers", "bytes"])
def test_a_long_standard_event_keeps_its_id_in_all_parts(kind: EngineKind, form: str) -> None:
    hashes: Any = [BIG + i for i in range(20_000)]
    if form == "bytes":
        hashes = b"".join(each.to_bytes(8, "little") for each in hashes)
    event = {"event_type": "stored", "event_id": 9, "backend_id": "b", "base_block_idx": 0, "seq_hashes": hashes}
    for payload in (packed(event), msgpack.packb(event), msgpack.packb([event])):
        batch = decoder(kind, seed=1337)(payload)
        assert sum(len(each.engine_hashes) for each in batch.events if isinstance(each, StoredIdentity)) == 20_000
        assert {each.envelope.event_id for each in batch.events if each.envelope is not None} == {9}


def test_siblings_of_a_long_event_are_read_in_their_order() -> None:
    removal = {"type": "BlockRemoved", "block_hashes": [1]}
    batch = decoder(VLLM, seed=1337)(packed(removal, stored(20_000), [], listed(stored(3000)), removal))
    assert isinstance(batch.events[0], Removed)
    assert isinstance(batch.events[-1], Removed)
    assert sum(len(each.engine_hashes) for each in batch.events if isinstance(each, Stored)) == 23_000
    assert batch.rejected == {"bad_event": 1}
    assert (batch.ts, batch.dp_rank) == (1.5, 0)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (stored(5000) | {"block_hashes": [1, *range(4999)]}, "repeated_hash"),
        (stored(5000, parent_block_hash=BIG + 4999), "own_parent"),
        (stored(5000, extra_keys=[["x"]] * 4999), "bad_extra_keys"),
        (stored(5000) | {"token_ids": [-1] * 20_000}, "bad_tokens"),
    ],
)
def test_one_bad_long_event_costs_one_event(event: Raw, kind: str) -> None:
    batch = decoder(VLLM, seed=1337)(packed(event, stored(1)))
    assert batch.rejected == {kind: 1}
    assert len(batch.events) == 1


SMALL = Ceilings(frame_bytes=2**20, batch_events=2000, event_hashes=3000, rejected_events=100)


@pytest.mark.parametrize(
    ("payload", "ceiling"),
    [
        (b"\x00" * (2**20 + 1), "frame_bytes"),
        (packed(*[[]] * 2001), "batch_events"),
        (packed(*[{"type": "x" * 60}] * 2001), "batch_events"),
        (packed(stored(3001)), "event_hashes"),
        (packed({"type": "BlockRemoved", "block_hashes": [*range(3001)]}), "event_hashes"),
        (packed(stored(3001), stored(20_000)), "event_hashes"),
        (packed({"type": "BlockStored", "x": dict.fromkeys(range(30000), 0)}), "misshapen_event"),
        (packed({"type": "BlockStored", "x": [[[0] * 100_000]]}), "misshapen_event"),
        (packed(stored(2000, extra_keys=[[{}] * 400] * 2000)), "misshapen_event"),
        (packed(["BlockStored", *([0] * 100), "x" * 70_000]), "misshapen_event"),
    ],
)
def test_a_batch_above_a_ceiling_is_not_read(payload: bytes, ceiling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waymark.engines.long._OTHER_BYTES_MAX", 400_000)
    with pytest.raises(OverCeiling) as raised:
        decoder(VLLM, seed=1337, ceilings=SMALL)(payload)
    assert raised.value.kind == ceiling
    assert len(raised.value.sentence) < 200


def test_a_long_list_where_no_engine_has_one_is_not_kept() -> None:
    batch = decoder(VLLM, seed=1337, ceilings=SMALL)(packed([[{}] * 100_000], stored(1, something=[{}] * 100_000)))
    assert batch.rejected == {"bad_event": 1}
    assert len(batch.events) == 1


def window_of(size: int) -> bytes:
    """A text that is just as long as fits into a window with one element more."""
    return b"\xda" + (size - 3).to_bytes(2, "big") + b"x" * (size - 3)


#: Each is read in small pieces, or is read again after a first try.
WASTEFUL: dict[str, Callable[[], bytes]] = {
    "a long element and many short ones": lambda: (
        b"\x92\xcb"
        + struct.pack(">d", 1.5)
        + b"\x91\x81\xa1x\xdd"
        + (200_001).to_bytes(4, "big")
        + window_of(WINDOW_BYTES - 2)
        + b"\x01" * 200_000
    ),
    "events that are no text": lambda: (
        b"\x92\xcb" + struct.pack(">d", 1.5) + b"\xdd" + (4000).to_bytes(4, "big") + (b"\xb1" + b"\xff" * 17) * 4000
    ),
}


@pytest.mark.parametrize("name", WASTEFUL)
def test_no_byte_is_unpacked_many_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []

    def counted(*pieces: bytes | memoryview) -> msgpack.Unpacker:
        fed.append(sum(map(len, pieces)))
        return unpacker_of(*pieces)

    monkeypatch.setattr("waymark.engines.long.unpacker_of", counted)
    payload = WASTEFUL[name]()
    batch = decoder(VLLM, seed=1337)(payload)
    assert (len(batch.events), sum(batch.rejected.values())) == (0, 1 if name.startswith("a") else 1001)
    assert sum(fed) < 16 * len(payload)


def test_rejected_events_beyond_the_ceiling_count_as_one_and_good_ones_are_kept() -> None:
    events = [[] if i % 2 else {"type": "BlockRemoved", "block_hashes": [i]} for i in range(1000)]
    batch = decoder(VLLM, seed=1337, ceilings=SMALL)(packed(*events))
    assert batch.rejected == {"bad_event": 100, MORE: 1}
    assert len(batch.events) == 500


#: Made when they are needed: each is megabytes.
PAYLOADS: dict[str, Callable[[], bytes]] = {
    "lists": lambda: packed(*[[]] * 65_536),
    "maps": lambda: packed(*[{}] * 65_536),
    "removals": lambda: packed(*[{"type": "BlockRemoved", "block_hashes": [i]} for i in range(65_536)]),
    "hashes": lambda: packed({"type": "BlockRemoved", "block_hashes": [*range(BIG, BIG + 262_144)]}),
    "store": lambda: packed(stored(100_000)),
    "bytes": lambda: packed(*[b"\xff"] * 10_000, "x"),
    "more": lambda: packed(*[["\ud800".encode("utf-16", "surrogatepass")]] * 5000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_slice_is_small_whatever_the_payload(name: str) -> None:
    """Counted in what is done between two stops: events that are read, and hashes in them."""
    payload = PAYLOADS[name]()
    done = 0
    most = 0
    decode = decoder(VLLM, seed=1337)
    read_event = decode._read_event

    def counting(event: Any) -> Any:
        nonlocal done
        read = read_event(event)
        done += 16 + len(getattr(read, "engine_hashes", ()))
        return read

    decode._read_event = counting
    work = decode.slices(payload, None)
    stops = 0
    for _ in work:
        most, done = max(most, done), 0
        stops += 1
    assert most <= 1024 + PART_HASHES + 16
    assert stops > len(payload) // (4 * WINDOW_BYTES)


def test_events_of_many_objects_are_unpacked_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    window = LongPayload._window

    def recorded(self: LongPayload, *arguments: int) -> tuple[list[Any], int]:
        found, size = window(self, *arguments)
        sizes.append(size)
        return found, size

    monkeypatch.setattr(LongPayload, "_window", recorded)

    batch = decoder(VLLM, seed=1337)(packed(*[{"type": "x", "a": [{}] * 250}] * 4000))

    assert batch.ignored == {"unknown_type": 4000}
    assert max(sizes) <= 16_384


def test_the_garbage_collector_never_has_many_new_hashes_to_read() -> None:
    new, most = 0, 0
    decode = decoder(VLLM, seed=1337)
    read_event = decode._read_event

    def counting(event: Any) -> Any:
        nonlocal new, most
        read = read_event(event)
        assert isinstance(read, Removed)
        new += len(read.engine_hashes)
        most = max(most, new)
        return read

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal new
        if phase == "stop":
            new = 0

    decode._read_event = counting
    gc.callbacks.append(collected)
    try:
        decode(packed({"type": "BlockRemoved", "block_hashes": [*range(BIG, BIG + 262_144)]}))
    finally:
        gc.callbacks.remove(collected)

    assert most <= 16 * PART_HASHES


def test_a_hash_that_is_twice_in_a_long_event_is_found_wherever_it_is() -> None:
    hashes = [*range(BIG, BIG + 3 * PART_HASHES)]
    for first, second in ((0, 1), (5, PART_HASHES + 7), (0, 3 * PART_HASHES - 1)):
        batch = decoder(VLLM, seed=1337)(
            packed({"type": "BlockRemoved", "block_hashes": [*hashes[:second], hashes[first], *hashes[second:]]})
        )
        assert batch.rejected == {"repeated_hash": 1}
        assert not batch.events
