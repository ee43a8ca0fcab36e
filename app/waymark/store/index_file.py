"""The file of an index, which ``waymark export`` writes and ``waymark import`` reads.

The file is a sequence of msgpack arrays. The first value of each names its kind; texts are UTF-8, ``bytes`` are the
type bin, and every other kind or length is an error:

- ``["waymark index", 1, written, hash_seed, rows]`` begins the file: the version of this format, seconds since 1970,
  the seed of all hashes, and the form of rows, as in ``wm:groups``.
- ``["publisher", claim, state, holders]`` begins a publisher. ``claim`` is its value in ``wm:publishers``; its ids
  have no meaning elsewhere. ``state`` is a map with the fields of its record: ``watermark``, ``ts``, ``newest_ts``,
  ``digest``, ``flags``, ``main_groups``, ``last_event_id``, ``is_lost`` and ``counters``. ``holders`` is a list of
  ``[name, holder, event_id, seq]``: the name in the record, the JSON of the holder table, the last ``event_id`` or
  nil, and the seq of the last batch that changed its blocks.
- ``["rows", number, [[place, namespace, slots, hashes, copies], ...]]`` are blocks of the holder with this number in
  the list of its publisher. ``place`` is the name of the row in the holder's entries, and ``slots`` are the slots of
  the row that the holder has. ``hashes`` are their engine hashes, 8 bytes each, all bits set if it is the seq_hash;
  empty if all are. ``copies`` is a map from the position of a block in ``slots`` to the value of its field
  ``*<key>``.
- ``["end of publisher", blocks, is_exact]``: without ``is_exact`` the stream changed while it was read.
- ``["end", publishers, blocks, digest]`` ends the file. ``digest`` are 16 bytes of BLAKE2b of all bytes before this
  array.

``lua/README.md`` describes rows, slots, entries and copies. A file without its last array is incomplete, and is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgpack

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.domain.names import GroupName, HolderName
from waymark.domain.rows import FORMAT, ROW_SLOTS, SLOT_CHARS, Place, parse_field
from waymark.store.claims import Claim
from waymark.store.parsing import Malformed

NAME = "waymark index"
VERSION = 1
_DIGEST_BYTES = 16
#: The most bytes of one array: 512 rows take a tenth.
RECORD_BYTES_MAX = 64 * 2**20
_READ_BYTES = 2**20
_SLOTS = re.compile(rb"(?:[0-9a-f]{16}[0-9a-v]){1,%d}" % ROW_SLOTS)
_COPIES = re.compile(rb"[1-9][0-9]{0,15}(?: [0-9a-f]{16})*")
_STATE = {
    "watermark": (int, type(None)),
    "ts": (float, int, type(None)),
    "newest_ts": (float, int, type(None)),
    "digest": (str,),
    "flags": (str,),
    "main_groups": (str,),
    "last_event_id": (str,),
    "is_lost": (bool,),
    "counters": (dict,),
}


class SavedHolder(NamedTuple):
    """A holder of a publisher, without an id."""

    name: HolderName
    holder: bytes
    """Its value in the holder table."""
    event_id: int | None
    seq: int


class SavedRow(NamedTuple):
    """The blocks of one holder in one row."""

    place: Place
    namespace: int
    slots: bytes
    hashes: bytes
    copies: Mapping[int, bytes]

    @property
    def blocks(self) -> int:
        return len(self.slots) // SLOT_CHARS


@record(frozen=True, slots=True)
class SavedPublisher:
    """A publisher: its registration, and the state of its stream."""

    claim: Claim
    state: Mapping[str, Any]
    holders: tuple[SavedHolder, ...]
    offset: int = 0
    """The offset in the file at which the publisher begins."""
    is_exact: bool = True
    blocks: int = 0

    @property
    def group(self) -> GroupName:
        return self.claim.registration.group


class SavedRows(NamedTuple):
    holder: int
    """The number of the holder in the list of its publisher."""
    rows: list[SavedRow]


# ---- writing -----------------------------------------------------------------------------------------


class IndexFileWriter:
    """Writes a file from its beginning to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake2b(digest_size=_DIGEST_BYTES)
        self.publishers = self.blocks = 0

    def begin(self, seconds: float, hash_seed: int) -> None:
        self._write([NAME, VERSION, seconds, hash_seed, FORMAT])

    def publisher(self, claim: Claim, state: Mapping[str, Any], holders: list[SavedHolder]) -> None:
        named = [[str(holder.name), holder.holder, holder.event_id, holder.seq] for holder in holders]
        self._write(["publisher", claim.encode(), dict(state), named])

    def rows(self, holder: int, rows: list[SavedRow]) -> None:
        packed = [[row.place.field, row.namespace, row.slots, row.hashes, dict(row.copies)] for row in rows]
        self._write(["rows", holder, packed])

    def end_publisher(self, blocks: int, *, is_exact: bool) -> None:
        self._write(["end of publisher", blocks, is_exact])
        self.publishers += 1
        self.blocks += blocks

    def end(self) -> None:
        self._write(["end", self.publishers, self.blocks, self._digest.digest()])

    def _write(self, record: list[Any]) -> None:
        packed = cast("bytes", msgpack.packb(record))
        self._file.write(packed)
        self._digest.update(packed)


# ---- reading -----------------------------------------------------------------------------------------


@record(slots=True)
class IndexFile:
    """A complete file, with its publishers."""

    path: Path
    hash_seed: int
    seconds: float
    publishers: list[SavedPublisher] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> IndexFile:
        """Read and check a file. Raise ``InvalidValue`` if it cannot be opened, is incomplete, or is damaged."""
        with _opened(path) as file:
            size = path.stat().st_size
            records = _records(path, file)
            _, first = next(records, (0, None))
            if not (isinstance(first, list) and len(first) == 5 and first[0] == NAME):
                raise InvalidValue(f"{path} is no file that 'waymark export' wrote")
            if first[1] != VERSION or first[4] != FORMAT:
                raise InvalidValue(
                    f"{path} has version {shown(first[1])} of rows {shown(first[4])}, and this release reads version "
                    f"{VERSION} of rows {shown(FORMAT)}; import it with the release that wrote it"
                )
            content = cls(path, *_typed(path, [(first[3], (int,)), (first[2], (int, float))]))
            publisher: SavedPublisher | None = None
            blocks = 0
            for offset, record in records:
                match record:
                    case ["publisher", claim, state, holders] if publisher is None:
                        publisher, blocks = _publisher(path, offset, claim, state, holders), 0
                    case ["rows", number, rows] if publisher is not None:
                        blocks += sum(row.blocks for row in _rows(path, publisher, number, rows).rows)
                    case ["end of publisher", count, is_exact] if publisher is not None and count == blocks:
                        content.publishers.append(replace(publisher, is_exact=is_exact is True, blocks=blocks))
                        publisher = None
                    case ["end", count, all_blocks, digest] if publisher is None:
                        counts = len(content.publishers), sum(publisher.blocks for publisher in content.publishers)
                        if (count, all_blocks) != counts or digest != _digest_of(file, offset):
                            raise _damaged(path, "its digest or its counts are not those of its content")
                        if next(records, None) is not None:
                            raise _damaged(path, f"more follows after its end, at byte {offset} of {size}")
                        return content
                    case _:
                        raise _damaged(path, f"there is no array of this format at byte {offset}")
        raise InvalidValue(f"{path} is not whole: it ends without its last array, after {size} bytes; export it again")

    def rows_of(self, publisher: SavedPublisher) -> Iterator[SavedRows]:
        """Yield the rows of one of ``publishers``."""
        with _opened(self.path) as file:
            file.seek(publisher.offset)
            records = _records(self.path, file)
            next(records, None)
            for _, record in records:
                if not (isinstance(record, list) and len(record) == 3 and record[0] == "rows"):
                    return
                yield _rows(self.path, publisher, record[1], record[2])


def _opened(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as exc:
        raise InvalidValue(f"{path} cannot be read: {exc.strerror}") from None
    if not file.seekable():  # the file is read twice
        file.close()
        raise InvalidValue(f"{path} is a pipe; give the name of a file")
    return file


def _records(path: Path, file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield each array with its offset from the place at which reading began; up to the end, or a part of an array."""
    start = file.tell()
    unpacker = msgpack.Unpacker(
        file, read_size=_READ_BYTES, max_buffer_size=RECORD_BYTES_MAX, strict_map_key=False, raw=False
    )
    offset = start
    while True:
        try:
            record = unpacker.unpack()
        except msgpack.OutOfData:
            return
        except (msgpack.UnpackException, ValueError, TypeError) as exc:
            raise _damaged(path, f"the array at byte {offset} cannot be read ({exc})") from None
        yield offset, record
        offset = start + unpacker.tell()


def _digest_of(file: BinaryIO, end: int) -> bytes:
    digest, remaining = blake2b(digest_size=_DIGEST_BYTES), end
    offset = file.tell()
    file.seek(0)
    while remaining:
        piece = file.read(min(remaining, _READ_BYTES))
        if not piece:
            break
        digest.update(piece)
        remaining -= len(piece)
    file.seek(offset)
    return digest.digest()


def _damaged(path: Path, why: str) -> InvalidValue:
    return InvalidValue(f"{path} is damaged: {why}; export it again")


def _typed(path: Path, values: list[tuple[Any, tuple[type, ...]]]) -> list[Any]:
    for value, types in values:
        if type(value) not in types:
            raise _damaged(path, f"{shown(value)} is not of the type that the format says")
    return [value for value, _ in values]


def _publisher(path: Path, offset: int, raw: Any, state: Any, named: Any) -> SavedPublisher:
    _typed(path, [(raw, (bytes,)), (state, (dict,)), (named, (list,))])
    _typed(path, [(state.get(name), types) for name, types in _STATE.items()])
    for name, count in state["counters"].items():
        _typed(path, [(name, (str,)), (count, (int,))])
    holders: list[SavedHolder] = []
    try:
        claim = Claim.decode(raw)
        for entry in named:
            name, holder, event_id, seq = entry
            _typed(path, [(name, (str,)), (holder, (bytes,)), (event_id, (int, type(None))), (seq, (int,))])
            holders.append(SavedHolder(HolderName.parse(name), holder, event_id, seq))
    except (Malformed, ValueError, TypeError) as exc:
        raise _damaged(path, f"the publisher at byte {offset} cannot be read ({exc})") from None
    return SavedPublisher(claim, state, tuple(holders), offset)


def _rows(path: Path, publisher: SavedPublisher, number: Any, packed: Any) -> SavedRows:
    _typed(path, [(number, (int,)), (packed, (list,))])
    if not 0 <= number < len(publisher.holders):
        raise _damaged(path, f"rows belong to holder {number}, and its publisher has {len(publisher.holders)}")
    rows: list[SavedRow] = []
    try:
        for place, namespace, slots, hashes, copies in packed:
            _typed(path, [(place, (bytes,)), (namespace, (int,)), (slots, (bytes,)), (hashes, (bytes,))])
            row = SavedRow(parse_field(place), namespace, slots, hashes, copies)
            if _SLOTS.fullmatch(slots) is None or not 0 <= namespace < 2**64:
                raise ValueError("a row has no slots")
            if len(hashes) not in (0, 8 * row.blocks):
                raise ValueError("a row has another number of engine hashes than of slots")
            if any(not 0 <= index < row.blocks or _COPIES.fullmatch(value) is None for index, value in copies.items()):
                raise ValueError("the copies of a block cannot be read")
            rows.append(row)
    except (ValueError, TypeError, AttributeError) as exc:
        raise _damaged(path, f"rows of {publisher.claim.registration.name} cannot be read ({exc})") from None
    return SavedRows(number, rows)
