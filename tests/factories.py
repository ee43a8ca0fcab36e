"""Builders of registrations, events and batches, for scenarios that read like the contract.

A block is a letter here: ``tokens("AB")`` has two blocks of four tokens, and all tokens of a block are the code of its
letter. ``keys("AB")`` has the keys by which the index finds these blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from waymark.base.shape import parse, plain
from waymark.contract.publishers import Publisher, WorkersAnswer
from waymark.domain.engines import EngineKind
from waymark.domain.events import (
    Batch,
    Cleared,
    Envelope,
    Event,
    RemovalEvent,
    Removed,
    RemovedIdentity,
    Stored,
    StoredIdentity,
    StoredReference,
    StoredWindow,
)
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.names import Registration
from waymark.domain.rows import DEPTHS, PIECE_BLOCKS

BLOCK_SIZE = 4
SEED = 1337


def tokens(blocks: str) -> bytes:
    """Return blocks of four tokens, one per letter. A digit at the end cuts the last block to this number of tokens:
    ``"AB2"``."""
    full, rest = (blocks[:-1], int(blocks[-1])) if blocks[-1:].isdigit() else (blocks, BLOCK_SIZE)
    packed = token_bytes([ord(letter) for letter in full for _ in range(BLOCK_SIZE)])
    return packed[: len(packed) - 4 * (BLOCK_SIZE - rest)]


def keys(blocks: str, *, ns: int = 0, extras: Sequence[int | None] | None = None) -> list[int]:
    """Return the key of each block of a prompt, from the first on."""
    return [seq_hash ^ ns for seq_hash in extend(None, tokens(blocks), BLOCK_SIZE, seed=SEED, extras=extras)]


def registration(kind: EngineKind = EngineKind.VLLM, **fields: Any) -> Registration:
    """Return a registration, by default of rank 0 of instance ``pod-1`` for model ``m``."""
    told: dict[str, Any] = {
        "kind": kind,
        "instance_id": "pod-1",
        "tenant_id": "default",
        "dp_rank": 0,
        "model_name": "m",
        "block_size": BLOCK_SIZE,
        "endpoint": "tcp://10.0.0.1:5557",
        "replay_endpoint": None,
        "lora_name": None,
        "additional_salt": None,
        "scope": "shared" if kind is EngineKind.MOONCAKE else "instance",
        "copies": "count" if kind in (EngineKind.VLLM, EngineKind.SGLANG) else "set",
        "sequence": "publisher",
    }
    return Registration(**(told | fields))


def publisher_row(instance_id: str = "a", **values: Any) -> Publisher:
    """Return a publisher of ``/workers``, by default one without problems."""
    absent = ("endpoint", "address", "metrics_url", "watermark", "lag_seconds", "known", "last_error", "worker")
    told: dict[str, Any] = dict.fromkeys(absent) | {
        **{"instance_id": instance_id, "tenant_id": "default", "dp_rank": 0, "model_name": "m", "type": "vLLM"},
        **{"block_size": BLOCK_SIZE, "scope": "instance", "role": "both", "weight": 1.0, "labels": {}},
        **{"adapters": [], "aliases": [], "source": "client", "status": "active", "gaps": 0, "restarts": 0},
        **{"unsalted_events": 0, "blocks": {}, "load": {"requests": 0, "tokens": 0}, "prefixes": {}, "replay": False},
        **{"copies": {"rule": "count", "why": "its type counts"}, "counters": {}},
    }
    return parse(Publisher, told | values)


def workers_answer(*publishers: Publisher, **values: Any) -> WorkersAnswer:
    """Return an answer of ``/workers`` with these publishers and one ingest worker."""
    worker = {"id": "worker-1", "streams": 3, "streams_max": None}
    told: dict[str, Any] = {"workers": [worker], "unreadable": [], "discovery": None}
    return parse(WorkersAnswer, told | {"publishers": plain(publishers)} | values)


def stored(hashes: Sequence[int], blocks: str = "", **fields: Any) -> Any:
    """Return a store on the GPU, at the root. Without ``blocks`` it is a placeholder, or has identities if it has an
    envelope."""
    told: dict[str, Any] = {"engine_hashes": tuple(hashes), "medium": "GPU"}
    if blocks:
        told |= {"parent": None, "tokens": tokens(blocks), "block_size": BLOCK_SIZE}
        return Stored(**(told | fields))
    return (
        StoredIdentity(**(told | {"parent": None} | fields))
        if "envelope" in fields
        else StoredReference(**(told | fields))
    )


def window_of(group: int | None, hashes: Sequence[int], blocks: str = "", **fields: Any) -> StoredWindow:
    """Return a store on the GPU of a KV-cache group other than main attention."""
    told: dict[str, Any] = {"medium": "GPU", "window": None, "block_size": BLOCK_SIZE if blocks else 0}
    return StoredWindow(tuple(hashes), group=group, **(told | {"is_dense": bool(blocks)} | fields))


def removed(*hashes: int, medium: str = "GPU", **fields: Any) -> RemovalEvent:
    """Return a removal; one with an envelope removes identities."""
    return RemovedIdentity(hashes, medium, **fields) if "envelope" in fields else Removed(hashes, medium, **fields)


def cleared(**fields: Any) -> Cleared:
    return Cleared(**fields)


def envelope(event_id: int, **fields: Any) -> Envelope:
    """Return the envelope of a standard event."""
    told: dict[str, Any] = {
        "backend_id": "pod-1",
        "tenant_id": "default",
        "model_name": None,
        "block_size": None,
        "dp_rank": None,
    }
    return Envelope(event_id=event_id, **(told | fields))


def batch(*events: Event, rank: int | None = None, ts: float | None = 1.0) -> Batch:
    return Batch(ts, events, rank)


def slots_of(block_keys: Iterable[int], depth: int) -> bytes:
    """Return the slots of consecutive blocks, of which the first is at ``depth``."""
    return b"".join(b"%016x%c" % (key, DEPTHS[at % PIECE_BLOCKS]) for at, key in enumerate(block_keys, depth))
