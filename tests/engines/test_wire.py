"""What all dialects share: the batch around the events, and the values inside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgpack
import pytest

from waymark.base.errors import Undecodable
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Cleared, Removed
from waymark.engines import decoder, wire

CLEARED = ["AllBlocksCleared"]
GOOD = b"\x91\xb0AllBlocksCleared"


def batch_of(payload: bytes) -> Batch:
    return decoder(EngineKind.VLLM, seed=1337)(payload)


# ---- the batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        pytest.param(b"", "bad_msgpack", id="nothing"),
        pytest.param(b"\xc1", "bad_msgpack", id="never-used-byte"),
        pytest.param(b"\x93\x01\x90", "bad_msgpack", id="cut-off"),
        pytest.param(b"\x92\x01\x90\x00", "bad_msgpack", id="trailing-byte"),
        pytest.param(b"\x91" * 5000, "bad_msgpack", id="nested-without-end"),
        pytest.param(b"\x93\x01" + b"\xdd\x00\xff\xff\xff" * 1000, "bad_msgpack", id="lists-longer-than-the-payload"),
        pytest.param(b"\xdf\xff\xff\xff\xff", "bad_msgpack", id="map-longer-than-the-payload"),
        pytest.param(b"\x92\x01\xc6\xff\xff\xff\xff", "bad_msgpack", id="bytes-longer-than-the-payload"),
        pytest.param(b"\x81\x80\x01", "bad_msgpack", id="map-as-a-key"),
        pytest.param(msgpack.packb(7), "not_a_batch", id="number"),
        pytest.param(msgpack.packb({"ts": 1}), "not_a_batch", id="map"),
        pytest.param(msgpack.packb([]), "not_a_batch", id="empty-list"),
        pytest.param(msgpack.packb([1.5]), "not_a_batch", id="no-events"),
        pytest.param(msgpack.packb([1.5, {"a": 1}]), "not_a_batch", id="events-are-a-map"),
        pytest.param(msgpack.packb([1.5, "events"]), "not_a_batch", id="events-are-text"),
    ],
)
def test_a_payload_that_is_no_batch(payload: bytes, kind: str) -> None:
    with pytest.raises(Undecodable) as raised:
        batch_of(payload)
    assert raised.value.kind == kind


@pytest.mark.parametrize(
    ("ts", "clock"),
    [
        (1.5, 1.5),
        (7, 7.0),
        (1739145600000, 1739145600.0),
        (None, None),
        ("1.5", None),
        (True, None),
        ([], None),
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
    ],
)
def test_the_clock_is_a_finite_number_of_seconds_or_none(ts: object, clock: float | None) -> None:
    assert batch_of(msgpack.packb([ts, [CLEARED]])).ts == clock


@pytest.mark.parametrize(
    ("rank", "kept", "ignored"),
    [
        (0, 0, 0),
        (2**32 - 1, 2**32 - 1, 0),
        (None, None, 0),
        (2**32, None, 1),
        (-1, None, 1),
        (True, None, 1),
        ("0", None, 1),
        (1.0, None, 1),
    ],
)
def test_the_rank_is_a_u32_or_none(rank: object, kept: int | None, ignored: int) -> None:
    batch = batch_of(msgpack.packb([1.5, [CLEARED], rank]))
    assert batch.dp_rank == kept
    assert batch.ignored == ({"bad_rank": 1} if ignored else {})
    assert batch.events == (Cleared(),)


def test_a_batch_may_have_two_elements_or_more_than_three() -> None:
    assert batch_of(msgpack.packb([1.5, [CLEARED]])) == Batch(1.5, (Cleared(),))
    assert batch_of(msgpack.packb([1.5, [CLEARED], 3, "later", {}])) == Batch(1.5, (Cleared(),), 3)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b"\x91\xa1\xff", id="text-that-is-no-utf8"),
        pytest.param(b"\x81\x80\x01", id="map-as-a-key"),
        pytest.param(b"\x81\x90\x01", id="list-as-a-key"),
        pytest.param(b"\x91\xc7\x05\xff12345", id="timestamp-of-five-bytes"),
        pytest.param(b"\xc7\x0c\xff" + b"\xff" * 12, id="timestamp-out-of-range"),
    ],
)
def test_an_event_that_msgpack_cannot_read_costs_that_event(event: bytes) -> None:
    batch = batch_of(b"\x93\xcb?\xf8\0\0\0\0\0\0\x93" + GOOD + event + GOOD + b"\x02")
    assert batch.events == (Cleared(), Cleared())
    assert (batch.ts, batch.dp_rank) == (1.5, 2)
    assert batch.rejected == {"bad_msgpack": 1}


def test_a_clock_or_rank_that_msgpack_cannot_read_costs_no_event() -> None:
    batch = batch_of(b"\x93\xa1\xff\x91" + GOOD + b"\xa1\xff")
    assert (batch.ts, batch.dp_rank, batch.events) == (None, None, (Cleared(),))
    assert batch.ignored == {"bad_rank": 1}


@pytest.mark.parametrize(
    "event",
    [
        None,
        7,
        "BlockStored",
        b"BlockStored",
        [],
        {},
        [None],
        [7, 8],
        {"type": 7},
        {"type": None},
        {7: 8},
        1.5,
        {b"type": b"BlockStored"},
        msgpack.ExtType(5, b"x"),
        msgpack.Timestamp(1),
    ],
)
def test_what_is_no_event_is_counted_and_its_siblings_are_kept(refusal: Callable[..., str], event: object) -> None:
    assert refusal(event) == "bad_event"


def test_an_unknown_type_is_ignored(decode: Callable[..., Batch]) -> None:
    batch = decode({"type": "BlockMoved", "block_hashes": [1]}, ["BlockUpdateEvent", "key", []], CLEARED)
    assert batch.ignored == {"unknown_type": 2}
    assert batch.rejected == {}
    assert batch.events == (Cleared(),)


def test_map_keys_that_are_no_text_and_keys_told_twice_hurt_nothing() -> None:
    event = b"\x85\xa4type\xacBlockRemoved\xacblock_hashes\x91\x01\xacblock_hashes\x91\x02\x07\x08\xc0\xc0"
    assert batch_of(b"\x92\x01\x91" + event).events == (Removed((2,), "GPU"),)


def test_rejects_are_counted_by_kind_with_one_short_sample_each(decode: Callable[..., Batch]) -> None:
    removals = [["BlockRemoved", ["x" * 10_000]], ["BlockRemoved", ["second"]], ["BlockRemoved", [1], "é" * 10_000]]
    batch = decode(*removals)
    assert batch.rejected == {"bad_hash": 2, "bad_medium": 1}
    assert set(batch.samples) == {"bad_hash", "bad_medium"}
    assert "xxx" in batch.samples["bad_hash"]
    assert all(len(sentence) < 200 for sentence in batch.samples.values())


# ---- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire_hash", "number"),
    [
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (b"\x01", 1),
        (b"\x01\x02", 0x0102),
        (bytes(range(1, 9)), 0x0102030405060708),
        (b"\xff" * 24 + bytes(range(1, 9)), 0x0102030405060708),
    ],
)
def test_an_engine_hash_becomes_a_u64(wire_hash: object, number: int) -> None:
    assert wire.u64(wire_hash, "block_hashes") == number


@pytest.mark.parametrize(
    "wire_hash", [2**64, -(2**63) - 1, b"", True, None, "12", 1.0, [1], {}, pytest.param(10**5000, id="huge")]
)
def test_what_is_no_engine_hash_is_rejected(wire_hash: object) -> None:
    with pytest.raises(wire.Rejected) as raised:
        wire.u64(wire_hash, "block_hashes", 3)
    assert raised.value.kind == "bad_hash"
    assert raised.value.sentence.startswith("block_hashes[3] is ")
    assert len(raised.value.sentence) < 200


@pytest.mark.parametrize("hashes", [[1, 2, 1], [-1, 2**64 - 1], [b"\x01", 1], [b"aaaaaaaa", b"bbaaaaaaaa"]])
def test_a_hash_repeated_within_one_event_is_rejected(refusal: Callable[..., str], hashes: list[object]) -> None:
    assert refusal(["BlockRemoved", hashes]) == "repeated_hash"
    assert refusal(["BlockStored", hashes, None, [], 0, None]) == "repeated_hash"


@pytest.mark.parametrize(
    ("spelling", "medium"),
    [(None, "GPU"), ("", "GPU"), ("gpu", "GPU"), ("cpu_pinned", "CPU"), ("EXTERNAL", "DISK"), ("cxl", "CXL")],
)
def test_a_medium_is_normalized(decode: Callable[..., Batch], spelling: str | None, medium: str) -> None:
    assert decode(["BlockRemoved", [1], spelling]).events == (Removed((1,), medium),)


@pytest.mark.parametrize("spelling", ["DP", "dp", "a b", "x" * 33, 7, b"GPU", ["GPU"], True])
def test_what_is_no_medium_is_rejected(refusal: Callable[..., str], spelling: object) -> None:
    assert refusal(["BlockRemoved", [1], spelling]) == "bad_medium"
    assert refusal(["BlockStored", [1], None, [], 0, None, spelling]) == "bad_medium"
