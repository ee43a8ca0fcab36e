"""Mooncake: the standard envelope from its master, vLLM's or SGLang's events from engines in front of the pool.

The master's maps may carry ``type`` and ``block_hashes`` beside ``event_type`` and ``seq_hashes``, as aliases for
readers of engine events; where both are there the standard names count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from waymark.base.shown import shown
from waymark.domain.events import Event, Removed, Stored
from waymark.engines import sglang, standard, vllm, wire
from waymark.engines.batches import Decoder
from waymark.engines.ceilings import Ceilings
from waymark.engines.object_keys import parse_object_key
from waymark.engines.wire import Ignored, Rejected


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """A decoder of Mooncake's batches, and of bare events."""
    return Decoder(partial(read_event, seed=seed), names=vllm.FIELDS, bare=True, ceilings=ceilings)


def read_event(event: Any, *, seed: int) -> Event | Ignored:
    """One event of a batch, decided by whether it has an ``event_type``."""
    if isinstance(event, dict) and "event_type" in event:
        if event.get("object_key") is not None and not event.get("seq_hashes"):
            return _object(event)
        return standard.read_event(event)
    # SGLang's reading is the wider one: it takes whatever vLLM sends, and does not trust a parent of 0.
    return sglang.read_event(event, seed=seed, zero_of_list="unknown")


def _object(event: Mapping[Any, Any]) -> Event | Ignored:
    """An event that names an object of the store: its key has the hash that the engine gave the block."""
    kind, key = event["event_type"], event["object_key"]
    if kind not in ("stored", "removed"):
        return standard.read_event(event)
    if not isinstance(key, str):
        raise Rejected("bad_envelope", f"object_key is {shown(key)}, not text", field="object_key")
    envelope = standard.read_envelope(event)
    found = parse_object_key(key)
    if found is None:
        return Ignored.UNKNOWN_KEY
    if found.group:
        return Ignored.OTHER_GROUP
    envelope = replace(envelope, object_shard=found.object_shard)
    medium = wire.medium(event.get("medium"))
    if kind == "removed":
        return Removed((found.engine_hash,), medium, envelope=envelope)
    return Stored((found.engine_hash,), None, b"", 0, medium, envelope=envelope)
