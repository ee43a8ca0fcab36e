"""The straight way of the server: the same answers as through ASGI, to the last byte, and the same bounds."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import pytest

from tests.api.conftest import MakeClient, hold_blocks
from tests.api.http.test_lists import NOT_BELIEVED, PLAIN, UNUSUAL
from tests.conftest import wait_until
from tests.patience import patient, patient_settings, within
from tests.proxy import Proxy, proxy_to
from tests.serving.wire import SECONDS, connections, served, wire
from tests.test_asgi import STRAIGHT
from waymark.api import access_log, operations
from waymark.api import first as first_questions
from waymark.api.application import create_app
from waymark.api.http.bodies import decode
from waymark.base.asgi import Answering, RawHeaders, StraightQuestion, StraightRequest, StraightTable
from waymark.base.errors import Contended, RecordDamaged, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide import selector
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.names import GroupName
from waymark.runtime import parts
from waymark.serving.connection import protocol
from waymark.store.redis.read_connection import ReadConnection
from waymark.store.steps import Steps, Waiting
from waymark.store.store import Store

PATHS = ("/query", "/query_by_hash", "/dynamo/query", "/dynamo/query_by_hash")
TOKENS = list(range(1, 601))
"""A prompt of 300 blocks, so that one request for rows is not enough."""
HASHES = extend(None, token_bytes(TOKENS), 2)
LOCAL = [extend(None, token_bytes(TOKENS[i : i + 2]), 2)[0] for i in range(0, 600, 2)]

#: Elements of a list of token ids or hashes: some are right for one of them, some for none.
ELEMENTS = [
    *(b"0", b"1", b"-1", b"-0", b"01", b"1.0", b"1e3", b"4294967295", b"4294967296", b"18446744073709551615"),
    *(b"18446744073709551616", b"-9223372036854775808", b"-9223372036854775809", b"123456789012345678901234567890"),
    *(b"true", b"null", b'"1"', b'"-1"', b'"x"', b'""', b'"18446744073709551615"', b'" 1"', b"[1]", b'{"a":1}', b""),
    *(b"[", b"1,", b"1 2", b'"\\u0031"', b"\xff", b"NaN", b"[[[[]]]]"),
]
#: Lists, in place of their elements.
LISTS = [b"7", b'"1,2"', b"{}", b"true", b"1.5", b"null", b"[]", b'""', b"[1,2]]"]

#: Fields beside the prompt of a query in the root API, and in the Dynamo API.
BESIDE: list[dict[str, Any]] = [
    {},
    {"instance_id": "a"},
    {"instance_id": "nobody"},
    {"tenant_id": "nobody"},
    {"tenant_id": ""},
    {"tenant_id": 7},
    {"model": "unknown"},
    {"model": ""},
    {"model": None},
    {"model": "x" * 5000},
    {"model_name": "other", "model": "m"},
    {"block_size": 2},
    {"block_size": 0},
    {"block_size": 3},
    {"block_size": "2"},
    {"block_size": True},
    {"by": "address"},
    {"by": "nothing"},
    {"cache_salt": "s"},
    {"additionalsalt": "s"},
    {"lora_name": "sql"},
    {"explain": True},
    {"explain": False},
    {"unknown": [[], {}, "größer", "\ud7ff"]},
    {"features": []},
    {"prompt": "text"},
    {"messages": [{"role": "user", "content": "text"}]},
    {"routing_group": "default"},
]


def bodies() -> Iterator[bytes]:
    """JSON bodies, right and wrong."""
    yield from (*PLAIN, *UNUSUAL, *NOT_BELIEVED)
    yield from (b"", b"{}", b"[]", b"7", b"null", b"{", b'{"a":}', b"\xff", b"[" * 3000, b"\x81\xa5model\xa1m")
    names = (b"token_ids", b"tokens", b"seq_hashes", b"block_hash", b"block_hashes")
    for name in names:
        head = b'{"model":"m","model_name":"m","block_size":2,"%b":' % name
        yield from (head + b"[5,%b,6]}" % element for element in ELEMENTS)
        yield from (head + value + b"}" for value in LISTS)
    for more in BESIDE:
        for prompt in ({"token_ids": TOKENS}, {"seq_hashes": HASHES}, {"block_hashes": LOCAL}, {"token_ids": [9, 9]}):
            asked = {"model": "m", "model_name": "m", "block_size": 2} | prompt | more
            yield json.dumps({name: value for name, value in asked.items() if value is not None}).encode()
            if "block_size" not in more:
                yield json.dumps({name: value for name, value in asked.items() if name != "block_size"}).encode()


def packed_bodies() -> Iterator[bytes]:
    """Bodies in msgpack, right and wrong."""
    for name, value in (("token_ids", TOKENS), ("seq_hashes", HASHES), ("block_hashes", LOCAL)):
        width = 4 if name == "token_ids" else 8
        binary = b"".join(number.to_bytes(width, "little") for number in value)
        for each in (value, binary, binary[:-1], b"", tuple(value), {"a": 1}, msgpack.ExtType(5, b"x"), "text", None):
            body: bytes = msgpack.packb({"model": "m", "model_name": "m", "block_size": 2, name: each})
            yield body
            yield body[:-1]
            yield body + b"\x00"


@dataclass
class Recorded:
    """A straight question that says what became of its requests."""

    question: StraightQuestion
    said: list[str]

    def open(self, headers: RawHeaders) -> StraightRequest | None:
        request = self.question.open(headers)
        return None if request is None else _RecordedRequest(request, self.said)


@dataclass
class _RecordedRequest:
    request: StraightRequest
    said: list[str]
    answering: Answering | None = None

    def begin(self, body: bytes, answering: Answering) -> None:
        self.answering = answering
        self.said.append("begun")
        self.request.begin(body, self)

    def disconnected(self) -> bool:
        is_forgotten = self.request.disconnected()
        if is_forgotten:
            self.said.append("disconnected")
        return is_forgotten

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        assert self.answering is not None
        self.said.append("replied")
        answering, self.answering = self.answering, None
        answering.reply(status, media_type, headers, body)

    def pass_on(self, pause: Any = None) -> None:
        assert self.answering is not None
        self.said.append("passed on")
        self.answering.pass_on(pause)

    def fail(self, error: BaseException) -> None:
        assert self.answering is not None
        self.answering.fail(error)


@dataclass
class Way:
    """A server of the application."""

    port: int
    metrics: Metrics
    said: list[str] = field(default_factory=list)
    """What became of the requests on the straight way, in turn."""
    table: StraightTable = field(default_factory=dict)
    """The straight questions themselves."""
    _kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    """The connection of ``ask``."""

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"waymark_{name}", labels) or 0.0

    async def post(self, path: str, body: bytes, *lines: bytes) -> bytes:
        """The answer on a connection of its own."""
        return await wire(self.port, request(path, body, *lines, b"connection: close"))

    async def ask(self, sent: bytes) -> bytes:
        """The answer on a connection that stays, as most clients have it; to open one takes as long as a question."""
        if self._kept is None:
            self._kept = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._kept
        writer.write(sent)
        async with within(SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            answer = head + await reader.readexactly(int(length[1]))
        if b"connection: close" in head:
            self.close()
        return answer

    def close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None


def request(path: str, body: bytes, *lines: bytes) -> bytes:
    sent = (
        lines if any(b"content-type" in line.lower() for line in lines) else (b"content-type: application/json", *lines)
    )
    if not any(b"transfer-encoding" in line.lower() for line in lines):
        sent = (*sent, b"content-length: %d" % len(body))
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n%b" % (path.encode(), b"\r\n".join(sent), body)


@asynccontextmanager
async def way(store: Store, *, is_straight: bool, **settings: Any) -> AsyncIterator[Way]:
    given = Settings(**patient_settings() | settings)
    asker = parts.asker(given)
    metrics = Metrics()
    app = create_app(store, parts.api_options(given), parts.selection_options(given), metrics, asker=asker)
    said: list[str] = []
    table = {path: Recorded(question, said) for path, question in app.straight.items()} if is_straight else None
    try:
        async with served(app, protocol(connections(metrics, straight=table)), interface="asgi3") as port:
            made = Way(port, metrics, said, app.straight)
            try:
                yield made
            finally:
                made.close()
    finally:
        await asker.close()


@pytest.fixture
async def store(redis_url: str, make_client: MakeClient) -> AsyncIterator[Store]:
    """A store in which ``a`` has the prompt, and ``7``, which the Dynamo API shows too, has half of it."""
    store = Store.open(redis_url, timeout_seconds=patient(2.0))
    client = await make_client(store)
    seqs = count(1)
    for instance_id, blocks in (("a", 300), ("7", 150)):
        body = {"type": "vLLM", "endpoint": "tcp://10.0.0.1:5557", "modelname": "m", "block_size": 2}
        assert (await client.post("/register", json=body | {"instance_id": instance_id})).status_code == 200
        await hold_blocks(store, seqs, instance_id, TOKENS, blocks=range(blocks))
    yield store
    await store.close()


@pytest.fixture
async def ways(store: Store) -> AsyncIterator[tuple[Way, Way]]:
    """The straight way, and the ordinary one."""
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(way(store, is_straight=each)) for each in (True, False)]
        yield both[0], both[1]


_ID = re.compile(rb"x-request-id: [^\r]*")


async def same(ways: tuple[Way, Way], path: str, body: bytes, *lines: bytes, is_kept: bool = False) -> bytes:
    """The answer, which is the same on both ways; ``is_kept``: on connections that stay."""
    if is_kept:
        found = [await each.ask(request(path, body, *lines)) for each in ways]
    else:
        found = [await each.post(path, body, *lines) for each in ways]
    straight, ordinary = [_ID.sub(b"x-request-id", each) for each in found]
    assert straight == ordinary, (path, body[:300], lines)
    assert straight.startswith(b"HTTP/1.1 ")
    return straight


def are_read(path: str, body: bytes) -> bool:
    """Whether the question reads the hashes of the body, or its tokens; to others they are unknown fields."""
    return path.endswith("by_hash") == (b"_hash" in body)


@pytest.mark.long
async def test_every_body_has_the_same_answer_on_both_ways(ways: tuple[Way, Way], implementation: str) -> None:
    """Most have fields beside the prompt that an earlier one had, too, and which are known then. Of the bodies whose
    list the question does not read, one in seven is asked: whatever is in the list, it is an unknown field.
    """
    seen = set()
    texts = ((body,) for body in islice(bodies(), 0, None, 1 if implementation == "native" else 3))
    packed = ((body, b"content-type: application/msgpack") for body in packed_bodies())
    for number, (body, *lines) in enumerate((*texts, *packed)):
        for path in PATHS:
            if number % 7 == 0 or are_read(path, body):
                seen.add((await same(ways, path, body, *lines, is_kept=True))[9:12])
    assert {b"200", b"400", b"404", b"413", b"422"} >= seen >= {b"200", b"400", b"404", b"422"}
    straight, _ = ways
    assert straight.said.count("replied") > 0.8 * straight.said.count("begun")


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/query", {"token_ids": TOKENS}),
        ("/query_by_hash", {"seq_hashes": HASHES}),
        ("/dynamo/query", {"token_ids": TOKENS}),
        ("/dynamo/query_by_hash", {"block_hashes": LOCAL}),
    ],
)
async def test_what_the_first_rows_decide_needs_nothing_else(
    store: Store, ways: tuple[Way, Way], path: str, prompt: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of which the fields, the group and the length are known; of others, its prompt may be another one."""
    straight, _ = ways
    body, other = (
        json.dumps({"model": "m", "model_name": "m", "block_size": 2} | {name: numbers[:length]}).encode()
        for length in (300, 7)
        for name, numbers in prompt.items()
    )
    for _ in range(5):  # so that the first portion becomes a large one
        answers = [await same(ways, path, each) for each in (body, other)]
    assert b'"7"' in answers[0]
    counted = "query_round_trips_sum"
    before = straight.value(counted)
    monkeypatch.setattr(store.reader, "reading", lambda *_, **__: pytest.fail("the general way"))
    assert [await straight.post(path, each) for each in (body, other)] == answers
    assert straight.value(counted) == before + 2


@pytest.mark.parametrize("access_log", [False, True])
@pytest.mark.parametrize("path", ["/query", "/select"])
async def test_an_answered_request_does_not_wait_for_the_garbage_collector(
    store: Store, path: str, access_log: bool
) -> None:
    """Its body would, too, and a prompt may be long."""
    asked, left = request(path, json.dumps({"model": "m", "token_ids": TOKENS}).encode()), []
    async with way(store, is_straight=True, loads_ms=10_000, access_log=access_log) as straight:
        reader, writer = await asyncio.open_connection("127.0.0.1", straight.port)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):  # what is done beside may leave something in one round, and not in each
                for _ in range(40):
                    writer.write(asked)
                    async with within(SECONDS):
                        head = await reader.readuntil(b"\r\n\r\n")
                        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                left.append(gc.collect())
        finally:
            gc.enable()
            writer.close()
        assert straight.said.count("replied") == 120
    assert min(left) < 40, left


DECISIONS = ("/select", "/score")
#: Fields of a decision beside its prompt.
OF_DECISION: list[dict[str, Any]] = [
    {},
    {"reserve": False},
    {"only": ["a"]},
    {"only": ["nobody"]},
    {"exclude": ["a", "7"]},
    {"policy": "sticky"},
    {"policy": "lmetric", "overrides": {"host_credit": 2}},
    {"policy": "longest", "overrides": {"wait_max": -1}},
    {"policy": "least-word"},
    {"overrides": {"new_weight": 1}},
    {"count": 2, "by": "address"},
    {"session_token": "Nw=="},
    {"session_token": "?"},
    {"profile": "disagg"},
    {"timeout_seconds": 0},
    {"prefix_hash": "ab" * 16},
    {"candidates": [{"instance_id": "a"}, {"instance_id": "7", "requests": 5}]},
    {"candidates": [{"instance_id": "nobody"}]},
    {"explain": True},
]


def decision_bodies() -> Iterator[bytes]:
    yield from islice(bodies(), 0, None, 3)
    for more in OF_DECISION:
        for prompt in (
            {"token_ids": TOKENS},
            {"token_ids": [9, 9]},
            {},
            {"messages": [{"role": "user", "content": "x"}]},
        ):
            yield json.dumps({"model": "m"} | prompt | more).encode()


def packed_decision_bodies() -> Iterator[bytes]:
    """Decisions in msgpack: each list as numbers and as a binary, and each further field."""
    yield from packed_bodies()
    for more in ({"model": "unknown"}, *OF_DECISION):
        for prompt in ({"token_ids": TOKENS}, {"token_ids": token_bytes(TOKENS)}, {"seq_hashes": HASHES}, {}):
            body: bytes = msgpack.packb({"model": "m"} | prompt | more)
            yield body


@pytest.mark.long
async def test_every_decision_has_the_same_answer_on_both_ways(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are read for each decision, and equal targets are taken in the same order."""
    monkeypatch.setattr(selector, "Random", lambda: Random(7))
    seen = set()
    async with (
        way(store, is_straight=True, loads_ms=0) as straight,
        way(store, is_straight=False, loads_ms=0) as ordinary,
    ):
        packed = ((body, b"content-type: application/msgpack") for body in packed_decision_bodies())
        for body, *lines in (*((body,) for body in decision_bodies()), *packed):
            for path in DECISIONS:
                answers = [await decided(each, path, body, *lines) for each in (straight, ordinary)]
                assert answers[0] == answers[1], (path, body[:300], lines)
                seen.add((answers[0][9:12], bool(lines)))
    for is_packed in (False, True):
        statuses = {status for status, of_packed in seen if of_packed is is_packed}
        assert {b"200", b"400", b"404", b"413", b"503"} >= statuses >= {b"200", b"400", b"404", b"503"}
    assert straight.said.count("replied") > 0.8 * straight.said.count("begun")


RELEASE, GONE = "/release", "1.1.3.3.5f0c2a9e11d04b7c"
#: Releases in turn, each of new reservations: ``@R`` is the first one, and ``@S`` another one of the same target.
RELEASES: list[Any] = [
    {"reservation": "@R"},
    {"reservation": "@R", "part": "prefill", "ttft_ms": 20},
    {"reservation": "@R", "part": "renew", "timeout_seconds": 60},
    {"reservation": "@R", "outcome": "failed"},
    {"reservation": "@R", "tpot_ms": 2.5, "cached_tokens": 500, "prompt_tokens": 600, "completion_tokens": 20},
    {"reservations": ["@R", "@S"]},
    {"reservations": ["@R", GONE, "@S", "@R"]},
    {"reservations": []},
    {"reservation": GONE},
    {"reservation": "@R @S"},
    {"reservation": "@R", "reservations": ["@S"]},
    {"reservation": "@R", "part": "renew", "ttft_ms": 20},
    {"reservations": ["@R"], "ttft_ms": 20},
    {"reservation": "@R", "part": "prefill", "cached_tokens": 5},
    {"reservation": "@R", "ttft_ms": -1},
    {"reservation": "@R", "timeout_seconds": 0},
    {"reservation": "@R", "part": "none"},
    {"reservation": "@R", "unknown": [1]},
    {"reservation": "größer"},
    {"reservation": 7},
    {"reservations": ["@R"] * 1001},
    {},
    [],
    7,
]


@pytest.mark.parametrize("as_bytes", [json.dumps, msgpack.packb], ids=["json", "msgpack"])
async def test_every_release_has_the_same_answer_on_both_ways(
    ways: tuple[Way, Way], as_bytes: Callable[[Any], Any]
) -> None:
    lines = (b"content-type: application/msgpack",) if as_bytes is msgpack.packb else ()
    seen = set()
    for asked in RELEASES:
        answers = []
        for each in ways:
            made = request("/select", json.dumps({"model": "m", "token_ids": [9, 9, 9], "only": ["a"]}).encode())
            names = [re.findall(rb'"reservation":"([^"]+)', await each.ask(made))[0].decode() for _ in "RS"]
            sent = as_bytes(json.loads(json.dumps(asked).replace("@R", names[0]).replace("@S", names[1])))
            sent = sent if isinstance(sent, bytes) else sent.encode()
            answers.append([_ID.sub(b"x-request-id", await each.ask(request(RELEASE, sent, *lines))) for _ in range(2)])
            for name in names:  # what an error has left
                await each.ask(request(RELEASE, json.dumps({"reservation": name}).encode()))
        straight, ordinary = answers
        assert straight == ordinary, asked
        seen |= {straight[0][9:12], straight[1][9:12]}
    assert seen == {b"200", b"400"}
    assert ways[0].said.count("replied") == ways[0].said.count("begun")


DYNAMO_DECISIONS = ("/dynamo/select", "/dynamo/select_and_reserve")
#: Fields of a decision of the Dynamo API beside its prompt.
OF_DYNAMO: list[dict[str, Any]] = [
    {},
    {"model_name": "unknown"},
    {"selection_id": "mine"},
    {"selection_id": ""},
    {"allowed_worker_ids": [7]},
    {"allowed_worker_ids": [8]},
    {"allowed_worker_ids": []},
    {"allowed_worker_ids": ["x"]},
    {"router_config_override": {"overlap_score_weight": 2.0, "unknown": 1}},
    {"router_config_override": {"overlap_score_weight": -1}},
    {"isl_tokens": 700},
    {"isl_tokens": -1},
    {"cache_salt": "s"},
    {"lora_name": "sql"},
    {"routing_group": "nobody"},
    {"tenant_id": 7},
]


def dynamo_bodies() -> Iterator[tuple[bytes, ...]]:
    """Each with its headers."""
    packed = b"content-type: application/msgpack"
    yield from ((body,) for body in islice(bodies(), 0, None, 3))
    yield from ((body, packed) for body in packed_bodies())
    for more in OF_DYNAMO:
        for prompt in (
            {"token_ids": TOKENS},
            {"token_ids": [9, 9]},
            {"block_hashes": LOCAL, "sequence_hashes": HASHES},
            {"block_hashes": LOCAL},
            {},
        ):
            asked = {"model_name": "m"} | prompt | more
            yield (json.dumps(asked).encode(),)
            yield msgpack.packb(asked), packed


@pytest.mark.long
async def test_every_decision_of_the_dynamo_api_has_the_same_answer_on_both_ways(store: Store) -> None:
    """Loads are read for each decision."""
    seen = set()
    async with (
        way(store, is_straight=True, loads_ms=0) as straight,
        way(store, is_straight=False, loads_ms=0) as ordinary,
    ):
        for body, *lines in dynamo_bodies():
            for path in DYNAMO_DECISIONS:
                answers = [await selected(each, path, body, *lines) for each in (straight, ordinary)]
                assert answers[0] == answers[1], (path, body[:300], lines)
                seen.add((path, answers[0][9:12]))
        for each in (straight, ordinary):
            answers = [await each.post(DYNAMO_DECISIONS[1], SELECTION) for _ in range(2)]
            assert [answer[9:12] for answer in answers] == [b"200", b"409"]
            await ended(each, b"mine")
    for path in DYNAMO_DECISIONS:
        statuses = {status for of, status in seen if of == path}
        assert {b"200", b"400", b"404", b"413", b"422", b"503"} >= statuses >= {b"200", b"422", b"503"}
    assert straight.said.count("replied") == straight.said.count("begun") > 500


SELECTION = json.dumps({"model_name": "m", "token_ids": TOKENS, "selection_id": "mine"}).encode()


async def selected(way: Way, path: str, body: bytes, *lines: bytes) -> bytes:
    """The answer without an id that was made for it; what it reserves is released."""
    answer = _ID.sub(b"x-request-id", await way.ask(request(path, body, *lines)))
    # A text in JSON, or in msgpack.
    named = re.search(rb'selection_id(?:":"|\xd9[\x00-\xff]|[\xa0-\xbf])([!#-~]+)', answer)
    if named is None:
        return answer
    if path == DYNAMO_DECISIONS[1]:
        await ended(way, named[1])
    return answer if b"mine" in body else answer.replace(named[1], b"id")


async def ended(way: Way, selection_id: bytes) -> None:
    deleted = b"DELETE /dynamo/reservations/%b HTTP/1.1\r\nhost: x\r\n\r\n" % selection_id
    assert (await way.ask(deleted)).startswith(b"HTTP/1.1 200 "), selection_id


async def decided(way: Way, path: str, body: bytes, *lines: bytes) -> bytes:
    """The answer without what is random in it; what it reserves is released."""
    answer = _ID.sub(b"x-request-id", await way.ask(request(path, body, *lines)))
    # A text in JSON, or in msgpack.
    reservation = re.search(rb'reservation(?:":"|\xd9[\x00-\xff]|[\xa0-\xbf])([!#-~]+)', answer)
    if reservation is not None:
        released = await way.ask(request("/release", b'{"reservation":"%b"}' % reservation[1]))
        assert b'"released":1' in released or b'"released":2' in released, released
        answer = answer.replace(reservation[1], re.sub(rb"\.[0-9a-f]{16}", b".nonce", reservation[1]))
    return answer


@pytest.mark.parametrize(
    ("path", "fields", "usual", "without"),
    [
        ("/select", {"model": "m", "policy": "least-work"}, b'"degraded":false', b'"degraded":true'),
        ("/dynamo/select", {"model_name": "m"}, b'"longest_matched":300', b'"longest_matched":0'),
    ],
)
async def test_a_decision_without_redis_is_the_same_on_both_ways(
    proxy: Proxy, path: str, fields: dict[str, Any], usual: bytes, without: bytes
) -> None:
    body = json.dumps({"token_ids": TOKENS} | fields).encode()
    async with (
        asked_once(proxy, query_deadline_ms=1000) as straight,
        asked_once(proxy, is_straight=False, query_deadline_ms=1000) as ordinary,
    ):
        for each in (straight, ordinary):
            assert usual in await each.post(path, body)
        straight.said.clear()
        proxy.hold()
        answers = [re.sub(rb"\.[0-9a-f]{16}", b"", await each.post(path, body)) for each in (straight, ordinary)]
        assert answers[0] == answers[1]
        assert without in answers[0]
        assert straight.said == ["begun", "replied"]
        assert straight.value("http_requests_total", route=path, method="POST", status="200") == 2
        proxy.heal()


QUERY = json.dumps({"model": "m", "block_size": 2, "token_ids": TOKENS}).encode()


@pytest.mark.parametrize(
    "lines",
    [
        (b"content-type: text/plain",),
        (b"content-type: application/json; charset=utf-8",),
        (b"Content-Type: APPLICATION/JSON",),
        (b"content-encoding: gzip",),
        (b"content-encoding: identity",),
        (b"expect: 100-continue",),
        (b"x-request-id: mine",),
        (b"authorization: Bearer wrong",),
        (b"origin: http://elsewhere", b"sec-fetch-site: cross-site"),
    ],
    ids=lambda lines: lines[0].decode(),
)
async def test_every_head_has_the_same_answer_on_both_ways(ways: tuple[Way, Way], lines: tuple[bytes, ...]) -> None:
    await same(ways, "/query", QUERY, *lines)


@pytest.mark.parametrize(
    ("lines", "status", "is_taken"),
    [
        ((), b"200", True),
        ((b"sec-fetch-site: same-origin", b"origin: http://elsewhere"), b"200", True),
        ((b"origin: http://x",), b"200", True),
        ((b"origin: http://elsewhere",), b"403", False),
        ((b"origin: http://elsewhere", b"x-forwarded-host: elsewhere"), b"200", True),
        ((b"sec-fetch-site: cross-site",), b"403", False),
    ],
)
async def test_a_decision_from_another_site_is_refused_on_both_ways(
    ways: tuple[Way, Way], lines: tuple[bytes, ...], status: bytes, is_taken: bool
) -> None:
    body = json.dumps({"model": "m", "token_ids": TOKENS, "reserve": False, "policy": "least-work"}).encode()
    assert (await same(ways, "/select", body, *lines))[9:12] == status
    assert ways[0].said == (["begun", "replied"] if is_taken else [])


async def test_the_callers_of_a_tokens_file_are_the_same_on_both_ways(store: Store, tmp_path: Path) -> None:
    """A caller goes the straight way if its token is known and may use the path, also if it may not see the tenant."""
    entries: list[dict[str, Any]] = [
        {"name": "all", "tenants": ["*"], "access": "write"},
        {"name": "reads", "tenants": ["default"], "access": "read"},
        {"name": "own", "tenants": ["default"], "access": "write"},
        {"name": "other", "tenants": ["b"], "access": "write"},
    ]
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps([entry | {"sha256": sha256(entry["name"].encode()).hexdigest()} for entry in entries]))
    given = {"api_token": "root", "api_tokens_file": str(file)}
    prompts: dict[str, Any] = {
        "/query_by_hash": {"seq_hashes": HASHES},
        "/dynamo/query_by_hash": {"block_hashes": LOCAL},
    }
    prompts[RELEASE] = {"reservation": GONE}  # of a tenant that nobody may see
    writes = ("/select", RELEASE)
    async with way(store, is_straight=True, **given) as straight, way(store, is_straight=False, **given) as ordinary:
        for token in ("root", "all", "reads", "own", "other", "nobody", ""):
            for path in (*PATHS, *DECISIONS, RELEASE):
                straight.said.clear()
                lines = [b"authorization: Bearer %b" % token.encode()] if token else []
                asked = {"model": "m", "model_name": "m", "reserve": False} | prompts.get(path, {"token_ids": TOKENS})
                status = (await same((straight, ordinary), path, json.dumps(asked).encode(), *lines))[9:12]
                may_not = {
                    "other": b"200" if path == RELEASE else b"403",
                    "reads": b"403" if path in writes else b"200",
                }
                assert status == (b"401" if token in ("nobody", "") else may_not.get(token, b"200")), (token, path)
                is_taken = token not in ("nobody", "") and (token != "reads" or path not in writes)
                assert straight.said == (["begun", "replied"] if is_taken else []), (token, path)


@pytest.mark.parametrize("path", ["/query?explain=true", "/query/", "//query", "/%71uery", "/Query", "/tokenize"])
async def test_another_target_goes_the_ordinary_way(ways: tuple[Way, Way], path: str) -> None:
    await same(ways, path, QUERY)
    assert ways[0].said == []


async def test_a_body_without_a_length_goes_the_ordinary_way(ways: tuple[Way, Way]) -> None:
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(QUERY), QUERY)
    assert b"longest_matched" in await same(ways, "/query", chunked, b"transfer-encoding: chunked")
    assert ways[0].said == []


async def test_a_body_beyond_the_limit_is_refused_before_it_has_arrived(store: Store) -> None:
    async with way(store, is_straight=True, max_body_bytes=1024) as straight:
        answer = await wire(straight.port, request("/query", QUERY, b"connection: close")[:1500])
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert straight.said == []


async def test_a_long_body_in_pieces_goes_the_straight_way(ways: tuple[Way, Way]) -> None:
    """It is longer than the ordinary way reads ahead."""
    body = json.dumps({"model": "m", "block_size": 2, "token_ids": TOKENS + [7] * 100_000}).encode()
    sent = request("/query", body, b"connection: close")
    pieces = [sent[at : at + 20_000] for at in range(0, len(sent), 20_000)]
    straight, ordinary = [await wire(each.port, *pieces) for each in ways]
    assert straight == ordinary
    assert b'"longest_matched":600' in straight
    assert ways[0].said == ["begun", "replied"]


#: Each straight question with a body, and what the answer has.
USUAL: dict[str, tuple[dict[str, Any], bytes]] = {
    "/query": ({"token_ids": TOKENS}, b'"longest_matched":600'),
    "/query_by_hash": ({"seq_hashes": HASHES}, b'"longest_matched":600'),
    "/select": ({"token_ids": TOKENS}, b'"device_tokens":600'),
    "/score": ({"token_ids": TOKENS}, b'"a"'),
    RELEASE: ({"reservation": GONE}, b'"gone":1'),
    "/dynamo/query": ({"token_ids": TOKENS}, b'"longest_matched":300'),
    "/dynamo/query_by_hash": ({"block_hashes": LOCAL}, b'"longest_matched":300'),
    "/dynamo/select": ({"token_ids": TOKENS}, b'"longest_matched":300'),
}
#: Its steps have tasks: the name of a reservation is written before, and after.
NAMED = "/dynamo/select_and_reserve"


async def test_every_straight_question_is_compared_and_served_by_other_servers(store: Store) -> None:
    settings = Settings(**patient_settings())
    asker = parts.asker(settings)
    app = create_app(store, parts.api_options(settings), parts.selection_options(settings), Metrics(), asker=asker)
    await asker.close()
    straight = {path.decode() for path in app.straight}
    assert straight == {*USUAL, NAMED} == {*PATHS, *DECISIONS, RELEASE, *DYNAMO_DECISIONS} == STRAIGHT.keys()


@pytest.mark.parametrize("path", USUAL)
async def test_a_usual_request_needs_no_task(store: Store, path: str) -> None:
    asked, expected = USUAL[path]
    body = json.dumps({"model": "m", "model_name": "m", "block_size": 2} | asked).encode()
    # One decision in a hundred is kept, and a task writes it.
    async with way(store, is_straight=True, loads_ms=10_000, decisions_kept=0) as straight:
        made = await tasks_made(straight, path, body, expected)
    # These are of the process, and no request waits for them.
    assert [each for each in made if not re.search("_keep|_flush", each)] == []


async def tasks_made(straight: Way, path: str, body: bytes, expected: bytes) -> list[str]:
    """The tasks that a second request makes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", straight.port)
    made: list[str] = []

    def noted(loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        if asyncio.current_task() is None:  # what a task of the process makes while it writes is no request's
            made.append(str(coroutine))
        return asyncio.Task(coroutine, loop=loop, **named)

    async def answer() -> None:
        writer.write(request(path, body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None
        assert expected in await reader.readexactly(int(found[1]))

    await answer()
    loop = asyncio.get_running_loop()
    loop.set_task_factory(noted)
    try:
        await answer()
    finally:
        loop.set_task_factory(None)
        writer.close()
    return made


OTHERS = list(range(7_000_000, 7_000_600))


async def test_a_prompt_whose_first_rows_decide_needs_no_steps(
    ways: tuple[Way, Way], store: Store, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """Its answer is that of the steps, which go on with what the rows leave open."""
    reading = store.reader.reading
    read: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        read.append(options["start"])
        return reading(*arguments, **options)

    monkeypatch.setattr(store.reader, "reading", noted)
    straight, ordinary = ways
    for path, name in (("/query", "token_ids"), ("/query_by_hash", "seq_hashes")):
        for further in ({}, {"block_size": 2}):
            #: Each prompt in tokens, and whether its first rows decide; the first one makes the group known.
            for tokens, is_decided in (
                (TOKENS[:8], False),
                (TOKENS, False),
                (TOKENS[:100], True),
                (TOKENS[:100] + OTHERS, True),
                (OTHERS, True),
                ([], False),
            ):
                prompt = tokens if name == "token_ids" else extend(None, token_bytes(tokens), 2)
                body = json.dumps({"model": "m"} | further | {name: prompt}).encode()
                expected = await ordinary.post(path, body)
                read.clear()
                assert await straight.post(path, body) == expected
                is_cut = name == "token_ids" or implementation == "native"
                assert (read == []) == (is_decided and is_cut), (path, further, len(tokens))
                if tokens is TOKENS and is_cut:
                    (start,) = read
                    assert start.fetched is not None


async def test_requests_of_one_turn_share_a_write_and_a_read_of_redis(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients write before the server's turn, so that all eight requests arrive in it."""
    written: list[int] = []
    read: list[int] = []
    write, receive = ReadConnection._write, ReadConnection.data_received

    def counted_write(connection: ReadConnection) -> None:
        written.append(len(connection._unsent))
        write(connection)

    def counted_receive(connection: ReadConnection, data: bytes) -> None:
        before = len(connection._requests)
        receive(connection, data)
        read.append(before - len(connection._requests))

    monkeypatch.setattr(ReadConnection, "_write", counted_write)
    monkeypatch.setattr(ReadConnection, "data_received", counted_receive)
    body = json.dumps({"model": "m", "block_size": 2, "token_ids": TOKENS[:100]}).encode()
    async with way(store, is_straight=True) as straight:
        assert (await straight.post("/query", body)).startswith(b"HTTP/1.1 200 ")
        clients = [await asyncio.open_connection("127.0.0.1", straight.port) for _ in range(8)]
        await wait_until(lambda: straight.value("http_connections") == 8, "all clients are connected")
        written.clear()
        read.clear()
        for _, writer in clients:
            writer.write(request("/query", body, b"connection: close"))
        for reader, writer in clients:
            assert b'"longest_matched":100' in await reader.read()
            writer.close()
        assert written == [8]
        assert read == [8]


async def test_requests_sent_ahead_are_answered_in_order(ways: tuple[Way, Way]) -> None:
    asked = [json.dumps({"model": "m", "block_size": 2, "token_ids": TOKENS[: 2 * n]}).encode() for n in range(1, 9)]
    sent = b"".join(request("/query", body) for body in asked[:-1]) + request("/query", asked[-1], b"connection: close")
    straight, ordinary = [await wire(each.port, sent) for each in ways]
    assert straight == ordinary
    assert re.findall(rb'"a":{"longest_matched":(\d+)', straight) == [b"%d" % (2 * n) for n in range(1, 9)]
    assert ways[0].said == ["begun", "replied"], "the first is alone, as far as the server can know"


# ---- metrics, the access log -------------------------------------------------------------------------


async def test_both_ways_count_the_same(ways: tuple[Way, Way]) -> None:
    asked = [
        (path, body) for path in PATHS for body in (QUERY, b"{", b'{"model":"m","token_ids":[1.5],"block_size":2}')
    ]
    for path, body in asked * 2:
        await same(ways, path, body)
    straight, ordinary = [
        {
            line
            for line in each.metrics.render()[0].decode().splitlines()
            if line.startswith(("waymark_http_req", "waymark_quer", "waymark_text_cache", "waymark_answer_cache"))
            and not re.search("_sum|_bucket|_created", line)
        }
        for each in ways
    ]
    assert straight == ordinary
    assert len(ways[0].said) == 2 * len(straight and asked) * 2


@pytest.mark.parametrize("access_log", [False, True])
async def test_the_id_of_a_request_is_answered_on_both_ways(store: Store, access_log: bool) -> None:
    for is_straight in (True, False):
        async with way(store, is_straight=is_straight, access_log=access_log) as asked:
            for path, body, status in (("/query", QUERY, b"200"), ("/query", b"{", b"400"), (RELEASE, b"{}", b"400")):
                for sent, ids in ((b"mine-1", 1), (b"two words", 0), (None, 0)):
                    lines = () if sent is None else (b"x-request-id: %b" % sent,)
                    answer = await asked.ask(request(path, body, *lines))
                    answered = re.findall(rb"x-request-id: ([^\r]*)", answer)
                    assert (answer[9:12], len(answered)) == (status, 1 if access_log else ids)
                    assert answered == [sent] or not ids
            assert asked.said.count("replied") == (9 if is_straight else 0)


async def test_the_access_log_has_the_same_lines(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    told: list[list[dict[str, Any]]] = []
    for is_straight in (True, False):
        caplog.clear()
        async with way(store, is_straight=is_straight, access_log=True) as asked:
            with caplog.at_level(logging.INFO, "waymark.api.access_log"):
                answer = await asked.post("/query", QUERY, b"x-request-id: mine")
                assert b"x-request-id: mine\r\n" in answer
                refused = await asked.post("/query", b"{", b"x-request-id: mine")
                assert refused.startswith(b"HTTP/1.1 400 ")
                assert b"x-request-id: mine\r\n" in refused
            assert bool(asked.said) == is_straight
        lines = [vars(record)["fields"] for record in caplog.records if record.name == "waymark.api.access_log"]
        told.append([{name: value for name, value in line.items() if name != "seconds"} for line in lines])
        assert all(line["seconds"] > 0 for line in lines)
    assert told[0] == told[1]
    assert [line["status"] for line in told[0]] == [200, 400]


async def test_our_own_fault_is_500_on_both_ways(
    ways: tuple[Way, Way], store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("token 424242")

    monkeypatch.setattr(store.reader, "reading", broken)
    with caplog.at_level(logging.ERROR):
        answer = await same(ways, "/query", QUERY)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"x-request-id" in answer
    assert "424242" not in caplog.text
    assert ways[0].said == ["begun", "replied"]


# ---- bounds ------------------------------------------------------------------------------------------


@pytest.fixture
async def proxy(redis_url: str, store: Store) -> AsyncIterator[Proxy]:
    """Stands before the Redis of ``store``, which has its data."""
    async with proxy_to(redis_url.removeprefix("unix://")) as proxy:
        yield proxy


@asynccontextmanager
async def asked_once(proxy: Proxy, *, is_straight: bool = True, **settings: Any) -> AsyncIterator[Way]:
    """A server that reads through the proxy, and has cached what it needs for ``QUERY``."""
    store = Store.open(proxy.url, timeout_seconds=patient(2.0))
    try:
        async with way(store, is_straight=is_straight, **settings) as found:
            assert (await found.post("/query", QUERY)).startswith(b"HTTP/1.1 200 ")
            found.said.clear()
            yield found
    finally:
        await store.close()


async def test_a_redis_that_hangs_is_503_at_the_deadline(proxy: Proxy) -> None:
    async with (
        asked_once(proxy, query_deadline_ms=1000) as straight,
        asked_once(proxy, is_straight=False, query_deadline_ms=1000) as ordinary,
    ):
        proxy.hold()
        answer = await same((straight, ordinary), "/query", QUERY)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"did not answer within 1 s" in answer
        assert straight.said == ["begun", "replied"]
        proxy.heal()
        assert (await same((straight, ordinary), "/query", QUERY)).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_to_redis_that_is_lost_is_opened_again(proxy: Proxy) -> None:
    """The request is answered all the same: the command is sent once more."""
    async with asked_once(proxy) as straight:
        proxy.hold()
        asked = asyncio.create_task(straight.post("/query", QUERY))
        await wait_until(lambda: straight.said == ["begun"], "it is under way")
        proxy.cut()
        proxy.heal()
        assert b'"longest_matched":600' in await asked
        assert straight.said == ["begun", "replied"]


async def waiting(way: Way, *bodies: bytes, path: str = "/query") -> list[asyncio.Task[bytes]]:
    """Requests that have arrived in this order."""
    tasks = []
    for number, body in enumerate(bodies, 1 + way.said.count("begun")):
        tasks.append(asyncio.create_task(way.post(path, body)))
        await wait_until(lambda number=number: way.said.count("begun") == number, "the request has arrived")  # type: ignore[misc]
    return tasks


async def test_requests_beyond_the_places_wait_their_turn(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    async with asked_once(proxy) as straight:
        proxy.hold()
        asked = await waiting(straight, QUERY, QUERY, b"{", QUERY)
        proxy.heal()
        assert [(await each)[9:12] for each in asked] == [b"200", b"200", b"400", b"200"]
        assert straight.said == ["begun"] * 4 + ["replied"] * 4, "none needed the ordinary way"
        assert straight.value("http_requests_total", route="/query", method="POST", status="200") == 4
        assert straight.value("http_bodies_bytes") == 0


async def test_a_client_that_goes_away_while_its_request_waits_is_forgotten(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    async with asked_once(proxy) as straight:
        proxy.hold()
        first, second = await waiting(straight, QUERY, QUERY)
        _, writer = await asyncio.open_connection("127.0.0.1", straight.port)
        writer.write(request("/query", QUERY))
        await wait_until(lambda: straight.said.count("begun") == 3, "a third one waits")
        writer.close()
        await wait_until(lambda: "disconnected" in straight.said, "its client has gone")
        assert straight.value("http_requests_total", route="/query", method="POST", status="499") == 1
        assert straight.value("http_bodies_bytes") == 2 * len(QUERY)
        (last,) = await waiting(straight, QUERY)
        proxy.heal()
        for each in (first, second, last):
            assert (await each).startswith(b"HTTP/1.1 200 ")
        assert straight.said.count("replied") == 3


@pytest.mark.parametrize("access_log", [False, True])
async def test_a_waiting_request_holds_its_body_once_and_until_its_answer_or_its_client_goes(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, access_log: bool
) -> None:
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    sent = request("/query", json.dumps({"model": "m", "block_size": 2, "token_ids": list(range(100_000))}).encode())
    async with asked_once(proxy, access_log=access_log) as straight:
        proxy.hold()
        (first,) = await waiting(straight, QUERY)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            clients = [await asyncio.open_connection("127.0.0.1", straight.port) for _ in range(10)]
            for _, writer in clients:
                writer.write(sent)
            await wait_until(lambda: straight.said.count("begun") == 11, "all of them wait")
            assert 9 * len(sent) < tracemalloc.get_traced_memory()[0] < 13 * len(sent)
            for _, writer in clients[5:]:
                writer.close()
            await wait_until(lambda: straight.said.count("disconnected") == 5, "half of their clients have gone")
            assert tracemalloc.get_traced_memory()[0] < 6.5 * len(sent)
            proxy.heal()
            assert (await first).startswith(b"HTTP/1.1 200 ")
            for reader, writer in clients[:5]:
                async with within(SECONDS):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            assert tracemalloc.get_traced_memory()[0] < 3 * len(sent)
            assert straight.value("http_bodies_bytes") == 0
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_what_waits_behind_a_redis_that_hangs_is_refused_with_the_first(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    async with (
        asked_once(proxy, query_deadline_ms=1000) as straight,
        asked_once(proxy, is_straight=False, query_deadline_ms=1000) as ordinary,
    ):
        proxy.hold()
        asked = await waiting(straight, QUERY, QUERY, b"{")
        others = [asyncio.create_task(ordinary.post("/query", QUERY)) for _ in range(2)]
        refused, *later = [await each for each in asked]
        assert b"did not answer within 1 s" in refused
        assert {await each for each in others} == {refused, later[0]}, "the ordinary way refuses with the same words"
        assert all(b"earlier requests still wait for Redis" in each for each in later)
        proxy.heal()
        assert (await same((straight, ordinary), "/query", QUERY)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("error", [RecordDamaged("its holders are a text"), Contended("its publisher is in use")])
async def test_what_one_model_lacks_refuses_no_query_that_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: StoreUnavailable
) -> None:
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    go_on, read = asyncio.Event(), store.reader.reading

    def reading(group: GroupName, *arguments: Any, **options: Any) -> Steps[Any]:
        if group.model_name == "damaged":
            yield Waiting(go_on.wait())
            raise error
        return (yield from read(group, *arguments, **options))

    monkeypatch.setattr(store.reader, "reading", reading)
    async with way(store, is_straight=True) as straight:
        asked = await waiting(straight, json.dumps(json.loads(QUERY) | {"model": "damaged"}).encode(), QUERY, QUERY)
        go_on.set()
        assert [(await each)[9:12] for each in asked] == [b"503", b"200", b"200"]
        assert straight.said == ["begun"] * 3 + ["replied"] * 3


async def test_a_body_that_is_refused_unread_is_unreadable_without_redis(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    async with asked_once(proxy, query_deadline_ms=1000) as straight:
        proxy.hold()
        chosen, unreadable = await waiting(straight, QUERY, b"{", path="/select")
        assert (await chosen).startswith(b"HTTP/1.1 ")
        assert (await unreadable).startswith(b"HTTP/1.1 400 ")
        proxy.heal()


async def test_thousands_that_end_as_soon_as_they_are_admitted_end_one_after_the_other(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of each admits the next one; were that a call within a call, the interpreter would give up."""
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    async with asked_once(proxy) as straight:
        proxy.hold()
        (first,) = await waiting(straight, QUERY)
        replies: list[int] = []
        for _ in range(2 * sys.getrecursionlimit()):
            unreadable = straight.table[b"/query"].open(
                [(b"content-type", b"application/json"), (b"content-length", b"1")]
            )
            assert unreadable is not None
            unreadable.begin(b"{", Statuses(replies))
        proxy.heal()
        assert (await first).startswith(b"HTTP/1.1 200 ")
        await wait_until(lambda: len(replies) == 2 * sys.getrecursionlimit(), "all are answered")
        assert set(replies) == {400}


@dataclass
class Statuses:
    """An ``Answering`` that notes the status."""

    replies: list[int]

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        self.replies.append(status)

    def pass_on(self, pause: Any = None) -> None:
        raise AssertionError("the request needs no other way")

    def fail(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize("path", ["/query", "/score"])
async def test_the_body_of_a_text_is_read_once(
    ways: tuple[Way, Way], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies_read: list[bytes] = []

    def counted(body: bytes, *arguments: Any, **options: Any) -> Any:
        bodies_read.append(body)
        return decode(body, *arguments, **options)

    monkeypatch.setattr(operations, "decode", counted)
    body = b'{"model":"m","block_size":2,"prompt":"text"}'
    await same(ways, path, body)
    assert ways[0].said == ["begun", "passed on"]
    assert bodies_read == [body, body], "one for each way"


async def test_a_client_that_goes_away_with_its_body_is_counted(ways: tuple[Way, Way]) -> None:
    straight, _ = ways
    _, writer = await asyncio.open_connection("127.0.0.1", straight.port)
    writer.write(request("/query", QUERY)[:-10])
    await wait_until(lambda: straight.value("http_bodies_bytes") > 0, "a part of the body has arrived")
    writer.close()
    await wait_until(lambda: straight.said == ["disconnected"], "the server has seen it")
    assert straight.value("http_requests_total", route="/query", method="POST", status="499") == 1
    assert straight.value("http_bodies_bytes") == 0


async def test_a_client_that_goes_away_gives_its_place_back(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_questions, "AT_ONCE", 1)
    async with asked_once(proxy) as straight:
        proxy.hold()
        _, writer = await asyncio.open_connection("127.0.0.1", straight.port)
        writer.write(request("/query", QUERY))
        await wait_until(lambda: straight.said == ["begun"], "a request is under way")
        writer.close()
        await wait_until(lambda: straight.value("http_connections") == 0, "its client has gone")
        proxy.heal()
        await wait_until(lambda: straight.said == ["begun", "replied"], "Redis has replied")
        straight.said.clear()
        assert (await straight.post("/query", QUERY)).startswith(b"HTTP/1.1 200 ")
        assert straight.said == ["begun", "replied"], "its place is free"
        assert straight.value("http_bodies_bytes") == 0


async def test_a_request_under_way_is_answered_when_the_process_ends(proxy: Proxy) -> None:
    async with AsyncExitStack() as stack:
        straight = await stack.enter_async_context(asked_once(proxy))
        proxy.hold()
        asked = asyncio.create_task(wire(straight.port, request("/query", QUERY)))
        await wait_until(lambda: straight.said == ["begun"], "it is under way")
        ended = asyncio.create_task(stack.aclose())
        await asyncio.sleep(0)
        proxy.heal()
        answer = await asked
        await ended
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_request_whose_work_goes_on_has_no_line_before_its_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    monkeypatch.setattr(_RecordedRequest, "disconnected", lambda _: is_forgotten)
    request = access_log._LoggedRequest(_RecordedRequest(None, []), "id", "/query")  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        assert request.disconnected() is is_forgotten
    assert len(caplog.records) == is_forgotten
