"""What a worker does when Redis has no slot for a block at the place that a part names.

The rest of the part goes to another place, the memory learns it, and later parts of the same fold follow: they were
resolved before the refusal was known. Each refusal places at least one block, and a wrong memory of full places costs a
reply, never a block.
"""

from __future__ import annotations

from itertools import groupby
from typing import Literal

from waymark.domain.held import BlockMemory
from waymark.domain.parts import Part
from waymark.domain.rows import Place

Refusal = Literal["branch", "row"]


class Moves:
    """The blocks of one fold that are not where they were planned."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._moved: dict[tuple[int, int], Place] = {}
        self._heads: set[int] = set()
        self.refusals = 0

    def refused(self, verdict: Refusal, part: Part, offset: int) -> list[Part]:
        """The parts that take the place of what is left of ``part`` from block ``offset`` on.

        ``branch``: there is no slot. ``row``: the branch row is not there, and the row has the block or room.
        """
        self.refusals += 1
        rest = part.cut(offset, len(part.keys))
        head, full = part.place.head, self._memory.full
        if verdict == "row":
            place = Place(head)
            full.discard(place)
        else:
            full.add(part.place)
            place = Place(head, rest.keys[0])
        # Of blocks that the holder has already, those after the first may be at the old place.
        count = 1 if verdict == "branch" and part.is_known else len(rest.keys)
        for key in rest.keys[:count]:
            self._move(rest.holder, key, place)
        parts = [rest.cut(0, count, place)]
        return parts if count == len(rest.keys) else [*parts, rest.cut(count, len(rest.keys))]

    def follow(self, part: Part) -> list[Part]:
        """The part, or several in its place where some of its blocks were moved."""
        if part.place.head not in self._heads:
            return [part]
        targets: list[Place] = []
        parent = part.parent
        for key in part.keys:
            targets.append(self._target(part, parent, key))
            parent = key
        parts, start = [], 0
        for place, group in groupby(targets):
            end = start + len(list(group))
            parts.append(part.cut(start, end, place))
            start = end
        return parts

    def _target(self, part: Part, parent: int | None, key: int) -> Place:
        moved = self._moved.get((part.holder, key))
        if moved is not None:
            return moved
        if part.kind != "+" or part.is_known or part.place not in self._memory.full:
            return part.place
        above = None if parent is None else self._moved.get((part.holder, parent))
        place = Place(part.place.head, key) if above is None or above in self._memory.full else above
        self._move(part.holder, key, place)
        return place

    def _move(self, holder: int, key: int, place: Place) -> None:
        self._moved[holder, key] = place
        self._heads.add(place.head)
        self._memory.move(holder, key, place)
