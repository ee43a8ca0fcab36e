"""Token ids to the rolling hashes that ``query_by_hash`` takes."""

from __future__ import annotations

from collections.abc import Sequence

from waymark.domain.hashing import DEFAULT_SEED, extend, token_bytes


def seq_hashes(token_ids: Sequence[int], block_size: int, *, seed: int = DEFAULT_SEED) -> list[int]:
    """The rolling hash of each complete block of ``block_size`` tokens; a last block that is incomplete has none.

    A router that asks several times about one prompt, or must not send the prompt itself, hashes it once and asks
    ``query_by_hash``. ``seed`` is ``WAYMARK_HASH_SEED`` of the service. ``ValueError`` where ``block_size`` is below 1
    or a token id is not within 0..2^32-1.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it is at least 1")
    wrong = next((token for token in token_ids if not (isinstance(token, int) and 0 <= token < 2**32)), None)
    if wrong is not None:
        raise ValueError(f"token_ids contains {wrong!r}; a token id is an integer within 0..4294967295")
    return extend(None, token_bytes(token_ids), block_size, seed=seed)
