"""The events of a session with their times, printed if there is a difference; and the deadlines of waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.patience import patient

_LINES_KEPT = 40


class Trace:
    """The trace of a session. A call adds a line; ``lines`` has the last lines, and ``all`` has all of them. With
    ``is_loud`` each line is printed at once; ``tell`` is called with each line.
    """

    def __init__(self, *, is_loud: bool = False, tell: Callable[[str], None] | None = None) -> None:
        self.all: list[str] = []
        self._began = time.monotonic()
        self._is_loud = is_loud
        self._tell = tell

    def __call__(self, text: str) -> None:
        line = f"{self.seconds:7.2f} s  {text}"
        self.all.append(line)
        if self._tell is not None:
            self._tell(line)
        if self._is_loud:
            print(line, flush=True)

    @property
    def lines(self) -> list[str]:
        return self.all[-_LINES_KEPT:]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


class Deadline:
    """A deadline in seconds on a quiet machine; a busy machine gets more time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._began > patient(self._seconds)
