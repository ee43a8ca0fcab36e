"""Workers: who applies which stream, handing over, and a Redis that is away."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, WITHOUT_PROBES, Bench, Pod, Server
from tests.patience import patient, within
from waymark.base.errors import StoreUnavailable
from waymark.domain.engines import EngineKind
from waymark.domain.status import StreamStatus
from waymark.domain.targets import Target
from waymark.ingest.options import WorkerOptions
from waymark.ingest.polling import Poller
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.leases import Grant, Leases
from waymark.store.redis.client import RedisClient


async def has_worker(pod: Pod, worker_id: str | None) -> None:
    async def has() -> bool:
        return (await pod.state()).worker == worker_id

    await wait_until(has, f"{pod.name} is {worker_id}'s", PATIENCE_SECONDS)


async def is_registered_nowhere(bench: Bench, pod: Pod) -> bool:
    return not await bench.store.directory.claims() and not await bench.held(pod.name)


# ---- registrations ---------------------------------------------------------------------------------


async def test_a_registration_reaches_a_worker_that_is_at_work(any_bench: Bench) -> None:
    await any_bench.worker()
    for instance_id in ("pod-1", "pod-2"):
        pod = await any_bench.pod(instance_id)
        await pod.at_work(2)


async def test_what_an_unregistered_publisher_sends_is_not_written(any_bench: Bench) -> None:
    await any_bench.worker()
    pod = await any_bench.pod()
    await pod.at_work(4)
    await any_bench.store.registry.unregister([pod.name])
    assert await is_registered_nowhere(any_bench, pod)
    await pod.work(4)  # its stream may still be at it
    await wait_until(lambda: pod.publisher.subscribers == 0, "nobody listens any more", PATIENCE_SECONDS)
    assert await is_registered_nowhere(any_bench, pod)

    async def is_swept() -> bool:
        return not await any_bench.blocks()

    await wait_until(is_swept, "its blocks are gone", PATIENCE_SECONDS)


async def test_a_publisher_that_moves_begins_a_new_life_at_its_new_address(bench: Bench) -> None:
    await bench.worker()
    old = await bench.pod()
    await old.at_work(3)
    new = await bench.pod(is_registered=False)
    await new.work(2)
    await bench.store.registry.register(new.registration)
    await new.agrees()
    await wait_until(lambda: old.publisher.subscribers == 0, "nobody listens to the old one", PATIENCE_SECONDS)
    await old.work(2)
    await new.work(1)
    await new.agrees()
    await bench.is_swept()


async def test_a_publisher_that_changes_as_a_target_keeps_its_stream(bench: Bench) -> None:
    worker = await bench.worker()
    pod = await bench.pod()
    await pod.caught_up()
    await pod.work(2)
    before = worker.metric("leases_taken_total")
    drained = replace(pod.registration, target=Target("http://10.0.0.7:8000", weight=0.0))
    assert await bench.store.registry.register(drained)
    await bench.pod("pod-2")  # the worker has looked again when it has this one's stream
    await wait_until(lambda: worker.metric("leases_taken_total") > before, "the other's stream runs", PATIENCE_SECONDS)
    await pod.work(2)
    await pod.agrees()
    await pod.counted(restarts=0, batches_lost=0)
    assert worker.metric("leases_taken_total") == before + 1
    assert worker.metric("leases_lost_total") == 0


async def test_a_registration_without_an_endpoint_is_no_stream(bench: Bench) -> None:
    worker = await bench.worker()
    pod = await bench.pod()
    await bench.store.registry.register(replace(pod.registration, instance_id="by-http", endpoint=None))
    await pod.has_status("active")
    await wait_until(lambda: worker.metric("streams", status="active") == 1, "one stream")
    assert worker.metric("streams", status="starting") == 0


# ---- several workers -------------------------------------------------------------------------------


async def test_two_workers_share_the_streams(bench: Bench) -> None:
    pods = [await bench.pod(f"pod-{i}") for i in range(8)]
    await bench.worker("worker-1")
    for pod in pods:
        await has_worker(pod, "worker-1")
    await bench.worker("worker-2")

    async def is_shared() -> bool:
        states = [await pod.state() for pod in pods]
        return {state.worker for state in states} == {"worker-1", "worker-2"}

    await wait_until(is_shared, "both have some", PATIENCE_SECONDS)
    for pod in pods:
        await pod.work(3)
    for pod in pods:
        await pod.agrees()
        await pod.counted(restarts=0, batches_lost=0)
    await wait_until(lambda: all(pod.publisher.subscribers == 1 for pod in pods), "no stream has two readers")


async def test_a_killed_workers_streams_are_taken_over(bench: Bench) -> None:
    first = await bench.worker("worker-1")
    pods = [await bench.pod(f"pod-{i}") for i in range(3)]
    for pod in pods:
        await pod.at_work(2)
    await bench.worker("worker-2")
    died = time.monotonic()
    await first.die()
    for pod in pods:
        await pod.work(2)
        await pod.agrees()
        assert (await pod.state()).worker == "worker-2"
        await pod.counted(restarts=0, batches_lost=0)
    # The bound of the contract, with room for a machine that is busy: a lease of 2 s, and 2 s.
    assert time.monotonic() - died < patient(2 * (QUICK.lease_seconds + 2.0))


@pytest.mark.parametrize("why", ["the other one stops", "the share moves"])
async def test_released_streams_are_taken_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """A stream without a replay loses what comes while nobody has it."""
    first = await bench.worker("worker-1")
    pods = [await bench.pod(f"pod-{i}") for i in range(6)]
    for pod in pods:
        await has_worker(pod, "worker-1")
    # From now on no worker polls by itself.
    monkeypatch.setattr(WorkerOptions, "poll_seconds", 3600.0)
    first.worker.poller.hint.set()
    second = await bench.worker("worker-2")

    async def are_listening() -> bool:
        ((_, count),) = await bench.redis.pubsub_numsub(keys.CONTROL)
        return count == 2 and not first.worker.poller.hint.is_set() and bool(second.worker.poller._listed.claims)

    await wait_until(are_listening, "both have polled and listen", PATIENCE_SECONDS)
    if why == "the other one stops":
        await first.stop()
        for pod in pods:
            await has_worker(pod, "worker-2")
    else:
        first.worker.poller.hint.set()

        async def are_shared() -> bool:
            return {(await pod.state()).worker for pod in pods} == {"worker-1", "worker-2"}

        await wait_until(are_shared, "each has some of them", PATIENCE_SECONDS)


async def test_a_hint_while_a_poll_reads_leads_to_another_poll(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, polls = Poller._poll, 0

    async def polled(poller: Poller, tasks: asyncio.TaskGroup) -> None:
        nonlocal polls
        polls += 1
        await poll(poller, tasks)
        if polls == 1:
            poller.hint.set()

    monkeypatch.setattr(Poller, "_poll", polled)
    monkeypatch.setattr(WorkerOptions, "poll_seconds", 3600.0)
    await bench.worker("worker-1")
    await wait_until(lambda: polls == 2, "it polls again", PATIENCE_SECONDS)


async def test_a_worker_that_is_told_to_stop_gives_its_leases_back_at_once(any_bench: Bench) -> None:
    first = await any_bench.worker("worker-1", lease_seconds=60.0)
    pod = await any_bench.pod()
    await pod.at_work(2)
    state = await pod.state()
    lease = keys.lease(state.group_id, state.id)
    assert await any_bench.redis.get(lease)
    await first.stop()
    assert await any_bench.redis.get(lease) is None
    assert (await pod.state()).worker is None
    assert list(await any_bench.store.heartbeats.report("", keep_seconds=60)) == []
    await any_bench.worker("worker-2", lease_seconds=60.0)
    await pod.work(2)
    await pod.agrees()
    await has_worker(pod, "worker-2")


async def test_a_stream_whose_lease_was_taken_away_stops_without_writing(bench: Bench) -> None:
    worker = await bench.worker("worker-1")
    pod = await bench.pod()
    await pod.at_work(2)
    (claim,) = await bench.store.directory.claims()
    grant = await bench.store.leases.take(claim, "worker-2", 60.0, force=True)
    assert grant is not None
    before = await bench.record(pod.name), await bench.blocks()
    await pod.work(3)
    await wait_until(lambda: pod.publisher.subscribers == 0, "the stream has stopped", PATIENCE_SECONDS)
    assert (await bench.record(pod.name), await bench.blocks()) == before
    assert not worker.task.done()
    # And it is taken up again once it is free.
    await bench.store.leases.drop(grant)
    await pod.agrees()
    await has_worker(pod, "worker-1")


async def test_one_publishers_stream_does_not_wait_for_anothers_replay(bench: Bench) -> None:
    silent = await bench.pod("pod-1")
    silent.fault(replay_silent=True)
    pod = await bench.pod("pod-2", has_replay=False)
    await bench.worker(options=WITHOUT_PROBES, replay_idle_seconds=60.0)
    await silent.has_status("replaying")
    await pod.at_work(2)
    assert (await silent.state()).status == "replaying"


async def test_a_stream_that_waits_for_its_turn_to_replay_is_not_given_up(bench: Bench) -> None:
    """Two streams, one replay at a time; the first takes longer than a lease."""
    worker = await bench.worker(options=WITHOUT_PROBES, replays_max=1, replay_idle_seconds=1.5, lease_seconds=1.0)
    pods = [await bench.pod(f"pod-{i}") for i in range(2)]
    for pod in pods:
        pod.fault(replay_silent=True)
    for pod in pods:
        await pod.says("replay_silent")
        await pod.counted(replays__silent=1)
    assert worker.metric("replays_total", outcome="silent") == 2


async def test_a_worker_runs_so_many_replays_at_a_time(bench: Bench) -> None:
    pods = [await bench.pod(f"pod-{i}") for i in range(4)]
    running: list[int] = []
    most = 0

    def slowed(pod: Pod) -> None:
        answer = pod.publisher._answer

        async def slow(socket: Any, identity: bytes, start: int) -> None:
            nonlocal most
            running.append(start)
            most = max(most, len(running))
            await asyncio.sleep(0.2)
            running.pop()
            await answer(socket, identity, start)

        pod.publisher._answer = slow

    for pod in pods:
        slowed(pod)
        await pod.work(2)
    await bench.worker(options=WITHOUT_PROBES, replays_max=2)
    for pod in pods:
        await pod.agrees()
    assert most == 2


async def test_a_replay_that_is_longer_than_a_lease_keeps_it(bench: Bench) -> None:
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    asked, lease_seconds = 0, min(2.0, patient(1.0))

    async def answer(socket: Any, identity: bytes, start: int) -> None:
        nonlocal asked
        asked += 1
        for seq, payload, _ in [*pod.publisher._buffer, (2**64 - 1, b"", b"")]:
            if seq >= start:
                await socket.send_multipart([identity, b"", seq.to_bytes(8, "big"), payload])
                await asyncio.sleep(lease_seconds / 10)

    pod.publisher._answer = answer
    await pod.work(15)
    # On a busy machine there is more than half a second between two batches.
    await bench.worker(options=replace(WITHOUT_PROBES, replay_idle_seconds=60.0), lease_seconds=lease_seconds)
    await pod.has_status("replaying")
    state = await pod.state()
    lease = keys.lease(state.group_id, state.id)

    async def is_over() -> bool:
        assert await bench.redis.exists(lease)
        return (await pod.state()).status == "active"

    await wait_until(is_over, "the replay is over", PATIENCE_SECONDS)
    await pod.agrees()
    assert asked == 1


# ---- stopping and cancelling -----------------------------------------------------------------------


async def test_a_cancellation_is_never_lost_in_a_call(bench: Bench, redis_url: str) -> None:
    client = RedisClient.open(redis_url)

    async def ask_forever() -> None:
        while True:
            await client.ping()

    for turn in range(200):
        asking = asyncio.create_task(ask_forever())
        for _ in range(turn % 20):
            await asyncio.sleep(0)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=patient(5.0))
        assert done, f"the cancellation of turn {turn} was lost"
    await client.close()


# ---- a Redis that is away --------------------------------------------------------------------------


async def test_frames_are_kept_while_redis_is_frozen_and_applied_afterwards(own_bench: Bench, server: Server) -> None:
    worker = await own_bench.worker(options=WITHOUT_PROBES)
    pod = await own_bench.pod(has_replay=False)
    await pod.at_work(3)
    server.freeze()
    for _ in range(10):
        await pod.work(3)
        await asyncio.sleep(0)
    await wait_until(lambda: worker.metric("redis_up") == 0, "the outage was noticed", PATIENCE_SECONDS)
    server.thaw()
    await pod.agrees()
    await pod.counted(gaps=0, batches_lost=0, buffer_dropped=0, restarts=0)
    await wait_until(lambda: worker.metric("redis_up") == 1, "it is back", PATIENCE_SECONDS)


async def test_frames_are_kept_while_redis_is_started_again_with_its_data(own_bench: Bench, server: Server) -> None:
    worker = await own_bench.worker(options=WITHOUT_PROBES)
    pod = await own_bench.pod(has_replay=False)
    await pod.at_work(3)
    await asyncio.to_thread(server.stop)
    await pod.work(20)
    await wait_until(lambda: worker.metric("redis_up") == 0, "the outage was noticed", PATIENCE_SECONDS)
    await asyncio.to_thread(server.start)
    await pod.agrees()
    await pod.counted(gaps=0, batches_lost=0, restarts=0)


async def test_what_did_not_fit_while_redis_was_frozen_is_a_gap(own_bench: Bench, server: Server) -> None:
    worker = await own_bench.worker(options=WITHOUT_PROBES, stream_buffer_frames=5)
    pod = await own_bench.pod()
    await pod.at_work(3)
    server.freeze()
    for _ in range(10):
        await pod.work(3)
        await asyncio.sleep(0.01)
    await wait_until(lambda: worker.metric("redis_up") == 0, "the outage was noticed", PATIENCE_SECONDS)
    server.thaw()
    await pod.agrees()
    await wait_until(lambda: worker.metric("buffer_dropped_total") > 0, "it was counted", PATIENCE_SECONDS)
    await pod.counted(batches_lost=0, restarts=0)


async def test_a_worker_can_be_stopped_while_redis_is_frozen(own_bench: Bench, server: Server) -> None:
    worker = await own_bench.worker()
    pod = await own_bench.pod()
    await pod.caught_up()
    server.freeze()
    await pod.work(2)
    await wait_until(lambda: worker.metric("redis_up") == 0, "the outage was noticed", PATIENCE_SECONDS)
    async with within(PATIENCE_SECONDS):
        await worker.stop()
    with pytest.raises(StoreUnavailable):
        await own_bench.store.directory.claims()
    server.thaw()


async def test_a_lease_that_comes_just_as_the_worker_stops_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, may_return = asyncio.Event(), asyncio.Event()
    take = Leases.take

    async def held_up(self: Leases, *args: Any, **options: Any) -> Grant | None:
        grant = await take(self, *args, **options)
        taken.set()
        await may_return.wait()
        return grant

    monkeypatch.setattr(Leases, "take", held_up)
    await bench.pod()
    worker = await bench.worker()
    async with within(10):
        await taken.wait()
        assert await bench.redis.keys("wm:*:lease:*")
        stopping = asyncio.ensure_future(worker.stop())
        await asyncio.sleep(0)
        may_return.set()
        await stopping
    assert await bench.redis.keys("wm:*:lease:*") == []


async def test_no_stream_changes_its_worker_because_redis_did_not_hear_who_lives(bench: Bench) -> None:
    hands = [await bench.worker(name, WITHOUT_PROBES) for name in ("worker-1", "worker-2")]
    for hand in hands:
        await wait_until(lambda hand=hand: hand.metric("workers") == 2, "they know each other")  # type: ignore[misc]
    pods = [await bench.pod(f"pod-{i}") for i in range(8)]

    async def owners() -> list[str | None]:
        return [(await pod.state()).worker for pod in pods]

    for pod in pods:
        await pod.caught_up()
    before = [(await bench.record(pod.name))["token"] for pod in pods], await owners()
    assert set(before[1]) == {"worker-1", "worker-2"}
    for hand in hands:
        hand.client.is_dead = True
    for hand in hands:
        await wait_until(lambda hand=hand: hand.worker.poller.is_away, "its look has failed", PATIENCE_SECONDS)  # type: ignore[misc]
    # As after an outage that was longer than a lease.
    await bench.redis.delete("wm:workers", *await bench.redis.keys("wm:*:lease:*"))
    hands[0].client.is_dead = False
    await wait_until(lambda: not hands[0].worker.poller.is_away, "the first is back", PATIENCE_SECONDS)
    hands[1].client.is_dead = False
    await wait_until(lambda: not hands[1].worker.poller.is_away, "the second is back", PATIENCE_SECONDS)
    for pod in pods:
        await pod.work(2)
        await pod.agrees()
    assert ([(await bench.record(pod.name))["token"] for pod in pods], await owners()) == before


async def test_a_stream_that_cannot_run_says_why_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "waymark.ingest")
    pod = await bench.pod(is_registered=False)
    await bench.store.registry.register(replace(pod.registration, endpoint="tcp://nowhere"))
    hand = await bench.worker()
    await wait_until(lambda: hand.metric("leases_taken_total") >= 3, "it was tried again", PATIENCE_SECONDS)
    said = [record.message for record in caplog.records]
    assert said == ["stream stopped, will be restarted"]


async def test_a_round_that_fails_ends_neither_the_worker_nor_its_streams(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "waymark.ingest.polling")
    hand = await bench.worker(options=WITHOUT_PROBES)
    pod, later = await bench.pod("pod-1"), await bench.pod("pod-2", is_registered=False)
    await pod.caught_up()
    claims, rounds = hand.worker.poller._store.polled_claims, 0

    async def fails() -> list[Claim]:
        nonlocal rounds
        rounds += 1
        raise ValueError("a defect")

    def are_three() -> bool:
        hand.worker.poller.hint.set()
        return rounds >= 3 or hand.task.done()

    with monkeypatch.context() as patch:
        patch.setattr(claims, "poll", fails)
        await wait_until(are_three, "rounds fail", PATIENCE_SECONDS)
        assert not hand.task.done()
        await pod.work(2)
        await pod.agrees()
        assert not hand.worker.poller.is_away, "it is not Redis that fails"
    await later.register()
    await later.caught_up()
    said = [record.message for record in caplog.records]
    assert said.count("polling for streams failed") == said.count("polling for streams resumed") == 1


# ---- publishers that stand in a file, and an empty Redis -------------------------------------------


async def test_publishers_of_the_file_are_registered_once_however_many_workers_have_it(bench: Bench) -> None:
    pods = [await bench.pod(f"pod-{i}", is_registered=False) for i in range(3)]
    publishers = [pod.registration for pod in pods]
    publishers.append(replace(publishers[0], instance_id="by-http", kind=EngineKind.STANDARD, endpoint=None))
    for name in ("worker-1", "worker-2"):
        await bench.worker(name, publishers=publishers)
    for pod in pods:
        await pod.at_work(2)
    claims = await bench.store.directory.claims()
    assert sorted(claim.registration.instance_id for claim in claims) == ["by-http", "pod-0", "pod-1", "pod-2"]
    third = await bench.worker("worker-3", publishers=publishers)
    await wait_until(lambda: third.metric("redis_up") == 1, "it has looked", PATIENCE_SECONDS)
    assert [claim.raw for claim in await bench.store.directory.claims()] == [claim.raw for claim in claims]
    for pod in pods:
        await pod.counted(restarts=0)


async def test_what_the_file_says_otherwise_moves_or_is_told_and_what_it_does_not_name_stays(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "waymark.ingest")
    moved, other, unnamed = [await bench.pod(f"pod-{i}") for i in range(3)]
    elsewhere = await bench.pod("pod-0", is_registered=False)
    refused = replace(other.registration, block_size=2 * other.registration.block_size)
    reserved = replace(other.registration, tenant_id="explanation")
    hand = await bench.worker(publishers=[reserved, elsewhere.registration, refused])
    await elsewhere.caught_up()
    found = {claim.registration.name: claim.registration for claim in await bench.store.directory.claims()}
    assert found[moved.name].endpoint == elsewhere.registration.endpoint
    assert found[other.name] == other.registration
    assert unnamed.name in found
    assert hand.metric("publishers_refused") == 2
    first, second = (getattr(record, "fields", {})["error"] for record in caplog.records)
    assert "choose another name" in first
    assert "block_size 4, not 8" in second


async def test_an_empty_redis_is_told_who_stands_in_the_file_and_who_was_heard(bench: Bench) -> None:
    named, heard, moved, changed = [await bench.pod(f"pod-{i}") for i in range(4)]
    hand = await bench.worker(publishers=[named.registration])
    for pod in (named, heard, moved, changed):
        await pod.at_work(3)
    elsewhere = await bench.pod("pod-2", is_registered=False)
    wider = replace(changed.registration, block_size=8)
    # Emptied, and two of them registered otherwise, before the worker looks again: who was later is right.
    hand.client.is_dead = True
    await wait_until(lambda: hand.worker.poller.is_away, "it does not look", PATIENCE_SECONDS)
    await bench.redis.flushall()
    await bench.store.registry.register(elsewhere.registration)
    await bench.store.registry.register(wider)
    hand.client.is_dead = False
    await elsewhere.work(2)
    for pod in (named, heard, elsewhere):
        await pod.agrees()
    found = {claim.registration.name: claim.registration for claim in await bench.store.directory.claims()}
    expected = [named.registration, heard.registration, elsewhere.registration, wider]
    assert found == {registration.name: registration for registration in expected}
    assert not hand.task.done()


async def test_who_was_unregistered_does_not_come_back_with_an_empty_redis(bench: Bench) -> None:
    hand = await bench.worker()
    gone, stays = await bench.pod("pod-0"), await bench.pod("pod-1")
    for pod in (gone, stays):
        await pod.caught_up()
    await bench.store.registry.unregister([gone.name])
    await wait_until(lambda: gone.publisher.subscribers == 0, "nobody listens to it", PATIENCE_SECONDS)
    await wait_until(lambda: sum(hand.metric("streams", status=s) for s in StreamStatus) == 1, "one stream is left")

    def is_read() -> bool:
        """The stream ends with its record, which may be before the worker has read the registrations again."""
        return [claim.registration.name for claim in hand.worker.poller._listed.claims] == [stays.name]

    await wait_until(is_read, "the worker knows that it is unregistered", PATIENCE_SECONDS)
    await bench.redis.flushall()
    await stays.work(2)
    await stays.agrees()
    assert [claim.registration.name for claim in await bench.store.directory.claims()] == [stays.name]


async def test_publishers_of_the_file_are_registered_as_soon_as_redis_is_there(
    own_bench: Bench, server: Server
) -> None:
    pod = await own_bench.pod(is_registered=False)
    await asyncio.to_thread(server.stop)
    hand = await own_bench.worker(publishers=[pod.registration])
    await pod.work(2)
    await wait_until(lambda: hand.metric("redis_up") == 0, "it has looked", PATIENCE_SECONDS)
    await asyncio.to_thread(server.start)
    await pod.agrees()


@pytest.mark.parametrize("is_another_life", [False, True])
async def test_a_redis_that_has_lost_its_last_writes_is_brought_up_to_date_though_nobody_publishes(
    bench: Bench, is_another_life: bool
) -> None:
    await bench.worker()
    pod = await bench.pod()
    await pod.at_work(3)
    kept = {key: await bench.redis.dump(key) for key in await bench.redis.keys("wm:*") if b":lease:" not in key}
    if is_another_life:
        await pod.engine.restart()
    await pod.work(5 if not is_another_life else 1)
    await pod.agrees()
    await bench.redis.flushall()
    for key, value in kept.items():
        assert value is not None
        await bench.redis.restore(key, 0, value, replace=True)  # a worker may have written its own by now
    await pod.agrees()
    await pod.counted(restarts=int(is_another_life), batches_lost=0)


async def test_a_redis_that_came_back_empty_is_told_again_what_it_held(bench: Bench) -> None:
    await bench.worker()
    pod = await bench.pod()
    await pod.at_work(5)
    await bench.redis.flushall()
    await pod.agrees()
    await pod.work(2)
    await pod.agrees()
