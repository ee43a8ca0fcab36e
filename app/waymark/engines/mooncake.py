"""Mooncake: the standard envelope from its master, vLLM's or SGLang's events from engines in front of the pool.

The master's maps may carry ``type`` and ``block_hashes`` besides ``event_type`` and ``seq_hashes``, as aliases for
readers of engine events. If both are present, the standard names count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from waymark.base.shown import shown
from waymark.domain.events import Event, RemovedObject, StoredObject
from waymark.engines import sglang, standard, vllm, wire
from waymark.engines.batches import Decoder
from waymark.engines.wire import Ceilings, Ignored, Rejected


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """Return a decoder of Mooncake's batches, and of bare events."""
    return Decoder(partial(read_event, seed=seed), names=vllm.FIELDS, bare=True, ceilings=ceilings)


def read_event(event: Any, *, seed: int) -> Event | Ignored:
    """Read one event of a batch; it is a standard event if it has an ``event_type``."""
    if isinstance(event, dict) and "event_type" in event:
        if event.get("object_key") is not None and not event.get("seq_hashes"):
            return _object(event)
        return standard.read_event(event)
    # SGLang's reader also accepts everything that vLLM sends. It takes a parent of 0 for an unknown one.
    return sglang.read_blocks(event, seed=seed, zero_of_list="unknown")


def _object(event: Mapping[Any, Any]) -> Event | Ignored:
    """Read an event that names an object of the store. The object's key contains the engine's hash of the block."""
    kind, key = event["event_type"], event["object_key"]
    if kind not in ("stored", "removed"):
        return standard.read_event(event)
    if not isinstance(key, str):
        raise Rejected("bad_envelope", f"object_key is {shown(key)}, not text", field="object_key")
    envelope = standard.read_envelope(event, has_names=False)
    object_key = parse_object_key(key)
    if object_key is None:
        return Ignored.UNKNOWN_KEY
    if object_key.group:
        return Ignored.OTHER_GROUP
    event_class = RemovedObject if kind == "removed" else StoredObject
    medium = wire.medium(event.get("medium"))
    return event_class((object_key.engine_hash,), object_key.object_shard, medium, envelope)


# The keys under which engines put blocks into an object store. Each names an engine hash, and an object shard.
#
# An engine that computes a block on several devices puts it as several objects. The block is complete when all of its
# object shards are stored.


#: No key of these forms is longer.
_KEY_MAX: Final = 1024
_HEX: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{16,64})", re.ASCII)
_SGLANG: Final = re.compile(r"(?:.*_)?([0-9a-fA-F]{64})(?:_(.*))?", re.ASCII | re.DOTALL)
_LAST: Final = re.compile(r"[0-9]{1,6}", re.ASCII)
_GROUP: Final = re.compile(r"group:?([0-9]{1,6})", re.ASCII)
_SHARD: Final = re.compile(r"(?:[a-z_]*rank|cache_role|cache_family):|pcp[0-9]|dcp[0-9]", re.ASCII)


class ObjectKey(NamedTuple):
    """The parts of an object's key."""

    engine_hash: int
    """The engine hash of the block in the engine's own events."""
    object_shard: str
    """16 hex digits that stand for the part of the block: ranks, layer, keys or values."""
    group: int
    """The KV-cache group of a hybrid model; 0 if the key does not name one."""


def parse_object_key(key: str) -> ObjectKey | None:
    """Parse a key. Return None for an unknown form.

    - vLLM: ``[<prefix>@]<model>@tp_rank:0@pcp0@dcp0@pp_rank:0[@group:0][@cache_role:..][@cache_family:..]@<hex>``
    - vLLM-Ascend: ``<model>@..@head_or_tp_rank:0..@<hex>[@<layer>]``, or ``<model>@[<group>@]<hex>@<rank>``
    - SGLang: ``[<namespace>_]<64 hex>[_<suffix>]``

    vLLM's events name the low 64 bits of a hash, SGLang's the first 64.
    """
    if len(key) > _KEY_MAX:
        return None
    return _parse_vllm_key(key.split("@")) if "@" in key else _parse_sglang_key(key)


def _parse_vllm_key(fields: list[str]) -> ObjectKey | None:
    # A model may have an @ in its name, so the fields are read from the end.
    last = len(fields) - 1
    for index in (last, last - 1):
        match = _HEX.fullmatch(fields[index]) if index > 0 else None
        if match is None or (index < last and not _LAST.fullmatch(fields[last])):
            continue
        shard = [field for field in fields[1:index] if _SHARD.match(field)] + fields[index + 1 :]
        groups = [int(group[1]) for field in fields[1:index] if (group := _GROUP.fullmatch(field))]
        if index < last and not groups and index > 1 and _LAST.fullmatch(fields[index - 1]):
            groups = [int(fields[index - 1])]
        return ObjectKey(int(match[1], 16) & (2**64 - 1), _digest("@".join(shard)), groups[-1] if groups else 0)
    return None


def _parse_sglang_key(key: str) -> ObjectKey | None:
    match = _SGLANG.fullmatch(key)
    return None if match is None else ObjectKey(int(match[1][:16], 16), _digest(match[2] or ""), 0)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
