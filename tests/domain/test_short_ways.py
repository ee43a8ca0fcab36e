"""Plain stores and removals in one step of the C module: they come to what the long way comes to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.unit import seeds
from waymark.base import native
from waymark.domain.hashing import extend
from waymark.domain.held import HeldBlocks
from waymark.domain.parts import PartList
from waymark.domain.placing import Placer
from waymark.domain.rows import Place

pytestmark = [
    pytest.mark.usefixtures("implementation_kept"),
    pytest.mark.skipif(not native.is_built, reason="built without the C part"),
]

GPU, CPU = 1, 2
SIZE = 2
SEED = 1337


class Stream:
    """A placer, and a memory with two holders of one rank; with ``is_short`` plain events take the short way."""

    def __init__(self, *, is_short: bool, piece_blocks: int = 32) -> None:
        native.select(True)
        self.memory = HeldBlocks(gone_max=64)
        self.memory.begin(GPU, 0)
        self.memory.begin(CPU, 0)
        self.placer = Placer(self.memory, 1, piece_blocks)
        self.short = 0
        self._piece_blocks = piece_blocks
        self._is_short = is_short

    def store(
        self, parts: PartList, at: int, holder: int, parent: int | None, hashes: Sequence[int], tokens: bytes, ns: int
    ) -> None:
        """As the resolver does: the short way, and where that is not possible the long one."""
        if self._is_short and self.placer.plain.extend(parts, holder, at, ns, parent, hashes, tokens, SIZE, SEED):
            self.short += 1
            return
        above = None if parent is None else self.memory.find(holder, parent)
        if parent is not None and above is None:
            return
        ns = ns if above is None else above.namespace
        seq_hashes = extend(None if above is None else above.seq_hash, tokens, SIZE, seed=SEED)
        keys = [seq_hash ^ ns for seq_hash in seq_hashes]
        self.placer.chain(parts, holder, at, ns, above, keys, hashes[: len(keys)], mode="count")

    def remove(self, parts: PartList, at: int, holder: int, hashes: Sequence[int]) -> None:
        if self._is_short and self.placer.plain.take(parts, holder, at, hashes):
            self.short += 1
            return
        for position, engine_hash in enumerate(hashes, at):
            self.placer.remove(parts, holder, position, engine_hash, mode="count")

    def contents(self, hashes: Sequence[int]) -> object:
        memory = self.memory
        found = [
            (memory.find(holder, h), memory.held(holder, h), memory.gone(holder, h) is not None)
            for h in hashes
            for holder in (GPU, CPU)
        ]
        assert memory.blocks == memory.blocks_of(GPU) + memory.blocks_of(CPU)
        return found, len(memory), memory.blocks, memory.places


def tokens(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def history(chance: random.Random, steps: int) -> int:
    """A random stream both ways; how many events took the short one."""
    piece_blocks = chance.choice([4, 8, 32])
    streams = [Stream(is_short=is_short, piece_blocks=piece_blocks) for is_short in (True, False)]
    hashes = [chance.getrandbits(64) for _ in range(120)]
    chains: list[list[int]] = []
    for step in range(steps):
        holder = chance.choice([GPU, GPU, CPU])
        parent: int | None = None
        event: list[int]
        if chance.random() < 0.6:
            count = chance.choice([1, 1, 2, 5, 40])
            event = chance.sample(hashes, count)
            if chains and chance.random() < 0.7:
                parent = chance.choice(chance.choice(chains))
            packed = tokens(*(chance.randrange(3) for _ in range(SIZE * count - chance.choice([0, 0, 0, 1]))))
            ns = chance.choice([0, 0, 0, 7])
            chains.append(event)
        else:
            ns, packed = 0, b""
            event = chance.choice(chains)[:] if chains and chance.random() < 0.8 else chance.sample(hashes, 3)
            if chance.random() < 0.5:
                event.reverse()
            if chance.random() < 0.1:
                event += event[:1]
        written = []
        for stream in streams:
            parts = stream.placer.begin_batch(step)
            if packed:
                stream.store(parts, 1, holder, parent, event, packed, ns)
            else:
                stream.remove(parts, 1, holder, event)
            written.append(list(parts.parts))
        assert written[0] == written[1]
        if written[0] and chance.random() < 0.1:
            place = chance.choice(written[0]).place
            for stream in streams:
                stream.memory.full.add(place)
        for stream in streams:
            if stream.memory.is_over:
                for _ in stream.memory.trim():
                    pass
        if step % 16 == 0:
            assert streams[0].contents(hashes) == streams[1].contents(hashes)
    assert streams[0].contents(hashes) == streams[1].contents(hashes)
    return streams[0].short


@pytest.mark.parametrize("seed", seeds(40))
def test_random_streams_come_to_the_same_both_ways(seed: int) -> None:
    assert history(random.Random(seed), 150) > 5


def test_a_whole_cache_comes_and_goes_in_short_ways() -> None:
    stream = Stream(is_short=True)
    for prompt in range(20):
        hashes = [prompt * 1000 + i for i in range(100)]
        parts = stream.placer.begin_batch(prompt)
        stream.store(parts, 1, GPU, None, hashes, tokens(*(prompt * 1000 + i for i in range(200))), 0)
        assert [len(part.keys) for part in parts.parts] == [32, 32, 32, 4]
        stream.remove(stream.placer.begin_batch(prompt), 1, GPU, hashes[::-1])
    assert stream.short == 40
    assert stream.memory.blocks == 0


def test_what_is_not_plain_changes_nothing() -> None:
    stream = Stream(is_short=True)
    parts = stream.placer.begin_batch(1)
    stream.store(parts, 1, GPU, None, [1, 2, 3], tokens(*range(6)), 0)
    stream.memory.full.add(stream.memory.find(GPU, 1).place)  # type: ignore[union-attr]
    before = stream.contents(range(10))
    extend_ = stream.placer.plain.extend
    for parent, hashes, packed, ns in (
        (9, [4], tokens(7, 7), 0),  # nobody has the parent
        (3, [4], tokens(7, 7), 0),  # its place is full
        (3, [4], tokens(7, 7), 5),  # it is of another namespace
        (None, [4, 1], tokens(7, 7, 8, 8), 0),  # an engine hash that is here
        (None, [4, 5], tokens(0, 1, 8, 8), 0),  # a block that is here
    ):
        assert not extend_(parts, GPU, 1, ns, parent, hashes, packed, SIZE, SEED)
    for removed in ([1, 9], [1, 1]):
        assert not stream.placer.plain.take(parts, GPU, 1, removed)
    stream.memory.copies(GPU).store_again(1, stream.memory.find(GPU, 1).key, counts=True)  # type: ignore[union-attr]
    assert not stream.placer.plain.take(parts, GPU, 1, [2, 1])
    assert stream.contents(range(10)) == before
    assert len(parts.parts) == 1
    assert stream.memory.find(GPU, 1) is not None
    assert Place(0) not in stream.memory.full
