"""What a router meets in production: values of strangers, a cancelled block, a replica that comes back, other loops."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.conftest import wait_until
from tests.listening import listening, port_of
from tests.patience import patient, within
from waymark.client import AsyncClient, Client, ModelNotFound, Refused, blocking, bounded, tries
from waymark.client.tries import UrlOrder

SELECTED: dict[str, Any] = {
    "target": {"instance_id": "pod-1", "dp_rank": 0, "address": None, "device_tokens": 0, "new_tokens": 1},
    **{"others": [], "prefill": None, "decision": "kv_aware", "degraded": False, "headers": {}},
    "reservation": "1.1.1.1.5f0c2a9e11d04b7c",
}
NOT_SENT = httpx.MockTransport(lambda _: pytest.fail("it was sent"))


@pytest.mark.parametrize("error", [Refused(409, "a gap", "gap", None), ModelNotFound(404, "no", "not_found", "model")])
def test_a_refusal_reaches_another_process_whole(error: Refused) -> None:
    """As a pool of processes sends it: an error that cannot be read there breaks the pool."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogates"),
        ({"prompt": "\ud83d"}, "surrogates"),
        ({"token_ids": [1], "cache_salt": "\ud83d"}, "surrogates"),
        ({"token_ids": [1], "block_size": 2**70}, "out of range"),
    ],
)
async def test_what_no_body_can_hold_is_refused_like_any_other_value(options: dict[str, Any], words: str) -> None:
    """A client of the router chooses its messages, and JSON can write half of a character."""
    with Client("http://a", transport=NOT_SENT) as client, pytest.raises(Refused, match=words) as refused:
        client.query("m", or_empty=True, **options)
    assert (refused.value.status, refused.value.reason) == (400, "invalid_value")
    async with AsyncClient("http://a", transport=NOT_SENT) as waymark:
        with pytest.raises(Refused, match=words):
            await waymark.query("m", **options)
        with pytest.raises(Refused, match="float"):
            await waymark.select("m", [1], slo_ttft_ms=float("nan")).begin()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_token_that_no_service_has_is_an_error_at_once_which_does_not_show_it(kind: Any) -> None:
    for token in ("s3cret\n", "s3cret ", "s3crét"):
        with pytest.raises(ValueError, match="api_token has a blank, a line end") as error:
            kind("http://a", api_token=token)
        assert "s3cr" not in str(error.value)


async def test_an_empty_token_is_none() -> None:
    """As ``os.environ.get("WAYMARK_API_TOKEN", "")`` gives it."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"count": 0, "services": []})

    with Client("http://a", api_token="", transport=httpx.MockTransport(answer)) as client:
        assert client.services() == []
    assert "authorization" not in asked[0].headers


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://h:port", "http://[::1", "http://a..b", "http://h\x00", "http://h?x=1"]
)
def test_a_url_that_cannot_be_asked_is_an_error_at_once(kind: Any, url: str) -> None:
    with pytest.raises(ValueError, match="it must be a URL such as"):
        kind(["http://a", url])


def refusing_the_release(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/select":
        return httpx.Response(200, json=SELECTED)
    return httpx.Response(401, json={"error": "another token", "reason": "unauthorized"})


async def test_the_error_of_a_block_is_not_hidden_by_the_refusal_of_its_release() -> None:
    transport = httpx.MockTransport(refusing_the_release)
    with Client("http://a", transport=transport) as client:
        with pytest.raises(ConnectionResetError), client.select("m", [1]):
            raise ConnectionResetError
        with pytest.raises(Refused), client.select("m", [1]):
            pass
    async with AsyncClient("http://a", transport=transport) as waymark:
        with pytest.raises(ConnectionResetError):
            async with waymark.select("m", [1]):
                raise ConnectionResetError
        with pytest.raises(Refused):
            async with waymark.select("m", [1]):
                pass


async def test_a_cancelled_block_stays_cancelled_if_its_release_is_refused() -> None:
    """Else the timeout around it would not end with TimeoutError."""
    async with AsyncClient("http://a", transport=httpx.MockTransport(refusing_the_release)) as waymark:
        with pytest.raises(TimeoutError):
            async with within(0.01), waymark.select("m", [1]):
                await asyncio.Event().wait()


def test_a_replica_that_was_away_is_tried_by_one_call_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be silent, and each call that waits for it is late."""
    now = 100.0
    monkeypatch.setattr(tries, "time", SimpleNamespace(monotonic=lambda: now))
    places = UrlOrder(["http://a", "http://b"])

    def first() -> str:
        return next(places.order())[0]

    places.failed("http://a")
    assert first() == "http://b"
    now += 6.0
    assert [first(), first(), first()] == ["http://a", "http://b", "http://b"]
    now += 6.0
    assert first() == "http://a"
    places.answered("http://a", httpx.Response(200))
    assert [first(), first()] == ["http://a", "http://a"]


BODY = json.dumps({"count": 0, "services": []}).encode()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY))


@pytest.mark.outside
async def test_a_forked_process_has_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of several processes may have asked before it forks them."""
    process, connections = 1, 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answer(reader, writer)

    monkeypatch.setattr(blocking, "os", SimpleNamespace(getpid=lambda: process))
    async with listening(count) as server, within(30):
        with Client(f"http://127.0.0.1:{port_of(server)}", timeout=patient(5.0), trust_env=False) as client:
            of_the_parent = client._http
            for now, expected in ((1, 1), (1, 1), (2, 2), (2, 2)):
                process = now
                assert await asyncio.to_thread(client.services) == []
                assert connections == expected
            of_the_parent.close()  # which the parent does
        with pytest.raises(RuntimeError, match="closed"):
            client.services()


def test_all_addresses_of_a_host_have_the_time_of_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without a virtual address has one for each replica, and some of them may be silent."""
    given: list[float | None] = []

    def connect(host: str, port: int, *, timeout: float | None) -> object:
        given.append(timeout)
        return object()

    connections = bounded._BoundedConnections(SimpleNamespace(connect_tcp=connect), bounded._Bound())
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [("127.0.0.1", 80)] * 4)
    for seconds in (6.0, None):
        connections.connect_tcp("waymark", 80, seconds)
    assert given == [1.5, None]


#: In a process of its own, since the connections of the first loop stay open until it ends.
TWO_LOOPS = """
import asyncio, sys
from waymark.client import AsyncClient
waymark = AsyncClient(sys.argv[1], timeout=float(sys.argv[2]), trust_env=False)
async def services():
    return await waymark.services()
print([asyncio.run(services()) for _ in range(2)])
asyncio.run(waymark.close())
"""


@pytest.mark.outside
async def test_a_client_of_a_loop_that_has_ended_is_used_in_the_next_one() -> None:
    """As a program does that calls ``asyncio.run`` for each question."""
    async with listening(answer) as server, within(60):
        words = [sys.executable, "-c", TWO_LOOPS, f"http://127.0.0.1:{port_of(server)}", str(patient(5.0))]
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, error = await process.communicate()
    assert (output, process.returncode) == (b"[[], []]\n", 0), error.decode()


async def test_the_first_error_of_several_queries_ends_the_others() -> None:
    ended: list[bytes] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        if b"first" in request.content:
            return httpx.Response(400, json={"error": "no"})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.content)
        raise AssertionError

    async with AsyncClient("http://a", transport=httpx.MockTransport(answer), timeout=patient(100)) as waymark:
        prompts: Any = [[2], [3], ["first"]]
        with pytest.raises(Refused, match="no"):
            await waymark.query_many("m", prompts)
        await wait_until(lambda: len(ended) == 2, "the other queries have ended")


async def test_a_closed_client_stays_closed() -> None:
    waymark = AsyncClient("http://a", transport=NOT_SENT)
    await waymark.close()
    with pytest.raises(RuntimeError, match="closed"):
        await waymark.services()
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.to_thread(lambda: asyncio.run(_services(waymark)))  # nor does another loop open it


async def test_the_first_token_of_a_user_waits_no_longer_for_waymark_than_the_decision() -> None:
    waited: dict[str, list[float]] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        part = json.loads(request.content).get("part", "select")
        waited.setdefault(part, []).append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json=SELECTED if part == "select" else {"released": 1, "gone": 0})

    transport, deadline = httpx.MockTransport(answer), patient(20)
    with Client("http://a", transport=transport, timeout=patient(200)) as client:
        target = client.select("m", [1], deadline=deadline).begin()
        target.first_token()
        target.end()
    async with AsyncClient("http://a", transport=transport, timeout=patient(200)) as waymark:
        begun = await waymark.select("m", [1], deadline=deadline).begin()
        await begun.first_token()
        await begun.end()
    assert max(waited["select"] + waited["prefill"]) <= deadline
    assert min(waited["all"]) > deadline, "a reservation that is not ended is a load"
    assert [len(times) for times in waited.values()] == [2, 2, 2]


async def _services(waymark: AsyncClient) -> Any:
    return await waymark.services()
