"""A redis-server of one test's own, on a port of its own, which the test kills, freezes, empties or reconfigures."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from tests.conftest import wait_until
from tests.patience import patient
from tests.ports import unused_port

_KEEPS_NOTHING = ("--save", "", "--appendonly", "no")


class RedisServer:
    """Not running before ``start``; with ``keeps_data`` everything it has answered survives a kill."""

    def __init__(self, directory: Path, *, keeps_data: bool = False) -> None:
        self.port = unused_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._usual = ("--save", "", "--appendonly", "yes", "--appendfsync", "always") if keeps_data else _KEEPS_NOTHING
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, *options: str) -> None:
        """Start it and do not wait; without options it is as usual."""
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        assert server is not None
        command = [server, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        command += options or self._usual
        with (self._directory / "redis.log").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    async def start(self, *options: str) -> None:
        """Start it; there when this returns."""
        self.launch(*options)
        await wait_until(self.answers, "redis-server answers")

    def answers(self) -> bool:
        try:
            with self.admin() as admin:
                return bool(admin.ping())
        except RedisError:
            return False

    def admin(self) -> Redis:
        """For the test itself; to be closed."""
        return Redis(port=self.port, protocol=2, socket_timeout=patient(5))

    def kill(self) -> None:
        """As by the kernel, or a power cut: nothing is saved, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """What it kept is lost; it is to be down."""
        shutil.rmtree(self._directory / "appendonlydir", ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """It accepts connections (the kernel does) and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """One that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="wm-") as directory:
        server = RedisServer(Path(directory))
        try:
            yield server
        finally:
            server.kill()
