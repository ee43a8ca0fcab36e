"""Writes publishers and their blocks into a file, while traffic goes on.

No lock is taken. A call that changes the blocks of a holder on a shard notes its progress in the field ``applied``. If
these marks are the same before and after the blocks of a stream were read, the blocks are those of its watermark.
Otherwise the stream is read again before it is written. A stream that never rests is written as it was read, with the
earlier watermark, and is marked as not exact. If its worker applies the batches after that watermark again, the index
has the right blocks in the end.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, BinaryIO, Final, NamedTuple

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.rows import ROW_SLOTS, SLOT_CHARS, find_field_place
from waymark.domain.status import StreamStatus
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.index_file import IndexFileWriter, SavedHolder, SavedRow
from waymark.store.records import StreamRecord
from waymark.store.store import Store

ATTEMPTS: Final = 20
#: The fields in one HSCAN, and the rows in one MGET and in one array of the file.
_FIELDS: Final = 2048
_ROWS: Final = 512
_PAUSES: Final = 10
_PAUSE_SECONDS: Final = 0.005
_APPLIED = re.compile(rb"([0-9]{1,15}) [0-9]{1,16}")


@record(slots=True)
class Exported:
    """The result of an export."""

    publishers: int = 0
    blocks: int = 0
    changed: int = 0
    """The number of streams that changed during each attempt."""
    unreadable: int = 0
    """The number of rows and entries that could not be read; a query does not count them either."""


@record(frozen=True, slots=True)
class _Moment:
    """A stream before its blocks are read."""

    marks: list[bytes | None]
    """The progress of each shard for each holder."""
    state: StreamRecord
    holders: list[tuple[int, SavedHolder]]
    is_between_batches: bool

    def is_as(self, earlier: _Moment | None) -> bool:
        """Return whether the blocks are unchanged since ``earlier``."""
        return earlier is not None and (self.marks, self.state.life, self.state.holders) == (
            earlier.marks,
            earlier.state.life,
            earlier.state.holders,
        )


class _HolderRows(NamedTuple):
    """The entries of a holder on one shard, and the values of their rows."""

    number: int
    holder: int
    entries: dict[bytes, bytes]
    copies: dict[bytes, bytes]
    values: list[bytes | None]


class _PublisherRead(NamedTuple):
    """A publisher with its rows, and whether they belong to one moment."""

    moment: _Moment
    rows: list[_HolderRows]
    is_exact: bool


async def export_index(
    store: Store, file: BinaryIO, *, model: str | None = None, tenant: str | None = None, attempts: int = ATTEMPTS
) -> Exported:
    """Write the publishers of the model and the tenant, with their blocks. Raise InvalidValue if the index has another
    format, and StoreUnavailable if Redis is unavailable.
    """
    complaint = await store.other_format()
    if complaint is not None:
        raise InvalidValue(complaint)
    writer, report = IndexFileWriter(file), Exported()
    seed = await store.client.hget(keys.GROUPS, "hash_seed")
    writer.begin(time.time(), int(seed) if seed else DEFAULT_SEED)
    for claim in await store.directory.claims():
        group = claim.registration.group
        if not claim.is_leaving and model in (None, group.model_name) and tenant in (None, group.tenant_id):
            await _Export(store, writer, claim, report).write(attempts)
    writer.end()
    report.publishers, report.blocks = writer.publishers, writer.blocks
    return report


class _Export:
    """The export of one publisher."""

    def __init__(self, store: Store, writer: IndexFileWriter, claim: Claim, report: Exported) -> None:
        self._store = store
        self._client = store.client
        self._writer = writer
        self._claim = claim
        self._report = report
        self._shards = range(claim.shards)

    async def write(self, attempts: int) -> None:
        """Write the publisher, unless it has been unregistered."""
        attempt = await self._attempt()
        for _ in range(attempts - 1):
            if attempt is None or attempt.is_exact:
                break
            await self._rest()
            attempt = await self._attempt()
        if attempt is not None:
            moment = attempt.moment
            self._writer.publisher(self._claim, _state_of(moment.state), [saved for _, saved in moment.holders])
            blocks = sum([await self._write(row) for row in attempt.rows])
            self._writer.end_publisher(blocks, is_exact=attempt.is_exact)
            self._report.changed += not attempt.is_exact

    async def _attempt(self) -> _PublisherRead | None:
        """Read the publisher. Return None if it has been unregistered."""
        moment = await self._moment()
        if moment is None:
            return None
        parts = [(number, id_, shard) for number, (id_, _) in enumerate(moment.holders) for shard in self._shards]
        rows = [await self._read(*part) for part in parts]
        return _PublisherRead(moment, rows, moment.is_between_batches and moment.is_as(await self._moment()))

    async def _rest(self) -> None:
        """Wait for the next change of the stream: right after a change, the most time is left before the next one."""
        now = await self._moment()
        for _ in range(_PAUSES):
            await asyncio.sleep(_PAUSE_SECONDS)
            later = await self._moment()
            if later is None or not later.is_as(now):
                return

    async def _moment(self) -> _Moment | None:
        """Return the state of the stream; None if it is gone."""
        claim = self._claim
        state = await self._store.records.peek(claim)
        if state is None:
            return None
        ids = list(state.holders.values())
        values, *marks = await self._client.several(
            [
                ("HMGET", keys.holders(claim.group_id), *ids, "version"),
                *(("HGET", keys.engine(claim.group_id, shard, id_), "applied") for id_, shard in self._parts(ids)),
            ]
        )
        seqs = dict.fromkeys(ids, 0)
        for (id_, _), mark in zip(self._parts(ids), marks, strict=True):
            match = _APPLIED.fullmatch(mark or b"")
            seqs[id_] = max(seqs[id_], int(match[1]) if match else 0)
        holders = [
            (id_, SavedHolder(name, value, state.event_ids.get(id_), seqs[id_]))
            for (name, id_), value in zip(state.holders.items(), values, strict=False)
            if value is not None
        ]
        # If the table lacks a holder of the record, a change of holders came in between.
        return _Moment(marks, state, holders, len(holders) == len(ids) and not _is_in_batch(state, holders))

    def _parts(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        return [(id_, shard) for id_ in ids for shard in self._shards]

    async def _read(self, number: int, holder: int, shard: int) -> _HolderRows:
        """Read the entries of a holder, and the rows that they name, without parsing them."""
        engine, cursor, is_over = keys.engine(self._claim.group_id, shard, holder), 0, False
        content = _HolderRows(number, holder, {}, {}, [])
        while not is_over:
            cursor, fields = await self._client.hscan(engine, cursor, _FIELDS)
            is_over = cursor == 0
            for name, value in fields.items():
                if name.startswith(b"*"):
                    content.copies[name[1:]] = value
                elif name != b"applied":
                    content.entries[name] = value
        prefix, places = keys.block_prefix(self._claim.group_id, shard), map(find_field_place, content.entries)
        rows = [prefix + (b"" if place is None else place.name) for place in places]
        portions = await self._client.several(
            [("MGET", *rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
        )
        content.values.extend(value for portion in portions for value in portion)
        return content

    async def _write(self, source: _HolderRows) -> int:
        """Write the blocks of a holder. Return how many there were."""
        blocks, rows = 0, list[SavedRow]()
        for (name, entry), value in zip(source.entries.items(), source.values, strict=True):
            place = find_field_place(name)
            of_holder = None if value is None or place is None else _holder_blocks(value, entry, source.holder)
            if place is None or of_holder is None:
                self._report.unreadable += place is None or value is not None
                continue
            row = SavedRow(place, *of_holder, {})
            rows.append(_with_copies(row, source.copies) if source.copies else row)
            blocks += row.blocks
            if len(rows) == _ROWS:
                self._writer.rows(source.number, rows)
                rows = []
                await asyncio.sleep(0)
        if rows:
            self._writer.rows(source.number, rows)
        return blocks


def _is_in_batch(state: StreamRecord, holders: Sequence[tuple[int, SavedHolder]]) -> bool:
    """Return whether Redis has a part of a batch, but not yet its seq."""
    for _, saved in holders:
        last = state.watermark if state.watermark is not None else saved.event_id
        if last is not None and saved.seq > last:
            return True
    return False


def _holder_blocks(value: bytes, entry: bytes, holder: int) -> tuple[int, bytes, bytes] | None:
    """Return namespace, slots and engine hashes of a holder's blocks in a row; None if the row lacks the holder."""
    end = value.find(b" ")
    start = value.find(b" %d:" % holder, end)
    slots = value[:end].removesuffix(b"+")
    count = len(slots) // SLOT_CHARS
    if end < 0 or start < 0 or len(slots) % SLOT_CHARS or count > ROW_SLOTS:
        return None
    try:
        bitmap = int(value[value.index(b":", start) + 1 :].split(b" ", 1)[0], 16)
        has_namespace = len(entry) % 8 == 1
        namespace, hashes = (int(entry[:16], 16), entry[17:]) if has_namespace else (0, entry)
    except ValueError:
        return None
    if len(hashes) % 8 or bitmap >> count or not bitmap:
        return None
    if hashes:
        hashes = hashes[: 8 * count].ljust(8 * count, b"\xff")
    if bitmap == (1 << count) - 1:
        return namespace, slots, hashes
    slot_numbers = [slot for slot in range(count) if bitmap >> slot & 1]
    return (
        namespace,
        b"".join([slots[SLOT_CHARS * slot : SLOT_CHARS * (slot + 1)] for slot in slot_numbers]),
        b"".join([hashes[8 * slot : 8 * (slot + 1)] for slot in slot_numbers]),
    )


def _with_copies(row: SavedRow, copies: dict[bytes, bytes]) -> SavedRow:
    names = [row.slots[start : start + 16] for start in range(0, len(row.slots), SLOT_CHARS)]
    return row._replace(copies={index: copies[name] for index, name in enumerate(names) if name in copies})


def _state_of(state: StreamRecord) -> dict[str, Any]:
    return {
        "watermark": state.watermark,
        "ts": state.ts,
        "newest_ts": state.newest_ts,
        "digest": state.digest,
        "flags": " ".join(sorted(state.flags)),
        "main_groups": state.main_groups,
        "last_event_id": state.last_event_id,
        "is_lost": state.status is StreamStatus.LOST,
        "counters": dict(state.counters),
    }
