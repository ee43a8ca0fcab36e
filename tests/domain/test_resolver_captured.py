"""Sessions captured from engines, replayed: what the index holds after each frame, written down from the prompts.

The prompts are the captures' own: A is tokens 100..111, B goes on from A, an adapter, a salt, an image, a long
prompt that evicts, a reset. Block size 4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.domain.index import Index
from tests.factories import SEED, registration, stored
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Stored
from waymark.domain.hashing import extend, extra_digest, namespace, token_bytes
from waymark.engines import decoder

WIRE = Path(__file__).parents[1] / "fixtures" / "wire"
A = list(range(100, 112))


def frames(name: str, kind: EngineKind) -> list[Batch]:
    session = json.loads((WIRE / f"{name}_session.json").read_text())
    return [decoder(kind, seed=SEED)(bytes.fromhex(frame["payload_hex"])) for frame in session["frames"]]


def keys(prompt: list[int], ns: int = 0, extras: list[int | None] | None = None) -> list[int]:
    return [seq_hash ^ ns for seq_hash in extend(None, token_bytes(prompt), 4, extras=extras)]


def vllm_contents() -> list[dict[int, int]]:
    """Copies by block key after each frame of vLLM's session."""
    a1, a2, a3 = keys(A)
    b4, b5 = keys([*A, 200, 201, 202, 203, 204, 205, 1, 2])[3:]
    lora = dict.fromkeys(keys(A, namespace("sql-adapter", [])), 1)
    salted = dict.fromkeys(keys(A, namespace(None, ["tenant-a"])), 1)
    image = "ab" * 32
    imaged = dict.fromkeys(keys([9] * 4 + [32000] * 8, 0, [None, *(extra_digest([[image, at]]) for at in (0, -4))]), 1)
    long = dict.fromkeys(keys(list(range(1000, 1036))), 1)
    return [
        {a1: 1, a2: 1, a3: 1},
        {a1: 1, a2: 1, a3: 1, b4: 1},
        {a1: 1, a2: 1, a3: 1, b4: 1, b5: 1},
        {a1: 1, a2: 1, a3: 2, b4: 1, b5: 1},
        {a1: 1, a2: 1, a3: 2, b4: 1, b5: 1} | lora,
        {a1: 1, a2: 1, a3: 2} | lora | salted,
        lora | salted | imaged,
        salted | imaged | {a1: 1, a2: 1, a3: 1},
        {a1: 1} | long,
        {},
    ]


def sglang_contents() -> list[dict[int, int]]:
    """Copies by block key after each frame of SGLang's session; frame 5 stores A a second time."""
    a1, a2, a3 = keys(A)
    b3, b4 = keys([*A[:8], *range(200, 208)])[2:]
    (c4,) = keys([*A, 300, 301, 302, 303])[3:]
    salted = dict.fromkeys(keys(A, namespace(None, ["tenant-a"])), 1)
    return [
        {},
        {a1: 1, a2: 1, a3: 1},
        {a1: 1, a2: 1, a3: 1, b3: 1, b4: 1},
        {a1: 1, a2: 1, a3: 1, b3: 1, b4: 1, c4: 1},
        {a1: 1, a2: 1, a3: 1, b3: 1, b4: 1, c4: 1} | salted,
        {a1: 2, a2: 2, a3: 2, b3: 1, b4: 1, c4: 1} | salted,
        {a1: 2, a2: 2, a3: 2, c4: 1} | salted,
        {a1: 2, a2: 2, a3: 1} | salted,
        {},
    ]


SESSIONS: list[Any] = [
    pytest.param("vllm_0.33", EngineKind.VLLM, vllm_contents(), id="vllm"),
    pytest.param("sglang_0.5.23", EngineKind.SGLANG, sglang_contents(), id="sglang"),
]


@pytest.mark.parametrize(("name", "kind", "contents"), SESSIONS)
def test_after_each_frame_the_index_holds_what_the_engine_holds(
    name: str, kind: EngineKind, contents: list[dict[int, int]]
) -> None:
    index = Index(registration(kind))
    for frame, expected in zip(frames(name, kind), contents, strict=True):
        index.fold(frame)
        assert index.held() == expected
    assert (index.ignored, index.resolver.unresolved) == ({}, 0)


@pytest.mark.parametrize(("name", "kind", "contents"), SESSIONS)
def test_however_frames_are_folded_they_come_to_the_same(
    name: str, kind: EngineKind, contents: list[dict[int, int]]
) -> None:
    batches = frames(name, kind)
    for size in range(2, len(batches) + 1):
        index = Index(registration(kind))
        for at in range(0, len(batches), size):
            index.fold(*batches[at : at + size])
            assert index.held() == contents[min(at + size, len(batches)) - 1]
        assert index.resolver.unresolved == 0


@pytest.mark.parametrize(("name", "kind", "contents"), SESSIONS)
def test_a_takeover_after_any_frame_changes_nothing(
    name: str, kind: EngineKind, contents: list[dict[int, int]]
) -> None:
    index = Index(registration(kind))
    for frame, expected in zip(frames(name, kind), contents, strict=True):
        index.take_over()
        index.fold(frame)
        assert index.held() == expected


def test_a_captured_placeholder_of_offloading_is_the_block_its_hash_names() -> None:
    others = {frame["note"]: frame for frame in json.loads((WIRE / "others.json").read_text())["frames"]}
    payload = bytes.fromhex(others["vLLM offload placeholder (tokens empty, block_size 0)"]["payload_hex"])
    placeholder = decoder(EngineKind.VLLM, seed=SEED)(payload)
    index = Index()
    index.fold(placeholder)
    assert index.held("0 CPU") == {}
    assert index.resolver.unresolved == 1
    session = frames("vllm_0.33", EngineKind.VLLM)[0]
    (first,) = session.events
    assert isinstance(first, Stored)
    index.fold(session)
    index.events(stored(first.engine_hashes[:1], medium="CPU", group=0))
    assert index.held("0 CPU") == {keys(A)[0]: 1}
