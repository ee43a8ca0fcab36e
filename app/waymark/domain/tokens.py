"""Packs token ids as little-endian u32.

This module imports almost nothing, because the process of each tokenizer imports it when it starts.
"""

from __future__ import annotations

import sys
from array import array


def pack_tokens(tokens: list[int]) -> bytes:
    """Pack a list like ``hashing.token_bytes``, but faster. Raise ``TypeError`` or ``OverflowError`` if an entry is
    not a token id. Booleans pass.
    """
    numbers = array("I")
    numbers.fromlist(tokens)  # takes two thirds of the time of ``array("I", tokens)``
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """Return the token ids of little-endian u32."""
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
