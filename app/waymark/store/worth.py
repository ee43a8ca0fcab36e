"""Valuations: walks over all rows of a group, which compute the worth of each engine's cache.

A worker walks at the pace of the sweep, and only if the worth was requested within the last hour. One walk at a time
holds ``wm:{g}:valuing``, and its result is kept in ``wm:{g}:worth`` for a while. A request reads that result and never
walks itself.

The walk reads each row once, however many holders have it, because it remembers the names of the rows that it
has read. This is bounded: if the holders of the group have more than ``ROWS_MAX`` entries together, it reads the rows
whose names begin with certain digits, and the sums are estimated from this share. Names are hashes, so the share is
a fair sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

import orjson

from waymark.domain.packing import unpack
from waymark.domain.rows import ROW_SLOTS
from waymark.domain.status import RecordKind
from waymark.domain.worth import CacheWorth, PrefixUse, Prompts, Tally
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.hashes import AskedGroups
from waymark.store.holder_tables import decode_table
from waymark.store.kept_decisions import KeptDecisions
from waymark.store.leases import random_nonce
from waymark.store.parsing import FORMAT, RecordParser
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts
from waymark.store.sweep import place_in
from waymark.store.takeover import parse_row

#: The most rows that one walk remembers, in about 7 MB. 65,536 full rows have two million blocks.
ROWS_MAX = 65_536
#: The rows read in one step, and the most blocks in these rows.
_STEP_ROWS = 64
STEP_BLOCKS = _STEP_ROWS * ROW_SLOTS
_SCAN_FIELDS = 512
#: The Redis hashes whose lengths are read in one round trip.
_HASHES_AT_ONCE = 512
#: A stopped worker delays the next walk by at most this time.
LEASE_SECONDS = 30.0
#: The least pause after a walk. It is also at least as long as the walk took.
PAUSE_SECONDS = 60.0
#: A result outlasts the pause and the next walk, if that takes at most ten minutes longer than this one.
_KEEP_SECONDS = 600.0
#: For how long a group is valued after its worth was requested.
ASKED_SECONDS = 3600
#: The most blocks in the list of prefixes, which is about 150 kB in Redis.
PREFIX_BLOCKS_MAX = 8192

#: The newest decisions of the last hour show which blocks are used. Their first blocks take 30 MB at most.
_USED_SECONDS, _DECISIONS_MAX, _SLICE_DECISIONS = 3600.0, 2000, 100

#: After this many bytes of rows, the event loop runs other tasks. A single row with hundreds of holders has as many
#: bytes, and takes a millisecond.
_BYTES_A_TURN = 16_384
_DIGITS = "0123456789abcdef"


class Valuation(NamedTuple):
    """The result of a walk."""

    ended: float
    """When the walk ended, in seconds since 1970 by the clock of its worker."""
    seconds: float
    """How long the walk took, in seconds."""
    share: float
    """The share of rows that the walk read; 1 unless the group is very large."""
    decisions: int
    """The number of kept decisions that say which blocks were used."""
    worths: Mapping[str, CacheWorth]
    """The worth of each cache, by instance."""
    prefixes: Sequence[PrefixUse]


class Valuations:
    def __init__(self, client: RedisClient, scripts: Scripts, parser: RecordParser, decisions: KeptDecisions) -> None:
        """``decisions`` are the kept decisions, which show which blocks prompts used."""
        self._client = client
        self._scripts = scripts
        self._parser = parser
        self._kept = decisions
        self.asked = AskedGroups(client, scripts, keys.VALUED, ASKED_SECONDS)
        """The valued groups."""

    async def read(self, group_ids: Sequence[int]) -> dict[int, Valuation]:
        """Return the last result of each group with one."""
        if not group_ids:
            return {}
        values = await self._client.several([("GET", keys.worth(group_id)) for group_id in group_ids], is_lenient=True)
        valuations = {group_id: _decoded(value) for group_id, value in zip(group_ids, values, strict=True) if value}
        return {group_id: valuation for group_id, valuation in valuations.items() if valuation is not None}

    async def walk(self, entry: GroupEntry, *, lease_seconds: float = LEASE_SECONDS) -> AsyncIterator[int]:
        """Walk over the rows of a group, and store the result. Yield the number of blocks of each step.

        The caller sets the pace; its pauses must be shorter than ``lease_seconds``. The walk ends at once if another
        one runs in the group, or ended a short time ago.
        """
        nonce, began = random_nonce(), time.monotonic()
        if not await self._hold(entry, nonce, lease_seconds):
            return
        name = keys.holders(entry.group_id)
        table = decode_table(await self._client.hgetall(name), self._parser, name)
        if table is None:
            return
        prompts, decisions = await self._prompts(entry)
        tally = Tally(table, prompts.uses)
        match, share = sample(await self._entries(entry, tally.holders), ROWS_MAX)
        for shard in range(entry.shards):
            async for names in self._names(entry, shard, tally.holders, match):
                yield await self._count(entry, shard, names, tally)
                if not await self._hold(entry, nonce, lease_seconds):
                    return
        seconds = time.monotonic() - began
        valuation = Valuation(
            time.time(), seconds, share, decisions, tally.worths(share), prompts.most_used(PREFIX_BLOCKS_MAX)
        )
        pause = max(PAUSE_SECONDS, seconds)
        await self._hold(entry, nonce, pause, _encoded(valuation), pause + seconds + _KEEP_SECONDS)

    async def _prompts(self, entry: GroupEntry) -> tuple[Prompts, int]:
        """Return the beginnings of the prompts in the newest kept decisions, and how many decisions those are."""
        since_ms = int(1000 * (time.time() - _USED_SECONDS))
        reading = await self._kept.read(entry.group_id, since_ms=since_ms, decisions_max=_DECISIONS_MAX)
        prompts, count = Prompts(), 0
        for decision in reading.decisions:
            if decision.blocks:
                prompts.add(decision.block_size, unpack(decision.blocks))
                count += 1
                if count % _SLICE_DECISIONS == 0:
                    await asyncio.sleep(0)
        return prompts, count

    async def _hold(
        self, entry: GroupEntry, nonce: str, seconds: float, value: bytes = b"", keep_seconds: float = 0.0
    ) -> bool:
        """Begin, continue or end a walk. Return False if another one runs."""
        outcome = await self._scripts.run(
            "keep_worth",
            valuing=keys.valuing(entry.group_id),
            worth=keys.worth(entry.group_id),
            walk=nonce,
            milliseconds=max(1, int(1000 * seconds)),
            keep=max(1, int(1000 * keep_seconds)),
            value=value,
        )
        return outcome.is_applied

    async def _entries(self, entry: GroupEntry, holders: Sequence[int]) -> int:
        """Return how many entries these holders have; a row of several holders counts several times."""
        names = [keys.engine(entry.group_id, shard, holder) for holder in holders for shard in range(entry.shards)]
        total = 0
        for start in range(0, len(names), _HASHES_AT_ONCE):
            portion = names[start : start + _HASHES_AT_ONCE]
            total += sum(await self._client.several([("HLEN", name) for name in portion]))
        return total

    async def _names(
        self, entry: GroupEntry, shard: int, holders: Sequence[int], match: str
    ) -> AsyncIterator[list[bytes]]:
        """Yield the names of the rows of a shard, each once, in portions of one step.

        After a failover the cursor of a scan is invalid, so rows can be missed; the next walk reads them.
        """
        yielded: set[bytes] = set()
        for holder in holders:
            engine, cursor, is_over = keys.engine(entry.group_id, shard, holder), 0, False
            while not is_over:
                cursor, fields = await self._client.hscan(engine, cursor, _SCAN_FIELDS, match)
                is_over = cursor == 0
                names = {name for field in fields if (name := self._row_name(engine, field)) is not None} - yielded
                yielded |= names
                several = list(names)
                for start in range(0, len(several), _STEP_ROWS):
                    yield several[start : start + _STEP_ROWS]
                if not names and not is_over:
                    yield []  # so that the caller pauses, too, if a scan finds no new key

    def _row_name(self, engine: str, field: bytes) -> bytes | None:
        """Return the name of the row that a field of an engine hash names; None for other fields."""
        place = place_in(self._parser, engine, field)
        return None if place is None else place.name

    async def _count(self, entry: GroupEntry, shard: int, names: Sequence[bytes], tally: Tally) -> int:
        """Read rows and count them. Return the number of blocks, or without rows the cost of a scan in blocks."""
        if not names:
            return _SCAN_FIELDS
        prefix = keys.block_prefix(entry.group_id, shard)
        (values,) = await self._client.several([("MGET", *(prefix + name for name in names))])
        blocks = size = 0
        for name, value in zip(names, values, strict=True):
            if value is None:
                continue
            row = self._parser.parse(RecordKind.BLOCK, (prefix + name).decode(), "", parse_row, value)
            if row is not None:
                blocks += tally.count(row)
            size += len(value)
            if size >= _BYTES_A_TURN:
                size = 0
                await asyncio.sleep(0)
        return max(blocks, 1)


def sample(entries: int, rows_max: int) -> tuple[str, float]:
    """Return a pattern that about ``rows_max`` of ``entries`` names match, and their share. All names match an empty
    pattern.

    Names begin with a hash in hex digits.
    """
    if entries <= rows_max:
        return "", 1.0
    share, zeros = rows_max / entries, ""
    while share * 16 < 1:
        share, zeros = share * 16, zeros + "0"
    digits = max(1, int(share * 16))
    return f"{zeros}[{_DIGITS[:digits]}]*", digits / 16 ** (len(zeros) + 1)


def _encoded(valuation: Valuation) -> bytes:
    return orjson.dumps(
        {
            "format": FORMAT,
            "ended": valuation.ended,
            "seconds": valuation.seconds,
            "share": valuation.share,
            "decisions": valuation.decisions,
            "worths": {name: list(worth) for name, worth in valuation.worths.items()},
            "prefixes": [
                [prefix.before, prefix.block_size, prefix.uses, "".join(f"{key:016x}" for key in prefix.keys)]
                for prefix in valuation.prefixes
            ],
        }
    )


def _decoded(value: bytes) -> Valuation | None:
    """Return the result in a value, or None if another release wrote the value."""
    try:
        fields = orjson.loads(value)
        if fields["format"] != FORMAT:
            return None
        prefixes = [
            PrefixUse(before, size, uses, tuple(int(text[start : start + 16], 16) for start in range(0, len(text), 16)))
            for before, size, uses, text in fields["prefixes"]
        ]
        worths = {name: CacheWorth(*map(int, sums)) for name, sums in fields["worths"].items()}
        return Valuation(
            float(fields["ended"]),
            float(fields["seconds"]),
            float(fields["share"]),
            int(fields["decisions"]),
            worths,
            prefixes,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
