"""SGLang's events, where they differ from vLLM's."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Event, Removed, Stored, StoredReference, StoredWindow
from waymark.domain.slices import finish
from waymark.engines import decoder
from waymark.engines.batches import PART_HASHES
from waymark.engines.long import WINDOW_BYTES
from waymark.engines.sglang import read_records
from waymark.engines.wire import Rejected

SGLANG = EngineKind.SGLANG
TOKENS = struct.pack("<4I", 1, 2, 3, 4)


def as_list(*more: object, parent: object = None, tokens: object = (1, 2, 3, 4)) -> list[object]:
    return ["BlockStored", [-11, 12], parent, tokens, 2, *more]


def as_map(**fields: object) -> dict[str, object]:
    event = {"type": "BlockStored", "block_hashes": [-11, 12], "parent_block_hash": None}
    return event | {"token_ids": [1, 2, 3, 4], "block_size": 2} | fields


@pytest.mark.parametrize(
    ("event", "told"),
    [
        pytest.param(as_list(None), {}, id="six-elements"),
        pytest.param(as_list(None, "CPU"), {"medium": "CPU"}, id="seven-elements"),
        pytest.param(as_list(None, "GPU", None), {}, id="eight-elements"),
        pytest.param(as_list(None, "GPU", "ad"), {"adapter": "ad"}, id="adapter-as-eighth"),
        pytest.param(as_list(None, "GPU", {"cache_salt": "s"}), {"salts": ("s",)}, id="salt-as-eighth"),
        pytest.param(as_list(None, "GPU", {"cache_salt": None}), {}, id="no-salt-as-eighth"),
        pytest.param(as_list(None, "GPU", {"cache_salt": ""}), {}, id="empty-salt-as-eighth"),
        pytest.param(as_list(None, "GPU", {}), {}, id="empty-map-as-eighth"),
        pytest.param(as_list(7, "GPU", {"cache_salt": "s"}), {"adapter": 7, "salts": ("s",)}, id="id-and-salt"),
        pytest.param(as_map(cache_salt="s"), {"salts": ("s",)}, id="salt-by-name"),
        pytest.param(as_map(cache_salt="s", lora_name={"cache_salt": "t"}), {"salts": ("s",)}, id="name-comes-first"),
        pytest.param(as_map(cache_salt="s", lora_name="ad"), {"salts": ("s",), "adapter": "ad"}, id="map-with-both"),
        pytest.param(as_map(parent_block_hash=-5), {"parent": 2**64 - 5}, id="signed-parent"),
        pytest.param(as_map(medium="EXTERNAL"), {"medium": "DISK"}, id="storage-of-hicache"),
        pytest.param(as_map(medium="CPU_PINNED"), {"medium": "CPU"}, id="host-of-hicache"),
    ],
)
def test_shapes_of_a_store(one: Callable[..., Event], event: object, told: dict[str, object]) -> None:
    plain: dict[str, object] = {"parent": None, "tokens": TOKENS, "block_size": 2, "medium": "GPU"}
    assert one(event, SGLANG) == Stored(engine_hashes=(2**64 - 11, 12), **(plain | told))  # type: ignore[arg-type]


def test_the_components_of_a_long_list_are_those_of_all_its_parts() -> None:
    """Else blocks of a state would count as blocks of full attention."""
    event = ["BlockStored", [*range(1, 2 * PART_HASHES)], None, [], 1, None, "GPU", None, ["mamba"]]
    batch = decoder(SGLANG, seed=0)(msgpack.packb([1.0, [event]]))
    assert [type(each) for each in batch.events] == [StoredWindow, StoredWindow]


@pytest.mark.parametrize("pairs", [[[1, 2], [2, 3], [3, 4], [4, 5]]])
def test_pairs_as_list_and_as_map(one: Callable[..., Event], pairs: list[list[int]]) -> None:
    from_list = one(as_list(None, "GPU", tokens=pairs), SGLANG)
    assert from_list == one(as_map(token_ids=pairs), SGLANG)
    assert isinstance(from_list, Stored)
    assert from_list.tokens == TOKENS


def test_a_parent_of_zero_is_not_known(refusal: Callable[..., str]) -> None:
    assert refusal(as_map(parent_block_hash=0), SGLANG) == "parent_unknown"
    assert refusal(as_list(None, "GPU", {"cache_salt": "s"}, parent=0), SGLANG) == "parent_unknown"


def test_a_parent_of_zero_in_a_list_is_the_root_unless_it_names_a_block(one: Callable[..., Event]) -> None:
    """llm-d's simulator writes such lists, whatever engine it stands for."""
    event = one(as_list(None, "GPU", parent=0), SGLANG)
    assert isinstance(event, Stored)
    assert (event.parent, event.may_begin) == (0, True)


def test_a_placeholder_needs_no_parent(one: Callable[..., Event]) -> None:
    placeholder = as_map(parent_block_hash=0, token_ids=[], block_size=0)
    assert one(placeholder, SGLANG) == StoredReference((2**64 - 11, 12), "GPU")
    keyed = one(placeholder | {"extra_keys": [["name"], None]}, SGLANG)
    assert keyed == StoredReference((2**64 - 11, 12), "GPU", is_salted=True)


def test_signed_hashes_of_a_removal(one: Callable[..., Event]) -> None:
    assert one(["BlockRemoved", [-1, 2], "CPU"], SGLANG) == Removed((2**64 - 1, 2), "CPU")


def test_what_stands_for_the_name_must_be_a_name_or_a_map(decode: Callable[..., Batch]) -> None:
    batch = decode(as_list(None, "GPU", 5), as_list(None, "GPU", {"cache_salt": 5}), kind=SGLANG)
    assert batch.rejected == {"bad_lora": 1, "bad_salt": 1}


# ---- components of hybrid models -------------------------------------------------------------------

MAIN = Stored((2**64 - 11, 12), None, TOKENS, 2, "GPU")
AGAIN = replace(MAIN, is_reused=True)
STATE = StoredWindow((2**64 - 11, 12), "GPU", 1, window=1)
NO_STATE = Removed((2**64 - 11, 12), "GPU", 1)
GONE = {"type": "BlockRemoved", "block_hashes": [-11, 12], "medium": "GPU"}


@pytest.mark.parametrize(
    ("event", "events"),
    [
        (as_map(component_types=["FULL", "SWA"]), (AGAIN, NO_STATE)),
        (as_map(component_types=["full", "mamba"]), (AGAIN, STATE)),
        (as_list(None, "GPU", None, ["FULL", "MAMBA"]), (AGAIN, STATE)),
        (as_list(None, "GPU", ["FULL", "MAMBA"]), (AGAIN, STATE)),
        (as_list(None, "GPU", [7]), (MAIN,)),
        (as_map(component_type="FULL"), (MAIN,)),
        (as_map(component_type="MAMBA"), (STATE,)),
        (GONE | {"component_type": "FULL"}, (Removed((2**64 - 11, 12), "GPU"),)),
        (GONE | {"component_type": "MAMBA"}, (NO_STATE,)),
        (as_map(component_types=None), (MAIN,)),
        (as_map(component_types="FULL"), (MAIN,)),
        (as_map(component_types=[1]), (MAIN,)),
        (as_map(component_type=7), (MAIN,)),
        (as_list(None, "GPU", None, "evict"), (MAIN,)),
    ],
    ids=lambda value: None,
)
def test_components_are_groups(decode: Callable[..., Batch], event: object, events: tuple[Event, ...]) -> None:
    batch = decode(event, kind=SGLANG)
    assert tuple(batch.events) == events
    assert (batch.rejected, batch.ignored) == ({}, {})


def test_a_window_of_unknown_length_counts_for_nothing(decode: Callable[..., Batch]) -> None:
    for event in (as_map(component_type="SWA"), GONE | {"component_type": "SWA"}):
        batch = decode(event, kind=SGLANG)
        assert (tuple(batch.events), batch.ignored, batch.rejected) == ((), {"other_group": 1}, {})


# ---- records of a snapshot -------------------------------------------------------------------------

RECORDS: list[dict[str, Any]] = [
    {"block_hashes": [-1, 5], "parent": None},
    {"block_hash": 7, "tier": 1, "component_mask": 3},
    {"block_hash": b"\1" * 32, "tier": 2},
    {"block_hash": 9, "component_mask": 2},
    {"block_hashes": [*range(2**40, 2**40 + 20_000)]},
]


@pytest.mark.parametrize(
    "chunk",
    [RECORDS, {"records": RECORDS}, {"version": 2, "of": "x" * 2 * WINDOW_BYTES, "records": RECORDS, "more": [1]}],
    ids=["list", "map", "map-with-more"],
)
def test_the_blocks_of_records_are_those_that_full_attention_has(chunk: object) -> None:
    count, stores = finish(read_records(msgpack.packb(chunk)))
    assert count == len(RECORDS)
    found: dict[str, list[int]] = {}
    for store in stores:
        found.setdefault(store.medium, []).extend(store.engine_hashes)
    on_device = [2**64 - 1, 5, 7, *range(2**40, 2**40 + 20_000)]
    assert found == {"GPU": on_device, "CPU": [int.from_bytes(b"\1" * 8, "big")]}


WHOLE = msgpack.packb(RECORDS)


@pytest.mark.parametrize(
    "chunk",
    [
        *(WHOLE[:end] for end in (0, 1, 9, len(WHOLE) // 2, len(WHOLE) - 1)),
        msgpack.packb([*RECORDS, 7]),
        msgpack.packb([{"block_hash": 1, "tier": [1]}]),
        msgpack.packb([{"block_hash": 1, "tier": 4}]),
        msgpack.packb([{"block_hash": 1, "component_mask": -1}]),
        msgpack.packb([{"block_hashes": [1, 1]}]),
        msgpack.packb([{"block_hashes": 7}]),
        msgpack.packb({"records": {"block_hash": 1}}),
        msgpack.packb({"others": RECORDS}),
        msgpack.packb({}),
        msgpack.packb(7),
        b"\x91\x81\xaablock_hash\xa1\xff",
        b"\x91\xc1",
        b"\xdd\xff\xff\xff\xff\x80",
    ],
)
def test_a_chunk_that_cannot_be_read_whole_is_rejected(chunk: bytes) -> None:
    with pytest.raises(Rejected):
        finish(read_records(chunk))


def test_what_a_record_has_besides_its_blocks_takes_no_memory() -> None:
    chunk = msgpack.packb([{"block_hash": 1, "more": [[]] * 400_000}])
    tracemalloc.start()
    try:
        count, (store,) = finish(read_records(chunk))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (count, store.engine_hashes) == (1, (1,))
    assert most < 16 * 2**20  # all of it would be 26 MB
