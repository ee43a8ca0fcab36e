"""What is known of each target beside its load, a moment old: read for the groups whose decisions need it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.store.background import StartTask

#: Readings that are older are read again, behind the decision; beyond the second the decision waits for it.
_FRESH_SECONDS = 0.25
_OLD_SECONDS = 1.0
_GROUPS_MAX = 1024

T = TypeVar("T")
ReadGroup = Callable[[int, Sequence[int]], Awaitable[Mapping[int, T]]]
"""Reads what Redis has of the publishers of a group."""


@dataclass(slots=True)
class _GroupReadings(Generic[T]):
    found: Mapping[int, T] = field(default_factory=dict)
    read_at: float = float("-inf")
    reading: asyncio.Task[None] | None = None


class Readings(Generic[T]):
    """The latest readings by group and publisher. A reading that Redis does not have any more does not count."""

    def __init__(self, read: ReadGroup[T], begin: StartTask) -> None:
        self._read_from_redis = read
        self._begin = begin
        self._groups: dict[int, _GroupReadings[T]] = {}

    async def of(self, group_id: int, publishers: Sequence[int]) -> Mapping[int, T]:
        """The readings of these publishers; none if Redis has none."""
        now = asyncio.get_running_loop().time()
        group = self._groups.get(group_id)
        if group is None:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.pop(next(iter(self._groups)))
            group = self._groups[group_id] = _GroupReadings()
        if now - group.read_at > _FRESH_SECONDS and (group.reading is None or group.reading.done()):
            group.reading = self._begin(self._read(group, group_id, publishers))
        if now - group.read_at > _OLD_SECONDS and group.reading is not None:
            await asyncio.shield(group.reading)
        return group.found

    def clear(self) -> None:
        """Redis came back empty: ids stand for something else."""
        self._groups.clear()

    async def _read(self, group: _GroupReadings[T], group_id: int, publishers: Sequence[int]) -> None:
        now = asyncio.get_running_loop().time()
        try:
            group.found = await self._read_from_redis(group_id, publishers)
        except StoreUnavailable:
            group.found = {}  # the decision itself reports that Redis is unavailable
        group.read_at = now
