"""Chunks: the units that a cache stores under one hash, each of several registered blocks.

A cache behind an engine has chunks of several of the engine's blocks. An engine registered with a smaller unit (vLLM's
``prefix_match_unit``) has chunks, too: its physical blocks, and the prefixes of these that end at a unit.

Waymark gives each block of a chunk its own engine hash. The last block has the hash of the chunk, because a store that
continues the chunk names that hash as its parent. The others have hashes derived from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from waymark.domain.events import Stored, StoredWindow
from waymark.domain.hashing import derived_hash
from waymark.domain.media import DEVICE

CHUNK: Final = "chunk:"
"""The prefix of the flag with the number of blocks in the largest chunk of this life."""
CHUNK_BLOCKS_MAX: Final = 128
"""A hash removed off the device takes this many positions in its batch, whether or not it was that of a chunk."""
_PIECE_BLOCKS: Final = 1024


def blocks_of(event: Stored | StoredWindow, block_size: int) -> int:
    """Return how many blocks of this size each hash of a store stands for: 1 if it is the hash of a block, or cannot be
    split.
    """
    size, hashes = event.block_size, len(event.engine_hashes)
    blocks = size // block_size
    if isinstance(event, StoredWindow):
        is_dense = event.is_dense
    else:
        is_dense = event.extras is None and len(event.tokens) == 4 * size * hashes
    is_chunked = (
        1 < blocks <= CHUNK_BLOCKS_MAX
        and size % block_size == 0
        and (event.medium not in DEVICE or event.group is not None)
        and is_dense
    )
    return blocks if is_chunked else 1


def split(event: Stored, block_size: int) -> Iterator[Stored]:
    """Split a store of chunks into stores of blocks, one after the other, each short enough for a slice of work."""
    blocks, width = blocks_of(event, block_size), 4 * event.block_size
    at_once = max(1, _PIECE_BLOCKS // blocks)
    parent = event.parent
    for start in range(0, len(event.engine_hashes), at_once):
        chunks = event.engine_hashes[start : start + at_once]
        yield replace(
            event,
            engine_hashes=tuple([block for chunk in chunks for block in hashes_of(chunk, blocks)]),
            parent=parent,
            tokens=event.tokens[start * width : (start + len(chunks)) * width],
            block_size=block_size,
            part=event.part + start,
        )
        parent = chunks[-1]


def hashes_of(chunk: int, blocks: int) -> list[int]:
    """Return the engine hashes of the blocks of a chunk, ancestor first. A smaller chunk has the last ones."""
    return [derived_hash(chunk, i) for i in range(blocks - 1, 0, -1)] + [chunk]
