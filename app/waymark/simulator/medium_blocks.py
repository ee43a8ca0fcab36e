"""One medium of the simulated cache: physical copies of blocks in the order of their use.

An invariant: a block's last copy never goes while a child is on the same medium.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from waymark.simulator.wire import ExtraKeys


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A complete block of a prompt, with the chain above it."""

    key: int
    """Names the block within this cache; u64."""
    name: int
    """The name of the block in events: the key, or a standard publisher's seq_hash."""
    parent: Block | None
    tokens: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None
    extra: ExtraKeys | None


class MediumBlocks:
    """At most ``size`` copies; the first in the order is the least recently used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._next_copy = 0
        self.clear()

    def clear(self) -> None:
        self._order: OrderedDict[int, Block] = OrderedDict()
        self._copies: dict[int, list[int]] = {}
        self._children: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._copies

    def blocks(self) -> Iterator[Block]:
        """Yield every block once, however many copies it has."""
        return (self._order[copies[0]] for copies in self._copies.values())

    def get(self, key: int) -> Block | None:
        copies = self._copies.get(key)
        return None if copies is None else self._order[copies[0]]

    def copies(self, key: int) -> int:
        return len(self._copies.get(key, ()))

    def add(self, block: Block) -> None:
        """Add a copy, as the most recently used."""
        copies = self._copies.setdefault(block.key, [])
        if not copies and block.parent is not None:
            self._children[block.parent.key] += 1
        copies.append(self._next_copy)
        self._order[self._next_copy] = block
        self._next_copy += 1

    def touch(self, blocks: Sequence[Block]) -> None:
        """Use one copy of each present block of a chain, parents last, so that they are the younger."""
        used = [self._copies[block.key][-1] for block in blocks if block.key in self._copies]
        for copy in reversed(used):
            self._order.move_to_end(copy)

    def evict(self) -> Block:
        """Remove the least recently used copy that may go, and return its block.

        A block passed over goes to the back: as long as its child is here, it is of use too.
        """
        for _ in range(len(self._order)):
            copy, block = self._order.popitem(last=False)
            copies = self._copies[block.key]
            if len(copies) == 1 and self._children[block.key]:
                self._order[copy] = block
                continue
            copies.remove(copy)
            if not copies:
                del self._copies[block.key]
                if block.parent is not None:
                    self._children[block.parent.key] -= 1
                    if not self._children[block.parent.key]:
                        del self._children[block.parent.key]
            return block
        raise AssertionError("nothing to evict")
