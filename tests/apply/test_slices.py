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
    applier, freed = await applier_of(stream), 0

    def release(memory: HeldBlocks) -> Slices[None]:
        nonlocal freed
        assert memory is applier.resolver.memory
        yield
        freed += 1

    monkeypatch.setattr(HeldBlocks, "release", release)
    await applier.new_life()
    assert freed == 1
