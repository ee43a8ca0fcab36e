"""Judges a live frame: in order, a gap, a restart, or seen before.

The decision follows from the state of the stream alone: its watermark with ts and digest, and the last live seq on this
connection. The rules are the table "Order, gaps, restarts" in ``docs/protocol.md``. A publisher counts its frames from
0 at every start, so a seq that does not grow on one connection always means a restart.
"""

from __future__ import annotations

from enum import StrEnum

from waymark.domain.parts import Commit
from waymark.ingest.frames import Frame


class FramePosition(StrEnum):
    IN_ORDER = "in_order"
    BEGINNING = "beginning"
    """There is no watermark, so this batch is the first one of its life that the stream has."""
    GAP = "gap"
    RESTART = "restart"
    STALE = "stale"
    APPLIED = "applied"
    """The replay for which the frame waited has applied it."""
    MIXED = "mixed"
    """The seq is lower, and the topic or rank differs from that of the last frame: several counters share this socket.
    """


class FrameOrder:
    """The state of one counter. ``watermark`` includes the batches of the current call to Redis."""

    def __init__(self, watermark: int | None, digest: str, newest_ts: float | None, *, is_shared: bool = False) -> None:
        """``is_shared``: it is known that one counter numbers the frames of all topics."""
        self._is_shared = is_shared
        self.watermark = watermark
        self.digest = digest
        self.newest_ts = newest_ts
        """The largest ts of this life."""
        self.last_live: int | None = None
        """The seq of the last live frame on this connection, whether or not it was applied."""
        self._last_topic = b""
        self._last_rank: int | None = None

    @property
    def next_seq(self) -> int:
        """The seq of the next batch; there is a watermark."""
        assert self.watermark is not None
        return self.watermark + 1

    def connected(self) -> None:
        """Note a new connection: its seqs are not compared with those of the old one."""
        self.last_live = None
        self._last_rank = None

    def judge(self, frame: Frame, digest: str, ts: float | None, dp_rank: int | None) -> FramePosition:
        """Judge a live frame; its seq is the last live one from now on.

        ``dp_rank`` is None for an undecodable payload: its rank is unknown.
        """
        last, topic, rank = self.last_live, self._last_topic, self._last_rank
        self.last_live, self._last_topic = frame.seq, frame.topic
        if dp_rank is not None:
            self._last_rank = dp_rank
        if last is not None and frame.seq <= last:
            if self._is_shared:
                return FramePosition.RESTART
            is_other_rank = dp_rank is not None and rank is not None and dp_rank != rank
            return FramePosition.MIXED if is_other_rank or frame.topic != topic else FramePosition.RESTART
        return self.position_of(frame.seq, digest, ts)

    def passed(self, frame: Frame) -> None:
        """Note a live frame that a replay has applied already."""
        self.last_live, self._last_topic = frame.seq, frame.topic

    def take_straight(self, frame: Frame, digest: str, ts: float, dp_rank: int) -> None:
        """Note the last one of live frames that were in order, and are being applied."""
        self.passed(frame)
        self._last_rank = dp_rank
        self.advance(frame.seq, digest, ts)

    def went_on(self, count: int) -> None:
        """Note ``count`` further live frames, in order, and of the topic and rank of the last one."""
        assert self.last_live is not None
        self.last_live += count

    def position_of(self, seq: int, digest: str, ts: float | None) -> FramePosition:
        """Judge a batch by its seq, digest and ts, without the seqs of earlier live frames."""
        if self.watermark is None:
            return FramePosition.BEGINNING
        if seq == self.watermark + 1:
            return FramePosition.IN_ORDER
        if seq > self.watermark:
            return FramePosition.GAP
        is_old = ts is None or self.newest_ts is None or ts <= self.newest_ts
        if is_old or (seq == self.watermark and digest == self.digest):
            return FramePosition.STALE
        return FramePosition.RESTART

    def is_behind(self, seq: int) -> bool:
        """Return whether a replay has already brought the batch of the next live frame, which has this seq.

        The frame came on the same connection as the last live frame and has a higher seq, so both belong to the same
        life.
        """
        return self.last_live is not None and self.watermark is not None and self.last_live < seq <= self.watermark

    def advance(self, seq: int, digest: str, ts: float | None) -> None:
        self.watermark, self.digest = seq, digest
        if ts is not None and (self.newest_ts is None or ts > self.newest_ts):
            self.newest_ts = ts

    def commit_at(self, seq: int, digest: str, ts: float) -> Commit:
        """Return the watermark for the batch ``seq``, which comes next."""
        newest = self.newest_ts
        return Commit(seq, ts, ts if newest is None or ts > newest else newest, digest)

    def begin_behind(self, seq: int, ts: float | None) -> None:
        """Begin a new life after the batch ``seq``, whose bytes are not known."""
        self.watermark, self.digest, self.newest_ts = seq, "", ts

    def restart(self) -> None:
        """Begin a new life, without a watermark, and without live frames of the previous process."""
        self.watermark, self.digest, self.newest_ts = None, "", None
        self.last_live = None
