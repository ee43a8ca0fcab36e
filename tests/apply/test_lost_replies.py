"""A change of holders whose reply is lost is gone on with; one that Redis has lost is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.apply.factories import applier_of
from tests.store.factories import Stream, hgetall
from waymark.apply.redis_calls import Fenced
from waymark.base.errors import StoreUnavailable
from waymark.domain.names import HolderName
from waymark.store import keys
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.store import Store


class Unheard(RedisClient):
    """Redis does what it is asked, and the first reply of ``new_life`` is lost."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client._redis, client.url)
        self.calls: list[tuple[Sequence[Any], Sequence[Any]]] = []

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        reply = await super().run(name, keys, args)
        if name == "new_life":
            self.calls.append((keys, args))
            if len(self.calls) == 1:
                raise StoreUnavailable("the reply is lost")
        return reply


async def test_a_stream_goes_on_with_a_change_whose_reply_was_lost(
    redis: Redis, client: RedisClient, stream: Stream
) -> None:
    await stream.begin("0 GPU", "0 CPU")
    unheard = Unheard(client)
    applier = await applier_of(stream, Store(unheard))
    await applier.new_life(HolderName(0, "GPU"))
    assert len(unheard.calls) == 2
    assert applier.resolver.holders == {HolderName(0, "CPU"): 2}
    assert await redis.smembers(keys.dead(1)) == {b"1"}

    # What the first call left on its way arrives when there is another holder of that name.
    assert await stream.begin("0 GPU") == [3]
    late_keys, late_args = unheard.calls[0]
    assert (await client.run("new_life", late_keys, late_args))[0] == b"fenced"
    state = await stream.store.records.read(stream.grant)
    assert state is not None
    assert state.holders == {HolderName(0, "CPU"): 2, HolderName(0, "GPU"): 3}


async def test_a_change_that_redis_has_lost_again_is_not_gone_on_with(
    redis: Redis, client: RedisClient, stream: Stream
) -> None:
    await stream.begin("0 GPU")
    applier = await applier_of(stream, Store(Unheard(client)))
    before = await hgetall(redis, stream.grant.record)
    await stream.begin("0 CPU")
    applier.resolver.holders[HolderName(0, "CPU")] = 2
    # The replica that takes over knows of no "0 CPU"; the change that was under way is made on it.
    await redis.delete(stream.grant.record)
    await redis.hset(stream.grant.record, mapping={name.decode(): value for name, value in before.items()})
    with pytest.raises(Fenced):
        await applier.new_life(HolderName(0, "GPU"))
    assert (await hgetall(redis, stream.grant.record))[b"holder:0 GPU"] == b"1", "nothing was ended"
