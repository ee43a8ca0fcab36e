"""Token ids to the seq_hashes that ``query_by_hash`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.domain.hashing import DEFAULT_SEED, token_bytes
from waymark.domain.multimodal import items_of, seq_hashes_with


def block_hashes(
    token_ids: Sequence[int], block_size: int, *, features: Mapping[str, Any] | None = None, seed: int = DEFAULT_SEED
) -> list[int]:
    """Return the seq_hash of each complete block of ``block_size`` tokens; an incomplete last block has no hash.

    ``features`` names the images among the tokens, as vLLM's render endpoints answer it: ``mm_hashes`` and
    ``mm_placeholders``. A router that asks several times about one prompt, or must not send the prompt itself, hashes
    it once and asks ``query_by_hash``. ``seed`` is ``WAYMARK_HASH_SEED`` of the service. Raise ``ValueError`` if
    ``block_size`` is below 1, a token id is not within 0..2^32-1, or ``features`` does not fit.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it is at least 1")
    wrong = next((token for token in token_ids if not (isinstance(token, int) and 0 <= token < 2**32)), None)
    if wrong is not None:
        raise ValueError(f"token_ids contains {shown(wrong)}; a token id is an integer within 0..4294967295")
    try:
        items = () if features is None else items_of(features)
    except InvalidValue as error:
        raise ValueError(error.sentence) from None
    return seq_hashes_with(items, None, token_bytes(token_ids), block_size, seed=seed)


def seq_hashes(token_ids: Sequence[int], block_size: int, *, seed: int = DEFAULT_SEED) -> list[int]:
    """Return ``block_hashes`` of a prompt without images."""
    return block_hashes(token_ids, block_size, seed=seed)
