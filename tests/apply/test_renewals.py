"""A renewal notices what Redis has lost."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, apart, registration, stream_of
from waymark.apply.options import ApplyOptions
from waymark.apply.redis_calls import Fenced
from waymark.apply.resuming import resumed
from waymark.base.errors import RecordDamaged
from waymark.base.metrics import Metrics
from waymark.ingest.running import LeaseKeeper
from waymark.store import keys
from waymark.store.store import Store


@pytest.mark.parametrize("shards", [3])
@pytest.mark.parametrize("emptied", [1, 2])
async def test_a_shard_that_is_emptied_between_a_takeover_and_the_first_batch_is_noticed_by_a_renewal(
    store: Store, redis: Redis, stream: Stream, emptied: int
) -> None:
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*apart(gpu, range(1, 13), seq=7))
    await store.leases.drop(stream.grant)
    grant = await store.leases.take(stream.grant.claim, "worker-2", 60.0)
    assert grant is not None
    assert not grant.is_forgotten
    applier, state = await resumed(grant, store, Metrics(), ApplyOptions())
    assert state.watermark == 7
    keeper, woken = LeaseKeeper(store, 60.0), list[bool]()
    with keeper.keeping(grant, lambda: woken.append(True)):
        await keeper.renew()
    await applier.check_lease()
    assert not woken
    keys_there = await redis.keys(f"wm:{{1.{emptied}}}:*")
    assert len(keys_there) > 4, "its fence, the engine hash and its blocks"
    await redis.delete(*keys_there)
    with keeper.keeping(grant, lambda: woken.append(True)):
        await keeper.renew()
    assert woken
    with pytest.raises(Fenced):
        await applier.check_lease()
    # The life has ended, so whoever takes the stream up again replays it from its beginning.
    grant = (await stream.again("worker-3")).grant
    after = await store.records.read(grant)
    assert after is not None
    assert (after.watermark, after.holders) == (None, {})
    assert after.life != state.life


async def test_a_group_that_cannot_be_read_hides_no_loss_of_another(store: Store, redis: Redis, stream: Stream) -> None:
    other = await stream_of(store, redis, registration("pod-2", model_name="other"))
    await redis.delete(keys.fence(1, 0), keys.fence(2, 0))
    await redis.set(keys.fence(1, 0), "damage")
    keeper, woken = LeaseKeeper(store, 60.0), list[int]()
    with (
        keeper.keeping(stream.grant, lambda: woken.append(1)),
        keeper.keeping(other.grant, lambda: woken.append(2)),
        pytest.raises(RecordDamaged),
    ):
        await keeper.renew()
    assert other.grant.group_id == 2
    assert (other.grant.renewal.lost_shards, woken) == ({0}, [2])
    await redis.delete(keys.fence(1, 0))
