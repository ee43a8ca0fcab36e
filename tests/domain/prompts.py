"""Holder tables and block values for the walk, in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile

from waymark.domain.engines import Scope
from waymark.domain.match import Walk
from waymark.domain.names import GroupName, Holder
from waymark.domain.table import HolderTable, PublisherRow

BLOCK_SIZE = 2


def publisher(instance: str, rank: int = 0, *, scope: Scope = "instance", is_lost: bool = False) -> PublisherRow:
    return PublisherRow(instance, rank, BLOCK_SIZE, scope, is_lost)


def holder(
    number: int,
    of: int,
    instance: str = "a",
    rank: int = 0,
    medium: str = "GPU",
    *,
    scope: Scope = "instance",
    block_size: int = BLOCK_SIZE,
) -> Holder:
    return Holder(number, of, instance, rank, medium, block_size, instance, scope)


def table(publishers: Mapping[int, PublisherRow], *holders: Holder) -> HolderTable:
    return HolderTable(b"v", GroupName("default", "m"), publishers, {each.id: each for each in holders})


def value(*holders: int) -> bytes | None:
    """A block's value; None for no block."""
    return b" ".join(b"%d" % number for number in sorted(holders)) or None


def runs(values: Sequence[bytes | None]) -> list[tuple[bytes, int]]:
    """Runs of equal values, up to the first None."""
    held = takewhile(lambda each: each is not None, values)
    return [(each or b"", len(list(run))) for each, run in groupby(held)]


def walk(of: HolderTable, values: Sequence[bytes | None], block_size: int = BLOCK_SIZE) -> Walk:
    """The walk over a prompt, fed at once."""
    walk = Walk(of.view(block_size))
    walk.feed(runs(values))
    return walk
