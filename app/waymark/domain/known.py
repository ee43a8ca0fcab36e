"""The tables of a stream, which have for each engine hash its block, and the place of that block.

A stream has one ``Places`` and, for each set of engine hashes, a ``KnownBlocks`` that refers to it. A place is kept as
long as one of its blocks. The C module implements both types, in about 35 bytes a block; ``pure_known`` implements them
in Python, with the same rules.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from waymark.domain.rows import Place


class Spot(NamedTuple):
    """A block and its place."""

    place: Place
    namespace: int
    depth: int
    """The depth within the piece."""
    key: int
    """seq_hash XOR namespace."""

    @property
    def seq_hash(self) -> int:
        return self.key ^ self.namespace


NewBlocks: TypeAlias = tuple[Place, bytes, bytes, int, int | None]
"""New blocks at one place: their slots and engine hashes, packed; the index of the first in its event, and the key of
the block before it, if both are in the same piece.
"""


class EventRun(NamedTuple):
    """The end of a run of plain events, and its counts."""

    at: int
    """The index of the next event."""
    position: int
    """The position of the next event in its batch."""
    stores: int
    stored: int
    """The number of blocks that were new."""
    removed: int
    """The number of blocks that have left."""
    hashes: int
    """The number of hashes in the events."""
    begun: int
    """How many of the following batches were begun. ``at`` and ``position`` refer to the last of them."""
    restored: int
    """The number of blocks stored again after a removal had left a copy."""
    miscounted: int
    """The number of blocks whose copies the engine itself counted differently."""
    are_removed_each: bool
    """Whether a removal has taken a copy that another removal had left, in this run or before."""


class HolderChanges(NamedTuple):
    """The changes of one holder in a run of events of several forms; see ``EventRun``."""

    stored: int
    removed: int
    restored: int
    miscounted: int
    are_removed_each: bool


RunChanges: TypeAlias = EventRun | HolderChanges


class MixedProgress(NamedTuple):
    """The end of a run of events of several forms, and its counts; see ``EventRun``."""

    end: int
    """The index of the next event."""
    position: int
    hashes: int
    holders: list[tuple[int, int, int, int, bool]]
    """The ``HolderChanges`` of each holder."""
    forms: list[tuple[int, int]]
    """How many events of each form are resolved, and how many of their blocks are unknown."""


# What a run may do, and how copies count: bits of an argument of ``run``.

MAY_STORE: Final = 1
MAY_REMOVE: Final = 2
MAY_REPEAT: Final = 4
"""Blocks may have several copies. A run over several batches ends with the first that contradicts their counts."""
COUNTS: Final = 8
"""A store adds a copy, and a removal takes one."""
REPLACES: Final = 16
"""A store sets the copies to one."""
NOTES_LEFT: Final = 32
"""A removal that leaves a copy marks the block as left."""
REMOVED_EACH: Final = 64
"""A removal has taken a copy that another removal had left."""
COPIES_MAX: Final = 2**24 - 1
"""The most copies that a table counts."""


TakenBlocks: TypeAlias = tuple[Place, int, bytes, bytes]
"""Blocks that were removed from one place together: the place, its namespace, and their slots and engine hashes,
packed.
"""
