"""A publisher that keeps few batches: what a replay lacks is taken from the live frames that have arrived meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgpack
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod
from waymark.apply.slices import SliceRunner
from waymark.base.metrics import Metrics
from waymark.domain.engines import EngineKind
from waymark.engines import decoder as decode_as
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.frames import Frame, FrameBuffer
from waymark.ingest.received import Settling
from waymark.ingest.subscriber import Subscriber

#: A replay waits for its place as long as the test wants.
PATIENT = replace(WITHOUT_PROBES, replay_idle_seconds=PATIENCE_SECONDS)


@pytest.fixture(autouse=True, params=["with events", "without events"])
def settling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that waits for a replay is kept with its events, or, as long ones are, without them."""
    if request.param == "without events":
        monkeypatch.setattr("waymark.ingest.received.SHORT_BYTES", 0)


async def short_pod(bench: Bench, **changes: object) -> Pod:
    """An engine that keeps its last three batches, and removes nothing."""
    return await bench.pod(buffer_batches=3, gpu_blocks=1000, cpu_blocks=0, **changes)  # type: ignore[arg-type]


async def connected(pod: Pod) -> None:
    """The replay on connect waits for its place, so that no frame has been taken from the buffer."""
    await pod.subscribed()
    await pod.has_status("replaying")


async def arrived(worker: Hand, frames: int) -> None:
    """So many frames were received, and none of them is applied."""
    await wait_until(
        lambda: worker.metric("buffer_frames") == frames, f"{frames} frames have arrived", PATIENCE_SECONDS
    )


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_frames_before_the_first_reply_are_applied(bench: Bench, transport: str) -> None:
    worker = await bench.worker(options=PATIENT)
    with worker.without_places():
        pod = await short_pod(bench, transport=transport)
        await connected(pod)
        await pod.work(6)
        await arrived(worker, 6)
    await pod.agrees()
    await pod.has_status("active")
    assert (await bench.record(pod.name)).get("flags", "") == ""
    # Three frames have what the replay has brought.
    await pod.counted(batches=6, batches_lost=0, stale_batches=3, restarts=0, gaps=0)
    await pod.work(2)
    await pod.agrees()
    await pod.counted(batches=8, stale_batches=3)


@pytest.mark.parametrize("dropped", [1, 4])
async def test_only_what_was_not_received_is_lost_in_a_gap(bench: Bench, dropped: int) -> None:
    worker = await bench.worker(options=PATIENT)
    pod = await short_pod(bench)
    await pod.at_work(1)
    with worker.without_places():
        with pod.dropping():
            await pod.work(dropped)
        await pod.work(1)
        await wait_until(lambda: worker.metric("gaps_total") == 1, "the gap is seen", PATIENCE_SECONDS)
        await pod.work(5)
        await arrived(worker, 5)
    await pod.at_watermark(pod.last_seq)
    await pod.counted(batches=7, batches_lost=dropped, stale_batches=3, restarts=0, gaps=1)
    await pod.says("batches_lost")


async def test_a_hole_that_was_received_is_no_loss(bench: Bench) -> None:
    worker = await bench.worker(options=PATIENT)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    await pod.at_work(1)
    with worker.without_places():
        with pod.dropping():
            await pod.work(1)
        await pod.work(1)
        await wait_until(lambda: worker.metric("gaps_total") == 1, "the gap is seen", PATIENCE_SECONDS)
        await pod.work(3)
        await arrived(worker, 3)
        del pod.publisher._buffer[3]
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(batches=6, batches_lost=0, holes=0, restarts=0)


async def test_a_life_that_cannot_be_proven_begins_anew_with_the_first_frame(bench: Bench) -> None:
    worker = await bench.worker(options=PATIENT)
    pod = await short_pod(bench)
    await pod.at_work(2)
    await pod.publisher.down()
    await pod.has_status("unreachable")
    with worker.without_places():
        with pod.dropping():
            await pod.work(1)
        await pod.publisher.up()
        await connected(pod)
        await pod.work(6)
        await arrived(worker, 6)
    await pod.at_watermark(8)
    # Batches 3 to 8 of the new connection; the replay has the last three of them.
    await pod.counted(batches=8, batches_lost=0, restarts=1, stale_batches=3)
    await pod.says("joined_late")
    await pod.work(1)
    await pod.at_watermark(9)
    await pod.counted(restarts=1, gaps=0)


async def test_frames_of_a_process_that_has_ended_are_not_mixed_with_the_replay_of_the_next(bench: Bench) -> None:
    """The engine restarts behind the same socket; the replay lacks the beginning of its new life, and has the rest."""
    worker = await bench.worker(options=PATIENT)
    with worker.without_places():
        pod = await short_pod(bench)
        await connected(pod)
        await pod.work(2)
        await pod.engine.restart()
        await pod.work(6)
        await arrived(worker, 8)
    await pod.agrees()
    await pod.at_watermark(5)
    await pod.has_status("active")
    # Three that the replay has, the six frames of the new process; two of the old one are left out.
    await pod.counted(batches=9, stale_batches=5, restarts=1)


async def test_a_frame_with_other_bytes_than_the_reply_of_its_seq_shows_another_process(bench: Bench) -> None:
    worker = await bench.worker(options=PATIENT)
    with worker.without_places():
        pod = await short_pod(bench)
        await connected(pod)
        await pod.work(4)
        await arrived(worker, 4)
        buffer = pod.publisher._buffer
        for i, (seq, _, topic) in enumerate(list(buffer)):
            buffer[i] = seq, msgpack.packb([pod.clock() + 100, [], 0]), topic
    await pod.at_watermark(3)
    await pod.says("joined_late")
    await pod.counted(batches=3, stale_batches=4)


async def test_frames_that_the_loop_has_not_read_when_the_reply_comes_are_applied_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sockets are ready, and the loop has come to the one of the replay first."""
    unread: list[tuple[FrameBuffer, Frame]] = []
    put, read = FrameBuffer.put, Subscriber.read

    def read_all(subscriber: Subscriber) -> None:
        if len(unread) == 6:
            for buffer, frame in unread:
                put(buffer, frame)
            unread.clear()
        read(subscriber)

    worker = await bench.worker(options=PATIENT)
    with monkeypatch.context() as patched:
        patched.setattr(FrameBuffer, "put", lambda buffer, frame: unread.append((buffer, frame)))
        patched.setattr(Subscriber, "read", read_all)
        with worker.without_places():
            pod = await short_pod(bench)
            await connected(pod)
            await pod.work(6)
            await wait_until(lambda: len(unread) == 6, "six frames are here", PATIENCE_SECONDS)
            patched.setattr(FrameBuffer, "put", put)
        await pod.agrees()
    await pod.counted(batches=6, batches_lost=0, stale_batches=3, restarts=0, gaps=0)


async def test_frames_that_are_read_with_the_connection_are_applied_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them tells the loop of the connection, whose replay lacks it."""
    wait, have_arrived = Subscriber.wait, asyncio.Event()

    async def waits(subscriber: Subscriber, timeout_seconds: float) -> bool:
        await have_arrived.wait()
        return await wait(subscriber, timeout_seconds)

    monkeypatch.setattr(Subscriber, "wait", waits)
    worker = await bench.worker(options=PATIENT)
    pod = await short_pod(bench)
    await pod.subscribed()
    await pod.work(6)
    await arrived(worker, 6)
    have_arrived.set()
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(batches=6, batches_lost=0, stale_batches=3, restarts=0, gaps=0)


async def test_a_long_batch_waits_for_a_replay_without_its_events() -> None:
    """Decoded, the frames of many streams that wait would have no bound."""
    events = [["BlockStored", [number], None, [1, 2, 3, number], 4, None, "GPU"] for number in range(1, 200)]
    payload = msgpack.packb([1.0, events, 3])
    decoder = BatchDecoder("a", None, decode_as(EngineKind.VLLM, seed=1337), SliceRunner(), lambda _: None, Metrics())
    incoming = await decoder.decode(7, payload, b"")
    assert incoming is not None
    assert len(incoming.batch.events) == 199
    settling = Settling.of(Frame(7, payload, b"", 1, 0.0), incoming)
    assert not settling.incoming.batch.events
    assert (settling.incoming.digest, settling.incoming.batch.dp_rank) == (incoming.digest, 3)
    whole = await settling.whole(decoder)
    assert list(whole.batch.events) == list(incoming.batch.events)
    assert (whole.seq, whole.digest, whole.size) == (7, incoming.digest, len(payload))


async def test_a_batch_of_another_publisher_is_not_decoded_after_a_replay() -> None:
    payload = msgpack.packb([1.0, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU"]] * 100, 0])
    decoder = BatchDecoder("a", "mine", decode_as(EngineKind.VLLM, seed=1337), SliceRunner(), lambda _: None, Metrics())
    incoming = await decoder.decode(7, payload, b"yours")
    assert incoming is not None
    assert not (await Settling.of(Frame(7, payload, b"yours", 1, 0.0), incoming).whole(decoder)).batch.events
