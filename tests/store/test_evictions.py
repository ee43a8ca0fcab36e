"""An engine that stores and evicts for long leaves no more in Redis than what it holds."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tools.benchmarks.evictions import Engine, day


async def test_keys_are_those_of_the_blocks_that_are_held(redis: Redis, request: pytest.FixtureRequest) -> None:
    if "real" not in request.node.name:
        pytest.skip("the emulation does not know the memory of a key")
    engine = Engine(redis, capacity=600, seed=1)
    *hours, last = [each async for each in day(engine, hours=9, prompts=12)]
    assert sum(each.branch_rows for each in hours) > 0
    assert hours[-1].stored > 3 * hours[-1].held
    for each in hours:
        assert 0 < each.held <= 600
        # A row without holders is there while it has branch rows.
        assert 0 <= each.rows + each.branch_rows - each.places <= each.marked, each
    assert (last.held, last.places, last.rows, last.branch_rows, last.marked) == (0, 0, 0, 0, 0)
