"""Mooncake: its master speaks the standard envelope, engines in front of it their own events, in one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from waymark.domain.engines import EngineKind
from waymark.domain.events import (
    Batch,
    Cleared,
    Envelope,
    Event,
    Removed,
    RemovedIdentity,
    Stored,
    StoredIdentity,
    StoredReference,
)
from waymark.engines import decoder

MOONCAKE = EngineKind.MOONCAKE
ENVELOPE = Envelope(7, "node-1", "default", None, None, None)


def of_master(kind: str, alias: str, **fields: object) -> dict[str, Any]:
    """A map as the master writes it, with the aliases it adds for readers of engine events."""
    envelope = {"event_id": 7, "timestamp": 1739145600000, "event_type": kind, "type": alias, "model_name": None}
    envelope |= {"block_size": None, "additional_salt": None, "lora_name": None, "tenant_id": "default"}
    envelope |= {"backend_id": "node-1", "medium": "cpu", "dp_rank": None, "group_id": "7"}
    return envelope | fields


def test_a_batch_of_the_master() -> None:
    stored = of_master("stored", "BlockStored", seq_hashes=[2**64 - 1], block_hashes=[-1])
    stored |= {"base_block_idx": None, "parent_hash": None, "token_ids": None, "parent_block_hash": None}
    removed = of_master("removed", "BlockRemoved", seq_hashes=[5], block_hashes=[5], base_block_idx=None)
    cleared = of_master("cleared", "AllBlocksCleared", medium=None)
    batch = decoder(MOONCAKE, seed=1337)(msgpack.packb([1739145600000, [stored, removed, cleared], 0]))
    assert batch == Batch(
        1739145600.0,
        (
            StoredIdentity((2**64 - 1,), None, "CPU", ENVELOPE),
            RemovedIdentity((5,), "CPU", ENVELOPE),
            Cleared(envelope=ENVELOPE),
        ),
        0,
    )


def test_a_key_without_a_hash_is_ignored(decode: Callable[..., Batch]) -> None:
    batch = decode(of_master("stored", "BlockStored", seq_hashes=[], base_block_idx=0, parent_hash=None), kind=MOONCAKE)
    assert batch.ignored == {"empty": 1}


def test_events_of_engines_stand_beside_those_of_the_master(decode: Callable[..., Batch]) -> None:
    batch = decode(
        ["BlockStored", [1], None, [1, 2], 2, None, "CPU"],
        {"type": "BlockRemoved", "block_hashes": [-1], "medium": "disk"},
        of_master("cleared", "AllBlocksCleared"),
        ["BlockStoreEvent", "key", [["memory", "tcp://h:1"]], "llama", 2, "0x1", "", [1, 2]],
        kind=MOONCAKE,
    )
    assert [type(event) for event in batch.events] == [Stored, Removed, Cleared]
    assert [event.envelope is not None for event in batch.events if isinstance(event, Cleared)] == [True]
    assert batch.ignored == {"unknown_type": 1}


def test_a_parent_of_zero_is_not_known(refusal: Callable[..., str], one: Callable[..., Event]) -> None:
    assert refusal(["BlockStored", [1], 0, [1, 2], 2, None], MOONCAKE) == "parent_unknown"
    assert one(["BlockStored", [1], 0, [], 0, None], MOONCAKE) == StoredReference((1,), "GPU")
