"""The work of a simulated engine on one request: it prefills the prompt, and then makes one token after another.

Token n of an answer is the text ``<mark>.<n>`` and a blank, with the mark of the request. So a client can check that
each piece belongs to its request, and that the answer is complete.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

from waymark.base.errors import InvalidValue
from waymark.simulator.encode import GPU
from waymark.simulator.engine import SimulatedEngine
from waymark.simulator.faults import AnswerFaults, is_due
from waymark.simulator.workload import SimulatedPrompt


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The speed of an engine; 0 means no delay."""

    prefill_tokens_per_second: float = 0.0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer that the engine is going to generate."""

    mark: str
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the prefix cache had."""
    tokens: int
    """The number of tokens of the answer."""

    def piece(self, number: int) -> str:
        return f"{self.mark}.{number} "

    @property
    def text(self) -> str:
        return "".join(self.piece(number) for number in range(self.tokens))


class Generator:
    """The requests of one engine. ``faults`` may be replaced at any time."""

    def __init__(self, engine: SimulatedEngine, block_size: int, pace: EngineSpeed, faults: AnswerFaults) -> None:
        self.faults = faults
        self.running = 0
        self.requests = 0
        self.cancelled = 0
        """Requests whose client went before the end."""
        self._engine = engine
        self._block_size = block_size
        self._pace = pace
        self._prefilling = asyncio.Lock()
        self._ranks = itertools.cycle(range(len(engine.caches)))

    def fault(self) -> str | None:
        """Count a request. Return ``error``, ``hang`` or ``cut`` if it must fail."""
        self.requests += 1
        faults = self.faults
        due = {"error": faults.error_every, "hang": faults.hang_every, "cut": faults.cut_every}
        return next((name for name, period in due.items() if is_due(period, self.requests)), None)

    async def prefill(self, prompt: SimulatedPrompt, mark: str, tokens: int, rank: int | None = None) -> Completion:
        """Compute a prompt, and publish its stored blocks. Prompts are computed one after the other."""
        chosen = next(self._ranks) if rank is None else rank
        if chosen >= len(self._engine.caches):
            raise InvalidValue(f"there is no rank {chosen}: this engine has {len(self._engine.caches)}")
        async with self._prefilling:
            cached_media = self._engine.caches[chosen].held(prompt.tokens, prompt.lora_name, prompt.cache_salt)
            hits = next((number for number, media in enumerate(cached_media) if GPU not in media), len(cached_media))
            cached = hits * self._block_size
            if self._pace.prefill_tokens_per_second:
                await asyncio.sleep((len(prompt.tokens) - cached) / self._pace.prefill_tokens_per_second)
            await self._engine.prefill(prompt, chosen)
        return Completion(mark, len(prompt.tokens), cached, tokens)

    async def pieces(self, answer: Completion) -> AsyncIterator[str]:
        """Yield the tokens of an answer, as they are made."""
        rate = self._pace.tokens_per_second
        for number in range(answer.tokens):
            if rate:
                await asyncio.sleep(1 / rate)
            yield answer.piece(number)

    async def whole(self, answer: Completion) -> str:
        """Return all tokens of an answer."""
        return "".join([piece async for piece in self.pieces(answer)])
