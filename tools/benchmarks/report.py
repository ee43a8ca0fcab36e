"""The results of a benchmark: rows, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

MARKS = ("<!-- measured -->", "<!-- /measured -->")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and optionally the figure to compare it with."""

    target: str
    """``P1`` to ``P14``, or the name of a part that has no target."""
    what: str
    figure: float
    unit: str
    other: float | None = None
    """The peer's figure, or the limit's, in the same unit and from the same rounds."""
    other_name: str = ""
    ratio: float | None = None
    """``figure`` over ``other``: the median of the rounds' ratios."""
    bar: float | None = None
    """The bound on the ratio, or on the figure if there is no ratio; None for a figure without a bound."""
    is_least: bool = False
    """Whether the bar is a lower bound, and not an upper one."""
    earlier: tuple[float, ...] = ()
    """The values from earlier runs of the same table: a bar holds only if it held in every run."""

    @property
    def measured(self) -> float:
        """Return the value that the bar bounds: the ratio, or the figure if there is no ratio."""
        return self.figure if self.ratio is None else self.ratio

    @property
    def holds(self) -> bool | None:
        if self.bar is None:
            return None
        values = (self.measured, *self.earlier)
        return min(values) >= self.bar if self.is_least else max(values) <= self.bar


def against(
    target: str,
    what: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    name: str,
    bar: float | None = None,
) -> Row:
    """Return the row of two series measured alternately: their medians, and the median of the ratios of all rounds."""
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    return Row(target, what, median(ours), unit, median(theirs), name, ratio, bar)


def beside(rows: Sequence[Row], path: Path) -> list[Row]:
    """Return the rows, with the values of an earlier run, which was written as JSON."""
    listed = json.loads(path.read_text(encoding="utf-8"))["rows"]
    before = {(row["target"], row["what"]): row["figure"] if row["ratio"] is None else row["ratio"] for row in listed}
    return [
        replace(row, earlier=(*row.earlier, before[row.target, row.what])) if (row.target, row.what) in before else row
        for row in rows
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table to print, one line each."""
    head = ("target", "what", "figure", "unit", "against", "", "ratio", "bar", "holds")
    lines = [head, *(_cells(row) for row in rows)]
    return aligned(lines, left={0, 1, 3, 5, 8})


def aligned(lines: Sequence[Sequence[str]], *, left: Set[int] = frozenset({0})) -> str:
    """Return lines of cells as columns; columns that are not in ``left`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write_json(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Write ``{"about": {...}, "rows": [{field: value, ..., "holds": true, false or null}]}``."""
    listed = [asdict(row) | {"holds": row.holds} for row in rows]
    path.write_text(json.dumps({"about": about, "rows": listed}, indent=1) + "\n", encoding="utf-8")


def write_markdown(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Replace the text between the page's marks with the table, followed by the description of the run."""
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
        _ratio(row),
        sign + _number(row.bar),
        holds,
    )


def _ratio(row: Row) -> str:
    """Return the ratio of this run, followed by those of earlier ones."""
    if not row.earlier or row.bar is None:
        return _number(row.ratio)
    return ", ".join(map(_number, (row.measured, *row.earlier)))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.4g}"
