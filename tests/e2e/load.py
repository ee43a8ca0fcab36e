"""Engines that are busy all the time, with a few prompts that share prefixes, until they are told to rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from tests.e2e.conftest import BLOCK_SIZE, Engines
from waymark.simulator.workload import SimulatedPrompt

SYSTEMS = 2
PAUSE_SECONDS = 0.02


class Load:
    """Prefills one prompt after another on engines taken at random; ``prompts`` are all there are."""

    def __init__(
        self,
        engines: Engines,
        rng: random.Random,
        *,
        prompts: int = 12,
        blocks: int = 6,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """Each prompt is one of two beginnings and at most ``blocks`` blocks of its own."""
        systems = [tuple(rng.choices(range(1000), k=3 * BLOCK_SIZE)) for _ in range(SYSTEMS)]
        self.prompts = [
            rng.choice(systems) + tuple(rng.choices(range(1000), k=rng.randint(1, blocks) * BLOCK_SIZE))
            for _ in range(prompts)
        ]
        self._engines = engines
        self._rng = rng
        self._pause_seconds = pause_seconds
        self._resting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError) and error is None:
            raise AssertionError("the load has ended by itself") from ended

    async def _work(self) -> None:
        while True:
            async with self._resting:
                engine = self._rng.choice(list(self._engines.engines.values()))
                prompt = self._rng.choice(self.prompts)
                # Now and then a shorter one, so that what is evicted differs from engine to engine.
                end = self._rng.randint(1, len(prompt) // BLOCK_SIZE) * BLOCK_SIZE
                await engine.prefill(SimulatedPrompt(prompt[:end]))
            await asyncio.sleep(self._pause_seconds)

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Nothing is published in here, except by who is in here."""
        async with self._resting:
            yield
