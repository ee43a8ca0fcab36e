"""When a publisher that has not answered a replay request is asked again."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The longest pause before another request for the beginning of a life, in seconds. Each such request takes a replay
#: place, and live frames wait until it has failed.
BEGINNING_SECONDS_MAX = 600.0


class ReplayPauses:
    """Two pauses of one stream: one before any replay, and one before a replay for only the beginning of its life.

    Both last ``seconds`` (``WAYMARK_PROBE_SECONDS``) at first. The second one doubles with each replay that has not
    brought the beginning. The first one does not, because a gap must not stay open for long.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """End both pauses: the connection or the life is new, or the publisher has answered."""
        self._silent_until = self._beginning_at = 0.0
        self._beginning_seconds = self._seconds

    @property
    def is_silent(self) -> bool:
        """Whether no replay may be requested now."""
        return self._clock() < self._silent_until

    @property
    def is_beginning_due(self) -> bool:
        """Whether a replay may be requested for only the beginning of the life."""
        return self._clock() >= max(self._silent_until, self._beginning_at)

    def nothing_came(self) -> None:
        """Note that a replay has brought nothing. The next one waits, so as not to delay live frames at every gap."""
        self._silent_until = self._clock() + self._seconds

    def put_off_beginning(self) -> None:
        """Note that a replay has not brought the beginning of the life."""
        self._beginning_at = self._clock() + self._beginning_seconds
        longest = max(self._seconds, BEGINNING_SECONDS_MAX)
        self._beginning_seconds = min(2 * self._beginning_seconds, longest)
