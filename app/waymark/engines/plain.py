"""Reads the plain events of vLLM's dialect with the C module; every other event is left to the dialect's own reader.

A plain event needs no rule beyond its form: it names no salt and no image, and nothing in it is to be rejected. So the
words of a rejection are in Python alone. Most events of most engines are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from waymark.base import native
from waymark.domain.events import Cleared, Event, PlainEvents, Removed, Stored
from waymark.domain.media import normal_medium

_CLEARED = Cleared()
LIST_FIELDS: Final = (10, 3)
"""The fields of a store and of a removal that are lists, as far as the C module reads them: those of vLLM."""


class PlainBatch(NamedTuple):
    """A batch whose form is plain."""

    ts: Any
    events: Sequence[Event | tuple[int, int]]
    """Events; an event that is not plain is its start and end in the payload."""
    rank: Any
    publisher_id: bytes | None
    others: int
    """The number of events that are not plain."""


ReadPlain: TypeAlias = Callable[[bytes, int], PlainBatch | None]
"""Reads a payload of at most so many events. Returns None where its batch is not plain, or without the C module."""


def read(payload: bytes, events_max: int, list_fields: tuple[int, int] = LIST_FIELDS) -> PlainBatch | None:
    """Read a batch. An event whose parent is 0 is not plain: what 0 says depends on the dialect.

    ``list_fields``: how many fields a store and a removal have at most in this dialect, if they are lists.
    """
    loops = native.selected
    if loops is None:
        return None
    found = loops.read_batch(payload, events_max, Stored, Removed, _CLEARED, normal_medium, *list_fields)
    if found is None:
        return None
    ts, events, rank, publisher_id, others = found
    return PlainBatch(ts, events if isinstance(events, list) else PlainEvents(events), rank, publisher_id, others)
