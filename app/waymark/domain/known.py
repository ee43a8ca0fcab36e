"""Tables of what a stream knows: for each engine hash its block, and the place of that block.

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
the block before it, where that is in the same piece."""


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


TakenBlocks: TypeAlias = tuple[Place, int, bytes, bytes]
"""Blocks at one place that went together: its namespace, their slots and engine hashes, packed."""


class Places(Protocol):
    """The places of a stream, each of them once."""

    def __len__(self) -> int: ...

    def __sizeof__(self) -> int: ...


class KnownBlocks(Protocol):
    """Engine hashes, and the block of each.

    With ``has_keys`` blocks are found by their key, too: then one of the engine hashes of a block is its first.

    ``extend``, ``take`` and ``run`` may raise an exception after some blocks have changed, and ``store`` a MemoryError;
    no part names these blocks. The caller then drops all tables of these ``Places``, and the parts. After any other
    exception the table is as before.
    """

    def __len__(self) -> int:
        """Engine hashes."""

    def __sizeof__(self) -> int:
        """Bytes, without those of the places."""

    def blocks(self) -> int:
        """Blocks that are found by their key."""

    def get(self, engine_hash: int, /) -> Spot | None:
        """The block of an engine hash."""

    def get_block(self, key: int, /) -> Spot | None:
        """The block with a key."""

    def first(self, key: int, /) -> int | None:
        """The first engine hash of the block with a key."""

    def are_new(self, engine_hashes: Sequence[int], keys: Sequence[int], /) -> bool:
        """Whether none of these is here, and none of them is there twice."""

    def store(
        self, place: Place, namespace: int, keys: Sequence[int], depths: Sequence[int], engine_hashes: Sequence[int], /
    ) -> None:
        """Blocks of one place. An engine hash that is here already becomes that of its new block."""

    def name(self, engine_hash: int, key: int, /) -> None:
        """A further engine hash of a block; ``KeyError`` where there is no block with this key."""

    def lead(self, engine_hash: int, /) -> None:
        """It becomes the first engine hash of its block; ``KeyError`` where it is not here."""

    def pop(self, engine_hash: int, /) -> Spot | None:
        """Take an engine hash out. If it is the first one of its block, the block is found by no key then."""

    def discard(self, engine_hashes: Sequence[int], /) -> None:
        """Take engine hashes out, those that are here."""

    def move(self, engine_hash: int, place: Place, /) -> None:
        """Its block is at another place; ``KeyError`` where it is not here."""

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
        gone: tuple[KnownBlocks, ...],
        /,
    ) -> list[NewBlocks] | None:
        """Hash a plain store, and put its blocks in: all of them are new, and go on from a block that is here, of the
        same namespace, at a place that is not ``full``; or they begin at the root. Their hashes are ``gone`` no more.

        None where the store is not plain, or this implementation has no short way for it; nothing has changed then.
        """

    def take(
        self, engine_hashes: Sequence[int], gone: tuple[KnownBlocks, ...], several: Mapping[int, object], /
    ) -> list[TakenBlocks] | None:
        """A plain removal: each of these engine hashes goes to the first of ``gone``, and out of the others. All of
        them are here, none comes twice, and the key of none is among ``several``.

        None as of ``extend``.
        """

    def run(
        self,
        events: Any,
        at: int,
        position: int,
        hashes_max: int,
        parts: Any,
        holder: int,
        seed: int,
        namespace: int,
        full: Mapping[Place, object],
        piece_blocks: int,
        gone: tuple[KnownBlocks, ...],
        several: Mapping[int, object],
        may_store: bool,
        may_remove: bool,
        /,
    ) -> tuple[int, int, int, int, int] | None:
        """``extend`` and ``take`` with ``events`` from the one with number ``at`` on, whose parts join ``parts``; both
        are the C module's. It ends before the first event that is not plain, or that it may not take, and after some
        ``hashes_max`` hashes. Returns what ``EventRun`` has, None as of ``extend``.
        """
