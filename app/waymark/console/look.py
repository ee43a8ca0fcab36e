"""Opens Redis for an operator's command: it reads for a short time, in pieces that do not delay queries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.errors import NotFound, SettingsError
from waymark.settings import Settings
from waymark.store import keys
from waymark.store.claims import Claim, decode_table
from waymark.store.client import RedisClient
from waymark.store.credentials import Credentials
from waymark.store.directory import GroupEntry
from waymark.store.records import PublisherState
from waymark.store.store import Store

#: Hash commands in one pipeline, about: Redis answers others between two of them.
_PIECE_COMMANDS = 512
#: Block values in one MGET.
_PIECE_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Group:
    """A group with its ids."""

    name: GroupName
    entry: GroupEntry

    @property
    def id(self) -> int:
        return self.entry.group_id

    def block_key(self, key: int) -> bytes:
        """The name of a block's key in Redis."""
        return b"%b%016x" % (keys.block_prefix(self.id, key % self.entry.shards), key)


class Look:
    """The reads that the console is made of."""

    def __init__(self, client: RedisClient, *, hash_seed: int = DEFAULT_SEED) -> None:
        self.client = client
        self.store = Store(client, hash_seed=hash_seed)

    async def groups(self) -> list[Group]:
        """Every group that ever was, in order of registration."""
        found = [Group(name, entry) for name, entry in (await self.store.directory.groups()).items()]
        return sorted(found, key=lambda group: group.id)

    async def claims(self, group: GroupName | None = None) -> list[Claim]:
        """Registrations, in order; of one group where one is named."""
        return [
            claim
            for claim in await self.store.directory.claims()
            if not claim.is_leaving and group in (None, claim.registration.group)
        ]

    async def states(self, claims: Sequence[Claim]) -> list[PublisherState]:
        """What the records of ``claims`` say, in their order."""
        states: list[PublisherState] = []
        size = max(1, _PIECE_COMMANDS // max((claim.shards for claim in claims), default=1))
        for start in range(0, len(claims), size):
            states += await self.store.records.publisher_states(claims[start : start + size])
        return states

    async def values(self, group: Group, block_keys: Sequence[int]) -> list[bytes | None]:
        """Values of blocks, in order."""
        values: list[bytes | None] = [None] * len(block_keys)
        for start in range(0, len(block_keys), _PIECE_BLOCKS):
            shards: dict[int, list[int]] = {}
            for i in range(start, min(start + _PIECE_BLOCKS, len(block_keys))):
                shards.setdefault(block_keys[i] % group.entry.shards, []).append(i)
            replies = await self.client.several(
                ("MGET", *(group.block_key(block_keys[i]) for i in indexes)) for indexes in shards.values()
            )
            for indexes, reply in zip(shards.values(), replies, strict=True):
                for i, value in zip(indexes, reply, strict=True):
                    values[i] = value
        return values

    async def table(self, group: Group) -> HolderTable | None:
        """Who is who among the holder ids of a group; None where nobody was registered yet."""
        key = keys.holders(group.id)
        return decode_table(await self.client.hgetall(key), self.store.parser, key)

    async def several(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        return await self.client.several(commands)


@asynccontextmanager
async def looking(settings: Settings) -> AsyncIterator[Look]:
    """A look at the Redis of the settings; ``SettingsError`` where that is one inside another process."""
    if settings.redis_url == "memory://":
        raise SettingsError(
            "WAYMARK_REDIS_URL is memory://, an emulated Redis inside 'waymark serve' that no other process can see; "
            "give the URL of a real one (--redis-url redis://host:6379/0), or ask that process: "
            "curl http://127.0.0.1:13333/workers"
        )
    client = RedisClient.open(
        settings.redis_url, timeout_seconds=settings.redis_timeout_seconds, credentials=Credentials.of(settings)
    )
    try:
        yield Look(client, hash_seed=settings.hash_seed)
    finally:
        await client.close()


def pick(groups: Sequence[Group], *, group_id: int | None, model: str | None, tenant: str | None) -> list[Group]:
    """The groups that are meant; all of them where nothing is named. ``NotFound`` where there are none."""
    picked = [
        group
        for group in groups
        if group_id in (None, group.id) and model in (None, group.name.model_name) and tenant in (None, group.name[0])
    ]
    if not picked:
        wanted = {"group": group_id, "model": model, "tenant": tenant}
        said = ", ".join(f"{name} {value!r}" for name, value in wanted.items() if value is not None)
        known = ", ".join(f"{group.id} ({shown(group.name)})" for group in groups[:20]) or "none"
        raise NotFound(f"no group with {said}; groups of this Redis: {known}" if said else "no group is registered yet")
    return picked


def shown(name: GroupName) -> str:
    """A group for people."""
    return f"{name.tenant_id}/{name.model_name}"
