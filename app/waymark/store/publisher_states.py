"""The states of publishers, read from their records: to show them to people, and to share the streams among workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field

from waymark.base.record import record
from waymark.domain.books import Drift
from waymark.domain.life_facts import CopiesRule, copies_rule
from waymark.domain.names import HolderName, Registration
from waymark.domain.status import StreamStatus, read_recent
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.parsing import RecordParser, pairs_of
from waymark.store.records import BLOCKS, COUNTER, HOLDER, MISSING, StreamFields
from waymark.store.redis.client import RedisClient
from waymark.store.reservations import DRIFT


@record(frozen=True, slots=True)
class PublisherState:
    """The state of a publisher, as ``GET /workers`` shows it."""

    registration: Registration
    id: int
    group_id: int
    status: StreamStatus
    watermark: int | None
    lag_seconds: float | None
    """Age of the newest applied batch, by its publisher's clock."""
    counters: Mapping[str, int]
    blocks: Mapping[str, int]
    """Blocks held, by medium."""
    last_error: str | None
    worker: str | None
    prefixes: Mapping[str, int] = field(default_factory=dict)
    """Opaque prefixes held, by medium."""
    flags: frozenset[str] = frozenset()
    """The facts that the events of this life have shown."""
    recent: tuple[Sequence[int], Sequence[int]] = ((), ())
    """The blocks that were stored and removed recently, slot by slot; empty if there were none."""

    @property
    def copies(self) -> CopiesRule:
        """The rule by which copies of its blocks count."""
        return copies_rule(self.registration, self.flags)

    @property
    def known(self) -> float | None:
        """The share of the publisher's blocks in this life that the index knows.

        None if the publisher has no blocks.
        """
        there = sum(self.blocks.values())
        total = there + self.counters.get(MISSING, 0)
        return round(there / total, 4) if total else None


class PublisherStates:
    """Reads the states of publishers. A record that cannot be read counts as a record without fields."""

    def __init__(self, client: RedisClient, parser: RecordParser) -> None:
        self._client = client
        self._parser = parser

    async def of(self, claims: Sequence[Claim]) -> list[PublisherState]:
        """Return the state of each claim, in order. If its record cannot be read, a state has only the values of the
        claim.
        """
        now = time.time()
        names = [keys.record(claim.group_id, claim.publisher) for claim in claims]
        replies = await self._client.several((("HGETALL", name) for name in names), is_lenient=True)
        pairs = map(pairs_of, replies)
        records = [StreamFields(self._parser, name, raw_record) for name, raw_record in zip(names, pairs, strict=True)]
        prefixes = await self._opaque_prefixes(claims, records)
        drifts = await self.drifts(claims)
        return [
            _state(claim, fields, opaque, drift, now)
            for claim, fields, opaque, drift in zip(claims, records, prefixes, drifts, strict=True)
        ]

    async def holders(self, claims: Sequence[Claim]) -> list[list[tuple[HolderName, int]]]:
        """Return the live holders of each claim, as far as they can be read."""
        names = [keys.record(claim.group_id, claim.publisher) for claim in claims]
        replies = await self._client.several((("HGETALL", name) for name in names), is_lenient=True)
        return [
            list(StreamFields(self._parser, name, pairs_of(reply)).integers(HOLDER, HolderName.parse).items())
            for name, reply in zip(names, replies, strict=True)
        ]

    async def drifts(self, claims: Sequence[Claim]) -> list[Drift | None]:
        """Return the drift of each target, None unless it delivers less than expected."""
        now = 1000 * time.time()
        values = await self._client.several(
            [("HGET", keys.load(claim.group_id), DRIFT + b"%d" % claim.publisher) for claim in claims], is_lenient=True
        )
        drifts = [None if value is None else Drift.parse(value) for value in values]
        return [None if drift is None or drift.until_ms < now else drift for drift in drifts]

    async def _opaque_prefixes(
        self, claims: Sequence[Claim], records: Sequence[StreamFields]
    ) -> list[Mapping[str, int]]:
        """Return how many opaque prefixes each publisher holds, by medium; empty for an engine without such
        prefixes.
        """
        now = int(1000 * time.time())
        holders_of_sources = [
            fields.integers(HOLDER, HolderName.parse) if claim.registration.kind.traits.is_opaque else {}
            for claim, fields in zip(claims, records, strict=True)
        ]
        commands = [
            ("ZCOUNT", keys.opaque_prefixes(claim.group_id, holder), now, "+inf")
            for claim, holders in zip(claims, holders_of_sources, strict=True)
            for holder in holders.values()
        ]
        counts = iter(await self._client.several(commands, is_lenient=True) if commands else ())
        return [{name.medium: next(counts) or 0 for name in holders} for holders in holders_of_sources]


def _state(
    claim: Claim, fields: StreamFields, opaque: Mapping[str, int], drift: Drift | None, now: float
) -> PublisherState:
    """Return the state in a record."""
    fields.is_of_this_format()
    ts = fields.number("ts")
    counters = fields.integers(COUNTER, str)
    blocks = {name.medium: 0 for name in fields.integers(HOLDER, HolderName.parse)}
    for medium in blocks:
        blocks[medium] = counters.pop(BLOCKS + medium, 0)
    status, error = fields.status(), fields.text("last_error") or None
    if not claim.registration.kind.traits.tells_events:
        status = StreamStatus.NO_EVENTS
    if drift is not None and status in (StreamStatus.ACTIVE, StreamStatus.DEGRADED):
        status, error = StreamStatus.DEGRADED, "; ".join(filter(None, (error, f"drift: {drift}")))
    return PublisherState(
        registration=claim.registration,
        id=claim.publisher,
        group_id=claim.group_id,
        status=status,
        watermark=fields.integer("watermark"),
        lag_seconds=None if ts is None else max(0.0, now - ts),
        counters={name: n for name, n in counters.items() if not name.startswith(BLOCKS)},
        blocks=blocks,
        last_error=error,
        worker=fields.text("worker") if fields.has("worker") else None,
        prefixes=opaque,
        flags=frozenset(fields.text("flags").split()),
        recent=read_recent(fields.text("recent"), now),
    )
