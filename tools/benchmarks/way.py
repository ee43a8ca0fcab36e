"""What each part of the straight way of a query costs, without the sockets: microseconds, and calls of Python.

    python -m tools.benchmarks.way [--only hash,tokens,short,select] [--pure] [--rounds 40]

Each rung is a server of more parts, in this process, over transports that only remember: the system calls are the
same on all of them. A figure is the least of the rounds, so it means something on a busy machine, too. The caches of
the processor are warm, and a replica that waits between queries spends up to twice as much. ``select`` is a whole
decision of the prompt of ``tokens`` among eight targets, of which one has it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import hiredis
import httptools
import uvicorn
import uvloop
from uvicorn.server import ServerState

from tools.benchmarks import prompts
from tools.benchmarks.decisions import register_idle_targets
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.processes import RedisServer, redis_server, waymark
from tools.benchmarks.report import aligned
from waymark.api import path_docs as docs
from waymark.api.access_log import AccessLog
from waymark.api.application import Shortcut, create_app
from waymark.api.http.access import Gate
from waymark.api.http.admission import AT_ONCE, AdmissionQueue
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import CACHE_BYTES_MAX, Body, RequestCache
from waymark.api.operations import Dependencies
from waymark.api.straight import Straight, StraightOperation
from waymark.base import native
from waymark.base.asgi import Answering, RawHeaders, StraightTable
from waymark.base.logs import configure
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.runtime import parts
from waymark.serving.connection import HttpConnection, protocol
from waymark.serving.limits import Connections, ServerBounds
from waymark.store.redis.read_connection import ReadConnection, Replies, ReplyReceiver
from waymark.store.steps import Steps
from waymark.store.store import Store

KINDS: dict[str, tuple[str, Callable[[prompts.Prompt], bytes]]] = {
    "hash": ("/query_by_hash", prompts.by_hash),
    "tokens": ("/query", prompts.by_tokens),
    "short": ("/query", prompts.by_few_tokens),
}
SELECT = "select"
#: The targets of a decision.
TARGETS = 8
#: Queries of a round.
QUERIES = 200


class Remembering(asyncio.Transport):
    """A transport that sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


@dataclass(frozen=True)
class Exchange:
    """What passes between a client, the replica and Redis in one query."""

    path: str
    request: bytes
    asked: bytes
    replies: bytes
    answer: bytes


class Bare:
    """The floor: httptools parses, hiredis parses, and the answer is known."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parser = httptools.HttpRequestParser(self)
        self._replies = hiredis.Reader()
        self._client, self._redis = Remembering(), Remembering()
        self._pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        pass

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self._pieces = []
        self._redis.write(self._exchange.asked)

    def query(self) -> None:
        self._parser.feed_data(self._exchange.request)
        self._replies.feed(self._exchange.replies)
        while self._replies.gets() is not False:
            pass
        self._client.write(self._exchange.answer)
        self._client.written.clear()
        self._redis.written.clear()


class Served:
    """A connection of the server with a table of questions, and a connection to Redis."""

    def __init__(self, exchange: Exchange, app: Any, table: StraightTable, redis: ReadConnection) -> None:
        self._exchange, self._redis = exchange, redis
        self._client, self._asked = Remembering(), Remembering()
        self._connection = connection(app, table)
        self._connection.connection_made(self._client)
        redis._transport = self._asked

    def query(self) -> None:
        redis = self._redis
        self._connection.data_received(self._exchange.request)
        if redis._unsent:
            redis._write()
            redis.data_received(self._exchange.replies)
        assert len(self._client.written) == 1
        self._client.written.clear()
        self._asked.written.clear()


class Decided:
    """A connection of the server, and those to Redis that a decision uses one after the other."""

    def __init__(self, app: Any, store: Store, redis: RedisServer, request: bytes) -> None:
        self._store, self._redis, self._request = store, redis, request
        self._asked: list[ReadConnection] = []
        self._replies: list[bytes] = []
        self._client = Remembering()
        self._connection = connection(app, app.straight)
        self._connection.connection_made(self._client)

    async def learn(self) -> None:
        """Decide in earnest, so that the readings are young, and then keep what Redis says."""
        self._client.written.clear()
        self._connection.data_received(self._request)
        while not self._client.written:  # noqa: ASYNC110  # a few turns of a loop that has nothing else to do
            await asyncio.sleep(0.001)
        self._client.written.clear()
        self._replies.clear()
        reads = self._store.reader._client.reads
        assert reads is not None
        assert reads.scripts.connection is not None
        self._asked = [read_connection(self._store), reads.scripts.connection]
        with self.silent():
            self._connection.data_received(self._request)
            for each, count in zip(self._asked, (2, 1), strict=True):
                packed = b"".join(each._unsent)
                each._write()
                self._replies.append(asked_of(self._redis, packed, count))
                each.data_received(self._replies[-1])
        assert len(self._client.written) == 1
        self._client.written.clear()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Send nothing to Redis in the meantime."""
        real = [each._transport for each in self._asked]
        for each in self._asked:
            each._transport = Remembering()
        try:
            yield
        finally:
            for each, transport in zip(self._asked, real, strict=True):
                each._transport = transport

    def query(self) -> None:
        self._connection.data_received(self._request)
        for each, replies in zip(self._asked, self._replies, strict=True):
            each._write()
            each.data_received(replies)
        assert len(self._client.written) == 1
        self._client.written.clear()


class AtOnce:
    """A question that is answered without a look at it, at once or with the reply of Redis."""

    def __init__(self, exchange: Exchange, redis: ReadConnection | None = None) -> None:
        self._body = exchange.answer.partition(b"\r\n\r\n")[2]
        self._exchange, self._redis = exchange, redis

    def open(self, headers: RawHeaders) -> AtOnce:
        return self

    def begin(self, body: bytes, answering: Answering) -> None:
        self._answering = answering
        if self._redis is None:
            self.set_result(None)
        else:
            self._redis.send(self._exchange.asked, Replies(2), self, asyncio.get_running_loop().time() + 5)

    def disconnected(self) -> None:
        pass

    def done(self) -> bool:
        return False

    def set_result(self, result: Any) -> None:
        self._answering.reply(200, b"application/json", (), self._body)

    def set_exception(self, error: BaseException) -> None:
        raise error


def fixed(exchange: Exchange, redis: ReadConnection, settings: Settings, metrics: Metrics) -> StraightOperation:
    """An operation whose body is read, and whose answer is known."""
    answer = exchange.answer.partition(b"\r\n\r\n")[2]

    class Ask:
        def begin(self, receiver: ReplyReceiver[Any]) -> None:
            redis.send(exchange.asked, Replies(2), receiver, asyncio.get_running_loop().time() + 5)

    def steps(body: Body) -> Steps[Answer]:
        yield Ask()
        return Answer(answer, media_type=b"application/json")

    cache = RequestCache(CACHE_BYTES_MAX, metrics)
    queue = AdmissionQueue(AT_ONCE)
    parts = Dependencies(
        metrics, Gate(None, protect_reads=False), settings.max_body_bytes, settings.max_tokens, {"read": queue}, cache
    )
    doc = docs.QUERY if exchange.path == "/query" else docs.QUERY_BY_HASH
    return StraightOperation("POST", exchange.path, Straight(steps), access="read", doc=doc, dependencies=parts)


def connection(app: Any, table: StraightTable) -> HttpConnection:
    """A connection of a server of its own."""
    bounds = ServerBounds(request_seconds=60, connections_max=10, bodies_max_bytes=2**26)
    config = uvicorn.Config(app, log_config=None, lifespan="off", interface="asgi3")
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]
    make: Any = protocol(Connections(bounds, Metrics(), straight=table))
    made: HttpConnection = make(config=config, server_state=state, app_state={})
    return made


def post(path: str, content: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    return head.encode() + b"%d\r\n\r\n%b" % (len(content), content)


def asked_of(redis: RedisServer, packed: bytes, count: int) -> bytes:
    """So many replies of Redis to packed commands."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(redis.path)
        opened.sendall(packed)
        parser, replies, seen = hiredis.Reader(), b"", 0
        while seen < count:
            replies += (piece := opened.recv(2**20))
            parser.feed(piece)
            while parser.gets() is not False:
                seen += 1
    return replies


async def exchanged(kind: str, prompt: prompts.Prompt, app: Any, redis: RedisServer, store: Store) -> Exchange:
    """What passes in a query of a prompt whose table and connection are known."""
    path, body = KINDS[kind]
    request = post(path, body(prompt))
    served, client = connection(app, app.straight), Remembering()
    served.connection_made(client)
    for _ in range(20):  # so that the portions have their size
        client.written.clear()
        served.data_received(request)
        while not client.written:  # noqa: ASYNC110  # a few turns of a loop that has nothing else to do
            await asyncio.sleep(0)
    reads = read_connection(store)
    asked = Remembering()
    real, reads._transport = reads._transport, asked
    served.data_received(request)
    reads._write()
    reads._transport = real
    packed = b"".join(asked.written)
    replies = asked_of(redis, packed, 2)
    answer = client.written[0]
    reads.data_received(replies)
    return Exchange(path, request, packed, replies, answer)


def read_connection(store: Store) -> ReadConnection:
    reads = store.reader._client.reads
    assert reads is not None
    assert reads.connection is not None
    return reads.connection


def rungs(
    exchange: Exchange, app: Shortcut, redis: ReadConnection, settings: Settings
) -> Iterator[tuple[str, Bare | Served]]:
    """The servers, each with what the one before has."""
    metrics, path = Metrics(), exchange.path.encode()
    yield "httptools and hiredis, nothing else", Bare(exchange)
    yield "the server: connection, cycle, limits", Served(exchange, app, {path: AtOnce(exchange)}, redis)
    yield "the connection to Redis, with deadlines", Served(exchange, app, {path: AtOnce(exchange, redis)}, redis)
    operation = fixed(exchange, redis, settings, metrics)
    yield "access, admission, the body, metrics", Served(exchange, app, {path: operation}, redis)
    yield "the whole query: keys, walk, answer", Served(exchange, app, app.straight, redis)
    logged = AccessLog(app)
    yield "the access log", Served(exchange, logged, logged.straight, redis)


def measured(server: Bare | Served | Decided, rounds: int) -> tuple[float, int]:
    """The least microseconds of a query, and its calls of Python."""
    least = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(QUERIES):
            server.query()
        least = min(least, (time.process_time() - began) / QUERIES)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    server.query()
    sys.setprofile(None)
    return least * 1e6, calls - 1


async def decided(app: Any, store: Store, redis: RedisServer, prompt: prompts.Prompt, rounds: int) -> list[str]:
    """The row of a whole decision. Its readings grow old, so they are repeated before each round."""
    server = Decided(app, store, redis, post("/select", prompts.by_tokens(prompt)))
    least, calls = float("inf"), 0
    for _ in range(rounds):
        await server.learn()
        with server.silent():
            microseconds, calls = measured(server, 1)
        least = min(least, microseconds)
    return ["the whole decision", f"{least:.1f}", "", str(calls)]


async def ladder(kinds: list[str], rounds: int) -> list[list[str]]:
    settings, metrics = Settings(loads_ms=10_000), Metrics()
    rows = [["query", "with also", "us", "more", "calls"]]
    with tempfile.TemporaryDirectory(prefix="wm-") as name, redis_server(Path(name)) as redis:
        (prompt,) = islice(prompts.fresh(), 1)
        with waymark(Path(name), "serve", redis.url) as server, publishers(1) as (engine,):
            engine.register(server)
            engine.store(prompt)
            register_idle_targets(server, range(engine.number + 1, engine.number + TARGETS))
            wait_for([server], {engine.number: prompt})
        store, asker = Store.open(redis.url), parts.asker(settings)
        app = create_app(store, parts.api_options(settings), parts.selection_options(settings), metrics, asker=asker)
        assert isinstance(app, Shortcut)
        try:
            for kind in kinds:
                if kind == SELECT:
                    rows.append([kind, *await decided(app, store, redis, prompt, rounds)])
                    continue
                exchange, before = await exchanged(kind, prompt, app, redis, store), 0.0
                reads = read_connection(store)
                real = reads._transport
                for what, served in rungs(exchange, app, reads, settings):
                    microseconds, calls = measured(served, rounds)
                    rows.append([kind, what, f"{microseconds:.1f}", f"{microseconds - before:+.1f}", str(calls)])
                    before = microseconds
                reads._transport = real
                await asyncio.sleep(0)
        finally:
            await store.close()
            await asker.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.way")
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}, {SELECT}")
    parser.add_argument("--pure", action="store_true", help="without the C module")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    kinds = given.only.split(",")
    if unknown := set(kinds) - {*KINDS, SELECT}:
        print(f"--only: '{min(unknown)}' is none of {', '.join(KINDS)}, {SELECT}", file=sys.stderr)
        return 2
    native.select(not given.pure)
    with Path(os.devnull).open("w") as nowhere, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        configure("warning", "json", nowhere)
        print(aligned(runner.run(ladder(kinds, given.rounds)), left=frozenset({0, 1})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
