"""``POST /events``: standard events over HTTP, for publishers without a socket.

A request does the work for its events that a stream does for frames: it takes the publisher's lease, reads the progress
of each stream, applies the next events, and releases the lease. Each stream is ordered by ``event_id``. An event that
was applied before is skipped, so a sender may always repeat a request whose answer was lost. The next request reuses
what this one knows of the publisher's blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.http.fields import RANK, BlockSize, Hash, HashList, Model, RankNumber, Root, TokenIds
from waymark.api.http.prompts import check_count
from waymark.api.http.tokens_file import Caller
from waymark.apply import resuming
from waymark.apply.applier import Applier, Incoming
from waymark.apply.options import ApplyOptions
from waymark.apply.redis_calls import Fenced
from waymark.apply.resuming import resumed
from waymark.base.errors import Conflict, Contended, InvalidValue, NotFound, WaymarkError
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.contract.publishers import EventsAnswer
from waymark.domain.engines import OVER_HTTP
from waymark.domain.events import Batch, Envelope, Event
from waymark.domain.media import UNNAMED
from waymark.domain.names import BLOCK_SIZE, DEFAULT_TENANT, U64_MASK, PublisherName
from waymark.domain.status import StreamStatus
from waymark.engines.standard import decode_event
from waymark.store.claims import Claim
from waymark.store.directory import FromClaims
from waymark.store.leases import Grant
from waymark.store.store import Store

EventId = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": U64_MASK},
                {"type": "string", "pattern": "^[0-9]{1,20}$"},
            ]
        }
    ),
]


class StandardEvent(Model):
    """One event of the KV Events envelope."""

    event_id: EventId = Field(description="the number of the event in its stream, which rises by one with each event")
    event_type: Literal["stored", "removed", "cleared"]
    backend_id: str = Field(description="the registered instance_id")
    tenant_id: str | None = Field(None, description=f"empty means '{DEFAULT_TENANT}'")
    model_name: str | None = Field(None, description="the default is the registered name")
    block_size: BlockSize | None = Field(None, description=f"{BLOCK_SIZE}; the default is the registered size")
    dp_rank: RankNumber | None = Field(None, description=f"{RANK}; the default is the registered rank")
    medium: Annotated[str, Field(pattern="^[A-Za-z0-9_]{0,32}$")] | None = Field(
        None,
        description=f"in upper or lower case, not DP; the default is {UNNAMED}, or for a cleared event every medium",
    )
    lora_name: str | None = Field(None, description="empty means the base model")
    additional_salt: str | None = Field(None, description="empty means none")
    seq_hashes: HashList | None = Field(
        None,
        description="rolling hashes; or, with token_ids, the engine's own hashes. "
        "Stored and removed events need at least one",
    )
    base_block_idx: RankNumber | None = Field(
        None,
        description=f"{RANK}: the position of the first block in the prompt; a stored event needs this or parent_hash",
    )
    parent_hash: Hash | None = Field(None, description="the hash of the block before the first block of this event")
    token_ids: TokenIds | None = Field(
        None, description="the tokens of the blocks; absent if the hashes are rolling hashes"
    )
    timestamp: Any = Field(None, description="the time of the event, in any unit; Waymark does not use it")


class EventsRequest(Root[StandardEvent | list[StandardEvent]]):
    """One event, or a list of events."""


_LEASE_SECONDS = 10.0
#: How long a request waits for the lease of another request on the same publisher.
_WAIT_SECONDS = 2.0
_FOLD_EVENTS, _OWNERS_AT_ONCE = 64, 1024
#: In Redis each event has a seq, which must be exact as a double; an event_id need not be. The last such number marks
#: ended holders.
_SEQS = 2**53 - 1
#: The most hashes in one event, because it is decoded in one go while other requests wait.
EVENT_HASHES_MAX = 65_536


@record(slots=True)
class _AppliedEvents:
    applied: int = 0
    stale: int = 0
    expected: int | None = None
    """The event_id that should have come next, if there is a gap."""


class Events:
    """The handler of ``/events``."""

    def __init__(self, store: Store, options: ApplyOptions, metrics: Metrics, *, tokens_max: int) -> None:
        self._store = store
        self._publishers = FromClaims(store.polled_claims, _Publishers)
        self._max_tokens = tokens_max
        self._options = options
        self._metrics = metrics
        self._kept = store.incarnation.cache(resuming.KeptMemories(store, resuming.BYTES_MAX, metrics))

    async def events(self, body: Body) -> Answer:
        """Apply one event or a list, up to the first gap. If one event is invalid, the whole request is refused."""
        documents = body.documents or []
        for field, width in (("token_ids", 4), ("seq_hashes", 8)):
            check_count(sum(_length(document, field, width) for document in documents), field, self._max_tokens)
        events: list[Event] = []
        for i, document in enumerate(documents):
            hashes = _length(document, "seq_hashes", 8)
            if hashes > EVENT_HASHES_MAX:
                raise InvalidValue(
                    f"seq_hashes has {hashes} elements and one event takes at most {EVENT_HASHES_MAX}; "
                    "send several events",
                    reason="too_large",
                    field="seq_hashes",
                )
            events.append(_decoded(document, i if len(documents) > 1 else None))
            await asyncio.sleep(0)
        publishers, owners = await self._publishers(), list[Claim]()
        for event in events:
            owners.append(publishers.owner_of(event, body.caller))
            if len(owners) % _OWNERS_AT_ONCE == 0:
                await asyncio.sleep(0)
        progress = _AppliedEvents()
        for _, pairs in groupby(zip(owners, events, strict=True), key=lambda pair: pair[0].publisher):
            owned = list(pairs)
            try:
                await self._apply(owned[0][0], [event for _, event in owned], progress)
            finally:
                self._store.reader.forget_rows()
            if progress.expected is not None:
                error = {
                    "error": f"event {progress.expected} of this stream is missing; continue with that event",
                    "reason": "gap",
                    "applied": progress.applied,
                    "expected": progress.expected,
                }
                return Answer(error, 409)
        return Answer(EventsAnswer(applied=progress.applied, stale=progress.stale))

    async def _apply(self, claim: Claim, events: Sequence[Event], progress: _AppliedEvents) -> None:
        grant = await self._granted(claim)
        try:
            await self._apply_under(grant, events, progress)
        except Fenced:
            raise Contended(
                f"publisher {shown(str(claim.registration.name))} moved to another process during this request; "
                "send the events again"
            ) from None
        finally:
            await self._store.leases.drop(grant)

    async def _granted(self, claim: Claim) -> Grant:
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            if not await self._store.claim_writer.begin(claim):
                raise Contended(
                    f"the registration of publisher {shown(str(claim.registration.name))} is being changed; try again"
                )
            grant = await self._store.leases.take(claim, "", _LEASE_SECONDS)
            if grant is not None:
                return grant
            if time.monotonic() > deadline:
                raise Contended(
                    f"publisher {shown(str(claim.registration.name))} is in use by another request; try again"
                )
            await asyncio.sleep(0.02)

    async def _apply_under(self, grant: Grant, events: Sequence[Event], progress: _AppliedEvents) -> None:
        applier, _ = await resumed(grant, self._store, self._metrics, self._options, is_patient=False, kept=self._kept)
        try:
            await self._apply_next(applier, events, progress)
            await self._kept.keep(grant, applier.resolver)
        finally:
            applier.close()

    async def _apply_next(self, applier: Applier, events: Sequence[Event], progress: _AppliedEvents) -> None:
        resolver = applier.resolver
        last_ids = {
            name.lasting: resolver.event_ids[holder]
            for name, holder in sorted(resolver.holders.items(), key=lambda item: item[1])
            if holder in resolver.event_ids
        }
        fold: list[Incoming] = []
        for event in events:
            assert event.envelope is not None
            batch = Batch(None, (event,))
            name, event_id = resolver.name_of(batch, event), event.envelope.event_id
            last = last_ids.get(name)
            if last is not None and event_id <= last:
                progress.stale += 1
                continue
            if last is not None and event_id > last + 1:
                progress.expected = last + 1
                break
            last_ids[name] = event_id
            if last is not None and event_id // _SEQS > last // _SEQS:
                # The seqs begin again, so a new holder begins, too.
                await self._flush(applier, fold, progress)
                await applier.new_life(name)
            fold.append(Incoming(event_id % _SEQS, "", batch))
            if len(fold) == _FOLD_EVENTS:
                await self._flush(applier, fold, progress)
        await self._flush(applier, fold, progress)
        if resolver.waiting.blocks:
            # No store waits beyond its request, so stores that have not found their parent are lost.
            applier.counters["waiting_lost"] += resolver.waiting.blocks
            applier.counters["waiting"] = 0
            await applier.write({}, applier.counters)
        await applier.bounding.check(at_once=True)

    async def _flush(self, applier: Applier, fold: list[Incoming], progress: _AppliedEvents) -> None:
        if not fold:
            return
        await applier.apply(fold, None)
        await applier.write({"status": StreamStatus.ACTIVE}, applier.counters)
        progress.applied += len(fold)
        fold.clear()


def _length(document: object, field: str, width: int) -> int:
    """Return how many integers of ``width`` bytes a field holds. For a value other than a list or bytes, which the
    decoder will refuse, return 0.
    """
    value = document.get(field) if isinstance(document, dict) else None
    if isinstance(value, bytes):
        return len(value) // width
    return len(value) if isinstance(value, list) else 0


def _decoded(document: object, index: int | None) -> Event:
    if not isinstance(document, dict):
        raise InvalidValue(f"an event is {shown(document)}, not an object", reason="invalid_type", index=index)
    try:
        return decode_event(document)
    except InvalidValue as exc:
        where = "" if index is None else f"event {index}: "
        raise InvalidValue(
            where + exc.sentence, reason=exc.reason, field=exc.field, index=exc.index if index is None else index
        ) from None


class _Publishers:
    """All publishers, indexed, so that an event's publisher is found without a search."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self._claims = claims
        self._by_rank: dict[tuple[str, str], dict[int, Claim]] = {}
        """The claims of publishers whose events come by HTTP, by instance and tenant, and then by rank, in order of
        registration.
        """
        for claim in claims:
            registration = claim.registration
            if registration.endpoint is None and registration.kind.traits.tells_events:
                ranks = self._by_rank.setdefault((registration.instance_id, registration.tenant_id), {})
                ranks.setdefault(registration.dp_rank, claim)

    def owner_of(self, event: Event, caller: Caller) -> Claim:
        """Return the publisher of an event, which names its instance as ``backend_id``, among those of a caller."""
        envelope = event.envelope
        assert envelope is not None
        has_tenant = caller.has(envelope.tenant_id)
        ranks = self._by_rank.get((envelope.backend_id, envelope.tenant_id), {}) if has_tenant else {}
        claim = ranks.get(envelope.dp_rank or 0) or next(iter(ranks.values()), None)
        if claim is None:
            raise _not_found([each for each in self._claims if caller.has(each.registration.tenant_id)], envelope)
        registration = claim.registration
        if envelope.model_name not in (None, registration.model_name):
            raise InvalidValue(
                f"model_name is {shown(envelope.model_name)}, but {shown(envelope.backend_id)} is registered for "
                f"{shown(registration.model_name)}; register that model under another instance_id",
                field="model_name",
            )
        if envelope.block_size not in (None, registration.block_size):
            raise InvalidValue(
                f"block_size is {envelope.block_size}, but {shown(envelope.backend_id)} is registered with "
                f"{registration.block_size}; send that, or leave it out",
                field="block_size",
            )
        return claim


def _not_found(claims: Sequence[Claim], envelope: Envelope) -> WaymarkError:
    """Return the error for an event without a publisher."""
    name = PublisherName(envelope.backend_id, envelope.tenant_id, envelope.dp_rank or 0)
    if not any(claim.registration.name[:2] == name[:2] for claim in claims) and any(
        claim.registration.instance_id == envelope.backend_id for claim in claims
    ):
        return InvalidValue(
            f"tenant_id is {shown(envelope.tenant_id)}, which {shown(envelope.backend_id)} is not registered for; "
            "send the tenant it is registered with",
            field="tenant_id",
        )
    registered = next((claim.registration for claim in claims if claim.registration.name == name), None)
    if registered is not None and not registered.kind.traits.tells_events:
        return Conflict(
            f"publisher {shown(str(name))} is registered as type {registered.kind}, which sends no events; register "
            f"it as type {OVER_HTTP} to send them here",
            field="backend_id",
        )
    if registered is not None:
        return Conflict(
            f"publisher {shown(str(name))} has an endpoint, and its events are read from there; "
            f"register it without one, as type {OVER_HTTP}, to send them here",
            field="backend_id",
        )
    return NotFound(f"no publisher {shown(str(name))}; register it first, as type {OVER_HTTP} without an endpoint")
