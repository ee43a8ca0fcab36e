"""Publishers' records: the state of each stream, and the lives of its holders.

Only the worker with the grant writes a record. If a method returns None or False, another worker has the stream
now (the caller is *fenced*): the caller discards its state of the stream.

A newer release, a person or a fault may have written any field of a record (``wm:{g}:publisher:<id>``), so each field
is checked by itself: an unreadable one does not affect the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, TypedDict, TypeVar

from waymark.base.errors import RecordDamaged
from waymark.base.record import record
from waymark.domain.names import Holder, HolderName
from waymark.domain.parts import Commit
from waymark.domain.status import RecordKind, StreamStatus
from waymark.store import keys
from waymark.store.calls import commit_words
from waymark.store.claims import Claim
from waymark.store.holder_tables import decode_table, encode_holder
from waymark.store.leases import Grant, random_nonce
from waymark.store.parsing import Malformed, RecordParser, check_format, integer_of, lenient_text, number_of
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Arg, Outcome, Scripts

T = TypeVar("T")

#: The beginning of the names of counters.
COUNTER = "count:"
#: The beginning of the names of counters of a stream's blocks; the medium follows.
BLOCKS = "blocks."

#: The counter of a publisher's blocks in this life that the index does not know.
MISSING = "missing"

#: The beginnings of the names of fields with the ids of live holders, and with the last event_ids of holders.
HOLDER, EVENT = "holder:", "event:"
#: The beginning of the names of fields with the ids of holders that no reader sees yet.
STAGED = "staged:"
#: The beginning of the names of fields with the number of acknowledged calls of a shard.
SHARD = "shard:"
_HOLDER_ID = re.compile(r"[0-9]{1,16}")


class StreamFields:
    """A publisher's record. A field that cannot be read counts as absent; the parser counts and logs it."""

    def __init__(self, parser: RecordParser, key: str, raw_fields: Mapping[bytes, bytes] | None) -> None:
        self._parser = parser
        self._key = key
        self._fields = {lenient_text(name): value for name, value in (raw_fields or {}).items()}
        self._damaged: set[str] = set()
        parser.forget(key, (raw_fields or {}).keys())
        if raw_fields is None:
            parser.reject(RecordKind.STREAM, key, "", "it is no hash")

    def has(self, name: str) -> bool:
        return name in self._fields

    def is_of_this_format(self) -> bool:
        """Return False if another release wrote the record in another format."""
        return not self.has("format") or self._parsed("format", _format_of, self._fields["format"]) is not None

    def is_damaged(self, beginnings: tuple[str, ...]) -> bool:
        """Return whether a requested field whose name begins with one of ``beginnings`` could not be read."""
        return any(name.startswith(beginnings) for name in self._damaged)

    def has_any(self, beginning: str) -> bool:
        """Return whether there is a field whose name begins with ``beginning``."""
        return any(name.startswith(beginning) for name in self._fields)

    def text(self, name: str) -> str:
        return lenient_text(self._fields.get(name, b""))

    def status(self) -> StreamStatus:
        raw = self._fields.get("status")
        return (raw and self._parsed("status", _status_of, raw)) or StreamStatus.STARTING

    def integer(self, name: str) -> int | None:
        raw = self._fields.get(name)
        return self._parsed(name, integer_of, raw, name) if raw else None

    def number(self, name: str) -> float | None:
        raw = self._fields.get(name)
        return self._parsed(name, number_of, raw, name) if raw else None

    def integers(self, beginning: str, name_of: Callable[[str], T], bits: int = 53) -> dict[T, int]:
        """Return the integers of all fields whose names begin with ``beginning``, of at most ``bits`` bits.

        ``name_of`` converts the rest of each name into a key, and raises ValueError for a wrong name.
        """
        numbers: dict[T, int] = {}
        for name, raw in self._fields.items():
            if name.startswith(beginning):
                named = self._parsed(name, _named_integer, name_of, name[len(beginning) :], raw, bits)
                if named is not None:
                    numbers[named[0]] = named[1]
        return numbers

    def _parsed(self, name: str, parse: Callable[..., T], *parts: Any) -> T | None:
        value = self._parser.parse(RecordKind.STREAM, self._key, name, parse, *parts)
        if value is None:
            self._damaged.add(name)
        return value


def _named_integer(name_of: Callable[[str], T], name: str, raw: bytes, bits: int) -> tuple[T, int]:
    try:
        named = name_of(name)
    except ValueError:
        raise Malformed("its name cannot be parsed") from None
    return named, integer_of(raw, "it", bits)


def holder_id(text: str) -> int:
    if _HOLDER_ID.fullmatch(text) is None:
        raise ValueError
    return int(text)


def _status_of(raw: bytes) -> StreamStatus:
    try:
        return StreamStatus(lenient_text(raw))
    except ValueError:
        raise Malformed("status is one that this release does not know") from None


def _format_of(raw: bytes) -> int:
    version = integer_of(raw, "format")
    check_format(version)
    return version


@record(frozen=True, slots=True)
class StreamRecord:
    """The record of a stream, as the worker that takes its lease reads it."""

    life: str
    watermark: int | None
    ts: float | None
    newest_ts: float | None
    digest: str
    flags: frozenset[str]
    main_groups: str
    holders: Mapping[HolderName, int]
    """Ids of the live holders, by their names."""
    event_ids: Mapping[int, int]
    """For standard events, the last event_id of each holder."""
    shard_calls: Mapping[int, int]
    """How many calls each shard but the first had acknowledged when the watermark was written."""
    counters: Mapping[str, int]
    status: StreamStatus
    last_event_id: str = ""
    """For an event stream over HTTP: the ``id`` of the last event that was applied."""
    has_staged: bool = False
    """Whether there are holders of an incomplete snapshot, which must end."""
    is_damaged: bool = False
    """Whether the watermark, or a field that names a holder, cannot be read. Then the life of the stream must end."""


class Facts(TypedDict, total=False):
    """The fields besides counters that a stream writes into its record, even while a batch is being applied.

    Each value is true whether or not that batch is applied in the end. The watermark and the ``event_ids`` are not
    among them: only the script that applies a batch writes those. An empty text deletes the field.
    """

    status: str
    """The state of the stream, a ``StreamStatus``."""
    last_error: str
    """Why the stream is degraded, or has failed; a sentence."""
    flags: str
    """Flags of this life, separated by blanks. A flag is written before the batch that causes it is applied, so a
    worker that takes over applies that batch under the same flag. An unnecessary flag does no harm."""
    recent: str
    """The blocks that were stored and removed recently, as ``RecentBlocks`` writes them."""
    main_groups: str
    """The KV-cache group whose blocks are indexed: the group of the first stored event with tokens."""
    last_event_id: str
    """For an event stream over HTTP: the ``id`` of an applied event; all earlier events are applied, too."""


@record(slots=True)
class NewHolder:
    """A holder to begin, under the name by which its stream knows it."""

    name: HolderName
    holder: Holder = field(repr=False)


class Records:
    def __init__(self, client: RedisClient, scripts: Scripts, parser: RecordParser) -> None:
        self._client = client
        self._parser = parser
        self._scripts = scripts

    async def read(self, grant: Grant) -> StreamRecord | None:
        """Return the record, or None if it is gone, or contains another token.

        Raise RecordDamaged if the record has a format that this release does not read.
        """
        raw_fields = await self._client.hgetall(grant.record)
        if raw_fields.get(b"token") != grant.token.encode():
            return None
        return self._decoded(grant.claim, raw_fields)

    async def peek(self, claim: Claim) -> StreamRecord | None:
        """Return the record, whichever worker has the stream; None if it is gone. Raise RecordDamaged as ``read``
        does.
        """
        raw_fields = await self._client.hgetall(keys.record(claim.group_id, claim.publisher))
        return self._decoded(claim, raw_fields) if raw_fields else None

    def _decoded(self, claim: Claim, raw_fields: Mapping[bytes, bytes]) -> StreamRecord:
        record = keys.record(claim.group_id, claim.publisher)
        fields = StreamFields(self._parser, record, raw_fields)
        if not fields.is_of_this_format():
            raise RecordDamaged(
                f"the record {record} is of another release; run its stream with that one, or unregister "
                f"publisher {claim.registration.name} there"
            )
        holders = fields.integers(HOLDER, HolderName.parse)
        event_ids = fields.integers(EVENT, holder_id, bits=64)
        shard_calls = fields.integers(SHARD, int)
        watermark, main_group = fields.integer("watermark"), fields.integer("main_groups")
        return StreamRecord(
            life=fields.text("life"),
            watermark=watermark,
            ts=fields.number("ts"),
            newest_ts=fields.number("newest_ts"),
            digest=fields.text("digest"),
            flags=frozenset(fields.text("flags").split()),
            main_groups="" if main_group is None else str(main_group),
            holders=holders,
            event_ids=event_ids,
            shard_calls=shard_calls,
            counters=fields.integers(COUNTER, str),
            status=fields.status(),
            last_event_id=fields.text("last_event_id"),
            has_staged=fields.has_any(STAGED),
            is_damaged=fields.is_damaged(("watermark", "main_groups", HOLDER, EVENT, SHARD)),
        )

    async def adopt(self, grant: Grant, state: StreamRecord) -> None:
        """Add to a damaged record the live holders of its publisher that it does not name, so that ``new_life`` ends
        them.
        """
        key = keys.holders(grant.group_id)
        table = decode_table(await self._client.hgetall(key), self._parser, key)
        ids = set(state.holders.values())
        args: list[str] = []
        for holder in () if table is None else table.holders.values():
            if holder.publisher == grant.publisher and holder.id not in ids:
                args += (f"{HOLDER}{HolderName(holder.dp_rank, holder.medium, digest=str(holder.id))}", str(holder.id))
        if args:
            await self._write(grant, args)

    async def new_life(
        self,
        grant: Grant,
        *,
        unit: str,
        is_restart: bool,
        begin: Sequence[NewHolder],
        above: int,
        nonce: str | None = None,
    ) -> list[int] | None:
        """End the holders that ``unit`` names, and then begin the holders in ``begin``.

        ``unit`` is '*' (all holders), the name of one holder, a prefix of holder names, or '' (no holder).

        Return the ids of the holders that began, in order, or None if fenced. With ``is_restart`` the stream has no
        watermark afterwards. A caller that repeats a call whose reply was lost passes the same ``nonce``; the change is
        then made once. The new ids are higher than ``above``.
        """
        nonce = nonce or random_nonce()
        outcome = await self._scripts.run(
            "new_life",
            holders=keys.holders(grant.group_id),
            **grant.fenced_call,
            dead=keys.dead(grant.group_id),
            before=grant.change.nonce,
            version=nonce,
            above=above,
            unit=unit,
            life=nonce if is_restart else "",
            begin=[arg for new_holder in begin for arg in (str(new_holder.name), encode_holder(new_holder.holder))],
        )
        ids = _begun(grant, outcome, nonce)
        if is_restart and ids is not None:
            grant.moved_shards.clear()
        return ids

    async def stage(self, grant: Grant, begin: Sequence[NewHolder], above: int, nonce: str) -> list[int] | None:
        """Begin holders that no reader sees, and return their ids, in order; None if fenced."""
        return await self._stage(grant, "begin", begin, above=above, nonce=nonce)

    async def drop_staged(self, grant: Grant, nonce: str, holders: Sequence[NewHolder] = ()) -> bool:
        """End the holders that no reader sees, or only ``holders``; False if fenced."""
        return await self._stage(grant, "drop", holders, nonce=nonce) is not None

    async def take_staged(
        self,
        grant: Grant,
        commit: Commit | None,
        facts: Facts,
        begin: Sequence[NewHolder],
        nonce: str,
        *,
        is_repair: bool = True,
    ) -> bool:
        """End all live holders, and replace them by the staged ones in ``begin``. Return False if fenced.

        The record then has this watermark, if any, and these flags instead of those of the old life. ``is_repair``:
        this also fulfils a request for a repair.
        """
        moved = sorted(grant.moved_shards)
        shards: list[Arg] = [word for shard in moved for word in (shard, grant.calls[shard])]
        ids = await self._stage(
            grant, "take" if is_repair else "fill", begin, nonce=nonce, commit=commit, facts=facts, shards=shards
        )
        if ids is None:
            return False
        grant.moved_shards.difference_update(moved)
        return True

    async def _stage(
        self,
        grant: Grant,
        step: str,
        begin: Sequence[NewHolder],
        *,
        nonce: str,
        above: int = 0,
        commit: Commit | None = None,
        facts: Facts | None = None,
        shards: Sequence[Arg] = (),
    ) -> list[int] | None:
        facts = facts or {}
        outcome = await self._scripts.run(
            "stage_life",
            holders=keys.holders(grant.group_id),
            **grant.fenced_call,
            dead=keys.dead(grant.group_id),
            before=grant.change.nonce,
            version=nonce,
            above=above,
            step=step,
            life=nonce,
            **commit_words(commit),
            flags=facts.get("flags", ""),
            main_groups=facts.get("main_groups", ""),
            shards=shards,
            begin=[arg for new_holder in begin for arg in (str(new_holder.name), encode_holder(new_holder.holder))],
        )
        return _begun(grant, outcome, nonce)

    async def ask_repair(self, claim: Claim) -> bool:
        """Ask the worker of a stream to repair it; False if the publisher is gone."""
        outcome = await self._scripts.run(
            "ask_repair", record=keys.record(claim.group_id, claim.publisher), nonce=random_nonce()
        )
        return outcome.is_applied

    async def write(self, grant: Grant, facts: Facts, counters: Mapping[str, int]) -> bool:
        """Write facts and counters (absolute values); False if fenced.

        A medium without blocks has no counter, because a publisher may name any number of media one after the other.
        """
        args: list[str] = []
        for name, value in facts.items():
            args += (name, str(value))
        for name, count in counters.items():
            args += (COUNTER + name, str(count) if count or not name.startswith(BLOCKS) else "")
        return await self._write(grant, args)

    async def _write(self, grant: Grant, args: Sequence[Arg]) -> bool:
        return grant.counted(await self._scripts.run("write_record", **grant.fenced_call, field=args))

    async def set_lost(self, grant: Grant, *, is_lost: bool) -> bool:
        """Set in the holder table whether the publisher is lost; False if fenced."""
        outcome = await self._scripts.run(
            "mark_publisher",
            holders=keys.holders(grant.group_id),
            **grant.fenced_call,
            row=grant.claim.row(is_lost=is_lost),
            version=random_nonce(),
        )
        return grant.counted(outcome)

    async def note_health(self, grant: Grant, *, milliseconds: int) -> bool:
        """Note for this many ms that the engine cannot be reached, or with 0 that it can. Return False if fenced."""
        outcome = await self._scripts.run(
            "note_health",
            load=keys.load(grant.group_id),
            changes=keys.load_changes(grant.group_id),
            **grant.fenced_call,
            milliseconds=milliseconds,
        )
        return grant.counted(outcome)

    async def keep_singles(self, grant: Grant) -> bool:
        """Mark the group as having blocks of unknown depth. Return False if fenced."""
        outcome = await self._scripts.run(
            "keep_singles", holders=keys.holders(grant.group_id), **grant.fenced_call, version=random_nonce()
        )
        return grant.counted(outcome)


def _begun(grant: Grant, outcome: Outcome, nonce: str) -> list[int] | None:
    """Note a change of holders. Return the ids of those that began; None if the call was fenced."""
    if not outcome.is_applied:
        return None
    calls, *ids = outcome.numbers
    grant.acknowledged(0, calls)
    grant.change.nonce = nonce
    return ids
