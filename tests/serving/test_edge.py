"""The edge of HTTP: what the RFCs let a client send, and what clients send whatever the RFCs say."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from starlette.types import Receive, Scope, Send

from tests.patience import within
from tests.serving.wire import LAST, SECONDS, Answer, answer, answers, ask, connections, echo, post, request, served
from waymark.base.metrics import Metrics
from waymark.serving.connection import protocol

# ---- Upgrade (RFC 9110, 7.8): a server may ignore it ------------------------------------------------

#: What the JDK's HTTP client sends with its first request to an http:// address.
H2C = ("Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAAAAIAAAAB", "Upgrade: h2c")
CHUNKED = request("/", "POST", "Transfer-Encoding: chunked", *H2C) + b"2\r\n{}\r\n3\r\n[1]\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        pytest.param(post(b'{"a": 1}', *H2C), '{"a": 1}', id="h2c-with-a-body"),
        pytest.param(CHUNKED, "{}[1]", id="h2c-chunked"),
        pytest.param(request("/", "GET", *H2C), "", id="h2c-without-a-body"),
        pytest.param(post(b"", *H2C), "", id="h2c-with-an-empty-body"),
        pytest.param(request("/", "GET", "Connection: upgrade", "Upgrade: websocket"), "", id="websocket"),
        pytest.param(post(b"x" * 300_000, *H2C), "x" * 300_000, id="h2c-with-a-large-body"),
    ],
)
async def test_another_protocol_is_answered_in_this_one(asked: bytes, body: str) -> None:
    def told(found: Answer) -> tuple[str, list[str]]:
        return found.echo["body"], [name for name, _ in found.echo["headers"] if name == "upgrade"]

    async with served(echo) as port:
        before = post(b"before")
        for pieces in (
            [before + asked + post(b"behind") + LAST],
            [before, asked, post(b"behind"), LAST],
            [before, *(asked[i : i + 1] for i in range(min(len(asked), 400))), asked[400:], post(b"behind"), LAST],
        ):
            found = await ask(port, *pieces)
            assert [told(each) for each in found] == [("before", []), (body, []), ("behind", []), ("", [])]


# ---- trailers (RFC 9110, 6.5.1): dropped --------------------------------------------------------------


async def test_fields_behind_a_body_are_dropped_and_counted() -> None:
    metrics = Metrics()
    trailers = b"authorization: Bearer secret\r\ncontent-type: text/x\r\nhost: other\r\nx-a: b\r\n"
    asked = request("/", "POST", "transfer-encoding: chunked", "x-head: 1") + b"2\r\nab\r\n0\r\n" + trailers + b"\r\n"
    async with served(echo, protocol(connections(metrics))) as port:
        for pieces in ([asked, LAST], [asked[:-30], asked[-30:], LAST], [asked + LAST]):
            first, last = await ask(port, *pieces)
            assert first.echo["body"] == "ab"
            assert [name for name, _ in first.echo["headers"]] == ["host", "transfer-encoding", "x-head"]
            assert last.echo["path"] == "/last"
    assert "waymark_http_trailer_fields_dropped_total 12.0" in metrics.render()[0].decode()


# ---- a fault of the application -----------------------------------------------------------------------


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    """Fails in the way that its path says."""
    if scope["path"] == "/raises":
        raise ArithmeticError("of the application")
    if scope["path"] == "/raises-after-its-head":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        raise ArithmeticError("of the application")
    if scope["path"] == "/is-silent":
        return
    await echo(scope, receive, send)


@pytest.mark.parametrize("path", ["/raises", "/raises-after-its-head", "/is-silent"])
async def test_a_fault_is_answered_and_said_in_the_log_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "waymark"):
        async with served(broken) as port:
            first, *others = await ask(port, post(b"{}", path=path), LAST)
    assert (first.status, first.reason, others) == (500, "internal", [])
    assert first.closes, "a client that is not told so would lose its next request"
    faults = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(faults) == 1
    assert "of the application" not in first.body.decode()


async def test_a_request_that_arrives_just_behind_a_fault_does_not_take_its_answer_away() -> None:
    with socket.socket() as client:

        async def fails(_: Scope, receive: Receive, send: Send) -> None:
            client.sendall(LAST)  # the server has not read it when it closes
            raise ArithmeticError

        async with served(fails) as port:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            client.sendall(post(b"{}"))
            content = b""
            async with within(SECONDS):
                while piece := await asyncio.get_running_loop().sock_recv(client, 65536):
                    content += piece
            client.close()
    assert [(each.status, each.reason, each.closes) for each in answers(content)] == [(500, "internal", True)]


async def test_an_answer_that_fails_halfway_is_cut_and_not_answered_twice() -> None:
    async def halfway(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        raise ArithmeticError

    async with served(halfway) as port:
        from tests.serving.wire import wire

        assert (await wire(port, request(), LAST)).endswith(b"\r\n\r\nab")


# ---- what cannot be read, behind what can ----------------------------------------------------------------

JUNK = [
    b"\x00\xff\x16\x03\x01",
    b'{"model": "m"}\r\n\r\n',
    b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
]


@pytest.mark.parametrize("junk", JUNK)
async def test_requests_before_what_cannot_be_read_are_answered(junk: bytes) -> None:
    async with served(echo) as port:
        for count in (1, 3):
            asked = [post(b"%d" % i) for i in range(count)]
            for pieces in ([b"".join(asked) + junk + LAST], [*asked, junk + LAST], [*asked, junk, LAST]):
                *before, last = await ask(port, *pieces)
                assert [each.echo["body"] for each in before] == [str(i) for i in range(count)]
                assert (last.status, last.reason, last.closes) == (400, "invalid_value", True)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_a_body_without_a_length_is_refused_with_411(method: str) -> None:
    async with served(echo) as port:
        for behind in (b"", b'{"model": "m"}', LAST):
            first, last = await ask(port, post(b"before") + request("/query", method) + behind)
            assert first.echo["body"] == "before"
            assert (last.status, last.reason, last.closes) == (411, "missing", True)
            assert b"Content-Length" in last.body


# ---- Host (RFC 9112, 3.2) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "version", "is_good"),
    [
        (["Host: x"], "1.1", True),
        (["Host: x:80"], "1.1", True),
        (["Host: [::1]:80"], "1.1", True),
        (["Host:"], "1.1", True),
        (["HOST: x"], "1.1", True),
        ([], "1.1", False),
        (["Host: x", "Host: x"], "1.1", False),
        (["Host: x", "hOsT: y"], "1.1", False),
        (["Host: a b"], "1.1", False),
        (["Host: user@x"], "1.1", False),
        (["Host: x/y"], "1.1", False),
        (["Host: x:port"], "1.1", False),
        (["Host: x, y"], "1.1", False),
        ([], "1.0", True),
        (["Host: x"], "1.0", True),
        (["Host: x", "Host: y"], "1.0", False),
    ],
)
async def test_a_request_names_one_host(lines: list[str], version: str, is_good: bool) -> None:
    asked = "\r\n".join([f"GET / HTTP/{version}", *lines, "Connection: close", "", ""]).encode()
    async with served(echo) as port:
        (found,) = await ask(port, asked)
        assert found.closes
        if is_good:
            assert found.echo["http_version"] == version
        else:
            assert (found.status, found.reason) == (400, "invalid_value")
            assert b"Host" in found.body


async def test_what_was_refused_has_the_headers_of_all_answers() -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 404, b"no")

    async with served(refuses, headers=[("x-of-all", "1")]) as port:
        good, refused = await ask(port, request() + b"junk\r\n\r\n")
        assert (good.status, refused.status) == (404, 400)
        assert [each.headers["x-of-all"] for each in (good, refused)] == ["1", "1"]
