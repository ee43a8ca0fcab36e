"""Catching up over real sockets: what replays bring, what they prove, and how they go wrong."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, WITHOUT_PROBES, Bench, Hand, Held, Pod
from tests.patience import patient
from waymark.simulator.publisher import SimulatedPublisher


def ghosts(held: Held, truth: Held) -> int:
    """How many blocks the index reports that are not there."""
    return sum(len(hashes - truth.get(unit, set())) for unit, hashes in held.items())


async def replayed(worker: Hand, outcome: str, times: int) -> None:
    await wait_until(
        lambda: worker.metric("replays_total", outcome=outcome) >= times,
        f"{times} replays {outcome}",
        PATIENCE_SECONDS,
    )


# ---- joining and coming back -----------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("replay_framing", ["seq", "topic"])
async def test_who_joins_late_is_told_everything_without_a_live_frame(
    any_bench: Bench, replay_framing: Any, transport: str
) -> None:
    pod = await any_bench.pod(transport=transport, replay_framing=replay_framing, topic="kv@pod-1@m")
    await pod.work(20)
    await any_bench.worker(options=WITHOUT_PROBES)
    await pod.agrees()
    await pod.at_watermark(19)
    await pod.has_status("active")
    await pod.counted(gaps=0, restarts=0, batches_lost=0, replays__complete=1)


async def test_a_connection_that_breaks_costs_nothing_where_the_replay_shows_the_same_life(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.at_work(5)
    before = await bench.record(pod.name)
    await pod.publisher.down()
    await pod.work(5)
    await pod.publisher.up()
    await pod.agrees()
    assert (await bench.record(pod.name))["life"] == before["life"]
    await pod.counted(restarts=0, gaps=0, batches_lost=0)
    await pod.has_status("active")


async def test_a_stream_without_a_replay_endpoint_is_active_until_it_has_lost_something(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False)
    await pod.has_status("active")
    await pod.subscribed()
    await pod.work(3)
    await pod.agrees()
    await pod.engine.restart()
    await pod.work(1)
    await pod.agrees()
    await pod.counted(restarts=1)
    await pod.has_status("active")
    assert not (await pod.state()).last_error
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    await pod.has_status("degraded")
    await pod.says("batches_lost")


# ---- lost for good ---------------------------------------------------------------------------------


async def lose_some(pod: Pod, lost: int = 4) -> None:
    """A gap that reaches back further than the publisher's replay buffer of two."""
    await pod.work(3)
    await pod.at_watermark(2)
    with pod.dropping():
        await pod.work(lost + 1)
    await pod.work(1)


async def test_a_replay_that_begins_too_late_leaves_a_loss_on_an_unbroken_connection(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(buffer_batches=2)
    await pod.caught_up()
    await lose_some(pod)
    await pod.at_watermark(8)
    await pod.has_status("degraded")
    await pod.says("batches_lost")
    await pod.counted(gaps=1, batches_lost=4, restarts=0)
    assert worker.metric("batches_lost_total") == 4


async def test_a_life_that_cannot_be_proven_after_a_broken_connection_has_ended(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(buffer_batches=2, gpu_blocks=1000, cpu_blocks=0)
    await pod.at_work(3)
    await pod.publisher.down()
    await pod.work(4)
    await pod.publisher.up()
    await pod.at_watermark(6)
    await pod.counted(restarts=1, batches_lost=0)
    await pod.says("joined_late")
    held = await bench.held(pod.name)
    assert ghosts(held, pod.truth()) == 0
    assert sum(map(len, held.values())) < sum(map(len, pod.truth().values()))


async def test_a_loss_ends_the_life_where_the_setting_says_so(bench: Bench) -> None:
    await bench.worker(options=replace(WITHOUT_PROBES, on_gap="reset"))
    pod = await bench.pod(buffer_batches=2)
    await pod.caught_up()
    await lose_some(pod)
    await pod.at_watermark(8)
    await pod.counted(gaps=1, batches_lost=4, restarts=1)
    assert ghosts(await bench.held(pod.name), pod.truth()) == 0
    await pod.says("joined_late")
    await pod.is_silent_about("batches_lost")


async def test_a_loss_without_a_replay_endpoint_ends_the_life_where_the_setting_says_so(bench: Bench) -> None:
    await bench.worker(options=replace(WITHOUT_PROBES, on_gap="reset"))
    pod = await bench.pod(has_replay=False)
    await pod.caught_up()
    await lose_some(pod)
    await pod.at_watermark(8)
    await pod.counted(gaps=1, batches_lost=5, restarts=1)
    assert ghosts(await bench.held(pod.name), pod.truth()) == 0
    await pod.says("joined_late")


async def test_joining_late_is_no_loss_and_never_resets(bench: Bench) -> None:
    pod = await bench.pod(buffer_batches=2)
    await pod.work(10)
    worker = await bench.worker(options=replace(QUICK, on_gap="reset"))
    await pod.at_watermark(9)
    await pod.says("joined_late")
    await replayed(worker, "complete", 4)  # probes, none of which finds a loss
    await pod.counted(restarts=0, batches_lost=0, gaps=0)


# ---- what the first reply proves -------------------------------------------------------------------


async def test_a_lost_tail_is_found_by_the_probe(any_bench: Bench) -> None:
    await any_bench.worker()
    pod = await any_bench.pod()
    await pod.caught_up()
    await pod.work(3)
    with pod.dropping():
        await pod.work(2)
    await pod.agrees()
    await pod.counted(gaps=0, restarts=0)


async def test_a_restart_that_nobody_saw_is_found_by_the_end_marker_alone(bench: Bench) -> None:
    await bench.worker()
    pod = await bench.pod()
    await pod.at_work(3)
    await pod.engine.restart()

    async def is_empty() -> bool:
        return not await bench.held(pod.name)

    await wait_until(is_empty, "nothing is held", PATIENCE_SECONDS)
    await pod.counted(restarts=1)
    assert (await pod.state()).watermark is None


@pytest.mark.parametrize("batches", [3, 6], ids=["as-many-batches", "more-batches"])
async def test_a_restart_that_nobody_saw_is_found_by_the_digest(bench: Bench, batches: int) -> None:
    await bench.worker()
    pod = await bench.pod()
    await pod.at_work(3)
    await pod.engine.restart()
    with pod.dropping():
        await pod.work(batches)
    await pod.agrees()
    await pod.counted(restarts=1, batches_lost=0)
    # Its next frames are no further restart, though their numbers are lower than those of the life before.
    await pod.work(1)
    await pod.agrees()
    await pod.counted(restarts=1, gaps=0)


async def test_a_restart_hidden_in_a_gap_is_found(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.at_work(3)
    await pod.engine.restart()
    with pod.dropping():
        await pod.work(8)
    await pod.work(1)
    await pod.agrees()
    await pod.at_watermark(8)
    await pod.counted(restarts=1, gaps=1, batches_lost=0)


async def test_a_restart_during_a_lost_connection_is_found(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.at_work(3)
    await pod.publisher.down()
    await pod.engine.restart()
    await pod.work(9)
    await pod.publisher.up()
    await pod.agrees()
    await pod.counted(restarts=1, batches_lost=0)


async def test_a_replay_that_leaves_out_the_watermark_itself_loses_nothing(bench: Bench) -> None:
    await bench.worker(options=replace(WITHOUT_PROBES, on_gap="reset"))
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(4)
    await pod.at_watermark(3)
    pod.fault(late_replay=1)
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    await pod.agrees()
    await pod.counted(gaps=1, batches_lost=0, restarts=0)
    assert (await pod.state()).status == "active"


# ---- replays that break off ------------------------------------------------------------------------


async def test_a_replay_that_breaks_off_is_asked_again_from_where_it_stopped(bench: Bench) -> None:
    pod = await bench.pod()
    pod.fault(truncate_replay=4)
    await pod.work(10)
    await bench.worker(options=WITHOUT_PROBES)
    await pod.has_status("degraded")
    await pod.says("replay_incomplete")
    await pod.agrees()
    # From 0, 3 and 6; from 9 three times without anything new.
    assert pod.publisher.counts["replays"] == 6
    await pod.counted(batches_lost=0, gaps=0, restarts=0, replays__incomplete=1)


async def test_a_replay_that_broke_off_is_asked_for_at_the_next_gap(bench: Bench) -> None:
    pod = await bench.pod()
    pod.fault(truncate_replay=4)
    await pod.work(6)
    await bench.worker(options=WITHOUT_PROBES)
    await pod.says("replay_incomplete")
    with pod.dropping():
        await pod.work(2)
    await pod.work(1)
    await pod.agrees()
    await pod.counted(batches_lost=0, gaps=1)
    pod.fault(truncate_replay=0)
    with pod.dropping():
        await pod.work(2)
    await pod.work(1)
    await pod.agrees()
    await pod.has_status("active")


async def test_a_replay_that_never_gets_anywhere_is_given_up(bench: Bench) -> None:
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    pod.fault(truncate_replay=1)
    await pod.work(5)
    options = replace(WITHOUT_PROBES, replay_idle_seconds=max(0.5, patient(0.1)), replay_seconds=patient(30.0))
    await bench.worker(options=options)
    await pod.says("replay_incomplete")
    assert pod.publisher.counts["replays"] == 4  # the first brought one batch
    await pod.work(1)
    await pod.at_watermark(5)
    await pod.counted(gaps=1, batches_lost=4)


class Shifty(SimulatedPublisher):
    """Leaves another batch out of every replay."""

    holes: list[int]

    async def _answer(self, socket: Any, identity: bytes, start: int) -> None:
        hole = self.holes.pop(0) if self.holes else None
        kept = self._buffer
        self._buffer = type(kept)((each for each in kept if each[0] != hole), maxlen=kept.maxlen)
        try:
            await super()._answer(socket, identity, start)
        finally:
            self._buffer = kept


class Endless(SimulatedPublisher):
    """Goes on for ever after what it has: with garbage and old batches, or with ever new ones."""

    has_news: bool

    async def _answer(self, socket: Any, identity: bytes, start: int) -> None:
        for seq, payload, _ in self._buffer:
            if seq >= start:
                await socket.send_multipart([identity, b"", seq.to_bytes(8, "big"), payload])
        for seq in itertools.count(max(start, self.next_seq)):
            if self.has_news:
                await socket.send_multipart([identity, b"", seq.to_bytes(8, "big"), b"no batch"])
            else:
                await socket.send_multipart([identity, b"", b"junk"])
                await socket.send_multipart([identity, b"", (0).to_bytes(8, "big"), b"no batch"])
            await asyncio.sleep(0.01)


async def test_a_hole_that_is_filled_when_asked_for_again_costs_nothing(bench: Bench) -> None:
    pod = await bench.pod()
    pod.publisher.__class__ = Shifty
    pod.publisher.holes = [4]
    await pod.work(8)
    await bench.worker(options=WITHOUT_PROBES)
    await pod.agrees()
    assert pod.publisher.counts["replays"] == 2
    await pod.counted(holes=0, batches_lost=0, replays__complete=1)
    await pod.has_status("active")


@pytest.mark.parametrize("on_gap", ["keep", "reset"])
async def test_a_hole_that_stays_is_the_publishers_own(bench: Bench, on_gap: Any) -> None:
    pod = await bench.pod()
    pod.fault(replay_hole_every=4)
    await pod.work(10)
    await bench.worker(options=replace(WITHOUT_PROBES, on_gap=on_gap))
    await pod.at_watermark(9)
    # Batches 3 and 7, each asked for once more.
    assert pod.publisher.counts["replays"] == 3
    await pod.counted(holes=2, batches_lost=2, restarts=0, replays__complete=1)
    await pod.says("batches_lost")


async def test_holes_that_wander_do_not_keep_a_stream_for_ever(bench: Bench) -> None:
    pod = await bench.pod()
    await pod.work(20)
    requests = 0

    async def answer(socket: Any, identity: bytes, start: int) -> None:
        nonlocal requests
        requests += 1
        for seq, payload, _ in pod.publisher._buffer:
            if seq == start or seq > start + requests:
                await socket.send_multipart([identity, b"", seq.to_bytes(8, "big"), payload])

    pod.publisher._answer = answer
    worker = await bench.worker(options=WITHOUT_PROBES)
    await replayed(worker, "incomplete", 1)
    # The first brought a batch; after that, three times, another hole than before.
    assert requests == 4


async def test_a_silent_endpoint_holds_live_events_up_once(bench: Bench) -> None:
    worker = await bench.worker(options=WITHOUT_PROBES, replay_idle_seconds=0.2)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    pod.fault(replay_silent=True)
    await pod.has_status("degraded")
    await pod.says("replay_silent")
    await pod.subscribed()
    for _ in range(3):
        with pod.dropping():
            await pod.work(1)
        await pod.work(2)
    await pod.at_watermark(8)
    await pod.counted(gaps=2, batches_lost=2, replays__silent=1)  # the first batch was no gap
    assert worker.metric("replays_total", outcome="silent") == 1
    await pod.says("replay_silent")


async def test_an_endpoint_that_speaks_again_ends_the_complaint(bench: Bench) -> None:
    await bench.worker(replay_idle_seconds=0.2)
    pod = await bench.pod()
    pod.fault(replay_silent=True)
    await pod.says("replay_silent")
    await pod.work(2)
    with pod.dropping():
        await pod.work(2)
    pod.fault(replay_silent=False)
    await pod.has_status("active")
    await pod.agrees()


async def test_a_replay_endpoint_that_cannot_be_connected_to_is_a_silent_one(bench: Bench) -> None:
    pod = await bench.pod(fields={"replay_endpoint": "tcp://nowhere"})
    await bench.worker(options=WITHOUT_PROBES)
    await pod.says("replay_silent")
    await pod.subscribed()
    await pod.work(3)
    await pod.agrees()


@pytest.mark.parametrize("has_news", [False, True])
async def test_a_replay_that_never_ends_is_ended(bench: Bench, has_news: bool) -> None:
    pod = await bench.pod()
    pod.publisher.__class__ = Endless
    pod.publisher.has_news = has_news
    await pod.work(4)
    began = time.monotonic()
    await bench.worker(options=WITHOUT_PROBES, replay_seconds=1.0)
    await pod.says("replay_incomplete")
    assert time.monotonic() - began >= 1.0
    await pod.agrees()
    if not has_news:
        await pod.work(2)
        await pod.agrees()
        assert (await pod.state()).counters["frames_malformed"] > 0
