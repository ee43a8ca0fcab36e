"""Fixtures for every test: an emulated and a real Redis, a deadline to wait by, a free port.

Whoever asks for ``redis`` runs twice, on fakeredis and on a real server, each time with an empty database.
The real server is started here, once a session, on a unix socket in a directory of its own. Where there is no
redis-server the tests fail: a test that skips itself has proved nothing.
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

# A shell without a terminal starts what it puts in the background with Ctrl-C ignored, and all children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_patience_in_the_environment() -> None:
    os.environ.pop(VARIABLE, None)


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """httpx reads the certificates of every authority for each client, which takes 20 ms; no test asks the Internet."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    path = tmp_path_factory.mktemp("authority") / "ca.pem"
    path.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_version() -> Iterator[None]:
    """redis-py reads its own version from the file of its package for each connection, which takes a millisecond."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_utils, "get_lib_version", cache(redis_utils.get_lib_version))
        yield


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that ran inside a test has set up logging for its process, which goes on with other tests."""
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
    """A TCP port on 127.0.0.1 that nobody listens on."""
    return unused_port()


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[Path]:
    """The unix socket of a real redis-server that lives as long as the test session."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        pytest.fail("no redis-server on PATH: install it (Debian: apt-get install redis-server)", pytrace=False)
    # A path of ours, not pytest's tmp_path: a unix socket's may have 107 characters at most.
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
    """The URL of the real Redis, emptied."""
    with SyncRedis(unix_socket_path=str(redis_socket), protocol=2) as client:
        client.flushall()
        client.script_flush()
    return f"unix://{redis_socket}"


@pytest.fixture(params=["emulated", "real"])
async def redis(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    """A client of an empty Redis, replies as bytes over RESP2; once emulated, once real."""
    if request.param == "real":
        client = Redis.from_url(
            request.getfixturevalue("redis_url"), protocol=2, decode_responses=False, socket_timeout=patient(5)
        )
    else:
        client = FakeAsyncRedis(server=FakeServer(), protocol=2, decode_responses=False)
    async with client:
        yield client


#: What the loops of ``waymark.base.native`` can run by here: where there was no compiler it is Python only.
IMPLEMENTATIONS: list[native.Implementation] = ["pure", "native"] if native.is_built else ["pure"]


@pytest.fixture
def implementation_kept() -> Iterator[None]:
    """After the test, the implementation that was selected before it is selected again."""
    before = native.implementation()
    yield
    native.select(before == "native")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, implementation_kept: None) -> str:
    """The test runs once with each implementation."""
    assert native.select(request.param == "native") == request.param
    return str(request.param)
