"""Hostile clients against a real ``waymark query``: answered or cut, memory bounded, the others served meanwhile.

Nothing here is about speed: a client that behaves must get its right answer within seconds, however long the machine
takes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from tests.conftest import wait_until
from tests.live import Live, start
from tests.patience import patient, within

MIB = 2**20
QUERY = {"model": "m", "block_size": 2, "token_ids": [1, 2, 3, 4]}
ROW = {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}
REGISTER = {"type": "vLLM", "endpoint": "tcp://127.0.0.1:9", "model": "m", "instance_id": "i", "block_size": 2}
SECONDS = 30.0
#: Between two requests of a client that behaves: without it the processor would be his while the others wait.
PAUSE_SECONDS = 0.05


@asynccontextmanager
async def served(redis_url: str, tmp_path: Path, **settings: object) -> AsyncIterator[Live]:
    """A replica that knows one instance; while the caller misbehaves, a client that does not gets its answers."""
    async with start("query", redis_url, tmp_path / "log", **settings) as live:
        async with live.client() as client:
            assert (await client.post("/register", json=REGISTER)).status_code == 200
        await ask(live)
        is_over = asyncio.Event()
        answers = 0

        async def behave() -> None:
            nonlocal answers
            while not is_over.is_set():
                await ask(live)
                answers += 1
                await asyncio.sleep(PAUSE_SECONDS)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(behave())
            try:
                yield live
                so_far = answers
                await wait_until(lambda: answers > so_far, "a client that behaves is still answered")
            finally:
                is_over.set()
        assert answers > 1
        assert "Traceback" not in live.said()


async def ask(live: Live) -> None:
    async with live.client() as client:
        answer = await client.post("/query", json=QUERY)
    assert (answer.status_code, answer.json()) == (200, {"default": {"i": ROW}})


async def said(live: Live, *pieces: bytes) -> bytes:
    """Everything the server says to these bytes until it closes; none where it cuts without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    try:
        async with within(SECONDS):
            sending = asyncio.create_task(pour(writer, *pieces))
            try:
                answer = bytearray()
                while piece := await reader.read(65536):
                    answer += piece
                return bytes(answer)
            except ConnectionError:
                return bytes(answer)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
    finally:
        writer.close()


async def pour(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()


def status(answer: bytes) -> int:
    """The status of a raw answer; 0 where there is none."""
    return int(answer[9:12]) if answer else 0


def head(path: str = "/query", *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: waymark", "content-type: application/json", *fields, "", ""]
    return "\r\n".join(lines).encode()


def whole(body: bytes, *fields: str, path: str = "/query") -> bytes:
    return head(path, f"content-length: {len(body)}", "connection: close", *fields) + body


# ---- bodies ----------------------------------------------------------------------------------------


async def test_bodies_over_the_limit_and_bodies_nobody_can_read(redis_url: str, tmp_path: Path) -> None:
    text = b'{"model": "m", "block_size": 2, "token_ids": %b}'
    bodies = {
        b"[" * 200_000: 400,
        b'{"a":' * 100_000: 400,
        text % b"[9223372036854775808]": 400,
        text % b"[18446744073709551616]": 400,
        text % b"[NaN]": 400,
        text % b"[-Infinity]": 400,
        text % b"[1e400]": 400,
        json.dumps(QUERY).encode("utf-16"): 400,
        json.dumps(QUERY).encode("utf-32-le"): 400,
        text.replace(b"m", b"\xe9", 1) % b"[1]": 400,
        b"\x1f\x8b\x08\x00" + bytes(100): 400,
        b"": 400,
        b'{"model": "x", "model": "m", "block_size": 2, "token_ids": [1, 2, 3, 4]}': 200,
        b'{"model": "m", "block_size": 2, "token_ids": [1], "token_ids": [true]}': 400,
    }
    async with served(redis_url, tmp_path, max_body_bytes=2 * MIB) as live:
        before = await live.memory()
        for body, expected in bodies.items():
            for path in ("/query", "/dynamo/query") if expected == 400 else ("/query",):
                answer = await said(live, whole(body, path=path))
                assert status(answer) in (expected, 422 if path.startswith("/dynamo") else expected), body[:40]
        # Declared: refused before a byte of it; chunked: at the limit. The sender may learn it by a reset only.
        assert status(await said(live, head("/query", f"content-length: {2 * MIB + 1}"))) == 413
        assert status(await said(live, head("/query", "content-length: " + "9" * 18))) == 413
        assert status(await said(live, head("/query", "content-length: " + "9" * 100))) == 400
        assert status(await said(live, head("/query", "content-length: -1"))) == 400
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        assert status(await said(live, head("/query", "transfer-encoding: chunked"), *[chunk] * 1600)) in (0, 413)
        assert await live.memory() - before < 64 * MIB


@pytest.mark.parametrize("media_type", ["application/json", "application/msgpack"])
async def test_small_things_that_become_large_are_not_parsed(redis_url: str, tmp_path: Path, media_type: str) -> None:
    count = 5 * MIB
    bodies = {
        "application/json": b'{"x": [' + b"{}," * count + b"0]}",
        "application/msgpack": b"\x81\xa1x\xdd" + count.to_bytes(4, "big") + b"\x80" * count,
    }
    body = bodies[media_type]
    fields = [
        "POST /query HTTP/1.1",
        "host: waymark",
        f"content-type: {media_type}",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    async with served(redis_url, tmp_path) as live:
        before = await live.memory()
        answer = await said(live, "\r\n".join([*fields, "", ""]).encode() + body)
        assert status(answer) == 413
        assert b"262144 lists and objects" in answer
        assert await live.memory() - before < 96 * MIB


async def test_bodies_together_have_a_ceiling(redis_url: str, tmp_path: Path) -> None:
    body = b" " * (MIB - 1)
    limits = {"max_body_bytes": MIB, "request_seconds": 60}
    async with served(redis_url, tmp_path, **limits) as live:
        before = await live.memory()
        async with asyncio.TaskGroup() as tasks:
            # All but the last byte of each, a hundred MiB in all.
            answers = [
                tasks.create_task(said(live, head("/query", f"content-length: {MIB}"), body)) for _ in range(100)
            ]

            async def has_cut() -> bool:
                return await live.metric("waymark_http_connections_cut_total", reason="bodies") >= 80

            await wait_until(has_cut, "all but a few bodies are cut", SECONDS)
            # The server counts a cut before its client has read the answer.
            await wait_until(lambda: sum(answer.done() for answer in answers) >= 80, "clients have read it", SECONDS)
            assert await live.memory() - before < 64 * MIB
            for answer in answers:
                if not answer.done():
                    answer.cancel()
        refusals = [answer.result() for answer in answers if not answer.cancelled()]
        assert len(refusals) >= 80
        assert {status(refusal) for refusal in refusals} <= {0, 503}


# ---- slowness --------------------------------------------------------------------------------------


async def test_what_trickles_is_cut(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path, request_seconds=min(2.5, patient(0.7))) as live:

        async def trickle(first: bytes, drop: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", live.port)

            async def drip() -> None:
                while True:
                    await pour(writer, drop)
                    await asyncio.sleep(0.1)

            await pour(writer, first)
            dripping = asyncio.create_task(drip())
            try:
                async with within(SECONDS):
                    return await reader.read()
            except ConnectionError:
                return b""
            finally:
                dripping.cancel()
                await asyncio.gather(dripping, return_exceptions=True)
                writer.close()

        slow = {
            "body": (head("/query", "content-length: 100000"), b" "),
            "chunks": (head("/query", "transfer-encoding: chunked"), b"1\r\n \r\n"),
            "head": (b"POST /query HTTP/1.1\r\n", b"a: b\r\n"),
            "field": (b"POST /query HTTP/1.1\r\na: ", b"b"),
            "path": (b"GET /", b"a"),
            "rest of a refused body": (head("/nope", "content-length: 100000"), b" "),
        }
        answers = await asyncio.gather(*(trickle(*each) for each in slow.values()))
        assert [status(answer) for answer in answers] == [408, 408, 408, 408, 408, 404]
        assert orjson.loads(answers[0].partition(b"\r\n\r\n")[2])["reason"] == "unavailable"
        assert await said(live) == b"", "a connection on which nothing comes is closed without a word"
        assert await live.metric("waymark_http_connections_cut_total", reason="slow") == len(slow) + 1


async def test_answers_that_are_not_taken_are_thrown_away(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path, request_seconds=min(2.5, patient(0.7))) as live:
        async with live.client() as client:
            for rank in range(100):
                wide = {"model": "wide", "lora_name": "l" * 4000, "additionalsalt": "s" * 4000, "dp_rank": rank}
                answer = await client.post("/register", json=REGISTER | wide | {"instance_id": "wide"})
                assert answer.status_code == 200
        before = await live.memory()
        writers = []
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", live.port, limit=1024)
            await pour(writer, b"GET /services HTTP/1.1\r\nhost: w\r\n\r\n" * 16)
            writers.append(writer)

        async def are_cut() -> bool:
            return await live.metric("waymark_http_connections_cut_total", reason="unread") == len(writers)

        await wait_until(are_cut, "whoever does not read is cut", SECONDS)
        assert await live.memory() - before < 128 * MIB
        for writer in writers:
            writer.close()


# ---- heads and connections -------------------------------------------------------------------------


async def test_floods_of_headers_are_cut_at_a_size(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as live:
        before = await live.memory()
        begin = b"POST /query HTTP/1.1\r\nhost: w\r\n"
        assert status(await said(live, begin, *[b"a: b\r\n" * 1000] * 100)) in (0, 431)
        assert status(await said(live, begin + b"a: b\r\n" * 101)) == 431
        assert status(await said(live, begin + b"a: " + b"b" * 33_000)) == 431
        floods = {
            "a field without end": [begin + b"a: ", *[b"b" * 65536] * 500],
            "a name without end": [begin, *[b"b" * 65536] * 500],
            "a path without end": [b"GET /", *[b"b" * 65536] * 500],
            "a chunk's extension without end": [
                head("/query", "transfer-encoding: chunked"),
                b"1;",
                *[b"b" * 65536] * 500,
            ],
            "a trailer without end": [
                head("/query", "transfer-encoding: chunked") + b"1\r\n \r\n0\r\na: ",
                *[b"b" * 65536] * 500,
            ],
        }
        answers = await asyncio.gather(*(said(live, *pieces) for _ in range(8) for pieces in floods.values()))
        assert {status(answer) for answer in answers} <= {0, 400, 431}
        for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 1000, b"GET / HTTP/9.9\r\n\r\n"):
            assert status(await said(live, nonsense)) == 400
        smuggled = begin + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        assert status(await said(live, smuggled)) == 400
        assert await live.memory() - before < 64 * MIB


async def test_requests_sent_ahead_are_bounded(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as live:
        few = await said(
            live,
            b"GET /health HTTP/1.1\r\nhost: w\r\n\r\n" * 8
            + b"GET /health HTTP/1.1\r\nhost: w\r\nconnection: close\r\n\r\n",
        )
        assert few.count(b"HTTP/1.1 200 OK") == 9
        before = await live.memory()
        floods = [said(live, *[b"GET /health HTTP/1.1\r\nhost: w\r\n\r\n" * 5000] * 20) for _ in range(20)]
        await asyncio.gather(*floods)
        assert await live.metric("waymark_http_connections_cut_total", reason="ahead") == 20
        assert await live.memory() - before < 64 * MIB


async def test_thousands_of_connections_that_say_nothing(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path, connections_max=500, request_seconds=60) as live:
        before = await live.memory()
        silent: list[asyncio.StreamWriter] = []
        for _ in range(40):
            opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", live.port) for _ in range(50)))
            silent += [writer for _, writer in opened]

        async def are_cut() -> bool:
            return await live.metric("waymark_http_connections_cut_total", reason="connections") >= 1500

        await wait_until(are_cut, "the oldest of two thousand connections are cut", SECONDS)
        assert await live.metric("waymark_http_connections") <= 500
        assert await live.memory() - before < 64 * MIB
        for writer in silent:
            writer.close()


async def test_thousands_of_queries_at_once_are_all_answered(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as live:
        request = whole(orjson.dumps(QUERY | {"token_ids": list(range(2000))}))
        answers = await asyncio.gather(*(said(live, request) for _ in range(3000)))
        assert {status(answer) for answer in answers} == {200}
        assert {answer.partition(b"\r\n\r\n")[2] for answer in answers} == {orjson.dumps({"default": {"i": ROW}})}


#: What the JDK's HTTP client adds to its first request to an http:// address.
H2C = ("Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA", "Upgrade: h2c")


async def test_what_proper_clients_send_besides_is_answered(redis_url: str, tmp_path: Path) -> None:
    query = orjson.dumps(QUERY)
    row = orjson.dumps({"default": {"i": ROW}})
    length = f"content-length: {len(query)}"
    async with served(redis_url, tmp_path) as live:
        upgrade = head("/query", length, *H2C) + query
        assert (await said(live, upgrade * 3 + whole(query))).count(row) == 4
        junk = await said(live, head("/query", length) + query + b"\x00\x01 no request\r\n\r\n")
        assert junk.count(row) == 1
        assert b"HTTP/1.1 400" in junk
        no_length = await said(live, head("/query"), query)
        assert status(no_length) == 411
        assert orjson.loads(no_length.partition(b"\r\n\r\n")[2])["reason"] == "missing"
        assert status(await said(live, b"GET /health HTTP/1.1\r\n\r\n")) == 400
        assert status(await said(live, b"GET /health HTTP/1.0\r\n\r\n")) == 200


async def test_a_token_behind_a_body_lets_nobody_in(redis_url: str, tmp_path: Path) -> None:
    body = orjson.dumps(REGISTER)
    chunked = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    asked = head("/register", "transfer-encoding: chunked", "connection: close") + chunked
    async with start("query", redis_url, tmp_path / "log", api_token="secret") as live:
        assert status(await said(live, asked + b"authorization: Bearer secret\r\n\r\n")) == 401
        given = asked.replace(b"connection: close", b"connection: close\r\nauthorization: Bearer secret")
        assert status(await said(live, given + b"\r\n")) == 200
        assert await live.metric("waymark_http_trailer_fields_dropped_total") == 1
