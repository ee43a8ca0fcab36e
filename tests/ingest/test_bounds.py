"""Bounds over real streams: blocks end by time or by number, in the index and in every answer."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import BLOCK_SIZE, GROUP, PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod
from tests.store.factories import hgetall
from waymark.apply.applier import Incoming
from waymark.apply.options import ApplyOptions
from waymark.apply.resuming import resumed
from waymark.base.metrics import Metrics
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Envelope, StoredIdentity
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys

LARGE: dict[str, Any] = {"gpu_blocks": 100_000, "cpu_blocks": 1}
BY_NUMBER = ApplyOptions(max_entries=1000)


async def prompts(pod: Pod, first: int, count: int, blocks: int = 10) -> list[SimulatedPrompt]:
    """Prompts that share nothing."""
    found = [
        SimulatedPrompt(tuple(100_000 * i + j for j in range(BLOCK_SIZE * blocks))) for i in range(first, first + count)
    ]
    for prompt in found:
        assert await pod.engine.prefill(prompt, 0) is not None
    return found


async def live_blocks(bench: Bench, *pods: Pod) -> int:
    held = [await bench.held(pod.name) for pod in pods]
    return sum(len(blocks) for each in held for blocks in each.values())


async def test_what_is_not_stored_again_in_time_goes_from_index_and_answers(bench: Bench) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(entry_ttl_seconds=2))
    pod = await bench.pod(**LARGE)
    await pod.caught_up()
    began = time.monotonic()
    (prompt,) = await prompts(pod, 1, 1)

    async def is_found() -> bool:
        return (await bench.row(pod, prompt))[0] == 10

    async def is_gone() -> bool:
        return await bench.row(pod, prompt) == (0, {}, {})

    await wait_until(is_found, "the prompt is indexed", PATIENCE_SECONDS)
    await wait_until(is_gone, "its time is over", PATIENCE_SECONDS)
    assert time.monotonic() - began >= 2
    assert hand.metric("index_evictions_total", reason="ttl") == 10
    await bench.is_swept()
    assert await bench.blocks() == {}


async def test_a_group_has_no_more_blocks_than_it_may_and_keeps_the_newest(bench: Bench) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES, apply=BY_NUMBER)
    pods = [await bench.pod("pod-1", **LARGE), await bench.pod("pod-2", **LARGE)]
    for pod in pods:
        await pod.caught_up()
    of_pod: dict[str, list[SimulatedPrompt]] = {"pod-1": [], "pod-2": []}
    for i in range(10):
        for j, pod in enumerate(pods):
            of_pod[pod.name.instance_id] += await prompts(pod, 100 * i + 1000 * j, 20)
            await pod.at_watermark(pod.last_seq)

    async def is_met() -> bool:
        return 800 <= await live_blocks(bench, *pods) <= 1100

    await wait_until(is_met, "the bound is met", PATIENCE_SECONDS)
    for pod in pods:
        mine = of_pod[pod.name.instance_id]
        assert (await bench.row(pod, mine[-1]))[0] == 10, "the newest blocks are there"
        assert await bench.row(pod, mine[0]) == (0, {}, {}), "the oldest ones are in no answer"
    assert hand.metric("index_evictions_total", reason="max_entries") >= 4000 - 1100
    await bench.is_swept()


async def test_the_oldest_generation_of_a_group_ends_whichever_worker_has_it(bench: Bench) -> None:
    """One publisher is silent; another one's stores take its blocks out, though other workers have the two streams."""
    hands = [await bench.worker(f"worker-{i}", options=WITHOUT_PROBES, apply=BY_NUMBER) for i in (1, 2, 3)]
    quiet = await bench.pod("pod-quiet", **LARGE)
    await quiet.caught_up()
    (old,) = await prompts(quiet, 1, 1)
    await quiet.at_watermark(quiet.last_seq)
    busy = [await bench.pod(f"pod-{i}", **LARGE) for i in range(3)]
    for i, pod in enumerate(busy):
        await pod.caught_up()
        await prompts(pod, 1000 * (i + 1), 60)
        await pod.at_watermark(pod.last_seq)

    async def is_gone() -> bool:
        return await bench.row(quiet, old) == (0, {}, {})

    async def is_met() -> bool:
        return await live_blocks(bench, quiet, *busy) <= 1100

    await wait_until(is_gone, "the oldest blocks have ended", PATIENCE_SECONDS)
    await wait_until(is_met, "the bound is met", PATIENCE_SECONDS)
    # Of 1810 blocks at most 1100 are left.
    assert sum(hand.metric("index_evictions_total", reason="max_entries") for hand in hands) >= 700
    # What is stored again counts again.
    await prompts(quiet, 2, 1)
    await quiet.at_watermark(quiet.last_seq)
    assert await live_blocks(bench, quiet) == 10


async def test_below_the_number_nothing_ends_and_a_worker_that_takes_over_goes_on(bench: Bench) -> None:
    first = await bench.worker("worker-1", options=WITHOUT_PROBES, apply=BY_NUMBER)
    pod = await bench.pod(**LARGE)
    await pod.caught_up()
    early = await prompts(pod, 1, 40)
    await pod.at_watermark(pod.last_seq)
    before = await bench.record(pod.name)
    await first.die()
    second = await bench.worker("worker-2", options=WITHOUT_PROBES, apply=BY_NUMBER)
    late = await prompts(pod, 101, 50)
    await pod.at_watermark(pod.last_seq)
    for prompt in (early[0], late[-1]):
        assert (await bench.row(pod, prompt))[0] == 10
    now = await bench.record(pod.name)
    assert [name for name in before if name.startswith("holder:") and now.get(name) != before[name]] == []
    assert second.metric("index_evictions_total", reason="max_entries") == 0
    await prompts(pod, 201, 40)

    async def is_gone() -> bool:
        return await bench.row(pod, early[0]) == (0, {}, {})

    await wait_until(is_gone, "the first generation of the other worker ends first", PATIENCE_SECONDS)
    assert (await bench.row(pod, late[-1]))[0] == 10


async def test_an_engine_that_tells_removals_is_still_exact(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(max_entries=10_000, entry_ttl_seconds=3600))
    pod = await bench.pod(gpu_blocks=30, cpu_blocks=20)
    await pod.caught_up()
    for _ in range(5):
        await pod.work(20)
        await pod.agrees()


async def test_a_publisher_that_is_unregistered_leaves_no_count(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES, apply=BY_NUMBER)
    pods = [await bench.pod(f"pod-{i}", **LARGE) for i in (1, 2)]
    for i, pod in enumerate(pods):
        await pod.caught_up()
        await prompts(pod, 1000 * i, 3)

    async def noted() -> dict[bytes, bytes]:
        return dict(await hgetall(bench.redis, keys.entries(1)))

    async def is_noted() -> bool:
        return (await noted()).get(b"total") == b"60"

    async def is_half() -> bool:
        return (await noted()).get(b"total") == b"30"

    async def is_empty() -> bool:
        return await noted() == {}

    await wait_until(is_noted, "both are counted", PATIENCE_SECONDS)
    await bench.store.registry.unregister([pods[0].name])
    await wait_until(is_half, "one of them is not counted any more", PATIENCE_SECONDS)
    await bench.store.registry.unregister([pods[1].name])
    await wait_until(is_empty, "nothing is left", PATIENCE_SECONDS)


async def test_on_a_medium_with_a_time_what_is_not_stored_again_goes(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(medium_ttl={"CPU": 1}))
    pod = await bench.pod(gpu_blocks=8)
    await pod.caught_up()
    await pod.work(6)

    async def media() -> set[str]:
        table = await bench.store.reader.table(GROUP)
        return set() if table is None else {holder.medium for holder in table.holders.values()}

    async def has_offloaded() -> bool:
        return await media() == {"GPU", "CPU"}

    async def has_only_gpu() -> bool:
        return await media() == {"GPU"}

    await wait_until(has_offloaded, "blocks are offloaded")
    await wait_until(has_only_gpu, "what is on the CPU is over after a little more than a second")
    assert (await pod.state()).blocks == {"GPU": 8}


async def by_http(bench: Bench, options: ApplyOptions) -> Pod:
    """A publisher without a socket, whose event was applied by a request."""
    pod = await bench.pod(kind=EngineKind.STANDARD, is_registered=False)
    await bench.store.registry.register(replace(pod.registration, endpoint=None, replay_endpoint=None))
    (claim,) = [
        claim for claim in await bench.store.directory.claims() if claim.registration.name == pod.registration.name
    ]
    grant = await bench.store.leases.take(claim, "", 5.0)
    assert grant is not None
    applier, _ = await resumed(grant, bench.store, Metrics(), options, is_patient=False)
    envelope = Envelope(1, "pod-1", "default", None, None, None)
    stored = StoredIdentity((1,), None, "DISK", envelope)
    await applier.apply([Incoming(1, "", Batch(None, (stored,)))], None)
    await applier.bounding.check(at_once=True)
    await bench.store.leases.drop(grant)
    return pod


async def disks(bench: Bench) -> int:
    table = await bench.store.reader.table(GROUP)
    assert table is not None
    return sum(holder.medium == "DISK" for holder in table.holders.values())


async def test_a_publisher_without_a_socket_is_looked_after_too(bench: Bench) -> None:
    """Its events came by HTTP and have long been applied; only a worker is left to end what is over."""
    options = ApplyOptions(waiting_blocks=10, medium_ttl={"DISK": 1})
    await by_http(bench, options)
    assert await disks(bench) == 1

    async def none_is_left() -> bool:
        return await disks(bench) == 0

    hand = await bench.worker(options=WITHOUT_PROBES, apply=options)
    await wait_until(none_is_left, "a worker ends what is over")
    await evicted(hand, reason="ttl")


async def test_a_publisher_without_a_socket_shares_the_number_of_its_group(bench: Bench) -> None:
    options = ApplyOptions(max_entries=100)
    await by_http(bench, options)
    hand = await bench.worker(options=WITHOUT_PROBES, apply=options)
    pod = await bench.pod("pod-2", **LARGE)
    await pod.caught_up()
    await prompts(pod, 1, 12)

    async def none_is_left() -> bool:
        return await disks(bench) == 0

    await wait_until(none_is_left, "a worker ends the oldest blocks of the group", PATIENCE_SECONDS)
    await evicted(hand, reason="max_entries")


async def evicted(hand: Hand, **labels: Any) -> None:
    await wait_until(lambda: hand.metric("index_evictions_total", **labels) >= 1, "it is counted")


@pytest.mark.parametrize(("shards", "begins"), [(1, False), (4, True)], ids=["blocks-wait", "a-generation-waits"])
async def test_a_stream_that_waits_for_memory_ends_its_old_generations(bench: Bench, shards: int, begins: bool) -> None:
    """Nobody else ends them, and their blocks take the memory that the stream waits for."""
    bench.shards = shards
    hand = await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(entry_ttl_seconds=4))
    pod = await bench.pod(**LARGE)
    await pod.caught_up()
    (old,) = await prompts(pod, 1, 1)
    await pod.at_watermark(pod.last_seq)
    stored, numbers = time.monotonic(), count(2)

    async def has_begun() -> bool:
        await prompts(pod, next(numbers), 1)
        await pod.at_watermark(pod.last_seq)
        return sum(name.startswith("holder:") for name in await bench.record(pod.name)) == 2

    if begins:
        await wait_until(lambda: time.monotonic() > stored + 0.5, "the next store begins a generation")
    else:
        await wait_until(has_begun, "the next generation has begun", PATIENCE_SECONDS)
    await bench.redis.config_set("maxmemory", "1")
    try:
        (new,) = await prompts(pod, next(numbers), 1)

        async def is_over() -> bool:
            return await bench.row(pod, old) == (0, {}, {})

        await wait_until(lambda: hand.metric("redis_up") == 0, "the stream waits", PATIENCE_SECONDS)
        await wait_until(is_over, "the time of the old blocks is over", PATIENCE_SECONDS)
        assert hand.metric("index_evictions_total", reason="ttl") >= 10
        await bench.is_swept()
    finally:
        await bench.redis.config_set("maxmemory", "0")
    await pod.at_watermark(pod.last_seq)
    assert (await bench.row(pod, new))[0] in (0, 10), "all of it, if its time is not over"
    await prompts(pod, next(numbers), 1)
    await pod.at_watermark(pod.last_seq)
    assert (hand.metric("leases_lost_total"), hand.metric("restarts_total")) == (0, 0)
