"""What a benchmark found: rows, one table of them, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

MARKS = ("<!-- measured -->", "<!-- /measured -->")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and what it is held against."""

    target: str
    """``P1`` to ``P10``, or the name of a part that has no target."""
    what: str
    figure: float
    unit: str
    other: float | None = None
    """The peer's figure, or the limit's, in the same unit and from the same rounds."""
    other_name: str = ""
    ratio: float | None = None
    """``figure`` over ``other``: the median of the rounds' ratios."""
    bar: float | None = None
    """What the ratio, or where there is none the figure, may be; None: a figure for information."""
    is_least: bool = False
    """The bar is the least that it must be, not the most."""

    @property
    def holds(self) -> bool | None:
        if self.bar is None:
            return None
        value = self.figure if self.ratio is None else self.ratio
        return value >= self.bar if self.is_least else value <= self.bar


def against(
    target: str,
    what: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    name: str,
    bar: float | None = None,
) -> Row:
    """The row of two things measured in turns: the medians, and the median of the rounds' ratios."""
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    return Row(target, what, median(ours), unit, median(theirs), name, ratio, bar)


def table(rows: Sequence[Row]) -> str:
    """The rows for people, one line each."""
    head = ("target", "what", "figure", "unit", "against", "", "ratio", "bar", "holds")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = {2, 4, 6, 7}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write_json(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """``{"about": {...}, "rows": [{field: value, ..., "holds": true, false or null}]}``."""
    listed = [asdict(row) | {"holds": row.holds} for row in rows]
    path.write_text(json.dumps({"about": about, "rows": listed}, indent=1) + "\n", encoding="utf-8")


def write_markdown(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Put the table in place of what stands between the page's marks, and say below it what it is of."""
    page = path.read_text(encoding="utf-8")
    before, start, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise SystemExit(f"{path} has no place for the table: put {MARKS[0]} and {MARKS[1]} where it is to stand")
    head = "| | What | Figure | Against | Ratio | Bar | Holds |\n|---|---|---|---|---|---|---|\n"
    lines = "".join(map(_line, rows))
    below = ", ".join(f"{name} {value}" for name, value in about.items())
    path.write_text(f"{before}{start}\n\n{head}{lines}\nMeasured with {below}.\n\n{end}{after}", encoding="utf-8")


def _line(row: Row) -> str:
    target, what, figure, unit, other, name, ratio, bar, holds = _cells(row)
    beside = f"{other} ({name})" if other else ""
    return f"| {target} | {what} | {figure} {unit} | {beside} | {ratio} | {bar} | {holds} |\n"


def _cells(row: Row) -> tuple[str, ...]:
    sign = "at least " if row.is_least else ""
    holds = {None: "", True: "yes", False: "no"}[row.holds]
    return (
        row.target,
        row.what,
        _number(row.figure),
        row.unit,
        _number(row.other),
        row.other_name,
        _number(row.ratio),
        sign + _number(row.bar),
        holds,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.4g}"
