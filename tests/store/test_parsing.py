"""What a process remembers of records that it could not read."""

from __future__ import annotations

from waymark.base.metrics import Metrics
from waymark.domain.status import RecordKind
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
