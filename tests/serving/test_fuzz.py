"""Whatever is sent, in whatever pieces: ours and h11 never read two different requests out of the same bytes.

One may refuse what the other reads, and then reads nothing more. Two readings of the same bytes are how requests are
smuggled past a proxy.
"""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.serving.readings import Reading, Readings, of_h11, ours
from tests.unit import examples

pytestmark = pytest.mark.slow

LINES = st.sampled_from(
    [
        b"Host: x",
        b"Host: y",
        b"Host:",
        b"host : x",
        b"Content-Length: 0",
        b"Content-Length: 3",
        b"Content-Length: 4",
        b"Content-Length: 3, 3",
        b"Content-Length: +3",
        b"Content-Length: 03",
        b"Content-Length:",
        b"Content-Length : 3",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: Chunked ",
        b"Transfer-Encoding: \tchunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: \x0bchunked",
        b"Connection: close",
        b"Connection: keep-alive",
        b"Connection: Upgrade, HTTP2-Settings",
        b"Connection: transfer-encoding",
        b"Upgrade: h2c",
        b"Upgrade: websocket",
        b"HTTP2-Settings: AAEAAEAA",
        b"Expect: 100-continue",
        b"Trailer: A",
        b"A: b",
        b"A: b\r\n c",
        b"A: \xe9",
        b"A",
        b": b",
        b" A: b",
    ]
)
ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n"])
STARTS = st.sampled_from(
    [b"GET /a?b HTTP/1.1", b"POST / HTTP/1.1", b"POST / HTTP/1.1", b"PUT /c HTTP/1.1", b"DELETE /d HTTP/1.1"]
    + [b"HEAD /h HTTP/1.1", b"OPTIONS * HTTP/1.1", b"CONNECT x:1 HTTP/1.1", b"GET / HTTP/1.0", b"POST / HTTP/1.0"]
    + [b"GET / HTTP/2.0", b"GET /", b"GET http://z/a HTTP/1.1", b"get / HTTP/1.1", b"", b"{}"]
)
BODIES = st.sampled_from(
    [b"", b"abc", b"abcd", b"3\r\nabc\r\n0\r\n\r\n", b"3;x=y\r\nabc\r\n0\r\nA: b\r\nHost: z\r\n\r\n", b"0\r\n\r\n"]
    + [
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"03\r\nabc\r\n00\r\n\r\n",
        b"-1\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
    ]
    + [b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nA\r\n\r\n", b"\x00\x01junk\r\n\r\n", b'{"model": "m"}']
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request, mostly with a Host and an end."""
    lines = [draw(STARTS), *draw(st.sampled_from([[b"Host: x"]] * 4 + [[]])), *draw(st.lists(LINES, max_size=4))]
    return b"".join(line + draw(ENDS) for line in lines) + draw(ENDS) + draw(BODIES)


@st.composite
def pieces(draw: st.DrawFn) -> list[bytes]:
    """Some requests over one connection, perhaps with a wrong place, cut anywhere."""
    sent = b"".join(draw(st.lists(requests(), min_size=1, max_size=4)))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(sent)))
        put = draw(st.sampled_from([b"", b"\r\n", b" ", b"\x00", b"\n", b":", b"0", b"\xff"]))
        sent = sent[:at] + put + sent[at + draw(st.integers(0, 2)) :]
    cuts = sorted({0, len(sent), *draw(st.lists(st.integers(0, len(sent)), max_size=4))})
    return [sent[start:end] for start, end in pairwise(cuts)]


#: What stands before the path in a target that is a URL, of whatever scheme.
ABSOLUTE = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://[^/?]*")


def plain(reading: Reading) -> tuple[str, str, list[tuple[bytes, bytes]], bytes]:
    """What both say in the same way: h11 leaves a target whole, and gives each coding in small letters."""
    target = ABSOLUTE.sub("", reading.target)
    path, _, query = target.partition("?")
    target = f"{path}?{query}" if query else path  # a scope does not tell an empty query from none
    headers = [
        (name, value.lower() if name == b"transfer-encoding" else value)
        for name, value in reading.headers
        if name != b"upgrade"
    ]
    return reading.method, target, headers, reading.body


def check(sent: list[bytes], found: Readings, other: Readings) -> None:
    for mine, theirs in zip(found.requests, other.requests, strict=False):
        assert plain(mine) == plain(theirs), sent
    assert found.status in (0, 400, 411, 431, 501, 503), sent


@settings(deadline=None, max_examples=examples(1500))
@given(pieces())
@example([b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"])
@example([b"GET ttp://z/a HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_ours_and_h11_never_read_two_different_requests(sent: list[bytes]) -> None:
    check(sent, asyncio.run(ours(sent)), of_h11(sent))


@settings(deadline=None, max_examples=examples(500))
@given(pieces())
def test_how_the_bytes_are_cut_changes_nothing(sent: list[bytes]) -> None:
    whole = asyncio.run(ours([b"".join(sent)]))
    assert asyncio.run(ours(sent)) == whole
