"""The questions and reports of external routers, by block hashes: who has a prompt, and where one was sent.

SGLang's router asks by the hashes that its engines name in their events. Redis keeps these hashes for the groups that
the router asks about.

SGLang's model gateway (smg) and this index use the same hashes: XXH3-64 of a block's tokens, little-endian. Reports,
called placements, count for engines without events, and for blocks of text, because no engine has events of these.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from waymark.base.errors import InvalidValue
from waymark.base.metrics import Metrics
from waymark.decide.fleet import Fleet, FleetMember
from waymark.decide.requests import RequestSelector
from waymark.decide.served import PromptOptions, ServedModel
from waymark.domain import packing
from waymark.domain.hashing import DEFAULT_SEED, extend_local, namespace, text_hash
from waymark.domain.match import target_rows
from waymark.domain.names import GroupName
from waymark.store.chain import PackedKeys
from waymark.store.claims import Claim
from waymark.store.directory import FromClaims, GroupEntry
from waymark.store.hashes import FIND_HASHES
from waymark.store.reader import Reading
from waymark.store.store import Store


class Keyspace(NamedTuple):
    """Blocks that can match one another."""

    model_name: str
    is_text: bool
    """Blocks of ``block_size`` bytes of text; else of as many tokens."""
    block_size: int


class HolderMatch(NamedTuple):
    """The number of blocks that a holder has, from the first on. ``holder`` is an address, or a name in a report."""

    holder: str
    blocks: int
    tells_events: bool
    instance_id: str = ""


class AskedGroup(NamedTuple):
    """A group whose engines' routers ask by engine hashes."""

    group: GroupName
    group_id: int
    block_size: int


PLACEMENT_SECONDS = 180
"""How long a reported prompt counts as cached. An engine without events does not say when it drops a block, and a
prompt that is sent again is reported again."""
PLACEMENTS_MAX = 1_000_000
"""The most blocks of a model that are reported within this time: 16 million tokens in blocks of 16."""

#: How many hashes of a prompt are looked up first: most new prompts have no match.
_FIRST_HASHES = 32
#: How long the groups are used before they are read again, and how often Redis is told that they are asked about.
_GROUPS_SECONDS, _ASK_SECONDS = 1.0, 60.0


PlacementResult = Literal["kept", "has_events", "unknown_model"]


class ReportedPrompts:
    """The index by addresses, with placements, of one tenant."""

    def __init__(
        self, store: Store, requests: RequestSelector, options: PromptOptions, metrics: Metrics, tenant_id: str
    ) -> None:
        self._store = store
        self._requests = requests
        self._metrics = metrics
        self._tenant_id = tenant_id
        self._deadline_seconds = options.deadline_seconds
        self.has_same_hashes = options.hash_seed == DEFAULT_SEED
        """Whether this index hashes as smg does."""
        self._asked_now = FromClaims(store.polled_claims, self._asked_of)
        self._asked: Sequence[AskedGroup] = ()
        self._asked_until = self._told_until = float("-inf")
        self._told: Sequence[AskedGroup] = ()
        """What Redis was told last. A Redis that came back empty has other registrations, even if they look equal."""

    async def match(self, keyspace: Keyspace, local_hashes: Sequence[int]) -> list[HolderMatch]:
        """Return the holders of the beginning of a prompt, the longest match first. Raise StoreUnavailable if Redis is
        unavailable.
        """
        served = await self._served(keyspace)
        if served is None or not local_hashes or not keyspace.block_size:
            return []
        hashes = extend_local(None, array("Q", local_hashes))
        if keyspace.is_text:
            matches = await self._placed(served, keyspace, hashes)
        else:
            matches, placed = await asyncio.gather(
                self._indexed(served, keyspace, hashes), self._placed(served, keyspace, hashes)
            )
            precise = _with_events(self._requests.selector.snapshots.fleet_at_hand(served.group))
            matches |= {holder: match for holder, match in placed.items() if holder not in precise}
        return _sorted(matches)

    async def match_engine_hashes(self, engine_hashes: Sequence[int], seconds: float) -> tuple[list[HolderMatch], int]:
        """Return who has the beginning of a prompt, by the engines' own hashes; and how many were looked up.

        A prompt that takes longer is looked up in part, so a match may be longer than reported. The hashes of a group
        are kept from its first such query on. Raises StoreUnavailable.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        groups = await self._asked_groups()
        answers = await asyncio.gather(*(self._by_engine_hashes(group, engine_hashes, deadline) for group in groups))
        best: dict[str, HolderMatch] = {}
        for matches, _ in answers:
            for match in matches.values():
                if match.holder not in best or best[match.holder].blocks < match.blocks:
                    best[match.holder] = match
        return _sorted(best), max((count for _, count in answers), default=0)

    async def _asked_groups(self) -> Sequence[AskedGroup]:
        """Return the groups whose engines have such a router; their streams learn that they are asked about."""
        now = asyncio.get_running_loop().time()
        if now >= self._asked_until:
            self._asked = await self._asked_now()
            if now >= self._told_until or self._asked is not self._told:
                await self._store.hashes.asked.add({group.group_id for group in self._asked})
                self._told, self._told_until = self._asked, now + _ASK_SECONDS
            self._asked_until = now + _GROUPS_SECONDS
        return self._asked

    def _asked_of(self, claims: Sequence[Claim]) -> Sequence[AskedGroup]:
        asked = {
            AskedGroup(registration.group, claim.group_id, registration.block_size)
            for claim in claims
            if (registration := claim.registration).tenant_id == self._tenant_id
            and registration.scope == "instance"
            and registration.kind.traits.is_asked_by_hash
            and registration.target.address is not None
        }
        return tuple(asked)

    async def _by_engine_hashes(
        self, group: AskedGroup, engine_hashes: Sequence[int], deadline: float
    ) -> tuple[dict[str, HolderMatch], int]:
        """Return the holders of the blocks by address, and how many hashes were looked up, in half of the time."""
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        block_keys: list[int] = []
        count, portion = 0, _FIRST_HASHES
        while count < len(engine_hashes) and (not count or loop.time() < (began + deadline) / 2):
            wanted = engine_hashes[count : count + portion]
            spots = await self._store.hashes.find(group.group_id, wanted)
            count, portion = count + len(wanted), FIND_HASHES
            block_keys += [spots[engine_hash].key for engine_hash in takewhile(spots.__contains__, wanted)]
            if len(block_keys) < count:
                break
        if not block_keys:
            return {}, count
        reading = await self._store.reader.read(
            group.group,
            group.block_size,
            PackedKeys(packing.pack(block_keys)),
            deadline_seconds=max(0.001, deadline - loop.time()),
        )
        return self._holders(group.group, reading), count

    async def place(
        self, keyspace: Keyspace, holder: str, parent: int | None, local_hashes: Sequence[int]
    ) -> PlacementResult:
        """Note that a prompt was sent to a holder. ``parent`` is the seq_hash of the block before the first one.

        Raises StoreUnavailable.
        """
        served = await self._served(keyspace)
        entry = None if served is None else await self._entry(served)
        if served is None or entry is None:
            return "unknown_model"
        if not keyspace.is_text:
            snapshots = self._requests.selector.snapshots
            fleet = snapshots.fleet_at_hand(served.group) or await snapshots.newest_fleet(served.group)
            if holder in _with_events(fleet):
                return "has_events"
        block_keys = _placement_keys(served, keyspace, extend_local(parent, array("Q", local_hashes)))
        dropped = await self._store.placements.place(
            entry.group_id, block_keys, holder, milliseconds=1000 * PLACEMENT_SECONDS, blocks_max=PLACEMENTS_MAX
        )
        self._metrics.placements_dropped.inc(dropped)
        return "kept"

    async def drop(self, keyspace: Keyspace, holder: str) -> None:
        """Note that a holder is gone: placements from before do not count any more. Raises StoreUnavailable."""
        served = await self._served(keyspace)
        entry = None if served is None else await self._entry(served)
        if entry is not None:
            await self._store.placements.drop(entry.group_id, holder, milliseconds=1000 * PLACEMENT_SECONDS)

    async def holders(self) -> list[tuple[Keyspace, HolderMatch]]:
        """Return every registered address with its model, without its blocks. Raise StoreUnavailable if Redis is
        unavailable.
        """
        addresses: dict[tuple[Keyspace, str], bool] = {}
        for registration in await self._store.polled_claims.registrations():
            if (
                registration.tenant_id == self._tenant_id
                and registration.scope == "instance"
                and registration.target.address is not None
            ):
                key = Keyspace(registration.model_name, False, registration.block_size), registration.target.address
                addresses[key] = addresses.get(key, False) or registration.endpoint is not None
        return [(keyspace, HolderMatch(holder, 0, tells)) for (keyspace, holder), tells in addresses.items()]

    async def _served(self, keyspace: Keyspace) -> ServedModel | None:
        named = GroupName(self._tenant_id, keyspace.model_name)
        try:
            return await self._requests.further_name(named) or ServedModel(named)
        except InvalidValue:
            return None  # a name of several models is ambiguous

    async def _entry(self, served: ServedModel) -> GroupEntry | None:
        group = served.group
        return self._store.reader.entry_at_hand(group) or await self._store.directory.group(group)

    async def _indexed(self, served: ServedModel, keyspace: Keyspace, hashes: Sequence[int]) -> dict[str, HolderMatch]:
        packed = packing.pack(hashes, namespace(served.adapter, []))
        reading = await self._store.reader.read(
            served.group, keyspace.block_size, PackedKeys(packed), deadline_seconds=self._deadline_seconds
        )
        return self._holders(served.group, reading)

    def _holders(self, group: GroupName, reading: Reading | None) -> dict[str, HolderMatch]:
        """Return what was found, by the addresses of the targets."""
        fleet = self._requests.selector.snapshots.fleet_at_hand(group)
        if reading is None or fleet is None:
            return {}
        rows = target_rows(reading.walk)
        matches: dict[str, HolderMatch] = {}
        for member in fleet.members:
            address, row = member.target.address, rows.get(member.name)
            if address is not None and row is not None and row.blocks:
                earlier = matches.get(address)
                if earlier is None or earlier.blocks < row.blocks:  # ranks of one address are one holder
                    matches[address] = HolderMatch(address, row.blocks, member.tells_events, member.name[0])
        return matches

    async def _placed(self, served: ServedModel, keyspace: Keyspace, hashes: Sequence[int]) -> dict[str, HolderMatch]:
        entry = await self._entry(served)
        if entry is None:
            return {}
        deadline = asyncio.get_running_loop().time() + self._deadline_seconds
        block_keys = _placement_keys(served, keyspace, hashes)
        matches = await self._store.placements.match(entry.group_id, block_keys, until=deadline)
        return {holder: HolderMatch(holder, blocks, tells_events=False) for holder, blocks in matches.items()}


def _with_events(fleet: Fleet | None) -> frozenset[str]:
    """Return the addresses of engines with events about their blocks."""
    members: Sequence[FleetMember] = () if fleet is None else fleet.members
    return frozenset(
        member.target.address for member in members if member.tells_events and member.target.address is not None
    )


def _placement_keys(served: ServedModel, keyspace: Keyspace, hashes: Sequence[int]) -> list[int]:
    """Return the keys of the blocks' placements: blocks of text differ from those of tokens, and other sizes differ
    too.
    """
    number = namespace(served.adapter, []) ^ text_hash(f"{keyspace.is_text} {keyspace.block_size}")
    return [engine_hash ^ number for engine_hash in hashes]


def _sorted(matches: dict[str, HolderMatch]) -> list[HolderMatch]:
    return sorted(matches.values(), key=lambda match: (-match.blocks, match.holder))
