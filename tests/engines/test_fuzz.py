"""Whatever bytes come: a batch, or ``Undecodable``."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import examples
from waymark.base.errors import InvalidValue, Undecodable
from waymark.domain.engines import EngineKind
from waymark.domain.events import REMOVALS, STORES, Batch, Cleared, Event, Stored, StoredIdentity
from waymark.domain.media import normal_medium
from waymark.engines import decoder, vllm
from waymark.engines.standard import decode_event
from waymark.engines.wire import Ignored

pytestmark = pytest.mark.slow

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
DECODERS = [decoder(kind, seed=1337) for kind in EngineKind]
KINDS = {"bad_msgpack", "bad_event", "bad_hash", "repeated_hash", "own_parent", "parent_unknown", "no_position"} | {
    "bad_tokens",
    "bad_medium",
    "bad_block_size",
    "bad_lora",
    "bad_salt",
    "bad_group",
    "bad_extra_keys",
    "bad_envelope",
}


def check(batch: Batch) -> None:
    """What holds for every batch, wherever it came from."""
    assert isinstance(batch, Batch)
    assert batch.ts is None or abs(batch.ts) < float("inf")
    assert batch.dp_rank is None or 0 <= batch.dp_rank < 2**32
    assert set(batch.rejected) <= KINDS
    assert set(batch.ignored) <= set(Ignored)
    assert set(batch.samples) == set(batch.rejected)
    assert all(len(sentence) < 250 for sentence in batch.samples.values())
    for event in batch.events:
        if isinstance(event, Cleared):
            continue
        assert isinstance(event, STORES + REMOVALS)
        hashes = event.engine_hashes
        assert len(set(hashes)) == len(hashes) > 0
        assert 0 <= min(hashes) <= max(hashes) < 2**64
        assert normal_medium(event.medium) == event.medium
        if isinstance(event, Stored | StoredIdentity):
            assert event.parent is None or (0 <= event.parent < 2**64 and event.parent not in hashes)
        if isinstance(event, Stored):
            assert len(event.tokens) % 4 == 0 < len(event.tokens)
            assert 0 <= event.block_size <= 65536
            assert event.extras is None or len(event.extras) == len(hashes)
            assert all(event.salts)


def captured() -> list[bytes]:
    """Every captured payload, and some shapes that no fixture has."""
    texts = [json.loads(path.read_text()) for path in sorted(WIRE.glob("*.json"))]
    frames = [frame for text in texts for frame in text.get("frames", []) + text.get("payloads", [])]
    envelope = {"event_id": 1, "backend_id": "b", "tenant_id": "t", "medium": "cpu", "block_size": 2, "lora_name": "l"}
    stored = envelope | {"event_type": "stored", "seq_hashes": [1, 2], "base_block_idx": 1, "parent_hash": 5}
    stored |= {"token_ids": [1, 2, 3, 4], "additional_salt": "s", "dp_rank": 1}
    pairs = ["BlockStored", [-1, b"\0" * 8], 3, [[1, 2], [2, 3]], 1, 7, "CPU", {"cache_salt": "s"}, [["a"], [["b", 0]]]]
    made = [stored, [stored, envelope | {"event_type": "cleared"}], [1739145600000, [stored, pairs], 1]]
    return [bytes.fromhex(frame["payload_hex"]) for frame in frames] + [msgpack.packb(root) for root in made]


def mutated(chance: random.Random, frames: list[bytes]) -> bytes:
    frame = bytearray(chance.choice(frames))
    for _ in range(chance.randint(1, 3)):
        where = chance.randrange(len(frame) + 1)
        # Most mutations keep the length, and with it the batch around what they hit.
        match chance.randrange(16):
            case 0:
                frame[where:where] = chance.randbytes(chance.randint(1, 9))
            case 1:
                del frame[where : where + chance.randint(1, 9)]
            case 2 | 3 | 4:
                # Where msgpack's types begin: nil, booleans, binary, ext, floats, integers, text, lists, maps.
                frame[where : where + 1] = bytes([chance.randrange(0xC0, 0xE0)])
            case 5:
                donor = chance.choice(frames)
                start = chance.randrange(len(donor))
                frame[where:where] = donor[start : start + chance.randint(1, 40)]
            case 6:
                del frame[where:]
            case _ if where < len(frame):
                frame[where] = chance.randrange(256)
    return bytes(frame)


def test_mutated_frames_are_read_or_refused() -> None:
    chance = random.Random(20250607)
    frames = captured()
    refused: Counter[str] = Counter()
    batches = salvaged = 0
    for _ in range(examples(100_000)):
        payload = mutated(chance, frames)
        try:
            batch = chance.choice(DECODERS)(payload)
        except Undecodable as bad:
            refused[bad.kind] += 1
            continue
        check(batch)
        batches += 1
        salvaged += "bad_msgpack" in batch.rejected
    # The mutations are worth something only if they reach behind msgpack, and behind the salvage too.
    assert batches > examples(100_000) / 5
    assert set(refused) == {"bad_msgpack", "not_a_batch"}
    assert refused.total() > examples(100_000) / 5
    assert salvaged > examples(100_000) / 1000


atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=9),
    st.sampled_from(
        ["BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "removed", "cleared", "REMOTE", "DP"]
    ),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=3)),
    st.builds(msgpack.Timestamp, st.integers(0, 2**34)),
)
keys = st.text(max_size=2) | st.integers(-1, 1) | st.none() | st.binary(max_size=1) | st.floats()
values = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3), max_leaves=12
)
hashes = st.lists(st.integers(-3, 3), max_size=3)


@st.composite
def events(draw: st.DrawFn) -> Any:
    """A good event with some of its values replaced by anything."""
    stored = dict(zip(vllm.STORED_FIELDS, [[1, 2], None, [1, 2], 1, *[None] * 4, 0, None, None], strict=True))
    envelope = {"event_id": 1, "backend_id": "b", "seq_hashes": [1, 2], "base_block_idx": 1, "parent_hash": 5}
    good: list[dict[Any, Any]] = [
        {"type": "BlockStored", **stored},
        {"type": "BlockRemoved", "block_hashes": [1]},
        {**envelope, "event_type": "stored", "token_ids": [1, 2]},
        {**envelope, "event_type": "removed"},
        {**envelope, "event_type": "cleared"},
    ]
    event = draw(st.sampled_from(good)).copy()
    optional = ["cache_salt", "locality", "block_mm_infos", "medium", "additional_salt", "tenant_id", "block_size"]
    for name in draw(st.lists(st.sampled_from([*event, *optional]), max_size=3)):
        event[name] = draw(values | hashes)
    return list(event.values()) if draw(st.booleans()) else event


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(root=st.tuples(values, st.lists(values | events(), max_size=4), values) | values | events())
def test_any_values_in_any_place(root: Any) -> None:
    payload = msgpack.packb(root)
    for decode in DECODERS:
        try:
            batch = decode(payload)
        except Undecodable:
            continue
        check(batch)


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(document=events().filter(lambda event: isinstance(event, dict)))
def test_any_document_over_http(document: dict[str, object]) -> None:
    answer = answer_to(document)
    if isinstance(answer, InvalidValue):
        assert answer.field is None or answer.field in answer.sentence
        assert len(answer.sentence) < 250
    else:
        check(Batch(None, (answer,)))


def answer_to(document: dict[str, object]) -> Event | InvalidValue:
    try:
        return decode_event(document)
    except InvalidValue as bad:
        return bad


def test_numbers_and_nesting_that_only_json_can_write() -> None:
    huge = json.loads("1" * 4000)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    document = {"event_type": "stored", "event_id": 1, "backend_id": "b", "seq_hashes": [1], "parent_hash": 5}
    assert isinstance(answer_to(document), StoredIdentity)
    for field in ("event_id", "block_size", "seq_hashes", "parent_hash", "token_ids", "dp_rank", "medium"):
        for value in (huge, [huge], deep):
            answer = answer_to(document | {field: value})
            assert isinstance(answer, InvalidValue)
            assert answer.field == field
