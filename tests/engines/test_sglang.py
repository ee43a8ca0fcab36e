"""SGLang's events, where they differ from vLLM's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Event, Removed, Stored, StoredReference, StoredWindow

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
