"""A publisher that queries the blocks that it has published, and measures the time until they are visible.

    python -m tools.benchmarks.visible HOW WHERE PROBES PAUSE GAP

This is a separate process. It binds a socket, prints its endpoint, and waits for a subscriber. Then it publishes one
store of four new blocks at a time, and repeats a query until the last block is visible: in Redis itself (HOW is
``redis``, WHERE its unix socket), in the answer of a server (HOW is ``query``, WHERE ``<port><path>``), or in the
answer of the floor, which is the number of the newest frame (HOW is ``floor``, WHERE a port). PAUSE is the time between
two queries, and GAP the mean time between two stores, in seconds. Prints the latencies in milliseconds as a list,
followed by the number of queries.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
import zmq

from tools.benchmarks.feed import Publisher, stored
from tools.benchmarks.processes import Server, wait_until
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, VOCABULARY
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.rows import parse

BLOCKS = 4
_PROBE_SECONDS = 30.0
_PAUSE_SECONDS, _GAP_SECONDS = 0.000_1, 0.015


class Probe:
    """The process, seen from the benchmark."""

    def __init__(self, process: subprocess.Popen[str], number: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._output = process.stdout
        self._errors = process.stderr
        self._number = number
        self.endpoint = process.stdout.readline().strip()
        self.asked = 0
        """The number of its queries, set by ``latencies_ms``."""

    def register(self, server: Server) -> None:
        server.post(
            f"{server.prefix}/register",
            instance_id=self._number,
            model_name=MODEL,
            block_size=BLOCK_SIZE,
            endpoint=self.endpoint,
            dp_rank=0,
        )

    def is_done(self) -> bool:
        return self._process.poll() is not None

    def latencies_ms(self) -> list[float]:
        """Wait until the process has ended, and return the latencies. Raise SystemExit with its last line of output if
        it has failed."""
        said = self._errors.read().strip()
        if self._process.wait():
            raise SystemExit(f"the probe has failed: {said.rpartition(chr(10))[2] or 'it says nothing'}")
        found: list[float]
        found, self.asked = json.loads(self._output.read())
        return found


@contextmanager
def probing(
    where: str, how: str, probes: int, pause_seconds: float = _PAUSE_SECONDS, gap_seconds: float = _GAP_SECONDS
) -> Iterator[Probe]:
    number = random.randrange(10**6, 10**9)
    given = map(str, (probes, pause_seconds, gap_seconds))
    command = (sys.executable, "-m", "tools.benchmarks.visible", how, where, *given)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Probe(process, number)
        except BaseException:
            process.kill()
            raise


# ---- the process -----------------------------------------------------------------------------------


def main() -> None:
    how, where, probes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    pause_seconds, gap_seconds = map(float, sys.argv[4:])
    is_there = {"redis": in_redis, "query": _by_query, "floor": _by_floor}[how](where)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = Publisher(context, 0)
    print(publisher.endpoint, flush=True)
    wait_until(publisher.has_subscriber, "somebody has subscribed")
    chosen = random.Random()
    found: list[float] = []
    asked = 0
    for _ in range(probes + 3):
        tokens = chosen.choices(range(VOCABULARY), k=BLOCKS * BLOCK_SIZE)
        payload = stored([chosen.getrandbits(64) for _ in range(BLOCKS)], None, tokens)
        is_visible = is_there(tokens)
        time.sleep(chosen.uniform(0.3, 1.7) * gap_seconds)
        began = time.perf_counter()
        publisher.send(payload)
        while not is_visible():
            if time.perf_counter() - began > _PROBE_SECONDS:
                raise SystemExit(f"blocks are not visible by {how} {_PROBE_SECONDS:g} s after they were published")
            time.sleep(pause_seconds)
            asked += 1
        asked += 1
        found.append((time.perf_counter() - began) * 1e3)
    publisher.close()
    context.term()
    print(json.dumps([found[3:], asked]))  # the first three include the time to connect


def in_redis(path: str) -> Callable[[list[int]], Callable[[], bool]]:
    """Return a function that takes the tokens of a new prompt of one piece, and returns a check: whether the row of the
    prompt has a holder of its last block."""
    client = redis.Redis(unix_socket_path=path)

    def look_for(tokens: list[int]) -> Callable[[], bool]:
        keys = extend(None, token_bytes(tokens), BLOCK_SIZE)
        last = len(keys) - 1

        def is_there() -> bool:
            value = client.get(f"wm:{{1}}:{keys[0]:016x}")
            return isinstance(value, bytes) and any(bits >> last & 1 for bits in parse(value).holders.values())

        return is_there

    return look_for


def _by_query(where: str) -> Callable[[list[int]], Callable[[], bool]]:
    port, _, path = where.partition("/")
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=_PROBE_SECONDS)

    def look_for(tokens: list[int]) -> Callable[[], bool]:
        body = json.dumps({"model_name": MODEL, "token_ids": tokens})

        def is_there() -> bool:
            connection.request("POST", f"/{path}", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            tenants = [answer["instances"]] if "instances" in answer else answer.values()  # Dynamo's API
            return any(row["longest_matched"] == len(tokens) for rows in tenants for row in rows.values())

        return is_there

    return look_for


def _by_floor(where: str) -> Callable[[list[int]], Callable[[], bool]]:
    connection = http.client.HTTPConnection("127.0.0.1", int(where), timeout=_PROBE_SECONDS)
    numbers = itertools.count()

    def look_for(tokens: list[int]) -> Callable[[], bool]:
        body = json.dumps({"model_name": MODEL, "token_ids": tokens})
        seq = next(numbers)

        def is_there() -> bool:
            connection.request("POST", "/query", body, {"Content-Type": "application/json"})
            return bool(json.loads(connection.getresponse().read()) >= seq)

        return is_there

    return look_for


if __name__ == "__main__":
    main()
