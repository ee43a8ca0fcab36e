"""A POST that the C module reads in one call is the one that httptools reads; whatever is unusual is left to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.readings import Readings, ours
from tests.serving.wire import answers, connections, echo, served, wire
from tests.unit import examples
from waymark.base import native
from waymark.serving.connection import protocol
from waymark.serving.limits import Rejection
from waymark.serving.request_reader import RequestReader

USUAL = [
    b"Content-Type: application/json",
    b"content-type:application/json",
    b"User-Agent: python-httpx/0.28 (a; b)",
    b"Accept: */*",
    b"Accept-Encoding: gzip, deflate, br",
    b"Connection: keep-alive",
    b"connection: Keep-Alive",
    b"Authorization: Bearer 0/=+_-~",
    b"X-Empty:",
    b"X-Blanks: \t a\tb \t",
    b"x_y-0: 1",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
]
UNUSUAL = [
    b"Connection: close",
    b"Connection: keep-alive, x",
    b"Connection:",
    b"Connection: Upgrade, HTTP2-Settings",
    b"Proxy-Connection: close",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Content-Length: 3",
    b"Host: y",
    b"A : b",
    b"A: \xe9",
    b"A: b\x7f",
    b"A: b\x00",
    b"A: b\r\n c",
    b"A: b\rc",
    b"A",
    b": b",
    b"",
    b"A!: b",
    b" A: b",
]
HOSTS = [b"x", b"x.y-z:80", b"10.0.0.1:8080", b"x:"]
UNUSUAL_HOSTS = [b"", b":80", b"[::1]:80", b"x:8a", b"x y", b"x,y", b"x_y", b"a@b", b"x/", b"%78"]
LENGTHS = [b"3", b"03", b" 3 ", b"000000003"]
UNUSUAL_LENGTHS = [b"", b"+3", b"-3", b"3, 3", b"0x3", b"3.0", b"1234567890", b"0000000003", b"2", b"0"]
STARTS = [b"POST /query HTTP/1.1", b"POST /dynamo/query_by_hash HTTP/1.1", b"POST /a/../x.y-Z_ HTTP/1.1"]
UNUSUAL_STARTS = [
    b"POST / HTTP/1.1",
    b"POST //a HTTP/1.1",
    b"POST /a/ HTTP/1.1",
    b"POST /a?b HTTP/1.1",
    b"POST /%61 HTTP/1.1",
    b"POST http://x/a HTTP/1.1",
    b"POST a HTTP/1.1",
    b"POST  /a HTTP/1.1",
    b"POST /a  HTTP/1.1",
    b"POST /a HTTP/1.0",
    b"POST /a http/1.1",
    b"POST /a HTTP/1.1 ",
    b"POST /a",
    b"post /a HTTP/1.1",
    b"PUT /a HTTP/1.1",
    b"GET /a HTTP/1.1",
    b"",
    b"\r\nPOST /a HTTP/1.1",
]


def request(start: bytes, lines: list[bytes], host: bytes = b"x", length: bytes = b"3", body: bytes = b"abc") -> bytes:
    return b"\r\n".join([start, b"Host: " + host, b"Content-Length: " + length, *lines, b"", body])


PLAIN = [
    *(request(STARTS[0], [line]) for line in USUAL),
    *(request(start, USUAL) for start in STARTS),
    *(request(STARTS[0], [], host=host) for host in HOSTS),
    *(request(STARTS[0], [], length=length) for length in LENGTHS),
    request(STARTS[0], [b"A%d: b" % i for i in range(98)]),
]
ODD = [
    *(request(STARTS[0], [line]) for line in UNUSUAL),
    *(request(start, []) for start in UNUSUAL_STARTS),
    *(request(STARTS[0], [], host=host) for host in UNUSUAL_HOSTS),
    *(request(STARTS[0], [], length=length) for length in UNUSUAL_LENGTHS),
    request(STARTS[0], []) + b"\r\n",
    request(STARTS[0], []) * 2,
    request(STARTS[0], [])[:-4],
    request(STARTS[0], [], length=b"0", body=b""),
    request(STARTS[0], [b"A%d: b" % i for i in range(99)]),
    request(STARTS[0], [b"A: " + b"b" * 32768]),
    request(b"POST /" + b"a" * 32768 + b" HTTP/1.1", []),
    b"\r\n".join([STARTS[0], b"Host: x", b"", b"abc"]),
    b"\r\n".join([STARTS[0], b"Content-Length: 3", b"", b"abc"]),
    b"\n".join([STARTS[0], b"Host: x", b"Content-Length: 3", b"", b"abc"]),
    b"",
]


@pytest.fixture
def loops() -> native.NativeFunctions:
    if native.selected is None:
        pytest.skip("the C module was not built")
    return native.selected


def read(sent: list[bytes], *, is_native: bool) -> Readings:
    before = native.implementation()
    native.select(is_native)
    try:
        return asyncio.run(ours(sent))
    finally:
        native.select(before == "native")


@pytest.mark.parametrize("sent", PLAIN)
def test_a_usual_request_is_read_in_one_call(loops: native.NativeFunctions, sent: bytes) -> None:
    assert loops.plain_post(sent) is not None
    (reading,) = read([sent], is_native=True).requests
    assert [reading] == read([sent], is_native=False).requests
    assert reading.body == b"abc"


@pytest.mark.parametrize("sent", ODD)
def test_an_unusual_request_is_left_to_httptools(loops: native.NativeFunctions, sent: bytes) -> None:
    assert loops.plain_post(sent) is None
    assert read([sent], is_native=True) == read([sent], is_native=False)


def cuts(sent: bytes) -> list[list[bytes]]:
    """A request in two pieces, for each place to cut, and in pieces of some bytes."""
    by_size = [[sent[i : i + size] for i in range(0, len(sent), size)] for size in (1, 7, 50)]
    return [[sent[:at], sent[at:]] for at in range(1, len(sent))] + by_size


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("sent", [PLAIN[0], request(STARTS[0], [], length=b"300", body=b"abc" * 100)])
def test_a_request_in_pieces_is_the_same_request(sent: bytes) -> None:
    expected = read([sent], is_native=True)
    for parts in cuts(sent):
        assert read(parts, is_native=True) == expected == read(parts, is_native=False)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("then", [b"", PLAIN[1], ODD[0], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff"])
def test_what_comes_behind_a_body_in_pieces_is_read_too(then: bytes) -> None:
    head, body = PLAIN[0][:-3], PLAIN[0][-3:]
    for parts in ([head, body + then], [head + body[:1], body[1:] + then], [head, body[:1], body[1:] + then, PLAIN[0]]):
        assert read(parts, is_native=True) == read(parts, is_native=False)


class Quiet:
    """A connection that takes everything, and answers nothing."""

    connections: Any = None

    def take_whole(self, scope: dict[str, Any], body: bytes) -> bool:
        return False

    def take_head(self, scope: dict[str, Any], *, keep_alive: bool, expects_continue: bool) -> None: ...

    def take_body(self, piece: bytes) -> None: ...

    def request_begins(self) -> None: ...

    def request_ends(self) -> None: ...

    def reject(self, rejection: Rejection) -> None: ...


@pytest.mark.usefixtures("loops")
def test_a_request_is_open_until_its_body_is_there() -> None:
    """An answer may come before, and the time for a body counts from then on."""
    found = []
    for is_native in (True, False):
        before = native.implementation()
        native.select(is_native)
        reader, states = RequestReader(Quiet()), list[bool]()
        for piece in (PLAIN[0][:-3], b"a", b"bc", PLAIN[0], PLAIN[0][:-1], b"c" + PLAIN[0][:-2]):
            reader.feed(piece)
            states.append(reader.is_open)
        native.select(before == "native")
        found.append(states)
    assert found == [[True, True, False, False, True, True]] * 2


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_head_is_read_in_one_call_before_its_body_is_there(loops: native.NativeFunctions, missing: int) -> None:
    sent = PLAIN[0][: len(PLAIN[0]) - missing]
    found = loops.plain_post(sent)
    assert found is not None
    assert (found[2], found[3]) == (b"abc"[: 3 - missing], missing)


@st.composite
def pieces(draw: st.DrawFn) -> list[bytes]:
    """Requests over one connection, mostly usual ones, each in one or two pieces of its own."""
    sent = []
    for _ in range(draw(st.integers(1, 4))):
        lines = draw(st.lists(st.sampled_from(USUAL * 4 + UNUSUAL), max_size=4))
        host = draw(st.sampled_from(HOSTS * 6 + UNUSUAL_HOSTS))
        length = draw(st.sampled_from(LENGTHS * 6 + UNUSUAL_LENGTHS))
        one = request(draw(st.sampled_from(STARTS * 12 + UNUSUAL_STARTS)), lines, host, length)
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(one)))
            put = draw(st.sampled_from([b"", b"\r\n", b" ", b"\x00", b"\n", b":", b"0", b"\xff", b"\t"]))
            one = one[:at] + put + one[at + draw(st.integers(0, 2)) :]
        at = draw(st.sampled_from([len(one), len(one) - 3, len(one) - 1, draw(st.integers(0, len(one)))]))
        sent += [one[:at], one[at:]]
    return [piece for piece in sent if piece]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(300))
@given(pieces())
def test_both_readers_read_the_same_requests(sent: list[bytes]) -> None:
    if native.selected is None:
        pytest.skip("the C module was not built")
    assert read(sent, is_native=True) == read(sent, is_native=False)


async def test_a_plain_body_above_the_ceiling_of_all_bodies_is_rejected(
    implementation: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = b"x" * 2000
    sent = request(STARTS[0], [], length=b"2000", body=body)
    async with served(echo, protocol(connections(bodies_max_bytes=1000))) as port:
        (given,) = answers(await wire(port, sent), ["POST"])
    assert (given.status, given.reason) == (503, "unavailable")
    assert "WAYMARK_MAX_BODY_BYTES" in given.body.decode()
    assert caplog.records == []


def test_a_name_of_one_letter_changes_no_byte_of_the_process(loops: native.NativeFunctions) -> None:
    """Python has one object for each single byte, which must not become its lower case."""
    for code in range(ord("A"), ord("Z") + 1):
        field = chr(code).encode() + b": x"
        request = b"\r\n".join([b"POST /query HTTP/1.1", b"Host: y", field, b"Content-Length: 1", b"", b"1"])
        found = loops.plain_post(request)
        assert found is not None
        assert (chr(code).lower().encode(), b"x") in found[1]
        assert chr(code).encode().decode() == chr(code)
