"""A load generator in a process of its own, so that it shares nothing with the server but the machine.

    python -m tools.benchmarks.load PORT PATH BODIES CONNECTIONS

It prints ``ready`` when CONNECTIONS persistent connections are open, and waits for a line. Then it posts every body of
the file BODIES once, with one request at a time on each connection, and prints ``{"seconds", "failed", "overtaken",
"latencies_ms": [...]}``. ``write_bodies`` makes the file.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

_ANSWER_SECONDS = 60.0


class Counted(Protocol):
    """A server whose CPU is counted."""

    def cpu(self) -> float:
        """Return the CPU of all threads since the start, in seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """The result of one run of the load generator."""

    seconds: float
    requests: int
    latencies_ms: list[float]
    overtaken: int = 0
    """The number of answers that arrived after the answer to a later request."""
    cpu: Sequence[float] = ()
    """The CPU that each counted server has used for the requests, in seconds."""

    @property
    def p50_ms(self) -> float:
        return self.percentile_ms(50)

    def percentile_ms(self, percent: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


def write_bodies(path: Path, bodies: Iterable[bytes]) -> Path:
    with path.open("wb") as file:
        for body in bodies:
            file.write(struct.pack(">I", len(body)) + body)
    return path


class Generator:
    """A load generator that has opened its connections and waits for ``begin``."""

    def __init__(self, port: int, path: str, bodies: Path, connections: int = 1) -> None:
        command = (sys.executable, "-m", "tools.benchmarks.load", str(port), path, str(bodies), str(connections))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def begin(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def end(self, cpu: Callable[[], Sequence[float]] = tuple) -> Load:
        """Return the result, with the CPU that ``cpu`` returns after the last answer. Raise SystemExit if a status was
        not 200.
        """
        found = json.loads(self._line())
        after = cpu()
        self._process.communicate()
        if found["failed"]:
            raise SystemExit(f"{found['failed']} requests were not answered with 200, such as {found['sample']}")
        latencies = found["latencies_ms"]
        return Load(found["seconds"], len(latencies), latencies, found["overtaken"], after)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            raise SystemExit("the load generator failed")
        return line


def run(port: int, path: str, bodies: Path, connections: int = 1, *, of: Sequence[Counted] = ()) -> Load:
    """Post all bodies. The CPU of the servers ``of`` is counted from the time at which all connections are open, so it
    does not include the start of the load generator.
    """
    generator = Generator(port, path, bodies, connections)
    before = [server.cpu() for server in of]
    generator.begin()
    return generator.end(lambda: [server.cpu() - earlier for server, earlier in zip(of, before, strict=True)])


# ---- the process -----------------------------------------------------------------------------------


class _Connection:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.began = 0.0
        self.number = 0
        """The number of the request under way; requests are numbered in the order in which they are sent."""
        self._received = b""

    def send(self, request: bytes, number: int) -> None:
        self.number = number
        self.began = time.perf_counter()
        self.socket.sendall(request)

    def answer(self) -> bytes | None:
        """Return the whole answer when it has arrived."""
        piece = self.socket.recv(262_144)
        if not piece:
            raise SystemExit("the server closed a connection")
        self._received += piece
        head, separator, content = self._received.partition(b"\r\n\r\n")
        if not separator:
            return None
        length = next(
            int(line.partition(b":")[2]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        )
        if len(content) < length:
            return None
        answer, self._received = self._received, b""
        return answer


def read_bodies(path: Path) -> Iterable[bytes]:
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from(">I", content, at)
        yield content[at + 4 : at + 4 + length]
        at += 4 + length


def main() -> None:
    port, path, connections = int(sys.argv[1]), sys.argv[2], int(sys.argv[4])
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    head += "Content-Length: %d\r\n\r\n"
    waiting = deque((head % len(body)).encode() + body for body in read_bodies(Path(sys.argv[3])))
    latencies: list[float] = []
    failed, sample = 0, ""
    numbers, newest, overtaken = count(), -1, 0
    with selectors.DefaultSelector() as selector:
        opened = [_Connection(port) for _ in range(connections)]
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        for connection in opened:
            if waiting:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                connection.send(waiting.popleft(), next(numbers))
        while selector.get_map():
            ready = selector.select(_ANSWER_SECONDS)
            if not ready:
                raise SystemExit(f"no answer within {_ANSWER_SECONDS:g} s")
            for key, _ in ready:
                connection = key.data
                answer = connection.answer()
                if answer is None:
                    continue
                latencies.append((time.perf_counter() - connection.began) * 1e3)
                overtaken += connection.number < newest
                newest = max(newest, connection.number)
                if not answer.startswith(b"HTTP/1.1 200"):
                    failed, sample = failed + 1, answer[:300].decode(errors="replace")
                if waiting:
                    connection.send(waiting.popleft(), next(numbers))
                else:
                    selector.unregister(connection.socket)
        seconds = time.perf_counter() - began
    found = {"seconds": seconds, "failed": failed, "sample": sample, "overtaken": overtaken}
    print(json.dumps(found | {"latencies_ms": latencies}))


if __name__ == "__main__":
    main()
