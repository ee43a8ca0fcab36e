"""The events a simulated engine sends, in vLLM's vocabulary, before any encoding.

Fields carry the names of the wire (``block_hashes``, ``parent_block_hash``, ...), because ``encode`` only arranges
them. The same events as an index sees them are in ``domain.events``; the two are kept apart so that a mistake in a
decoder cannot hide behind the same mistake here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

GPU = "GPU"
CPU = "CPU"
DISK = "DISK"

ExtraKeys: TypeAlias = tuple[tuple[str, int], ...]
"""The images in a block: (digest of an image, offset of the image in the block)."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks entered a medium, ancestor first."""

    block_hashes: tuple[int, ...]
    """u64, opaque; a standard publisher's are seq_hashes."""
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    """Empty in a placeholder."""
    block_size: int
    """Tokens per hash; 0 in a placeholder."""
    medium: str = GPU
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    """Per hash; images only: an encoding adds adapter and salt if its engine does."""
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left a medium: one copy of each."""

    block_hashes: tuple[int, ...]
    medium: str | None = GPU
    group_idx: int | None = 0
    lora_name: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block left every medium."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A type that no decoder knows, as a newer engine might send."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent
