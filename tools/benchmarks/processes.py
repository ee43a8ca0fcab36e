"""The processes that a benchmark starts, and their CPU time according to the operating system.

CPU time is that of all threads of a process, with the resolution of the scheduler's clock. Unlike wall-clock time it
remains meaningful on a machine with other work.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import redis

from tests.ports import unused_port

START_SECONDS = 120.0
SETTLE_SECONDS = 120.0


#: The niceness of a process that gives way to others.
_LESS = 19
_libc = ctypes.CDLL(None, use_errno=True)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of all threads of a running process, including those that have ended."""
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, f"no CPU clock of process {pid}: {os.strerror(error)}")
    return time.clock_gettime(clock.value)


def queue_seconds(pid: int) -> float:
    """Return how long the main thread of a process has been ready to run without a core."""
    _, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return int(waited) / 1e9


def ready_seconds(pid: int) -> float:
    """Return how long the main thread of a process has run or been ready to run."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return (int(ran) + int(waited)) / 1e9


def prefer(priority: int, *pids: int) -> None:
    """Give these processes a core whenever they are ready to run, before any process of a lower priority."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(priority))


@contextmanager
def on_one_core(first: Sequence[int], last: Sequence[int]) -> Iterator[None]:
    """Let these processes share the first core of this process. Those in ``last`` give way to those in ``first``."""
    cores, priority = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    try:
        for pid in (*first, *last):
            _put(pid, {min(cores)}, priority + _LESS if pid in last else priority)
        yield
    finally:
        for pid in (*first, *last):
            _put(pid, cores, priority)


def _put(pid: int, cores: set[int], priority: int) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
        os.setpriority(os.PRIO_PROCESS, int(thread.name), priority)


_AWAKE = """
import os, sys
parent = os.getppid()
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextmanager
def awake_cores() -> Iterator[None]:
    """Run a loop that gives way to everything else on each core, so that no core sleeps.

    A hypervisor gives a sleeping core to other guests, whose work evicts data from its caches; and waking a core takes
    time.
    """
    loops = [
        subprocess.Popen([sys.executable, "-Sc", _AWAKE, str(core)])  # in this session, so that its priority counts
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Refused(SystemExit):
    """An answer whose status is not one of the 200s."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def wait_until(
    predicate: Callable[[], bool], description: str, seconds: float = SETTLE_SECONDS, pause_seconds: float = 0.02
) -> None:
    """Wait until a predicate is true. If it raises because a busy server answers 503, it is evaluated again."""
    deadline = time.monotonic() + seconds
    while not _is_so(predicate):
        if time.monotonic() >= deadline:
            raise SystemExit(f"after {seconds:g} s it is still not so: {description}")
        time.sleep(pause_seconds)


def _is_so(predicate: Callable[[], bool]) -> bool:
    try:
        return predicate()
    except Refused as refused:
        if refused.status != http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return False


@dataclass(frozen=True, slots=True)
class Server:
    """A process that answers HTTP on 127.0.0.1."""

    name: str
    pid: int
    port: int
    prefix: str = ""
    """The text before the paths of Dynamo's API."""

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the content of the answer. Raise Refused if its status is not one of the 200s."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(f"{self.name}: {method} {path}: {answer.status} {text[:400]!r}", answer.status)
        is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
        return json.loads(text) if is_json else text

    def post(self, path: str, **fields: Any) -> Any:
        return self.ask("POST", path, fields)

    def is_up(self) -> bool:
        try:
            self.ask("GET", "/health")
        except (OSError, http.client.HTTPException):
            return False
        return True


@dataclass(frozen=True, slots=True)
class RedisServer:
    url: str
    path: str
    pid: int
    client: redis.Redis

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def used(self) -> int:
        """Close every other connection, because connections take memory, and return the bytes by Redis' own count."""
        self.client.client_kill_filter(_type="normal", skipme=True)
        return int(self.client.info("memory")["used_memory"])

    def calls(self, command: str) -> int:
        """Return how often a command has been called so far."""
        return int(self.client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))

    def version(self) -> str:
        return str(self.client.info("server")["redis_version"])


def begin(command: Sequence[str], environ: Mapping[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a process. Tests replace this function with a faster one."""
    return subprocess.Popen(command, env=environ, stdout=output, stderr=output)


@contextmanager
def running(folder: Path, name: str, *command: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process while the body of the ``with`` runs. Its output goes to a file in ``folder``."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WAYMARK_")}
    with (folder / f"{name}.log").open("wb") as output:
        process = begin(command, kept | environ, output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def redis_server(folder: Path, *inside: str) -> Iterator[RedisServer]:
    """Start a new redis-server (or valkey-server) on a unix socket, without persistence. ``inside`` is a command that
    runs it, such as valgrind."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("no redis-server on PATH")
    path = folder / f"redis-{unused_port()}.sock"
    options = ("--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(folder))
    with (
        running(folder, path.stem, *inside, program, *options) as process,
        redis.Redis(unix_socket_path=str(path)) as client,
    ):

        def is_up() -> bool:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

        wait_until(is_up, "redis-server answers", START_SECONDS)
        yield RedisServer(f"unix://{path}", str(path), process.pid, client)


@contextmanager
def waymark(
    folder: Path,
    role: str,
    url: str,
    environ: Mapping[str, str] | None = None,
    *,
    is_pure: bool = False,
    is_awaited: bool = True,
    command: Sequence[str] = (sys.executable, "-m", "waymark"),
) -> Iterator[Server]:
    """Start ``waymark query`` or ``waymark ingest``, and wait until it is up. With ``is_pure`` it does not use the C
    extension.

    ``command`` can be the ``waymark`` of another environment.
    """
    port = unused_port()
    values = {"REDIS_URL": url, "HOST": "127.0.0.1", "LOG_LEVEL": "warning", "NATIVE": str(not is_pure).lower()}
    values["QUERY_DEADLINE_MS"] = "10000"  # 256 queries at once take longer than the default on a busy machine
    values["PROBE_PORT" if role == "ingest" else "PORT"] = str(port)
    settings = {f"WAYMARK_{key}": value for key, value in values.items()} | dict(environ or {})
    with running(folder, f"{role}-{port}", *command, role, **settings) as process:
        server = Server(f"waymark {role}", process.pid, port, "/dynamo")
        if is_awaited:
            wait_until(server.is_up, f"waymark {role} is up", START_SECONDS)
        yield server


@contextmanager
def dynamo(folder: Path, python: str, *arguments: str, is_awaited: bool = True) -> Iterator[Server]:
    """Start a ``dynamo.indexer``, and wait until it is up."""
    port = unused_port()
    with running(folder, f"dynamo-{port}", python, "-m", "dynamo.indexer", "--port", str(port), *arguments) as process:
        server = Server("dynamo.indexer", process.pid, port)
        if is_awaited:
            wait_until(server.is_up, "dynamo.indexer is up", START_SECONDS)
        yield server
