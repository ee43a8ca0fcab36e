"""The progress of one query through the index: the next reads, and the results so far.

A query reads the rows of the pieces of its chain, a portion at a time. If a marked row does not list a block of its
piece, that block is *open*: a branch row may contain it. The query reads the branch rows of open blocks together
with the next portion, and the shared branch rows of those whose parent the row lists. The blocks before the first open
one are *certain*.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from waymark.domain.packing import KEY_BYTES
from waymark.domain.row_runs import Runs, piece_runs, row_runs
from waymark.domain.rows import DEPTHS, PIECE_BLOCKS, shared_places
from waymark.store.directory import GroupEntry
from waymark.store.hot import HotRow, HotRows, crowd_blocks

KeySource: TypeAlias = Callable[[int], bytes]
"""Returns the next n block keys of a prompt (seq_hash XOR namespace), packed; fewer at its end."""


class PackedKeys:
    """The computed keys of a prompt, a piece at a time."""

    def __init__(self, keys: bytes) -> None:
        self._keys = keys
        self._at = 0

    def __call__(self, count: int) -> bytes:
        start, self._at = self._at, self._at + KEY_BYTES * count
        return self._keys[start : self._at]


ValueName: TypeAlias = tuple[int, bytes]
"""A value to read: its shard, and the part of its key after the prefix of group and shard."""


class WantedValues(NamedTuple):
    """The values that a chain needs next."""

    heads: bytes
    """Packed keys of the heads whose rows are wanted."""
    beside: list[ValueName]
    """Branch rows and singles."""


_PIECE_BYTES = KEY_BYTES * PIECE_BLOCKS


class _PieceValues:
    """The values read for a piece besides its row. Bit i of a bitmap stands for block i of the piece."""

    __slots__ = ("branches", "has_singles", "shared", "values")

    def __init__(self) -> None:
        self.branches = 0
        self.shared = 0
        self.has_singles = False
        self.values: list[tuple[ValueName, bytes]] = []


def _shareable(missing: int) -> int:
    """Return those missing blocks of a marked row whose parent it lists. Shared branch rows may have them."""
    return missing & ~(missing << 1)


class Chain:
    """The progress of a query along its chain. After ``begin`` its user calls ``ask``, ``take`` and ``settle`` in turn,
    until the whole chain is looked up.
    """

    def __init__(self, source: KeySource, hot: HotRows) -> None:
        self._source = source
        self._hot = hot
        self._keys = b""
        self._is_whole = False
        """Whether the source has no more keys."""

    def begin(self, entry: GroupEntry) -> None:
        """Start the lookup in this group. Values that were read before are dropped; the keys of the chain are kept."""
        self.has_singles = False
        """Whether the group has blocks of unknown depth, so that every block is also looked up among the singles."""
        self.found = 0
        """The number of blocks, from the start of the chain, that certainly have a holder."""
        self.unreadable: set[ValueName] = set()
        """The values that cannot be read."""
        self._entry = entry
        self._rows: list[bytes | None] = []
        """The row of each requested piece."""
        self._beside: dict[int, _PieceValues] = {}
        self._rows_asked: Sequence[int] = ()
        """The pieces whose rows were asked for last."""
        self._beside_asked: list[tuple[int, int, ValueName]] = []
        """The values besides rows that were asked for last, as (piece, block, name).

        For a single, the number of the block is increased by ``PIECE_BLOCKS``.
        """
        self._clearings = self._hot.clearings
        """How often the hot rows had been cleared when the last values were asked for."""
        self.may_be_hot = False
        """Whether some of the last values are marked or have many holders, as ``settle`` has found."""
        self._open: list[tuple[int, int]] = []
        """(piece, bitmap of the blocks that its marked row does not list), in order."""
        self._is_at_end = False
        """Whether no holder has a block after the requested rows."""

    @property
    def blocks(self) -> int:
        """How many blocks have been looked up."""
        return min(PIECE_BLOCKS * len(self._rows), len(self._keys) // KEY_BYTES)

    def ask(self, pieces: int, now: float) -> WantedValues:
        """Return the next values to read: the branch rows of open blocks, and the rows of the next ``pieces`` pieces.

        Rows that the cache of hot rows has are left out.
        """
        self._beside_asked = []
        for piece, blocks in self._open:
            self._ask_beside(piece, blocks)
        following = range(0) if self._is_at_end else self._next_pieces(pieces)
        self._rows += [None] * len(following)
        self._rows_asked = following
        self._clearings = self._hot.clearings
        hot = self._hot.find(self._entry.group_id, self._heads(following)) if self._hot.expire(now) else {}
        if hot or self.has_singles:
            usual = not self.has_singles
            self._rows_asked = [
                piece
                for index, piece in enumerate(following)
                if (usual and index not in hot) or self._ask_piece(piece, hot.get(index))
            ]
        further = [name for _, _, name in self._beside_asked] if self._beside_asked else []
        return WantedValues(self._heads(self._rows_asked), further)

    def take(self, values: Sequence[bytes | None]) -> None:
        """Store the values that ``ask`` named: first the rows, then the others."""
        rows = self._rows_asked
        if isinstance(rows, range):
            self._rows[rows.start : rows.stop] = values[: len(rows)]
        else:
            for piece, value in zip(rows, values, strict=False):
                self._rows[piece] = value
        for (piece, index, name), value in zip(self._beside_asked, values[len(rows) :], strict=True):
            if value is not None:
                if index >= PIECE_BLOCKS:  # the value of a single does not contain its depth
                    value = b"%b%c%b" % (value[:16], DEPTHS[index - PIECE_BLOCKS], value[17:])
                self._beside[piece].values.append((name, value))

    def keep_hot(self, now: float) -> None:
        """Keep the hot rows among the last values, if ``may_be_hot``."""
        if self._clearings == self._hot.clearings:
            pieces, rows = self._rows_asked, self._rows
            self._hot.keep(self._entry.group_id, self._heads(pieces), [rows[piece] for piece in pieces], now)

    def settle(self) -> tuple[Runs, bool]:
        """Return the runs which became certain since the last call, and whether the whole chain is looked up."""
        certain: Runs = []
        self._open = []
        self._is_at_end = False
        self.may_be_hot = self.has_singles
        piece = self.found // PIECE_BLOCKS
        while piece < len(self._rows) and not self._is_at_end:
            if self.has_singles:
                self._settle(certain, piece)
                piece += 1
                continue
            runs, count, self._is_at_end = row_runs(self._keys[_PIECE_BYTES * piece :], self._rows[piece:])
            self._add(certain, piece, runs)
            self.may_be_hot |= crowd_blocks(runs) > 0
            piece += count
            if piece < len(self._rows) and not self._is_at_end:
                self._settle(certain, piece)
                piece += 1
        return certain, not self._open and (self._is_at_end or self._is_whole)

    # ---- asking ----------------------------------------------------------------------------------------

    def _next_pieces(self, count: int) -> range:
        first = len(self._rows)
        missing = PIECE_BLOCKS * (first + count) - len(self._keys) // KEY_BYTES
        if missing > 0 and not self._is_whole:
            more = self._source(missing + 1)  # one more shows whether the chain continues
            self._is_whole = len(more) <= KEY_BYTES * missing
            self._keys = self._keys + more if self._keys else more
        return range(first, min(first + count, -(-len(self._keys) // _PIECE_BYTES)))

    def _heads(self, pieces: Sequence[int]) -> bytes:
        if not pieces:
            return b""
        if isinstance(pieces, range):
            all_keys = array("Q", self._keys[_PIECE_BYTES * pieces[0] : _PIECE_BYTES * pieces[-1] + KEY_BYTES])
            return all_keys[::PIECE_BLOCKS].tobytes()
        keys = self._keys
        return b"".join([keys[_PIECE_BYTES * piece : _PIECE_BYTES * piece + KEY_BYTES] for piece in pieces])

    def _head(self, piece: int) -> bytes:
        return self._keys[_PIECE_BYTES * piece : _PIECE_BYTES * piece + KEY_BYTES]

    def _keys_of(self, piece: int) -> bytes:
        return self._keys[_PIECE_BYTES * piece : _PIECE_BYTES * (piece + 1)]

    def _shard(self, key: bytes) -> int:
        return 0 if self._entry.shards == 1 else int.from_bytes(key, "big") % self._entry.shards

    def _name(self, piece: int) -> ValueName:
        head = self._head(piece)
        return self._shard(head), head.hex().encode()

    def _ask_piece(self, piece: int, row: HotRow | None) -> bool:
        """Ask for the values that a piece needs besides its row. Return whether the row itself must be read.

        ``row`` is its hot row.
        """
        missing = 0
        if row is not None:
            if row.is_marked:
                missing = piece_runs(self._keys_of(piece), [row.value])[1]
            if row.is_enough:
                self._rows[piece] = row.value
        if missing or self.has_singles:
            self._ask_beside(piece, missing)
        return row is None or not row.is_enough

    def _ask_beside(self, piece: int, blocks: int) -> None:
        """Ask for the branch rows that may list ``blocks``, which the row does not. In a group with singles, also ask
        for all singles.
        """
        piece_values = self._beside.setdefault(piece, _PieceValues())
        keys = self._keys_of(piece)
        shard = self._shard(keys[:KEY_BYTES])
        shared = _shareable(blocks) & ~piece_values.shared
        for index in range(len(keys) // KEY_BYTES):
            key = keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]
            if (blocks & ~piece_values.branches) >> index & 1:
                self._beside_asked.append((piece, index, (shard, b"%b:b" % key.hex().encode())))
            if shared >> index & 1:
                places = shared_places(int.from_bytes(keys[:KEY_BYTES], "big"), int.from_bytes(key, "big"))
                self._beside_asked += [(piece, index, (shard, place.name)) for place in places]
            if self.has_singles and not piece_values.has_singles:
                name = self._shard(key), b"%b:s" % key.hex().encode()
                self._beside_asked.append((piece, PIECE_BLOCKS + index, name))
        piece_values.branches |= blocks
        piece_values.shared |= shared
        piece_values.has_singles = self.has_singles

    # ---- settling --------------------------------------------------------------------------------------

    def _settle(self, certain: Runs, piece: int) -> None:
        """Find the runs of a piece whose blocks may be in its row, in branch rows or in singles."""
        self.may_be_hot = True
        keys = self._keys_of(piece)
        piece_values = self._beside.get(piece) or _PieceValues()
        runs, missing, unreadable = piece_runs(keys, [self._rows[piece], *(value for _, value in piece_values.values)])
        if unreadable:
            self._note(piece, piece_values, unreadable)
        unknown = missing & ~piece_values.branches | _shareable(missing) & ~piece_values.shared
        decided = blocks = len(keys) // KEY_BYTES
        if self.has_singles and not piece_values.has_singles:
            decided = 0
        elif unknown:
            decided = (unknown & -unknown).bit_length() - 1
        # Only the row can contain the blocks before the first open one.
        runs = _first(runs, decided)
        self._add(certain, piece, runs)
        if _length(runs) < decided:
            self._is_at_end = True
        elif decided < blocks:
            self._open.append((piece, missing))

    def _add(self, certain: Runs, piece: int, runs: Runs) -> None:
        """Append the runs of a piece, from its first block, to ``certain``, unless an earlier block is open."""
        if self._open:
            return
        known_blocks = self.found - PIECE_BLOCKS * piece
        for value, length in runs:
            more = min(length, length - known_blocks)
            known_blocks = max(0, known_blocks - length)
            if more > 0:
                certain.append((value, more))
                self.found += more

    def _note(self, piece: int, piece_values: _PieceValues, unreadable: int) -> None:
        names = [self._name(piece), *(name for name, _ in piece_values.values)]
        self.unreadable |= {name for index, name in enumerate(names) if unreadable >> index & 1}


def _length(runs: Runs) -> int:
    return sum(length for _, length in runs)


def _first(runs: Runs, count: int) -> Runs:
    """Return the runs of the first ``count`` blocks."""
    first: Runs = []
    for value, length in runs:
        if count > 0:
            first.append((value, min(length, count)))
        count -= length
    return first
