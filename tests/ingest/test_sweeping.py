"""Sweeping by a worker: the pace of the setting on average, and slower where Redis takes long for a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import repeat
from types import SimpleNamespace
from typing import cast

import pytest

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.ingest import sweeping
from waymark.store.directory import GroupEntry
from waymark.store.store import Store

PACE = 20_000
STEP_BLOCKS = 100
IDLE_SECONDS = 7.0
GROUP = GroupEntry(1, 1)


@dataclass
class Scene:
    """One dead holder: each step takes so many seconds of the clock, and each pause lasts ``late`` too long."""

    took: Iterable[float]
    late: float = 0.0
    now: float = 100.0
    pauses: list[float] = field(default_factory=list)
    is_swept: bool = False
    ended: float = 0.0

    async def left(self, entry: GroupEntry) -> int:
        return int(not self.is_swept)

    async def pick(self, entry: GroupEntry) -> int | None:
        return None if self.is_swept else 1

    async def steps(self, entry: GroupEntry, holder: int) -> AsyncIterator[int]:
        for seconds in self.took:
            self.now += seconds
            yield STEP_BLOCKS
        self.is_swept, self.ended = True, self.now

    async def sleep(self, seconds: float) -> None:
        if seconds == IDLE_SECONDS:
            raise asyncio.CancelledError
        self.now += seconds + self.late
        self.pauses.append(seconds)

    async def groups(self) -> dict[str, GroupEntry]:
        return {"llama": GROUP}


async def played(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> float:
    """How many seconds of the clock the sweep takes."""
    monkeypatch.setattr(sweeping, "asyncio", SimpleNamespace(sleep=scene.sleep))
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(perf_counter=lambda: scene.now))
    store = cast(Store, SimpleNamespace(sweeper=scene, directory=SimpleNamespace(groups=scene.groups)))
    began = scene.now
    with pytest.raises(asyncio.CancelledError):
        await sweeping.keep_sweeping(store, Metrics(), blocks_per_second=PACE, pause_seconds=IDLE_SECONDS)
    return scene.ended - began


async def test_a_defect_in_one_group_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group comes first in every round, so those after it would never be swept."""
    scene = Scene([0.0])
    pick = scene.pick

    async def fails_for_the_first(entry: GroupEntry) -> int | None:
        if entry is not GROUP:
            raise ValueError("a defect")
        return await pick(entry)

    async def groups() -> dict[str, GroupEntry]:
        return {"damaged": GroupEntry(9, 1), "llama": GROUP}

    monkeypatch.setattr(scene, "pick", fails_for_the_first)
    monkeypatch.setattr(scene, "groups", groups)
    await played(monkeypatch, scene)
    assert scene.is_swept


@pytest.mark.parametrize(
    ("took", "late"),
    [
        pytest.param([0.0], 0.0, id="at no cost"),
        pytest.param([0.002], 0.0, id="steps that take their time"),
        pytest.param([0.001], 0.002, id="pauses that last too long"),
        pytest.param([0.0005, 0.0005, 0.0005, 0.008], 0.001, id="now and then a slow step"),
    ],
)
async def test_the_pace_is_kept_on_average(monkeypatch: pytest.MonkeyPatch, took: list[float], late: float) -> None:
    blocks = 200_000
    scene = Scene(took * (blocks // STEP_BLOCKS // len(took)), late)
    step = STEP_BLOCKS / PACE
    assert await played(monkeypatch, scene) == pytest.approx(blocks / PACE, abs=4 * step)
    assert len(scene.pauses) == blocks // STEP_BLOCKS


async def test_where_redis_is_slow_it_has_half_of_the_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(repeat(0.03, 50))
    await played(monkeypatch, scene)
    assert scene.pauses == pytest.approx([0.03] * 50)


async def test_every_step_is_followed_by_a_pause_as_long_as_redis_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a sweep makes up for a step that took very long."""
    scene = Scene([0.002, 5.0, *[0.002] * 400])
    await played(monkeypatch, scene)
    assert min(scene.pauses) >= 0.002 - 1e-9


async def test_a_standstill_is_made_up_for_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 2000
    scene = Scene([*[0.0] * 10, 30.0, *[0.0] * steps])
    assert await played(monkeypatch, scene) == pytest.approx(30.0 + (steps * STEP_BLOCKS / PACE - 1.0), abs=0.1)


async def test_groups_are_valued_if_somebody_asks_and_one_that_fails_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = {name: GroupEntry(number, 1) for number, name in enumerate(("nobody", "damaged", "llama"), 1)}
    walks: list[int] = []
    pauses: list[float] = []

    async def walk(entry: GroupEntry, *, lease_seconds: float) -> AsyncIterator[int]:
        walks.append(entry.group_id)
        if entry.group_id == 2:
            raise ValueError("a defect")
        for blocks in (STEP_BLOCKS, PACE):
            yield blocks

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    async def read() -> set[int]:
        if not pauses:
            raise StoreUnavailable("redis is away")
        return {2, 3}

    async def all_groups() -> dict[str, GroupEntry]:
        return groups

    valuations = SimpleNamespace(walk=walk, asked=SimpleNamespace(read=read))
    store = cast(Store, SimpleNamespace(valuations=valuations, directory=SimpleNamespace(groups=all_groups)))
    monkeypatch.setattr(sweeping, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    with pytest.raises(asyncio.CancelledError):
        await sweeping.keep_valuing(store, blocks_per_second=PACE, pause_seconds=IDLE_SECONDS)
    assert walks == [2, 3]
    assert pauses == pytest.approx([IDLE_SECONDS, STEP_BLOCKS / PACE, 1.0 + STEP_BLOCKS / PACE, IDLE_SECONDS])
