"""A model of the index by brute force, without hashes, holders, runs or Redis, that gives the answers of the HTTP
contract.

A block is named by its whole prefix, so the model cannot have the faults of an index. It is written from the contract
alone, and shares no code with the implementation that it checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from waymark.simulator.cache import PrefixCache

Tokens: TypeAlias = tuple[int, ...]


class Space(NamedTuple):
    """The adapter and the list of salts, which distinguish prompts with equal tokens."""

    lora_name: str | None = None
    salts: tuple[str, ...] = ()
    lora_id: int | None = None
    """The id of an adapter whose name the engine does not send."""


BASE = Space()


class Place(NamedTuple):
    """The place of a copy. ``publisher`` is the registered rank whose socket reported it, and ``rank`` is the rank that
    has it."""

    instance: str
    publisher: int
    rank: int
    medium: str


class Model:
    """The index of one (tenant, model) with one block size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ranks: dict[str, set[int]] = {}
        """The registered ranks by instance, without pools."""
        self.pools: set[str] = set()
        self.copies: dict[tuple[Space, Tokens], Counter[Place]] = {}
        """The number of copies of each block at each place. A block is named by its whole prefix."""

    def end(self, instance: str, publisher: int | None = None, rank: int | None = None) -> None:
        """Remove the blocks of an instance, of one of its publishers, or of one rank of that publisher."""
        for places in self.copies.values():
            for place in list(places):
                if place.instance == instance and publisher in (None, place.publisher) and rank in (None, place.rank):
                    del places[place]

    def hold(self, instance: str, caches: Iterable[PrefixCache]) -> None:
        """Let an instance have exactly the blocks in the caches of its ranks."""
        self.end(instance)
        for rank, cache in enumerate(caches):
            for medium, prefixes in cache.contents().items():
                for prefix in prefixes:
                    space = Space(prefix.lora_name, (prefix.cache_salt,) if prefix.cache_salt else ())
                    self.copies.setdefault((space, prefix.tokens), Counter())[Place(instance, 0, rank, medium)] = 1

    def query(self, tokens: Tokens, space: Space = BASE) -> dict[str, dict[str, Any]]:
        """Return the rows of an answer, in tokens, by a walk over every block for every instance."""
        size, rows = self.block_size, {}
        for instance, ranks in self.ranks.items():
            row: dict[str, Any] = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0}
            matched = dict.fromkeys(ranks, 0)
            for end in range(size, len(tokens) + 1, size):
                places = self.copies.get((space, tokens[:end]), Counter())
                own = {place for place in places if place.instance == instance}
                media = {place.medium for place in places if place in own or place.instance in self.pools}
                if not media:
                    break
                row["longest_matched"] += size
                for medium in media:
                    row[medium] = row.get(medium, 0) + size
                for rank in {place.rank for place in own}:
                    matched[rank] = matched.get(rank, 0) + size
            rows[instance] = row | {"DP": {str(rank): count for rank, count in matched.items()}}
        return rows
