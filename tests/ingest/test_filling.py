"""What may go wrong while a late replay fills a gap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, Bench, Pod
from tests.ingest.test_late_answers import (
    IMPATIENT,
    PATIENT,
    SMALL,
    PausesClock,
    forget_before,
    gapped_at_work,
    is_filled,
    replays,
)
from waymark.apply.applier import Applier
from waymark.base.errors import StoreUnavailable
from waymark.ingest.frames import ReplayedBatch
from waymark.ingest.replay import Replay
from waymark.ingest.request import EndlessMessage
from waymark.store.records import Records
from waymark.store.scripts import Outcome, Scripts
from waymark.store.takeover import Takeover

pytestmark = pytest.mark.usefixtures("replays_wait")


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seqs from which replays were requested, in order."""
    starts: list[int] = []
    begin = Replay.__init__

    def noted(replay: Replay, context: Any, endpoint: str, start: int, **options: Any) -> None:
        starts.append(start)
        begin(replay, context, endpoint, start, **options)

    monkeypatch.setattr(Replay, "__init__", noted)
    return starts


async def waiting_for_the_next_worker(bench: Bench) -> Pod:
    """An engine with a gap that its answer fills, and without a worker."""
    first = await bench.worker("worker-1", options=IMPATIENT)
    pod = await bench.pod(**SMALL)
    await gapped_at_work(first, pod)
    await first.stop()
    await pod.is_left()
    forget_before(pod, 8)
    pod.fault(replay_silent=False)
    return pod


async def has_staged(pod: Pod) -> bool:
    return any(name.startswith("staged:") for name in await pod.bench.record(pod.name))


async def test_redis_is_away_while_a_gap_is_filled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the copy, and at each change of the staged life: the call, or only its reply, is lost."""
    pod = await waiting_for_the_next_worker(bench)
    copies = refused = 0
    keys_of, run = Takeover.keys_of, Scripts.run

    async def breaks_off(self: Takeover, *of: Any) -> AsyncIterator[list[int]]:
        nonlocal copies
        copies += 1
        async for some in keys_of(self, *of):
            yield some
            if copies == 1:
                raise StoreUnavailable("connection refused")

    async def is_away(self: Scripts, name: str, /, **values: Any) -> Outcome:
        nonlocal refused
        if name != "stage_life":
            return await run(self, name, **values)
        refused += 1
        if refused % 3 == 1:
            raise StoreUnavailable("connection refused")
        outcome = await run(self, name, **values)
        if refused % 3 == 2:
            raise StoreUnavailable("the reply was lost")
        return outcome

    monkeypatch.setattr(Takeover, "keys_of", breaks_off)
    monkeypatch.setattr(Scripts, "run", is_away)
    worker = await bench.worker("worker-2", options=PATIENT)
    await is_filled(pod)
    assert (copies, refused) == (2, 3 * len(["begin", "drop", "begin", "take"]))
    assert worker.metric("leases_lost_total") == 0


async def test_a_reply_without_an_end_leaves_no_staged_life(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_clock = PausesClock(monkeypatch)
    pod = await waiting_for_the_next_worker(bench)
    batches = Replay.batches

    async def endless(replay: Replay, limit: int) -> list[ReplayedBatch]:
        if await has_staged(pod):
            raise EndlessMessage("a message is longer than any valid one")
        return await batches(replay, limit)

    with monkeypatch.context() as patched:
        patched.setattr(Replay, "batches", endless)
        worker = await bench.worker("worker-2", options=replace(PATIENT, fold_batches=2))
        await replays(worker, "silent", 1)
        assert not await has_staged(pod)
    await pod.work(4)
    pauses_clock.now += 60
    await is_filled(pod)


async def test_blocks_that_cannot_be_copied_stop_no_replay(
    bench: Bench, requested: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await waiting_for_the_next_worker(bench)
    requested.clear()
    copies = 0

    async def lacks(*_: Any) -> bool:
        nonlocal copies
        copies += 1
        return False

    monkeypatch.setattr(Applier, "copy", lacks)
    await bench.worker("worker-2", options=PATIENT)

    async def is_given_up() -> bool:
        return (await bench.record(pod.name))["flags"] == "untrusted"

    await wait_until(is_given_up, "the gap stays", PATIENCE_SECONDS)
    await pod.is_silent_about("replay_")
    await pod.says("batches_lost")
    assert (requested, copies) == ([0, 0, 0], 2)


async def test_a_restart_is_seen_though_the_replay_begins_before_it(bench: Bench, requested: list[int]) -> None:
    """All replies are older than the watermark, so its batch is asked for."""
    pod = await waiting_for_the_next_worker(bench)
    await pod.engine.restart()
    await pod.work(10)
    forget_before(pod, 6)
    requested.clear()
    await bench.worker("worker-2", options=PATIENT)
    await wait_until(lambda: len(requested) == 3, "the new life is asked for", PATIENCE_SECONDS)
    await pod.at_watermark(9)
    assert requested == [0, 16, 0]
    await pod.counted(restarts=1)
    assert (await bench.held(pod.name)).get((0, "GPU"), set()) <= pod.truth()[0, "GPU"]


async def test_a_repair_that_is_asked_for_meanwhile_is_still_to_be_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await waiting_for_the_next_worker(bench)
    copy, take_staged = Applier.copy, Records.take_staged
    is_asked_for: list[bool] = []

    async def ask(self: Applier, *of: Any) -> bool:
        assert await bench.store.records.ask_repair(self.grant.claim)
        return await copy(self, *of)

    async def look(self: Records, *of: Any, **options: Any) -> bool:
        is_taken = await take_staged(self, *of, **options)
        is_asked_for.append("repair" in await bench.record(pod.name))
        return is_taken

    monkeypatch.setattr(Applier, "copy", ask)
    monkeypatch.setattr(Records, "take_staged", look)
    await bench.worker("worker-2", options=PATIENT)
    await wait_until(lambda: is_asked_for == [True], "the gap is filled", PATIENCE_SECONDS)
