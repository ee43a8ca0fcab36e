"""Ends the old generations of one stream, and counts blocks if the number of blocks in the group is bounded."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from waymark.base.metrics import Metrics
from waymark.domain.names import HolderName
from waymark.domain.resolver import Resolver
from waymark.store.entries import GroupEntries

#: Seconds between two writes of the block counts: few enough that a bound is enforced within a second.
_NOTE_SECONDS: Final = 0.4


class Bounding:
    def __init__(
        self,
        resolver: Resolver,
        metrics: Metrics,
        end: Callable[[HolderName], Awaitable[None]],
        note: Callable[[Mapping[int, int], int], Awaitable[GroupEntries]],
    ) -> None:
        """``end`` ends a holder. ``note`` writes how many blocks each holder has, and how many the group may have."""
        self.is_needed = resolver.generations.are_bounded
        """Whether the group has bounds."""
        self._resolver = resolver
        self._end = end
        self._tell = note
        self._metrics = metrics
        self._noted = 0.0

    def begin_fold(self) -> None:
        """Begin a fold. All generations of this fold use the time at which it began."""
        self._resolver.generations.now = int(1000 * time.time())

    async def check(self, *, at_once: bool = False) -> None:
        """End the generations too old or beyond the bound on blocks. Raises Fenced.

        With a bound on blocks, write the block counts and read the cut of the group (see ``store.entries``) every
        0.4 s, or now if ``at_once``.
        """
        generations = self._resolver.generations
        if not self.is_needed:
            return
        self.begin_fold()
        await self._end_over()
        now = time.monotonic()
        if generations.bounds.max_entries and (at_once or now - self._noted >= _NOTE_SECONDS):
            self._noted = now
            old_cut = generations.cut
            await self._note()
            if generations.cut != old_cut:
                await self._end_over()
                await self._note()

    async def _end_over(self) -> None:
        resolver = self._resolver
        for name, reason in resolver.over():
            if name not in resolver.holders:
                continue  # an earlier call in this loop has ended this holder, too
            blocks = self._blocks_of(name)
            await self._end(name)
            if reason is not None and blocks:
                self._metrics.index_evictions.labels(reason=reason).inc(blocks)

    def _blocks_of(self, unit: HolderName) -> int:
        resolver = self._resolver
        return sum(resolver.memory.blocks_of(holder) for name, holder in resolver.holders.items() if name.is_of(unit))

    async def _note(self) -> None:
        resolver = self._resolver
        blocks = {holder: resolver.memory.blocks_of(holder) for holder in resolver.holders.values()}
        group = await self._tell(blocks, resolver.generations.bounds.max_entries)
        resolver.generations.publishers, resolver.generations.cut = max(1, group.publishers), group.cut
