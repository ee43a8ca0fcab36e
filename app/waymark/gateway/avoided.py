"""Engines that a connection has failed to a moment ago: other requests do not try them for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

_NAMES_MAX = 4096


class Avoided:
    """Instances by name, each for ``seconds``; 0: none."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[str, float] = {}

    def failed(self, instance_id: str) -> None:
        """A connection to an instance has failed."""
        if self._seconds and len(self._until) < _NAMES_MAX:
            self._until[instance_id] = self._clock() + self._seconds

    def answered(self, instance_id: str) -> None:
        self._until.pop(instance_id, None)

    def now(self) -> frozenset[str]:
        """Instances that are avoided now."""
        if not self._until:
            return frozenset()
        now = self._clock()
        self._until = {name: until for name, until in self._until.items() if until > now}
        return frozenset(self._until)
