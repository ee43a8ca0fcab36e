"""RFC 9110 and 9112, case by case: what is read, and with which status a connection is ended.

h11 reads the same bytes. Where it reads them in another way, the table says so and why ours may.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.serving.readings import of_h11, ours


class Case(NamedTuple):
    sent: bytes
    """A Host is put in for ``H``."""
    read: list[str]
    """Requests as method, target and body; last, where there is one, the status of a refusal."""
    by_h11: list[str] | None = None
    """Where it is another."""


def case(sent: bytes, *read: str, h11: list[str] | None = None) -> Case:
    return Case(sent.replace(b"\r\nH\r\n", b"\r\nHost: x\r\n"), list(read), h11)


GET = b"GET /n HTTP/1.1\r\nH\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: chunked\r\n\r\n"
CASES = {
    # RFC 9112, 2.2: message parsing
    "blank line before a request": case(b"\r\n" + GET, "GET /n", h11=["400"]),
    "blank lines between requests": case(GET + b"\r\n" + GET, "GET /n", "GET /n", h11=["GET /n", "400"]),
    "bare LF as the end of a line": case(b"GET / HTTP/1.1\nHost: x\n\n", "400", h11=["GET /"]),
    "bare CR in a value": case(b"GET / HTTP/1.1\r\nH\r\nA: b\rc\r\n\r\n", "400"),
    "NUL in a value": case(b"GET / HTTP/1.1\r\nH\r\nA: b\x00c\r\n\r\n", "400"),
    "control character in a value": case(b"GET / HTTP/1.1\r\nH\r\nA: b\x01c\r\n\r\n", "400", h11=["GET /"]),
    "whitespace before the first field": case(b"GET / HTTP/1.1\r\n H\r\nHost: x\r\n\r\n", "400"),
    # 2.3 and 3: version and request line
    "lower-case version": case(b"GET / http/1.1\r\nH\r\n\r\n", "400"),
    "version 2.0": case(b"GET / HTTP/2.0\r\nH\r\n\r\n", "400", h11=["GET /"]),
    "version 1.2": case(b"GET / HTTP/1.2\r\nH\r\n\r\n", "400", h11=["GET /"]),
    "version 0.9": case(b"GET / HTTP/0.9\r\nH\r\n\r\n", "400", h11=["GET /"]),
    "no version": case(b"GET /\r\n\r\n", "400"),
    "preface of HTTP/2": case(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400", h11=["PRI *", "400"]),
    "two spaces in the request line": case(b"GET  / HTTP/1.1\r\nH\r\n\r\n", "GET /", h11=["400"]),
    "space in the target": case(b"GET /a b HTTP/1.1\r\nH\r\n\r\n", "400"),
    "no target": case(b"GET HTTP/1.1\r\nH\r\n\r\n", "400"),
    "unknown method": case(b"FROB / HTTP/1.1\r\nH\r\n\r\n", "400", h11=["FROB /"]),
    "lower-case method": case(b"get / HTTP/1.1\r\nH\r\n\r\n", "400", h11=["get /"]),
    # 3.2: targets
    "query": case(b"GET /a?b=c%20d HTTP/1.1\r\nH\r\n\r\n", "GET /a?b=c%20d"),
    "absolute form": case(b"GET http://y/a?b HTTP/1.1\r\nH\r\n\r\n", "GET /a?b", h11=["GET http://y/a?b"]),
    "absolute form without a path": case(b"GET http://y HTTP/1.1\r\nH\r\n\r\n", "GET /", h11=["GET http://y"]),
    "asterisk form": case(b"OPTIONS * HTTP/1.1\r\nH\r\n\r\n", "OPTIONS *"),
    "authority form": case(b"CONNECT y:80 HTTP/1.1\r\nH\r\n\r\n", "400", h11=["CONNECT y:80"]),
    "relative target": case(b"GET a HTTP/1.1\r\nH\r\n\r\n", "400", h11=["GET a"]),
    # 3.2: Host
    "no Host": case(b"GET / HTTP/1.1\r\n\r\n", "400"),
    "no Host in 1.0": case(b"GET / HTTP/1.0\r\n\r\n", "GET /"),
    "two Hosts": case(b"GET / HTTP/1.1\r\nH\r\nHost: x\r\n\r\n", "400"),
    "two Hosts in 1.0": case(b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n", "400"),
    "Host that is none": case(b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", "400", h11=["GET /"]),
    # 5: fields
    "space before a colon": case(b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", "400"),
    "no colon": case(b"GET / HTTP/1.1\r\nH\r\nabc\r\n\r\n", "400"),
    "empty name": case(b"GET / HTTP/1.1\r\nH\r\n: b\r\n\r\n", "400"),
    "folded value": case(b"GET / HTTP/1.1\r\nH\r\nA: b\r\n c\r\n\r\n", "400", h11=["GET /"]),
    "empty value": case(b"GET / HTTP/1.1\r\nH\r\nA:\r\n\r\n", "GET /"),
    "value of any bytes": case(b"GET / HTTP/1.1\r\nH\r\nA: \xe9\xff\r\n\r\n", "GET /"),
    "whitespace around Host": case(b"GET / HTTP/1.1\r\nHost:\t x \t \r\n\r\n" + GET, "GET /", "GET /n"),
    "whitespace around a length": case(
        b"POST / HTTP/1.1\r\nH\r\nContent-Length:\t2 \t\r\n\r\nab" + GET, "POST / ab", "GET /n"
    ),
    "whitespace behind close": case(b"GET / HTTP/1.1\r\nH\r\nConnection: close \t\r\n\r\n" + GET, "GET /"),
    # 6: bodies
    "body of a length": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: 2\r\n\r\nab" + GET, "POST / ab", "GET /n"),
    "no length of a POST": case(b"POST / HTTP/1.1\r\nH\r\n\r\n", "411", h11=["POST /"]),
    "no length of a DELETE": case(b"DELETE / HTTP/1.1\r\nH\r\n\r\n" + GET, "DELETE /", "GET /n"),
    "body of a GET": case(b"GET / HTTP/1.1\r\nH\r\nContent-Length: 1\r\n\r\na" + GET, "GET / a", "GET /n"),
    "length and chunks": case(
        b"POST / HTTP/1.1\r\nH\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "400",
        h11=["POST /"],
    ),
    "chunks and length": case(
        b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        "400",
        h11=["POST /"],
    ),
    "two lengths": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "400"),
    "the same length twice": case(
        b"POST / HTTP/1.1\r\nH\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", "400", h11=["POST / a"]
    ),
    "list of lengths": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: 1, 1\r\n\r\na", "400", h11=["POST / a"]),
    "negative length": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: -1\r\n\r\n", "400"),
    "signed length": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: +1\r\n\r\na", "400"),
    "length in words": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: two\r\n\r\na", "400"),
    "length beyond 64 bits": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n", "400"),
    "hexadecimal length": case(b"POST / HTTP/1.1\r\nH\r\nContent-Length: 0x1\r\n\r\na", "400"),
    # 6.1: transfer codings
    "gzip and chunked": case(b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "501"),
    "gzip alone": case(b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: gzip\r\n\r\n", "501"),
    "chunked twice": case(
        b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "400",
        h11=["501"],
    ),
    "identity": case(b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: identity\r\n\r\n", "501"),
    "chunked in any case": case(
        b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\na\r\n0\r\n\r\n" + GET, "POST / a", "GET /n"
    ),
    "blanks around chunked": case(
        b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding:\t chunked  \r\n\r\n1\r\na\r\n0\r\n\r\n" + GET, "POST / a", "GET /n"
    ),
    # Legal, but the parser takes it for another coding: it is refused before anything of a body is read.
    "tab behind chunked": case(
        b"POST / HTTP/1.1\r\nH\r\nTransfer-Encoding: chunked\t\r\n\r\n0\r\n\r\n", "501", h11=["POST /"]
    ),
    "chunked in 1.0": case(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "501", h11=["POST /"]),
    # 7.1: chunks
    "chunks": case(CHUNKED + b"1\r\na\r\n0A\r\n0123456789\r\n0\r\n\r\n" + GET, "POST / a0123456789", "GET /n"),
    "extension of a chunk": case(CHUNKED + b'1;a=b;c="d"\r\na\r\n0;e\r\n\r\n' + GET, "POST / a", "GET /n"),
    "size of no digits": case(CHUNKED + b"\r\na\r\n0\r\n\r\n", "400"),
    "size with a sign": case(CHUNKED + b"+1\r\na\r\n0\r\n\r\n", "400"),
    "size with 0x": case(CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", "400"),
    "size beyond 64 bits": case(CHUNKED + b"f" * 17 + b"\r\na\r\n", "400", h11=[]),
    "longer than its size": case(CHUNKED + b"1\r\nab\r\n0\r\n\r\n", "400"),
    "bare LF behind a size": case(CHUNKED + b"1\na\r\n0\r\n\r\n", "400"),
    "trailers": case(CHUNKED + b"1\r\na\r\n0\r\nA: b\r\nHost: y\r\n\r\n" + GET, "POST / a", "GET /n"),
    "trailer that is none": case(CHUNKED + b"1\r\na\r\n0\r\nabc\r\n\r\n", "400"),
    # 9: connections
    "close": case(b"GET / HTTP/1.1\r\nH\r\nConnection: close\r\n\r\n" + GET, "GET /"),
    "Close among others": case(b"GET / HTTP/1.1\r\nH\r\nConnection: a, Close\r\n\r\n" + GET, "GET /"),
    "1.0": case(b"GET / HTTP/1.0\r\n\r\n" + GET, "GET /"),
    "1.0 that is kept": case(b"GET / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n" + GET, "GET /"),
    "junk behind close": case(b"GET / HTTP/1.1\r\nH\r\nConnection: close\r\n\r\n\x00\x01", "GET /"),
    "junk behind a request": case(GET + b"\x00\x01\r\n\r\n", "GET /n", "400"),
    # RFC 9110, 7.8 and 10.1.1
    "Upgrade": case(
        b"POST / HTTP/1.1\r\nH\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab" + GET,
        "POST / ab",
        "GET /n",
    ),
    "Upgrade twice over": case(
        (b"GET / HTTP/1.1\r\nH\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n") * 3 + GET,
        "GET /",
        "GET /",
        "GET /",
        "GET /n",
    ),
    "Upgrade in 1.0": case(b"GET / HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", "GET /"),
    "Upgrade without Connection": case(b"GET / HTTP/1.1\r\nH\r\nUpgrade: h2c\r\n\r\n" + GET, "GET /", "GET /n"),
    "Expect of another thing": case(b"GET / HTTP/1.1\r\nH\r\nExpect: tea\r\n\r\n", "GET /"),
}


@pytest.mark.parametrize("name", CASES)
async def test_it_is_read_as_the_rfc_says(name: str) -> None:
    sent, read, _ = CASES[name]
    assert (await ours([sent])).shown == read
    assert (await ours([sent[i : i + 1] for i in range(len(sent))])).shown == read, "byte by byte"


@pytest.mark.parametrize("name", CASES)
def test_h11_reads_it_as_the_table_says(name: str) -> None:
    sent, read, by_h11 = CASES[name]
    assert of_h11([sent]).shown == (read if by_h11 is None else by_h11)
    assert by_h11 != read, "the table names differences only"
