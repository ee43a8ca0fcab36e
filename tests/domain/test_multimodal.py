"""multimodal: images give blocks the extra keys that vLLM gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waymark.base.errors import InvalidValue
from waymark.client import block_hashes
from waymark.domain import packing
from waymark.domain.hashing import block_keys, extend
from waymark.domain.multimodal import (
    BLOCKS_MAX,
    ITEMS_MAX,
    PromptItem,
    PromptItems,
    block_keys_with,
    check_blocks,
    extra_keys,
    items_of,
    seq_hashes_with,
)
from waymark.domain.packing import pack_tokens

SESSION = json.loads((Path(__file__).parents[1] / "fixtures" / "wire" / "vllm_0.33_session.json").read_text())


def captured() -> tuple[list[int], list[Any], int]:
    """Tokens, extra keys and block size of the store with an image that a real cache manager published."""
    frame = next(frame for frame in SESSION["frames"] if frame["note"].startswith("mm prefill"))
    _, events, _ = msgpack.unpackb(bytes.fromhex(frame["payload_hex"]), strict_map_key=False)
    event = next(event for event in events if event["type"] == "BlockStored")
    return event["token_ids"], event["extra_keys"], event["block_size"]


def test_the_extra_keys_are_those_that_vllm_published() -> None:
    tokens, published, block_size = captured()
    placeholders = [at for at, token in enumerate(tokens) if token == 32000]
    identifier = published[1][0][0]
    features = {
        "mm_hashes": {"image": [identifier]},
        "mm_placeholders": {"image": [{"offset": placeholders[0], "length": len(placeholders)}]},
    }
    found = extra_keys(items_of(features), block_size, range(len(published)))
    assert [each or None for each in found] == published


def plain_extra_keys(items: PromptItems, start: int, end: int) -> list[list[Any]]:
    return [
        [item.identifier, item.offset - start]
        for item in items
        if item.offset < end and item.offset + item.length > start
    ]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[bytes, PromptItems]:
    tokens, items = [], []
    for identifier in draw(st.lists(st.sampled_from("abc"), max_size=5)):
        tokens += draw(st.lists(st.integers(0, 3), max_size=5))
        length = draw(st.integers(1, 12))
        items.append(PromptItem(len(tokens), length, identifier))
        tokens += [9] * length
    return pack_tokens(tokens + [1] * draw(st.integers(0, 5))), tuple(items)


@given(prompts(), st.integers(1, 6), st.integers(0, 2**64 - 1), st.lists(st.integers(0, 5), max_size=6))
def test_keys_in_pieces_are_those_of_the_whole(
    prompt: tuple[bytes, PromptItems], block_size: int, namespace: int, pieces: list[int]
) -> None:
    tokens, items = prompt
    whole = seq_hashes_with(items, None, tokens, block_size)
    blocks = range(len(tokens) // 4 // block_size)
    found = list(extra_keys(items, block_size, blocks))
    assert found == [plain_extra_keys(items, at * block_size, (at + 1) * block_size) for at in blocks]
    at, parent, joined = 0, None, b""
    for count in [*pieces, len(blocks)]:
        piece = tokens[4 * block_size * at : 4 * block_size * (at + count)]
        joined += block_keys_with(items, parent, piece, block_size, first=at, namespace=namespace)
        at = min(len(blocks), at + count)
        parent = whole[at - 1] if at else None
    assert joined == packing.pack(whole, namespace)
    untouched = next((at for at, each in enumerate(found) if each), len(blocks))
    plain = extend(None, tokens, block_size)
    assert whole[:untouched] == plain[:untouched]
    assert not set(whole[untouched:]) & set(plain)
    if not items:
        assert joined == block_keys(None, tokens, block_size, namespace=namespace)


def test_two_images_of_one_size_and_one_image_elsewhere_are_different_blocks() -> None:
    tokens = pack_tokens([1, 9, 9, 2])
    chains = {
        tuple(seq_hashes_with(items, None, tokens, 2))
        for items in ((), (PromptItem(1, 2, "a"),), (PromptItem(1, 2, "b"),))
    }
    chains.add(tuple(seq_hashes_with((PromptItem(0, 2, "a"),), None, tokens, 2)))
    assert len({chain[0] for chain in chains}) == len({chain[1] for chain in chains}) == 4


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ([], "no object"),
        ({"mm_hashes": {"image": ["a"]}}, "no mm_placeholders"),
        ({"mm_hashes": {"image": []}, "mm_placeholders": {"audio": []}}, "modalities"),
        ({"mm_hashes": {"image": "a"}, "mm_placeholders": {"image": []}}, "one placeholder for each"),
        ({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}}, "one placeholder for each"),
        ({"mm_hashes": {"image": [1]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}, "no text"),
        ({"mm_hashes": {"image": [""]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}, "no text"),
        ({"mm_hashes": {"image": ["\ud800"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}, "surrogate"),
        ({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": -1, "length": 1}]}}, "offset"),
        ({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 0}]}}, "length"),
        ({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": True, "length": 1}]}}, "offset"),
        ({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [[0, 1]]}}, "offset"),
        (
            {
                "mm_hashes": {"image": ["a"], "video": ["b"]},
                "mm_placeholders": {"image": [{"offset": 0, "length": 2}], "video": [{"offset": 1, "length": 1}]},
            },
            "overlap",
        ),
        (
            {
                "mm_hashes": {"image": ["a"] * (ITEMS_MAX + 1)},
                "mm_placeholders": {"image": [{"offset": at, "length": 1} for at in range(ITEMS_MAX + 1)]},
            },
            "items",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_features_that_do_not_fit_are_named(features: Any, named: str) -> None:
    with pytest.raises(InvalidValue, match=named) as caught:
        items_of(features)
    assert caught.value.field == "features"


def test_no_features_are_no_items() -> None:
    assert items_of({}) == items_of({"mm_hashes": None, "mm_placeholders": {}}) == ()


def test_items_in_too_many_blocks_are_refused() -> None:
    check_blocks((PromptItem(0, 2**31, "a"),), BLOCKS_MAX, 1)
    with pytest.raises(InvalidValue, match="blocks of 1 tokens"):
        check_blocks((PromptItem(0, 2**31, "a"),), BLOCKS_MAX + 1, 1)


def test_the_client_hashes_images_as_the_service_does() -> None:
    features = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    tokens = [1, 9, 9, 2, 5, 6]
    found = block_hashes(tokens, 2, features=features)
    assert found == seq_hashes_with((PromptItem(1, 2, "a"),), None, pack_tokens(tokens), 2)
    assert not set(found) & set(block_hashes(tokens, 2))
    with pytest.raises(ValueError, match="features"):
        block_hashes(tokens, 2, features={"mm_hashes": 1})
