"""Read connections: many questions under way on one of them, on every transport and loop; whatever goes wrong."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hiredis
import pytest
import trustme
import uvloop
from redis.exceptions import ResponseError

from tests.conftest import wait_until
from tests.patience import patient, within
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.store.redis.client import RedisClient
from waymark.store.redis.credentials import Credentials
from waymark.store.redis.read_connection import REQUESTS_MAX, ReadConnection, Replies

LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LONG = b"7" * 3_000_000


@dataclass
class Fake:
    """A server that says what it was asked, after what it was told to do first."""

    url: str = ""
    credentials: Credentials = field(default_factory=Credentials)
    opened: int = 0
    asked: int = 0
    greeted: list[list[bytes]] = field(default_factory=list)
    greeting: bytes = b"+OK\r\n"
    may_greet: asyncio.Event | None = None
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
                    if command[0] in (b"AUTH", b"SELECT", b"READONLY"):
                        self.greeted.append(command)
                        if self.may_greet is not None:
                            await self.may_greet.wait()
                        writer.write(self.greeting if command[-1] != b"wrong" else b"-WRONGPASS no\r\n")
                        continue
                    self.asked += 1
                    writer.write(b"+PONG\r\n" if command == [b"PING"] else self.said(command[-1]))
        except ConnectionError:
            return  # the client has heard enough
        finally:
            self.open.remove(writer)
            writer.close()

    def client(self, *, timeout_seconds: float = 5.0) -> RedisClient:
        client = RedisClient.open(self.url, credentials=self.credentials, timeout_seconds=timeout_seconds)
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
            fake.credentials = Credentials(tls_ca_file=directory / "ca.pem")
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        fake.url = f"{'rediss' if context else 'redis'}://127.0.0.1:{port}"
    async with server:
        yield fake


def ask(client: RedisClient, *words: bytes, seconds: float = 30.0) -> Awaitable[list[bytes]]:
    packed = b"".join(b"*2\r\n$4\r\nECHO\r\n$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return client.ask(b"key", packed, Replies(len(words)), asyncio.get_running_loop().time() + seconds)


def has_asked(server: Fake, count: int) -> bool:
    return server.asked == count


def errors(client: RedisClient) -> float:
    """How many have been counted."""
    assert client.metrics is not None
    found = [each for each in client.metrics.registry.collect() if each.name == "waymark_redis_errors"]
    return sum(sample.value for each in found for sample in each.samples if sample.name.endswith("_total"))


def echo(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


async def _asks(transport: str, directory: Path) -> None:
    async with fake(transport, directory) as server:
        client = server.client()
        for _ in range(3):
            assert await ask(client, b"one", b"two") == [b"one", b"two"]
            assert await ask(client, LONG) == [LONG]
        words = [b"%d" % number for number in range(300)]
        assert await asyncio.gather(*(ask(client, word, LONG[:70_000], word) for word in words)) == [
            [word, LONG[:70_000], word] for word in words
        ]
        assert server.opened == 1
        server.open[0].close()
        await wait_until(lambda: client.reads is not None and client.reads.connection is None, "it is lost")
        assert await ask(client, b"four") == [b"four"]
        assert (server.opened, errors(client)) == (2, 0)
        await client.close()
        await wait_until(lambda: not server.open, "it is closed")


@LOOPS
@pytest.mark.parametrize("transport", ["tcp", "unix", "tls"])
def test_many_questions_are_under_way_on_one_connection(
    loop_factory: LoopFactory, transport: str, tmp_path: Path
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_asks(transport, tmp_path))


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
def test_closing_a_client_ends_the_question_that_is_under_way(loop_factory: LoopFactory) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_closed_with_a_question())


# ---- how it is opened ----------------------------------------------------------------------------------


class Together:
    """Gets the results of many questions, and notes how many have come when the loop next does anything else."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.in_one_pass: list[int] = []

    def done(self) -> bool:
        return False

    def set_result(self, result: Any) -> None:
        if not self.results:
            asyncio.get_running_loop().call_soon(lambda: self.in_one_pass.append(len(self.results)))
        self.results.append(result)

    def set_exception(self, exception: BaseException) -> None:
        raise exception


async def _share() -> None:
    count, ping = 64, b"*1\r\n$4\r\nPING\r\n"
    together = Together()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: ReadConnection(patient(30.0), lambda _: None), *listener.getsockname()
        )
        server, _ = listener.accept()
        with server:
            server.setblocking(False)
            for _ in range(count):
                connection.send(ping, Replies(1), together, None)
            with pytest.raises(BlockingIOError):  # what is written on loopback is there at once
                server.recv(1)
            received: list[bytes] = []

            def has_received() -> bool:
                with suppress(BlockingIOError):
                    received.append(server.recv(1 << 20))
                return bool(received)

            await wait_until(has_received, "the questions have arrived")
            assert received == [ping * count]
            server.send(b"+PONG\r\n" * count)
            await wait_until(lambda: len(together.results) == count, "every question is answered")
        await wait_until(lambda: together.in_one_pass != [], "the turn is over")
        assert together.in_one_pass == [count]
        connection.retire()


def test_questions_of_one_turn_share_a_write_and_their_replies_a_pass() -> None:
    """On the loop that processes run."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_share())


async def test_it_is_let_in_as_the_url_says() -> None:
    async with fake() as server:
        server.url = server.url.replace("redis://", "redis://user:secret@") + "/3"
        client = server.client()
        assert await ask(client, b"one") == [b"one"]
        assert server.greeted == [[b"AUTH", b"user", b"secret"], [b"SELECT", b"3"]]
        await client.close()


async def test_a_password_file_is_read_for_each_connection(tmp_path: Path) -> None:
    async with fake() as server:
        secret = tmp_path / "secret"
        server.credentials = Credentials(password_file=secret)
        secret.write_text("wrong\n")
        client = server.client()
        with pytest.raises(StoreUnavailable, match="refuses the login"):
            await ask(client, b"one")
        secret.write_text("right\n")
        assert await ask(client, b"one") == [b"one"]
        assert server.greeted == [[b"AUTH", b"wrong"], [b"AUTH", b"right"]]
        secret.unlink()
        server.open[0].close()
        await wait_until(lambda: client.reads is not None and client.reads.connection is None, "it is lost")
        with pytest.raises(StoreUnavailable, match=r"WAYMARK_REDIS_PASSWORD_FILE .* cannot be read"):
            await ask(client, b"one")
        await client.close()
        await wait_until(lambda: not server.open, "those that were refused are closed, too")


async def test_a_certificate_that_cannot_be_trusted_is_said(tmp_path: Path) -> None:
    async with fake("tls", tmp_path) as server:
        trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        client = server.client()
        with pytest.raises(StoreUnavailable, match="no trusted TLS certificate"):
            await ask(client, b"one")
        server.credentials = Credentials(tls_verify="none")
        trusting = server.client()
        assert await ask(trusting, b"one") == [b"one"]
        for each in (client, trusting):
            await each.close()


async def test_many_that_wait_for_a_connection_open_one_and_fail_together(free_port: int) -> None:
    async with fake() as server:
        client = server.client()
        words = [b"%d" % number for number in range(50)]
        assert await asyncio.gather(*(ask(client, word) for word in words)) == [[word] for word in words]
        assert server.opened == 1
        await client.close()
    dead = RedisClient.open(f"redis://127.0.0.1:{free_port}", timeout_seconds=5.0)
    outcomes = await asyncio.gather(*(ask(dead, word) for word in words), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    await dead.close()


# ---- bounds --------------------------------------------------------------------------------------------


async def test_a_question_has_one_bound_and_what_comes_after_it_is_nobodys() -> None:
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b"" if word == b"late" else echo(word)
        with pytest.raises(TimeoutError):
            await ask(client, b"late", seconds=0.05)
        assert await ask(client, b"next") == [b"next"]
        with pytest.raises(TimeoutError):
            await ask(client, b"next", b"late", seconds=0.05)
        assert await ask(client, b"next") == [b"next"]
        asked = server.asked
        with pytest.raises(TimeoutError):
            await ask(client, b"none", seconds=-1.0)
        assert await ask(client, b"next") == [b"next"]
        assert server.asked == asked + 1, "a question that is late already is not asked"
        assert errors(client) == 0, "a deadline is no failure of Redis"
        await client.close()


async def test_one_that_gives_up_takes_nobody_along() -> None:
    """Its reply comes, and is nobody's; those in front of it and behind it have theirs."""
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b""
        first, late, cancelled, last = (
            asyncio.ensure_future(ask(client, word, seconds=0.2 if word == b"late" else 30.0))
            for word in (b"first", b"late", b"cancelled", b"last")
        )
        await wait_until(lambda: server.asked == 4, "all have arrived")
        cancelled.cancel()
        with pytest.raises(TimeoutError):
            await late
        server.open[0].write(b"".join(echo(word) for word in (b"first", b"late", b"cancelled", b"last")))
        assert [await first, await last] == [[b"first"], [b"last"]]
        assert server.opened == 1
        await client.close()


async def test_each_question_has_its_own_deadline_whatever_those_of_others_are() -> None:
    """One timer serves all of them: it is set forward for an earlier deadline, and again for the next."""
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b""
        first = asyncio.ensure_future(ask(client, b"first"))
        late = [asyncio.ensure_future(ask(client, b"late", seconds=seconds)) for seconds in (0.3, 0.05, 0.2)]
        async with within(20):
            found = await asyncio.gather(*late, return_exceptions=True)
        assert list(map(type, found)) == [TimeoutError] * 3
        with pytest.raises(TimeoutError):
            await ask(client, b"later", seconds=0.05)
        assert not first.done()
        server.open[0].write(b"".join(echo(word) for word in (b"first", b"late", b"late", b"late", b"later")))
        assert await first == [b"first"]
        assert server.opened == 1
        await client.close()


async def test_a_connection_that_owes_a_reply_and_says_nothing_is_opened_again() -> None:
    async with fake() as server:
        client = server.client(timeout_seconds=0.3)
        server.said = lambda word: b"" if word == b"never" else echo(word)
        questions = [asyncio.ensure_future(ask(client, b"never")) for _ in range(3)]
        await wait_until(lambda: server.asked == 3, "they have arrived")
        questions[0].cancel()
        for question in questions[1:]:
            with pytest.raises(StoreUnavailable, match="did not reply within"):
                await question
        assert await ask(client, b"next") == [b"next"]
        assert server.opened == 2
        await client.close()


async def test_questions_under_way_are_bounded() -> None:
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b""
        assert client.reads is not None
        await client.reads.opened(None)
        waiting = [asyncio.ensure_future(ask(client, b"never")) for _ in range(REQUESTS_MAX)]
        await wait_until(lambda: server.asked == REQUESTS_MAX, "all are under way")
        with pytest.raises(StoreUnavailable, match="commands are under way"):
            await ask(client, b"one too many")
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
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


# ---- what is not as it should be -----------------------------------------------------------------------


async def test_an_error_is_of_its_own_question() -> None:
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b"-ERR no\r\n" if word == b"bad" else echo(word)
        outcomes = await asyncio.gather(
            ask(client, b"1"), ask(client, b"2", b"bad", b"3"), ask(client, b"4"), return_exceptions=True
        )
        assert [outcomes[0], outcomes[2]] == [[b"1"], [b"4"]]
        assert isinstance(outcomes[1], StoreUnavailable)
        assert (server.opened, errors(client)) == (1, 1)
        await client.close()


async def test_replies_in_pieces_of_any_length_are_read() -> None:
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b""
        said = b"".join(echo(word) for word in (b"a", b"bb", LONG[:100], b"d"))
        for cut in (1, 3, 5, 9, 40, len(said) - 1):
            before = server.asked
            waiting = [asyncio.ensure_future(ask(client, *words)) for words in ((b"a",), (b"bb", b"c"), (b"d",))]
            await wait_until(partial(has_asked, server, before + 4), "all have arrived")
            server.open[-1].write(said[:cut])
            await server.open[-1].drain()
            await asyncio.sleep(0)
            server.open[-1].write(said[cut:])
            assert await asyncio.gather(*waiting) == [[b"a"], [b"bb", LONG[:100]], [b"d"]]
        assert server.opened == 1
        await client.close()


@pytest.mark.parametrize("said", [b"$5\r\nwrong\r\n", b"$5\r\nwr", b"?\r\n"])
async def test_what_nobody_has_asked_for_is_never_an_answer(said: bytes) -> None:
    async with fake() as server:
        client = server.client()
        assert await ask(client, b"one") == [b"one"]
        server.open[0].write(said)
        await wait_until(lambda: client.reads is not None and client.reads.connection is None, "it has arrived")
        assert await ask(client, b"two") == [b"two"]
        server.said = lambda word: echo(word) + said
        # The answer was right, so it is given; the connection is not used again.
        assert await ask(client, b"three") == [b"three"]
        await wait_until(lambda: client.reads is not None and client.reads.connection is None, "it has arrived")
        server.said = echo
        assert await ask(client, b"four") == [b"four"]
        await client.close()


async def test_no_resp_fails_all_that_are_under_way() -> None:
    async with fake() as server:
        client = server.client()
        server.said = lambda word: b"HTTP/1.1 400\r\n" if word == b"bad" else b""
        outcomes = await asyncio.gather(ask(client, b"bad"), ask(client, b"other"), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
        await client.close()


async def test_a_connection_that_is_lost_with_its_greeting_is_opened_again() -> None:
    async with fake() as server:
        server.url = server.url.replace("//", "//:secret@")
        server.greeting = b"+OK\r\n-ERR behind it\r\n"
        client = server.client()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="lost"):
                await ask(client, b"one")
        server.greeting = b"+OK\r\n"
        assert await ask(client, b"two") == [b"two"]
        assert server.opened == 3
        await client.close()


async def test_a_connection_that_takes_longer_than_a_question_may_is_opened_nevertheless() -> None:
    async with fake() as server:
        server.url, server.may_greet = server.url.replace("//", "//:secret@"), asyncio.Event()
        client = server.client(timeout_seconds=patient(60.0))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await ask(client, b"one", seconds=0.01)
        await wait_until(lambda: server.greeted == [[b"AUTH", b"secret"]], "it is being opened")
        server.may_greet.set()
        assert await ask(client, b"two") == [b"two"]
        assert (server.opened, errors(client)) == (1, 0)
        await client.close()


async def test_a_connection_that_is_opened_as_its_client_closes_does_not_stay() -> None:
    async with fake() as server:
        server.url, server.may_greet = server.url.replace("//", "//:secret@"), asyncio.Event()
        client = server.client(timeout_seconds=patient(60.0))
        question = asyncio.ensure_future(ask(client, b"one"))
        await wait_until(lambda: bool(server.greeted), "it is being opened")
        await client.close()
        server.may_greet.set()
        with pytest.raises(StoreUnavailable):
            await question
        await wait_until(lambda: not server.open, "it is closed")


async def test_a_connection_that_is_retired_ends_with_its_last_question() -> None:
    async with fake() as server:
        client = server.client()
        assert await ask(client, b"one") == [b"one"]
        server.said = lambda word: b""
        question = asyncio.ensure_future(ask(client, b"two"))
        await wait_until(lambda: server.asked == 2, "the question has arrived")
        assert client.reads is not None
        client.reads.retire()
        server.open[0].write(echo(b"two"))
        assert await question == [b"two"]
        await wait_until(lambda: not server.open, "it is closed")
        server.said = echo
        assert await ask(client, b"three") == [b"three"]
        client.reads.retire()
        await wait_until(lambda: not server.open, "it is closed at once")
        await client.close()


async def test_a_connection_that_is_retired_while_it_is_opened_does_not_stay() -> None:
    """It may be open to a server that has just been demoted."""
    async with fake() as server:
        server.url, server.may_greet = server.url.replace("//", "//:secret@"), asyncio.Event()
        client = server.client(timeout_seconds=patient(60.0))
        assert client.reads is not None
        opening = asyncio.ensure_future(client.reads.opened(None))
        await wait_until(lambda: bool(server.greeted), "it is being opened")
        client.reads.retire()
        server.may_greet.set()
        assert (await opening).is_lost
        assert [client.reads.connection] == [None]
        await wait_until(lambda: not server.open, "it is closed")
        assert await ask(client, b"two") == [b"two"]
        assert client.reads.connection is not None
        await client.close()


class _Broken(ResponseError):
    """Can be watched."""


async def test_an_error_does_not_wait_for_the_garbage_collector() -> None:
    seen: list[weakref.ref[_Broken]] = []

    class Breaking(Replies):
        def parsed(self, replies: list[Any]) -> list[Any]:
            error = _Broken("broken")
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
                await client.ask(b"key", b"*2\r\n$4\r\nECHO\r\n$1\r\nx\r\n", Breaking(1), None)
            await wait_until(lambda: [each() for each in seen] == [None], "nobody holds the error")
        finally:
            gc.enable()
            await client.close()  # otherwise a failure waits for the server's end, from Python 3.12 on


async def test_the_embedded_redis_has_no_read_connection() -> None:
    client = RedisClient.open("memory://")
    for _ in range(200):
        with pytest.raises(StoreUnavailable, match="embedded"):
            await ask(client, b"one")
    assert await client.several([("ECHO", "one")]) == [b"one"]
    await client.close()
