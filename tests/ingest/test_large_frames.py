"""Frames that are large, or hold more than they should: their stream is slow or lossy, all others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Pod
from tests.patience import patient
from waymark.apply.options import ApplyOptions
from waymark.apply.slices import SliceRunner
from waymark.domain.slices import EVENT_WORK, SLICE_WORK
from waymark.simulator.encode import BlockRemoved, BlockStored

LOW = ApplyOptions(frame_bytes_max=100_000, batch_events_max=1024, event_hashes_max=3000, rejected_events=16)
TOO_MANY_EVENTS = [BlockRemoved((i,)) for i in range(1025)]
TOO_MANY_HASHES = [BlockStored(tuple(range(1, 3002)), None, (1, 2, 3, 4), 4)]
TOO_MANY_BYTES = [BlockStored((1, 2), None, tuple(range(70_000, 100_000)), 4)]


async def publish(pod: Pod, events: list[Any]) -> int:
    return int(pod.publisher.publish(events, ts=pod.clock()))


@pytest.mark.parametrize("on_gap", ["keep", "reset"])
@pytest.mark.parametrize(
    ("events", "ceiling", "setting"),
    [
        (TOO_MANY_EVENTS, "batch_events", "WAYMARK_FRAME_BYTES_MAX allows 1024"),
        (TOO_MANY_HASHES, "event_hashes", "WAYMARK_FRAME_BYTES_MAX allows 3000"),
        (TOO_MANY_BYTES, "frame_bytes", "WAYMARK_FRAME_BYTES_MAX allows 100000"),
    ],
    ids=["events", "hashes", "bytes"],
)
async def test_a_batch_above_a_ceiling_is_lost_once_for_all_workers(
    bench: Bench, events: list[Any], ceiling: str, setting: str, on_gap: Any
) -> None:
    options = replace(WITHOUT_PROBES, on_gap=on_gap)
    first = await bench.worker("worker-1", options=options, apply=LOW)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(2)
    seq = await publish(pod, events)
    await pod.at_watermark(seq)
    await pod.says(setting)
    await pod.has_status("degraded")
    await pod.counted(batches_lost=1, **{f"decode_errors__{ceiling}": 1}, restarts=0)
    assert first.metric("batches_over_ceiling_total", ceiling=ceiling) == 1
    await first.stop()
    second = await bench.worker("worker-2", options=options, apply=LOW)
    await pod.says("over_ceiling")
    await pod.counted(replays__complete=2)
    assert second.metric("batches_over_ceiling_total", ceiling=ceiling) == 0
    await pod.work(2)
    await pod.agrees()
    await pod.counted(batches_lost=1)


async def test_rejected_events_beyond_the_ceiling_are_counted_once(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES, apply=LOW)
    pod = await bench.pod()
    await pod.caught_up()
    await publish(pod, [BlockStored((5, 5), None, (1,) * 8, 4)] * 40)
    await pod.counted(decode_errors__repeated_hash=16, decode_errors__more=1, batches_lost=0)
    assert worker.metric("batches_over_ceiling_total", ceiling="rejected_events") == 1
    await pod.work(1)
    await pod.agrees()


async def test_a_message_that_is_never_read_fails_its_stream_and_no_other(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES, message_bytes_max=200_000)
    pod, neighbour = await bench.pod("pod-1"), await bench.pod("pod-2")
    await pod.caught_up()
    await neighbour.caught_up()
    await publish(pod, [BlockStored((1, 2), None, tuple(range(70_000, 120_000)), 4)])
    await pod.has_status("failed")
    await pod.says("WAYMARK_FRAME_BYTES_MAX")
    await neighbour.work(5)
    await neighbour.agrees()


async def test_a_failed_stream_goes_on_behind_what_it_cannot_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waymark.ingest.subscriber.REFUSED_SECONDS", 0.5)
    await bench.worker(options=WITHOUT_PROBES, message_bytes_max=200_000)
    pod = await bench.pod(has_replay=False)
    await pod.caught_up()
    await publish(pod, [BlockStored((1, 2), None, tuple(range(70_000, 120_000)), 4)])
    await pod.has_status("failed")

    async def is_read_again() -> bool:
        # The end of the old subscription is seen late, and what comes before the new one is lost: there is no replay.
        await pod.work(1)
        return "joined_late" in ((await pod.state()).last_error or "")

    await wait_until(is_read_again, "the stream goes on", PATIENCE_SECONDS)
    last = await publish(pod, [BlockStored((11, 12), None, tuple(range(8)), 4)])

    async def is_applied() -> bool:
        return (await pod.state()).watermark == last

    await wait_until(is_applied, "the last frame is applied", PATIENCE_SECONDS)
    held = (await bench.held(pod.name))[0, "GPU"]
    assert len(held) >= 2


async def test_a_lost_connection_is_no_message_that_is_never_read(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.publisher.down()
    await pod.has_status("unreachable")
    await pod.publisher.up()
    await pod.caught_up()


async def test_long_events_are_indexed_as_any_other(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    hashes, tokens = tuple(range(1, 9001)), tuple(range(36_000))
    await publish(pod, [BlockStored(hashes, None, tokens, 4), BlockRemoved(hashes[5000:])])
    await pod.counted(events__stored=1, events__removed=1, unresolved=0)
    assert len((await bench.held(pod.name))[0, "GPU"]) == 5000


# ---- turns of the loop -----------------------------------------------------------------------------


#: Events of large batches, made when they are needed.
LARGE: dict[str, Callable[[], list[Any]]] = {
    "junk": lambda: [[]] * 60_000,
    "removals": lambda: [["BlockRemoved", [i]] for i in range(20_000)],
    "one store": lambda: [["BlockStored", [*range(1, 40_001)], None, [*range(160_000)], 4, None, "GPU"]],
    # More than is read at once, PLAIN_BYTES.
    "stores": lambda: [["BlockStored", [i + 1], None, [1, 2, 3, i], 4, None, "GPU"] for i in range(9_000)],
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_batch_gives_the_loop_back_all_the_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With a turn after every slice: there are as many turns as there is work, from the frame to Redis."""
    monkeypatch.setattr("waymark.apply.slices.SLICE_SECONDS", 0.0)
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    turns = 0
    give_back = SliceRunner.pause

    async def counting(runner: SliceRunner) -> None:
        nonlocal turns
        turns += 1
        await give_back(runner)

    monkeypatch.setattr(SliceRunner, "pause", counting)
    before = turns
    events = LARGE[name]()
    await pod.at_watermark(pod.publisher.publish_payload(msgpack.packb([1.0, events, 0])))
    assert turns - before > len(events) * EVENT_WORK / SLICE_WORK / 4


async def test_an_honest_neighbour_goes_on_beside_a_flood(bench: Bench) -> None:
    """However much the first sends, the second is read in between, and the first's lease is kept."""
    worker = await bench.worker(options=replace(WITHOUT_PROBES, lease_seconds=patient(2.0)))
    pod, neighbour = await bench.pod("pod-1"), await bench.pod("pod-2")
    await pod.caught_up()
    await neighbour.caught_up()
    junk = msgpack.packb([1.0, [[]] * 20_000, 0])
    before = worker.metric("frames_total")

    async def flood() -> None:
        """Without end: as soon as few frames wait, more are sent."""
        while True:
            while pod.publisher.next_seq - sent_before - (worker.metric("frames_total") - before) < 8:
                pod.publisher.publish_payload(junk)
            await asyncio.sleep(0.005)

    sent_before = pod.publisher.next_seq
    flooding = asyncio.create_task(flood())
    try:
        await wait_until(lambda: worker.metric("frames_total") > before, "the flood is being read", PATIENCE_SECONDS)
        await neighbour.work(3)
        await neighbour.agrees()
        assert not flooding.done()
    finally:
        flooding.cancel()
        await asyncio.wait([flooding])
    await pod.at_watermark(pod.publisher.next_seq - 1)
    assert worker.metric("leases_lost_total") == 0
