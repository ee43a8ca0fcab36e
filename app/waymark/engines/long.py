"""Reads a long payload in windows of bytes.

``msgpack`` creates all objects of a payload in one call, and every byte may be an object. So a payload longer than a
window is read in pieces that fit into one: a batch event by event, a long event field by field, a long list some
elements at a time. Lists of hashes and tokens become arrays of u64, eight bytes an element. Long values of fields that
engines keep short are not read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack

from waymark.base.errors import Undecodable
from waymark.domain.names import U64_MASK
from waymark.domain.slices import Slices
from waymark.engines.wire import Ceilings, misshapen, too_many_events, too_many_hashes

WINDOW_BYTES: Final = 65_536
"""A payload, event or value of at most this size is unpacked in one go, which takes a few ms and MB at most."""
_EVENTS_BYTES: Final = 16_384
"""Shorter events are unpacked together, this many bytes at a time."""

#: The long fields of an event with many blocks.
HASHES: Final = frozenset({"block_hashes", "seq_hashes"})
TOKENS: Final = frozenset({"token_ids"})
PER_BLOCK: Final = frozenset({"extra_keys", "block_mm_infos", "remaining_copy_counts"})

_HEAD_MAX: Final = 4
"""The number of elements of a batch to read; further ones are ignored."""
_FIELDS_MAX: Final = 64
_PIECE: Final = 4096
_INTEGER_BYTES: Final = 9
_OTHER_BYTES_MAX: Final = 2 * 2**20
"""The most bytes in a payload's lists other than hashes and tokens, because each byte may become an object."""
BAD_MSGPACK: Final = (msgpack.UnpackException, ValueError, TypeError, MemoryError)


def unpacker_of(*pieces: bytes | memoryview) -> msgpack.Unpacker:
    """Return an unpacker of these bytes. Their number is passed, because msgpack otherwise allocates a megabyte."""
    size = sum(map(len, pieces))
    unpacker = msgpack.Unpacker(None, strict_map_key=False, read_size=max(1, size), max_buffer_size=0)
    for piece in pieces:
        unpacker.feed(piece)
    return unpacker


class UnreadableValue:
    """The replacement for bytes that msgpack cannot turn into a value."""


UNREADABLE: Final = UnreadableValue()


def unpack_event(piece: bytes | memoryview) -> Any:
    """Return the event in these bytes, or ``UNREADABLE`` if they are not msgpack."""
    try:
        return msgpack.unpackb(piece, strict_map_key=False)
    except BAD_MSGPACK:
        return UNREADABLE


class LongPayload:
    """Reads one payload from its beginning to its end. It raises ``Undecodable`` if that is impossible."""

    def __init__(self, payload: bytes, names: Mapping[str, tuple[str, ...]], ceilings: Ceilings) -> None:
        """Begin a payload. ``names`` are the fields of events in list form, by tag."""
        self._names = names
        self._view = memoryview(payload)
        self._ceilings = ceilings
        self._at = 0
        self._others = 0

    def batch(self, read_event: Callable[[Any], Slices[None]], *, bare: bool) -> Slices[list[Any]]:
        """Call ``read_event`` for each event of ``[ts, events, rank?, publisher_id?]``, and return the other elements.

        With ``bare`` the payload may also be one event map, or a list of maps.

        An event is passed as msgpack unpacks it, except that lists of hashes and of tokens may be arrays of u64.
        """
        if bare and self._is_map():
            yield from self._events(1, read_event)
            return []
        is_map, length = self._container()
        if is_map or length == 0:
            raise self._no_batch()
        if bare and self._is_map():
            yield from self._events(length, read_event)
            return []
        ts = self._value()
        if length < 2 or not self._is_list():
            raise self._no_batch()
        yield from self._events(self._container()[1], read_event)
        return [ts, *(self._value() for _ in range(2, min(length, _HEAD_MAX)))]

    def records(self, read_record: Callable[[Any], Slices[None]]) -> Slices[int]:
        """Call ``read_record`` for each record of a list, or of the list ``records`` in a map. Return the number of
        records.
        """
        is_map, length = self._container()
        while is_map and length and self._value() != "records":
            self._value()
            length -= 1
        if is_map and length:
            is_map, length = self._container()
        if is_map:
            raise self._no_batch()
        yield from self._events(length, read_record)
        return length

    def _events(self, count: int, read_event: Callable[[Any], Slices[None]]) -> Slices[None]:
        if count > self._ceilings.batch_events:
            raise too_many_events(count, self._ceilings)
        remaining = count
        while remaining:
            events, size = self._window(remaining, _EVENTS_BYTES)
            if not events:
                events, size = self._window(1)
            self._at += size
            yield
            if not events:
                events = [(yield from self._long_event())]
            remaining -= len(events)
            events.reverse()
            while events:
                yield from read_event(events.pop())  # so that it is freed in its own slice

    def _no_batch(self) -> Undecodable:
        return Undecodable("not_a_batch", f"a payload of {len(self._view)} bytes is not a batch")

    # ---- a window ----------------------------------------------------------------------------------

    def _byte(self) -> int:
        if self._at >= len(self._view):
            raise Undecodable("bad_msgpack", f"a payload of {len(self._view)} bytes is not msgpack")
        return self._view[self._at]

    def _unpacker(self, window: int = WINDOW_BYTES) -> msgpack.Unpacker:
        return unpacker_of(self._view[self._at : self._at + window])

    def _window(self, most: int, window: int = WINDOW_BYTES) -> tuple[list[Any], int]:
        """Return the complete values in the next window, and their number of bytes."""
        values: list[Any] = []
        unpacker, size = self._unpacker(window), 0
        try:
            while len(values) < most:
                values.append(unpacker.unpack())
                size = unpacker.tell()
        except msgpack.OutOfData:
            pass
        except BAD_MSGPACK:
            return self._one_by_one(most, window)
        return values, size

    def _one_by_one(self, most: int, window: int) -> tuple[list[Any], int]:
        """Do what ``_window`` does if msgpack cannot read one of the values, and return ``UNREADABLE`` for it."""
        values: list[Any] = []
        unpacker, size = self._unpacker(window), 0
        try:
            while len(values) < most:
                unpacker.skip()
                start, size = self._at + size, int(unpacker.tell())
                values.append(unpack_event(self._view[start : self._at + size]))
        except msgpack.OutOfData:
            if not values and window == WINDOW_BYTES:
                raise misshapen("a long value that is not valid msgpack") from None
        except BAD_MSGPACK:
            raise Undecodable("bad_msgpack", f"a payload of {len(self._view)} bytes is not msgpack") from None
        return values, size

    def _value(self) -> Any:
        """Return one value that fits into a window, or bytes of any length. A longer text becomes ``UNREADABLE``."""
        values, size = self._window(1)
        if values:
            self._at += size
            return values[0]
        head = self._byte()
        wide = {0xC5: 2, 0xC6: 4, 0xDA: 2, 0xDB: 4}.get(head)
        if wide is None:
            raise misshapen("a long value, and not a list of its event")
        start = self._at + 1 + wide
        end = start + int.from_bytes(self._view[self._at + 1 : start], "big")
        if end > len(self._view):
            raise Undecodable("bad_msgpack", f"a payload of {len(self._view)} bytes is not msgpack")
        self._at, view = end, self._view[start:end]
        return bytes(view) if head in (0xC5, 0xC6) else UNREADABLE

    # ---- a long event ------------------------------------------------------------------------------

    def _container(self) -> tuple[bool, int]:
        """Read the header of a map or a list. Return whether it is a map, and its number of entries."""
        head = self._byte()
        if head & 0xE0 == 0x80:
            self._at += 1
            return head < 0x90, head & 0x0F
        wide = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(head)
        if wide is None:
            raise self._no_batch()
        length = int.from_bytes(self._view[self._at + 1 : self._at + 1 + wide], "big")
        self._at += 1 + wide
        return head >= 0xDE, length

    def _is_map(self) -> bool:
        head = self._byte()
        return head & 0xF0 == 0x80 or head in (0xDE, 0xDF)

    def _is_list(self) -> bool:
        head = self._byte()
        return head & 0xF0 == 0x90 or head in (0xDC, 0xDD)

    def _long_event(self) -> Slices[Any]:
        head = self._byte()
        if not (head & 0xE0 == 0x80 or 0xDC <= head <= 0xDF):
            return self._value()
        is_map, length = self._container()
        if length > _FIELDS_MAX:
            raise misshapen(f"an event of {length} fields")
        if is_map:
            event: dict[Any, Any] = {}
            for _ in range(length):
                name = self._value()
                if not isinstance(name, str):
                    raise misshapen("a long event whose fields have no names")
                event[name] = yield from self._field(name)
            return event
        listed: list[Any] = []
        fields: tuple[str, ...] = ()
        for i in range(length):
            listed.append((yield from self._field(fields[i - 1] if 0 < i <= len(fields) else "")))
            if i == 0 and isinstance(listed[0], str):
                fields = self._names.get(listed[0], ())
        return listed

    def _field(self, name: str) -> Slices[Any]:
        values, size = self._window(1)
        if values or not self._is_list():
            return self._value() if not values else self._advance(values[0], size)
        _, length = self._container()
        if (name in HASHES or name in PER_BLOCK) and length > self._ceilings.event_hashes:
            raise too_many_hashes(length, self._ceilings)
        return (yield from self._elements(name, length))

    def _advance(self, value: Any, size: int) -> Any:
        self._at += size
        return value

    def _elements(self, name: str, length: int) -> Slices[array[int] | list[Any] | None]:
        """Return the elements of a list: an array of hashes or tokens, or the values of another field."""
        compact: array[int] = array("Q")
        elements: list[Any] = []
        remaining, most = length, _PIECE
        while remaining:
            count = min(remaining, most)
            start, piece = self._at, self._piece(count)
            if piece is None:
                if count == 1:
                    raise misshapen(f"a long element of {name or 'a list'}")
                most = max(1, count // 8)
                continue
            remaining -= count
            if self._at - start < WINDOW_BYTES // 8:  # otherwise a few long elements would make all others slow
                most = min(_PIECE, 8 * most)
            if name in HASHES or name in TOKENS:
                compact.extend(_integers(piece, name))
            elif name in PER_BLOCK:
                elements += piece
                if piece.count(None) < count:
                    self._others += self._at - start
                    if self._others > _OTHER_BYTES_MAX:
                        raise misshapen(f"more than {_OTHER_BYTES_MAX} bytes of {name}")
            yield
        if name in HASHES or name in TOKENS:
            return compact
        return elements if name in PER_BLOCK else None

    def _piece(self, count: int) -> list[Any] | None:
        """Return the next ``count`` elements of a list, or None if a window has no room for them."""
        window = max(WINDOW_BYTES, _INTEGER_BYTES * count)
        unpacker = unpacker_of(b"\xdd" + count.to_bytes(4, "big"), self._view[self._at : self._at + window])
        try:
            piece: list[Any] = unpacker.unpack()
        except msgpack.OutOfData:
            return None
        except BAD_MSGPACK:
            raise misshapen("a long list that is not valid msgpack") from None
        self._at += int(unpacker.tell()) - 5
        return piece


def _integers(piece: list[Any], name: str) -> list[int]:
    """Return elements as u64: integers by their 64 bits, bytes by their last 8, and pairs by their first elements."""
    kinds = set(map(type, piece))
    if kinds == {int}:
        return piece if min(piece) >= 0 else [element & U64_MASK for element in piece]
    if kinds == {bytes} and name in HASHES and all(piece):
        return [int.from_bytes(element[-8:], "big") for element in piece]
    if kinds == {list} and name in TOKENS and all(len(pair) == 2 and set(map(type, pair)) == {int} for pair in piece):
        return [first & U64_MASK for first, _ in piece]
    raise misshapen(f"a long list of {name} with something else in it")
