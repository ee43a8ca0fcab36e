"""Redis comes back empty while a worker sweeps: what engines say to the new Redis is never swept."""

from __future__ import annotations

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Pod
from waymark.store import keys, sweep


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_a_sweep_ends_with_the_redis_it_began_in(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Who ends had the first ids of the old Redis; who stays has the same blocks, and the first ids of the new one."""
    monkeypatch.setattr(sweep, "STEP_BLOCKS", 2)
    hand = await bench.worker(options=WITHOUT_PROBES, sweep_blocks_per_second=4)
    leaving, staying = await bench.pod("pod-1", gpu_blocks=200), await bench.pod("pod-2", is_registered=False)
    await leaving.caught_up()
    await leaving.work(6)
    await leaving.agrees()
    await bench.store.registry.register(staying.registration)
    await staying.caught_up()
    for prompt in leaving.prompts:
        staying.prompts.append(prompt)
        await staying.engine.prefill(prompt)
    await staying.agrees()
    await bench.store.registry.unregister([leaving.name])

    def has_swept(blocks: int) -> bool:
        return hand.metric("sweep_blocks_total") >= blocks

    await wait_until(lambda: has_swept(2 * steps), "a sweep is under way", PATIENCE_SECONDS)
    await bench.redis.flushall()
    await staying.agrees()
    await bench.store.registry.register(leaving.registration)
    await leaving.agrees()
    # Whatever of the old sweep was to come has come when another one, begun later, is done.
    await leaving.engine.clear()
    await leaving.agrees()
    await bench.is_swept()
    await staying.agrees()
    assert await entries(bench, staying) >= sum(map(len, staying.truth().values())), "each block has its entry"


async def entries(bench: Bench, pod: Pod) -> int:
    names = [name for name in await bench.record(pod.name) if name.startswith("holder:")]
    record = await bench.record(pod.name)
    return sum([await bench.redis.hlen(keys.engine(1, 0, int(record[name]))) for name in names])
