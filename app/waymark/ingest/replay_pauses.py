"""When a publisher that has not answered a replay request is asked again."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The longest pause before another request for a beginning, in seconds: each such request takes a replay place, and
#: live frames wait until it has failed.
BEGINNING_SECONDS_MAX = 600.0


class ReplayPauses:
    """Two pauses of one stream: of all its replays, and of those that only ask for the beginning of its life.

    ``seconds`` is the first one, the long silence of the settings. The pause of the beginning doubles with each
    request that has not brought it; the other one does not, because a gap must not stay open for long.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Nothing speaks against a request: the connection or the life is new, or the publisher has answered."""
        self._silent_until = self._beginning_at = 0.0
        self._beginning_seconds = self._seconds

    @property
    def is_silent(self) -> bool:
        """Whether no replay is to be requested at all."""
        return self._clock() < self._silent_until

    @property
    def is_beginning_due(self) -> bool:
        """Whether a replay may be requested for nothing but the beginning."""
        return self._clock() >= max(self._silent_until, self._beginning_at)

    def nothing_came(self) -> None:
        """A replay has brought nothing. The next one waits, so that it delays live frames once, not at every gap."""
        self._silent_until = self._clock() + self._seconds

    def put_off_beginning(self) -> None:
        """A replay has not brought the beginning."""
        self._beginning_at = self._clock() + self._beginning_seconds
        longest = max(self._seconds, BEGINNING_SECONDS_MAX)
        self._beginning_seconds = min(2 * self._beginning_seconds, longest)
