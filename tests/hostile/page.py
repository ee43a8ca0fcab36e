"""A page of another site in the browser of somebody who may reach the API, and a browser that is no browser."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from tests.hostile.attacker import Attacker, expect
from tests.patience import within

#: What a foreign page can make a browser send without asking the server first.
FOREIGN = [
    {"content-type": "text/plain", "origin": "http://evil.example"},
    {"content-type": "application/x-www-form-urlencoded", "origin": "http://evil.example"},
    {"content-type": "multipart/form-data; boundary=x", "origin": "null"},
    {"origin": "http://evil.example"},
    {"content-type": "", "origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "empty"},
    {"content-type": "application/json", "origin": "http://evil.example", "sec-fetch-site": "cross-site"},
]
HONEST: dict[str, Any] = {"instance_id": "honest", "tenant_id": "honest", "model": "m", "dp_rank": 0}
WRITES: dict[str, dict[str, Any]] = {
    "/unregister": HONEST,
    "/register": {**HONEST, "instance_id": "planted", "type": "vLLM", "endpoint": "tcp://127.0.0.1:9", "block_size": 4},
    "/events": {"event_id": 10**9, "event_type": "cleared", "backend_id": "honest", "tenant_id": "honest"},
    "/weight": {**HONEST, "weight": 0},
}
DEPTHS = [63, 64, 65, 127, 128, 253, 254, 255, 256, 1000, 1024, 1025, 100_000]
PATHS = [
    "/ui",
    "/ui/",
    "/ui/cells.js",
    "/docs",
    "/openapi.json",
    "/activity",
    "/workers",
    "/services",
    "/status",
    "/inspect/holders",
    "/inspect/prompt",
    "/metrics",
    "/health",
    "/",
    "//",
    "/%00",
    "/ui/%2e%2e/%2e%2e/etc/passwd",
    "/ui/../../etc/passwd",
    "/" + "a" * 8000,
    "/ui/\xff",
    "/inspect/" + "%ff" * 100,
    "/activity?after=" + "9" * 5000,
]


class Page(Attacker):
    async def _send(self, method: str, path: str, body: bytes = b"", **fields: str) -> tuple[int, bytes]:
        lines = [f"{method} {path} HTTP/1.1", "host: waymark", f"content-length: {len(body)}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {text}" for name, text in fields.items()]
        said = await self._said(self.target["port"], "\r\n".join([*lines, "", ""]).encode("latin-1") + body, seconds=5)
        status = int(said[9:12]) if said[9:12].isdigit() else 0
        expect(status != 500, f"{method} {path[:100]} is answered with {said[-300:]!r}")
        return status, said

    async def writes_from_another_site(self) -> None:
        """None of them may be taken; what they would change is asked for beside."""
        for path, body in WRITES.items():
            for fields in FOREIGN:
                status, said = await self._send("POST", path, json.dumps(body).encode(), **fields)
                expect(status >= 400, f"POST {path} of another site's page with {fields} is taken: {said[-200:]!r}")
        async with self.http.get(self.target["url"] + "/services") as answer:
            expect(b"planted" not in await answer.read(), "another site's page has registered an engine")

    async def paths_of_nonsense(self) -> None:
        pick = self.random
        for _ in range(self._times(60)):
            method = pick.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "X" * 50, "get"])
            query = pick.choice(
                [
                    "",
                    "?",
                    "?a=b&a=c",
                    "?%zz",
                    "?model=%00",
                    "?tenant_id=" + "x" * 5000,
                    "?limit=-1",
                    "?limit=" + "9" * 5000,
                ]
            )
            body = pick.choice([b"", b"{}", b"[]", os.urandom(100)])
            path = pick.choice(PATHS)
            if path.startswith("/activity"):
                continue  # it never ends; see below
            _, said = await self._send(
                method, path + query, body, content_type=pick.choice(["", "application/json", "\x7f"])
            )
            expect(b"root:" not in said, f"{method} {path} shows a file of the machine")

    async def followers_that_do_not_read(self) -> None:
        """More of them than may follow, from absurd places on."""
        pick, writers = self.random, []
        for _ in range(80):
            _, writer = await asyncio.open_connection("127.0.0.1", self.target["port"], limit=1024)
            last = pick.choice(["", "0-0", "9" * 5000, "-1", "x", "\xff", "1-1-1"])
            head = f"GET /activity HTTP/1.1\r\nhost: w\r\naccept: text/event-stream\r\nlast-event-id: {last}\r\n\r\n"
            writer.write(head.encode("latin-1"))
            writers.append(writer)
        async with within(5):
            await asyncio.gather(*(writer.drain() for writer in writers), return_exceptions=True)
        await asyncio.sleep(0.5)
        for writer in writers:
            writer.transport.abort()

    async def bodies_that_are_deep(self) -> None:
        """Every path that takes JSON, at the depths at which parsers and writers of it give up."""
        pick = self.random
        paths = [
            "/query",
            "/query_by_hash",
            "/register",
            "/unregister",
            "/events",
            "/select",
            "/release",
            "/inspect/prompt",
            "/dynamo/query",
            "/score",
            "/tokenize",
            "/detokenize",
            "/weight",
            "/repair",
            "/policies/replay",
            "/inspect/block",
            "/inspect/holder",
            "/inspect/keys",
            "/dynamo/register",
            "/dynamo/workers",
            "/dynamo/select",
            "/dynamo/overlap_scores",
        ]
        for path in self._some(paths, 12):
            for depth in pick.sample(DEPTHS, 4):
                opened, closed = pick.choice([(b"[", b"]"), (b'{"a":', b"}")])
                deep = opened * depth + b"1" + closed * depth
                name = pick.choice([b"token_ids", b"messages", b"labels", b"model", b"tools", b"events", b"unknown"])
                await self._post(self.target["url"] + path, b'{"model": "m", "block_size": 4, "%b": %b}' % (name, deep))
                await self._post(
                    self.target["url"] + path,
                    b"\x81\xa1a" + b"\x91" * depth + b"\x01",
                    content_type="application/msgpack",
                )

    async def views_of_nonsense(self) -> None:
        """Views that compute over what is kept, and their parameters."""
        pick = self.random
        parameters = ["model", "tenant", "tenant_id", "since", "instance", "tokens", "limit", "x"]
        values = [
            "",
            "-1",
            "0",
            "1h",
            "24h",
            "9" * 5000,
            "1e400",
            "\u00b2h".encode().decode("latin-1"),
            "%00",
            "x" * 5000,
        ]
        for _ in range(self._times(40)):
            path = pick.choice(["/books", "/placement", "/placement/warm", "/policies/compare", "/dynamo/loads"])
            chosen = "&".join(f"{pick.choice(parameters)}={pick.choice(values)}" for _ in range(pick.randrange(5)))
            await self._send("GET", f"{path}?{chosen}")

    async def policies_that_cost(self) -> None:
        """Picker files in YAML that grow, are deep, or are none, to be tried over the kept decisions."""
        bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
            for before, after in zip("abcdefgh", "bcdefghi", strict=True)
        )
        files = [
            bomb,
            "[" * 8000,
            "{a: " * 4000,
            "- " * 8000,
            "&a [*a]",
            "!!python/object/apply:os.system ['true']",
            "kind: EndpointPickerConfig\nplugins: " + "[{type: x}, " * 1000,
            "plugins:\n" + "- type: random-picker\n" * 700,
            "\x00",
            "? " * 8000,
            "a: " + "9" * 16_000,
            "k" * 16_384,
            "k" * 16_385,
        ]
        for text in self._some(files, 6):
            status, said = await self._post(self.target["url"] + "/policies/replay", {"file": text, "since": "24h"})
            expect(status in (200, 400, 413), f"the file {text[:40]!r} is answered with {status} {said[:200]!r}")

    async def numbers_at_bounds(self) -> None:
        pick = self.random
        numbers = [
            "0",
            "-1",
            "1",
            "65536",
            "65537",
            "2147483648",
            "18446744073709551615",
            "18446744073709551616",
            "1e400",
            "1.5",
            "9" * 5000,
            "true",
            "null",
            '"1"',
            "-0",
            "1E1",
        ]
        for _ in range(self._times(60)):
            path = pick.choice(["/query", "/register", "/select", "/events", "/query_by_hash"])
            name = pick.choice(
                ["block_size", "dp_rank", "event_id", "base_block_idx", "shards", "weight", "limit", "depth"]
            )
            body = json.dumps({"model": "m", "tenant_id": "bounds", "token_ids": [1], "seq_hashes": [1], name: "PLACE"})
            await self._post(self.target["url"] + path, body.replace('"PLACE"', pick.choice(numbers)).encode())
