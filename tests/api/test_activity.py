"""``GET /activity``: what happens, as server-sent events to a bounded number of clients, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.conftest import wait_until
from tests.e2e.redis_server import redis_server
from tests.live import Live, start
from tests.patience import patient, within
from waymark.api import activity as feed
from waymark.api.activity import CLIENTS_MAX
from waymark.api.http.tokens_file import EVERYONE
from waymark.store.activity import ActivityEntry
from waymark.store.store import Store

pytestmark = pytest.mark.outside


class Following:
    """A client of the feed."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The id and the content of the next event; comments are left out."""
        event: dict[str, str] = {}
        async with within(20.0):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if name in ("id", "event", "data"):
                    event[name] = value
                elif not line and "data" in event:
                    content = json.loads(event["data"])
                    assert content["kind"] == event["event"]
                    return event["id"], content
        raise AssertionError("the feed has ended")

    async def until(self, kind: str) -> dict[str, Any]:
        """The next event of a kind."""
        while True:
            _, content = await self.next()
            if content["kind"] == kind:
                return content


@asynccontextmanager
async def following(live: Live, last: str | None = None, token: str | None = None) -> AsyncIterator[Following]:
    headers = {} if last is None else {"Last-Event-ID": last}
    headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
    async with live.client() as client, client.stream("GET", "/activity", headers=headers) as answer:
        yield Following(answer)


async def register(live: Live, name: str, **fields: Any) -> None:
    body = {"type": "standard", "modelname": "m", "instance_id": name, "block_size": 4} | fields
    async with live.client() as client:
        answer = await client.post("/register", json=body)
        assert answer.status_code == 200, answer.text


async def test_what_happens_is_sent_and_a_client_goes_on_where_it_was(redis_url: str, tmp_path: Path) -> None:
    async with start("serve", redis_url, tmp_path / "log") as live:
        await register(live, "before")
        async with following(live) as first:
            assert first.answer.headers["content-type"] == "text/event-stream"
            last, content = await first.next()
            assert (content["kind"], content["instance_id"], content["model"]) == ("registered", "before", "m")
            assert content["at"] > 1.7e9
            await register(live, "<script>")
            assert (await first.next())[1]["instance_id"] == "<script>"
        async with live.client() as client:
            await client.post("/unregister", json={"instance_id": "before"})
        async with following(live, last) as second:
            assert (await second.next())[1]["instance_id"] == "<script>"
            content = (await second.next())[1]
            assert (content["kind"], content["instance_id"]) == ("unregistered", "before")
        await wait_until(lambda: no_clients(live), "waymark_activity_clients is 0 when all have left")


async def no_clients(live: Live) -> bool:
    return await live.metric("waymark_activity_clients") == 0


async def test_a_process_with_clients_ends_when_it_is_told(redis_url: str, tmp_path: Path) -> None:
    async with start("serve", redis_url, tmp_path / "log") as live:
        client = live.client()
        answer = await client.send(client.build_request("GET", "/activity"), stream=True)
        assert answer.status_code == 200
    # `start` has waited for its end.
    async with within(20.0):
        assert b"retry" in await answer.aread()
    await client.aclose()


async def test_clients_beyond_the_bound_are_refused(redis_url: str, tmp_path: Path) -> None:
    async with start("serve", redis_url, tmp_path / "log") as live:
        async with AsyncExitStack() as stack:
            for _ in range(CLIENTS_MAX):
                assert (await stack.enter_async_context(following(live))).answer.status_code == 200
            await wait_until(lambda: has_all_clients(live), "the clients are counted")
            async with following(live) as other:
                assert other.answer.status_code == 503
                body = json.loads(await other.answer.aread())
                assert body["reason"] == "unavailable"
                assert body["error"].startswith(f"{CLIENTS_MAX} clients follow /activity of this process")
                assert other.answer.headers["retry-after"] == "5"
        await wait_until(lambda: no_clients(live), "the clients have left")
        async with following(live) as later:
            assert later.answer.status_code == 200


async def has_all_clients(live: Live) -> bool:
    return await live.metric("waymark_activity_clients") == CLIENTS_MAX


@pytest.mark.parametrize("last", ["x", "1", "1-", "-1-1", "9" * 20 + "-1", "1 1"])
async def test_what_is_no_id_is_refused(last: str, make_client: MakeClient, memory_store: Store) -> None:
    client = await make_client(memory_store)
    answer = await client.get("/activity", headers={"Last-Event-ID": last})
    assert (answer.status_code, answer.json()["field"]) == (400, "Last-Event-ID")


def write_tokens(file: Path, **tenants: list[str]) -> None:
    entries = [
        {"name": token, "sha256": sha256(token.encode()).hexdigest(), "tenants": names, "access": "write"}
        for token, names in tenants.items()
    ]
    file.write_text(json.dumps(entries))


async def test_a_token_of_one_tenant_sees_its_events_only(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    write_tokens(file, root=["*"], of_a=["a"])
    async with start("serve", redis_url, tmp_path / "log", api_token="all", api_tokens_file=str(file)) as live:
        async with live.client() as client:
            assert (await client.get("/activity", headers={"Authorization": "Bearer wrong"})).status_code == 401
        for name, tenant in (("secret", "b"), ("own", "a")):
            await register(live, name, tenant_id=tenant)
        async with following(live, token="of_a") as feed:
            assert (await feed.next())[1]["instance_id"] == "own"
        async with following(live, token="root") as feed:
            assert (await feed.next())[1]["instance_id"] == "secret"


async def test_the_feed_of_a_token_ends_with_its_rights(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    write_tokens(file, revoked=["*"], narrowed=["a", "b"], same=["a"])
    async with (
        start("serve", redis_url, tmp_path / "log", api_token="all", api_tokens_file=str(file)) as live,
        following(live, token="revoked") as revoked,
        following(live, token="narrowed") as narrowed,
        following(live, token="same") as same,
    ):
        write_tokens(file, narrowed=["a"], same=["a"])
        async with within(20.0):
            assert b"retry" in await revoked.answer.aread()
            assert b"retry" in await narrowed.answer.aread()
        await register(live, "later", tenant_id="a")
        assert (await same.next())[1]["instance_id"] == "later"


async def test_the_feed_goes_on_when_redis_is_back(tmp_path: Path) -> None:
    with redis_server() as server:
        await server.start()
        seconds = min(2.0, patient(0.5))
        async with start("serve", server.url, tmp_path / "log", redis_timeout_seconds=seconds) as live:
            await register(live, "first")
            async with following(live) as feed:
                assert (await feed.next())[1]["instance_id"] == "first"
                server.freeze()
                await asyncio.sleep(2 * seconds)
                server.thaw()
                await wait_until(lambda: is_ready(live), "Redis is back")
                await register(live, "second")
                while (await feed.next())[1]["instance_id"] != "second":
                    pass


async def is_ready(live: Live) -> bool:
    async with live.client() as client:
        return (await client.get("/ready")).status_code == 200


async def test_a_client_that_falls_behind_is_ended_after_what_waits_for_it() -> None:
    client = feed._ActivityReader(EVERYONE, "0-0")
    for number in range(1, 2 * feed._WAITING_MAX):
        client.take(ActivityEntry(f"{number}-0", {"kind": "sweep"}))
    waiting = [client.waiting.get_nowait() for _ in range(client.waiting.qsize())]
    assert len(waiting) == feed._WAITING_MAX + 1, "however much happens, no more is kept for it"
    assert waiting[-1] is None, "then its connection ends"
    last = waiting[-2]
    assert last is not None
    assert last.startswith(f"id: {feed._WAITING_MAX}-0".encode()), "from there it goes on when it is back"
