"""Tokens to seq_hashes, adapter and salts to namespaces: the published vectors and what must never meet."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.conftest import IMPLEMENTATIONS
from waymark.base import native
from waymark.domain.hashing import dimensions_digest, extend, extend_local, extra_digest, namespace, token_bytes
from waymark.domain.names import U32_MAX, U64_MASK, Adapter

TOKENS = st.lists(st.integers(0, U32_MAX), max_size=40)
U64 = st.integers(0, U64_MASK)


@pytest.mark.parametrize(
    ("ids", "block_size", "expected"),
    [
        pytest.param(range(1, 9), 4, [14643705804678351452, 4945711292740353085], id="1..8"),
        pytest.param(range(1, 33), 16, [16863443419780771464, 12466389667045779788], id="1..32"),
        pytest.param([101, 15, 100, 55, 89], 2, [11345600125438922323, 2624253222771150309], id="incomplete"),
        pytest.param([U32_MAX] * 4, 4, [12410542959481710713], id="largest-token"),
        pytest.param(
            range(1, 25),
            4,
            [
                14643705804678351452,
                4945711292740353085,
                12583592247330656132,
                1921452330601040443,
                16910271745392797383,
                1149017327988146166,
            ],
            id="1..24",
        ),
    ],
)
def test_seq_hashes_are_those_of_the_published_vectors(ids: range, block_size: int, expected: list[int]) -> None:
    assert extend(None, token_bytes(ids), block_size) == expected


def test_local_hashes_chain_to_the_same_seq_hashes() -> None:
    local = [extend(None, token_bytes(ids), 4)[0] for ids in (range(1, 5), range(5, 9))]
    assert local == [14643705804678351452, 16777012769546811212]
    assert extend_local(None, local) == [14643705804678351452, 4945711292740353085]
    assert extend_local(14643705804678351452, local[1:]) == [4945711292740353085]


@settings(deadline=None)
@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_extended_in_pieces_is_the_chain_of_the_whole(ids: list[int], block_size: int, cut: int) -> None:
    packed = token_bytes(ids)
    whole = extend(None, packed, block_size)
    assert len(whole) == len(ids) // block_size
    at = 4 * block_size * min(cut, len(whole))
    head = extend(None, memoryview(packed)[:at], block_size)
    assert head + extend(head[-1] if head else None, packed[at:], block_size) == whole


def test_another_seed_gives_other_hashes() -> None:
    packed = token_bytes(range(8))
    assert set(extend(None, packed, 4)).isdisjoint(extend(None, packed, 4, seed=7))
    assert extend_local(5, [6], seed=7) != extend_local(5, [6])


def test_what_an_image_adds_stands_behind_the_tokens_of_its_block() -> None:
    packed, extra = token_bytes([9] * 8), extra_digest(["image", 3])
    plain, imaged = extend(None, packed, 4), extend(None, packed, 4, extras=(None, extra))
    assert imaged[0] == plain[0]
    local = xxh3_64_intdigest(struct.pack("<4IQ", 9, 9, 9, 9, extra), 1337)
    assert imaged[1] == xxh3_64_intdigest(struct.pack("<QQ", plain[0], local), 1337)
    assert extend(None, memoryview(packed), 4, extras=(None, extra)) == imaged


@pytest.mark.usefixtures("implementation_kept")
@settings(deadline=None)
@given(TOKENS, st.integers(1, 5), st.none() | U64, st.data())
def test_a_chain_is_that_of_its_blocks_one_by_one(
    ids: list[int], block_size: int, parent: int | None, data: st.DataObject
) -> None:
    count = len(ids) // block_size
    extras = data.draw(st.none() | st.lists(st.none() | U64, min_size=count, max_size=count + 1))
    expected, previous = [], parent
    for i in range(count):
        block = struct.pack(f"<{block_size}I", *ids[i * block_size : (i + 1) * block_size])
        if extras is not None and (extra := extras[i]) is not None:
            block += extra.to_bytes(8, "little")
        local = xxh3_64_intdigest(block, 1337)
        previous = local if previous is None else xxh3_64_intdigest(struct.pack("<QQ", previous, local), 1337)
        expected.append(previous)
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        assert extend(parent, memoryview(token_bytes(ids)), block_size, extras=extras) == expected


def test_an_extra_digest_is_of_the_msgpack_of_what_is_left_in_its_order() -> None:
    leftovers = [["ab", -4], b"\x01", 300]
    assert extra_digest(leftovers) == xxh3_64_intdigest(msgpack.packb(leftovers), 1337)
    assert extra_digest(leftovers[::-1]) != extra_digest(leftovers)
    assert extra_digest([b"a"]) != extra_digest(["a"])
    assert extra_digest(leftovers, seed=7) != extra_digest(leftovers)


@pytest.mark.parametrize("bad", [-1, U32_MAX + 1, 1.5, "1"])
def test_only_u32_is_a_token(bad: int) -> None:
    with pytest.raises(struct.error):
        token_bytes([bad])


def test_the_base_model_without_salts_has_namespace_0() -> None:
    assert namespace(None, ()) == namespace(None, []) == 0


def test_namespaces_that_must_never_meet() -> None:
    spaces: list[tuple[Adapter, list[str]]] = [
        (None, []),
        (None, ["a"]),
        (None, ["b"]),
        (None, ["a", "b"]),
        (None, ["b", "a"]),
        (None, ["ab"]),
        (None, [""]),
        ("a", []),
        ("a", ["b"]),
        ("ab", []),
        (7, []),
        ("7", []),
        (0, []),
        ("", []),
    ]
    numbers = {namespace(adapter, salts) for adapter, salts in spaces}
    assert len(numbers) == len(spaces)
    assert all(0 <= number < 2**64 for number in numbers)


def test_a_namespace_is_the_blake2b_of_adapter_and_salts() -> None:
    # Written down once, because other programs compute it too: a change would lose every index there is.
    assert namespace("sql", ["a", "b"]) == namespace("sql", ("a", "b")) == 10364086632306257315


def test_dimensions_tell_backend_adapter_and_salts_apart() -> None:
    streams = [("b", None, []), ("c", None, []), ("b", "x", []), ("b", None, ["x"]), ("bx", None, []), ("b", 7, [])]
    digests = [dimensions_digest(*stream) for stream in streams]
    assert len(set(digests)) == len(streams)
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)
