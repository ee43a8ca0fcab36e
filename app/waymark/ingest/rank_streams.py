"""Streams of a proxy in front of several publishers, registered with ``sequence: rank``: one counter per rank, and no
replay.

The order of each rank is kept in memory only, and no watermark moves.
"""

from __future__ import annotations

from typing import Literal

from waymark.apply.applier import Incoming
from waymark.ingest.counters import BATCHES_LOST
from waymark.ingest.frames import Frame
from waymark.ingest.life import Life
from waymark.ingest.order import FrameOrder, FramePosition
from waymark.store.activity import ActivityKind

#: Ranks come from batches. Above this number the oldest known rank is forgotten.
_RANKS_MAX = 1024


class RankStreams:
    def __init__(self, life: Life, *, on_gap: Literal["keep", "reset"]) -> None:
        self._life = life
        self._on_gap = on_gap
        self._orders: dict[int, FrameOrder] = {}

    def connected(self) -> None:
        for order in self._orders.values():
            order.connected()

    async def live(self, frame: Frame, incoming: Incoming) -> None:
        """Apply a live frame; a lower seq ends the life of its rank only."""
        life = self._life
        dp_rank = life.rank_of(incoming.batch)
        if dp_rank is None:
            # The payload cannot be decoded, so its rank is unknown. The frame is counted, and its rank will show a gap.
            if incoming.batch.lost is not None:
                await life.give_up(incoming)
            await life.applier.apply([incoming], None)
            life.count_passed()
            return
        order = self._orders.setdefault(dp_rank, FrameOrder(None, "", None))
        if len(self._orders) > _RANKS_MAX:
            del self._orders[next(iter(self._orders))]
        judgement = order.judge(frame, incoming.digest, incoming.batch.ts, dp_rank)
        if judgement is FramePosition.STALE:
            life.count("stale_batches")
            return
        is_end = judgement in (FramePosition.RESTART, FramePosition.MIXED)
        is_late = judgement is FramePosition.BEGINNING
        if is_late:
            # After a takeover, the rank may be in another life than its holders.
            is_end = life.has_holders_of(dp_rank)
        elif judgement is FramePosition.GAP:
            is_end = is_late = await self._lose(order, incoming.seq)
        if is_end:
            await life.applier.new_life(dp_rank)
            life.applier.happened(ActivityKind.RESTART, f"rank {dp_rank}")
            life.count("restarts")
            order.restart()
            order.last_live = frame.seq
        if is_late and incoming.seq > life.first_seq:
            await life.join_late()
        order.advance(incoming.seq, incoming.digest, incoming.batch.ts)
        await life.applier.apply([incoming], None)
        await life.found()

    async def _lose(self, order: FrameOrder, seq: int) -> bool:
        """Count the missing batches. Return whether the loss ends the life of the rank."""
        life = self._life
        assert order.watermark is not None
        life.count("gaps")
        life.count("batches_lost", seq - order.watermark - 1)
        if self._on_gap == "reset":
            return True
        life.reasons.add(BATCHES_LOST)
        await life.distrust_counts()
        life.applier.miss(seq - order.watermark - 1)
        return False
