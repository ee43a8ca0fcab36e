"""Many streams at once: what is under way to Redis stays bounded, and no lease runs out over the waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench
from waymark.store import keys
from waymark.store.redis.client import RedisClient

PODS = 12


class Watched:
    """Counts the calls that apply blocks and are under way; each takes some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.most = self._under_way = 0
        run = RedisClient.run

        async def watched(client: RedisClient, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Any:
            if name != "apply_rows":
                return await run(client, name, keys, args)
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            try:
                await asyncio.sleep(seconds)
                return await run(client, name, keys, args)
            finally:
                self._under_way -= 1

        monkeypatch.setattr(RedisClient, "run", watched)


@pytest.mark.parametrize(("blocks_max", "at_once"), [(1, 1), (80, 2)])
async def test_a_flood_of_streams_keeps_few_calls_under_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, blocks_max: int, at_once: int
) -> None:
    watched = Watched(monkeypatch, 0.01)
    pods = [await bench.pod(f"pod-{i}", is_registered=False) for i in range(PODS)]
    hand = await bench.worker(options=WITHOUT_PROBES)
    hand.worker._store.pacer._blocks_max = blocks_max
    for pod in pods:
        await pod.work(20)
        await pod.register()
    for pod in pods:
        await pod.agrees()
    # A call costs 32 beside its blocks.
    assert 1 <= watched.most <= at_once


async def test_streams_that_wait_for_long_keep_their_leases(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call at a time, each a fifth of a lease: the last stream waits for more than two leases."""
    hand = await bench.worker(options=WITHOUT_PROBES, lease_seconds=2.0)
    pods = [await bench.pod(f"pod-{i}") for i in range(PODS)]
    for pod in pods:
        await pod.caught_up()
    states = [await pod.state() for pod in pods]
    leases = [keys.lease(state.group_id, state.id) for state in states]
    watched = Watched(monkeypatch, 0.4)
    hand.worker._store.pacer._blocks_max = 1
    for pod in pods:
        await pod.work(3)

    most_waiting = 0.0

    async def are_all_in() -> bool:
        nonlocal most_waiting
        most_waiting = max(most_waiting, hand.metric("calls_waiting"))
        assert await bench.redis.exists(*leases) == PODS
        return all([(await pod.state()).watermark == 2 for pod in pods])

    await wait_until(are_all_in, "all is applied", 2 * PATIENCE_SECONDS)
    assert watched.most == 1
    assert 1 <= most_waiting < PODS
    assert hand.metric("calls_waiting") == 0
    for pod in pods:
        await pod.agrees()
        await pod.counted(restarts=0, batches_lost=0)
    assert hand.metric("leases_lost_total") == 0
