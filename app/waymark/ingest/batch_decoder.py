"""Decodes the payload of a frame into a batch with its seq and its digest. A rejected payload is counted, and logged
once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from waymark.apply.applier import Incoming
from waymark.apply.slices import SliceRunner
from waymark.base.errors import Undecodable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.events import Batch, PlainEvents
from waymark.engines import Decoder, OverCeiling
from waymark.engines.batches import MORE, SHORT_BYTES, plain_batch
from waymark.engines.wire import frame_too_large
from waymark.ingest.counters import LifeCounter
from waymark.ingest.frames import DIGEST_SLICE_BYTES, Frame, PayloadFacts, ReplayedBatch, digest, digest_slices

log = logging.getLogger(__name__)

#: A larger seq is rejected: numbers in Redis' scripts are doubles, and no publisher sends so many batches.
SEQ_MAX = 2**53 - 1
_KINDS_LOGGED_MAX = 100
_FRAMES_AT_FIRST = 4
_NO_BATCH = Batch(None, ())


class BatchDecoder:
    """Decodes the frames of one stream, in slices if they are large."""

    def __init__(
        self,
        stream: str,
        topic: str | None,
        decode: Decoder,
        slices: SliceRunner,
        count: Callable[[LifeCounter], None],
        metrics: Metrics,
    ) -> None:
        """``topic`` is the publisher's topic, if others share its socket."""
        self._stream = stream
        self._topic = None if topic is None else topic.encode()
        self._decode = decode
        self.slices = slices
        self._count = count
        self._metrics = metrics
        self._logged: set[str] = set()

    @property
    def payload_bytes_max(self) -> int:
        """The bytes of the longest payload to read."""
        return self._decode.ceilings.frame_bytes

    @property
    def plain_bytes_max(self) -> int:
        """The bytes of the longest payload whose plain events are read at once."""
        return self._decode.plain_bytes_max

    def reading_of(self, batch: Batch, hashes_max: int) -> tuple[Any, ...] | None:
        """Return how frames like ``batch`` are read in one step; see ``Decoder.reading_of``."""
        return self._decode.reading_of(batch, hashes_max)

    async def decode(
        self, seq: int, payload: bytes | PayloadFacts, topic: bytes, *, is_known: bool = False
    ) -> Incoming | None:
        """Return the decoded batch, or None if ``seq`` is too large.

        An undecodable payload, or one under the topic of another publisher, gives an empty batch, so that
        its seq still counts. ``is_known``: the batch was applied before, so only its digest is computed.
        """
        if seq > SEQ_MAX:
            self._count("frames_malformed")
            return None
        size = payload.size if isinstance(payload, PayloadFacts) else len(payload)
        self._metrics.frames.inc()
        self._metrics.frame_bytes.inc(size)
        is_other = self._topic is not None and topic != self._topic
        batch = _NO_BATCH
        if not (is_known or is_other):
            batch = await self.batch(payload)
            self._note(batch, size)
        if isinstance(payload, PayloadFacts) or size <= DIGEST_SLICE_BYTES:
            digested = digest(payload)
        else:
            digested = await self.slices.run(digest_slices(payload))
        return Incoming(seq, digested, batch, size)

    async def go_on(
        self, first: Incoming, frames: Iterable[Frame | ReplayedBatch], *, hashes_max: int, bytes_max: int
    ) -> Incoming:
        """Return a decoded batch, extended by the next frames that differ from it in their blocks only.

        ``frames`` come from the same publisher, and their seqs continue that of the batch without a gap. Together they
        have at most ``hashes_max`` hashes and ``bytes_max`` bytes.
        """
        batch, size, last = first.batch, first.size, b""
        if type(batch.events) is not PlainEvents:
            return first
        # If a batch cannot be extended far, the first few frames usually show it. Otherwise doubling keeps the steps
        # few.
        waiting, step = iter(frames), _FRAMES_AT_FIRST
        while True:
            payloads = _fitting(islice(waiting, step), bytes_max - size)
            joined = self._decode.go_on(batch, payloads, hashes_max)
            count = joined.frames - batch.frames
            if count:
                batch, last = joined, payloads[count - 1]
                size += sum(map(len, payloads[:count]))
            if count < step:
                break
            step *= 2
        if not last:
            return first
        self._metrics.frames.inc(batch.frames - 1)
        self._metrics.frame_bytes.inc(size - first.size)
        if self.slices.is_over:
            await self.slices.pause()
        return Incoming(first.seq, digest(last), batch, size)

    async def batch(self, payload: bytes | PayloadFacts) -> Batch:
        """Decode a payload without counting its rejected events."""
        try:
            if isinstance(payload, PayloadFacts):
                raise frame_too_large(payload.size, self._decode.ceilings)
            plain = self._decode.plain(payload)
            if plain is not None and not plain.others:
                batch = plain_batch(plain)
                if self.slices.is_over:
                    await self.slices.pause()
                return batch
            if len(payload) <= SHORT_BYTES:
                return self._decode.short(payload, plain)
            return await self.slices.run(self._decode.slices(payload, plain))
        except Undecodable as exc:
            batch = Batch(None, (), lost=exc.sentence if isinstance(exc, OverCeiling) else None)
            batch.rejected[exc.kind] += 1
            batch.samples[exc.kind] = exc.sentence
            return batch

    def _note(self, batch: Batch, size: int) -> None:
        """Count the ceilings that a batch exceeded, and log each kind of rejected event once."""
        if not batch.rejected:
            return
        if batch.lost is not None:
            (kind,) = batch.rejected
            self._metrics.batches_over_ceiling.labels(ceiling=kind).inc()
        if MORE in batch.rejected:
            self._metrics.batches_over_ceiling.labels(ceiling="rejected_events").inc()
        for kind, sample in batch.samples.items():
            if kind not in self._logged and len(self._logged) < _KINDS_LOGGED_MAX:
                self._logged.add(kind)
                about = fields(stream=self._stream, reason=kind, sample=sample, bytes=size)
                log.warning("events rejected", extra=about)


def _fitting(frames: Iterable[Frame | ReplayedBatch], bytes_max: int) -> list[bytes]:
    """Return the payloads of the first frames that may be decoded, at most ``bytes_max`` bytes together."""
    payloads: list[bytes] = []
    for frame in frames:
        payload = frame.payload
        if isinstance(payload, PayloadFacts) or len(payload) > bytes_max or frame.seq > SEQ_MAX:
            break
        bytes_max -= len(payload)
        payloads.append(payload)
    return payloads
