"""What routings without an index go by: chance, stickiness, the caches themselves.

Each gives a key per engine, the least is the best; ``simulate_engines.pick`` adds the load, in the same way for all.
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
        """One per engine. ``names`` are the engine hashes of the request's blocks; requests come in their order."""

    def hear(self, at_seconds: float, engine: int, events: list[WireEvent]) -> None:
        """What an engine publishes."""


class Deaf:
    """Needs no events."""

    def hear(self, at_seconds: float, engine: int, events: list[WireEvent]) -> None:
        """Nothing is made of it."""


class Chance(Deaf):
    def __init__(self, engines: int, seed: int) -> None:
        self._engines = engines
        self._random = random.Random(f"{seed}/chance")

    async def keys(self, request: Request, names: Sequence[int]) -> Sequence[float]:
        return [self._random.random() for _ in range(self._engines)]


class Stickiness(Deaf):
    """The same engine for all prompts with the same first blocks, and the same next one where that has too much to do.

    Which one follows from rendezvous hashing of the first ``prefix_blocks`` blocks, so nothing is to be kept.
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
    """Reads the engines' caches, as no router can."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def matches(self, names: Sequence[int]) -> list[int]:
        """Tokens per engine."""
        return [engine.cache.held(names) * BLOCK_SIZE for engine in self._engines]

    async def keys(self, request: Request, names: Sequence[int]) -> Sequence[float]:
        return [-match for match in self.matches(names)]
