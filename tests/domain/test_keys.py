"""Block keys in C and in Python: each is that of the published scheme."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.conftest import IMPLEMENTATIONS
from waymark.base import native
from waymark.domain.hashing import block_keys, extend, extend_local, hash_keys, local_keys, token_bytes
from waymark.domain.names import U64_MASK
from waymark.domain.packing import pack, unpack

pytestmark = pytest.mark.usefixtures("implementation_kept")

U64 = st.integers(0, U64_MASK)


def reference(parent: int | None, tokens: bytes, block_size: int, seed: int) -> list[int]:
    """The published scheme, word by word."""
    starts = range(0, len(tokens) - 4 * block_size + 1, 4 * block_size)
    return rolled(parent, [xxh3_64_intdigest(tokens[start : start + 4 * block_size], seed) for start in starts], seed)


def rolled(parent: int | None, local_hashes: list[int], seed: int) -> list[int]:
    hashes: list[int] = []
    for local in local_hashes:
        parent = local if parent is None else xxh3_64_intdigest(struct.pack("<QQ", parent, local), seed)
        hashes.append(parent)
    return hashes


# XXH3 has a way of its own for inputs of up to 16, 128 and 240 bytes, and for longer ones.
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 16, 31, 32, 33, 60, 61, 64, 255, 256, 257, 1024, 4096])
def test_keys_are_those_of_the_published_scheme(implementation: str, block_size: int) -> None:
    tokens = token_bytes([(7 * i * i + i) % 2**32 for i in range(3 * block_size + (block_size > 1))])
    for seed in (1337, 0, U64_MASK):
        for parent in (None, 0, U64_MASK, 12345678901234567890):
            expected = reference(parent, tokens, block_size, seed)
            assert len(expected) == 3
            assert extend(parent, tokens, block_size, seed=seed) == expected
            for ns in (0, 1, U64_MASK, 2**63 + 5):
                keys = block_keys(parent, memoryview(tokens), block_size, namespace=ns, seed=seed)
                assert unpack(keys) == tuple(each ^ ns for each in expected)


@given(st.lists(U64, max_size=40), st.none() | U64, U64)
def test_hashes_of_blocks_by_themselves_become_the_same_keys(local: list[int], parent: int | None, seed: int) -> None:
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        keys = local_keys(parent, array("Q", local), seed=seed)
        assert list(unpack(keys)) == extend_local(parent, local, seed=seed) == rolled(parent, local, seed)


def test_a_prompt_without_a_complete_block_has_no_key(implementation: str) -> None:
    for tokens in (b"", b"\1\0\0\0", token_bytes(range(15))):
        assert block_keys(None, tokens, 16, namespace=9) == b""
        assert extend(5, tokens, 16) == []
    with pytest.raises((ValueError, ZeroDivisionError)):
        block_keys(None, token_bytes(range(4)), 0, namespace=0)


def test_keys_are_packed_and_folded(implementation: str) -> None:
    numbers = [0, 1, 2**63, U64_MASK, 0x0123456789ABCDEF]
    assert pack(numbers) == b"".join(number.to_bytes(8, "big") for number in numbers)
    assert unpack(pack(numbers)) == tuple(numbers)
    assert unpack(pack(numbers, 2**64 - 2)) == tuple(number ^ (2**64 - 2) for number in numbers)
    assert pack(iter([])) == pack([], 7) == b""
    for namespace in (0, 1, 2**64 - 2):
        little = struct.pack(f"<{len(numbers)}Q", *numbers)
        assert hash_keys(little, namespace=namespace) == pack(numbers, namespace)
    assert hash_keys(b"", namespace=7) == b""
