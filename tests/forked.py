"""Starts processes of ``waymark`` without an import: they are forked from a process that has imported it.

To import all of Waymark takes a second of CPU, and the tests start several hundred processes. A forked process has its
own environment, directory, output and exit code, like any other. Each test process starts one ``python -m
tests.forked``, from which they are forked, and which ends with the test process. When coverage is measured, processes
are started in the usual way, because it is measured from the beginning of a process; and also on systems without pidfd
(Linux has it).
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NoReturn, Protocol

import certifi

from tests.patience import patient, patient_settings

_REQUEST_MAX = 1 << 16
_STATUS = struct.Struct("i")
_START_SECONDS = 60.0
#: Modules that roles and commands import on demand. gRPC does not survive a fork, so a picker imports it by itself.
_IMPORTED = (
    *("waymark.runtime.replica", "waymark.runtime.worker", "waymark.runtime.gateway", "waymark.gateway.application"),
    *("waymark.runtime.commands", "waymark.simulator.run", "waymark.tokenization.local"),
    *("waymark.cli.roles", "waymark.cli.remote", "waymark.cli.looking", "waymark.cli.registering"),
    *("waymark.console.ask", "waymark.console.decisions", "waymark.console.doctor", "waymark.console.drain"),
    *("waymark.console.events", "waymark.console.inspections", "waymark.console.publishers", "waymark.cli.trials"),
    *("waymark.epp.process_call", "waymark.cli.moving", "waymark.base.setting_types", "waymark.base.exposition"),
    *("waymark.runtime.http_server", "waymark.store.index", "waymark.store.gauges", "waymark.store.claim_writer"),
    *("waymark.store.registry", "waymark.store.redis.cluster", "waymark.store.redis.connect"),
    *("encodings.idna", "fakeredis"),
    *("httpcore", "lupa", "prometheus_client", "uvicorn.lifespan.off", "uvicorn.main", "uvloop"),
)


class Process(Protocol):
    """The methods that a forked process shares with ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def start(
    words: Sequence[str],
    environ: Mapping[str, str],
    output: BinaryIO | int,
    directory: Path,
    *,
    error: BinaryIO | None = None,
    stdin: BinaryIO | None = None,
) -> Process:
    """Start ``waymark`` with these words. Its environment has only ``environ`` and patient deadlines.

    Standard error also goes to ``output``, unless ``error`` is given. ``output`` can be ``subprocess.DEVNULL``.
    """
    environ = {f"WAYMARK_{name.upper()}": str(value) for name, value in patient_settings().items()} | dict(environ)
    if "COVERAGE_PROCESS_START" in os.environ or not hasattr(os, "pidfd_open"):
        command = [sys.executable, "-m", "waymark", *words]
        told = output if error is None else error
        return subprocess.Popen(command, cwd=directory, env=environ, stdin=stdin, stdout=output, stderr=told)
    server = _server()
    ours, theirs = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        request = json.dumps([list(words), environ, str(directory)]).encode()
        written = nothing if isinstance(output, int) else output.fileno()
        read, told = nothing if stdin is None else stdin.fileno(), written if error is None else error.fileno()
        socket.send_fds(server, [request], [read, written, told, theirs])
        (pid,) = _STATUS.unpack(server.recv(_STATUS.size))
    finally:
        os.close(theirs)
        os.close(nothing)
    return _Forked(pid, ours)


async def run(
    words: Sequence[str], environ: Mapping[str, str], directory: Path, stdin: bytes = b"", seconds: float = 60.0
) -> tuple[int, str, str]:
    """Run a command to its end. Return its exit code, its output, and its standard error."""
    with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as error:
        given.write(stdin)
        given.seek(0)
        process = start(words, environ, output, directory, error=error, stdin=given)
        try:
            code = await asyncio.to_thread(process.wait, patient(seconds))
        finally:
            process.kill()
        output.seek(0)
        error.seek(0)
        return code, output.read().decode(), error.read().decode()


class _Forked:
    """A forked process. The process from which it was forked sends its exit code through a pipe."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pipe = pipe

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None or not self._is_over(0) else self._read()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._is_over(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._read() if self.returncode is None else self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _is_over(self, timeout: float | None) -> bool:
        return bool(select.select([self._pipe], [], [], timeout)[0])

    def _read(self) -> int:
        (status,) = _STATUS.unpack(os.read(self._pipe, _STATUS.size))  # raises if the parent has ended
        os.close(self._pipe)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@cache
def _server() -> socket.socket:
    """Start the process that imports everything, and return a socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(patient(_START_SECONDS))
    with theirs:
        # The file of the only certificate authority for tests; to read all takes 40 ms for each command.
        command = [sys.executable, "-m", "tests.forked", str(theirs.fileno()), certifi.where()]
        # PYTHONPATH comes first, because it may name the source of another checkout.
        path = os.pathsep.join(each for each in (os.environ.get("PYTHONPATH", ""), *sys.path) if each)
        root = Path(__file__).parents[1]
        # numpy, which the emulated Redis imports, would start threads.
        environ = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=root, pass_fds=[theirs.fileno()], env=environ)
    atexit.register(process.wait)
    atexit.register(ours.close)  # runs first
    return ours


# ---- the process that is forked --------------------------------------------------------------------


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request. Return the words of a command in the new process; never return in this one."""
    running: dict[int, tuple[int, int]] = {}
    """pidfd -> process, and the pipe for its status."""
    while True:
        ready, _, _ = select.select([requests.fileno(), *running], [], [])
        for pidfd in running.keys() & ready:
            pid, pipe = running.pop(pidfd)
            os.write(pipe, _STATUS.pack(os.waitpid(pid, 0)[1]))
            os.close(pipe)
            os.close(pidfd)
        if requests.fileno() not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_MAX, 4)
        if not request:
            os._exit(0)
        *streams, pipe = descriptors
        pid = os.fork()
        if pid == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            # Make the streams anew, as the interpreter does, because the earlier ones may have been seekable files.
            sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
            requests.detach()
            os.closerange(3, 1024)
            words, environ, directory = json.loads(request)
            os.environ.clear()
            os.environ.update(environ)
            os.chdir(directory)
            sys.argv = ["waymark", *words]
            return list(words)
        for stream in streams:
            os.close(stream)
        running[os.pidfd_open(pid)] = pid, pipe
        requests.send(_STATUS.pack(pid))


def _begin_once() -> None:
    """Make the model of the settings, the routes of an API and its records, which a process keeps once it has them."""
    from waymark.api.application import create_app
    from waymark.base.metrics import Metrics
    from waymark.base.setting_types import model_of
    from waymark.base.settings import Settings
    from waymark.runtime import parts
    from waymark.store.store import Store

    model_of(Settings)
    settings = Settings()
    store, metrics = Store.open("memory://"), Metrics()
    of_text = parts.tokenizers(settings, metrics, store)
    create_app(store, parts.api_options(settings), parts.selection_options(settings), metrics, of_text)


def _end(code: int) -> NoReturn:
    """End like the interpreter, but free no memory: to free a page that the fork shares would copy it first."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import waymark
    from waymark.cli import main

    for name in _IMPORTED:
        with suppress(ModuleNotFoundError):  # another checkout may not have this module
            import_module(name)
    authorities = sys.argv[2]
    certifi.where = lambda: authorities
    if Path(waymark.__file__).is_relative_to(Path(__file__).parents[1]):  # another checkout has other functions, too
        _begin_once()
    gc.freeze()
    code: Any
    try:
        code = main(_serve(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as end:
        code = end.code
    if isinstance(code, int):
        _end(code)
    raise SystemExit(code)
