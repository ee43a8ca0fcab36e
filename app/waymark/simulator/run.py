"""A run of simulated engines from beginning to end, for ``waymark simulate``.

This module never prints: ``on_start`` gets the news of the start, and the summary is the result. Engines, prompts and
their order depend on the seed alone; only ``ts`` and the pace depend on the clock.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from waymark.base.record import record
from waymark.simulator.encode import KIND_NAMES, Dimensions
from waymark.simulator.engine import EngineSpeed, SimulatedEngine, build_engine
from waymark.simulator.http import EngineHttp
from waymark.simulator.options import SimulateOptions
from waymark.simulator.workload import SimulatedPrompt, conversations, read_trace

Register: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Registers an engine with a running Waymark, by the fields of its registration."""
LINGER_SECONDS = 1.0
"""The time for the last frames to be sent."""
PROMPTS_PER_SECOND = 10.0
"""The rate if neither a rate nor a trace is set."""


@record(frozen=True, slots=True)
class EngineStarted:
    """One engine is up; as text, the line to print."""

    instance_id: str
    endpoint: str
    replay_endpoint: str | None
    dialect: str
    is_registered: bool
    http_url: str | None = None

    def __str__(self) -> str:
        http = "" if self.http_url is None else f", {self.http_url}"
        replay = "no replay" if self.replay_endpoint is None else f"replay {self.replay_endpoint}"
        registered = ", registered" if self.is_registered else ""
        return f"{self.instance_id}: {self.dialect} on {self.endpoint}, {replay}{http}{registered}"


@record(frozen=True, slots=True)
class EngineSummary:
    """The work of one engine; as text, the line to print."""

    instance_id: str
    prompts: int
    batches: int
    dropped: int
    restarts: int
    replays: int
    blocks_hit: int
    blocks_stored: int
    blocks_removed: int
    blocks_held: dict[str, int]
    """Different blocks per medium, over all ranks; a block on two ranks counts twice."""

    def __str__(self) -> str:
        blocks_text = ", ".join(f"{count} on {medium}" for medium, count in self.blocks_held.items())
        return (
            f"{self.instance_id}: {self.prompts} prompts, {self.batches} batches ({self.dropped} dropped), "
            f"{self.blocks_stored} blocks stored, {self.blocks_removed} removed, {self.blocks_hit} hit, "
            f"{self.restarts} restarts, {self.replays} replays; holds {blocks_text}"
        )


@record(frozen=True, slots=True)
class Summary:
    """The whole run; as text, one line per engine and one for all."""

    seconds: float
    engines: tuple[EngineSummary, ...]

    @property
    def prompts(self) -> int:
        return sum(engine.prompts for engine in self.engines)

    @property
    def blocks_stored(self) -> int:
        return sum(engine.blocks_stored for engine in self.engines)

    def __str__(self) -> str:
        total = f"{self.prompts} prompts, {self.blocks_stored} blocks stored in {self.seconds:.1f} s"
        return "\n".join([*(str(engine) for engine in self.engines), total])


async def simulate(
    options: SimulateOptions,
    *,
    stop: asyncio.Event | None = None,
    on_start: Callable[[EngineStarted], None] | None = None,
    on_prompt: Callable[[int], None] = lambda _: None,
    register: Register | None = None,
) -> Summary:
    """Run engines until the prompts, the time or the trace is over, or ``stop`` is set. Return their work.

    ``register`` gets each engine once it is up, then ``on_start``, and ``on_prompt`` the number of prompts so far.

    Raise ``InvalidValue`` if an address cannot be bound, or a trace cannot be read, and the errors of ``register``.
    """
    stop = asyncio.Event() if stop is None else stop
    loop = asyncio.get_running_loop()
    began = loop.time()
    engines = [_engine(options, i) for i in range(options.engines)]
    async with AsyncExitStack() as stack:
        for i, engine in enumerate(engines):
            await stack.enter_async_context(engine.publisher)
            http_url = None
            if options.http_port is not None:
                http_url = (await stack.enter_async_context(_http(options, options.http_port, i, engine))).url
            if register is not None:
                await register(_registration(options, i, engine, http_url))
            if on_start is not None:
                on_start(_started(options, i, engine, http_url, is_registered=register is not None))
        for engine in engines:
            engine.start()
        deadline = None if options.duration_seconds is None else loop.time() + options.duration_seconds
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                await _feed(options, engines, stop, on_prompt)
                if options.stay:
                    await stop.wait()
        except TimeoutError:
            if not timeout.expired():
                raise
    return Summary(loop.time() - began, tuple(_summary(options, i, engine) for i, engine in enumerate(engines)))


async def _feed(
    options: SimulateOptions, engines: list[SimulatedEngine], stop: asyncio.Event, on_prompt: Callable[[int], None]
) -> None:
    """Feed prompts to engines and ranks at random, at the wanted pace."""
    rng = random.Random(f"{options.seed}/routing")
    loop = asyncio.get_running_loop()
    began = loop.time()
    due = 0.0
    for number, prompt in enumerate(_prompts(options)):
        if number == options.prompts or stop.is_set():
            return
        if options.blocks_per_second is None:
            due = _due(options, number, prompt)
        if await _stopped_within(stop, began + due - loop.time()):
            return
        await rng.choice(engines).prefill(prompt, rng.randrange(options.ranks))
        on_prompt(number + 1)
        if options.blocks_per_second:
            due += len(prompt.tokens) // options.block_size / options.blocks_per_second


def _due(options: SimulateOptions, number: int, prompt: SimulatedPrompt) -> float:
    """Return when to run a prompt, in seconds since the first; 0 for at once."""
    if options.prompts_per_second is None and prompt.at_seconds is not None:
        return prompt.at_seconds / options.trace_speed if options.trace_speed else 0.0
    rate = PROMPTS_PER_SECOND if options.prompts_per_second is None else options.prompts_per_second
    return number / rate if rate else 0.0


async def _stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    """Return whether ``stop`` was set before ``seconds`` had passed; other tasks run in any case."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    try:
        async with asyncio.timeout(seconds):
            return await stop.wait()
    except TimeoutError:
        return stop.is_set()


def _prompts(options: SimulateOptions) -> Iterator[SimulatedPrompt]:
    if options.trace is not None:
        return read_trace(options.trace)
    return conversations(options.seed, lora_names=options.lora_names, cache_salts=options.cache_salts)


def _port(first: int, i: int) -> int:
    """Return the port of engine ``i``; 0 for any free one."""
    return first + i if first else 0


def _instance(options: SimulateOptions, i: int) -> str:
    return f"{options.instance_prefix}-{i}"


def _engine(options: SimulateOptions, i: int) -> SimulatedEngine:
    port = options.base_port + 2 * i if options.base_port else 0
    replay_port = port + 1 if port else 0
    return build_engine(
        f"tcp://{options.host}:{port}",
        f"tcp://{options.host}:{replay_port}" if options.has_replay else None,
        None if options.snapshot_port is None else f"tcp://{options.host}:{_port(options.snapshot_port, i)}",
        dialect=options.dialect,
        block_size=options.block_size,
        gpu_blocks=options.gpu_blocks,
        cpu_blocks=options.cpu_blocks,
        disk_blocks=options.disk_blocks,
        ranks=options.ranks,
        seed=options.seed + i,
        repeat_rate=options.repeat_rate,
        dimensions=Dimensions(options.model_name, options.block_size, options.tenant_id, _instance(options, i)),
        topic=options.topic,
        buffer_batches=options.buffer_batches,
        replay_framing=options.replay_framing,
        linger_seconds=LINGER_SECONDS,
        faults=options.faults,
    )


def _http(options: SimulateOptions, port: int, i: int, engine: SimulatedEngine) -> EngineHttp:
    return EngineHttp(
        engine,
        host=options.host,
        port=_port(port, i),
        model_name=options.model_name,
        block_size=options.block_size,
        gpu_blocks=options.gpu_blocks,
        adapters=options.lora_names,
        answer_tokens=options.answer_tokens,
        pace=EngineSpeed(options.prefill_tokens_per_second, options.tokens_per_second),
        faults=options.answer_faults,
    )


def _registration(options: SimulateOptions, i: int, engine: SimulatedEngine, http_url: str | None) -> dict[str, Any]:
    return {
        "endpoint": _advertised(options, engine.publisher.endpoint),
        "replay_endpoint": _advertised(options, engine.publisher.replay_endpoint),
        "snapshot_endpoint": _advertised(options, engine.publisher.snapshot_endpoint),
        "type": KIND_NAMES[options.dialect.partition("-")[0]],
        "model": options.model_name,
        "instance_id": _instance(options, i),
        "tenant_id": options.tenant_id,
        "block_size": options.block_size,
        "dp_rank": 0,
        "address": _advertised(options, http_url),
    }


def _advertised(options: SimulateOptions, endpoint: str | None) -> str | None:
    if endpoint is None or options.advertised_host is None:
        return endpoint
    return f"{endpoint.partition('://')[0]}://{options.advertised_host}:{endpoint.rpartition(':')[2]}"


def _started(
    options: SimulateOptions, i: int, engine: SimulatedEngine, http_url: str | None, *, is_registered: bool
) -> EngineStarted:
    publisher = engine.publisher
    return EngineStarted(
        _instance(options, i), publisher.endpoint, publisher.replay_endpoint, options.dialect, is_registered, http_url
    )


def _summary(options: SimulateOptions, i: int, engine: SimulatedEngine) -> EngineSummary:
    counts = engine.publisher.counts
    blocks_held: Counter[str] = Counter()
    for cache in engine.caches:
        blocks_held.update(cache.size())
    return EngineSummary(
        _instance(options, i),
        engine.prompts,
        counts["batches"],
        counts["dropped"],
        counts["restarts"],
        counts["replays"],
        sum(cache.totals.hit for cache in engine.caches),
        sum(cache.totals.stored for cache in engine.caches),
        sum(cache.totals.removed for cache in engine.caches),
        dict(blocks_held),
    )
