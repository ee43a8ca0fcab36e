"""Work in slices: a generator that stops after each slice, so that its caller decides when to continue.

A publisher decides how much work one batch is. An event loop that did all the work at once would be blocked meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Slices: TypeAlias = Generator[None, None, T]
"""Yields after each slice of about ``SLICE_WORK`` at most, and returns the outcome."""

SLICE_WORK = 1024
"""Hashes, or as much work as one costs: between a tenth of a millisecond and two."""
EVENT_WORK = 16
"""The cost of an event besides its hashes, in hashes."""


class Slice:
    """The work of the slice under way."""

    __slots__ = ("_work",)

    def __init__(self) -> None:
        self._work = 0

    def is_full(self, work: int) -> bool:
        """Add work. Return whether that is enough for one slice; then the next one begins, after the caller has
        yielded.
        """
        self._work += work
        if self._work <= SLICE_WORK:
            return False
        self._work = 0
        return True


def finish(work: Slices[T]) -> T:
    """Run all slices in one go, if no other work waits."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            outcome: T = end.value
            return outcome
