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
from tests.e2e.conftest import free_port


class RedisServer:
    """Not running before ``start``; what it saved it has again after the next."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, *options: str) -> None:
        """Start it and do not wait; without options it keeps nothing."""
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        assert server is not None
        command = [server, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        command += options or ("--save", "", "--appendonly", "no")
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
        return Redis(port=self.port, protocol=2, socket_timeout=5)

    def kill(self) -> None:
        """As by the kernel, or a power cut: nothing is saved, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

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
