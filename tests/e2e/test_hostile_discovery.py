"""An API server of Kubernetes whose lists and events are made to be slow to read holds up no client of a service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.discovery.api_server import ApiServerStub, pod
from tests.e2e.test_hostile_metrics import OTHERS_SECONDS, slowest_answer
from tests.live import start
from tests.patience import patient

#: The engine in such a pod needs not to be asked.
SAID = {"model": "m", "block-size": "16", "type": "vLLM"}
#: Every watch ends with it, and the pods are listed again.
GONE = b'{"type": "ERROR", "object": {"code": 410}}\n'


def pod_with_labels(count: int) -> bytes:
    return json.dumps(pod("p", "127.0.0.1", annotations=SAID, labels={f"l{n}": "x" for n in range(count)})).encode()


def page(items: bytes) -> bytes:
    return b'{"metadata": {"resourceVersion": "1"}, "items": [' + items + b"]}"


def version(of: bytes) -> bytes:
    return b'{"metadata": {"resourceVersion": ' + of + b', "continue": ' + of + b'}, "items": []}'


@pytest.fixture
async def server() -> AsyncIterator[ApiServerStub]:
    server = ApiServerStub()
    server.greeting = GONE
    await server.start()
    yield server
    await server.stop()


LISTS = {
    "two million items": page(b",".join([b"{}"] * 2_000_000)),
    "two million nulls": page(b",".join([b"null"] * 2_000_000)),
    "a pod of 300,000 labels": page(pod_with_labels(300_000)),
    "a pod of 250,000 labels": page(pod_with_labels(250_000)),
    "a version of a million numbers": version(b"[" + b"1," * 1_000_000 + b"1]"),
}


@pytest.mark.parametrize("name", LISTS)
async def test_a_list_of_pods_holds_up_nobody(redis_url: str, tmp_path: Path, server: ApiServerStub, name: str) -> None:
    server.body = LISTS[name]
    await holds_up_nobody(redis_url, tmp_path, server)


@pytest.mark.parametrize("count", [300_000, 250_000])
async def test_an_event_of_a_watch_holds_up_nobody(
    redis_url: str, tmp_path: Path, server: ApiServerStub, count: int
) -> None:
    server.greeting = b'{"type": "ADDED", "object": ' + pod_with_labels(count) + b"}\n"
    await holds_up_nobody(redis_url, tmp_path, server)


async def holds_up_nobody(redis_url: str, directory: Path, server: ApiServerStub) -> None:
    settings = {"discovery": "kubernetes", "discovery_url": server.url, "discovery_namespace": "serving"}
    async with start("serve", redis_url, directory / "log", **settings) as live:
        before = len(server.asked_at)
        asked = asyncio.create_task(wait_until(lambda: len(server.asked_at) >= before + 4, "four more answers", 30))
        assert await slowest_answer(live, asked) <= patient(OTHERS_SECONDS)
