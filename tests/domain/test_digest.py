"""XXH3-64 in C is what the ``xxhash`` package says it is, for every class of length."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from waymark.base import native
from waymark.domain.names import U64_MASK

U64 = st.integers(0, U64_MASK)

# A payload of up to 16, up to 240 and more bytes is hashed in three ways, with further ones inside the first two;
# from 1,024 bytes on the state is scrambled between rounds.
LENGTH_MAX = 4096


def digest(payload: bytes | memoryview, seed: int) -> int:
    if native.selected is None:
        pytest.skip("built without the C part")
    return native.selected.digest(payload, seed)


@pytest.mark.parametrize("seed", [0, 1, 1337, 2**32 - 1, 2**63, 0x9E3779B185EBCA87, U64_MASK])
@pytest.mark.parametrize("offset", [0, 1, 3, 4, 7])
def test_every_length_is_hashed_as_the_package_does_at_any_alignment(offset: int, seed: int) -> None:
    contents = memoryview(random.Random(seed ^ offset).randbytes(offset + LENGTH_MAX))
    wrong = [
        length
        for length in range(LENGTH_MAX + 1)
        if digest(payload := contents[offset : offset + length], seed) != xxh3_64_intdigest(payload, seed)
    ]
    assert wrong == []


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"\x80"])
def test_contents_of_one_byte_are_hashed_as_the_package_does(fill: bytes) -> None:
    lengths = [*range(260), 1023, 1024, 1025, 2048, 65_536, 1_000_003]
    assert [digest(fill * length, 7) for length in lengths] == [
        xxh3_64_intdigest(fill * length, 7) for length in lengths
    ]


@settings(deadline=None)
@given(st.binary(max_size=1500), U64)
def test_any_payload_is_hashed_as_the_package_does(payload: bytes, seed: int) -> None:
    assert digest(payload, seed) == xxh3_64_intdigest(payload, seed)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_is_a_number_of_64_bits(seed: int) -> None:
    with pytest.raises(OverflowError):
        digest(b"", seed)
