"""The answers of the HTTP contract, by brute force: an index without hashes, holders, runs or Redis.

A block is named by its whole prefix, so nothing here can go wrong the way an index can. It is written from the
contract alone and shares no code with what it judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from waymark.simulator.cache import PrefixCache

Tokens: TypeAlias = tuple[int, ...]


class Space(NamedTuple):
    """What separates equal prompts: the adapter, and those salts that are there, as a list."""

    lora_name: str | None = None
    salts: tuple[str, ...] = ()
    lora_id: int | None = None
    """Of an adapter that its engine does not name."""


BASE = Space()


class Place(NamedTuple):
    """Where a copy is. ``publisher`` is the registered rank whose socket told of it, ``rank`` the rank that has it."""

    instance: str
    publisher: int
    rank: int
    medium: str


class Model:
    """One (tenant, model) with one block size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ranks: dict[str, set[int]] = {}
        """Registered ranks by instance; pools are not in it."""
        self.pools: set[str] = set()
        self.copies: dict[tuple[Space, Tokens], Counter[Place]] = {}
        """How many copies of a block, named by its whole prefix, are where."""

    def end(self, instance: str, publisher: int | None = None, rank: int | None = None) -> None:
        """Forget what an instance has, or what one publisher of it told, or what that told of one rank."""
        for places in self.copies.values():
            for place in list(places):
                if place.instance == instance and publisher in (None, place.publisher) and rank in (None, place.rank):
                    del places[place]

    def hold(self, instance: str, caches: Iterable[PrefixCache]) -> None:
        """Let an instance have just what the caches of its ranks have."""
        self.end(instance)
        for rank, cache in enumerate(caches):
            for medium, prefixes in cache.contents().items():
                for prefix in prefixes:
                    space = Space(prefix.lora_name, (prefix.cache_salt,) if prefix.cache_salt else ())
                    self.copies.setdefault((space, prefix.tokens), Counter())[Place(instance, 0, rank, medium)] = 1

    def query(self, tokens: Tokens, space: Space = BASE) -> dict[str, dict[str, Any]]:
        """The rows of an answer, in tokens: for every instance every block of its walk."""
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
