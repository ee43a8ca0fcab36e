"""The standard envelope, over ZMQ and over HTTP."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import orjson
import pytest

from waymark.base.errors import InvalidValue, Undecodable
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Cleared, Envelope, Event, RemovedIdentity, Stored, StoredIdentity
from waymark.engines import decoder
from waymark.engines.standard import decode_event

STANDARD = EngineKind.STANDARD
ENVELOPE = Envelope(
    event_id=42, backend_id="worker-0", tenant_id="default", model_name="llama", block_size=2, dp_rank=0
)


def event(**fields: object) -> dict[str, Any]:
    """The published example of a stored event, but for ``fields``; ``...`` takes a field out."""
    whole = {
        "event_id": 42,
        "timestamp": 1739145600000,
        "event_type": "stored",
        "model_name": "llama",
        "block_size": 2,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": "worker-0",
        "medium": "gpu",
        "dp_rank": 0,
        "seq_hashes": [11, 12],
        "base_block_idx": 5,
        "parent_hash": 99,
        "token_ids": None,
    } | fields
    return {name: value for name, value in whole.items() if value is not ...}


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


# ---- the three events ------------------------------------------------------------------------------


def test_a_store_without_tokens_tells_identities() -> None:
    identity = StoredIdentity((11, 12), 99, "GPU", ENVELOPE)
    assert decode_event(event()) == identity
    assert decode_event(event(token_ids=[])) == decode_event(event(token_ids=...)) == identity


def test_a_store_with_tokens_tells_the_publishers_own_hashes() -> None:
    tokens = packed(1, 2, 3, 4)
    assert decode_event(event(token_ids=[1, 2, 3, 4])) == Stored((11, 12), 99, tokens, 2, "GPU", envelope=ENVELOPE)


def test_a_removal() -> None:
    removed = RemovedIdentity((11, 12), "GPU", ENVELOPE)
    assert decode_event(event(event_type="removed")) == removed
    assert decode_event(event(event_type="removed", base_block_idx=..., parent_hash=..., token_ids=...)) == removed


def test_a_clear_is_of_one_medium_or_of_all() -> None:
    assert decode_event(event(event_type="cleared")) == Cleared("GPU", envelope=ENVELOPE)
    assert decode_event(event(event_type="cleared", medium=None, seq_hashes=...)) == Cleared(None, envelope=ENVELOPE)


@pytest.mark.parametrize("kind", ["stored", "removed", "cleared"])
def test_adapter_and_salt_come_from_the_envelope(kind: str) -> None:
    named = decode_event(event(event_type=kind, lora_name="sql", additional_salt="w8a8"))
    assert named.envelope == replace(ENVELOPE, adapter="sql", salts=("w8a8",))
    empty = decode_event(event(event_type=kind, lora_name="", additional_salt=""))
    assert empty.envelope == ENVELOPE


def test_tokens_have_adapter_and_salt_of_the_envelope() -> None:
    stored = decode_event(event(token_ids=[1, 2, 3, 4], lora_name="sql", additional_salt="w8a8"))
    assert isinstance(stored, Stored)
    assert (stored.adapter, stored.salts) == ("sql", ("w8a8",))


@pytest.mark.parametrize("kind", ["stored", "removed", "cleared"])
def test_what_the_envelope_leaves_out_is_none(kind: str) -> None:
    absent = {"model_name": None, "block_size": None, "dp_rank": None, "tenant_id": None, "medium": None}
    bare = Envelope(42, "worker-0", "default", None, None, None)
    for fields in (absent, dict.fromkeys(absent, ...)):
        assert decode_event(event(event_type=kind, **fields)).envelope == bare
    assert decode_event(event(event_type=kind, tenant_id="")).envelope == ENVELOPE
    stored = decode_event(event(**absent, token_ids=[1, 2]))
    assert isinstance(stored, Stored)
    assert (stored.block_size, stored.medium) == (0, "GPU")


# ---- where the blocks are --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "parent", "found"),
    [
        (0, None, None),
        (0, ..., None),
        (..., None, None),
        (None, None, None),
        (0, 0, None),
        (0, 99, None),
        (5, 99, 99),
        (None, 99, 99),
        (..., 99, 99),
        (5, -1, 2**64 - 1),
        (5, "99", 99),
        (5, "-1", 2**64 - 1),
    ],
)
def test_the_root_and_the_parent(index: object, parent: object, found: int | None) -> None:
    for tokens in (None, [1, 2, 3, 4]):
        stored = decode_event(event(base_block_idx=index, parent_hash=parent, token_ids=tokens))
        assert isinstance(stored, Stored | StoredIdentity)
        assert stored.parent == found


@pytest.mark.parametrize(("index", "parent"), [(5, None), (5, ...), (5, 0), (None, 0), (..., 0)])
def test_without_its_parent_an_identity_is_known_and_tokens_are_not(
    refusal: Callable[..., str], index: object, parent: object
) -> None:
    where = {"base_block_idx": index, "parent_hash": parent}
    identity = decode_event(event(**where))
    assert isinstance(identity, StoredIdentity)
    assert identity.parent is None
    assert refusal(event(**where, token_ids=[1, 2, 3, 4]), STANDARD) == "parent_unknown"


def test_a_store_that_tells_no_position_is_rejected(refusal: Callable[..., str]) -> None:
    assert refusal(event(base_block_idx=..., parent_hash=...), STANDARD) == "no_position"


# ---- what does not fit -----------------------------------------------------------------------------

UNFIT = [
    ("event_type", None, "missing", "bad_event"),
    ("event_type", 7, "invalid_type", "bad_event"),
    ("event_id", None, "missing", "bad_envelope"),
    ("event_id", ..., "missing", "bad_envelope"),
    ("event_id", -1, "out_of_range", "bad_envelope"),
    ("event_id", "18446744073709551616", "out_of_range", "bad_envelope"),
    ("event_id", True, "invalid_type", "bad_envelope"),
    ("event_id", "0x10", "invalid_type", "bad_envelope"),
    ("backend_id", None, "missing", "bad_envelope"),
    ("backend_id", "", "missing", "bad_envelope"),
    ("backend_id", 7, "invalid_type", "bad_envelope"),
    ("tenant_id", 7, "invalid_type", "bad_envelope"),
    ("model_name", ["llama"], "invalid_type", "bad_envelope"),
    ("lora_name", 7, "invalid_type", "bad_envelope"),
    ("additional_salt", 7, "invalid_type", "bad_envelope"),
    ("block_size", 65537, "out_of_range", "bad_block_size"),
    ("block_size", "2", "invalid_type", "bad_block_size"),
    ("dp_rank", 2**32, "out_of_range", "bad_envelope"),
    ("dp_rank", "0", "invalid_type", "bad_envelope"),
    ("medium", "DP", "invalid_value", "bad_medium"),
    ("medium", 7, "invalid_value", "bad_medium"),
    ("seq_hashes", None, "missing", "bad_hash"),
    ("seq_hashes", 7, "invalid_type", "bad_hash"),
    ("seq_hashes", b"\0" * 9, "invalid_type", "bad_hash"),
    ("seq_hashes", [1, "x"], "invalid_type", "bad_hash"),
    ("seq_hashes", [1, "18446744073709551616"], "out_of_range", "bad_hash"),
    ("seq_hashes", [1, 1.5], "invalid_type", "bad_hash"),
    ("seq_hashes", [1, True], "invalid_type", "bad_hash"),
    ("seq_hashes", [1, "1"], "invalid_value", "repeated_hash"),
    ("parent_hash", "x", "invalid_type", "bad_hash"),
    ("parent_hash", 11, "invalid_value", "own_parent"),
    ("base_block_idx", -1, "out_of_range", "bad_envelope"),
    ("base_block_idx", 2**32, "out_of_range", "bad_envelope"),
    ("base_block_idx", "5", "invalid_type", "bad_envelope"),
    ("token_ids", "1234", "invalid_type", "bad_tokens"),
    ("token_ids", b"\0" * 3, "invalid_type", "bad_tokens"),
    ("token_ids", [1, 2, 3, -4], "out_of_range", "bad_tokens"),
    ("token_ids", [1, 2, 3, 2**32], "out_of_range", "bad_tokens"),
    ("token_ids", [1, 2, 3, True], "invalid_type", "bad_tokens"),
    ("token_ids", [1, 2, 3, "4"], "invalid_type", "bad_tokens"),
    ("token_ids", [[1, 2], [2, 3]], "invalid_type", "bad_tokens"),
]


@pytest.mark.parametrize(("field", "value", "reason", "kind"), UNFIT)
def test_a_field_that_does_not_fit_is_named(
    refusal: Callable[..., str], field: str, value: object, reason: str, kind: str
) -> None:
    document = event(**{field: value})
    with pytest.raises(InvalidValue) as raised:
        decode_event(document)
    assert (raised.value.field, raised.value.reason) == (field, reason)
    assert field in raised.value.sentence
    assert refusal(document, STANDARD) == kind


def test_the_value_and_the_place_of_what_does_not_fit_are_named() -> None:
    with pytest.raises(InvalidValue, match=r"^block_size is 65537; it must be an integer of 1\.\.65536$"):
        decode_event(event(block_size=65537))
    with pytest.raises(InvalidValue, match=r'^seq_hashes\[1\] is "x"; it must be a hash') as raised:
        decode_event(event(seq_hashes=[1, "x"]))
    assert raised.value.index == 1
    with pytest.raises(InvalidValue, match=r"^token_ids\[3\] is -4; it must be an integer of 0") as raised:
        decode_event(event(token_ids=[77777, 2, 3, -4]))
    assert raised.value.index == 3
    assert "77777" not in raised.value.sentence
    with pytest.raises(InvalidValue, match=r'^event_type is "moved"; it must be stored, removed or cleared$'):
        decode_event(event(event_type="moved"))
    with pytest.raises(InvalidValue, match="seq_hashes is an empty list"):
        decode_event(event(seq_hashes=[]))


@pytest.mark.parametrize(
    ("field", "written", "told"),
    [
        ("event_id", "null", "event_id is missing"),
        ("event_id", "true", "event_id is true"),
        ("event_id", "{}", "event_id is an object"),
        ("backend_id", '""', 'backend_id is ""'),
        ("backend_id", "false", "backend_id is false"),
        ("tenant_id", "[1]", "tenant_id is a list"),
        ("model_name", "1.5", "model_name is 1.5"),
        ("additional_salt", "true", "additional_salt is a boolean"),
        ("additional_salt", "4711", "additional_salt is an integer"),
        ("medium", '"it\'s"', 'medium is "it\'s"'),
        ("medium", json.dumps("\U0001f600" * 50), 'medium is "' + "\U0001f600" * 50 + '"'),
        ("seq_hashes", "null", "seq_hashes is missing"),
        ("seq_hashes", "[1, null]", "seq_hashes[1] is null"),
        ("seq_hashes", "[1, {}]", "seq_hashes[1] is an object"),
        ("token_ids", '"hush"', "token_ids is a string"),
        ("token_ids", "[1, 2, false, 4]", "token_ids[2] is false"),
        ("parent_hash", "[]", "parent_hash is a list"),
    ],
)
def test_a_sentence_speaks_json(field: str, written: str, told: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        decode_event(event(**{field: orjson.loads(written)}))
    assert raised.value.sentence.startswith(f"{told}; it must be ")


def test_a_parent_that_is_not_known_is_told_in_json_too() -> None:
    with pytest.raises(InvalidValue, match=r"^parent_hash is null at base_block_idx 5: "):
        decode_event(event(parent_hash=None, token_ids=[1, 2, 3, 4]))


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "1" * 30])
@pytest.mark.parametrize(
    ("field", "inside"),
    [
        *((field, False) for field in ("event_id", "block_size", "dp_rank", "base_block_idx", "parent_hash")),
        ("seq_hashes", True),
        ("token_ids", True),
    ],
)
def test_an_integer_that_64_bits_cannot_hold_is_out_of_range(field: str, inside: bool, number: str) -> None:
    written = [number, f'"{number}"'] if field in ("event_id", "parent_hash", "seq_hashes") else [number]
    for text in written:
        value = orjson.loads(f"[{text}]" if inside else text)
        with pytest.raises(InvalidValue) as raised:
            decode_event(event(**{field: value}))
        assert (raised.value.field, raised.value.reason) == (field, "out_of_range")
        assert raised.value.index == (0 if inside else None)
    with pytest.raises(InvalidValue) as raised:
        decode_event(event(backend_id=orjson.loads(number)))
    assert raised.value.reason == "invalid_type"


@pytest.mark.parametrize("field", ["backend_id", "tenant_id", "model_name", "lora_name", "additional_salt"])
def test_half_of_a_surrogate_pair_is_no_name(field: str) -> None:
    document = event(**{field: json.loads(r'"a\ud800"')})
    with pytest.raises(InvalidValue) as raised:
        decode_event(document)
    assert raised.value.field == field
    assert decode_event(event(**{field: "\U0001f600é"}))


# ---- HTTP and ZMQ forms ----------------------------------------------------------------------------


def test_a_u64_may_be_an_integer_a_negative_i64_or_a_decimal_string() -> None:
    stored = decode_event(event(event_id="7", seq_hashes=[1, -1, "2", "18446744073709551614"], parent_hash="-3"))
    assert isinstance(stored, StoredIdentity)
    assert stored.engine_hashes == (1, 2**64 - 1, 2, 2**64 - 2)
    assert stored.parent == 2**64 - 3
    assert stored.envelope is not None
    assert stored.envelope.event_id == 7


def test_a_msgpack_body_may_hold_tokens_and_hashes_as_bytes() -> None:
    hashes = struct.pack("<2Q", 11, 2**64 - 1)
    stored = decode_event(event(seq_hashes=hashes, token_ids=packed(1, 2, 3, 2**32 - 1)))
    assert isinstance(stored, Stored)
    assert stored.engine_hashes == (11, 2**64 - 1)
    assert stored.tokens == packed(1, 2, 3, 2**32 - 1)


def test_over_zmq_a_batch_a_bare_map_and_a_bare_list_mean_the_same() -> None:
    decode = decoder(STANDARD, seed=1337)
    decoded = (decode_event(event()),)
    assert decode(msgpack.packb([1.5, [event()], 3])) == Batch(1.5, decoded, 3)
    assert decode(msgpack.packb(event())) == Batch(None, decoded)
    assert decode(msgpack.packb([event(), event(event_type="cleared")])).events == (
        *decoded,
        decode_event(event(event_type="cleared")),
    )
    assert decode(msgpack.packb([])) == Batch(None, ())


def test_in_a_bare_list_one_bad_event_costs_one_event() -> None:
    batch = decoder(STANDARD, seed=1337)(msgpack.packb([event(), 5, {}, event(seq_hashes=[]), event(event_type="x")]))
    assert len(batch.events) == 1
    assert batch.rejected == {"bad_event": 2}
    assert batch.ignored == {"empty": 1, "unknown_type": 1}
    torn = b"\x93" + msgpack.packb(event()) + b"\x81\xa1\xff\x01" + msgpack.packb(event(event_type="cleared"))
    batch = decoder(STANDARD, seed=1337)(torn)
    assert [type(found) for found in batch.events] == [StoredIdentity, Cleared]
    assert batch.rejected == {"bad_msgpack": 1}


@pytest.mark.parametrize("root", [{}, {"type": "BlockStored"}, [1, 2], ["AllBlocksCleared"], 7, "stored"])
def test_what_is_neither_batch_nor_event_is_undecodable(root: object) -> None:
    with pytest.raises(Undecodable):
        decoder(STANDARD, seed=1337)(msgpack.packb(root))


def test_an_engines_own_events_are_not_standard(decode: Callable[..., Batch]) -> None:
    batch = decode(["AllBlocksCleared"], {"type": "AllBlocksCleared"}, kind=STANDARD)
    assert batch.rejected == {"bad_event": 2}


def test_the_salt_is_in_no_sentence(one: Callable[..., Event], decode: Callable[..., Batch]) -> None:
    envelope = one(event(additional_salt="hush"), STANDARD).envelope
    assert envelope is not None
    assert envelope.salts == ("hush",)
    for unfit in (
        {"additional_salt": ["hush"]},
        {"additional_salt": 4711},
        {"additional_salt": "hush", "medium": "DP"},
    ):
        (sentence,) = decode(event(**unfit), kind=STANDARD).samples.values()
        assert "hush" not in sentence
        assert "4711" not in sentence
