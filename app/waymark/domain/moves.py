"""Moves blocks for which Redis has no slot at the place that a part names.

The rest of the part goes to another place, the memory notes that place, and later parts of the same fold follow,
because they were resolved before the refusal was known. Each refusal places at least one block. If a place is
remembered as full by mistake, this costs a reply, but never a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from waymark.base.errors import RecordDamaged
from waymark.domain.held import HeldBlocks
from waymark.domain.parts import STEP, Part
from waymark.domain.rows import Place

REFUSALS_MAX = 65_536
"""The most refusals in one fold. Each refusal places a block, unless a row is damaged."""


class Moves:
    """The moved blocks of one fold."""

    def __init__(self, memory: HeldBlocks) -> None:
        self._memory = memory
        self._moved: dict[tuple[int, int], list[tuple[tuple[int, int], Place]]] = {}
        """The places of moved blocks, by holder and block key. Each place is valid from a seq and a position on."""
        self._heads: set[int] = set()
        self._sent: set[tuple[int, int, int]] = set()
        self._planned: list[tuple[Sequence[Part], int, int]] = []
        """Parts that were sent to their planned places: a list of parts, the first index and the index after the last.
        """
        self.refusals = 0

    def refused(self, is_row: bool, part: Part, offset: int, *, is_apart: bool = False) -> list[Part]:
        """Return the parts that replace the rest of ``part`` from block ``offset`` on.

        Its place has no slot for that block. With ``is_row`` its branch row does not exist, and the row has the block
        or room for it. With ``is_apart`` it is a shared branch row in which the holder's slots would be far apart.
        """
        self.refusals += 1
        if self.refusals > REFUSALS_MAX:
            raise RecordDamaged(f"the rows of block {part.keys[offset]:016x} refuse it again and again; delete them")
        rest = part.cut(offset, part.count)
        keys = rest.keys
        head, full = part.place.head, self._memory.full
        if is_row:
            place = Place(head)
            full.discard(place)
        elif is_apart:
            full.keep_apart(head)
            place = Place(head, keys[0])
        else:
            full.add(part.place)
            # Only a block whose parent is named, and is in the row, may go to a shared branch row.
            is_shareable = rest.parent is not None and not part.is_known
            place = full.beyond(part.place, keys[0], rest.count) if is_shareable else Place(head, keys[0])
        # If the holder already has the blocks, those after the first may be at the old place.
        count = 1 if part.is_known and not is_row else rest.count
        for i in range(count):
            self._move(rest, i, keys[i], place)
        if place == part.place:  # only a damaged value refuses this, and then the block has no place
            return [rest.cut(1, rest.count)] if rest.count > 1 else []
        parts = [rest.cut(0, count, place)]
        return parts if count == rest.count else [*parts, rest.cut(count, rest.count)]

    @property
    def are_any(self) -> bool:
        """Whether any block was moved. Until then every part goes to its planned place."""
        return bool(self._heads)

    def send(self, parts: Sequence[Part], start: int, end: int) -> None:
        """Note that parts ``start`` to ``end`` go to their planned places, because no block was moved."""
        self._planned.append((parts, start, end))

    def stopped_before(self, parts: Sequence[Part]) -> None:
        """Note that Redis has applied none of ``parts``, which were sent after a block that it refused."""
        self._note_planned()
        self._sent.difference_update([(part.holder, part.seq, part.last) for part in parts])

    def _note_planned(self) -> None:
        for parts, start, end in self._planned:
            self._sent.update([(part.holder, part.seq, part.last) for part in parts[start:end]])
        self._planned.clear()

    def follow(self, part: Part) -> list[Part]:
        """Return the part, cut into several parts if some of its blocks were moved.

        A part that was sent before goes to the same place again, unless ``stopped_before`` named it: Redis may have
        applied it.
        """
        self._note_planned()
        name = (part.holder, part.seq, part.last)
        is_sent = name in self._sent
        self._sent.add(name)
        if part.place.head not in self._heads or part.place.is_single:
            return [part]
        is_free = not is_sent and part.kind == "+" and not part.is_known
        keys, depths = part.keys, part.depths
        targets = [self._target(part, i, keys, depths, is_free=is_free) for i in range(part.count)]
        parts, start = [], 0
        for place, group in groupby(targets):
            end = start + len(list(group))
            parts.append(part.cut(start, end, place))
            start = end
        return parts

    def _target(self, part: Part, i: int, keys: list[int], depths: list[int], *, is_free: bool) -> Place:
        moved = self._place_of(part, i, keys[i])
        if moved is not None:
            return moved
        if not is_free or depths[i] == 0 or part.place not in self._memory.full:
            return part.place
        parent = keys[i - 1] if i else part.parent
        if parent is None:
            place = Place(part.place.head, keys[i])
        else:
            place = self._place_of(part, i, parent) or part.place
            if place in self._memory.full:
                place = self._memory.full.beyond(place, keys[i], part.count - i)
        self._move(part, i, keys[i], place)
        return place

    def _place_of(self, part: Part, i: int, key: int) -> Place | None:
        """Return the place of the block with ``key`` when block ``i`` is applied; None if it was not moved before."""
        target = None
        for start, place in self._moved.get((part.holder, key), ()):
            if start <= (part.seq, part.first + STEP * i):
                target = place
        return target

    def _move(self, part: Part, i: int, key: int, place: Place) -> None:
        """Note that block ``i`` with this key is at ``place`` from its position on, up to its next move."""
        moved = self._moved.setdefault((part.holder, key), [])
        start = part.seq, part.first + STEP * i
        moved[:] = sorted([*(move for move in moved if move[0] != start), (start, place)])
        self._heads.add(place.head)
        # A later event may have removed the block, and stored it again without its depth, or with it.
        self._memory.move(part.holder, key, moved[-1][1], is_single=part.place.is_single)
