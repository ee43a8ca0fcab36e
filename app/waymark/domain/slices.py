"""Work in slices: generators that stop after each slice, so that whoever runs one decides when it goes on.

A publisher decides how much there is to do for one batch of its. An event loop that did it in one go would serve
nobody else meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Slices: TypeAlias = Generator[None, None, T]
"""Yields after each slice of at most some ``SLICE_UNITS``, and returns the outcome."""

SLICE_UNITS = 1024
"""Hashes, or as much work as one costs: between a tenth of a millisecond and two."""
EVENT_UNITS = 16
"""What an event costs beside its hashes, in hashes."""


def finish(work: Slices[T]) -> T:
    """All slices in one go, where nobody waits."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            outcome: T = end.value
            return outcome
