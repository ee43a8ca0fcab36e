"""What a stream believes, and what of it survives a takeover."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Mortal, Pod
from waymark.apply.options import ApplyOptions
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.held import HeldBlocks
from waymark.simulator.encode import BlockRemoved, BlockStored, WireEvent

TOKENS = (1, 2, 3, 4)


def stored(engine_hash: int = 77, parent: int | None = None, tokens: tuple[int, ...] = TOKENS) -> BlockStored:
    return BlockStored((engine_hash,), parent, tokens, 4)


def removed(engine_hash: int = 77) -> BlockRemoved:
    return BlockRemoved((engine_hash,))


def seq_hashes(tokens: tuple[int, ...] = TOKENS) -> set[int]:
    return set(extend(None, token_bytes(tokens), 4))


async def publish(pod: Pod, *events: WireEvent, rank: int | None = 0) -> None:
    """One batch, and wait until it is applied."""
    seq = pod.publisher.publish(list(events), ts=pod.clock(), rank=rank)
    await pod.at_watermark(seq)


async def lose_one(pod: Pod) -> None:
    with pod.dropping():
        pod.publisher.publish([], ts=pod.clock())


async def test_copies_are_counted_while_nothing_is_lost(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await publish(pod, stored())
    await publish(pod, stored())
    await publish(pod, removed())
    assert await bench.held(pod.name) == {(0, "GPU"): seq_hashes()}
    await publish(pod, removed())
    assert await bench.held(pod.name) == {}


@pytest.mark.parametrize("is_taken_over", [False, True])
async def test_after_a_loss_a_removal_takes_the_block_whatever_its_count(bench: Bench, is_taken_over: bool) -> None:
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False)
    await pod.caught_up()
    await publish(pod, stored())
    await publish(pod, stored())
    await lose_one(pod)
    await publish(pod)
    await pod.says("batches_lost")
    if is_taken_over:
        await worker.stop()
        await bench.worker("worker-2", options=WITHOUT_PROBES)
        await pod.publisher.down()
        await pod.publisher.up()
        await pod.subscribed()
        await pod.says("batches_lost")
    await publish(pod, removed())
    assert await bench.held(pod.name) == {}


async def test_after_a_batch_above_a_limit_a_removal_takes_the_block_whatever_its_count(bench: Bench) -> None:
    """What the batch would have removed is not known, and no replay would say it in fewer events."""
    await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(batch_events_max=1024))
    pod = await bench.pod(has_replay=False)
    await pod.caught_up()
    await publish(pod, stored())
    await publish(pod, stored())
    await publish(pod, *[stored(n, None, (n, n, n, n)) for n in range(1000, 2100)])
    await pod.says("over_ceiling")
    await publish(pod, removed())
    assert await bench.held(pod.name) == {}


async def test_a_new_life_counts_again(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False)
    await pod.caught_up()
    await publish(pod, stored())
    await lose_one(pod)
    await publish(pod)
    await pod.says("batches_lost")
    await pod.engine.restart()
    await publish(pod, stored())
    await publish(pod, stored())
    await publish(pod, removed())
    assert await bench.held(pod.name) == {(0, "GPU"): seq_hashes()}
    await pod.is_silent_about("batches_lost")


async def test_joining_late_is_known_to_the_next_worker(bench: Bench) -> None:
    pod = await bench.pod(buffer_batches=2)
    await pod.work(5)
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    await pod.says("joined_late")
    await pod.has_status("degraded")
    await worker.stop()
    second = await bench.worker("worker-2", options=WITHOUT_PROBES)
    await wait_until(lambda: second.metric("streams", status="degraded") == 1, "it is degraded", PATIENCE_SECONDS)
    await pod.says("joined_late")


@pytest.mark.parametrize("on_gap", ["keep", "reset"])
async def test_nothing_is_applied_twice_after_a_takeover(bench: Bench, on_gap: Any) -> None:
    options = replace(WITHOUT_PROBES, on_gap=on_gap)
    worker = await bench.worker("worker-1", options=options)
    pod = await bench.pod(repeat_rate=0.5)
    await pod.caught_up()
    await pod.work(20)
    await pod.at_watermark(19)
    before = await bench.record(pod.name)
    await worker.stop()
    await pod.work(3)
    await bench.worker("worker-2", options=options)
    await pod.agrees()
    await pod.work(10)
    await pod.agrees()
    assert (await bench.record(pod.name))["life"] == before["life"]
    await pod.counted(restarts=0, gaps=0, stale_batches=0)


async def test_an_apply_that_arrives_in_the_next_life_of_the_engine_hides_nothing_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given up and sent again, and its first copy was long on its way. The new life begins again at 0."""
    sent: list[tuple[Sequence[Any], Sequence[Any]]] = []
    run = Mortal.run

    async def noting(self: Mortal, name: str, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        if name == "apply_rows":
            sent.append((keys, args))
        return await run(self, name, keys, args)

    monkeypatch.setattr(Mortal, "run", noting)
    worker = await bench.worker()  # a probe finds the new life
    pod = await bench.pod()
    await pod.at_work(5)
    late = sent[-1]
    await pod.engine.restart()

    async def has_no_watermark() -> bool:
        return (await pod.state()).watermark is None

    await wait_until(has_no_watermark, "the new life has no watermark", PATIENCE_SECONDS)
    assert await run(worker.client, "apply_rows", *late) == [b"fenced", 0]
    await pod.work(3)
    await pod.agrees()
    assert (await pod.state()).watermark == pod.last_seq


async def test_what_waited_for_its_parent_is_counted_as_lost_by_a_takeover(bench: Bench) -> None:
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await publish(pod, stored(5, parent=4))
    await pod.counted(waiting=1, waiting_lost=0)
    await worker.stop()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.counted(waiting=0, waiting_lost=1)
    # The parent comes, and its child is not taken for known.
    await publish(pod, stored(4))
    assert await bench.held(pod.name) == {(0, "GPU"): seq_hashes()}


async def test_another_block_size_is_said_once_per_stream(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    for hashed in (77, 78):
        await publish(pod, BlockStored((hashed,), None, 2 * TOKENS, 8, group_idx=None))
    await pod.counted(ignored__block_size_mismatch=2)
    await worker.stop()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await publish(pod, BlockStored((79,), None, 2 * TOKENS, 8, group_idx=None))
    await pod.counted(ignored__block_size_mismatch=3)
    said = [record for record in caplog.records if "blocks are not indexed" in record.message]
    assert [record.levelname for record in said] == ["WARNING"]
    assert await bench.held(pod.name) == {}


async def test_counters_go_on_where_the_last_worker_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waymark.ingest.status_reporter._REPORT_SECONDS", 60.0)
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    await pod.agrees()
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    await pod.agrees()
    pod.publisher.send_malformed()
    await pod.work(1)
    await pod.agrees()
    await worker.stop()  # what it counted last is written as it leaves
    counters = (await pod.state()).counters
    assert (counters["stale_batches"], counters["frames_malformed"]) == (2, 1)
    monkeypatch.setattr("waymark.ingest.status_reporter._REPORT_SECONDS", 0.1)
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.subscribed()
    await pod.counted(replays__complete=4)
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    await pod.agrees()
    await pod.counted(gaps=2, stale_batches=3, replays__complete=5)


async def test_a_stream_that_runs_out_of_memory_begins_again_with_new_tables(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the last allocation of a call fails: the blocks are in the table, and no part names them."""
    caplog.set_level(logging.ERROR, "waymark.ingest")
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await publish(pod, stored())
    failed: list[HeldBlocks] = []
    left: list[int] = []

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def once(memory: HeldBlocks, *args: Any, **named: Any) -> Any:
            before = memory.blocks
            found = method(memory, *args, **named)
            if memory.blocks > before and not failed:
                failed.append(memory)
                left.append(memory.blocks)
                raise MemoryError
            return found

        return once

    for name in ("note_run", "store"):
        monkeypatch.setattr(HeldBlocks, name, failing(getattr(HeldBlocks, name)))
    more = (*TOKENS, 5, 6, 7, 8)
    await publish(pod, stored(78, 77, more[4:]))
    assert left == [2], "what was changed is not taken back"
    await wait_until(lambda: failed[0].blocks == 0, "nothing of it is kept", PATIENCE_SECONDS)
    assert await bench.held(pod.name) == {(0, "GPU"): seq_hashes(more)}
    await publish(pod, removed(77))
    assert await bench.held(pod.name) == {(0, "GPU"): seq_hashes(more) - seq_hashes()}
    assert [record.message for record in caplog.records] == ["stream failed, will be restarted"]
