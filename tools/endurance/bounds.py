"""Measures how exactly the bounds on the age and on the number of blocks are kept, by the answers to queries.

    python -m tools.endurance.bounds [--seconds 30] [--ttl 10] [--entries 20000]

Two engines publish stores that share no blocks to ``waymark serve`` with a Redis of its own. For the bound on the age,
each store is queried until no answer has it any more. For the bound on the number, a search for the oldest store in an
answer is repeated, which gives the number of live blocks to within a store. Prints how far each is from its setting.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.benchmarks.feed import Publisher, publishers, stored
from tools.benchmarks.processes import Server, redis_server, wait_until, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, VOCABULARY

ENGINES = 2
STORE_BLOCKS = 20
BLOCKS_PER_SECOND = 4000
_TOLERANCE = 0.1
_SECONDS = 1.0


class Stores:
    """The published stores, in order."""

    def __init__(self, server: Server, engines: list[Publisher]) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.published = 0
        self._engines = engines
        self._random = random.Random(1)
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def publish(self) -> None:
        tokens = self._random.choices(range(VOCABULARY), k=STORE_BLOCKS * BLOCK_SIZE)
        hashes = [self._random.getrandbits(64) for _ in range(STORE_BLOCKS)]
        self._engines[self.published % len(self._engines)].send(stored(hashes, None, tokens))
        self.tokens[self.published] = tokens
        self.published += 1

    def has(self, number: int) -> bool:
        body = json.dumps({"model": MODEL, "token_ids": self.tokens[number], "block_size": BLOCK_SIZE})
        self._connection.request("POST", "/query", body, {"Content-Type": "application/json"})
        answer = json.loads(self._connection.getresponse().read())
        return any(row["longest_matched"] for row in answer.get("default", {}).values())

    def forget(self, before: int) -> None:
        for number in range(min(self.tokens, default=before), before):
            del self.tokens[number]


@contextmanager
def serving(**settings: int | str) -> Iterator[Stores]:
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as redis:
        environ = {f"WAYMARK_{setting.upper()}": str(value) for setting, value in settings.items()}
        with waymark(Path(name), "serve", redis.url, environ) as server, publishers(ENGINES) as engines:
            for engine in engines:
                engine.register(server)
            stores = Stores(server, engines)
            stores.publish()
            wait_until(lambda: stores.has(0), "the first store is indexed")
            yield stores


def measure_time(ttl: int, seconds: float) -> bool:
    """Print the lifetimes of stores. Return whether all are within the bound."""
    lifetimes: list[float] = []
    with serving(medium_ttl=f"*={ttl}") as stores:
        born: deque[tuple[int, float]] = deque()
        began = time.monotonic()
        while born or time.monotonic() - began < seconds:
            now = time.monotonic()
            if now - began < seconds and (not born or now - born[-1][1] > 0.1):
                stores.publish()
                born.append((stores.published - 1, now))
            while born and time.monotonic() - born[0][1] > ttl / 2 and not stores.has(born[0][0]):
                lifetimes.append(time.monotonic() - born.popleft()[1])
            time.sleep(0.01)
    least, most = min(lifetimes), max(lifetimes)
    is_met = ttl <= least and most <= ttl * (1 + _TOLERANCE) + _SECONDS
    print(f"time {ttl} s: {len(lifetimes)} stores lived {least:.2f} to {most:.2f} s: {'yes' if is_met else 'no'}")
    return is_met


def measure_number(entries: int, seconds: float) -> bool:
    """Print how many blocks were live. Return whether the number is within the bound."""
    with serving(max_entries=entries) as stores:
        began = time.monotonic()
        oldest, above_since, longest = 0, None, 0.0
        most, least = 0, entries
        sent = stores.published
        while (now := time.monotonic()) - began < seconds:
            while stores.published - sent < (now - began) * BLOCKS_PER_SECOND / STORE_BLOCKS:
                stores.publish()
            published = stores.published
            before = oldest
            oldest = _first(stores, oldest, published)
            live = (published - oldest) * STORE_BLOCKS
            stores.forget(oldest)
            most = max(most, live)
            if oldest > before:
                least = min(least, live)
            if live <= entries * (1 + _TOLERANCE):
                above_since = None
            else:
                above_since = above_since or now
                longest = max(longest, time.monotonic() - above_since)
    is_met = longest <= _SECONDS and least >= entries * (1 - _TOLERANCE)
    print(
        f"number {entries}: {published * STORE_BLOCKS} blocks stored, {BLOCKS_PER_SECOND} a second; {least} to {most} "
        f"live, more than a tenth above it for {longest:.2f} s at most: {'yes' if is_met else 'no'}"
    )
    return is_met


def _first(stores: Stores, low: int, high: int) -> int:
    """Return the oldest store that answers have, by bisection: stores end in order, a generation at a time."""
    while low < high and not stores.has(low):
        step = 1
        while low + step < high and not stores.has(low + step):
            low, step = low + step, 2 * step
        low += 1
    return low


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.endurance.bounds")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long stores are published (30)")
    parser.add_argument("--ttl", type=int, default=10, help="seconds (10)")
    parser.add_argument("--entries", type=int, default=20_000, help="blocks (20000)")
    given = parser.parse_args()
    met = [measure_time(given.ttl, given.seconds), measure_number(given.entries, given.seconds)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
