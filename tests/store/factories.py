"""Words for scenarios on the store: registrations, a publisher's stream under a grant, runs, a whole database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from redis.asyncio import Redis

from waymark.domain.engines import EngineKind
from waymark.domain.names import GroupName, Holder, HolderName, Registration
from waymark.domain.runs import Commit, Mode, Run
from waymark.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.address import parse
from waymark.store.claims import Claim
from waymark.store.client import RedisClient, Reply
from waymark.store.credentials import Credentials
from waymark.store.directory import GroupEntry
from waymark.store.index import Index
from waymark.store.leases import Grant
from waymark.store.read_connection import ReplyReader
from waymark.store.read_pool import Dialer, ReadPool
from waymark.store.records import Begin
from waymark.store.scripts import Arg, Outcome, Scripts, Verdict
from waymark.store.store import Store

T = TypeVar("T")

GROUP = GroupName("default", "m")

_POD = Registration(
    kind=EngineKind.VLLM,
    instance_id="pod-1",
    tenant_id="default",
    dp_rank=0,
    model_name="m",
    block_size=16,
    endpoint="tcp://10.0.0.1:5557",
    replay_endpoint=None,
    lora_name=None,
    additional_salt=None,
    scope="instance",
    copies="count",
    sequence="publisher",
)


def client_of(redis: Redis) -> RedisClient:
    """A client of the same Redis, with a read connection where it is real. To be closed by ``client.reads``."""
    path = redis.connection_pool.connection_kwargs.get("path")
    reads = None if path is None else ReadPool(Dialer(parse(f"unix://{path}"), Credentials(), 5.0, None))
    return RedisClient(redis, "redis://test", reads=reads)


def registration(instance_id: str = "pod-1", **fields: Any) -> Registration:
    """An instance of model ``m`` with blocks of 16 tokens, unless told otherwise."""
    return replace(_POD, instance_id=instance_id, **fields)


def stored(
    holder: int,
    blocks: Sequence[int],
    *,
    seq: int = 1,
    first: int = 1,
    ns: int = 0,
    hashes: Sequence[int] | None = None,
    is_identity: bool = False,
) -> Run:
    return Run("+", holder, seq, first, list(blocks), list(hashes or blocks), ns, is_identity)


def removed(holder: int, blocks: Sequence[int], *, seq: int = 2, first: int = 1, is_whole: bool = False) -> Run:
    return Run("!" if is_whole else "-", holder, seq, first, list(blocks), list(blocks))


class Recorder(Scripts):
    """Remembers what every script answered."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client)
        self.replies: list[tuple[str, Outcome]] = []

    async def _run(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Outcome:
        outcome = await super()._run(name, keys, args)
        self.replies.append((name, outcome))
        return outcome


class Dying(RedisClient):
    """A process that dies at a script: before the call of that number, or after it with the reply unread."""

    def __init__(self, client: RedisClient, script: str, *, call: int = 1, is_done: bool = False) -> None:
        super().__init__(client._redis, client.url, reads=client.reads)
        self._script, self._calls_left, self._is_done = script, call, is_done

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        if self._calls_left <= 0:
            raise StoreUnavailable("this process is dead")
        if name == self._script:
            self._calls_left -= 1
            if self._calls_left == 0:
                if self._is_done:
                    await super().run(name, keys, args)
                raise StoreUnavailable(f"died at {name}")
        return await super().run(name, keys, args)


class Meeting(RedisClient):
    """Lets something else happen right before a script, or a read, of that number."""

    def __init__(
        self, client: RedisClient, name: str, meanwhile: Callable[[], Awaitable[Any]], *, call: int = 1
    ) -> None:
        super().__init__(client._redis, client.url, reads=client.reads)
        self._name, self._meanwhile, self._calls_left = name, meanwhile, call

    async def _meet(self, name: str) -> None:
        if name == self._name:
            self._calls_left -= 1
            if self._calls_left == 0:
                await self._meanwhile()

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        await self._meet(name)
        return await super().run(name, keys, args)

    async def several(self, commands: Any, *, is_lenient: bool = False) -> list[Any]:
        await self._meet("several")
        return await super().several(commands, is_lenient=is_lenient)

    async def ask(self, key: bytes, packed: bytes, reader: ReplyReader[T], until: float | None) -> T:
        await self._meet("ask")
        return await super().ask(key, packed, reader, until)


@dataclass
class Stream:
    """A publisher's stream, and the grant under which it is applied."""

    store: Store
    redis: Redis
    grant: Grant

    @property
    def entry(self) -> GroupEntry:
        return GroupEntry(self.grant.group_id, self.grant.shards)

    async def begin(self, *names: str, nonce: str | None = None) -> list[int]:
        """Live holder ids by name, begun where they were not."""
        begin, above = begins(self.grant.claim, *names), self.grant.above
        ids = await self.store.records.new_life(
            self.grant, unit="", is_restart=False, begin=begin, above=above, nonce=nonce
        )
        assert ids is not None
        return ids

    async def end(self, unit: str = "*", *, is_restart: bool = False) -> None:
        ids = await self.store.records.new_life(
            self.grant, unit=unit, is_restart=is_restart, begin=[], above=self.grant.above
        )
        assert ids == []

    async def apply(
        self,
        *runs: Run,
        watermark: int | None = None,
        mode: Mode = "count",
        event_ids: Mapping[int, int] | None = None,
    ) -> Verdict:
        """Apply runs; the watermark goes to the last one's seq unless told otherwise."""
        if watermark is None:
            watermark = runs[-1].seq
        commit = Commit(watermark, float(watermark), float(watermark), f"{watermark:016x}")
        modes: dict[int, Mode] = dict.fromkeys((run.holder for run in runs), mode)
        return await self.store.index.apply(self.grant, runs, modes, commit, event_ids)

    def recorded(self) -> list[tuple[str, Outcome]]:
        """From now on, what the scripts of ``apply`` answer."""
        recorder = Recorder(RedisClient(self.redis, ""))
        self.store.index = Index(RedisClient(self.redis, ""), recorder)
        return recorder.replies

    async def again(self, worker: str = "worker-2") -> Stream:
        """The same publisher, taken over by another worker."""
        grant = await self.store.leases.take(self.grant.claim, worker, 60.0, force=True)
        assert grant is not None
        return Stream(self.store, self.redis, grant)

    async def watermark(self) -> int | None:
        value = await cast("Awaitable[bytes | None]", self.redis.hget(self.grant.record, "watermark"))
        return None if value is None else int(value)

    def key(self, block: int) -> bytes:
        shard = block % self.grant.shards
        return keys.block_prefix(self.grant.group_id, shard) + b"%016x" % block

    async def values(self, blocks: Sequence[int]) -> list[bytes | None]:
        return cast("list[bytes | None]", await self.redis.mget([self.key(block) for block in blocks]))

    async def engine(self, holder: int, shard: int = 0) -> dict[bytes, bytes]:
        """A holder's engine hash, without its mark and the number of its copy counts, which is checked here."""
        entries = await hgetall(self.redis, keys.engine(self.grant.group_id, shard, holder))
        entries.pop(b"applied", None)
        copied = int(entries.pop(b"*", 0))
        assert copied == sum(name.startswith(b"*") for name in entries)
        return entries

    async def mark(self, holder: int, shard: int = 0) -> bytes | None:
        entries = await hgetall(self.redis, keys.engine(self.grant.group_id, shard, holder))
        return entries.get(b"applied")


def begins(claim: Claim, *names: str) -> list[Begin]:
    of = claim.registration
    return [
        Begin(
            name,
            Holder(
                0, claim.publisher, of.instance_id, name.dp_rank, name.medium, of.block_size, of.instance_id, of.scope
            ),
        )
        for name in map(HolderName.parse, names)
    ]


async def claim_of(store: Store, of: Registration) -> Claim:
    (claim,) = [claim for claim in await store.directory.claims() if claim.registration.name == of.name]
    return claim


async def stream_of(
    store: Store, redis: Redis, of: Registration | None = None, worker: str = "worker-1", *, ids_above: int = 0
) -> Stream:
    """Register, and take the lease. The group's first holder id is not what the clock says, so a test can name it."""
    of = of or registration()
    await store.registry.register(of)
    group_id = (await claim_of(store, of)).group_id
    await redis.hsetnx(keys.fence(group_id, 0), "holder", str(ids_above))
    grant = await store.leases.take(await claim_of(store, of), worker, 60.0)
    assert grant is not None
    return Stream(store, redis, grant)


async def hgetall(redis: Redis, key: str | bytes) -> dict[bytes, bytes]:
    return await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(cast("str", key)))


async def snapshot(redis: Redis) -> dict[bytes, tuple[str, bool, Any]]:
    """Every key: its type, whether it runs out by itself, and all it holds."""
    names = sorted(cast("list[bytes]", await redis.keys("*")))
    async with redis.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.type(cast("str", name))
            pipeline.pttl(cast("str", name))
        about = await pipeline.execute()
        for name, kind in zip(names, about[::2], strict=True):
            match kind:
                case b"string":
                    pipeline.get(cast("str", name))
                case b"hash":
                    pipeline.hgetall(cast("str", name))
                case b"set":
                    pipeline.smembers(cast("str", name))
                case b"zset":
                    pipeline.zrange(cast("str", name), 0, -1, withscores=True)
                case _:
                    pipeline.exists(cast("str", name))
        held = await pipeline.execute()
    return {
        name: (kind.decode(), pttl >= 0, value)
        for name, kind, pttl, value in zip(names, about[::2], about[1::2], held, strict=True)
        if value  # a lease may have run out meanwhile
    }
