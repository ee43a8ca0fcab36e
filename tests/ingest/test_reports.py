"""What a stream writes of itself is true, also where it is written in the middle of an apply that never ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import msgpack
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Mortal, Pod
from tests.patience import within
from waymark.domain.engines import EngineKind
from waymark.ingest.life import Life
from waymark.ingest.status_reporter import StatusReporter
from waymark.ingest.stream import Stream
from waymark.simulator.encode import BlockStored
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys
from waymark.store.records import Facts
from waymark.store.store import Store

FACTS = {
    "status": "what the stream does at this moment",
    "last_error": "why it is not all it could be at this moment",
    "recent": "what was stored and removed, counted after the apply is acknowledged",
    "flags": "written before the batch that reports it is applied: one too many makes a stream more careful",
    "main_groups": "that of the first store with tokens, whoever comes to apply it",
    "last_event_id": "kept by the stream after what it names is applied",
}

SEEN = {
    "gaps": "a frame came that was not next",
    "frames_malformed": "a frame came that was none",
    "buffer_dropped": "a frame came for which there was no room",
    "stale_batches": "a frame came that the watermark has behind it",
    "replays.*": "a replay has ended so",
}
APPLIED = {
    "restarts": "counted after the change of holders is acknowledged",
    "waiting_lost": "counted after the change of holders is acknowledged, or by whoever takes over",
    "batches_lost": "counted when the watermark has moved past them, or the life has ended",
    "holes": "counted when the watermark has moved past them",
    "events.*": "counted after the apply is acknowledged",
    "decode_errors.*": "counted after the apply is acknowledged",
    "ignored.*": "counted after the apply is acknowledged",
    "unresolved": "counted after the apply is acknowledged",
    "copies_contradicted": "counted after the apply is acknowledged",
    "unsalted_events": "counted after the apply is acknowledged",
    "waiting": "how many wait, as of the last apply that was acknowledged",
    "missing": "an estimate, as of the last apply or change of holders that was acknowledged",
    "blocks_stored": "counted after the apply is acknowledged",
    "blocks_removed": "counted after the apply is acknowledged",
    "batches": "counted after the apply is acknowledged",
    "waiting_dropped": "counted after the apply is acknowledged",
}


def family(name: str) -> str:
    return name.partition(".")[0] + ".*" if "." in name else name


class Stalling(Mortal):
    """A client whose next call of ``script`` that ``passes`` lets through is sent and never answered."""

    script = "apply_rows"
    calls = 0
    stalls_at: int | None = None
    is_stalled = False

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        if name == self.script:
            self.calls += 1
            if self.calls == self.stalls_at:
                self.is_stalled = True
                await asyncio.Event().wait()
        return await super().run(name, keys, args)


def stall(hand: Hand, monkeypatch: pytest.MonkeyPatch, *, after: int, script: str = "apply_rows") -> Stalling:
    """From now on the worker's call number ``after`` of the script gets stuck on its way to Redis."""
    client = hand.client
    client.__class__ = Stalling
    assert isinstance(client, Stalling)
    client.script, client.calls, client.stalls_at = script, 0, after
    return client


async def standard_pod(bench: Bench, kind: EngineKind = EngineKind.STANDARD) -> Pod:
    return await bench.pod(kind=kind, dialect="standard", fields={"copies": "set"})


def test_every_fact_of_a_report_has_its_reason() -> None:
    assert FACTS.keys() == get_type_hints(Facts).keys()


async def test_every_counter_of_a_report_has_its_reason(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session with all that can go wrong; what it counts is in the lists above."""
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(repeat_rate=0.3)
    await pod.caught_up()
    await pod.work(2)
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    pod.publisher.send_malformed()
    bad = [BlockStored((5,), 4, (1, 2, 3, 4), 4), BlockStored((5, 5), None, (1,) * 8, 4)]
    pod.publisher.publish([*bad, BlockStored((6,), None, (1,) * 8, 8)], ts=pod.clock())
    await pod.engine.clear()
    await pod.agrees()
    await pod.engine.restart()
    await pod.work(1)
    await pod.agrees()
    state = await pod.state()
    counters, (stored, removed) = state.counters, state.recent
    assert 0 < sum(stored) <= counters["blocks_stored"]
    assert sum(removed) <= counters.get("blocks_removed", 0)
    assert {family(name) for name in counters} <= SEEN.keys() | APPLIED.keys()
    assert len(counters) > 8


async def twelve_events(pod: Pod) -> None:
    for i in range(12):
        await pod.engine.prefill(SimulatedPrompt(tuple(range(100 * i, 100 * i + 4))))


@pytest.mark.parametrize("kind", [EngineKind.STANDARD, EngineKind.MOONCAKE])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stalls_at", [1, 2, 10])
async def test_a_worker_that_ends_during_an_apply_loses_no_standard_event(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: EngineKind, shards: int, stalls_at: int
) -> None:
    bench.store = Store(bench.store.records._client, shards=shards)
    first = await bench.worker("worker-1", options=WITHOUT_PROBES, fold_batches=1)
    first_seq = 1 if kind is EngineKind.MOONCAKE else 0
    pod = await standard_pod(bench, kind)
    pod.publisher.first_seq = pod.publisher.next_seq = first_seq
    await pod.caught_up()
    client = stall(first, monkeypatch, after=stalls_at)
    await twelve_events(pod)
    await wait_until(lambda: client.is_stalled, "an apply is under way", PATIENCE_SECONDS)
    await first.stop()
    record = await bench.record(pod.name)
    told = [int(value) for name, value in record.items() if name.startswith("event:")]
    watermark = int(record.get("watermark", first_seq - 1))
    assert max(told, default=0) == watermark + 1 - first_seq, "one event a batch, from 1"
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.agrees()
    assert sum(len(hashes) for hashes in (await bench.held(pod.name)).values()) == 12
    await pod.counted(events__stored=12, ignored__seen=0, batches_lost=0)


async def test_a_write_pause_and_a_stopped_worker_lose_no_event(
    own_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with nothing replaced: Redis holds all writes back, and the worker is stopped meanwhile."""
    bench = own_bench
    monkeypatch.setattr(
        "waymark.ingest.status_reporter._REPORT_SECONDS", 1.0
    )  # as by default: the last report comes through
    first = await bench.worker("worker-1", options=WITHOUT_PROBES, fold_batches=1)
    pod = await standard_pod(bench)
    await pod.caught_up()
    for i in range(12):
        if i == 9:
            await pod.at_watermark(8)
            await bench.redis.client_pause(800, all=False)
        await pod.engine.prefill(SimulatedPrompt(tuple(range(100 * i, 100 * i + 4))))
        if i == 9:
            await wait_until(lambda: first.metric("frames_total") >= 10, "the tenth is read", PATIENCE_SECONDS)
            await first.stop()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.agrees()
    assert sum(len(hashes) for hashes in (await bench.held(pod.name)).values()) == 12


@pytest.mark.parametrize("stalls_at", range(1, 9))
async def test_counters_of_batches_are_those_up_to_the_watermark(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stalls_at: int
) -> None:
    """Whatever apply a worker ends in: what it counted of batches is what the batches up to the watermark come to."""
    # So that each frame has an apply of its own.
    monkeypatch.setattr("waymark.ingest.life.CALL_BLOCKS", 1)
    monkeypatch.setattr("waymark.ingest.straight.StraightWay.take", lambda _: False)
    first = await bench.worker("worker-1", options=WITHOUT_PROBES, fold_batches=1)
    pod = await bench.pod(has_replay=False)
    await pod.caught_up()
    client = stall(first, monkeypatch, after=stalls_at)
    upto: dict[int, Counter[str]] = {}
    so_far: Counter[str] = Counter()
    for i in range(8):
        if i in (3, 6):
            with pod.dropping():
                pod.publisher.publish([], ts=pod.clock())
            so_far["batches_lost"] += 1
        events = [BlockStored((100 + i,), None, (i, 2, 3, 4), 4)]
        so_far["events.stored"] += 1
        if i % 2:
            events.append(BlockStored((200 + i,), 999, (i, 2, 3, 4), 4))
            so_far["events.stored"] += 1
            so_far["waiting"] += 1
        upto[pod.publisher.publish(events, ts=pod.clock())] = so_far.copy()
    await wait_until(lambda: client.is_stalled, "an apply is under way", PATIENCE_SECONDS)
    await first.stop()
    state = await pod.state()
    expected = upto[state.watermark] if state.watermark is not None else Counter()
    assert {name: state.counters.get(name, 0) for name in so_far} == {name: expected[name] for name in so_far}
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.counted(waiting=0, waiting_lost=expected["waiting"])


async def test_a_restart_counts_when_its_holders_have_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.at_work(2)
    client = stall(first, monkeypatch, after=1, script="new_life")
    await pod.engine.restart()
    await pod.work(1)
    await wait_until(lambda: client.is_stalled, "holders are being ended", PATIENCE_SECONDS)
    await first.stop()
    assert (await pod.state()).counters.get("restarts", 0) == 0
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.agrees()
    await pod.counted(restarts=1)


def statuses(bench: Bench, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What the record says whenever the watermark has moved, from now on."""
    seen: dict[int, str] = {}
    run = Mortal.run

    async def noting(self: Mortal, name: str, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        reply = await run(self, name, keys, args)
        if name == "apply_rows":
            record = await bench.record(pod.name)
            if "watermark" in record:
                seen.setdefault(int(record["watermark"]), record["status"])
        return reply

    monkeypatch.setattr(Mortal, "run", noting)
    return seen


@pytest.mark.parametrize("fault", ["gap", "late"])
async def test_whoever_sees_a_watermark_sees_that_something_before_it_is_missing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A worker may die right after an apply: its record says degraded by then."""
    pod = await bench.pod(has_replay=False)
    await pod.work(2 if fault == "late" else 0)
    seen = statuses(bench, pod, monkeypatch)
    await bench.worker()
    await pod.subscribed()
    await pod.work(2)
    await pod.at_watermark(pod.last_seq)
    before_loss = -1
    if fault == "gap":
        before_loss = pod.last_seq
        with pod.dropping():
            await pod.work(1)
        await pod.work(1)
        await pod.at_watermark(pod.last_seq)

    def since_the_loss() -> set[str]:
        return {status for watermark, status in seen.items() if watermark > before_loss}

    await wait_until(lambda: bool(since_the_loss()), "an apply after the loss is noted")
    assert since_the_loss() == {"degraded"}
    await pod.has_status("degraded")
    if fault == "gap":
        await pod.engine.restart()
        await pod.work(1)
        await pod.has_status("active")


async def test_a_loss_that_one_worker_notes_and_the_next_one_meets_is_seen_with_the_watermark(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends before the batch that begins the life late is applied: nothing is known of that life."""
    options = replace(WITHOUT_PROBES, on_gap="reset")
    worker = await bench.worker("worker-1", options)
    pod = await bench.pod(has_replay=False)
    await pod.at_work(2)
    join_late = Life.join_late

    async def last_words(life: Life) -> None:
        await join_late(life)
        worker.client.is_dead = True

    with monkeypatch.context() as patched:
        patched.setattr(Life, "join_late", last_words)
        with pod.dropping():
            await pod.work(1)
        await pod.work(1)
        await wait_until(lambda: worker.client.is_dead, "the worker has ended", PATIENCE_SECONDS)
        await worker.die()
    record = await bench.record(pod.name)
    assert (record["flags"], record.get("watermark")) == ("joined_late", None)
    await pod.is_left()
    seen = statuses(bench, pod, monkeypatch)
    await bench.worker("worker-2", options)
    # What the first worker has said is gone: no frame has shown yet that anything is missing.
    await pod.has_status("active")
    await pod.work(1)
    await wait_until(lambda: bool(seen), "the apply is noted", PATIENCE_SECONDS)
    assert seen == {pod.last_seq: "degraded"}
    await pod.says("joined_late")


async def test_the_last_report_of_a_worker_does_not_hide_a_loss(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends after the frame that shows the loss is applied, and before it reports again."""
    is_stuck = asyncio.Event()
    tick = Stream._tick

    async def stuck(stream: Stream) -> None:
        if "batches_lost" in stream._life.reasons:
            is_stuck.set()
            await asyncio.Event().wait()
        await tick(stream)

    monkeypatch.setattr(Stream, "_tick", stuck)
    worker = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False)
    await pod.at_work(2)
    await pod.has_status("active")
    with pod.dropping():
        await pod.work(1)
    await pod.work(1)
    async with within(PATIENCE_SECONDS):
        await is_stuck.wait()
    await worker.stop()
    record = await bench.record(pod.name)
    assert (record["watermark"], record["status"]) == (str(pod.last_seq), "degraded")
    assert record["last_error"].startswith("batches_lost")


async def test_the_last_report_of_a_worker_does_not_hide_that_the_publisher_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no worker would let its blocks count again."""
    is_lost = asyncio.Event()
    lost = Life.lost

    async def stuck(life: Life) -> None:
        await lost(life)
        is_lost.set()
        await asyncio.Event().wait()

    worker = await bench.worker("worker-1")
    pod = await bench.pod()
    await pod.at_work(2)
    with monkeypatch.context() as patched:
        patched.setattr(Life, "lost", stuck)
        await pod.publisher.down()
        async with within(PATIENCE_SECONDS):
            await is_lost.wait()
        patched.setattr(StatusReporter, "_problem", "its connection fails otherwise than before")
        await worker.stop()
    assert (await bench.record(pod.name))["status"] == "lost"
    await pod.publisher.up()
    await bench.worker("worker-2")
    await pod.agrees()


async def test_media_that_a_publisher_has_left_are_not_counted_for_ever(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    size = pod.registration.block_size
    for number in range(40):
        stored = ["BlockStored", [number], None, list(range(size)), size, None, f"M{number}"]
        pod.publisher.publish_payload(msgpack.packb([pod.clock(), [["AllBlocksCleared"], stored], 0]))
        await pod.at_watermark(pod.last_seq)

    async def has_one() -> bool:
        fields: list[Any] = await bench.redis.hkeys(keys.record(1, 1))
        return [field for field in fields if field.startswith(b"count:blocks.")] == [b"count:blocks.M39"]

    await wait_until(has_one, "the record counts the last medium", PATIENCE_SECONDS)
    (state,) = await bench.store.publisher_states.of(await bench.store.directory.claims())
    assert state.blocks == {"M39": 1}
