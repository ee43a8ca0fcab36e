"""An API server of Kubernetes that lies: versions that are always gone, pages without an end, watches of nonsense."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.conftest import wait_until
from tests.discovery.api_server import pod
from tests.hostile.attacker import Attacker, expect
from tests.hostile.engine_server import GOOD
from tests.hostile.raw_server import Answer, Pieces, RawServer, chunked, http
from tests.listening import listening

_MIB = 2**20
GONE = http(b'{"kind": "Status", "code": 410}', status="410 Gone")
#: So many requests in a second and a half are no attack on the API server: one list has several pages.
REQUESTS_MAX = 40
LIE_SECONDS = 1.5
#: Until a new pod is registered, once it is said.
RIGHT_SECONDS = 5.0


def pods(*items: Any, version: str = "1", following: str = "") -> bytes:
    metadata = {"resourceVersion": version} | ({"continue": following} if following else {})
    return json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}).encode()


def event(kind: str, item: Any) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def watched(*lines: bytes) -> Pieces:
    """A watch that says this, and ends."""
    return chunked(*lines, kind="application/json")


class ApiServer(Attacker):
    async def _prepare(self) -> None:
        self.server = RawServer(self._truth)
        await self.stack.enter_async_context(listening(self.server.handler, self.target["api_port"]))
        engine = RawServer(lambda path, _: [http(GOOD[path])] if path in GOOD else [http(b"", status="404 x")])
        await self.stack.enter_async_context(listening(engine.handler, self.target["engine_port"]))
        self._true = 0

    def _true_pod(self) -> dict[str, Any]:
        """The latest pod of an address that all of them have in turn: of two, the one that started later counts."""
        return pod(
            f"true-{self._true}", "127.0.0.1", started=f"2026-01-01T{self._true // 60:02}:{self._true % 60:02}:02Z"
        )

    @staticmethod
    def _is_watch(path: str) -> bool:
        return "watch" in parse_qs(urlsplit(path).query)

    async def _truth(self, path: str, body: bytes) -> Pieces:
        if self._is_watch(path):
            await asyncio.sleep(0.2)
            # Whoever has listed lies, and watches now, is told by the watch.
            mark = event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "2"}})
            return watched(event("ADDED", self._true_pod()) + mark)
        return [http(pods(self._true_pod()))]

    async def _lie(self, lists: Answer, watches: Answer | None = None, *, most: int = REQUESTS_MAX) -> None:
        """Say this for a while, then the truth, which has to be known soon."""
        before = self.server.asked

        def answer(path: str, body: bytes) -> Any:
            return (watches or self._truth)(path, body) if self._is_watch(path) else lists(path, body)

        self.server.answer = answer
        await asyncio.sleep(LIE_SECONDS * self.part)
        asked = self.server.asked - before
        self._true += 1
        self.server.answer = self._truth
        expect(asked <= most, f"{asked} requests in {LIE_SECONDS} s")
        await self._is_known(f"serving/true-{self._true}")

    async def _is_known(self, instance: str) -> None:
        """A new pod is registered soon after the server has begun to tell the truth."""

        async def is_registered() -> bool:
            async with self.http.get(self.target["url"] + "/services") as answer:
                return instance.encode() in await answer.read()

        await wait_until(is_registered, f"{instance} is registered", RIGHT_SECONDS)

    async def versions_that_are_gone(self) -> None:
        def gone(path: str, body: bytes) -> Pieces:
            return [GONE]

        await self._lie(gone if self.random.random() < 0.5 else self._truth, gone)

    async def watches_that_end_at_once(self) -> None:
        pick = self.random
        error = event("ERROR", {"kind": "Status", "code": pick.choice([410, 500, "x", None])})
        ends = [
            watched(),
            watched(error),
            [b""],
            [http(b"", status="500 x")],
        ]
        await self._lie(self._truth, lambda path, body: pick.choice(ends))

    async def pages_without_end(self) -> None:
        pick = self.random
        item = pick.choice([[], [pod("again", "10.9.9.9")], [pod(f"p-{n}", f"10.1.0.{n}") for n in range(100)]])
        same = pick.choice(["same", ""])
        await self._lie(lambda path, body: [http(pods(*item, following=same or str(pick.random())))])

    async def lists_of_nonsense(self) -> None:
        pick = self.random
        deep = b"[" * 100_000 + b"]" * 100_000
        lists = [
            b"",
            b"{}",
            b"[]",
            b'{"items": 1}',
            b'{"items": [], "metadata": []}',
            b'{"items": [null, 1, "x", [], {}], "metadata": {}}',
            deep,
            b'{"metadata": {}, "items": [' + b"{}," * 2_000_000 + b"{}]}",
            os.urandom(10_000),
            b"\xef\xbb\xbf{}",
            json.dumps({"metadata": {"resourceVersion": [1], "continue": {}}, "items": []}).encode(),
            pods(pod("long", "10.9.9.9", labels={f"l{n}": "x" * 1000 for n in range(2000)})),
            b" " * (33 * _MIB),
        ]
        said = pick.choice(lists)
        await self._lie(lambda path, body: [http(said)])

    async def pods_of_wrong_types(self) -> None:
        pick = self.random
        notes = [
            {"port": "\u00b2"},
            {"port": "9" * 5000},
            {"ranks": "1024"},
            {"ranks": "1025"},
            {"block-size": "65536"},
            {"model": "x" * 5000, "block-size": "4"},
            {"model": "a\x00b", "block-size": "4"},
            {"role": "evil"},
            {"tenant": "|", "model": "m", "block-size": "4"},
            {"type": "x"},
            {"api-port": "-1"},
            {"replay-port": "0"},
        ]
        addresses = ["10.9.9.9", "127.0.0.1/evil?x=", "a b", "\x00", "::1", "[::1]", "x" * 5000, "0", "-", "%00"]
        items: list[Any] = []
        for number in range(25):
            item = pod(f"odd-{number}", pick.choice(addresses), annotations=pick.choice(notes))
            place = pick.choice([item, item["metadata"], item["status"], item["metadata"]])
            if pick.random() < 0.4:
                place[pick.choice(sorted(place))] = pick.choice([None, [], {}, 1, "x", [[]], {"a": 1}, "\x00"])
            items.append(item)
        await self._lie(lambda path, body: [http(pods(*items))])

    async def watches_of_nonsense(self) -> None:
        pick = self.random
        lines = [
            os.urandom(1000) + b"\n",
            b"\n" * 100_000,
            b"{}\n" * 50_000,
            b"[]\n",
            b"1\n",
            b'{"type": 1}\n',
            b"x" * (5 * _MIB),
            event("ADDED", None) + event("DELETED", []) + event("X" * 10_000, {}),
            event("BOOKMARK", {}),
            event("MODIFIED", pod("flap", "10.9.9.9")) * 2000,
            event("DELETED", pod("true-0")) * 10,
            b'{"type": "ADDED", "object": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        ]
        said = [pick.choice(lines) for _ in range(3)]
        # What a watch says of a pod counts until the next list; the truth is said by that.
        await self._lie(self._truth, lambda path, body: watched(*said))

    async def answers_that_are_no_http(self) -> None:
        pick = self.random
        lies: list[Pieces] = [
            [b""],
            [os.urandom(100)],
            [b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n{"],
            [b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"],
            [http(b"{}", status=pick.choice(["401 x", "403 x", "429 x", "500 x", "000 x", "999 x", "204 x"]))],
            [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n"],
        ]
        lie = pick.choice(lies)
        await self._lie(lambda path, body: lie, lambda path, body: lie)

    async def ten_thousand_pods(self) -> None:
        """In pages as they should be; no engine answers. Two lists may begin in the time, and a watch behind each."""
        items = [pod(f"many-{n}", f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}") for n in range(256, 2256)]

        def page(path: str, body: bytes) -> Pieces:
            first = int(parse_qs(urlsplit(path).query).get("continue", ["0"])[0])
            more = str(first + 100) if first + 100 < len(items) else ""
            return [http(pods(*items[first : first + 100], following=more))]

        await self._lie(page, most=2 * (len(items) // 100 + 1))
