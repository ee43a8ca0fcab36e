"""The output of trials: the progress of long work, and the table of ``waymark demo``.

Progress is on standard error: one rewritten line on a terminal, and a few lines elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final, Self, TextIO

from waymark.base.record import record
from waymark.console.screen import Grid, ScreenPart, text

#: The pause between two updates of a count, on a terminal and elsewhere.
_TERMINAL_SECONDS: Final = 0.2
_OTHER_SECONDS: Final = 10.0
_CLEAR: Final = "\r\x1b[K"


class Progress:
    """A context manager, so that the line leaves the terminal at the end."""

    def __init__(self, name: str, file: TextIO | None = None) -> None:
        """``name`` stands in front of each line."""
        self._name = name
        self._file = sys.stderr if file is None else file
        self._is_terminal = self._file.isatty()
        self._next_count = time.monotonic() + (0.0 if self._is_terminal else _OTHER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the line away, so that something else can be written."""
        if self._is_terminal:
            self._file.write(_CLEAR)
            self._file.flush()

    def count(self, sentence: str) -> None:
        """Show the progress; it may be called as often as needed."""
        now = time.monotonic()
        if now >= self._next_count:
            self._next_count = now + (_TERMINAL_SECONDS if self._is_terminal else _OTHER_SECONDS)
            self.step(sentence)

    def step(self, sentence: str) -> None:
        """Begin a new step of the work."""
        line = f"{self._name}: {sentence}"
        self._file.write(f"{_CLEAR}{line}" if self._is_terminal else f"{line}\n")
        self._file.flush()


#: With this the table has room in 80 columns.
_BAR = 12


@record(frozen=True, slots=True)
class PromptMatch:
    """One line of the table: one engine's share of one prompt, in tokens."""

    label: str
    tokens: int
    instance: str
    matched: int
    gpu: int
    cpu: int


def parts(lines: Sequence[PromptMatch]) -> list[ScreenPart]:
    """Return the sentences and the table."""
    rows = [
        (line.label, line.instance, line.matched, line.tokens, line.gpu, line.cpu, "#" * _bar(line)) for line in lines
    ]
    return [
        text("Two simulated engines, one shared system prompt. Tokens that each engine has, according to /query:"),
        text(""),
        Grid(
            ("prompt", "engine", "has", "of", "on GPU", "on CPU", "share"),
            [tuple(text(cell) for cell in row) for row in rows],
            numbers=frozenset({"has", "of", "on GPU", "on CPU"}),
        ),
        text(""),
        text("Checked: every number agrees with the cache of the engine."),
    ]


def _bar(line: PromptMatch) -> int:
    return round(_BAR * line.matched / line.tokens)
