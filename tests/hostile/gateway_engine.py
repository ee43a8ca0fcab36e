"""An engine behind a gateway: answers that are cut short, never end, cost much, or pretend to be the gateway's."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from typing import Any

import aiohttp

from tests.hostile.attacker import CUT, Attacker, Found, expect
from tests.hostile.gateway_client import ANSWERS, EVENTS, FIELDS
from tests.hostile.raw_server import Pieces, RawServer, chunked, http
from tests.listening import listening
from tests.patience import patient

_MIB = 2**20
#: Fields of an answer that only the gateway may give.
OURS = ("x-decoder-host-port", "x-prefiller-host-port", "x-session-token", "x-waymark-decision", "x-cache")
FORGED = "forged-by-an-engine"
#: The paths whose answers are the engine's own; the tokens of a prompt are what the gateway asks for itself.
PATHS = sorted(FIELDS.keys() - {"/tokenize", "/v1/messages/count_tokens"})


def true_answer(path: str) -> dict[str, Any]:
    return ANSWERS.get(path, {"object": "list", "data": [{"index": 0, "score": 0.5}]})


class GatewayEngine(Attacker):
    async def _prepare(self) -> None:
        self.server = RawServer(self._answer)
        self._lie: Pieces = []
        await self.stack.enter_async_context(listening(self.server.handler, self.target["engine_port"]))

    def _answer(self, path: str, body: bytes) -> Pieces:
        return [http(b'{"tokens": [1, 2, 3]}')] if path == "/tokenize" else self._lie

    async def _asked(self, lie: Pieces, path: str | None = None, **more: Any) -> tuple[int, bytes, bool]:
        """What a client gets: status and body, and whether its connection ended well."""
        self._lie = lie
        path = path or self.random.choice(sorted(FIELDS))
        body = {"model": "hostile", **FIELDS[path], **more, "user": f"{self.random.random()}"}
        received = bytearray()
        status = 0
        try:
            async with self.http.post(self.target["url"] + path, json=body) as answer:
                status = answer.status
                forged = {
                    name: text for name, text in answer.headers.items() if FORGED in text and name.lower() in OURS
                }
                expect(not forged, f"fields that are the gateway's come from an engine: {forged}")
                expect(100 < status < 600, f"a status of {status}")
                async for piece in answer.content.iter_chunked(65536):
                    received += piece
                    if len(received) > 64 * _MIB:
                        break
        except TimeoutError:
            raise Found(f"{path} is not answered: {b''.join(lie)[:200]!r}") from None
        except CUT:
            return status, bytes(received), False
        expect(status != 500, f"{path} is answered with 500 {bytes(received[:200])!r}: {b''.join(lie)[:200]!r}")
        return status, bytes(received), True

    async def answers_that_are_cut_short(self) -> None:
        """At any byte: what has not come whole may not look whole."""
        pick = self.random
        path = pick.choice(PATHS)
        body = json.dumps(true_answer(path)).encode()
        stream = path in ("/v1/chat/completions", "/v1/completions")
        for kind in ("length", "chunks", "stream"):
            whole = chunked(*EVENTS) if kind == "stream" else chunked(body[:9], body[9:], kind="application/json")
            if kind == "length":
                whole = [http(body)]
            sent = b"".join(whole)
            begin = sent.index(b"\r\n\r\n") + 4
            if kind == "stream" and not stream:
                continue
            for at in self._some(range(begin, len(sent) - 1), 12):
                status, received, is_whole = await self._asked([sent[:at]], path, stream=kind == "stream")
                is_error = not is_whole or status >= 400 or b"error" in received
                expect(
                    is_error, f"{path} by {kind}, cut after {at} of {len(sent)} bytes, ends well: {received[-200:]!r}"
                )

    async def streams_that_cost(self) -> None:
        """Millions of events of nothing, and lines without an end."""
        pick = self.random
        large = b'data: {"type": "response.created", "response": {"x": "' + b"a" * _MIB + b'"}}\n\n'
        streams: list[Pieces] = [
            chunked(*[b"\n\n" * 32768] * 64),
            chunked(*[b"data:\n\n" * 8192] * 64),
            chunked(*[b"data: {}\n\n" * 4096] * 64),
            chunked(*[b": x\n" * 16384] * 64),
            chunked(*[b"a" * 65536] * 200),
            chunked(*[b"data: " + b"x" * 100_000] * 50),
            chunked(*[large[n : n + 4096] for n in range(0, len(large), 4096)] * 2),
            chunked(*[b"\r" * 65536] * 50),
            chunked(b"data: " + b"[" * 200_000 + b"]" * 200_000 + b"\n\n", *EVENTS),
            chunked(b'event: response.completed\ndata: {"type": "response.completed", "response": []}\n\n'),
            chunked(
                b'data: {"type": "response.completed", "response": {"output": ' + b"[" * 250 + b"]" * 250 + b"}}\n\n"
            ),
            chunked(*EVENTS[:-1], b"data: [DONE]\n\n" * 100_000),
            chunked(os.urandom(65536)),
        ]
        for stream in self._some(streams, 4):
            await self._asked(
                stream, pick.choice(["/v1/responses", "/v1/chat/completions", "/v1/messages"]), stream=True
            )

    async def two_large_events(self) -> None:
        """Two events of a MB, in the pieces in which a slow engine sends them."""
        event = b'data: {"type": "response.output_text.delta", "delta": "' + b"a" * self._times(1_000_000) + b'"}\n\n'
        pieces = [event[n : n + 512] for n in range(0, len(event), 512)]
        await self._asked(chunked(*pieces, *pieces, b"data: [DONE]\n\n"), "/v1/responses", stream=True)

    async def streams_of_single_bytes(self) -> None:
        """Two events of a MiB in pieces of a few bytes would need more patience than an attacker has."""
        event = b'data: {"type": "response.output_text.delta", "delta": "' + b"a" * self._times(150_000) + b'"}\n\n'
        pieces = [event[n : n + 37] for n in range(0, len(event), 37)]
        await self._asked(chunked(*pieces, b"data: [DONE]\n\n"), "/v1/responses", stream=True)

    async def answers_that_are_no_http(self) -> None:
        pick = self.random
        body = json.dumps(ANSWERS["/v1/chat/completions"]).encode()
        forged = [f"{name}: {FORGED}" for name in OURS]
        lies: list[Pieces] = [
            [b""],
            [os.urandom(1000)],
            *(
                [http(body, status=status)]
                for status in ("000 x", "099 x", "101 Switching Protocols", "999 x", "200", "204 x", "304 x", "-1 x")
            ),
            [http(body, *forged)],
            [http(body, *(line.upper() for line in forged))],
            [b"HTTP/1.1 200 OK\r\n x-decoder-host-port: " + FORGED.encode() + b"\r\ncontent-length: 2\r\n\r\n{}"],
            [b"HTTP/1.1 200 OK\r\na: b\r\n x-session-token: " + FORGED.encode() + b"\r\ncontent-length: 2\r\n\r\n{}"],
            [b"HTTP/1.1 200 OK\r\nx-session-token : " + FORGED.encode() + b"\r\ncontent-length: 2\r\n\r\n{}"],
            [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}"],
            [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}"],
            [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"],
            [b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, http(body)],
            [b"HTTP/1.1 103 Early Hints\r\nx-session-token: " + FORGED.encode() + b"\r\n\r\n", http(body)],
            [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"\r\n"],
            [b"HTTP/1.1 200 OK\r\na: " + b"b" * _MIB + b"\r\n\r\n"],
            [http(gzip.compress(bytes(50 * _MIB), 1), "content-encoding: gzip")],
            [http(b"x" * 100, "content-encoding: gzip")],
            [b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n"],
            [b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\nset-cookie: \xff\r\ncontent-length: 2\r\n\r\n{}"],
        ]
        for lie in self._some(lies, 10):
            await self._asked(lie, "/v1/chat/completions", stream=pick.random() < 0.3)

    async def answers_of_wrong_types(self) -> None:
        """JSON that is kept, counted or read by the gateway."""
        pick = self.random
        values: list[Any] = [None, True, -1, 10**400, 1.5, "", "x", [], {}, [[]], [None], {"a": []}]
        for _ in range(self._times(15)):
            path = pick.choice(["/v1/responses", "/v1/responses", *PATHS])
            answer: dict[str, Any] = {**true_answer(path), "usage": {"prompt_tokens": 1, "input_tokens": 1}}
            answer[pick.choice(sorted(answer))] = pick.choice(values)
            raw = json.dumps(answer).encode()
            deep = pick.choice([64, 254, 255, 1000, 50_000])
            raw = pick.choice(
                [raw, raw, b"[" * deep + b"]" * deep, raw[:-1] + b',"x":' + b"[" * deep + b"]" * deep + b"}"]
            )
            await self._asked([http(raw)], path)
        large = b'{"id": "r", "status": "completed", "output": [' + b"{}," * 1_500_000 + b"{}]}"
        await self._asked([http(large)], "/v1/responses")

    async def answers_that_are_slow(self) -> None:
        """Some at once: one that says nothing, and some that say a byte now and then."""

        async def silent() -> Pieces:
            await asyncio.sleep(patient(0.8))
            return []

        whole = http(json.dumps(ANSWERS["/v1/chat/completions"]).encode())
        before = self.server.answer
        self.server.answer = lambda path, body: silent() if b"silent" in body else [whole[n : n + 1] for n in range(40)]
        self.server.pause = 0.02
        url = self.target["url"] + "/v1/chat/completions"

        async def ask(text: str) -> None:
            body = {"model": "hostile", "messages": [{"role": "user", "content": text}], "n": self.random.random()}
            try:
                async with self.http.post(url, json=body, timeout=aiohttp.ClientTimeout(patient(20))) as answer:
                    await answer.read()
            except CUT:
                pass

        try:
            await asyncio.gather(*(ask(text) for text in ["silent", "slow", "slow"] * self._times(10)))
        finally:
            self.server.pause, self.server.answer = 0.0, before
