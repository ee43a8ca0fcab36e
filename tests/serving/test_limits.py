"""What is kept of a connection while it waits: under which bound it stands, whatever it did before."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tests.patience import wait_until, within
from tests.serving.test_answers import USUAL
from tests.serving.wire import LAST, echo, post, served
from tests.serving.wire import connections as bounded
from waymark.base.metrics import Metrics
from waymark.serving.connection import protocol
from waymark.serving.limits import Connections, Rejection


async def test_one_that_was_answered_before_its_body_had_come_is_idle() -> None:
    connections = bounded()

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        for message in USUAL:
            await send(message)

    async with served(refuses, protocol(connections)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(post(b"12")[:-2])
            async with within(20):
                await reader.readuntil(b"ok")
            assert len(connections.arriving) == 1
            writer.write(b"12")
            await wait_until(lambda: not connections.arriving, "the body has come")
            assert len(connections.idle) == 1
        finally:
            writer.close()


async def test_a_body_that_comes_with_its_head_is_under_the_ceiling_too() -> None:
    connections = bounded(bodies_max_bytes=1000)
    may_go_on = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/waits":
            await may_go_on.wait()
        for message in USUAL:
            await send(message)

    async with served(waits, protocol(connections)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        other_reader, other = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with within(20):
                for _ in range(2):
                    writer.write(post(b"12"))
                    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                other.write(post(b"x" * 600, path="/waits"))
                await wait_until(lambda: connections.bodies_bytes == 600, "the other's body is held")
                writer.write(post(b"x" * 400))
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                writer.write(post(b"x" * 401))
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503")
                assert b"WAYMARK_MAX_BODY_BYTES" in await reader.read()
                may_go_on.set()
                assert (await other_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await wait_until(lambda: connections.bodies_bytes == 0, "what was answered is held no more")
        finally:
            may_go_on.set()
            writer.close()
            other.close()


async def test_just_so_many_connections_stay_open() -> None:
    metrics = Metrics()
    connections = bounded(metrics, connections_max=3)

    def cut() -> float:
        return metrics.http_connections_cut.labels(reason="connections").value

    def are_counted(count: int) -> bool:
        return metrics.http_connections.value + cut() == count

    async with served(echo, protocol(connections)) as port, AsyncExitStack() as stack:
        opened = []
        for count in range(1, 5):
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            stack.callback(opened[-1][1].close)
            await wait_until(partial(are_counted, count), "it is open")
            assert cut() == (0 if count < 4 else 1)
        async with within(20):
            assert (await opened[0][0].read()).startswith(b"HTTP/1.1 503")
            for reader, writer in opened[1:]:
                writer.write(LAST)
                assert (await reader.read()).startswith(b"HTTP/1.1 200")


def test_a_request_has_just_its_time() -> None:
    class Clock:
        now = 0.0

        def time(self) -> float:
            return self.now

        def call_later(self, *_: Any) -> None:
            pass

    class Late:
        loop, is_holding = Clock(), False
        ended: Any = None

        def reject(self, rejection: Rejection) -> None:
            self.ended = rejection.why

        def abort(self) -> None:
            self.ended = "unread"

    clock: Any = Late.loop
    for begin, why in ((Connections.opened, "slow"), (Connections.closing, "unread")):
        connection: Any = Late()
        connections, clock.now = bounded(request_seconds=5.0), 0.0
        begin(connections, connection)
        ended = []
        for clock.now in (4.999, 5.001):
            connections._poll(clock)
            ended.append(connection.ended)
        assert ended == [None, why]


def test_what_all_answers_begin_with_is_never_that_of_a_second_before() -> None:
    connections = bounded()
    before, now = [(b"date", b"one")], [(b"date", b"two"), (b"x-of-all", b"1")]
    for _ in range(2):
        assert connections.default_lines(before) == b"date: one\r\n"
        assert connections.default_lines(now) == b"date: two\r\nx-of-all: 1\r\n"
        assert connections.default_lines(now) == b"date: two\r\nx-of-all: 1\r\n"


async def test_a_server_without_room_for_a_connection_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    connections = bounded(connections_max=1)

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        for message in USUAL:
            await send(message)

    async with served(answers, protocol(connections)) as port, AsyncExitStack() as stack:
        for count in range(1, 4):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            if count == 1:
                await wait_until(lambda: bool(connections.arriving), "the first connection is open")
                assert caplog.messages == []
        await wait_until(lambda: bool(caplog.messages), "a connection found no room")
    assert len([each for each in caplog.messages if "the limit of open files" in each]) == 1
