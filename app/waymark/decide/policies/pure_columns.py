"""Sums over all candidates of a decision, and the least sums, in Python; see ``native/columns.c``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Column: TypeAlias = Sequence[float | None]
"""A number of each candidate; None if it has none."""


def add_columns(columns: Sequence[tuple[float, Column]], is_clamped: bool, /) -> list[float]:
    """Return the sum of each candidate, from the first column to the last, each times its weight; None adds nothing.

    With ``is_clamped`` a number below 0 counts as 0, and one above 1 as 1.
    """
    sums = [0.0] * len(columns[0][1])
    for weight, column in columns:
        if is_clamped:
            column = [None if number is None else min(1.0, max(0.0, number)) for number in column]
        sums = [
            total if number is None else total + weight * number for total, number in zip(sums, column, strict=True)
        ]
    return sums


def least_of(values: Sequence[float], draws: Sequence[float], most: int, sign: float, /) -> list[int]:
    """Return the places of the least ``sign * value``, at most so many, least first; equal ones by their draws."""
    entries = sorted(zip([sign * value for value in values], draws, range(len(values)), strict=True))
    return [place for _, _, place in entries[: max(0, most)]]
