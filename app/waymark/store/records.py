"""Publishers' records: what a stream knows of itself, and the lives of its holders.

Everything here is written under a grant; a caller that gets None or False has been fenced, and must forget all it
believed of the stream.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from waymark.domain.names import Holder, Registration
from waymark.store import keys
from waymark.store.claims import Claim, encode_holder
from waymark.store.client import Client
from waymark.store.heartbeats import Heartbeat
from waymark.store.incarnation import Incarnation
from waymark.store.leases import Grant, random_word
from waymark.store.scripts import Scripts

#: Record fields that are counters begin with this.
_COUNTER = "count:"


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
    holders: Mapping[str, int]
    """Live holder ids by name, ``<rank> <medium>`` with the digest of further dimensions for standard events."""
    event_ids: Mapping[int, int]
    """Standard events: the last event_id per holder."""
    counters: Mapping[str, int]
    status: str
    turn: str
    """The word of the last change of holders under the present token; '' for none."""


@dataclass(frozen=True, slots=True)
class PublisherState:
    """A publisher as ``/workers`` tells of it."""

    registration: Registration
    id: int
    group_id: int
    status: str
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

    name: str
    holder: Holder = field(repr=False)


class Records:
    def __init__(self, client: Client, scripts: Scripts, incarnation: Incarnation | None = None) -> None:
        self._client = client
        self._scripts = scripts
        self._incarnation = incarnation or Incarnation()

    async def read(self, grant: Grant) -> StreamState | None:
        """The record; None where it is gone or names another token."""
        fields = {name.decode(): value.decode() for name, value in (await self._client.hgetall(grant.record)).items()}
        if fields.get("token") != grant.token:
            return None
        by, _, turn = fields.get("turn", "").partition(" ")
        return StreamState(
            life=fields["life"],
            watermark=_integer(fields.get("watermark")),
            ts=_number(fields.get("ts")),
            newest_ts=_number(fields.get("newest_ts")),
            digest=fields.get("digest", ""),
            flags=frozenset(fields.get("flags", "").split()),
            main_groups=fields.get("main_groups", ""),
            holders={name[7:]: int(value) for name, value in fields.items() if name.startswith("holder:")},
            event_ids={int(name[6:]): int(value) for name, value in fields.items() if name.startswith("event:")},
            counters=_counters(fields),
            status=fields.get("status", "pending"),
            turn=turn if by == grant.token else "",
        )

    async def watermark(self, grant: Grant) -> int | None:
        """As it stands now; only who has the stream moves it, so another one than his is that of an older Redis."""
        found = await self._client.hget(grant.record, "watermark")
        return None if found is None else int(found)

    async def new_life(
        self,
        grant: Grant,
        *,
        unit: str,
        is_restart: bool,
        begin: Sequence[Begin],
        above: int,
        word: str | None = None,
    ) -> list[int] | None:
        """End the holders of ``unit`` ('*', a name, a name's beginning, or '' for none) and begin others.

        The ids of ``begin``, in order; with ``is_restart`` the stream has no watermark afterwards. Who makes the same
        call again, because he has seen no reply, gives the same random ``word``: what was done is not done twice.
        """
        word = word or random_word()
        outcome = await self._scripts.new_life(
            keys.holders(grant.group_id),
            grant.record,
            keys.fence(grant.group_id, 0),
            keys.dead(grant.group_id),
            grant.token,
            grant.turn.word,
            word,
            above,
            unit,
            word if is_restart else "",
            [word for each in begin for word in (each.name, encode_holder(each.holder))],
        )
        if not outcome.is_applied:
            return None
        grant.turn.word = word
        if is_restart:
            grant.marks.clear()
        return list(outcome.numbers)

    async def write(self, grant: Grant, facts: Facts, counters: Mapping[str, int]) -> bool:
        """Write facts and counters (absolute values); False where fenced."""
        words: list[str] = []
        for name, value in facts.items():
            words += (name, str(value))
        for name, count in counters.items():
            words += (_COUNTER + name, str(count))
        return (await self._scripts.write_record(grant.record, grant.token, words)).is_applied

    async def mark(self, grant: Grant, *, is_lost: bool) -> bool:
        """Tell readers whether the publisher is lost; False where fenced."""
        outcome = await self._scripts.mark_publisher(
            keys.holders(grant.group_id),
            grant.record,
            grant.publisher,
            grant.token,
            grant.claim.row(is_lost=is_lost),
            random_word(),
        )
        return outcome.is_applied

    async def publisher_states(self, claims: Sequence[Claim]) -> list[PublisherState]:
        """What the records of ``claims`` say, in their order."""
        now = time.time()
        records = await self._client.several(
            ("HGETALL", keys.record(claim.group_id, claim.publisher)) for claim in claims
        )
        decoded = [_decode_reply(record) for record in records]
        asked: list[tuple[int, str]] = []
        lengths: list[tuple[str, ...]] = []
        for i, (claim, fields) in enumerate(zip(claims, decoded, strict=True)):
            for name, holder in fields.items():
                if name.startswith("holder:"):
                    for shard in range(claim.shards):
                        asked.append((i, name.split()[1]))
                        engine = keys.engine(claim.group_id, shard, int(holder))
                        lengths += (("HLEN", engine), ("HGET", engine, "*"))
        blocks: list[dict[str, int]] = [{} for _ in claims]
        replies = await self._client.several(lengths)
        for (i, medium), length, copied in zip(asked, replies[::2], replies[1::2], strict=True):
            # Fields of an engine hash that are no blocks: its mark, those that count copies, and how many these are.
            others = 1 + (0 if copied is None else 1 + int(copied))
            blocks[i][medium] = blocks[i].get(medium, 0) + max(0, length - others)
        states: list[PublisherState] = []
        for claim, fields, held in zip(claims, decoded, blocks, strict=True):
            ts = _number(fields.get("ts"))
            states.append(
                PublisherState(
                    registration=claim.registration,
                    id=claim.publisher,
                    group_id=claim.group_id,
                    status=fields.get("status", "pending"),
                    watermark=_integer(fields.get("watermark")),
                    lag_seconds=None if ts is None else max(0.0, now - ts),
                    counters=_counters(fields),
                    blocks=held,
                    last_error=fields.get("last_error"),
                    worker=fields.get("worker"),
                )
            )
        return states

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
        """The random word of this filling of Redis; another one means that it came back empty."""
        word = await self._scripts.name_birth(keys.BIRTH, random_word())
        self._incarnation.saw(keys.BIRTH, word.encode())
        return word


def _decode_reply(reply: list[bytes] | dict[bytes, bytes]) -> dict[str, str]:
    """HGETALL through a pipeline of raw commands: a flat list, or a dict where the client has made one."""
    if isinstance(reply, dict):
        return {name.decode(): value.decode() for name, value in reply.items()}
    words = [word.decode() for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _counters(fields: Mapping[str, str]) -> dict[str, int]:
    return {name[len(_COUNTER) :]: int(value) for name, value in fields.items() if name.startswith(_COUNTER)}


def _integer(text: str | None) -> int | None:
    return int(text) if text else None


def _number(text: str | None) -> float | None:
    return float(text) if text else None
