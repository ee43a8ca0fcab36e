"""A failover may forget which holders were begun or ended last: nothing is written under those it has forgotten."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.apply.factories import applier_of
from tests.store.factories import Stream, hgetall
from waymark.apply.applier import Fenced
from waymark.errors import StoreUnavailable


@pytest.mark.parametrize("change", ["lost a begin", "lost an end", "lost nothing"])
async def test_after_redis_was_away_nothing_is_written_under_holders_it_has_forgotten(
    redis: Redis, stream: Stream, change: str
) -> None:
    await stream.begin("0 CPU")
    before = await hgetall(redis, stream.grant.record)
    if change == "lost a begin":
        await stream.begin("0 GPU")
    elif change == "lost an end":
        await stream.end("0 CPU")
    applier = await applier_of(stream)
    calls = 0

    async def call() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            # The replica that takes over has the record as it was.
            await redis.delete(stream.grant.record)
            await redis.hset(stream.grant.record, mapping={name.decode(): value for name, value in before.items()})
            raise StoreUnavailable("away")
        return "written"

    if change == "lost nothing":
        assert await applier.answered(call) == "written"
    else:
        with pytest.raises(Fenced):
            await applier.answered(call)
        assert calls == 1, "not written"
