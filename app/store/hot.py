"""Hot blocks: long values that a replica keeps for a moment.

The blocks of a long shared system prompt name hundreds of holders each, and every query asks for them. A value of
some kilobytes that was read a moment ago is as good a hint as one read now: a holder that has ended since vanishes
by the table anyway, one that came is counted a moment later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

#: Shorter values cost less to ask for again than to keep.
_VALUE_BYTES_MIN = 256
#: What an entry costs beside its value, roughly: two dictionary slots, a key, a place in the queue.
_ENTRY_BYTES = 300


class HotBlocks:
    """Values by (group id, block key), until they are too old or too many. Times are monotonic seconds."""

    def __init__(self, seconds: float, bytes_max: int) -> None:
        self._seconds = seconds
        self._bytes_max = bytes_max if seconds > 0 else 0
        self._values: dict[tuple[int, int], bytes] = {}
        self._queue: deque[tuple[float, tuple[int, int]]] = deque()
        # Neighbours in a chain have equal values; one object stands for all of them.
        self._shared: dict[bytes, int] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def find(self, group_id: int, keys: Sequence[int], now: float) -> dict[int, bytes]:
        """The values that are kept, by their index in ``keys``."""
        self._expire(now)
        if not self._values:
            return {}
        values = self._values
        return {i: value for i, key in enumerate(keys) if (value := values.get((group_id, key))) is not None}

    def keep(self, group_id: int, keys: Sequence[int], values: Sequence[bytes | None], now: float) -> None:
        """Keep those of the values that are long."""
        if not self._bytes_max:
            return
        for key, value in zip(keys, values, strict=True):
            if value is None or len(value) < _VALUE_BYTES_MIN or (group_id, key) in self._values:
                continue
            size = _ENTRY_BYTES + (0 if value in self._shared else len(value))
            while self._queue and self.bytes + size > self._bytes_max:
                self._drop_oldest()
            if self.bytes + size > self._bytes_max:
                return
            self._shared[value] = self._shared.get(value, 0) + 1
            self._values[group_id, key] = value
            self._queue.append((now + self._seconds, (group_id, key)))
            self.bytes += size

    def clear(self) -> None:
        self._values.clear()
        self._queue.clear()
        self._shared.clear()
        self.bytes = 0

    def _expire(self, now: float) -> None:
        while self._queue and self._queue[0][0] <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, key = self._queue.popleft()
        value = self._values.pop(key)
        self.bytes -= _ENTRY_BYTES
        count = self._shared[value] - 1
        if count:
            self._shared[value] = count
        else:
            del self._shared[value]
            self.bytes -= len(value)
