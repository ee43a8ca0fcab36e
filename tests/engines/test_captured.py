"""Bytes that real engines sent, against what those engines said they mean."""

from __future__ import annotations

import ast
import json
import re
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from xxhash import xxh3_64_intdigest

from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Cleared, Event, Removed, Stored, StoredReference, StoredWindow
from waymark.engines import decoder

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
VLLM_SESSION = json.loads((WIRE / "vllm_0.33_session.json").read_text())
SGLANG_SESSION = json.loads((WIRE / "sglang_0.5.23_session.json").read_text())
VLLM_VERSIONS = json.loads((WIRE / "vllm_versions.json").read_text())
OTHERS = {frame["note"]: frame["payload_hex"] for frame in json.loads((WIRE / "others.json").read_text())["frames"]}

IMAGE = "ab" * 32


def batch_of(payload_hex: str, kind: EngineKind = EngineKind.VLLM) -> Batch:
    return decoder(kind, seed=1337)(bytes.fromhex(payload_hex))


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def meant(sentence: str) -> Event:
    """The domain event that an engine's own ``repr`` of its event asks for, but for salts and extras."""
    call = ast.parse(re.sub(r"<StorageMedium\.\w+: ('\w+')>", r"\1", sentence), mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    told: dict[str, Any] = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    if call.func.id == "AllBlocksCleared":
        return Cleared()
    hashes = tuple(value % 2**64 for value in told["block_hashes"])
    if call.func.id == "BlockRemoved":
        return Removed(hashes, told["medium"], told.get("group_idx"))
    assert told.get("kv_cache_spec_kind") in ("full_attention", None)
    parent = told["parent_block_hash"]
    return Stored(
        engine_hashes=hashes,
        parent=None if parent is None else parent % 2**64,
        tokens=packed(told["token_ids"]),
        block_size=told["block_size"],
        medium=told["medium"],
        adapter=told["lora_name"] or told["lora_id"],
        salts=(told["cache_salt"],) if told.get("cache_salt") else (),
        group=told.get("group_idx"),
    )


FRAMES = [
    pytest.param(kind, frame, id=f"{kind}-{frame['seq']}")
    for kind, session in ((EngineKind.VLLM, VLLM_SESSION), (EngineKind.SGLANG, SGLANG_SESSION))
    for frame in session["frames"]
]


@pytest.mark.parametrize(("kind", "frame"), FRAMES)
def test_a_captured_frame_has_its_stated_meaning(kind: EngineKind, frame: dict[str, Any]) -> None:
    batch = batch_of(frame["payload_hex"], kind)
    expected = [meant(sentence) for sentence in frame["meaning"]]
    if kind is EngineKind.VLLM and frame["note"].startswith("A with salt"):
        salted = expected[-1]
        assert isinstance(salted, Stored)
        expected[-1] = Stored(**{name: getattr(salted, name) for name in salted.__slots__} | {"salts": ("tenant-a",)})
    if frame["note"].startswith("mm prefill"):
        imaged = expected[-1]
        assert isinstance(imaged, Stored)
        extras = (None, *(xxh3_64_intdigest(msgpack.packb([[IMAGE, offset]]), 1337) for offset in (0, -4)))
        expected[-1] = Stored(**{name: getattr(imaged, name) for name in imaged.__slots__} | {"extras": extras})
    assert list(batch.events) == expected
    assert (batch.rejected, batch.ignored, batch.samples) == ({}, {}, {})
    assert batch.dp_rank == 0
    assert batch.ts is not None
    assert 1.7e9 < batch.ts < 2e9


@pytest.mark.parametrize("release", VLLM_VERSIONS["payloads"], ids=lambda release: release["versions"][0])
def test_the_same_events_in_the_shape_of_every_vllm_release(release: dict[str, Any]) -> None:
    version = tuple(int(part) for part in release["versions"][0].split("."))
    batch = batch_of(release["payload_hex"])
    group = 0 if version >= (0, 20, 0) else None
    assert batch.ts == 1.5
    assert batch.dp_rank == (None if version == (0, 9, 0) else 0)
    assert batch.events == (
        Stored(
            engine_hashes=(0x1122334455667788, 0xFFEEDDCCBBAA9988),
            parent=None,
            tokens=packed([1, 2, 3, 4, 5, 6, 7, 8]),
            block_size=4,
            medium="GPU",
            group=group,
        ),
        Removed((0xFFEEDDCCBBAA9988,), "GPU", group),
        Cleared(),
    )
    assert (batch.rejected, batch.ignored) == ({}, {})


def test_a_placeholder_of_vllm_offloading() -> None:
    batch = batch_of(OTHERS["vLLM offload placeholder (tokens empty, block_size 0)"])
    assert batch.events == (StoredReference((0x8511A30617AFA01D,), "CPU", group=0),)


def test_lists_of_older_sglang() -> None:
    batch = batch_of(OTHERS["SGLang 0.5.9-0.5.19, arrays, negative hash"], EngineKind.SGLANG)
    assert batch.events == (
        Stored((0xEEDDCCBBAA998878, 0x7FEEDDCCBBAA9988), None, packed([1, 2, 3, 4]), 2, "GPU"),
        Removed((0x7FEEDDCCBBAA9988,), "GPU"),
        Cleared(),
    )


def test_signed_hashes_and_salt_of_a_republisher_on_rank_1() -> None:
    batch = batch_of(OTHERS["Dynamo republisher for TensorRT-LLM: signed hashes, lora_name, cache_salt, dp rank 1"])
    tokens = packed([1, 2, 3, 4, 5, 6, 7, 8])
    assert batch.events == (Stored((2**64 - 5, 77), None, tokens, 4, "GPU", adapter="ad", salts=("salt",)),)
    assert batch.dp_rank == 1


def test_a_removal_without_a_medium_is_of_gpu() -> None:
    assert batch_of(OTHERS["Dynamo mocker removal: no medium"]).events == (Removed((0xC92875CDEABEE7C0,), "GPU", 0),)


def test_an_empty_batch_is_a_batch() -> None:
    batch = batch_of(OTHERS["empty batch"])
    assert (batch.ts, batch.events, batch.dp_rank) == (1.5, (), None)


def test_a_unit_inside_a_physical_block() -> None:
    batch = batch_of(OTHERS["vLLM unit inside a physical block, written from the source: no release sends it"])
    parent, unit = (int.from_bytes(bytes([each]) * 8, "big") for each in (4, 7))
    tokens = packed(list(range(9, 21)))
    assert batch.events == (Stored((unit,), parent, tokens, 12, "GPU", group=0),)
    assert batch.publisher_id == bytes(range(16))


def test_components_of_sglang() -> None:
    several = OTHERS["SGLang component_types in a map and in a list, written from the source: no release sends it"]
    hashes, tokens = (2**64 - 3, 4), packed([1, 2, 3, 4])
    state = StoredWindow(hashes, "GPU", 1, window=1)
    assert batch_of(several, EngineKind.SGLANG).events == (
        Stored(hashes, None, tokens, 2, "GPU", is_reused=True),
        state,
        Stored((5,), 4, packed([5, 6]), 2, "GPU", is_reused=True),
        Removed((5,), "GPU", 1),
    )
    one = OTHERS["SGLang one component_type an event, written from the source: no release sends it"]
    main, removal = Stored(hashes, None, tokens, 2, "GPU"), Removed((4,), "GPU", 1)
    assert batch_of(one, EngineKind.SGLANG).events == (main, state, removal)
