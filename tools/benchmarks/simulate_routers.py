"""Routers without an index: by chance, by stickiness, and by the contents of the caches.

Each returns a key for each engine, and the smallest key is the best. ``simulate_engines.pick`` takes the load into
account, in the same way for all routers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from tools.benchmarks.prompts import BLOCK_SIZE
from tools.benchmarks.simulate_engines import Engine
from tools.benchmarks.simulate_trace import Request
from waymark.simulator.encode import WireEvent


class Router(Protocol):
    async def keys(self, request: Request, names: Sequence[int]) -> Sequence[float]:
        """Return a key for each engine. ``names`` are the engine hashes of the request's blocks. Calls are in the order
        of the requests."""

    def hear(self, at_seconds: float, engine: int, events: list[WireEvent]) -> None:
        """Process the events of an engine."""


class Deaf:
    """A router that needs no events."""

    def hear(self, at_seconds: float, engine: int, events: list[WireEvent]) -> None:
        """Ignore the events."""


class Chance(Deaf):
    def __init__(self, engines: int, seed: int) -> None:
        self._engines = engines
        self._random = random.Random(f"{seed}/chance")

    async def keys(self, request: Request, names: Sequence[int]) -> Sequence[float]:
        return [self._random.random() for _ in range(self._engines)]


class Stickiness(Deaf):
    """A router that sends all prompts with the same first blocks to the same engine, or to the same next one if that
    engine is too busy.

    Rendezvous hashing of the first ``prefix_blocks`` blocks determines the engine, so the router keeps no state.
    """

    def __init__(self, engines: int, prefix_blocks: int) -> None:
        self._engines = engines
        self._prefix_blocks = prefix_blocks

    async def keys(self, request: Request, names: Sequence[int]) -> Sequence[float]:
        # A name stands for the whole prefix up to it, so the last one is enough.
        last = names[: self._prefix_blocks][-1:]
        return [
            float(int.from_bytes(blake2b(f"{last}/{engine}".encode(), digest_size=6).digest(), "big"))
            for engine in range(self._engines)
        ]


class Truth(Deaf):
    """A router that reads the caches of the engines, as no real router can."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def matches(self, names: Sequence[int]) -> list[int]:
        """Return the cached tokens by engine."""
        return [engine.cache.held(names) * BLOCK_SIZE for engine in self._engines]

    async def keys(self, request: Request, names: Sequence[int]) -> Sequence[float]:
        return [-match for match in self.matches(names)]
