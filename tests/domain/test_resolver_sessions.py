"""Random sessions of engines, against what their caches would hold if one counted the prefixes themselves.

The engine here knows nothing of hashes of ours: it keeps, per rank and medium, how often it has each prefix
(adapter, salt, letters). Only at the end is a prefix turned into a key, by hashing its tokens from the beginning.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.domain.index import Index
from tests.factories import BLOCK_SIZE, SEED, batch, cleared, registration, removed, stored
from tests.unit import examples
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Event
from waymark.domain.hashing import namespace

pytestmark = pytest.mark.slow


class Prefix(NamedTuple):
    """What an engine hashes: all blocks up to and including this one, and what is not in the tokens."""

    adapter: str
    salt: str
    blocks: str

    @property
    def parent(self) -> Prefix | None:
        return self._replace(blocks=self.blocks[:-1]) if len(self.blocks) > 1 else None

    @property
    def engine_hash(self) -> int:
        return int.from_bytes(blake2b(repr(self).encode(), digest_size=8).digest(), "big")

    @property
    def key(self) -> int:
        seq_hash = None
        for letter in self.blocks:
            local = xxh3_64_intdigest(struct.pack("<I", ord(letter)) * BLOCK_SIZE, SEED)
            seq_hash = local if seq_hash is None else xxh3_64_intdigest(struct.pack("<QQ", seq_hash, local), SEED)
        assert seq_hash is not None
        return seq_hash ^ namespace(self.adapter or None, [self.salt] if self.salt else [])


class Engine:
    """The caches of an instance, and the events of what is done to them."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], *, keeps_parents: bool) -> None:
        self._draw = draw
        self._keeps_parents = keeps_parents
        """A block is stored only under a parent that is in some cache of its rank."""
        self.caches: dict[str, Counter[Prefix]] = defaultdict(Counter)
        self._placed: dict[int, set[Prefix]] = defaultdict(set)
        """Per rank, what was ever stored in this life: nobody has to wait for it."""
        self._waiting: dict[int, list[tuple[Prefix, list[Prefix]]]] = defaultdict(list)
        self._late: set[Prefix] = set()
        """What waited until this batch; it is placed at its end, so its placeholders come later."""

    def pick(self, among: list[Any]) -> Any:
        return self._draw(st.sampled_from(among))

    def some(self, among: Iterable[Prefix]) -> list[Prefix]:
        picked: list[Prefix] = self._draw(st.lists(st.sampled_from(sorted(among)), unique=True, min_size=1, max_size=4))
        return picked

    def batch(self, rank: int, events: int) -> Batch:
        self._late = set()
        return batch(*(self.event(rank) for _ in range(events)), rank=rank)

    def event(self, rank: int) -> Event:
        kind = self.pick(["store"] * 5 + ["copy", "offload", "remove", "remove", "remove", "clear"])
        here = [prefix for medium in ("GPU", "CPU") for prefix in self.caches[f"{rank} {medium}"]]
        if kind == "clear":
            if self._draw(st.integers(0, 3)):
                return self.store(rank)
            for medium in ("GPU", "CPU"):
                self.caches.pop(f"{rank} {medium}", None)
            self._placed.pop(rank, None)
            self._waiting.pop(rank, None)
            return cleared()
        if kind == "store" or not here:
            return self.store(rank)
        if kind == "copy":
            return self.store(rank, self.pick(here))
        if kind == "offload":
            known = (set(here) if self._keeps_parents else self._placed[rank]) - self._late
            if not known:
                return self.store(rank)
            offloaded = self.some(known)
            self.caches[f"{rank} CPU"].update(offloaded)
            return stored([prefix.engine_hash for prefix in offloaded], medium="CPU")
        emptied: str = self.pick([medium for medium in ("GPU", "CPU") if self.caches[f"{rank} {medium}"]])
        evicted = self.some(self.caches[f"{rank} {emptied}"])
        self.caches[f"{rank} {emptied}"] -= Counter(evicted)
        return removed(*(prefix.engine_hash for prefix in evicted), medium=emptied)

    def store(self, rank: int, end: Prefix | None = None) -> Event:
        """Blocks of a prompt, from somewhere in it on; ``end`` is the last one."""
        if end is None:
            blocks = self._draw(st.text("AB", min_size=1, max_size=4))
            end = Prefix(self.pick(["", "", "x"]), self.pick(["", "", "s"]), str(blocks))
        start = self._draw(st.integers(0, len(end.blocks) - 1))
        chain = [end._replace(blocks=end.blocks[: n + 1]) for n in range(start, len(end.blocks))]
        if self._keeps_parents:
            held = self.caches[f"{rank} GPU"] | self.caches[f"{rank} CPU"]
            while chain[0].parent is not None and chain[0].parent not in held:
                chain.insert(0, chain[0].parent)
        parent = chain[0].parent
        if parent is None or parent in self._placed[rank]:
            self._place(rank, chain)
        else:
            self._waiting[rank].append((parent, chain))
        return stored(
            [prefix.engine_hash for prefix in chain],
            "".join(prefix.blocks[-1] for prefix in chain),
            parent=parent and parent.engine_hash,
            adapter=end.adapter or None,
            salts=(end.salt,) if end.salt and parent is None else (),
        )

    def _place(self, rank: int, chain: list[Prefix]) -> None:
        self.caches[f"{rank} GPU"].update(chain)
        self._placed[rank].update(chain)
        for entry in list(self._waiting[rank]):
            if entry[0] in chain and entry in self._waiting[rank]:
                self._waiting[rank].remove(entry)
                self._late.update(entry[1])
                self._place(rank, entry[1])

    def expected(self, *, counts: bool) -> dict[str, Counter[int]]:
        """Copies of each key per rank and medium."""
        return {
            name: Counter({prefix.key: n if counts else 1 for prefix, n in cache.items() if n})
            for name, cache in self.caches.items()
            if +cache
        }


def contents(index: Index) -> dict[str, Counter[int]]:
    return {name: index.held(name) for name in index.holders if index.held(name)}


@settings(deadline=None, max_examples=examples(120))
@given(st.data(), st.sampled_from([EngineKind.VLLM, EngineKind.SGLANG]))
def test_the_index_holds_what_the_caches_hold_however_batches_are_folded(data: st.DataObject, kind: EngineKind) -> None:
    index, engine = Index(registration(kind), waiting_blocks=10_000), Engine(data.draw, keeps_parents=False)
    for _ in range(data.draw(st.integers(1, 4))):
        fold: list[Batch] = []
        for _ in range(data.draw(st.integers(1, 4))):
            rank = data.draw(st.integers(0, 1))
            fold.append(engine.batch(rank, data.draw(st.integers(1, 4))))
        index.fold(*fold)
        assert contents(index) == engine.expected(counts=True)
    assert set(index.ignored) <= {"cleared"}


@settings(deadline=None, max_examples=examples(120))
@given(st.data(), st.sampled_from([EngineKind.VLLM, EngineKind.SGLANG]))
def test_takeovers_lose_nothing(data: st.DataObject, kind: EngineKind) -> None:
    index, engine = Index(registration(kind)), Engine(data.draw, keeps_parents=True)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.integers(0, 3)) == 0:
            index.take_over()
        ranks = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        index.fold(*(engine.batch(rank, 2) for rank in ranks))
        assert contents(index) == engine.expected(counts=True)
    assert set(index.ignored) <= {"cleared"}
    assert (index.resolver.waiting.blocks, index.resolver.unresolved) == (0, 0)


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_sets_hold_each_block_once(data: st.DataObject) -> None:
    """One copy of each: what is removed is gone, so a cache that counts must not be asked to remove a copy."""
    index, engine = Index(registration(copies="set")), Engine(data.draw, keeps_parents=True)
    for _ in range(data.draw(st.integers(1, 10))):
        index.fold(engine.batch(0, 1))
        for cache in engine.caches.values():
            for prefix in cache:
                cache[prefix] = min(cache[prefix], 1)
        assert contents(index) == engine.expected(counts=False)
