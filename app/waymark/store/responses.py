"""Stored responses of gateways, and the queue of those to copy to MongoDB.

All are in one slot of Redis, so that one script can bound them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from waymark.store import keys
from waymark.store.answers import AnswersSize
from waymark.store.scripts import Scripts, Verdict

_GROUP = "mongo-sync"


def _keys() -> dict[str, str]:
    return {
        "responses": keys.RESPONSES,
        "kept": keys.RESPONSES_KEPT,
        "due": keys.RESPONSES_DUE,
        "copied": keys.RESPONSES_COPIED,
        "queue": keys.RESPONSES_QUEUE,
    }


class QueuedResponse(NamedTuple):
    """A response to be copied: its place in the queue, and its name."""

    id: str
    name: str


class ResponseBounds(NamedTuple):
    """How long responses are stored, how many, and in how many bytes. ``queue_max`` is 0 without MongoDB."""

    milliseconds: int
    entries_max: int
    bytes_max: int
    queue_max: int = 0


class ResponseChange(NamedTuple):
    """Whether a change was made, and how much is stored. A change is not made if the response does not fit."""

    is_done: bool
    room: AnswersSize


class StoredResponses:
    """Names are 32 hex digits. All methods raise StoreUnavailable."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def find(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the responses by name: an empty value if it was deleted, None if Redis does not have it."""
        return await self._scripts.find_responses(kept=keys.RESPONSES_KEPT, due=keys.RESPONSES_DUE, name=names)

    async def keep(self, name: str, value: bytes, bounds: ResponseBounds) -> ResponseChange:
        """Keep a response. Old responses are removed to make room; with MongoDB, only those that MongoDB has."""
        return await self._change(name, value, bounds, bounds.queue_max)

    async def put_back(self, name: str, value: bytes, bounds: ResponseBounds) -> ResponseChange:
        """Keep a response that MongoDB has, unless it was changed or deleted meanwhile."""
        return await self._change(name, value, bounds, 0)

    async def delete(self, name: str, bounds: ResponseBounds) -> ResponseChange:
        """Delete a response. With MongoDB, a mark of the deletion stays in Redis for a time."""
        return await self._change(name, b"", bounds, bounds.queue_max)

    async def _change(self, name: str, value: bytes, bounds: ResponseBounds, length: int) -> ResponseChange:
        group = _GROUP if bounds.queue_max else ""
        outcome = await self._scripts.keep_response(
            **_keys(),
            name=name,
            milliseconds=bounds.milliseconds,
            value=value,
            group=group,
            length=length,
            entries_max=bounds.entries_max,
            bytes_max=bounds.bytes_max,
        )
        evicted, entries, bytes_ = outcome.numbers
        return ResponseChange(outcome.verdict is not Verdict.FULL, AnswersSize(entries, bytes_, evicted))

    async def take(self, consumer: str, count: int, *, idle_ms: int) -> list[QueuedResponse]:
        """Return entries for a consumer: those that another one has held for ``idle_ms``, or else new ones."""
        entries = await self._scripts.take_responses(
            queue=keys.RESPONSES_QUEUE, group=_GROUP, consumer=consumer, count=count, milliseconds=idle_ms
        )
        return [QueuedResponse(*entry) for entry in entries]

    async def end(self, entries: Sequence[QueuedResponse]) -> None:
        """Take entries out of the queue, since MongoDB has their responses."""
        texts = [text for entry in entries for text in entry]
        await self._scripts.end_responses(
            responses=keys.RESPONSES,
            due=keys.RESPONSES_DUE,
            copied=keys.RESPONSES_COPIED,
            queue=keys.RESPONSES_QUEUE,
            group=_GROUP,
            entry=texts,
        )
