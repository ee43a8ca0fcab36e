"""What an application sends is on the wire what HTTP wants; what uvicorn makes of it says the same."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tests.patience import within
from tests.serving.wire import LAST, answers, ask, post, request, served, wire
from waymark.api.http import answers as api_answers
from waymark.serving import cycle
from waymark.serving.connection import HttpConnection

WHOLE = {"type": cycle.WHOLE, "content_type": b"text/plain", "body": b"ok"}
LENGTH_2 = (b"content-length", b"2")
START: dict[str, Any] = {"type": "http.response.start", "status": 200}
BODY: dict[str, Any] = {"type": "http.response.body", "body": b"ok"}
USUAL = [START | {"headers": [(b"content-type", b"text/plain"), LENGTH_2]}, BODY]
GOOD: dict[str, list[dict[str, Any]]] = {
    "/last": USUAL,
    "/usual": USUAL,
    "/refused": [START | {"status": 404, "headers": [(b"content-length", b"0")]}, BODY | {"body": b""}],
    "/unknown-status": [START | {"status": 599, "headers": [LENGTH_2]}, BODY],
    "/without-length": [START | {"headers": []}, BODY],
    "/without-headers": [START, BODY],
    "/without-content": [START | {"status": 204, "headers": []}, BODY | {"body": b""}],
    "/in-pieces": [START | {"headers": []}, BODY | {"more_body": True}, BODY],
    "/in-pieces-and-an-empty-end": [START, BODY | {"more_body": True}, {"type": "http.response.body"}],
    "/pieces-of-a-length": [START | {"headers": [(b"content-length", b"4")]}, BODY | {"more_body": True}, BODY],
    "/closes-and-says-so-elsewhere": [
        START | {"headers": [LENGTH_2, (b"x-connection", b"close"), (b"connection", b"close"), (b"x-note", b"a")]},
        BODY,
    ],
    "/closes": [START | {"headers": [LENGTH_2, (b"connection", b"close")]}, BODY],
}
#: What breaks a rule before anything is on the wire.
BROKEN: dict[str, list[dict[str, Any]]] = {
    "/another-line": [START | {"headers": [LENGTH_2, (b"x-note", b"a\r\nset-cookie: b")]}, BODY],
    "/bare-line": [START | {"headers": [LENGTH_2, (b"x-note", b"a\nset-cookie: b")]}, BODY],
    "/bare-return": [START | {"headers": [LENGTH_2, (b"x-note", b"a\rb")]}, BODY],
    "/nul": [START | {"headers": [LENGTH_2, (b"x-note", b"a\x00b")]}, BODY],
    "/name-of-two-words": [START | {"headers": [LENGTH_2, (b"x note", b"a")]}, BODY],
    "/name-with-a-colon": [START | {"headers": [LENGTH_2, (b"x:note", b"a")]}, BODY],
    "/own-framing": [START | {"headers": [(b"transfer-encoding", b"chunked")]}, BODY],
    "/too-long": [START | {"headers": [(b"content-length", b"1")]}, BODY],
    "/too-short": [START | {"headers": [(b"content-length", b"3")]}, BODY],
    "/nothing": [],
    "/no-start": [BODY],
    "/two-starts": [START, START],
}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    for message in (GOOD | BROKEN | {"/whole": [WHOLE]})[scope["path"]]:
        await send(message)


#: Of framing and time, in which two servers may differ.
_OWN = frozenset({"content-length", "transfer-encoding"})


async def test_an_answer_says_what_uvicorn_says() -> None:
    async with (
        served(app, "httptools", headers=[("x-all", "1")]) as theirs,
        served(app, headers=[("x-all", "1")]) as ours,
    ):
        for path in GOOD:
            for method in ("GET", "HEAD"):
                # In one piece: some answers end the connection, and a piece that comes later may reset it.
                for asked in (request(path, method) + LAST, request(path, method, "connection: close")):
                    expected, found = [await ask(port, asked, methods=[method]) for port in (theirs, ours)]
                    assert len(found) == len(expected), (path, method)
                    for each, other in zip(found, expected, strict=True):
                        headers, others = (
                            {name: value for name, value in answer.headers.items() if name not in _OWN}
                            for answer in (each, other)
                        )
                        assert (each.status, headers, each.body) == (other.status, others, other.body), path
                        assert each.headers["x-all"] == "1"


@pytest.mark.parametrize("path", GOOD)
async def test_an_old_client_gets_no_chunks(path: str) -> None:
    async with served(app) as port:
        (found,) = await ask(port, request(path, version="1.0"))
        assert found.closes
        assert "transfer-encoding" not in found.headers
        assert found.body == b"".join(message.get("body", b"") for message in GOOD[path])


@pytest.mark.parametrize("path", BROKEN)
async def test_an_answer_that_breaks_a_rule_is_a_fault_of_the_service(path: str) -> None:
    async with served(app) as port:
        # In one piece: the connection ends after the answer, and a piece that comes later may reset it.
        (found,) = await ask(port, request(path) + LAST)
        assert (found.status, found.reason, found.closes) == (500, "internal", True)
        assert "set-cookie" not in found.headers
        if path in ("/too-long", "/too-short"):
            return  # of no body any length may be told
        (headless,) = await ask(port, request(path, "HEAD") + LAST, methods=["HEAD"])
        assert (headless.status, headless.body) == (500, b"")


async def test_what_is_sent_behind_a_whole_answer_does_not_reach_the_wire() -> None:
    async def twice(scope: Scope, receive: Receive, send: Send) -> None:
        for message in [*USUAL, BODY]:
            await send(message)

    async with served(twice) as port:
        assert [each.body for each in await ask(port, request(), LAST)] == [b"ok", b"ok"]


async def test_a_whole_answer_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads the head alone would be woken twice."""
    pieces: list[bytes] = []
    write = HttpConnection.write

    def written(self: HttpConnection, piece: bytes) -> None:
        pieces.append(piece)
        write(self, piece)

    monkeypatch.setattr(HttpConnection, "write", written)
    async with served(app) as port:
        await ask(port, request("/usual"), LAST)
    assert [piece.partition(b"\r\n\r\n")[2] for piece in pieces] == [b"ok", b"ok"]


@pytest.mark.parametrize(
    "asked",
    [
        lambda path: request(path) + LAST,
        lambda path: request(path, "HEAD") + LAST,
        lambda path: request(path, "GET", "connection: close"),
        lambda path: request(path, version="1.0"),
        lambda path: post(b"body", path=path) + LAST,
        lambda path: request(path, "POST", "content-length: 4", "expect: 100-continue"),
    ],
)
async def test_one_message_for_a_whole_answer_says_what_two_say(asked: Callable[[str], bytes]) -> None:
    async with served(app) as port:
        assert await wire(port, asked("/whole")) == await wire(port, asked("/usual"))


async def test_nothing_follows_a_whole_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def twice(_: Scope, __: Receive, send: Send) -> None:
        await send(WHOLE)
        await send(WHOLE)

    async with served(twice) as port:
        (answer,) = await ask(port, LAST)
    assert (answer.status, answer.body) == (200, b"ok")
    assert "request failed" in caplog.text


async def test_what_follows_an_answer_before_its_request_was_whole() -> None:
    """The rest of the body is thrown away, and is no request."""

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        for message in USUAL:
            await send(message)

    async with served(refuses) as port:
        asked = post(request("/usual"))
        assert len(await ask(port, asked[:-20], asked[-20:], LAST)) == 2
        expecting = request("/", "POST", "content-length: 5", "expect: 100-continue")
        (only,) = await ask(port, expecting, LAST)
        assert only.closes, "whether the client sends the body now, nobody knows"


async def test_a_client_that_expects_it_is_told_to_go_on() -> None:
    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        while message["more_body"]:
            message = await receive()
        for message in USUAL:
            await send(message)

    async with served(reads) as port:
        for version, is_told in (("1.1", True), ("1.0", False)):
            head = request(
                "/", "POST", "content-length: 2", "expect: 100-Continue", "connection: close", version=version
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with within(20):
                writer.write(head)
                if is_told:
                    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(b"ab")
                assert [each.status for each in answers(await reader.read())] == [200]
            writer.close()
            told = await wire(port, head + b"ab")
            assert told.startswith(b"HTTP/1.1 200"), "the body has come already"


async def test_a_request_leaves_nothing_for_the_garbage_collector() -> None:
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        gc.collect()
        gc.disable()
        left = []
        try:
            for _ in range(3):  # what other tests have left may become garbage in one round, and not in each
                for _ in range(100):
                    writer.write(request("/usual"))
                    async with within(20):
                        await reader.readuntil(b"ok")
                left.append(gc.collect())
            assert min(left) < 100, left
        finally:
            gc.enable()
            writer.close()


def test_both_sides_have_the_same_name_of_a_whole_answer() -> None:
    """They share no module; with two names each answer would be two messages."""
    assert api_answers._WHOLE == cycle.WHOLE


async def test_an_answer_that_ends_with_the_connection_is_reset_where_it_fails() -> None:
    """To a client of HTTP/1.0 half of it would be all of it."""

    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("the rest is lost")

    async with served(fails) as port:
        with pytest.raises(ConnectionResetError):
            await wire(port, request("/", "GET", version="1.0"))
        assert b"0\r\n\r\n" not in await wire(port, request())
