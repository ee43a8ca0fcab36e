"""Lines: the library's connections asked in our own words, on every transport and loop, and back to it unharmed."""

from __future__ import annotations

import asyncio
import gc
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import hiredis
import pytest
import trustme
import uvloop
from redis.exceptions import ResponseError

from tests.conftest import wait_until
from waymark.errors import StoreUnavailable
from waymark.metrics import Metrics
from waymark.store.access import Access
from waymark.store.client import Client
from waymark.store.connect import Pool
from waymark.store.lending import KEPT_MAX
from waymark.store.line import Replies

LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LONG = b"7" * 3_000_000


@dataclass
class Fake:
    """A server that says what it was asked, after what it was told to do first."""

    url: str = ""
    access: Access = field(default_factory=Access)
    opened: int = 0
    asked: int = 0
    said: Callable[[bytes], bytes] = lambda word: b"$%d\r\n%b\r\n" % (len(word), word)
    open: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open.append(writer)
        parser = hiredis.Reader()
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    self.asked += 1
                    writer.write(b"+PONG\r\n" if command == [b"PING"] else self.said(command[-1]))
        except ConnectionError:
            return  # the client has heard enough
        finally:
            self.open.remove(writer)
            writer.close()

    def client(self, *, connections: int = 64) -> Client:
        client = Client.open(self.url, access=self.access, timeout_seconds=5.0, connections=connections)
        client.metrics = Metrics()
        return client


@asynccontextmanager
async def fake(transport: str = "tcp", directory: Path | None = None) -> AsyncIterator[Fake]:
    fake = Fake()
    if transport == "unix":
        assert directory is not None
        path = directory / "s"
        fake.url = f"unix://{path}"
        server: asyncio.Server = await asyncio.start_unix_server(fake.serve, str(path))
    else:
        context = None
        if transport == "tls":
            assert directory is not None
            ca, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            ca.issue_cert("127.0.0.1").configure_cert(context)
            ca.cert_pem.write_to_path(str(directory / "ca.pem"))
            fake.access = Access(tls_ca_file=directory / "ca.pem")
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        fake.url = f"{'rediss' if context else 'redis'}://127.0.0.1:{port}"
    async with server:
        yield fake


def ask(client: Client, *words: bytes, seconds: float = 30.0) -> Awaitable[list[bytes]]:
    packed = b"".join(b"*2\r\n$4\r\nECHO\r\n$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return client.ask(b"key", packed, Replies(len(words)), asyncio.get_running_loop().time() + seconds)


def errors(client: Client) -> float:
    """How many have been counted."""
    assert client.metrics is not None
    found = [each for each in client.metrics.registry.collect() if each.name == "waymark_redis_errors"]
    return sum(sample.value for each in found for sample in each.samples if sample.name.endswith("_total"))


async def _goes_to_and_fro(transport: str, directory: Path) -> None:
    async with fake(transport, directory) as server:
        client = server.client()
        assert client._lender is not None
        for _ in range(3):
            assert await ask(client, b"one", b"two") == [b"one", b"two"]
            assert await ask(client, LONG) == [LONG]
        assert server.opened == 1
        await client._lender.put_back()
        await client.ping()  # by the library, over the same connection
        assert await client.several([("ECHO", LONG)]) == [LONG]
        assert await ask(client, b"three") == [b"three"]
        assert server.opened == 1
        (line,) = client._lender._kept
        server.open[0].close()
        await wait_until(lambda: not line.is_idle, "the connection is lost")
        assert await ask(client, b"four") == [b"four"]
        assert (server.opened, errors(client)) == (2, 0)
        server.open[0].close()
        await client.close()


@LOOPS
@pytest.mark.parametrize("transport", ["tcp", "unix", "tls"])
def test_a_connection_goes_to_and_fro_between_us_and_the_library(
    loop_factory: LoopFactory, transport: str, tmp_path: Path
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_goes_to_and_fro(transport, tmp_path))


async def _closed_with_a_question() -> None:
    async with fake() as server:
        client = server.client()
        assert await ask(client, b"one") == [b"one"]
        server.said = lambda word: b""
        question = asyncio.ensure_future(ask(client, b"two"))
        await wait_until(lambda: server.asked == 2, "the question has arrived")
        await client.close()
        with pytest.raises(StoreUnavailable):
            await question
        assert errors(client) == 1


@LOOPS
def test_closing_a_client_ends_the_question_that_is_on_its_way(loop_factory: LoopFactory) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_closed_with_a_question())


async def test_a_question_has_one_bound_and_what_comes_after_it_is_nobodys() -> None:
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b"" if word == b"late" else b"$%d\r\n%b\r\n" % (len(word), word)
        with pytest.raises(TimeoutError):
            await ask(client, b"late", seconds=0.05)
        assert await ask(client, b"next") == [b"next"]
        with pytest.raises(TimeoutError):
            await ask(client, b"next", b"late", seconds=0.05)
        assert await ask(client, b"next") == [b"next"]
        with pytest.raises(TimeoutError):
            await ask(client, b"none", seconds=-1.0)
        assert errors(client) == 0, "a deadline is no failure of Redis"
        await client.close()


async def test_the_bound_holds_on_a_cluster_for_its_map_too() -> None:
    async with fake() as server:
        host, port = server.url.removeprefix("redis://").split(":")
        slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (len(host), host.encode(), int(port))
        server.url = f"redis+cluster://{host}:{port}"
        client = server.client()
        server.said = lambda word: b""
        with pytest.raises(TimeoutError):
            await ask(client, b"one", seconds=0.05)
        server.said = lambda word: slots if word == b"SLOTS" else b""
        with pytest.raises(TimeoutError):
            await ask(client, b"two", seconds=0.2)
        assert errors(client) == 0
        server.said = lambda word: slots if word == b"SLOTS" else b"$5\r\nthree\r\n"
        assert await ask(client, b"three") == [b"three"]
        server.said = lambda word: slots if word == b"SLOTS" else b"-MOVED 1 127.0.0.1:1\r\n"
        with pytest.raises(StoreUnavailable):
            await ask(client, b"four")
        assert errors(client) == 1
        await client.close()


async def test_a_question_that_is_cancelled_closes_its_connection() -> None:
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b"" if word == b"never" else b"$%d\r\n%b\r\n" % (len(word), word)
        question = asyncio.ensure_future(ask(client, b"never"))
        await wait_until(lambda: server.asked == 1, "the question has arrived")
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        await wait_until(lambda: not server.open, "its connection is closed")
        assert await ask(client, b"next") == [b"next"]
        assert server.opened == 2
        await client.close()


async def test_what_nobody_has_asked_for_is_never_an_answer() -> None:
    async with fake() as server:
        client = server.client()
        assert await ask(client, b"one") == [b"one"]
        assert client._lender is not None
        (line,) = client._lender._kept
        server.open[0].write(b"$5\r\nwrong\r\n")
        await wait_until(lambda: not line.is_idle, "it has arrived")
        assert await ask(client, b"two") == [b"two"]
        assert server.opened == 2
        server.said = lambda word: b"$3\r\ntwo\r\n$5\r\nwrong\r\n"
        with pytest.raises(StoreUnavailable, match="more than was asked for"):
            await ask(client, b"two")
        server.said = lambda word: b"$5\r\nright\r\n"
        assert await ask(client, b"three") == [b"right"]
        await client.close()


async def test_connections_that_are_kept_count_as_taken_and_one_too_many_waits() -> None:
    async with fake() as server:
        most = KEPT_MAX + 3
        client = server.client(connections=most)
        words = [b"%d" % number for number in range(50)]
        assert await asyncio.gather(*(ask(client, word) for word in words)) == [[word] for word in words]
        assert server.opened == most
        server.said = lambda word: b""
        waiting = [asyncio.ensure_future(ask(client, b"never", seconds=0.2)) for _ in range(2 * most)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {TimeoutError}
        server.said = lambda word: b"$%d\r\n%b\r\n" % (len(word), word)
        assert await asyncio.gather(*(ask(client, word) for word in words)) == [[word] for word in words]
        await wait_until(lambda: len(server.open) <= most, "those that were closed are gone")
        await client.close()


async def test_no_more_than_some_are_kept_and_all_go_back_after_a_failure() -> None:
    async with fake() as server:
        client = server.client()
        lender = client._lender
        assert lender is not None
        words = [b"%d" % number for number in range(2 * KEPT_MAX)]
        await asyncio.gather(*(ask(client, word) for word in words))
        assert len(lender._kept) == KEPT_MAX
        server.said = lambda word: b"-ERR no\r\n"
        with pytest.raises(StoreUnavailable):
            await ask(client, b"one")
        assert lender._kept == []
        await client.close()


async def test_a_connection_that_the_library_wants_anew_is_not_kept() -> None:
    async with fake() as server:
        client = server.client()
        lender = client._lender
        assert lender is not None
        assert await ask(client, b"one") == [b"one"]
        await lender._pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]
        assert await ask(client, b"two") == [b"two"]
        assert lender._kept == []
        assert await ask(client, b"three") == [b"three"]
        assert server.opened == 2
        await client.close()


async def test_the_connection_that_failed_is_the_next_to_be_opened() -> None:
    """Behind Sentinels that is when the pool learns of a new primary; the others may still lead to the old one."""
    async with fake() as server:
        client = server.client()
        await asyncio.gather(*(ask(client, word) for word in (b"1", b"2", b"3")))
        server.said = lambda word: b"-ERR no\r\n"
        with pytest.raises(StoreUnavailable):
            await ask(client, b"four")
        server.said = lambda word: b"$4\r\nfive\r\n"
        assert await ask(client, b"five") == [b"five"]
        assert server.opened == 4
        await client.close()


async def test_what_nobody_has_asked_for_closes_its_connection_also_where_another_has_failed() -> None:
    async with fake() as server:
        client = server.client()
        await asyncio.gather(ask(client, b"one"), ask(client, b"two"))
        assert client._lender is not None
        stray, good = client._lender._kept
        for writer in server.open:
            if writer.get_extra_info("peername") == stray._transport.get_extra_info("sockname"):
                writer.write(b"$5\r\nwr")
        await wait_until(lambda: not stray.is_idle, "it has arrived")
        assert good.is_idle
        server.said = lambda word: b"-ERR no\r\n"
        with pytest.raises(StoreUnavailable):
            await ask(client, b"three")
        assert not stray.connection.is_connected
        await client.close()


async def test_whoever_waits_for_a_connection_gets_the_one_that_is_free() -> None:
    async with fake() as server:
        client = server.client(connections=2)
        server.said = lambda word: b""
        never, first = (asyncio.ensure_future(ask(client, word)) for word in (b"never", b"first"))
        await wait_until(lambda: server.asked == 2, "both connections are taken")
        second = asyncio.ensure_future(ask(client, b"second", seconds=5.0))
        assert client._lender is not None
        pool = cast("Pool", client._lender._pool)
        await wait_until(lambda: bool(pool._condition._waiters), "one waits for a connection")
        server.said = lambda word: b"$6\r\nsecond\r\n"
        # Whose connection it is does not matter: each has one question on its way.
        server.open[1].write(b"$5\r\nfirst\r\n")
        done, _ = await asyncio.wait([never, first], return_when=asyncio.FIRST_COMPLETED)
        assert [each.result() for each in done] == [[b"first"]]
        assert await second == [b"second"]
        for each in (never, first):
            each.cancel()
        await asyncio.gather(never, first, return_exceptions=True)
        await client.close()


async def test_a_connection_comes_back_though_whoever_gives_it_back_is_cancelled() -> None:
    async with fake() as server:
        client = server.client(connections=1)
        assert await ask(client, b"one") == [b"one"]
        assert client._lender is not None
        pool = cast("Pool", client._lender._pool)
        server.said = lambda word: b"-ERR no\r\n"
        async with pool._condition:
            question = asyncio.ensure_future(ask(client, b"two"))
            lock = pool._condition._lock  # type: ignore[attr-defined]
            await wait_until(lambda: bool(lock._waiters), "it is being given back")
            question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        server.said = lambda word: b"$5\r\nthree\r\n"
        assert await ask(client, b"three", seconds=5.0) == [b"three"]
        await client.close()


class _Broken(ResponseError):
    """Can be watched."""


async def test_an_error_does_not_wait_for_the_garbage_collector() -> None:
    seen: list[weakref.ref[_Broken]] = []

    def take(piece: bytes) -> bytes | None:
        error = _Broken(piece.decode())
        seen.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async with fake() as server:
        client = server.client()
        gc.disable()
        try:
            with pytest.raises(StoreUnavailable):
                await client.ask(b"key", b"*1\r\n$4\r\nECHO\r\n", take, None)
            await wait_until(lambda: [each() for each in seen] == [None], "nobody holds the error")
        finally:
            gc.enable()
        await client.close()


async def test_the_embedded_redis_has_no_line_and_loses_no_connection_by_that() -> None:
    client = Client.open("memory://")
    for _ in range(200):
        with pytest.raises(StoreUnavailable, match="embedded"):
            await ask(client, b"one")
    assert await client.several([("ECHO", "one")]) == [b"one"]
    await client.close()
