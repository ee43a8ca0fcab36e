"""The packed way to Redis: whatever goes wrong on it, the answer is right, or late, and never another query's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.listening import listening, port_of
from tests.store.factories import GROUP, Stream, registration, stored, stream_of
from waymark.base.errors import StoreUnavailable
from waymark.domain.match import conductor_rows
from waymark.domain.packing import KEY_BYTES, pack
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

CHAIN = list(range(1, 601))
#: Answers in place of what Redis said to a query's questions; the connection stays open, and silent, behind them.
Spoil = Callable[[bytes], bytes]


class Proxy:
    """Stands in front of a Redis and may spoil one answer to an MGET."""

    def __init__(self, redis_path: str) -> None:
        self._redis_path = redis_path
        self.spoil: Spoil | None = None
        self.spoilt = 0
        self.opened = 0
        self.is_cut = False
        """Whether the connection is closed behind a spoilt answer."""
        self.open = 0
        """Connections that are served now."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open += 1
        there, back = await asyncio.open_unix_connection(self._redis_path)
        spoil: Spoil | None = None

        async def answers() -> None:
            nonlocal spoil
            while answer := await there.read(1 << 20):
                if spoil is None:
                    writer.write(answer)
                    continue
                writer.write(spoil(answer))
                spoil = None
                self.spoilt += 1
                if self.is_cut:
                    break
            writer.close()

        answering = asyncio.create_task(answers())
        try:
            while command := await reader.read(1 << 20):
                if b"MGET" in command:
                    spoil, self.spoil = self.spoil, None
                back.write(command)
        finally:
            # Redis ends its side when it has answered what came before.
            back.write_eof()
            await answering
            back.close()
            with suppress(ConnectionError):
                await asyncio.gather(back.wait_closed(), writer.wait_closed())
            self.open -= 1


@pytest.fixture
def proxy(redis_url: str) -> Proxy:
    return Proxy(redis_url.removeprefix("unix://"))


@pytest.fixture
def timeout_seconds() -> float:
    """Until a call is given up that Redis does not answer."""
    return 5.0


@pytest.fixture
async def store(proxy: Proxy, timeout_seconds: float) -> AsyncIterator[Store]:
    """A store that reads through the proxy."""
    async with listening(proxy.serve) as server:
        store = Store.open(f"redis://127.0.0.1:{port_of(server)}", timeout_seconds=timeout_seconds)
        yield store
        await store.close()
        await wait_until(lambda: proxy.open == 0, "every connection through the proxy is closed")


@pytest.fixture
async def held(store: Store, redis_url: str) -> AsyncIterator[Stream]:
    """pod-1 has the whole chain; Redis without the proxy beside it."""
    async with Redis.from_url(redis_url, protocol=2) as redis:
        stream = await stream_of(store, redis, registration())
        (gpu,) = await stream.begin("0 GPU")
        await stream.apply(stored(gpu, CHAIN))
        yield stream


async def longest(store: Store, blocks: list[int], *, deadline_seconds: float = 30.0) -> int:
    keys = pack(blocks)
    at = 0

    def source(count: int) -> bytes:
        nonlocal at
        at += KEY_BYTES * count
        return keys[at - KEY_BYTES * count : at]

    reading = await store.reader.read(GROUP, 16, source, deadline_seconds=deadline_seconds)
    assert reading is not None
    return conductor_rows(reading.walk)["pod-1"].longest


ERRORS = [
    b"-MOVED 866 127.0.0.1:1",
    b"-ASK 866 127.0.0.1:1",
    b"-TRYAGAIN multiple keys",
    b"-CLUSTERDOWN the cluster is down",
    b"-LOADING the dataset is being loaded",
    b"-READONLY a replica does not write",
    b"-NOSUCHTHING an error that nobody knows",
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error[1:].split()[0].decode())
async def test_an_error_sends_the_question_once_more_through_the_library(
    store: Store, held: Stream, proxy: Proxy, error: bytes
) -> None:
    assert await longest(store, CHAIN[:20]) == 20
    # To both questions, and to the first of them only.
    for count, spoil in enumerate(
        (lambda _: (error + b"\r\n") * 2, lambda answer: error + answer[answer.rindex(b"\r\n$") :]), 1
    ):
        proxy.spoil = spoil
        assert await longest(store, CHAIN[:25]) == 25
        assert proxy.spoilt == count
        assert await longest(store, CHAIN[:300] + [9999]) == 300


async def test_a_connection_that_is_cut_in_the_middle_of_an_answer_is_made_again(
    store: Store, held: Stream, proxy: Proxy
) -> None:
    proxy.is_cut = True
    assert await longest(store, CHAIN[:20]) == 20
    for length in (0, 1, 30):
        proxy.spoil = lambda answer, length=length: answer[:length]
        assert await longest(store, CHAIN[:25]) == 25
        assert await longest(store, CHAIN[:300] + [9999]) == 300
    assert proxy.spoilt == 3


@pytest.mark.parametrize("length", [0, 1, 30])
async def test_an_answer_that_was_not_read_whole_is_never_the_next_querys(
    store: Store, held: Stream, proxy: Proxy, length: int
) -> None:
    """The rest of it comes when the query has long given up."""
    assert await longest(store, CHAIN[:20]) == 20
    proxy.spoil = lambda answer: answer[:length]
    with pytest.raises(StoreUnavailable):
        await longest(store, CHAIN[:20], deadline_seconds=0.1)
    await wait_until(lambda: proxy.spoilt == 1, "the answer has come, late or not")
    assert await longest(store, CHAIN[:7] + [9999]) == 7
    assert await longest(store, [9999, *CHAIN]) == 0


@pytest.mark.parametrize("timeout_seconds", [1.5])
async def test_a_query_that_is_cancelled_between_two_answers_leaves_nothing_behind(
    store: Store, held: Stream, proxy: Proxy
) -> None:
    assert await longest(store, CHAIN[:20]) == 20
    # The blocks have been answered, the version has not.
    proxy.spoil = lambda answer: answer[: answer.rindex(b"\r\n$") + 2]
    query = asyncio.create_task(longest(store, CHAIN[:20]))
    await wait_until(lambda: proxy.spoilt == 1, "the query waits for its second answer")
    query.cancel()
    with pytest.raises(asyncio.CancelledError):
        await query
    assert await longest(store, CHAIN[:7] + [9999]) == 7


async def test_many_queries_share_one_connection(store: Store, held: Stream, proxy: Proxy) -> None:
    assert await longest(store, CHAIN[:20]) == 20
    opened = proxy.opened
    lengths = [7 * number for number in range(1, 65)]
    assert await asyncio.gather(*(longest(store, [*CHAIN[:length], 9999]) for length in lengths)) == lengths
    assert proxy.opened == opened


async def test_connections_that_redis_has_closed_are_found_out_by_one_query(held: Stream, redis_url: str) -> None:
    client = RedisClient.open(redis_url)
    store = Store(client)
    assert await asyncio.gather(*(longest(store, CHAIN[:20]) for _ in range(8))) == [20] * 8
    await held.redis.client_kill_filter(_type="normal", skipme=True)
    for _ in range(8):
        assert await longest(store, CHAIN[:600]) == 600
    await store.close()
