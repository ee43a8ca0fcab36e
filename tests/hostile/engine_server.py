"""An engine that is asked: its metrics, models, sockets and tokens are whatever it likes, at registration and later."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from typing import Any

from tests.hostile.attacker import Attacker, expect
from tests.hostile.raw_server import Pieces, RawServer, http
from tests.listening import listening, port_of

_MIB = 2**20
DEEP = b"[" * 100_000 + b"]" * 100_000
DIGITS = "9" * 5000


def page(*lines: str) -> bytes:
    return "\n".join([*lines, ""]).encode()


def cache_config(labels: str) -> str:
    return f"vllm:cache_config_info{{{labels}}} 1.0"


def cards(*names: Any) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "parent": None} for name in names]}).encode()


GOOD: dict[str, bytes] = {
    "/v1/models": cards("hostile"),
    "/metrics": page("vllm:num_requests_running 0.0", cache_config('block_size="4",engine="0"')),
    "/kv_event_sources": json.dumps({"0": {"endpoint": "tcp://*:9", "replay_endpoint": None}}).encode(),
}


class EngineServer(Attacker):
    async def _prepare(self) -> None:
        self._answers: dict[str, bytes | Pieces] = {}
        self.server = RawServer(self._answer)
        self._url = f"http://127.0.0.1:{port_of(await self.stack.enter_async_context(listening(self.server.handler)))}"

    def _answer(self, path: str, body: bytes) -> Pieces:
        found = self._answers.get(path)
        if found is None:
            return [http(b"{}", status="404 Not Found")]
        return [http(found)] if isinstance(found, bytes) else found

    async def _registered(self, **more: Any) -> int:
        try:
            status, said = await self._post(
                f"{self.target['url']}/register", {"url": self._url, "tenant_id": "hostile"} | more
            )
        finally:
            await self._gone()
        expect(
            status in (200, 400, 409, 502, 503, 504), f"registration by URL is answered with {status}: {said[:300]!r}"
        )
        expect(status == 200 or b'"error"' in said, f"{status} without a sentence: {said[:300]!r}")
        return status

    async def _gone(self) -> None:
        named = {"instance_id": self._url.removeprefix("http://"), "tenant_id": "hostile"}
        status, said = await self._post(f"{self.target['url']}/unregister", named)
        expect(status in (200, 404), f"it is not unregistered: {status} {said[:300]!r}")

    async def _lie(self, **lies: bytes | Pieces) -> int:
        """Register an engine that says this, and the truth of everything else."""
        self._answers = {**GOOD, **{"/" + path.replace("__", "/"): answer for path, answer in lies.items()}}
        return await self._registered()

    # ---- metrics -----------------------------------------------------------------------------------

    def _metrics(self) -> list[bytes]:
        """Pages that cost much."""
        pick = self.random
        count = pick.choice([1000, 30_000, 300_000])
        many = ",".join(f'a{n}="b"' for n in range(count))
        quotes = pick.choice(['"', "\\", '\\"', '="', '",', "{", "}", "a", "=", " "])
        name = pick.choice(["vllm:num_requests_running", "sglang:num_queue_reqs", "vllm:lora_requests_info"])
        return [
            page(cache_config(many), f"{name}{{{many}}} 1"),
            page(f"{name} {'9' * pick.choice([4301, 65_536, 3_500_000])}"),
            page("a" * 3_500_000),
            page(cache_config(quotes * pick.choice([1000, 65_536, 3_500_000 // len(quotes)]))),
            page(f"{name}{{{quotes * pick.choice([1000, 65_536, 3_500_000 // len(quotes)])}}} 1"),
            page(*[f'{name}{{engine="{n}"}} {n}' for n in range(pick.choice([4096, 4097, 100_000]))]),
            page(*[cache_config(f'block_size="{n}"') for n in range(20_000)]),
            page(cache_config(f'block_size="{DIGITS}"')),
            page(cache_config('block_size="\u00b2"')),
            page(*[f"{name} {text}" for text in ("NaN", "+Inf", "1e400", "-1e400", "0x10", "1_0", "")]),
            page(f'vllm:lora_requests_info{{max_lora="{DIGITS}",running_lora_adapters="{"a," * 300_000}"}} 1'),
            os.urandom(100_000),
            b"\n" * 3_000_000,
            page("# HELP " + "x" * 3_000_000, f"# TYPE {name} {'y' * 1000}", f"{name} 1 {DIGITS}"),
        ]

    async def metrics_at_registration(self) -> None:
        for text in self._some(self._metrics(), 5):
            await self._lie(metrics=text)

    async def metrics_of_an_engine_that_turns(self) -> None:
        """It was registered long ago, and is scraped."""
        self._answers = dict(GOOD)
        status, said = await self._post(f"{self.target['url']}/register", {"url": self._url, "tenant_id": "hostile"})
        expect(status == 200, f"an engine without fault is not registered: {status} {said[:300]!r}")
        for text in self._some(self._metrics(), 2):
            self._answers["/metrics"] = text
            before = self.server.asked
            for _ in range(100):
                if self.server.asked > before:
                    break
                await asyncio.sleep(0.02)
        await self._gone()

    # ---- what it is --------------------------------------------------------------------------------

    async def sources_of_wrong_types(self) -> None:
        pick = self.random
        ends = [
            "tcp://*:5557",
            "tcp://*:99999",
            "tcp://*:-1",
            "ipc:///etc/passwd",
            "x",
            "",
            "tcp://*:\u00b2",
            "a\x00b",
            "tcp://[::1]:1",
            "tcp://" + "h" * _MIB + ":1",
            "tcp://169.254.169.254:80",
            "tcp://*:" + DIGITS,
        ]
        ranks = ["0", "\u00b2", DIGITS, "-1", "1023", "1024", "0x1", "", "\u0661"]
        documents: list[Any] = [
            {rank: {"endpoint": pick.choice(ends), "replay_endpoint": pick.choice([*ends, None, 1])} for rank in ranks},
            {str(rank): {"endpoint": f"tcp://*:{rank + 1}"} for rank in range(pick.choice([1024, 1025, 30_000]))},
            [{"endpoint": pick.choice(ends), "dp_rank": pick.choice([0, -1, True, 10**18, None])} for _ in range(50)],
            {"sources": pick.choice([[], {}, [None], [[]], {"0": []}])},
            {"0": {"endpoint": [], "publisher": {}}},
        ]
        for document in self._some(documents, 3):
            await self._lie(kv_event_sources=json.dumps(document).encode())
        long_number = json.dumps([{"endpoint": "tcp://*:1", "rank": 0}]).replace(" 0", " " + DIGITS)
        for raw in (DEEP, b'{"0":' * 20_000, long_number.encode(), b'{"0": {"endpoint": "\\ud800"}}', b"\xff\xfe[]"):
            await self._lie(kv_event_sources=raw)

    async def models_of_wrong_types(self) -> None:
        pick = self.random
        names: list[Any] = ["", "x" * 256, "x" * 257, "a\x00b", "\u202e", "a|b", "a\nb", 1, None, [], {}]
        await self._lie(v1__models=cards(*names))
        await self._lie(v1__models=cards(*(f"m{n}" for n in range(pick.choice([256, 257, 40_000])))))
        for raw in (b'{"data": [{"id": "\\ud800"}]}', DEEP, b'{"data": {}}', b"[]", b"", b'{"data": [[]]}'):
            await self._lie(v1__models=raw)
        lists = b'{"data": [' + b"{}," * 1_000_000 + b"{}]}"
        await self._lie(v1__models=lists)

    async def servers_of_wrong_types(self) -> None:
        """SGLang's ``/server_info``."""
        pick = self.random
        values: list[Any] = [0, -1, 1, 2**63, 10**30, 1.5, True, None, "16", [], {}, "\x00", "x" * 10_000]
        for _ in range(self._times(6)):
            events = {"endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 16, "dp_size": 1}
            server: dict[str, Any] = {"served_model_name": "hostile", "page_size": 16, "kv_events": events}
            for chosen in (events, server):
                name = pick.choice(sorted(chosen))
                chosen[name] = pick.choice(values)
            self._answers = {"/v1/models": cards("hostile"), "/server_info": json.dumps(server).encode()}
            await self._registered()

    # ---- HTTP itself -------------------------------------------------------------------------------

    async def answers_that_are_no_http(self) -> None:
        pick = self.random
        bomb = gzip.compress(bytes(200 * _MIB), 1) if pick.random() < 0.3 else gzip.compress(bytes(20 * _MIB), 1)
        loop = f"HTTP/1.1 302 Found\r\nlocation: {self._url}/metrics\r\ncontent-length: 0\r\n\r\n".encode()
        elsewhere = b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
        lies: list[Pieces] = [
            [b""],
            [os.urandom(1000)],
            [loop],
            [elsewhere],
            [http(b"{}", status="000 x")],
            [http(b"{}", status="999 x")],
            [http(b"{}", status="101 x")],
            [b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000],
            [http(bomb, "content-encoding: gzip")],
            [b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", b"x" * _MIB],
            [b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}"],
            [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"ffffffffffffffff\r\n", b"x" * 1000],
            [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50_000 + b"\r\n"],
            [b"HTTP/1.1 200 OK\r\na: " + b"b" * _MIB + b"\r\n\r\n"],
            [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 65536] * 100],
            [b"HTTP/1.1 200 OK\r\nset-cookie: \xff\x00\r\n\r\n{}"],
        ]
        for lie in self._some(lies, 6):
            path = pick.choice(sorted(GOOD))
            self._answers = dict(GOOD) | {path: lie}
            await self._registered()

    async def answers_that_trickle(self) -> None:
        """Longer than anybody waits: several at once, so that they take the time of one."""
        self._answers = dict(GOOD) | {"/metrics": [http(bytes(1000))[n : n + 1] for n in range(200)]}
        self.server.pause = 0.05
        try:
            await asyncio.gather(*(self._registered() for _ in range(5)))
        finally:
            self.server.pause = 0.0

    # ---- tokens ------------------------------------------------------------------------------------

    async def tokens_of_wrong_types(self) -> None:
        """The engine makes the tokens of its model; what it says is none of a prompt's, or too much."""
        pick = self.random
        self._answers = dict(GOOD)
        status, said = await self._post(f"{self.target['url']}/register", {"url": self._url, "tenant_id": "hostile"})
        expect(status == 200, f"an engine without fault is not registered: {status} {said[:300]!r}")
        many = b"[" + b"1," * pick.choice([10_000, 4_000_000, 12_000_000]) + b"1]"
        found: list[bytes] = [
            many,
            b"[true]",
            b"[-1]",
            b"[4294967296]",
            b"[1.5]",
            b'["1"]',
            b"[null]",
            b"[[1]]",
            b"{}",
            b'"abc"',
            b"1",
            b"[" + DIGITS.encode() + b"]",
            DEEP,
            b"[1e400]",
            b"[" + b"{}," * 1_000_000 + b"1]",
        ]
        for tokens in [*self._some(found, 6), many]:
            for path in ("/tokenize", "/v1/chat/completions/render"):
                name = b"tokens" if path == "/tokenize" else b"token_ids"
                self._answers[path] = b'{"%b": %b, "count": 1, "max_model_len": 4096}' % (name, tokens)
            body = {"model": "hostile", "tenant_id": "hostile", "prompt": f"hello {pick.random()}"}
            status, said = await self._post(f"{self.target['url']}/query", body)
            is_list = tokens.startswith(b"[1,") and b"{" not in tokens and len(tokens) < 50_000
            if status == 200 and not is_list and tokens is not many:
                expect(False, f"tokens {tokens[:50]!r} are taken: {said[:200]!r}")
        await self._gone()
