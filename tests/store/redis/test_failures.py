"""Whatever Redis answers, and however it fails: an error of ours, in bounded time, with the way out in its sentence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest

from tests.listening import listening, port_of
from tests.patience import patient
from tests.topologies import farm
from waymark.base.errors import StoreUnavailable
from waymark.store.redis.client import RedisClient
from waymark.store.redis.credentials import Credentials
from waymark.store.redis.read_connection import Replies

#: Of one connection or reply, where something is answered; and where nothing is, which every command waits for.
TIMEOUT_SECONDS = 5.0
SILENT_SECONDS = 0.1
#: A command may take three of them, and this machine its time.
SLACK_SECONDS = 5.0

Answer = Callable[[list[bytes]], bytes | None]


@asynccontextmanager
async def fake(answer: Answer) -> AsyncIterator[int]:
    """A server that answers each command with these bytes, None for a closed connection; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader()
        while data := await reader.read(65536):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                said = answer(command)
                if said is None:
                    return
                writer.write(said)

    async with listening(serve) as server:
        yield port_of(server)


WAYS: dict[str, Callable[[RedisClient], Awaitable[Any]]] = {
    "run": lambda client: client.run("name_birth", ["wm:birth"], ["word"]),
    "hget": lambda client: client.hget("wm:groups", "field"),
    "hgetall": lambda client: client.hgetall("wm:groups"),
    "hscan": lambda client: client.hscan("wm:groups", 0, 10),
    "several": lambda client: client.several([("HGET", "wm:groups", "field"), ("HGET", "wm:publishers", "field")]),
    "ping": lambda client: client.ping(),
    "infos": lambda client: client.infos(),
    "load_scripts": lambda client: client.load_scripts(),
    "publish": lambda client: client.publish("wm:control", "word"),
    "subscription": lambda client: _subscribed(client),
    "ask": lambda client: client.ask(b"wm:groups", b"*2\r\n$7\r\nHGETALL\r\n$9\r\nwm:groups\r\n", Replies(1), None),
}


async def _subscribed(client: RedisClient) -> None:
    async with client.subscription("wm:control") as subscription:
        while await subscription.get_message(seconds=TIMEOUT_SECONDS) is None:
            continue


async def check_all_ways(
    url: str, sentence: str, credentials: Credentials | None = None, *, is_silent: bool = False
) -> None:
    """Where it is silent, a subscription hears nothing, which is no error; a question has a bound of its own."""
    timeout_seconds = SILENT_SECONDS if is_silent else TIMEOUT_SECONDS
    client = RedisClient.open(url, timeout_seconds=timeout_seconds, credentials=credentials)
    try:
        for name, way in WAYS.items():
            if is_silent and name in ("subscription", "ask"):
                continue
            began = time.monotonic()
            with pytest.raises(StoreUnavailable) as caught:
                await way(client)
            assert time.monotonic() - began < 3 * timeout_seconds + patient(SLACK_SECONDS), name
            assert sentence in caught.value.sentence, name
            assert "127.0.0.1" in caught.value.sentence, name
            assert "hunter2" not in caught.value.sentence, name
    finally:
        await client.close()


PERMITS = "WAYMARK_REDIS_USERNAME"
LETS_IN = "WAYMARK_REDIS_PASSWORD_FILE"
ERRORS = {
    "READONLY You can't write against a read only replica.": "READONLY",
    "LOADING Redis is loading the dataset in memory": "loading the dataset",
    "OOM command not allowed when used memory > 'maxmemory'.": "raise its maxmemory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": "MASTERDOWN",
    "NOSCRIPT No matching script. Please use EVAL.": "No matching script",
    "CLUSTERDOWN The cluster is down": "CLUSTERDOWN",
    "TRYAGAIN Multiple keys request during rehashing of slot": "during rehashing",
    "MOVED 1 127.0.0.1:1": "127.0.0.1:1",
    "ASK 1 127.0.0.1:1": "127.0.0.1:1",
    "BUSY Redis is busy running a script.": "BUSY",
    "MISCONF Redis is configured to save RDB snapshots, but it is unable to persist to disk.": "MISCONF",
    "ERR max number of clients reached": "max number of clients",
    "NOAUTH Authentication required.": LETS_IN,
    "WRONGPASS invalid username-password pair or user is disabled.": LETS_IN,
    "NOPERM this user has no permissions to run the command": PERMITS,
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.split()[0])
async def test_an_error_of_a_server_is_ours(error: str) -> None:
    async with fake(lambda _: f"-{error}\r\n".encode()) as port:
        await check_all_ways(f"redis://127.0.0.1:{port}", ERRORS[error])


@pytest.mark.parametrize(
    "before", ["", "ERR Error running script (call to f_8568db0c): @user_script:40: @user_script: 40: -"]
)
@pytest.mark.parametrize("name", ["name_birth", "end_overdue"], ids=["library", "shared-connection"])
async def test_a_demoted_primary_is_left_whose_script_cannot_write(name: str, before: str) -> None:
    """Redis 6.2 names the script before the error of a command in it."""
    errors = [f"-{before}READONLY You can't write against a read only replica.\r\n".encode()]

    async with fake(lambda _: errors.pop() if errors else b"*2\r\n$7\r\napplied\r\n:0\r\n") as port:
        client = RedisClient.open(f"redis://127.0.0.1:{port}")
        try:
            assert await client.run(name, ["wm:birth"], ["8"]) == [b"applied", 0]
        finally:
            await client.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.split()[0])
async def test_an_error_of_a_node_of_a_cluster_is_ours(error: str) -> None:
    """The map of slots is answered well, and names this one node."""

    def answer(command: list[bytes]) -> bytes:
        if command[:2] == [b"CLUSTER", b"SLOTS"]:
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % port
        return f"-{error}\r\n".encode()

    async with fake(answer) as port:
        # Where it sends us, nobody is.
        sentence = "127.0.0.1" if error.startswith(("MOVED", "ASK")) else ERRORS[error]
        await check_all_ways(f"redis+cluster://127.0.0.1:{port}", sentence)


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:{}", "redis+cluster://127.0.0.1:{}", "redis+sentinel://127.0.0.1:{}/m"]
)
@pytest.mark.parametrize(
    "said", [None, b"", b"nonsense\r\n", b"*-7\r\n"], ids=["closed", "silent", "nonsense", "broken"]
)
async def test_what_is_no_redis_is_ours_too(url: str, said: bytes | None) -> None:
    async with fake(lambda _: said) as port:
        await check_all_ways(url.format(port), "", is_silent=said == b"")


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:{}", "redis+cluster://127.0.0.1:{}", "redis+sentinel://127.0.0.1:{}/m"]
)
async def test_nobody_there_is_ours(url: str, free_port: int) -> None:
    await check_all_ways(url.format(free_port), "")


async def test_sentinels_that_know_no_such_primary_say_so() -> None:
    async with fake(lambda _: b"-ERR No such master with that name\r\n") as port:
        await check_all_ways(f"redis+sentinel://127.0.0.1:{port}/main", 'names a primary "main"')


async def test_a_wrong_password_of_a_real_server_names_the_settings_and_no_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    with farm() as servers:
        server = servers.start("--requirepass", "right", more={"password": "right"})
        await check_all_ways(server.url, LETS_IN)
        await check_all_ways(server.url, LETS_IN, Credentials(password_file=secret))
        await check_all_ways(server.url.replace("//", "//user:hunter2@"), LETS_IN)


async def test_a_password_that_was_changed_is_used_by_the_next_connection(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    with farm() as servers:
        server = servers.start("--requirepass", "first", more={"password": "first"})
        client = RedisClient.open(server.url, credentials=Credentials(password_file=secret))
        await client.ping()
        server.ask("CONFIG", "SET", "requirepass", "second")
        server.options["password"] = "second"
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(StoreUnavailable, match=LETS_IN):
            await client.ping()
        secret.unlink()
        with pytest.raises(StoreUnavailable, match=r"WAYMARK_REDIS_PASSWORD_FILE .* cannot be read"):
            await client.ping()
        secret.write_text("second\n")
        await client.ping()
        await client.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{}", "redis+cluster://127.0.0.1:{}"])
async def test_a_server_that_is_frozen_is_unavailable_in_bounded_time(url: str) -> None:
    with farm() as servers:
        options = ("--cluster-enabled", "yes") if "cluster" in url else ()
        server = servers.start(*options)
        if options:
            server.ask("CLUSTER", "ADDSLOTS", *range(16384))
        client = RedisClient.open(url.format(server.port), timeout_seconds=10.0)
        await client.load_scripts()
        await client.close()
        server.pause()
        await check_all_ways(url.format(server.port), "", is_silent=True)
        server.resume()
