"""Replays over real sockets where there are more than places: nobody is held up, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod
from waymark.base.errors import StoreUnavailable

TRICKLE_SECONDS = 0.1
OPTIONS = replace(WITHOUT_PROBES, replay_idle_seconds=0.4)


def trickling(pod: Pod) -> None:
    """From now on a replay brings one batch after the other, just before the idle timeout of each."""
    sending: list[asyncio.Task[None]] = []

    async def send(socket: Any, identity: bytes, start: int) -> None:
        for seq, payload, _ in [*pod.publisher._buffer, (2**64 - 1, b"", b"")]:
            if seq >= start:
                await socket.send_multipart([identity, b"", seq.to_bytes(8, "big"), payload])
                await asyncio.sleep(TRICKLE_SECONDS)

    async def answer(socket: Any, identity: bytes, start: int) -> None:
        for task in sending:
            task.cancel()
        sending[:] = [asyncio.create_task(send(socket, identity, start))]

    pod.publisher._answer = answer


async def watermark(pod: Pod) -> int:
    found = (await pod.state()).watermark
    return -1 if found is None else found


@pytest.mark.long
@pytest.mark.parametrize("bytes_per_second_min", [16_384, 0], ids=["by-rate", "by-turn"])
async def test_publishers_that_trickle_their_replays_hold_up_nobody(bench: Bench, bytes_per_second_min: int) -> None:
    """More of them than places, each with a minute of replay to go."""
    slow = [await bench.pod(f"slow-{i}", gpu_blocks=10_000) for i in range(4)]
    for pod in slow:
        trickling(pod)
        await pod.work(600)
    worker = await bench.worker(
        options=replace(OPTIONS, replay_bytes_per_second_min=bytes_per_second_min), replays_max=2
    )
    await wait_until(lambda: worker.metric("replays_waiting") == 2, "all places are taken")
    await wait_until(lambda: worker.metric("replays_running") == 2, "two replays are under way")
    honest = await bench.pod("honest")
    await honest.work(20)
    await honest.agrees()
    await honest.has_status("active")
    await honest.counted(restarts=0, batches_lost=0)
    # The honest one needs no replay where the worker has heard it from its first frame on.
    assert worker.metric("replays_total", outcome="complete") <= 1, "none of the others can be at its end"
    yielded = sum(worker.metric("replay_places_yielded_total", reason=reason) for reason in ("slow", "fairness"))
    assert yielded >= 1
    # Each of them has its turns.
    before = [await watermark(pod) for pod in slow]

    async def has_each_gone_on() -> bool:
        return all([await watermark(pod) > was for pod, was in zip(slow, before, strict=True)])

    await wait_until(has_each_gone_on, "each of the slow ones has gone on", 2 * PATIENCE_SECONDS)
    for pod in slow:
        await pod.counted(restarts=0, batches_lost=0, holes=0)


async def test_a_replay_that_gave_its_place_up_ends_as_if_it_had_not(bench: Bench) -> None:
    pods = [await bench.pod(f"pod-{i}") for i in range(3)]
    for pod in pods:
        trickling(pod)
        await pod.work(12)
    worker = await bench.worker(options=OPTIONS, replays_max=1)
    for pod in pods:
        await pod.at_watermark(11)
    for pod in pods:
        await pod.agrees()
        await pod.has_status("active")
        await pod.counted(restarts=0, batches_lost=0, holes=0, replays__complete=1, replays__incomplete=0)
    assert worker.metric("replay_places_yielded_total", reason="fairness") >= 1
    await wait_until(lambda: worker.metric("replays_running") == 0, "all places are free again")
    assert worker.metric("replays_waiting") == 0


# ---- live frames meanwhile -------------------------------------------------------------------------


async def test_a_stream_without_a_place_begins_with_live_frames_and_heals(bench: Bench) -> None:
    worker = await bench.worker(options=OPTIONS)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0, is_registered=False)
    await pod.work(5)
    with worker.without_places():
        await pod.register()
        await pod.subscribed()
        await pod.says("replay_waiting")
        await pod.work(3)
        await pod.at_watermark(7)
        assert (await pod.state()).status == "degraded"
        await pod.says("joined_late")
        assert (await bench.held(pod.name))[0, "GPU"] < pod.truth()[0, "GPU"]
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0, gaps=0, batches_lost=0, replays__complete=1)
    await pod.work(2)
    await pod.agrees()


async def test_the_next_worker_heals_what_began_with_live_frames(bench: Bench) -> None:
    first = await bench.worker("worker-1", options=OPTIONS)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0, is_registered=False)
    await pod.work(5)
    with first.without_places():
        await pod.register()
        await pod.subscribed()
        await pod.says("replay_waiting")
        await pod.work(3)
        await pod.at_watermark(7)
        await first.stop()
    await bench.worker("worker-2", options=OPTIONS)
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0, gaps=0, batches_lost=0)


async def test_a_beginning_that_cannot_be_had_stays_as_it_is(bench: Bench) -> None:
    worker = await bench.worker(options=OPTIONS)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0, buffer_batches=2, is_registered=False)
    await pod.work(5)
    with worker.without_places():
        await pod.register()
        await pod.subscribed()
        await pod.says("replay_waiting")
        await pod.work(3)
        await pod.at_watermark(7)
        before = await bench.held(pod.name)
    await pod.is_silent_about("replay_waiting")
    await pod.says("joined_late")
    await pod.counted(restarts=0, gaps=0, batches_lost=0, replays__complete=1)
    assert await bench.held(pod.name) == before
    assert "opened_at" not in (await bench.record(pod.name))["flags"]
    await pod.work(1)
    await pod.at_watermark(8)


async def test_frames_behind_a_gap_wait_for_the_replay(bench: Bench) -> None:
    worker = await bench.worker(options=OPTIONS)
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(2)
    await pod.at_watermark(1)
    with worker.without_places():
        with pod.dropping():
            await pod.work(1)
        await pod.work(2)
        await wait_until(lambda: worker.metric("replays_waiting") == 1, "the gap waits")
        await pod.has_status("replaying")
        assert await watermark(pod) == 1
    await pod.agrees()
    await pod.counted(restarts=0, gaps=1, batches_lost=0)


@pytest.mark.parametrize("is_same_life", [True, False])
async def test_what_follows_a_connection_that_broke_is_proven_later(bench: Bench, is_same_life: bool) -> None:
    worker = await bench.worker(options=OPTIONS)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    await pod.at_work(3)
    with worker.without_places():
        await pod.publisher.down()
        if not is_same_life:
            # As many batches as before: the next one is in order by its number.
            await pod.engine.restart()
            await pod.work(3)
        await pod.publisher.up()
        await pod.subscribed()
        await pod.says("replay_waiting")
        await pod.work(2)
        await pod.at_watermark(4)
    await pod.is_silent_about("replay_waiting")
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0 if is_same_life else 1, gaps=0, batches_lost=0)


async def test_a_primary_that_is_away_leaves_places_to_other_groups(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays that wait for it keep their places."""
    hand = await bench.worker(options=WITHOUT_PROBES)
    _lose_groups(hand, monkeypatch, "wm:{1}")
    places = hand.worker._places
    await _register_group(bench, "first", places.size)
    await wait_until(lambda: (places.running, places.waiting) == (6, 2), "all wait", PATIENCE_SECONDS)
    other = await bench.pod("other", is_registered=False, fields={"model_name": "another"})
    await other.work(3)
    await other.register()
    await other.at_watermark(other.last_seq)


async def test_two_primaries_that_are_away_leave_places_to_other_groups(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES)
    _lose_groups(hand, monkeypatch, "wm:{1}", "wm:{2}")
    places = hand.worker._places
    await _register_group(bench, "first", places.size)
    await _register_group(bench, "second", places.size)
    await wait_until(lambda: (places.running, places.waiting) == (12, 4), "all wait", PATIENCE_SECONDS)
    other = await bench.pod("other", is_registered=False, fields={"model_name": "another"})
    await other.work(3)
    await other.register()
    await other.at_watermark(other.last_seq)


async def _register_group(bench: Bench, model_name: str, pods: int) -> None:
    for number in range(pods):
        pod = await bench.pod(f"{model_name}-{number}", is_registered=False, fields={"model_name": model_name})
        await pod.work(1)
        await pod.register()


def _lose_groups(hand: Hand, monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> None:
    """Let no block of these groups be written, each of which has a primary of its own."""
    run = hand.client.run

    async def reached(name: str, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        if name == "apply_rows" and any(prefix in keys[0] for prefix in prefixes):
            raise StoreUnavailable("its primary is away")
        return await run(name, keys, args)

    monkeypatch.setattr(hand.client, "run", reached)
    monkeypatch.setattr(hand.client, "server_of", lambda key: key.partition(b"}")[0])
