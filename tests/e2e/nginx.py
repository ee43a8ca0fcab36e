"""nginx in front of query replicas, by the configuration that operators are given, ``deploy/nginx.conf``."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import READY_SECONDS
from tests.patience import patient
from tests.ports import unused_port

CONF = Path(__file__).parents[2] / "deploy" / "nginx.conf"

# Debian keeps it where only root looks.
_PATHS = "/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin"


def nginx_command() -> str:
    """Where nginx is; the test fails where it is not."""
    command = shutil.which("nginx") or shutil.which("nginx", path=_PATHS)
    if command is None:
        pytest.fail("no nginx here: install it (Debian: apt-get install nginx)", pytrace=False)
    return command


def configured(directory: Path, port: int, replicas: Sequence[int]) -> str:
    """The configuration for replicas on these ports of this machine, writing to ``directory`` only.

    It waits for a slow replica as long as other deadlines of tests do.
    """
    text = CONF.read_text(encoding="utf-8")
    text, servers = re.subn(
        r"server query:13333 resolve (.*;)",
        lambda found: "\n        ".join(f"server 127.0.0.1:{each} {found[1]}" for each in replicas),
        text,
    )
    text, ports = re.subn(r"listen 13333;", f"listen 127.0.0.1:{port};", text)
    text, workers = re.subn(r"worker_processes auto;", "worker_processes 1;", text)
    text = re.sub(r"_timeout (\d+)s;", lambda found: f"_timeout {math.ceil(patient(float(found[1])))}s;", text)
    assert (servers, ports, workers) == (2, 1, 1), "deploy/nginx.conf has another form than this knows"
    return text.replace("/tmp/", f"{directory}/")


class Nginx:
    """A running nginx; killed, it can be started again on the same port."""

    def __init__(self, directory: Path, replicas: Sequence[int]) -> None:
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = directory / "nginx.log"
        self._conf = directory / "nginx.conf"
        self._conf.write_text(configured(directory, self.port, replicas), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def start(self) -> None:
        self._spawn()
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:

            async def is_up() -> bool:
                assert self._process is not None
                assert self._process.poll() is None, self.log
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await wait_until(is_up, "nginx passes requests on", READY_SECONDS)

    def _spawn(self) -> None:
        command = [nginx_command(), "-c", str(self._conf), "-p", str(self._conf.parent), "-e", "stderr"]
        with self._log.open("ab") as log:
            # One process, or those it begins would outlive it when it is killed.
            self._process = subprocess.Popen(
                [*command, "-g", "daemon off; master_process off;"], stdout=log, stderr=log
            )

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
