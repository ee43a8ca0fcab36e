"""The worth of an engine's cache: the tokens that would be lost with it, and the most used prefixes.

A ``Tally`` counts row by row, so its memory grows with the number of engines and not with the number of blocks.
``Prompts`` counts how often the blocks of prompts were asked for. Both are estimates. If a block is in a row for one
engine and in a branch row for another one, it counts as if each were its only holder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from waymark.domain.rows import Row
from waymark.domain.table import HolderTable


class CacheWorth(NamedTuple):
    """The tokens in an engine's cache. A token that several of its ranks or media have counts once."""

    tokens: int = 0
    only: int = 0
    """Tokens that neither another engine nor a pool has."""
    few: int = 0
    """Tokens that fewer than two others have."""
    only_used: int = 0
    """The tokens of ``only``, each counted once, and once more for each prompt that used it."""
    few_used: int = 0
    """The tokens of ``few``, counted in the same way."""

    def scaled(self, factor: float) -> CacheWorth:
        return CacheWorth(*(round(factor * tokens) for tokens in self))


class Tally:
    """Adds up the worth of each engine of a group.

    An engine is all ranks of an instance, because they stop together. Holders of a lost publisher do not count. Neither
    do those of a window, which are useless without the blocks of the main group.
    """

    def __init__(self, table: HolderTable, uses: Mapping[int, int]) -> None:
        """``uses`` is how many prompts used the block with a key; 0 for a block without an entry."""
        self._uses = uses
        names: dict[tuple[str, str], int] = {}
        self._names: list[str | None] = []
        """The instance of each owner; None for a pool."""
        self._sizes: list[int] = []
        self._owners: dict[int, int] = {}
        for holder in table.holders.values():
            publisher = table.publishers.get(holder.publisher)
            if publisher is None or publisher.is_lost or holder.window is not None:
                continue
            owner = names.setdefault((holder.scope, holder.instance_id), len(names))
            if owner == len(self._names):
                self._names.append(None if holder.scope == "shared" else holder.instance_id)
                self._sizes.append(holder.block_size)
            self._owners[holder.id] = owner
        self._sums = [[0] * len(CacheWorth._fields) for _ in self._names]

    @property
    def holders(self) -> list[int]:
        """The ids of the holders that count."""
        return list(self._owners)

    def count(self, row: Row) -> int:
        """Count a row. Return the number of its blocks with a holder."""
        masks: dict[int, int] = {}
        for holder, bitmap in row.holders.items():
            owner = self._owners.get(holder)
            if owner is not None:
                masks[owner] = masks.get(owner, 0) | bitmap
        once = twice = thrice = 0  # the slots with at least one, two and three owners
        for mask in masks.values():
            thrice |= twice & mask
            twice |= once & mask
            once |= mask
        used = (
            [(slot, uses) for slot, key in enumerate(row.keys) if (uses := self._uses.get(key))] if self._uses else ()
        )
        for owner, mask in masks.items():
            sums = self._sums[owner]
            only, few = mask & ~twice, mask & ~thrice
            sums[0] += mask.bit_count()
            sums[1] += only.bit_count()
            sums[2] += few.bit_count()
            sums[3] += only.bit_count() + sum(uses for slot, uses in used if only >> slot & 1)
            sums[4] += few.bit_count() + sum(uses for slot, uses in used if few >> slot & 1)
        return once.bit_count()

    def worths(self, share: float) -> dict[str, CacheWorth]:
        """Return the worth of each engine; ``share`` is the share of all rows that were counted."""
        return {
            name: CacheWorth(*sums).scaled(size / share)
            for name, size, sums in zip(self._names, self._sizes, self._sums, strict=True)
            if name is not None
        }


class PrefixUse(NamedTuple):
    """Consecutive blocks that equally many prompts used."""

    before: int | None
    """The index of the entry with the blocks before them; None at the beginning of a prompt."""
    block_size: int
    uses: int
    keys: tuple[int, ...]


class Prompts:
    """The beginnings of prompts, as a tree of blocks. The caller bounds the number of prompts."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        """The number of prompts with the block, by key."""
        self._before: dict[int, tuple[int | None, int]] = {}

    def add(self, block_size: int, keys: Sequence[int]) -> None:
        """Add a prompt by the keys of its first blocks."""
        parent: int | None = None
        for key in keys:
            if key in self.uses:
                self.uses[key] += 1
            else:
                self.uses[key] = 1
                self._before[key] = parent, block_size
            parent = key

    def most_used(self, blocks_max: int) -> list[PrefixUse]:
        """Return at most ``blocks_max`` blocks, those with the most uses, in descending order of uses.

        A block has no more uses than its parent, so an entry comes after the one that it continues.
        """
        entries: list[tuple[int | None, int, int, list[int]]] = []
        ends: dict[int, int] = {}
        """The index of the entry that contains a block, by key."""
        by_uses: dict[int, list[int]] = {}
        for key, uses in self.uses.items():
            by_uses.setdefault(uses, []).append(key)
        most_first = chain.from_iterable(by_uses[uses] for uses in sorted(by_uses, reverse=True))
        for key in islice(most_first, blocks_max):
            parent, block_size = self._before[key]
            index = None if parent is None else ends.get(parent)
            if index is not None and entries[index][2] == self.uses[key] and entries[index][3][-1] == parent:
                entries[index][3].append(key)
                ends[key] = index
            else:
                ends[key] = len(entries)
                entries.append((index, block_size, self.uses[key], [key]))
        return [PrefixUse(parent, size, uses, tuple(keys)) for parent, size, uses, keys in entries]
