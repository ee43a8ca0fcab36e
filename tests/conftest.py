"""Fixtures for every test: an emulated and a real Redis, a free port, and the implementations of the loops.

A test with the fixture ``redis`` runs twice, on fakeredis and on a real server, each time with an empty database. The
real server is started here, once per session, on a unix socket in a directory of its own. If there is no redis-server,
the tests fail, because a skipped test proves nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import certifi
import pytest
from fakeredis import FakeAsyncRedis, FakeServer
from redis import Redis as SyncRedis
from redis import utils as redis_utils
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.patience import VARIABLE, patient, wait_for
from tests.patience import wait_until as wait_until
from tests.ports import unused_port
from tests.unit import pytest_addoption as pytest_addoption
from tests.unit import pytest_collection as pytest_collection
from tests.unit import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.unit import pytest_configure as pytest_configure
from tests.unit import pytest_ignore_collect as pytest_ignore_collect
from tests.unit import pytest_runtest_protocol as pytest_runtest_protocol
from tests.unit import pytest_sessionstart as pytest_sessionstart
from tests.unit import pytest_xdist_auto_num_workers as pytest_xdist_auto_num_workers
from waymark.base import native

SERVER_START_SECONDS = 10.0

# A shell without a terminal starts background commands with SIGINT ignored, and all their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_patience_in_the_environment() -> None:
    os.environ.pop(VARIABLE, None)


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let httpx read one certificate authority instead of all, which take 20 ms for each client. No test uses the
    Internet."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    path = tmp_path_factory.mktemp("authority") / "ca.pem"
    path.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_version() -> Iterator[None]:
    """Cache the version of redis-py, which it would read from its package's file for each connection, in a
    millisecond."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_utils, "get_lib_version", cache(redis_utils.get_lib_version))
        yield


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Restore logging after each test, because a command that runs inside a test sets it up for the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers, root.level = handlers, level


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nothing listens."""
    return unused_port()


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[Path]:
    """Run a real redis-server for the test session, and yield its unix socket."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        pytest.fail("no redis-server on PATH: install it (Debian: apt-get install redis-server)", pytrace=False)
    # Not pytest's tmp_path, because the path of a unix socket may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="wm-") as directory:
        path = Path(directory) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--dir", directory, "--save", "", "--appendonly", "no"]
        log = Path(directory) / "redis.log"
        with log.open("wb") as output, subprocess.Popen([server, *options], stdout=output, stderr=output) as process:
            try:
                _wait_for_server(process, path, log)
                yield path
            finally:
                process.terminate()
                process.wait(timeout=patient(10))


def _wait_for_server(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    def answers() -> bool:
        if process.poll() is not None:
            pytest.fail(f"redis-server has ended:\n{log.read_text()}", pytrace=False)
        try:
            return bool(client.ping())
        except RedisConnectionError:
            return False

    with SyncRedis(unix_socket_path=str(path), protocol=2) as client:
        wait_for(answers, "redis-server answers", SERVER_START_SECONDS)


@pytest.fixture
def redis_url(redis_socket: Path) -> str:
    """Empty the real Redis, and return its URL."""
    with SyncRedis(unix_socket_path=str(redis_socket), protocol=2) as client:
        client.flushall()
        client.script_flush()
    return f"unix://{redis_socket}"


@pytest.fixture(params=["emulated", "real"])
async def redis(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    """Yield a client of an empty Redis, emulated or real, with replies as bytes over RESP2."""
    if request.param == "real":
        client = Redis.from_url(
            request.getfixturevalue("redis_url"), protocol=2, decode_responses=False, socket_timeout=patient(5)
        )
    else:
        client = FakeAsyncRedis(server=FakeServer(), protocol=2, decode_responses=False)
    async with client:
        yield client


#: The implementations of the loops of ``waymark.base.native`` on this machine; only Python if there was no compiler.
IMPLEMENTATIONS: list[native.Implementation] = ["pure", "native"] if native.is_built else ["pure"]


@pytest.fixture
def implementation_kept() -> Iterator[None]:
    """Select the earlier implementation again after the test."""
    before = native.implementation()
    yield
    native.select(before == "native")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, implementation_kept: None) -> str:
    """Run the test once with each implementation."""
    assert native.select(request.param == "native") == request.param
    return str(request.param)
