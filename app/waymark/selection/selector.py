"""The use case: a prompt's blocks, the targets' loads, a policy, a reservation.

A decision looks as a query does, ranks all targets by loads that are a moment old, and lets Redis take the best of the
first few by their loads of that instant. So it costs one round trip more than a query, and any number of replicas
decide as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

from waymark.domain.block_size import only_block_size
from waymark.domain.first_tokens import FirstTokens
from waymark.domain.gauges import Gauges
from waymark.domain.keys import KEY_BYTES
from waymark.domain.match import pool_bitmap, target_rows
from waymark.domain.names import GroupName
from waymark.domain.prefixes import prefix_key
from waymark.domain.table import HolderTable
from waymark.errors import NoTarget, Saturated, StoreUnavailable
from waymark.metrics import Metrics
from waymark.routing.policy import Decision
from waymark.routing.presets import PRESETS
from waymark.routing.target import Candidate, Request
from waymark.selection.asked import Asked, Chosen, PackedKeys, Prompt, Ranked, Selected, Taking
from waymark.selection.degraded import Degraded
from waymark.selection.fleet import Fleet, Member, OpaquePrefix, Seen
from waymark.selection.loads import Loads
from waymark.selection.offers import SumOffers
from waymark.selection.options import SelectionOptions
from waymark.selection.prefill_progress import PrefillProgress
from waymark.selection.ranking import Stages, rank, stages
from waymark.selection.readings import Readings
from waymark.selection.taking import Looked, Taker, headers_of, key_at
from waymark.shown import shown
from waymark.store.directory import GroupEntry
from waymark.store.reservations import CANDIDATES_MAX, Load, Offer, Part, Reservation, Terms
from waymark.store.speculative import depths
from waymark.store.store import Store

#: How often a decision starts over because its group's table has changed meanwhile.
_LOOKUPS_MAX = 3
#: After Redis did not answer, decisions are made without it for so long before it is asked again.
_AWAY_SECONDS = 1.0
#: Fleets that are kept, by group.
_FLEETS_MAX = 1024
_TOKENS_MAX = 2**53
#: Tokens by whose last block ``sticky`` finds its place, where no prefix key is given.
_STICKY_TOKENS = 512


class _Lookup(NamedTuple):
    """What was found for a group and a prompt."""

    looked: Looked
    fleet: Fleet
    request: Request
    seen: Seen
    is_partial: bool


class _Aside(NamedTuple):
    """What is asked beside the blocks."""

    loads: Mapping[int, Load]
    expected: Mapping[int, int]
    gauges: Mapping[int, Gauges]
    prefixes: Mapping[tuple[str, int], OpaquePrefix] = MappingProxyType({})
    first_tokens: Mapping[int, FirstTokens] = MappingProxyType({})


class Selector:
    """Decisions of one replica."""

    def __init__(self, store: Store, options: SelectionOptions, metrics: Metrics, random: Random | None = None) -> None:
        self._store = store
        self._options = options
        self._metrics = metrics
        self._random = random or Random()
        self._fleets: dict[GroupName, Fleet] = store.incarnation.cache({})
        self._loads = store.incarnation.cache(Loads(store.reservations, store.begin, options.loads_seconds, metrics))
        self._gauges = store.incarnation.cache(Readings(store.gauges.read, store.begin))
        self._first_tokens = store.incarnation.cache(Readings(store.first_tokens.read, store.begin))
        self._progress = store.incarnation.cache(
            PrefillProgress(store.reader, store.reservations, store.begin, metrics)
        )
        self._taker = Taker(store.reservations, self._loads, self._progress, options, metrics)
        self._degraded = Degraded()
        self._away_until = float("-inf")
        self._default_policy = Chosen(None) if options.picker is not None else Chosen.of(options.policy)
        self._observe_walk = metrics.decision_duration_seconds.labels(part="walk").observe
        self._observe_policy = metrics.decision_duration_seconds.labels(part="policy").observe
        metrics.prefix_routing_prefix_cardinality.set_function(lambda: store.counts.prefixes_seen)
        metrics.prefix_routing_backend_distribution.set_function(lambda: metrics.backends(self._under_way()))

    @property
    def default_policy(self) -> Chosen:
        """What decides where a request names no policy."""
        return self._default_policy

    # ---- without a reservation ---------------------------------------------------------------------

    async def score(self, asked: Asked) -> Ranked | None:
        """All candidates, best first; None where nothing is registered for the group.

        Raises StoreUnavailable.
        """
        lookup = await self._lookup(asked, expects=None)
        if lookup is None:
            return None
        # A caller that names candidates knows what they serve.
        members = None if asked.given is not None else lookup.fleet.serving(asked.served_as)
        candidates = lookup.fleet.candidates(lookup.seen, lookup.request.block_size, asked.given, members)
        found = rank(asked.policy, self._options.picker, lookup.request, candidates, lookup.fleet, self._random)
        decision = found.decision if candidates else Decision.KV_AWARE
        self._metrics.decisions.labels(policy=asked.policy.name, decision=decision).inc()
        return Ranked(
            found.scored,
            asked.policy,
            decision,
            lookup.request.tokens,
            lookup.request.block_size,
            lookup.request.prefix_key,
            lookup.is_partial,
            lookup.looked.walk,
            frozenset() if asked.given is None else {(each.instance_id, each.dp_rank) for each in candidates},
        )

    # ---- with one ----------------------------------------------------------------------------------

    async def select(self, asked: Asked, taking: Taking) -> Selected:
        """Take a target. Raises NoTarget, Saturated, StoreUnavailable; then nothing is taken."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            raise StoreUnavailable("Redis did not answer a moment ago; try again in a moment")
        try:
            async with asyncio.timeout(2 * self._options.deadline_seconds):
                selected = await self._select(asked, taking)
        except (StoreUnavailable, TimeoutError) as exc:
            self._away_until = loop.time() + _AWAY_SECONDS
            if isinstance(exc, TimeoutError):
                seconds = 2 * self._options.deadline_seconds
                raise StoreUnavailable(f"Redis did not answer within {seconds:g} s; try again in a moment") from None
            raise
        tier = "prefix_routing" if selected.policy.name == "sticky" else "kv_index"
        self._store.counts.add(f"{tier}.{selected.decision}", asked.prefix_key)
        if tier == "kv_index":
            self._metrics.kv_index_routing_decisions.labels(decision=selected.decision).inc()
        else:
            self._metrics.prefix_routing_requests.labels(strategy=selected.decision).inc()
        return selected

    async def _select(self, asked: Asked, taking: Taking) -> Selected:
        for _ in range(_LOOKUPS_MAX):
            lookup = await self._lookup(asked, expects=taking.expects)
            if lookup is None:
                break
            began = perf_counter()
            of = self._sums(asked, taking, lookup) or self._stages(asked, taking, lookup)
            self._observe_policy(perf_counter() - began)
            if of is None:
                raise NoTarget(_none_allowed(asked, taking, lookup.fleet))
            taken = await self._taker.take(of, lookup.looked, asked, taking)
            if taken is not None:
                return taken
            # Every target that was offered is gone: the cached table is older than that.
            await self._store.reader.table(asked.group, deadline_seconds=self._options.deadline_seconds)
        raise NoTarget(
            f"no target is registered for model {shown(asked.group.model_name)} of tenant "
            f"{shown(asked.group.tenant_id)}; register one with POST /register"
        )

    def _sums(self, asked: Asked, taking: Taking, lookup: _Lookup) -> SumOffers | None:
        """The targets by sums alone, where the policy is one and nothing else decides; None: by ``_stages``."""
        preset, seen = asked.policy.preset, lookup.seen
        if preset is None or preset.sum_of is None or asked.session is not None or taking.profile == "disagg":
            return None
        if seen.prefixes or seen.gauges or seen.first_tokens:
            return None
        members = self._members(asked, taking, lookup)
        if not members:
            return None
        blocks = len(lookup.looked.keys) // KEY_BYTES
        return SumOffers(members, seen, asked.policy, lookup.request, blocks, self._random)

    def _stages(self, asked: Asked, taking: Taking, lookup: _Lookup) -> Stages | None:
        members = self._members(asked, taking, lookup)
        candidates = lookup.fleet.candidates(lookup.seen, lookup.request.block_size, members=members)
        return stages(
            asked.policy, self._options.picker, taking.profile, lookup.request, candidates, lookup.fleet, self._random
        )

    def _members(self, asked: Asked, taking: Taking, lookup: _Lookup) -> Sequence[Member]:
        """The targets that a decision has to rank."""
        policy = asked.policy
        members = lookup.fleet.serving(asked.served_as)
        if not taking.allows_all:
            members = [each for each in members if taking.allows(each.name[0], each.target.address)]
        if taking.needs_address and not lookup.fleet.have_addresses:
            members = [each for each in members if each.target.address is not None]
        if taking.profile == "disagg" or (policy.preset is None and taking.profile is None):
            return members
        if policy.preset is None or policy.preset.linear is None or policy.values is None:
            return [each for each in members if each.is_whole]
        most = max(CANDIDATES_MAX, taking.count)
        return lookup.fleet.shortlist(
            lookup.seen,
            policy.preset.linear(policy.values),
            most,
            self._random,
            allowed=None if members is lookup.fleet.members else members,
            session=asked.session,
        )

    def select_without_redis(self, asked: Asked, taking: Taking) -> Selected:
        """Take a target by what is known; StoreUnavailable where nothing of the group is."""
        known = self._degraded.groups.get(asked.group)
        if known is None:
            raise StoreUnavailable(
                "Redis is unavailable, and this process knows no target of this model yet; try again in a moment"
            )
        sizes = known.fleet.block_sizes
        prompt = asked.prompt(asked.block_size or max(sizes, default=1))
        request = self._request(asked, prompt, asked.block_size or max(sizes, default=1), 0)
        lookup = _Lookup(
            Looked(known.entry, request, known.fleet, self._degraded.seen(asked.group), prompt.keys),
            known.fleet,
            request,
            self._degraded.seen(asked.group),
            False,
        )
        sticky = PRESETS["sticky"]
        degraded = asked._replace(policy=Chosen.of(sticky))
        of = self._stages(degraded, taking, lookup)
        if of is None:
            raise NoTarget(f"no target is left for model {shown(asked.group.model_name)}; look at only and exclude")
        best, *others = of.decode
        prefill = of.prefill[0] if of.prefill else None
        reservations = []
        if taking.is_reserved:
            reservations = [
                self._degraded.reserve(asked.group, stage.candidate.publisher, request.tokens, taking.milliseconds)
                for stage in (best, prefill)
                if stage is not None
            ]
        self._metrics.decisions.labels(policy=sticky.name, decision="degraded").inc()
        return Selected(
            best,
            [each.candidate for each in others[: taking.count - 1]],
            degraded.policy,
            of.decision,
            request.tokens,
            request.prefix_key,
            prefill,
            of.encode,
            reservations,
            is_degraded=True,
            group_id=known.entry.group_id,
            block_size=request.block_size,
            headers=headers_of(best.candidate, prefill and prefill.candidate, [each.candidate for each in of.encode]),
        )

    async def fleet(self, group: GroupName) -> Fleet | None:
        """The targets of a group, by the table of now; None where nothing is registered for it."""
        table = await self._store.reader.table(group, deadline_seconds=self._options.deadline_seconds)
        return None if table is None else self._fleet(group, table)

    def fleet_at_hand(self, group: GroupName) -> Fleet | None:
        """The same, by the table that the last lookup in the group has used."""
        table = self._store.reader.table_at_hand(group)
        return None if table is None else self._fleet(group, table)

    async def reserve(
        self, group: GroupName, candidate: Candidate, tokens: int, context: int, milliseconds: int
    ) -> Reservation:
        """Reserve a target that the caller has chosen. Raises NoTarget, Saturated."""
        entry = self._store.reader.entry_at_hand(group)
        if entry is None:
            raise NoTarget(f"no target is registered for model {shown(group.model_name)}")
        terms = Terms(
            context=context,
            milliseconds=milliseconds,
            limit=self._options.target_requests_max,
            reservations_max=self._options.reservations_max,
        )
        found = await self._store.reservations.reserve(entry.group_id, [Offer(candidate.publisher, tokens)], terms)
        self._metrics.reservations_expired.inc(found.overdue)
        if found.reservation is None:
            raise Saturated(f"target {shown(candidate.instance_id)} cannot take a request now; try again in a moment")
        return found.reservation

    async def release(
        self,
        reservations: Sequence[Reservation],
        part: Part,
        *,
        milliseconds: int = 120_000,
        ttft_ms: float | None = None,
    ) -> tuple[int, int]:
        """End reservations, or a part of them; how many were there, and how many were gone."""
        others = self._degraded.release(reservations, part, milliseconds)
        own = len(reservations) - len(others)
        if not others:
            return own, 0
        self._progress.told(others, part)
        released, gone = await self._store.reservations.release(
            others, part, milliseconds=milliseconds, ttft_ms=ttft_ms
        )
        return own + released, gone

    def _under_way(self) -> Iterator[tuple[str, float]]:
        """Requests under way, by instance, in the groups that this replica decides in."""
        for group, fleet in self._fleets.items():
            entry = self._store.reader.entry_at_hand(group)
            loads = {} if entry is None else self._loads.known(entry.group_id)
            for member in fleet.members:
                load = loads.get(member.publisher)
                yield member.name[0], 0.0 if load is None else load.requests

    # ---- one lookup ----------------------------------------------------------------------------------

    async def _lookup(self, asked: Asked, *, expects: bool | None) -> _Lookup | None:
        """The group's targets, and what is known of each; None where nothing is registered for the group."""
        began = perf_counter()
        table = self._store.reader.table_at_hand(asked.group)
        if table is None and asked.block_size is None:
            table = await self._store.reader.table(asked.group, deadline_seconds=self._options.deadline_seconds)
        for _ in range(_LOOKUPS_MAX):
            fleet = None if table is None else self._fleet(asked.group, table)
            block_size = asked.block_size or _block_size(fleet)
            prompt = asked.prompt(block_size)
            lookup, table = await self._lookup_with(asked, fleet, prompt, block_size, expects=expects)
            if lookup is not None:
                self._observe_walk(perf_counter() - began)
                return lookup
            if table is None:
                if asked.needs_source is not None:
                    raise asked.needs_source
                return None
        raise StoreUnavailable("the registrations of this model change all the time; try again in a moment")

    async def _lookup_with(
        self, asked: Asked, fleet: Fleet | None, prompt: Prompt, block_size: int, *, expects: bool | None
    ) -> tuple[_Lookup | None, HolderTable | None]:
        """What was found, and the table of that moment; no lookup where it asks for another block size."""
        reader = self._store.reader
        entry = reader.entry_at_hand(asked.group)
        aside = None
        at_hand = None
        if entry is not None and fleet is not None:
            at_hand = self._aside_at_hand(asked, entry, fleet, prompt, expects=expects)
            if at_hand is None:
                aside = asyncio.ensure_future(self._aside(asked, entry, fleet, prompt, expects=expects))
        try:
            reading = await reader.read(
                asked.group, block_size, PackedKeys(prompt.keys), deadline_seconds=self._options.deadline_seconds
            )
            table, now = reader.table_at_hand(asked.group), reader.entry_at_hand(asked.group)
            if reading is None or table is None or now is None:
                return None, None
            if fleet is None or fleet.table is not table:
                fleet = self._fleet(asked.group, table)
                if asked.block_size is None and _block_size(fleet) != block_size:
                    return None, table
            self._degraded.remember(asked.group, now, fleet)
            if asked.needs_source is not None and not fleet.has_sources:
                raise asked.needs_source
            if at_hand is not None and now == entry:
                beside = at_hand
            elif aside is not None and now == entry:
                beside = await aside
            else:
                beside = await self._aside(asked, now, fleet, prompt, expects=expects)
        finally:
            if aside is not None and not aside.cancel() and not aside.cancelled():
                aside.exception()  # retrieved: the walk's own error is the one that counts
        walk = reading.walk
        rows = target_rows(walk)
        seen = Seen(rows, *beside)
        if not prompt.tokens and seen.prefixes:
            # The longest that anybody has of it is all that is known of its length.
            prompt = prompt._replace(tokens=max(each.tokens for each in seen.prefixes.values()))
        request = self._request(asked, prompt, block_size, pool_bitmap(walk))
        looked = Looked(now, request, fleet, seen, prompt.keys, walk)
        return _Lookup(looked, fleet, request, seen, reading.is_partial), table

    def _aside_at_hand(
        self, asked: Asked, entry: GroupEntry, fleet: Fleet, prompt: Prompt, *, expects: bool | None
    ) -> _Aside | None:
        """What is asked beside the blocks, if it is the loads alone, and these are known."""
        if asked.given is not None or self._needs_gauges(asked.policy) or self._needs_first_tokens(asked.policy):
            return None
        if (asked.prefix_key is not None and fleet.has_sources) or self._expects(fleet, expects):
            return None
        loads = self._loads.at_hand(entry.group_id)
        return None if loads is None else _Aside(loads, {}, {})

    def _expects(self, fleet: Fleet, expects: bool | None) -> bool:
        """Whether speculative entries are read."""
        return fleet.has_silent or (self._options.is_speculative if expects is None else expects)

    async def _aside(
        self, asked: Asked, entry: GroupEntry, fleet: Fleet, prompt: Prompt, *, expects: bool | None
    ) -> _Aside:
        """What is asked beside the blocks: loads, gauges and speculative entries."""
        given = None if asked.given is None else asked.given.values()
        loads: Mapping[int, Load] = {}
        gauges: Mapping[int, Gauges] = {}
        if given is None or not all(each.is_whole for each in given):
            loads = await self._loads.of(entry.group_id)
        if self._needs_gauges(asked.policy) and (given is None or any(each.gauges is None for each in given)):
            gauges = await self._gauges.of(entry.group_id, fleet.scraped)
        first_tokens: Mapping[int, FirstTokens] = {}
        if self._needs_first_tokens(asked.policy):
            first_tokens = await self._first_tokens.of(entry.group_id, list(fleet.by_publisher))
        until = asyncio.get_running_loop().time() + self._options.deadline_seconds
        prefixes = await self._prefixes(asked, entry, fleet, prompt, until)
        at = depths(len(prompt.keys) // KEY_BYTES) if self._expects(fleet, expects) else []
        if not at:
            return _Aside(loads, {}, gauges, prefixes, first_tokens)
        numbers = [key_at(prompt.keys, depth) for depth in at]
        try:
            publishers = await self._store.speculative.read(entry.group_id, numbers, until=until)
        except TimeoutError:
            return _Aside(loads, {}, gauges, prefixes, first_tokens)
        # The deepest wins, being last.
        expected = {publisher: depth for publisher, depth in zip(publishers, at, strict=True) if publisher is not None}
        return _Aside(loads, expected, gauges, prefixes, first_tokens)

    async def _prefixes(
        self, asked: Asked, entry: GroupEntry, fleet: Fleet, prompt: Prompt, until: float
    ) -> Mapping[tuple[str, int], OpaquePrefix]:
        """What sources of opaque prefixes have of the prompt; nothing where there are none, or the time is over."""
        if asked.prefix_key is None or not fleet.has_sources:
            return {}
        try:
            found = await self._store.prefixes.read(entry.group_id, prefix_key(asked.prefix_key.hex()), until=until)
            if max(found, default=0) > fleet.newest:
                # The cached table is older than a holder that has begun since.
                table = await self._store.reader.table(asked.group, deadline_seconds=self._options.deadline_seconds)
                fleet = fleet if table is None else self._fleet(asked.group, table)
        except TimeoutError:
            return {}
        return fleet.prefixes(found, prompt.tokens or _TOKENS_MAX)

    def _needs_gauges(self, policy: Chosen) -> bool:
        if policy.preset is not None:
            return policy.preset.needs_gauges
        return self._options.picker is not None and self._options.picker.needs_gauges

    def _needs_first_tokens(self, policy: Chosen) -> bool:
        return policy.preset is None and self._options.picker is not None and self._options.picker.needs_first_tokens

    def _fleet(self, group: GroupName, table: HolderTable) -> Fleet:
        fleet = self._fleets.get(group)
        if fleet is None or fleet.table is not table:
            if fleet is None and len(self._fleets) >= _FLEETS_MAX:
                self._fleets.clear()
            fleet = self._fleets[group] = Fleet(table)
        return fleet

    def _request(self, asked: Asked, prompt: Prompt, block_size: int, pool: int) -> Request:
        prefix_key = asked.prefix_key
        blocks = min(_STICKY_TOKENS // block_size, len(prompt.keys) // KEY_BYTES)
        if prefix_key is None and blocks:
            prefix_key = prompt.keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
        return Request(
            prompt.tokens,
            block_size,
            pool,
            asked.lora_name,
            asked.session,
            prefix_key,
            asked.is_multimodal,
        )


def _none_allowed(asked: Asked, taking: Taking, fleet: Fleet) -> str:
    homeless = sum(each.target.address is None for each in fleet.members) if taking.needs_address else 0
    return (
        f"no target is left for model {shown(asked.group.model_name)}: of {len(fleet.members)} registered ones "
        + f"none is allowed{f' ({homeless} without an address)' if homeless else ''}; "
        + "look at only, exclude, roles and weights"
    )


def _block_size(fleet: Fleet | None) -> int:
    """The one block size of a group; InvalidValue where it has several, and 1 where it has none."""
    return (None if fleet is None else only_block_size(fleet.block_sizes)) or 1
