"""The loops in C and in Python: each is right, and they are the same."""

from __future__ import annotations

import json
import struct
from array import array
from itertools import groupby

import hiredis
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.conftest import WAYS
from waymark.domain import native
from waymark.domain.hashing import block_keys, extend, extend_local, local_keys, token_bytes
from waymark.domain.names import U32_MAX, U64_MASK

pytestmark = pytest.mark.usefixtures("way_kept")

NAME = b'"token_ids"'
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
def test_keys_are_those_of_the_published_scheme(way: str, block_size: int) -> None:
    tokens = token_bytes([(7 * i * i + i) % 2**32 for i in range(3 * block_size + (block_size > 1))])
    for seed in (1337, 0, U64_MASK):
        for parent in (None, 0, U64_MASK, 12345678901234567890):
            expected = reference(parent, tokens, block_size, seed)
            assert len(expected) == 3
            assert extend(parent, tokens, block_size, seed=seed) == expected
            for ns in (0, 1, U64_MASK, 2**63 + 5):
                keys = block_keys(parent, memoryview(tokens), block_size, namespace=ns, seed=seed)
                assert native.unpack(keys) == tuple(each ^ ns for each in expected)


@given(st.lists(U64, max_size=40), st.none() | U64, U64)
def test_hashes_of_blocks_by_themselves_become_the_same_keys(local: list[int], parent: int | None, seed: int) -> None:
    for each in WAYS:
        native.use(each == "native")
        keys = local_keys(parent, array("Q", local), seed=seed)
        assert list(native.unpack(keys)) == extend_local(parent, local, seed=seed) == rolled(parent, local, seed)


def test_a_prompt_without_a_complete_block_has_no_key(way: str) -> None:
    for tokens in (b"", b"\1\0\0\0", token_bytes(range(15))):
        assert block_keys(None, tokens, 16, namespace=9) == b""
        assert extend(5, tokens, 16) == []
    with pytest.raises((ValueError, ZeroDivisionError)):
        block_keys(None, token_bytes(range(4)), 0, namespace=0)


def test_keys_are_packed_and_folded(way: str) -> None:
    numbers = [0, 1, 2**63, U64_MASK, 0x0123456789ABCDEF]
    assert native.pack(numbers) == b"".join(number.to_bytes(8, "big") for number in numbers)
    assert native.unpack(native.pack(numbers)) == tuple(numbers)
    assert native.unpack(native.pack(numbers, 2**64 - 2)) == tuple(number ^ (2**64 - 2) for number in numbers)
    assert native.pack(iter([])) == native.pack([], 7) == b""


@pytest.mark.parametrize("prefix", [b"wm:{1}:", b"wm:{4294967295.255}:", b""])
@pytest.mark.parametrize("count", [1, 2, 9, 10, 512, 1000])
def test_a_command_is_what_the_driver_would_send(way: str, prefix: bytes, count: int) -> None:
    numbers = [(index * 0x9E3779B97F4A7C15) % 2**64 for index in range(count)]
    expected = hiredis.pack_command(("MGET", *(b"%b%016x" % (prefix, number) for number in numbers)))  # type: ignore[arg-type]
    assert native.mget(prefix, native.pack(numbers)) == expected


@given(values=st.lists(st.sampled_from([b"1", b"2", b"1 2", b"", None]), max_size=12))
def test_runs_go_to_the_first_block_that_nobody_has(values: list[bytes | None]) -> None:
    head = values[: values.index(None)] if None in values else values
    expected = [(value, len(list(run))) for value, run in groupby(head)]
    for each in WAYS:
        native.use(each == "native")
        assert native.runs([None if value is None else bytes(bytearray(value)) for value in values]) == expected


# ---- a reply of Redis ------------------------------------------------------------------------------

Scanned = tuple[bytes | None, list[tuple[bytes, int]], int]


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def spoken(values: list[bytes | None], *version: bytes | None) -> bytes:
    """What Redis says to an MGET and, with a version, to an HGET behind it."""
    head = b"*%d\r\n" % len(values) if values else b""
    return head + b"".join(map(bulk, [*values, *version]))


def parsed(reply: bytes, count: int, with_version: bool) -> Scanned | None:
    """The same by the library's parser; None where it reads anything but the two replies whole."""
    reader = hiredis.Reader(notEnoughData=...)
    reader.feed(reply)
    try:
        replies = [reader.gets() for _ in range((count > 0) + with_version)]
    except hiredis.ProtocolError:
        return None
    values = replies[0] if count else []
    version = replies[-1] if with_version else None
    if reader.has_data() or not isinstance(values, list) or len(values) != count:
        return None
    if not all(each is None or isinstance(each, bytes) for each in [*values, version]):
        return None
    found = native.runs(values)
    return version, found, sum(length for _, length in found)


VALUES = st.lists(st.sampled_from([b"1", b"2", b"1 2", b"", b"$-1\r\n", b"\r\n", b"7" * 300, None]), max_size=12)
VERSION = st.sampled_from([(), (b"a1b2",), (None,), (b"",)])


@given(VALUES, VERSION)
@example([b"17"] * 512, (b"a1b2",))
@example([], (b"a1b2",))
def test_a_reply_is_scanned_as_the_parser_reads_it(
    values: list[bytes | None], version: tuple[bytes | None, ...]
) -> None:
    reply, asked = spoken(values, *version), (len(values), bool(version))
    native.use(False)
    expected = parsed(reply, *asked)
    assert expected is not None
    assert native.scan(reply, *asked) is None, "in Python it is always for the parser"
    if native.use(True) == "native":
        assert native.scan(reply, *asked) == expected


@pytest.mark.parametrize("values", [[b"17", b"17", None, b"18"], [None, None], [b"1 2", b""], [b"1" * 1000] * 3, []])
@pytest.mark.parametrize("version", [(), (b"a1b2",), (None,)])
def test_a_reply_that_is_not_whole_or_has_more_behind_it_is_for_the_parser(
    way: str, values: list[bytes | None], version: tuple[bytes | None, ...]
) -> None:
    reply, asked = spoken(values, *version), (len(values), bool(version))
    for length in range(len(reply)):
        assert native.scan(reply[:length], *asked) is None
    for more in (b"$", b"\r", b"\r\n", b"\0", b"$-1\r\n", reply or b"+"):
        assert native.scan(reply + more, *asked) is None


@pytest.mark.parametrize(
    "reply",
    [
        b"-MOVED 866 127.0.0.1:1\r\n",
        b"-LOADING the dataset is being loaded\r\n$1\r\nv\r\n",
        b"*1\r\n$1\r\n1\r\n-ERR no\r\n",
        b"*1\r\n-ERR no\r\n$1\r\nv\r\n",
        b"*-1\r\n$1\r\nv\r\n",
        b"*0\r\n$1\r\nv\r\n",
        b"*2\r\n$1\r\n1\r\n$1\r\nv\r\n",
        b"*01\r\n$1\r\n1\r\n$1\r\nv\r\n",
        b"*1\r\n:1\r\n$1\r\nv\r\n",
        b"*1\r\n+1\r\n$1\r\nv\r\n",
        b"*1\r\n_\r\n$1\r\nv\r\n",
        b"*1\r\n*1\r\n$1\r\n1\r\n$1\r\nv\r\n",
        b"~1\r\n$1\r\n1\r\n$1\r\nv\r\n",
        b"*1\r\n$-2\r\n$1\r\nv\r\n",
        b"*1\r\n$01\r\n1\r\n$1\r\nv\r\n",
        b"*1\r\n$2\r\n1\r\n$1\r\nv\r\n",
        b"*1\r\n$1\n1\r\n$1\r\nv\r\n",
        b"*1\r\n$\r\n\r\n$1\r\nv\r\n",
        b"*1\r\n$9999999999\r\n1\r\n$1\r\nv\r\n",
        b"*1\r\n$18446744073709551615\r\n1\r\n$1\r\nv\r\n",
        b"*1\r\n$1\r\n1\r\n:1\r\n",
    ],
)
def test_what_is_no_reply_to_the_question_is_for_the_parser(way: str, reply: bytes) -> None:
    assert native.scan(reply, 1, True) is None


@settings(deadline=None, max_examples=500)
@given(VALUES, VERSION, st.data())
def test_whatever_is_scanned_is_what_the_parser_reads(
    values: list[bytes | None], version: tuple[bytes | None, ...], data: st.DataObject
) -> None:
    """Of replies with bytes changed, taken out and put in."""
    reply = bytearray(spoken(values, *version))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(reply)))
        reply[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b"\r\n", b"$", b"-1", b"0", b"1", b"9", b"\xff"])
        )
    asked = (data.draw(st.sampled_from([len(values), len(values) + 1])), bool(version))
    native.use(True)
    found = native.scan(bytes(reply), *asked)
    assert found is None or found == parsed(bytes(reply), *asked)


# ---- token ids out of a text -----------------------------------------------------------------------

PLAIN = [
    b'{"model":"m","block_size":16,"token_ids":[1,2,3]}',
    b'{"token_ids": [1, 2, 3], "model": "m"}',
    b'{"token_ids": []}',
    b'{"token_ids": [ \t\r\n ]}',
    b' {\n "token_ids" :\n [\n 1 ,\n 22 ,\t333\r ]\n , "instance_id": "i", "cache_salt": "s" } ',
    b'{"token_ids":[0,4294967295,1234567,12345678,123456789,1000000000]}',
    b'{"token_ids":[' + b",".join(b"%d" % token for token in range(99_990, 100_500)) + b"]}",
    b'{"a":{"b":[1,{"c":"]"}]},"token_ids":[7],"z":[[]]}',
    '{"model":"größer","token_ids":[7]}'.encode(),
]
UNUSUAL = [
    b'{"token_ids":[1],"token_ids":[2]}',
    b'{"token_ids":[1],"token_ids":[]}',
    b'{"token_ids":[1],"x":"\\u0041"}',
    b'{"\\u0074oken_ids":[1],"token_ids":[2]}',
    b'{"token_ids":[1],"\\u0074oken_ids":[2]}',
    b'{"model":"a\\"b","token_ids":[1]}',
    b'{"model":"token_ids","x":[1]}',
    b'{"token_ids":"token_ids"}',
    b'{"token_ids":null}',
    b'{"token_ids":[1.0]}',
    b'{"token_ids":[1e3]}',
    b'{"token_ids":[-1]}',
    b'{"token_ids":[-0]}',
    b'{"token_ids":[01]}',
    b'{"token_ids":[00]}',
    b'{"token_ids":[4294967296]}',
    b'{"token_ids":[99999999999]}',
    b'{"token_ids":[18446744073709551617]}',
    b'{"token_ids":[123456789012345678901234567890]}',
    b'{"token_ids":[true,1]}',
    b'{"token_ids":["1"]}',
    b'{"token_ids":[[1]]}',
    b'{"token_ids":[{}]}',
    b'{"token_ids":[1,]}',
    b'{"token_ids":[,1]}',
    b'{"token_ids":[1,,2]}',
    b'{"token_ids":[1 2]}',
    b'{"token_ids":[,]}',
    b'{"token_ids":[1',
    b'{"token_ids":[1,',
    b'{"token_ids":[12345678',
    b'{"token_ids":[',
    b'{"token_ids":',
    b'{"token_ids"',
    b'"token_ids"',
    b'{"token_ids":[1\x00]}',
    b'{"token_ids":[1\x0b]}',
    b'{"token_ids":[1\xa0]}',
    b'{"token_ids":[\xff\xfe\xfd1]}',
    b'{"token_ids":[12\xff45678,1]}',
    b"",
]
#: Read by the loop, and not believed by its caller: see the tests of ``bodies.decode``.
NOT_BELIEVED = [
    b'{"token_ids":[1]//}',
    b'{"x":{"token_ids":[1]}}',
    b'[{"token_ids":[1]}]',
    b'{"x":"a"token_ids":[1]}',
    b'{"token_ids":[1]}}',
    b'{"token_ids":[1]',
    b'{"token_ids":[1]"model":"m"}',
    b"{'token_ids':[1]}",
    b'{"model":"\xff","token_ids":[1]}',
]


@pytest.mark.parametrize("body", PLAIN)
def test_a_plain_list_of_token_ids_is_cut_out_of_its_text(way: str, body: bytes) -> None:
    found = native.cut(body, NAME, 1000)
    assert found is not None
    start, end, tokens = found
    ids = json.loads(body)["token_ids"]
    assert json.loads(body[start:end]) == ids
    assert tokens == token_bytes(ids)
    assert native.cut(body, NAME, len(ids)) == found
    assert native.cut(body, NAME, len(ids) - 1) is None, "one more than may be"


@pytest.mark.parametrize("body", UNUSUAL)
def test_what_is_unusual_is_left_to_the_parser(way: str, body: bytes) -> None:
    assert native.cut(body, NAME, 1000) is None


def test_a_text_with_many_strings_around_its_list_is_left_to_the_parser_by_the_c(way: str) -> None:
    for many in (b'"a":1,' * 1000, b'"token_idz":1,' * 1000):
        for body in (b"{" + many + b'"token_ids":[1]}', b'{"token_ids":[1],' + many + b'"z":1}'):
            at = body.index(b"[1]")
            found = None if way == "native" else (at, at + 3, token_bytes([1]))
            assert native.cut(body, NAME, 9) == found


PIECES = st.sampled_from(
    [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b" ",
        b"\n",
        b"\\",
        b'"token_ids"',
        b'"token_ids":[',
        b"1",
        b"0",
        b"12345",
    ]
    + [b"4294967295", b"4294967296", b"12345678", b"-", b".", b"e", b"\xff", b'"model":"m"', b"null", b"true"]
)


@settings(deadline=None, max_examples=400)
@given(st.lists(PIECES, max_size=14), st.integers(0, 8))
@example([b"{", b'"token_ids":[', b"1", b"]", b"}"], 0)
def test_whatever_is_cut_out_is_a_list_of_token_ids(pieces: list[bytes], padding: int) -> None:
    body = b"".join(pieces) + b" " * padding
    for way in WAYS:
        native.use(way == "native")
        found = native.cut(body, NAME, 4)
        if found is None:
            continue
        start, end, tokens = found
        ids = json.loads(body[start:end])
        assert all(type(each) is int and 0 <= each <= U32_MAX for each in ids)
        assert (tokens, len(ids) <= 4) == (token_bytes(ids), True)
        assert body[:start].rstrip(b" \n").removesuffix(b":").rstrip(b" \n").endswith(NAME)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, U32_MAX), max_size=300), st.sampled_from([",", ", ", " , ", ",\n\t"]), st.integers(0, 9))
def test_every_list_of_token_ids_is_read(ids: list[int], comma: str, padding: int) -> None:
    body = b'{"token_ids":[' + comma.join(map(str, ids)).encode() + b"]}" + b" " * padding
    for way in WAYS:
        native.use(way == "native")
        assert native.cut(body, NAME, len(ids)) == (13, len(body) - 1 - padding, token_bytes(ids))


@settings(deadline=None, max_examples=600)
@given(
    st.lists(st.integers(0, 10**8 + 5), min_size=1, max_size=90),
    st.sampled_from([",", ", "]),
    st.lists(st.tuples(st.integers(0, 1000), st.sampled_from("0123456789, -.e\n\xff")), max_size=2),
    st.integers(0, 64),
)
@example([1] * 40, ",", [(33, ",")], 0)
@example([1] * 40, ", ", [(32, " ")], 0)
@example([10] * 40, ",", [(64, "0")], 0)
def test_a_list_in_which_something_is_wrong_is_read_as_it_stands_or_not_at_all(
    ids: list[int], comma: str, changes: list[tuple[int, str]], before: int
) -> None:
    text = bytearray(comma.join(map(str, ids)), "ascii")
    for at, character in changes:
        text[at % len(text)] = ord(character)
    try:
        # -0 is a number for a parser of JSON, and none of a token.
        tokens = None if b"-" in text else token_bytes(json.loads(b"[%b]" % bytes(text)))
    except (ValueError, struct.error):
        tokens = None
    for way in WAYS:
        native.use(way == "native")
        found = native.cut(b'{"x":"%b","token_ids":[%b]}' % (b"x" * before, bytes(text)), NAME, 1000)
        assert (None if found is None else found[2]) == tokens
