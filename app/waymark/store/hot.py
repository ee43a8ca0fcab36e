"""Hot blocks: long values that a replica keeps for a short time.

Each block of a long shared system prompt has hundreds of holders, and every query reads these blocks. A value of some
kilobytes that was read a moment ago is good enough: the table removes a holder that has ended since, and a new holder
counts a moment later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from waymark.domain.keys import KEY_BYTES, unpack
from waymark.metrics import Metrics

#: Reading a shorter value again costs less than keeping it.
_VALUE_BYTES_MIN = 256
#: Bytes of an entry without its value, roughly: two dictionary slots, a key, a place in the queue.
_ENTRY_BYTES = 300


class HotBlocks:
    """Values by (group id, block key), at most ``bytes_max`` and ``seconds`` old. Times are monotonic seconds."""

    def __init__(self, seconds: float, bytes_max: int, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._metrics.hot_block_bytes.set_function(lambda: self.bytes)
        self._seconds = seconds
        self._bytes_max = bytes_max if seconds > 0 else 0
        self._values: dict[tuple[int, int], bytes] = {}
        self._queue: deque[tuple[float, tuple[int, int]]] = deque()
        # Neighbours in a chain have equal values; one object stands for all of them.
        self._shared: dict[bytes, int] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def find(self, group_id: int, keys: bytes, now: float) -> dict[int, bytes]:
        """The kept values, by the index of their key among the packed ``keys``."""
        if not self._queue:
            return {}
        self._expire(now)
        values = self._values
        if not values:
            return {}
        found = {i: value for i, key in enumerate(unpack(keys)) if (value := values.get((group_id, key))) is not None}
        self._metrics.hot_block_hits.inc(len(found))
        return found

    def keep(self, group_id: int, keys: bytes, runs: Sequence[tuple[bytes, int]], now: float) -> None:
        """Keep the long values. ``runs`` has (value, how many) for the first of the packed ``keys``."""
        at = 0
        for value, length in runs:
            if len(value) >= _VALUE_BYTES_MIN:
                for key in unpack(keys[KEY_BYTES * at : KEY_BYTES * (at + length)]):
                    if not self._keep(group_id, key, value, now):
                        return
            at += length

    def _keep(self, group_id: int, key: int, value: bytes, now: float) -> bool:
        """False if there is no room for the value."""
        if (group_id, key) in self._values:
            return True
        size = _ENTRY_BYTES + (0 if value in self._shared else len(value))
        while self._queue and self.bytes + size > self._bytes_max:
            self._drop_oldest()
            size = _ENTRY_BYTES + (0 if value in self._shared else len(value))
        if self.bytes + size > self._bytes_max:
            return False
        self._shared[value] = self._shared.get(value, 0) + 1
        self._values[group_id, key] = value
        self._queue.append((now + self._seconds, (group_id, key)))
        self.bytes += size
        return True

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
