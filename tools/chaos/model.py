"""The bounds of answers: they must have the blocks that are certain to be in the index, and no blocks that cannot be
there.

For a publisher that has lost nothing the two bounds are the same: the contents of its caches. If a publisher may have
lost batches, and its stream reports that, the index may have none of its blocks. It may also still have blocks that the
publisher has removed since the index last had exactly its blocks, if a life goes on after a loss
(``WAYMARK_ON_GAP=keep``). No other block may ever be in the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from tests.model import Model, Place, Space, Tokens

BLOCK_SIZE = 4
"""The block size of most sessions."""


class Held(NamedTuple):
    """A block, named by its whole prefix, and its place."""

    space: Space
    prefix: Tokens
    place: Place


class Bounds:
    """The bounds for one tenant and model."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self.least = Model(block_size)
        self.most = Model(block_size)

    def register(self, instance: str, rank: int, *, is_pool: bool) -> None:
        for model in (self.least, self.most):
            if is_pool:
                model.pools.add(instance)
            else:
                model.ranks.setdefault(instance, set()).add(rank)

    def hold(self, least: Iterable[Held], most: Iterable[Held]) -> None:
        put(self.least, least)
        put(self.most, most)

    def blocks(self) -> set[tuple[Space, Tokens]]:
        """Return all blocks that may be in the index."""
        return set(self.most.copies)

    def wrong_walk(self, tokens: Tokens, space: Space, rows: Mapping[str, Any]) -> list[str]:
        """Return the errors in the answer for a whole prompt."""
        return _differences(self.least.query(tokens, space), self.most.query(tokens, space), rows)

    def wrong_block(self, prefix: Tokens, space: Space, places: Set[Place]) -> list[str]:
        """Return the errors in the places of one block, whether or not the blocks before it are there."""
        least, most = (model.copies.get((space, prefix), Counter()).keys() for model in (self.least, self.most))
        found = [f"{place.instance}: it is not at {place}" for place in sorted(least - places)]
        return found + [f"{place.instance}: it is at {place}" for place in sorted(places - most)]

    def wrong_counts(self, counts: Counter[Place]) -> list[str]:
        """Return the errors in the numbers of blocks at all places."""
        least, most = (
            Counter(place for of in model.copies.values() for place in of) for model in (self.least, self.most)
        )
        return [
            f"{place.instance}: {counts[place]} blocks at {place}, not {least[place]} to {most[place]}"
            for place in sorted(counts.keys() | most.keys())
            if not least[place] <= counts[place] <= most[place]
        ]


def put(model: Model, held: Iterable[Held]) -> None:
    for space, prefix, place in held:
        model.copies.setdefault((space, prefix), Counter())[place] = 1


def _differences(least: Mapping[str, Any], most: Mapping[str, Any], rows: Mapping[str, Any]) -> list[str]:
    found = [f"{instance} has no row" for instance in sorted(least.keys() - rows.keys())]
    found += [f"{instance} has a row and is not registered" for instance in sorted(rows.keys() - most.keys())]
    for instance in sorted(rows.keys() & most.keys()):
        low, high, row = _flat(least[instance]), _flat(most[instance]), _flat(rows[instance])
        for name in sorted(low.keys() | high.keys() | row.keys()):
            value, lowest, highest = row[name], low[name], high[name]
            if not lowest <= value <= highest:
                span = str(lowest) if lowest == highest else f"{lowest} to {highest}"
                found.append(f"{instance}: {name} is {value}, not {span}")
    return found


def _flat(row: Mapping[str, Any]) -> Counter[str]:
    flat = Counter({name: value for name, value in row.items() if name != "DP"})
    flat.update({f"rank {rank}": value for rank, value in row["DP"].items()})
    return flat
