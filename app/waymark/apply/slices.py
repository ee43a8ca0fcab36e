"""Turns of one stream on the event loop: it gives the loop back before others notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from waymark.domain.slices import Slices

T = TypeVar("T")

TURN_SECONDS = 0.003
"""After this long the next slice waits for the loop's other callbacks; a slice may take some 2 ms more."""


class SliceRunner:
    """Runs the sliced work of one stream, piece after piece, and counts the time since the loop had its turn."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, between: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``between`` is called at each turn of the loop: a lease does not wait for a long batch."""
        self._between = between
        self._clock = clock
        self._until = 0.0

    def begin(self) -> None:
        """The loop has just had its turn."""
        self._until = self._clock() + TURN_SECONDS

    async def run(self, work: Slices[T]) -> T:
        """The result of ``work``."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                if self._clock() >= self._until:
                    await self._give_back()
                return result
            if self._clock() >= self._until:
                await self._give_back()

    async def _give_back(self) -> None:
        """Let the loop have its turn."""
        await asyncio.sleep(0)
        if self._between is not None:
            await self._between()
        self.begin()
