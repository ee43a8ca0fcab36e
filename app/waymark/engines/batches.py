"""Decodes a payload, which may have any bytes, into events.

The only exception of a decoder is ``Undecodable``. One bad event costs one event, even if msgpack cannot read it. A
batch that exceeds a ceiling is not read at all, and raises ``OverCeiling``, which is an ``Undecodable``. A decoder
works in slices, and no slice takes longer than a few milliseconds.

Later stages work event by event, so an event of many blocks is cut into parts before it is read. An engine could have
published these parts one after the other. Each part has some of the hashes, with their tokens and the facts about each
block, and its parent is the last block of the part before.
"""

from __future__ import annotations

import gc
import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from waymark.base.errors import Undecodable
from waymark.domain.events import Batch, Cleared, Event, KeptEvents, PlainEvents
from waymark.domain.slices import EVENT_WORK, SLICE_WORK, Slices, finish
from waymark.engines import plain
from waymark.engines.long import (
    BAD_MSGPACK,
    PER_BLOCK,
    UNREADABLE,
    WINDOW_BYTES,
    LongPayload,
    unpack_event,
    unpacker_of,
)
from waymark.engines.plain import ListFields, PlainBatch
from waymark.engines.wire import Ceilings, Ignored, Rejected, frame_too_large, is_u32, too_many_events, too_many_hashes

ReadEvent: TypeAlias = Callable[[Any], Event | tuple[Event, ...] | Ignored]
"""Reads an event in the engine's format, which may become several domain events."""

MORE: Final = "more"
"""The kind of a batch's rejected events beyond ``Ceilings.rejected_events``, counted once."""

PUBLISHER_ID_BYTES: Final = 16
"""The length of the id of an engine's process."""
SHORT_BYTES: Final = 1024
"""A payload up to this size is read in one go."""
_SHORT_EVENTS: Final = 16
PLAIN_BYTES: Final = 4 * WINDOW_BYTES
"""A payload up to this size is read at once if all of its events are plain, which takes less than a millisecond."""
_COLLECTED_PARTS: Final = 16
"""The garbage collector runs each time this many parts were read, so that no single run has many new objects."""

# A larger number cannot be in seconds, so it is in milliseconds, as from Mooncake's master.
_MILLISECONDS_FROM: Final = 1e11

PART_HASHES: Final = 2048


def hashes_of(event: Any, names: Mapping[str, tuple[str, ...]]) -> list[Any] | array[int]:
    """Return the unread hashes of an event, if it has any."""
    if isinstance(event, dict):
        value = event.get("seq_hashes" if "event_type" in event else "block_hashes")
    elif isinstance(event, list) and len(event) > 1 and isinstance(event[0], str) and event[0] in names:
        value = event[1 + names[event[0]].index("block_hashes")]
    else:
        value = None
    return _hashes(value)


def parts(event: Any, names: Mapping[str, tuple[str, ...]]) -> Iterator[Any]:
    """Yield the parts of an event with hashes, each in the format of the event."""
    if isinstance(event, dict):
        for part in _cut(event):
            yield part
        return
    fields = names[event[0]]
    named = dict(zip(fields, event[1:], strict=False))
    for part in _cut(named):
        yield [event[0], *(part[field] for field in fields[: len(event) - 1]), *event[1 + len(fields) :]]


def _cut(event: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    hashes_name = "seq_hashes" if "event_type" in event else "block_hashes"
    hashes, tokens = _hashes(event[hashes_name]), event.get("token_ids")
    count, width = len(hashes), 0
    if isinstance(tokens, list | array | bytes) and len(tokens):
        unit = 4 if isinstance(tokens, bytes) else 1  # packed tokens have four bytes each
        units = len(tokens) // unit
        size = event.get("block_size")
        size = size if type(size) is int and size > 0 else max(1, units // count)
        if units > count * size:  # sparse, so it is skipped
            count, tokens = 1, tokens[: (size + 1) * unit]
        elif units < count * size:  # only the leading complete blocks count
            count = max(1, units // size)
        width = size * unit
    per_block = {name: event[name] for name in PER_BLOCK if isinstance(event.get(name), list)}
    # A list whose length differs from that of the hashes becomes an empty list, so that the decoder rejects it, too.
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
    """Turn a part into one that continues a block. Salt and position in the prompt belong to the first part only."""
    if "event_type" in part:
        part |= {"parent_hash": parent, "base_block_idx": None}
        return
    part["parent_block_hash"] = parent
    if "cache_salt" in part:
        part["cache_salt"] = None
    if isinstance(named := part.get("lora_name"), dict):
        part["lora_name"] = {"lora_name": named.get("lora_name")}


def _has_arrays(event: Any) -> bool:
    """Return whether a list of an event is an array, which ``parts`` converts."""
    return any(type(value) is array for value in (event.values() if isinstance(event, dict) else event))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value


class Decoder:
    """A decoder of the batches of one dialect. ``names`` are the fields of events in list form, by tag.

    With ``list_fields`` the C module reads the plain events of the dialect, faster than ``read_event`` does.
    """

    def __init__(
        self,
        read_event: ReadEvent,
        *,
        names: Mapping[str, tuple[str, ...]],
        bare: bool = False,
        ceilings: Ceilings | None = None,
        list_fields: ListFields | None = None,
    ) -> None:
        self.ceilings = ceilings or Ceilings()
        self._list_fields = list_fields
        self._read_event = read_event
        self._names = names
        self._bare = bare

    def __call__(self, payload: bytes) -> Batch:
        """Return the batch in a payload: ``[ts, events, rank?, publisher_id?]``.

        A bare dialect's payload may be one event map or a list of maps.
        """
        read = self.plain(payload)
        return finish(self.slices(payload, read)) if read is None or read.others else plain_batch(read)

    def plain(self, payload: bytes) -> PlainBatch | None:
        """Read the plain events of a payload at once. Return None if it is too long, or its batch has another form."""
        if self._list_fields is None or len(payload) > PLAIN_BYTES or not self._may_be_plain(b""):
            return None
        if len(payload) > self.ceilings.frame_bytes:
            return None
        batch = plain.read(payload, self.ceilings.batch_events, self._list_fields)
        # The other events of a long payload are read in slices.
        return batch if batch is None or not batch.others or len(payload) <= WINDOW_BYTES else None

    def _may_be_plain(self, payload: bytes) -> bool:
        return len(payload) <= self.plain_bytes_max and self.ceilings.event_hashes >= PART_HASHES

    def go_on(self, batch: Batch, payloads: Iterable[bytes], hashes_max: int) -> Batch:
        """Return a batch, extended by the next frames that differ from it in their blocks only, if its events are
        plain.

        ``payloads`` are those of the next frames. Frames are added up to ``hashes_max`` hashes in all.
        """
        if self._list_fields is None or type(batch.events) is not PlainEvents:
            return batch
        short = tuple(takewhile(self._may_be_plain, payloads))
        return plain.go_on(batch, short, self.ceilings.batch_events, hashes_max, self._list_fields) if short else batch

    def reading_of(self, batch: Batch, hashes_max: int) -> tuple[Any, ...] | None:
        """Return how ``run_frames`` of the C module reads frames like ``batch``, up to ``hashes_max`` hashes; None if
        it cannot.
        """
        if self._list_fields is None or type(batch.events) is not PlainEvents or not self._may_be_plain(b""):
            return None
        reading = plain.reading_of(batch, self.ceilings.batch_events, hashes_max, self._list_fields)
        return batch.events.loop, *reading[1:]

    @property
    def plain_bytes_max(self) -> int:
        """The bytes of the longest payload whose plain events are read at once."""
        return min(WINDOW_BYTES, self.ceilings.frame_bytes)

    def short(self, payload: bytes, read: PlainBatch | None) -> Batch:
        """Return the batch in a payload of at most ``SHORT_BYTES``, decoded at once because all its parts are short.

        ``read`` is the result of ``plain``.
        """
        events = self._events()
        try:
            root = msgpack.unpackb(payload, strict_map_key=False)
        except BAD_MSGPACK:
            return finish(self.slices(payload, read))
        listed, head = _split(root, len(payload), bare=self._bare)
        if len(listed) > _SHORT_EVENTS:
            return finish(self.slices(payload, read))
        for event in listed:
            events.read_short(event)
        return events.batch(head)

    def slices(self, payload: bytes, read: PlainBatch | None) -> Slices[Batch]:
        """Decode the batch in a payload, slice by slice. ``read`` is the same as for ``short``."""
        if len(payload) > self.ceilings.frame_bytes:
            raise frame_too_large(len(payload), self.ceilings)
        events = self._events()
        if read is not None:
            head = _Head(read.ts, read.rank, read.publisher_id)
            for plain_event in read.events:
                if isinstance(plain_event, tuple):
                    yield from events.read(unpack_event(payload[slice(*plain_event)]))
                else:
                    events.events.append(plain_event)
        elif len(payload) > WINDOW_BYTES:
            long = LongPayload(payload, self._names, self.ceilings)
            head = _head(*(yield from long.batch(events.read, bare=self._bare)))
        else:
            listed, head = _split((yield from unpack(payload)), len(payload), bare=self._bare)
            if len(listed) > self.ceilings.batch_events:
                raise too_many_events(len(listed), self.ceilings)
            may_be_long = len(payload) > 2 * PART_HASHES
            for event in listed:
                if may_be_long or events.work > SLICE_WORK:
                    yield from events.read(event)
                else:
                    events.read_short(event)
        return events.batch(head)

    def _events(self) -> _EventReader:
        return _EventReader(self._read_event, self._names, self.ceilings)


class _Head(NamedTuple):
    """The fields of a batch besides its events."""

    ts: Any
    rank: Any
    publisher_id: bytes | None


class _EventReader:
    """Reads the events of one batch, one after the other."""

    __slots__ = ("_ceilings", "_names", "_read_event", "_rejected", "events", "ignored", "rejected", "samples", "work")

    def __init__(self, read_event: ReadEvent, names: Mapping[str, tuple[str, ...]], ceilings: Ceilings) -> None:
        self.events: list[Event] = []
        self.rejected: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.samples: dict[str, str] = {}
        self.work = 0
        """The work of the slice under way, as ``SLICE_WORK`` counts it."""
        self._read_event = read_event
        self._names = names
        self._ceilings = ceilings
        self._rejected = 0

    def batch(self, head: _Head) -> Batch:
        """Return the batch of all events read."""
        rank = _rank(head.rank, self.ignored)
        return Batch(
            _clock(head.ts), tuple(self.events), rank, head.publisher_id, self.rejected, self.ignored, self.samples
        )

    def read(self, event: Any) -> Slices[None]:
        """Read one event, in parts if it is long."""
        hashes = hashes_of(event, self._names)
        if len(hashes) > self._ceilings.event_hashes:
            raise too_many_hashes(len(hashes), self._ceilings)
        if len(hashes) > PART_HASHES or (len(hashes) and _has_arrays(event)):
            yield from self._read_parts(event)
        else:
            self.read_short(event)
        if self.work > SLICE_WORK:
            self.work = 0
            yield

    def read_short(self, event: Any) -> None:
        self.work += EVENT_WORK
        try:
            if event is UNREADABLE:
                raise Rejected("bad_msgpack", "an event that is not valid msgpack")
            result = self._read_event(event)
        except Rejected as bad:
            self._reject(bad)
            return
        if isinstance(result, Ignored):
            self.ignored[result.value] += 1
            return
        for item in result if isinstance(result, tuple) else (result,):
            self.events.append(item)
            if not isinstance(item, Cleared):
                self.work += len(item.engine_hashes)

    def _read_parts(self, event: Any) -> Slices[None]:
        events: list[Event] = []
        distinct = DistinctHashes()
        try:
            for part in parts(event, self._names):
                result = self._read_event(part)
                if isinstance(result, Ignored):
                    self.ignored[result.value] += 1
                    return
                if isinstance(result, Cleared):
                    self.events.append(result)
                    return
                several = result if isinstance(result, tuple) else (result,)
                if not distinct.add(hashes_of_first(several)):
                    raise Rejected("repeated_hash", f"an event names one of its first {distinct.added} blocks twice")
                for item in several:
                    events.append(replace(item, part=len(events)))
                if len(events) % _COLLECTED_PARTS == 0:
                    gc.collect(0)
                yield
        except Rejected as bad:
            self._reject(bad)
            return
        if getattr(events[0], "parent", None) in distinct:
            self._reject(Rejected("own_parent", "a block is its own parent"))
        else:
            self.events += events

    def _reject(self, bad: Rejected) -> None:
        self._rejected += 1
        if self._rejected <= self._ceilings.rejected_events:
            self.rejected[bad.kind] += 1
            self.samples.setdefault(bad.kind, bad.sentence)
        else:
            self.rejected[MORE] = 1


_NONE_COUNTED: Final[Counter[str]] = Counter()
_NO_SAMPLES: Final[dict[str, str]] = {}


def plain_batch(read: PlainBatch) -> Batch:
    """Return the batch of a payload whose events are all plain."""
    events: Sequence[Event]
    if isinstance(read.events, KeptEvents):
        events = read.events
    else:
        events = tuple(event for event in read.events if not isinstance(event, tuple))
    rank, ignored = read.rank, _NONE_COUNTED
    if rank is not None and not is_u32(rank):
        ignored = Counter[str]()
        rank = _rank(rank, ignored)
    return Batch(_clock(read.ts), events, rank, read.publisher_id, _NONE_COUNTED, ignored, _NO_SAMPLES)


def _rank(value: Any, ignored: Counter[str]) -> int | None:
    """Return the rank of a batch; any other value is counted in ``ignored``."""
    if value is None or is_u32(value):
        return value
    ignored[Ignored.BAD_RANK.value] += 1
    return None


def hashes_of_first(events: Sequence[Event]) -> Sequence[int]:
    """Return the hashes of the first event. The other events concern the same blocks."""
    first = events[0]
    return () if isinstance(first, Cleared) else first.engine_hashes


def _head(ts: Any = None, rank: Any = None, publisher_id: Any = None, *_: Any) -> _Head:
    is_id = isinstance(publisher_id, bytes) and len(publisher_id) == PUBLISHER_ID_BYTES
    return _Head(ts, rank, publisher_id if is_id else None)


def _split(root: Any, size: int, *, bare: bool) -> tuple[list[Any], _Head]:
    """Return the events of an unpacked payload, and its other fields."""
    if isinstance(root, list) and len(root) >= 2 and isinstance(root[1], list):
        return root[1], _head(root[0], *root[2:])
    if bare and isinstance(root, dict) and "event_type" in root:
        return [root], _head()
    if bare and isinstance(root, list) and (not root or any(isinstance(item, dict) for item in root)):
        return root, _head()
    raise Undecodable("not_a_batch", f"a payload of {size} bytes is a {type(root).__name__}, not a batch")


def _clock(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value / 1000 if value >= _MILLISECONDS_FROM else float(value)


# The check whether a long event names a block twice.


_DICTS: Final = 127


class DistinctHashes:
    """Hashes of one long event, in many small dicts.

    A large dict would sometimes be copied as it grows, and the garbage collector would traverse a whole set; either
    takes 10 ms. The collector skips dicts of integers.
    """

    __slots__ = ("_dicts", "added")

    def __init__(self) -> None:
        self.added = 0
        self._dicts: list[dict[int, None]] = [{} for _ in range(_DICTS)]

    def add(self, engine_hashes: Sequence[int]) -> bool:
        """Add hashes. Return False if any hash has occurred twice so far."""
        self.added += len(engine_hashes)
        dicts = self._dicts
        for engine_hash in engine_hashes:
            dicts[engine_hash % _DICTS][engine_hash] = None
        return sum(map(len, dicts)) == self.added

    def __contains__(self, engine_hash: int | None) -> bool:
        return engine_hash is not None and engine_hash in self._dicts[engine_hash % _DICTS]


# Unpacks msgpack. A payload that msgpack cannot read as a whole is read value by value.


def unpack(payload: bytes) -> Slices[Any]:
    """Return the values of a payload, with ``UNREADABLE`` for each event that is not msgpack. Raise ``Undecodable`` if
    that is impossible.
    """
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
    """Return the value of ``piece``. If it is a list that cannot be read, replace each unreadable element by
    ``UNREADABLE``.

    Text other than UTF-8, a map as a map's key or a broken timestamp makes ``unpackb`` fail for the whole payload.
    Skipping a value needs only lengths, so elements are cut out and read one by one, down to the events, two levels
    below. Values are lists, not tuples, because the memory of a list is not touched before it is filled, however long
    it claims to be.
    """
    try:
        return msgpack.unpackb(piece, strict_map_key=False)
    except BAD_MSGPACK:
        if levels == 0:
            return UNREADABLE
    unpacker = unpacker_of(piece)
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
