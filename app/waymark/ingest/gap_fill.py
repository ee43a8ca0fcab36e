"""Fills a gap of a life: applies the batches from the gap on again, to a copy of the life that readers do not see."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto

from waymark.apply.applier import Applier, Incoming
from waymark.base.errors import RecordDamaged, StoreUnavailable
from waymark.base.logs import fields
from waymark.ingest.frames import ReplayedBatch
from waymark.ingest.life import Life

log = logging.getLogger(__name__)


class FillProgress(Enum):
    """The result of reading replies for a gap."""

    GOES_ON = auto()
    FILLED = auto()
    OTHER_LIFE = auto()
    """The replies come from another process than the life."""
    BROKEN = auto()
    """A batch is missing in the replay, or too large."""


class GapFill:
    """A life that readers do not see: the blocks known now, to which all batches from a gap to the watermark are
    applied again.

    The last batch that names a block decides about it, because no count of copies is trusted after a gap. A block that
    no batch from the gap on names is as it was before the gap. So the life is right only after the last batch.
    """

    def __init__(self, life: Life, staged: Applier) -> None:
        assert life.opening.gap_from is not None
        self.hole: tuple[int, int] | None = None
        """(first missing seq, seq that came instead)."""
        self.lacks_blocks = False
        """Whether some known blocks were not found in Redis."""
        self._life = life
        self._staged = staged
        self._next = life.opening.gap_from
        order = life.order
        self._proofs = {seq: digest for seq, digest in (life.proof, (order.watermark, order.digest)) if digest}
        staged.resolver.is_snapshot = False

    async def begin(self, tick: Callable[[], Awaitable[None]]) -> bool:
        """Begin with the known blocks. Return False, without an effect, if they cannot be copied now."""
        try:
            if await self._staged.copy(self._life.applier, self._next - 1, tick):
                return True
            self.lacks_blocks = True
        except StoreUnavailable as exc:
            self.lacks_blocks = isinstance(exc, RecordDamaged)
            log.debug("blocks not copied", extra=fields(stream=self._life.name, error=exc.sentence))
        await self.drop()
        return False

    async def drop(self) -> None:
        """Give up: the life stays as it is. Raises Fenced."""
        await self._staged.drop_staged()

    async def read(self, replies: Sequence[ReplayedBatch]) -> tuple[int, FillProgress]:
        """Apply replies up to the watermark. Return how many were read, and the progress."""
        life, fold = self._life, list[Incoming]()
        for count, (seq, payload, topic) in enumerate(replies, 1):
            is_known = seq < self._next
            if is_known and seq not in self._proofs:
                continue
            incoming = await life.decoder.decode(seq, payload, topic, is_known=is_known)
            if incoming is None:
                continue
            is_other = self._proofs.get(seq, incoming.digest) != incoming.digest
            if is_other or life.is_of_another_process(incoming.batch):
                return count, FillProgress.OTHER_LIFE
            if is_known:
                continue
            if seq > self._next:
                self.hole = self._next, seq
                return count - 1, FillProgress.BROKEN
            if incoming.batch.lost is not None:
                return count - 1, FillProgress.BROKEN
            fold.append(incoming)
            self._next += 1
            if seq == life.order.watermark:
                await self._apply(fold)
                await life.take_filled(self._staged, incoming.batch.ts)
                return count, FillProgress.FILLED
        await self._apply(fold)
        return len(replies), FillProgress.GOES_ON

    async def _apply(self, fold: Sequence[Incoming]) -> None:
        staged = self._staged
        staged.slices.begin()
        if fold:
            batches = [incoming.batch for incoming in fold]
            await staged.slices.run(staged.resolver.recall(batches, self._life.applier.resolver))
            await staged.apply(fold, None)
