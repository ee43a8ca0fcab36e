"""A simulated engine: caches, one per rank, that publish their changes over one socket, with faults on request.

For a request it prefills the prompt, and then makes one token after another. Token n of an answer is the text
``<mark>.<n>`` and a blank, with the mark of the request. So a client can check that each piece belongs to its request,
and that the answer is complete.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.simulator.cache import Prefix, PrefixCache
from waymark.simulator.encode import GPU, WITHOUT_MEDIUM, Dimensions, Encoder, ReplayFraming, UnknownEvent, WireEvent
from waymark.simulator.options import AnswerFaults, Faults, is_due
from waymark.simulator.publisher import SimulatedPublisher
from waymark.simulator.workload import SimulatedPrompt


class SimulatedEngine:
    """Prompts in, batches out. Rank r of the caches is rank r on the wire.

    This class causes the faults of batches, and the publisher all others; both read
    ``publisher.faults``, which may be replaced at any time. ``clock`` gives the ``ts`` of batches.
    """

    def __init__(
        self, publisher: SimulatedPublisher, caches: Sequence[PrefixCache], *, clock: Callable[[], float] = time.time
    ) -> None:
        self.publisher = publisher
        self.caches = tuple(caches)
        self.prompts = 0
        self._clock = clock
        self._batches = 0
        publisher.snapshot = self._snapshot

    def start(self) -> None:
        """Report the start of an engine: SGLang resets its cache, vLLM is silent."""
        if self.publisher.encoder.dialect.startswith("sglang"):
            for rank, cache in enumerate(self.caches):
                self.publisher.publish(cache.clear(), ts=self._clock(), rank=rank)

    async def prefill(self, prompt: SimulatedPrompt, rank: int = 0) -> int | None:
        """Run one prompt. Return the seq of its batch, or None if the cache did not change, so that nothing was
        sent.
        """
        self.prompts += 1
        cache = self.caches[rank]
        events = cache.prefill(prompt.tokens, prompt.lora_name, prompt.cache_salt, prompt.extras)
        return await self._publish(events, rank) if events else None

    async def fill(self, prefix: Prefix, rank: int = 0) -> int | None:
        """Take over a prefix from another engine. Return the seq of its batch, or None if no block was new."""
        events = self.caches[rank].fill(prefix)
        return await self._publish(events, rank) if events else None

    async def clear(self, rank: int = 0) -> int:
        """Reset the prefix cache of one rank. Return the seq of the batch that says so."""
        return await self._publish(self.caches[rank].clear(), rank)

    async def restart(self, *, rebind: bool = False) -> None:
        """Stop, and start with empty caches, as another process with other hashes."""
        for cache in self.caches:
            cache.restart()
        await self.publisher.restart(rebind=rebind)
        self.start()

    def _snapshot(self) -> list[tuple[int, list[WireEvent]]]:
        return [(rank, chunk) for rank, cache in enumerate(self.caches) for chunk in cache.snapshot()]

    async def _publish(self, events: list[WireEvent], rank: int) -> int:
        faults = self.publisher.faults
        self._batches += 1
        if is_due(faults.garbage_every, self._batches):
            self.publisher.publish_garbage()
        if is_due(faults.malformed_every, self._batches):
            self.publisher.send_malformed()
        if is_due(faults.unknown_every, self._batches):
            events = [UnknownEvent(), *events]
        seq = self.publisher.publish(events, ts=self._clock(), rank=rank)
        if self._batches == faults.restart_after:
            await self.restart()
        return seq


def build_engine(
    endpoint: str,
    replay_endpoint: str | None = None,
    snapshot_endpoint: str | None = None,
    *,
    dialect: str = "vllm-map",
    block_size: int = 16,
    gpu_blocks: int = 4096,
    cpu_blocks: int = 0,
    disk_blocks: int = 0,
    ranks: int = 1,
    seed: int = 0,
    repeat_rate: float = 0.05,
    removes_once: bool = False,
    dimensions: Dimensions | None = None,
    topic: str = "",
    buffer_batches: int = 10_000,
    replay_framing: ReplayFraming = "topic",
    linger_seconds: float = 0.0,
    faults: Faults | None = None,
    clock: Callable[[], float] = time.time,
) -> SimulatedEngine:
    """Return an engine whose cache behaves as the dialect's engine does; open its ``publisher`` before use.

    SGLang's stores off the GPU have tokens, and it removes several blocks in one event. A standard publisher counts no
    copies, so its blocks are never repeated. With ``removes_once`` a block with several copies is removed after the
    last one only. Raise ``InvalidValue`` if more than the GPU is asked for in a dialect without media.
    """
    if cpu_blocks and dialect in WITHOUT_MEDIUM:
        raise InvalidValue(f"{dialect} names no medium, so cpu_blocks is 0 there, not {cpu_blocks}", field="cpu_blocks")
    is_sglang, is_standard = dialect.startswith("sglang"), dialect.startswith("standard")
    caches = [
        PrefixCache(
            block_size,
            gpu_blocks,
            cpu_blocks,
            disk_blocks,
            seed=f"{seed}/{rank}",
            repeat_rate=0.0 if is_standard else repeat_rate,
            dense_offload=is_sglang or is_standard,
            removals_together=is_sglang,
            standard_hashes=dialect == "standard",
            removes_once=removes_once,
        )
        for rank in range(ranks)
    ]
    publisher = SimulatedPublisher(
        endpoint,
        replay_endpoint,
        snapshot_endpoint,
        encoder=Encoder(dialect, dimensions),
        topic=topic,
        buffer_batches=buffer_batches,
        replay_framing=replay_framing,
        linger_seconds=linger_seconds,
        faults=faults,
        clock=clock,
    )
    return SimulatedEngine(publisher, caches, clock=clock)


@record(frozen=True, slots=True)
class EngineSpeed:
    """The speed of an engine; 0 means no delay."""

    prefill_tokens_per_second: float = 0.0
    tokens_per_second: float = 0.0


@record(frozen=True, slots=True)
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
