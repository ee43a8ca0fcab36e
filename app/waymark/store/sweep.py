"""Sweeping: removes a dead holder from its rows in small steps, and ends publishers without a claim, and holders and
fences that shard 0 does not know.

No query waits for a sweep: readers ignore a holder from the end of its life. A step is one bounded call, so it delays a
reader only a little. A crash between two steps loses no holder, because the id stays in ``dead`` until every shard is
done. Each step checks whether the id is still in ``dead``. If it is not, another worker has swept the holder, or Redis
has come back empty, and the sweep is complete.

A claim and the publisher's row in a holder table are in two slots. A Redis that loses the last writes of one slot can
bring back a publisher that was unregistered, or lose the claim of one that no worker has seen. Such a publisher could
not be unregistered, and answers would count its blocks permanently.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.domain.rows import Place, parse_field
from waymark.domain.status import RecordKind
from waymark.store import keys
from waymark.store.directory import Directory, GroupEntry
from waymark.store.leases import Leases
from waymark.store.parsing import Malformed, RecordParser, integer_of
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Outcome, Scripts, Verdict

#: The rows written in one step, which takes Redis less than 1 ms. Readers wait for it.
STEP_ROWS = 64
#: The entries read at once, for several steps.
SCAN_ENTRIES = 256


class Sweeper:
    def __init__(
        self, client: RedisClient, scripts: Scripts, parser: RecordParser | None = None, metrics: Metrics | None = None
    ) -> None:
        self._client = client
        self._parser = parser or RecordParser()
        self._scripts = scripts
        self._metrics = metrics or Metrics()

    async def pick(self, entry: GroupEntry) -> int | None:
        """Return a dead holder, or None. A member of ``dead`` other than a holder id is deleted, and gives None."""
        key = keys.dead(entry.group_id)
        member = await self._client.command("SRANDMEMBER", key)
        if member is None:
            return None
        holder = self._parser.parse(RecordKind.DEAD_HOLDER, key, member, integer_of, member, "the holder's id")
        if holder is None:
            await self._scripts.run("forget_dead", dead=key, holder=member)
        return holder

    async def left(self, entry: GroupEntry) -> int:
        """Return how many dead holders of the group are still to be swept."""
        return int(await self._client.command("SCARD", keys.dead(entry.group_id)))

    async def steps(self, entry: GroupEntry, holder: int) -> AsyncIterator[int]:
        """Sweep one dead holder on all shards; yield the number of blocks of each step. The caller sets the pace.

        It ends at once if the holder is not, or no longer, in ``dead``.
        """
        for shard in range(entry.shards):
            if await self._is_gone(entry, shard, holder, is_swept=False):
                return
            cursor, has_found = 0, False
            places: list[Place] = []
            while True:
                cursor, found_places = await self._scan(entry, shard, holder, cursor)
                has_found = has_found or bool(found_places)
                places += found_places
                while len(places) >= STEP_ROWS or (places and cursor == 0):
                    outcome = await self._step(entry, shard, holder, places[:STEP_ROWS])
                    if outcome.verdict is Verdict.GONE:
                        return
                    rows, blocks = outcome.numbers
                    places = places[rows:]
                    self._metrics.sweep_blocks.inc(blocks)
                    yield blocks
                if cursor == 0:
                    # After a failover the cursor is invalid, so entries can be missed. A shard is done when a complete
                    # scan finds no entry.
                    if not has_found:
                        break
                    has_found = False
            if await self._is_gone(entry, shard, holder, is_swept=True):
                return
            self._parser.forget(keys.engine(entry.group_id, shard, holder))
        forgotten = await self._scripts.run("forget_dead", dead=keys.dead(entry.group_id), holder=holder)
        self._metrics.sweeps.inc(forgotten.numbers[0])

    async def _scan(self, entry: GroupEntry, shard: int, holder: int, cursor: int) -> tuple[int, list[Place]]:
        """Return the next cursor, and the places that the fields name."""
        engine = keys.engine(entry.group_id, shard, holder)
        cursor, fields = await self._client.hscan(engine, cursor, SCAN_ENTRIES)
        places = [place for name in fields if (place := place_in(self._parser, engine, name)) is not None]
        return cursor, places

    async def _step(self, entry: GroupEntry, shard: int, holder: int, places: Sequence[Place]) -> Outcome:
        """Remove the holder from the first places."""
        if not await self._is_dead(entry, shard, holder):
            return Outcome(Verdict.GONE, (0, 0))
        prefix = keys.block_prefix(entry.group_id, shard)
        return await self._scripts.run(
            "sweep_rows",
            engine=keys.engine(entry.group_id, shard, holder),
            row=[prefix + place.name for place in places],
            piece=[prefix + Place(place.head).name for place in places if place.branch is not None],
            branches=keys.branches(entry.group_id, shard),
            dead=None if shard else keys.dead(entry.group_id),
            holder=holder,
            rows=len(places),
            field=[place.field for place in places],
        )

    async def _is_gone(self, entry: GroupEntry, shard: int, holder: int, *, is_swept: bool) -> bool:
        """Begin or end the sweep on a shard; return whether another worker has ended it on all."""
        if not await self._is_dead(entry, shard, holder):
            return True
        ended = await self._scripts.run(
            "end_holder",
            engine=keys.engine(entry.group_id, shard, holder),
            fence=keys.fence(entry.group_id, shard),
            dead=None if shard else keys.dead(entry.group_id),
            holder=holder,
            is_swept=int(is_swept),
        )
        return ended.verdict is Verdict.GONE

    async def _is_dead(self, entry: GroupEntry, shard: int, holder: int) -> bool:
        """Return whether the holder is still to be swept. On shard 0, which has ``dead``, the scripts check this.

        On the others it is checked before the script. In between, a failover of shard 0 may lose the end of the holder.
        If this call then begins the sweep, its mark makes the next batch of the holder begin a new life. Rows are only
        swept after such a mark.
        """
        return not shard or bool(await self._client.command("SISMEMBER", keys.dead(entry.group_id), holder))


def place_in(parser: RecordParser, engine: str, field: bytes) -> Place | None:
    """Return the place that a field of an engine hash names; None for the other fields, and if it cannot be read."""
    if field == b"applied" or field.startswith(b"*"):
        return None
    return parser.parse(RecordKind.ENTRY, engine, field, _place, field)


def _place(field: bytes) -> Place:
    try:
        return parse_field(field)
    except ValueError as exc:
        raise Malformed(str(exc)) from None


_ROW = b"publisher:"


@record(frozen=True, slots=True)
class UnclaimedPublisher:
    """A publisher of a holder table without a claim."""

    publisher: int
    group_id: int
    shards: int


TableState: TypeAlias = tuple[bytes | None, int]
"""The version and the number of fields of a holder table, which change with its publishers."""


class UnclaimedPublishers:
    def __init__(self, client: RedisClient, scripts: Scripts, leases: Leases, directory: Directory) -> None:
        self._client = client
        self._scripts = scripts
        self._leases = leases
        self._directory = directory

    async def state(self, group_id: int) -> TableState:
        """Return the state of the group's table. Raise StoreUnavailable if Redis is unavailable."""
        table = keys.holders(group_id)
        version, rows = await self._client.several((("HGET", table, "version"), ("HLEN", table)))
        return version, rows

    async def publishers(self, group_id: int) -> set[int]:
        """Return the publishers with a row in the group's table. Raise StoreUnavailable if Redis is
        unavailable.
        """
        names = await self._client.hkeys(keys.holders(group_id))
        ids = (name.removeprefix(_ROW) for name in names if name.startswith(_ROW))
        return {int(publisher_id) for publisher_id in ids if publisher_id.isdigit() and len(publisher_id) < 17}

    async def end(self, ids: UnclaimedPublisher) -> bool:
        """End a publisher if it has no claim; return whether it has ended. Raises StoreUnavailable.

        A registration at the same time wins. This method marks the record as ``unclaimed``, and looks for a claim
        again. A registration writes its claim first, and then removes the mark. So either this method finds the claim,
        or the script finds no mark.
        """
        record = keys.record(ids.group_id, ids.publisher)
        name = await self._client.hget(record, "name")
        if await self._has_claim(ids, name):
            return False
        lease = await self._leases.take_for(ids, "unregister", 5.0, force=True)
        if lease is None:
            return await self._leases.end_without_record(ids)
        fenced: dict[str, Any] = {
            "record": record,
            "fence": keys.fence(ids.group_id, 0),
            "publisher": ids.publisher,
            "token": lease.token,
            "calls": lease.calls[0],
        }
        marked = await self._scripts.run("write_record", **fenced, field=["unclaimed", "1"])
        if (
            marked.is_applied
            and not await self._has_claim(ids, name)
            and await self._leases.end_for(ids, lease.token, only_unclaimed=True)
        ):
            return True
        await self._scripts.run("write_record", **fenced, field=["unclaimed", ""])
        await self._scripts.run(
            "drop_lease", lease=keys.lease(ids.group_id, ids.publisher), record=record, token=lease.token
        )
        return False

    async def _has_claim(self, ids: UnclaimedPublisher, name: bytes | None) -> bool:
        """Return whether the publisher has a claim. A claim that cannot be read counts, because it may be the
        publisher's.
        """
        if name is None:
            fields = await self._client.hgetall(keys.PUBLISHERS)
            return any(self._is_of(ids, field, raw) for field, raw in fields.items())
        raw = await self._client.hget(keys.PUBLISHERS, name)
        return raw is not None and self._is_of(ids, name, raw)

    def _is_of(self, ids: UnclaimedPublisher, name: bytes, raw: bytes) -> bool:
        claim = self._directory.decode(name, raw)
        return claim is None or claim.publisher == ids.publisher


#: The beginnings of the fields of a publisher, without the colon.
_OF_PUBLISHER = (b"", b"calls", b"first")

FencePlace: TypeAlias = tuple[int, int]
"""How far the fences of a group are searched: a shard, and the cursor of its hash."""


class Leftovers:
    """Finds holders and publishers in the fences of a group's shards that shard 0 does not know.

    Each shard knows which holders have blocks on it. Shard 0 knows which of them live, and which are to be swept. If it
    comes back empty or without its last writes, or another shard comes back with blocks that were swept, no other code
    would remove these blocks. A worker that stops while it takes a lease may leave the fences of a publisher that has
    ended meanwhile.
    """

    def __init__(self, client: RedisClient, scripts: Scripts, leases: Leases) -> None:
        self._client = client
        self._scripts = scripts
        self._leases = leases

    async def look(self, entry: GroupEntry, place: FencePlace = (0, 0)) -> FencePlace:
        """Search a part of a fence, and return the place of the next part, which is (0, 0) after the last one.

        Holders and publishers are known to shard 0 before they get into a fence, which is read first. So those that
        it does not know have ended or are lost.
        """
        group_id, (shard, cursor) = entry.group_id, place
        cursor, fields = await self._client.hscan(keys.fence(group_id, shard), cursor, SCAN_ENTRIES)
        owners: dict[bytes, bytes] = {}
        """The publisher of each holder that has blocks."""
        publishers: set[bytes] = set()
        for field, value in fields.items():
            kind, _, number = field.rpartition(b":")
            if number.isdigit() and len(number) < 17:
                if kind == b"blocks":
                    owners[number] = value
                elif kind in _OF_PUBLISHER:
                    publishers.add(number)
        rows = {number: _ROW + number for number in publishers}
        names = [*owners, *rows.values()]
        if names:
            table, dead = keys.holders(group_id), keys.dead(group_id)
            (found,) = await self._client.several([("HMGET", table, *names)])
            unknown = {name for name, value in zip(names, found, strict=True) if value is None}
            lost = list(owners.keys() & unknown)
            are_dead = await self._client.several([("SISMEMBER", dead, holder) for holder in lost]) if lost else ()
            for holder in (holder for holder, is_dead in zip(lost, are_dead, strict=True) if not is_dead):
                await self._scripts.run(
                    "end_lost",
                    holders=table,
                    record=keys.record(group_id, _publisher_of(owners[holder])),
                    dead=dead,
                    holder=int(holder),
                )
            for publisher in (int(number) for number, row in rows.items() if row in unknown):
                if await self._client.hget(keys.record(group_id, publisher), "life") is None:
                    await self._leases.forget(UnclaimedPublisher(publisher, group_id, entry.shards))
        return (shard, cursor) if cursor else ((shard + 1) % entry.shards, 0)


def _publisher_of(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) < 17 else 0
