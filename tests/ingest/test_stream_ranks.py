"""Whose batch it is: several ranks on one socket, ranks with a registration of their own, proxies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Held, Pod
from waymark.domain.names import PublisherName

PROXY: dict[str, Any] = {"sequence": "rank"}


def of_rank(held: Held, dp_rank: int) -> Held:
    return {unit: hashes for unit, hashes in held.items() if unit[0] == dp_rank}


class Proxy:
    """Sends what two ranks publish over one socket, under each rank's own numbers."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.next_seq = {0: 0, 1: 0}

    async def work(self, rank: int, prompts: int = 1) -> None:
        publisher = self._pod.publisher
        publisher.next_seq = self.next_seq[rank]
        await self._pod.work(prompts, rank)
        self.next_seq[rank] = publisher.next_seq

    def restart(self, rank: int) -> None:
        self._pod.engine.caches[rank].restart()
        self.next_seq[rank] = 0


async def test_a_rank_in_the_batch_wins_over_the_registered_one(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(ranks=8, fields={"dp_rank": 0})
    await pod.caught_up()
    await pod.work(3, rank=7)
    await pod.agrees()
    assert set(await bench.held(pod.name)) == {(7, "GPU")}


async def test_a_batch_without_a_rank_is_of_the_registered_one(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(dialect="vllm-list-12", fields={"dp_rank": 5})
    await pod.caught_up()
    events = pod.engine.caches[0].prefill((1, 2, 3, 4))
    pod.publisher.publish(events, ts=1.0, rank=None)
    await pod.at_watermark(0)
    assert set(await bench.held(pod.name)) == {(5, "GPU")}


async def test_several_ranks_share_one_socket_and_one_counter(any_bench: Bench) -> None:
    await any_bench.worker(options=WITHOUT_PROBES)
    pod = await any_bench.pod(ranks=3)
    await pod.caught_up()
    for turn in range(12):
        await pod.work(1, rank=turn % 3)
    with pod.dropping():
        await pod.work(2, rank=1)
    await pod.work(1, rank=2)
    await pod.engine.clear(rank=0)
    await pod.agrees()
    await pod.counted(restarts=0, gaps=1, batches_lost=0)
    assert (await pod.state()).status == "active"


async def test_a_rank_with_a_registration_of_its_own_is_applied_by_that_one_only(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(ranks=2)
    own = replace(pod.registration, dp_rank=1)
    await bench.store.registry.register(own)
    await pod.caught_up()
    await wait_until(lambda: pod.publisher.subscribers == 2, "both have subscribed", PATIENCE_SECONDS)
    for turn in range(10):
        await pod.work(1, rank=turn % 2)
    for name in (pod.name, own.name):
        await _at(bench, name, 9)
    truth = pod.truth()

    async def is_divided() -> bool:
        # The first stream may have begun before it knew of the second; it yields the rank at its next tick.
        held = [await bench.held(name) for name in (pod.name, own.name)]
        return held == [of_rank(truth, 0), of_rank(truth, 1)]

    await wait_until(is_divided, "each registration has its own rank alone", PATIENCE_SECONDS)
    for prompt in pod.prompts:
        assert await bench.row(pod, prompt) == pod.expected(prompt)


async def test_a_rank_that_gets_a_registration_of_its_own_leaves_nothing_behind_at_the_other(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(ranks=2)
    await pod.caught_up()
    for turn in range(6):
        await pod.work(1, rank=turn % 2)
    await pod.agrees()
    own = replace(pod.registration, dp_rank=1)
    await bench.store.registry.register(own)

    async def is_handed_over() -> bool:
        truth = pod.truth()
        first, second = await bench.held(pod.name), await bench.held(own.name)
        return first == of_rank(truth, 0) and second == of_rank(truth, 1)

    await wait_until(is_handed_over, "each has its own rank", PATIENCE_SECONDS)
    await wait_until(lambda: pod.publisher.subscribers == 2, "both have subscribed", PATIENCE_SECONDS)
    await pod.work(3, rank=1)
    await wait_until(is_handed_over, "each has its own rank", PATIENCE_SECONDS)


async def _at(bench: Bench, name: PublisherName, seq: int) -> None:
    async def is_there() -> bool:
        return (await bench.state(name)).watermark == seq

    await wait_until(is_there, f"{name} is at {seq}", PATIENCE_SECONDS)


# ---- proxies ---------------------------------------------------------------------------------------


async def test_counters_of_several_ranks_without_the_setting_fail_the_stream_and_end_nothing(bench: Bench) -> None:
    worker = await bench.worker()
    pod = await bench.pod(ranks=2, has_replay=False)
    proxy = Proxy(pod)
    await pod.caught_up()
    await proxy.work(0, 5)
    await pod.agrees()
    before = await bench.held(pod.name)
    await proxy.work(1)
    await pod.has_status("failed")
    await pod.says('"sequence": "rank"')
    await proxy.work(0, 3)
    await proxy.work(1, 3)
    await wait_until(lambda: worker.metric("streams", status="failed") == 1, "the metric says so")
    assert await bench.held(pod.name) == before
    await pod.counted(restarts=0)


async def test_a_failed_stream_asks_for_no_replay(bench: Bench) -> None:
    worker = await bench.worker()
    pod = await bench.pod(ranks=2)
    proxy = Proxy(pod)
    await pod.caught_up()
    await proxy.work(0, 5)
    await pod.agrees()
    before = await bench.held(pod.name)
    await proxy.work(1)
    await pod.has_status("failed")
    asked = pod.publisher.counts["replays"]
    await pod.publisher.down()
    await pod.publisher.up()
    await pod.subscribed()
    await proxy.work(1, 3)
    await wait_until(lambda: worker.metric("streams", status="failed") == 1, "the metric says so")
    assert pod.publisher.counts["replays"] == asked
    assert await bench.held(pod.name) == before


async def test_a_proxy_with_a_counter_per_rank(any_bench: Bench) -> None:
    await any_bench.worker(options=WITHOUT_PROBES)
    pod = await any_bench.pod(ranks=2, fields=PROXY)
    proxy = Proxy(pod)
    await pod.caught_up()
    for turn in range(12):
        await proxy.work(turn % 2, 1 + turn % 3)
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0, gaps=0)

    proxy.restart(1)
    await proxy.work(1, 2)
    await proxy.work(0, 1)
    await pod.agrees()
    await pod.counted(restarts=1, gaps=0)


@pytest.mark.parametrize("on_gap", ["keep", "reset"])
async def test_a_gap_of_one_rank_of_a_proxy_is_that_ranks_loss(bench: Bench, on_gap: Any) -> None:
    await bench.worker(options=replace(WITHOUT_PROBES, on_gap=on_gap))
    pod = await bench.pod(ranks=2, gpu_blocks=1000, cpu_blocks=0, fields=PROXY)
    proxy = Proxy(pod)
    await pod.caught_up()
    await proxy.work(0, 3)
    await proxy.work(1, 3)
    with pod.dropping():
        await proxy.work(1, 2)
    await proxy.work(1, 1)
    await proxy.work(0, 1)
    await pod.counted(gaps=1, batches_lost=2, restarts=1 if on_gap == "reset" else 0)

    async def is_whole() -> bool:
        return of_rank(await bench.held(pod.name), 0) == of_rank(pod.truth(), 0)

    await wait_until(is_whole, "the other rank lost nothing", PATIENCE_SECONDS)
    left, truth = of_rank(await bench.held(pod.name), 1), of_rank(pod.truth(), 1)
    assert left[1, "GPU"] < truth[1, "GPU"]
    if on_gap == "reset":
        await pod.says("joined_late")
    else:
        await pod.says("batches_lost")


async def test_a_takeover_of_a_proxy_proves_nothing_of_its_ranks(bench: Bench) -> None:
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod(ranks=2, gpu_blocks=1000, cpu_blocks=0, fields=PROXY)
    proxy = Proxy(pod)
    await pod.caught_up()
    await proxy.work(0, 6)
    await pod.agrees()
    await worker.stop()
    await wait_until(lambda: pod.publisher.subscribers == 0, "nobody listens", PATIENCE_SECONDS)
    proxy.restart(0)
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await wait_until(lambda: pod.publisher.subscribers == 1, "subscribed", PATIENCE_SECONDS)
    await pod.caught_up()
    # Lower numbers than the old life's, over a connection that never saw those.
    await proxy.work(0, 2)
    await pod.agrees()


async def test_the_next_worker_of_a_proxy_knows_that_a_rank_joined_late(bench: Bench) -> None:
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod(ranks=2, gpu_blocks=1000, cpu_blocks=0, fields=PROXY)
    proxy = Proxy(pod)
    await pod.caught_up()
    with pod.dropping():
        await proxy.work(0, 2)
    await proxy.work(0, 1)
    await pod.says("joined_late")
    await worker.stop()
    second = await bench.worker("worker-2", options=WITHOUT_PROBES)
    await wait_until(lambda: second.metric("streams", status="degraded") == 1, "it is degraded", PATIENCE_SECONDS)
    await pod.says("joined_late")
