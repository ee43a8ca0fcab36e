"""A replay endpoint that answers late: what a life has begun without comes back once the publisher answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, WITHOUT_PROBES, Bench, Hand, Pod
from waymark.apply.applier import Applier
from waymark.ingest import replay
from waymark.ingest.life import Life
from waymark.ingest.replay_places import BEGINNING_SECONDS_MAX, ReplayPauses
from waymark.ingest.sockets import ZmqContext

OPTIONS = replace(QUICK, probe_seconds=0.5, replay_idle_seconds=0.1, publisher_timeout=60.0)
#: A replay that a faulty publisher does not answer is over soon, and nothing is asked for because time has passed.
IMPATIENT = replace(WITHOUT_PROBES, replay_idle_seconds=0.1)
#: As long as the test wants, if the publisher is faulty, too.
PATIENT = replace(WITHOUT_PROBES, replay_idle_seconds=PATIENCE_SECONDS)

pytestmark = pytest.mark.usefixtures("replays_wait")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, replays_wait: None) -> list[int]:
    """The seqs from which replays were requested, in order."""
    starts: list[int] = []
    waiting: Any = replay.Replay

    class Recorded(waiting):  # type: ignore[misc]
        def __init__(self, context: ZmqContext, endpoint: str, start: int, **options: Any) -> None:
            starts.append(start)
            super().__init__(context, endpoint, start, **options)

    monkeypatch.setattr("waymark.ingest.replay.Replay", Recorded)
    return starts


class PausesClock:
    """The clock of all pauses between replays; it goes on only where the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("waymark.ingest.stream.ReplayPauses", partial(ReplayPauses, clock=lambda: self.now))


@pytest.fixture
def pauses_clock(monkeypatch: pytest.MonkeyPatch) -> PausesClock:
    return PausesClock(monkeypatch)


async def began_late(pod: Pod, silent: Any) -> None:
    """The pod is at work, and what it did before its third live frame is not in the index."""
    pod.fault(**silent)
    await pod.work(5)
    await pod.register()
    await pod.subscribed()
    await pod.says("replay_")
    await pod.work(3)
    await pod.at_watermark(7)
    await pod.says("joined_late")
    assert (await pod.bench.held(pod.name))[0, "GPU"] < pod.truth()[0, "GPU"]


async def healed(pod: Pod, **counts: int) -> None:
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0, batches_lost=0, **counts)
    assert (await pod.bench.record(pod.name)).get("flags", "") == ""


async def late_pod(bench: Bench, **changes: Any) -> Pod:
    return await bench.pod(gpu_blocks=1000, cpu_blocks=0, is_registered=False, **changes)


async def test_a_life_that_began_while_its_replay_was_silent_heals(any_bench: Bench) -> None:
    await any_bench.worker(options=OPTIONS)
    pod = await late_pod(any_bench)
    await began_late(pod, {"replay_silent": True})
    pod.fault(replay_silent=False)
    await healed(pod, gaps=0)
    await pod.work(2)
    await pod.agrees()


async def test_the_next_worker_heals_what_began_while_the_replay_was_silent(bench: Bench) -> None:
    first = await bench.worker("worker-1", options=WITHOUT_PROBES, replay_idle_seconds=0.1)
    pod = await late_pod(bench)
    await began_late(pod, {"replay_silent": True})
    await first.stop()
    pod.fault(replay_silent=False)
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await healed(pod, gaps=0)


@asynccontextmanager
async def busy(pod: Pod) -> AsyncIterator[None]:
    """Meanwhile the pod sends a batch every few milliseconds, so no probe comes for want of frames."""

    async def work() -> None:
        while True:
            pod.publisher.publish([], ts=pod.clock())
            await asyncio.sleep(0.02)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_stream_that_is_never_quiet_heals_too(bench: Bench) -> None:
    await bench.worker(options=OPTIONS)
    pod = await late_pod(bench)
    await began_late(pod, {"replay_silent": True})
    async with busy(pod):
        pod.fault(replay_silent=False)
        await healed(pod)


async def replays(worker: Hand, outcome: str, times: int) -> None:
    await wait_until(
        lambda: worker.metric("replays_total", outcome=outcome) >= times,
        f"{times} replays {outcome}",
        PATIENCE_SECONDS,
    )


async def test_a_beginning_that_the_answer_does_not_have_is_asked_for_no_more(bench: Bench, asked: list[int]) -> None:
    worker = await bench.worker(options=OPTIONS)
    pod = await late_pod(bench, buffer_batches=2)
    await began_late(pod, {"replay_silent": True})
    before = await bench.held(pod.name)
    pod.fault(replay_silent=False)
    await replays(worker, "complete", 3)
    assert asked == sorted(asked), "a probe asks from the watermark, not from 0"
    assert asked[-2:] == [7, 7]
    await pod.is_silent_about("replay_silent")
    await pod.says("joined_late")
    assert "opened_at" not in (await bench.record(pod.name))["flags"]
    assert await bench.held(pod.name) == before
    await pod.counted(restarts=0, gaps=0, batches_lost=0)


# ---- how often it is asked for ---------------------------------------------------------------------


class Pauses(ReplayPauses):
    """With a clock that the test moves."""

    def __init__(self, seconds: float) -> None:
        self.now = 1000.0
        super().__init__(seconds, clock=lambda: self.now)

    def after(self, seconds: float) -> tuple[bool, bool]:
        """Whether any replay may be requested then, and one for the beginning alone."""
        self.now += seconds
        answer = not self.is_silent, self.is_beginning_due
        self.now -= seconds
        return answer


def test_the_pause_of_a_beginning_doubles_up_to_a_bound_and_that_of_all_replays_does_not() -> None:
    pauses = Pauses(30.0)
    assert pauses.after(0) == (True, True)
    for seconds in (30, 60, 120, 240, 480, BEGINNING_SECONDS_MAX, BEGINNING_SECONDS_MAX):
        pauses.nothing_came()
        pauses.put_off_beginning()
        assert pauses.after(29) == (False, False)
        assert pauses.after(30) == (True, seconds == 30)
        assert pauses.after(seconds - 1) == (seconds > 30, False)
        assert pauses.after(seconds) == (True, True)
        pauses.now += seconds


def test_pauses_are_short_again_after_an_answer() -> None:
    pauses = Pauses(30.0)
    for _ in range(3):
        pauses.put_off_beginning()
    pauses.nothing_came()
    pauses.reset()
    assert pauses.after(0) == (True, True)
    pauses.put_off_beginning()
    assert pauses.after(29) == (True, False)
    assert pauses.after(30) == (True, True)


def test_the_pause_of_a_beginning_is_never_shorter_than_the_setting() -> None:
    pauses = Pauses(3600.0)
    for _ in range(3):
        pauses.put_off_beginning()
        assert pauses.after(3599) == (True, False)
        assert pauses.after(3600) == (True, True)


async def applied(pod: Pod, batches: int = 2) -> None:
    """So many batches, one after the other: before each of them, the stream has seen whether a replay is due."""
    for _ in range(batches):
        await pod.work(1)
        await pod.at_watermark(pod.last_seq)


async def test_live_frames_wait_ever_more_rarely_for_an_endpoint_that_never_answers(
    bench: Bench, asked: list[int], pauses_clock: PausesClock
) -> None:
    worker = await bench.worker(options=IMPATIENT)
    pod = await late_pod(bench)
    await began_late(pod, {"replay_silent": True})
    for tries, pause in enumerate((60, 120, 240), 1):
        assert len(asked) == tries
        pauses_clock.now += pause - 1
        await applied(pod)
        assert len(asked) == tries
        pauses_clock.now += 1
        await applied(pod)
        await replays(worker, "silent", tries + 1)
    # A connection that comes again is asked at once.
    await pod.publisher.down()
    await pod.has_status("unreachable")
    await pod.publisher.up()
    await replays(worker, "silent", 5)
    assert set(asked) == {0}


async def test_a_new_connection_asks_once_though_the_beginning_is_due_as_well(bench: Bench, asked: list[int]) -> None:
    first = await bench.worker("worker-1", options=IMPATIENT)
    pod = await late_pod(bench)
    await began_late(pod, {"replay_silent": True})
    await first.stop()
    await pod.is_left()
    asked.clear()
    pod.fault(replay_silent=False)
    await bench.worker("worker-2", options=PATIENT)
    await healed(pod, gaps=0)
    await applied(pod)
    assert asked == [0]


class Stale(deque[Any]):
    """A replay buffer that its engine no longer answers from: what is sent goes into the other one."""

    def __init__(self, whole: deque[Any]) -> None:
        super().__init__(whole)
        self.whole = whole

    def append(self, batch: Any) -> None:
        self.whole.append(batch)


async def test_an_answer_that_always_ends_too_early_is_not_asked_for_at_each_frame(
    bench: Bench, asked: list[int], pauses_clock: PausesClock
) -> None:
    await bench.worker(options=replace(PATIENT, on_gap="reset"))
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    await pod.at_work(3)
    whole = pod.publisher._buffer
    pod.publisher._buffer = Stale(whole)
    asked.clear()
    with pod.dropping():
        await pod.work(1)
    await applied(pod, 3)
    await pod.counted(gaps=1, restarts=1)
    assert asked == [2]
    pauses_clock.now += 60
    await wait_until(lambda: len(asked) == 2, "the beginning is asked for", PATIENCE_SECONDS)
    await applied(pod, 3)
    await pod.counted(gaps=2, restarts=2)
    assert asked == [2, 0, 2]
    pod.publisher._buffer = whole
    pauses_clock.now += 60
    await pod.agrees()
    await pod.has_status("active")
    assert asked == [2, 0, 2, 0]


# ---- other ways to begin without an answer ---------------------------------------------------------


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "silent"])
async def test_a_first_frame_that_was_never_applied_leaves_no_flags(
    bench: Bench, asked: list[int], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The flags are written before the frame, and the worker may end in between."""
    worker = await bench.worker("worker-1", options=IMPATIENT)
    pod = await late_pod(bench)
    pod.fault(replay_silent=True)
    await pod.work(5)
    open_at = Life.open_at

    async def last_words(life: Life, seq: int) -> None:
        await open_at(life, seq)
        worker.client.is_dead = True

    with monkeypatch.context() as patched:
        patched.setattr(Life, "open_at", last_words)
        await pod.register()
        await pod.subscribed()
        await pod.says("replay_silent")
        await pod.work(1)
        await wait_until(lambda: worker.client.is_dead, "the worker has ended", PATIENCE_SECONDS)
        await worker.die()
    assert (await bench.record(pod.name))["flags"] == "joined_late opened_at:5"
    await pod.is_left()
    asked.clear()
    pod.publisher._buffer.clear()
    pod.fault(replay_silent=not answers)
    await bench.worker("worker-2", options=PATIENT if answers else IMPATIENT)
    if answers:
        await pod.is_silent_about("replay_silent")  # what the record said before is the first worker's
    await pod.caught_up()
    assert (await bench.record(pod.name)).get("flags", "") == ""
    await applied(pod)
    assert (await bench.record(pod.name))["flags"] == ("joined_late" if answers else "joined_late opened_at:6")
    await pod.counted(restarts=0, gaps=0, batches_lost=0)
    # On connecting, and where it answers once more before the first frame, which begins late.
    assert asked == ([0, 0] if answers else [0])


@pytest.mark.parametrize("silent", [{"replay_silent": True}, {"truncate_replay": 1}], ids=["silent", "broken-off"])
async def test_a_life_that_a_gap_without_an_answer_has_ended_heals(bench: Bench, silent: Any) -> None:
    """Where a gap ends the life, the next one begins behind the gap, and nobody has been asked for what is before."""
    worker = await bench.worker(options=replace(OPTIONS, on_gap="reset"))
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    await pod.at_work(3)
    pod.fault(**silent)
    with pod.dropping():
        await pod.work(2)
    await pod.work(1)
    await replays(worker, "silent" if "replay_silent" in silent else "incomplete", 1)
    pod.fault(replay_silent=False, truncate_replay=0)
    await pod.agrees()
    await pod.has_status("active")
    assert (await bench.record(pod.name)).get("flags", "") == ""


# ---- a gap behind which the life goes on -----------------------------------------------------------


async def gapped(worker: Hand, pod: Pod) -> None:
    """Two batches are lost, and the publisher has not answered the replay for them."""
    await pod.at_work(3)
    pod.fault(replay_silent=True)
    with pod.dropping():
        await pod.work(2)
    await pod.work(1)
    await replays(worker, "silent", 1)
    await pod.at_watermark(5)
    await pod.says("batches_lost")


async def filled(pod: Pod) -> None:
    """The counter stays: it counts what was lost since the registration."""
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0, gaps=1, batches_lost=2)
    assert (await pod.bench.record(pod.name)).get("flags", "") == ""


async def test_a_gap_without_an_answer_is_asked_for_at_doubling_pauses_and_heals(
    bench: Bench, asked: list[int], pauses_clock: PausesClock
) -> None:
    worker = await bench.worker(options=IMPATIENT)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    await gapped(worker, pod)
    assert (await bench.record(pod.name))["flags"] == "gap_at:5 gap_from:3 untrusted"
    for tries, pause in enumerate((60, 120), 2):
        pauses_clock.now += pause - 1
        await applied(pod)
        assert len(asked) == tries
        pauses_clock.now += 1
        await replays(worker, "silent", tries)
    pod.fault(replay_silent=False)
    pauses_clock.now += 240
    await filled(pod)
    assert asked == [0, 2, 0, 0, 0]


SMALL: dict[str, Any] = {"gpu_blocks": 32, "cpu_blocks": 0, "repeat_rate": 0.0}
"""A cache that is full after a few prompts, so that each batch removes blocks of earlier ones."""


async def gapped_at_work(worker: Hand, pod: Pod, missing: int = 3) -> None:
    """Batches are lost that stored blocks and removed others, and so do those behind them."""
    await pod.at_work(8)
    pod.fault(replay_silent=True)
    with pod.dropping():
        await pod.work(missing)
    await pod.work(6)
    await replays(worker, "silent", 1)
    await pod.at_watermark(13 + missing)
    await pod.says("batches_lost")
    assert await pod.bench.held(pod.name) != pod.truth()


def forget_before(pod: Pod, seq: int) -> None:
    """The engine's replay buffer begins with this batch now."""
    while pod.publisher.batches[0][0] < seq:
        pod.publisher._buffer.popleft()


async def is_filled(pod: Pod, missing: int = 3) -> None:
    """Counts of copies are not trusted any more, and all else is as if nothing had been lost."""
    await pod.agrees()
    await pod.has_status("active")
    await pod.counted(restarts=0, gaps=1, batches_lost=missing)
    assert (await pod.bench.record(pod.name))["flags"] == "filled untrusted"
    assert (await pod.state()).known == 1.0
    await pod.bench.is_swept()


async def test_a_replay_from_the_gap_on_fills_it(any_bench: Bench, asked: list[int], pauses_clock: PausesClock) -> None:
    worker = await any_bench.worker(options=IMPATIENT)
    pod = await any_bench.pod(**SMALL)
    await gapped_at_work(worker, pod)
    forget_before(pod, 8)
    pod.fault(replay_silent=False)
    pauses_clock.now += 60
    await is_filled(pod)
    assert asked == [0, 7, 0]
    pauses_clock.now += 3600
    await applied(pod, 4)
    await pod.agrees()
    assert asked == [0, 7, 0], "there is nothing more to ask for"


async def test_live_frames_are_applied_behind_the_batches_that_fill_a_gap(
    bench: Bench, pauses_clock: PausesClock
) -> None:
    worker = await bench.worker(options=replace(IMPATIENT, fold_batches=2))
    pod = await bench.pod(**SMALL)
    await gapped_at_work(worker, pod)
    forget_before(pod, 6)
    copy = Applier.copy

    async def slow(applier: Applier, *given: Any) -> bool:
        await pod.work(5)
        return await copy(applier, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Applier, "copy", slow)
        pod.fault(replay_silent=False)
        pauses_clock.now += 60
        await is_filled(pod)
    await applied(pod, 2)
    await pod.agrees()


async def test_a_replay_that_breaks_off_leaves_the_gap_as_it_was(
    bench: Bench, asked: list[int], pauses_clock: PausesClock
) -> None:
    worker = await bench.worker(options=IMPATIENT)
    pod = await bench.pod(**SMALL)
    await gapped_at_work(worker, pod)
    forget_before(pod, 8)
    before = await bench.held(pod.name)
    pod.fault(replay_silent=False, truncate_replay=4)
    pauses_clock.now += 60
    await replays(worker, "incomplete", 1)
    assert await bench.held(pod.name) == before
    await pod.says("batches_lost")
    pod.fault(truncate_replay=0)
    pauses_clock.now += 120
    await is_filled(pod)
    assert set(asked[2:]) == {0}


async def test_the_next_worker_fills_a_gap_if_the_first_one_dies_in_the_middle(bench: Bench) -> None:
    first = await bench.worker("worker-1", options=IMPATIENT)
    pod = await bench.pod(**SMALL)
    await gapped_at_work(first, pod)
    forget_before(pod, 8)
    before = await bench.held(pod.name)
    take_filled = Life.take_filled

    async def last_words(life: Life, staged: Applier, ts: float | None) -> None:
        first.client.is_dead = True
        await take_filled(life, staged, ts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Life, "take_filled", last_words)
        pod.fault(replay_silent=False)
        await pod.publisher.down()
        await pod.publisher.up()
        await wait_until(lambda: first.client.is_dead, "the worker has ended", PATIENCE_SECONDS)
        await first.die()
    assert await bench.held(pod.name) == before
    assert any(name.startswith("staged:") for name in await bench.record(pod.name))
    await bench.worker("worker-2", options=PATIENT)
    await is_filled(pod)


async def test_what_is_lost_after_a_filled_gap_is_lost(bench: Bench, pauses_clock: PausesClock) -> None:
    worker = await bench.worker(options=IMPATIENT)
    pod = await bench.pod(**SMALL)
    await gapped_at_work(worker, pod)
    pod.publisher._buffer.popleft()
    pod.fault(replay_silent=False)
    pauses_clock.now += 60
    await is_filled(pod)
    with pod.dropping():
        await pod.work(2)
    pod.publisher._buffer.clear()
    await applied(pod)
    await pod.says("batches_lost")
    assert (await bench.record(pod.name))["flags"] == "untrusted"


@pytest.mark.parametrize("begins", [0, 1, 3, 4])
async def test_only_a_replay_of_the_whole_gap_fills_it(bench: Bench, begins: int, asked: list[int]) -> None:
    """Batches 3 and 4 are missing. The first batch of the life makes all counts right, too."""
    first = await bench.worker("worker-1", options=IMPATIENT)
    pod = await bench.pod(gpu_blocks=1000, cpu_blocks=0)
    await gapped(first, pod)
    before = await bench.held(pod.name)
    await first.stop()
    await pod.is_left()
    forget_before(pod, begins)
    pod.fault(replay_silent=False)
    asked.clear()
    second = await bench.worker("worker-2", options=PATIENT)
    await replays(second, "complete", 1)
    if begins == 0:
        await filled(pod)
    elif begins < 4:
        await is_filled(pod, missing=2)
    else:
        await pod.is_silent_about("replay_silent")
        await pod.says("batches_lost")
        assert await bench.held(pod.name) == before

        async def is_given_up() -> bool:
            return (await bench.record(pod.name))["flags"] == "untrusted"

        await wait_until(is_given_up, "the gap stays", PATIENCE_SECONDS)
    await applied(pod)
    assert asked == [0]
