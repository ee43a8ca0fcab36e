"""The snapshots of one stream: when one is requested, and how it replaces the memory of the stream.

A snapshot is tried after a replay, before a stream is left degraded. It is applied to a life hidden from readers; later
live frames are applied after it, as after a replay. If it cannot be used, the stream continues unchanged, and asks
again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Final

import zmq

from waymark.apply.applier import Applier, Incoming
from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.record import record
from waymark.domain.events import Batch, Cleared, PlainEvents, StoredReference
from waymark.engines.sglang import read_records
from waymark.engines.wire import Rejected
from waymark.ingest import snapshot
from waymark.ingest.frames import digest
from waymark.ingest.life import Life
from waymark.ingest.options import StreamOptions
from waymark.ingest.received import ReceivedFrames
from waymark.ingest.snapshot import NOTHING_RECORDED, UNAVAILABLE, BadSnapshot, Snapshot
from waymark.ingest.sockets import ZmqContext
from waymark.store.activity import ActivityKind
from waymark.store.leases import SnapshotPlaces, new_place

log = logging.getLogger(__name__)

BLOCKS_MAX: Final = 1_000_000
"""The bound that vLLM sets on the blocks of its snapshots."""
PAUSE_SECONDS_MAX: Final = 600.0


class SnapshotOutcome(StrEnum):
    COMPLETE = "complete"
    UNAVAILABLE = "unavailable"
    """The engine cannot make a snapshot now."""
    SILENT = "silent"
    """The engine did not answer in time."""
    REFUSED = "refused"
    """The reply contradicts itself, is incomplete, or exceeds a bound."""
    INTERRUPTED = "interrupted"
    """The connection or the time ended before the snapshot was complete."""


@record(frozen=True, slots=True)
class SnapshotSource:
    """The dependencies of a stream's snapshots."""

    endpoint: str
    places: SnapshotPlaces
    stage: Callable[[Life], Applier]
    """Creates an applier whose life readers do not see."""


class Snapshots:
    """Asks for snapshots, one at a time. ``tick`` is called several times a second meanwhile."""

    def __init__(
        self,
        life: Life,
        source: SnapshotSource,
        context: ZmqContext,
        received: ReceivedFrames,
        options: StreamOptions,
        *,
        tick: Callable[[], Awaitable[None]],
    ) -> None:
        self._life = life
        self._source = source
        self._context = context
        self._received = received
        self._answer_seconds = options.snapshot_answer_seconds
        self._seconds = options.snapshot_seconds
        self._pause_seconds = self._pause = options.snapshot_pause_seconds
        """The shortest pause before an engine is asked again, and the present one, which doubles after failures."""
        self._message_bytes_max = options.message_bytes_max
        self._tick = tick
        self._due = 0.0
        self._repairs = False

    @property
    def is_due(self) -> bool:
        """Whether to ask now: something is missing, and frames of this connection show that the subscription works."""
        wants_repair = self._life.applier.grant.change.wants_repair
        if wants_repair and not self._repairs:
            self._due = 0.0
        self._repairs = wants_repair
        if not self._life.wants_snapshot or time.monotonic() < self._due:
            return False
        return self._received.is_unbroken and self._life.order.last_live is not None

    async def run(self) -> None:
        """Ask for a snapshot and apply it, if this engine may be asked now. Raises Fenced."""
        life, source, place = self._life, self._source, new_place()
        socket = digest(source.endpoint.encode())
        place = await life.applier.calls.answered(
            lambda: source.places.take(place, socket, self._seconds, self._pause_seconds)
        )
        if place.wait_seconds:
            self._due = time.monotonic() + min(place.wait_seconds, self._pause_seconds)
            return
        began = time.monotonic()
        try:
            outcome, why = await self._take(began + self._seconds)
        finally:
            await self._release(lambda: source.places.release(place, socket))
        life.note_snapshot(outcome, why)
        about = fields(stream=life.name, seconds=round(time.monotonic() - began, 3), outcome=outcome)
        if outcome is SnapshotOutcome.COMPLETE:
            self._pause = self._pause_seconds
            blocks = life.applier.resolver.memory.blocks
            life.applier.happened(ActivityKind.SNAPSHOT, f"{blocks} blocks")
            log.info("a snapshot has taken the place of what was known", extra=about | fields(blocks=blocks))
        else:
            log.warning("a snapshot could not be used; it is asked for again", extra=about | fields(why=why))
        self._due = time.monotonic() + self._pause
        if outcome is not SnapshotOutcome.COMPLETE:
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    async def _take(self, deadline: float) -> tuple[SnapshotOutcome, str]:
        """Ask, and apply the answer. Return the outcome, and why it is not complete."""
        try:
            snapshot = await self._ask()
            if snapshot is None and not self._received.is_unbroken:
                return SnapshotOutcome.INTERRUPTED, "the connection ended before a snapshot came"
            if snapshot is None:
                return SnapshotOutcome.SILENT, f"no snapshot came within {self._answer_seconds:g} s"
            if snapshot.seq == UNAVAILABLE:
                return SnapshotOutcome.UNAVAILABLE, "the engine cannot make a snapshot now"
            if snapshot.seq == NOTHING_RECORDED:
                return await self._begin_empty(snapshot)
            return await self._apply(snapshot, deadline)
        except (BadSnapshot, InvalidValue, OSError) as exc:
            return SnapshotOutcome.REFUSED, str(exc)

    async def _ask(self) -> Snapshot | None:
        registration = self._life.applier.resolver.registration
        if registration.kind.traits.snapshots == "batches":
            ask = snapshot.ask
        else:
            ask = partial(snapshot.ask_records, block_size=registration.block_size)
        return await ask(
            self._context,
            self._source.endpoint,
            seconds=self._answer_seconds,
            message_bytes_max=self._message_bytes_max,
            between=self._may_go_on,
        )

    async def _may_go_on(self) -> bool:
        await self._tick()
        return self._received.is_unbroken

    async def _begin_empty(self, snapshot: Snapshot) -> tuple[SnapshotOutcome, str]:
        """Begin an empty life, because the engine has not published yet, so the known blocks belong to an earlier
        process.
        """
        life = self._life
        if snapshot.publisher_id == life.publisher_id:
            raise BadSnapshot("its snapshot says that it has published nothing, but batches of that process have come")
        if life.order.watermark is not None:
            await life.begin_anew("the snapshot of another publisher_id")
        life.applier.grant.change.wants_repair = False
        return SnapshotOutcome.COMPLETE, ""

    async def _apply(self, snapshot: Snapshot, deadline: float) -> tuple[SnapshotOutcome, str]:
        """Apply the chunks to a life that readers do not see, and then replace the old life with it."""
        life, watermark = self._life, self._life.order.watermark
        if snapshot.publisher_id == life.publisher_id and watermark is not None and snapshot.seq < watermark:
            raise BadSnapshot(f"its snapshot ends with batch {snapshot.seq}, and batch {watermark} is applied already")
        staged, ts, records = self._source.stage(life), None, 0
        try:
            for seq, payloads in _numbered(snapshot):
                if snapshot.records is None:
                    incoming = await self._decoded(seq, payloads, snapshot.publisher_id)
                else:
                    incoming, count = await self._records(seq, payloads)
                    records += count
                    staged.resolver.before = await life.applier.spots_of(incoming.batch)
                await staged.apply([incoming], None)
                ts = incoming.batch.ts if ts is None else max(ts, incoming.batch.ts or ts)
                _check(staged)
                await self._tick()
                if time.monotonic() > deadline:
                    await staged.drop_staged()
                    return SnapshotOutcome.INTERRUPTED, f"a snapshot was not applied within {self._seconds:g} s"
            if snapshot.records not in (None, records):
                raise BadSnapshot(f"its snapshot has {records} records and says that it has {snapshot.records}")
            staged.resolver.before = {}
            await life.take_snapshot(staged, snapshot.seq, ts, snapshot.publisher_id)
        except (BadSnapshot, InvalidValue, OSError):
            await staged.drop_staged()
            raise
        return SnapshotOutcome.COMPLETE, ""

    async def _records(self, seq: int, payloads: list[bytes]) -> tuple[Incoming, int]:
        """Return one or more chunks of records as a batch, and the number of records. Raises BadSnapshot."""
        events: list[StoredReference] = []
        records = 0
        for payload in payloads:
            try:
                count, stores = await self._life.decoder.slices.run(read_records(payload))
            except Rejected as bad:
                raise BadSnapshot(f"a chunk of its snapshot cannot be read: {bad.sentence}") from None
            records += count
            events += stores
        return Incoming(seq, "", Batch(None, tuple(events)), sum(map(len, payloads))), records

    async def _decoded(self, seq: int, payloads: list[bytes], publisher_id: bytes | None) -> Incoming:
        """Return one or more chunks as a batch. Raise BadSnapshot if they cannot be read completely."""
        batches: list[Incoming] = []
        for payload in payloads:
            incoming = await self._life.decoder.decode(seq, payload, b"")
            if incoming is None:
                raise BadSnapshot(f"its snapshot ends with batch {seq}, which is no number of a batch")
            batch = incoming.batch
            if batch.rejected:
                kind, sample = next(iter(batch.samples.items()), (next(iter(batch.rejected)), ""))
                raise BadSnapshot(f"a chunk of its snapshot cannot be read: {batch.lost or sample or kind}")
            if batch.publisher_id != publisher_id:
                raise BadSnapshot("a chunk of its snapshot is of another publisher_id than the snapshot")
            if type(batch.events) is not PlainEvents and any(isinstance(event, Cleared) for event in batch.events):
                raise BadSnapshot("a chunk of its snapshot clears the cache")
            batches.append(incoming)
        first = batches[0]
        if len(batches) == 1:
            return first
        events = tuple(event for item in batches for event in item.batch.events)
        return Incoming(seq, "", replace(first.batch, events=events), sum(item.size for item in batches))

    async def _release(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await asyncio.shield(asyncio.ensure_future(call()))
        except StoreUnavailable as exc:
            # The place expires by itself.
            log.debug("place of a snapshot not released", extra=fields(error=exc.sentence))


def _numbered(snapshot: Snapshot) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the chunks, numbered from 0 to the seq of the snapshot, so that batches after the snapshot have higher
    numbers.

    If there are more chunks than numbers, the last number gets all remaining chunks.
    """
    chunks, seq = snapshot.chunks, 0
    while chunks:
        if seq < snapshot.seq:
            yield seq, [_bytes(chunks.popleft())]
        else:
            rest = [_bytes(chunk) for chunk in chunks]
            chunks.clear()
            yield seq, rest
        seq += 1


def _bytes(chunk: bytes | zmq.Frame) -> bytes:
    return chunk if isinstance(chunk, bytes) else chunk.bytes


def _check(staged: Applier) -> None:
    """Raise BadSnapshot if the chunks applied so far cannot be the beginning of a snapshot."""
    resolver = staged.resolver
    if resolver.below_zero:
        raise BadSnapshot("its snapshot removes a block of which no copy is left")
    if resolver.memory.blocks > BLOCKS_MAX:
        raise BadSnapshot(f"its snapshot has more than {BLOCKS_MAX} blocks (snapshot_max_blocks)")
