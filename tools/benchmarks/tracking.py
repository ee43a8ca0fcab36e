"""Measures the CPU that Redis would need, and save, with CLIENT TRACKING, which reports changed rows to replicas.

    python -m tools.benchmarks.tracking [--prompts 2000]

A query reads 16 rows and the version of the holder table. With tracking, Redis remembers which clients have read a key,
and sends them a message when it changes; a query of rows that the replica has kept then needs no read.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import hiredis

from tools.benchmarks.processes import RedisServer, redis_server

Command = Sequence[bytes | str]

ROWS = 16
REPLICAS = 8
VERSION = ("HGET", "wm:{1}:holders", "version")
_VALUE = b"0123456789abcdef0" * 32 + b" 17000000000000:ffffffff"


class Client:
    """A connection that sends commands and waits for their replies; tracking messages are counted."""

    def __init__(self, redis: RedisServer, *, is_tracking: bool) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(redis.path)
        self._reader = hiredis.Reader()
        self.pushed = 0
        if is_tracking:
            self.ask(("HELLO", "3"), ("CLIENT", "TRACKING", "ON"))

    def ask(self, *commands: Command) -> list[Any]:
        self._socket.sendall(b"".join(hiredis.pack_command(cast("Any", tuple(command))) for command in commands))
        replies: list[Any] = []
        while len(replies) < len(commands):
            reply = self._reader.gets()
            if reply is False:
                self._reader.feed(self._socket.recv(1 << 20))
            elif isinstance(reply, hiredis.PushNotification):
                self.pushed += 1
            else:
                replies.append(reply)
        return replies

    def query(self, rows: Iterable[bytes]) -> None:
        self.ask(("MGET", *rows), VERSION)

    def write(self, rows: Iterable[bytes]) -> None:
        self.ask(*[("SET", row, _VALUE) for row in rows])


def measure(redis: RedisServer, prompts: int) -> dict[str, float]:
    """Return the microseconds of Redis' CPU, by purpose."""
    asked = [[b"wm:{1}:%016x" % (ROWS * i + j) for j in range(ROWS)] for i in range(prompts)]
    plain = Client(redis, is_tracking=False)
    plain.ask(("HSET", *VERSION[1:], "0123456789abcdef"))
    for rows in asked:
        plain.write(rows)

    def each(what: Callable[[list[bytes]], object], units: int = 1) -> float:
        before = redis.cpu()
        for rows in asked:
            what(rows)
        return (redis.cpu() - before) / prompts / units * 1e6

    found = {
        "a query of 16 rows and the version": each(plain.query),
        "the version alone, which a query of kept rows would still ask for": each(lambda _: plain.ask(VERSION)),
    }
    trackers = [Client(redis, is_tracking=True) for _ in range(REPLICAS)]
    found["a query of 16 rows and the version, tracked for the first time"] = each(trackers[0].query)
    found["a query of 16 rows and the version, tracked before"] = each(trackers[0].query)
    found[f"a row written that 1 of {REPLICAS} replicas tracks"] = each(plain.write, ROWS)
    found["a row written that no replica tracks"] = each(plain.write, ROWS)
    for tracker in trackers:
        each(tracker.query)
    found[f"a row written that {REPLICAS} replicas track"] = each(plain.write, ROWS)
    for tracker in trackers:
        tracker.ask(("PING",))
    if sum(tracker.pushed for tracker in trackers) < ROWS * prompts * (REPLICAS + 1):
        raise SystemExit("Redis has not announced every row that was written")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=2000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wm-") as folder, redis_server(Path(folder)) as redis:
        time.sleep(0.1)
        for what, microseconds in measure(redis, given.prompts).items():
            print(f"{what:70} {microseconds:7.2f} us of Redis' CPU")


if __name__ == "__main__":
    main()
