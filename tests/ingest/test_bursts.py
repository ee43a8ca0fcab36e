"""More frames than the buffer has room for: what no replay can bring is counted, and the stream says so."""

from __future__ import annotations

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod
from waymark.ingest.stream import Stream

ROOM = 5
BURST = 40


async def burst(bench: Bench, worker: Hand, pod: Pod) -> None:
    """Frames while Redis takes none: one batch is being applied, some wait, the rest finds no room."""
    await bench.redis.execute_command("CLIENT PAUSE", 60_000, "WRITE")  # type: ignore[no-untyped-call]
    try:
        await pod.work(BURST)
        await wait_until(
            lambda: any(
                isinstance(stream, Stream) and stream._subscriber.dropped
                for stream, _ in worker.worker.poller._served()
            ),
            "the buffer was full",
            PATIENCE_SECONDS,
        )
    finally:
        await bench.redis.execute_command("CLIENT UNPAUSE")  # type: ignore[no-untyped-call]


async def dropped(pod: Pod) -> int:
    found = 0

    async def is_counted() -> bool:
        nonlocal found
        found = (await pod.state()).counters.get("buffer_dropped", 0)
        return found > 0

    await wait_until(is_counted, "what was dropped is counted", PATIENCE_SECONDS)
    return found


async def test_a_burst_without_a_replay_endpoint_is_counted_and_named(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES, stream_buffer_frames=ROOM, lease_seconds=120.0)
    pod = await bench.pod(has_replay=False)
    await pod.subscribed()
    await pod.work(1)
    await pod.at_watermark(0)
    await burst(bench, worker, pod)
    # Nothing comes behind it: no gap tells of the loss.
    await pod.says("buffer_full")
    await pod.says("WAYMARK_STREAM_BUFFER_BYTES")
    await pod.has_status("degraded")
    count = await dropped(pod)
    assert count <= worker.metric("buffer_dropped_total") < BURST
    assert "untrusted" in (await bench.record(pod.name))["flags"]
    await pod.engine.restart()
    await pod.work(2)
    await pod.agrees()
    await pod.is_silent_about("buffer_full")


async def test_a_burst_with_a_replay_endpoint_leaves_nothing_behind(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES, stream_buffer_frames=ROOM, lease_seconds=120.0)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(1)
    await pod.at_watermark(0)
    await burst(bench, worker, pod)
    await pod.agrees()
    await pod.is_silent_about("buffer_full")
    await pod.has_status("active")
    assert await dropped(pod) > 0


@pytest.mark.parametrize("has_replay", [True, False])
async def test_what_the_buffer_holds_is_no_loss(bench: Bench, has_replay: bool) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=has_replay)
    await pod.subscribed()
    await pod.work(BURST)
    await pod.agrees()
    await pod.is_silent_about("buffer_full")
    await pod.counted(buffer_dropped=0)
