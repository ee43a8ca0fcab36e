"""``GET /placement``, the worth of each cache, and ``GET /placement/warm``, the prefixes for a new engine."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.errors import InvalidValue, NotFound
from waymark.base.shown import shown
from waymark.contract.results import PlacementAnswer, ValuedModel, ValuedTarget, WarmAnswer, WarmPrefix, WarmSource
from waymark.decide.policies.policy import nearest
from waymark.domain.answer_times import NO_SUMS, TimeSums
from waymark.domain.media import order_of
from waymark.domain.names import GroupName
from waymark.domain.rows import PIECE_BLOCKS, Place, Row
from waymark.domain.table import HolderTable
from waymark.domain.worth import PrefixUse
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.places import read_row, values_of
from waymark.store.reservations import NO_LOAD, Load
from waymark.store.store import Store
from waymark.store.worth import Valuation

PARAMETERS = ("model", "tenant")
WARM_PARAMETERS = ("instance", "tokens", "model", "tenant")
_NO_WALK = (
    "no ingest worker has valued the caches of this model within the last minutes; one does so now that somebody has "
    "asked, so ask again in a few seconds"
)
_NO_DECISIONS = (
    "no decision of the last hour is kept, so nobody knows which prefixes are used; see WAYMARK_DECISIONS_KEPT"
)
_TOKENS, _TOKENS_MAX = 100_000, 10_000_000
#: The most prefixes read for one answer.
_PREFIXES_MAX = 1024

Rank = tuple[str, int]
"""An instance and one of its ranks."""


class _ValuedGroup(NamedTuple):
    """A group with the claims of its engines, by instance."""

    name: GroupName
    entry: GroupEntry
    engines: dict[str, list[Claim]]


class PlacementView:
    """The handlers of ``/placement`` and ``/placement/warm``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def placement(self, body: Body) -> Answer:
        groups = await self._groups(body)
        valuations = await self._valuations(groups)
        parts = await asyncio.gather(*(self._targets(group, valuations.get(group.entry.group_id)) for group in groups))
        return Answer(
            PlacementAnswer(
                models=[model for model, _ in parts], targets=[target for _, targets in parts for target in targets]
            )
        )

    async def warm(self, body: Body) -> Answer:
        tokens = _tokens(body.path.get("tokens"))
        instance_id = body.path.get("instance") or ""
        group = _group_of(await self._groups(body), instance_id)
        valuation = (await self._valuations([group])).get(group.entry.group_id)
        reason = _NO_WALK if valuation is None else None if valuation.decisions else _NO_DECISIONS
        table = await self._store.reader.table(group.name)
        prefixes: list[WarmPrefix] = []
        if valuation is not None and table is not None:
            prefixes = await _Warming(self._store, group, table, instance_id).prefixes(valuation.prefixes, tokens)
        return Answer(
            WarmAnswer(
                tenant_id=group.name.tenant_id,
                model_name=group.name.model_name,
                instance_id=instance_id,
                age_seconds=None if valuation is None else _age(valuation),
                tokens=sum(prefix.tokens for prefix in prefixes),
                prefixes=prefixes,
                reason=reason,
            )
        )

    async def _groups(self, body: Body) -> list[_ValuedGroup]:
        """Return the groups that the request concerns, each with its registered engines."""
        model, tenant_id = body.path.get("model") or None, body.path.get("tenant") or None
        engines: dict[int, dict[str, list[Claim]]] = defaultdict(dict)
        for claim in await self._store.directory.claims():
            if not claim.is_leaving and claim.registration.scope == "instance":
                engines[claim.group_id].setdefault(claim.registration.instance_id, []).append(claim)
        return [
            _ValuedGroup(name, entry, engines[entry.group_id])
            for name, entry in (await self._store.directory.groups()).items()
            if entry.group_id in engines
            and body.caller.has(name.tenant_id)
            and model in (None, name.model_name)
            and tenant_id in (None, name.tenant_id)
        ]

    async def _valuations(self, groups: Sequence[_ValuedGroup]) -> dict[int, Valuation]:
        """Return the last valuation of each group that has one, and request new ones."""
        valuations, group_ids = self._store.valuations, [group.entry.group_id for group in groups]
        not_asked = set(group_ids) - await valuations.asked.read()
        if not_asked:
            await valuations.asked.add(not_asked)
        return await valuations.read(group_ids)

    async def _targets(
        self, group: _ValuedGroup, valuation: Valuation | None
    ) -> tuple[ValuedModel, list[ValuedTarget]]:
        """Return the facts about the model, and its targets, the cheapest ones first."""
        group_id = group.entry.group_id
        publishers = [claim.publisher for claims in group.engines.values() for claim in claims]
        values, times = await asyncio.gather(
            self._store.reservations.values(group_id), self._store.answer_times.read(group_id, publishers)
        )
        loads = {int(name): Load.parse(value) for name, value in values.items() if name.isdigit()}
        slope = reduce(TimeSums.plus, (target_times.first_token for target_times in times.values()), NO_SUMS).slope
        targets = [
            _target(group.name, instance_id, claims, loads, valuation, slope)
            for instance_id, claims in group.engines.items()
        ]
        model = ValuedModel(
            tenant_id=group.name.tenant_id,
            model_name=group.name.model_name,
            age_seconds=None if valuation is None else _age(valuation),
            walk_seconds=None if valuation is None else round(valuation.seconds, 3),
            share=None if valuation is None else valuation.share,
            decisions=None if valuation is None else valuation.decisions,
            ms_per_token=slope,
            reason=_NO_WALK if valuation is None else None,
        )
        return model, sorted(targets, key=_cost)


def _target(
    group: GroupName,
    instance_id: str,
    claims: Sequence[Claim],
    loads: Mapping[int, Load],
    valuation: Valuation | None,
    slope: float | None,
) -> ValuedTarget:
    registration = claims[0].registration
    tells_blocks = registration.kind.traits.tells_blocks
    worth = None if valuation is None or not tells_blocks else valuation.worths.get(instance_id)
    reason = None
    if not tells_blocks:
        reason = "its events do not say which blocks it has"
    elif valuation is not None and worth is None:
        reason = "it had no block that counts when the caches were valued"
    return ValuedTarget(
        tenant_id=group.tenant_id,
        model_name=group.model_name,
        instance_id=instance_id,
        address=registration.target.address,
        role=registration.target.role,
        weight=max(claim.registration.target.weight for claim in claims),
        requests=sum(loads.get(claim.publisher, NO_LOAD).requests for claim in claims),
        tokens=None if worth is None else worth.tokens,
        only_tokens=None if worth is None else worth.only,
        few_tokens=None if worth is None else worth.few,
        only_used_tokens=None if worth is None else worth.only_used,
        few_used_tokens=None if worth is None else worth.few_used,
        cost_seconds=None if worth is None or slope is None else round(worth.only * slope / 1000, 3),
        reason=reason,
    )


def _cost(target: ValuedTarget) -> tuple[Any, ...]:
    """Return the sort key of targets: the cheapest first, those of unknown worth last."""
    is_unknown = target.only_used_tokens is None
    costs = (0, 0, 0) if is_unknown else (target.only_used_tokens, target.requests, target.tokens)
    return is_unknown, *costs, target.instance_id


def _age(valuation: Valuation) -> float:
    return round(max(0.0, time.time() - valuation.ended), 1)


def _tokens(text: str | None) -> int:
    """Parse the number of tokens to pull. Raise ``InvalidValue`` if it is not such a number."""
    if not text:
        return _TOKENS
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= _TOKENS_MAX):
        raise InvalidValue(f"tokens is {shown(text)}; send an integer of 1..{_TOKENS_MAX}", field="tokens")
    return int(text)


def _group_of(groups: Sequence[_ValuedGroup], instance_id: str) -> _ValuedGroup:
    """Return the only group with an engine of this name. Raise ``NotFound`` if there is no such group, and
    ``InvalidValue`` if there are several.
    """
    if not instance_id:
        raise InvalidValue("instance is missing; send the instance_id of the engine to be warmed", field="instance")
    named = [group for group in groups if instance_id in group.engines]
    if len(named) > 1:
        several = ", ".join(f"{entry.name.model_name} of {entry.name.tenant_id}" for entry in named)
        raise InvalidValue(f"several models have an engine of this name ({several}); send model and tenant, too")
    if not named:
        names = {name for group in groups for name in group.engines}
        way_out = nearest(instance_id, names) if names else "no engine is registered"
        raise NotFound(f"no engine {shown(instance_id)} is registered; {way_out}", field="instance")
    return named[0]


class _Warming:
    """Finds the prefixes that one engine should pull, and the engines with these prefixes."""

    def __init__(self, store: Store, group: _ValuedGroup, table: HolderTable, instance_id: str) -> None:
        self._store = store
        self._group = group
        self._table = table
        self._instance_id = instance_id
        self._sizes = {claim.registration.block_size for claim in group.engines[instance_id]}
        self._owners: dict[int, Rank] = {
            holder.id: (holder.instance_id, holder.dp_rank)
            for holder in table.holders.values()
            if holder.scope == "instance"
            and holder.window is None
            and holder.block_size in self._sizes
            and (publisher := table.publishers.get(holder.publisher)) is not None
            and not publisher.is_lost
        }

    async def prefixes(self, entries: Sequence[PrefixUse], tokens: int) -> list[WarmPrefix]:
        """Return the most used prefixes that the engine lacks and another one has, up to ``tokens`` tokens."""
        chains: list[tuple[int, ...]] = []
        for entry in entries[:_PREFIXES_MAX]:
            chains.append((() if entry.before is None else chains[entry.before]) + entry.keys)
        heads = list({chain[index] for chain in chains for index in range(0, len(chain), PIECE_BLOCKS)})
        values = await values_of(self._store.client, self._group.entry, [Place(head) for head in heads])
        rows = {head: row for head, value in zip(heads, values, strict=True) if (row := read_row(value)) is not None}
        reached: list[int] = []
        """How many blocks of each chain the engine has, or will have after pulling."""
        prefixes: list[WarmPrefix] = []
        for entry, chain in zip(entries, chains, strict=False):
            first = len(chain) - len(entry.keys)
            depths = _leading(chain, rows, self._owners)
            own = max((blocks for (name, _), blocks in depths.items() if name == self._instance_id), default=0)
            reached.append(max(own, 0 if entry.before is None else min(first, reached[entry.before])))
            is_wanted = entry.block_size in self._sizes and first <= reached[-1] < len(chain)
            if not is_wanted or tokens <= 0:
                continue
            pull = await self._pull(entry, chain[: reached[-1] + -(-tokens // entry.block_size)], reached[-1], depths)
            if pull is not None:
                reached[-1] += len(pull.engine_hashes)
                tokens -= pull.tokens
                prefixes.append(pull)
        return prefixes

    async def _pull(
        self, prefix: PrefixUse, chain: Sequence[int], first: int, depths: Mapping[Rank, int]
    ) -> WarmPrefix | None:
        """Return the part of a prefix from block ``first`` on, and the best engine to pull it from; None if no other
        engine has any of it.
        """
        sources = {name: claims[0].registration.target for name, claims in self._group.engines.items()}
        ranks = [rank for rank, blocks in depths.items() if blocks > first and rank[0] != self._instance_id]
        if not ranks:
            return None

        def order(rank: Rank) -> tuple[Any, ...]:
            target = sources.get(rank[0])
            return target is None or target.kv_source is None, -min(depths[rank], len(chain)), rank

        source = min(ranks, key=order)
        holders = sorted(
            (self._table.holders[holder] for holder, rank in self._owners.items() if rank == source),
            key=lambda holder: order_of(holder.medium),
        )
        blocks = await self._store.held_hashes.read(
            self._group.entry, chain[: depths[source]], first, [holder.id for holder in holders]
        )
        if not blocks:
            return None
        target = sources.get(source[0])
        return WarmPrefix(
            before_tokens=first * prefix.block_size,
            tokens=len(blocks) * prefix.block_size,
            uses=prefix.uses,
            engine_hashes=[block.engine_hash for block in blocks],
            source=WarmSource(
                instance_id=source[0],
                dp_rank=source[1],
                address=None if target is None else target.address,
                kv_source=None if target is None else target.kv_source,
            ),
        )


def _leading(chain: Sequence[int], rows: Mapping[int, Row], owners: Mapping[int, Rank]) -> dict[Rank, int]:
    """Return how many blocks each rank has from the beginning of a chain, on all its media together."""
    depths: dict[Rank, int] = {}
    for start in range(0, len(chain), PIECE_BLOCKS):
        row = rows.get(chain[start])
        if row is None:
            break
        slots = {key: slot for slot, key in enumerate(row.keys)}
        bitmaps: dict[Rank, int] = defaultdict(int)
        for holder, bitmap in row.holders.items():
            if holder in owners and depths.get(owners[holder], 0) == start:
                bitmaps[owners[holder]] |= bitmap
        for rank, bitmap in bitmaps.items():
            blocks = start
            for key in chain[start : start + PIECE_BLOCKS]:
                if key not in slots or not bitmap >> slots[key] & 1:
                    break
                blocks += 1
            depths[rank] = blocks
    return depths
