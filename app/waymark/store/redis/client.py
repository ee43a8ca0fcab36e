"""The one client of Redis: a server, a primary behind Sentinels, or a Cluster.

The rest of ``store`` does not know which one it is. Every command ends in bounded time, and every error of redis-py
becomes ``StoreUnavailable``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import hiredis

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.shown import hide_password
from waymark.store.redis import errors
from waymark.store.redis.address import parse
from waymark.store.redis.credentials import Credentials, RedisCliCall
from waymark.store.redis.failures import is_damage, kind_of, unavailable
from waymark.store.redis.read_connection import ReadConnection, ReadPool, Replies, ReplyReader, reads_of_one
from waymark.store.redis.words import (
    Parameter,
    SharedPipeline,
    SplitParameters,
    packed_call,
    parameters,
    split,
    words_of,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

    from waymark.store.redis.cluster import Cluster

Reply: TypeAlias = list[Any]
T = TypeVar("T")
Connect: TypeAlias = "Callable[[], tuple[Redis | Cluster, ReadPool | None]]"
"""Returns redis-py's client, and the read connection of a client that finds its server."""

EMBEDDED = "memory://"

#: The connections to each server, which are more than the requests that run in parallel. So no request waits for a
#: connection, which matters because redis-py does not serve waiting callers in order.
CONNECTIONS = 80
_ONE_REPLY = Replies(1)
_PIPELINES_MAX = 1000
#: The keys in one step of a SCAN.
_SCAN_COUNT = 1000


class _NoConnection(Exception):
    """The embedded Redis has no connections."""


class Subscription:
    """The messages of a channel."""

    def __init__(self, pubsub: PubSub, translated: Callable[[], AbstractContextManager[None]]) -> None:
        self._pubsub = pubsub
        self._translated = translated

    async def get_message(self, *, seconds: float) -> dict[str, Any] | None:
        """Return the next message, or None after ``seconds`` without one. Raise StoreUnavailable if Redis is
        unavailable.
        """
        with self._translated():
            return cast("dict[str, Any] | None", await self._pubsub.get_message(timeout=seconds))


class RedisClient:
    """The client of a Redis, real or embedded, for the rest of ``store``."""

    def __init__(
        self,
        redis: Redis | Cluster | Connect,
        url: str,
        variable: str = "WAYMARK_REDIS_URL",
        reads: ReadPool | None = None,
    ) -> None:
        """Create a client. ``redis`` may be a function, which is called when redis-py is first needed. ``reads`` is the
        read connection to a server; a Cluster has its own, and the embedded Redis needs no connection.
        """
        self._driver = redis
        self._cluster = cast("Cluster", redis) if hasattr(redis, "server_of") else None
        self.reads = reads
        self._variable = variable
        self._pipelines: dict[object, SharedPipeline] = {}
        self.url = hide_password(url)
        note = "# this Redis is inside the process of Waymark (memory://): no redis-cli reaches it"
        self.redis_cli = RedisCliCall(["redis-cli"], [note] if self.is_embedded else [])
        self.metrics: Metrics | None = None
        """The metrics of its store."""
        self.bar_reason: str | None = None
        """Why Redis gets no command now, except ``hmget``; None if it gets every command."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        timeout_seconds: float = 2.0,
        connections: int = CONNECTIONS,
        credentials: Credentials | None = None,
        variable: str = "WAYMARK_REDIS_URL",
    ) -> RedisClient:
        """Return a client that connects on first use. ``memory://`` is a new, empty Redis inside this process.

        ``connections`` is the most connections to each server. Raise SettingsError, which names ``variable``, if the
        URL or a field of ``credentials`` does not fit.
        """
        if url == EMBEDDED:
            return cls(embedded(), url, variable)
        credentials = credentials or Credentials()
        address = parse(url, variable)
        credentials.check(address, variable)
        connect = partial(_load_driver, address, credentials, timeout_seconds, connections)
        reads = reads_of_one(address, credentials, timeout_seconds)
        redis, reads = connect() if reads is None else (connect, reads)
        client = cls(redis, url, variable, reads)
        client.redis_cli = credentials.redis_cli(address)
        return client

    @property
    def _redis(self) -> Redis | Cluster:
        driver = self._driver
        if callable(driver):
            driver, _ = driver()
            self._driver = driver
        return driver

    @property
    def is_embedded(self) -> bool:
        """Whether this Redis is inside the process, so that no other one reaches it."""
        return self.url == EMBEDDED

    async def close(self) -> None:
        if self.reads is not None:
            self.reads.close()
        if not callable(self._driver):
            await self._driver.aclose()

    @contextmanager
    def _translated(self, *, has_bar: bool = True) -> Iterator[None]:
        if has_bar:
            self._check_bar()
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            yield
            # The driver sends through asyncio.wait_for, which before Python 3.12 can swallow a cancellation.
            if task and task.cancelling() > cancels:
                raise asyncio.CancelledError
        except (errors.RedisError, OSError, TimeoutError) as exc:
            if task and task.cancelling() > cancels:
                raise asyncio.CancelledError from exc
            raise self.translated(exc) from exc

    def _check_bar(self) -> None:
        if self.bar_reason is not None:
            raise StoreUnavailable(self.bar_reason)

    def translated(self, error: errors.RedisError | OSError) -> StoreUnavailable:
        """Count an error of the driver, and return the error that the rest of ``store`` gets for it."""
        if self.metrics is not None:
            self.metrics.redis_errors.labels(reason=kind_of(error)).inc()
        return unavailable(self.url, self._variable, error)

    @property
    def is_cluster(self) -> bool:
        """Whether keys are on different servers."""
        return self._cluster is not None

    def connections(self) -> tuple[int, int]:
        """Return how many connections of the pools are in use, and how many are idle; 0 for the embedded Redis."""
        if callable(self._driver):
            return 0, 0
        nodes = [cast("Redis", self._driver)] if self._cluster is None else self._cluster.nodes()
        counts = [pool.counts() for node in nodes if hasattr(pool := node.connection_pool, "counts")]
        return sum(used for used, _ in counts), sum(idle for _, idle in counts)

    async def _primaries(self) -> list[Redis]:
        return [cast("Redis", self._redis)] if self._cluster is None else await self._cluster.primaries()

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        """Run a script by its SHA-1, or by its text if Redis does not have the script."""
        script: Script = SCRIPTS[name]
        self._check_bar()
        if name in REPEATABLE:
            try:
                return await self._run_repeatable(script, keys, args)
            except TimeoutError:
                with self._translated():
                    raise
            except (errors.RedisError, OSError, _NoConnection):
                pass  # redis-py then checks whether another server has the data
        with self._translated():
            send = self._ask_in_pipeline if name in TOGETHER else self._execute
            words: tuple[Any, ...] = (len(keys), *keys, *args)
            try:
                reply = await send(("EVALSHA", script.sha, *words))
            except errors.NoScriptError:
                reply = await send(("EVAL", script.text, *words))
            return cast("Reply", reply)

    async def _run_repeatable(self, script: Script, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        """Run a script over a read connection, which takes a third of the time that redis-py takes.

        Raise _NoConnection if Redis is embedded, TimeoutError, and RedisError.
        """
        now = asyncio.get_running_loop().time()
        if self.reads is not None:
            pool = self.reads.scripts
            try:
                (reply,) = await pool.ask(packed_call(script.sha, keys, args), _ONE_REPLY, now + pool.seconds)
            except (errors.RedisError, OSError) as exc:
                if isinstance(exc, errors.ReadOnlyError):
                    self.reads.retire()  # otherwise queries would still read from the demoted server
                elif not isinstance(exc, errors.NoScriptError | TimeoutError):
                    pool.retire()
                raise
        elif self._cluster is not None:
            key, packed = next(iter(keys)), packed_call(script.sha, keys, args)
            key_bytes = key if isinstance(key, bytes) else key.encode()
            (reply,) = await self._cluster.ask(
                key_bytes, packed, _ONE_REPLY, now + self._cluster.timeout_seconds, is_script=True
            )
        else:
            raise _NoConnection
        return cast("Reply", reply)

    async def _execute(self, command: Sequence[Any]) -> Any:
        return await self._redis.execute_command(*command)

    async def _read(self, *command: Any) -> Any:
        """Return the reply to a command that only reads. A replica asks its first ones before it imports redis-py."""
        if self.reads is not None:
            packed = hiredis.pack_command(cast("Any", command))
            deadline = asyncio.get_running_loop().time() + self.reads.seconds
            try:
                (reply,) = await self.reads.ask(packed, _ONE_REPLY, deadline)
                return reply
            except TimeoutError:
                raise
            except (errors.RedisError, OSError):
                pass  # redis-py then checks whether another server has the data
        return await self._execute(command)

    async def _ask_in_pipeline(self, command: Sequence[Any]) -> Any:
        """Return the reply to a script call or to a command of one key, which shares its round trip with other
        callers'.
        """
        key = command[3 if command[0] in ("EVALSHA", "EVAL") else 1]
        server = self.server_of(key if isinstance(key, bytes) else key.encode())
        pipeline = self._pipelines.get(server)
        if pipeline is None:
            if len(self._pipelines) >= _PIPELINES_MAX:
                self._pipelines.clear()  # they may be those of former nodes of a Cluster; calls under way continue
            pipeline = self._pipelines[server] = SharedPipeline(self._replies)
        return await pipeline.ask(command)

    async def each(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Send commands as ``several`` does, but let many frequent callers share round trips."""
        with self._translated():
            return list(await asyncio.gather(*(self._ask_in_pipeline(command) for command in commands)))

    async def load_scripts(self) -> None:
        """Load all scripts into every primary."""
        with self._translated():
            await asyncio.gather(*(_load(primary) for primary in await self._primaries()))

    async def ping(self) -> None:
        with self._translated():
            await self._redis.ping()

    async def infos(self) -> list[dict[str, Any]]:
        """Return INFO of every primary, as the driver parses it; empty for the embedded Redis."""
        if self.is_embedded:
            return []
        with self._translated():
            return list(await asyncio.gather(*(primary.info() for primary in await self._primaries())))

    async def hget(self, key: str, field: Any) -> bytes | None:
        with self._translated():
            return cast("bytes | None", await self._read("HGET", key, field))

    async def hmget(self, key: str, *fields: str) -> list[bytes | None]:
        """Return the values of fields, even while other commands are barred."""
        with self._translated(has_bar=False):
            return cast("list[bytes | None]", await self._read("HMGET", key, *fields))

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        with self._translated():
            reply = await self._read("HGETALL", key)
            return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))

    async def command(self, *words: Any) -> Any:
        """Return the reply to any other command of one key, as redis-py parses it."""
        with self._translated():
            return await self._execute(words)

    async def hkeys(self, key: str) -> list[bytes]:
        return cast("list[bytes]", await self.command("HKEYS", key))

    async def hscan(self, key: str, cursor: int, count: int, match: str = "") -> tuple[int, dict[bytes, bytes]]:
        """Do one step of an HSCAN: return the next cursor and some fields, of all or of those that ``match``.

        A cursor is invalid after a failover; then start again.
        """
        filters = ("MATCH", match) if match else ()
        reply = await self.command("HSCAN", key, cursor, *filters, "COUNT", count)
        return cast("tuple[int, dict[bytes, bytes]]", reply)

    async def unlink_all(self, pattern: str) -> int:
        """Delete every key that matches ``pattern``, on every primary; return how many there were."""
        with self._translated():
            return sum([await _unlink_all(primary, pattern) for primary in await self._primaries()])

    async def several(self, commands: Iterable[Sequence[Any]], *, is_lenient: bool = False) -> list[Any]:
        """Return the replies to independent commands, in one round trip (on a Cluster, one to each node, all at once).

        Raise the first error. With ``is_lenient`` a command that meets a key of another type returns None instead.
        """
        with self._translated():
            replies = await self._replies(commands)
            for i, reply in enumerate(replies):
                if isinstance(reply, BaseException):
                    if not (is_lenient and is_damage(reply)):
                        raise reply
                    replies[i] = None
            return replies

    async def _replies(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Return the reply or the error of each command."""
        if self._cluster is not None:
            return await self._cluster.several(commands)
        async with cast("Redis", self._redis).pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute(raise_on_error=False)

    async def ask(self, key: bytes, packed: bytes, reader: ReplyReader[T], deadline: float | None) -> T:
        """Send packed commands to the server of ``key``; ``reader`` turns the replies into the result.

        Raise TimeoutError at ``deadline``, a time of the event loop's clock, and StoreUnavailable. It also raises
        StoreUnavailable if a slot of a Cluster has moved, and on the embedded Redis: the caller then uses ``several``.
        """
        self._check_bar()
        try:
            if self.reads is not None:
                return await self.reads.ask(packed, reader, deadline)
            if self._cluster is not None:
                return await self._cluster.ask(key, packed, reader, deadline)
        except TimeoutError:
            raise  # the caller's deadline
        except (errors.RedisError, OSError) as exc:
            raise self.translated(exc) from exc
        raise StoreUnavailable("the embedded Redis has no connections")

    def connection(self, key: bytes, *, is_script: bool = False) -> ReadConnection | None:
        """Return the connection for reads, or for scripts, to the server of ``key``; None if it is not open, and
        ``ask`` or ``run`` has to open it.
        """
        if self.bar_reason is not None:
            return None
        if self.reads is not None:
            return (self.reads.scripts if is_script else self.reads).connection
        return None if self._cluster is None else self._cluster.connection(key, is_script=is_script)

    def script_connection(self, name: str) -> ReadConnection | None:
        """Return the open connection to the only server for a script, or None if ``run`` must send the script."""
        if self.reads is None or name not in REPEATABLE or self.bar_reason is not None:
            return None
        return self.reads.scripts.connection

    def server_of(self, key: bytes) -> object:
        """Return an object that identifies the server of ``key``, as far as it is known."""
        return None if self._cluster is None else self._cluster.server_of(key)

    async def publish(self, channel: str, message: str) -> None:
        await self.command("PUBLISH", channel, message)

    @asynccontextmanager
    async def subscription(self, channel: str) -> AsyncIterator[Subscription]:
        with self._translated():
            server = (await self._primaries())[0]
            async with server.pubsub(ignore_subscribe_messages=True) as pubsub:
                # In a block of its own, so that a swallowed cancellation is raised before the first wait for messages.
                with self._translated():
                    await pubsub.subscribe(channel)
                yield Subscription(pubsub, self._translated)


async def _unlink_all(redis: Redis, pattern: str) -> int:
    count = 0
    async with redis.pipeline(transaction=False) as pipeline:
        async for key in redis.scan_iter(match=pattern, count=_SCAN_COUNT):
            pipeline.unlink(key)  # one at a time: on a Cluster two keys may be in two slots
            if len(pipeline) >= _SCAN_COUNT:
                count += sum(await pipeline.execute())
        return count + int(sum(await pipeline.execute()))


async def _load(redis: Redis) -> None:
    async with redis.pipeline(transaction=False) as pipeline:
        for script in SCRIPTS.values():
            pipeline.execute_command("SCRIPT LOAD", script.text)
        await pipeline.execute()


# The scripts of ``lua/``, read once, each with the SHA-1 that EVALSHA needs.


# The folder is next to the package in a checkout, and inside it after an installation.
_PACKAGE = Path(__file__).parents[2]
LUA_DIR = next(folder for folder in (_PACKAGE / "lua", _PACKAGE.parents[1] / "lua") if folder.is_dir())


class Script(NamedTuple):
    text: str
    sha: str
    keys: tuple[Parameter, ...]
    """The KEYS in the signature on the first line. ``args`` has the ARGV."""
    args: tuple[Parameter, ...]
    keys_of: SplitParameters
    args_of: SplitParameters

    @classmethod
    def of(cls, text: str) -> Script:
        keys, args = text[text.index("(") + 1 : text.index(")")].split(";")
        sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
        of_keys, of_args = parameters(keys), parameters(args)
        return cls(text, sha, of_keys, of_args, split(of_keys), split(of_args))

    def words(self, values: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the KEYS and the ARGV of a call, from a value for each name of the signature. Raise TypeError or
        KeyError if the names are others.
        """
        if len(values) != len(self.keys) + len(self.args):
            raise TypeError(f"values for {', '.join(values)} in place of {self.text[: self.text.index(chr(10))]}")
        return words_of(*self.keys_of, values), words_of(*self.args_of, values)

    def again(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the ARGV of a call that may have been made before."""
        return ["1", *args[1:]] if self.args[0].name == "again" else args


REPEATABLE = frozenset({"apply_rows", "release", "end_overdue", "read_loads", "reserve", "match_placements"})
"""Scripts that may run twice for one call. Each skips finished steps, or only reads."""
TOGETHER = frozenset(
    {"begin_publisher", "claim_publisher", "new_ids", "raise_fence", "renew_leases", "take_lease", "write_record"}
)
"""Scripts that a worker calls for thousands of streams at once: their calls share round trips."""
SCRIPTS: dict[str, Script] = {
    path.stem: Script.of(path.read_text(encoding="utf-8")) for path in sorted(LUA_DIR.glob("*.lua"))
}


def _load_driver(*arguments: Any) -> tuple[Redis | Cluster, ReadPool | None]:
    from waymark.store.redis.cluster import driver  # it imports redis-py

    return driver(*arguments)


def embedded() -> Redis:
    """Return a new, empty Redis of this process alone."""
    from fakeredis import FakeAsyncRedis, FakeServer  # only a process with an embedded Redis loads the emulation

    return FakeAsyncRedis(server=FakeServer(), decode_responses=False, protocol=2)
