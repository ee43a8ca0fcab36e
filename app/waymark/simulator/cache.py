"""A paged LRU prefix cache over GPU, CPU and disk, which reports its changes as events.

It is the truth the tests hold Waymark against, so two things must stay true: replaying the events with copies
counted gives exactly ``copies``; and the same seed and the same prompts give the same events.

It behaves like vLLM in every way that an index could notice:

- Hashes are opaque: BLAKE2b chained over parent, tokens, adapter, salt and images, under the seed of this life.
- Every physical copy of a block is reported. A prompt found whole has its last block computed again, and now and then
  (``repeat_rate``) two requests for one prefix meet in one step; such a block is stored twice and removed twice.
- The least recently used copy goes first, and on no medium does a block go before its children there.
- Blocks that leave the GPU move to the CPU, and blocks that leave the CPU move to disk. Such a store is a placeholder
  (no tokens, block size 0) as vLLM's offloading reports it, or dense, as SGLang's.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from struct import pack
from typing import NamedTuple

import msgpack
from xxhash import xxh3_64_intdigest

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.simulator.encode import CPU, DISK, GPU, AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, WireEvent

_HASH_SEED = 1337


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
        """Use one copy of each present block of a chain, parents last, so that a parent outlives its children."""
        used = [self._copies[block.key][-1] for block in blocks if block.key in self._copies]
        for copy in reversed(used):
            self._order.move_to_end(copy)

    def evict(self) -> Block:
        """Remove the least recently used copy that may go, and return its block.

        A block whose child is here stays. It goes to the back of the order, because a use of the child uses it, too.
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


class Prefix(NamedTuple):
    """A block named by everything that decides its contents, from the root on, for comparisons with an independent
    model.
    """

    tokens: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None
    extras: tuple[ExtraKeys | None, ...]


@record(frozen=True, slots=True)
class Totals:
    """The counts since the start, in blocks."""

    hit: int
    stored: int
    removed: int


class PrefixCache:
    """See the module. ``gpu_blocks`` bounds a prompt too: blocks that do not fit on the GPU are left out.

    ``repeat_rate`` is the chance, per prompt with a hit, that a part of the hit is stored again; at 0 every block
    has one copy per medium. With ``dense_offload``, stores off the GPU have tokens. ``removals_together`` puts the
    removals of one call and medium in one event, as SGLang does, instead of one event each. ``standard_hashes``
    names blocks by their seq_hash, as a publisher of the KV Events envelope does. With ``removes_once`` a block is
    reported as removed after its last copy only.
    """

    def __init__(
        self,
        block_size: int,
        gpu_blocks: int,
        cpu_blocks: int = 0,
        disk_blocks: int = 0,
        *,
        seed: int | str = 0,
        repeat_rate: float = 0.05,
        dense_offload: bool = False,
        removals_together: bool = False,
        standard_hashes: bool = False,
        removes_once: bool = False,
    ) -> None:
        if block_size < 1 or gpu_blocks < 1:
            raise InvalidValue(
                "a cache needs at least one token per block and one block on the GPU", field="gpu_blocks"
            )
        if disk_blocks and not cpu_blocks:
            raise InvalidValue("disk_blocks needs cpu_blocks: blocks reach the disk from the CPU", field="disk_blocks")
        self.block_size = block_size
        self._seed = seed
        self._life = 0
        self._random = random.Random(f"{seed}/cache")
        self._repeat_rate = repeat_rate
        self._dense_offload = dense_offload
        self._removals_together = removals_together
        self._standard_hashes = standard_hashes
        self._removes_once = removes_once
        self._adapter_ids: dict[str, int] = {}
        sizes = {GPU: gpu_blocks, CPU: cpu_blocks, DISK: disk_blocks}
        self._media = {medium: MediumBlocks(size) for medium, size in sizes.items() if size}
        self._hit = self._stored = self._removed = 0

    # ---- changes of the cache --------------------------------------------------------------------------

    def prefill(
        self,
        tokens: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extras: Sequence[ExtraKeys | None] | None = None,
    ) -> list[WireEvent]:
        """Bring the complete blocks of a prompt onto the GPU. Return the events in the order of their reports.

        ``extras`` holds, per complete block, its contents besides tokens; it may be shorter than the prompt.
        """
        blocks = self._blocks(tokens, lora_name, cache_salt, extras)[: self._media[GPU].size]
        hits = self._hits(blocks)
        self._hit += hits
        return self._bring(blocks, self._kept(hits, len(tokens)))

    def fill(self, prefix: Prefix) -> list[WireEvent]:
        """Bring a prefix onto the GPU that was copied from another engine, without a computation or a hit.

        Return the events in the order of their reports.
        """
        blocks = self._blocks(*prefix)[: self._media[GPU].size]
        return self._bring(blocks, self._hits(blocks))

    def prefix(self, name: int) -> Prefix | None:
        """Return the prefix that ends with the block of this hash, as events name it; None if no medium has it."""
        copies = (block for medium in self._media.values() for block in medium.blocks() if block.name == name)
        block = next(copies, None)
        return None if block is None else _prefix(block)

    def _hits(self, blocks: Sequence[Block]) -> int:
        """Return how many blocks, from the first one on, are on the GPU."""
        gpu = self._media[GPU]
        return next((index for index, block in enumerate(blocks) if block.key not in gpu), len(blocks))

    def _bring(self, blocks: Sequence[Block], kept_blocks: int) -> list[WireEvent]:
        """Store the blocks after the first ones, which are kept. Return the events."""
        gpu, new = self._media[GPU], blocks[kept_blocks:]

        # Touched first, so that the rest of this prompt does not push it out; and touched last, because a request gives
        # its blocks back last one first: a parent is always the younger.
        gpu.touch(blocks[:kept_blocks])
        events: list[WireEvent] = []
        for _ in range(len(gpu) + len(new) - gpu.size):
            self._evict(GPU, events)
        for block in reversed(new):
            gpu.add(block)
        gpu.touch(blocks[:kept_blocks])
        for medium in (CPU, DISK):
            if medium in self._media:
                self._media[medium].touch(blocks)
        if new:
            self._stored += len(new)
            events.append(self._stored_event(new, GPU))
        return self._grouped(events) if self._removals_together else events

    def clear(self) -> list[WireEvent]:
        """Forget every block on every medium (``reset_prefix_cache``, ``flush_cache``)."""
        for medium_blocks in self._media.values():
            medium_blocks.clear()
        return [AllBlocksCleared()]

    def restart(self) -> None:
        """Restart the process: the cache is empty, without a report, and the hashes differ from those before."""
        self.clear()
        self._life += 1

    # ---- the truth -------------------------------------------------------------------------------------

    def held(
        self,
        tokens: Sequence[int],
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extras: Sequence[ExtraKeys | None] | None = None,
    ) -> list[frozenset[str]]:
        """Return the media of each complete block of the prompt; empty for a block on no medium."""
        blocks = self._blocks(tokens, lora_name, cache_salt, extras)
        return [
            frozenset(m for m, medium_blocks in self._media.items() if block.key in medium_blocks) for block in blocks
        ]

    def contents(self) -> dict[str, frozenset[Prefix]]:
        """Return by medium every block held, each as its whole prefix; meant for small caches."""
        return {medium: frozenset(_prefix(b) for b in held.blocks()) for medium, held in self._media.items()}

    def copies(self) -> dict[str, Counter[int]]:
        """Return by medium the number of physical copies, by the hash in events."""
        counts: dict[str, Counter[int]] = {}
        for medium, medium_blocks in self._media.items():
            counts[medium] = Counter()
            for block in medium_blocks.blocks():
                counts[medium][block.name] += medium_blocks.copies(block.key)
        return counts

    def snapshot(self, chunk_blocks: int = 1000) -> list[list[WireEvent]]:
        """Return events that describe the whole cache to a new reader, in chunks of so many blocks, as vLLM's.

        A chunk stores blocks with their tokens, parents first, even those no longer held; then the contents
        of each medium, copy by copy and without tokens; and then it removes the first stores.
        """
        ordered: dict[int, Block] = {}
        for medium_blocks in self._media.values():
            for block in medium_blocks.blocks():
                chain = [block]
                while (parent := chain[-1].parent) is not None and parent.key not in ordered:
                    chain.append(parent)
                ordered |= {ancestor.key: ancestor for ancestor in reversed(chain)}
        blocks = list(ordered.values())
        chunks: list[list[WireEvent]] = []
        for start in range(0, len(blocks), chunk_blocks):
            portion = blocks[start : start + chunk_blocks]
            events: list[WireEvent] = [self._stored_event([block], GPU) for block in portion]
            for medium, medium_blocks in self._media.items():
                for block in portion:
                    event = BlockStored((block.name,), None, (), self.block_size, medium, kv_cache_spec_kind=None)
                    events += [event] * medium_blocks.copies(block.key)
            chunks.append([*events, *(BlockRemoved((block.name,), GPU) for block in portion)])
        return chunks

    def size(self) -> dict[str, int]:
        """Return by medium the number of different blocks held."""
        return {medium: sum(1 for _ in medium_blocks.blocks()) for medium, medium_blocks in self._media.items()}

    @property
    def totals(self) -> Totals:
        return Totals(self._hit, self._stored, self._removed)

    # ---- inside ----------------------------------------------------------------------------------------

    def _kept(self, hits: int, length: int) -> int:
        """Return how many of the hits are used unchanged; the others are computed and stored once more."""
        if not hits or not self._repeat_rate:
            return hits
        if self._random.random() < self._repeat_rate:
            return self._random.randrange(hits)
        # One token must be left to compute; otherwise there is no output to sample from.
        return min(hits, (length - 1) // self.block_size)

    def _evict(self, medium: str, events: list[WireEvent]) -> None:
        block = self._media[medium].evict()
        colder = {GPU: CPU, CPU: DISK}.get(medium)
        if colder in self._media and block.key not in self._media[medium] and block.key not in self._media[colder]:
            medium_blocks = self._media[colder]
            if len(medium_blocks) == medium_blocks.size:
                self._evict(colder, events)
            medium_blocks.add(block)
            self._stored += 1
            events.append(self._stored_event([block], colder))
        self._removed += 1
        if not self._removes_once or block.key not in self._media[medium]:
            events.append(self._gone(block, medium))

    def _gone(self, block: Block, medium: str) -> BlockRemoved:
        return BlockRemoved((block.name,), medium, lora_name=block.lora_name, cache_salt=block.cache_salt)

    def _stored_event(self, blocks: Sequence[Block], medium: str) -> BlockStored:
        """Return the event for consecutive blocks that entered ``medium``."""
        first = blocks[0]
        names = tuple(block.name for block in blocks)
        if medium != GPU and not (self._dense_offload or self._standard_hashes):
            return BlockStored(names, None, (), 0, medium, kv_cache_spec_kind=None)
        lora_id = None
        if first.lora_name is not None:
            lora_id = self._adapter_ids.setdefault(first.lora_name, len(self._adapter_ids) + 1)
        return BlockStored(
            names,
            None if first.parent is None else first.parent.name,
            tuple(token for block in blocks for token in block.tokens),
            self.block_size,
            medium,
            lora_id,
            first.lora_name,
            first.cache_salt,
            tuple(block.extra for block in blocks),
        )

    def _grouped(self, events: list[WireEvent]) -> list[WireEvent]:
        """Join neighbouring removals that differ in their hashes only; parents first, as SGLang lists them."""
        groups: list[list[WireEvent]] = []
        hashes: set[int] = set()  # of the last group
        for event in events:
            last = groups[-1][-1] if groups else None
            if (
                isinstance(event, BlockRemoved)
                and isinstance(last, BlockRemoved)
                and (last.medium, last.lora_name, last.cache_salt) == (event.medium, event.lora_name, event.cache_salt)
                and event.block_hashes[0] not in hashes
            ):
                groups[-1].append(event)
            else:
                groups.append([event])
                hashes.clear()
            if isinstance(event, BlockRemoved):
                hashes.update(event.block_hashes)
        return [_joined(group) for group in groups]

    def _blocks(
        self,
        tokens: Sequence[int],
        lora_name: str | None,
        cache_salt: str | None,
        extras: Sequence[ExtraKeys | None] | None,
    ) -> list[Block]:
        """Return the complete blocks of a prompt, named."""
        size = self.block_size
        count = len(tokens) // size
        extra = [extras[i] if extras and i < len(extras) else None for i in range(count)]
        blocks: list[Block] = []
        parent: Block | None = None
        life = blake2b(digest_size=8, key=blake2b(f"{self._seed}/{self._life}".encode()).digest())
        packed = pack(f"<{count * size}I", *tokens[: count * size])
        plain = repr((lora_name, None, None)).encode()
        for i in range(count):
            digest = life.copy()
            if parent is None or extra[i] is not None:
                keys = repr((lora_name, cache_salt if parent is None else None, extra[i])).encode()
            else:
                keys = plain
            parent_bytes = b"" if parent is None else parent.key.to_bytes(8, "little")
            digest.update(parent_bytes + packed[4 * i * size : 4 * (i + 1) * size] + keys)
            key = int.from_bytes(digest.digest(), "little")
            block = next(
                (b for medium_blocks in self._media.values() if (b := medium_blocks.get(key)) is not None), None
            )
            if block is None:
                piece = tuple(tokens[i * size : (i + 1) * size])
                name = _rolling_hash(parent, piece, extra[i]) if self._standard_hashes else key
                block = Block(key, name, parent, piece, lora_name, cache_salt, extra[i])
            blocks.append(block)
            parent = block
        return blocks


def _joined(group: Sequence[WireEvent]) -> WireEvent:
    """Return one removal for several, or the only event of a group."""
    removals = [event for event in reversed(group) if isinstance(event, BlockRemoved)]
    if len(removals) < 2:
        return group[0]
    return replace(removals[0], block_hashes=tuple(name for removal in removals for name in removal.block_hashes))


def _rolling_hash(parent: Block | None, tokens: tuple[int, ...], images: ExtraKeys | None) -> int:
    """Return the seq_hash of a block. ``domain.hashing`` follows the same rule; the two are kept apart so that a
    mistake there cannot hide behind the same mistake here.
    """
    content = pack(f"<{len(tokens)}I", *tokens)
    if images is not None:
        content += pack("<Q", xxh3_64_intdigest(msgpack.packb(images), _HASH_SEED))
    local_hash = xxh3_64_intdigest(content, _HASH_SEED)
    return local_hash if parent is None else xxh3_64_intdigest(pack("<QQ", parent.name, local_hash), _HASH_SEED)


def _prefix(block: Block) -> Prefix:
    chain = [block]
    while (parent := chain[-1].parent) is not None:
        chain.append(parent)
    chain.reverse()
    tokens = tuple(token for ancestor in chain for token in ancestor.tokens)
    return Prefix(tokens, block.lora_name, block.cache_salt, tuple(ancestor.extra for ancestor in chain))
