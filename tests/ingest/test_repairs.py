"""Repairs of engines without snapshots: all batches of the life are applied again, if a replay has the first one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, Bench, Pod
from waymark.ingest import running
from waymark.ingest.options import StreamOptions
from waymark.ingest.stream import Stream
from waymark.store import keys

#: No replay but those that frames, connections and repairs ask for.
REPAIRS: StreamOptions = replace(QUICK, probe_seconds=60.0, publisher_timeout=60.0, snapshot_pause_seconds=0.3)
SMALL: dict[str, Any] = {"gpu_blocks": 24, "cpu_blocks": 0, "repeat_rate": 0.5}


async def set_back(bench: Bench, pod: Pod, prompts: int = 12) -> None:
    """Blocks that the engine has removed since are in Redis again, as from an old copy of its data."""
    (claim,) = await bench.store.directory.claims()
    hexadecimal = 16 * b"[0-9a-f]" + b"*"
    patterns = [
        keys.block_prefix(claim.group_id, 0) + hexadecimal,
        keys.engine(claim.group_id, 0, 0)[:-1].encode() + b"*",
    ]
    old = {key: await bench.redis.dump(key) for pattern in patterns for key in await bench.redis.keys(pattern)}
    assert len(old) > 1
    await pod.work(prompts)
    await pod.agrees()
    for key, value in old.items():
        assert value is not None
        await bench.redis.restore(key, 0, value, replace=True)
    held, truth = await bench.held(pod.name), pod.truth()
    assert any(hashes - truth.get(unit, set()) for unit, hashes in held.items()), "the index has blocks that are gone"


async def ask(bench: Bench) -> None:
    (claim,) = await bench.store.directory.claims()
    assert await bench.store.records.ask_repair(claim)


async def replays_of(pod: Pod) -> int:
    return sum(count for name, count in (await pod.state()).counters.items() if name.startswith("replays."))


async def has_replays(pod: Pod, number: int) -> None:
    async def has() -> bool:
        return await replays_of(pod) == number

    await wait_until(has, f"there were {number} replays", PATIENCE_SECONDS)


async def test_a_repair_applies_all_batches_again(bench: Bench) -> None:
    pod = await bench.pod(**SMALL)
    await bench.worker(options=REPAIRS)
    await pod.at_work(8)
    await set_back(bench, pod)
    await ask(bench)
    await pod.agrees()
    assert "repair" not in await bench.record(pod.name), "the new life needs none"
    await pod.has_status("active")
    await pod.work(8)
    await pod.agrees()


async def test_a_repair_whose_worker_stops_is_made_by_the_next_one(bench: Bench) -> None:
    pod = await bench.pod(**SMALL)
    hand = await bench.worker(options=REPAIRS)
    await pod.at_work(8)
    await set_back(bench, pod)
    await hand.die()
    await ask(bench)
    await bench.worker("worker-2", options=REPAIRS)
    await pod.agrees()
    assert "repair" not in await bench.record(pod.name)
    await pod.has_status("active")


async def test_a_replay_without_the_first_batch_ends_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """More would be lost than gained: the older blocks are in no batch that it has."""
    pod = await bench.pod(buffer_batches=4, **SMALL)
    await bench.worker(options=REPAIRS)
    await pod.at_work(12)
    before, restarts = await replays_of(pod), (await pod.state()).counters.get("restarts", 0)
    await ask(bench)

    async def is_tried() -> bool:
        return "no replay has the first batch" in caplog.text

    await wait_until(is_tried, "the log says that a replay repairs nothing", PATIENCE_SECONDS)
    await pod.work(8)
    await pod.agrees()
    await pod.has_status("active")
    assert (await pod.state()).counters.get("restarts", 0) == restarts
    await has_replays(pod, before + 1)
    assert await replays_of(pod) == before + 1, "asked once in a life, though the mark stays"
    assert "repair" in await bench.record(pod.name)


async def test_an_engine_that_drifts_again_is_asked_again_after_a_pause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Stream] = []

    class Noted(Stream):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            streams.append(self)

    monkeypatch.setattr(running, "Stream", Noted)
    pod = await bench.pod(**SMALL)
    await bench.worker(options=replace(REPAIRS, snapshot_pause_seconds=3600.0))
    await pod.at_work(8)
    first = await replays_of(pod)
    await ask(bench)

    async def is_made() -> bool:
        return "repair" not in await bench.record(pod.name)

    await wait_until(is_made, "the repair is made", PATIENCE_SECONDS)
    await pod.agrees()
    await has_replays(pod, first + 1)
    await ask(bench)
    (stream,) = streams

    async def is_seen() -> bool:
        return stream.applier.grant.change.wants_repair

    await wait_until(is_seen, "the worker has seen the mark", PATIENCE_SECONDS)
    await pod.work(4)
    await pod.agrees()
    assert await replays_of(pod) == first + 1
    stream._repair_at = 0.0  # the pause is over
    await wait_until(is_made, "the next repair is made", PATIENCE_SECONDS)
    await pod.agrees()
