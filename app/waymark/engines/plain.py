"""Reads the plain events of vLLM's dialect with the C module; every other event is left to the dialect's own reader.

A plain event needs no special rule: it has neither a salt nor an image, and is entirely valid. So the C module rejects
no event, and the texts of rejections are in Python only. Most events of most engines are plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from waymark.base import native
from waymark.domain.events import (
    Batch,
    Cleared,
    Event,
    MixedEvents,
    PlainEvents,
    Removed,
    Stored,
    StoredReference,
    StoredWindow,
)
from waymark.domain.media import normal_medium

_CLEARED = Cleared()
ListFields: TypeAlias = tuple[int, int]
"""The most fields that the C module reads in a store and in a removal in list form, for one dialect."""
LIST_FIELDS: Final[ListFields] = (10, 3)
"""The numbers of fields for vLLM."""


class PlainBatch(NamedTuple):
    """A batch of plain form, whose events need not all be plain."""

    ts: Any
    events: Sequence[Event | tuple[int, int]]
    """The plain events; for any other event, its start and end in the payload."""
    rank: Any
    publisher_id: bytes | None
    others: int
    """The number of other events."""


def read(payload: bytes, events_max: int, list_fields: ListFields = LIST_FIELDS) -> PlainBatch | None:
    """Read a batch of at most ``events_max`` events. Return None if its form is not plain, or without the C module.

    An event whose parent is 0 is not plain: the meaning of 0 depends on the dialect.
    """
    loops = native.selected
    if loops is None:
        return None
    result = loops.read_batch(
        payload, events_max, Stored, StoredReference, StoredWindow, Removed, _CLEARED, normal_medium, *list_fields
    )
    if result is None:
        return None
    ts, events, rank, publisher_id, count, is_mixed = result
    if not isinstance(events, list):
        events = MixedEvents(events) if is_mixed else PlainEvents(events)
    return PlainBatch(ts, events, rank, publisher_id, count)


def go_on(
    batch: Batch, payloads: tuple[bytes, ...], events_max: int, hashes_max: int, list_fields: ListFields
) -> Batch:
    """Return the batch, extended by the next frames that differ from it in their blocks only, up to ``hashes_max``
    hashes.

    ``payloads`` are those of the next frames. The other arguments are those of ``read``. The events of the batch are
    ``PlainEvents``.
    """
    events = batch.events
    assert type(events) is PlainEvents
    hashes_left = max(0, hashes_max - events.hashes)
    following, ts, *counts = events.loop.go_on(
        payloads, batch.ts, *reading_of(batch, events_max, hashes_left, list_fields)
    )
    return replace(batch, ts=ts, events=events.with_following(following, *counts)) if following else batch


def reading_of(batch: Batch, events_max: int, hashes_max: int, list_fields: ListFields) -> tuple[Any, ...]:
    """Return the arguments of ``Events.go_on`` from the rank on; see ``go_on``."""
    return batch.dp_rank, batch.publisher_id, events_max, hashes_max, normal_medium, *list_fields
