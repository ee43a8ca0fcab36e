"""Reads SGLang's events, which are vLLM's with a few differences.

Hashes are signed. A parent of 0 means that the parent is unknown. Only in a list without a salt does it mean the root,
if the publisher has no block 0: llm-d's simulator writes such lists for every engine. A list has at most seven fields
of a store and two of a removal; further elements differ from those of vLLM. The salt is named in every store, in the
map's ``cache_salt``, or (0.5.18 and 0.5.19) in a map instead of the adapter's name. Tokens may be pairs; media are
those of HiCache.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial
from typing import Any, Final

from waymark.base.errors import Undecodable
from waymark.base.shown import shown
from waymark.domain.events import Cleared, EngineEvent, Removed, Stored, StoredReference, StoredWindow
from waymark.domain.media import IN_EVERY_ANSWER, UNNAMED
from waymark.domain.slices import Slices
from waymark.engines import vllm, wire
from waymark.engines.batches import Decoder
from waymark.engines.long import UNREADABLE, LongPayload
from waymark.engines.wire import Ceilings, Ignored, Rejected

STORED_FIELDS: Final = vllm.STORED_FIELDS[:7]
REMOVED_FIELDS: Final = vllm.REMOVED_FIELDS[:2]
FIELDS: Final = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}
_STATE: Final = "MAMBA"
_STATE_GROUP: Final = 1
_NAME: Final = 1 + vllm.STORED_FIELDS.index("lora_name")
_LIST_MAX: Final = _NAME + 2
"""In a list, ``component_types`` is at the index of the adapter's name or at the next one, so before this index."""


def decoder(*, seed: int, ceilings: Ceilings | None) -> Decoder:
    """Return a decoder of SGLang's batches."""
    return Decoder(
        partial(read_event, seed=seed),
        names=FIELDS,
        ceilings=ceilings,
        list_fields=(len(STORED_FIELDS), len(REMOVED_FIELDS)),
    )


def read_event(
    event: Any, *, seed: int, zero_of_list: vllm.Zero = "root"
) -> EngineEvent | tuple[EngineEvent, ...] | Ignored:
    """Read one event of a batch, a list or a map."""
    blocks = read_blocks(event, seed=seed, zero_of_list=zero_of_list)
    if isinstance(blocks, Ignored | Cleared):
        return blocks
    components = _components(event)
    return blocks if components is None else _of_components(blocks, *components)


def _components(event: Any) -> tuple[frozenset[str], bool] | None:
    """Return the components of an event, and whether these are all components of the blocks. Return None if it has
    none.
    """
    if isinstance(event, dict):
        component, several = event.get("component_type"), event.get("component_types")
    else:
        component, several = None, next((value for value in event[_NAME:_LIST_MAX] if isinstance(value, list)), None)
    if isinstance(component, str):
        return frozenset([component.upper()]), False
    if isinstance(several, list) and several and all(isinstance(value, str) for value in several):
        return frozenset(value.upper() for value in several), True
    return None


def _of_components(
    event: Stored | StoredReference | StoredWindow | Removed, components: frozenset[str], is_whole: bool
) -> tuple[EngineEvent, ...] | Ignored:
    """Read an event about components: full attention is the main group, and a state is a separate group.

    No event has the length of a sliding window, so such a component is skipped. With ``is_whole`` the event lists all
    components that the blocks now have. So a component that it does not name has left, and a block that the holder
    already has gets no further copy.
    """
    is_store = not isinstance(event, Removed)
    if is_whole and not isinstance(event, Removed):
        event = replace(event, is_reused=True)
    events: list[EngineEvent] = [event] if "FULL" in components else []
    hashes, medium = event.engine_hashes, event.medium
    if is_store and _STATE in components:
        events.append(StoredWindow(hashes, medium, _STATE_GROUP, window=1))
    elif _STATE in components or (is_whole and is_store):
        events.append(Removed(hashes, medium, _STATE_GROUP))
    return tuple(events) or Ignored.OTHER_GROUP


def read_blocks(event: Any, *, seed: int, zero_of_list: vllm.Zero) -> EngineEvent | Ignored:
    """Read an event without its components."""
    if isinstance(event, list) and event and isinstance(event[0], str) and event[0] in FIELDS:
        event = event[: 1 + len(FIELDS[event[0]])]
        if len(event) > _NAME and isinstance(event[_NAME], list):
            event = event[:_NAME]
    if isinstance(event, list) and len(event) > _NAME and event[0] == "BlockStored" and isinstance(event[_NAME], dict):
        event = {"type": event[0], **dict(zip(vllm.STORED_FIELDS, event[1:], strict=False))}
    if isinstance(event, dict) and isinstance(named := event.get("lora_name"), dict):
        salt = event.get("cache_salt") or named.get("cache_salt")
        event = event | {"lora_name": named.get("lora_name"), "cache_salt": salt}
    return vllm.read_event(event, seed=seed, zero_of_map="unknown", zero_of_list=zero_of_list)


# ---- records of a snapshot -------------------------------------------------------------------------

_TIERS: Final = dict(enumerate(IN_EVERY_ANSWER, 1))
"""The device, the memory of its machine, and storage."""
_FULL: Final = 1
"""The bit of ``component_mask`` for full attention."""
_HASHES_AT_ONCE: Final = 1024
_CEILINGS: Final = Ceilings(batch_events=2**20)
"""A single chunk may have all records of a snapshot."""


def read_records(payload: bytes) -> Slices[tuple[int, list[StoredReference]]]:
    """Return the number of records in a chunk, and the blocks that they name, as references.

    A record of version 1 has ``block_hashes``, all on the device; one of version 2 has ``block_hash``, ``tier`` and
    ``component_mask``. Raise Rejected if the chunk cannot be read as a whole.
    """
    by_medium: dict[str, list[int]] = {}
    stores: list[StoredReference] = []

    def read_record(record: Any) -> Slices[None]:
        for medium, block in _blocks_of(record):
            hashes = by_medium.setdefault(medium, [])
            hashes.append(block)
            if len(hashes) >= _HASHES_AT_ONCE:
                stores.append(_store_of(medium, by_medium.pop(medium)))
        yield from ()

    try:
        count = yield from LongPayload(payload, {}, _CEILINGS).records(read_record)
    except Undecodable as error:
        raise Rejected("bad_msgpack", f"a chunk of records is not msgpack, or is cut short: {error}") from error
    return count, stores + [_store_of(medium, hashes) for medium, hashes in by_medium.items()]


def _blocks_of(record: Any) -> list[tuple[str, int]]:
    """Return the medium and the hash of each block of a record that full attention has."""
    if not isinstance(record, dict):
        text = "not valid msgpack" if record is UNREADABLE else f"{shown(record)}, not a map"
        raise Rejected("bad_event", f"a record is {text}")
    if "block_hashes" in record:
        hashes = record["block_hashes"]
        hashes = hashes.tolist() if isinstance(hashes, array) else hashes  # long records have arrays
        return [(UNNAMED, engine_hash) for engine_hash in wire.hashes(hashes, "block_hashes")]
    tier, mask = record.get("tier", 1), record.get("component_mask", _FULL)
    medium = _TIERS.get(tier) if wire.is_u32(tier) else None
    if medium is None or not wire.is_u32(mask):
        raise Rejected("bad_event", "a record has a tier or a component_mask that is not known")
    return [(medium, wire.u64(record.get("block_hash"), "block_hash"))] if mask & _FULL else []


def _store_of(medium: str, hashes: list[int]) -> StoredReference:
    # Two records of one block mean one copy.
    return StoredReference(tuple(dict.fromkeys(hashes)), medium, is_reused=True)
