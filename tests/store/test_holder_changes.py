"""Holders change once for every turn of a stream, however often Redis is asked for it, and however late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.listening import listening, port_of
from tests.store.factories import Stream, begins, hgetall
from waymark.store import keys
from waymark.store.redis.client import SCRIPTS, RedisClient
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
            redis_writer.close()

    async with listening(serve) as server:
        yield f"redis://127.0.0.1:{port_of(server)}/0", calls


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
