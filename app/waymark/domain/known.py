"""Tables of a stream's knowledge: for each engine hash its block, and the place of that block.

A stream has one ``Places`` and, for each set of engine hashes, a ``KnownBlocks`` in it. A place is there as long as one
of its blocks is. The C module has both types, in some 35 bytes a block; ``pure_known`` has them in Python, with the
same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

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
    """The number of the next event."""
    position: int
    """The position of the next event in its batch."""
    stores: int
    stored: int
    """The number of stored blocks."""
    removed: int
    """The number of removed blocks."""
    begun: int
    """How many of the following batches were begun. ``at`` and ``position`` are in the last of them."""


TakenBlocks: TypeAlias = tuple[Place, int, bytes, bytes]
"""Blocks at one place that went together: its namespace, their slots and engine hashes, packed."""


class Places(Protocol):
    """The places of a stream, each once."""

    def __len__(self) -> int: ...

    def __sizeof__(self) -> int: ...


class KnownBlocks(Protocol):
    """Engine hashes, and the block of each.

    With ``has_keys`` blocks are found by their key, too: then one of the engine hashes of a block is its first.

    ``extend``, ``take`` and ``run`` may raise an exception after some blocks have changed, and ``store`` a MemoryError;
    no part names these blocks. The caller then drops all tables of the ``Places``, and the parts. After any other
    exception the table is as before.
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
        """Return whether all hashes and keys are new here, and each occurs only once."""

    def store(
        self, place: Place, namespace: int, keys: Sequence[int], depths: Sequence[int], engine_hashes: Sequence[int], /
    ) -> None:
        """Store blocks at one place. An engine hash already here moves to its new block."""

    def name(self, engine_hash: int, key: int, /) -> None:
        """Add an engine hash to a block. Raise ``KeyError`` if there is no block with this key."""

    def lead(self, engine_hash: int, /) -> None:
        """Make a hash the first one of its block. Raise ``KeyError`` if it is not here."""

    def pop(self, engine_hash: int, /) -> Spot | None:
        """Take an engine hash out. If it is the first one of its block, the block can no longer be found by its key."""

    def discard(self, engine_hashes: Sequence[int], /) -> None:
        """Remove engine hashes; unknown ones are ignored."""

    def clear(self) -> None:
        """Forget all blocks. The C module keeps the memory of the table for others."""

    def release(self) -> bool:
        """Forget some blocks of a table of no further use, and return whether some are left.

        A million blocks that go with their table hold the process for a hundredth of a second.
        """

    def move(self, engine_hash: int, place: Place, /) -> None:
        """Move the block of a hash to another place. Raise ``KeyError`` if the hash is not here."""

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
        """Hash a plain store and add its blocks: all are new, and continue a block of the same namespace that
        is here, at a place that is not ``full``; or they begin at the root. Their hashes leave ``former``.

        Return None, without a change, if the store is not plain or this implementation has no short way for it.
        """

    def take(
        self, engine_hashes: Sequence[int], former: tuple[KnownBlocks, ...], several: Mapping[int, object], /
    ) -> list[TakenBlocks] | None:
        """Apply a plain removal: move each of its engine hashes to the first of ``former``.

        All must be here, each once, and their keys must not be among ``several``.

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
        several: Mapping[int, object],
        may_store: bool,
        may_remove: bool,
        following: list[tuple[int, Any]],
        waves: Any,
        /,
    ) -> tuple[int, int, int, int, int, int] | None:
        """Run ``extend`` and ``take`` over ``events`` from number ``start`` on, and add their parts to ``parts``.

        ``events``, ``parts`` and ``waves`` are the C module's. Stop before the first event that is not plain or may not
        be applied, and after about ``hashes_max`` hashes. At the end of the events go on with those of the batches that
        follow, given as seq and events, up to the first that says more than its blocks. Return an ``EventRun``, or None
        as ``extend`` does.
        """
