"""Answers of servers that Waymark asks, cut short at every byte: an error, and never taken for the whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.conftest import wait_until
from tests.discovery.api_server import SELECTOR, pod
from waymark.base.asker import Asker, HttpReply
from waymark.base.errors import TokenizerUnavailable, Unanswered
from waymark.base.metrics import Metrics
from waymark.discovery import kubernetes
from waymark.discovery.kubernetes import ApiServer, PodWatch
from waymark.tokenization.prompt import TextPrompt, TokenizedPrompt
from waymark.tokenization.remote import RemoteTokenizer

pytestmark = pytest.mark.outside

IDS = b'{"tokens": [1, 2, 345678], "count": 3, "prompt": "a"}'
#: As short as pods may be: each byte is a case.
PODS = [
    {name: value for name, value in pod(f"pod-{number}", version=number).items() if name in ("metadata", "spec")}
    for number in range(2)
]
for each in PODS:
    del each["metadata"]["labels"], each["metadata"]["annotations"], each["metadata"]["creationTimestamp"]
LIST = json.dumps({"metadata": {"resourceVersion": "7"}, "items": PODS[:1]}).encode()
EVENTS = b"".join(json.dumps({"type": "ADDED", "object": each}).encode() + b"\n" for each in PODS)


def with_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def in_chunks(body: bytes) -> bytes:
    pieces = [body[at : at + 97] for at in range(0, len(body), 97)] + [b""]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


def to_the_end(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + body


FRAMES = [with_length, in_chunks]


@asynccontextmanager
async def server(answer: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """A server that sends what ``answer`` makes of the head of a request, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or b"0"))
            writer.write(answer(head))
        except asyncio.IncompleteReadError:
            pass  # the test is over
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def cuts_taken_for_whole(whole: bytes, ask: Callable[[str], Awaitable[object]]) -> list[int]:
    """The numbers of bytes after which the server may stop, and ``ask`` has an answer."""
    found = []
    cut = 0
    async with server(lambda head: whole[:cut]) as url:
        for cut in range(len(whole) + 1):
            try:
                await ask(url)
            except (Unanswered, TokenizerUnavailable):
                continue
            found.append(cut)
    return found


@pytest.mark.parametrize("frame", FRAMES)
async def test_a_cut_answer_of_an_engine_is_no_answer(frame: Callable[[bytes], bytes]) -> None:
    body = b"vllm:num_requests_waiting 12\nvllm:num_requests_running 345\n"
    whole = frame(body)
    asker = Asker()

    async def ask(url: str) -> None:
        assert await asker.ask(url, seconds=60, bytes_max=1000) == HttpReply(200, body)

    assert await cuts_taken_for_whole(whole, ask) == [len(whole)]
    await asker.close()


async def test_an_answer_whose_end_nobody_knows_is_no_answer() -> None:
    asker = Asker()

    async def ask(url: str) -> None:
        await asker.ask(url, seconds=60, bytes_max=1000)

    assert await cuts_taken_for_whole(to_the_end(b"vllm:num_requests_waiting 12\n"), ask) == []
    await asker.close()


@pytest.mark.parametrize("frame", FRAMES)
async def test_cut_tokens_are_no_tokens(frame: Callable[[bytes], bytes]) -> None:
    whole = frame(IDS)

    async def ask(url: str) -> None:
        remote = RemoteTokenizer(url, "m", Asker(), seconds=60, bytes_max=2**20)
        try:
            assert await remote.tokens(TextPrompt("a")) == TokenizedPrompt(b"\1\0\0\0\2\0\0\0\x4e\x46\5\0")
            assert await remote.text([1]) == "a"
        finally:
            await remote.close()

    assert await cuts_taken_for_whole(whole, ask) == [len(whole)]


@asynccontextmanager
async def watching(url: str, metrics: Metrics) -> AsyncIterator[PodWatch]:
    watch = PodWatch(ApiServer(url, None, None, "serving", SELECTOR), metrics)
    task = asyncio.ensure_future(watch.keep())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two attempts."""
    monkeypatch.setattr(kubernetes, "_BACKOFF_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("frame", FRAMES)
async def test_a_cut_list_of_pods_is_no_list(frame: Callable[[bytes], bytes]) -> None:
    whole, lists = frame(LIST), 0
    taken: list[int] = []

    def answer(head: bytes) -> bytes:
        nonlocal lists
        if b"watch=true" in head:
            taken.append(lists - 1)  # a watch follows a list
            return b""
        lists += 1
        return whole[: lists - 1]

    metrics = Metrics()
    async with server(answer) as url, watching(url, metrics) as watch:
        await wait_until(lambda: bool(taken), "the pods are listed", 60)
        assert (taken[0], list(watch.pods)) == (len(whole), ["serving/pod-0"])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("frame", [*FRAMES, to_the_end])
async def test_a_cut_watch_is_a_failure(frame: Callable[[bytes], bytes]) -> None:
    """One that ends with a line is over, if it has no other end: the next goes on from the last event."""
    whole, watches = frame(EVENTS), 0
    ends = {0, EVENTS.index(b"\n") + 1, len(EVENTS)} if frame is to_the_end else {len(EVENTS)}
    fine = {len(whole) - len(EVENTS) + end for end in ends} if frame is not in_chunks else {len(whole)}

    seen: list[tuple[list[str], float]] = []

    def answer(head: bytes) -> bytes:
        nonlocal watches
        if b"watch=true" not in head:
            return with_length(LIST)
        watches += 1
        if watches == len(whole) + 2:
            ok = metrics.registry.get_sample_value("waymark_discovery_requests_total", {"outcome": "ok"}) or 0.0
            seen.append((sorted(watch.pods), ok - watch.lists))
        return whole[: watches - 1]

    metrics = Metrics()
    async with server(answer) as url, watching(url, metrics) as watch:
        await wait_until(lambda: bool(seen), "the last watch was whole", 60)
    assert seen == [(["serving/pod-0", "serving/pod-1"], len(fine))]
