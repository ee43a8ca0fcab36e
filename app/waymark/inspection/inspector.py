"""Reads Redis for a person who asks: for a short time, in pieces that do not delay queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from waymark.base.errors import NotFound
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.domain.row_runs import pieces_of
from waymark.domain.rows import HolderEntry, Place, find_entry
from waymark.domain.table import HolderTable
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.holder_tables import decode_table
from waymark.store.places import holders_of, key_of, values_of
from waymark.store.publisher_states import PublisherState
from waymark.store.store import Store

#: The approximate number of hash commands in one pipeline: Redis answers others between two pipelines.
_PIECE_COMMANDS = 512


@record(frozen=True, slots=True)
class InspectedGroup:
    """A group with its ids."""

    name: GroupName
    entry: GroupEntry

    @property
    def id(self) -> int:
        return self.entry.group_id

    def key_of(self, place: Place) -> str:
        """Return the name of the key in Redis."""
        return key_of(self.entry, place).decode()


class Inspector:
    """The reads that the console is made of."""

    def __init__(self, store: Store) -> None:
        self.client = store.client
        self.store = store

    async def groups(self) -> list[InspectedGroup]:
        """Return every group that ever was, in order of registration."""
        entries = [InspectedGroup(name, entry) for name, entry in (await self.store.directory.groups()).items()]
        return sorted(entries, key=lambda group: group.id)

    async def claims(self, group: GroupName | None = None) -> list[Claim]:
        """Return registrations in order, of all groups or of one."""
        return [
            claim
            for claim in await self.store.directory.claims()
            if not claim.is_leaving and group in (None, claim.registration.group)
        ]

    async def states(self, claims: Sequence[Claim]) -> list[PublisherState]:
        """Return the states in the records of ``claims``, in their order."""
        states: list[PublisherState] = []
        size = max(1, _PIECE_COMMANDS // max((claim.shards for claim in claims), default=1))
        for start in range(0, len(claims), size):
            states += await self.store.publisher_states.of(claims[start : start + size])
        return states

    async def holders(self, group: InspectedGroup, block_keys: Sequence[int], *, has_singles: bool) -> list[set[int]]:
        """Return the holder ids of each block of a chain, from its root on."""
        pieces = await holders_of(self.client, group.entry, pieces_of(pack(block_keys)), has_singles=has_singles)
        return [ids for piece in pieces for ids in piece]

    async def values(self, group: InspectedGroup, places: Sequence[Place]) -> list[bytes | None]:
        """Return the values at ``places``, in order."""
        return await values_of(self.client, group.entry, places)

    async def entries(self, group: InspectedGroup, place: Place, holders: Sequence[int]) -> list[HolderEntry | None]:
        """Return the entry of each holder for the row at ``place``; None if it is missing or cannot be read."""
        shard = place.shard(group.entry.shards)
        values = await self.client.several(
            ("HGET", keys.engine(group.id, shard, holder), place.field) for holder in holders
        )
        return [find_entry(value) for value in values]

    async def table(self, group: InspectedGroup) -> HolderTable | None:
        """Return the holder table of a group, or None if the group never had a registration."""
        key = keys.holders(group.id)
        return decode_table(await self.client.hgetall(key), self.store.parser, key)

    async def several(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        return await self.client.several(commands)


def places_that_begin_with(key: int) -> list[Place]:
    """Return the possible places of a block whose head is unknown: the row that begins with it, and its single."""
    return [Place(key), Place(key, is_single=True)]


def pick(
    groups: Sequence[InspectedGroup], *, group_id: int | None, model: str | None, tenant: str | None
) -> list[InspectedGroup]:
    """Return the groups with these names; without a name, all groups. Raise ``NotFound`` if there is no such group."""
    picked = [
        group
        for group in groups
        if group_id in (None, group.id) and model in (None, group.name.model_name) and tenant in (None, group.name[0])
    ]
    if not picked:
        wanted = {"group": group_id, "model": model, "tenant": tenant}
        names = ", ".join(f"{name} {shown(value)}" for name, value in wanted.items() if value is not None)
        choices = ", ".join(f"{group.id} ({group.name.text})" for group in groups[:20]) or "none"
        raise NotFound(
            f"no group with {names}; groups of this Redis: {choices}" if names else "no group is registered yet"
        )
    return picked
