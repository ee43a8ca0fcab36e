"""A client of a gateway: bodies of any type and depth, requests that stop halfway, answers that nobody reads."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from tests.hostile.attacker import Attacker, expect
from tests.hostile.raw_server import Pieces, RawServer, chunked, http
from tests.listening import listening
from tests.patience import within

_MIB = 2**20
FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [],
        "stream": False,
        "stream_options": {},
        "seed": 1,
        "temperature": 0,
        "max_tokens": 5,
        "stop": ["x"],
        "n": 1,
        "metadata": {},
        "response_format": {},
        "user": "u",
        "logit_bias": {},
        "truncate_prompt_tokens": None,
        "chat_template_kwargs": {},
    },
    "/v1/completions": {"prompt": "hello", "max_tokens": 5, "echo": False, "suffix": "", "n": 1, "stream": False},
    "/v1/embeddings": {"input": "hello", "encoding_format": "float", "dimensions": 3},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hello"}],
        "system": "be brief",
        "max_tokens": 5,
        "tools": [],
        "metadata": {},
        "stop_sequences": [],
        "thinking": {},
        "stream": False,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": "hello"}],
        "instructions": "",
        "previous_response_id": None,
        "store": True,
        "metadata": {},
        "tools": [],
        "stream": False,
        "include": [],
        "reasoning": {},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}], "system": "", "tools": []},
    "/v1/rerank": {"query": "hello", "documents": ["a", "b"], "top_n": 1, "return_documents": True},
    "/v2/rerank": {"query": "hello", "documents": ["a", "b"], "top_n": 1},
    "/v1/score": {"text_1": "hello", "text_2": ["a", "b"]},
    "/pooling": {"input": ["hello"], "dimensions": 3},
    "/classify": {"input": ["hello"]},
    "/tokenize": {"prompt": "hello", "add_special_tokens": True},
    "/v1/audio/speech": {"input": "hello", "voice": "v", "stream_format": "audio"},
}
FORMS = ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations"]


#: Names by which an engine is told where to copy from, and answers which decision it was: no client may set them.
OURS = ("x-waymark-decision", "x-decoder-host-port", "x-kv-cache-source-host-port", "x-prefiller-host-port")
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]},
    "/v1/completions": {"choices": [{"index": 0, "text": "hi"}]},
    "/v1/embeddings": {"data": [{"index": 0, "embedding": [0.5]}]},
    "/v1/messages": {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}]},
    "/v1/responses": {"id": "resp_1", "object": "response", "status": "completed", "output": []},
}
EVENTS = [b'data: {"choices": [{"index": 0, "text": "hi", "delta": {"content": "hi"}}]}\n\n'] * 3 + [
    b"data: [DONE]\n\n"
]


_MARK = "10.6.6.6"


def head(path: str, content: bytes, *fields: str, kind: str | None = "application/json") -> bytes:
    """The head of a request with a body."""
    lines = [f"POST {path} HTTP/1.1", "host: w", f"content-length: {len(content)}", *fields]
    lines += [] if kind is None else [f"content-type: {kind}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class GatewayClient(Attacker):
    """The engine of its model is its own, and does no wrong."""

    async def _prepare(self) -> None:
        self._engine = RawServer(self._answer)
        await self.stack.enter_async_context(listening(self._engine.handler, self.target["engine_port"]))

    @staticmethod
    def _answer(path: str, body: bytes) -> Pieces:
        if b'"stream": true' in body:
            return chunked(*EVENTS)
        return [http(json.dumps(ANSWERS.get(path, {"tokens": [1, 2, 3]})).encode())]

    async def _ask(self, path: str, body: Any, **headers: str) -> int:
        status, said = await self._post(self.target["url"] + path, body, **headers)
        expect(status < 500 or status in (502, 503, 504), f"{path} is answered with {status} {said[:200]!r}")
        return status

    def _value(self, depth: int = 0) -> Any:
        pick = self.random
        simple: list[Any] = [
            None,
            True,
            0,
            -1,
            2**64,
            10**400,
            1.5,
            float("nan"),
            "",
            "x" * 10_000,
            "\x00",
            "\ud800",
            "é",
        ]
        if depth < 4:
            simple += [[self._value(depth + 1)] * pick.choice([0, 1, 3]), {"": self._value(depth + 1)}]
        return pick.choice(simple)

    async def fields_of_wrong_types(self) -> None:
        pick = self.random
        for _ in range(self._times(120)):
            path = pick.choice(sorted(FIELDS))
            body = {"model": pick.choice(["hostile", "not-there", self._value()]), **FIELDS[path]}
            for _ in range(pick.choice([1, 2])):
                body[pick.choice(sorted(body))] = self._value()
            await self._ask(path, body)

    async def bodies_that_are_deep(self) -> None:
        """Each field of each path, at the depths at which parsers and writers of JSON give up."""
        pick = self.random
        for path, fields in FIELDS.items():
            for name in self._some(sorted(fields), min(3, len(fields))):
                depth = pick.choice([63, 64, 65, 126, 127, 128, 252, 253, 254, 255, 256, 500, 1000, 1025, 100_000])
                opened, closed = pick.choice([(b"[", b"]"), (b'{"a":', b"}")])
                inner = opened * depth + b"1" + closed * depth
                body = json.dumps({"model": "hostile", **fields, name: "PLACE"}).encode()
                status = await self._ask(path, body.replace(b'"PLACE"', inner))
                expect(status < 500, f"{path} with {name} of depth {depth} is {status}")

    async def bodies_that_cost(self) -> None:
        pick = self.random
        bodies = [
            b'{"model": "hostile", "messages": [' + b"{}," * pick.choice([2**18 - 3, 2**18, 3_000_000]) + b"{}]}",
            b'{"model": "hostile", "prompt": [' + b"1," * 2_000_000 + b"1]}",
            b'{"model": "hostile", "messages": [{"role": "user", "content": "' + b"a" * (15 * _MIB) + b'"}]}',
            b'{"model": "hostile", "messages": [{"role": "user", "content": "' + b"\\u00e9" * _MIB + b'"}]}',
            b"{" + b",".join(b'"k%d": 1' % n for n in range(200_000)) + b"}",
            b'{"model": "' + b"m" * 100_000 + b'", "messages": []}',
            os.urandom(_MIB),
            b" " * (17 * _MIB),
        ]
        for body in self._some(bodies, 4):
            await self._ask(pick.choice(["/v1/chat/completions", "/v1/completions", "/v1/responses"]), body)

    async def forms_of_nonsense(self) -> None:
        """Bodies of several parts with a file, whose boundary, parts or names are wrong."""
        pick = self.random
        model = b'content-disposition: form-data; name="model"\r\n\r\nhostile\r\n'
        file = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n' + os.urandom(1000) + b"\r\n"
        cut = b"--b\r\n"
        bodies = [
            cut + model + cut + file + b"--b--\r\n",
            cut + model,
            cut * 100_000,
            cut + b"content-disposition: form-data; name=" + b"x" * 100_000 + b"\r\n\r\n",
            cut + b"a: b\r\n" * 100_000 + b"\r\n",
            (cut + model) * 20_000 + b"--b--",
            b"--b--",
            b"",
            os.urandom(100_000),
            b"-" * 2_000_000,
            cut + b'content-disposition: form-data; name="model"\r\n\r\n' + b"m" * 1_000_000 + b"\r\n--b--",
            cut + b'content-disposition: form-data; name="model"; filename="\xff\x00"\r\n\r\n\xff\r\n--b--',
        ]
        for body in self._some(bodies, 6):
            boundary = pick.choice(["b", '"b"', "", "x" * 5000, '"', "b; boundary=c"])
            await self._ask(pick.choice(FORMS), body, content_type=f"multipart/form-data; boundary={boundary}")

    async def requests_that_stop_halfway(self) -> None:
        """Clients that go away within the head, within the body, and before or within the answer."""
        pick = self.random
        body = {"model": "hostile", "stream": pick.random() < 0.5, "messages": [{"role": "user", "content": "again"}]}
        content = json.dumps(body).encode()
        whole = head("/v1/chat/completions", content) + content

        async def stop(at: int, read: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.target["port"])
            try:
                async with within(10):
                    writer.write(whole[:at])
                    await writer.drain()
                    if read:
                        await reader.read(read)
            except OSError:
                pass
            finally:
                writer.transport.abort()

        ends = [(pick.randrange(len(whole) + 1), 0) for _ in range(self._times(30))]
        ends += [(len(whole), pick.choice([0, 1, 300])) for _ in range(self._times(30))]
        await asyncio.gather(*(stop(*each) for each in ends))

    async def heads_that_mislead(self) -> None:
        pick = self.random
        content = json.dumps({"model": "hostile", "messages": [{"role": "user", "content": "x"}]}).encode()
        fields = [
            "content-length: 5\r\ncontent-length: 6",
            "transfer-encoding: chunked\r\ncontent-length: 3",
            "transfer-encoding: gzip, chunked",
            "x-request-id: " + "a" * 5000,
            "x-session-token: " + "a" * 3000,
            "x-session-token: \xff",
            "anthropic-beta: a\r\n" * 50 + "a: b",
            "authorization: Bearer " + "a" * 10_000,
            *(f"{name}: {_MARK}:1" for name in OURS),
            "content-encoding: gzip",
            "expect: 100-continue",
            "upgrade: h2c\r\nconnection: upgrade",
            "host : x",
            "content-type: application/json; charset=utf-16",
            "x-tenant: \x01",
            "te: trailers",
            "connection: host",
        ]
        for field in self._some(fields, 8):
            stored = "/v1/responses/" + pick.choice(["x", "%00", "a" * 5000, "../.."])
            whole = head(pick.choice([*FIELDS, "/v1/models", stored]), content, field, "connection: close", kind=None)
            said = await self._said(self.target["port"], whole + content, seconds=8)
            status = said[9:12]
            expect(status not in (b"500", b"501"), f"a head with {field[:80]!r} is answered with {said[:200]!r}")
        forged = [name for fields in self._engine.heads for name in OURS if _MARK in fields.get(name, "")]
        expect(not forged, f"a client's own fields went on to the engine: {forged[:3]}")

    async def answers_that_nobody_reads(self) -> None:
        content = json.dumps({"model": "hostile", "stream": True, "prompt": f"{self.random.random()}"}).encode()
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", self.target["port"], limit=1024)
            writer.write(head("/v1/completions", content) + content)
            writers.append(writer)
        await asyncio.sleep(0.5)
        for writer in writers:
            writer.transport.abort()

    async def many_at_once(self) -> None:
        """Equal requests of the cache whose leader goes away, and conversations that nobody has."""
        pick = self.random
        equal = {
            "model": "hostile",
            "messages": [{"role": "user", "content": f"same {pick.random()}"}],
            "temperature": 0,
        }
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(self._ask("/v1/chat/completions", equal))
            others = [tasks.create_task(self._ask("/v1/chat/completions", equal)) for _ in range(60)]
            await asyncio.sleep(0.005)
            first.cancel()
        expect({each.result() for each in others} == {200}, "equal requests are not all answered")
        unknown: list[Any] = ["resp_x", "", "\x00", "r" * 257, "../x", 1, {}]
        for name in unknown:
            status = await self._ask("/v1/responses", {"model": "hostile", "input": "x", "previous_response_id": name})
            expect(status < 500, f"previous_response_id {name!r} is {status}")
