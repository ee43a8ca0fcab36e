"""The turns of a stream's work on the event loop."""

from __future__ import annotations

import asyncio

import pytest

from tests.apply.factories import applier_of
from tests.store.factories import Stream
from waymark.apply.slices import SliceRunner
from waymark.domain.held import HeldBlocks
from waymark.domain.slices import Slices


def work(slices: int) -> Slices[str]:
    for _ in range(slices):
        yield
    return "done"


@pytest.mark.parametrize("seconds", [0.0001, 0.001, 0.01])
async def test_the_loop_has_its_turn_as_often_as_the_clock_says(seconds: float) -> None:
    """On a clock that goes on by ``seconds`` at every look, so by that much in every slice."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    runner = SliceRunner(clock)
    runner.begin()
    task = asyncio.create_task(others())
    assert await runner.run(work(300)) == "done"
    task.cancel()
    assert turns >= 300 // max(1, round(0.005 / seconds)) - 1


async def test_what_was_known_of_a_life_is_freed_in_slices_at_its_end(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever renews the lease, which lasts for some seconds, has a turn after each slice."""
    monkeypatch.setattr("waymark.apply.slices.SLICE_SECONDS", 0.0)
    applier, turn, freed_in = await applier_of(stream), 0, list[int]()

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def release(memory: HeldBlocks) -> Slices[None]:
        assert memory is applier.resolver.memory
        for _ in range(5):
            freed_in.append(turn)
            yield

    monkeypatch.setattr(HeldBlocks, "release", release)
    beside = asyncio.create_task(others())
    await applier.new_life()
    beside.cancel()
    assert len(set(freed_in)) == 5


async def test_streams_with_long_work_take_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are, the loop runs one slice, and then everybody else."""
    monkeypatch.setattr("waymark.apply.slices.SLICE_SECONDS", 0.0)
    since, most, is_over = 0, 0, False
    order: list[int] = []

    def counted(stream: int) -> Slices[int]:
        nonlocal since, most
        for _ in range(20):
            since += 1
            most = max(most, since)
            order.append(stream)
            yield
        return stream

    async def others() -> None:
        nonlocal since
        while not is_over:
            since = 0
            await asyncio.sleep(0)

    async def long_work(stream: int) -> int:
        runner = SliceRunner(lambda: 0.0)
        await runner.pause()
        return await runner.run(counted(stream))

    beside = asyncio.create_task(others())
    streams = [asyncio.create_task(long_work(stream)) for stream in range(30)]
    await asyncio.sleep(0)
    streams[7].cancel()
    ended = await asyncio.gather(*streams, return_exceptions=True)
    is_over = True
    await beside
    others_of_7 = [stream for stream in range(30) if stream != 7]
    assert [each for each in ended if isinstance(each, int)] == others_of_7
    assert most == 1
    assert order == 20 * others_of_7, "each has a turn before one has two"
