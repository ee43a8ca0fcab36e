"""A prompt to inspect. It can be read in other ways, too: with another block size, adapter, salt or seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from waymark.domain.hashing import block_keys, namespace
from waymark.domain.keys import pack, unpack
from waymark.domain.multimodal import PromptItems, block_keys_with
from waymark.domain.names import Adapter


@dataclass(frozen=True, slots=True)
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
