"""books: compares the four sums of the books with those of a simulation that knows the truth, and measures the cost of
books.

Eight engines have parts of documents. Clients ask three replicas, one of which is killed half way, for a target, and
report at the end of each request how much the engine has reused. The simulation adds up the same numbers by itself.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from tools.benchmarks import placement, shadows
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, redis_server, waymark
from tools.benchmarks.report import Row
from waymark.base.metrics import Metrics
from waymark.decide.books import Bookkeeper, Choices, promises_of
from waymark.decide.fleet import Allowed, Fleet, PromptState
from waymark.decide.policies.policy import RoutingRequest
from waymark.domain.books import NO_USAGE, Promise, Usage
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.store.reservations import Offer, ReservationPart, ReservationTerms
from waymark.store.store import Store

MODEL, SIZE, ENGINES, DOCUMENTS, BLOCKS = "books", 16, 8, 40, 16
REPLICAS, CLIENTS = 3, 6
COST_MS = 0.02
#: The number of turns, with and without books, in which their cost is measured.
_TURNS = 40
_AMOUNTS = ("available", "chosen", "expected", "delivered", "random")


def measure(options: Options) -> Iterator[Row]:
    """Yield the rows of ``books``."""
    requests, calls = (2_000, 400) if options.is_quick else (20_000, 8_000)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        replicas = [stack.enter_context(waymark(folder, "query", redis.url)) for _ in range(REPLICAS)]
        _fill(replicas[0])
        simulation = _Simulation(replicas, requests)
        simulation.run()
        total = replicas[-1].ask("GET", f"/books?model={MODEL}&since=24h")["total"]
        for name in _AMOUNTS:
            apart = abs(total[name] - simulation.truth[name])
            yield Row("books", f"tokens {name} of {requests:,} requests: apart from the truth", apart, "tokens", bar=0)
        yield Row("books", "requests in the books", total["requests"], "requests", other=simulation.truth["requests"])
        yield Row("books", "earned, of the prompt tokens", total["earned"] / total["prompt_tokens"], "times")
        yield from _drift(replicas[-1])
        yield from _costs(redis, calls)
    for (targets, names), (order_ms, both_ms, record_ms) in shadows.medians(calls // 20).items():
        what = f"CPU of two shadows ({' and '.join(names)}) at {targets} targets"
        yield Row("books", what, both_ms, "ms", other=order_ms, other_name="the order", bar=shadows.BAR_MS)
        yield Row("books", f"CPU of the record of a kept decision at {targets} targets", record_ms, "ms")
    yield from placement.measure(3 if options.is_quick else 8)


def _document(number: int) -> list[int]:
    return list(range(100_000 * (number + 1), 100_000 * (number + 1) + SIZE * BLOCKS))


def _held(engine: int, document: int) -> int:
    """Return how many blocks of a document an engine has."""
    return {0: BLOCKS, 1: BLOCKS // 2}.get((engine + document) % 4, 0)


def _fill(replica: Server) -> None:
    for engine in range(ENGINES):
        named = {"type": "standard", "modelname": MODEL, "instance_id": f"engine-{engine}", "block_size": SIZE}
        replica.post("/register", **named, address=f"http://10.0.0.{engine + 1}:8000")
        number = 0
        for document in range(DOCUMENTS):
            tokens = _document(document)[: SIZE * _held(engine, document)]
            if not tokens:
                continue
            number += 1
            replica.post(
                "/events",
                event_id=number,
                event_type="stored",
                backend_id=f"engine-{engine}",
                model_name=MODEL,
                block_size=SIZE,
                token_ids=tokens,
                seq_hashes=list(extend(None, token_bytes(tokens), SIZE)),
                timestamp=1.0,
                medium="gpu",
                dp_rank=0,
                base_block_idx=0,
            )


class _Simulation:
    """Clients that ask for a target and end their requests, and the sums that the books should have."""

    def __init__(self, replicas: Sequence[Server], requests: int) -> None:
        self.truth: Counter[str] = Counter()
        self._replicas = replicas
        self._left = requests
        self._kill_at = requests // 2
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run until all requests have ended."""
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _next(self) -> bool:
        with self._lock:
            self._left -= 1
            if self._left == self._kill_at:
                os.kill(self._replicas[0].pid, signal.SIGKILL)
            return self._left >= 0

    def _client(self, number: int) -> None:
        random, http_client = Random(number), _Client(self._replicas, number)
        while self._next():
            document, blocks = random.randrange(DOCUMENTS), random.randint(1, BLOCKS)
            rest = [random.randrange(1, 90_000) for _ in range(random.randrange(SIZE))]
            prompt = _document(document)[: SIZE * blocks] + rest
            selected = http_client.post("/select", model=MODEL, token_ids=prompt)
            engine = int(selected["target"]["instance_id"].removeprefix("engine-"))
            held = [SIZE * min(blocks, _held(each, document)) for each in range(ENGINES)]
            expected = min(held[engine], (len(prompt) - 1) // SIZE * SIZE)
            cached = expected - random.randrange(expected // 10 + 1)
            usage = {"cached_tokens": cached, "prompt_tokens": len(prompt), "completion_tokens": 1}
            http_client.post("/release", reservation=selected["reservation"], **usage)
            with self._lock:
                self.truth.update(
                    requests=1,
                    available=max(held),
                    chosen=held[engine],
                    expected=expected,
                    delivered=cached,
                    random=round(sum(held) / ENGINES),
                )


def _drift(replica: Server) -> Iterator[Row]:
    """Yield how many requests it takes until an engine that reuses nothing is noticed, and how many more until it is
    trusted again once it reuses everything."""
    name, prompt = "engine-0", _document(0) + [1]
    for what, delivered, status in (("noticed", 0, "degraded"), ("believed again", SIZE * BLOCKS, "active")):
        count = 0
        while count < 200:
            taken = replica.post("/select", model=MODEL, token_ids=prompt, only=[name])
            replica.post("/release", reservation=taken["reservation"], cached_tokens=delivered)
            count += 1
            publishers = replica.ask("GET", "/workers")["publishers"]
            drifts = next(each for each in publishers if each["instance_id"] == name)["status"] == "degraded"
            if drifts == (status == "degraded"):
                break
        yield Row("books", f"requests until a drift is {what}", count, "requests", bar=50)


class _Client:
    """A client that asks another replica if one does not answer.

    A release whose answer is lost is sent again: the reservation has ended already, or the repetition ends it. If the
    answer of a selection is lost, no request follows, and the reservation expires.
    """

    def __init__(self, replicas: Sequence[Server], number: int) -> None:
        self._replicas = replicas
        self._at = number % len(replicas)
        self._connection = self._connected()

    def _connected(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._replicas[self._at].port, timeout=60)

    def post(self, path: str, **fields: Any) -> Any:
        """Return the answer. Raise SystemExit if no replica answers."""
        for _ in range(2 * len(self._replicas)):
            try:
                self._connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
                answer = self._connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):
                self._at = (self._at + 1) % len(self._replicas)
                self._connection = self._connected()
                continue
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status} {content[:300]!r}")
            return json.loads(content)
        raise SystemExit(f"{path}: no replica answers")


def _costs(redis: RedisServer, calls: int) -> Iterator[Row]:
    """Yield the additional cost of the books for a decision and its end, in a replica and in Redis."""
    client_ms, redis_ms, fleet = asyncio.run(_calls(redis, calls))
    client_ms += _promising(fleet, calls)
    yield Row("books", "books of a decision: the replica's CPU", client_ms, "ms", bar=COST_MS)
    yield Row("books", "books of a decision: Redis' CPU", redis_ms, "ms", bar=COST_MS)


async def _calls(redis: RedisServer, calls: int) -> tuple[float, float, Fleet]:
    """Return how many more milliseconds ``reserve`` and ``release`` take with a promise and a usage.

    Both are medians of many short turns, because the other load of the machine changes all the time. The third value is
    the fleet.
    """
    store = Store.open(redis.url)
    keeper, used = Bookkeeper(store, Metrics()), Usage(640, 1100, 100)
    try:
        group = GroupName("default", MODEL)
        entry, table = (await store.directory.groups())[group], await store.reader.table(group, deadline_seconds=10)
        assert table is not None
        offers = [Offer(each.publisher, 100) for each in await store.directory.claims()]
        plain = ReservationTerms(context=1100)
        promised = plain._replace(promises=[str(Promise(1024, 512, 128, 0, 0, 640, 300))] * len(offers))
        own, theirs = [], []
        for _ in range(_TURNS):
            costs = []
            for terms, usage in ((plain, NO_USAGE), (promised, used)):
                before = time.process_time(), redis.cpu()
                for _ in range(calls // _TURNS):
                    found = await store.reservations.reserve(entry.group_id, offers, terms)
                    assert found.reservation is not None
                    ended = [found.reservation]
                    await store.reservations.release(
                        ended, ReservationPart.OK, usage=usage, booked=lambda of, drift: keeper.booked(of, used, drift)
                    )
                costs.append((time.process_time() - before[0], redis.cpu() - before[1]))
            (own_plain, theirs_plain), (own_books, theirs_books) = costs
            own.append((own_books - own_plain) / (calls // _TURNS) * 1e3)
            theirs.append((theirs_books - theirs_plain) / (calls // _TURNS) * 1e3)
        return median(own), median(theirs), Fleet(table)
    finally:
        await store.close()


def _promising(fleet: Fleet, calls: int) -> float:
    """Return the milliseconds it takes to find the promises of eight targets, three of which have a part of the
    prompt."""
    rows = {member.name: TargetRow(8 * (at + 1)) for at, member in enumerate(fleet.members[:3])}
    seen, request = PromptState(rows, {}, {}, {}), RoutingRequest(1100, SIZE)
    publishers = [member.publisher for member in fleet.members[:8]]
    targets, times = fleet.targets(None, "whole"), []
    for _ in range(_TURNS):
        began = time.process_time()
        for _ in range(calls // _TURNS):
            promises_of(publishers, seen, request, fleet, Choices(targets, Allowed()))
        times.append((time.process_time() - began) / (calls // _TURNS) * 1e3)
    return median(times)
