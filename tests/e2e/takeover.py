"""A worker is killed in the middle of a fast stream: how long until another goes on, and is everything there?"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.fleet import Member
from waymark.domain.names import PublisherName
from waymark.simulator.encode import WireEvent
from waymark.simulator.engine import build_engine
from waymark.store import keys
from waymark.store.claims import Claim

BLOCK_SIZE = 16
SYSTEM_BLOCKS = 16
PROMPT_BLOCKS = 128
#: What an engine holds at most, in prompts; beyond it each prompt evicts another.
HELD_PROMPTS = 256
SETTLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of one kill."""

    blocks: int
    """Blocks stored in all."""
    blocks_per_second: float
    """Blocks stored, while the engine published."""
    takeover_seconds: float
    """From the kill to the first batch that another worker has applied."""
    caught_up_seconds: float
    """From the kill to the last batch published before this was seen applied."""
    wrong: list[int]
    """Prompts, by number, that are not answered as the engine's cache has them."""
    counters: dict[str, int]


class Load:
    """Prompts, prepared: what an engine tells at each of them."""

    def __init__(self, seed: int, prompts: int) -> None:
        rng = random.Random(seed)
        # Without repeats every batch stores something, and nothing twice.
        self.engine = build_engine(
            "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=BLOCK_SIZE, seed=seed, repeat_rate=0.0,
            gpu_blocks=HELD_PROMPTS * PROMPT_BLOCKS,
        )  # fmt: skip
        system = rng.choices(range(100_000), k=SYSTEM_BLOCKS * BLOCK_SIZE)
        own = (PROMPT_BLOCKS - SYSTEM_BLOCKS) * BLOCK_SIZE
        self.prompts = [(*system, *rng.choices(range(100_000), k=own)) for _ in range(prompts)]
        self.events: list[list[WireEvent]] = [self.engine.caches[0].prefill(tokens) for tokens in self.prompts]

    async def publish(self, blocks_per_second: float) -> float:
        """All of it at that pace; the pace that came of it."""
        began, seconds = time.monotonic(), (PROMPT_BLOCKS - SYSTEM_BLOCKS) / blocks_per_second
        for number, events in enumerate(self.events):
            await asyncio.sleep(max(0.0, began + number * seconds - time.monotonic()))
            self.engine.publisher.publish(events, ts=time.time())
        return len(self.events) * (PROMPT_BLOCKS - SYSTEM_BLOCKS) / (time.monotonic() - began)

    def matched(self, number: int) -> int:
        """How many tokens of a prompt the engine's cache has at the end."""
        blocks = 0
        for media in self.engine.caches[0].held(self.prompts[number]):
            if not media:
                break
            blocks += 1
        return blocks * BLOCK_SIZE


async def take_over(
    workers: Sequence[Member],
    replica: Member,
    redis: Redis,
    *,
    tenant_id: str,
    blocks_per_second: int,
    seconds_before: float,
    seconds_after: float,
) -> Figures:
    """Publish, kill the worker that has the stream, go on publishing until another has it; then compare all of it.

    ``seconds_after`` is for how long it publishes after the kill, at the least.
    """
    count = int((seconds_before + seconds_after) * blocks_per_second / (PROMPT_BLOCKS - SYSTEM_BLOCKS))
    load = await asyncio.to_thread(Load, 1, count)
    async with load.engine.publisher as publisher, asyncio.TaskGroup() as tasks:
        group: dict[str, Any] = {"tenant_id": tenant_id, "model": "m"}
        await replica.post(
            "/register", **group, instance_id="fast", type="vLLM", block_size=BLOCK_SIZE,
            endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint,
        )  # fmt: skip
        name = PublisherName("fast", tenant_id, 0)
        raw = await cast("Awaitable[bytes]", redis.hget(keys.PUBLISHERS, keys.publisher_field(name)))
        claim = Claim.decode(raw)
        record = keys.record(claim.group_id, claim.publisher)

        async def state() -> tuple[str, int]:
            fields = await cast("Awaitable[list[bytes | None]]", redis.hmget(record, ["worker", "watermark"]))
            return (fields[0] or b"").decode(), int(fields[1] or -1)

        publishing = tasks.create_task(load.publish(blocks_per_second))
        await asyncio.sleep(seconds_before)
        owner, _ = await state()
        victim = next(worker for worker in workers if worker.name == owner)
        await victim.kill()
        killed, (_, watermark) = time.monotonic(), await state()

        async def goes_on() -> bool:
            now_at, at = await state()
            return now_at != victim.name and at > watermark

        await wait_until(goes_on, "another worker applies the stream", SETTLE_SECONDS)
        takeover_seconds = time.monotonic() - killed
        newest = publisher.next_seq - 1

        async def has_caught_up() -> bool:
            return (await state())[1] >= newest

        await wait_until(has_caught_up, "what was published meanwhile is applied", SETTLE_SECONDS)
        caught_up_seconds = time.monotonic() - killed
        pace = await publishing

        async def is_done() -> bool:
            return (await state())[1] == publisher.next_seq - 1

        await wait_until(is_done, "the last batch is applied", SETTLE_SECONDS)
        victim.start()
        await victim.ready()

        async def matched(number: int) -> int:
            answer = await replica.query(load.prompts[number], block_size=BLOCK_SIZE, **group)
            return int(answer[tenant_id]["fast"]["longest_matched"])

        wrong = [number for number in range(count) if await matched(number) != load.matched(number)]
        counters = (await replica.publisher("fast", tenant_id=tenant_id))["counters"]
        return Figures(
            load.engine.caches[0].totals.stored,
            pace,
            takeover_seconds,
            caught_up_seconds,
            wrong,
            {each: counters.get(each, 0) for each in ("batches_lost", "restarts", "waiting_lost")},
        )
