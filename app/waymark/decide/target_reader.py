"""Reads the facts for a decision: the targets of its group, the match of each, their loads and other readings.

The blocks are read as a query reads them. The other values are from a moment ago, or are requested at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide.asked_pools import AskedPools
from waymark.decide.books import believed
from waymark.decide.decision import HashedPrompt, PackedKeys, PolicyChoice, RankingRequest
from waymark.decide.fleet import Fleet, OpaquePrefix, PromptState
from waymark.decide.fleets import Fleets
from waymark.decide.loads import Loads
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.ring import POINTS
from waymark.decide.policies.target import RoutingRequest
from waymark.domain.first_tokens import FirstTokens
from waymark.domain.gauges import Gauges
from waymark.domain.keys import KEY_BYTES, key_at
from waymark.domain.match import Walk, pool_bitmap, target_rows
from waymark.domain.names import GroupName
from waymark.domain.prefixes import prefix_key
from waymark.domain.table import HolderTable, only_block_size
from waymark.store.background import StartTask
from waymark.store.directory import GroupEntry
from waymark.store.reservations import Load
from waymark.store.speculative import depths
from waymark.store.store import Store

#: How often a lookup starts over because its group's table has changed meanwhile.
_TRIES_MAX = 3
_TOKENS_MAX = 2**53
#: Tokens by whose last block ``sticky`` finds its place, without a prefix key.
_STICKY_TOKENS = 512


class TargetLookup(NamedTuple):
    """The result of a lookup for a group and a prompt."""

    entry: GroupEntry
    request: RoutingRequest
    fleet: Fleet
    seen: PromptState
    keys: bytes
    walk: Walk | None = None
    is_partial: bool = False
    told: PromptState | None = None
    """What the index says, where ``seen`` believes less of it; None: the same."""


class _SideReads(NamedTuple):
    """The values of targets to read together with the blocks."""

    loads: Mapping[int, Load]
    expected: Mapping[int, int]
    gauges: Mapping[int, Gauges]
    prefixes: Mapping[tuple[str, int], OpaquePrefix] = MappingProxyType({})
    first_tokens: Mapping[int, FirstTokens] = MappingProxyType({})


class TargetReader:
    def __init__(
        self,
        store: Store,
        options: SelectionOptions,
        metrics: Metrics,
        loads: Loads,
        fleets: Fleets,
        remember: Callable[[GroupName, GroupEntry, Fleet], None],
        pools: AskedPools | None = None,
    ) -> None:
        """``remember`` is called with each group that was found. ``pools`` asks pools without events; None: nobody."""
        self._pools = pools
        self._store = store
        self._options = options
        self._loads = loads
        self._fleets = fleets
        self._remember = remember
        self._gauges = store.incarnation.cache(Readings(store.gauges.read, store.begin))
        self._first_tokens = store.incarnation.cache(Readings(store.first_tokens.read, store.begin))
        self._observe = metrics.decision_duration_seconds.labels(part="walk").observe

    async def read(self, ranking: RankingRequest, *, expects: bool | None) -> TargetLookup | None:
        """Return the group's targets with their values, or None if the group has no registration."""
        began = perf_counter()
        table = self._store.reader.table_at_hand(ranking.group)
        if table is None and ranking.block_size is None:
            table = await self._store.reader.table(ranking.group, deadline_seconds=self._options.deadline_seconds)
        for _ in range(_TRIES_MAX):
            fleet = None if table is None else self._fleets.of(ranking.group, table)
            block_size = ranking.block_size or _block_size(fleet)
            prompt = ranking.prompt(block_size)
            lookup, table = await self._read_with(ranking, fleet, prompt, block_size, expects=expects)
            if lookup is not None:
                self._observe(perf_counter() - began)
                return lookup
            if table is None:
                return None
        raise StoreUnavailable("the registrations of this model change all the time; try again in a moment")

    async def _read_with(
        self,
        ranking: RankingRequest,
        fleet: Fleet | None,
        prompt: HashedPrompt,
        block_size: int,
        *,
        expects: bool | None,
    ) -> tuple[TargetLookup | None, HolderTable | None]:
        """Return the results, and the table of that moment; no lookup if another block size is needed."""
        reader = self._store.reader
        entry = reader.entry_at_hand(ranking.group)
        aside = None
        at_hand = None
        asking = self._ask_pools(ranking, fleet, prompt, block_size)
        if entry is not None and fleet is not None:
            at_hand = self._aside_at_hand(ranking, entry, fleet, prompt, expects=expects)
            if at_hand is None:
                aside = asyncio.ensure_future(self._aside(ranking, entry, fleet, prompt, expects=expects))
        try:
            reading = await reader.read(
                ranking.group, block_size, PackedKeys(prompt.keys), deadline_seconds=self._options.deadline_seconds
            )
            table, now = reader.table_at_hand(ranking.group), reader.entry_at_hand(ranking.group)
            if reading is None or table is None or now is None:
                return None, None
            if fleet is None or fleet.table is not table:
                fleet = self._fleets.of(ranking.group, table)
                if ranking.block_size is None and _block_size(fleet) != block_size:
                    return None, table
            self._remember(ranking.group, now, fleet)
            asking = asking or self._ask_pools(ranking, fleet, prompt, block_size)
            if at_hand is not None and now == entry:
                beside = at_hand
            elif aside is not None and now == entry:
                beside = await aside
            else:
                beside = await self._aside(ranking, now, fleet, prompt, expects=expects)
            asked = 0 if asking is None else await asking
        finally:
            if asking is not None:
                asking.cancel()
            if aside is not None and not aside.cancel() and not aside.cancelled():
                aside.exception()  # retrieved: the walk's own error is the one that counts
        walk = reading.walk if ranking.has_index else None
        if walk is not None and walk.view.windows:
            asked = 0  # nobody knows whether the pool has the windows of a hybrid model
        seen = PromptState({} if walk is None else target_rows(walk, asked), *beside)
        if walk is None and seen.is_cold:
            # As a prompt whose tokens nobody knows: equal beginnings go to one target.
            prompt = prompt._replace(has_tokens=False)
        if not prompt.has_tokens and ranking.prefix_key is not None and fleet.has_sources:
            # Sources know the holders of a prompt with this key. It is at least as long as the longest known match.
            longest = max((prefix.tokens for prefix in seen.prefixes.values()), default=0)
            prompt = prompt._replace(tokens=max(prompt.tokens, longest), has_tokens=True)
        request = request_of(ranking, prompt, block_size, 0 if walk is None else pool_bitmap(walk, asked), fleet)
        drifts, told = self._loads.drifts(now.group_id), None
        if drifts:
            told, seen = seen, believed(seen, drifts, fleet.by_publisher)
        return TargetLookup(now, request, fleet, seen, prompt.keys, walk, reading.is_partial, told), table

    def _ask_pools(
        self, ranking: RankingRequest, fleet: Fleet | None, prompt: HashedPrompt, block_size: int
    ) -> asyncio.Future[int] | None:
        """Which blocks pools without events have; None if there is nobody to ask, or nothing to ask for."""
        if self._pools is None or fleet is None or not fleet.queried or not prompt.ids or not ranking.has_index:
            return None
        return asyncio.ensure_future(self._pools.blocks(fleet.queried, prompt.ids, block_size))

    def _aside_at_hand(
        self, ranking: RankingRequest, entry: GroupEntry, fleet: Fleet, prompt: HashedPrompt, *, expects: bool | None
    ) -> _SideReads | None:
        """Return the values beside the blocks, if only the loads are needed and are known."""
        if ranking.given is not None or self._needs_gauges(ranking.policy) or self._needs_first_tokens(ranking, fleet):
            return None
        if (ranking.prefix_key is not None and fleet.has_sources) or self._expects(ranking, fleet, expects):
            return None
        loads = self._loads.at_hand(entry.group_id)
        return None if loads is None else _SideReads(loads, {}, {})

    def _expects(self, ranking: RankingRequest, fleet: Fleet, expects: bool | None) -> bool:
        """Return whether speculative entries are read."""
        return fleet.has_silent or self._options.speculation(ranking.policy, expects).is_on

    async def _aside(
        self, ranking: RankingRequest, entry: GroupEntry, fleet: Fleet, prompt: HashedPrompt, *, expects: bool | None
    ) -> _SideReads:
        """Read the values beside the blocks: loads, gauges and speculative entries."""
        given = None if ranking.given is None else ranking.given.values()
        loads: Mapping[int, Load] = {}
        gauges: Mapping[int, Gauges] = {}
        if given is None or not all(each.is_whole for each in given):
            loads = await self._loads.of(entry.group_id)
        if self._needs_gauges(ranking.policy) and (given is None or any(each.gauges is None for each in given)):
            gauges = await self._gauges.of(entry.group_id, fleet.scraped)
        first_tokens: Mapping[int, FirstTokens] = {}
        if self._needs_first_tokens(ranking, fleet):
            first_tokens = await self._first_tokens.of(entry.group_id, list(fleet.by_publisher))
        until = asyncio.get_running_loop().time() + self._options.deadline_seconds
        prefixes = await self._prefixes(ranking, entry, fleet, prompt, until)
        at = depths(len(prompt.keys) // KEY_BYTES) if self._expects(ranking, fleet, expects) else []
        if not at:
            return _SideReads(loads, {}, gauges, prefixes, first_tokens)
        numbers = [key_at(prompt.keys, depth) for depth in at]
        try:
            publishers = await self._store.speculative.read(
                entry.group_id, numbers, until=until, has_stages=fleet.has_stages
            )
        except TimeoutError:
            return _SideReads(loads, {}, gauges, prefixes, first_tokens)
        expected: dict[int, int] = {}
        for publisher, depth in zip(publishers, (*at, *at), strict=False):
            if publisher is not None:
                expected[publisher] = max(depth, expected.get(publisher, 0))
        return _SideReads(loads, expected, gauges, prefixes, first_tokens)

    async def _prefixes(
        self, ranking: RankingRequest, entry: GroupEntry, fleet: Fleet, prompt: HashedPrompt, until: float
    ) -> Mapping[tuple[str, int], OpaquePrefix]:
        """Return the prompt's opaque prefixes; empty without sources, or if the time is over."""
        if ranking.prefix_key is None or not fleet.has_sources:
            return {}
        try:
            found = await self._store.prefixes.read(entry.group_id, prefix_key(ranking.prefix_key.hex()), until=until)
            if max(found, default=0) > fleet.newest:
                # The cached table is older than a holder that has begun since.
                table = await self._store.reader.table(ranking.group, deadline_seconds=self._options.deadline_seconds)
                fleet = fleet if table is None else self._fleets.of(ranking.group, table)
        except TimeoutError:
            return {}
        return fleet.prefixes(found, prompt.tokens if prompt.has_tokens else _TOKENS_MAX)

    def _needs_gauges(self, policy: PolicyChoice) -> bool:
        if policy.preset is not None:
            return policy.preset.needs_gauges
        return self._options.picker is not None and self._options.picker.needs_gauges

    def _needs_first_tokens(self, ranking: RankingRequest, fleet: Fleet) -> bool:
        if fleet.kv_sources:
            return True  # they tell what computing a prompt costs beside copying it
        is_by_file = ranking.policy.preset is None and self._options.picker is not None
        return is_by_file and self._options.picker is not None and self._options.picker.needs_first_tokens


def request_of(
    ranking: RankingRequest, prompt: HashedPrompt, block_size: int, pool: int, fleet: Fleet
) -> RoutingRequest:
    """Return the request as policies see it; ``pool`` are the blocks that shared pools have."""
    prefix_key = ranking.prefix_key
    blocks = min(_STICKY_TOKENS // block_size, len(prompt.keys) // KEY_BYTES)
    if prefix_key is None and blocks:
        prefix_key = prompt.keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
    return RoutingRequest(
        prompt.tokens,
        block_size,
        pool,
        ranking.lora_name,
        ranking.session,
        prefix_key,
        ranking.is_multimodal,
        prompt.has_tokens,
        None if prompt.has_tokens or prefix_key is None else fleet.ring(POINTS),
    )


def _block_size(fleet: Fleet | None) -> int:
    """Return the one block size of a group, or 1 without an engine. Raise InvalidValue if there are several."""
    return (None if fleet is None else only_block_size(fleet.block_sizes)) or 1


# Further values of each target, from a moment ago: read for the groups whose decisions need them.


#: Older readings are read again in the background; beyond the second bound the decision waits for it.
_FRESH_SECONDS = 0.25
_OLD_SECONDS = 1.0
_GROUPS_MAX = 1024

T = TypeVar("T")
ReadGroup = Callable[[int, Sequence[int]], Awaitable[Mapping[int, T]]]
"""Reads the values of a group's publishers from Redis."""


@dataclass(slots=True)
class _GroupReadings(Generic[T]):
    found: Mapping[int, T] = field(default_factory=dict)
    read_at: float = float("-inf")
    reading: asyncio.Task[None] | None = None


class Readings(Generic[T]):
    """The latest readings by group and publisher. A reading that Redis does not have any more does not count."""

    def __init__(self, read: ReadGroup[T], begin: StartTask) -> None:
        self._read_from_redis = read
        self._begin = begin
        self._groups: dict[int, _GroupReadings[T]] = {}

    async def of(self, group_id: int, publishers: Sequence[int]) -> Mapping[int, T]:
        """Return the readings of these publishers; empty if Redis has none."""
        now = asyncio.get_running_loop().time()
        group = self._groups.get(group_id)
        if group is None:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.pop(next(iter(self._groups)))
            group = self._groups[group_id] = _GroupReadings()
        if now - group.read_at > _FRESH_SECONDS and (group.reading is None or group.reading.done()):
            group.reading = self._begin(self._read(group, group_id, publishers))
        if now - group.read_at > _OLD_SECONDS and group.reading is not None:
            await asyncio.shield(group.reading)
        return group.found

    def clear(self) -> None:
        """Forget all ids, because Redis came back empty and uses them for other objects."""
        self._groups.clear()

    async def _read(self, group: _GroupReadings[T], group_id: int, publishers: Sequence[int]) -> None:
        now = asyncio.get_running_loop().time()
        try:
            group.found = await self._read_from_redis(group_id, publishers)
        except StoreUnavailable:
            group.found = {}  # the decision itself reports that Redis is unavailable
        group.read_at = now
