"""The keys of objects in a store: which block, which shard of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waymark.engines.mooncake import ObjectKey, parse_object_key

SHA = "0011223344556677" + "8899aabbccddeeff" * 3
LOW, FIRST = 0x8899AABBCCDDEEFF, 0x0011223344556677

VLLM = f"meta/llama@tp_rank:{{}}@pcp0@dcp0@pp_rank:0@group:0@{SHA}"


def parsed(key: str) -> ObjectKey:
    found = parse_object_key(key)
    assert found is not None, key
    return found


@pytest.mark.parametrize(
    ("key", "engine_hash"),
    [
        (VLLM.format(0), LOW),
        ("team-a@" + VLLM.format(0), LOW),
        (f"m@x@tp_rank:1@pcp0@dcp0@pp_rank:0@cache_role:k@cache_family:mla@{SHA[:16]}", FIRST),
        (f"m@pcp0@dcp0@head_or_tp_rank:3@pp_rank:0@{SHA}@17", LOW),
        (f"m@{SHA}@5", LOW),
        (f"{SHA}_0_k", FIRST),
        (f"tag_my_model_{SHA}_3_1_v", FIRST),
        (SHA, FIRST),
    ],
)
def test_a_key_names_the_hash_that_the_engine_publishes(key: str, engine_hash: int) -> None:
    assert parsed(key).engine_hash == engine_hash


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (VLLM.format(0), VLLM.format(1)),
        (VLLM.format(0), VLLM.format(0).replace("pp_rank:0", "pp_rank:1")),
        (VLLM.format(0), VLLM.format(0).replace("dcp0", "dcp1")),
        (f"m@head_or_tp_rank:0@{SHA}@1", f"m@head_or_tp_rank:0@{SHA}@2"),
        (f"m@{SHA}@0", f"m@{SHA}@1"),
        (f"{SHA}_0_k", f"{SHA}_0_v"),
        (f"{SHA}_0_k", f"{SHA}_1_k"),
    ],
)
def test_each_part_of_a_block_is_a_shard_of_its_own(one: str, other: str) -> None:
    assert parsed(one).object_shard != parsed(other).object_shard
    assert parsed(one).object_shard == parsed(one.replace(SHA, SHA[::-1])).object_shard, "whatever the block"


def test_model_and_prefix_are_no_part_of_a_shard() -> None:
    assert parsed("team-a@" + VLLM.format(0)).object_shard == parsed(VLLM.format(0)).object_shard


def test_a_group_of_a_hybrid_model_is_told() -> None:
    assert parsed(VLLM.format(0)).group == 0
    assert parsed(VLLM.format(0).replace("group:0", "group:2")).group == 2
    assert parsed(f"m@2@{SHA}@5").group == 2


@pytest.mark.parametrize(
    "key", ["", "@", "m@", "m@xyz", f"m@{SHA}@layer", f"m@{SHA[:8]}", SHA[:63], f"m@{SHA}" + "0" * 2000]
)
def test_other_keys_have_no_hash(key: str) -> None:
    assert parse_object_key(key) is None


@given(
    st.text(max_size=200) | st.lists(st.sampled_from(["@", "_", SHA, "tp_rank:1", "0", "é"]), max_size=12).map("".join)
)
def test_any_text_is_a_key_or_none(key: str) -> None:
    found = parse_object_key(key)
    assert found is None or (0 <= found.engine_hash < 2**64 and len(found.object_shard) == 16)
