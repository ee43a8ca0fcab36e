"""Words for scenarios on the store: registrations, a publisher's stream under a grant, runs, a whole database."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import pytest
from redis.asyncio import Redis, RedisCluster

from tests.patience import patient
from waymark.base.errors import StoreUnavailable
from waymark.domain.engines import EngineKind
from waymark.domain.held import HeldBlocks
from waymark.domain.known import Spot
from waymark.domain.moves import Moves
from waymark.domain.names import GroupName, Holder, HolderName, Registration
from waymark.domain.packing import pack
from waymark.domain.parts import Commit, Mode, Part
from waymark.domain.placing import Placer
from waymark.domain.rows import PIECE_BLOCKS, Place
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.hashes import FIND_HASHES
from waymark.store.index import Index
from waymark.store.leases import Grant
from waymark.store.places import holders_of
from waymark.store.records import BLOCKS, NewHolder
from waymark.store.redis.address import parse
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.redis.credentials import Credentials
from waymark.store.redis.read_connection import Dialer, ReadPool, ReplyReader
from waymark.store.reservations import Offer, ReservationPart, ReservationTerms
from waymark.store.scripts import Outcome, Scripts, Verdict
from waymark.store.store import Store
from waymark.store.takeover import parse_row

T = TypeVar("T")

GROUP = GroupName("default", "m")
_ROW = re.compile(rb"wm:\{([0-9]+)(?:\.[0-9]+)?\}:[0-9a-f]{16}(?::[bs])?")

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


async def found_hashes(store: Store, group_id: int, engine_hashes: Sequence[int]) -> dict[int, Spot]:
    """As ``EngineHashes.find``, for any number of hashes."""
    found: dict[int, Spot] = {}
    for start in range(0, len(engine_hashes), FIND_HASHES):
        found |= await store.hashes.find(group_id, engine_hashes[start : start + FIND_HASHES])
    return found


def client_of(redis: Redis) -> RedisClient:
    """A client of the same Redis, with a read connection where it is real. To be closed by ``client.reads``."""
    path = redis.connection_pool.connection_kwargs.get("path")
    reads = None if path is None else ReadPool(Dialer(parse(f"unix://{path}"), Credentials(), patient(5), None))
    return RedisClient(redis, "redis://test", reads=reads)


class Readings:
    """How often a store has read claims since the last look: all of them, or those that have changed."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        self.names: list[bytes] = []
        """The names of the claims of the last reading of some."""
        by_field, some = store.directory.by_field, store.directory.some

        async def all_counted() -> dict[bytes, Claim | None]:
            self._count += 1
            return await by_field()

        async def some_counted(fields: Collection[bytes]) -> dict[bytes, Claim | None]:
            self._count += 1
            self.names = sorted(fields)
            return await some(fields)

        monkeypatch.setattr(store.directory, "by_field", all_counted)
        monkeypatch.setattr(store.directory, "some", some_counted)

    def __call__(self) -> int:
        count, self._count = self._count, 0
        return count


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
    is_deep: bool = False,
    after: int | None = None,
) -> Change:
    """Block keys of a chain: it goes on from the block before the first, where the holder has that, else from the
    root; ``after`` names that block. Without ``hashes`` each block is its own engine hash."""
    parent = blocks[0] - 1 if after is None else after
    return Change("+", holder, seq, first, list(blocks), list(hashes or blocks), ns, is_identity, is_deep, parent)


def apart(holder: int, blocks: Sequence[int], *, seq: int = 1, first: int = 1) -> list[Change]:
    """Blocks that begin a chain each, so that they are on several shards."""
    return [stored(holder, [block], seq=seq, first=at, after=0) for at, block in enumerate(blocks, first)]


def removed(holder: int, blocks: Sequence[int], *, seq: int = 2, first: int = 1) -> Change:
    """``blocks``: engine hashes."""
    return Change("-", holder, seq, first, list(blocks), list(blocks))


@dataclass
class Change:
    """Consecutive blocks of one batch that a holder gets or loses."""

    kind: str
    holder: int
    seq: int
    first: int
    """Position of the first block in its batch, from 1."""
    keys: list[int]
    hashes: list[int]
    namespace: int = 0
    is_identity: bool = False
    is_deep: bool = False
    parent: int = -1
    path: Sequence[int] = ()
    """The keys of the whole chain, where ``keys`` are some of it."""


class Resolved:
    """Turns changes into parts, and remembers what a worker does."""

    def _above(self, change: Change) -> Spot | None:
        return None if change.parent < 0 else self.memory.held_block(change.holder, change.parent)

    def __init__(self, shards: int, memory: HeldBlocks | None = None) -> None:
        self.memory = memory or HeldBlocks()
        self.placer = Placer(self.memory, shards)

    def parts(self, *changes: Change, mode: Mode = "count") -> list[Part]:
        parts: list[Part] = []
        for change in changes:
            self.memory.begin(change.holder, 0)
            batch = self.placer.begin_batch(change.seq)
            if change.path:
                for position, (key, engine_hash) in enumerate(
                    zip(change.keys, change.hashes, strict=True), change.first
                ):
                    depth = change.path.index(key)
                    place = Place(change.path[depth - depth % PIECE_BLOCKS])
                    spot = Spot(place, change.namespace, depth % PIECE_BLOCKS, key)
                    self.placer.block(batch, change.holder, position, engine_hash, spot, mode=mode)
            elif change.kind == "+":
                above = self._above(change)
                self.placer.chain(
                    batch,
                    change.holder,
                    change.first,
                    change.namespace,
                    above,
                    change.keys,
                    change.hashes,
                    mode=mode,
                    is_identity=change.is_identity,
                    is_deep=change.is_deep,
                )
            else:
                for position, engine_hash in enumerate(change.hashes, change.first):
                    self.placer.remove(batch, change.holder, position, engine_hash, mode=mode)
            parts += batch.parts
        return parts


class Recorder(Scripts):
    """Remembers what every script answered."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client)
        self.replies: list[tuple[str, Outcome]] = []

    async def run(self, name: str, /, **values: Any) -> Outcome:
        outcome = await super().run(name, **values)
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


class Repeating(RedisClient):
    """Makes each call of a script twice, as if its first reply were lost."""

    def __init__(self, client: RedisClient, script: str) -> None:
        super().__init__(client._redis, client.url, reads=client.reads)
        self._script = script

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        if name == self._script:
            await super().run(name, keys, args)
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
    resolved: Resolved | None = field(default=None, repr=False)
    """None: what the worker remembers is read from Redis first."""

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
        *changes: Change,
        watermark: int | None = None,
        mode: Mode = "count",
        event_ids: Mapping[int, int] | None = None,
    ) -> Verdict:
        """Apply changes; the watermark goes to the last one's seq unless told otherwise."""
        if watermark is None:
            watermark = changes[-1].seq
        commit = Commit(watermark, float(watermark), float(watermark), f"{watermark:016x}")
        resolved = await self.remembered()
        parts = resolved.parts(*changes, mode=mode)
        return await self.store.index.apply(self.grant, parts, Moves(resolved.memory), commit, event_ids)

    async def remembered(self) -> Resolved:
        if self.resolved is None:
            self.resolved = await resolved_of(self.store, self.grant)
        return self.resolved

    def recorded(self) -> list[tuple[str, Outcome]]:
        """From now on, what the scripts of ``apply`` answer."""
        recorder = Recorder(RedisClient(self.redis, ""))
        self.store.index = Index(RedisClient(self.redis, ""), recorder)
        return recorder.replies

    async def again(self, worker: str = "worker-2") -> Stream:
        """The same publisher, taken over by another worker."""
        grant = await self.store.leases.take(self.grant.claim, worker, 3600.0, force=True)
        assert grant is not None
        return Stream(self.store, self.redis, grant)

    async def watermark(self) -> int | None:
        value = await cast("Awaitable[bytes | None]", self.redis.hget(self.grant.record, "watermark"))
        return None if value is None else int(value)

    def key(self, block: int) -> bytes:
        shard = block % self.grant.shards
        return keys.block_prefix(self.grant.group_id, shard) + b"%016x" % block

    async def who_has(self, chain: Sequence[int]) -> list[set[int]]:
        """The holders of each block of a chain that begins at the root."""
        pieces = [pack(chain[at : at + PIECE_BLOCKS]) for at in range(0, len(chain), PIECE_BLOCKS)]
        client = RedisClient(self.redis, "redis://test")
        found = await holders_of(client, self.entry, pieces, has_singles=True)
        return [holders for piece in found for holders in piece]

    async def row(self, head: int) -> bytes | None:
        return cast("bytes | None", await self.redis.get(self.key(head)))

    async def values(self, blocks: Sequence[int]) -> list[bytes | None]:
        return cast("list[bytes | None]", await self.redis.mget([self.key(block) for block in blocks]))

    async def engine(self, holder: int, shard: int = 0) -> dict[bytes, bytes]:
        """A holder's engine hash, without its mark."""
        entries = await hgetall(self.redis, keys.engine(self.grant.group_id, shard, holder))
        entries.pop(b"applied", None)
        return entries

    async def mark(self, holder: int, shard: int = 0) -> bytes | None:
        entries = await hgetall(self.redis, keys.engine(self.grant.group_id, shard, holder))
        return entries.get(b"applied")


async def resolved_of(store: Store, grant: Grant) -> Resolved:
    """What a worker that takes over reads from Redis."""
    state = await store.records.read(grant)
    holders = {} if state is None else {holder: name.dp_rank for name, holder in state.holders.items()}
    memory = HeldBlocks()
    counted = await store.takeover.fill(grant, holders, memory)
    resolved = Resolved(grant.shards, memory)
    resolved.placer.skip(counted)
    return resolved


async def apply_changes(
    store: Store, grant: Grant, *changes: Change, commit: Commit | None = None, mode: Mode = "count"
) -> Verdict:
    """Apply changes as a worker does that has just taken over; the watermark goes to the last one's seq."""
    if commit is None and changes:
        seq = changes[-1].seq
        commit = Commit(seq, float(seq), float(seq), f"{seq:016x}")
    resolved = await resolved_of(store, grant)
    parts = resolved.parts(*changes, mode=mode)
    verdict = await store.index.apply(grant, parts, Moves(resolved.memory), commit)
    state = await store.records.read(grant)
    held = Counter[str]()
    for name, holder in ({} if state is None else state.holders).items():
        resolved.memory.begin(holder, name.dp_rank)
        held[BLOCKS + name.medium] += resolved.memory.blocks_of(holder)
    await store.records.write(grant, {}, held)
    return verdict


async def blocks_of(redis: Redis, group_id: int = 1) -> dict[int, set[int]]:
    """By key, the holder ids of every block of a group, on all shards."""
    names = cast("list[bytes]", [name async for name in redis.scan_iter(match=f"wm:{{{group_id}*}}:*", count=1000)])
    names = [name for name in names if (row_key := _ROW.fullmatch(name)) and int(row_key[1]) == group_id]
    held: dict[int, set[int]] = {}
    for value in await _values_of(redis, names):
        if value and (row := parse_row(value)):
            for holder, bitmap in row.holders.items():
                for slot, key in enumerate(row.keys):
                    if bitmap >> slot & 1:
                        held.setdefault(key, set()).add(holder)
    return held


async def _values_of(redis: Redis | RedisCluster, names: list[bytes]) -> list[bytes | None]:
    """The values of keys, by one command where it can be one: tests that wait for blocks ask again and again."""
    if isinstance(redis, Redis):
        return cast("list[bytes | None]", await redis.mget(names)) if names else []
    async with redis.pipeline(transaction=False) as pipeline:  # on a Cluster the keys are in several slots
        for name in names:
            pipeline.get(name)
        return cast("list[bytes | None]", await pipeline.execute())


def begins(claim: Claim, *names: str) -> list[NewHolder]:
    of = claim.registration
    return [
        NewHolder(
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
    grant = await store.leases.take(await claim_of(store, of), worker, 3600.0)
    assert grant is not None
    return Stream(store, redis, grant)


async def hgetall(redis: Redis, key: str | bytes) -> dict[bytes, bytes]:
    return await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(cast("str", key)))


async def snapshot(redis: Redis, *, has_activity: bool = False) -> dict[bytes, tuple[str, bool, Any]]:
    """Every key: its type, whether it runs out by itself, and all it holds.

    The activity is left out unless it is asked for: it is written in the background, at any moment.
    """
    names = sorted(cast("list[bytes]", await redis.keys("*")))
    return await held_by(redis, [name for name in names if has_activity or name != keys.ACTIVITY.encode()])


async def held_by(redis: Redis, names: Sequence[bytes]) -> dict[bytes, tuple[str, bool, Any]]:
    """A snapshot of these keys."""
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
                case b"stream":
                    pipeline.xrange(cast("str", name))
                case _:
                    pipeline.exists(cast("str", name))
        held = await pipeline.execute()
    return {
        name: (kind.decode(), pttl >= 0, value)
        for name, kind, pttl, value in zip(names, about[::2], about[1::2], held, strict=True)
        if value  # a lease may have run out meanwhile
    }


async def answered_before(store: Store, publisher: int, ttft_ms: float, tpot_ms: float, group_id: int = 1) -> None:
    """Let a target have answered as many requests as a prediction needs, all in the same times."""
    for _ in range(5):
        found = await store.reservations.reserve(group_id, [Offer(publisher, 0)], ReservationTerms(context=1))
        assert found.reservation is not None
        await store.reservations.release([found.reservation], ReservationPart.OK, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
