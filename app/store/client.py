"""One contact point with Redis: how a connection is made, what a failure becomes.

Timeouts, retries and the protocol are set here and nowhere else, because the library's own defaults have changed
between releases. A command that failed because its connection was gone is sent once more on a fresh one: every
write of ours is a script that may come twice. Everything the driver raises leaves as ``StoreUnavailable``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import hiredis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from app.errors import SettingsError, StoreUnavailable
from app.settings import hide_password
from app.store.lua import SCRIPTS, Script

Reply = list[Any]


class Client:
    """A Redis, real or embedded, as the rest of ``store`` sees it."""

    def __init__(self, redis: Redis, url: str) -> None:
        self._redis = redis
        self.url = hide_password(url)

    @classmethod
    def open(cls, url: str, *, timeout_seconds: float = 2.0, connections: int = 64) -> Client:
        """Connects on first use. ``memory://`` is a new, empty, embedded Redis of this process alone."""
        if url == "memory://":
            return cls(_embedded(), url)
        if not re.match(r"(redis|rediss|unix)://", url):
            raise SettingsError(
                f"WAYMARK_REDIS_URL: '{hide_password(url)}' is no URL known here; "
                "use redis://host:port/db, rediss://, unix://path, or memory://"
            )
        tcp_only = {} if url.startswith("unix:") else {"socket_keepalive": True}
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                protocol=2,
                decode_responses=False,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                health_check_interval=0,
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
                max_connections=connections,
                timeout=timeout_seconds,
                **tcp_only,
            )
        except ValueError:  # its text may have a piece of the password, where that is not percent-encoded
            raise SettingsError(
                f"WAYMARK_REDIS_URL: '{hide_password(url)}' cannot be read; use redis://user:password@host:port/db, "
                "user and password percent-encoded"
            ) from None
        pool.connection_class = type("Packing", (_Packing, pool.connection_class), {})
        return cls(Redis.from_pool(pool), url)

    async def close(self) -> None:
        await self._redis.aclose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            yield
            # The driver sends through asyncio.wait_for, which before Python 3.12 can swallow a cancellation.
            if task and task.cancelling() > cancels:
                raise asyncio.CancelledError
        except (RedisError, OSError, TimeoutError) as exc:
            raise StoreUnavailable(
                f"Redis at {self.url} does not answer as it should ({type(exc).__name__}: {exc}); try again in a moment"
            ) from exc

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        """Call a script by its hash; one that Redis has forgotten is loaded again."""
        script: Script = SCRIPTS[name]
        with self._translated():
            try:
                reply: Reply = await self._redis.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                await self._redis.script_load(script.text)
                reply = await self._redis.evalsha(script.sha, len(keys), *keys, *args)
            return reply

    async def load_scripts(self) -> None:
        with self._translated():
            for script in SCRIPTS.values():
                await self._redis.script_load(script.text)

    async def ping(self) -> None:
        with self._translated():
            await self._redis.ping()

    async def hget(self, key: str, field: Any) -> bytes | None:
        with self._translated():
            return cast("bytes | None", await self._redis.hget(key, field))

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        with self._translated():
            return cast("dict[bytes, bytes]", await self._redis.hgetall(key))

    async def hkeys(self, key: str) -> list[bytes]:
        with self._translated():
            return cast("list[bytes]", await self._redis.hkeys(key))

    async def srandmember(self, key: str) -> bytes | None:
        with self._translated():
            return cast("bytes | None", await self._redis.srandmember(key))

    async def scard(self, key: str) -> int:
        with self._translated():
            return await self._redis.scard(key)

    async def hscan(self, key: str, cursor: int, count: int) -> tuple[int, dict[bytes, bytes]]:
        with self._translated():
            cursor, fields = await self._redis.hscan(key, cursor, count=count)
            return cursor, cast("dict[bytes, bytes]", fields)

    async def several(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Commands that do not depend on each other, in one round trip; one failing fails them all."""
        with self._translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()

    async def publish(self, channel: str, word: str) -> None:
        with self._translated():
            await self._redis.publish(channel, word)

    @asynccontextmanager
    async def subscription(self, channel: str) -> AsyncIterator[PubSub]:
        with self._translated():
            async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                await pubsub.subscribe(channel)
                yield pubsub


class _Packing:
    """A connection that packs commands in C: the library's own loop costs as much as all else a batch needs."""

    def pack_command(self, *args: Any) -> list[bytes]:
        if " " in args[0]:  # SCRIPT LOAD and the like are two words on the wire
            args = (*args[0].split(), *args[1:])
        return [hiredis.pack_command(args)]


def _embedded() -> Redis:
    from fakeredis import FakeAsyncRedis, FakeServer  # the emulation is loaded only where it is asked for

    return FakeAsyncRedis(server=FakeServer(), decode_responses=False, protocol=2)
