"""A process that works with a model's files, and the socket to it: ``rendering`` and ``encoding`` are such programs.

A request has a length and a number for the program; an answer has a kind and a length.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from waymark.base.errors import TokenizerUnavailable
from waymark.tokenization.rendering import ANSWER, REQUEST


class ChildProcess:
    """A process that runs ``program``. Its calls block; they are for threads."""

    def __init__(self, program: str, *arguments: str) -> None:
        """Start the process. Raise TokenizerUnavailable if the system has no process or socket left for it."""
        self._parent = os.getpid()
        try:
            self._process, self.socket = _start(program, arguments)
        except OSError as error:
            raise TokenizerUnavailable(
                f"a process of a tokenizer or of a chat template cannot be started: {error}; try again in a moment"
            ) from None
        # Ends the process even if no caller does.
        self._finalizer = weakref.finalize(self, _end, self._process, self.socket, self._parent)

    def is_own(self) -> bool:
        """Return whether this process has started it: after a fork, two processes share the socket."""
        return self._parent == os.getpid()

    def is_usable(self) -> bool:
        """Return whether it runs, and is this process's own."""
        return self.is_own() and self._finalizer.alive and self._process.poll() is None

    def ask(self, request: bytes, number: int, *, answer_max: int, seconds: float) -> tuple[bytes, bytes]:
        """Send a request and return the kind of its answer, and the answer. Raises EOFError or OSError if the process
        ends, and TimeoutError if it does not answer in time.
        """
        deadline = monotonic() + seconds
        self.socket.settimeout(seconds)
        self.socket.sendall(REQUEST.pack(len(request), number) + request)
        kind, size = ANSWER.unpack(self._read(ANSWER.size, deadline))
        # A model's file may have taken over the process: its answers are not trusted.
        if size > answer_max:
            raise EOFError
        return kind, self._read(size, deadline)

    def kill(self) -> None:
        """End it in the middle of its work."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until it has ended; its socket stays open."""
        self._process.wait()

    def end(self) -> int:
        """End it and return its status."""
        self._finalizer()
        return self._process.returncode or 0

    def _read(self, size: int, deadline: float) -> bytes:
        pieces = []
        while size:
            seconds_left = deadline - monotonic()
            if seconds_left <= 0:
                raise TimeoutError
            self.socket.settimeout(seconds_left)
            piece = self.socket.recv(min(size, 2**18))
            if not piece:
                raise EOFError
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def is_out_of_cpu(status: int) -> bool:
    """Return whether a process was ended by its bound of CPU."""
    return status in (-signal.SIGPROF, -signal.SIGXCPU)


def named(status: int) -> str:
    """Return a process's status in words."""
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"status {status}"


def _start(program: str, arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process. Return it, and the socket to it."""
    connection, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    with theirs:
        try:
            process = subprocess.Popen(
                # -P: modules next to the file have names of other packages' modules.
                [sys.executable, "-P", str(Path(program)), str(theirs.fileno()), *arguments],
                env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A signal to the group of the parent, as a terminal sends it, is not for this process.
                start_new_session=True,
            )
        except OSError:
            connection.close()
            raise
    return process, connection


def _end(process: subprocess.Popen[bytes], connection: socket.socket, parent: int) -> None:
    connection.close()
    if os.getpid() != parent:
        process.returncode = 0  # the child of another process
        return
    try:
        # It ends by itself at the end of its socket, unless it is in the middle of its work.
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
