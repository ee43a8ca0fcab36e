"""Computes local hashes from tokens, rolling seq_hashes from local hashes, and a namespace from adapter and salts.

The scheme is the one of the published KV Events contract (XXH3-64 with a seed): ``local[i]`` is the hash of block i's
tokens as little-endian u32; ``seq[0] = local[0]``; ``seq[i]`` hashes the sixteen bytes of ``seq[i-1]`` and
``local[i]``, little-endian. A seq_hash therefore proves the whole prefix. Anything besides tokens that changes the
contents of a block (images, embeds) is appended to its token bytes as one u64; adapter and salts are not hashed at all
but folded into the key by XOR, as the namespace.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from waymark.base import native
from waymark.domain import packing
from waymark.domain.names import Adapter

DEFAULT_SEED = 1337

_PAIR = struct.Struct("<QQ").pack
_U64 = struct.Struct("<Q").pack


def _digest() -> Callable[[bytes, int], int]:
    """Return the selected implementation of XXH3-64, which hashes a payload with a seed."""
    return xxh3_64_intdigest if native.selected is None else native.selected.digest


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32. Raise ``struct.error`` if one is not an integer of 0..2^32-1."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def extend(
    parent: int | None,
    tokens: bytes | memoryview,
    block_size: int,
    *,
    seed: int = DEFAULT_SEED,
    extras: Sequence[int | None] | None = None,
) -> list[int]:
    """Return the seq_hashes of the complete blocks in ``tokens``, continuing from ``parent`` (None at the root).

    ``tokens`` is little-endian u32, 4 bytes a token; an incomplete last block is left out. ``extras`` holds, per block,
    the digest of its leftover extra keys (``extra_digest``) or None.
    """
    if extras is None and native.selected is not None:
        return list(packing.unpack(native.selected.hash_blocks(tokens, block_size, seed, parent, 0)))
    width = 4 * block_size
    count = len(tokens) // width
    # Cut in one call, because a slice for each block costs as much as hashing it. ``struct.unpack`` would cache a
    # format of this length.
    blocks: Sequence[bytes] = struct.Struct(f"{width}s" * count).unpack(tokens[: width * count])
    if extras is not None:
        blocks = [block if (extra := extras[i]) is None else block + _U64(extra) for i, block in enumerate(blocks)]
    digest = _digest()
    return extend_local(parent, [digest(block, seed) for block in blocks], seed=seed)


def extend_local(parent: int | None, local_hashes: Sequence[int], *, seed: int = DEFAULT_SEED) -> list[int]:
    """Do what ``extend`` does, for blocks whose tokens are already hashed."""
    if not local_hashes:
        return []
    if native.selected is not None and sys.byteorder == "little":
        return list(packing.unpack(native.selected.chain(array("Q", local_hashes), seed, parent)))
    digest, pair = xxh3_64_intdigest, _PAIR  # looked up once, not twice a block
    rest = iter(local_hashes)
    previous = next(rest)
    if parent is not None:
        previous = digest(pair(parent, previous), seed)
    return [previous] + [previous := digest(pair(previous, local), seed) for local in rest]


def block_keys(
    parent: int | None, tokens: bytes | memoryview, block_size: int, *, namespace: int, seed: int = DEFAULT_SEED
) -> bytes:
    """Return packed block keys (see ``keys``) of the blocks of ``extend``: each seq_hash with the namespace
    folded in.
    """
    if native.selected is not None:
        return native.selected.hash_blocks(tokens, block_size, seed, parent, namespace)
    return packing.pack(extend(parent, tokens, block_size, seed=seed), namespace)


def hash_keys(seq_hashes: bytes, *, namespace: int) -> bytes:
    """Return packed block keys (see ``keys``) from seq_hashes as little-endian u64."""
    if native.selected is not None:
        return native.selected.hash_keys(seq_hashes, namespace)
    return packing.pack(struct.unpack(f"<{len(seq_hashes) // 8}Q", seq_hashes), namespace)


def local_keys(parent: int | None, local_hashes: array[int], *, seed: int = DEFAULT_SEED) -> bytes:
    """Return packed block keys of the base model for the blocks of ``extend_local``; ``local_hashes`` are u64."""
    if native.selected is not None and sys.byteorder == "little":
        return native.selected.chain(local_hashes, seed, parent)
    return packing.pack(extend_local(parent, local_hashes, seed=seed))


def extra_digest(leftovers: Sequence[Any], *, seed: int = DEFAULT_SEED) -> int:
    """Return XXH3-64 of the msgpack (shortest forms) of a block's leftover extra keys, in order."""
    return _digest()(msgpack.packb(list(leftovers), use_bin_type=True), seed)


def text_hash(text: str) -> int:
    """Return XXH3-64 of a text's UTF-8 with seed 0, for positions on rings and for shares, but never for a block."""
    return xxh3_64_intdigest(text.encode())


def namespace(adapter: Adapter, salts: Sequence[str]) -> int:
    """Return the number folded into a block's key: 0 for the base model without salts, else BLAKE2b-64.

    It is computed from the msgpack of ``[adapter, salts]``, so it needs no table, and concatenation cannot make
    different values equal: ``["a", "b"]`` is not ``["ab"]``, and adapter 7 is not adapter ``"7"``.
    """
    if adapter is None and not salts:
        return 0
    packed: bytes = msgpack.packb([adapter, list(salts)], use_bin_type=True)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "big")


def derived_hash(engine_hash: int, number: int) -> int:
    """Return an engine hash for a block without one, ``number`` blocks before the block with ``engine_hash``."""
    return xxh3_64_intdigest(_PAIR(engine_hash, number))


def dimensions_digest(backend_id: str, adapter: Adapter, salts: Sequence[str], spelling: str = "") -> str:
    """Return a digest, as 16 hex digits, of the dimensions of a standard event's stream other than rank and medium.

    ``spelling`` is the name of the medium in the event, if it differs from the medium's normal name.
    """
    packed: bytes = msgpack.packb([backend_id, adapter, list(salts), *filter(None, [spelling])], use_bin_type=True)
    return blake2b(packed, digest_size=8).hexdigest()
