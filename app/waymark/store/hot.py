"""Hot rows: values that a replica keeps for a short time.

Each row of a long shared system prompt has hundreds of holders, and every query reads these rows. A copy from a moment
ago is good enough: readers ignore a holder after its end, and miss a new holder for that moment only. A marked
row with few holders is kept, too, but only as a hint. The query reads that row again, and in the same request the
branch rows of the blocks that the copy did not list.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from waymark.base.metrics import Metrics

HOLDERS_MIN = 32
"""A row with at least this many holders is hot. Reading a row with fewer costs less than keeping it."""
#: The approximate bytes of a row besides its value: a dictionary slot, a key, a place in the queue.
_ROW_BYTES = 300


def crowd_blocks(runs: Iterable[tuple[bytes, int]]) -> int:
    """Return how many blocks of runs have enough holders to make their rows hot."""
    blocks = 0
    for value, length in runs:
        if value.count(b" ") >= HOLDERS_MIN - 1:
            blocks += length
    return blocks


MILLISECONDS = 200
"""How long a replica keeps a row. The last engine to store its blocks may be missing from the copy, but a choice among
the others that it names is as good. A longer time saves little, because a busy replica reads each such row only
five times a second.
"""
BYTES_MAX = 64 * 2**20
"""The bound on hot rows. They are few: the rows of common beginnings of prompts."""


class HotRow(NamedTuple):
    """A copy of a row. With ``is_enough`` a query uses the copy instead of the row; otherwise it is only a hint."""

    value: bytes
    is_enough: bool
    is_marked: bool
    """Whether branch rows may have blocks that the row does not list."""


class HotRows:
    """Rows by group id and head, at most ``bytes_max`` and ``seconds`` old. Times are monotonic."""

    def __init__(self, seconds: float, bytes_max: int, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._metrics.hot_block_bytes.set_function(lambda: self.bytes)
        self._seconds = seconds
        self._bytes_max = bytes_max if seconds > 0 else 0
        self._rows: dict[int, dict[int, HotRow]] = {}
        """By group id and head, a number."""
        self._queue: deque[tuple[float, int, int]] = deque()
        self.bytes = 0
        self.clearings = 0
        """How often all rows were dropped. A row may be kept only if this has not changed since the row was
        requested.
        """

    def __len__(self) -> int:
        return len(self._queue)

    def expire(self, now: float) -> bool:
        """Drop the outdated rows. Return whether any row remains."""
        while self._queue and self._queue[0][0] <= now:
            self._drop_oldest()
        return bool(self._rows)

    def find(self, group_id: int, heads: bytes) -> dict[int, HotRow]:
        """Return the rows of packed ``heads``, by the index of the head, in order."""
        found = self._find(group_id, array("Q", heads))
        self._metrics.hot_block_hits.inc(len(found))
        return found

    def find_whole(self, group_id: int, heads: array[int]) -> dict[int, bytes] | None:
        """Return the values of rows as ``find`` does, if each of them is enough and unmarked; otherwise None."""
        found = self._find(group_id, heads)
        if any(row.is_marked or not row.is_enough for row in found.values()):
            return None
        self._metrics.hot_block_hits.inc(len(found))
        return {index: row.value for index, row in found.items()}

    def _find(self, group_id: int, heads: array[int]) -> dict[int, HotRow]:
        rows = self._rows.get(group_id)
        if rows is None or rows.keys().isdisjoint(heads):
            return {}
        return {index: rows[head] for index, head in enumerate(heads) if head in rows}

    def keep(self, group_id: int, heads: bytes, values: Sequence[bytes | None], now: float) -> None:
        """Keep the hot and the marked rows among those of packed ``heads``."""
        for head, value in zip(array("Q", heads), values, strict=True):
            if value is None:
                continue
            is_enough, is_marked = value.count(b":") >= HOLDERS_MIN, b"+" in value
            if is_enough or is_marked:
                self._keep(group_id, head, HotRow(value, is_enough, is_marked), now)

    def _keep(self, group_id: int, head: int, row: HotRow, now: float) -> None:
        rows = self._rows.get(group_id, {})
        if self._bytes_max == 0 or head in rows:
            return
        size = _ROW_BYTES + len(row.value)
        while self._queue and self.bytes + size > self._bytes_max:
            self._drop_oldest()
        if size <= self._bytes_max:
            self._rows.setdefault(group_id, {})[head] = row
            self._queue.append((now + self._seconds, group_id, head))
            self.bytes += size

    def clear(self) -> None:
        """Drop all rows, because after an acknowledged write of this process, answers must contain its blocks."""
        self.clearings += 1
        self._rows.clear()
        self._queue.clear()
        self.bytes = 0

    def _drop_oldest(self) -> None:
        _, group_id, head = self._queue.popleft()
        rows = self._rows[group_id]
        self.bytes -= _ROW_BYTES + len(rows.pop(head).value)
        if not rows:
            del self._rows[group_id]
