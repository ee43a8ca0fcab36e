"""What a process remembers of records: of those that it could not read, and of rows that it has read before."""

from __future__ import annotations

from waymark.base.metrics import Metrics
from waymark.domain.names import Holder
from waymark.domain.status import RecordKind
from waymark.store.holder_tables import decode_table, encode_holder
from waymark.store.parsing import RecordParser


def test_a_row_that_no_query_meets_any_more_is_not_listed_for_ever() -> None:
    """It was deleted, or written again: what reads records by their names has forgotten those at once."""
    now = [0.0]
    parser = RecordParser(Metrics(), lambda: now[0])

    def kinds() -> list[RecordKind]:
        return [place.kind for place in parser.unreadable]

    for kind in (RecordKind.BLOCK, RecordKind.HOLDER):
        parser.reject(kind, "key", kind, "damaged")
    now[0] = 599.0
    parser.reject(RecordKind.BLOCK, "key", RecordKind.BLOCK, "damaged")
    now[0] = 1_198.0
    assert kinds() == [RecordKind.BLOCK, RecordKind.HOLDER]
    now[0] = 1_199.0
    assert kinds() == [RecordKind.HOLDER]
    assert parser.counts == {RecordKind.HOLDER: 1}


def test_rows_of_a_table_with_the_same_bytes_are_parsed_once() -> None:
    """A table is read again after each change, and a thousand engines have three thousand rows."""
    parser = RecordParser(Metrics())
    rows = {
        b"group": b'["default","m"]',
        b"publisher:3": b'{"format":1,"instance_id":"pod-3","dp_rank":0,"block_size":16,"scope":"instance"}',
        b"target:3": b'{"format":1,"address":"http://pod-3:8000","labels":{"zone":"a"}}',
        b"7": encode_holder(Holder(7, 3, "pod-3", 0, "GPU", 16, "pod-3", "instance")),
    }
    first, second = (decode_table(rows | {b"version": version}, parser, "wm:{1}:holders") for version in (b"1", b"2"))
    assert first is not None
    assert second is not None
    assert first.targets[3].address == "http://pod-3:8000"
    assert first.targets[3] is second.targets[3]
    assert first.publishers[3] is second.publishers[3]
    assert first.holders[7] is second.holders[7]
