"""Work in slices: a generator that stops after each slice, so that its caller decides when to continue.

A publisher decides how much work one batch is. Doing it all at once would block the event loop.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Slices: TypeAlias = Generator[None, None, T]
"""A generator that yields after each slice of about ``SLICE_WORK``, and returns the result."""

SLICE_WORK = 1024
"""The work in one slice, in hashes: between a tenth of a millisecond and two milliseconds."""
EVENT_WORK = 16
"""The cost of an event besides its hashes, in hashes."""


class Slice:
    """The work of the slice under way."""

    __slots__ = ("_work",)

    def __init__(self) -> None:
        self._work = 0

    def is_full(self, work: int) -> bool:
        """Add work. Return whether the slice is full. The caller then yields, and the next slice begins."""
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
