"""Why there is no connection: over real sockets, from what libzmq reports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, Bench
from waymark.domain.status import StreamStatus
from waymark.ingest import sockets
from waymark.ingest.sockets import Attempt, ConnectionFailure, ZmqContext
from waymark.ingest.subscriber import Subscriber


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    context: ZmqContext = zmq.Context()
    yield context
    context.destroy(0)


@pytest.fixture
def serve() -> Iterator[Callable[[bytes | None], str]]:
    """Listens for TCP: each connection gets an answer and its end, or with None nothing at all."""
    with ExitStack() as stack:

        def accept(listening: socket.socket, answer: bytes | None) -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                if answer is None:
                    stack.callback(connection.close)
                    continue
                with closing(connection):
                    connection.recv(64)
                    connection.sendall(answer)

        def start(answer: bytes | None) -> str:
            listening = socket.create_server(("127.0.0.1", 0))
            thread = threading.Thread(target=accept, args=(listening, answer), daemon=True)
            thread.start()
            stack.callback(listening.close)
            stack.callback(listening.shutdown, socket.SHUT_RDWR)
            return f"tcp://127.0.0.1:{listening.getsockname()[1]}"

        yield start


async def failure_of(context: ZmqContext, endpoint: str) -> ConnectionFailure:
    async with Subscriber(context, endpoint, buffer_bytes=2**20, buffer_frames=100) as subscriber:
        await wait_until(lambda: subscriber.failure is not None, "no failure is reported", 20)
        assert not subscriber.is_connected
        assert subscriber.failure is not None
        return subscriber.failure


async def test_a_port_where_nothing_listens(context: ZmqContext, free_port: int, tmp_path: Path) -> None:
    assert await failure_of(context, f"tcp://127.0.0.1:{free_port}") is ConnectionFailure.REFUSED
    assert await failure_of(context, f"ipc://{tmp_path}/none") is ConnectionFailure.REFUSED


async def test_a_host_without_an_address(context: ZmqContext) -> None:
    assert await failure_of(context, "tcp://no-such-host.invalid:5557") is ConnectionFailure.UNRESOLVED


async def test_a_replay_port(context: ZmqContext) -> None:
    with context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert await failure_of(context, f"tcp://127.0.0.1:{port}") is ConnectionFailure.OTHER_SOCKET


async def test_an_http_port(context: ZmqContext, serve: Callable[[bytes | None], str]) -> None:
    assert await failure_of(context, serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")) is ConnectionFailure.NO_ZMQ


async def test_a_port_that_stays_silent(
    context: ZmqContext, serve: Callable[[bytes | None], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "CONNECT_MILLISECONDS", 500)
    assert await failure_of(context, serve(None)) is ConnectionFailure.NO_ZMQ


async def test_a_socket_with_another_security_mechanism(context: ZmqContext) -> None:
    with context.socket(zmq.XPUB) as socket_:
        socket_.curve_server = True
        _, socket_.curve_secretkey = zmq.curve_keypair()
        port = socket_.bind_to_random_port("tcp://127.0.0.1")
        assert await failure_of(context, f"tcp://127.0.0.1:{port}") is ConnectionFailure.OTHER_SECURITY


def test_an_address_that_never_answers() -> None:
    for seconds, failure in ((9.9, ConnectionFailure.UNANSWERED), (0.1, ConnectionFailure.REFUSED)):
        attempt = Attempt(100.0, 10.0)
        attempt.saw(zmq.EVENT_CLOSED, 100.0 + seconds)
        attempt.saw(zmq.EVENT_CONNECT_RETRIED, 100.0 + seconds)
        assert attempt.failure is failure


def test_a_connection_that_was_there_is_no_failure() -> None:
    attempt = Attempt(0.0, 10.0)
    for event in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
        attempt.saw(event, 1.0)
    assert attempt.failure is None


async def test_the_reason_goes_with_the_connection(context: ZmqContext, free_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port}"
    async with Subscriber(context, endpoint, buffer_bytes=2**20, buffer_frames=100) as subscriber:
        await wait_until(lambda: subscriber.failure is ConnectionFailure.REFUSED, "it is not refused", 20)
        with context.socket(zmq.PUB) as publisher:
            publisher.bind(endpoint)
            await wait_until(lambda: subscriber.is_connected, "it is not connected", 20)
            assert subscriber.failure is None


async def test_a_stream_reports_why_it_has_no_connection(bench: Bench, free_port: int) -> None:
    pod = await bench.pod()
    await bench.store.registry.register(replace(pod.registration, endpoint=f"tcp://127.0.0.1:{free_port}"))
    await bench.worker()

    async def is_reported() -> bool:
        state = await pod.state()
        return (state.status, state.last_error) == (StreamStatus.UNREACHABLE, ConnectionFailure.REFUSED.value)

    await wait_until(is_reported, "the stream reports no refusal", PATIENCE_SECONDS)
    await bench.store.registry.register(pod.registration)
    await pod.caught_up()
    assert (await pod.state()).last_error != ConnectionFailure.REFUSED.value


def test_each_sentence_names_the_way_out() -> None:
    for failure in ConnectionFailure:
        assert "; " in failure
        assert any(word in failure for word in ("register", "check", "configure"))
