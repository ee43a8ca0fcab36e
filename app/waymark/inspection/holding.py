"""A prompt to inspect, and the holders of all its blocks, also of blocks after the end of every match.

The matches agree with ``/query``, which walks over the same rows in the same way.

A prompt can be read in other ways, too: with another block size, adapter, salt or seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, takewhile

from waymark.base.record import record
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.match import Walk, conductor_rows
from waymark.domain.media import order_of
from waymark.domain.multimodal import PromptItems, block_keys_with
from waymark.domain.names import Adapter, Holder
from waymark.domain.packing import pack, unpack
from waymark.domain.table import HolderTable
from waymark.inspection.inspector import InspectedGroup, Inspector


@record(frozen=True, slots=True)
class InspectedPrompt:
    """Tokens, or the seq_hashes of blocks."""

    tokens: bytes | None
    """Token ids as little-endian u32."""
    seq_hashes: Sequence[int] | None
    adapter: Adapter
    salts: tuple[str, ...]
    seed: int
    items: PromptItems = ()
    """The images and other items among the tokens."""

    @property
    def namespace(self) -> int:
        return namespace(self.adapter, self.salts)

    @property
    def count(self) -> int:
        """Tokens of the prompt; 0 if only hashes are known."""
        return len(self.tokens or b"") // 4

    def blocks(self, block_size: int) -> int:
        """Complete blocks of the prompt."""
        return self.count // block_size if self.seq_hashes is None else len(self.seq_hashes)

    def block_keys(self, block_size: int, blocks: int | None = None) -> Sequence[int]:
        """Return seq_hash XOR namespace of each complete block, or of the first ``blocks``."""
        if self.seq_hashes is not None:
            return unpack(pack(self.seq_hashes[:blocks], self.namespace))
        tokens = memoryview(self.tokens or b"")
        if blocks is not None:
            tokens = tokens[: 4 * block_size * blocks]
        if self.items:
            return unpack(
                block_keys_with(self.items, None, tokens, block_size, first=0, namespace=self.namespace, seed=self.seed)
            )
        return unpack(block_keys(None, tokens, block_size, namespace=self.namespace, seed=self.seed))

    def without_first_token(self) -> InspectedPrompt:
        return replace(self, tokens=None if self.tokens is None else self.tokens[4:])


#: Blocks of one lookup; other requests are served between two lookups. A multiple of a piece.
_STEP_BLOCKS = 512
#: Blocks, each with all its holders, between two turns of the loop.
_BLOCKS_A_TURN = 32


@record(frozen=True, slots=True)
class HolderLine:
    """One holder: rank and medium of one life."""

    holder: Holder
    has: frozenset[int]
    """The blocks of the prompt that it has, by position."""
    not_counted: str
    """The reason why ``/query`` does not count it; empty if it does."""


@record(frozen=True, slots=True)
class InstanceLines:
    """An instance, or a pool, with its live holders by rank and medium."""

    instance_id: str
    is_pool: bool
    match: int
    """Blocks of the longest match; 0 for a pool, whose blocks count for the instances."""
    holders: tuple[HolderLine, ...]

    @property
    def blocks(self) -> int:
        """How many blocks of the prompt any of its holders has."""
        return len(_union(self.holders))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The runs of consecutive blocks that any of its holders has, as (first, how many)."""
        return list(runs(_union(self.holders)))

    @property
    def counted_runs(self) -> list[tuple[int, int]]:
        """``runs`` of the holders that count."""
        return list(runs(_union(line for line in self.holders if not line.not_counted)))

    def counts(self, block: int) -> bool:
        """Return whether a holder that counts has the block."""
        return any(block in line.has for line in self.holders if not line.not_counted)


@record(frozen=True, slots=True)
class PromptHoldings:
    """The blocks of a prompt that each instance has."""

    group: InspectedGroup
    block_size: int
    keys: Sequence[int]
    instances: tuple[InstanceLines, ...]
    """The longest match first, then by name; pools last."""

    @property
    def best(self) -> int:
        """The longest match of any instance, in blocks."""
        return max((lines.match for lines in self.instances), default=0)

    @property
    def blocks_held(self) -> int:
        """How many of the blocks a counted holder has."""
        return len(_union([line for lines in self.instances for line in lines.holders if not line.not_counted]))


def _union(lines: Iterable[HolderLine]) -> frozenset[int]:
    return frozenset[int]().union(*(line.has for line in lines))


async def hold(
    inspector: Inspector, group: InspectedGroup, table: HolderTable, prompt: InspectedPrompt, block_size: int
) -> PromptHoldings:
    """Look up every block of the prompt."""
    block_keys = prompt.block_keys(block_size)
    holders: list[set[int]] = []
    for start in range(0, len(block_keys), _STEP_BLOCKS):
        step = block_keys[start : start + _STEP_BLOCKS]
        holders += await inspector.holders(group, step, has_singles=table.has_singles)
        await asyncio.sleep(0)
    walk = Walk(table.view(block_size))
    walk.feed(_runs(holders))
    rows = conductor_rows(walk)
    positions: dict[int, list[int]] = {}
    for i, ids in enumerate(holders):
        for holder_id in ids:
            positions.setdefault(holder_id, []).append(i)
        if not i % _BLOCKS_A_TURN:
            await asyncio.sleep(0)
    # Every registered instance gets a place, even one without any block.
    lines: dict[tuple[bool, str], list[HolderLine]] = {
        (row.scope == "shared", row.instance_id): [] for row in table.publishers.values()
    }
    for holder in sorted(table.holders.values(), key=_rank_and_medium):
        line = HolderLine(holder, frozenset(positions.get(holder.id, ())), not_counted(table, holder, block_size))
        lines.setdefault((holder.scope == "shared", holder.instance_id), []).append(line)
    instances = [
        # A holder whose publisher cannot be read belongs to no row.
        InstanceLines(
            instance_id,
            is_pool,
            0 if is_pool or instance_id not in rows else rows[instance_id].longest,
            tuple(holder_lines),
        )
        for (is_pool, instance_id), holder_lines in lines.items()
    ]
    instances.sort(key=lambda instance: (instance.is_pool, -instance.match, -instance.blocks, instance.instance_id))
    return PromptHoldings(group, block_size, block_keys, tuple(instances))


def _runs(holders: Iterable[set[int]]) -> Iterator[tuple[bytes, int]]:
    """Yield runs of blocks with the same holders, as the walk takes them, up to the first block without one."""
    for ids, run in groupby(takewhile(bool, holders)):
        yield b" ".join(b"%d" % holder for holder in sorted(ids)), len(list(run))


def runs(positions: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive positions as (first, how many)."""
    first = last = -1
    for position in sorted(positions):
        if position != last + 1 or first < 0:
            if first >= 0:
                yield first, last - first + 1
            first = position
        last = position
    if first >= 0:
        yield first, last - first + 1


def _rank_and_medium(holder: Holder) -> tuple[int, int, str, int]:
    return holder.dp_rank, order_of(holder.medium), holder.medium, holder.id


def not_counted(table: HolderTable, holder: Holder, block_size: int | None = None) -> str:
    """Return why queries with this block size do not count a live holder; an empty text if they do."""
    publisher = table.publishers.get(holder.publisher)
    if publisher is None:
        return "its publisher is not registered"
    if publisher.is_lost:
        return "lost, not counted"
    if block_size is not None and holder.block_size != block_size:
        return f"block size {holder.block_size}, not counted"
    if holder.window is not None:
        return f"window of KV-cache group {holder.window.group}, needed at the end of a match"
    return ""
