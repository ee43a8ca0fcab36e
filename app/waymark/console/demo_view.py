"""The view of ``waymark demo``: a table of each engine's share of each prompt, with a bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from waymark.console.screen import Grid, ScreenPart, text

#: With this the table has room in 80 columns.
_BAR = 12


class PromptLine(Protocol):
    """One engine's share of one prompt; numbers are tokens."""

    @property
    def label(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def instance(self) -> str: ...
    @property
    def matched(self) -> int: ...
    @property
    def gpu(self) -> int: ...
    @property
    def cpu(self) -> int: ...


def parts(lines: Sequence[PromptLine]) -> list[ScreenPart]:
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


def _bar(line: PromptLine) -> int:
    return round(_BAR * line.matched / line.tokens)
