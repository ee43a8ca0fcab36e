"""Snapshots of an engine's cache: what no replay has is known again, exactly, and by one request for all workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, Bench, Pod
from tests.patience import patient, within
from waymark.apply.slices import SliceRunner
from waymark.base.errors import StoreUnavailable
from waymark.domain.engines import EngineKind
from waymark.domain.held import RESTORED_MAX, HeldBlocks
from waymark.domain.slices import Slices
from waymark.domain.targets import Target
from waymark.ingest import snapshot, snapshots
from waymark.ingest.life import Life
from waymark.ingest.options import StreamOptions
from waymark.ingest.snapshot import RECORDS_MAX, BadSnapshot, RecordReply
from waymark.ingest.snapshots import Snapshots
from waymark.store import keys
from waymark.store.holder_tables import decode_table
from waymark.store.leases import new_place
from waymark.store.scripts import Outcome, Scripts
from waymark.store.store import Store

SNAPSHOTS: StreamOptions = replace(QUICK, snapshot_pause_seconds=0.3, snapshot_answer_seconds=patient(1.0))
LOSSY: dict[str, Any] = {"has_snapshots": True, "buffer_batches": 2, "repeat_rate": 0.5, "gpu_blocks": 24}


async def lose(pod: Pod, prompts: int = 12) -> None:
    """Batches that neither a subscriber nor a replay has."""
    with pod.dropping():
        await pod.work(prompts)
    await pod.work(3)


async def has_snapshots_of(pod: Pod, outcome: str = "complete", most: int | None = None) -> None:
    async def has() -> bool:
        return (await pod.state()).counters.get(f"snapshots.{outcome}", 0) > 0

    await wait_until(has, f"a snapshot was {outcome}", PATIENCE_SECONDS)
    assert most is None or pod.publisher.counts["snapshots"] <= most


async def test_a_hole_is_filled_by_one_snapshot(bench: Bench) -> None:
    pod = await bench.pod(**LOSSY)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    assert pod.publisher.counts["snapshots"] == 0
    await lose(pod)
    await has_snapshots_of(pod)
    await pod.has_status("active")
    await pod.work(20)
    await pod.agrees()
    assert pod.publisher.counts["snapshots"] == 1
    assert (await pod.state()).known == 1.0
    await bench.is_swept()
    assert not await bench.strangers()


async def test_what_was_known_is_freed_in_slices_by_a_snapshot_and_at_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million blocks in one piece would hold up every other stream of the worker."""
    monkeypatch.setattr("waymark.apply.slices.SLICE_SECONDS", 0.0)
    pause, pauses, freed_after = SliceRunner.pause, 0, list[set[int]]()

    async def counted(runner: SliceRunner) -> None:
        nonlocal pauses
        pauses += 1
        await pause(runner)

    def drop(memory: HeldBlocks) -> Slices[None]:
        assert memory.blocks
        freed_after.append(set())
        for _ in range(5):
            freed_after[-1].add(pauses)
            yield

    monkeypatch.setattr(SliceRunner, "pause", counted)
    monkeypatch.setattr(HeldBlocks, "drop", drop)
    pod = await bench.pod(**LOSSY)
    hand = await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    await lose(pod)
    await has_snapshots_of(pod)
    assert list(map(len, freed_after)) == [5]
    await hand.stop()
    assert list(map(len, freed_after)) == [5, 5]


async def test_an_engine_that_is_registered_late_is_known_whole(bench: Bench) -> None:
    pod = await bench.pod(**LOSSY)
    await pod.work(30)
    await bench.worker(options=SNAPSHOTS)
    await has_snapshots_of(pod)
    await pod.agrees()
    await pod.work(20)
    await pod.agrees()
    await pod.has_status("active")


async def test_a_hole_without_a_replay_endpoint(bench: Bench) -> None:
    pod = await bench.pod(has_replay=False, **LOSSY)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(4)
    await lose(pod)
    await has_snapshots_of(pod)
    await pod.agrees()
    await pod.has_status("active")


COPIED: dict[str, Any] = {"gpu_blocks": 24, "cpu_blocks": 0, "repeat_rate": 0.9}
"""An engine that stores most blocks several times."""


@pytest.mark.parametrize("has_snapshots", [True, False], ids=["snapshot", "no_snapshot"])
async def test_copies_that_contradict_their_counts_are_repaired(bench: Bench, has_snapshots: bool) -> None:
    pod = await bench.pod(has_snapshots=has_snapshots, removes_once=True, **COPIED)
    hand = await bench.worker(options=SNAPSHOTS)
    await pod.at_work(4)
    assert (await pod.state()).copies.rule == "count"

    async def has_another_rule() -> bool:
        await pod.work(4)
        return (await pod.state()).copies.rule == "set"

    await wait_until(has_another_rule, "the events have shown how copies are removed", PATIENCE_SECONDS)

    async def are_counted() -> bool:
        counted = (await pod.state()).counters["copies_contradicted"], hand.metric("copies_contradicted_total")
        return min(counted) >= RESTORED_MAX

    await wait_until(are_counted, "the contradictions are counted", PATIENCE_SECONDS)
    if has_snapshots:
        await has_snapshots_of(pod)
        await pod.has_status("active")
    else:
        await pod.says("counted by a rule that the events of the engine contradict")
        await pod.has_status("degraded")
    await pod.agrees()
    await pod.work(20)
    await pod.agrees()
    assert "its events contradict" in (await pod.state()).copies.why
    await hand.die()
    await bench.worker("worker-2", options=SNAPSHOTS)
    await pod.work(20)
    await pod.agrees()
    await pod.has_status("active" if has_snapshots else "degraded")


@pytest.mark.parametrize("removes_once", [True, False], ids=["as_its_release", "not_as_its_release"])
async def test_copies_count_by_the_release_until_the_events_show_otherwise(bench: Bench, removes_once: bool) -> None:
    fields = {"target": Target(release="0.34.0")}
    pod = await bench.pod(has_snapshots=True, removes_once=removes_once, fields=fields, **COPIED)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(60)
    if removes_once:
        assert "0.34.0" in (await pod.state()).copies.why
        assert not (await pod.state()).counters.get("copies_contradicted")
    else:
        await has_snapshots_of(pod)
        assert (await pod.state()).copies.rule == "count"
    await pod.has_status("active")
    await pod.work(20)
    await pod.agrees()


@pytest.mark.parametrize(
    ("fault", "outcome", "why"),
    [
        ({"snapshot_unavailable": 1}, "unavailable", ""),
        ({"snapshot_silent": True}, "silent", "no snapshot came"),
        ({"snapshot_cut": True}, "refused", "cannot be read"),
        ({"snapshot_other_id": True}, "refused", "another publisher_id"),
        ({"snapshot_below_zero": True}, "refused", "no copy is left"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_a_snapshot_that_cannot_be_used_is_asked_for_again(
    bench: Bench, fault: dict[str, Any], outcome: str, why: str
) -> None:
    pod = await bench.pod(**LOSSY)
    is_silent = outcome == "silent"
    hand = await bench.worker(options=replace(SNAPSHOTS, snapshot_answer_seconds=1.0) if is_silent else SNAPSHOTS)
    await pod.at_work(4)
    pod.fault(**fault)
    before = (await bench.record(pod.name))["life"]
    await lose(pod)
    await has_snapshots_of(pod, outcome)
    if why:
        await pod.says(why)
        await pod.has_status("degraded")
        assert (await bench.record(pod.name))["life"] == before, "what was known stays"
    assert hand.metric("snapshots_total", outcome=outcome) >= 1
    pod.fault(snapshot_silent=False, snapshot_cut=False, snapshot_other_id=False, snapshot_below_zero=False)
    await has_snapshots_of(pod)
    await pod.agrees()
    await pod.has_status("active")
    await bench.is_swept()
    assert not await bench.strangers()


async def test_a_restart_beyond_the_buffer(bench: Bench) -> None:
    pod = await bench.pod(**LOSSY)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(4)
    await pod.engine.restart(rebind=True)
    await pod.work(20)
    await has_snapshots_of(pod)
    await pod.agrees()
    await pod.has_status("active")


async def test_four_workers_ask_once_and_no_answer_is_wrong_afterwards(bench: Bench) -> None:
    pod = await bench.pod(**LOSSY)
    hands = [await bench.worker(f"worker-{i}", options=SNAPSHOTS) for i in range(4)]

    def takeovers() -> float:
        return sum(hand.metric("takeovers_total") for hand in hands)

    await pod.at_work(8)
    before = takeovers()
    await lose(pod, 40)

    async def is_repaired() -> bool:
        await pod.work(1)  # an engine goes on; a worker asks once a frame has shown that its subscription works
        return (await pod.state()).counters.get("snapshots.complete", 0) > 0

    await wait_until(is_repaired, "a snapshot was complete", PATIENCE_SECONDS)
    await pod.agrees()
    replicas = [Store(bench.store.client) for _ in range(4)]
    asked = 0
    while asked < 1000:
        for prompt in pod.prompts:
            for bench.store in replicas:
                assert await bench.row(pod, prompt) == pod.expected(prompt)
                asked += 1
    # On a busy machine a lease may run out, and the next worker has then lost what the small buffer no longer has.
    assert 1 <= pod.publisher.counts["snapshots"] <= 1 + takeovers() - before


async def test_a_worker_that_dies_in_the_middle_leaves_what_was_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await bench.pod(**LOSSY)
    hand = await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    is_applied = asyncio.Event()

    async def hangs(*_: object) -> None:
        is_applied.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Life, "take_snapshot", hangs)
    await lose(pod)
    async with within(PATIENCE_SECONDS):
        await is_applied.wait()
    record = await bench.record(pod.name)
    assert any(name.startswith("staged:") for name in record)
    table = decode_table(await bench.store.client.hgetall(keys.holders(1)), bench.store.parser, keys.holders(1))
    assert table is not None
    live = {value for name, value in record.items() if name.startswith("holder:")}
    assert {str(holder) for holder in table.holders} == live, "readers see only the old life"
    monkeypatch.undo()
    await hand.die()
    await bench.worker("worker-2", options=SNAPSHOTS)
    await has_snapshots_of(pod)
    await pod.agrees()
    await pod.has_status("active")
    await bench.is_swept()
    assert not await bench.strangers()


async def test_a_repair_is_asked_for_through_redis(bench: Bench) -> None:
    pod = await bench.pod(**LOSSY)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    (claim,) = await bench.store.directory.claims()
    assert await bench.store.records.ask_repair(claim)
    await has_snapshots_of(pod)
    await pod.agrees()
    assert "repair" not in await bench.record(pod.name)
    assert pod.publisher.counts["snapshots"] == 1


async def test_two_places_in_all_and_a_pause_for_each_socket(bench: Bench) -> None:
    places, one = bench.store.snapshots, new_place()
    assert (await places.take(one, "a" * 16, 60.0, 60.0)).wait_seconds == 0
    assert (await places.take(one, "a" * 16, 60.0, 60.0)).wait_seconds == 0, "a repeated call takes one place"
    left = (await places.take(new_place(), "a" * 16, 60.0, 60.0)).wait_seconds
    assert max(0.0, 60 - patient(10)) < left <= 60
    assert (await places.take(new_place(), "b" * 16, 60.0, 60.0)).wait_seconds == 0
    assert (await places.take(new_place(), "c" * 16, 60.0, 60.0)).wait_seconds > 0
    await places.release(one, "a" * 16)
    assert (await places.take(new_place(), "c" * 16, 60.0, 60.0)).wait_seconds == 0


@pytest.mark.parametrize("what", ["blocks", "bytes"])
async def test_a_snapshot_above_a_bound_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    pod = await bench.pod(**LOSSY)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    monkeypatch.setattr(*{"blocks": (snapshots, "BLOCKS_MAX", 3), "bytes": (snapshot, "BYTES_MAX", 300)}[what])
    await lose(pod)
    await pod.says("more than 3 blocks" if what == "blocks" else "at most 300 are read")

    async def is_dropped() -> bool:
        return not [name for name in await bench.record(pod.name) if name.startswith("staged:")]

    await wait_until(is_dropped, "no part of the snapshot is left", PATIENCE_SECONDS)
    monkeypatch.undo()
    await has_snapshots_of(pod)
    await pod.agrees()


@pytest.mark.parametrize("beyond", [0, 1], ids=["at the bound", "above it"])
async def test_the_parts_of_a_snapshot_have_a_bound_and_are_read_in_turns(
    monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """An engine sends as many parts as it likes; reading millions in one turn of the loop would hold up all streams."""
    head = [(7).to_bytes(8, "big"), b"p" * snapshot.PUBLISHER_ID_BYTES]
    parts = [b"", *head, *[b"x"] * (snapshot.PARTS_MAX - 3 + beyond)]
    turns, turns_meanwhile = 0, 0
    receive = snapshot._receive

    def answer(router: zmq.Socket[bytes]) -> None:
        if router.poll(int(1000 * patient(10))):
            router.send_multipart([router.recv_multipart()[0], *parts])

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def count(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
        nonlocal turns_meanwhile
        before = turns
        try:
            return await receive(socket)
        finally:
            turns_meanwhile = turns - before

    async def go_on() -> bool:
        return True

    monkeypatch.setattr(snapshot, "_receive", count)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        answering = asyncio.create_task(asyncio.to_thread(answer, router))
        turning = asyncio.create_task(turn())
        asking = snapshot.ask(context, endpoint, seconds=patient(10), message_bytes_max=1000, between=go_on)
        try:
            if beyond:
                with pytest.raises(snapshot.BadSnapshot, match="more than 65536 parts"):
                    await asking
            else:
                found = await asking
                assert found is not None
                assert (found.seq, len(found.chunks)) == (7, snapshot.PARTS_MAX - 3)
        finally:
            turning.cancel()
            await answering
    assert turns_meanwhile > snapshot.PARTS_MAX / 2048


async def test_a_snapshot_that_takes_too_long_to_apply_is_interrupted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await bench.pod(**LOSSY)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    apply = Snapshots._apply
    monkeypatch.setattr(Snapshots, "_apply", lambda self, snapshot, _: apply(self, snapshot, 0.0))
    await lose(pod)
    await has_snapshots_of(pod, "interrupted")
    await pod.says("was not applied within")
    assert not any(name.startswith("staged:") for name in await bench.record(pod.name))
    monkeypatch.undo()
    await has_snapshots_of(pod)
    await pod.agrees()
    await bench.is_swept()
    assert not await bench.strangers()


async def test_redis_is_away_in_the_middle_of_a_snapshot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = await bench.pod(**LOSSY)
    hand = await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    refused = 0
    run = Scripts.run

    async def is_away(self: Scripts, name: str, /, **values: Any) -> Outcome:
        nonlocal refused
        if name != "stage_life":
            return await run(self, name, **values)
        refused += 1
        if refused % 2:
            raise StoreUnavailable("connection refused")
        await run(self, name, **values)
        if refused < 4:
            raise StoreUnavailable("the reply was lost")
        return await run(self, name, **values)

    monkeypatch.setattr(Scripts, "run", is_away)
    await lose(pod)
    await has_snapshots_of(pod)
    await pod.agrees()
    assert refused >= 4
    assert hand.metric("leases_lost_total") == 0
    await bench.is_swept()
    assert not await bench.strangers()


async def test_an_engine_that_dies_in_the_middle_is_asked_in_its_next_life(bench: Bench) -> None:
    pod = await bench.pod(**LOSSY)
    await bench.worker(options=replace(SNAPSHOTS, snapshot_answer_seconds=patient(60.0)))
    await pod.at_work(8)
    pod.fault(snapshot_silent=True)
    await lose(pod)

    async def is_asked() -> bool:
        return bool(await bench.redis.zcard(keys.SNAPSHOTS))

    await wait_until(is_asked, "the engine is asked", PATIENCE_SECONDS)
    await pod.engine.restart(rebind=True)
    pod.fault(snapshot_silent=False)
    await has_snapshots_of(pod, "interrupted")
    await pod.work(12)
    await pod.agrees()
    await pod.has_status("active")
    assert not await bench.redis.zcard(keys.SNAPSHOTS)


# ---- snapshots of SGLang: records without tokens ---------------------------------------------------

SGLANG: dict[str, Any] = {
    "kind": EngineKind.SGLANG, "dialect": "sglang-map", "has_snapshots": True, "buffer_batches": 2, "gpu_blocks": 24,
}  # fmt: skip


async def promises_no_more(pod: Pod) -> int:
    """Ask for every prompt of the pod; by how many blocks the answers fall short of its cache."""
    short = 0
    for prompt in pod.prompts:
        (found, *_), (expected, *_) = await pod.bench.row(pod, prompt), pod.expected(prompt)
        assert found <= expected
        short += expected - found
    return short


@pytest.mark.parametrize("version", [1, 2])
async def test_a_snapshot_of_records_names_the_blocks_that_were_told_with_tokens(bench: Bench, version: int) -> None:
    pod = await bench.pod(**SGLANG, cpu_blocks=0 if version == 1 else 30)
    pod.fault(snapshot_version=version)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(12)
    (claim,) = await bench.store.directory.claims()
    assert await bench.store.records.ask_repair(claim)
    await has_snapshots_of(pod)
    await pod.agrees()
    assert (await pod.state()).known == 1.0
    await pod.work(12)
    await pod.agrees()
    assert pod.publisher.counts["snapshots"] == 1


async def test_blocks_that_nobody_told_with_tokens_are_unknown(bench: Bench) -> None:
    pod = await bench.pod(**SGLANG)
    hand = await bench.worker(options=SNAPSHOTS)
    await pod.at_work(8)
    await lose(pod, 4)
    await has_snapshots_of(pod)
    await pod.has_status("active")
    known = (await pod.state()).known
    assert known is not None
    assert 0 < known < 1
    await pod.at_watermark(pod.last_seq)
    assert await promises_no_more(pod) > 0
    await hand.die()
    await pod.is_left()  # else the subscriber that is seen next may be the one that dies
    await bench.worker("worker-2", options=SNAPSHOTS)
    await pod.caught_up()
    await pod.work(12)
    await pod.at_watermark(pod.last_seq)
    await pod.has_status("active")
    assert await promises_no_more(pod) >= 0
    await bench.is_swept()
    assert not await bench.strangers()


@pytest.mark.parametrize(
    ("fault", "why"),
    [({"snapshot_cut": True}, "cut short"), ({"snapshot_below_zero": True}, "records and says that it has")],
    ids=["cut", "lacks-a-record"],
)
async def test_a_snapshot_of_records_that_is_not_whole_changes_nothing(
    bench: Bench, fault: dict[str, Any], why: str
) -> None:
    pod = await bench.pod(**SGLANG)
    await bench.worker(options=SNAPSHOTS)
    await pod.at_work(4)
    before = (await bench.record(pod.name))["life"]
    pod.fault(**fault)
    await lose(pod)
    await has_snapshots_of(pod, "refused")
    await pod.says(why)
    assert (await bench.record(pod.name))["life"] == before
    pod.fault(snapshot_cut=False, snapshot_below_zero=False)
    await has_snapshots_of(pod)
    await pod.has_status("active")


HEADER = {"version": 2, "resume_seq": 8, "barrier_seq": 7, "record_count": 1, "page_size": 4}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([[b"", b"chunk", b""]], "out of place"),
        ([[b"", b"header"]], "has 1 frames"),
        ([[b"", b"header", msgpack.packb([1])]], "not a map"),
        ([[b"", b"header", b"\xc1"]], "not a map"),
        ([[b"", b"header", msgpack.packb(HEADER | {"resume_seq": 7})]], "goes on with 7"),
        ([[b"", b"header", msgpack.packb(HEADER | {"barrier_seq": -2})]], "ends with batch -2"),
        ([[b"", b"header", msgpack.packb(HEADER | {"page_size": 16})]], "pages of 16"),
        ([[b"", b"header", msgpack.packb(HEADER)], *2 * [[b"", b"chunk", b"x"]]], "more chunks than records"),
        ([[b"", b"header", msgpack.packb(HEADER)], [b"", b"chunk", bytes(301)]], "more than 300 bytes"),
    ],
)
def test_messages_that_are_no_reply_are_refused(
    monkeypatch: pytest.MonkeyPatch, messages: list[list[bytes]], why: str
) -> None:
    monkeypatch.setattr(snapshot, "BYTES_MAX", 300)
    reply = RecordReply(4)
    for parts in messages[:-1]:
        assert not reply.take(parts)
    with pytest.raises(BadSnapshot, match=why):
        reply.take(messages[-1])


def test_a_snapshot_has_so_many_records() -> None:
    def header(count: int) -> list[bytes]:
        return [b"", b"header", msgpack.packb(HEADER | {"record_count": count})]

    assert not RecordReply(4).take(header(RECORDS_MAX))
    with pytest.raises(BadSnapshot, match=f"has {RECORDS_MAX + 1} records, and at most {RECORDS_MAX}"):
        RecordReply(4).take(header(RECORDS_MAX + 1))
