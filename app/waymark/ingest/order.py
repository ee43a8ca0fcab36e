"""Decides what a live frame means: in order, a gap, a restart, or seen before.

The decision follows from the state of the stream alone: its watermark with ts and digest, and the last live seq on this
connection. The rules are the table "Order, gaps, restarts" of the event contract. A publisher counts its frames from 0
at every start, so a seq that does not grow on one connection always means a restart, whatever any clock says.
"""

from __future__ import annotations

from enum import StrEnum

from waymark.ingest.frames import Frame


class Judgement(StrEnum):
    IN_ORDER = "in_order"
    BEGINNING = "beginning"
    """There is no watermark; what comes first is the beginning."""
    GAP = "gap"
    RESTART = "restart"
    STALE = "stale"
    MIXED = "mixed"
    """A lower seq under another topic or rank than the last frame's: several counters share this socket."""


class Order:
    """One counter's state. ``watermark`` runs ahead of Redis by what is being applied."""

    def __init__(self, watermark: int | None, digest: str, newest_ts: float | None, *, is_shared: bool = False) -> None:
        """``is_shared``: the frames of all topics are known to have one counter."""
        self._is_shared = is_shared
        self.watermark = watermark
        self.digest = digest
        self.newest_ts = newest_ts
        """The largest ts of this life."""
        self.last_live: int | None = None
        """Seq of the last live frame on this connection, whatever came of it."""
        self._last_topic = b""
        self._last_rank: int | None = None

    def connected(self) -> None:
        """A new connection: live frames of the old one prove nothing any more."""
        self.last_live = None
        self._last_rank = None

    def judge(self, frame: Frame, digest: str, ts: float | None, dp_rank: int | None) -> Judgement:
        """What a live frame means; its seq is the last live one from now on.

        ``dp_rank`` is None for a payload that is no batch: it may be anybody's.
        """
        last, topic, rank = self.last_live, self._last_topic, self._last_rank
        self.last_live, self._last_topic = frame.seq, frame.topic
        if dp_rank is not None:
            self._last_rank = dp_rank
        if last is not None and frame.seq <= last:
            if self._is_shared:
                return Judgement.RESTART
            is_other_rank = dp_rank is not None and rank is not None and dp_rank != rank
            return Judgement.MIXED if is_other_rank or frame.topic != topic else Judgement.RESTART
        return self.place(frame.seq, digest, ts)

    def place(self, seq: int, digest: str, ts: float | None) -> Judgement:
        """What a batch means by its number alone, where it is known that no restart lies before it."""
        if self.watermark is None:
            return Judgement.BEGINNING
        if seq == self.watermark + 1:
            return Judgement.IN_ORDER
        if seq > self.watermark:
            return Judgement.GAP
        is_old = ts is None or self.newest_ts is None or ts <= self.newest_ts
        if is_old or (seq == self.watermark and digest == self.digest):
            return Judgement.STALE
        return Judgement.RESTART

    def is_behind(self, seq: int) -> bool:
        """Whether a live frame that comes next is known by its seq alone: a replay has brought it meanwhile.

        The connection is the one that the last live frame came over, so the frame is of the same life.
        """
        return self.last_live is not None and self.watermark is not None and self.last_live < seq <= self.watermark

    def advance(self, seq: int, digest: str, ts: float | None) -> None:
        self.watermark, self.digest = seq, digest
        if ts is not None and (self.newest_ts is None or ts > self.newest_ts):
            self.newest_ts = ts

    def restart(self) -> None:
        """A new life: no watermark, and what was live before was another process's."""
        self.watermark, self.digest, self.newest_ts = None, "", None
        self.last_live = None
