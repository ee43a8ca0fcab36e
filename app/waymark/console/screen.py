"""Where the console's text goes: a terminal with colours and width, or plain lines for files, pipes and logs.

Views return ``Text`` and ``Grid``; only this module knows their final form. Plain text has no colour, no box art, no
cut words, and the same columns each time. Names come from clients: unprintable characters are replaced, so that a name
cannot move the cursor of the terminal. Spans of time, sizes and counts are formatted here, too.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text as Text

from waymark.base.record import record
from waymark.base.shown import printable
from waymark.domain.media import order_of
from waymark.domain.status import StreamStatus

_PLAIN_WIDTH = 100
#: The width to which a column is shortened before other columns are left out.
_CUT_WIDTH = 20
#: The most rows to name before a sentence below a table.
_NAMES_MAX = 5


@record(frozen=True, slots=True)
class Grid:
    """A table; the columns in ``numbers`` are aligned to the right."""

    head: tuple[str, ...]
    rows: Sequence[tuple[Text, ...]]
    numbers: frozenset[str] = frozenset()
    spare: tuple[str, ...] = ()
    """Columns that a narrow terminal leaves out, in this order."""
    cut: str = ""
    """The last column, if a narrow terminal cuts its texts: a row is one line then."""
    below: str = ""
    """The column whose sentences a terminal shows below the table, each once, with the rows that have it. If there is
    room, and each row has its own sentence, they stand in the table.
    """
    named: tuple[str, ...] = ()
    """The columns that name a row below the table, such as ENGINE and RANK."""


class ScreenWarning(Text):
    """A warning beside an answer: a file or a pipe gets the answer alone, and standard error the warning."""

    @classmethod
    def of(cls, sentence: str) -> ScreenWarning:
        return cls(text(f"warning: {sentence}").plain, "bold red")


ScreenPart: TypeAlias = Text | Grid


class Screen:
    """Standard output, or ``file``."""

    def __init__(self, file: TextIO | None = None, *, width: int | None = None) -> None:
        self.console = Console(file=file, highlight=False, markup=False, emoji=False, width=width)
        self.is_plain = not self.console.is_terminal or self.console.is_dumb_terminal
        self.is_ascii = self.is_plain or not self.console.encoding.startswith("utf")

    @property
    def width(self) -> int:
        """The number of columns; in plain text always the same."""
        return _PLAIN_WIDTH if self.is_plain else self.console.width

    def show(self, parts: Sequence[ScreenPart]) -> None:
        """Write the parts, one below the other."""
        if self.is_plain:
            for part in parts:
                if isinstance(part, ScreenWarning):
                    print(part.plain, file=sys.stderr, flush=True)
            self.write("\n".join(_plain(part) for part in parts if not isinstance(part, ScreenWarning)))
        else:
            self.console.print(self._rich(parts))

    @property
    def height(self) -> int:
        """Lines of the terminal."""
        return self.console.height

    @contextmanager
    def live(self) -> Iterator[Callable[[Sequence[ScreenPart]], None]]:
        """Yield a function that draws over its last drawing, on a screen of its own."""
        with Live(console=self.console, auto_refresh=False, screen=True) as live:
            yield lambda parts: live.update(self._rich(parts), refresh=True)

    def write(self, text: str) -> None:
        """Write a text unchanged, whatever the width."""
        self.console.file.write(text + "\n")
        self.console.file.flush()

    def _rich(self, parts: Sequence[ScreenPart]) -> Group:
        return Group(*(drawing for part in parts for drawing in _drawn(part, self.width)))

    async def watch(self, seconds: float, draw: Callable[[], Awaitable[Sequence[ScreenPart]]]) -> None:
        """Draw again every ``seconds``, until cancelled: in place on a terminal, else one below the other."""
        if self.is_plain:
            while True:
                self.show(await draw())
                self.write("")
                await asyncio.sleep(seconds)
        with Live(console=self.console, auto_refresh=False) as live:
            while True:
                live.update(self._rich(await draw()), refresh=True)
                await asyncio.sleep(seconds)


def text(value: object, style: str = "") -> Text:
    """Return a value that may come from a client, as one line of printable characters."""
    return Text(printable(str(value)), style)


def joined(*pieces: Text | str, by: str = "") -> Text:
    return Text(by).join(piece if isinstance(piece, Text) else text(piece) for piece in pieces)


def _drawn(part: ScreenPart, width: int) -> Iterator[RenderableType]:
    if isinstance(part, Text):
        yield part
    elif part.below:
        yield from _with_sentences(part, part.head.index(part.below), width)
    else:
        yield _table(part, width)


def _with_sentences(grid: Grid, column: int, width: int) -> Iterator[RenderableType]:
    """Draw a table whose column ``column`` has sentences: beside the rows if there is room and each row has its own."""
    rows_of: dict[str, list[tuple[Text, ...]]] = {}
    for row in grid.rows:
        if row[column].plain:
            rows_of.setdefault(row[column].plain, []).append(row)
    is_room = _needed(dict(zip(grid.head, _widths(grid), strict=True))) <= width
    if is_room and all(len(rows) == 1 for rows in rows_of.values()):
        yield _table(grid, width)
        return
    remaining_rows = [(*row[:column], *row[column + 1 :]) for row in grid.rows]
    yield _table(replace(grid, head=(*grid.head[:column], *grid.head[column + 1 :]), rows=remaining_rows), width)
    for rows in rows_of.values():
        more = f" and {len(rows) - _NAMES_MAX} more" if len(rows) > _NAMES_MAX else ""
        names = ", ".join(_name(grid, row) for row in rows[:_NAMES_MAX])
        yield joined(f"  {names}{more}: ", rows[0][column])


def _name(grid: Grid, row: tuple[Text, ...]) -> str:
    """Return the name of a row, such as ``vllm-0 rank 1``."""
    first, *rest = [(name, cell.plain) for name, cell in zip(grid.head, row, strict=True) if name in grid.named]
    return " ".join([first[1], *(f"{name.lower()} {cell}" for name, cell in rest)])


def _table(grid: Grid, width: int) -> RenderableType:
    widths = dict(zip(grid.head, _widths(grid), strict=True))
    if grid.cut:
        widths[grid.cut] = min(widths[grid.cut], _CUT_WIDTH)
    left_out: list[str] = []
    for name in grid.spare:
        if _needed(widths) <= width:
            break
        del widths[name]
        left_out.append(name)
    caption = f"a wider terminal also shows {', '.join(left_out)}" if left_out else None
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", caption=caption, caption_justify="left"
    )
    for name in widths:
        if name == grid.cut:
            room = max(_CUT_WIDTH, width - _needed(widths) + widths[name])
            table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=room)
        else:
            table.add_column(name, justify="right" if name in grid.numbers else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(cell for name, cell in zip(grid.head, row, strict=True) if name in widths))
    return table


def _needed(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * len(widths)


def _widths(grid: Grid) -> list[int]:
    """Return the preferred width of each column."""
    cells = [[len(cell.plain) for cell in column] for column in zip(*grid.rows, strict=True)] or [[]] * len(grid.head)
    return [max(len(name), *lengths, 1) for name, lengths in zip(grid.head, cells, strict=True)]


def _plain(part: ScreenPart) -> str:
    if isinstance(part, Text):
        return part.plain
    # An empty cell as `-`, so that columns can be counted.
    rows = [tuple(cell.plain or "-" for cell in row) for row in part.rows]
    widths = _widths(part)
    aligned = [
        "  ".join(
            cell.rjust(width) if name in part.numbers else cell.ljust(width)
            for name, cell, width in zip(part.head, row, widths, strict=True)
        ).rstrip()
        for row in [part.head, *rows]
    ]
    return "\n".join(aligned)


# How the statuses of streams look on a terminal, in the order from the best to the worst.


STATUS_STYLES: dict[str, str] = {
    StreamStatus.ACTIVE: "green",
    StreamStatus.REPLAYING: "cyan",
    StreamStatus.NO_EVENTS: "green",
    StreamStatus.STARTING: "yellow",
    StreamStatus.DEGRADED: "yellow",
    StreamStatus.UNREACHABLE: "red",
    StreamStatus.LOST: "bold red",
    StreamStatus.FAILED: "bold red",
}


_KIB = 1024


def seconds_text(seconds: float) -> str:
    """Format a span in about four characters: 0.4s, 12s, 5m, 3h, 2d."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    for unit, size, limit in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def bytes_text(number: int) -> str:
    """Format a size in binary units."""
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < _KIB or unit == "TiB":
            break
        size /= _KIB
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"


def held_text(blocks: Mapping[str, int]) -> str:
    """Format the number of blocks by medium, the fastest first."""
    ordered = sorted(blocks.items(), key=lambda item: (order_of(item[0]), item[0]))
    return ", ".join(f"{medium} {count}" for medium, count in ordered) or "none"
