"""Token ids out of a JSON text, in C and in Python: what is read is what the parser reads."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import IMPLEMENTATIONS
from tests.unit import examples
from waymark.api.http.bodies import cut
from waymark.base import native
from waymark.domain.hashing import token_bytes
from waymark.domain.names import U32_MAX

pytestmark = pytest.mark.usefixtures("implementation_kept")

NAME = b'"token_ids"'

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
def test_a_plain_list_of_token_ids_is_cut_out_of_its_text(implementation: str, body: bytes) -> None:
    found = cut(body, NAME, 1000)
    assert found is not None
    start, end, tokens = found
    ids = json.loads(body)["token_ids"]
    assert json.loads(body[start:end]) == ids
    assert tokens == token_bytes(ids)
    assert cut(body, NAME, len(ids)) == found
    assert cut(body, NAME, len(ids) - 1) is None, "one more than may be"


@pytest.mark.parametrize("body", UNUSUAL)
def test_what_is_unusual_is_left_to_the_parser(implementation: str, body: bytes) -> None:
    assert cut(body, NAME, 1000) is None


def test_a_text_with_many_strings_around_its_list_is_left_to_the_parser_by_the_c(implementation: str) -> None:
    for many in (b'"a":1,' * 1000, b'"token_idz":1,' * 1000):
        for body in (b"{" + many + b'"token_ids":[1]}', b'{"token_ids":[1],' + many + b'"z":1}'):
            at = body.index(b"[1]")
            found = None if implementation == "native" else (at, at + 3, token_bytes([1]))
            assert cut(body, NAME, 9) == found


@pytest.mark.parametrize("separator", [",", ", "])
@pytest.mark.parametrize("digits", range(1, 9))
def test_each_number_of_a_list_of_any_length_is_read(implementation: str, digits: int, separator: str) -> None:
    """The C reads four numbers at a time, and hundreds after their ends were found: no border loses one."""
    ids = [(10**digits - 1 - i) % 10**digits for i in range(700)]
    for count in (*range(1, 12), *range(250, 270), *range(505, 520), 700):
        body = f'{{"x":1,"token_ids":[{separator.join(map(str, ids[:count]))}]}}'.encode()
        found = cut(body, NAME, count)
        assert found is not None
        assert found[2] == token_bytes(ids[:count])
        for wrong in ("x", "01", "", "-1", "123456789012"):
            spoilt = [*map(str, ids[: count - 1]), wrong]
            assert cut(f'{{"token_ids":[{separator.join(spoilt)},1]}}'.encode(), NAME, 1000) is None


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


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(400))
@given(st.lists(PIECES, max_size=14), st.integers(0, 8))
@example([b"{", b'"token_ids":[', b"1", b"]", b"}"], 0)
def test_whatever_is_cut_out_is_a_list_of_token_ids(pieces: list[bytes], padding: int) -> None:
    body = b"".join(pieces) + b" " * padding
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        found = cut(body, NAME, 4)
        if found is None:
            continue
        start, end, tokens = found
        ids = json.loads(body[start:end])
        assert all(type(each) is int and 0 <= each <= U32_MAX for each in ids)
        assert (tokens, len(ids) <= 4) == (token_bytes(ids), True)
        assert body[:start].rstrip(b" \n").removesuffix(b":").rstrip(b" \n").endswith(NAME)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.integers(0, U32_MAX), max_size=300), st.sampled_from([",", ", ", " , ", ",\n\t"]), st.integers(0, 9))
def test_every_list_of_token_ids_is_read(ids: list[int], comma: str, padding: int) -> None:
    body = b'{"token_ids":[' + comma.join(map(str, ids)).encode() + b"]}" + b" " * padding
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        assert cut(body, NAME, len(ids)) == (13, len(body) - 1 - padding, token_bytes(ids))


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(600))
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
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        found = cut(b'{"x":"%b","token_ids":[%b]}' % (b"x" * before, bytes(text)), NAME, 1000)
        assert (None if found is None else found[2]) == tokens
