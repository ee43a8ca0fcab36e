"""A reference in plain Python for the C function that reads the msgpack of a batch: which events are plain, and their
fields."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack

from waymark.domain.events import Cleared, Removed, Stored, StoredReference, StoredWindow

STORED = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
STORED += ["extra_keys", "group_idx", "kv_cache_spec_kind"]
REMOVED = ["block_hashes", "medium", "group_idx"]
OF_MAPS = ["cache_salt", "block_mm_infos", "locality", "origin", "remaining_copy_counts", "type"]
OF_MAPS += ["kv_cache_spec_sliding_window"]
MAIN = ["full_attention", "mla_attention", "sink_full_attention"]
HASHES_MAX, DEPTH_MAX, FORMS_MAX = 2048, 16, 16
#: The types of the events that ``read_batch`` returns, and the object for a clear.
EVENT_TYPES: tuple[type, type, type, type, object] = (Stored, StoredReference, StoredWindow, Removed, Cleared())
#: Head byte of msgpack -> the number of bytes of the number after it.
WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2}
WIDTHS |= {0xD2: 4, 0xD3: 8, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


class NotPlain(Exception):
    """The C module does not read this value, event or batch, and leaves it to Python."""


class Text(bytes):
    """A text as bytes, which may not be valid UTF-8."""


class Pairs(list[Any]):
    """A map, as a list of its pairs of key and value."""


def _value(payload: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
    """Return the value at an offset, and the offset of its end."""
    if at >= len(payload):
        raise NotPlain
    head = payload[at]
    at += 1
    if head < 0x80 or head >= 0xE0:
        return head if head < 0x80 else head - 256, at
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], at
    if head < 0xC0:
        number = head & (0x0F if head < 0xA0 else 0x1F)
    else:
        width = WIDTHS.get(head)
        if width is None or at + width > len(payload):
            raise NotPlain
        raw = payload[at : at + width]
        at += width
        if head in (0xCA, 0xCB):
            return struct.unpack(">f" if width == 4 else ">d", raw)[0], at
        if 0xCC <= head <= 0xD3:
            return int.from_bytes(raw, "big", signed=head >= 0xD0), at
        number = int.from_bytes(raw, "big")
    if 0xA0 <= head < 0xC0 or 0xD9 <= head <= 0xDB or 0xC4 <= head <= 0xC6:
        if at + number > len(payload):
            raise NotPlain
        span = payload[at : at + number]
        return (span if 0xC4 <= head <= 0xC6 else Text(span)), at + number
    is_map = head < 0x90 or head >= 0xDE
    count = 2 * number if is_map else number
    if depth == DEPTH_MAX or count > len(payload) - at:
        raise NotPlain
    items: list[Any] = Pairs() if is_map else []
    for _ in range(count):
        item, at = _value(payload, at, depth + 1)
        items.append(item)
    return items, at


def _require(condition: object) -> None:
    if not condition:
        raise NotPlain


def _simple(value: object) -> None:
    _require(not isinstance(value, list) and not (isinstance(value, Text) and not value.isascii()))


def _text(value: object) -> str | None:
    _require(value is None or (isinstance(value, Text) and value.isascii()))
    return None if value is None else bytes(value).decode()  # type: ignore[call-overload]


def _integer(value: object, most: int) -> int:
    _require(type(value) is int and 0 <= value <= most)
    assert isinstance(value, int)
    return value


def _hash(value: object) -> int:
    if type(value) is int:
        return value % 2**64
    _require(type(value) is bytes and value)
    assert isinstance(value, bytes)
    return int.from_bytes(value[-8:], "big")


def _hashes(value: object) -> tuple[int, ...]:
    _require(type(value) is list and 0 < len(value) <= HASHES_MAX)
    assert isinstance(value, list)
    found = tuple(map(_hash, value))
    _require(len(set(found)) == len(found))
    return found


def _fields(event: list[Any], list_fields: tuple[int, int]) -> tuple[dict[str, Any], int]:
    """Return the fields of an event by name, including its tag, and the number of elements of its list; 0 if it is a
    map."""
    if not isinstance(event, Pairs):
        _require(event)
        is_removal = event[0] == b"BlockRemoved"
        fields = REMOVED if is_removal else STORED
        for value in event[11:]:
            _simple(value)
        if event[0] == b"BlockStored" or (is_removal and list_fields[1] < len(REMOVED)):
            for value in event[1 + list_fields[is_removal] :]:
                _simple(value)
            event = event[: 1 + list_fields[is_removal]]
        return {"type": event[0]} | dict(zip([*fields, *range(20)], event[1:11], strict=False)), len(event)
    named: dict[str, Any] = {}
    for name, value in zip(event[::2], event[1::2], strict=True):
        _require(isinstance(name, Text))
        if name.decode(errors="replace") in [*STORED, *OF_MAPS]:
            _require(name.decode() not in named)
            named[name.decode()] = value
        else:
            _require(name.isascii())
            _simple(value)
    return named, 0


def _event(
    event: object,
    stored: Callable[..., Any],
    reference: Callable[..., Any],
    window: Callable[..., Any],
    removed: Callable[..., Any],
    cleared: object,
    medium: Any,
    list_fields: tuple[int, int],
) -> object:
    _require(isinstance(event, list))
    assert isinstance(event, list)
    named, elements = _fields(event, list_fields)
    tag = named.get("type")
    _require(isinstance(tag, Text))
    _simple(named.get("kv_cache_spec_sliding_window"))
    _require(all(named.get(field) is None for field in OF_MAPS[:2]))
    locality, origin, counts = (named.get(field) for field in OF_MAPS[2:5])
    _require(locality is None or (isinstance(locality, Text) and locality == b"LOCAL"))
    if tag == b"AllBlocksCleared":
        _require(len(event) == (2 if isinstance(event, Pairs) else 1))
        return cleared
    _require(tag in (b"BlockStored", b"BlockRemoved"))
    hashes = _hashes(named.get("block_hashes"))
    if tag == b"BlockRemoved":
        told = [*REMOVED, "locality", "remaining_copy_counts", "type", "kv_cache_spec_sliding_window"]
        _require(all(value is None for name, value in named.items() if name not in told))
        if counts is not None:
            _require(type(counts) is list and len(counts) == len(hashes))
            _require(all(type(each) is int and each == 0 for each in counts))
    else:
        _require(counts is None)
        _require(origin is None or (isinstance(origin, Text) and origin in (b"NEW", b"REUSED")))
        above = named.get("parent_block_hash")
        _require(not (type(above) is int and above == 0))
        parent = None if above is None else _hash(above)
        _require(parent not in hashes)
        tokens = [] if named.get("token_ids") is None else named["token_ids"]
        _require(type(tokens) is list)
        tokens = [_integer(token, 2**32 - 1) for token in tokens]
        size = _integer(named.get("block_size"), 65536)
    name = medium(_text(named.get("medium")))
    _require(name is not None)
    if tag == b"BlockRemoved":
        group = named.get("group_idx")
        group = None if group is None else _integer(group, 2**32 - 1)
        return removed(hashes, name, group, copies_left=None if counts is None else (0,) * len(hashes))
    adapter: str | int | None = _text(named.get("lora_name"))
    lora_id = named.get("lora_id")
    if adapter:
        _simple(lora_id)
    else:
        adapter = None if lora_id is None else _integer(lora_id, 2**63 - 1)
    group, attention = named.get("group_idx"), _text(named.get("kv_cache_spec_kind"))
    _require(attention is None or attention in MAIN or not elements)
    keys = named.get("extra_keys")
    if keys is not None:
        _require(type(keys) is list and len(keys) == len(hashes))
        plain = [Text(adapter.encode())] if isinstance(adapter, str) else None
        _require(all(each is None or (type(each) is list and each == plain and _is_text(each[0])) for each in keys))
    group, is_reused = (
        None if group is None else _integer(group, 2**32 - 1),
        None if origin is None else origin == b"REUSED",
    )
    if attention is not None and attention not in MAIN:
        is_dense = len(tokens) == size * len(hashes)
        span = _window(attention, named.get("kv_cache_spec_sliding_window"))
        return window(hashes, name, group, span, size, is_dense, is_reused=is_reused)
    if not tokens:
        return reference(engine_hashes=hashes, medium=name, block_size=size, group=group, is_reused=is_reused)
    return stored(
        engine_hashes=hashes,
        parent=parent,
        tokens=struct.pack(f"<{len(tokens)}I", *tokens),
        block_size=size,
        medium=name,
        adapter=adapter,
        group=group,
        tells_salts=not elements or elements >= 9,
        is_reused=is_reused,
    )


def _window(attention: str, tokens: object) -> int | None:
    if attention == "mamba":
        return 1
    if attention in ("sliding_window", "sliding_window_mla") and type(tokens) is int and 0 < tokens < 2**32:
        return max(1, tokens - 1)
    return None


def keeping(events: list[Any]) -> str:
    """Return how the C module keeps events: ``alike``, ``mixed``, or ``apart``."""
    forms = {}
    for each in events:
        if isinstance(each, Stored) and len(each.tokens) != 4 * each.block_size * len(each.engine_hashes):
            return "apart"
        if not isinstance(each, Stored | StoredReference | StoredWindow | Removed):
            return "apart"
        without: dict[str, Any] = {"engine_hashes": ()}
        if isinstance(each, Stored):
            without |= {"tokens": b"", "parent": None}
        elif isinstance(each, Removed):
            without |= {"copies_left": each.copies_left and ()}
        forms[replace(each, **without), getattr(each, "tells_salts", None)] = type(each)
    kinds = list(forms.values())
    if not forms or len(forms) > FORMS_MAX:
        return "apart"
    is_alike = set(kinds) <= {Stored, Removed} and len(kinds) == len(set(kinds))
    return "alike" if is_alike else "mixed"


def _is_text(value: object) -> bool:
    return isinstance(value, Text)


def _number(value: object) -> object:
    _require(value is None or (type(value) is float and value == value) or (type(value) is int and value >= 0))
    return value


def read_batch(
    payload: bytes,
    events_max: int,
    stored: Callable[..., Any],
    reference: Callable[..., Any],
    window: Callable[..., Any],
    removed: Callable[..., Any],
    cleared: object,
    medium: Any,
    stored_fields: int,
    removed_fields: int,
) -> object:
    if not isinstance(payload, bytes):
        raise TypeError
    if not 0 <= events_max < 2**63:
        raise OverflowError
    if not (1 <= stored_fields <= len(STORED) and 1 <= removed_fields <= len(REMOVED)):
        raise ValueError
    try:
        root, end = _value(payload, 0, -2)
        _require(type(root) is list and 2 <= len(root) <= 8 and end == len(payload))
        ts, events, rank, publisher = [*root, None, None][:4]
        for value in root[3:]:
            _simple(value)
        _require(type(events) is list and len(events) <= events_max)
        found: list[Any] = []
        others = 0
        at = _start_of_events(payload)
        for _ in events:
            start = at
            event, at = _value(payload, at)
            try:
                found.append(
                    _event(event, stored, reference, window, removed, cleared, medium, (stored_fields, removed_fields))
                )
            except NotPlain:
                found.append((start, at))
                others += 1
        is_id = type(publisher) is bytes and len(publisher) == 16
        return _number(ts), found, _number(rank), publisher if is_id else None, others, keeping(found) == "mixed"
    except NotPlain:
        return None


def _start_of_events(payload: bytes) -> int:
    """Return the offset after the heads of the batch and of its list."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(payload)
    unpacker.read_array_header()
    unpacker.skip()
    unpacker.read_array_header()
    return int(unpacker.tell())


def _stored(**fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [2**63, 2], "parent_block_hash": 3, "token_ids": [1, 2, 300, 70000]}
    return event | {"block_size": 2, "medium": "GPU"} | fields


EVENTS: list[Any] = [
    _stored(),
    _stored(block_hashes=[-1, b"\1", b"\2" * 32, -(2**63)], parent_block_hash=b"\3" * 9, medium=None),
    _stored(lora_id=7, extra_keys=[None, None], group_idx=300, kv_cache_spec_kind="mamba", more=1.5),
    _stored(lora_name="adapter", lora_id=-1, extra_keys=[["adapter"], None], token_ids=None, block_size=0),
    _stored(block_hashes=list(range(4, 90)), token_ids=[]),
    _stored(cache_salt="s", locality="REMOTE", block_mm_infos=[None, {"mm": 1}]),
    ["BlockStored", [1, 2], None, [1, 2], 1, None, "CPU"],
    ["BlockStored", [1], 2, [1], 1, None, "GPU", "a", [["a"]], 1, "mla_attention", 128],
    {"type": "BlockRemoved", "block_hashes": [1, -2, b"\3"], "medium": "CPU", "group_idx": 1},
    {"type": "BlockRemoved", "block_hashes": [1, 2], "remaining_copy_counts": [0, 0], "locality": "LOCAL"},
    _stored(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128, origin="NEW"),
    _stored(group_idx=2, kv_cache_spec_kind="sliding_window_mla", kv_cache_spec_sliding_window=1, token_ids=None),
    _stored(locality="LOCAL", origin="NEW", session_id="s"),
    _stored(locality=None, origin="REUSED"),
    ["BlockRemoved", [1, 2], "DISK", "evict"],
    ["BlockRemoved", [1, 2], "DISK", 3],
    ["AllBlocksCleared"],
    {"type": "AllBlocksCleared"},
    [[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]],
]
BATCHES: list[bytes] = [msgpack.packb([1.5, [event], 0]) for event in EVENTS]
BATCHES += [msgpack.packb([1, EVENTS]), msgpack.packb([None, [*EVENTS, 7, None], None]), msgpack.packb([])]
BATCHES += [msgpack.packb([1.5, EVENTS[:1], 0, bytes(range(16)), 7]), msgpack.packb([1.5, [], None, b"short"])]
WORDS = [msgpack.packb(field) for field in [*STORED, *OF_MAPS]]
WORDS += [
    msgpack.packb(tag)
    for tag in (
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
        "full_attention",
        "sliding_window",
        "mamba",
        "adapter",
        "LOCAL",
        "NEW",
        "REUSED",
    )
]
WORDS += [
    msgpack.packb(value) for value in (None, True, 0, -1, 127, 128, 2**16, 2**32, -(2**31), 2**63, 0.5, b"", b"\1")
]
WORDS += [bytes([head]) for head in range(0xC0, 0xE0)] + [bytes([0x80, 0x90, 0xA0, 0xA1, 0xFF])]
