"""Sweeping by a worker: the pace of the setting, and slower where Redis takes long for a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from waymark.ingest import sweeping
from waymark.metrics import Metrics
from waymark.store.registry import GroupEntry
from waymark.store.store import Store

PACE = 1000
IDLE_SECONDS = 7.0
GROUP = GroupEntry(1, 1)


class Sweeper:
    """One dead holder; each of its steps takes 50 blocks, and so many seconds of the clock."""

    def __init__(self, *took: float) -> None:
        self.now = 0.0
        self._took: tuple[float, ...] | None = took

    async def left(self, entry: GroupEntry) -> int:
        return int(self._took is not None)

    async def pick(self, entry: GroupEntry) -> int | None:
        return None if self._took is None else 1

    async def steps(self, entry: GroupEntry, holder: int) -> AsyncIterator[int]:
        for seconds in self._took or ():
            self.now += seconds
            yield 50
        self._took = None


@pytest.mark.parametrize(
    ("took", "pauses"),
    [
        pytest.param([0.001, 0.002], [0.05, 0.05], id="at the pace"),
        pytest.param([0.001, 0.1, 0.001], [0.05, 0.3, 0.05], id="a slow step is followed by a longer pause"),
    ],
)
async def test_the_pause_is_of_the_pace_or_of_the_step(
    monkeypatch: pytest.MonkeyPatch, took: list[float], pauses: list[float]
) -> None:
    sweeper, slept = Sweeper(*took), list[float]()

    async def sleep(seconds: float) -> None:
        sweeper.now += seconds
        if seconds == IDLE_SECONDS:
            raise asyncio.CancelledError
        slept.append(seconds)

    async def groups() -> dict[str, GroupEntry]:
        return {"llama": GROUP}

    monkeypatch.setattr(sweeping, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(perf_counter=lambda: sweeper.now))
    store = cast(Store, SimpleNamespace(sweeper=sweeper, registry=SimpleNamespace(groups=groups)))
    with pytest.raises(asyncio.CancelledError):
        await sweeping.keep_sweeping(store, Metrics(), blocks_per_second=PACE, pause_seconds=IDLE_SECONDS)
    assert slept == pytest.approx(pauses)
