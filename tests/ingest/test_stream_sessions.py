"""Whole sessions made up from a seed: work, losses, restarts, broken connections, replays that go wrong."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, QUICK, Bench, Pod
from tests.patience import patient
from waymark.simulator.options import Faults

Step = Callable[[Pod, random.Random], Awaitable[None]]


async def work(pod: Pod, chance: random.Random) -> None:
    await pod.work(chance.randrange(1, 6), chance.randrange(len(pod.engine.caches)))


async def lose(pod: Pod, chance: random.Random) -> None:
    with pod.dropping():
        await work(pod, chance)


async def clear(pod: Pod, chance: random.Random) -> None:
    await pod.engine.clear(chance.randrange(len(pod.engine.caches)))


async def noise(pod: Pod, chance: random.Random) -> None:
    pod.publisher.publish_garbage()
    pod.publisher.send_malformed()


async def restart(pod: Pod, chance: random.Random) -> None:
    """Mostly as real processes do, whose sockets close; a lower seq of another rank would be taken for a proxy's."""
    pod.clock.now += chance.choice((0.0, 3600.0, -3600.0))
    await pod.engine.restart(rebind=len(pod.engine.caches) > 1 or chance.random() < 0.7)


async def break_off(pod: Pod, chance: random.Random) -> None:
    await pod.publisher.down()
    for _ in range(chance.randrange(3)):
        await chance.choice((work, restart_unseen))(pod, chance)
    await pod.publisher.up()


async def restart_unseen(pod: Pod, chance: random.Random) -> None:
    await pod.engine.restart()


async def pause(pod: Pod, chance: random.Random) -> None:
    """Until the worker has come as far as it can without being told more."""
    before = (await pod.state()).watermark

    async def moved() -> bool:
        return (await pod.state()).watermark != before or chance.random() < 0.1

    await wait_until(moved, "a moment", PATIENCE_SECONDS)


STEPS: tuple[Step, ...] = (*[work] * 6, *[lose] * 3, clear, noise, restart, break_off, pause, pause)


async def session(pod: Pod, chance: random.Random, steps: int, faults: list[Faults]) -> None:
    for _ in range(steps):
        pod.publisher.faults = chance.choice(faults)
        await chance.choice(STEPS)(pod, chance)


@pytest.mark.parametrize("any_bench", ["real"], indirect=True)
@pytest.mark.parametrize("on_gap", ["keep", "reset"])
@pytest.mark.parametrize("seed", range(2))
async def test_the_index_is_the_caches_where_the_replay_tells_the_truth(
    any_bench: Bench, seed: int, on_gap: str
) -> None:
    chance = random.Random(f"{seed}/{on_gap}")
    # A replay that is only slow must not be taken for a silent one: a reset would lose what it brings.
    options = replace(QUICK, on_gap=on_gap, replay_idle_seconds=patient(0.3))  # type: ignore[arg-type]
    await any_bench.worker(options=options)
    pod = await any_bench.pod(
        dialect=chance.choice(("vllm-map", "vllm-list-12")), ranks=chance.randrange(1, 3), repeat_rate=0.2
    )
    # Such replays break off, but hold nothing back for good.
    faults = [Faults(), Faults(drop_every=3), Faults(truncate_replay=5)]
    await session(pod, chance, 40, faults)
    pod.publisher.faults = Faults()
    await work(pod, chance)
    await pod.agrees()
    asked = pod.publisher.counts["replays"]
    await wait_until(lambda: pod.publisher.counts["replays"] >= asked + 2, "it was asked again", PATIENCE_SECONDS)
    await pod.agrees()
    assert await any_bench.strangers() == set()


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_reported_that_is_not_there_where_a_loss_ends_a_life(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    await bench.worker(options=replace(QUICK, on_gap="reset", replay_idle_seconds=0.3))
    pod = await bench.pod(buffer_batches=chance.randrange(1, 8), repeat_rate=0.2)
    faults = [Faults(), Faults(drop_every=3), Faults(truncate_replay=2), Faults(late_replay=2)]
    await session(pod, chance, 40, faults)
    pod.publisher.faults = Faults()
    await work(pod, chance)

    async def is_at_the_end() -> bool:
        state = await pod.state()
        return state.watermark == pod.last_seq and state.status in ("active", "degraded")

    await wait_until(is_at_the_end, "the stream is quiet", PATIENCE_SECONDS)
    truth = pod.truth()
    for unit, hashes in (await bench.held(pod.name)).items():
        assert hashes <= truth.get(unit, set())
