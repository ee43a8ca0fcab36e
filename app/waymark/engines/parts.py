"""Cuts a long event into parts that an engine could have published one after the other.

Later stages work event by event, so an event of many blocks is split before it is read. Each part has some of the
hashes, with their tokens and the facts about each block, and its parent is the last block of the part before.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Final

from waymark.engines.long import PER_BLOCK

PART_HASHES: Final = 2048


def hashes_of(event: Any, names: Mapping[str, tuple[str, ...]]) -> list[Any] | array[int]:
    """Return the unread hashes of an event; empty if it has none."""
    if isinstance(event, dict):
        value = event.get("seq_hashes" if "event_type" in event else "block_hashes")
    elif isinstance(event, list) and len(event) > 1 and isinstance(event[0], str) and event[0] in names:
        value = event[1 + names[event[0]].index("block_hashes")]
    else:
        value = None
    return _hashes(value)


def parts(event: Any, names: Mapping[str, tuple[str, ...]]) -> Iterator[Any]:
    """Yield the parts of an event with hashes, each in the event's own form."""
    if isinstance(event, dict):
        for part in _cut(event):
            yield part
        return
    fields = names[event[0]]
    named = dict(zip(fields, event[1:], strict=False))
    for part in _cut(named):
        yield [event[0], *(part[field] for field in fields[: len(event) - 1])]


def _cut(event: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    hashes_name = "seq_hashes" if "event_type" in event else "block_hashes"
    hashes, tokens = _hashes(event[hashes_name]), event.get("token_ids")
    count, width = len(hashes), 0
    if isinstance(tokens, list | array | bytes) and len(tokens):
        unit = 4 if isinstance(tokens, bytes) else 1  # bytes hold u32
        units = len(tokens) // unit
        size = event.get("block_size")
        size = size if type(size) is int and size > 0 else max(1, units // count)
        if units > count * size:  # sparse, and as such skipped
            count, tokens = 1, tokens[: (size + 1) * unit]
        elif units < count * size:  # the complete leading blocks count
            count = max(1, units // size)
        width = size * unit
    per_block = {name: event[name] for name in PER_BLOCK if isinstance(event.get(name), list)}
    # One that does not fit the hashes goes to the decoder unchanged, as one of no block.
    fitting = {name: value for name, value in per_block.items() if len(value) == len(hashes)}
    for start in range(0, count, PART_HASHES):
        end = min(start + PART_HASHES, count)
        part = event | {hashes_name: _plain(hashes[start:end])}
        if width:
            assert tokens is not None
            part["token_ids"] = _plain(tokens[start * width : end * width] if count > 1 else tokens)
        for name in per_block:
            part[name] = fitting[name][start:end] if name in fitting else []
        if start:
            _go_on(part, hashes[start - 1])
        yield part


def _hashes(value: Any) -> list[Any] | array[int]:
    """Return the hashes as a list; standard events may have them as little-endian bytes."""
    if isinstance(value, bytes) and len(value) % 8 == 0:
        packed = array("Q", value)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed
    return value if isinstance(value, list | array) else []


def _go_on(part: dict[Any, Any], parent: Any) -> None:
    """Make it one that goes on from a block: a salt and a place in the prompt belong to the first part."""
    if "event_type" in part:
        part |= {"parent_hash": parent, "base_block_idx": None}
        return
    part["parent_block_hash"] = parent
    if "cache_salt" in part:
        part["cache_salt"] = None
    if isinstance(named := part.get("lora_name"), dict):
        part["lora_name"] = {"lora_name": named.get("lora_name")}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value
