"""Payloads of simulated engines are the bytes that real ones sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from waymark.base.errors import InvalidValue
from waymark.domain.engines import EngineKind
from waymark.simulator.encode import (
    CPU,
    DIALECTS,
    KIND_NAMES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Dimensions,
    Encoder,
    UnknownEvent,
    WireEvent,
)

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"

A, B = 0x1122334455667788, 0xFFEEDDCCBBAA9988
IMAGE = "ab" * 32


def captured(file: str) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads((WIRE / file).read_text())
    frames: list[dict[str, Any]] = content.get("payloads") or content["frames"]
    return frames


def unpacked(payload: bytes) -> list[Any]:
    batch: list[Any] = msgpack.unpackb(payload)
    return batch


@pytest.mark.parametrize(
    ("dialect", "version", "rank"),
    [
        ("vllm-list-6", "0.9.0", None),
        ("vllm-list-6", "0.10.0", 0),
        ("vllm-list-7", "0.13.0", 0),
        ("vllm-list-8", "0.16.0", 0),
        ("vllm-list-9", "0.19.0", 0),
        ("vllm-list-10", "0.21.0", 0),
        ("vllm-list-12", "0.23.0", 0),
        ("vllm-map", "0.32.0", 0),
        ("vllm-map-wide", "0.33.0", 0),
    ],
)
def test_each_vllm_version_byte_by_byte(dialect: str, version: str, rank: int | None) -> None:
    [frame] = [each for each in captured("vllm_versions.json") if version in each["versions"]]
    events: list[WireEvent] = [
        BlockStored((A, B), None, tuple(range(1, 9)), 4, extra_keys=(None, None)),
        BlockRemoved((B,)),
        AllBlocksCleared(),
    ]
    assert Encoder(dialect).payload(events, ts=1.5, rank=rank).hex() == frame["payload_hex"]


def vllm_event(fields: dict[str, Any], salt: str | None) -> WireEvent:
    """A captured vLLM map in the simulator's words."""
    if fields["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    if fields["type"] == "BlockRemoved":
        return BlockRemoved(tuple(fields["block_hashes"]), fields["medium"], fields["group_idx"])
    extras = [
        tuple((item[0], item[1]) for item in keys or () if isinstance(item, list)) or None
        for keys in fields["extra_keys"]
    ]
    return BlockStored(
        tuple(fields["block_hashes"]),
        fields["parent_block_hash"],
        tuple(fields["token_ids"]),
        fields["block_size"],
        fields["medium"],
        fields["lora_id"],
        fields["lora_name"],
        salt,
        tuple(extras),
        session_id=fields.get("session_id"),
    )


@pytest.mark.parametrize("frame", captured("vllm_0.33_session.json"), ids=lambda frame: f"seq-{frame['seq']}")
def test_a_vllm_session_with_adapter_salt_and_images_byte_by_byte(frame: dict[str, Any]) -> None:
    ts, maps, rank = unpacked(bytes.fromhex(frame["payload_hex"]))
    salt = "tenant-a" if "salt" in frame["note"] else None
    events = [vllm_event(fields, salt) for fields in maps]
    assert Encoder("vllm-map-wide").payload(events, ts=ts, rank=rank).hex() == frame["payload_hex"]


def sglang_event(fields: dict[str, Any]) -> WireEvent:
    """A captured SGLang map in the simulator's words: hashes unsigned."""
    if fields["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    hashes = tuple(each % 2**64 for each in fields["block_hashes"])
    if fields["type"] == "BlockRemoved":
        return BlockRemoved(hashes, fields["medium"])
    parent = fields["parent_block_hash"]
    return BlockStored(
        hashes,
        None if parent is None else parent % 2**64,
        tuple(fields["token_ids"]),
        fields["block_size"],
        cache_salt=fields.get("cache_salt"),
    )


@pytest.mark.parametrize("frame", captured("sglang_0.5.23_session.json"), ids=lambda frame: f"seq-{frame['seq']}")
def test_an_sglang_session_byte_by_byte(frame: dict[str, Any]) -> None:
    ts, maps, rank = unpacked(bytes.fromhex(frame["payload_hex"]))
    events = [sglang_event(fields) for fields in maps]
    assert Encoder("sglang-map").payload(events, ts=ts, rank=rank).hex() == frame["payload_hex"]


def other(note: str) -> dict[str, Any]:
    [frame] = [each for each in captured("others.json") if note in each["note"]]
    return frame


def test_a_vllm_placeholder_byte_by_byte() -> None:
    placeholder = BlockStored((0x8511A30617AFA01D,), None, (), 0, CPU, kv_cache_spec_kind=None)
    payload = Encoder("vllm-map-wide").payload([placeholder], ts=1.5)
    assert payload.hex() == other("placeholder")["payload_hex"]


def test_sglang_lists_byte_by_byte() -> None:
    positive = 9218549358665570696
    events: list[WireEvent] = [
        BlockStored((2**64 - 1234605616436508552, positive), None, (1, 2, 3, 4), 2),
        BlockRemoved((positive,)),
        AllBlocksCleared(),
    ]
    assert Encoder("sglang-list").payload(events, ts=1.5).hex() == other("negative hash")["payload_hex"]


def test_an_empty_batch_without_a_rank_byte_by_byte() -> None:
    assert Encoder("vllm-map").payload([], ts=1.5, rank=None).hex() == other("empty batch")["payload_hex"]


def test_sglang_names_the_salt_where_its_format_has_a_place_for_it() -> None:
    events: list[WireEvent] = [BlockStored((A,), None, (1, 2), 2, cache_salt="tenant-a")]
    lists = {d: unpacked(Encoder(d).payload(events, ts=1.0))[1][0] for d in DIALECTS if d.startswith("sglang-list")}
    assert {dialect: len(fields) for dialect, fields in lists.items()} == {
        "sglang-list-6": 6,
        "sglang-list-7": 7,
        "sglang-list": 8,
    }
    assert lists["sglang-list"][7] == {"cache_salt": "tenant-a"}
    assert unpacked(Encoder("sglang-map").payload(events, ts=1.0))[1][0]["cache_salt"] == "tenant-a"


def test_sglang_spells_the_media_off_the_gpu_its_own_way() -> None:
    events: list[WireEvent] = [BlockStored((A,), None, (1, 2), 2, CPU), BlockRemoved((A,), CPU)]
    stored, removed = unpacked(Encoder("sglang-map").payload(events, ts=1.0))[1]
    assert stored["medium"] == removed["medium"] == "CPU_TIER1"


def test_vllm_tells_a_salt_in_the_first_block_of_a_prompt_only() -> None:
    root = BlockStored((A, B), None, (1, 2), 1, lora_name="sql", cache_salt="s", extra_keys=(None, ((IMAGE, -3),)))
    child = BlockStored((A,), B, (1,), 1, cache_salt="s", extra_keys=(None,))
    first, second = unpacked(Encoder("vllm-map").payload([root, child], ts=1.0))[1]
    assert first["extra_keys"] == [["sql", "s"], ["sql", [IMAGE, -3]]]
    assert second["extra_keys"] == [None]


def test_standard_events_are_numbered_within_their_stream() -> None:
    encoder = Encoder("standard", Dimensions("llama", 2, "acme", "engine-7"))
    events: list[WireEvent] = [
        BlockStored((A, B), None, (1, 2, 3, 4), 2),
        BlockStored((A,), B, (5, 6), 2, CPU),
        BlockRemoved((B,)),
    ]
    ts, maps, rank = unpacked(encoder.payload(events, ts=1739145600.5, rank=1))
    assert (ts, rank) == (1739145600.5, 1)
    assert maps[0] == {
        "event_id": 1,
        "timestamp": 1739145600500,
        "event_type": "stored",
        "model_name": "llama",
        "block_size": 2,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "acme",
        "backend_id": "engine-7",
        "medium": "gpu",
        "dp_rank": 1,
        "seq_hashes": [A, B],
        "base_block_idx": 0,
        "parent_hash": None,
        "token_ids": None,
    }
    assert [(m["event_id"], m["event_type"], m["medium"]) for m in maps] == [
        (1, "stored", "gpu"),
        (1, "stored", "cpu"),
        (2, "removed", "gpu"),
    ]
    assert maps[1]["parent_hash"] == B


def test_a_standard_clear_is_told_once_per_stream_of_the_rank() -> None:
    encoder = Encoder("standard")
    stores: list[WireEvent] = [BlockStored((A,), None, (1,), 1), BlockStored((A,), None, (1,), 1, CPU)]
    encoder.payload(stores, ts=1.0, rank=0)
    encoder.payload(stores[:1], ts=1.0, rank=1)
    maps = unpacked(encoder.payload([AllBlocksCleared()], ts=2.0, rank=0))[1]
    assert [(m["event_type"], m["medium"], m["dp_rank"], m["event_id"]) for m in maps] == [
        ("cleared", "gpu", 0, 2),
        ("cleared", "cpu", 0, 2),
    ]


def test_a_standard_publisher_with_hashes_of_its_own_sends_tokens() -> None:
    events: list[WireEvent] = [BlockStored((A,), None, (1, 2), 2)]
    assert unpacked(Encoder("standard-tokens").payload(events, ts=1.0))[1][0]["token_ids"] == [1, 2]


def test_event_ids_begin_again_in_a_new_process() -> None:
    encoder = Encoder("standard")
    events: list[WireEvent] = [BlockRemoved((A,))]
    first = encoder.payload(events, ts=1.0)
    assert encoder.payload(events, ts=1.0) != first
    encoder.reset()
    assert encoder.payload(events, ts=1.0) == first


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_unknown_event_is_of_a_type_no_engine_sends(dialect: str) -> None:
    [event] = unpacked(Encoder(dialect).payload([UnknownEvent()], ts=1.0))[1]
    kind = event[0] if isinstance(event, list) else event.get("type", event.get("event_type"))
    assert kind in ("BlockMoved", "moved")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_has_the_kind_of_a_registration(dialect: str) -> None:
    word = dialect.partition("-")[0]
    assert EngineKind(KIND_NAMES[word]).traits.dialect == word


def test_an_unknown_dialect_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="vllm-list-6") as caught:
        Encoder("vllm-list-11")
    assert caught.value.field == "dialect"
