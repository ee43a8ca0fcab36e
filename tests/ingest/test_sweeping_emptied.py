"""Redis comes back empty while a worker sweeps: what engines say to the new Redis is never swept."""

from __future__ import annotations

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import BLOCK_SIZE, PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Pod
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys, sweep


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_sweep_ends_with_the_redis_it_began_in(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Who ends had the first ids of the old Redis; who stays has the same blocks, and the first ids of the new one."""
    monkeypatch.setattr(sweep, "STEP_ROWS", 1)
    await bench.worker(options=WITHOUT_PROBES, sweep_blocks_per_second=6)
    leaving, staying = await bench.pod("pod-1", gpu_blocks=200), await bench.pod("pod-2", is_registered=False)
    await leaving.caught_up()
    for start in range(0, 10_000, 1000):
        prompt = SimulatedPrompt(tuple(range(start, start + 2 * BLOCK_SIZE)))
        leaving.prompts.append(prompt)
        await leaving.engine.prefill(prompt)
    await leaving.agrees()
    await bench.store.registry.register(staying.registration)
    await staying.caught_up()
    for prompt in leaving.prompts:
        staying.prompts.append(prompt)
        await staying.engine.prefill(prompt)
    await staying.agrees()
    ended = await holders(bench, leaving)
    rows = await entries(bench, ended)
    await bench.store.registry.unregister([leaving.name])

    async def is_under_way() -> bool:
        return await entries(bench, ended) <= rows - steps

    await wait_until(is_under_way, "a sweep is under way", PATIENCE_SECONDS)
    assert await entries(bench, ended), "the sweep has more to come"
    await bench.redis.flushall()
    await staying.agrees()
    await bench.store.registry.register(leaving.registration)
    await leaving.agrees()
    # Whatever of the old sweep was to come has come when another one, begun later, is done.
    await leaving.engine.clear()
    await leaving.agrees()
    await bench.is_swept()
    await staying.agrees()
    assert await entries(bench, await holders(bench, staying)) == rows, "each row has its entry"


async def holders(bench: Bench, pod: Pod) -> list[int]:
    record = await bench.record(pod.name)
    return [int(holder) for name, holder in record.items() if name.startswith("holder:")]


async def entries(bench: Bench, of: list[int]) -> int:
    """How many fields of the holders' engine hashes name a row."""
    fields = [field for holder in of for field in await bench.redis.hkeys(keys.engine(1, 0, holder))]
    return sum(field != b"applied" for field in fields)
