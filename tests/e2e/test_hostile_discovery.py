"""A Kubernetes API server whose lists and events are slow to read, or odd: no client waits, and soon all is right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.discovery.api_server import ApiServerStub, pod
from tests.e2e.test_hostile_metrics import held_up_nobody
from tests.live import start

#: The engine in such a pod needs not to be asked.
SAID = {"model": "m", "block-size": "16", "type": "vLLM"}
#: Every watch ends with it, and the pods are listed again.
GONE = b'{"type": "ERROR", "object": {"code": 410}}\n'
#: From the first right answer that a server could give.
RIGHT_SECONDS = 5.0


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


#: What is refused before it is parsed, and what is just not refused.
LISTS: dict[str, Callable[[], bytes]] = {
    "two million items": lambda: page(b",".join([b"{}"] * 2_000_000)),
    "a pod of 130,000 labels": lambda: page(pod_with_labels(130_000)),
    "a version of half a million numbers each": lambda: version(b"[" + b"1," * 500_000 + b"1]"),
}


@pytest.mark.parametrize("name", LISTS)
async def test_a_list_of_pods_holds_up_nobody(redis_url: str, tmp_path: Path, server: ApiServerStub, name: str) -> None:
    server.body = LISTS[name]()
    await holds_up_nobody(redis_url, tmp_path, server)


async def test_an_event_of_a_watch_holds_up_nobody(redis_url: str, tmp_path: Path, server: ApiServerStub) -> None:
    server.greeting = b'{"type": "ADDED", "object": ' + pod_with_labels(130_000) + b"}\n"
    await holds_up_nobody(redis_url, tmp_path, server)


async def holds_up_nobody(redis_url: str, directory: Path, server: ApiServerStub) -> None:
    settings = {"discovery": "kubernetes", "discovery_url": server.url, "discovery_namespace": "serving"}
    async with start("serve", redis_url, directory / "log", **settings) as live:
        before = len(server.asked_at)
        # Whoever asks again has read the answer before.
        asked = wait_until(lambda: len(server.asked_at) >= before + 2, "one more answer is read", 30)
        await held_up_nobody(asked, redis_url, live)


@dataclass(frozen=True, slots=True)
class Oddity:
    """What a server says in place of the pods, and for how many lists: then the pauses between them are the longest."""

    begin: Callable[[ApiServerStub], None]
    lists: int = 4


def _has_an_odd_item(server: ApiServerStub) -> None:
    server.pods["p1"] = {"metadata": 7}


def _lacks_pods(server: ApiServerStub) -> None:
    del server.pods["p1"], server.pods["p2"]


ODDITIES = {
    "an item that is no pod": Oddity(_has_an_odd_item, 2),
    "pods that are left out": Oddity(_lacks_pods, 1),
    "an object without items": Oddity(lambda server: setattr(server, "body", b'{"items": null, "metadata": {}}')),
    "no JSON": Oddity(lambda server: setattr(server, "body", b"<html>")),
    "versions that are gone": Oddity(lambda server: setattr(server, "status", 410)),
    "refusals": Oddity(lambda server: setattr(server, "status", 403)),
}


@pytest.mark.long
async def test_pods_are_right_again_soon_after_the_server_is(redis_url: str, tmp_path: Path) -> None:
    """All at once, as each of them is little but pauses. A busy machine makes them late; that the pauses themselves are
    short is shown by the tests of ``discovery/test_kubernetes.py`` with a clock of their own.
    """
    async with asyncio.TaskGroup() as tasks:
        for number, what in enumerate(ODDITIES):
            tasks.create_task(are_right_again(redis_url, tmp_path / f"{number}.log", f"odd{number}:", what))


async def are_right_again(redis_url: str, log: Path, prefix: str, what: str) -> None:
    oddity, server = ODDITIES[what], ApiServerStub()
    server.put(*(pod(f"p{n}", f"127.0.0.{n + 1}", annotations=SAID) for n in range(5)))
    await server.start()
    settings = {"discovery": "kubernetes", "discovery_url": server.url, "discovery_namespace": "serving"}
    async with start("serve", redis_url, log, key_prefix=prefix, **settings) as live, live.client() as client:

        async def are_there() -> bool:
            services = (await client.get("/services")).raise_for_status().json()["services"]
            return {each["InstanceID"] for each in services} == {f"serving/{name}" for name in server.pods}

        await wait_until(are_there, "all pods are registered")
        await wait_until(lambda: server.watched == 1, "pods are watched")
        right = dict(server.pods)
        oddity.begin(server)
        asked = len(server.asked_at)
        server.send_line(GONE)
        server.send_line(None)
        await wait_until(lambda: len(server.asked_at) >= asked + oddity.lists, f"{what}: pods are listed", 30)
        server.body, server.status, server.pods = None, 200, right
        server.put(pod("new", "127.0.0.9", annotations=SAID))
        await wait_until(are_there, f"after {what} the pods are right again", RIGHT_SECONDS)
    await server.stop()
