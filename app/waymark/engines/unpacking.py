"""From bytes to what msgpack says in them; a payload that msgpack cannot read as a whole is read value by value."""

from __future__ import annotations

from typing import Any, Final

import msgpack

from waymark.base.errors import Undecodable
from waymark.domain.slices import EVENT_WORK, Slices
from waymark.engines.long import UNREADABLE

BAD_MSGPACK: Final = (msgpack.UnpackException, ValueError, TypeError, MemoryError)


def unpack_event(piece: bytes) -> Any:
    """The event in these bytes; ``UNREADABLE`` if they are not msgpack."""
    try:
        return msgpack.unpackb(piece, strict_map_key=False)
    except BAD_MSGPACK:
        return UNREADABLE


def unpack(payload: bytes) -> Slices[Any]:
    """What a payload has, with ``UNREADABLE`` for each event that is not msgpack. Raises ``Undecodable``."""
    try:
        return msgpack.unpackb(payload, strict_map_key=False)
    except BAD_MSGPACK:
        pass
    try:
        root = yield from _salvage(payload, 2)
    except BAD_MSGPACK:
        root = UNREADABLE
    if root is UNREADABLE:
        raise Undecodable("bad_msgpack", f"a payload of {len(payload)} bytes is not msgpack")
    return root


def _salvage(piece: bytes, levels: int) -> Slices[Any]:
    """The value of ``piece``; where that fails, the same list with ``UNREADABLE`` for what cannot be read.

    Text that is no UTF-8, a map as a map's key or a broken timestamp end ``unpackb`` for the whole payload, but
    skipping a value needs only lengths: elements are cut out and read one by one, down to the events, two levels
    below. Lists and not tuples: a list's room is not touched before it is filled, however long it claims to be.
    """
    try:
        return msgpack.unpackb(piece, strict_map_key=False)
    except BAD_MSGPACK:
        if levels == 0:
            return UNREADABLE
    unpacker = msgpack.Unpacker(None, max_buffer_size=0)
    unpacker.feed(piece)
    try:
        length = unpacker.read_array_header()
    except ValueError:
        return UNREADABLE
    items = []
    end = unpacker.tell()
    for i in range(length):
        start = end
        unpacker.skip()
        end = unpacker.tell()
        items.append((yield from _salvage(piece[start:end], levels - 1)))
        if i % EVENT_WORK == 0:
            yield
    return items if end == len(piece) else UNREADABLE
