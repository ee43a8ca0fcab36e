"""Measures the cost of each part of the straight way without the sockets, in microseconds and in Python calls.

    python -m tools.benchmarks.way [--only hash,tokens,short,select,select-hash] [--cold] [--calls] [--pure]

Each rung of the table is a server with more parts than the rung before, in this process, over transports that only
record. A figure is the minimum of the rounds, so it is useful on a busy machine, too. ``select`` and ``select-hash``
are decisions about the prompts of ``tokens`` and ``hash`` among eight targets, one of which has them; they wait for
Redis twice.

``hot`` repeats one query, so that the caches of the processor have all its data. ``--cold`` adds two columns. A query
has several turns: a turn begins when a request or a reply arrives, and ends at the next wait. For ``cold`` the caches
are emptied before each turn. For ``waits`` another process sends each request and reply over a socket, and receives the
answer. So a turn includes three system calls, and the process sleeps before it; the first rung is mostly kernel time.

``--calls`` prints the calls of the last rung in their order, with the microseconds from the beginning of a hot query.
The cost of tracing is subtracted: the same amount for each call and each return, so the figures of short calls are too
low.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import pickle
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

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
from waymark.api.application import create_app
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
    "select": ("/select", prompts.by_tokens),
    "select-hash": ("/select", prompts.by_hash),
}
_USUAL = ("hash", "tokens", "short")
#: The number of targets of a decision.
TARGETS = 8
#: The number of queries of a round.
QUERIES = 200
#: The number of queries in a round of ``cold``.
COLD_QUERIES = 5
#: Twice the size of the last cache of a large processor's core complex.
_CACHES_BYTES = 64 * 2**20
_MESSAGE_BYTES_MAX = 2**20
#: The prefix of a message with the bytes that the other process has to send from then on.
_NEW = b"new:"


class Remembering(asyncio.Transport):
    """A transport that records the bytes instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        if data:  # a connection may write an empty string
            self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


@dataclass(frozen=True)
class Trip:
    """A question to Redis, and its replies."""

    asked: bytes
    replies: bytes
    count: int


@dataclass(frozen=True)
class Exchange:
    """The messages between a client, the replica and Redis in one query."""

    path: str
    request: bytes
    trips: Sequence[Trip]
    answer: bytes

    @property
    def arriving(self) -> list[bytes]:
        """Return the messages that arrive at the replica, in order."""
        return [self.request, *(trip.replies for trip in self.trips)]


class Bare:
    """The floor: httptools and hiredis parse the messages, and the answer is prepared."""

    def __init__(self, exchange: Exchange) -> None:
        self.arriving = exchange.arriving
        self._sent = [*(trip.asked for trip in exchange.trips), exchange.answer]
        self._parser = httptools.HttpRequestParser(self)
        self._replies = hiredis.Reader()
        self._pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        pass

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self._pieces = []

    def turn(self, at: int) -> bytes:
        if at == 0:
            self._parser.feed_data(self.arriving[0])
        else:
            self._replies.feed(self.arriving[at])
            while self._replies.gets() is not False:
                pass
        return self._sent[at]

    async def rest(self) -> None:
        pass

    def silent(self) -> AbstractContextManager[None]:
        return nullcontext()


class Served:
    """A connection of the server with its table of straight operations, and the connections to Redis that a query uses
    in turn."""

    def __init__(self, exchange: Exchange, app: Any, table: StraightTable, redis: Sequence[ReadConnection]) -> None:
        self.arriving = exchange.arriving[: len(redis) + 1]
        self._redis = redis
        self._client, self._asked = Remembering(), Remembering()
        self._connection = connection(app, table)
        self._connection.connection_made(self._client)

    def turn(self, at: int) -> bytes:
        """Process a message that arrives, and return the bytes that are sent in response."""
        receiver = self._redis[at - 1] if at else self._connection
        receiver.data_received(self.arriving[at])
        if at < len(self._redis):
            self._redis[at]._write()
            sent = self._asked.written
        else:
            sent = self._client.written
        (data,) = sent
        sent.clear()
        return data

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record the bytes for Redis instead of sending them."""
        real = [each._transport for each in self._redis]
        for each in self._redis:
            each._transport = self._asked
        try:
            yield
        finally:
            for each, transport in zip(self._redis, real, strict=True):
                each._transport = transport

    async def ask(self) -> None:
        """Run the query on the real Redis, so that each cache of the server is filled."""
        self._connection.data_received(self.arriving[0])
        while not self._client.written:  # noqa: ASYNC110  # a few turns of a loop that has nothing else to do
            await asyncio.sleep(0.001)
        self._client.written.clear()
        await self.rest()

    async def rest(self) -> None:
        """Let the loop run until nothing is under way, including background tasks."""
        await asyncio.sleep(0.001)
        while any(each._requests for each in self._redis):  # noqa: ASYNC110  # a few turns, too
            await asyncio.sleep(0.001)


class AtOnce:
    """A straight operation that does not read its body, and answers at once or after the replies of Redis."""

    def __init__(self, exchange: Exchange, redis: Sequence[ReadConnection] = ()) -> None:
        self._body = exchange.answer.partition(b"\r\n\r\n")[2]
        self._trips = list(zip(redis, exchange.trips, strict=False))

    def open(self, headers: RawHeaders) -> AtOnce:
        return self

    def begin(self, body: bytes, answering: Answering) -> None:
        self._answering = answering
        self._left = iter(self._trips)
        self.set_result(None)

    def disconnected(self) -> bool:
        return False

    def done(self) -> bool:
        return False

    def set_result(self, result: Any) -> None:
        trip = next(self._left, None)
        if trip is None:
            self._answering.reply(200, b"application/json", (), self._body)
        else:
            send(*trip, self)

    def set_exception(self, error: BaseException) -> None:
        raise error


def send(redis: ReadConnection, trip: Trip, receiver: ReplyReceiver[Any]) -> None:
    redis.send(trip.asked, Replies(trip.count), receiver, asyncio.get_running_loop().time() + 5)


def fixed(exchange: Exchange, redis: Sequence[ReadConnection], settings: Settings) -> StraightOperation:
    """Return an operation that reads its body, and whose answer is prepared."""
    answer = exchange.answer.partition(b"\r\n\r\n")[2]
    metrics = Metrics()

    class Ask:
        def __init__(self, redis: ReadConnection, trip: Trip) -> None:
            self._redis, self._trip = redis, trip

        def begin(self, receiver: ReplyReceiver[Any]) -> None:
            send(self._redis, self._trip, receiver)

    def steps(body: Body) -> Steps[Answer]:
        for each in zip(redis, exchange.trips, strict=True):
            yield Ask(*each)
        return Answer(answer, media_type=b"application/json")

    cache = RequestCache(CACHE_BYTES_MAX, metrics)
    queue = AdmissionQueue(AT_ONCE)
    parts = Dependencies(
        metrics,
        Gate(None, protect_reads=False),
        settings.max_body_bytes,
        settings.max_tokens,
        {"read": queue, "decide": queue},
        cache,
    )
    doc = {"/query": docs.QUERY, "/query_by_hash": docs.QUERY_BY_HASH, "/select": docs.SELECT}[exchange.path]
    return StraightOperation("POST", exchange.path, Straight(steps), access="read", doc=doc, dependencies=parts)


def connection(app: Any, table: StraightTable) -> HttpConnection:
    """Return a connection of a separate server."""
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
    """Send packed commands to Redis, and return this number of replies."""
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
    """Run a query for a prompt, with all caches filled and connections open, and return its messages."""
    path, body = KINDS[kind]
    request = post(path, body(prompt))
    learning = Served(Exchange(path, request, (), b""), app, app.straight, ())
    for _ in range(20):  # until the sizes of the portions no longer change
        await learning.ask()
    trips: list[Trip] = []
    served = Served(Exchange(path, request, trips, b""), app, app.straight, connections(store))
    await served.ask()
    with served.silent():
        served._connection.data_received(request)
        for each in connections(store):
            if each._unsent:
                packed, count = b"".join(each._unsent), sum(question.reader.count for question in each._requests)
                each._write()
                trips.append(Trip(packed, asked_of(redis, packed, count), count))
                each.data_received(trips[-1].replies)
    return Exchange(path, request, trips, served._client.written[0])


def connections(store: Store) -> list[ReadConnection]:
    """Return the open connections to Redis: for reads, and for scripts if there was a decision."""
    reads = store.reader._client.reads
    assert reads is not None
    opened = [each.connection for each in (reads, reads.scripts) if each.connection is not None]
    assert opened
    return opened


def rungs(
    exchange: Exchange, app: AccessLog, redis: Sequence[ReadConnection], settings: Settings
) -> Iterator[tuple[str, Bare | Served]]:
    """Yield the servers, each with all parts of the previous one."""
    path = exchange.path.encode()
    redis = redis[: len(exchange.trips)]
    yield "httptools and hiredis, nothing else", Bare(exchange)
    yield "the server: connection, cycle, limits", Served(exchange, app, {path: AtOnce(exchange)}, ())
    yield "the connection to Redis, with deadlines", Served(exchange, app, {path: AtOnce(exchange, redis)}, redis)
    operation = fixed(exchange, redis, settings)
    yield "access, admission, the body, metrics", Served(exchange, app, {path: operation}, redis)
    what = "the whole decision" if exchange.path == "/select" else "the whole query: keys, walk, answer"
    yield what, Served(exchange, app, app.straight, redis)
    if exchange.path != "/select":
        logged = AccessLog(app, is_written=True)
        yield "the access log", Served(exchange, logged, logged.straight, redis)


# ---- how a query is repeated ----------------------------------------------------------------------


Repeat: TypeAlias = "Callable[[Bare | Served], float]"
"""A function that repeats a query, and returns the seconds of CPU per query. It blocks the event loop."""


def hot(server: Bare | Served) -> float:
    """Repeat a query without pauses. Return the mean CPU time of a query."""
    turns = range(len(server.arriving))
    began = time.process_time()
    for _ in range(QUERIES):
        for at in turns:
            server.turn(at)
    return (time.process_time() - began) / QUERIES


class Emptied:
    """A way to repeat a query: with empty caches at each turn."""

    def __init__(self) -> None:
        self._memory = bytearray(b"\1") * _CACHES_BYTES

    def __call__(self, server: Bare | Served) -> float:
        seconds = 0.0
        for _ in range(COLD_QUERIES):
            for at in range(len(server.arriving)):
                assert self._memory.find(b"\2") < 0
                began = time.process_time()
                server.turn(at)
                seconds += time.process_time() - began
        return seconds / COLD_QUERIES


def play(wire: socket.socket) -> None:
    """Act as the client and the Redis of a replica, until the replica closes the connection."""
    arriving: list[bytes] = []
    at = 0
    while data := wire.recv(_MESSAGE_BYTES_MAX):
        if data.startswith(_NEW):
            arriving, at = pickle.loads(data.removeprefix(_NEW)), 0  # from our own parent
        wire.send(arriving[at % len(arriving)])
        at += 1


class Waited:
    """A way to repeat a query: each turn waits for another process, and the system calls count, too."""

    def __init__(self) -> None:
        self._wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        multiprocessing.get_context("spawn").Process(target=play, args=(theirs,), daemon=True).start()
        theirs.close()
        self._poll = select.epoll()
        self._poll.register(self._wire.fileno(), select.EPOLLIN)

    def __call__(self, server: Bare | Served) -> float:
        wait, receive, answer = self._poll.poll, self._wire.recv, self._wire.send
        turns = range(len(server.arriving))
        answer(_NEW + pickle.dumps(server.arriving))
        wait()
        began = time.process_time()
        for _ in range(QUERIES):
            for at in turns:
                wait()
                receive(_MESSAGE_BYTES_MAX)
                answer(server.turn(at))
        seconds = time.process_time() - began
        wait()
        receive(_MESSAGE_BYTES_MAX)  # the next request
        return seconds / QUERIES


async def measured(server: Bare | Served, rounds: int, ways: Sequence[Repeat]) -> list[float]:
    """Return the minimum microseconds of a query for each way to repeat it."""
    least = [float("inf")] * len(ways)
    for _ in range(rounds):
        for number, way in enumerate(ways):
            await server.rest()
            with server.silent():
                least[number] = min(least[number], 1e6 * way(server))
    return least


# ---- the calls of Python --------------------------------------------------------------------------


class Call(NamedTuple):
    """A Python call: the function, the depth, and the time in microseconds."""

    name: str
    depth: int
    at: float


def traced(server: Bare | Served) -> list[tuple[str, int, int]]:
    """Return the calls and returns of a query, each as the function, 1 or -1, and the clock in nanoseconds."""
    events: list[tuple[Any, int, int]] = []
    now, note = time.perf_counter_ns, events.append

    def trace(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            note((frame.f_code, 1, now()))
        elif event == "return":
            note((frame.f_code, -1, now()))

    turns = range(1, len(server.arriving))
    sys.setprofile(trace)
    server.turn(0)
    for at in turns:
        server.turn(at)
    sys.setprofile(None)
    return [(f"{Path(code.co_filename).stem}.{code.co_qualname}", step, at) for code, step, at in events]


def calls_of(server: Bare | Served, seconds: float) -> list[Call]:
    """Return the calls of a query, each at its median time, scaled to the time of the query without tracing."""
    gc.disable()  # the recorded events would trigger it, each time at the same call
    several = [traced(server) for _ in range(QUERIES)]
    gc.enable()
    names = [event[:2] for event in several[-1]]  # the first queries may have to make objects that the later ones reuse
    alike = [events for events in several if [event[:2] for event in events] == names]
    steps = [[after[2] - before[2] for before, after in pairwise(events)] for events in alike]
    passed = [median(each) / 1e3 for each in zip(*steps, strict=True)]
    tracing, step = 0.0, max(passed)
    for _ in range(30):  # no step may take less than zero, so the cost of tracing is found by bisection
        step /= 2
        if sum(max(0.0, each - tracing - step) for each in passed) > 1e6 * seconds:
            tracing += step
    found: list[Call] = []
    at, depth = 0.0, 0
    for (name, way), more in zip(names, [0.0, *passed], strict=True):
        at += max(0.0, more - tracing)
        if way == 1:
            found.append(Call(name, depth, at))
        depth += way
    return found


def listed(calls: Sequence[Call], end: float) -> str:
    """Return a table of the calls, in order."""
    rows = [["", "call", "us", "until the next"]]
    for number, (call, after) in enumerate(zip(calls, [*(each.at for each in calls[1:]), end], strict=True), 1):
        rows.append([str(number), "  " * call.depth + call.name, f"{call.at:.1f}", f"{after - call.at:.1f}"])
    return aligned(rows, left=frozenset({1}))


async def ladder(kinds: Sequence[str], rounds: int, *, is_cold: bool, has_calls: bool) -> Iterator[str]:
    """Yield a table for each kind of query."""
    settings, metrics = Settings(), Metrics()
    ways: list[Repeat] = [hot, Emptied(), Waited()] if is_cold else [hot]
    rows = [["query", "with also", "hot", *(["cold", "waits"] if is_cold else []), "more", "calls"]]
    lists: list[str] = []
    with tempfile.TemporaryDirectory(prefix="wm-") as name, redis_server(Path(name)) as redis:
        (prompt,) = islice(prompts.fresh(), 1)
        with waymark(Path(name), "serve", redis.url) as server, publishers(1) as (engine,):
            engine.register(server)
            engine.store(prompt)
            register_idle_targets(server, range(engine.number + 1, engine.number + TARGETS))
            wait_for([server], {engine.number: prompt})
        store, asker = Store.open(redis.url), parts.asker(settings)
        # While queries are repeated, no background task reads loads, so old readings have to remain valid.
        selection = replace(parts.selection_options(settings), loads_seconds=3600.0)
        app = create_app(store, parts.api_options(settings), selection, metrics, asker=asker)
        try:
            for kind in kinds:
                exchange, before = await exchanged(kind, prompt, app, redis, store), [0.0]
                for what, served in rungs(exchange, app, connections(store), settings):
                    least = await measured(served, rounds, ways)
                    await served.rest()
                    with served.silent():
                        calls = calls_of(served, least[0] / 1e6)
                    more = f"{least[0] - before[0]:+.1f}"
                    rows.append(
                        [kind, what, *(f"{each:.1f}" for each in least), more, str(len(calls) - len(served.arriving))]
                    )
                    before = least
                if has_calls:
                    lists.append(f"{kind}, {what}\n{listed(calls, least[0])}")
        finally:
            await store.close()
            await asker.close()
    return iter([aligned(rows, left=frozenset({0, 1})), *lists])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.way")
    parser.add_argument("--only", default=",".join(_USUAL), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--cold", action="store_true", help="also with empty caches, and with a wait before each turn")
    parser.add_argument("--calls", action="store_true", help="also the calls of the last rung, in their order")
    parser.add_argument("--pure", action="store_true", help="without the C module")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    kinds = given.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        print(f"--only: '{min(unknown)}' is none of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    native.select(not given.pure)
    with Path(os.devnull).open("w") as nowhere, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        configure("warning", "json", nowhere)
        for text in runner.run(ladder(kinds, given.rounds, is_cold=given.cold, has_calls=given.calls)):
            print(text, end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
