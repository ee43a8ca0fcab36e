"""Packed numbers: token ids as little-endian u32, and block keys, ``seq_hash XOR namespace``, as big-endian u64.

Between hashing and Redis, a key is eight big-endian bytes, so its hex digits are the same as in the name of the key.
This module imports almost nothing, because the process of each tokenizer imports it when it starts.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable

KEY_BYTES = 8
"""The size of a packed block key."""


def pack(seq_hashes: Iterable[int], namespace: int = 0) -> bytes:
    """Pack seq_hashes as keys. This is fastest for an array."""
    numbers = array("Q", seq_hashes)
    if sys.byteorder == "little":
        numbers.byteswap()
    packed = numbers.tobytes()
    if namespace:  # XOR all keys at once, as one long number
        mask = namespace.to_bytes(KEY_BYTES, "big") * len(numbers)
        return (int.from_bytes(packed, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(packed), "big")
    return packed


def unpack(keys: bytes) -> tuple[int, ...]:
    """Return packed keys as numbers."""
    return struct.unpack(f">{len(keys) // KEY_BYTES}Q", keys)


def key_at(packed: bytes, depth: int) -> int:
    """Return the key of the block that ends a prefix of ``depth`` blocks."""
    (key,) = unpack(packed[(depth - 1) * KEY_BYTES : depth * KEY_BYTES])
    return key


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
