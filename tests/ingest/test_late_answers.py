"""A replay endpoint that answers late: what a life has begun without comes back once the publisher answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, WITHOUT_PROBES, Bench, Hand, Pod

OPTIONS = replace(QUICK, probe_seconds=0.5, replay_idle_seconds=0.1, publisher_timeout=60.0)


async def began_late(pod: Pod, silent: Any) -> None:
    """The pod is at work, and what it did before its third live frame is not in the index."""
    pod.fault(**silent)
    await pod.work(5)
    await pod.register()
    await pod.subscribed()
    await pod.says("replay_")
    await pod.work(3)
    await pod.at_watermark(7)
    await pod.says("joined_late")
    assert (await pod.bench.held(pod.name))[0, "GPU"] < pod.truth()[0, "GPU"]


async def healed(pod: Pod, **counts: int) -> None:
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0, batches_lost=0, **counts)
    assert (await pod.bench.record(pod.name)).get("flags", "") == ""


async def late_pod(bench: Bench, **changes: Any) -> Pod:
    return await bench.pod(gpu_blocks=1000, cpu_blocks=0, is_registered=False, **changes)


async def test_a_life_that_began_while_its_replay_was_silent_heals(any_bench: Bench) -> None:
    await any_bench.worker(options=OPTIONS)
    pod = await late_pod(any_bench)
    await began_late(pod, {"replay_silent": True})
    pod.fault(replay_silent=False)
    await healed(pod, gaps=0)
    await pod.work(2)
    await pod.agrees()


async def test_the_next_worker_heals_what_began_while_the_replay_was_silent(bench: Bench) -> None:
    first = await bench.worker("worker-1", options=WITHOUT_PROBES, replay_idle_seconds=0.1)
    pod = await late_pod(bench)
    await began_late(pod, {"replay_silent": True})
    await first.stop()
    pod.fault(replay_silent=False)
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await healed(pod, gaps=0)


@asynccontextmanager
async def busy(pod: Pod) -> AsyncIterator[None]:
    """Meanwhile the pod sends a batch every few milliseconds, so no probe comes for want of frames."""

    async def work() -> None:
        while True:
            pod.publisher.publish([], ts=pod.clock())
            await asyncio.sleep(0.02)

    task = asyncio.create_task(work())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_stream_that_is_never_quiet_heals_too(bench: Bench) -> None:
    await bench.worker(options=OPTIONS)
    pod = await late_pod(bench)
    await began_late(pod, {"replay_silent": True})
    async with busy(pod):
        pod.fault(replay_silent=False)
        await healed(pod)


async def replays(worker: Hand, outcome: str, times: int) -> None:
    await wait_until(
        lambda: worker.metric("replays_total", outcome=outcome) >= times,
        f"{times} replays {outcome}",
        PATIENCE_SECONDS,
    )


async def test_a_beginning_that_the_answer_does_not_have_is_asked_for_no_more(bench: Bench) -> None:
    worker = await bench.worker(options=OPTIONS)
    pod = await late_pod(bench, buffer_batches=2)
    await began_late(pod, {"replay_silent": True})
    before = await bench.held(pod.name)
    pod.fault(replay_silent=False)
    await replays(worker, "complete", 3)
    await pod.is_silent_about("replay_silent")
    await pod.says("joined_late")
    assert "opened_at" not in (await bench.record(pod.name))["flags"]
    assert await bench.held(pod.name) == before
    await pod.counted(restarts=0, gaps=0, batches_lost=0)


@pytest.mark.parametrize("silent", [{"replay_silent": True}, {"truncate_replay": 1}], ids=["silent", "broken-off"])
async def test_a_life_that_a_gap_without_an_answer_has_ended_heals(bench: Bench, silent: Any) -> None:
    """Where a gap ends the life, the next one begins behind the gap, and nobody has been asked for what is before."""
    worker = await bench.worker(options=replace(OPTIONS, on_gap="reset"))
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    await pod.at_work(3)
    pod.fault(**silent)
    with pod.dropping():
        await pod.work(2)
    await pod.work(1)
    await replays(worker, "silent" if "replay_silent" in silent else "incomplete", 1)
    pod.fault(replay_silent=False, truncate_replay=0)
    await pod.agrees()
    await pod.has_status("active")
    assert (await bench.record(pod.name)).get("flags", "") == ""
