"""The command of a query and the reply to it: as the client library would write and read them."""

from __future__ import annotations

import hiredis
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from waymark import native
from waymark.domain.keys import pack
from waymark.domain.match import value_runs
from waymark.store.wire import mget, scan

pytestmark = pytest.mark.usefixtures("implementation_kept")


@pytest.mark.parametrize("prefix", [b"wm:{1}:", b"wm:{4294967295.255}:", b""])
@pytest.mark.parametrize("count", [1, 2, 9, 10, 512, 1000])
def test_a_command_is_what_the_driver_would_send(implementation: str, prefix: bytes, count: int) -> None:
    numbers = [(index * 0x9E3779B97F4A7C15) % 2**64 for index in range(count)]
    expected = hiredis.pack_command(("MGET", *(b"%b%016x" % (prefix, number) for number in numbers)))  # type: ignore[arg-type]
    assert mget(prefix, pack(numbers)) == expected


Scanned = tuple[bytes | None, list[tuple[bytes, int]], int, int]


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
    found = value_runs(values)
    return version, found, sum(length for _, length in found), len(reply)


VALUES = st.lists(st.sampled_from([b"1", b"2", b"1 2", b"", b"$-1\r\n", b"\r\n", b"7" * 300, None]), max_size=12)
VERSION = st.sampled_from([(), (b"a1b2",), (None,), (b"",)])


@given(VALUES, VERSION)
@example([b"17"] * 512, (b"a1b2",))
@example([], (b"a1b2",))
def test_a_reply_is_scanned_as_the_parser_reads_it(
    values: list[bytes | None], version: tuple[bytes | None, ...]
) -> None:
    reply, asked = spoken(values, *version), (len(values), bool(version))
    native.select(False)
    expected = parsed(reply, *asked)
    assert expected is not None
    assert scan(reply, *asked) is None, "in Python it is always for the parser"
    if native.select(True) == "native":
        assert scan(reply, *asked) == expected


@pytest.mark.parametrize("values", [[b"17", b"17", None, b"18"], [None, None], [b"1 2", b""], [b"1" * 1000] * 3, []])
@pytest.mark.parametrize("version", [(), (b"a1b2",), (None,)])
def test_a_reply_that_is_not_whole_is_for_the_parser_and_one_ends_where_it_ends(
    implementation: str, values: list[bytes | None], version: tuple[bytes | None, ...]
) -> None:
    reply, asked = spoken(values, *version), (len(values), bool(version))
    for length in range(len(reply)):
        assert scan(reply[:length], *asked) is None
    for more in (b"$", b"\r", b"\r\n", b"\0", b"$-1\r\n", reply or b"+"):
        assert scan(reply + more, *asked) == scan(reply, *asked), "what follows is of another question"


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
def test_what_is_no_reply_to_the_question_is_for_the_parser(implementation: str, reply: bytes) -> None:
    assert scan(reply, 1, True) is None


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
    native.select(True)
    found = scan(bytes(reply), *asked)
    assert found is None or found == parsed(bytes(reply[: found[3]]), *asked)
