"""A whole worker beside a slot of a Cluster that is half moved: one group's writes wait, in bounded buffers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import BLOCK_SIZE, PATIENCE_SECONDS, QUICK
from tests.store.factories import registration
from tests.topologies import Cluster, farm, migrate, moving, start_cluster
from waymark.base.metrics import Metrics
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.match import conductor_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.ingest.options import WorkerOptions
from waymark.ingest.worker import Worker
from waymark.simulator.engine import SimulatedEngine, build_engine
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys
from waymark.store.store import Store

BUFFER_BYTES = 16 * 1024
STEPS = 16
#: So long at the least, which is several leases.
HALF_MOVED_SECONDS = 2.5
PROMPT_BLOCKS = 100
#: Of one engine: what it has room for, so that it removes nothing.
PROMPTS_MAX = 150
#: How many of the newest prompts are asked for in each step, beside those that wait.
ASKED = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with farm() as servers:
        yield start_cluster(servers)


@dataclass
class Publisher:
    """An engine in a group of its own, with room for all its prompts."""

    model_name: str
    engine: SimulatedEngine
    store: Store
    prompts: list[SimulatedPrompt] = field(default_factory=list)

    async def work(self) -> None:
        tokens = random.Random(len(self.prompts)).choices(range(2**31), k=PROMPT_BLOCKS * BLOCK_SIZE)
        self.prompts.append(SimulatedPrompt(tuple(tokens)))
        assert await self.engine.prefill(self.prompts[-1]) is not None

    async def found(self, prompt: SimulatedPrompt) -> int:
        """How many blocks of it a query finds; the query is not refused, and is no part of an answer."""
        left = list(extend(None, token_bytes(prompt.tokens), BLOCK_SIZE))

        def source(count: int) -> bytes:
            piece, left[:] = left[:count], left[count:]
            return pack(piece)

        reading = await self.store.reader.read(
            GroupName("default", self.model_name), BLOCK_SIZE, source, deadline_seconds=PATIENCE_SECONDS
        )
        assert reading is not None
        assert not reading.is_partial
        return conductor_rows(reading.walk)[self.model_name].longest

    async def has_all(self) -> bool:
        return all([await self.found(prompt) == PROMPT_BLOCKS for prompt in self.prompts])

    async def has_newest(self) -> bool:
        return all([await self.found(prompt) == PROMPT_BLOCKS for prompt in self.prompts[-ASKED:]])


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def opened(stack: AsyncExitStack, cluster: Cluster, metrics: Metrics | None = None) -> Store:
    store = Store.open(cluster.url, shards=1, timeout_seconds=2.0, metrics=metrics)
    stack.push_async_callback(store.close)
    return store


async def ended(working: asyncio.Task[None]) -> None:
    working.cancel()
    await asyncio.wait([working])


async def test_a_worker_goes_on_with_other_groups_while_a_slot_is_half_moved(
    cluster: Cluster, stack: AsyncExitStack, short_path: Path
) -> None:
    store = await opened(stack, cluster)
    publishers: list[Publisher] = []
    for name in ("moving", "beside-1", "beside-2"):
        address = f"ipc://{short_path}/{name}"
        engine = build_engine(address, f"{address}.replay", block_size=BLOCK_SIZE, gpu_blocks=20_000, cpu_blocks=0)
        await stack.enter_async_context(engine.publisher)
        await store.registry.register(
            registration(
                name,
                model_name=name,
                block_size=BLOCK_SIZE,
                endpoint=engine.publisher.endpoint,
                replay_endpoint=engine.publisher.replay_endpoint,
            )
        )
        publishers.append(Publisher(name, engine, store))
    metrics = Metrics()
    options = WorkerOptions("worker-1", replace(QUICK, lease_seconds=1.0, stream_buffer_bytes=BUFFER_BYTES))
    worker = Worker(await opened(stack, cluster, metrics), metrics, options)
    working = asyncio.create_task(worker.run())
    stack.push_async_callback(ended, working)
    for publisher in publishers:
        for _ in range(4):
            await publisher.work()
        await wait_until(publisher.has_all, "the first prompts are indexed", PATIENCE_SECONDS)

    late, *others = publishers
    claims = {claim.registration.model_name: claim for claim in await store.directory.claims()}
    slot_key = keys.holders(claims[late.model_name].group_id)
    source = cluster.primaries[cluster.of(slot_key)]
    target = cluster.primaries[(cluster.of(slot_key) + 1) % 3]
    most = 0
    with moving(cluster, [slot_key], source, target) as arrive:
        names = source.ask("CLUSTER", "GETKEYSINSLOT", cluster.slot(slot_key), 10_000)
        # The fence stays until the end, so no write of the group has all its keys on one node.
        names.sort(key=lambda name: name.endswith(b":fence"))
        names = names[: len(names) * 3 // 4]
        migrate(source, target, [names.pop()])
        before = len(late.prompts)
        until = asyncio.get_running_loop().time() + HALF_MOVED_SECONDS
        step = 0
        while step < STEPS or asyncio.get_running_loop().time() < until:
            if moved := names[step::STEPS] if step < STEPS else []:
                migrate(source, target, moved)
            step += 1
            if len(late.prompts) < PROMPTS_MAX:
                for publisher in publishers:
                    await publisher.work()
            for publisher in others:
                await wait_until(publisher.has_newest, f"{publisher.model_name} goes on", PATIENCE_SECONDS)
            assert [await late.found(prompt) for prompt in late.prompts[:before]] == [PROMPT_BLOCKS] * before
            assert await late.found(late.prompts[-1]) == 0, "what is written to the group waits"
            for running in worker.poller.running.values():
                if running.stream is not None:
                    size, _ = running.stream.buffered
                    assert size <= BUFFER_BYTES
                    most = max(most, size)
        assert most > BUFFER_BYTES / 2, "more came than there was room for"
        arrive()
        await wait_until(late.has_all, "what waited is applied", 2 * PATIENCE_SECONDS)
    for publisher in publishers:
        assert await publisher.has_all()
    assert not working.done()
