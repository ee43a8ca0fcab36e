"""Hot rows: values that a replica keeps for a short time.

Each row of a long shared system prompt has hundreds of holders, and every query reads these rows. A copy from a moment
ago is good enough: readers ignore a holder after its end, and miss a new holder for that moment only. A marked
row with few holders is kept, too, but only as a hint. The query reads that row again, and in the same request the
branch rows of the blocks that the copy did not list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from waymark.base.metrics import Metrics
from waymark.domain.packing import KEY_BYTES

#: A row with at least this many holders is hot. A row with fewer is read from Redis each time.
_HOLDERS_MIN = 8
#: The approximate bytes of a row besides its value: a dictionary slot, a key, a place in the queue.
_ROW_BYTES = 300


def is_crowd(run: tuple[bytes, int]) -> bool:
    """Return whether a run of blocks has enough holders to make its row hot."""
    return run[0].count(b" ") >= _HOLDERS_MIN - 1


MILLISECONDS = 200
"""How long a replica keeps a row. The last engine to store its blocks may be missing from the copy, but a choice among
the eight others that it names is as good. A longer time saves little, because a busy replica reads each such row only
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
    """Rows by (group id, packed key of the head), at most ``bytes_max`` and ``seconds`` old. Times are monotonic."""

    def __init__(self, seconds: float, bytes_max: int, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._metrics.hot_block_bytes.set_function(lambda: self.bytes)
        self._seconds = seconds
        self._bytes_max = bytes_max if seconds > 0 else 0
        self._rows: dict[tuple[int, bytes], HotRow] = {}
        self._queue: deque[tuple[float, tuple[int, bytes]]] = deque()
        self.bytes = 0
        self.clearings = 0
        """How often all rows were dropped. A row may be kept only if this has not changed since the row was
        requested.
        """

    def __len__(self) -> int:
        return len(self._rows)

    def expire(self, now: float) -> bool:
        """Drop the outdated rows. Return whether any row remains."""
        while self._queue and self._queue[0][0] <= now:
            self._drop_oldest()
        return bool(self._rows)

    def find(self, group_id: int, heads: bytes) -> dict[int, HotRow]:
        """Return the rows of packed ``heads``, by the index of the head."""
        rows, hits = self._rows, {}
        for index in range(len(heads) // KEY_BYTES):
            row = rows.get((group_id, heads[KEY_BYTES * index : KEY_BYTES * (index + 1)]))
            if row is not None:
                hits[index] = row
        self._metrics.hot_block_hits.inc(len(hits))
        return hits

    def find_whole(self, group_id: int, heads: bytes) -> dict[int, bytes] | None:
        """Return rows as ``find`` does, if each of them is enough and unmarked; otherwise None."""
        rows, values = self._rows, {}
        for index in range(len(heads) // KEY_BYTES):
            row = rows.get((group_id, heads[KEY_BYTES * index : KEY_BYTES * (index + 1)]))
            if row is not None:
                value, is_enough, is_marked = row
                if is_marked or not is_enough:
                    return None
                values[index] = value
        self._metrics.hot_block_hits.inc(len(values))
        return values

    def keep(self, group_id: int, heads: bytes, values: Sequence[bytes | None], now: float) -> None:
        """Keep the hot and the marked rows among those of packed ``heads``."""
        for index, value in enumerate(values):
            if value is None:
                continue
            is_enough, is_marked = value.count(b":") >= _HOLDERS_MIN, b"+" in value
            if is_enough or is_marked:
                head = heads[KEY_BYTES * index : KEY_BYTES * (index + 1)]
                self._keep((group_id, head), HotRow(value, is_enough, is_marked), now)

    def _keep(self, key: tuple[int, bytes], row: HotRow, now: float) -> None:
        if self._bytes_max == 0 or key in self._rows:
            return
        size = _ROW_BYTES + len(row.value)
        while self._queue and self.bytes + size > self._bytes_max:
            self._drop_oldest()
        if size <= self._bytes_max:
            self._rows[key] = row
            self._queue.append((now + self._seconds, key))
            self.bytes += size

    def clear(self) -> None:
        """Drop all rows, because after an acknowledged write of this process, answers must contain its blocks."""
        self.clearings += 1
        self._rows.clear()
        self._queue.clear()
        self.bytes = 0

    def _drop_oldest(self) -> None:
        _, key = self._queue.popleft()
        self.bytes -= _ROW_BYTES + len(self._rows.pop(key).value)
