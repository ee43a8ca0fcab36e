"""vLLM's events: every field, every length of list, and the same as a map."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import examples
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Cleared, Event, Removed, Stored, StoredReference, StoredWindow
from waymark.domain.hashing import extra_digest
from waymark.engines import decoder, vllm

SEED = 1337


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def stored(**fields: object) -> dict[str, Any]:
    """Two root blocks of two tokens, as a map, but for ``fields``."""
    event = {"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None}
    return event | {"token_ids": [1, 2, 3, 4], "block_size": 2} | fields


def digest(*leftovers: object) -> int:
    return extra_digest(leftovers, seed=SEED)


# ---- shapes ----------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
u64s = st.integers(0, 2**64 - 1)
wire_hashes = u64s | st.integers(-(2**63), -1) | st.binary(min_size=1, max_size=33)


def number(wire_hash: int | bytes) -> int:
    return wire_hash % 2**64 if isinstance(wire_hash, int) else int.from_bytes(wire_hash[-8:], "big")


@st.composite
def stores(draw: st.DrawFn) -> list[Any]:
    """The eleven values of a store that this index reads, in the order of the list."""
    hashes = draw(st.lists(wire_hashes, min_size=1, max_size=5, unique_by=number))
    # A parent of 0 is another thing in a list than in a map.
    parents = st.none() | wire_hashes.filter(lambda each: each != 0 and number(each) not in map(number, hashes))
    images = st.tuples(st.text("0123456789abcdef", min_size=4, max_size=4), st.integers(-8, 8)).map(list)
    return [
        hashes,
        draw(parents),
        draw(st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=12)),
        draw(st.integers(0, 65536)),
        draw(st.none() | st.integers(1, 99)),
        draw(st.sampled_from([None, "GPU", "cpu", "DISK", "cxl"])),
        draw(st.none() | names),
        draw(st.none() | st.lists(st.none() | st.lists(images), min_size=len(hashes), max_size=len(hashes))),
        draw(st.none() | st.integers(0, 9)),
        draw(
            st.sampled_from([None, "full_attention", "mla_attention", "sink_full_attention", "mamba", "sliding_window"])
        ),
        draw(st.none() | st.integers(1, 4096)),
    ]


def expected(values: list[Any]) -> Event:
    hashes, parent, tokens, size, lora_id, medium, lora_name, extra_keys, group, kind, tokens_before = values
    extras = tuple(digest(*block) if block else None for block in extra_keys or ())
    engine_hashes, name = tuple(map(number, hashes)), (medium or "GPU").upper()
    has_extras = any(extra is not None for extra in extras)
    window = {"mamba": 1, "sliding_window": tokens_before and max(1, tokens_before - 1)}
    if kind in window:
        is_dense = not has_extras and len(tokens or ()) == size * len(hashes)
        return StoredWindow(engine_hashes, name, group, window[kind], size, is_dense)
    if not tokens:
        return StoredReference(engine_hashes, name, size, group, has_extras)
    return Stored(
        engine_hashes=engine_hashes,
        parent=None if parent is None else number(parent),
        tokens=packed(*tokens),
        block_size=size,
        medium=name,
        adapter=lora_name or lora_id,
        extras=extras if has_extras else None,
        group=group,
    )


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=stores(), data=st.data())
def test_lists_of_every_length_and_maps_mean_the_same(
    one: Callable[..., Event], values: list[Any], data: st.DataObject
) -> None:
    for length in (5, 6, 7, 8, 9, 10, 11, 12, 14):
        there = length - 1
        told = values[:there] + [None] * (len(values) - there)
        as_list = ["BlockStored", *values[:there], *[None] * (there - len(values))]
        as_map = {"type": "BlockStored", **dict(zip(vllm.STORED_FIELDS, told, strict=True))}
        without_nil = {name: value for name, value in as_map.items() if value is not None}
        shuffled = dict(data.draw(st.permutations(list(as_map.items()))))
        assert len(as_list) == length
        assert one(as_list) == one(as_map) == one(without_nil) == one(shuffled) == expected(told)


@pytest.mark.parametrize("event", [["BlockStored"], ["BlockStored", [1]], ["BlockStored", [1], None, [1, 2]]])
def test_a_list_without_the_required_fields_is_rejected(refusal: Callable[..., str], event: list[object]) -> None:
    assert refusal(event) in {"bad_hash", "bad_block_size"}


def test_removed_and_cleared_as_list_and_as_map(one: Callable[..., Event]) -> None:
    assert one(["BlockRemoved", [-1]]) == one({"type": "BlockRemoved", "block_hashes": [-1]})
    assert one(["BlockRemoved", [-1]]) == Removed((2**64 - 1,), "GPU")
    named = {"type": "BlockRemoved", "block_hashes": [7, b"\x08"], "medium": "CPU", "group_idx": 2}
    assert one(["BlockRemoved", [7, b"\x08"], "CPU", 2]) == one(named) == Removed((7, 8), "CPU", 2)
    assert one(["AllBlocksCleared"]) == one({"type": "AllBlocksCleared"}) == Cleared()


# ---- fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [stored(block_hashes=[]), ["BlockStored", [], 5, [], 0], ["BlockRemoved", []]])
def test_an_event_without_hashes_is_ignored(decode: Callable[..., Batch], event: object) -> None:
    batch = decode(event, ["AllBlocksCleared"])
    assert batch.ignored == {"empty": 1}
    assert batch.events == (Cleared(),)
    assert batch.rejected == {}


@pytest.mark.parametrize("locality", ["REMOTE", "remote", "Remote"])
def test_a_remote_event_is_ignored(decode: Callable[..., Batch], locality: str) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "locality": locality}
    batch = decode(stored(locality=locality), removed, stored(locality="LOCAL"), stored(locality=None))
    assert batch.ignored == {"remote_locality": 2}
    assert len(batch.events) == 2


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"block_hashes": None}, "bad_hash"),
        ({"block_hashes": 7}, "bad_hash"),
        ({"block_hashes": b"\0" * 16}, "bad_hash"),
        ({"block_hashes": [1, None]}, "bad_hash"),
        ({"block_hashes": [1, ""]}, "bad_hash"),
        ({"block_hashes": [1, b""]}, "bad_hash"),
        ({"block_hashes": [1, False]}, "bad_hash"),
        ({"parent_block_hash": "12"}, "bad_hash"),
        ({"parent_block_hash": False}, "bad_hash"),
        ({"parent_block_hash": 11}, "own_parent"),
        ({"parent_block_hash": 12}, "own_parent"),
        ({"block_hashes": [-1], "parent_block_hash": b"\xff" * 8}, "own_parent"),
        ({"token_ids": b"\0" * 16}, "bad_tokens"),
        ({"token_ids": {}}, "bad_tokens"),
        ({"token_ids": [1, 2, 3, True]}, "bad_tokens"),
        ({"token_ids": [1, 2, 3, 4.0]}, "bad_tokens"),
        ({"token_ids": [1, 2, 3, None]}, "bad_tokens"),
        ({"token_ids": [1, 2, 3, "4"]}, "bad_tokens"),
        ({"token_ids": [1, 2, 3, -1]}, "bad_tokens"),
        ({"token_ids": [1, 2, 3, 2**32]}, "bad_tokens"),
        ({"token_ids": [1, [2, 3]]}, "bad_tokens"),
        ({"token_ids": [[1, 2], 3]}, "bad_tokens"),
        ({"token_ids": [[1, 2], [2]]}, "bad_tokens"),
        ({"token_ids": [[1, 2], [2, -1]]}, "bad_tokens"),
        ({"token_ids": [[]]}, "bad_tokens"),
        ({"block_size": None}, "bad_block_size"),
        ({"block_size": -1}, "bad_block_size"),
        ({"block_size": 65537}, "bad_block_size"),
        ({"block_size": True}, "bad_block_size"),
        ({"block_size": 2.0}, "bad_block_size"),
        ({"lora_id": "7"}, "bad_lora"),
        ({"lora_id": True}, "bad_lora"),
        ({"lora_name": 7}, "bad_lora"),
        ({"lora_name": {"cache_salt": "s"}}, "bad_lora"),
        ({"cache_salt": 7}, "bad_salt"),
        ({"group_idx": "0"}, "bad_group"),
        ({"group_idx": -1}, "bad_group"),
        ({"group_idx": True}, "bad_group"),
        ({"kv_cache_spec_kind": 1}, "bad_group"),
        ({"extra_keys": []}, "bad_extra_keys"),
        ({"extra_keys": [None]}, "bad_extra_keys"),
        ({"extra_keys": [None] * 3}, "bad_extra_keys"),
        ({"extra_keys": [None, "salt"]}, "bad_extra_keys"),
        ({"extra_keys": {}}, "bad_extra_keys"),
        ({"extra_keys": [None, {}]}, "bad_extra_keys"),
        ({"block_mm_infos": [None]}, "bad_extra_keys"),
        ({"block_mm_infos": [None, 7]}, "bad_extra_keys"),
    ],
)
def test_a_store_that_does_not_fit_is_rejected(
    refusal: Callable[..., str], fields: dict[str, object], kind: str
) -> None:
    assert refusal(stored(**fields)) == kind


def test_no_sentence_tells_a_token_or_a_salt(decode: Callable[..., Batch]) -> None:
    secret = 3735928559
    batch = decode(
        stored(token_ids=[1, secret, -secret]),
        stored(token_ids=str(secret)),
        stored(token_ids=[[secret, secret], secret]),
        stored(cache_salt=[str(secret)]),
        stored(cache_salt=secret),
        stored(extra_keys=[None, str(secret)]),
        stored(extra_keys=str(secret)),
    )
    assert batch.rejected.total() == 7
    assert str(secret) not in " ".join(batch.samples.values())


@pytest.mark.parametrize("block_size", [0, 1, 65536])
def test_a_block_size_is_taken_as_told(one: Callable[..., Event], block_size: int) -> None:
    event = one(stored(block_size=block_size))
    assert isinstance(event, Stored)
    assert event.block_size == block_size


@pytest.mark.parametrize("token_ids", [None, []])
def test_a_store_without_tokens_is_a_placeholder(one: Callable[..., Event], token_ids: object) -> None:
    assert one(stored(token_ids=token_ids, block_size=0)) == StoredReference((11, 12), "GPU")
    event = stored(block_size=0)
    del event["token_ids"]
    assert one(event) == StoredReference((11, 12), "GPU")


def test_the_tokens_of_pairs_are_their_firsts(one: Callable[..., Event]) -> None:
    event = one(stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))
    assert isinstance(event, Stored)
    assert event.tokens == packed(1, 2, 3, 4)


def test_a_parent_of_zero_names_a_block_of_vllm(one: Callable[..., Event]) -> None:
    assert one(stored(parent_block_hash=0)) == Stored((11, 12), 0, packed(1, 2, 3, 4), 2, "GPU")


def test_in_a_list_a_parent_of_zero_may_be_the_root(one: Callable[..., Event]) -> None:
    """llm-d's simulator writes it so."""
    event = one(["BlockStored", [11, 12], 0, [1, 2, 3, 4], 2, None, "GPU", None, [["salt"], None]])
    assert isinstance(event, Stored)
    assert (event.parent, event.may_begin, event.salts) == (0, True, ("salt",))
    bytes_of_zero = one(["BlockStored", [11, 12], bytes(8), [1, 2, 3, 4], 2])
    assert isinstance(bytes_of_zero, Stored)
    assert (bytes_of_zero.parent, bytes_of_zero.may_begin) == (0, False)


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({"lora_name": "sql", "lora_id": 7}, "sql"),
        ({"lora_name": "sql", "lora_id": "nonsense"}, "sql"),
        ({"lora_name": "", "lora_id": 7}, 7),
        ({"lora_name": None, "lora_id": 7}, 7),
        ({"lora_name": "7"}, "7"),
        ({"lora_name": ""}, None),
        ({}, None),
    ],
)
def test_the_adapter_is_its_name_or_else_its_id(
    one: Callable[..., Event], fields: dict[str, object], adapter: str | int | None
) -> None:
    event = one(stored(**fields))
    assert isinstance(event, Stored)
    assert event.adapter == adapter
    assert type(event.adapter) is type(adapter)


@pytest.mark.parametrize(
    ("kind", "is_main"),
    [
        ("full_attention", True),
        ("mla_attention", True),
        ("sink_full_attention", True),
        (None, True),
        ("sliding_window", False),
        ("mamba", False),
        ("a_new_one", False),
    ],
)
def test_which_groups_are_main_attention(one: Callable[..., Event], kind: str | None, is_main: bool) -> None:
    event = one(stored(kv_cache_spec_kind=kind, group_idx=3))
    assert isinstance(event, Stored if is_main else StoredWindow)
    assert event.group == 3


@pytest.mark.parametrize(
    ("kind", "said", "window"),
    [
        ("sliding_window", 64, 63),
        ("sliding_window_mla", 1, 1),
        ("sliding_window", None, None),
        ("sliding_window", 0, None),
        ("sliding_window", "64", None),
        ("sliding_window", -1, None),
        ("mamba", None, 1),
        ("chunked_local_attention", None, None),
    ],
)
def test_what_a_boundary_needs_of_a_group(one: Callable[..., Event], kind: str, said: object, window: int) -> None:
    event = one(stored(kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=said, group_idx=3))
    assert isinstance(event, StoredWindow)
    assert event.window == window


# ---- extra keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "salts", "extras"),
    [
        pytest.param({"extra_keys": [None, None]}, (), None, id="nothing"),
        pytest.param({"extra_keys": [[], []]}, (), None, id="empty-lists"),
        pytest.param({"extra_keys": [["s"], None]}, ("s",), None, id="salt-in-the-first-block"),
        pytest.param({"extra_keys": [["dynamo-cache-salt:s"], None]}, ("s",), None, id="prefixed-salt"),
        pytest.param({"extra_keys": [[""], None]}, (), None, id="empty-salt"),
        pytest.param({"extra_keys": [["s"], ["s"]]}, ("s",), (None, digest("s")), id="not-in-the-second-block"),
        pytest.param(
            {"extra_keys": [["s"], None], "parent_block_hash": 5}, (), (digest("s"), None), id="not-under-a-parent"
        ),
        pytest.param({"extra_keys": [["img", "s"], None]}, ("s",), (digest("img"), None), id="image-before-salt"),
        pytest.param({"extra_keys": [["s", b"\1\2"], None]}, ("s",), (digest(b"\1\2"), None), id="embed-after-salt"),
        pytest.param(
            {"extra_keys": [["ad", "s"], ["ad"]], "lora_name": "ad"}, ("s",), None, id="adapter-of-every-block"
        ),
        pytest.param({"extra_keys": [["ad", "ad"], ["ad"]], "lora_name": "ad"}, ("ad",), None, id="adapter-only-once"),
        pytest.param(
            {"extra_keys": [None, ["ad", "ad"]], "lora_name": "ad"}, (), (None, digest("ad")), id="once-per-block"
        ),
        pytest.param({"cache_salt": "s"}, ("s",), None, id="named-salt"),
        pytest.param({"cache_salt": "s", "parent_block_hash": 5}, ("s",), None, id="named-salt-of-a-child"),
        pytest.param({"cache_salt": "dynamo-cache-salt:s"}, ("s",), None, id="named-salt-with-prefix"),
        pytest.param({"cache_salt": ""}, (), None, id="empty-named-salt"),
        pytest.param({"cache_salt": "s", "extra_keys": [["s"], None]}, ("s",), None, id="salt-in-both-places"),
        pytest.param(
            {"cache_salt": "s", "extra_keys": [["dynamo-cache-salt:s"], None]}, ("s",), None, id="both-one-prefixed"
        ),
        pytest.param(
            {"cache_salt": "s", "extra_keys": [["t"], ["s"]]},
            ("s",),
            (digest("t"), digest("s")),
            id="another-string-beside-a-named-salt",
        ),
        pytest.param(
            {"extra_keys": [None, [["img", 0], ["img2", 3]]]}, (), (None, digest(["img", 0], ["img2", 3])), id="images"
        ),
        pytest.param({"block_mm_infos": [None, None]}, (), None, id="no-image-infos"),
        pytest.param({"block_mm_infos": [None, [5]]}, (), (None, digest([5])), id="image-infos"),
        pytest.param(
            {"block_mm_infos": [{"h": 5}, None], "extra_keys": [["s", ["i", 0]], None]},
            ("s",),
            (digest(["i", 0], {"h": 5}), None),
            id="image-infos-after-extra-keys",
        ),
    ],
)
def test_salt_and_leftovers_of_extra_keys(
    one: Callable[..., Event], fields: dict[str, object], salts: tuple[str, ...], extras: tuple[int | None, ...] | None
) -> None:
    event = one(stored(**fields))
    assert isinstance(event, Stored)
    assert event.salts == salts
    assert event.extras == extras


def test_extra_keys_nested_as_deep_as_msgpack_reads_cost_no_sibling() -> None:
    whole = msgpack.packb([1.5, [stored(extra_keys=[None, ["deepest"]]), ["AllBlocksCleared"]]])
    batch = decoder(EngineKind.VLLM, seed=SEED)(whole.replace(b"\xa7deepest", b"\x91" * 1000 + b"\xc0"))
    assert batch.events[-1] == Cleared()
    assert len(batch.events) + batch.rejected["bad_extra_keys"] == 2


def test_extra_keys_that_msgpack_reads_but_cannot_write_cost_one_event(
    decode: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_deep(leftovers: object, *, seed: int) -> int:
        raise ValueError("recursion limit exceeded")

    # The depth that packb takes differs from release to release, and in some is less than unpackb's.
    monkeypatch.setattr(vllm, "extra_digest", too_deep)
    batch = decode(stored(extra_keys=[None, ["image"]]), ["AllBlocksCleared"])
    assert batch.rejected == {"bad_extra_keys": 1}
    assert batch.events == (Cleared(),)


def test_the_seed_reaches_the_digest_of_leftovers() -> None:
    event = stored(extra_keys=[None, [["img", 0]]])
    found = [vllm.read_event(event, seed=seed) for seed in (1, 2)]
    assert [store.extras for store in found if isinstance(store, Stored)] == [
        (None, extra_digest([["img", 0]], seed=1)),
        (None, extra_digest([["img", 0]], seed=2)),
    ]


@pytest.mark.parametrize(("length", "tells"), [(6, False), (8, False), (9, True), (12, True)])
def test_a_list_too_short_for_extra_keys_cannot_tell_salts(length: int, tells: bool) -> None:
    event = ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU", None, [None], 0, "full_attention", None][:length]
    (stored,) = decoder(EngineKind.VLLM, seed=1337)(msgpack.packb([1.0, [event], 0])).events
    assert isinstance(stored, Stored)
    assert stored.tells_salts is tells


# ---- units inside a physical block -----------------------------------------------------------------


def test_the_skipped_units_before_a_unit_are_in_its_physical_block(one: Callable[..., Event]) -> None:
    fields = {"skipped_parent_block_hash": b"\1" * 32, "skipped_token_ids": [1, 2, 3, 4], "skipped_extra_keys": [None]}
    unit = stored(block_hashes=[7], parent_block_hash=6, token_ids=[5, 6], block_size=2)
    found = one(unit | fields)
    assert isinstance(found, Stored)
    assert (found.parent, found.tokens, found.block_size) == (0x0101010101010101, packed(1, 2, 3, 4, 5, 6), 6)
    root = one(unit | {"skipped_parent_block_hash": None, "skipped_token_ids": [1, 2]})
    assert isinstance(root, Stored)
    assert (root.parent, root.block_size) == (None, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"skipped_token_ids": None, "skipped_parent_block_hash": None},
        {"skipped_token_ids": "many"},
        {"skipped_token_ids": [-1]},
        {"skipped_token_ids": [1, 2], "skipped_parent_block_hash": [9]},
        {"skipped_token_ids": [1, 2], "skipped_extra_keys": [["an image"]]},
        {"skipped_token_ids": [1, 2], "extra_keys": [["an image"]]},
    ],
    ids=["nil", "text", "negative", "no-hash", "skipped-image", "image"],
)
def test_skipped_units_that_are_not_valid_cost_no_event(one: Callable[..., Event], fields: dict[str, Any]) -> None:
    found = one(stored(block_hashes=[7], parent_block_hash=6, token_ids=[5, 6], block_size=2) | fields)
    assert isinstance(found, Stored)
    assert (found.parent, found.tokens, found.block_size) == (6, packed(5, 6), 2)
