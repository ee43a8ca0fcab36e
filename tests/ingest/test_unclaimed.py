"""Which groups a worker searches for publishers without a claim, and that none delays the others."""

from __future__ import annotations

from redis.asyncio import Redis

from tests.store.factories import registration, stream_of
from waymark.base.metrics import Metrics
from waymark.ingest.unclaimed import UnclaimedWatch
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store


async def test_a_damaged_table_does_not_delay_the_next_group(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    stream = await stream_of(store, redis, registration("pod-1"))
    other = await stream_of(store, redis, registration("pod-2", model_name="another"))
    share = [GroupEntry(each.grant.group_id, 1) for each in (stream, other)]
    await redis.delete(keys.PUBLISHERS, keys.holders(stream.grant.group_id))
    await redis.set(keys.holders(stream.grant.group_id), "no hash")
    metrics = Metrics()
    watch = UnclaimedWatch(store, metrics, 0.0)
    for _ in 2 * share:  # it is found, and ends the next time
        await watch.check_next(share, [])
    assert await store.unclaimed.publishers(other.grant.group_id) == set()
    assert metrics.registry.get_sample_value("waymark_publishers_unclaimed_total") == 1


async def test_a_publisher_without_a_claim_has_some_time(redis: Redis) -> None:
    """A worker that knows its claim may put it back."""
    store = Store(RedisClient(redis, "redis://test"))
    stream = await stream_of(store, redis)
    await redis.delete(keys.PUBLISHERS)
    share = [GroupEntry(stream.grant.group_id, 1)]
    watch = UnclaimedWatch(store, Metrics(), 3600.0)
    for _ in range(3):
        await watch.check_next(share, [])
    assert await store.unclaimed.publishers(stream.grant.group_id) == {stream.grant.publisher}
