"""Runs long computations of one stream in slices, with pauses in which the event loop runs other tasks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

from waymark.domain.slices import Slices

T = TypeVar("T")

SLICE_SECONDS = 0.003
"""Seconds of computing after which the event loop runs other callbacks; the current slice may take 2 ms more."""


class LoopTurns:
    """The order in which the streams of an event loop compute: one slice, or one large read, in each iteration.

    So other users of the loop wait for one slice, however many streams have long work.
    """

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, LoopTurns]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], object]] = deque()

    @classmethod
    def of_loop(cls) -> LoopTurns:
        """Return the turns of the running loop."""
        loop = asyncio.get_running_loop()
        turns = cls._of_loops.get(loop)
        if turns is None:
            turns = cls._of_loops[loop] = cls(loop)
        return turns

    async def next(self) -> None:
        """Wait for a turn, after all tasks that wait already."""
        turn: asyncio.Future[None] = self._loop.create_future()

        def give() -> None:
            if not turn.done():  # its task may have been cancelled
                turn.set_result(None)

        self.call(give)
        await turn

    def call(self, work: Callable[[], object]) -> None:
        """Call ``work`` in a turn of its own, after all tasks that wait already."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._give)

    def _give(self) -> None:
        try:
            self._waiting[0]()
        finally:
            self._waiting.popleft()
            if self._waiting:
                self._loop.call_soon(self._give)


class SliceRunner:
    """Runs sliced work of one stream, and pauses when ``SLICE_SECONDS`` have passed since the last pause."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
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
                if self.is_over:
                    await self.pause()
                return result
            if self.is_over:
                await self.pause()

    @property
    def is_over(self) -> bool:
        """Whether the event loop should run other callbacks now."""
        return self._clock() >= self._until

    async def pause(self) -> None:
        """Let the event loop run other callbacks."""
        await LoopTurns.of_loop().next()
        self.begin()
