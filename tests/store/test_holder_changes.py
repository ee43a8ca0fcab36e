"""Holders change once for every turn of a stream, however often Redis is asked for it, and however late."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, begins, hgetall
from waymark.apply.applier import Applier, Fenced
from waymark.domain.names import HolderName
from waymark.domain.resolver import Resolver
from waymark.errors import StoreUnavailable
from waymark.metrics import Metrics
from waymark.store import keys
from waymark.store.client import RedisClient, Reply
from waymark.store.lua import SCRIPTS
from waymark.store.store import Store


@asynccontextmanager
async def breaking(redis_socket: Path, script: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A way to Redis whose connection breaks when the script has run, once, before its reply is there.

    Its URL, and what was sent each time the script was called.
    """
    calls: list[bytes] = []
    name = SCRIPTS[script].sha.encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        redis_reader, redis_writer = await asyncio.open_unix_connection(str(redis_socket))
        try:
            while asked := await reader.read(65536):
                redis_writer.write(asked)
                answered = await redis_reader.read(65536)
                if name in asked:
                    calls.append(asked)
                    if len(calls) == 1:
                        return
                writer.write(answered)
        finally:
            writer.close()
            redis_writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", calls


@pytest.mark.parametrize("redis", ["real"], indirect=True)
async def test_a_call_whose_connection_breaks_after_it_was_done_is_not_done_again(
    redis: Redis, redis_socket: Path, stream: Stream
) -> None:
    await stream.store.check()  # scripts are known, so that the first call is the one that runs
    assert await stream.begin("0 GPU", "0 CPU") == [1, 2]
    async with breaking(redis_socket, "new_life") as (url, calls):
        client = RedisClient.open(url, timeout_seconds=5.0)
        try:
            ids = await Store(client).records.new_life(
                stream.grant, unit="0 GPU", is_restart=True, begin=begins(stream.grant.claim, "0 GPU"), above=0
            )
        finally:
            await client.close()
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert ids == [3]
    assert await redis.smembers(keys.dead(1)) == {b"1"}
    assert {name for name in await hgetall(redis, keys.holders(1)) if name.isdigit()} == {b"2", b"3"}
    assert await stream.begin("0 CPU", "0 GPU", "1 GPU") == [2, 3, 4]


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


async def applier_of(stream: Stream, client: RedisClient) -> Applier:
    state = await stream.store.records.read(stream.grant)
    assert state is not None
    claim = stream.grant.claim
    resolver = Resolver(claim.registration, claim.publisher, seed=1, memory_entries=10, waiting_blocks=10)
    resolver.resume(state.holders, state.flags, None, state.event_ids)
    return Applier(stream.grant, Store(client), resolver, Metrics(), Counter())


async def test_a_stream_goes_on_with_a_change_whose_reply_was_lost(
    redis: Redis, client: RedisClient, stream: Stream
) -> None:
    await stream.begin("0 GPU", "0 CPU")
    unheard = Unheard(client)
    applier = await applier_of(stream, unheard)
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
    applier = await applier_of(stream, Unheard(client))
    before = await hgetall(redis, stream.grant.record)
    await stream.begin("0 CPU")
    applier.resolver.holders[HolderName(0, "CPU")] = 2
    # The replica that takes over knows of no "0 CPU"; the change that was under way is made on it.
    await redis.delete(stream.grant.record)
    await redis.hset(stream.grant.record, mapping={name.decode(): value for name, value in before.items()})
    with pytest.raises(Fenced):
        await applier.new_life(HolderName(0, "GPU"))
    assert (await hgetall(redis, stream.grant.record))[b"holder:0 GPU"] == b"1", "nothing was ended"
