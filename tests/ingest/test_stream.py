"""A stream over real sockets: the rows of the contract's table, restarts, frames that are none, statuses."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgpack
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import GROUP, PATIENCE_SECONDS, QUICK, WITHOUT_PROBES, Bench, Pod
from waymark.apply.applier import Applier, Incoming
from waymark.base import native
from waymark.decide.group_loads import GroupLoads
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch
from waymark.domain.parts import Commit
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.frames import ReplayedBatch
from waymark.ingest.sockets import ConnectionFailure
from waymark.ingest.stream import Stream
from waymark.ingest.subscriber import Subscriber
from waymark.store.pacing import BLOCKS_MAX, Pacer


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_frames_in_order_are_applied(any_bench: Bench, transport: str) -> None:
    worker = await any_bench.worker(options=WITHOUT_PROBES)
    pod = await any_bench.pod(transport=transport)
    await pod.at_work(30)
    await pod.at_watermark(29)
    await pod.counted(gaps=0, restarts=0, batches_lost=0, stale_batches=0, replays__complete=1)
    assert worker.metric("batches_total") == 30
    assert (await pod.state()).status == "active"
    assert (await pod.state()).last_error is None


async def test_the_beginning_of_a_life_is_its_first_seq(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    mooncake = await bench.pod(
        kind=EngineKind.MOONCAKE, dialect="standard", cpu_blocks=0, has_replay=False, fields={"scope": "instance"}
    )
    mooncake.publisher.first_seq = mooncake.publisher.next_seq = 1
    late = await bench.pod("pod-2", has_replay=False)
    late.publisher.next_seq = 5
    for pod in (mooncake, late):
        await pod.at_work(2)
    await mooncake.has_status("active")
    await late.has_status("degraded")
    await late.says("joined_late")
    assert "joined_late" not in ((await mooncake.state()).last_error or "")
    await late.counted(gaps=0, batches_lost=0)


async def test_a_gap_is_filled_by_a_replay(any_bench: Bench) -> None:
    worker = await any_bench.worker(options=WITHOUT_PROBES)
    pod = await any_bench.pod()
    await pod.caught_up()
    await pod.work(3)
    with pod.dropping():
        await pod.work(4)
    await pod.work(2)
    await pod.agrees()
    # The replay has both frames behind the gap; the second came live, too.
    await pod.counted(gaps=1, batches_lost=0, replays__complete=2, restarts=0, stale_batches=2)
    assert worker.metric("gaps_total") == 1
    assert worker.metric("replays_total", outcome="complete") == 2
    assert worker.metric("stale_batches_total") == 2
    assert (await pod.state()).status == "active"


async def test_what_a_replay_has_brought_is_not_decoded_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer is full of live frames when the replay for the first gap ends: a few large ones took minutes."""
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.at_work(2)
    decoded: list[bytes] = []
    decode, go_on = BatchDecoder.batch, BatchDecoder.go_on

    async def counting(decoder: BatchDecoder, payload: bytes) -> Batch:
        decoded.append(payload)
        return await decode(decoder, payload)

    async def counting_more(
        decoder: BatchDecoder, first: Incoming, frames: Iterable[ReplayedBatch], **bounds: int
    ) -> Incoming:
        following = list(frames)
        joined = await go_on(decoder, first, following, **bounds)
        decoded.extend(each.payload for each in following[: joined.batch.frames - 1])
        return joined

    monkeypatch.setattr(BatchDecoder, "batch", counting)
    monkeypatch.setattr(BatchDecoder, "go_on", counting_more)
    batches = [msgpack.packb([pod.clock(), [["BlockRemoved", [i]]], 0]) for i in range(30)]
    with pod.dropping():
        pod.publisher.publish_payload(batches[0])
    for payload in batches[1:]:
        pod.publisher.publish_payload(payload)
    await pod.at_watermark(pod.last_seq)
    await pod.counted(gaps=1, batches_lost=0, stale_batches=len(batches) - 1)
    # The one that showed the gap was decoded to see what it means.
    assert Counter(decoded) == Counter([*batches, batches[1]])
    await pod.work(1)
    await pod.agrees()


@pytest.mark.parametrize("step_seconds", [0.0, -86_400.0, 86_400.0])
@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_lower_seq_on_one_connection_is_a_new_life_whatever_its_ts(
    bench: Bench, step_seconds: float, has_replay: bool
) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=has_replay)
    await pod.at_work(6)
    before = await bench.record(pod.name)
    pod.clock.now += step_seconds
    await pod.engine.restart()
    await pod.work(2)
    await pod.agrees()
    assert await pod.bench.held(pod.name)
    await pod.at_watermark(1)
    assert (await bench.record(pod.name))["life"] != before["life"]
    await pod.counted(restarts=1, gaps=0, batches_lost=0)
    assert worker.metric("restarts_total") == 1


async def test_what_a_life_held_is_swept_after_its_end(any_bench: Bench) -> None:
    await any_bench.worker(options=WITHOUT_PROBES)
    pod = await any_bench.pod()
    await pod.at_work(6)
    await pod.engine.restart()
    await pod.work(1)
    await pod.agrees()
    await any_bench.is_swept()
    await pod.agrees()


async def test_the_first_frames_of_a_new_life_may_be_lost_and_are_replayed(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(6)
    await pod.engine.restart()
    with pod.dropping():
        await pod.work(2)
    await pod.work(1)
    await pod.agrees()
    await pod.counted(restarts=1, gaps=0, batches_lost=0)
    assert (await pod.state()).status == "active"


async def test_the_very_first_frame_may_be_lost_and_is_replayed(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    await pod.agrees()
    assert (await pod.state()).status == "active"


async def test_frames_that_a_replay_has_overtaken_are_stale(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(2)
    with pod.dropping():
        await pod.work(1)
    # Ten frames are on their way, and the first one's replay has them all.
    await pod.work(10)
    await pod.agrees()
    await pod.at_watermark(12)
    await pod.counted(gaps=1, stale_batches=10, restarts=0)


async def test_a_newer_frame_below_the_watermark_is_a_new_life_where_nothing_was_live_yet(bench: Bench) -> None:
    # The connection broke and there is no replay to ask: only the frame itself can tell.
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False)
    await pod.at_work(8)
    await pod.engine.restart(rebind=True)
    await pod.subscribed()
    await pod.work(3)
    await pod.agrees()
    await pod.counted(restarts=1)


async def test_frames_of_wrong_form_are_counted_and_move_nothing(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(1)
    for _ in range(3):
        pod.publisher.send_malformed()
    await pod.work(1)
    await pod.agrees()
    await pod.at_watermark(1)
    await pod.counted(frames_malformed=3, gaps=0)
    assert worker.metric("frames_malformed_total") == 3


async def test_a_seq_that_no_publisher_can_have_reached_is_no_frame(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False)
    await pod.caught_up()
    await pod.work(1)
    pod.publisher.next_seq = 2**63
    await pod.work(1)
    await pod.counted(frames_malformed=1)
    await pod.at_watermark(0)


async def test_a_payload_that_is_no_batch_is_counted_and_has_its_place(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(1)
    pod.publisher.publish_garbage()
    await pod.at_watermark(1)
    await pod.work(1)
    await pod.agrees()
    await pod.at_watermark(2)
    await pod.counted(decode_errors__bad_msgpack=1, gaps=0, replays__complete=1)
    assert worker.metric("decode_errors_total", reason="bad_msgpack") == 1


async def test_a_restart_after_a_payload_that_is_no_batch_is_a_restart(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(2)
    pod.publisher.publish_garbage()
    await pod.at_watermark(2)
    await pod.engine.restart()
    await pod.work(1)
    await pod.agrees()
    assert (await pod.state()).status == "active"
    await pod.counted(restarts=1)


async def test_three_thousand_frames_of_noise_do_not_end_a_stream(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(1)
    noise = random.Random(1)
    live, payloads = pod.publisher._live, 0
    for i in range(3000):
        parts = [noise.randbytes(noise.randrange(12)) for _ in range(noise.randrange(1, 6))]
        if i % 3 == 0:
            parts = [b"", pod.publisher.next_seq.to_bytes(8, "big"), b"\xc1" + noise.randbytes(20)]
            pod.publisher._buffer.append((pod.publisher.next_seq, parts[2], b""))
            pod.publisher.next_seq += 1
            payloads += 1
        elif len(parts) in (2, 3):
            parts[-2] = b"no seq"
        live.send_multipart(parts)
        if i % 500 == 0:
            await asyncio.sleep(0)
    await pod.work(1)
    await pod.agrees()
    await pod.at_watermark(payloads + 1)
    await pod.counted(decode_errors__bad_msgpack=payloads, frames_malformed=3000 - payloads, restarts=0)


# ---- statuses --------------------------------------------------------------------------------------


async def stays(pod: Pod, status: str) -> None:
    """For longer than a publisher may be away, which has blocks that could be lost."""
    loop = asyncio.get_running_loop()
    until = loop.time() + 1.5 * QUICK.publisher_timeout

    async def has_stayed() -> bool:
        assert (await pod.state()).status == status
        return loop.time() > until

    await wait_until(has_stayed, "the time is over")


async def test_a_listener_that_never_answers_is_no_publisher(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pod = await bench.pod(fields={"endpoint": f"tcp://127.0.0.1:{listener.getsockname()[1]}"})
        assert (await pod.state()).status == "starting"
        worker = await bench.worker()
        await wait_until(lambda: worker.metric("streams", status="starting") == 1, "the stream was begun")
        await stays(pod, "starting")


async def test_a_publisher_that_was_never_there_is_unreachable_and_left_out_until_it_is_there(bench: Bench) -> None:
    pod = await bench.pod()
    await pod.publisher.down()
    await bench.worker()
    await pod.has_status("unreachable")
    (claim,) = await bench.store.directory.claims()

    async def is_left_out() -> bool:
        loads = GroupLoads()
        loads.read(await bench.store.reservations.values(claim.group_id))
        return bool(loads.left_out(bench.store.reservations.now_ms()))

    async def is_a_candidate() -> bool:
        return not await is_left_out()

    await wait_until(is_left_out, "decisions leave it out", PATIENCE_SECONDS)
    await stays(pod, "unreachable")
    assert await is_left_out()
    await pod.publisher.up()
    await pod.has_status("active")
    await wait_until(is_a_candidate, "decisions name it", PATIENCE_SECONDS)


async def test_a_note_is_repeated_after_a_third_of_the_time_that_it_counts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the stream looks at itself: a note is a call to Redis, and there may be thousands of streams."""
    pod = await bench.pod()
    await pod.publisher.down()
    worker = await bench.worker()
    await pod.has_status("unreachable")
    (running,) = worker.worker.poller.running.values()
    stream, noted = running.stream, list[int]()
    assert isinstance(stream, Stream)

    async def note(milliseconds: int) -> None:
        noted.append(milliseconds)

    monkeypatch.setattr(stream.applier, "note_health", note)
    monkeypatch.setattr(Subscriber, "note_seconds", 60.0)
    begun = stream._noted + 10_000
    for seconds in range(200):
        await stream._note_health(begun + seconds)
    assert noted == [60_000] * 10


async def test_the_activity_says_why_a_connection_is_gone(bench: Bench) -> None:
    pod = await bench.pod()
    await bench.worker()
    await pod.has_status("active")
    await pod.publisher.down()

    async def told() -> list[tuple[str, str]]:
        entries = [entry.content for entry in await bench.store.activity.newest(100)]
        return [(each["kind"], each["detail"]) for each in entries if "reachable" in each["kind"]]

    async def is_told() -> bool:
        return bool(await told())

    await wait_until(is_told, "the activity names the loss", PATIENCE_SECONDS)
    detail = f"no connection to {pod.publisher.endpoint}: {ConnectionFailure.REFUSED}"
    assert await told() == [("unreachable", detail)]
    await pod.publisher.up()
    await pod.has_status("active")

    async def is_back() -> bool:
        return await told() == [("unreachable", detail), ("reachable", "")]

    await wait_until(is_back, "the activity says that it is back", PATIENCE_SECONDS)


async def test_a_publisher_is_replaying_while_it_replays(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES, replay_idle_seconds=1.0)
    pod = await bench.pod()
    pod.fault(replay_silent=True)
    await pod.has_status("replaying")
    await pod.has_status("degraded")
    await wait_until(lambda: worker.metric("streams", status="degraded") == 1, "the metric says so")


@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_publisher_that_is_away_for_too_long_is_lost_until_it_is_found(bench: Bench, has_replay: bool) -> None:
    await bench.worker()
    pod = await bench.pod(has_replay=has_replay)
    await pod.at_work(5)
    held = (await bench.row(pod, pod.prompts[-1]))[0]
    assert held > 0

    await pod.publisher.down()
    await pod.has_status("lost")
    # The status is written first, and then the table.
    await wait_until(lambda: _is_without_blocks(pod), "its blocks do not count", PATIENCE_SECONDS)
    assert pod.registration.instance_id in await _rows(bench, pod)

    await pod.publisher.up()
    await pod.subscribed()
    if not has_replay:
        # Its connection alone proves nothing.
        assert await bench.row(pod, pod.prompts[-1]) == (0, {}, {})
        assert (await pod.state()).status == "lost"
        await pod.work(1)
    await pod.has_status("active")
    await pod.agrees()
    await pod.counted(restarts=0)


async def _is_without_blocks(pod: Pod) -> bool:
    return await pod.bench.row(pod, pod.prompts[-1]) == (0, {}, {})


async def _rows(bench: Bench, pod: object) -> set[str]:
    table = await bench.store.reader.table(GROUP)
    assert table is not None
    return {row.instance_id for row in table.publishers.values()}


async def test_a_lost_publisher_that_comes_back_as_another_process_begins_anew(bench: Bench) -> None:
    await bench.worker()
    pod = await bench.pod()
    await pod.at_work(5)
    await pod.publisher.down()
    await pod.has_status("lost")
    await pod.engine.restart(rebind=True)
    await pod.has_status("active")
    assert await bench.held(pod.name) == {}
    await pod.work(2)
    await pod.agrees()
    await pod.counted(restarts=1)


async def test_a_lost_publisher_is_lost_to_the_next_worker_too(bench: Bench) -> None:
    first = await bench.worker("worker-1")
    pod = await bench.pod()
    await pod.at_work(3)
    await pod.publisher.down()
    await pod.has_status("lost")
    await first.stop()
    await bench.worker("worker-2")
    await pod.publisher.up()
    await pod.has_status("active")
    await pod.agrees()


async def test_a_publisher_whose_row_is_not_that_of_a_lost_one_is_lost_to_the_next_worker(bench: Bench) -> None:
    """A worker may stop between the writes of the status and of the row."""
    first = await bench.worker("worker-1")
    pod = await bench.pod()
    await pod.at_work(3)
    await pod.publisher.down()
    await pod.has_status("lost")
    await first.stop()
    (claim,) = await bench.store.directory.claims()
    grant = await bench.store.leases.take(claim, "worker-1", 60.0)
    assert grant is not None
    assert await bench.store.records.set_lost(grant, is_lost=False)
    await bench.store.leases.drop(grant)
    assert not await _is_without_blocks(pod)
    await bench.worker("worker-2")
    await wait_until(lambda: _is_without_blocks(pod), "its blocks do not count", PATIENCE_SECONDS)


async def test_what_is_left_of_a_connection_whose_life_has_ended_is_dropped(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES, replays_max=1)
    pod = await bench.pod()
    await pod.at_work(3)
    with worker.without_places():
        # A gap, and frames behind it: they wait for a replay, which then shows another life.
        with pod.dropping():
            await pod.work(1)
        await pod.work(3)
        await pod.counted(gaps=1)
        await pod.engine.restart(rebind=True)
        await pod.work(1)
        await pod.subscribed()
    await pod.agrees()
    await pod.at_watermark(0)
    await pod.counted(restarts=1, gaps=1, batches_lost=0)


async def test_a_restart_while_a_replay_waits_for_its_turn_is_no_loss(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES, replays_max=1)
    pod = await bench.pod(buffer_batches=2)
    await pod.at_work(3)
    with worker.without_places():
        with pod.dropping():
            await pod.work(1)
        await pod.work(1)
        await pod.counted(gaps=1)
        await pod.engine.restart(rebind=True)
        # More batches than the replay still has: it begins behind the watermark.
        await pod.work(7)
        await pod.subscribed()
    await pod.at_watermark(6)
    await pod.says("joined_late")
    await pod.counted(restarts=1, batches_lost=0)
    for unit, hashes in (await bench.held(pod.name)).items():
        assert hashes <= pod.truth().get(unit, set())


async def test_a_second_restart_is_one_though_its_clock_went_back(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False)
    await pod.at_work(3)
    for restarts in (1, 2):
        pod.clock.now -= 3600
        await pod.engine.restart()
        await pod.work(1)
        await pod.agrees()
        await pod.counted(restarts=restarts)


async def test_a_lone_frame_waits_for_no_timer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the loop stands still, so nothing that waits for a time goes on. Calls are paced as by default."""
    monkeypatch.setattr("waymark.store.pacing.Pacer", lambda _: Pacer(BLOCKS_MAX))
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.at_work(1)
    loop = asyncio.get_running_loop()
    now, seq = loop.time(), pod.last_seq + 1
    with monkeypatch.context() as still:
        still.setattr(loop, "time", lambda: now)
        await pod.work(1)
        await bench.at_watermark_by_another_loop(1, seq)
    await pod.agrees()


@pytest.mark.skipif(not native.is_built, reason="built without the C part")
async def test_a_fold_is_applied_before_it_needs_a_second_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waymark.ingest.life.CALL_BLOCKS", 4)
    folds: list[list[Batch]] = []
    apply = Applier.apply

    async def noting(applier: Applier, fold: Sequence[Incoming], commit: Commit | None) -> None:
        folds.append([incoming.batch for incoming in fold])
        await apply(applier, fold, commit)

    monkeypatch.setattr(Applier, "apply", noting)
    worker = await bench.worker(options=replace(WITHOUT_PROBES, replay_idle_seconds=PATIENCE_SECONDS))
    with worker.without_places():
        pod = await bench.pod()
        await pod.subscribed()
        await pod.has_status("replaying")
        for i in range(10):
            pod.publisher.publish_payload(msgpack.packb([pod.clock(), [["BlockRemoved", [i]]], 0]))
        await wait_until(lambda: worker.metric("buffer_frames") == 10, "10 frames have arrived", PATIENCE_SECONDS)
    await pod.at_watermark(pod.last_seq)
    await pod.counted(batches=10)
    frames = [[batch.frames for batch in fold] for fold in folds]
    assert sum(map(sum, frames)) == 10
    assert max(map(sum, frames)) <= 4  # each has one hash
    assert max(map(max, frames)) > 1


@pytest.mark.skipif(not native.is_built, reason="built without the C part")
async def test_a_fold_takes_buffered_frames_until_its_call_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waymark.ingest.life.CALL_BLOCKS", 4)
    folds: list[int] = []
    gate = asyncio.Event()
    apply = Applier.apply

    async def noting(applier: Applier, fold: Sequence[Incoming], commit: Commit | None) -> None:
        folds.append(sum(incoming.batch.frames for incoming in fold))
        await gate.wait()
        await apply(applier, fold, commit)

    monkeypatch.setattr(Applier, "apply", noting)
    worker = await bench.worker(options=replace(WITHOUT_PROBES, fold_batches=3))
    pod = await bench.pod(has_replay=False)
    await pod.subscribed()

    def remove(engine_hash: int) -> None:
        pod.publisher.publish_payload(msgpack.packb([pod.clock(), [["BlockRemoved", [engine_hash]]], 0]))

    remove(0)
    await wait_until(lambda: len(folds) == 1, "the first frame is being applied", PATIENCE_SECONDS)
    for i in range(1, 11):
        remove(i)
    await wait_until(lambda: worker.metric("buffer_frames") == 10, "10 frames have arrived", PATIENCE_SECONDS)
    gate.set()
    await pod.at_watermark(pod.last_seq)
    await pod.counted(batches=11)
    assert folds == [1, 4, 4, 2]
