"""Reads the plain events of vLLM's dialect with the C module; every other event is left to the dialect's own reader.

A plain event needs no rule beyond its form: it has neither a salt nor an image, and is entirely valid. So the words of
a rejection are in Python alone. Most events of most engines are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from waymark.base import native
from waymark.domain.events import Cleared, Event, PlainEvents, Removed, Stored, StoredReference
from waymark.domain.media import normal_medium

_CLEARED = Cleared()
LIST_FIELDS: Final = (10, 3)
"""The fields of a store and of a removal in list form, as far as the C module reads them: those of vLLM."""


class PlainBatch(NamedTuple):
    """A batch whose form is plain."""

    ts: Any
    events: Sequence[Event | tuple[int, int]]
    """Plain events; in place of any other event, its start and end in the payload."""
    rank: Any
    publisher_id: bytes | None
    others: int
    """The number of other events."""


ReadPlain: TypeAlias = Callable[[bytes, int], PlainBatch | None]
"""Reads a payload of at most so many events. Returns None if its batch is not plain, or without the C module."""


def read(payload: bytes, events_max: int, list_fields: tuple[int, int] = LIST_FIELDS) -> PlainBatch | None:
    """Read a batch. An event whose parent is 0 is not plain: the meaning of 0 depends on the dialect.

    ``list_fields``: the most fields of a store and a removal in list form in this dialect.
    """
    loops = native.selected
    if loops is None:
        return None
    result = loops.read_batch(
        payload, events_max, Stored, StoredReference, Removed, _CLEARED, normal_medium, *list_fields
    )
    if result is None:
        return None
    ts, events, rank, publisher_id, count = result
    return PlainBatch(ts, events if isinstance(events, list) else PlainEvents(events), rank, publisher_id, count)
