"""The tables of a stream, which have for each engine hash its block, and the place of that block.

A stream has one ``Places`` and, for each set of engine hashes, a ``KnownBlocks`` that refers to it. A place is kept as
long as one of its blocks. The C module implements both types, in about 35 bytes a block; ``pure_known`` implements them
in Python, with the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

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


Neighbour: TypeAlias = "tuple[int, KnownBlocks, bool]"
"""Another holder of a rank, its table, and whether it is a generation of the same name."""


class Places(Protocol):
    """The places of a stream, each stored once."""

    def __len__(self) -> int: ...

    def __sizeof__(self) -> int: ...


class KnownBlocks(Protocol):
    """Engine hashes, and the block of each.

    With ``has_keys`` blocks are found by their key, too, and one engine hash of each block is its first one.

    ``extend``, ``take`` and ``run`` may raise an exception after some blocks have changed, and ``store`` a MemoryError;
    no part names these blocks. The caller then drops the parts, and all tables of the ``Places``. After any other
    exception the table is unchanged.
    """

    def __len__(self) -> int:
        """Return the number of engine hashes."""

    def __sizeof__(self) -> int:
        """Return the size in bytes, without the places."""

    def blocks(self) -> int:
        """Return the number of blocks that can be found by their key."""

    def get(self, engine_hash: int, /) -> Spot | None:
        """Return the block of an engine hash."""

    def get_block(self, key: int, /) -> Spot | None:
        """Return the block with a key."""

    def first(self, key: int, /) -> int | None:
        """Return the first engine hash of the block with a key."""

    def are_new(self, engine_hashes: Sequence[int], keys: Sequence[int], /) -> bool:
        """Return whether all hashes and keys are new to the table, and each occurs only once."""

    def store(
        self, place: Place, namespace: int, keys: Sequence[int], depths: Sequence[int], engine_hashes: Sequence[int], /
    ) -> None:
        """Store blocks at one place. An engine hash that the table already has moves to its new block."""

    def name(self, engine_hash: int, key: int, /) -> None:
        """Add an engine hash to a block. Raise ``KeyError`` if there is no block with this key."""

    def lead(self, engine_hash: int, /) -> None:
        """Make a hash the first one of its block. Raise ``KeyError`` if the table does not have it."""

    def pop(self, engine_hash: int, /) -> Spot | None:
        """Remove an engine hash. If it is the first one of its block, the block can no longer be found by its key."""

    def discard(self, engine_hashes: Sequence[int], /) -> None:
        """Remove engine hashes; unknown ones are ignored."""

    def clear(self) -> None:
        """Forget all blocks. The C module keeps the memory of the table for new ones."""

    def release(self) -> bool:
        """Forget some blocks of a table no longer in use, and return whether any are left.

        Freeing a million blocks at once would block the process for a hundredth of a second.
        """

    def copies(self, key: int, /) -> tuple[int, bool]:
        """Return the copies of a block, 0 if it has further hashes, and whether its last event was a removal that left
        a copy. Raise ``KeyError`` if there is no block with this key.

        A new block has one copy. The count belongs to the block's first hash, and leaves with it.
        """

    def set_copies(self, key: int, copies: int, is_left: bool, /) -> None:
        """Set what ``copies`` returns, up to ``COPIES_MAX``. Raise ``KeyError`` as ``copies`` does."""

    def left(self) -> list[int]:
        """Return the hashes of the blocks that a removal left with a copy."""

    def move(self, engine_hash: int, place: Place, /) -> None:
        """Move the block of a hash to another place. Raise ``KeyError`` if the table does not have the hash."""

    def extend(
        self,
        parent: int | None,
        engine_hashes: Sequence[int],
        tokens: bytes,
        block_size: int,
        seed: int,
        namespace: int,
        full: Mapping[Place, object],
        piece_blocks: int,
        former: tuple[KnownBlocks, ...],
        /,
    ) -> list[NewBlocks] | None:
        """Hash a plain store and add its blocks. All must be new, and begin at the root, or continue a block of the
        same namespace in this table, at a place that is not ``full``. Their hashes are removed from ``former``.

        Return None, without a change, if the store is not plain or this implementation has no shortcut for it.
        """

    def take(self, engine_hashes: Sequence[int], former: tuple[KnownBlocks, ...], /) -> list[TakenBlocks] | None:
        """Apply a plain removal: move each of its engine hashes to the first of ``former``.

        The table must have all, each once, with one copy that no removal has left, and without further hashes.

        Return None as ``extend`` does.
        """

    def run(
        self,
        events: Any,
        start: int,
        position: int,
        hashes_max: int,
        parts: Any,
        holder: int,
        seed: int,
        namespace: int,
        full: Mapping[Place, object],
        piece_blocks: int,
        former: tuple[KnownBlocks, ...],
        may: int,
        following: list[tuple[int, Any]],
        waves: Any,
        neighbours: tuple[Neighbour, ...],
        /,
    ) -> tuple[int, int, int, int, int, int, int, int, int, bool] | None:
        """Run ``extend`` and ``take`` over ``events`` from number ``start`` on, and add their parts to ``parts``.

        ``events``, ``parts`` and ``waves`` are the C module's, and ``may`` has the bits above. With ``MAY_REPEAT`` a
        store may begin with blocks that the table has, and blocks may have several copies. Stop before the first event
        that is not plain or may not be applied, and after about ``hashes_max`` hashes. After the last event, continue
        with the batches in ``following``, each a seq and its events, up to the first batch whose events differ from the
        others in more than their blocks.

        A store may also continue a block of one of the ``neighbours``. Its blocks must be new to all generations among
        these, and a removal may take blocks with a single copy out of them.

        Return the fields of an ``EventRun``, or None as ``extend`` does.
        """
