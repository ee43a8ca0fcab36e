"""Publishers' records: what a stream knows of itself, and the lives of its holders.

Everything here is written under a grant; a caller that gets None or False has been fenced, and must forget all it
believed of the stream.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

from waymark.domain.names import Holder, HolderName, Registration
from waymark.domain.status import StreamStatus
from waymark.errors import RecordDamaged
from waymark.store import keys
from waymark.store.claims import Claim, decode_table, encode_holder
from waymark.store.client import Client
from waymark.store.heartbeats import Heartbeat
from waymark.store.incarnation import Incarnation
from waymark.store.leases import Grant, random_nonce
from waymark.store.parsing import Malformed, RecordKind, RecordParser, check_format, integer_of, lenient_text, number_of
from waymark.store.scripts import Scripts

T = TypeVar("T")

#: Record fields that are counters begin with this.
_COUNTER = "count:"

#: Fields with the ids of live holders, and with the last event_ids of holders, begin with these.
_HOLDER, _EVENT = "holder:", "event:"
_HOLDER_ID = re.compile(r"[0-9]{1,16}")


@dataclass(frozen=True, slots=True)
class StreamState:
    """A record as the lease holder finds it."""

    life: str
    watermark: int | None
    ts: float | None
    newest_ts: float | None
    digest: str
    flags: frozenset[str]
    main_groups: str
    holders: Mapping[HolderName, int]
    """Ids of the live ones."""
    event_ids: Mapping[int, int]
    """Standard events: the last event_id per holder."""
    counters: Mapping[str, int]
    status: StreamStatus
    change: str
    """The nonce of the last change of holders under the present token; '' for none."""
    is_damaged: bool = False
    """Where the stream stands, or which holders it has, cannot be read: its life has to end."""


@dataclass(frozen=True, slots=True)
class PublisherState:
    """A publisher as ``/workers`` tells of it."""

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


class Facts(TypedDict, total=False):
    """What a stream writes of itself beside its counters, at any time: also while a batch is being applied.

    Each value is true whether or not that batch is applied in the end. The watermark and the ``event_ids`` are not
    among them: only the script that applies a batch moves those. An empty text takes a field out.
    """

    status: str
    """What the stream does at this moment."""
    last_error: str
    """Why it is not all it could be at this moment."""
    flags: str
    """What this life has reported, words with blanks between: written before the batch that reports it is applied,
    so that whoever applies that batch goes by it. A flag too many makes a stream more careful."""
    main_groups: str
    """The KV-cache group that counts: that of the first store with tokens, whoever comes to apply that store."""


@dataclass(slots=True)
class Begin:
    """A holder to begin, under the name by which its stream knows it."""

    name: HolderName
    holder: Holder = field(repr=False)


class Records:
    def __init__(
        self, client: Client, scripts: Scripts, parser: RecordParser, incarnation: Incarnation | None = None
    ) -> None:
        self._client = client
        self._parser = parser
        self._scripts = scripts
        self._incarnation = incarnation or Incarnation()

    async def read(self, grant: Grant) -> StreamState | None:
        """The record; None where it is gone or names another token.

        Raises RecordDamaged where it is of a version that this release does not read.
        """
        held = await self._client.hgetall(grant.record)
        if held.get(b"token") != grant.token.encode():
            return None
        fields = _StreamFields(self._parser, grant.record, held)
        if not fields.is_of_this_format():
            raise RecordDamaged(
                f"the record {grant.record} is of another release; run its stream with that one, or unregister "
                f"publisher {grant.claim.registration.name} there"
            )
        by, _, change = fields.text("turn").partition(" ")
        holders = fields.integers(_HOLDER, HolderName.parse)
        event_ids = fields.integers(_EVENT, _holder_id)
        watermark, main_group = fields.integer("watermark"), fields.integer("main_groups")
        return StreamState(
            life=fields.text("life"),
            watermark=watermark,
            ts=fields.number("ts"),
            newest_ts=fields.number("newest_ts"),
            digest=fields.text("digest"),
            flags=frozenset(fields.text("flags").split()),
            main_groups="" if main_group is None else str(main_group),
            holders=holders,
            event_ids=event_ids,
            counters=fields.integers(_COUNTER, str),
            status=fields.status(),
            change=change if by == grant.token else "",
            is_damaged=fields.is_damaged(("watermark", "main_groups", _HOLDER, _EVENT)),
        )

    async def adopt(self, grant: Grant, state: StreamState) -> None:
        """Write into a damaged record the live holders of the publisher that it does not name, so that they can end."""
        key = keys.holders(grant.group_id)
        table = decode_table(await self._client.hgetall(key), self._parser, key)
        known = set(state.holders.values())
        lost = [] if table is None else [each for each in table.holders.values() if each.publisher == grant.publisher]
        args: list[str] = []
        for holder in lost:
            if holder.id not in known:
                name = HolderName(holder.dp_rank, holder.medium, digest=str(holder.id))
                args += (f"{_HOLDER}{name}", str(holder.id))
        if args:
            await self._scripts.write_record(grant.record, grant.token, args)

    async def watermark(self, grant: Grant) -> int | None:
        """As it stands now; only who has the stream moves it, so another one than his is that of an older Redis."""
        found = await self._client.hget(grant.record, "watermark")
        return (
            None
            if found is None
            else self._parser.parse(RecordKind.STREAM, grant.record, "watermark", integer_of, found, "watermark")
        )

    async def new_life(
        self,
        grant: Grant,
        *,
        unit: str,
        is_restart: bool,
        begin: Sequence[Begin],
        above: int,
        nonce: str | None = None,
    ) -> list[int] | None:
        """End the holders of ``unit`` ('*', a name, a name's beginning, or '' for none) and begin others.

        The ids of ``begin``, in order; with ``is_restart`` the stream has no watermark afterwards. Who makes the same
        call again, because he has seen no reply, gives the same random ``nonce``: what was done is not done twice.
        """
        nonce = nonce or random_nonce()
        outcome = await self._scripts.new_life(
            keys.holders(grant.group_id),
            grant.record,
            keys.fence(grant.group_id, 0),
            keys.dead(grant.group_id),
            grant.token,
            grant.change.nonce,
            nonce,
            above,
            unit,
            nonce if is_restart else "",
            [arg for each in begin for arg in (str(each.name), encode_holder(each.holder))],
        )
        if not outcome.is_applied:
            return None
        grant.change.nonce = nonce
        if is_restart:
            grant.shard_seqs.clear()
        return list(outcome.numbers)

    async def write(self, grant: Grant, facts: Facts, counters: Mapping[str, int]) -> bool:
        """Write facts and counters (absolute values); False where fenced."""
        args: list[str] = []
        for name, value in facts.items():
            args += (name, str(value))
        for name, count in counters.items():
            args += (_COUNTER + name, str(count))
        return (await self._scripts.write_record(grant.record, grant.token, args)).is_applied

    async def set_lost(self, grant: Grant, *, is_lost: bool) -> bool:
        """Tell readers whether the publisher is lost; False where fenced."""
        outcome = await self._scripts.mark_publisher(
            keys.holders(grant.group_id),
            grant.record,
            grant.publisher,
            grant.token,
            grant.claim.row(is_lost=is_lost),
            random_nonce(),
        )
        return outcome.is_applied

    async def publisher_states(self, claims: Sequence[Claim]) -> list[PublisherState]:
        """What the records of ``claims`` say, in their order; of one that cannot be read, what the claim says."""
        now = time.time()
        names = [keys.record(claim.group_id, claim.publisher) for claim in claims]
        replies = await self._client.several((("HGETALL", name) for name in names), is_lenient=True)
        records = [_StreamFields(self._parser, name, _pairs(reply)) for name, reply in zip(names, replies, strict=True)]
        blocks = await self._blocks(claims, records)
        states: list[PublisherState] = []
        for claim, fields, held in zip(claims, records, blocks, strict=True):
            fields.is_of_this_format()
            ts = fields.number("ts")
            states.append(
                PublisherState(
                    registration=claim.registration,
                    id=claim.publisher,
                    group_id=claim.group_id,
                    status=fields.status(),
                    watermark=fields.integer("watermark"),
                    lag_seconds=None if ts is None else max(0.0, now - ts),
                    counters=fields.integers(_COUNTER, str),
                    blocks=held,
                    last_error=fields.text("last_error") or None,
                    worker=fields.text("worker") if fields.has("worker") else None,
                )
            )
        return states

    async def _blocks(self, claims: Sequence[Claim], records: Sequence[_StreamFields]) -> list[dict[str, int]]:
        """How many blocks each publisher holds, by medium."""
        asked: list[tuple[int, str]] = []
        lengths: list[tuple[str, ...]] = []
        for i, (claim, fields) in enumerate(zip(claims, records, strict=True)):
            for name, holder in fields.integers(_HOLDER, HolderName.parse).items():
                for shard in range(claim.shards):
                    asked.append((i, name.medium))
                    engine = keys.engine(claim.group_id, shard, holder)
                    lengths += (("HLEN", engine), ("HGET", engine, "*"))
        blocks: list[dict[str, int]] = [{} for _ in claims]
        replies = await self._client.several(lengths, is_lenient=True)
        for (i, medium), length, copied in zip(asked, replies[::2], replies[1::2], strict=True):
            # Fields of an engine hash that are no blocks: its mark, those that count copies, and how many these are.
            copies = int(copied) if copied is not None and copied.isdigit() and len(copied) <= 16 else 0
            others = 1 + (0 if copied is None else 1 + copies)
            blocks[i][medium] = blocks[i].get(medium, 0) + max(0, (length or 0) - others)
        return blocks

    async def heartbeat(
        self, worker: str, *, keep_seconds: int, streams_max: int | None = None, is_leaving: bool = False
    ) -> dict[str, int | None]:
        """Say that ``worker`` is alive (or leaves; '' only asks); of all that are, how many streams each takes.

        None is no limit. A worker says the same ``streams_max`` for as long as it lives.
        """
        member = Heartbeat(worker, streams_max).member
        members = await self._scripts.beat(keys.WORKERS, member, keep_seconds, "1" if is_leaving else "")
        return dict(map(Heartbeat.of, members))

    async def alive(self, worker: str, *, keep_seconds: int, is_leaving: bool = False) -> list[str]:
        """As ``heartbeat``, of a worker without a limit; the ids alone."""
        return list(await self.heartbeat(worker, keep_seconds=keep_seconds, is_leaving=is_leaving))

    async def incarnation(self) -> str:
        """The random nonce of this filling of Redis; another one means that it came back empty."""
        nonce = await self._scripts.name_birth(keys.INCARNATION, random_nonce())
        self._incarnation.saw(keys.INCARNATION, nonce.encode())
        return nonce


class _StreamFields:
    """A publisher's record, field by field. What cannot be read is as good as not there, and is counted."""

    def __init__(self, parser: RecordParser, key: str, held: Mapping[bytes, bytes] | None) -> None:
        self._parser = parser
        self._key = key
        self._fields = {lenient_text(name): value for name, value in (held or {}).items()}
        self._damaged: set[str] = set()
        parser.forget(key, (held or {}).keys())
        if held is None:
            parser.reject(RecordKind.STREAM, key, "", "it is no hash")

    def has(self, name: str) -> bool:
        return name in self._fields

    def is_of_this_format(self) -> bool:
        return not self.has("format") or self._parsed("format", _format_of, self._fields["format"]) is not None

    def is_damaged(self, beginnings: tuple[str, ...]) -> bool:
        """Whether a field that was read, and whose name begins so, could not be."""
        return any(name.startswith(beginnings) for name in self._damaged)

    def text(self, name: str) -> str:
        return lenient_text(self._fields.get(name, b""))

    def status(self) -> StreamStatus:
        raw = self._fields.get("status")
        return (raw and self._parsed("status", _status_of, raw)) or StreamStatus.PENDING

    def integer(self, name: str) -> int | None:
        raw = self._fields.get(name)
        return self._parsed(name, integer_of, raw, name) if raw else None

    def number(self, name: str) -> float | None:
        raw = self._fields.get(name)
        return self._parsed(name, number_of, raw, name) if raw else None

    def integers(self, beginning: str, name_of: Callable[[str], T]) -> dict[T, int]:
        """Integers of the fields whose names begin so, by what ``name_of`` reads in the rest of their names."""
        found: dict[T, int] = {}
        for name, raw in self._fields.items():
            if name.startswith(beginning):
                named = self._parsed(name, _named_integer, name_of, name[len(beginning) :], raw)
                if named is not None:
                    found[named[0]] = named[1]
        return found

    def _parsed(self, name: str, parse: Callable[..., T], *parts: Any) -> T | None:
        found = self._parser.parse(RecordKind.STREAM, self._key, name, parse, *parts)
        if found is None:
            self._damaged.add(name)
        return found


def _named_integer(name_of: Callable[[str], T], name: str, raw: bytes) -> tuple[T, int]:
    try:
        named = name_of(name)
    except ValueError:
        raise Malformed("its name is not as it should be") from None
    return named, integer_of(raw, "it")


def _holder_id(text: str) -> int:
    if _HOLDER_ID.fullmatch(text) is None:
        raise ValueError
    return int(text)


def _status_of(raw: bytes) -> StreamStatus:
    try:
        return StreamStatus(lenient_text(raw))
    except ValueError:
        raise Malformed("status is none that this release knows") from None


def _format_of(raw: bytes) -> int:
    version = integer_of(raw, "format")
    check_format(version)
    return version


def _pairs(reply: list[bytes] | dict[bytes, bytes] | None) -> Mapping[bytes, bytes] | None:
    """HGETALL through a pipeline of raw commands: a flat list, or a dict where the client has made one."""
    if reply is None or isinstance(reply, dict):
        return reply
    return dict(zip(reply[::2], reply[1::2], strict=True))
