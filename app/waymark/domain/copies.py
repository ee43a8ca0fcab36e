"""Blocks of a holder with several copies or several engine hashes, and their text in Redis.

The table of blocks counts the copies of a block with one hash. Blocks with several hashes are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from waymark.base.record import record
from waymark.domain.known import COPIES_MAX, COUNTS, NOTES_LEFT, REMOVED_EACH, REPLACES, RunChanges
from waymark.domain.parts import NO_COPIES, UNCHANGED, Mode
from waymark.domain.pure_known import KnownBlocks
from waymark.domain.rows import SAME_HASH

HASHES_MAX = 64
"""The most engine hashes that a holder has for one block. The field ``*<key>`` lists them, and is rewritten for each
new one.
"""
SEVERAL_BYTES = 300
"""The memory of a block with further engine hashes, in addition to that of the tables."""


@record(slots=True)
class BlockCopies:
    """A block with copies, or with further engine hashes."""

    copies: int
    hashes: list[int]
    """All engine hashes; the first one is in the entry."""
    is_left: bool = False
    """Whether the last event about the block was a removal that left a copy."""

    @property
    def text(self) -> bytes:
        # In an entry ``SAME_HASH`` means that the engine hash is the seq_hash. If an engine hash has that value, the
        # text lists all of them, including the first.
        hashes = self.hashes if SAME_HASH in self.hashes else self.hashes[1:]
        if not hashes:
            return NO_COPIES if self.copies < 2 else b"%d" % self.copies
        return b"%d%b" % (self.copies, b"".join([b" %016x" % engine_hash for engine_hash in hashes]))


class HolderCopies:
    """The copies and the further engine hashes of the blocks of one holder."""

    def __init__(self, table: KnownBlocks, *, notes_left: bool = True) -> None:
        """Begin without copies; ``table`` has all blocks of the holder. With ``notes_left``, a store after a removal
        that left a copy may contradict the counts.
        """
        self._known = table
        self.notes_left = notes_left
        self.contradictions = 0
        """The number of blocks whose copies were miscounted; the owner reads it and resets it."""
        self.restored = 0
        """The number of blocks that were stored again after a removal had left a copy."""
        self.are_removed_each = False
        """Whether a removal has taken a copy that another removal had left: then the engine removes each copy."""
        self.several: dict[int, BlockCopies] = {}
        """The blocks whose copies the table does not count, by block key: those with several hashes, or with
        ``SAME_HASH``.
        """

    def is_crowded(self, engine_hash: int, key: int) -> bool:
        """Return whether a block of the holder has no room for this engine hash."""
        several = self.several.get(key)
        return several is not None and len(several.hashes) >= HASHES_MAX and engine_hash not in several.hashes

    def find(self, key: int) -> BlockCopies:
        """Return the copies and hashes of a block that the holder has. Pass them to ``keep`` after a change."""
        several = self.several.get(key)
        if several is None:
            first = self._known.first(key)
            assert first is not None
            copies, is_left = self._known.copies(key)
            several = BlockCopies(copies, [first], is_left)
        return several

    def keep(self, key: int, several: BlockCopies) -> None:
        """Keep the copies and hashes of a block, whose first hash is the one in the table."""
        if len(several.hashes) == 1 and several.hashes[0] != SAME_HASH and several.copies <= COPIES_MAX:
            self.several.pop(key, None)
            self._known.set_copies(key, several.copies, several.is_left)
        else:
            self.several[key] = several
            self._known.set_copies(key, 0, False)

    def text_to_clear(self, key: int) -> bytes:
        """Return the text of ``*<key>`` for a block that leaves with its copies."""
        several = self.several.get(key)
        has_text = self._known.copies(key)[0] > 1 if several is None else several.text != NO_COPIES
        return NO_COPIES if has_text else UNCHANGED

    def bits(self, mode: Mode) -> int:
        """Return how copies count in a run of events: bits of ``KnownBlocks.run``."""
        bits = COUNTS if mode == "count" else REPLACES if mode == "all" else 0
        return bits | (NOTES_LEFT if self.notes_left else 0) | (REMOVED_EACH if self.are_removed_each else 0)

    def note_run(self, ran: RunChanges) -> None:
        """Note what a run of events has shown of the copies."""
        self.contradictions += ran.restored + ran.miscounted
        self.restored += ran.restored
        self.are_removed_each = ran.are_removed_each

    def store_again(self, engine_hash: int, key: int, *, counts: bool, replaces: bool = False) -> tuple[int, bytes]:
        """Store a block that the holder already has. Return the hash in its entry, and the new text of ``*<key>`` if it
        changes.

        With ``replaces`` the old count is not trusted, and the block has one copy from now on. If a removal has left a
        copy, and no removal has ever taken such a copy, the engine probably reports a removal only after the last copy
        of a block. Then this store contradicts the count.
        """
        several = self.find(key)
        first, text_before = several.hashes[0], several.text
        is_restored = counts and several.is_left and not self.are_removed_each
        self.contradictions += is_restored
        self.restored += is_restored
        several.is_left = several.is_left and not counts
        several.copies = 1 if replaces else several.copies + counts
        if engine_hash not in several.hashes:
            several.hashes.append(engine_hash)
            self._known.name(engine_hash, key)
        text = several.text
        if text == text_before:
            text = UNCHANGED
        elif text == NO_COPIES:
            several.is_left = False
        self.keep(key, several)
        return first, text

    def take(self, key: int, copies_left: int | None, *, counts: bool) -> BlockCopies | None:
        """Take one copy of a block that the holder has. Return the rest, or None if the block has no copy left.

        ``copies_left`` is the engine's own count for one of the block's engine hashes; ``counts`` says whether a
        removal without a count takes only one copy.
        """
        several = self.find(key)
        counted, more_copies = several.copies, len(several.hashes) - 1
        if copies_left is None or (copies_left == 0 and more_copies):
            remaining = counted - 1 if counts else 0
        else:
            remaining = copies_left + more_copies
            self.contradictions += counts and remaining != counted - 1
        self.are_removed_each = self.are_removed_each or several.is_left
        if remaining < 1:
            return None
        several.copies, several.is_left = remaining, copies_left is None and self.notes_left
        self.keep(key, several)
        return several

    def left_over(self) -> list[int]:
        """Return an engine hash of each block that a removal left with a copy, and that has not been stored since."""
        with_hashes = [several.hashes[0] for several in self.several.values() if several.is_left]
        return sorted([*with_hashes, *self._known.left()])

    def tell(self, key: int) -> bytes:
        """Return the text of ``*<key>`` for a new block. It is empty, unless the entry cannot hold the block's engine
        hash.
        """
        first = self._known.first(key)
        spot = self._known.get_block(key)
        if first != SAME_HASH or spot is None or spot.seq_hash == SAME_HASH:
            return UNCHANGED
        several = BlockCopies(1, [first])
        self.keep(key, several)
        return several.text

    def restore(self, key: int, copies: int, further: Sequence[int]) -> None:
        """Restore the copies of a block from Redis.

        ``further`` has the engine hashes of the block besides the one in its entry.
        """
        first = self._known.first(key)
        assert first is not None
        hashes = []
        for engine_hash in dict.fromkeys(further if SAME_HASH in further else [first, *further]):
            spot = self._known.get(engine_hash)
            if spot is None:
                self._known.name(engine_hash, key)
            if spot is None or spot.key == key:
                hashes.append(engine_hash)
        if hashes:
            self._known.set_copies(key, 0, False)  # of the hash in the entry, which may be one of several
            self._known.lead(hashes[0])
        if hashes and first not in hashes:  # the entry was read as the seq_hash
            self._known.pop(first)
        self.keep(key, BlockCopies(copies, hashes or [first]))

    def of(self, key: int) -> tuple[int, list[int]] | None:
        """Return the number of copies of a block and its engine hashes, or None if the holder does not have it."""
        if self._known.first(key) is None:
            return None
        several = self.find(key)
        return several.copies, list(several.hashes)

    def carry(self, key: int, copies: int, hashes: Iterable[int], *, counts: bool) -> bytes:
        """Add another holder's copies and hashes of a block to those of this holder. Return the new text of
        ``*<key>``.
        """
        several = self.find(key)
        several.copies += copies if counts else 0
        for engine_hash in hashes:
            if (
                engine_hash not in several.hashes
                and len(several.hashes) < HASHES_MAX
                and self._known.get(engine_hash) is None
            ):
                self._known.name(engine_hash, key)
                several.hashes.append(engine_hash)
        self.keep(key, several)
        return UNCHANGED if several.text == NO_COPIES else several.text
