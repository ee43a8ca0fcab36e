"""The parts beyond the watermark that Redis has when a worker takes a stream over.

The worker resolves their batches again, and leaves these parts out. It has read its memory of the blocks from Redis, so
that memory has them, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from waymark.domain.rows import Place


class AppliedMarks:
    """How far each shard is for each holder."""

    def __init__(self, shards: int) -> None:
        self.marks: dict[tuple[int, int], tuple[int, int]] = {}
        """The seq and the position of the last part, by holder and shard. Empty once all of them are behind."""
        self._shards = shards

    def restore(self, marks: Mapping[tuple[int, int], tuple[int, int]]) -> None:
        self.marks = dict(marks)

    def begin_batch(self, seq: int) -> None:
        if self.marks and all(seq > applied for applied, _ in self.marks.values()):
            self.marks = {}

    def has(self, seq: int, at: int, holder: int, place: Place) -> bool:
        """Whether Redis has the part that a batch writes at this position."""
        if not self.marks:
            return False
        mark = self.marks.get((holder, place.shard(self._shards)))
        return mark is not None and (seq, at) <= mark
