"""Runs long computations of one stream in slices, with pauses in which the event loop runs other tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from waymark.domain.slices import Slices

T = TypeVar("T")

SLICE_SECONDS = 0.003
"""Seconds of computing after which the event loop runs other callbacks; the current slice may take 2 ms more."""


class SliceRunner:
    """Runs sliced work of one stream, and pauses when ``SLICE_SECONDS`` have passed since the last pause."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, between: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``between`` is awaited in each pause; it renews the lease during a long batch."""
        self._between = between
        self._clock = clock
        self._until = 0.0

    def begin(self) -> None:
        """Restart the clock of the slice, because the event loop has just run other callbacks."""
        self._until = self._clock() + SLICE_SECONDS

    async def run(self, work: Slices[T]) -> T:
        """Run ``work`` to its end, and return its result."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                if self._clock() >= self._until:
                    await self.pause()
                return result
            if self._clock() >= self._until:
                await self.pause()

    async def pause(self) -> None:
        """Let the event loop run other callbacks, and renew the lease if it is due."""
        await asyncio.sleep(0)
        if self._between is not None:
            await self._between()
        self.begin()
